#include "host/reference_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/element_types.h"

namespace orlop::host {
namespace {

template <typename T>
double get(const void* base, int64_t index) {
  return static_cast<double>(T::load(static_cast<const typename T::Storage*>(base)[index]));
}

template <typename T>
void put(void* base, int64_t index, double value) {
  static_cast<typename T::Storage*>(base)[index] = T::store(static_cast<float>(value));
}

// Row i of a (rows, width) times row j of b.
template <typename T>
double dot(const void* a, int64_t a_offset, const void* b, int64_t b_offset, int64_t width) {
  double total = 0;
  for (int64_t c = 0; c < width; ++c) total += get<T>(a, a_offset + c) * get<T>(b, b_offset + c);
  return total;
}

template <typename T>
double score(const AttentionHead& h, int64_t query, int64_t key) {
  return static_cast<double>(h.scale) *
         dot<T>(h.q, query * h.q_stride, h.k, key * h.kv_stride, h.head_dim);
}

struct PairGradient {
  double probability;
  double dscore;  // with respect to q . k
};

template <typename T>
PairGradient pair_gradient(const AttentionHeadBackward& b, int64_t query, int64_t key) {
  const AttentionHead& h = b.forward;
  const int64_t row = query * h.out_stride;
  const double probability = std::exp(score<T>(h, query, key) - static_cast<double>(h.lse[query]));
  const double dprobability = dot<T>(b.dout, row, h.v, key * h.kv_stride, h.head_dim);
  const double delta = dot<T>(b.dout, row, h.out, row, h.head_dim);
  return {probability, probability * (dprobability - delta) * static_cast<double>(h.scale)};
}

}  // namespace

int64_t reference_attention_scratch(int64_t head_dim, int64_t max_length, bool /*backward*/) {
  return 2 * (max_length + 2 * head_dim);  // in floats; used as doubles
}

template <typename T>
void reference_attention_forward(const AttentionHead& h, int64_t block, float* scratch) {
  auto* scores = reinterpret_cast<double*>(scratch);
  const int64_t begin = block * kAttentionBlock;
  for (int64_t q = begin; q < std::min(begin + kAttentionBlock, h.length); ++q) {
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t k = 0; k <= q; ++k) {
      scores[k] = score<T>(h, q, k);
      highest = std::fmax(highest, scores[k]);
    }
    double total = 0;
    for (int64_t k = 0; k <= q; ++k) total += std::exp(scores[k] - highest);
    for (int64_t c = 0; c < h.head_dim; ++c) {
      double out = 0;
      for (int64_t k = 0; k <= q; ++k) {
        out += std::exp(scores[k] - highest) / total * get<T>(h.v, k * h.kv_stride + c);
      }
      put<T>(h.out, q * h.out_stride + c, out);
    }
    h.lse[q] = static_cast<float>(highest + std::log(total));
  }
}

template <typename T>
void reference_attention_backward(const AttentionHeadBackward& b, float* scratch) {
  const AttentionHead& h = b.forward;
  auto* first = reinterpret_cast<double*>(scratch);
  auto* second = first + h.head_dim;
  for (int64_t q = 0; q < h.length; ++q) {
    std::fill_n(first, h.head_dim, 0.0);
    for (int64_t k = 0; k <= q; ++k) {
      const double dscore = pair_gradient<T>(b, q, k).dscore;
      for (int64_t c = 0; c < h.head_dim; ++c)
        first[c] += dscore * get<T>(h.k, k * h.kv_stride + c);
    }
    for (int64_t c = 0; c < h.head_dim; ++c) put<T>(b.dq, q * h.q_stride + c, first[c]);
  }
  for (int64_t k = 0; k < h.length; ++k) {
    std::fill_n(first, h.head_dim, 0.0);
    std::fill_n(second, h.head_dim, 0.0);
    for (int64_t q = k; q < h.length; ++q) {
      const PairGradient pair = pair_gradient<T>(b, q, k);
      for (int64_t c = 0; c < h.head_dim; ++c) {
        first[c] += pair.dscore * get<T>(h.q, q * h.q_stride + c);
        second[c] += pair.probability * get<T>(b.dout, q * h.out_stride + c);
      }
    }
    for (int64_t c = 0; c < h.head_dim; ++c) {
      b.dk[k * b.partial_stride + c] = static_cast<float>(first[c]);
      b.dv[k * b.partial_stride + c] = static_cast<float>(second[c]);
    }
  }
}

template void reference_attention_forward<Float32>(const AttentionHead&, int64_t, float*);
template void reference_attention_forward<Float16>(const AttentionHead&, int64_t, float*);
template void reference_attention_forward<BFloat16>(const AttentionHead&, int64_t, float*);
template void reference_attention_backward<Float32>(const AttentionHeadBackward&, float*);
template void reference_attention_backward<Float16>(const AttentionHeadBackward&, float*);
template void reference_attention_backward<BFloat16>(const AttentionHeadBackward&, float*);

}  // namespace orlop::host
