#include "ops_reference.h"

#include <cmath>

namespace orlop::test {
namespace {

size_t at(int64_t index) { return static_cast<size_t>(index); }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

const double kPi = std::acos(-1.0);

}  // namespace

Values reference_matmul(const Values& a, const Values& b, int64_t m, int64_t n, int64_t k,
                        bool trans_a, bool trans_b) {
  Values c(at(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double total = 0;
      for (int64_t p = 0; p < k; ++p) {
        total += a[at(trans_a ? p * m + i : i * k + p)] * b[at(trans_b ? j * k + p : p * n + j)];
      }
      c[at(i * n + j)] = total;
    }
  }
  return c;
}

NormResult reference_norm(const NormShape& shape, const Values& x, const Values& weight,
                          const Values& bias) {
  NormResult result{Values(x.size()), Values(at(shape.rows)), Values(at(shape.rows))};
  const auto count = static_cast<double>(shape.cols);
  for (int64_t r = 0; r < shape.rows; ++r) {
    const double* row = x.data() + r * shape.cols;
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < shape.cols; ++c) mean += shape.center ? row[c] / count : 0.0;
    for (int64_t c = 0; c < shape.cols; ++c) variance += (row[c] - mean) * (row[c] - mean) / count;
    const double rstd = 1.0 / std::sqrt(variance + shape.eps);
    for (int64_t c = 0; c < shape.cols; ++c) {
      const double shift = bias.empty() ? 0.0 : bias[at(c)];
      result.y[at(r * shape.cols + c)] = (row[c] - mean) * rstd * weight[at(c)] + shift;
    }
    result.rstd[at(r)] = rstd;
    result.mean[at(r)] = mean;
  }
  return result;
}

// From the Jacobian of y with respect to x, entry by entry: with n = (x - mean) * rstd,
// dn_i / dx_j = rstd * ([i == j] - [center] / cols - n_i n_j / cols).
NormGradients reference_norm_backward(const NormShape& shape, const Values& x, const Values& weight,
                                      const Values& dy) {
  const NormResult forward = reference_norm(shape, x, weight, {});
  NormGradients result{Values(x.size()), Values(at(shape.cols)), Values(at(shape.cols))};
  const auto count = static_cast<double>(shape.cols);
  Values n(at(shape.cols));
  for (int64_t r = 0; r < shape.rows; ++r) {
    const int64_t base = r * shape.cols;
    for (int64_t c = 0; c < shape.cols; ++c) {
      n[at(c)] = (x[at(base + c)] - forward.mean[at(r)]) * forward.rstd[at(r)];
      result.dweight[at(c)] += dy[at(base + c)] * n[at(c)];
      result.dbias[at(c)] += dy[at(base + c)];
    }
    for (int64_t j = 0; j < shape.cols; ++j) {
      double total = 0;
      for (int64_t i = 0; i < shape.cols; ++i) {
        const double jacobian =
            (i == j ? 1.0 : 0.0) - (shape.center ? 1.0 / count : 0.0) - n[at(i)] * n[at(j)] / count;
        total += dy[at(base + i)] * weight[at(i)] * forward.rstd[at(r)] * jacobian;
      }
      result.dx[at(base + j)] = total;
    }
  }
  return result;
}

namespace {

// Calls visit(query_row, key_row) for every pair that attends.
template <typename Visit>
void for_each_query(const AttentionCase& shape, Visit&& visit) {
  for (size_t s = 0; s + 1 < shape.cu_seqlens.size(); ++s) {
    for (int64_t q = shape.cu_seqlens[s]; q < shape.cu_seqlens[s + 1]; ++q) {
      visit(q, int64_t{shape.cu_seqlens[s]});
    }
  }
}

// Probabilities of one query over the keys first .. query, and the log of their denominator.
Values probabilities(const AttentionCase& shape, const Values& q, const Values& k, int64_t query,
                     int64_t first, int64_t head, double* lse) {
  const int64_t kv_head = head / (shape.heads / shape.kv_heads);
  Values p;
  double total = 0;
  for (int64_t key = first; key <= query; ++key) {
    double score = 0;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      score += q[at((query * shape.heads + head) * shape.head_dim + d)] *
               k[at((key * shape.kv_heads + kv_head) * shape.head_dim + d)];
    }
    p.push_back(std::exp(score * shape.scale));
    total += p.back();
  }
  for (double& value : p) value /= total;
  *lse = std::log(total);
  return p;
}

}  // namespace

AttentionResult reference_attention(const AttentionCase& shape, const Values& q, const Values& k,
                                    const Values& v) {
  const int64_t width = shape.head_dim;
  AttentionResult result{Values(q.size()), Values(at(shape.heads * shape.rows()))};
  for_each_query(shape, [&](int64_t query, int64_t first) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      const int64_t kv_head = head / (shape.heads / shape.kv_heads);
      double* lse = &result.lse[at(head * shape.rows() + query)];
      const Values p = probabilities(shape, q, k, query, first, head, lse);
      for (int64_t key = first; key <= query; ++key) {
        for (int64_t d = 0; d < width; ++d) {
          result.out[at((query * shape.heads + head) * width + d)] +=
              p[at(key - first)] * v[at((key * shape.kv_heads + kv_head) * width + d)];
        }
      }
    }
  });
  return result;
}

