// The block types of GGUF files: how their bytes become groups of 32 values with one scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {

// 32 values of one column: value = scale * code + minimum, codes as the packed format has them
// (4 bits: 0..15, before zero or table; 8 bits: signed).
struct ColumnGroup {
  std::uint8_t codes[kStep];
  fp16 scale = 0, minimum = 0;
};

// Values and bytes of a block in a file.
struct BlockSize {
  int values, bytes;
};
BlockSize block_size(BlockType type);

// Group number `group` of a row whose blocks begin at `row`.
using GroupReader = void (*)(const std::uint8_t* row, int group, ColumnGroup& out);
GroupReader group_reader(BlockType type);

// 32 floats on one scale: int8 codes of the largest magnitude / 127, as Q8_0 has them.
void quantize_group_8bit(const float* values, ColumnGroup& out);

// 32 floats to 4 bits with scale and minimum, as Q4_1 has them. Starts from the range of the values
// and then fits both to the codes by least squares, twice.
void quantize_group_4bit(const float* values, ColumnGroup& out);

}  // namespace tokenmill
