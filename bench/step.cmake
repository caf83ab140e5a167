orlop_bench(bench_step SOURCES bench_step.cc DEPENDS orlop_engine orlop_bench_support)
