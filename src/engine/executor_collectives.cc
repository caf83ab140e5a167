#include "engine/executor.h"

namespace orlop {

// Rows are as long as the padded parts, so that every rank sends and receives alike.
std::byte* Executor::own_row(const PlanBuffer& buffer) const {
  const size_t element =
      buffer.kind == BufferKind::kGrad ? sizeof(float) : dtype_bytes(input_.compute_dtype);
  const bool has_rows = buffer.kind == BufferKind::kGrad || buffer.kind == BufferKind::kParam;
  const size_t row_bytes = static_cast<size_t>(input_.shard_numel(buffer.param)) * element;
  return address(buffer) + (has_rows ? static_cast<size_t>(ranks_.rank()) * row_bytes : 0);
}

std::byte* Executor::norm_row(const StepPlan& plan) const {
  const size_t row_bytes = norm_row_bytes(input_.layout.flat_params.size());
  return address(plan.buffers[static_cast<size_t>(plan.norm_sums)]) +
         static_cast<size_t>(ranks_.rank()) * row_bytes;
}

void Executor::issue_between_ranks(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  switch (op.kind) {
    case OpKind::kAllGather:
      return issue_all_gather(plan, op, queue);
    case OpKind::kReduceScatter:
      return issue_reduce_scatter(plan, op, queue);
    case OpKind::kNarrowGrad:
      return issue_narrow_grad(plan, op, queue);
    case OpKind::kExchangeGrad:
      return issue_exchange_grad(plan, op, queue);
    case OpKind::kSumGrad:
      return issue_sum_grad(plan, op, queue);
    default:
      return issue_gather_norms(plan, queue);
  }
}

// This rank's part is in its row already, or is the first plane of the states on the device.
void Executor::issue_all_gather(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  const PlanBuffer& copy = plan.buffer(op.uses.front());
  const BufferUse* state = find_use(plan, op, BufferKind::kState, Tier::kDevice);
  const std::byte* part = state == nullptr ? own_row(copy) : address(plan.buffer(*state));
  ranks_.all_gather(queue, part, address(copy), input_.shard_numel(op.param), input_.compute_dtype,
                    name_of(op.param));
}

void Executor::issue_reduce_scatter(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  const PlanBuffer& grad = plan.buffer(op.uses.front());
  ranks_.reduce_scatter(queue, address(grad), own_row(grad), input_.shard_numel(op.param),
                        DType::kF32, name_of(op.param));
}

void Executor::issue_narrow_grad(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  const int64_t numel = input_.shard_numel(op.param) * input_.world_size;
  backend_.ops().narrow(queue,
                        reinterpret_cast<const float*>(address(plan.buffer(op.uses.front()))),
                        address(plan.buffer(op.uses.back())), numel, input_.gradient_wire);
}

void Executor::issue_exchange_grad(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  ranks_.all_to_all(queue, address(plan.buffer(op.uses.front())),
                    address(plan.buffer(op.uses.back())), input_.shard_numel(op.param),
                    input_.gradient_wire, name_of(op.param));
}

void Executor::issue_sum_grad(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  backend_.ops().sum_rows(queue, address(plan.buffer(op.uses.front())),
                          reinterpret_cast<float*>(address(plan.buffer(op.uses.back()))),
                          input_.world_size, input_.shard_numel(op.param), input_.gradient_wire);
}

void Executor::issue_gather_norms(const StepPlan& plan, Queue& queue) {
  const size_t row_bytes = norm_row_bytes(input_.layout.flat_params.size());
  ranks_.all_gather(queue, norm_row(plan),
                    address(plan.buffers[static_cast<size_t>(plan.norm_sums)]),
                    static_cast<int64_t>(row_bytes), DType::kU8, "norms");
}

}  // namespace orlop
