orlop_bench(bench_ops SOURCES bench_ops.cc DEPENDS orlop_host orlop_cpu_adam OpenMP::OpenMP_CXX)
