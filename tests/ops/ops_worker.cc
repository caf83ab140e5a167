// One operation on inputs that another program has written, for comparisons with that program's
// own:
//
//   ops_worker DEVICE bf16|fp16|fp32 OPERATION FOLDER [dimension=value ...]
//
// FOLDER holds an input NAME as NAME.f32 or NAME.i32, plain elements that the dtype can hold, and
// gets every result as NAME.f32. Names and shapes are those of the functions below and of
// backend/ops.h.

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/backend_factory.h"
#include "test_device.h"

namespace orlop::test {
namespace {

constexpr size_t kArenaBytes = size_t{3} << 29;

class Request {
 public:
  Request(TestDevice& device, DType dtype, std::filesystem::path folder,
          std::map<std::string, int64_t> dimensions)
      : device_(device),
        dtype_(dtype),
        folder_(std::move(folder)),
        dimensions_(std::move(dimensions)) {}

  DType dtype() const { return dtype_; }
  Ops& ops() { return device_.ops(); }
  Queue& queue() { return device_.queue(); }
  TestDevice& device() { return device_; }

  int64_t dimension(const std::string& name) const {
    const auto found = dimensions_.find(name);
    check(found != dimensions_.end(), ErrorCode::kUsage, "ops_worker: {}= is missing", name);
    return found->second;
  }

  void* input(const std::string& name) { return device_.put(values(name), dtype_); }
  float* input_f32(const std::string& name) { return device_.put_f32(values(name)); }
  std::vector<int32_t> indices(const std::string& name) const {
    return read<int32_t>(name + ".i32");
  }

  void* room(int64_t numel) { return device_.poisoned(numel, dtype_); }
  float* room_f32(int64_t numel) {
    return static_cast<float*>(device_.poisoned(numel, DType::kF32));
  }
  float* zeros(int64_t numel) { return device_.put_f32(Values(static_cast<size_t>(numel))); }

  void output(const std::string& name, const void* data, int64_t numel) {
    write(name, device_.get(data, numel, dtype_));
  }
  void output_f32(const std::string& name, const float* data, int64_t numel) {
    write(name, device_.get(data, numel, DType::kF32));
  }

