#include "zero/hardware_profile.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/log.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Home folders are shared between machines; a profile is of one kind of processor.
std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with("model name") && colon != std::string::npos && colon + 2 <= line.size())
      return line.substr(colon + 2);
  }
  return "unknown processor";
}

fs::path profile_path(const std::string& device) {
  fs::path base;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) {
    base = cache;
  } else if (const char* home = std::getenv("HOME"); home && *home) {
    base = fs::path(home) / ".cache";
  } else {
    return {};
  }
  std::string name;
  for (const char c : device + "-" + processor_name())
    name += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
  return base / "orlop" / ("profile-" + name + ".json");
}

}  // namespace

std::string HardwareProfile::to_json() const {
  json document = {
      {"device", device},
      {"processor", processor_name()},
      {"matmul_flop_per_s",
       {{"BF16", matmul_rates.bf16}, {"F16", matmul_rates.fp16}, {"F32", matmul_rates.fp32}}},
      {"upload_bytes_per_s", upload_bytes_per_s},
      {"offload_bytes_per_s", offload_bytes_per_s},
      {"device_bytes_per_s", device_bytes_per_s},
      {"host_bytes_per_s", host_bytes_per_s},
      {"launch_seconds", launch_seconds}};
  if (collective_is_measured) document["collective_bytes_per_s"] = collective_bytes_per_s;
  if (drive_is_measured) {
    document["nvme_read_bytes_per_s"] = nvme_read_bytes_per_s;
    document["nvme_write_bytes_per_s"] = nvme_write_bytes_per_s;
  }
  return document.dump(2);
}

HardwareProfile default_profile(const DeviceInfo& device, int cores) {
  HardwareProfile profile;
  profile.device = device.name;
  profile.host_bytes_per_s = 8e9 * cores;
  const auto known = [](double rate, double otherwise) { return rate > 0 ? rate : otherwise; };
  if (device.is_host) {
    profile.matmul_flop_per_s = 5e10 * cores;
    profile.upload_bytes_per_s = 5e9;
    profile.offload_bytes_per_s = 5e9;
    profile.device_bytes_per_s = 8e9 * cores;
  } else {
    profile.matmul_flop_per_s = known(device.typical.matmul_flop_per_s, 2e14);
    profile.upload_bytes_per_s = known(device.typical.link_bytes_per_s, 2.4e10);
    profile.offload_bytes_per_s = profile.upload_bytes_per_s;
    profile.device_bytes_per_s = known(device.typical.device_bytes_per_s, 1e12);
    profile.collective_bytes_per_s = 3e11;
  }
  return profile;
}

HardwareProfile load_profile(const DeviceInfo& device, int cores, DType compute_dtype) {
  HardwareProfile profile = default_profile(device, cores);
  const fs::path path = profile_path(device.name);
  std::ifstream in(path);
  if (path.empty() || !in) return profile;
  try {
    const json document = json::parse(in);
    const auto take = [](const json& from, const char* key, double& value) {
      const double found = from.at(key).get<double>();
      check(found > 0, ErrorCode::kInvalidData, "{} is {}", key, found);
      value = found;
    };
    const auto read = [&](const char* key, double& value) { take(document, key, value); };
    const json& matmuls = document.at("matmul_flop_per_s");
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      take(matmuls, dtype_name(dtype).data(), profile.matmul_rates.of(dtype));
    profile.matmul_flop_per_s = profile.matmul_rates.of(compute_dtype);
    read("upload_bytes_per_s", profile.upload_bytes_per_s);
    read("offload_bytes_per_s", profile.offload_bytes_per_s);
    read("device_bytes_per_s", profile.device_bytes_per_s);
    read("host_bytes_per_s", profile.host_bytes_per_s);
    if (document.contains("collective_bytes_per_s")) {
      read("collective_bytes_per_s", profile.collective_bytes_per_s);
      profile.collective_is_measured = true;
    }
    read("launch_seconds", profile.launch_seconds);
    if (document.contains("nvme_read_bytes_per_s")) {  // measured where there was a drive
      read("nvme_read_bytes_per_s", profile.nvme_read_bytes_per_s);
      read("nvme_write_bytes_per_s", profile.nvme_write_bytes_per_s);
      profile.drive_is_measured = true;
    }
    profile.is_measured = true;
    profile.source = path.string();
  } catch (const std::exception& error) {
    log_warning(
        "hardware profile '{}' is not readable ({}); using typical figures. `orlop doctor "
        "--measure` writes it anew.",
        path.string(), error.what());
    return default_profile(device, cores);
  }
  return profile;
}

HardwareProfile share_of_machine(HardwareProfile profile, int ranks, bool device_is_host) {
  const auto share = [ranks](double& rate) { rate /= ranks; };
  share(profile.nvme_read_bytes_per_s);
  share(profile.nvme_write_bytes_per_s);
  if (!profile.is_measured) return profile;  // of a rank's own cores already
  share(profile.host_bytes_per_s);
  if (device_is_host) {
    share(profile.matmul_flop_per_s);
    share(profile.device_bytes_per_s);
    share(profile.upload_bytes_per_s);
    share(profile.offload_bytes_per_s);
  }
  return profile;
}

std::string save_profile(const HardwareProfile& profile) {
  const fs::path path = profile_path(profile.device);
  check(!path.empty(), ErrorCode::kIo, "hardware profile: neither XDG_CACHE_HOME nor HOME is set");
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const fs::path temporary = path.string() + ".tmp";
  {
    std::ofstream out(temporary);
    out << profile.to_json() << '\n';
    out.flush();
    check(out.good(), ErrorCode::kIo, "hardware profile: cannot write '{}': {}", temporary.string(),
          errno_text(errno));
  }
  fs::rename(temporary, path, error);
  check(!error, ErrorCode::kIo, "hardware profile: cannot rename '{}': {}", temporary.string(),
        error.message());
  return path.string();
}

}  // namespace orlop
