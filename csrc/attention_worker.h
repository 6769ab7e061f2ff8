// One task of attention on vectors: queries, scores, softmax and weighted values of a block of rows.
// For files compiled with AVX-512, or behind a header that stands in for it.
#pragma once

#include "attention_latents.h"
#include "attention_rows.h"
#include "attention_vectors.h"

namespace tokenmill {
namespace {  // classes, too, are compiled for each instruction set by itself

// 2^x for x up to about 0, relative error 3e-6; 0 below -125. A NaN stays one.
inline __m512 exp2_small(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(0x1.3a02bap-7f);
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.c9fc4cp-5f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.ec0378p-3f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.62e12cp-1f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(x), 23);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(
      _mm512_maskz_add_epi32(counts, _mm512_castps_si512(y), exponent));
}

template <class Words, KvFormat Format>
class VectorWorker {
 public:
  using Value = typename Words::Value;

  explicit VectorWorker(const AttentionCall& call)
      : call_(call), shape_(call.shape), size_(call.shape.cache.head_size),
        value_size_(call.shape.cache.value_size()), factor_(exponent_factor(call.shape)),
        codes_(size_ > 512 ? 16383.0f : Words::kMostCode), products_(size_, value_size_) {
    const std::size_t state = partial_floats(value_size_) * sizeof(float);
    const std::size_t scores = std::size_t{kRowBlock} * kScoreStride * sizeof(float);
    const std::size_t queries = std::size_t(kRowBlock) * size_ * sizeof(Value);
    const bool has_slice = !shape_.cache.stores_values();
    const std::size_t slice = has_slice ? sizeof(Value) * kPartition * kSlice : 0;
    auto* memory =
        static_cast<std::uint8_t*>(thread_scratch(1, 2 * state + scores + queries + slice));
    state_ = RowState::at(reinterpret_cast<float*>(memory));
    next_ = RowState::at(reinterpret_cast<float*>(memory + state));
    scores_ = reinterpret_cast<float*>(memory + 2 * state);
    queries_ = reinterpret_cast<Value*>(memory + 2 * state + scores);
    slice_ = memory + 2 * state + scores + queries;
  }

  void run(const TaskQueue& queue, float* partials) {
    walk(*this, call_, queue, state_, next_, partials);
  }

  // Queries, and what each of them sees.
  void load_rows(const Block& block) {
    const RequestView request(call_.tables, block.request);
    num_rows_ = block.num_rows;
    RowCursor row(shape_, request, block);
    for (int r = 0; r < num_rows_; ++r, row.advance()) {
      seen_[r] = visible_keys(shape_, request.query_len, request.seq_len, row.query());
      const std::int64_t at = row.offset(call_.queries.stride, size_);
      Value* query = queries_ + std::int64_t{r} * size_;
      if constexpr (Format == KvFormat::int8) {
        query_scales_[r] = load_codes(at, query);
      } else {
        for (int d = 0; d < size_; d += 16)
          store_values(query, sizeof(Value) == 2, d, 0xffff, load_query(at + d));
      }
    }
  }

  void attend(const Units& units, const AheadUnit* ahead, const RowState& result) {
    if constexpr (Format == KvFormat::int8)  // needed first
      for (int u = 0; u < units.count; ++u)
        for (int half = 0; half < 2; ++half) fetch(value_scales(units, u, half));
    const Rows queries = rows_of(queries_, size_ * std::int64_t{sizeof(Value)});
    products_.scores(queries, query_scales_, units, ahead, scores_, kScoreStride);
    for (int r = 0; r < num_rows_; ++r) result.m[r] = largest(r, units);
    for (int r = 0; r < num_rows_; ++r) result.l[r] = softmax(r, units, result.m[r]);
    const Rows weights = rows_of(scores_, kScoreStride * std::int64_t{sizeof(float)});
    if (shape_.cache.stores_values()) {
      products_.weighted(weights, weight_scales_, units, ahead + units.count, result.o);
    } else {
      weigh_keys(weights, units, result.o);
    }
  }

 private:
  using Rows = WordRows<typename Words::Word>;

  Rows rows_of(const void* data, std::int64_t row_bytes) const {
    constexpr std::int64_t kWordBytes = sizeof(typename Words::Word);
    return {static_cast<const typename Words::Word*>(data), row_bytes / kWordBytes, num_rows_};
  }

