# bench_ops
