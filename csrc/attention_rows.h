// What attention does besides products: queries into tiles, softmax, merging. For files compiled
// with AVX-512 only.
//
// An engine multiplies (see attention_avx512.cpp):
//   Value    type of the tiles
//   begin(num_rows, head_size), end()
//   scores(q, num_rows, head_size, keys, num_groups, scores)
//              q [num_rows][head_size], keys: 2 * num_groups groups of K
//   weighted(p, num_rows, head_size, values, num_groups, out)
//              p in the rows of the scores, values: num_groups groups of V, out [rows][head_size]
#pragma once

#include <type_traits>

#include "attention_kernels.h"
#include "pool.h"
#include "elementwise_math.h"

namespace tokenmill {

// Floats between two rows of scores; a cache line more than needed, so that the rows of a tile do
// not fall into the same few sets of the cache.
constexpr int kScoreStride = kPartition + 16;
constexpr int kValueGroups = kPartition / kValueGroup;

// Hidden scores, and the m of a row that has seen no key. They are so far apart and so large that
// exp2 makes 0 of every difference with another number; both stay finite.
constexpr float kHidden = -1e30f;
constexpr float kNothing = -1e20f;

// Running result of the rows of a block: m, l and o of the partitions so far.
struct RowState {
  float* m;  // [kRowBlock]
  float* l;  // [kRowBlock]
  float* o;  // [kRowBlock][head_size]

  static RowState at(float* data) { return {data, data + kRowBlock, data + 2 * kRowBlock}; }
};

static inline void clear_state(const RowState& state, int num_rows, int head_size) {
  for (int r = 0; r < kRowBlock; ++r) {
    state.m[r] = kNothing;
    state.l[r] = 0.0f;
  }
  std::memset(state.o, 0, sizeof(float) * num_rows * head_size);
}

// Scores are multiplied by this in the exponent of 2.
static inline float exponent_factor(const AttentionShape& shape) {
  return shape.soft_cap > 0.0f ? kLog2E : shape.scale * kLog2E;
}

static inline void merge_state(const RowState& state, const RowState& next, int num_rows,
                               int head_size, float factor) {
  alignas(64) float keep[kRowBlock], add[kRowBlock];
  const __m512 c = _mm512_set1_ps(factor);
  for (int r = 0; r < num_rows; r += 16) {
    const __m512 m = _mm512_loadu_ps(state.m + r), next_m = _mm512_loadu_ps(next.m + r);
    const __m512 largest = _mm512_max_ps(m, next_m);
    const __m512 a = exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(m, largest), c));
    const __m512 b = exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(next_m, largest), c));
    const __m512 l = _mm512_loadu_ps(state.l + r), next_l = _mm512_loadu_ps(next.l + r);
    _mm512_storeu_ps(state.m + r, largest);
    _mm512_storeu_ps(state.l + r, _mm512_fmadd_ps(l, a, _mm512_mul_ps(next_l, b)));
    _mm512_store_ps(keep + r, a);
    _mm512_store_ps(add + r, b);
  }
  for (int r = 0; r < num_rows; ++r) {
    const __m512 a = _mm512_set1_ps(keep[r]), b = _mm512_set1_ps(add[r]);
    float* o = state.o + std::int64_t{r} * head_size;
    const float* next_o = next.o + std::int64_t{r} * head_size;
    for (int d = 0; d < head_size; d += 16)
      _mm512_storeu_ps(o + d, _mm512_fmadd_ps(_mm512_loadu_ps(o + d), a,
                                              _mm512_mul_ps(_mm512_loadu_ps(next_o + d), b)));
  }
}

// The rows of one request and KV head that are worked on together.
struct Block {
  int request, kv_head, row_begin, num_rows;
};

struct RequestView {
  int first_token, query_len, seq_len;
  const std::int32_t* blocks;

  RequestView(const StepTables& tables, int request)
      : first_token(tables.query_start_loc[request]),
        query_len(tables.query_start_loc[request + 1] - first_token),
        seq_len(tables.seq_lens[request]),
        blocks(tables.block_table + request * tables.block_table_stride) {}
};

// Where a row of a block is in rows of activations.
static inline std::int64_t row_offset(const AttentionShape& shape, int group,
                                      const RequestView& request, const Block& block, int r,
                                      std::int64_t stride) {
  const int row = block.row_begin + r;
  const int head = block.kv_head * group + row % group;
  return std::int64_t{request.first_token + row / group} * stride +
         std::int64_t{head} * shape.cache.head_size;
}

