// Attention with AMX: bf16 tiles of up to 16 rows, accumulated in tiles 0 to 3.
//
//   one tile of rows    4 tiles of columns at once, rows in tile 4
//   two tiles of rows   2 tiles of columns at once, rows in tiles 4 and 5
//   columns pass through tiles 6 and 7
//
// int8 codes become bf16, which is exact; scales come later.
#include "attention_latents.h"
#include "attention_rows.h"
#include "gemm_tiles.h"

namespace tokenmill {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileColumns = 16;
constexpr int kTileValues = 512;  // of a full tile of K or V
constexpr int kLower = 2;         // the first accumulator of the lower rows, if there are any

// Tiles for products that add up `step` values at a time.
void use_shapes(int num_rows, int step) {
  TileShapes shapes;
  const int upper = min_of(num_rows, kTileRows), lower = num_rows - upper;
  for (int tile = 0; tile < 4; ++tile)
    shapes.set(tile, lower > 0 && tile >= kLower ? lower : upper, kTileColumns * sizeof(float));
  shapes.set(4, upper, step * sizeof(bf16));
  shapes.set(5, lower > 0 ? lower : upper, step * sizeof(bf16));
  shapes.set(6, step / 2, kTileColumns * 2 * sizeof(bf16));
  shapes.set(7, step / 2, kTileColumns * 2 * sizeof(bf16));
  shapes.use();
}

inline void fetch(const void* line) {
  _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1);
}

// A tile of columns, and one (or null) that is fetched meanwhile if there are few rows: with many,
// products take longer than memory.
struct ColumnTile {
  const bf16* data;
  const std::uint8_t* ahead;
};

template <int RowTiles, int Column>
inline void multiply_column(const ColumnTile& tile) {
  constexpr int kTile = 6 + Column % 2;
  load_tile<kTile>(tile.data, kTileColumns * 2 * sizeof(bf16));
  if (RowTiles == 1 && tile.ahead != nullptr)
    for (int row = 0; row < 16; ++row) fetch(tile.ahead + row * kCacheLine);
  multiply_bf16<Column, 4, kTile>();
  if constexpr (RowTiles == 2) multiply_bf16<kLower + Column, 5, kTile>();
}

template <int RowTiles, int Column>
inline void store_column(float* out, std::int64_t stride) {
  store_tile<Column>(out + Column * kTileColumns, stride * sizeof(float));
  if constexpr (RowTiles == 2)
    store_tile<kLower + Column>(out + kTileRows * stride + Column * kTileColumns,
                                 stride * sizeof(float));
}

// out = rows . columns for `Columns` tiles of columns; column_tile(step, column) finds them.
template <int RowTiles, int Columns, class FindTile>
inline void multiply(const bf16* rows, std::int64_t row_stride, int step_values, int num_steps,
                     const FindTile& column_tile, float* out, std::int64_t out_stride) {
  static_assert(RowTiles * Columns <= 4);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int step = 0; step < num_steps; ++step) {
    load_tile<4>(rows + step * step_values, row_stride * sizeof(bf16));
    if constexpr (RowTiles == 2)
      load_tile<5>(rows + step * step_values + kTileRows * row_stride, row_stride * sizeof(bf16));
    multiply_column<RowTiles, 0>(column_tile(step, 0));
    if constexpr (Columns > 1) multiply_column<RowTiles, 1>(column_tile(step, 1));
    if constexpr (Columns > 2) {
      multiply_column<RowTiles, 2>(column_tile(step, 2));
      multiply_column<RowTiles, 3>(column_tile(step, 3));
    }
  }
  store_column<RowTiles, 0>(out, out_stride);
  if constexpr (Columns > 1) store_column<RowTiles, 1>(out, out_stride);
  if constexpr (Columns > 2) {
    store_column<RowTiles, 2>(out, out_stride);
    store_column<RowTiles, 3>(out, out_stride);
  }
}

template <int N>
struct Number {
  static constexpr int value = N;
};

constexpr int kStep = 32;

