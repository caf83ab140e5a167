// Causal attention of one head in fp32, in blocks that stay in the second-level cache; never the
// whole score matrix (Dao et al. 2022). Included after kernels.inl.h.

// A register tile of the block product: R rows by V registers.
typedef float Lanes __attribute__((vector_size(4 * ORLOP_LANES), aligned(4), may_alias));

template <int R, int V>
inline void product_tile(const BlockProduct& p, const float* a, const float* b, float* c) {
  Lanes sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      const Lanes old = *reinterpret_cast<const Lanes*>(c + r * p.ldc + v * ORLOP_LANES);
      sum[r][v] = p.accumulate ? old : Lanes{};
    }
  }
  for (int64_t k = 0; k < p.k; ++k) {
    Lanes right[V];
    for (int v = 0; v < V; ++v) {
      right[v] = *reinterpret_cast<const Lanes*>(b + k * p.ldb + v * ORLOP_LANES);
    }
    for (int r = 0; r < R; ++r) {
      const float left = a[r * p.a_row + k * p.a_col];
      for (int v = 0; v < V; ++v) sum[r][v] += right[v] * left;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      *reinterpret_cast<Lanes*>(c + r * p.ldc + v * ORLOP_LANES) = sum[r][v];
    }
  }
}

template <int V>
inline void product_columns(const BlockProduct& p, int64_t column) {
  const float* b = p.b + column;
  int64_t row = 0;
  for (; row + 6 <= p.m; row += 6) {
    product_tile<6, V>(p, p.a + row * p.a_row, b, p.c + row * p.ldc + column);
  }
  for (; row + 2 <= p.m; row += 2) {
    product_tile<2, V>(p, p.a + row * p.a_row, b, p.c + row * p.ldc + column);
  }
  if (row < p.m) product_tile<1, V>(p, p.a + row * p.a_row, b, p.c + row * p.ldc + column);
}

// AVX-512 has 32 registers: 6 x 4 sums; the narrower sets have 16: 6 x 2.
inline constexpr int kTileRegisters = ORLOP_LANES == 16 ? 4 : 2;

void block_product(const BlockProduct& p) {
  constexpr int64_t kWide = kTileRegisters * ORLOP_LANES;
  int64_t column = 0;
  for (; column + kWide <= p.n; column += kWide) product_columns<kTileRegisters>(p, column);
  for (; column < p.n; column += ORLOP_LANES) product_columns<1>(p, column);
}

inline constexpr int64_t kTile = kAttentionBlock;  // queries and keys of one block

inline int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline void zero(float* to, int64_t n) {
  __builtin_memset(to, 0, static_cast<size_t>(n) * sizeof(float));
}

// (rows, width) elements to fp32 rows of `ld` >= width, the rest of each row zero.
template <typename T>
void load_rows(const void* from, int64_t stride, int64_t rows, int64_t width, float* to,
               int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    widen<T>(elements<T>(from) + r * stride, to + r * ld, width);
    zero(to + r * ld + width, ld - width);
  }
}

// (rows, width) elements to (width, kTile) fp32, multiplied by `factor`; columns from `rows` on are
// zero.
template <typename T>
void load_transposed(const void* from, int64_t stride, int64_t rows, int64_t width, float factor,
                     float* to) {
  if (rows < kTile) zero(to, width * kTile);
  for (int64_t r = 0; r < rows; ++r) {
    const auto* row = elements<T>(from) + r * stride;
    for (int64_t c = 0; c < width; ++c) to[c * kTile + r] = T::load(row[c]) * factor;
  }
}

// One step of the online softmax for kTile queries, one per lane. scores (keys, kTile) become
// probabilities relative to the new maxima; `sums` follow; `correction` rescales what was summed so
// far.
inline void softmax_step(float* scores, int64_t keys, float* maxima, float* sums,
                         float* correction) {
  float old[kTile];
  for (int64_t q = 0; q < kTile; ++q) old[q] = maxima[q];
  for (int64_t k = 0; k < keys; ++k) {
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      const float s = scores[k * kTile + q];
      maxima[q] = s > maxima[q] ? s : maxima[q];
    }
  }
#pragma omp simd
  for (int64_t q = 0; q < kTile; ++q) {
    correction[q] = exp_of(old[q] - maxima[q]);
    sums[q] *= correction[q];
  }
  for (int64_t k = 0; k < keys; ++k) {
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      const float p = exp_of(scores[k * kTile + q] - maxima[q]);
      scores[k * kTile + q] = p;
      sums[q] += p;
    }
  }
}

