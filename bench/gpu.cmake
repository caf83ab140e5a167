if(ORLOP_HAVE_CUDA)
  orlop_bench(bench_gpu_ops SOURCES bench_gpu_ops.cc DEPENDS orlop_gpu orlop_bench_support)
endif()
