// Passes over a row of logits with AVX-512.
#include <math.h>  // not <cmath>: its inline functions would be compiled for this file's processor

#include "elementwise_math.h"
#include "sampling_kernels.h"

namespace tokenmill {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr std::uint64_t kMix1 = 0xBF58476D1CE4E5B9ull;
constexpr std::uint64_t kMix2 = 0x94D049BB133111EBull;
constexpr float kLargestNoise = 36.8f;  // -log(-log(1 - 2^-53))
constexpr float kMinusInfinity = -__builtin_inff();

// sampling/random.py, 8 numbers at once.
__m512i mix(__m512i z) {
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(kMix1));
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

// The hashes of tokens id .. id + 7; their upper 52 bits are the noise.
__m512i hashes(std::uint64_t key, int id) {
  const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                           _mm512_set1_epi64(kGolden));
  const std::uint64_t first = key + (std::uint64_t(id) + 1) * kGolden;
  return mix(_mm512_add_epi64(_mm512_set1_epi64(first), steps));
}

float gumbel(std::uint64_t hash) {
  const double uniform = (static_cast<double>(hash >> 12) + 0.5) * 0x1p-52;
  return static_cast<float>(-log(-log(uniform)));
}

// Which hashes give uniform numbers of at least about 1 - 2^exponents, for exponents of at least
// -53: all of those from 1 - 2^exponents on, and few others.
__mmask8 reaches(__m512i hashes, __m256i exponents) {
  const __m512i shifts =
      _mm512_cvtepi32_epi64(_mm256_add_epi32(exponents, _mm256_set1_epi32(64)));
  // 2^64 - 2^(64 + exponent), or 0 from exponent 0 on.
  return _mm512_cmpge_epu64_mask(hashes, _mm512_sllv_epi64(_mm512_set1_epi64(-1), shifts));
}

// e^x for x <= 0, relative error 1e-7; 0 below -87, for -infinity, too.
__m512 exp_below(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts; whole times the first one is exact.
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0x1.63p-1f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-0x1.bd0106p-13f), rest);
  __m512 y = _mm512_set1_ps(0x1.6ae6dep-10f);
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.1267d8p-7f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.555824p-5f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.555418p-3f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.fffffcp-2f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(whole), 23);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(counts, _mm512_castps_si512(y), exponent));
}

// A sum in double precision, in two parts of 8 lanes.
struct DoubleSum {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

  void add(__m512 x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

// Writes the lanes of a mask one after another. A whole vector is stored.
void append(float* to, __mmask16 mask, __m512 x) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, x));
}

// body(first index, lanes in use) for every 16 of `count` values. All but the last are whole, which
// the compiler knows.
template <class F>
TOKENMILL_INLINE void for_vectors(int count, const F& body) {
  int i = 0;
  for (; i + 16 <= count; i += 16) body(i, __mmask16{0xffff});
  if (i < count) body(i, first_lanes(count - i));
}

// Lanes that are not in use become -infinity.
TOKENMILL_INLINE __m512 load_padded(const float* values, __mmask16 mask) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(kMinusInfinity), mask, values);
}

}  // namespace

Largest find_largest_avx512(const float* values, int count) {
  constexpr int kSums = 4;
  __m512 largest[kSums];
  for (__m512& x : largest) x = _mm512_set1_ps(kMinusInfinity);
  __mmask16 nan = 0;
  const auto add = [&](__m512& sum, __m512 x) {
    nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    sum = _mm512_max_ps(sum, x);
  };
  int i = 0;
  for (; i + kSums * 16 <= count; i += kSums * 16)
    for (int j = 0; j < kSums; ++j) add(largest[j], _mm512_loadu_ps(values + i + j * 16));
  for_vectors(count - i, [&](int j, __mmask16 mask) {
    add(largest[0], load_padded(values + i + j, mask));
  });
  if (nan != 0) return {__builtin_nanf(""), 0};
  const float value = _mm512_reduce_max_ps(_mm512_max_ps(
      _mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
  return {value, find_equal_avx512(values, count, value, 1)};
}

int find_equal_avx512(const float* values, int count, float value, int n) {
  for (int i = 0; i < count; i += 16) {
    const __m512 x = _mm512_maskz_loadu_ps(first_lanes(count - i), values + i);
    __mmask16 equal = _mm512_mask_cmp_ps_mask(first_lanes(count - i), x, _mm512_set1_ps(value),
                                              _CMP_EQ_OQ);
    const int found = __builtin_popcount(equal);
    if (found < n) {
      n -= found;
      continue;
    }
    for (; n > 1; --n) equal &= equal - 1;
    return i + __builtin_ctz(equal);
  }
  return count;
}

double sum_exp_avx512(const float* values, int count, float shift) {
  DoubleSum sum;
  for_vectors(count, [&](int i, __mmask16 mask) {
    sum.add(exp_below(_mm512_sub_ps(load_padded(values + i, mask), _mm512_set1_ps(shift))));
  });
  return sum.total();
}

double weigh_avx512(const Weighted& some) {
  DoubleSum sum;
  for_vectors(some.count, [&](int i, __mmask16 mask) {
    const __m512 weight = exp_below(load_padded(some.values + i, mask));
    _mm512_mask_storeu_ps(some.weights + i, mask, weight);
    sum.add(weight);
  });
  return sum.total();
}

int count_at_least_avx512(const float* values, int count, float lowest) {
  int found = 0;
  for_vectors(count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    found += __builtin_popcount(
        _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(lowest), _CMP_GE_OQ));
  });
  return found;
}

