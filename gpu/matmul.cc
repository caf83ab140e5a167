#include "gpu/matmul.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "gpu/cublas_check.h"
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

// Output tiles (rows, columns as cuBLASLt counts them) of its Hopper kernels, with the rate of each
// where it fills the chip, relative to the best: fitted to the 30 large matmuls of bench_gpu_ops on
// an H100, where it picks 0.98 of the best of eight on average, the first heuristic 0.95.
struct Tile {
  uint32_t id;
  int64_t rows, cols;
  double rate;
};
constexpr Tile kTiles[] = {
    {CUBLASLT_MATMUL_TILE_128x256, 128, 256, 1.00}, {CUBLASLT_MATMUL_TILE_256x128, 256, 128, 0.99},
    {CUBLASLT_MATMUL_TILE_192x192, 192, 192, 1.00}, {CUBLASLT_MATMUL_TILE_128x160, 128, 160, 0.92},
    {CUBLASLT_MATMUL_TILE_192x128, 192, 128, 0.96}, {CUBLASLT_MATMUL_TILE_128x192, 128, 192, 0.95},
    {CUBLASLT_MATMUL_TILE_320x128, 320, 128, 0.95}, {CUBLASLT_MATMUL_TILE_256x96, 256, 96, 0.94}};
constexpr uint32_t kSmallTile = CUBLASLT_MATMUL_TILE_128x160;
// A sum into fp32 reads and writes much for each product when k is small: a smaller tile leaves
// room to overlap the two.
constexpr int64_t kSmallSum = 4096;
constexpr double kSmallTileGain = 1.25;
// Below this many waves of the largest tile other things decide: split sums, launch cost.
constexpr int64_t kLeastWaves = 4;
constexpr int kHopper = 9;

uint32_t algorithm_attribute(const cublasLtMatmulAlgo_t& algorithm,
                             cublasLtMatmulAlgoConfigAttributes_t attribute) {
  uint32_t value = 0;
  size_t written = 0;
  ORLOP_CUBLAS(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written));
  return value;
}

// The share of the multiprocessors that work, over all waves of tiles; with the tile's own rate.
double expected_rate(const cublasLtMatmulAlgo_t& algorithm, const MatmulArgs& args,
                     int multiprocessors) {
  const uint32_t id = algorithm_attribute(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID);
  const auto* const tile = std::find_if(std::begin(kTiles), std::end(kTiles),
                                        [&](const Tile& known) { return known.id == id; });
  if (tile == std::end(kTiles) ||
      algorithm_attribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1)
    return 0;
  const int64_t tiles =
      ceil_div(args.n, tile->rows) * ceil_div(args.m, tile->cols);  // c^T: see Plan
  const int64_t waves = ceil_div(tiles, int64_t{multiprocessors});
  const double used = static_cast<double>(args.m * args.n) /
                      static_cast<double>(waves * multiprocessors * tile->rows * tile->cols);
  const bool small = args.accumulate && args.k <= kSmallSum && id == kSmallTile;
  return used * tile->rate * (small ? kSmallTileGain : 1.0);
}

// A pure function of the shape: the first of the candidates with the highest expected rate.
size_t choose_candidate(const std::vector<cublasLtMatmulAlgo_t>& candidates, const MatmulArgs& args,
                        int multiprocessors) {
  if (args.in_dtype == DType::kF32 ||
      args.m * args.n < kLeastWaves * multiprocessors * kTiles[0].rows * kTiles[0].cols)
    return 0;
  size_t best = 0;
  double best_rate = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const double rate = expected_rate(candidates[i], args, multiprocessors);
    if (rate > best_rate) {
      best = i;
      best_rate = rate;
    }
  }
  return best;
}

}  // namespace

// cuBLASLt sees column-major matrices, that is, the transposes: it computes c^T = op(b)^T op(a)^T
// with its A = b, its B = a and its m = n. A stored row-major (r, c) matrix is its column-major (c,
// r).
struct CublasMatmul::Plan {
  MatmulDesc desc;
  Layout a, b, c;  // cuBLASLt's: a is the layout of args.b
  // The chosen one, then the others in the order of the heuristics; empty: unsupported.
  std::vector<cublasLtMatmulAlgo_t> candidates;
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

CublasMatmul::CublasMatmul(int device, bool autotune) : autotune_(autotune) {
  int major = 0;
  ORLOP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major == kHopper) {
    ORLOP_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  }
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
    const size_t chosen =
        multiprocessors_ > 0 ? choose_candidate(plan->candidates, args, multiprocessors_) : 0;
    const auto begin = plan->candidates.begin();
    std::rotate(begin, begin + static_cast<std::ptrdiff_t>(chosen),
                begin + static_cast<std::ptrdiff_t>(chosen) + 1);
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
  if (args.k == 0) return kernels::plain_matmul(args, queue.stream());
  const std::lock_guard lock(mutex_);
  const Plan& plan = plan_for(queue, args);
  if (plan.candidates.empty()) return kernels::plain_matmul(args, queue.stream());
  launch(queue, plan, plan.chosen, args);
}

std::vector<float> CublasMatmul::time_plan(CudaQueue& queue, const Plan& plan,
                                           const MatmulArgs& args) const {
  constexpr int kRepeats = 7;
  constexpr int kCalls = 3;  // between two events
  const CudaEventHandle begin(cudaEventDefault);
  const CudaEventHandle end(cudaEventDefault);
  // In turns: the clock of a chip that has just been busy is lower.
  std::vector<std::vector<float>> times(plan.candidates.size());
  for (int repeat = -1; repeat < kRepeats; ++repeat) {
    for (size_t i = 0; i < plan.candidates.size(); ++i) {
      ORLOP_CUDA(cudaEventRecord(begin.get(), queue.stream()));
      for (int call = 0; call < kCalls; ++call) launch(queue, plan, plan.candidates[i], args);
      ORLOP_CUDA(cudaEventRecord(end.get(), queue.stream()));
      ORLOP_CUDA(cudaEventSynchronize(end.get()));
      float ms = 0;
      ORLOP_CUDA(cudaEventElapsedTime(&ms, begin.get(), end.get()));
      if (repeat >= 0) times[i].push_back(ms / kCalls);
    }
  }
  std::vector<float> result;
  for (std::vector<float>& ms : times) {
    std::nth_element(ms.begin(), ms.begin() + kRepeats / 2, ms.end());
    result.push_back(ms[kRepeats / 2]);
  }
  return result;
}

std::vector<float> CublasMatmul::time_candidates(CudaQueue& queue, const MatmulArgs& args) {
  const std::lock_guard lock(mutex_);
  return time_plan(queue, plan_for(queue, args), args);
}

}  // namespace orlop