template <KvFormat Format>
class TileWorker {
 public:
  explicit TileWorker(const AttentionCall& call)
      : call_(call), shape_(call.shape), size_(call.shape.cache.head_size),
        value_size_(call.shape.cache.value_size()), factor_(exponent_factor(call.shape)) {
    const std::size_t state = partial_floats(value_size_) * sizeof(float);
    const std::size_t scores = std::size_t{kRowBlock} * kScoreStride * sizeof(float);
    const std::size_t queries = std::size_t(kRowBlock) * size_ * sizeof(bf16);
    const std::size_t unit = std::size_t(kUnit) * size_ * sizeof(bf16);
    const bool has_unpacked = Format == KvFormat::int8 || !shape_.cache.stores_values();
    const std::size_t unpacked = has_unpacked ? 2 * kUnits * unit : 0;
    auto* memory = static_cast<std::uint8_t*>(
        thread_scratch(1, 2 * state + scores + queries + unit + unpacked));
    auto take = [&memory](std::size_t size) {
      std::uint8_t* taken = memory;
      memory += size;
      return taken;
    };
    state_ = RowState::at(reinterpret_cast<float*>(take(state)));
    next_ = RowState::at(reinterpret_cast<float*>(take(state)));
    scores_ = reinterpret_cast<float*>(take(scores));
    queries_ = reinterpret_cast<bf16*>(take(queries));
    tail_ = reinterpret_cast<bf16*>(take(unit));
    unpacked_ = reinterpret_cast<bf16*>(take(unpacked));
  }

  void run(const TaskQueue& queue, float* partials) {
    walk(*this, call_, queue, state_, next_, partials);
    release_tiles();
  }

  // Queries, and what each of them sees.
  void load_rows(const Block& block) {
    const RequestView request(call_.tables, block.request);
    num_rows_ = block.num_rows;
    seq_len_ = request.seq_len;
    RowCursor row(shape_, request, block);
    for (int r = 0; r < num_rows_; ++r, row.advance()) {
      seen_[r] = visible_keys(shape_, request.query_len, request.seq_len, row.query());
      const std::int64_t at = row.offset(call_.queries.stride, size_);
      for (int d = 0; d < size_; d += 16)
        store_values(queries_ + std::int64_t{r} * size_, true, d, 0xffff,
                     load_values(call_.queries.data, call_.queries.is_bf16, at + d, 0xffff));
    }
    use_shapes(num_rows_, kStep);
  }

  void attend(const Units& units, const AheadUnit* ahead, const RowState& result) {
    Columns columns;
    find_columns(units, ahead, columns);
    score(columns, ahead);
    for (int r = 0; r < num_rows_; ++r)
      softmax(scores_ + r * kScoreStride, columns, seen_[r].begin - units.first_key,
              seen_[r].end - units.first_key, result.m[r], result.l[r]);
    weigh(columns, shape_.cache.stores_values() ? ahead + units.count : nullptr, result.o);
  }

 private:
  // A visit's keys and values in bf16: groups of K, units of V. Scores and p have a column for each
  // of their keys.
  struct Columns {
    int num_units;
    const bf16* keys[2 * kUnits];
    const bf16* values[kUnits];
    const float* key_scales[2 * kUnits];  // int8 only
    const float* value_scales[kUnits];
  };

  void find_columns(const Units& units, const AheadUnit* ahead, Columns& columns) {
    columns.num_units = units.count;
    const std::int64_t group_bytes = kKeyGroup * shape_.cache.token_bytes();
    for (int u = 0; u < units.count; ++u) {
      for (int half = 0; half < 2; ++half) {
        const int g = 2 * u + half;
        columns.keys[g] = unpack<kKeyGroup>(units.keys[u] + half * group_bytes,
                                            ahead[u].data + half * group_bytes, g * kKeyGroup,
                                            columns.key_scales[g]);
      }
    }
    for (int u = 0; u < units.count; ++u) {
      if (shape_.cache.stores_values()) {
        columns.values[u] = unpack<kUnit>(units.values(u), ahead[units.count + u].data,
                                          (kUnits + u) * kUnit, columns.value_scales[u]);
      } else {
        columns.values[u] = from_keys(columns, u);
      }
      const int position = units.first_key + u * kUnit;
      if (position + kUnit > seq_len_)
        columns.values[u] = written_values(columns.values[u], seq_len_ - position);
    }
  }

  // Tokens as tiles take them, `slot` tokens into the space for unpacked ones.
  template <int Tokens>
  const bf16* unpack(const std::uint8_t* data, const std::uint8_t* ahead, int slot,
                     const float*& scales) {
    if constexpr (Format == KvFormat::int8) {
      bf16* space = unpacked_ + std::int64_t{slot} * size_;
      const int count = Tokens * size_;
      scales = reinterpret_cast<const float*>(data + count);
      for (int i = 0; i < count; i += 32) {
        if (num_rows_ <= kTileRows && i % 64 == 0) fetch(ahead + i);
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i));
        const __m512 low = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        const __m512 high = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
        _mm512_storeu_si512(space + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      for (int i = count; i < count + Tokens * int{sizeof(float)}; i += 64) fetch(ahead + i);
      return space;
    } else {
      return reinterpret_cast<const bf16*>(data);
    }
  }

