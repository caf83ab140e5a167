#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "orlop/types.h"

namespace orlop {

// One causal attention problem as cuDNN sees it: `batches` sequences of `length` rows that lie one
// after the other, or, when `ragged`, one sequence of at most `length` rows whose true length is in
// device memory. Strides are elements between rows.
struct SdpaShape {
  int64_t batches = 0, length = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0, out_stride = 0;
  float scale = 1;
  DType dtype = DType::kBF16;
  bool ragged = false;
  bool backward = false;
  bool deterministic = true;

  bool operator==(const SdpaShape&) const = default;
};

struct SdpaShapeHash {
  size_t operator()(const SdpaShape& shape) const;
};

// Device memory of one call. dq, dk, dv have the strides of q, k, v; dout that of out.
struct SdpaPointers {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* stats = nullptr;  // (batches, heads, length) fp32: log-sum-exp
  const void* dout = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  const int32_t* sequence = nullptr;  // ragged: as written by kernels::set_sequence()
  void* workspace = nullptr;
};

class SdpaGraph;

// cuDNN's graphs, one per shape, built at the shape's first use and kept. Not thread-safe.
class SdpaGraphs {
 public:
  // The device is current. Throws Error(kDevice) when cuDNN cannot be used on this machine.
  SdpaGraphs();
  ~SdpaGraphs();

  std::string version() const;
  // Null when cuDNN refuses the shape; the log then says why, once per shape.
  const SdpaGraph* find(const SdpaShape& shape);
  void execute(const SdpaGraph& graph, const SdpaPointers& pointers, cudaStream_t stream);

 private:
  struct Handle;

  std::unique_ptr<Handle> handle_;
  std::unordered_map<SdpaShape, std::unique_ptr<SdpaGraph>, SdpaShapeHash> graphs_;
};

// Workspace of one execute(), in bytes.
size_t workspace_bytes(const SdpaGraph& graph);

}  // namespace orlop
