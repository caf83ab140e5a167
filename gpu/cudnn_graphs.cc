#include "gpu/cudnn_graphs.h"

#include <cudnn_frontend.h>

#include <bit>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace orlop {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kStats,
  kDout,
  kDq,
  kDk,
  kDv,
  kLengthQ,
  kLengthKv,
  kOffsetQ,
  kOffsetKv,
  kOffsetOut,
};

// Offsets of the ragged case inside SdpaPointers::sequence, in int32: kernels::set_sequence().
constexpr int kSlotLength = 0;
constexpr int kSlotQ = 4;
constexpr int kSlotKv = 8;
constexpr int kSlotOut = 12;

void cudnn_check(cudnnStatus_t status, const char* call) {
  check(status == CUDNN_STATUS_SUCCESS, ErrorCode::kDevice, "{}: {}", call,
        cudnnGetErrorString(status));
}

TensorPtr int32_tensor(fe::graph::Graph& graph, const char* name, Uid uid, int64_t numel) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({numel, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(fe::DataType_t::INT32));
}

// Adds the tensors of one graph: all are (batches, heads, length, head_dim) with rows `stride`
// apart.
class Builder {
 public:
  Builder(fe::graph::Graph& graph, const SdpaShape& shape) : graph_(graph), shape_(shape) {
    if (!shape.ragged) return;
    length_q_ = int32_tensor(graph, "length_q", kLengthQ, shape.batches);
    length_kv_ = int32_tensor(graph, "length_kv", kLengthKv, shape.batches);
    offset_q_ = int32_tensor(graph, "offset_q", kOffsetQ, shape.batches + 1);
    offset_kv_ = int32_tensor(graph, "offset_kv", kOffsetKv, shape.batches + 1);
    offset_out_ = int32_tensor(graph, "offset_out", kOffsetOut, shape.batches + 1);
  }

  TensorPtr input(const char* name, Uid uid) {
    auto attributes = fe::graph::Tensor_attributes().set_name(name).set_uid(uid);
    const TensorPtr tensor = graph_.tensor(attributes);
    describe(tensor, uid);
    return tensor;
  }
  void output(const TensorPtr& tensor, Uid uid) {
    tensor->set_output(true).set_uid(uid);
    describe(tensor, uid);
  }

  // Causal, scaled, and with the true length where ragged.
  template <typename Attributes>
  Attributes attributes(const char* name) const {
    Attributes out;
    out.set_name(name).set_attn_scale(shape_.scale);
    out.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    if (shape_.ragged) {
      out.set_padding_mask(true).set_seq_len_q(length_q_).set_seq_len_kv(length_kv_);
    }
    return out;
  }

 private:
  void describe(const TensorPtr& tensor, Uid uid) {
    const int64_t b = shape_.batches, s = shape_.length;
    if (uid == kStats) {
      tensor->set_data_type(fe::DataType_t::FLOAT)
          .set_dim({b, shape_.heads, s, 1})
          .set_stride({shape_.heads * s, s, 1, 1});
      return;
    }
    const bool kv = uid == kK || uid == kV || uid == kDk || uid == kDv;
    const bool out = uid == kOut || uid == kDout;
    const int64_t stride = kv ? shape_.kv_stride : out ? shape_.out_stride : shape_.q_stride;
    const int64_t heads = kv ? shape_.kv_heads : shape_.heads;
    tensor->set_dim({b, heads, s, shape_.head_dim})
        .set_stride({s * stride, shape_.head_dim, stride, 1});
    if (shape_.ragged) tensor->set_ragged_offset(kv ? offset_kv_ : out ? offset_out_ : offset_q_);
  }

  fe::graph::Graph& graph_;
  const SdpaShape& shape_;
  TensorPtr length_q_, length_kv_, offset_q_, offset_kv_, offset_out_;
};

void add_forward(fe::graph::Graph& graph, const SdpaShape& shape) {
  Builder builder(graph, shape);
  const TensorPtr q = builder.input("q", kQ);
  const TensorPtr k = builder.input("k", kK);
  const TensorPtr v = builder.input("v", kV);
  auto attributes = builder.attributes<fe::graph::SDPA_attributes>("sdpa");
  attributes.set_generate_stats(true);
  const auto [out, stats] = graph.sdpa(q, k, v, std::move(attributes));
  builder.output(out, kOut);
  builder.output(stats, kStats);
}

