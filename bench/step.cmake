orlop_bench(bench_step
  SOURCES bench_step.cc step_compute.cc step_copies.cc step_drives.cc step_ranks.cc step_setup.cc
          support/recording_backend.cc support/swap_rig.cc
  DEPENDS orlop_engine orlop_bench_support)
if(ORLOP_HAVE_ONEDNN)
  target_sources(bench_step PRIVATE support/matmul_ceiling.cc)
  target_link_libraries(bench_step PRIVATE orlop_onednn OpenMP::OpenMP_CXX)
  target_compile_definitions(bench_step PRIVATE ORLOP_HAVE_ONEDNN)
endif()
# The measurement over ranks, small enough for every machine.
add_test(NAME bench_step_ranks
  COMMAND bench_step --gpus 2 --device host --shape tiny --sequence 32 --micro-batch 2
          --tokens 64,256 --steps 2)
set_tests_properties(bench_step_ranks PROPERTIES LABELS integration TIMEOUT 120)
