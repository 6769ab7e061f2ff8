#include "pack_weights.h"

#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kPairs = kStep / 2;
constexpr int kQuads = kStep / 4;

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

// A block of a GGUF file. In all of them value j < 16 has its low bits in the lower half of byte
// j, and value j + 16 in the upper half of the same byte.
struct RawBlock {
  fp16 scale = 0, minimum = 0;
  const std::uint8_t* codes;        // 16 or, for Q8_0, 32 bytes
  std::uint32_t fifth_bits = 0;

  RawBlock(BlockType type, const std::uint8_t* data) {
    std::memcpy(&scale, data, sizeof scale);
    data += sizeof scale;
    if (type == BlockType::q4_1 || type == BlockType::q5_1) {
      std::memcpy(&minimum, data, sizeof minimum);
      data += sizeof minimum;
    }
    if (type == BlockType::q5_0 || type == BlockType::q5_1) {
      std::memcpy(&fifth_bits, data, sizeof fifth_bits);
      data += sizeof fifth_bits;
    }
    codes = data;
  }

  int five_bits(int value) const {
    const int low = value < kStep / 2 ? codes[value] & 15 : codes[value - kStep / 2] >> 4;
    return low | static_cast<int>(fifth_bits >> value & 1u) << 4;
  }
};

void pack_group(BlockType type, const RawBlock& block, int column, std::uint8_t* group) {
  const BlockFormat format = block_format(type);
  if (format.bits == 4) {
    // The file's bytes are ours: quad q and quad q + 4 share four of them.
    for (int quad = 0; quad < kQuads / 2; ++quad)
      std::memcpy(group + quad_at(column, quad, kQuads / 2), block.codes + 4 * quad, 4);
  } else {
    std::uint8_t codes[kStep];
    const int zero = type == BlockType::q5_0 ? 16 : 0;
    for (int value = 0; value < kStep; ++value)
      codes[value] = type == BlockType::q8_0
          ? block.codes[value] : static_cast<std::uint8_t>(block.five_bits(value) - zero);
    for (int quad = 0; quad < kQuads; ++quad)
      std::memcpy(group + quad_at(column, quad, kQuads), codes + 4 * quad, 4);
  }
  fp16* scales = reinterpret_cast<fp16*>(group + format.code_bytes());
  scales[column] = block.scale;
  if (format.has_minimum) scales[kPanel + column] = block.minimum;
}

int code_of(const BlockFormat& format, const std::uint8_t* group, int column, int value) {
  if (format.bits == 8)
    return static_cast<std::int8_t>(group[quad_at(column, value / 4, kQuads) + value % 4]);
  const int low = value % (kStep / 2);
  const int both = group[quad_at(column, low / 4, kQuads / 2) + low % 4];
  return (value < kStep / 2 ? both & 15 : both >> 4) - format.zero;
}

template <class T, class Position>
void pack_panels(const T* weight, std::int64_t stride, int n, int k, const std::int64_t* row_index,
                 std::int64_t panel_values, T* packed, Position position) {
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    T* target = packed + panel * panel_values;
    std::memset(target, 0, sizeof(T) * panel_values);
    for (int column = 0; column < min_of(kPanel, n - panel * kPanel); ++column) {
      const T* row = weight + source_row(row_index, panel * kPanel + column) * stride;
      for (int value = 0; value < k; ++value) target[position(column, value)] = row[value];
    }
  });
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

std::size_t raw_block_bytes(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return 18;
    case BlockType::q4_1: return 20;
    case BlockType::q5_0: return 22;
    case BlockType::q5_1: return 24;
    default: return 34;
  }
}

void pack_bf16(const bf16* weight, std::int64_t stride, int n, int k, const std::int64_t* row_index,
               bf16* packed) {
  pack_panels(weight, stride, n, k, row_index, std::int64_t{round_up(k, kStep)} * kPanel, packed,
              bf16_in_panel);
}

void pack_float32(const float* weight, std::int64_t stride, int n, int k,
                  const std::int64_t* row_index, float* packed) {
  pack_panels(weight, stride, n, k, row_index, std::int64_t{k} * kPanel, packed, float32_in_panel);
}

void pack_blocks(BlockType type, const std::uint8_t* raw, int n, int k,
                 const std::int64_t* row_index, std::uint8_t* packed) {
  const std::size_t group_bytes = block_format(type).group_bytes();
  const std::size_t raw_bytes = raw_block_bytes(type);
  const int num_groups = k / kStep;
  parallel_for(ceil_div(n, kPanel), [&](int panel, int) {
    std::uint8_t* target = packed + panel * num_groups * group_bytes;
    const int num_columns = min_of(kPanel, n - panel * kPanel);
    if (num_columns < kPanel) std::memset(target, 0, num_groups * group_bytes);
    for (int column = 0; column < num_columns; ++column) {
      const std::int64_t row = source_row(row_index, panel * kPanel + column);
      const std::uint8_t* source = raw + row * num_groups * static_cast<std::int64_t>(raw_bytes);
      for (int g = 0; g < num_groups; ++g)
        pack_group(type, RawBlock(type, source + g * raw_bytes), column, target + g * group_bytes);
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
