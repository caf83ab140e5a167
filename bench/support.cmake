orlop_library(orlop_bench_support
  SOURCES support/huge_buffer.cc support/memory_ceiling.cc support/rank_waits.cc support/samples.cc
          support/trace_times.cc
  DEPENDS orlop_base
  PRIVATE_DEPENDS OpenMP::OpenMP_CXX nlohmann_json::nlohmann_json)
