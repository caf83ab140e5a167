orlop_library(orlop_bench_support
  SOURCES support/huge_buffer.cc support/memory_ceiling.cc support/samples.cc
  DEPENDS orlop_base
  PRIVATE_DEPENDS OpenMP::OpenMP_CXX)
