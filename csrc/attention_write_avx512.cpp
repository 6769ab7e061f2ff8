// Rotation of queries and keys, and the way of K and V into the cache. Elements i and i + half of a
// head are rotated as a pair, in float32, and rounded once.
#include "attention_kernels.h"
#include "elementwise_math.h"

namespace tokenmill {
namespace {

// One head in float32, rotated if cos is given.
void load_head(const TokenRows& rows, std::int64_t at, int size, const float* cos,
               const float* sin, int half, float* head) {
  for (int d = 0; d < size; d += 16)
    _mm512_storeu_ps(head + d, load_values(rows.data, rows.is_bf16, at + d, 0xffff));
  if (cos == nullptr) return;
  for (int d = 0; d < half; d += 16) {
    const __mmask16 mask = first_lanes(half - d);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + d), s = _mm512_maskz_loadu_ps(mask, sin + d);
    const __m512 x1 = _mm512_maskz_loadu_ps(mask, head + d);
    const __m512 x2 = _mm512_maskz_loadu_ps(mask, head + half + d);
    const __m512 y1 = _mm512_sub_ps(_mm512_mul_ps(x1, c), _mm512_mul_ps(x2, s));
    const __m512 y2 = _mm512_add_ps(_mm512_mul_ps(x2, c), _mm512_mul_ps(x1, s));
    _mm512_mask_storeu_ps(head + d, mask, y1);
    _mm512_mask_storeu_ps(head + half + d, mask, y2);
  }
}

// A head to int8 codes; returns the scale.
float quantize_head(const float* head, int size, std::int8_t* codes) {
  __m512 largest = _mm512_setzero_ps();
  for (int d = 0; d < size; d += 16)
    largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(head + d)));
  const float amax = _mm512_reduce_max_ps(largest);
  const bool is_zero = amax < 1e-30f;
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : 127.0f / amax);
  bool has_nan = false;
  for (int d = 0; d < size; d += 16) {
    const __m512 values = _mm512_loadu_ps(head + d);
    has_nan = has_nan || _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) != 0;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + d),
                     _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values, inverse))));
  }
  return has_nan ? __builtin_nanf("") : is_zero ? 0.0f : amax / 127.0f;
}

// Words of 32 bits, 64 bytes apart.
void scatter_words(void* target, __m512i words) {
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192,
                                          208, 224, 240);
  _mm512_i32scatter_epi32(target, lanes, words, 4);
}

void write_key(const CacheLayout& cache, std::uint8_t* group, int lane, const float* head) {
  const int size = cache.head_size;
  switch (cache.format) {
    case KvFormat::float32:
      for (int d = 0; d < size; d += 16)
        scatter_words(group + 4 * (d * 16 + lane), _mm512_castps_si512(_mm512_loadu_ps(head + d)));
      break;
    case KvFormat::bf16:
      for (int d = 0; d < size; d += 32) {
        const bool whole = d + 32 <= size;
        const __m512 low = _mm512_loadu_ps(head + d);
        const __m512 high = whole ? _mm512_loadu_ps(head + d + 16) : _mm512_setzero_ps();
        const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        std::uint8_t* target = group + 4 * (d / 2 * 16 + lane);
        if (whole) {
          scatter_words(target, words);
        } else {
          const __m256i lanes = _mm256_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112);
          _mm256_i32scatter_epi32(target, lanes, _mm512_castsi512_si256(words), 4);
        }
      }
      break;
    case KvFormat::int8: {
      alignas(64) std::int8_t codes[kMaxHeadSize];
      const float scale = quantize_head(head, size, codes);
      for (int d = 0; d < size; d += 2)
        std::memcpy(group + 2 * (d / 2 * 16 + lane), codes + d, 2);
      std::memcpy(group + 16 * size + 4 * lane, &scale, 4);
      break;
    }
  }
}

// Only this token's bytes are written: another thread may write the token that shares its words.
void write_value(const CacheLayout& cache, std::uint8_t* group, int token, const float* head) {
  const int size = cache.head_size, pair = token / 2;
  const bool odd = token % 2 != 0;
  switch (cache.format) {
    case KvFormat::float32:
      for (int d = 0; d < size; d += 16)
        _mm512_storeu_ps(group + 4 * (d * 32 + token * 16), _mm512_loadu_ps(head + d));
      break;
    case KvFormat::bf16:
      for (int d = 0; d < size; d += 16) {
        __m512i words = _mm512_cvtepu16_epi32(round_to_bf16(_mm512_loadu_ps(head + d)));
        if (odd) words = _mm512_slli_epi32(words, 16);
        _mm512_mask_storeu_epi16(group + 2 * (d * 32 + pair * 32), odd ? 0xaaaaaaaau : 0x55555555u,
                                 words);
      }
      break;
    case KvFormat::int8: {
      alignas(64) std::int8_t codes[kMaxHeadSize];
      const float scale = quantize_head(head, size, codes);
      for (int d = 0; d < size; d += 16) {
        __m256i pairs = _mm256_cvtepu8_epi16(
            _mm_load_si128(reinterpret_cast<const __m128i*>(codes + d)));
        if (odd) pairs = _mm256_slli_epi16(pairs, 8);
        _mm256_mask_storeu_epi8(group + d * 32 + pair * 32, odd ? 0xaaaaaaaau : 0x55555555u, pairs);
      }
      std::memcpy(group + 32 * size + 4 * token, &scale, 4);
      break;
    }
  }
}

}  // namespace

void write_kv_avx512(const KvWrite& call, int token_begin, int token_end) {
  const CacheLayout& cache = call.cache;
  const int size = cache.head_size, half = call.rotary_dim / 2;
  alignas(64) float head[kMaxHeadSize];
  for (int token = token_begin; token < token_end; ++token) {
    const float* cos = nullptr;
    const float* sin = nullptr;
    if (call.cos != nullptr) {
      cos = call.cos + call.positions[token] * half;
      sin = call.sin + call.positions[token] * half;
    }
    if (call.queries.data != nullptr) {
      for (int h = 0; h < call.num_heads; ++h) {
        load_head(call.queries, token * call.queries.stride + h * size, size, cos, sin, half, head);
        for (int d = 0; d < size; d += 16)
          store_values(call.out_queries.data, call.out_queries.is_bf16,
                       token * call.out_queries.stride + h * size + d, 0xffff,
                       _mm512_loadu_ps(head + d));
      }
    }
    const std::int64_t slot = call.slots[token];
    if (slot < 0) continue;
    const int block = static_cast<int>(slot / cache.block_size);
    const int offset = static_cast<int>(slot % cache.block_size);
    for (int h = 0; h < cache.num_kv_heads; ++h) {
      load_head(call.keys, token * call.keys.stride + h * size, size, cos, sin, half, head);
      write_key(cache, call.blocks + cache.key_group(block, h, offset), offset % kKeyGroup, head);
      if (!cache.stores_values()) continue;
      load_head(call.values, token * call.values.stride + h * size, size, nullptr, nullptr, 0,
                head);
      write_value(cache, call.blocks + cache.value_group(block, h, offset), offset % kValueGroup,
                  head);
    }
  }
}

}  // namespace tokenmill