  static constexpr int kSlice = 64;  // values that are in the order of V at the same time

  // As `weighted`, with values that are parts of keys.
  void weigh_keys(const Rows& weights, const Units& units, float* out) {
    const CacheLayout& cache = shape_.cache;
    const std::int64_t group_bytes = kKeyGroup * cache.token_bytes();
    for (int begin = 0; begin < value_size_; begin += kSlice) {
      const int count = min_of(kSlice, value_size_ - begin);
      Units slice = units;
      slice.to_values = 0;
      AheadUnit none[kUnits];
      for (int u = 0; u < units.count; ++u) {
        std::uint8_t* unit = slice_ + std::int64_t{u} * kUnit * kSlice * cache.value_bytes();
        keys_to_values(Format, units.keys[u], group_bytes, cache.value_offset + begin, count, unit);
        slice.keys[u] = unit;
        none[u] = {unit, true, false};
      }
      VectorProducts<Words>(count, value_size_)
          .weighted(weights, weight_scales_, slice, none, out + begin);
    }
  }

  // int8: the scales of the values of 16 tokens, half of a unit.
  const std::uint8_t* value_scales(const Units& units, int unit, int half) const {
    if (shape_.cache.stores_values())
      return units.values(unit) + kUnit * size_ + half * kCacheLine;
    return units.keys[unit] + half * kKeyGroup * shape_.cache.token_bytes() + kKeyGroup * size_;
  }

  // Rounded to bf16, except for float32 caches.
  __m512 load_query(std::int64_t at) const {
    const __m512 q = load_values(call_.queries.data, call_.queries.is_bf16, at, 0xffff);
    return Format == KvFormat::float32 ? q : widen_bf16(round_to_bf16(q));
  }

  // A query as codes of 16 bits; returns their scale, NaN if the query has one.
  float load_codes(std::int64_t at, std::int16_t* codes) const {
    __m512i bits = _mm512_setzero_si512();  // as integers, a NaN is the largest
    for (int d = 0; d < size_; d += 16)
      bits = _mm512_max_epu32(bits, _mm512_castps_si512(_mm512_abs_ps(load_query(at + d))));
    const float amax = float_from_bits(_mm512_reduce_max_epu32(bits));
    const __m512 inverse = _mm512_set1_ps(amax < kTiny ? 0.0f : codes_ / amax);
    for (int d = 0; d < size_; d += 16)
      Words::store_codes(codes + d, _mm512_mul_ps(load_query(at + d), inverse));
    return amax < kTiny ? 0.0f : amax / codes_;
  }

  static constexpr float kTiny = 1e-33f;  // the largest code over it is finite

  // The units in which a row sees keys.
  struct Span {
    int first, last;
  };
  Span span(int r, const Units& units) const {
    const int begin = seen_[r].begin - units.first_key, end = seen_[r].end - units.first_key;
    const int first = begin > 0 ? min_of(begin / kUnit, units.count) : 0;
    return {first, end <= 0 ? first : min_of(ceil_div(end, kUnit), units.count)};
  }

  // Caps the scores of a row, hides the keys that it does not see among its units, and returns the
  // largest score.
  float largest(int r, const Units& units) const {
    float* row = scores_ + r * kScoreStride;
    const int begin = seen_[r].begin - units.first_key, end = seen_[r].end - units.first_key;
    const Span seen = span(r, units);
    if (shape_.soft_cap > 0.0f) cap(row, seen);
    hide(row, seen, begin, end);
    __m512 low = _mm512_set1_ps(kNothing), high = low;
    for (int u = seen.first; u < seen.last; ++u) {
      low = _mm512_max_ps(low, _mm512_loadu_ps(row + u * kUnit));
      high = _mm512_max_ps(high, _mm512_loadu_ps(row + u * kUnit + 16));
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(low, high));
  }

  void cap(float* row, const Span& seen) const {
    const __m512 cap = _mm512_set1_ps(shape_.soft_cap);
    const __m512 scale = _mm512_set1_ps(shape_.scale / shape_.soft_cap);
    for (int at = seen.first * kUnit; at < seen.last * kUnit; at += 16)
      _mm512_storeu_ps(row + at,
                       _mm512_mul_ps(tanh_of(_mm512_mul_ps(_mm512_loadu_ps(row + at), scale)),
                                     cap));
  }