static inline void store_result(const AttentionCall& call, const Block& block,
                                const RowState& state) {
  const RequestView request(call.tables, block.request);
  const int size = call.shape.cache.head_size, group = call.shape.group_size();
  for (int r = 0; r < block.num_rows; ++r) {
    const std::int64_t at = row_offset(call.shape, group, request, block, r, call.out.stride);
    const __m512 inverse = _mm512_set1_ps(1.0f / state.l[r]);
    for (int d = 0; d < size; d += 16) {
      const __m512 o = _mm512_loadu_ps(state.o + std::int64_t{r} * size + d);
      // A zero's sign could tell which keys were skipped; 0 + -0 is 0.
      const __m512 value = _mm512_add_ps(_mm512_mul_ps(o, inverse), _mm512_setzero_ps());
      store_values(call.out.data, call.out.is_bf16, at + d, 0xffff, value);
    }
  }
}

template <class Engine, KvFormat Format>
class BlockWorker {
 public:
  using Value = typename Engine::Value;

  explicit BlockWorker(const AttentionCall& call)
      : call_(call), shape_(call.shape), cache_(call.shape.cache), size_(cache_.head_size),
        factor_(exponent_factor(call.shape)) {
    const std::size_t state = partial_floats(size_) * sizeof(float);
    const std::size_t scores = std::size_t{kRowBlock} * kScoreStride * sizeof(float);
    const std::size_t queries = round_up(std::size_t(kRowBlock) * size_ * sizeof(Value), kCacheLine);
    const std::size_t group = std::size_t(kValueGroup) * size_ * sizeof(Value);
    const std::size_t unpacked = Format == KvFormat::int8 ? 2 * kValueGroups * group : 0;
    auto* memory = static_cast<std::uint8_t*>(
        thread_scratch(1, 2 * state + scores + queries + group + unpacked));
    auto take = [&memory](std::size_t size) {
      std::uint8_t* taken = memory;
      memory += size;
      return taken;
    };
    state_ = RowState::at(reinterpret_cast<float*>(take(state)));
    next_ = RowState::at(reinterpret_cast<float*>(take(state)));
    scores_ = reinterpret_cast<float*>(take(scores));
    queries_ = reinterpret_cast<Value*>(take(queries));
    tail_ = reinterpret_cast<Value*>(take(group));
    unpacked_ = reinterpret_cast<Value*>(take(unpacked));
  }

  void run(const AttentionTask& task, float* partials) {
    for (int head = task.kv_head_begin; head < task.kv_head_end; ++head) {
      for (int row = task.row_begin; row < task.row_end; row += kRowBlock) {
        const int num_rows = min_of(kRowBlock, task.row_end - row);
        Engine::begin(num_rows, size_);
        const Block block{task.request, head, row, num_rows};
        if (task.first_partial < 0) {
          attend(block);
        } else {
          attend_partly(block, task, partials);
        }
      }
    }
    Engine::end();
  }

 private:
  // From the first to the last key that any row of the block sees.
  KeyRange block_keys(const Block& block, const RequestView& request) const {
    const int last = block.row_begin + block.num_rows - 1;
    return {visible_keys(shape_, request.query_len, request.seq_len, block.row_begin).begin,
            visible_keys(shape_, request.query_len, request.seq_len, last).end};
  }

  void attend(const Block& block) {
    const RequestView request(call_.tables, block.request);
    const KeyRange keys = block_keys(block, request);
    load_rows(block, request);
    clear_state(state_, block.num_rows, size_);
    for (int p = keys.begin / kPartition; p * kPartition < keys.end; ++p) {
      attend_partition(block, request, keys, p, next_);
      merge_state(state_, next_, block.num_rows, size_, factor_);
    }
    store_result(call_, block, state_);
  }

  void attend_partly(const Block& block, const AttentionTask& task, float* partials) {
    const RequestView request(call_.tables, block.request);
    const KeyRange keys = block_keys(block, request);
    load_rows(block, request);
    for (int p = task.partition_begin; p < task.partition_end; ++p) {
      const std::int64_t index = task.first_partial + p - task.partition_begin;
      attend_partition(block, request, keys, p,
                       RowState::at(partials + index * partial_floats(size_)));
    }
  }