// Queries lie along the lanes: scores and outputs are kept transposed, so softmax needs no
// reduction across lanes and keys and values are read as they lie.
template <typename T>
void attention_forward(const AttentionHead& h, int64_t block, float* scratch) {
  const int64_t width = h.head_dim, ld = padded(width);
  const int64_t first = block * kTile, queries = least(kTile, h.length - first);
  float* query = scratch;               // (width, kTile)
  float* out = query + width * kTile;   // (width, kTile)
  float* keys = out + width * kTile;    // (kTile, ld)
  float* values = keys + kTile * ld;    // (kTile, ld)
  float* scores = values + kTile * ld;  // (kTile keys, kTile queries)
  float maxima[kTile], sums[kTile], correction[kTile];
  load_transposed<T>(elements<T>(h.q) + first * h.q_stride, h.q_stride, queries, width, h.scale,
                     query);
  zero(out, width * kTile);
  for (int64_t q = 0; q < kTile; ++q) {
    maxima[q] = -__builtin_inff();
    sums[q] = 0.0f;
  }
  for (int64_t begin = 0; begin < first + queries; begin += kTile) {
    const int64_t count = least(kTile, first + queries - begin);
    load_rows<T>(elements<T>(h.k) + begin * h.kv_stride, h.kv_stride, count, width, keys, ld);
    load_rows<T>(elements<T>(h.v) + begin * h.kv_stride, h.kv_stride, count, width, values, ld);
    block_product({keys, query, scores, count, kTile, width, ld, 1, kTile, kTile, false});
    if (begin == first) {
      for (int64_t k = 1; k < count; ++k) {
        for (int64_t q = 0; q < k; ++q) scores[k * kTile + q] = -__builtin_inff();
      }
    }
    softmax_step(scores, count, maxima, sums, correction);
    for (int64_t c = 0; c < width; ++c) {
#pragma omp simd
      for (int64_t q = 0; q < kTile; ++q) out[c * kTile + q] *= correction[q];
    }
    block_product({values, scores, out, width, kTile, count, 1, ld, kTile, kTile, true});
  }
  for (int64_t q = 0; q < queries; ++q) {
    auto* row = elements<T>(h.out) + (first + q) * h.out_stride;
    const float inverse = 1.0f / sums[q];
    for (int64_t c = 0; c < width; ++c) row[c] = T::store(out[c * kTile + q] * inverse);
    h.lse[first + q] = maxima[q] + __builtin_logf(sums[q]);
  }
}

// The buffers of one head's backward pass inside its scratch.
struct BackwardScratch {
  float* dq;           // (length, ld)
  float* delta;        // (length): sum over the row of dout * out
  float *k, *dk, *dv;  // (kTile, ld)
  float *k_t, *v_t;    // (width, kTile)
  float *q, *dout;     // (kTile, ld)
  float *p, *ds;       // (kTile queries, kTile keys)
};

inline int64_t lay_out(BackwardScratch& s, float* base, int64_t width, int64_t length) {
  const int64_t ld = padded(width);
  int64_t used = 0;
  const auto take = [&](int64_t floats) {
    float* at = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return at;
  };
  s.dq = take(length * ld);
  s.delta = take(length);
  s.k = take(kTile * ld);
  s.dk = take(kTile * ld);
  s.dv = take(kTile * ld);
  s.k_t = take(width * kTile);
  s.v_t = take(width * kTile);
  s.q = take(kTile * ld);
  s.dout = take(kTile * ld);
  s.p = take(kTile * kTile);
  s.ds = take(kTile * kTile);
  return used;
}

inline int64_t attention_scratch(int64_t head_dim, int64_t max_length, bool backward) {
  if (!backward) {
    return 2 * head_dim * kTile + 2 * kTile * padded(head_dim) + kTile * kTile;
  }
  BackwardScratch unused;
  return lay_out(unused, nullptr, head_dim, max_length);
}