  // A unit of values that are parts of keys, which are unpacked already.
  const bf16* from_keys(Columns& columns, int u) {
    bf16* space = unpacked_ + std::int64_t{kUnits + u} * kUnit * size_;
    auto* keys = reinterpret_cast<const std::uint8_t*>(columns.keys[2 * u]);
    auto* next = reinterpret_cast<const std::uint8_t*>(columns.keys[2 * u + 1]);
    keys_to_values(KvFormat::bf16, keys, next - keys, shape_.cache.value_offset, value_size_,
                   reinterpret_cast<std::uint8_t*>(space));
    if constexpr (Format == KvFormat::int8) {
      float* scales = scales_ + u * kUnit;
      for (int half = 0; half < 2; ++half)
        std::memcpy(scales + half * kKeyGroup, columns.key_scales[2 * u + half],
                    kKeyGroup * sizeof(float));
      columns.value_scales[u] = scales;
    }
    return space;
  }

  // A copy of a unit of V in which tokens from `count` on are zeros: recycled memory may hold
  // anything there, and 0 times NaN is NaN.
  const bf16* written_values(const bf16* unit, int count) {
    for (int i = 0; i < value_size_ * kUnit; i += 32) {
      const int left = count - i / 32 % (kUnit / 2) * 2;
      const __mmask32 mask = left >= 2 ? 0xffffffffu : left <= 0 ? 0 : 0x55555555u;
      _mm512_storeu_si512(tail_ + i, _mm512_maskz_loadu_epi16(mask, unit + i));
    }
    return tail_;
  }

  // scores = queries . keys.
  void score(const Columns& columns, const AheadUnit* ahead) {
    if (size_ % kStep == 0) {
      score_tiles(kStep, columns, ahead);
    } else {
      use_shapes(num_rows_, kStep / 2);
      score_tiles(kStep / 2, columns, ahead);
      use_shapes(num_rows_, kStep);
    }
  }

  void score_tiles(int step, const Columns& columns, const AheadUnit* ahead) {
    const int num_steps = size_ / step, tile_values = step * kTileColumns;
    const int num_tiles = 2 * columns.num_units;
    int tile = 0;
    const auto at = [&](int step, int column) {
      const int g = tile + column;
      return ColumnTile{columns.keys[g] + step * tile_values,
                        ahead_bytes(ahead[g / 2], (g % 2 * num_steps + step) * tile_values)};
    };
    const auto some = [&](auto row_tiles, auto count) {
      constexpr int kRows = decltype(row_tiles)::value, kCount = decltype(count)::value;
      multiply<kRows, kCount>(queries_, size_, step, num_steps, at,
                              scores_ + tile * kTileColumns, kScoreStride);
      tile += kCount;
    };
    if (num_rows_ > kTileRows) {
      while (tile < num_tiles) some(Number<2>{}, Number<2>{});
    } else {
      while (tile + 4 <= num_tiles) some(Number<1>{}, Number<4>{});
      if (tile < num_tiles) some(Number<1>{}, Number<2>{});
    }
  }

  // out = p . values. `ahead` may be null.
  void weigh(const Columns& columns, const AheadUnit* ahead, float* out) {
    const auto* p = reinterpret_cast<const bf16*>(scores_);
    const int num_tiles = value_size_ / kTileColumns;
    constexpr std::int64_t kStride = kScoreStride * sizeof(float) / sizeof(bf16);
    int tile = 0;
    const auto at = [&](int unit, int column) {
      const int begin = (tile + column) * kTileValues;
      return ColumnTile{columns.values[unit] + begin,
                        ahead == nullptr ? nullptr : ahead_bytes(ahead[unit], begin)};
    };
    const auto some = [&](auto row_tiles, auto count) {
      constexpr int kRows = decltype(row_tiles)::value, kCount = decltype(count)::value;
      multiply<kRows, kCount>(p, kStride, kStep, columns.num_units, at,
                              out + tile * kTileColumns, value_size_);
      tile += kCount;
    };
    if (num_rows_ > kTileRows) {
      while (tile + 2 <= num_tiles) some(Number<2>{}, Number<2>{});
      if (tile < num_tiles) some(Number<2>{}, Number<1>{});
    } else {
      while (tile + 4 <= num_tiles) some(Number<1>{}, Number<4>{});
      while (tile + 2 <= num_tiles) some(Number<1>{}, Number<2>{});
      if (tile < num_tiles) some(Number<1>{}, Number<1>{});
    }
  }

  // What is fetched while values [value, ...) of a unit are multiplied. int8 is fetched while it is
  // unpacked.
  static const std::uint8_t* ahead_bytes(const AheadUnit& unit, int value) {
    return Format == KvFormat::bf16 ? unit.data + value * sizeof(bf16) : nullptr;
  }