  static void hide(float* row, const Span& seen, int begin, int end) {
    for (int u = seen.first; u < seen.last; ++u) {
      const int column = u * kUnit;
      if (column >= begin && column + kUnit <= end) continue;
      for (int at = column; at < column + kUnit; at += 16) {
        const __mmask16 visible = first_lanes(end - at) & ~first_lanes(begin - at);
        _mm512_mask_storeu_ps(row + at, ~visible, _mm512_set1_ps(kHidden));
      }
    }
  }

  // Scores of a row to p, in place; returns their sum. p of hidden keys is 0.
  float softmax(int r, const Units& units, float m) {
    float* row = scores_ + r * kScoreStride;
    Value* p = reinterpret_cast<Value*>(row);
    const Span seen = span(r, units);
    const __m512 shift = _mm512_set1_ps(Format == KvFormat::float32 ? m : -m * factor_);
    __m512 sum = _mm512_setzero_ps();
    __m512i most = _mm512_setzero_si512();
    for (int u = 0; u < seen.first; ++u) clear(p, u);
    for (int u = seen.first; u < seen.last; ++u) {
      __m512 low = weight(_mm512_loadu_ps(row + u * kUnit), shift);
      __m512 high = weight(_mm512_loadu_ps(row + u * kUnit + 16), shift);
      sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
      if constexpr (Format == KvFormat::int8) {
        low = scaled(low, value_scales(units, u, 0));
        high = scaled(high, value_scales(units, u, 1));
        most = _mm512_max_epu32(most, _mm512_max_epu32(_mm512_castps_si512(low),
                                                       _mm512_castps_si512(high)));
        _mm512_storeu_ps(row + u * kUnit, low);
        _mm512_storeu_ps(row + u * kUnit + 16, high);
      } else if constexpr (Format == KvFormat::bf16) {
        _mm512_storeu_si512(p + u * kUnit, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      } else {
        _mm512_storeu_ps(p + u * kUnit, low);
        _mm512_storeu_ps(p + u * kUnit + 16, high);
      }
    }
    if constexpr (Format == KvFormat::int8) weight_scales_[r] = round_weights(row, seen, most);
    for (int u = seen.last; u < units.count; ++u) clear(p, u);
    return _mm512_reduce_add_ps(sum);
  }

  // Weights of a row to codes of 16 bits, in place; returns their scale.
  static float round_weights(float* row, const Span& seen, __m512i most) {
    const float largest = float_from_bits(_mm512_reduce_max_epu32(most));
    const __m512 inverse = _mm512_set1_ps(largest < kTiny ? 0.0f : Words::kMostCode / largest);
    auto* codes = reinterpret_cast<std::int16_t*>(row);
    for (int at = seen.first * kUnit; at < seen.last * kUnit; at += 16)
      Words::store_codes(codes + at, _mm512_mul_ps(_mm512_loadu_ps(row + at), inverse));
    return largest < kTiny ? 0.0f : largest / Words::kMostCode;
  }

  static void clear(Value* p, int unit) {
    std::memset(p + unit * kUnit, 0, kUnit * sizeof(Value));
  }

  // float32: exact where s = m. Others: off by a factor near 1 that is the same for the whole row.
  __m512 weight(__m512 score, __m512 shift) const {
    const __m512 factor = _mm512_set1_ps(factor_);
    if constexpr (Format == KvFormat::float32) {
      return exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(score, shift), factor));
    } else {
      return exp2_small(_mm512_fmadd_ps(score, factor, shift));
    }
  }

  // Scales of hidden tokens may be NaN.
  static __m512 scaled(__m512 weights, const std::uint8_t* scales) {
    const __mmask16 seen = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return _mm512_maskz_mul_ps(seen, weights, _mm512_maskz_loadu_ps(seen, scales));
  }

  const AttentionCall& call_;
  const AttentionShape& shape_;
  const int size_, value_size_;
  const float factor_;
  const float codes_;  // largest of a query: its sums of products must fit 32 bits
  const VectorProducts<Words> products_;
  int num_rows_ = 0;
  RowState state_, next_;
  KeyRange seen_[kRowBlock];
  float query_scales_[kRowBlock], weight_scales_[kRowBlock];
  float* scores_;
  Value* queries_;
  std::uint8_t* slice_;
};

}  // namespace
}  // namespace tokenmill
