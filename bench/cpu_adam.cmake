orlop_bench(bench_cpu_adam
  SOURCES bench_cpu_adam.cc
  DEPENDS orlop_bench_support orlop_cpu_adam)
