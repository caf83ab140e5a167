#include "nvme/aio_sweep.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/completion.h"
#include "nvme/aligned_memory.h"
#include "nvme/shard_file.h"

namespace orlop {
namespace nvme {
namespace {

constexpr double kGoodEnough = 0.97;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Harmonic mean: the rate at which equal bytes are read and written one after the other.
double combined(const SweepPoint& point) {
  return 2 / (1 / point.read_gib_per_s + 1 / point.write_gib_per_s);
}

SweepPoint pick(const std::vector<SweepPoint>& points) {
  double fastest = 0;
  for (const SweepPoint& point : points) fastest = std::max(fastest, combined(point));
  const SweepPoint* best = nullptr;
  for (const SweepPoint& point : points) {
    if (combined(point) < kGoodEnough * fastest) continue;
    if (!best ||
        std::pair(point.depth, point.block_bytes) < std::pair(best->depth, best->block_bytes)) {
      best = &point;
    }
  }
  return *best;
}

}  // namespace

double measure_bandwidth(IoQueue& queue, IoOp op, int fd, uint64_t offset,
                         std::span<std::byte> memory) {
  Completion<> moved;
  Transfer transfer;
  transfer.op = op;
  transfer.fd = fd;
  transfer.offset = offset;
  transfer.data = memory;
  transfer.alignment = 4096;
  transfer.operation = "measuring the drive";
  transfer.path = "a temporary file";
  transfer.done = [moved](const std::exception_ptr& error) mutable {
    if (error) {
      moved.set_error(error);
    } else {
      moved.set_value();
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  queue.submit(std::move(transfer));
  moved.wait();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return static_cast<double>(memory.size()) / seconds.count() / (1 << 30);
}

}  // namespace nvme

SweepResult sweep_aio(const SweepOptions& options) {
  check(!options.block_bytes.empty() && !options.depths.empty() && options.repeats > 0,
        ErrorCode::kUsage, "sweep_aio: give at least one block size, one depth and one repeat");
  nvme::ShardFile file({options.directory, 0, nvme::default_run_id(), options.direct});
  const size_t bytes = options.file_bytes / file.alignment() * file.alignment();
  check(bytes > 0, ErrorCode::kUsage, "sweep_aio: a file of {} bytes is too small",
        options.file_bytes);
  file.reserve(file.alignment(), bytes, 0);
  const nvme::AlignedMemory memory(bytes, file.alignment());
  std::memset(memory.data(), 0x5a, bytes);
  const std::span<std::byte> data = memory.span();

  const nvme::IoEngine engine = nvme::parse_io_engine(options.engine);
  SweepResult result;
  result.direct = file.direct();
  for (const size_t block : options.block_bytes) {
    for (const unsigned depth : options.depths) {
      nvme::IoQueue queue(nvme::make_io_backend(engine, depth).backend, {block, depth});
      queue.with_backend([&](nvme::IoBackend& backend) {
        backend.register_file(file.fd());
        backend.register_buffer(data, file.alignment());
      });
      result.backend = queue.backend_name();
      std::vector<double> reads;
      std::vector<double> writes;
      // The first write also turns allocated blocks into written ones: it does not count.
      if (result.points.empty()) {
        nvme::measure_bandwidth(queue, nvme::IoOp::kWrite, file.fd(), file.alignment(), data);
      }
      for (int i = 0; i < options.repeats; ++i) {
        writes.push_back(
            nvme::measure_bandwidth(queue, nvme::IoOp::kWrite, file.fd(), file.alignment(), data));
        reads.push_back(
            nvme::measure_bandwidth(queue, nvme::IoOp::kRead, file.fd(), file.alignment(), data));
      }
      result.points.push_back({block, depth, nvme::median(reads), nvme::median(writes)});
    }
  }
  result.best = nvme::pick(result.points);
  return result;
}

}  // namespace orlop