 private:
  template <typename T>
  std::vector<T> read(const std::string& name) const {
    const std::filesystem::path path = folder_ / name;
    std::ifstream file(path, std::ios::binary);
    check(file.is_open(), ErrorCode::kIo, "ops_worker: cannot read {}", path.string());
    std::vector<T> elements(std::filesystem::file_size(path) / sizeof(T));
    file.read(reinterpret_cast<char*>(elements.data()),
              static_cast<std::streamsize>(elements.size() * sizeof(T)));
    return elements;
  }
  Values values(const std::string& name) const {
    const std::vector<float> elements = read<float>(name + ".f32");
    return {elements.begin(), elements.end()};
  }
  void write(const std::string& name, const Values& values) const {
    const std::vector<float> elements(values.begin(), values.end());
    std::ofstream file(folder_ / (name + ".f32"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(elements.data()),
               static_cast<std::streamsize>(elements.size() * sizeof(float)));
    check(file.good(), ErrorCode::kIo, "ops_worker: cannot write {}", name);
  }

  TestDevice& device_;
  DType dtype_;
  std::filesystem::path folder_;
  std::map<std::string, int64_t> dimensions_;
};

// A linear layer: x (m, k), weight (n, k), dy (m, n) -> y (m, n), dx (m, k), dweight (n, k) fp32.
void run_linear(Request& request) {
  const int64_t m = request.dimension("m"), n = request.dimension("n"), k = request.dimension("k");
  const void* x = request.input("x");
  const void* weight = request.input("weight");
  const void* dy = request.input("dy");
  void* y = request.room(m * n);
  void* dx = request.room(m * k);
  float* dweight = request.zeros(n * k);
  MatmulArgs args;
  args.in_dtype = args.out_dtype = request.dtype();
  args.a = x, args.b = weight, args.c = y, args.trans_b = true;
  args.m = m, args.n = n, args.k = k;
  args.lda = k, args.ldb = k, args.ldc = n;
  request.ops().matmul(request.queue(), args);
  args.a = dy, args.b = weight, args.c = dx, args.trans_b = false;
  args.m = m, args.n = k, args.k = n;
  args.lda = n, args.ldb = k, args.ldc = k;
  request.ops().matmul(request.queue(), args);
  args.a = dy, args.b = x, args.c = dweight, args.trans_a = true;
  args.m = n, args.n = k, args.k = m;
  args.lda = n, args.ldb = k, args.ldc = k;
  args.accumulate = true, args.out_dtype = DType::kF32;
  request.ops().matmul(request.queue(), args);
  request.output("y", y, m * n);
  request.output("dx", dx, m * k);
  request.output_f32("dweight", dweight, n * k);
}

// x, dy (rows, cols), weight (cols), for LayerNorm (center=1) bias (cols) -> y, dx, dweight, dbias.
void run_norm(Request& request) {
  const int64_t rows = request.dimension("rows"), cols = request.dimension("cols");
  const bool center = request.dimension("center") != 0;
  NormArgs forward;
  forward.x = request.input("x");
  forward.weight = request.input("weight");
  forward.y = request.room(rows * cols);
  forward.rstd = request.room_f32(rows);
  if (center) forward.bias = request.input("bias"), forward.mean = request.room_f32(rows);
  forward.rows = rows, forward.cols = cols, forward.x_stride = forward.y_stride = cols;
  forward.dtype = request.dtype();
  request.ops().norm_forward(request.queue(), forward);
  NormBackwardArgs backward;
  backward.dy = request.input("dy");
  backward.x = forward.x, backward.weight = forward.weight;
  backward.rstd = forward.rstd, backward.mean = forward.mean;
  backward.dx = request.room(rows * cols);
  backward.dweight = request.zeros(cols);
  if (center) backward.dbias = request.zeros(cols);
  backward.rows = rows, backward.cols = cols, backward.x_stride = backward.y_stride = cols;
  backward.dtype = request.dtype();
  request.ops().norm_backward(request.queue(), backward);
  request.output("y", forward.y, rows * cols);
  request.output("dx", backward.dx, rows * cols);
  request.output_f32("dweight", backward.dweight, cols);
  if (center) request.output_f32("dbias", backward.dbias, cols);
}

// x (rows, heads, head_dim) at positions 0, 1, ...; cos_sin (rows, head_dim / 2, 2) fp32 -> y.
void run_rope(Request& request) {
  RopeArgs args;
  args.rows = request.dimension("rows");
  args.heads = request.dimension("heads");
  args.head_dim = args.rotary_dim = request.dimension("head_dim");
  args.row_stride = args.heads * args.head_dim;
  std::vector<int32_t> positions(static_cast<size_t>(args.rows));
  std::iota(positions.begin(), positions.end(), 0);
  args.positions = request.device().put_raw(positions);
  args.x = request.input("x");
  args.cos_sin = request.input_f32("cos_sin");
  args.dtype = request.dtype();
  request.ops().rope(request.queue(), args);
  request.output("y", args.x, args.rows * args.row_stride);
}

// Causal attention over `sequences` of `length`: q, dout (rows, heads, head_dim), k, v (rows,
// kv_heads, head_dim) -> out, dq, dk, dv.
void run_attention(Request& request) {
  const int64_t length = request.dimension("length");
  AttentionArgs args;
  args.heads = request.dimension("heads"), args.kv_heads = request.dimension("kv_heads");
  args.head_dim = request.dimension("head_dim");
  std::vector<int32_t> cu_seqlens;
  for (int64_t s = 0; s <= request.dimension("sequences"); ++s)
    cu_seqlens.push_back(static_cast<int32_t>(s * length));
  args.rows = cu_seqlens.back();
  args.q_stride = args.heads * args.head_dim, args.kv_stride = args.kv_heads * args.head_dim;
  args.scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim));
  args.dtype = request.dtype();
  args.cu_seqlens_host = cu_seqlens;
  args.cu_seqlens = request.device().put_raw(cu_seqlens);
  args.q = request.input("q"), args.k = request.input("k"), args.v = request.input("v");
  args.out = request.room(args.rows * args.q_stride);
  args.lse = request.room_f32(args.heads * args.rows);
  args.workspace_bytes = request.ops().attention_workspace_bytes(
      {args.rows, args.heads, args.kv_heads, args.head_dim, length, args.dtype, true});
  args.workspace = request.device().poisoned_bytes(args.workspace_bytes);
  request.ops().attention_forward(request.queue(), args);
  AttentionBackwardArgs backward;
  backward.forward = args;
  backward.dout = request.input("dout");
  backward.dq = request.room(args.rows * args.q_stride);
  backward.dk = request.room(args.rows * args.kv_stride);
  backward.dv = request.room(args.rows * args.kv_stride);
  request.ops().attention_backward(request.queue(), backward);
  request.output("out", args.out, args.rows * args.q_stride);
  request.output("dq", backward.dq, args.rows * args.q_stride);
  request.output("dk", backward.dk, args.rows * args.kv_stride);
  request.output("dv", backward.dv, args.rows * args.kv_stride);
}

// kind = 0 SwiGLU: in (rows, 2 * width); 1 GELU by tanh, 2 GELU by erf: in (rows, width).
// dout (rows, width) -> out, din.
void run_activation(Request& request) {
  ActivationArgs args;
  args.kind = static_cast<Activation>(request.dimension("kind"));
  args.rows = request.dimension("rows"), args.width = request.dimension("width");
  const int64_t in_width = args.kind == Activation::kSwiGlu ? 2 * args.width : args.width;
  args.in = request.input("in");
  args.out = request.room(args.rows * args.width);
  args.dtype = request.dtype();
  request.ops().activation_forward(request.queue(), args);
  request.output("out", args.out, args.rows * args.width);
  args.dout = request.input("dout");
  args.din = request.room(args.rows * in_width);
  request.ops().activation_backward(request.queue(), args);
  request.output("din", args.din, args.rows * in_width);
}

// tokens (rows), dy (rows, cols) -> dtable (vocab, cols) fp32.
void run_embedding(Request& request) {
  const int64_t vocab = request.dimension("vocab");
  EmbeddingBackwardArgs args;
  args.rows = request.dimension("rows"), args.cols = request.dimension("cols");
  std::map<int32_t, std::vector<int32_t>> rows_of;
  const std::vector<int32_t> tokens = request.indices("tokens");
  for (size_t r = 0; r < tokens.size(); ++r) rows_of[tokens[r]].push_back(static_cast<int32_t>(r));
  std::vector<int32_t> sorted_rows, run_begin = {0}, run_index;
  for (const auto& [token, rows] : rows_of) {
    sorted_rows.insert(sorted_rows.end(), rows.begin(), rows.end());
    run_begin.push_back(static_cast<int32_t>(sorted_rows.size()));
    run_index.push_back(token);
  }
  args.sorted_rows = request.device().put_raw(sorted_rows);
  args.run_begin = request.device().put_raw(run_begin);
  args.run_index = request.device().put_raw(run_index);
  args.runs = static_cast<int64_t>(run_index.size());
  args.dy = request.input("dy");
  args.dtable = request.zeros(vocab * args.cols);
  args.dtype = request.dtype();
  request.ops().embedding_backward(request.queue(), args);
  request.output_f32("dtable", args.dtable, vocab * args.cols);
}

// logits (rows, vocab), labels (rows) -> loss (rows) fp32, dlogits of the mean loss.
void run_cross_entropy(Request& request) {
  CrossEntropyArgs args;
  args.rows = request.dimension("rows"), args.vocab = request.dimension("vocab");
  args.logits = request.input("logits");
  args.labels = request.device().put_raw(request.indices("labels"));
  args.loss = request.room_f32(args.rows);
  args.scale = request.device().put_f32({1.0 / static_cast<double>(args.rows)});
  args.dtype = request.dtype();
  request.ops().cross_entropy(request.queue(), args);
  request.output_f32("loss", args.loss, args.rows);
  request.output("dlogits", args.logits, args.rows * args.vocab);
}

DType parse_dtype(const std::string& name) {
  const std::map<std::string, DType> dtypes = {
      {"bf16", DType::kBF16}, {"fp16", DType::kF16}, {"fp32", DType::kF32}};
  const auto found = dtypes.find(name);
  check(found != dtypes.end(), ErrorCode::kUsage, "ops_worker: no dtype is called '{}'", name);
  return found->second;
}

void run(const std::vector<std::string>& words) {
  check(words.size() >= 4, ErrorCode::kUsage,
        "usage: ops_worker DEVICE DTYPE OPERATION FOLDER [dimension=value ...]");
  const std::map<std::string, void (*)(Request&)> operations = {
      {"linear", run_linear},
      {"norm", run_norm},
      {"rope", run_rope},
      {"attention", run_attention},
      {"activation", run_activation},
      {"embedding", run_embedding},
      {"cross_entropy", run_cross_entropy}};
  const auto operation = operations.find(words[2]);
  check(operation != operations.end(), ErrorCode::kUsage, "ops_worker: no operation '{}'",
        words[2]);
  std::map<std::string, int64_t> dimensions;
  for (size_t i = 4; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    check(equals != std::string::npos, ErrorCode::kUsage, "ops_worker: '{}' is not name=value",
          words[i]);
    dimensions[words[i].substr(0, equals)] = std::stoll(words[i].substr(equals + 1));
  }
  EngineConfig config;
  config.device = words[0];
  TestDevice device(make_backend(config, 1, 2, nullptr).backend, kArenaBytes);
  Request request(device, parse_dtype(words[1]), words[3], std::move(dimensions));
  operation->second(request);
}

}  // namespace
}  // namespace orlop::test

int main(int argc, char** argv) {
  try {
    orlop::test::run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
