// More elements than 32 bits can count. About 17 GB: bf16 master and moments, and one small file
// mapped over and over as the gradient.

#include <sys/mman.h>
#include <unistd.h>

#include <fstream>

#include "adam_test_support.h"
#include "base/bytes.h"
#include "base/half.h"
#include "base/unique_fd.h"

namespace orlop::test {
namespace {

constexpr int64_t kNumel = (int64_t{1} << 31) + 5;

size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  size_t kib = 0;
  while (file >> key >> kib >> unit) {
    if (key == "MemAvailable:") return kib * kKiB;
  }
  return 0;
}

class Mapping {
 public:
  // Zeros, on huge pages where the system has them.
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ != MAP_FAILED) madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Mapping() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  bool valid() const { return data_ != MAP_FAILED; }
  uint16_t* halves() const { return static_cast<uint16_t*>(data_); }

  // Shows `tile_bytes` of `fd` again and again instead of memory of its own.
  bool tile(int fd, size_t tile_bytes) {
    for (size_t at = 0; at < bytes_; at += tile_bytes) {
      const size_t length = std::min(tile_bytes, bytes_ - at);
      if (mmap(static_cast<char*>(data_) + at, length, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) ==
          MAP_FAILED) {
        return false;
      }
    }
    return true;
  }

 private:
  void* data_;
  size_t bytes_;
};

// Case N-11.
TEST(CpuAdamLarge, UpdatesEveryElementBeyondTwoToTheThirtyFirst) {
  constexpr size_t kPlaneBytes = 2 * static_cast<size_t>(kNumel);
  constexpr size_t kTileBytes = 64 * kMiB;
  if (available_bytes() < 4 * kPlaneBytes + 2 * kTileBytes) {
    GTEST_SKIP() << "needs " << format_bytes(4 * kPlaneBytes + 2 * kTileBytes)
                 << " of free memory, " << format_bytes(available_bytes()) << " are there";
  }
  const UniqueFd tile(memfd_create("gradient", MFD_CLOEXEC));
  ASSERT_GE(tile.get(), 0);
  const std::vector<uint16_t> ones(kTileBytes / 2, float_to_bf16(1.0f));
  for (size_t written = 0; written < kTileBytes;) {
    const ssize_t n = write(tile.get(), reinterpret_cast<const char*>(ones.data()) + written,
                            kTileBytes - written);
    ASSERT_GT(n, 0);
    written += static_cast<size_t>(n);
  }
  const Mapping param(kPlaneBytes), lo(kPlaneBytes), exp_avg(kPlaneBytes), exp_avg_sq(kPlaneBytes);
  Mapping grad(kPlaneBytes);
  ASSERT_TRUE(param.valid() && lo.valid() && exp_avg.valid() && exp_avg_sq.valid() && grad.valid());
  ASSERT_TRUE(grad.tile(tile.get(), kTileBytes));

  const AdamShard shard{.moment_dtype = DType::kBF16,
                        .param = param.halves(),
                        .lo = lo.halves(),
                        .exp_avg = exp_avg.halves(),
                        .exp_avg_sq = exp_avg_sq.halves(),
                        .grad = grad.halves(),
                        .numel = kNumel};
  const int threads = default_threads();
  adam_step(shard, {.lr = 0.25}, 1.0f, threads);

  // All weights are -lr; 0.25 is exact in the hi plane up to the one rounding of the formula.
  const uint16_t first_hi = param.halves()[0];
  const uint16_t first_lo = lo.halves()[0];
  EXPECT_NEAR(bf16_to_float(first_hi), -0.25f, 0x1p-9);
  int64_t first_wrong = kNumel;
#pragma omp parallel for reduction(min : first_wrong) num_threads(threads)
  for (int64_t i = 0; i < kNumel; ++i) {
    const bool same = param.halves()[i] == first_hi && lo.halves()[i] == first_lo &&
                      exp_avg.halves()[i] != 0 && exp_avg_sq.halves()[i] != 0;
    if (!same && i < first_wrong) first_wrong = i;
  }
  EXPECT_EQ(first_wrong, kNumel) << "first element that was not updated";

  std::vector<double> scratch(static_cast<size_t>(ceil_div(kNumel, kNormChunk)));
  const SquareSum sum =
      grad_square_sum(grad.halves(), DType::kBF16, kNumel, scratch.data(), threads);
  EXPECT_EQ(sum.sum, static_cast<double>(kNumel));
  EXPECT_EQ(sum.first_nonfinite, -1);
}

}  // namespace
}  // namespace orlop::test
