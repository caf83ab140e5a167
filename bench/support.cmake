# bench_support
