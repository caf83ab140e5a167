# bench_nvme
