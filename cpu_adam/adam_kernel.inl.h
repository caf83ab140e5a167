// The update, the sum of squares and the sums of micro-batches' gradients, written once for every
// instruction set. A file of an instruction set defines `Lanes` in its unnamed namespace and
// includes this text inside that same namespace, so that each set has a copy of its own that no
// linker can swap for another's.
//
// Lanes:
//   kWidth, Float, Bits     kWidth fp32 lanes / uint32 lanes; arithmetic by the built-in operators
//   Double, kDoubleWidth    fp64 lanes
//   broadcast(float | uint32_t), iota()
//   load(const float*), store(float*, Float)
//   load_u16(const uint16_t*) -> Bits, zero-extended;  load_i16, sign-extended
//   store_u16(uint16_t*, Bits)    stores the low halves
//   load_fp16(const uint16_t*) -> Float;  store_fp16(uint16_t*, Float), to nearest even
//   fma, sqrt, to_bits, to_float
//   zero_if_negative(Bits)        of signed numbers
//   quiet_bits(Float)             the bits, where every NaN is 0x7fc00000
//   add_squares(Float, Double*)   adds the squares to kWidth / kDoubleWidth consecutive sums
//   store_sums(double*, Double)

constexpr int64_t kCacheLineBytes = 64;
constexpr int64_t kBlockElements =
    kCacheLineBytes / 2;                    // a line of the 16-bit planes, two of the others
constexpr int64_t kPrefetchElements = 512;  // by measurement: without, 15 % slower; 2048, 8 %

template <class L>
typename L::Bits random_bits(typename L::Bits index_low, const AdamRngKey& key) {
  typename L::Bits x = index_low ^ L::broadcast(key.first);
  x ^= x >> 16;
  x *= L::broadcast(0x21f0aaadu);
  x ^= L::broadcast(key.second);
  x ^= x >> 15;
  x *= L::broadcast(0x735a2d97u);
  x ^= x >> 15;
  return x;
}

template <GradFormat kGrad>
constexpr int64_t kGradBytes = kGrad == kGradF32 ? 4 : 2;

template <class L, GradFormat kGrad>
typename L::Float load_grad(const void* grad, int64_t i) {
  if constexpr (kGrad == kGradF32) {
    return L::load(static_cast<const float*>(grad) + i);
  } else if constexpr (kGrad == kGradBf16) {
    return L::to_float(L::load_u16(static_cast<const uint16_t*>(grad) + i) << 16);
  } else {
    return L::load_fp16(static_cast<const uint16_t*>(grad) + i);
  }
}

template <class L, MasterLayout kMaster>
typename L::Float load_master(const AdamChunk& chunk, int64_t i) {
  if constexpr (kMaster == kSplitBf16) {
    const typename L::Bits hi = L::load_u16(static_cast<const uint16_t*>(chunk.param) + i) << 16;
    const typename L::Bits magnitude = (hi & L::broadcast(0x7fffffffu)) + L::load_i16(chunk.lo + i);
    return L::to_float((hi & L::broadcast(0x80000000u)) | L::zero_if_negative(magnitude));
  } else {
    return L::load(chunk.master + i);
  }
}

template <class L, MasterLayout kMaster>
void store_master(const AdamChunk& chunk, int64_t i, typename L::Float p) {
  if constexpr (kMaster == kSplitBf16) {
    // A NaN with a full payload would round to -0 and one with a small payload to Inf: hence
    // quiet_bits.
    const typename L::Bits bits = L::quiet_bits(p);
    L::store_u16(static_cast<uint16_t*>(chunk.param) + i, (bits + L::broadcast(0x8000u)) >> 16);
    L::store_u16(chunk.lo + i, bits);
  } else {
    L::store(chunk.master + i, p);
    if constexpr (kMaster == kMasterAndFp16) {
      L::store_fp16(static_cast<uint16_t*>(chunk.param) + i, p);
    }
  }
}

template <class L, MomentFormat kMoment>
typename L::Float load_moment(const void* plane, int64_t i) {
  if constexpr (kMoment == kMomentF32) {
    return L::load(static_cast<const float*>(plane) + i);
  } else {
    return L::to_float(L::load_u16(static_cast<const uint16_t*>(plane) + i) << 16);
  }
}

