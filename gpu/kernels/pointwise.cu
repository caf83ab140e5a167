#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

// Rotary embedding, activations, addition and permutation: every element is read once and written
// once.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;

// One block per row; a thread rotates N pairs of one head at a time.
template <typename T, int N>
__global__ void __launch_bounds__(kBlock) rope_kernel(RopeArgs args) {
  const int half = static_cast<int>(args.rotary_dim / 2);
  const int per_head = half / N;
  const int pieces = static_cast<int>(args.heads) * per_head;
  const float sign = args.inverse ? -1.0f : 1.0f;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    T* x_row = static_cast<T*>(args.x) + row * args.row_stride;
    const float* cos_sin = args.cos_sin + int64_t{args.positions[row]} * args.rotary_dim;
    for (int piece = static_cast<int>(threadIdx.x); piece < pieces; piece += kBlock) {
      const int head = piece / per_head;
      const int pair = (piece - head * per_head) * N;
      T* first = x_row + head * args.head_dim + pair;
      T* second = first + half;
      float a[N], b[N];
      load_float(first, a);
      load_float(second, b);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float2 turn = *reinterpret_cast<const float2*>(cos_sin + (pair + i) * 2);
        const float sine = sign * turn.y;
        const float rotated = a[i] * turn.x - b[i] * sine;
        b[i] = b[i] * turn.x + a[i] * sine;
        a[i] = rotated;
      }
      store_float(first, a);
      store_float(second, b);
    }
  }
}

constexpr float kInverseSqrt2 = 0.70710678118654752f;
constexpr float kInverseSqrt2Pi = 0.39894228040143268f;
constexpr float kGeluTanhScale = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kGeluTanhCubic = 0.044715f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <Activation kKind>
__device__ __forceinline__ float gelu(float x) {
  if constexpr (kKind == Activation::kGelu) {
    return 0.5f * x * (1.0f + erff(x * kInverseSqrt2));
  } else {
    const float inner = kGeluTanhScale * (x + kGeluTanhCubic * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
  }
}

template <Activation kKind>
__device__ __forceinline__ float gelu_derivative(float x) {
  if constexpr (kKind == Activation::kGelu) {
    return 0.5f * (1.0f + erff(x * kInverseSqrt2)) + x * kInverseSqrt2Pi * expf(-0.5f * x * x);
  } else {
    const float inner = kGeluTanhScale * (x + kGeluTanhCubic * x * x * x);
    const float t = tanhf(inner);
    const float slope = kGeluTanhScale * (1.0f + 3.0f * kGeluTanhCubic * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
  }
}

// Walks over (rows, width) in pieces of N columns: x over columns, y over rows.
template <int N, typename Body>
__device__ __forceinline__ void for_each_piece(int64_t rows, int64_t width, Body&& body) {
  const int64_t first = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * N;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t col = first; col < width; col += int64_t{gridDim.x} * kBlock * N) body(row, col);
  }
}

template <typename T, int N, Activation kKind>
__global__ void __launch_bounds__(kBlock) activation_forward_kernel(ActivationArgs args) {
  const T* in = static_cast<const T*>(args.in);
  T* out = static_cast<T*>(args.out);
  const int64_t width = args.width;
  for_each_piece<N>(args.rows, width, [&](int64_t row, int64_t col) {
    float result[N];
    if constexpr (kKind == Activation::kSwiGlu) {
      float gate[N], up[N];
      load_float(in + row * 2 * width + col, gate);
      load_float(in + row * 2 * width + width + col, up);
#pragma unroll
      for (int i = 0; i < N; ++i) result[i] = gate[i] * sigmoid(gate[i]) * up[i];
    } else {
      float x[N];
      load_float(in + row * width + col, x);
#pragma unroll
      for (int i = 0; i < N; ++i) result[i] = gelu<kKind>(x[i]);
    }
    store_float(out + row * width + col, result);
  });
}

// A thread reads its elements of `in` before it writes them to `din`: the two may be one buffer.
template <typename T, int N, Activation kKind>
__global__ void __launch_bounds__(kBlock) activation_backward_kernel(ActivationArgs args) {
  const T* in = static_cast<const T*>(args.in);
  const T* dout = static_cast<const T*>(args.dout);
  T* din = static_cast<T*>(args.din);
  const int64_t width = args.width;
  for_each_piece<N>(args.rows, width, [&](int64_t row, int64_t col) {
    float dy[N];
    load_float(dout + row * width + col, dy);
    if constexpr (kKind == Activation::kSwiGlu) {
      const int64_t at = row * 2 * width + col;
      float gate[N], up[N], dgate[N], dup[N];
      load_float(in + at, gate);
      load_float(in + at + width, up);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float s = sigmoid(gate[i]);
        dup[i] = dy[i] * gate[i] * s;
        dgate[i] = dy[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
      }
      store_float(din + at, dgate);
      store_float(din + at + width, dup);
    } else {
      float x[N], dx[N];
      load_float(in + row * width + col, x);
#pragma unroll
      for (int i = 0; i < N; ++i) dx[i] = dy[i] * gelu_derivative<kKind>(x[i]);
      store_float(din + row * width + col, dx);
    }
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kBlock) add_kernel(T* to, const T* from, int64_t numel) {
  const int64_t step = int64_t{gridDim.x} * kBlock * N;
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * N; i < numel; i += step) {
    if (i + N <= numel) {
      float a[N], b[N];
      load_float(to + i, a);
      load_float(from + i, b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] += b[k];
      store_float(to + i, a);
    } else {
      for (int64_t k = i; k < numel; ++k) {
        to[k] = from_float<T>(to_float(to[k]) + to_float(from[k]));
      }
    }
  }
}

__global__ void __launch_bounds__(kBlock) permute_kernel(PermuteArgs args) {
  const int64_t numel = args.outer * args.rows * args.cols;
  const int64_t step = int64_t{gridDim.x} * kBlock;
  for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < numel; i += step) {
    const int64_t col = i % args.cols;
    const int64_t row = i / args.cols % args.rows;
    const int64_t outer = i / args.cols / args.rows;
    args.to[outer * args.to_outer + row * args.to_row + col * args.to_col] =
        args.from[outer * args.from_outer + row * args.from_row + col * args.from_col];
  }
}

