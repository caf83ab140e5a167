orlop_bench(bench_ops SOURCES bench_ops.cc DEPENDS orlop_host orlop_cpu_adam orlop_bench_support OpenMP::OpenMP_CXX)