template <class L>
void store_moment_bf16(void* plane, int64_t i, typename L::Float moment,
                       typename L::Bits random_half) {
  L::store_u16(static_cast<uint16_t*>(plane) + i, (L::quiet_bits(moment) + random_half) >> 16);
}

// One vector at element i of the chunk. Always inlined: the loop keeps pointers and constants in
// registers.
template <class L, MasterLayout kMaster, MomentFormat kMoment, GradFormat kGrad>
[[gnu::always_inline]] inline void update(const AdamChunk& chunk, const AdamConstants& c,
                                          int64_t i) {
  using Float = typename L::Float;
  Float g = load_grad<L, kGrad>(chunk.grad, i) * L::broadcast(c.grad_scale);
  Float p = load_master<L, kMaster>(chunk, i);
  if (c.l2 != 0.0f) g = L::fma(L::broadcast(c.l2), p, g);
  p = p * L::broadcast(c.decay);

  Float m = load_moment<L, kMoment>(chunk.exp_avg, i);
  Float v = load_moment<L, kMoment>(chunk.exp_avg_sq, i);
  m = L::fma(L::broadcast(c.one_minus_beta1), g - m, m);
  v = L::fma(L::broadcast(c.one_minus_beta2) * g, g, L::broadcast(c.beta2) * v);
  const Float denominator =
      L::sqrt(v) / L::broadcast(c.bias_correction2_sqrt) + L::broadcast(c.eps);
  p = p - L::broadcast(c.step_size) * (m / denominator);

  store_master<L, kMaster>(chunk, i, p);
  if constexpr (kMoment == kMomentF32) {
    L::store(static_cast<float*>(chunk.exp_avg) + i, m);
    L::store(static_cast<float*>(chunk.exp_avg_sq) + i, v);
  } else {
    const typename L::Bits index = L::broadcast(chunk.index_low + static_cast<uint32_t>(i));
    const typename L::Bits random = random_bits<L>(index + L::iota(), chunk.key);
    store_moment_bf16<L>(chunk.exp_avg, i, m, random & L::broadcast(0xffffu));
    store_moment_bf16<L>(chunk.exp_avg_sq, i, v, random >> 16);
  }
}

// Asks for the block of every plane that the loop reaches kPrefetchElements later. Five streams are
// more than the hardware's own prefetchers keep up with. A prefetch never faults, so the end needs
// no care.
template <MasterLayout kMaster, MomentFormat kMoment, GradFormat kGrad>
[[gnu::always_inline]] inline void prefetch_block(const AdamChunk& chunk, int64_t i) {
  const auto fetch = [i](const void* plane, int64_t element_bytes) {
    const char* block = static_cast<const char*>(plane) + (i + kPrefetchElements) * element_bytes;
    __builtin_prefetch(block);
    if (element_bytes == 4) __builtin_prefetch(block + kCacheLineBytes);
  };
  if constexpr (kMaster != kMasterAlone) fetch(chunk.param, 2);
  if constexpr (kMaster == kSplitBf16) fetch(chunk.lo, 2);
  if constexpr (kMaster != kSplitBf16) fetch(chunk.master, 4);
  fetch(chunk.exp_avg, kMoment == kMomentF32 ? 4 : 2);
  fetch(chunk.exp_avg_sq, kMoment == kMomentF32 ? 4 : 2);
  fetch(chunk.grad, kGrad == kGradF32 ? 4 : 2);
}