__global__ void set_sequence_kernel(SequenceArgs args, int32_t* slot) {
  const int64_t ends[4] = {args.length, args.length * args.q_stride, args.length * args.kv_stride,
                           args.length * args.out_stride};
  slot[0] = static_cast<int32_t>(ends[0]);
  for (int i = 1; i < 4; ++i) {
    slot[4 * i] = 0;
    slot[4 * i + 1] = static_cast<int32_t>(ends[i]);
  }
}

dim3 piece_grid(int64_t rows, int64_t width, int per_thread) {
  return dim3(grid_blocks(width, int64_t{kBlock} * per_thread, 65535),
              static_cast<unsigned>(std::min<int64_t>(rows, 65535)));
}

// Calls launch.template operator()<Activation>().
template <typename Launch>
void dispatch_activation(Activation kind, Launch&& launch) {
  switch (kind) {
    case Activation::kSwiGlu:
      return launch.template operator()<Activation::kSwiGlu>();
    case Activation::kGeluTanh:
      return launch.template operator()<Activation::kGeluTanh>();
    case Activation::kGelu:
      return launch.template operator()<Activation::kGelu>();
  }
}

}  // namespace

void rope(const RopeArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.heads == 0 || args.rotary_dim == 0) return;
  dispatch_float(args.dtype, "rope", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const unsigned blocks = grid_blocks(args.rows, 1);
    const bool vectors = args.rotary_dim / 2 % kWide == 0 && args.head_dim % kWide == 0 &&
                         args.row_stride % kWide == 0 && is_aligned(args.x, 16);
    if (vectors) {
      rope_kernel<T, kWide><<<blocks, kBlock, 0, stream>>>(args);
    } else {
      rope_kernel<T, 1><<<blocks, kBlock, 0, stream>>>(args);
    }
    ORLOP_CUDA_LAUNCHED("rope_kernel");
  });
}

void activation_forward(const ActivationArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.width == 0) return;
  dispatch_float(args.dtype, "activation_forward", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const bool vectors =
        args.width % kWide == 0 && is_aligned(args.in, 16) && is_aligned(args.out, 16);
    dispatch_activation(args.kind, [&]<Activation kKind>() {
      if (vectors) {
        activation_forward_kernel<T, kWide, kKind>
            <<<piece_grid(args.rows, args.width, kWide), kBlock, 0, stream>>>(args);
      } else {
        activation_forward_kernel<T, 1, kKind>
            <<<piece_grid(args.rows, args.width, 1), kBlock, 0, stream>>>(args);
      }
      ORLOP_CUDA_LAUNCHED("activation_forward_kernel");
    });
  });
}

void activation_backward(const ActivationArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.width == 0) return;
  dispatch_float(args.dtype, "activation_backward", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const bool vectors = args.width % kWide == 0 && is_aligned(args.in, 16) &&
                         is_aligned(args.dout, 16) && is_aligned(args.din, 16);
    dispatch_activation(args.kind, [&]<Activation kKind>() {
      if (vectors) {
        activation_backward_kernel<T, kWide, kKind>
            <<<piece_grid(args.rows, args.width, kWide), kBlock, 0, stream>>>(args);
      } else {
        activation_backward_kernel<T, 1, kKind>
            <<<piece_grid(args.rows, args.width, 1), kBlock, 0, stream>>>(args);
      }
      ORLOP_CUDA_LAUNCHED("activation_backward_kernel");
    });
  });
}

void add(void* to, const void* from, int64_t numel, DType dtype, cudaStream_t stream) {
  if (numel == 0) return;
  dispatch_float(dtype, "add", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    T* out = static_cast<T*>(to);
    const T* in = static_cast<const T*>(from);
    if (is_aligned(to, 16) && is_aligned(from, 16)) {
      add_kernel<T, kWide>
          <<<grid_blocks(numel, int64_t{kBlock} * kWide), kBlock, 0, stream>>>(out, in, numel);
    } else {
      add_kernel<T, 1><<<grid_blocks(numel, kBlock), kBlock, 0, stream>>>(out, in, numel);
    }
    ORLOP_CUDA_LAUNCHED("add_kernel");
  });
}

void permute(const PermuteArgs& args, cudaStream_t stream) {
  const int64_t numel = args.outer * args.rows * args.cols;
  if (numel == 0) return;
  permute_kernel<<<grid_blocks(numel, kBlock), kBlock, 0, stream>>>(args);
  ORLOP_CUDA_LAUNCHED("permute_kernel");
}

void set_sequence(const SequenceArgs& args, int32_t* slot, cudaStream_t stream) {
  set_sequence_kernel<<<1, 1, 0, stream>>>(args, slot);
  ORLOP_CUDA_LAUNCHED("set_sequence_kernel");
}

}  // namespace orlop::kernels
