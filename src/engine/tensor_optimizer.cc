#include "orlop/tensor_optimizer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/owner_process.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/grad_sum.h"
#include "engine/tensor_store.h"
#include "optim/optimizer_queue.h"

namespace orlop {
namespace {

static_assert(kFailedVersion == Gate::kFailed);
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Runs on the optimizer's thread.
void wait_for(const Fence& fence, const std::string& name) {
  if (fence.wait == nullptr) return;
  const int status = fence.wait(fence.handle);
  check(status == 0, ErrorCode::kDevice,
        "the gradient of '{}' did not arrive: the device reports status {}", name, status);
}

}  // namespace

class TensorOptimizer::Impl {
 public:
  explicit Impl(int threads)
      : threads_(threads == 0 ? default_threads() : threads), queue_({}, threads_, nullptr) {}

  bool in_owner() const { return owner_.is_this(); }

  // Every call passes here.
  void check_owner() const { owner_.check_this("optimizer"); }

  TensorStore& store() { return store_; }
  int threads() const { return threads_; }

  GradientNorm norm(std::span<const GradientView> gradients) {
    GradientNorm norm;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const SquareSum sum = square_sum(gradients[i], scratch_, threads_);
      norm.square_sum += sum.sum;
      if (sum.first_nonfinite >= 0 && norm.first_tensor < 0) {
        norm.first_tensor = static_cast<int64_t>(i);
        norm.first_element = sum.first_nonfinite;
      }
    }
    return norm;
  }

  uint32_t update(std::span<const TensorUpdate> updates, float grad_scale, int64_t step) {
    auto batch = std::make_shared<UpdateBatch>();
    batch->scalars.grad_scale = grad_scale;
    batch->updates.reserve(updates.size());
    for (const TensorUpdate& update : updates) {
      const TensorStore::Tensor& tensor = store_.at(update.tensor);
      check(update.gradient.numel == tensor.spec.numel, ErrorCode::kUsage,
            "the gradient of '{}' has {} elements, its weights have {}", tensor.spec.name,
            update.gradient.numel, tensor.spec.numel);
      const AdamShard shard = adam_shard(tensor, update.gradient);
      check_adam_shard(shard);
      adam_constants(update.hyper, grad_scale);  // throws for what is out of range
      batch->updates.push_back(HostUpdate{
          static_cast<int>(update.tensor),
          {UpdatePart{shard, true, tensor.spec.seed, update.hyper}},
          tensor.gate(),
          [&tensor, fence = update.arrived, threads = threads_, is_written = update.is_written] {
            wait_for(fence, tensor.spec.name);
            if (is_written) mend_master(tensor, threads);
          }});
    }
    return submit(std::move(batch), step);
  }

  uint32_t accumulate(int64_t index, std::span<float> sum, bool add, bool last, Fence arrived) {
    return submit_sum(index, sum, add ? SumStart::kAdd : SumStart::kStart, last, arrived);
  }

  uint32_t round_sum(int64_t index, std::span<float> sum) {
    return submit_sum(index, sum, SumStart::kKeep, true, {});
  }

  uint32_t measure(std::span<const int64_t> tensors, Fence arrived) {
    auto batch = std::make_shared<UpdateBatch>();
    batch->updates.reserve(tensors.size());
    for (const int64_t index : tensors) {
      const TensorStore::Tensor& tensor = store_.at(index);
      const GradientView gradient = kept_gradient(tensor, static_cast<size_t>(tensor.spec.numel));
      SquareSum& found = result_of(index);
      batch->updates.push_back(HostUpdate{
          static_cast<int>(index), {}, tensor.gate(), [this, &tensor, &found, gradient, arrived] {
            wait_for(arrived, tensor.spec.name);
            found = square_sum(gradient, queue_scratch_, threads_);
          }});
    }
    return submit(std::move(batch), 0);
  }

  GradientNorm measured(int64_t index) {
    wait(index);
    const SquareSum& found = result_of(index);
    GradientNorm norm{found.sum, -1, found.first_nonfinite};
    if (found.first_nonfinite >= 0) norm.first_tensor = 0;
    return norm;
  }