AttentionGradients reference_attention_backward(const AttentionCase& shape, const Values& q,
                                                const Values& k, const Values& v,
                                                const Values& dout) {
  const int64_t width = shape.head_dim;
  AttentionGradients result{Values(q.size()), Values(k.size()), Values(v.size())};
  for_each_query(shape, [&](int64_t query, int64_t first) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      const int64_t q_base = (query * shape.heads + head) * width;
      double lse = 0;
      const Values p = probabilities(shape, q, k, query, first, head, &lse);
      const int64_t kv_head = head / (shape.heads / shape.kv_heads);
      Values dp(p.size());
      double average = 0;  // of dp under p: the softmax Jacobian subtracts it
      for (int64_t key = first; key <= query; ++key) {
        const int64_t kv_base = (key * shape.kv_heads + kv_head) * width;
        for (int64_t d = 0; d < width; ++d) {
          dp[at(key - first)] += dout[at(q_base + d)] * v[at(kv_base + d)];
          result.dv[at(kv_base + d)] += p[at(key - first)] * dout[at(q_base + d)];
        }
        average += p[at(key - first)] * dp[at(key - first)];
      }
      for (int64_t key = first; key <= query; ++key) {
        const int64_t kv_base = (key * shape.kv_heads + kv_head) * width;
        const double dscore = p[at(key - first)] * (dp[at(key - first)] - average) * shape.scale;
        for (int64_t d = 0; d < width; ++d) {
          result.dq[at(q_base + d)] += dscore * k[at(kv_base + d)];
          result.dk[at(kv_base + d)] += dscore * q[at(q_base + d)];
        }
      }
    }
  });
  return result;
}

Values reference_rope(const Values& x, const std::vector<int32_t>& positions, const Values& cos_sin,
                      int64_t heads, int64_t head_dim, int64_t rotary_dim) {
  Values result = x;
  const int64_t half = rotary_dim / 2;
  for (size_t r = 0; r < positions.size(); ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < half; ++c) {
        const size_t low = at((static_cast<int64_t>(r) * heads + h) * head_dim + c);
        const size_t high = low + at(half);
        const double cosine = cos_sin[at((positions[r] * half + c) * 2)];
        const double sine = cos_sin[at((positions[r] * half + c) * 2 + 1)];
        result[low] = x[low] * cosine - x[high] * sine;
        result[high] = x[high] * cosine + x[low] * sine;
      }
    }
  }
  return result;
}

Values reference_activation(Activation kind, const Values& in, int64_t rows, int64_t width) {
  Values out(at(rows * width));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      if (kind == Activation::kSwiGlu) {
        const double gate = in[at(r * 2 * width + c)];
        out[at(r * width + c)] = gate * sigmoid(gate) * in[at(r * 2 * width + width + c)];
        continue;
      }
      const double x = in[at(r * width + c)];
      const double inner = kind == Activation::kGelu
                               ? std::erf(x / std::sqrt(2.0))
                               : std::tanh(std::sqrt(2.0 / kPi) * (x + 0.044715 * x * x * x));
      out[at(r * width + c)] = 0.5 * x * (1.0 + inner);
    }
  }
  return out;
}

Values reference_activation_backward(Activation kind, const Values& in, const Values& dout,
                                     int64_t rows, int64_t width) {
  Values din(in.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      const double d = dout[at(r * width + c)];
      if (kind == Activation::kSwiGlu) {
        const size_t gate = at(r * 2 * width + c), up = gate + at(width);
        const double s = sigmoid(in[gate]);
        din[gate] = d * in[up] * (s + in[gate] * s * (1.0 - s));
        din[up] = d * in[gate] * s;
        continue;
      }
      const double x = in[at(r * width + c)];
      double slope = 0;
      if (kind == Activation::kGelu) {
        slope = 0.5 * (1.0 + std::erf(x / std::sqrt(2.0))) +
                x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * kPi);
      } else {
        const double factor = std::sqrt(2.0 / kPi);
        const double t = std::tanh(factor * (x + 0.044715 * x * x * x));
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * factor * (1.0 + 0.134145 * x * x);
      }
      din[at(r * width + c)] = d * slope;
    }
  }
  return din;
}

CrossEntropyResult reference_cross_entropy(const Values& logits, const std::vector<int32_t>& labels,
                                           int64_t vocab, double scale) {
  CrossEntropyResult result{Values(labels.size()), Values(logits.size())};
  for (size_t r = 0; r < labels.size(); ++r) {
    if (labels[r] < 0) continue;
    const double* row = logits.data() + r * at(vocab);
    double total = 0;
    for (int64_t c = 0; c < vocab; ++c) total += std::exp(row[c]);
    result.loss[r] = std::log(total) - row[labels[r]];
    for (int64_t c = 0; c < vocab; ++c) {
      const double hot = c == labels[r] ? 1.0 : 0.0;
      result.gradient[r * at(vocab) + at(c)] = scale * (std::exp(row[c]) / total - hot);
    }
  }
  return result;
}

}  // namespace orlop::test
