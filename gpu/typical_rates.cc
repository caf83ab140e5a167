#include "gpu/typical_rates.h"

#include <cuda_runtime_api.h>

#include "gpu/cuda_check.h"

namespace orlop {
namespace {

// 16-bit operands, fp32 sums, dense.
struct Architecture {
  int major, minor;
  double flop_per_clock;  // of a multiprocessor
  double reached;         // of that, by large matmuls: power and clocks of the larger chips fall
  double link_bytes_per_s;
};

// The rates per clock are those of the vendor's tables. What is reached is measured for 9.0 (H100
// and H200) and typical of the others.
constexpr Architecture kArchitectures[] = {
    {8, 0, 2048, 0.82, 2.4e10},   // A100
    {8, 6, 512, 0.90, 2.4e10},    // GeForce 30, A10, A40
    {8, 9, 512, 0.90, 2.4e10},    // GeForce 40, L4, L40
    {9, 0, 4096, 0.67, 5.3e10},   // H100, H200
    {10, 0, 8192, 0.65, 5.3e10},  // B200
    {12, 0, 512, 0.90, 5.3e10},   // GeForce 50
};
constexpr double kMemoryReached = 0.9;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  ORLOP_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

ChipTraits chip_traits(int device) {
  constexpr double kKilo = 1e3;
  return {.major = attribute(cudaDevAttrComputeCapabilityMajor, device),
          .minor = attribute(cudaDevAttrComputeCapabilityMinor, device),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device),
          .clock_hz = kKilo * attribute(cudaDevAttrClockRate, device),
          .memory_clock_hz = kKilo * attribute(cudaDevAttrMemoryClockRate, device),
          .memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device)};
}

TypicalRates typical_rates(const ChipTraits& chip) {
  TypicalRates rates;
  rates.device_bytes_per_s = kMemoryReached * 2 * chip.memory_clock_hz * chip.memory_bus_bits / 8;
  for (const Architecture& known : kArchitectures) {
    if (known.major != chip.major || known.minor != chip.minor) continue;
    rates.matmul_flop_per_s =
        known.reached * known.flop_per_clock * chip.multiprocessors * chip.clock_hz;
    rates.link_bytes_per_s = known.link_bytes_per_s;
  }
  return rates;
}

}  // namespace orlop