  // Scores of a row to p, in place: the columns [begin, end) are visible, p of the others is 0.
  // Works on 32 columns at a time; those without a visible one are not looked at.
  void softmax(float* row, const Columns& columns, int begin, int end, float& m, float& l) {
    const int first = begin > 0 ? min_of(begin / kUnit, columns.num_units) : 0;
    const int last = end <= 0 ? first : min_of(ceil_div(end, kUnit), columns.num_units);
    transform(row, columns, 2 * first, 2 * last);
    hide(row, first, last, begin, end);
    __m512 largest = _mm512_set1_ps(kNothing);
    for (int v = 2 * first; v < 2 * last; ++v)
      largest = _mm512_max_ps(largest, _mm512_loadu_ps(row + v * 16));
    m = _mm512_reduce_max_ps(largest);
    const __m512 shift = _mm512_set1_ps(-m * factor_);
    __m512 sum = _mm512_setzero_ps();
    bf16* p = reinterpret_cast<bf16*>(row);
    for (int g = 0; g < first; ++g) store_p(p, g, _mm512_setzero_ps(), _mm512_setzero_ps());
    for (int g = first; g < last; ++g) {
      __m512 low = weight(_mm512_loadu_ps(row + g * kUnit), shift);
      __m512 high = weight(_mm512_loadu_ps(row + g * kUnit + 16), shift);
      sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
      if constexpr (Format == KvFormat::int8) {
        low = scaled(low, columns.value_scales[g]);
        high = scaled(high, columns.value_scales[g] + 16);
      }
      store_p(p, g, low, high);
    }
    for (int g = last; g < columns.num_units; ++g)
      store_p(p, g, _mm512_setzero_ps(), _mm512_setzero_ps());
    l = _mm512_reduce_add_ps(sum);
  }

  // Hidden scores among the 32 columns at either end of the visible ones.
  static void hide(float* row, int first, int last, int begin, int end) {
    for (int g = first; g < last; ++g) {
      const int column = g * kUnit;
      if (column >= begin && column + kUnit <= end) continue;
      for (int at = column; at < column + kUnit; at += 16) {
        const __mmask16 visible = first_lanes(end - at) & ~first_lanes(begin - at);
        _mm512_mask_storeu_ps(row + at, ~visible, _mm512_set1_ps(kHidden));
      }
    }
  }

  // Off by a factor near 1 that is the same for the whole row.
  __m512 weight(__m512 score, __m512 shift) const {
    return exp2_of<4>(_mm512_fmadd_ps(score, _mm512_set1_ps(factor_), shift));
  }

  // Scales of hidden tokens may be NaN.
  static __m512 scaled(__m512 weights, const float* scales) {
    const __mmask16 seen = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return _mm512_maskz_mul_ps(seen, weights, _mm512_maskz_loadu_ps(seen, scales));
  }

  // Scales of int8 keys, soft cap.
  void transform(float* row, const Columns& columns, int first, int last) {
    if (Format != KvFormat::int8 && shape_.soft_cap <= 0.0f) return;
    const __m512 cap = _mm512_set1_ps(shape_.soft_cap);
    const __m512 scale = _mm512_set1_ps(shape_.scale / shape_.soft_cap);
    for (int v = first; v < last; ++v) {
      __m512 s = _mm512_loadu_ps(row + v * 16);
      if constexpr (Format == KvFormat::int8)
        s = _mm512_mul_ps(s, _mm512_loadu_ps(columns.key_scales[v]));
      if (shape_.soft_cap > 0.0f) s = _mm512_mul_ps(tanh_of(_mm512_mul_ps(s, scale)), cap);
      _mm512_storeu_ps(row + v * 16, s);
    }
  }

  static void store_p(bf16* p, int unit, __m512 low, __m512 high) {
    _mm512_storeu_si512(p + unit * kUnit, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  const AttentionCall& call_;
  const AttentionShape& shape_;
  const int size_, value_size_;
  const float factor_;
  int num_rows_ = 0, seq_len_ = 0;
  RowState state_, next_;
  KeyRange seen_[kRowBlock];
  float* scores_;
  bf16* queries_;
  bf16* tail_;
  bf16* unpacked_;
  alignas(64) float scales_[kPartition];  // int8: of values that are parts of keys
};

}  // namespace

void attention_amx(const AttentionCall& call, const TaskQueue& queue, float* partials) {
  if (call.shape.cache.format == KvFormat::int8) {
    TileWorker<KvFormat::int8>(call).run(queue, partials);
  } else {
    TileWorker<KvFormat::bf16>(call).run(queue, partials);
  }
}

}  // namespace tokenmill
