orlop_bench(bench_nvme
  SOURCES bench_nvme.cc
  DEPENDS orlop_nvme nlohmann_json::nlohmann_json)
