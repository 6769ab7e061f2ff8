#include "pack_weights.h"

#include "block_formats.h"
#include "isa.h"
#include "pack_steps.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kPairs = kStep / 2;

// Positions of (column, value along K) within a panel.
constexpr std::int64_t bf16_in_panel(int column, int value) {
  const int pair = value % kStep / 2;
  return std::int64_t{value / kStep} * (kPanel * kStep) +
         ((column / kHalf * kPairs + pair) * kHalf + column % kHalf) * 2 + value % 2;
}

constexpr std::int64_t float32_in_panel(int column, int value) {
  return std::int64_t{value} * kPanel + column;
}

// Byte of four codes within a group; `quads` is how many lie behind one another.
constexpr int quad_at(int column, int quad, int quads) {
  return ((column / kHalf * quads + quad) * kHalf + column % kHalf) * 4;
}

std::int64_t source_row(const std::int64_t* row_index, int row) {
  return row_index != nullptr ? row_index[row] : row;
}

// Puts a column's group in its place in the group of a panel.
void place_group(const BlockFormat& format, const ColumnGroup& from, int column,
                 std::uint8_t* group) {
  if (format.bits == 4) {
    for (int quad = 0; quad < kQuads / 2; ++quad) {
      std::uint32_t low, high;
      std::memcpy(&low, from.codes + 4 * quad, 4);
      std::memcpy(&high, from.codes + kStep / 2 + 4 * quad, 4);
      const std::uint32_t both = low | high << 4;
      std::memcpy(group + quad_at(column, quad, kQuads / 2), &both, 4);
    }
  } else {
    for (int quad = 0; quad < kQuads; ++quad)
      std::memcpy(group + quad_at(column, quad, kQuads), from.codes + 4 * quad, 4);
  }
  fp16* scales = reinterpret_cast<fp16*>(group + format.code_bytes());
  scales[column] = from.scale;
  if (format.has_minimum) scales[kPanel + column] = from.minimum;
}

int code_of(const BlockFormat& format, const std::uint8_t* group, int column, int value) {
  if (format.bits == 8)
    return static_cast<std::int8_t>(group[quad_at(column, value / 4, kQuads) + value % 4]);
  const int low = value % (kStep / 2);
  const int both = group[quad_at(column, low / 4, kQuads / 2) + low % 4];
  const int code = value < kStep / 2 ? both & 15 : both >> 4;
  return format.codes == Codes::linear ? code - format.zero : code_table(format.codes)[code];
}

// One panel of groups; read(row, group, out) gives them column by column.
template <class Read>
void pack_groups(const BlockFormat& format, int panel, int n, int k, const std::int64_t* row_index,
                 std::uint8_t* packed, const Read& read) {
  const std::size_t group_bytes = format.group_bytes();
  const int num_groups = k / kStep;
  std::uint8_t* target = packed + panel * num_groups * group_bytes;
  const int num_columns = min_of(kPanel, n - panel * kPanel);
  if (num_columns < kPanel) std::memset(target, 0, num_groups * group_bytes);
  ColumnGroup group;
  // Group by group, so that what is written stays in the first-level cache until it is whole.
  for (int g = 0; g < num_groups; ++g) {
    for (int column = 0; column < num_columns; ++column) {
      read(source_row(row_index, panel * kPanel + column), g, group);
      place_group(format, group, column, target + g * group_bytes);
    }
  }
}

// The rows of a weight that a whole panel is made of.
struct PanelRows {
  const char* rows[kPanel];

  PanelRows(const void* weight, std::int64_t row_bytes, int panel, const std::int64_t* row_index) {
    for (int column = 0; column < kPanel; ++column)
      rows[column] = static_cast<const char*>(weight) +
                     source_row(row_index, panel * kPanel + column) * row_bytes;
  }

  // Where the values of a step begin.
  void at(std::int64_t byte, const void** begins) const {
    for (int column = 0; column < kPanel; ++column) begins[column] = rows[column] + byte;
  }
};

// One panel; Run values along K are neighbours in it, too.
template <int Run, class T, class Position>
void pack_panel(const T* weight, std::int64_t stride, int panel, int n, int k,
                const std::int64_t* row_index, std::int64_t panel_values, T* packed,
                Position position) {
  T* target = packed + panel * panel_values;
  std::memset(target, 0, sizeof(T) * panel_values);
  // Step by step, so that what is written stays in the first-level cache until it is whole.
  for (int step = 0; step < k; step += kStep) {
    for (int column = 0; column < min_of(kPanel, n - panel * kPanel); ++column) {
      const T* row = weight + source_row(row_index, panel * kPanel + column) * stride;
      const int end = min_of(step + kStep, k);
      int value = step;
      for (; value + Run <= end; value += Run)
        std::memcpy(target + position(column, value), row + value, sizeof(T) * Run);
      for (; value < end; ++value) target[position(column, value)] = row[value];
    }
  }
}

}  // namespace

std::size_t packed_bf16_bytes(int n, int k) {
  return sizeof(bf16) * round_up<std::size_t>(n, kPanel) * round_up<std::size_t>(k, kStep);
}

std::size_t packed_float32_bytes(int n, int k) {
  return sizeof(float) * round_up<std::size_t>(n, kPanel) * k;
}

std::size_t packed_blocks_bytes(int n, int k, BlockFormat format) {
  return std::size_t(ceil_div(n, kPanel)) * (k / kStep) * format.group_bytes();
}

