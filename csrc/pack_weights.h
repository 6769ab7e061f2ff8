// Packs weights for the products of gemm_kernels.h, and reads rows back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"
#include "gemm_kernels.h"
#include "pack_steps.h"

namespace tokenmill {

std::size_t packed_bf16_bytes(int n, int k);
std::size_t packed_float32_bytes(int n, int k);
std::size_t packed_blocks_bytes(int n, int k, BlockFormat format);

// weight [n, k] with rows `stride` values apart, to `packed`. Row i of the result is row
// row_index[i] of the weight, or row i if row_index is null. Columns and values that fill up a
// panel or a step are zero.
void pack_bf16(const bf16* weight, std::int64_t stride, int n, int k, const std::int64_t* row_index,
               bf16* packed);

// The same for float32.
void pack_float32(const float* weight, std::int64_t stride, int n, int k,
                  const std::int64_t* row_index, float* packed);

// The same for rows of GGUF blocks that follow one another; k is a multiple of the type's block.
// Codes are kept where a group of 32 has one scale in the file, and scales are rounded to fp16;
// groups of 16 are joined. docs/formats.md has what that costs.
void pack_blocks(BlockType type, const std::uint8_t* raw, int n, int k,
                 const std::int64_t* row_index, std::uint8_t* packed);

// Rows of plain values, `stride` values apart.
struct SourceRows {
  const void* data;
  std::int64_t stride;
  SourceType type;

  // 32 values of a row, from value `begin` on.
  void read(std::int64_t row, int begin, float* values) const;
};

// Quantises weight [n, k] to the codes of `type`, Q8_0 or Q4_1, and packs them.
void pack_quantized(const SourceRows& weight, int n, int k, const std::int64_t* row_index,
                    BlockType type, std::uint8_t* packed);

// Rows ids[0..num_ids) of the weight as float32 [num_ids, k].
void unpack_bf16_rows(const Bf16Weights& weights, const std::int64_t* ids, int num_ids, float* out);
void unpack_float32_rows(const Float32Weights& weights, const std::int64_t* ids, int num_ids,
                         float* out);
void unpack_block_rows(const BlockWeights& weights, const std::int64_t* ids, int num_ids,
                       float* out);

}  // namespace tokenmill
