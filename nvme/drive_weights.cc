#include "nvme/drive_weights.h"

#include <sys/stat.h>

#include <cstring>
#include <set>

#include "base/bytes.h"
#include "base/check.h"
#include "nvme/aio_sweep.h"
#include "nvme/aligned_memory.h"

namespace orlop::nvme {
namespace {

constexpr uint64_t kMeasuredBytes = 64 * kMiB;

// Directories on one file system share its drive evenly, whatever that can do.
bool lie_apart(std::span<const std::unique_ptr<ShardFile>> files) {
  std::set<dev_t> devices;
  for (const auto& file : files) {
    struct stat info {};
    if (::fstat(file->fd(), &info) == 0) devices.insert(info.st_dev);
  }
  return devices.size() > 1;
}

// Both ways one after the other, as a step does.
double measure(IoQueue& queue, ShardFile& file) {
  const size_t bytes = kMeasuredBytes;
  file.reserve(file.alignment(), bytes, 0);
  const AlignedMemory memory(bytes, file.alignment());
  std::memset(memory.data(), 0x5a, bytes);
  const std::span<std::byte> data = memory.span();
  measure_bandwidth(queue, IoOp::kWrite, file.fd(), file.alignment(), data);
  const double write = measure_bandwidth(queue, IoOp::kWrite, file.fd(), file.alignment(), data);
  const double read = measure_bandwidth(queue, IoOp::kRead, file.fd(), file.alignment(), data);
  return 2 / (1 / read + 1 / write);
}

}  // namespace

DriveWeights drive_weights(IoQueue& queue, std::span<const std::unique_ptr<ShardFile>> files,
                           const std::vector<double>& given) {
  ORLOP_INVARIANT(given.empty() || given.size() == files.size());
  const bool measures = given.empty() && lie_apart(files);
  DriveWeights drives{given, measures || !given.empty()};
  if (given.empty()) {
    for (const auto& file : files) drives.weights.push_back(measures ? measure(queue, *file) : 1);
  }
  for (const double weight : drives.weights) {
    check(weight > 0, ErrorCode::kUsage, "a swap directory has a bandwidth of {}", weight);
  }
  return drives;
}

}  // namespace orlop::nvme
