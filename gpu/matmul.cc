#include "gpu/matmul.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "gpu/cuda_check.h"
#include "gpu/kernels/kernels.h"

namespace orlop {
namespace {

cudaDataType_t cuda_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      fail(ErrorCode::kUsage, "matmul: dtype {} is not F32, BF16 or F16", dtype_name(dtype));
  }
}

// Owners of cuBLASLt's descriptors.
template <typename Handle, cublasStatus_t (*kDestroy)(Handle)>
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (handle_ != nullptr) kDestroy(handle_);
  }
  Handle* out() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};
using MatmulDesc = Descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <typename Value>
void set_desc(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute,
              const Value& value) {
  ORLOP_CUBLAS(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}

template <typename Value>
void set_preference(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
                    const Value& value) {
  ORLOP_CUBLAS(
      cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

// The largest power of two up to 256 that divides the address.
uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  uint32_t alignment = 256;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

uint32_t alignment_log2(const void* p) {
  return static_cast<uint32_t>(__builtin_ctz(alignment_of(p)));
}

}  // namespace

// cuBLASLt sees column-major matrices, that is, the transposes: it computes c^T = op(b)^T op(a)^T
// with its A = b, its B = a and its m = n. A stored row-major (r, c) matrix is its column-major (c,
// r).
struct CublasMatmul::Plan {
  MatmulDesc desc;
  Layout a, b, c;  // cuBLASLt's: a is the layout of args.b
  std::vector<cublasLtMatmulAlgo_t>
      candidates;  // in the order of the heuristics; empty: unsupported
  cublasLtMatmulAlgo_t chosen{};
  bool bias_apart = false;  // no algorithm adds this bias
};

size_t CublasMatmul::KeyHash::operator()(const Key& key) const {
  uint64_t hash = key.flags;
  for (const int64_t value : {key.m, key.n, key.k, key.lda, key.ldb, key.ldc}) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

CublasMatmul::Key CublasMatmul::make_key(const MatmulArgs& args) {
  uint32_t flags = static_cast<uint32_t>(args.in_dtype);
  flags = flags << 4 | static_cast<uint32_t>(args.out_dtype);
  flags = flags << 1 | static_cast<uint32_t>(args.trans_a);
  flags = flags << 1 | static_cast<uint32_t>(args.trans_b);
  flags = flags << 1 | static_cast<uint32_t>(args.accumulate);
  flags = flags << 1 | static_cast<uint32_t>(args.bias != nullptr);
  flags = flags << 4 | alignment_log2(args.a);
  flags = flags << 4 | alignment_log2(args.b);
  flags = flags << 4 | alignment_log2(args.c);
  flags = flags << 4 | (args.bias != nullptr ? alignment_log2(args.bias) : 0u);
  return {args.m, args.n, args.k, args.lda, args.ldb, args.ldc, flags};
}

CublasMatmul::CublasMatmul(bool autotune) : autotune_(autotune) {
  ORLOP_CUBLAS(cublasLtCreate(&handle_));
}

CublasMatmul::~CublasMatmul() {
  plans_.clear();
  cublasLtDestroy(handle_);
}

std::unique_ptr<CublasMatmul::Plan> CublasMatmul::make_plan(const MatmulArgs& args) const {
  auto plan = std::make_unique<Plan>();
  // fp32 sums for every dtype; fp32 operands stay fp32 (TF32 has a compute type of its own).
  ORLOP_CUBLAS(cublasLtMatmulDescCreate(plan->desc.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set_desc(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, args.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_desc(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, args.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);

  const auto create_layout = [](Layout& layout, DType dtype, int64_t rows, int64_t cols,
                                int64_t ld) {
    ORLOP_CUBLAS(cublasLtMatrixLayoutCreate(layout.out(), cuda_dtype(dtype),
                                            static_cast<uint64_t>(rows),
                                            static_cast<uint64_t>(cols), ld));
  };
  const auto [b_rows, b_cols] =
      args.trans_b ? std::pair(args.k, args.n) : std::pair(args.n, args.k);
  const auto [a_rows, a_cols] =
      args.trans_a ? std::pair(args.m, args.k) : std::pair(args.k, args.m);
  create_layout(plan->a, args.in_dtype, b_rows, b_cols, args.ldb);
  create_layout(plan->b, args.in_dtype, a_rows, a_cols, args.lda);
  create_layout(plan->c, args.out_dtype, args.n, args.m, args.ldc);

  Preference preference;
  ORLOP_CUBLAS(cublasLtMatmulPreferenceCreate(preference.out()));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
  // Parts of a split sum are added in fp32, never in the output's dtype.
  set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(args.b));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(args.a));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(args.c));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(args.c));

  const auto ask = [&] {
    cublasLtMatmulHeuristicResult_t results[kCandidates] = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, plan->desc.get(), plan->a.get(), plan->b.get(), plan->c.get(), plan->c.get(),
        preference.get(), kCandidates, results, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return;
    for (int i = 0; i < count; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS) plan->candidates.push_back(results[i].algo);
    }
  };
  if (args.bias != nullptr) {
    set_desc(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set_desc(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_dtype(args.in_dtype));
    set_desc(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
    ask();
    if (plan->candidates.empty()) {
      plan->bias_apart = true;
      set_desc(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
    }
  }
  if (plan->candidates.empty()) ask();
  if (plan->candidates.empty()) {
    log_info("matmul {}x{}x{} {} -> {}: cuBLASLt has no algorithm, a plain kernel is used", args.m,
             args.n, args.k, dtype_name(args.in_dtype), dtype_name(args.out_dtype));
  } else {
    plan->chosen = plan->candidates.front();
  }
  return plan;
}

const CublasMatmul::Plan& CublasMatmul::plan_for(CudaQueue& queue, const MatmulArgs& args) {
  auto& plan = plans_[make_key(args)];
  if (plan == nullptr) {
    plan = make_plan(args);
    if (autotune_ && !args.accumulate && plan->candidates.size() > 1) {
      const std::vector<float> ms = time_plan(queue, *plan, args);
      plan->chosen = plan->candidates[static_cast<size_t>(std::min_element(ms.begin(), ms.end()) -
                                                          ms.begin())];
    }
  }
  return *plan;
}

void CublasMatmul::launch(CudaQueue& queue, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                          const MatmulArgs& args) const {
  const float alpha = 1.0f;
  const float beta = args.accumulate ? 1.0f : 0.0f;
  if (args.bias != nullptr && !plan.bias_apart) {
    set_desc(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  }
  void* workspace = queue.workspace(kWorkspaceBytes, "matmul");
  ORLOP_CUBLAS(cublasLtMatmul(handle_, plan.desc.get(), &alpha, args.b, plan.a.get(), args.a,
                              plan.b.get(), &beta, args.c, plan.c.get(), args.c, plan.c.get(),
                              &algorithm, workspace, kWorkspaceBytes, queue.stream()));
  if (plan.bias_apart) kernels::add_bias(args, queue.stream());
}

void CublasMatmul::run(CudaQueue& queue, const MatmulArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  check(!args.accumulate || args.out_dtype == DType::kF32, ErrorCode::kUsage,
        "matmul {}x{}x{}: accumulation needs an F32 result, not {}", args.m, args.n, args.k,
        dtype_name(args.out_dtype));
  if (args.k == 0) return kernels::plain_matmul(args, queue.stream());
  const std::lock_guard lock(mutex_);
  const Plan& plan = plan_for(queue, args);
  if (plan.candidates.empty()) return kernels::plain_matmul(args, queue.stream());
  launch(queue, plan, plan.chosen, args);
}

std::vector<float> CublasMatmul::time_plan(CudaQueue& queue, const Plan& plan,
                                           const MatmulArgs& args) const {
  constexpr int kRepeats = 5;
  constexpr int kCalls = 4;  // between two events
  const CudaEventHandle begin(cudaEventDefault);
  const CudaEventHandle end(cudaEventDefault);
  std::vector<float> result;
  for (const cublasLtMatmulAlgo_t& algorithm : plan.candidates) {
    launch(queue, plan, algorithm, args);
    std::vector<float> times(kRepeats);
    for (float& ms : times) {
      ORLOP_CUDA(cudaEventRecord(begin.get(), queue.stream()));
      for (int i = 0; i < kCalls; ++i) launch(queue, plan, algorithm, args);
      ORLOP_CUDA(cudaEventRecord(end.get(), queue.stream()));
      ORLOP_CUDA(cudaEventSynchronize(end.get()));
      ORLOP_CUDA(cudaEventElapsedTime(&ms, begin.get(), end.get()));
      ms /= kCalls;
    }
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    result.push_back(times[kRepeats / 2]);
  }
  return result;
}

std::vector<float> CublasMatmul::time_candidates(CudaQueue& queue, const MatmulArgs& args) {
  const std::lock_guard lock(mutex_);
  return time_plan(queue, plan_for(queue, args), args);
}

}  // namespace orlop
