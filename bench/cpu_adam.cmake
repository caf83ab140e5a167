# bench_cpu_adam