  // Queries, and what each of them sees.
  void load_rows(const Block& block, const RequestView& request) {
    const int group = shape_.group_size();
    for (int r = 0; r < block.num_rows; ++r) {
      seen_[r] = visible_keys(shape_, request.query_len, request.seq_len, block.row_begin + r);
      const std::int64_t at = row_offset(shape_, group, request, block, r, call_.queries.stride);
      for (int d = 0; d < size_; d += 16)
        store_values(queries_ + std::int64_t{r} * size_, sizeof(Value) == 2, d, 0xffff,
                     load_values(call_.queries.data, call_.queries.is_bf16, at + d, 0xffff));
    }
  }

  // Groups of one partition that hold keys of the block, by pointer. Scores and p have a column for
  // each of their keys; column 0 is position `first`.
  struct Groups {
    int first, count;
    const Value* keys[2 * kValueGroups];
    const Value* values[kValueGroups];
    const float* key_scales[2 * kValueGroups];  // int8 only
    const float* value_scales[kValueGroups];
  };

  void attend_partition(const Block& block, const RequestView& request, const KeyRange& keys,
                        int partition, const RowState& result) {
    Groups groups;
    find_groups(block, request, keys, partition * kPartition, groups);
    Engine::scores(queries_, block.num_rows, size_, groups.keys, groups.count, scores_);
    for (int r = 0; r < block.num_rows; ++r) {
      softmax(scores_ + r * kScoreStride, groups, seen_[r].begin - groups.first,
              seen_[r].end - groups.first, result.m[r], result.l[r]);
    }
    Engine::weighted(reinterpret_cast<const Value*>(scores_), block.num_rows, size_,
                     groups.values, groups.count, result.o);
  }

  void find_groups(const Block& block, const RequestView& request, const KeyRange& keys,
                   int start, Groups& groups) {
    const int begin = keys.begin > start ? (keys.begin - start) / kValueGroup : 0;
    const int end = ceil_div(min_of(keys.end - start, kPartition), kValueGroup);
    groups.first = start + begin * kValueGroup;
    groups.count = end - begin;
    for (int g = 0; g < groups.count; ++g) {
      const int position = groups.first + g * kValueGroup;
      const int at = position / cache_.block_size, offset = position % cache_.block_size;
      for (int half = 0; half < 2; ++half)
        groups.keys[2 * g + half] = key_group(
            cache_.key_group(request.blocks[at], block.kv_head, offset + half * kKeyGroup),
            2 * g + half, groups);
      groups.values[g] =
          value_group(cache_.value_group(request.blocks[at], block.kv_head, offset), g, groups);
      if (position + kValueGroup > request.seq_len)
        groups.values[g] = written_values(groups.values[g], request.seq_len - position);
    }
  }

  const Value* key_group(std::int64_t offset, int index, Groups& groups) {
    return group_at<kKeyGroup>(offset, unpacked_ + std::int64_t{index} * kKeyGroup * size_,
                               groups.key_scales[index]);
  }

  const Value* value_group(std::int64_t offset, int index, Groups& groups) {
    Value* space = unpacked_ + std::int64_t{kValueGroups + index} * kValueGroup * size_;
    return group_at<kValueGroup>(offset, space, groups.value_scales[index]);
  }