  void wait(int64_t index) {
    const TensorStore::Tensor& tensor = store_.at(index);
    const auto position = static_cast<size_t>(index);
    const uint32_t wanted = position < submitted_.size() ? submitted_[position] : 0;
    uint32_t seen = tensor.written->load(std::memory_order_acquire);
    while (seen < wanted) {
      tensor.written->wait(seen, std::memory_order_acquire);
      seen = tensor.written->load(std::memory_order_acquire);
    }
    if (seen == kFailedVersion) queue_.wait_idle();
  }

  void synchronize() { queue_.wait_idle(); }

 private:
  // Room for the chunk sums of so many elements.
  static double* scratch_for(int64_t numel, std::vector<double>& scratch) {
    const auto chunks = static_cast<size_t>(ceil_div(numel, kNormChunk));
    if (scratch.size() < chunks) scratch.resize(chunks);
    return scratch.data();
  }

  static SquareSum square_sum(const GradientView& gradient, std::vector<double>& scratch,
                              int threads) {
    double* const sums = scratch_for(gradient.numel, scratch);
    return grad_square_sum(gradient.data, gradient.dtype, gradient.numel, sums, threads);
  }

  uint32_t submit_sum(int64_t index, std::span<float> sum, SumStart start, bool round,
                      Fence arrived) {
    const TensorStore::Tensor& tensor = store_.at(index);
    kept_gradient(tensor, sum.size());
    SquareSum& found = result_of(index);
    const GradSum work{
        tensor.states.gradient, tensor.spec.dtype, sum.data(), tensor.spec.numel, start, round};
    return submit_job(index, [this, &tensor, &found, work, arrived] {
      wait_for(arrived, tensor.spec.name);
      double* const scratch = work.round ? scratch_for(work.numel, queue_scratch_) : nullptr;
      const SquareSum squares = sum_gradient(work, scratch, threads_);
      if (work.round) found = squares;
    });
  }

  // `count`: elements of the sum that it is for.
  static GradientView kept_gradient(const TensorStore::Tensor& tensor, size_t count) {
    const GradientView kept{tensor.states.gradient, tensor.spec.dtype, tensor.spec.numel};
    check(kept.data != nullptr || kept.numel == 0, ErrorCode::kUsage,
          "tensor '{}' keeps no gradient", tensor.spec.name);
    check(count == static_cast<size_t>(kept.numel), ErrorCode::kUsage,
          "tensor '{}' has {} elements, the sum has {}", tensor.spec.name, kept.numel, count);
    return kept;
  }

  SquareSum& result_of(int64_t index) {
    const auto count = static_cast<size_t>(store_.count());
    if (measured_.size() < count) measured_.resize(count);
    return measured_.at(static_cast<size_t>(index));
  }

  // A job of one tensor that is no update: its gate opens when `work` has run.
  uint32_t submit_job(int64_t index, std::function<void()> work) {
    auto batch = std::make_shared<UpdateBatch>();
    batch->updates.push_back(
        HostUpdate{static_cast<int>(index), {}, store_.at(index).gate(), std::move(work)});
    return submit(std::move(batch), 0);
  }

  uint32_t submit(std::shared_ptr<const UpdateBatch> batch, int64_t step) {
    UpdateJob job;
    job.scalars = &batch->scalars;
    job.hyper.step = step;
    job.version = version_ + 1;
    job.batch = batch;
    queue_.submit(job);
    ++version_;
    submitted_.resize(static_cast<size_t>(store_.count()), 0);
    for (const HostUpdate& update : batch->updates) {
      submitted_[static_cast<size_t>(update.param)] = version_;
    }
    return version_;
  }

  OwnerProcess owner_;
  int threads_;
  TensorStore store_;
  std::vector<uint32_t> submitted_;  // the newest version submitted for each tensor
  std::vector<double> scratch_;
  std::vector<double> queue_scratch_;  // of the queue's thread
  std::deque<SquareSum> measured_;     // by tensor; the queue's thread writes, and they never move
  uint32_t version_ = 0;
  OptimizerQueue queue_;  // last: its thread ends before what it works on
};