// The last elements, fewer than one vector, moved through a padded copy of every plane: nothing
// outside the chunk is touched, and the arithmetic is that of all other elements.
template <class L, MasterLayout kMaster, MomentFormat kMoment, GradFormat kGrad>
void update_tail(const AdamChunk& chunk, const AdamConstants& constants, int64_t begin) {
  constexpr int kMaxBytes = 4 * L::kWidth;
  alignas(64) unsigned char planes[6][kMaxBytes] = {};
  constexpr int64_t kMomentBytes = kMoment == kMomentF32 ? 4 : 2;
  struct Plane {
    void* data;
    int64_t element_bytes;
  };
  const Plane written[5] = {
      {chunk.param, 2},
      {chunk.lo, 2},
      {chunk.master, 4},
      {chunk.exp_avg, kMomentBytes},
      {chunk.exp_avg_sq, kMomentBytes},
  };
  const auto bytes = [&](int64_t element_bytes) {
    return static_cast<size_t>((chunk.numel - begin) * element_bytes);
  };
  const auto at = [&](const Plane& plane) {
    return static_cast<unsigned char*>(plane.data) + begin * plane.element_bytes;
  };
  for (int k = 0; k < 5; ++k) {
    if (written[k].data == nullptr) continue;
    __builtin_memcpy(planes[k], at(written[k]), bytes(written[k].element_bytes));
  }
  __builtin_memcpy(planes[5],
                   static_cast<const unsigned char*>(chunk.grad) + begin * kGradBytes<kGrad>,
                   bytes(kGradBytes<kGrad>));

  AdamChunk padded = chunk;
  padded.param = planes[0];
  padded.lo = reinterpret_cast<uint16_t*>(planes[1]);
  padded.master = reinterpret_cast<float*>(planes[2]);
  padded.exp_avg = planes[3];
  padded.exp_avg_sq = planes[4];
  padded.grad = planes[5];
  padded.numel = L::kWidth;
  padded.index_low = chunk.index_low + static_cast<uint32_t>(begin);
  update<L, kMaster, kMoment, kGrad>(padded, constants, 0);

  for (int k = 0; k < 5; ++k) {
    if (written[k].data == nullptr) continue;
    __builtin_memcpy(at(written[k]), planes[k], bytes(written[k].element_bytes));
  }
}

template <class L, MasterLayout kMaster, MomentFormat kMoment, GradFormat kGrad>
void adam_chunk(const AdamChunk& chunk_in, const AdamConstants& constants_in) {
  // Copies on the stack: stores to the planes cannot alias them, so they stay in registers.
  const AdamChunk chunk = chunk_in;
  const AdamConstants constants = constants_in;
  int64_t i = 0;
  for (; i + kBlockElements <= chunk.numel; i += kBlockElements) {
    prefetch_block<kMaster, kMoment, kGrad>(chunk, i);
    for (int64_t j = 0; j < kBlockElements; j += L::kWidth) {
      update<L, kMaster, kMoment, kGrad>(chunk, constants, i + j);
    }
  }
  for (; i + L::kWidth <= chunk.numel; i += L::kWidth) {
    update<L, kMaster, kMoment, kGrad>(chunk, constants, i);
  }
  if (i < chunk.numel) update_tail<L, kMaster, kMoment, kGrad>(chunk, constants, i);
}

template <class L, GradFormat kGrad>
double square_sum(const void* grad, int64_t numel) {
  constexpr int kSums = kNormLanes / L::kDoubleWidth;
  typename L::Double sums[kSums] = {};
  const auto add_row = [&sums](const void* row) {
    for (int part = 0; part < kNormLanes / L::kWidth; ++part) {
      L::add_squares(load_grad<L, kGrad>(row, part * L::kWidth),
                     sums + part * (L::kWidth / L::kDoubleWidth));
    }
  };
  const auto* bytes = static_cast<const unsigned char*>(grad);
  int64_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) add_row(bytes + i * kGradBytes<kGrad>);
  if (i < numel) {  // zeros change no sum
    alignas(64) unsigned char padded[4 * kNormLanes] = {};
    __builtin_memcpy(padded, bytes + i * kGradBytes<kGrad>,
                     static_cast<size_t>((numel - i) * kGradBytes<kGrad>));
    add_row(padded);
  }
  double lanes[kNormLanes];
  for (int k = 0; k < kSums; ++k) L::store_sums(lanes + k * L::kDoubleWidth, sums[k]);
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

