#pragma once

#include <string>

#include "backend/backend.h"
#include "orlop/types.h"

namespace orlop {

// Large matmuls per compute dtype, FLOP per second.
struct MatmulRates {
  double bf16 = 0;
  double fp16 = 0;
  double fp32 = 0;

  double& of(DType dtype) {
    return dtype == DType::kBF16 ? bf16 : dtype == DType::kF16 ? fp16 : fp32;
  }
};

// Bandwidths and rates that the simulation runs on. Bytes are counted as moved: an in-place update
// of one byte counts two.
struct HardwareProfile {
  std::string device;                     // the name DeviceInfo gives
  double matmul_flop_per_s = 1e11;        // large matmuls in the compute dtype
  double upload_bytes_per_s = 8e9;        // pinned host -> device, alone
  double offload_bytes_per_s = 8e9;       // device -> pinned host, alone
  double device_bytes_per_s = 2e10;       // device memory, read + write
  double host_bytes_per_s = 1e10;         // host memory under the optimizer's threads, read + write
  double collective_bytes_per_s = 2e9;    // what a rank receives in a collective of all ranks
  double nvme_read_bytes_per_s = 2.5e9;   // of the drives that states and checkpoints go to
  double nvme_write_bytes_per_s = 1.5e9;  // likewise
  double launch_seconds = 5e-6;           // fixed cost of one operation
  MatmulRates matmul_rates;               // measured ones
  bool is_measured = false;
  bool drive_is_measured = false;
  bool collective_is_measured = false;  // where there are several GPUs
  std::string source;                   // the file it was read from; empty: typical figures

  std::string to_json() const;
};

// Typical figures of a device, for plans made before anything was measured.
HardwareProfile default_profile(const DeviceInfo& device, int cores);

// The profile that `orlop doctor --measure` kept for this device beside this kind of processor, or
// the default one. Matmuls run in `compute_dtype`.
HardwareProfile load_profile(const DeviceInfo& device, int cores, DType compute_dtype);

// What each of `ranks` processes of one machine gets of it: they share its memory, its drives and,
// as devices, its cores; GPUs are their own.
HardwareProfile share_of_machine(HardwareProfile profile, int ranks, bool device_is_host);

// Keeps a profile under $XDG_CACHE_HOME/orlop (or ~/.cache/orlop) and returns its path. Throws
// Error(kIo).
std::string save_profile(const HardwareProfile& profile);

}  // namespace orlop
