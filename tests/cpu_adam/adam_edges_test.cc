// Sizes around the pieces that kernels work in, against torch's formula, in memory that ends where
// the shard does.

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "adam_test_support.h"

namespace orlop::test {
namespace {

// A plane's copy whose last byte lies before a page that must not be touched.
class AtPageEnd {
 public:
  AtPageEnd(const void* plane, size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    mapped_bytes_ = (bytes / page + 2) * page;
    mapped_ =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (plane == nullptr || mapped_ == MAP_FAILED) return;
    char* const end = static_cast<char*>(mapped_) + mapped_bytes_ - page;
    EXPECT_EQ(::mprotect(end, page, PROT_NONE), 0);
    data_ = end - bytes;
    std::memcpy(data_, plane, bytes);
  }
  ~AtPageEnd() {
    if (mapped_ != MAP_FAILED) ::munmap(mapped_, mapped_bytes_);
  }
  AtPageEnd(const AtPageEnd&) = delete;
  AtPageEnd& operator=(const AtPageEnd&) = delete;

  template <typename T = void>
  T* data() const {
    return static_cast<T*>(static_cast<void*>(data_));
  }
  bool equals(const void* plane) const {
    return data_ == nullptr ? plane == nullptr : std::memcmp(data_, plane, bytes_) == 0;
  }

 private:
  size_t bytes_;
  size_t mapped_bytes_ = 0;
  void* mapped_ = MAP_FAILED;
  char* data_ = nullptr;
};

constexpr AdamHyper kHyper{.lr = 1e-3, .weight_decay = 0.1, .step = 1};

class EveryLayoutEdges : public ::testing::TestWithParam<Layout> {};

// Nothing beyond the last element is read or written: either would end the process.
TEST_P(EveryLayoutEdges, TouchNothingBeyondTheShard) {
  for (const Isa isa : available_isas()) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    for (const int64_t numel : {1, 31, 33, 1023, 1024, 1025, 4097}) {
      OwnedShard expected(GetParam(), numel, 4);
      const AdamShard from = expected.view();
      const auto count = static_cast<size_t>(numel);
      const size_t moment_bytes = count * dtype_bytes(GetParam().moment);
      const AtPageEnd param(from.param, count * dtype_bytes(GetParam().compute));
      const AtPageEnd lo(from.lo, 2 * count);
      const AtPageEnd master(from.master, 4 * count);
      const AtPageEnd exp_avg(from.exp_avg, moment_bytes);
      const AtPageEnd exp_avg_sq(from.exp_avg_sq, moment_bytes);
      const AtPageEnd grad(from.grad, count * dtype_bytes(GetParam().grad));
      AdamShard shard = from;
      shard.param = param.data();
      shard.lo = lo.data<uint16_t>();
      shard.master = master.data<float>();
      shard.exp_avg = exp_avg.data();
      shard.exp_avg_sq = exp_avg_sq.data();
      shard.grad = grad.data();
      adam_step(shard, kHyper, 1.0f, 2);
      adam_step(from, kHyper, 1.0f, 2);
      EXPECT_TRUE(param.equals(from.param) && lo.equals(from.lo) && master.equals(from.master) &&
                  exp_avg.equals(from.exp_avg) && exp_avg_sq.equals(from.exp_avg_sq))
          << numel << " elements, " << isa_name(isa);
      EXPECT_TRUE(expected.guards_are_intact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(CpuAdam, EveryLayoutEdges, ::testing::ValuesIn(all_layouts()),
                         [](const auto& info) { return layout_name(info.param); });

// Case N-12, with the test above: the kernels have no tile that a setting could change, so the
// sizes stand around their blocks of 32 elements.
TEST(CpuAdamEdges, FollowTorchFor100Steps) {
  for (const int64_t numel : {31, 32, 33, 1023, 1024, 1025, 4097}) {
    for (const DType compute : {DType::kF32, DType::kBF16, DType::kF16}) {
      OwnedShard shard({compute, DType::kF32, compute}, numel, 21);
      std::vector<ReferenceElement> reference;
      for (int64_t i = 0; i < numel; ++i) {
        shard.set_moments(i, 0, 0);
        reference.push_back({shard.master(i), 0, 0});
      }
      AdamHyper hyper = kHyper;
      for (hyper.step = 1; hyper.step <= 100; ++hyper.step) {
        shard.fill_grad(static_cast<uint64_t>(hyper.step));
        adam_step(shard.view(), hyper, 1.0f, 2);
        for (int64_t i = 0; i < numel; ++i) {
          reference[static_cast<size_t>(i)].step(shard.grad(i), hyper);
        }
      }
      for (int64_t i = 0; i < numel; ++i) {
        ASSERT_TRUE(near_reference(shard.master(i), reference[static_cast<size_t>(i)].p, i))
            << numel << " elements, " << layout_name(shard.layout());
      }
    }
  }
}

}  // namespace
}  // namespace orlop::test
