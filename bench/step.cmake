orlop_bench(bench_step SOURCES bench_step.cc support/recording_backend.cc support/swap_rig.cc
  DEPENDS orlop_engine orlop_bench_support)
if(ORLOP_HAVE_ONEDNN)
  target_sources(bench_step PRIVATE support/matmul_ceiling.cc)
  target_link_libraries(bench_step PRIVATE orlop_onednn OpenMP::OpenMP_CXX)
  target_compile_definitions(bench_step PRIVATE ORLOP_HAVE_ONEDNN)
endif()