// One pair of blocks: queries from `first` on against the keys from `begin` on, which `s` holds.
template <typename T>
void attention_backward_pair(const AttentionHeadBackward& b, const BackwardScratch& s,
                             int64_t first, int64_t begin) {
  const AttentionHead& h = b.forward;
  const int64_t width = h.head_dim, ld = padded(width);
  const int64_t queries = least(kTile, h.length - first), keys = least(kTile, h.length - begin);
  load_rows<T>(elements<T>(h.q) + first * h.q_stride, h.q_stride, queries, width, s.q, ld);
  load_rows<T>(elements<T>(b.dout) + first * h.out_stride, h.out_stride, queries, width, s.dout,
               ld);
  block_product({s.q, s.k_t, s.p, queries, kTile, width, ld, 1, kTile, kTile, false});
  block_product({s.dout, s.v_t, s.ds, queries, kTile, width, ld, 1, kTile, kTile, false});
  for (int64_t q = 0; q < queries; ++q) {
    float* p = s.p + q * kTile;
    float* ds = s.ds + q * kTile;
    const float lse = h.lse[first + q], delta = s.delta[first + q], scale = h.scale;
    const int64_t visible = first + q - begin + 1;  // keys up to the query itself
#pragma omp simd
    for (int64_t k = 0; k < kTile; ++k) {
      const float weight = k < visible ? exp_of(p[k] * scale - lse) : 0.0f;
      p[k] = weight;
      ds[k] = k < visible ? weight * (ds[k] - delta) * scale : 0.0f;
    }
  }
  block_product({s.p, s.dout, s.dv, keys, ld, queries, 1, kTile, ld, ld, true});
  block_product({s.ds, s.q, s.dk, keys, ld, queries, 1, kTile, ld, ld, true});
  block_product({s.ds, s.k, s.dq + first * ld, queries, ld, keys, kTile, 1, ld, ld, true});
}

template <typename T>
void attention_backward(const AttentionHeadBackward& b, float* scratch) {
  const AttentionHead& h = b.forward;
  const int64_t width = h.head_dim, ld = padded(width);
  BackwardScratch s;
  lay_out(s, scratch, width, h.length);
  zero(s.dq, h.length * ld);
  for (int64_t r = 0; r < h.length; ++r) {
    const auto* out = elements<T>(h.out) + r * h.out_stride;
    const auto* dout = elements<T>(b.dout) + r * h.out_stride;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < width; ++c) dot += T::load(out[c]) * T::load(dout[c]);
    s.delta[r] = dot;
  }
  for (int64_t begin = 0; begin < h.length; begin += kTile) {
    const int64_t keys = least(kTile, h.length - begin);
    const auto* k = elements<T>(h.k) + begin * h.kv_stride;
    const auto* v = elements<T>(h.v) + begin * h.kv_stride;
    load_rows<T>(k, h.kv_stride, keys, width, s.k, ld);
    load_transposed<T>(k, h.kv_stride, keys, width, 1.0f, s.k_t);
    load_transposed<T>(v, h.kv_stride, keys, width, 1.0f, s.v_t);
    zero(s.dk, kTile * ld);
    zero(s.dv, kTile * ld);
    for (int64_t first = begin; first < h.length; first += kTile) {
      attention_backward_pair<T>(b, s, first, begin);
    }
    for (int64_t r = 0; r < keys; ++r) {
      float* dk = b.dk + (begin + r) * b.partial_stride;
      float* dv = b.dv + (begin + r) * b.partial_stride;
      for (int64_t c = 0; c < width; ++c) dk[c] = s.dk[r * ld + c];
      for (int64_t c = 0; c < width; ++c) dv[c] = s.dv[r * ld + c];
    }
  }
  for (int64_t r = 0; r < h.length; ++r) {
    narrow<T>(s.dq + r * ld, elements<T>(b.dq) + r * h.q_stride, width);
  }
}

template <typename T>
constexpr Kernels make_kernels() {
  return {.widen = widen<T>,
          .narrow = narrow<T>,
          .add = add<T>,
          .accumulate = accumulate<T>,
          .sum = sum<T>,
          .norm_forward = norm_forward<T>,
          .norm_backward = norm_backward<T>,
          .rope = rope<T>,
          .swiglu = swiglu<T>,
          .swiglu_backward = swiglu_backward<T>,
          .gelu_tanh = gelu_tanh<T>,
          .gelu_tanh_backward = gelu_tanh_backward<T>,
          .gelu = gelu<T>,
          .gelu_backward = gelu_backward<T>,
          .cross_entropy = cross_entropy<T>,
          .attention_forward = attention_forward<T>,
          .attention_backward = attention_backward<T>,
          .attention_scratch = attention_scratch};
}