void pack_bf16(const bf16* weight, std::int64_t stride, int n, int k, const std::int64_t* row_index,
               bf16* packed) {
  const PlaceBf16Step place = TOKENMILL_AT_LEVEL(place_bf16_step);
  const std::int64_t panel_values = std::int64_t{round_up(k, kStep)} * kPanel;
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    if (n - panel * kPanel < kPanel || k % kStep != 0) {
      pack_panel<2>(weight, stride, panel, n, k, row_index, panel_values, packed, bf16_in_panel);
      return;
    }
    const PanelRows rows(weight, sizeof(bf16) * stride, panel, row_index);
    const void* begins[kPanel];
    for (int step = 0; step < k; step += kStep) {
      rows.at(sizeof(bf16) * step, begins);
      place(begins, packed + panel * panel_values + step * kPanel);
    }
  });
}

void pack_float32(const float* weight, std::int64_t stride, int n, int k,
                  const std::int64_t* row_index, float* packed) {
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    pack_panel<1>(weight, stride, panel, n, k, row_index, std::int64_t{k} * kPanel, packed,
                  float32_in_panel);
  });
}

void pack_blocks(BlockType type, const std::uint8_t* raw, int n, int k,
                 const std::int64_t* row_index, std::uint8_t* packed) {
  const BlockSize size = block_size(type);
  const GroupReader read = group_reader(type);
  const std::int64_t row_bytes = std::int64_t{k / size.values} * size.bytes;
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    pack_groups(block_format(type), panel, n, k, row_index, packed,
                [=](std::int64_t row, int g, ColumnGroup& out) {
                  read(raw + row * row_bytes, g, out);
                });
  });
}

void SourceRows::read(std::int64_t row, int begin, float* values) const {
  const std::int64_t at = row * stride + begin;
  switch (type) {
    case SourceType::bf16:
      for (int i = 0; i < kStep; ++i) values[i] = bf16_to_float(static_cast<const bf16*>(data)[at + i]);
      break;
    case SourceType::fp16:
      for (int i = 0; i < kStep; ++i) values[i] = fp16_to_float(static_cast<const fp16*>(data)[at + i]);
      break;
    case SourceType::float32:
      std::memcpy(values, static_cast<const float*>(data) + at, sizeof(float) * kStep);
      break;
  }
}

void pack_quantized(const SourceRows& weight, int n, int k, const std::int64_t* row_index,
                    BlockType type, std::uint8_t* packed) {
  const QuantizeStep quantize_step = TOKENMILL_AT_LEVEL(quantize_step);
  const auto quantize_group = type == BlockType::q4_1 ? quantize_group_4bit : quantize_group_8bit;
  const BlockFormat format = block_format(type);
  const std::size_t group_bytes = format.group_bytes();
  const std::int64_t value_bytes = weight.type == SourceType::float32 ? 4 : 2;
  const int num_groups = k / kStep;
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    if (n - panel * kPanel < kPanel) {
      pack_groups(format, panel, n, k, row_index, packed,
                  [&](std::int64_t row, int g, ColumnGroup& out) {
                    float values[kStep];
                    weight.read(row, g * kStep, values);
                    quantize_group(values, out);
                  });
      return;
    }
    const PanelRows rows(weight.data, value_bytes * weight.stride, panel, row_index);
    const void* begins[kPanel];
    for (int g = 0; g < num_groups; ++g) {
      rows.at(value_bytes * g * kStep, begins);
      quantize_step(weight.type, begins, type,
                    packed + (std::size_t(panel) * num_groups + g) * group_bytes);
    }
  });
}

void unpack_bf16_rows(const Bf16Weights& weights, const std::int64_t* ids, int num_ids,
                      float* out) {
  const std::int64_t panel_values = std::int64_t{round_up(weights.k, kStep)} * kPanel;
  parallel_for(num_ids, [&](int i, int) {
    const bf16* panel = weights.data + ids[i] / kPanel * panel_values;
    const int column = static_cast<int>(ids[i] % kPanel);
    float* row = out + std::int64_t{i} * weights.k;
    for (int value = 0; value < weights.k; ++value)
      row[value] = bf16_to_float(panel[bf16_in_panel(column, value)]);
  });
}

void unpack_float32_rows(const Float32Weights& weights, const std::int64_t* ids, int num_ids,
                         float* out) {
  parallel_for(num_ids, [&](int i, int) {
    const float* panel = weights.data + ids[i] / kPanel * std::int64_t{weights.k} * kPanel;
    const int column = static_cast<int>(ids[i] % kPanel);
    float* row = out + std::int64_t{i} * weights.k;
    for (int value = 0; value < weights.k; ++value)
      row[value] = panel[float32_in_panel(column, value)];
  });
}

void unpack_block_rows(const BlockWeights& weights, const std::int64_t* ids, int num_ids,
                       float* out) {
  const BlockFormat format = weights.format;
  const std::size_t group_bytes = format.group_bytes();
  const int num_groups = weights.k / kStep;
  parallel_for(num_ids, [&](int i, int) {
    const std::uint8_t* panel = weights.data + ids[i] / kPanel * num_groups * group_bytes;
    const int column = static_cast<int>(ids[i] % kPanel);
    float* row = out + std::int64_t{i} * weights.k;
    for (int g = 0; g < num_groups; ++g) {
      const std::uint8_t* group = panel + g * group_bytes;
      const fp16* scales = reinterpret_cast<const fp16*>(group + format.code_bytes());
      const float scale = fp16_to_float(scales[column]);
      const float minimum = format.has_minimum ? fp16_to_float(scales[kPanel + column]) : 0.0f;
      for (int value = 0; value < kStep; ++value)
        row[g * kStep + value] =
            scale * static_cast<float>(code_of(format, group, column, value)) + minimum;
    }
  });
}

}  // namespace tokenmill
