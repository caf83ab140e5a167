#include "bench/support/recording_backend.h"

#include <utility>

namespace orlop::bench {
namespace {

class RecordingOps final : public Ops {
 public:
  RecordingOps(Ops& ops, std::vector<MatmulArgs>& matmuls) : ops_(ops), matmuls_(matmuls) {}

  void matmul(Queue&, const MatmulArgs& args) override { matmuls_.push_back(args); }
  void bias_backward(Queue&, const void*, float*, int64_t, int64_t, DType) override {}
  void norm_forward(Queue&, const NormArgs&) override {}
  void norm_backward(Queue&, const NormBackwardArgs&) override {}
  void rope(Queue&, const RopeArgs&) override {}
  void attention_forward(Queue&, const AttentionArgs&) override {}
  void attention_backward(Queue&, const AttentionBackwardArgs&) override {}
  void activation_forward(Queue&, const ActivationArgs&) override {}
  void activation_backward(Queue&, const ActivationArgs&) override {}
  void embedding_forward(Queue&, const EmbeddingArgs&) override {}
  void embedding_backward(Queue&, const EmbeddingBackwardArgs&) override {}
  void cross_entropy(Queue&, const CrossEntropyArgs&) override {}
  void add(Queue&, void*, const void*, int64_t, DType) override {}
  void narrow(Queue&, const float*, void*, int64_t, DType) override {}
  void sum_rows(Queue&, const void*, float*, int64_t, int64_t, DType) override {}
  void round_grad(Queue&, const RoundGradArgs&) override {}
  void finish_norm(Queue&, const FinishNormArgs&) override {}
  void device_adam(Queue&, const DeviceAdamArgs&) override {}

  size_t attention_workspace_bytes(const AttentionShape& shape) const override {
    return ops_.attention_workspace_bytes(shape);
  }
  size_t grad_norm_scratch_bytes(int64_t numel) const override {
    return ops_.grad_norm_scratch_bytes(numel);
  }
  int64_t head_chunk_rows(int64_t vocab, DType dtype) const override {
    return ops_.head_chunk_rows(vocab, dtype);
  }

 private:
  Ops& ops_;
  std::vector<MatmulArgs>& matmuls_;
};

}  // namespace

RecordingBackend::RecordingBackend(std::unique_ptr<Backend> backend,
                                   std::vector<MatmulArgs>& matmuls)
    : backend_(std::move(backend)),
      ops_(std::make_unique<RecordingOps>(backend_->ops(), matmuls)) {}

RecordingBackend::~RecordingBackend() = default;

}  // namespace orlop::bench