template <class L, GradFormat kGrad>
void store_grad(void* grad, int64_t i, typename L::Float value) {
  if constexpr (kGrad == kGradF32) {
    L::store(static_cast<float*>(grad) + i, value);
  } else if constexpr (kGrad == kGradBf16) {
    const typename L::Bits bits = L::quiet_bits(value);
    const typename L::Bits odd = (bits >> 16) & L::broadcast(1u);
    L::store_u16(static_cast<uint16_t*>(grad) + i, (bits + L::broadcast(0x7fffu) + odd) >> 16);
  } else {
    L::store_fp16(static_cast<uint16_t*>(grad) + i, value);
  }
}

// Calls `vector(in, out, i)` for every whole vector of the chunk, and for the rest with padded
// copies. kOutIsRead: what was in `out` matters.
template <class L, int64_t kInBytes, int64_t kOutBytes, bool kOutIsRead, class Vector>
[[gnu::always_inline]] inline void for_each_vector(const void* in, void* out, int64_t numel,
                                                   Vector vector) {
  int64_t i = 0;
  for (; i + L::kWidth <= numel; i += L::kWidth) vector(in, out, i);
  if (i >= numel) return;
  alignas(64) unsigned char padded_in[4 * L::kWidth] = {};
  alignas(64) unsigned char padded_out[4 * L::kWidth] = {};
  auto* const rest_out = static_cast<unsigned char*>(out) + i * kOutBytes;
  const auto bytes = [&](int64_t element_bytes) {
    return static_cast<size_t>((numel - i) * element_bytes);
  };
  __builtin_memcpy(padded_in, static_cast<const unsigned char*>(in) + i * kInBytes,
                   bytes(kInBytes));
  if (kOutIsRead) __builtin_memcpy(padded_out, rest_out, bytes(kOutBytes));
  vector(padded_in, padded_out, 0);
  __builtin_memcpy(rest_out, padded_out, bytes(kOutBytes));
}

template <class L, GradFormat kGrad, bool kAdd>
void accumulate(const void* grad, float* sum, int64_t numel) {
  for_each_vector<L, kGradBytes<kGrad>, 4, kAdd>(
      grad, sum, numel, [](const void* in, void* out, int64_t i) {
        float* const place = static_cast<float*>(out) + i;
        typename L::Float value = load_grad<L, kGrad>(in, i);
        if constexpr (kAdd) value = L::load(place) + value;
        L::store(place, value);
      });
}

template <class L, GradFormat kGrad>
void round_sum(const float* sum, void* grad, int64_t numel) {
  for_each_vector<L, 4, kGradBytes<kGrad>, false>(
      sum, grad, numel, [](const void* in, void* out, int64_t i) {
        store_grad<L, kGrad>(out, i, L::load(static_cast<const float*>(in) + i));
      });
}

template <class L>
constexpr CpuKernels make_kernels() {
  CpuKernels kernels{};
  const auto fill_grads = [&]<MasterLayout kMaster, MomentFormat kMoment>() {
    AdamKernel(&row)[kGradFormats] = kernels.adam[kMaster][kMoment];
    row[kGradF32] = adam_chunk<L, kMaster, kMoment, kGradF32>;
    row[kGradBf16] = adam_chunk<L, kMaster, kMoment, kGradBf16>;
    row[kGradF16] = adam_chunk<L, kMaster, kMoment, kGradF16>;
  };
  const auto fill_moments = [&]<MasterLayout kMaster>() {
    fill_grads.template operator()<kMaster, kMomentF32>();
    fill_grads.template operator()<kMaster, kMomentBf16>();
  };
  fill_moments.template operator()<kSplitBf16>();
  fill_moments.template operator()<kMasterAndFp16>();
  fill_moments.template operator()<kMasterAlone>();
  const auto fill_sums = [&]<GradFormat kGrad>() {
    kernels.square_sum[kGrad] = square_sum<L, kGrad>;
    kernels.start_sum[kGrad] = accumulate<L, kGrad, false>;
    kernels.add_to_sum[kGrad] = accumulate<L, kGrad, true>;
    kernels.round_sum[kGrad] = round_sum<L, kGrad>;
  };
  fill_sums.template operator()<kGradF32>();
  fill_sums.template operator()<kGradBf16>();
  fill_sums.template operator()<kGradF16>();
  return kernels;
}