TensorOptimizer::TensorOptimizer(int threads) {
  check(threads >= 0, ErrorCode::kUsage, "optimizer: threads = {} is negative", threads);
  impl_ = std::make_unique<Impl>(threads);
}

TensorOptimizer::~TensorOptimizer() {
  // A forked child has neither the thread nor the memory.
  if (impl_ && !impl_->in_owner()) static_cast<void>(impl_.release());
}

int64_t TensorOptimizer::add(std::span<const TensorSpec> tensors) {
  impl_->check_owner();
  return impl_->store().add(tensors);
}

void TensorOptimizer::release(int64_t tensor) {
  impl_->check_owner();
  impl_->wait(tensor);
  impl_->store().release(tensor);
}

std::shared_ptr<const void> TensorOptimizer::memory(int64_t tensor) const {
  impl_->check_owner();
  return impl_->store().at(tensor).arena;
}

TensorStates TensorOptimizer::states(int64_t tensor) const {
  impl_->check_owner();
  return impl_->store().at(tensor).states;
}

GradientNorm TensorOptimizer::norm(std::span<const GradientView> gradients) {
  impl_->check_owner();
  return impl_->norm(gradients);
}

uint32_t TensorOptimizer::update(std::span<const TensorUpdate> updates, float grad_scale,
                                 int64_t step) {
  impl_->check_owner();
  return impl_->update(updates, grad_scale, step);
}

uint32_t TensorOptimizer::accumulate(int64_t tensor, std::span<float> sum, bool add, bool last,
                                     Fence arrived) {
  impl_->check_owner();
  return impl_->accumulate(tensor, sum, add, last, arrived);
}

uint32_t TensorOptimizer::round_sum(int64_t tensor, std::span<float> sum) {
  impl_->check_owner();
  return impl_->round_sum(tensor, sum);
}

uint32_t TensorOptimizer::measure(std::span<const int64_t> tensors, Fence arrived) {
  impl_->check_owner();
  return impl_->measure(tensors, arrived);
}

GradientNorm TensorOptimizer::measured(int64_t tensor) {
  impl_->check_owner();
  return impl_->measured(tensor);
}

void TensorOptimizer::wait(int64_t tensor) {
  impl_->check_owner();
  impl_->wait(tensor);
}

void TensorOptimizer::synchronize() {
  impl_->check_owner();
  impl_->synchronize();
}

void TensorOptimizer::adopt_weights(int64_t tensor, const void* weights) {
  impl_->check_owner();
  impl_->wait(tensor);
  orlop::adopt_weights(impl_->store().at(tensor), weights);
}

void TensorOptimizer::move_weights(int64_t tensor, void* weights) {
  impl_->check_owner();
  impl_->wait(tensor);
  impl_->store().move_weights(tensor, weights);
}

void TensorOptimizer::read_master(int64_t tensor, std::span<float> values) {
  impl_->check_owner();
  impl_->wait(tensor);
  orlop::read_master(impl_->store().at(tensor), values);
}

void TensorOptimizer::write_master(int64_t tensor, std::span<const float> values) {
  impl_->check_owner();
  impl_->wait(tensor);
  orlop::write_master(impl_->store().at(tensor), values);
}

std::vector<std::span<std::byte>> TensorOptimizer::ranges() const {
  impl_->check_owner();
  std::vector<std::span<std::byte>> ranges;
  for (const auto& arena : impl_->store().arenas()) {
    ranges.emplace_back(arena->data(), arena->capacity_bytes());
  }
  return ranges;
}

std::vector<TensorMemory> TensorOptimizer::memory_report() const {
  impl_->check_owner();
  std::vector<TensorMemory> report;
  for (const auto& arena : impl_->store().arenas()) {
    for (const PurposeBytes& entry : arena->report()) {
      const auto known = std::find_if(report.begin(), report.end(), [&](const TensorMemory& held) {
        return held.purpose == entry.purpose;
      });
      if (known == report.end()) {
        report.push_back({entry.purpose, entry.bytes});
      } else {
        known->bytes += entry.bytes;
      }
    }
  }
  return report;
}

}  // namespace orlop
