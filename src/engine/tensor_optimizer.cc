#include "orlop/tensor_optimizer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/owner_process.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/grad_sum.h"
#include "engine/tensor_homes.h"
#include "engine/update_order.h"
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
  Impl(int threads, const StateDrives& drives)
      : threads_(threads == 0 ? default_threads() : threads),
        homes_(drives),
        queue_(homes_.drives() ? homes_.drives()->queue_options() : HostUpdates{}, threads_,
               nullptr) {}

  bool in_owner() const { return owner_.is_this(); }

  // Every call passes here.
  void check_owner() const { owner_.check_this("optimizer"); }

  const TensorHomes& homes() const { return homes_; }
  TensorStore& store() { return homes_.store(); }

  // Those of a tensor of which nothing is under way.
  TensorHomes& homes_of(int64_t index) {
    wait(index);
    return homes_;
  }

  int64_t add(std::span<const TensorSpec> specs) {
    if (homes_.drives() != nullptr && TensorHomes::want_drives(specs)) synchronize();
    return homes_.add(specs);
  }

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
    homes_.settle();
    if (homes_.drives() != nullptr) homes_.drives()->before_updates();
    UpdateOrder order(batch->updates, homes_.drives() ? homes_.drives()->ahead() : 0);
    std::set<int64_t> on_drives;
    for (const TensorUpdate& update : updates) {
      const TensorStore::Tensor& tensor = homes_.store().at(update.tensor);
      check(update.gradient.numel == tensor.spec.numel, ErrorCode::kUsage,
            "the gradient of '{}' has {} elements, its weights have {}", tensor.spec.name,
            update.gradient.numel, tensor.spec.numel);
      adam_constants(update.hyper, grad_scale);  // throws for what is out of range
      const auto arrive = [&tensor, fence = update.arrived] { wait_for(fence, tensor.spec.name); };
      if (homes_.on_drives(tensor)) {
        check(on_drives.insert(update.tensor).second, ErrorCode::kUsage,
              "tensor '{}', whose states are on drives, is given twice", tensor.spec.name);
        order.add(homes_.drives()->update(update.tensor, tensor, update, threads_, arrive));
        continue;
      }
      const AdamShard shard = adam_shard(tensor, update.gradient);
      check_adam_shard(shard);
      HostUpdate adam = make_job(update.tensor, tensor);
      adam.op.parts = {UpdatePart{shard, true, tensor.spec.seed, update.hyper}};
      adam.prepare = [arrive, shard, threads = threads_, is_written = update.is_written] {
        arrive();
        if (is_written) mend_master(shard, threads);
      };
      order.add(std::move(adam));
    }
    order.finish();
    const uint32_t version = submit(std::move(batch), step);
    for (const int64_t index : on_drives)
      homes_.drives()->expect(homes_.store().at(index), version);
    return version;
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
      const TensorStore::Tensor& tensor = store().at(index);
      const GradientView gradient = kept_gradient(tensor, static_cast<size_t>(tensor.spec.numel));
      SquareSum& found = result_of(index);
      HostUpdate job = make_job(index, tensor);
      job.prepare = [this, &tensor, &found, gradient, arrived] {
        wait_for(arrived, tensor.spec.name);
        found = square_sum(gradient, queue_scratch_, threads_);
      };
      batch->updates.push_back(std::move(job));
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
    const TensorStore::Tensor& tensor = store().at(index);
    const auto position = static_cast<size_t>(index);
    const uint32_t wanted = position < submitted_.size() ? submitted_[position] : 0;
    uint32_t seen = tensor.written->load(std::memory_order_acquire);
    while (seen < wanted) {
      tensor.written->wait(seen, std::memory_order_acquire);
      seen = tensor.written->load(std::memory_order_acquire);
    }
    if (seen == kFailedVersion) queue_.wait_idle();
  }

  void synchronize() {
    homes_.settle();
    queue_.wait_idle();
    if (homes_.drives() != nullptr) homes_.drives()->flush_weights();
  }

 private:
  // A job of a tensor behind which its gate opens.
  static HostUpdate make_job(int64_t index, const TensorStore::Tensor& tensor) {
    HostUpdate job;
    job.op.param = static_cast<int>(index);
    job.op.is_last = true;
    job.gate = tensor.gate();
    return job;
  }

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
    const TensorStore::Tensor& tensor = store().at(index);
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
    const auto count = static_cast<size_t>(store().count());
    if (measured_.size() < count) measured_.resize(count);
    return measured_.at(static_cast<size_t>(index));
  }

  // A job of one tensor that is no update: its gate opens when `work` has run.
  uint32_t submit_job(int64_t index, std::function<void()> work) {
    auto batch = std::make_shared<UpdateBatch>();
    batch->updates.push_back(make_job(index, store().at(index)));
    batch->updates.back().prepare = std::move(work);
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
    submitted_.resize(static_cast<size_t>(store().count()), 0);
    for (const HostUpdate& update : batch->updates) {
      submitted_[static_cast<size_t>(update.op.param)] = version_;
    }
    return version_;
  }

  OwnerProcess owner_;
  int threads_;
  TensorHomes homes_;
  std::vector<uint32_t> submitted_;  // the newest version submitted for each tensor
  std::vector<double> scratch_;
  std::vector<double> queue_scratch_;  // of the queue's thread
  std::deque<SquareSum> measured_;     // by tensor; the queue's thread writes, and they never move
  uint32_t version_ = 0;
  OptimizerQueue queue_;  // last: its thread ends before what it works on
};

TensorOptimizer::TensorOptimizer(int threads, const StateDrives& drives) {
  check(threads >= 0, ErrorCode::kUsage, "optimizer: threads = {} is negative", threads);
  impl_ = std::make_unique<Impl>(threads, drives);
}

TensorOptimizer::~TensorOptimizer() {
  // A forked child has neither the thread nor the memory.
  if (impl_ && !impl_->in_owner()) static_cast<void>(impl_.release());
}

int64_t TensorOptimizer::add(std::span<const TensorSpec> tensors) {
  impl_->check_owner();
  return impl_->add(tensors);
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
  impl_->homes_of(tensor).adopt_weights(tensor, weights);
}

void TensorOptimizer::move_weights(int64_t tensor, void* weights) {
  impl_->check_owner();
  impl_->homes_of(tensor).move_weights(tensor, weights);
}

void TensorOptimizer::read_master(int64_t tensor, std::span<float> values) {
  impl_->check_owner();
  impl_->homes_of(tensor).read_master(tensor, values);
}

void TensorOptimizer::write_master(int64_t tensor, std::span<const float> values) {
  impl_->check_owner();
  impl_->homes_of(tensor).write_master(tensor, values);
}

void TensorOptimizer::read_state(int64_t tensor, StatePlane plane, int64_t first,
                                 std::span<std::byte> values) {
  impl_->check_owner();
  impl_->homes_of(tensor).read_state(tensor, plane, first, values);
}

void TensorOptimizer::write_state(int64_t tensor, StatePlane plane, int64_t first,
                                  std::span<const std::byte> values) {
  impl_->check_owner();
  impl_->homes_of(tensor).write_state(tensor, plane, first, values);
}

int64_t TensorOptimizer::piece_numel(int64_t tensor, int64_t first) const {
  impl_->check_owner();
  return impl_->homes().piece_numel(tensor, first);
}

std::vector<std::span<std::byte>> TensorOptimizer::ranges() const {
  impl_->check_owner();
  return impl_->homes().ranges();
}

std::vector<TensorMemory> TensorOptimizer::memory_report() const {
  impl_->check_owner();
  return impl_->homes().memory_report();
}

}  // namespace orlop
