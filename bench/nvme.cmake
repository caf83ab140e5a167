orlop_bench(bench_nvme
  SOURCES bench_nvme.cc support/swap_rig.cc
  DEPENDS orlop_nvme nlohmann_json::nlohmann_json)
