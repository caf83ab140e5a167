# bench_step