  // A group as the engine takes it. int8 codes become bf16, which is exact; scales come later.
  template <int Tokens>
  const Value* group_at(std::int64_t offset, Value* space, const float*& scales) {
    const std::uint8_t* data = call_.cache + offset;
    if constexpr (Format == KvFormat::int8) {
      const int count = Tokens * size_;
      scales = reinterpret_cast<const float*>(data + count);
      for (int i = 0; i < count; i += 32) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i));
        const __m512 low = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        const __m512 high = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
        _mm512_storeu_si512(space + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      return space;
    } else {
      (void)space;
      (void)scales;
      return reinterpret_cast<const Value*>(data);
    }
  }

  // A copy of a group of V in which tokens from `count` on are zeros: recycled memory may hold
  // anything there, and 0 times NaN is NaN.
  const Value* written_values(const Value* group, int count) {
    constexpr int kPacked = 4 / sizeof(Value);  // tokens in a word
    constexpr int kWords = kValueGroup / kPacked;
    for (int i = 0; i < size_; i += 16) {
      for (int w = 0; w < kWords; ++w) {
        const std::int64_t at = (std::int64_t{i} * kWords + w * 16) * kPacked;
        const int left = count - w * kPacked;
        const __mmask32 mask = left >= kPacked ? 0xffffffffu : left <= 0 ? 0 : 0x55555555u;
        _mm512_storeu_si512(tail_ + at, _mm512_maskz_loadu_epi16(mask, group + at));
      }
    }
    return tail_;
  }

  // Scores of a row to p, in place: the columns [begin, end) are visible, p of the others is 0.
  // Works on 32 columns at a time; those without a visible one are not looked at.
  void softmax(float* row, const Groups& groups, int begin, int end, float& m, float& l) {
    const int first = begin > 0 ? min_of(begin / kValueGroup, groups.count) : 0;
    const int last = end <= 0 ? first : min_of(ceil_div(end, kValueGroup), groups.count);
    transform(row, groups, 2 * first, 2 * last);
    hide(row, first, last, begin, end);
    __m512 largest = _mm512_set1_ps(kNothing);
    for (int v = 2 * first; v < 2 * last; ++v)
      largest = _mm512_max_ps(largest, _mm512_loadu_ps(row + v * 16));
    m = _mm512_reduce_max_ps(largest);
    const __m512 shift = _mm512_set1_ps(Format == KvFormat::float32 ? m : -m * factor_);
    __m512 sum = _mm512_setzero_ps();
    Value* p = reinterpret_cast<Value*>(row);
    for (int g = 0; g < first; ++g) store_p(p, g, _mm512_setzero_ps(), _mm512_setzero_ps());
    for (int g = first; g < last; ++g) {
      __m512 low = weight(_mm512_loadu_ps(row + g * kValueGroup), shift);
      __m512 high = weight(_mm512_loadu_ps(row + g * kValueGroup + 16), shift);
      sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
      if constexpr (Format == KvFormat::int8) {
        low = scaled(low, groups.value_scales[g]);
        high = scaled(high, groups.value_scales[g] + 16);
      }
      store_p(p, g, low, high);
    }
    for (int g = last; g < groups.count; ++g)
      store_p(p, g, _mm512_setzero_ps(), _mm512_setzero_ps());
    l = _mm512_reduce_add_ps(sum);
  }

  // Hidden scores among the 32 columns at either end of the visible ones.
  static void hide(float* row, int first, int last, int begin, int end) {
    for (int g = first; g < last; ++g) {
      const int column = g * kValueGroup;
      if (column >= begin && column + kValueGroup <= end) continue;
      for (int at = column; at < column + kValueGroup; at += 16) {
        const __mmask16 visible = first_lanes(end - at) & ~first_lanes(begin - at);
        _mm512_mask_storeu_ps(row + at, ~visible, _mm512_set1_ps(kHidden));
      }
    }
  }

  // float32: exact where s = m. Others: off by a factor near 1 that is the same for the whole row.
  __m512 weight(__m512 score, __m512 shift) const {
    const __m512 factor = _mm512_set1_ps(factor_);
    if constexpr (Format == KvFormat::float32) {
      return exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(score, shift), factor));
    } else {
      return exp2_of<4>(_mm512_fmadd_ps(score, factor, shift));
    }
  }

  // Scales of hidden tokens may be NaN.
  static __m512 scaled(__m512 weights, const float* scales) {
    const __mmask16 seen = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return _mm512_maskz_mul_ps(seen, weights, _mm512_maskz_loadu_ps(seen, scales));
  }

  // Scales of int8 keys, soft cap.
  void transform(float* row, const Groups& groups, int first, int last) {
    if (Format != KvFormat::int8 && shape_.soft_cap <= 0.0f) return;
    const __m512 cap = _mm512_set1_ps(shape_.soft_cap);
    const __m512 scale = _mm512_set1_ps(shape_.scale / shape_.soft_cap);
    for (int v = first; v < last; ++v) {
      __m512 s = _mm512_loadu_ps(row + v * 16);
      if constexpr (Format == KvFormat::int8)
        s = _mm512_mul_ps(s, _mm512_loadu_ps(groups.key_scales[v]));
      if (shape_.soft_cap > 0.0f) s = _mm512_mul_ps(tanh_of(_mm512_mul_ps(s, scale)), cap);
      _mm512_storeu_ps(row + v * 16, s);
    }
  }

  static void store_p(Value* p, int group, __m512 low, __m512 high) {
    if constexpr (sizeof(Value) == 2) {
      _mm512_storeu_si512(p + group * kValueGroup, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    } else {
      _mm512_storeu_ps(p + group * kValueGroup, low);
      _mm512_storeu_ps(p + group * kValueGroup + 16, high);
    }
  }

  const AttentionCall& call_;
  const AttentionShape& shape_;
  const CacheLayout& cache_;
  const int size_;
  const float factor_;
  RowState state_, next_;
  KeyRange seen_[kRowBlock];
  float* scores_;
  Value* queries_;
  Value* tail_;
  Value* unpacked_;
};

}  // namespace tokenmill
