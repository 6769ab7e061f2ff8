// Attention products with AVX-512: up to 4 rows times 4 vectors of 16 columns. A word of a row (two
// bf16 values or a float32) is multiplied with 16 words, and the products are added one after
// another.
#include "attention_rows.h"

namespace tokenmill {
namespace {

struct Bf16Words {
  using Value = bf16;
  static __m512 add(__m512 sum, __m512i columns, std::int32_t row) {
    return _mm512_dpbf16_ps(sum, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(row));
  }
};

struct FloatWords {
  using Value = float;
  static __m512 add(__m512 sum, __m512i columns, std::int32_t row) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(columns),
                           _mm512_castsi512_ps(_mm512_set1_epi32(row)), sum);
  }
};

constexpr int kRows = 4;
constexpr int kColumns = 4;

// out = rows . columns. A step has `step_words` words of each row; column_words(step, column) are
// the words of 16 columns, [step_words][16].
template <class Words, int Rows, int Columns, class ColumnWords>
inline void multiply(const std::int32_t* rows, std::int64_t row_stride, int step_words,
                     int num_steps, const ColumnWords& column_words, float* out,
                     std::int64_t out_stride) {
  __m512 sums[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) sums[r][c] = _mm512_setzero_ps();
  for (int step = 0; step < num_steps; ++step) {
    const std::int32_t* columns[Columns];
    for (int c = 0; c < Columns; ++c) columns[c] = column_words(step, c);
    for (int w = 0; w < step_words; ++w) {
      __m512i words[Columns];
      for (int c = 0; c < Columns; ++c) words[c] = _mm512_loadu_si512(columns[c] + w * 16);
      for (int r = 0; r < Rows; ++r) {
        const std::int32_t word = rows[r * row_stride + step * step_words + w];
        for (int c = 0; c < Columns; ++c) sums[r][c] = Words::add(sums[r][c], words[c], word);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c)
      _mm512_storeu_ps(out + r * out_stride + c * 16, sums[r][c]);
}

// All rows, in fours as far as there are so many.
template <class Words, int Columns, class ColumnWords>
inline void multiply_rows(const std::int32_t* rows, std::int64_t row_stride, int num_rows,
                          int step_words, int num_steps, const ColumnWords& column_words,
                          float* out, std::int64_t out_stride) {
  int r = 0;
  for (; r + kRows <= num_rows; r += kRows)
    multiply<Words, kRows, Columns>(rows + r * row_stride, row_stride, step_words, num_steps,
                                    column_words, out + r * out_stride, out_stride);
  rows += r * row_stride;
  out += r * out_stride;
  switch (num_rows - r) {
    case 1:
      multiply<Words, 1, Columns>(rows, row_stride, step_words, num_steps, column_words, out,
                                  out_stride);
      break;
    case 2:
      multiply<Words, 2, Columns>(rows, row_stride, step_words, num_steps, column_words, out,
                                  out_stride);
      break;
    case 3:
      multiply<Words, 3, Columns>(rows, row_stride, step_words, num_steps, column_words, out,
                                  out_stride);
      break;
    default: break;
  }
}

template <class Words>
struct VectorEngine {
  using Value = typename Words::Value;
  static constexpr int kPacked = 4 / sizeof(Value);  // values in a word

  static void begin(int, int) {}
  static void end() {}

  static void scores(const Value* q, int num_rows, int head_size, const Value* const* keys,
                     int num_groups, float* scores) {
    const int num_words = head_size / kPacked;
    int group = 0;
    const auto at = [&](int, int column) { return words(keys[group + column]); };
    for (; group + kColumns <= 2 * num_groups; group += kColumns)
      multiply_rows<Words, kColumns>(words(q), num_words, num_rows, num_words, 1, at,
                                     scores + group * 16, kScoreStride);
    if (group < 2 * num_groups)
      multiply_rows<Words, 2>(words(q), num_words, num_rows, num_words, 1, at,
                              scores + group * 16, kScoreStride);
  }

  static void weighted(const Value* p, int num_rows, int head_size, const Value* const* values,
                       int num_groups, float* out) {
    constexpr int kWords = kValueGroup / kPacked;
    int left = 0;
    const auto at = [&](int step, int column) {
      return words(values[step]) + (left / 16 + column) * kWords * 16;
    };
    for (; left + kColumns * 16 <= head_size; left += kColumns * 16)
      multiply_rows<Words, kColumns>(words(p), kScoreStride, num_rows, kWords, num_groups, at,
                                     out + left, head_size);
    for (; left < head_size; left += 16)
      multiply_rows<Words, 1>(words(p), kScoreStride, num_rows, kWords, num_groups, at,
                              out + left, head_size);
  }

 private:
  static const std::int32_t* words(const Value* values) {
    return reinterpret_cast<const std::int32_t*>(values);
  }
};

}  // namespace

void attention_avx512(const AttentionCall& call, const AttentionTask& task, float* partials) {
  switch (call.shape.cache.format) {
    case KvFormat::bf16:
      BlockWorker<VectorEngine<Bf16Words>, KvFormat::bf16>(call).run(task, partials);
      break;
    case KvFormat::int8:
      BlockWorker<VectorEngine<Bf16Words>, KvFormat::int8>(call).run(task, partials);
      break;
    case KvFormat::float32:
      BlockWorker<VectorEngine<FloatWords>, KvFormat::float32>(call).run(task, partials);
      break;
  }
}

void merge_partials_avx512(const AttentionCall& call, const MergeTask& merge,
                           const float* partials) {
  const int size = call.shape.cache.head_size, num_rows = merge.row_end - merge.row_begin;
  const RowState state = RowState::at(
      static_cast<float*>(thread_scratch(1, partial_floats(size) * sizeof(float))));
  clear_state(state, num_rows, size);
  for (int i = 0; i < merge.num_partials; ++i) {
    const float* partial = partials + (merge.first_partial + i) * partial_floats(size);
    merge_state(state, RowState::at(const_cast<float*>(partial)), num_rows, size,
                exponent_factor(call.shape));
  }
  store_result(call, {merge.request, merge.kv_head, merge.row_begin, num_rows}, state);
}

}  // namespace tokenmill