void add_backward(fe::graph::Graph& graph, const SdpaShape& shape) {
  Builder builder(graph, shape);
  const TensorPtr q = builder.input("q", kQ);
  const TensorPtr k = builder.input("k", kK);
  const TensorPtr v = builder.input("v", kV);
  const TensorPtr out = builder.input("out", kOut);
  const TensorPtr dout = builder.input("dout", kDout);
  const TensorPtr stats = builder.input("stats", kStats);
  auto attributes = builder.attributes<fe::graph::SDPA_backward_attributes>("sdpa_backward");
  attributes.set_deterministic_algorithm(shape.deterministic);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, std::move(attributes));
  builder.output(dq, kDq);
  builder.output(dk, kDk);
  builder.output(dv, kDv);
}

}  // namespace

struct SdpaGraphs::Handle {
  cudnnHandle_t handle = nullptr;

  Handle() { cudnn_check(cudnnCreate(&handle), "cudnnCreate"); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { cudnnDestroy(handle); }
};

class SdpaGraph {
 public:
  SdpaShape shape;
  fe::graph::Graph graph;
  int64_t workspace = 0;
};

size_t workspace_bytes(const SdpaGraph& graph) { return static_cast<size_t>(graph.workspace); }

size_t SdpaShapeHash::operator()(const SdpaShape& shape) const {
  uint64_t hash = std::bit_cast<uint32_t>(shape.scale);
  const auto mix = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  };
  for (const int64_t value :
       {shape.batches, shape.length, shape.heads, shape.kv_heads, shape.head_dim, shape.q_stride,
        shape.kv_stride, shape.out_stride, static_cast<int64_t>(shape.dtype)}) {
    mix(value);
  }
  mix(shape.ragged * 4 + shape.backward * 2 + shape.deterministic);
  return hash;
}

SdpaGraphs::SdpaGraphs() : handle_(std::make_unique<Handle>()) {}
SdpaGraphs::~SdpaGraphs() = default;

std::string SdpaGraphs::version() const {
  const size_t version = cudnnGetVersion();
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

const SdpaGraph* SdpaGraphs::find(const SdpaShape& shape) {
  const auto known = graphs_.find(shape);
  if (known != graphs_.end()) return known->second.get();

  auto graph = std::make_unique<SdpaGraph>();
  graph->shape = shape;
  graph->graph
      .set_io_data_type(shape.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16
                                                    : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  if (shape.backward) {
    add_backward(graph->graph, shape);
  } else {
    add_forward(graph->graph, shape);
  }
  fe::error_t error = graph->graph.build(handle_->handle, {fe::HeurMode_t::A});
  if (error.is_good()) error = graph->graph.get_workspace_size(graph->workspace);
  if (error.is_bad()) {
    log_info("attention {}: cuDNN {} refuses {} x {} rows, {}/{} heads of {}{}: {}",
             shape.backward ? "backward" : "forward", version(), shape.batches, shape.length,
             shape.heads, shape.kv_heads, shape.head_dim, shape.ragged ? ", ragged" : "",
             error.get_message());
    graph = nullptr;
  }
  return graphs_.emplace(shape, std::move(graph)).first->second.get();
}

void SdpaGraphs::execute(const SdpaGraph& graph, const SdpaPointers& pointers,
                         cudaStream_t stream) {
  const auto in = [](const void* p) { return const_cast<void*>(p); };
  std::unordered_map<int64_t, void*> pack = {{kQ, in(pointers.q)},
                                             {kK, in(pointers.k)},
                                             {kV, in(pointers.v)},
                                             {kOut, pointers.out},
                                             {kStats, pointers.stats}};
  if (graph.shape.backward) {
    pack.insert(
        {{kDout, in(pointers.dout)}, {kDq, pointers.dq}, {kDk, pointers.dk}, {kDv, pointers.dv}});
  }
  if (graph.shape.ragged) {
    int32_t* slot = const_cast<int32_t*>(pointers.sequence);
    pack.insert({{kLengthQ, slot + kSlotLength},
                 {kLengthKv, slot + kSlotLength},
                 {kOffsetQ, slot + kSlotQ},
                 {kOffsetKv, slot + kSlotKv},
                 {kOffsetOut, slot + kSlotOut}});
  }
  cudnn_check(cudnnSetStream(handle_->handle, stream), "cudnnSetStream");
  fe::error_t error = graph.graph.execute(handle_->handle, pack, pointers.workspace);
  check(error.is_good(), ErrorCode::kDevice, "attention {}: cuDNN {}: {}",
        graph.shape.backward ? "backward" : "forward", version(), error.get_message());
}

}  // namespace orlop