void scale_logits_avx512(const float* values, int count, float best, float temperature,
                         float* out) {
  for_vectors(count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    _mm512_mask_storeu_ps(out + i, mask,
                          _mm512_div_ps(_mm512_sub_ps(x, _mm512_set1_ps(best)),
                                        _mm512_set1_ps(temperature)));
  });
}

void run_maxima_avx512(const float* values, int count, float* maxima) {
  for (int i = 0; i < count; i += 64) {
    __m512 largest = _mm512_set1_ps(kMinusInfinity);
    for_vectors(min_of(64, count - i), [&](int j, __mmask16 mask) {
      largest = _mm512_max_ps(largest, load_padded(values + i + j, mask));
    });
    maxima[i / 64] = _mm512_reduce_max_ps(largest);
  }
}

int collect_avx512(const float* values, int count, float lowest, std::int32_t* indices) {
  int found = 0;
  for_vectors(count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    __mmask16 hits = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(lowest), _CMP_GE_OQ);
    for (; hits != 0; hits &= hits - 1) indices[found++] = i + __builtin_ctz(hits);
  });
  return found;
}

Weighted gather_avx512(const Weighted& from, float lowest, const Weighted& to) {
  int count = 0;
  for_vectors(from.count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, from.values + i);
    const __mmask16 hits = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(lowest), _CMP_GE_OQ);
    append(to.values + count, hits, x);
    if (from.weights != nullptr)
      append(to.weights + count, hits, _mm512_maskz_loadu_ps(mask, from.weights + i));
    count += __builtin_popcount(hits);
  });
  return {to.values, to.weights, count};
}

int keep_avx512(const Weighted& some, float pivot, bool above) {
  int count = 0;
  const __m512 p = _mm512_set1_ps(pivot);
  for_vectors(some.count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, some.values + i);
    const __mmask16 hits = above ? _mm512_mask_cmp_ps_mask(mask, x, p, _CMP_GT_OQ)
                                 : _mm512_mask_cmp_ps_mask(mask, x, p, _CMP_LT_OQ);
    // Only what has been read is written over: count <= i.
    if (some.weights != nullptr)
      append(some.weights + count, hits, _mm512_maskz_loadu_ps(mask, some.weights + i));
    append(some.values + count, hits, x);
    count += __builtin_popcount(hits);
  });
  return count;
}

Split split_avx512(const Weighted& some, float pivot) {
  Split split{0.0, 0.0, 0, 0};
  DoubleSum above;
  float equal_weight = 1.0f;
  const __m512 p = _mm512_set1_ps(pivot);
  for_vectors(some.count, [&](int i, __mmask16 mask) {
    const __m512 x = _mm512_maskz_loadu_ps(mask, some.values + i);
    const __mmask16 is_above = _mm512_mask_cmp_ps_mask(mask, x, p, _CMP_GT_OQ);
    const __mmask16 is_equal = _mm512_mask_cmp_ps_mask(mask, x, p, _CMP_EQ_OQ);
    split.num_above += __builtin_popcount(is_above);
    split.num_equal += __builtin_popcount(is_equal);
    if (some.weights == nullptr) return;
    above.add(_mm512_maskz_loadu_ps(is_above, some.weights + i));
    if (is_equal != 0) equal_weight = some.weights[i + __builtin_ctz(is_equal)];
  });
  split.weight_above = some.weights != nullptr ? above.total() : split.num_above;
  split.weight_equal = static_cast<double>(equal_weight) * split.num_equal;
  return split;
}

// A token beats the best so far only if its noise is above best - value, that is if
// 1 - uniform < 1 - exp(-exp(value - best)) < exp(value - best). With a power of 2 above that, a
// comparison of integers rules out nearly all of them; the rest is computed exactly.
int draw_avx512(const float* values, int count, int start, const Kept& kept, std::uint64_t key) {
  alignas(64) std::uint64_t hash[16];
  _mm512_store_si512(hash, hashes(key, start));
  int winner = start;
  float best = values[start] + gumbel(hash[0]);
  const __m512 lowest = _mm512_set1_ps(kept.lowest);
  for (int i = 0; i < count; i += 16) {
    const __m512 x = load_padded(values + i, first_lanes(count - i));
    const __m512 ahead = _mm512_sub_ps(x, _mm512_set1_ps(best));
    __mmask16 open = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(ahead, _mm512_set1_ps(-kLargestNoise), _CMP_GE_OQ);
    if (open == 0) continue;
    const __m512i low = hashes(key, i), high = hashes(key, i + 8);
    const __m512i exponents = _mm512_cvt_roundps_epi32(
        _mm512_fmadd_ps(ahead, _mm512_set1_ps(kLog2E), _mm512_set1_ps(1e-3f)),
        _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    open &= static_cast<__mmask16>(
        reaches(low, _mm512_castsi512_si256(exponents)) |
        reaches(high, _mm512_extracti32x8_epi32(exponents, 1)) << 8);
    if (open == 0) continue;
    _mm512_store_si512(hash, low);
    _mm512_store_si512(hash + 8, high);
    for (; open != 0; open &= open - 1) {
      const int lane = __builtin_ctz(open), id = i + lane;
      if (values[id] == kept.lowest && id > kept.last) continue;
      const float total = values[id] + gumbel(hash[lane]);
      if (total > best || (total == best && id < winner)) {
        best = total;
        winner = id;
      }
    }
  }
  return winner;
}

}  // namespace tokenmill
