// Matrix products with packed weights: out[M, N] = x[M, K] @ weight[N, K].T + bias.
//
// Weights are packed in panels of 32 output columns, in steps of 32 along K, and each step of a
// panel is contiguous: a thread reads its panels from front to back, once for all rows.
//
//   bf16    [N/32 panels][K/32 steps][2 halves][16 pairs][16 columns][2 values]
//   float32 [N/32 panels][K values][32 columns]
//   blocks  [N/32 panels][K/32 groups] of one group:
//             codes      [2 halves][8 quads][16 columns][4 values], 8 bits each, or 4 bits: the
//                        low halves of the bytes hold quads 0..3, the high halves 4..7; these are
//                        numbers or indices of a table
//             scales     [32 columns] fp16
//             minimums   [32 columns] fp16, if the format has them
//
// A half of a step is what an AMX tile holds, and in AVX-512 a row of it fills a register.
//
// Every output is one sum along K in one order, whatever M, the neighbours and the threads are.
//   bf16    pairs along K, or with i8mm fours, added to a float32 one after another, as the
//           instruction does it; with AVX2 and below one multiply-add after another
//   float32 one multiply-add after another; it is fused, but for the portable level of processors
//           that lack the instruction
//   blocks  sum = 0; for each group:
//             sum = fma(float(sum of codes * x_codes), scale * x_scale, sum)
//             sum = fma(minimum, x_scaled_sum, sum)
//           the inner sum is an exact integer, so all instruction sets give the same bits
// The bias is added to the finished sum, and the result rounded to bf16 if that is wanted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"

namespace tokenmill {

constexpr int kPanel = 32;  // columns of a packed panel
constexpr int kStep = 32;   // values along K of a step, or of a group of a block format
constexpr int kHalf = 16;   // columns of a vector register and of a tile
constexpr int kQuads = kStep / 4;  // a group's codes, four by four

// Types of GGUF files; values are indices of kBlockTypeNames.
enum class BlockType : int {
  q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4
};
constexpr const char* kBlockTypeNames[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",   "Q2_K",  "Q3_K",
                                           "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"};

// What 4-bit codes stand for.
enum class Codes : int {
  linear,  // code - zero
  iq4,     // the table of IQ4_NL
  fp4,     // twice the value of an e2m1 float
};

// How weights of a block type are packed: value = scale * (code - zero) + minimum, or for codes of
// a table value = scale * table[code]. 8-bit codes are signed and zero is 0; 4-bit codes are
// unsigned.
struct BlockFormat {
  int bits;
  int zero;
  bool has_minimum;
  Codes codes = Codes::linear;

  constexpr std::size_t code_bytes() const { return kPanel * kStep * bits / 8; }
  constexpr std::size_t group_bytes() const {
    return code_bytes() + kPanel * sizeof(fp16) * (has_minimum ? 2 : 1);
  }
};

constexpr BlockFormat block_format(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return {4, 8, false};
    case BlockType::q4_1:
    case BlockType::q4_k: return {4, 0, true};
    case BlockType::iq4_nl:
    case BlockType::iq4_xs: return {4, 0, false, Codes::iq4};
    case BlockType::mxfp4: return {4, 0, false, Codes::fp4};
    case BlockType::q5_1:
    case BlockType::q5_k: return {8, 0, true};
    default: return {8, 0, false};
  }
}

constexpr std::int8_t kCodeTables[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

// The table of 4-bit codes that have one.
static inline const std::int8_t* code_table(Codes codes) {
  return kCodeTables[codes == Codes::fp4];
}

struct Bf16Weights {
  const bf16* data;  // packed
  int n, k;
};

struct Float32Weights {
  const float* data;  // packed
  int n, k;
};

struct BlockWeights {
  const std::uint8_t* data;  // packed
  int n, k;                  // k is a multiple of kStep
  BlockFormat format;
};

struct Bf16Rows {
  const bf16* data;  // [m, k], rows `stride` values apart
  std::int64_t stride;
};

struct Float32Rows {
  const float* data;  // [m, k], rows `stride` values apart
  std::int64_t stride;
};

struct FloatRows {
  const void* data;     // [m, k], rows `stride` values apart
  std::int64_t stride;
  bool is_bf16;         // else float32
};

// Activations in int8, each group of 32 values of a row on a scale of its own. Rows lie in blocks
// of 16, the rows of a tile: [m / 16 blocks][k / 32 groups] of these.
struct alignas(64) QuantizedGroup {
  static constexpr int kRows = 16;
  std::int8_t codes[kRows][kStep];
  float scales[kRows];             // largest magnitude / 127
  float scaled_sums[kRows];        // float(sum of codes) * scale
  std::int32_t sums[kRows];        // sum of codes
};
static_assert(sizeof(QuantizedGroup) == 704, "no gaps");

struct QuantizedRows {
  QuantizedGroup* groups;
  int num_groups;  // k / 32

  // Group 0 of the block of `row`; the row is number row % 16 in it.
  QuantizedGroup* block_of(int row) const {
    return groups + std::int64_t{row} / QuantizedGroup::kRows * num_groups;
  }
  static constexpr std::size_t num_bytes(std::size_t m, std::size_t k) {
    return ceil_div<std::size_t>(m, QuantizedGroup::kRows) * (k / kStep) * sizeof(QuantizedGroup);
  }
};

struct OutputRows {
  void* data;           // [m, n], rows `stride` values apart
  std::int64_t stride;
  bool is_bf16;         // else float32
  const float* bias;    // [n] or null
};

// All of these split their work among the pool's threads, and none allocates once the threads'
// scratch memory has grown to the shapes in use. x and out must not overlap.
void gemm_bf16(const Bf16Rows& x, int m, const Bf16Weights& weights, const OutputRows& out);
void gemm_float32(const Float32Rows& x, int m, const Float32Weights& weights,
                  const OutputRows& out);
void gemm_blocks(const QuantizedRows& x, int m, const BlockWeights& weights,
                 const OutputRows& out);
void quantize_rows(const FloatRows& x, int m, const QuantizedRows& out);

// ---------------------------------------------------------------------------------------------
// What an instruction set provides: some rows times some panels. For bf16, k is a multiple of
// kStep here; for blocks, the first of the rows is a multiple of 16.

struct Range {
  int begin, end;
};

using Bf16Kernel = void (*)(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                            const OutputRows&);
using Float32Kernel = void (*)(const Float32Rows&, Range rows, const Float32Weights&,
                               Range panels, const OutputRows&);
using BlockKernel = void (*)(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                             const OutputRows&);

// Those of the level in use. They throw as `require_kernels` does.
Bf16Kernel choose_bf16_kernel();
Float32Kernel choose_float32_kernel();
BlockKernel choose_block_kernel();

void gemm_bf16_portable(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                        const OutputRows&);
void gemm_bf16_avx2(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                    const OutputRows&);
void gemm_bf16_avx512(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                      const OutputRows&);
void gemm_bf16_amx(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                   const OutputRows&);
void gemm_bf16_i8mm(const Bf16Rows&, Range rows, const Bf16Weights&, Range panels,
                    const OutputRows&);
void gemm_float32_portable(const Float32Rows&, Range rows, const Float32Weights&, Range panels,
                           const OutputRows&);
void gemm_float32_avx2(const Float32Rows&, Range rows, const Float32Weights&, Range panels,
                       const OutputRows&);
void gemm_float32_avx512(const Float32Rows&, Range rows, const Float32Weights&, Range panels,
                         const OutputRows&);
void gemm_blocks_portable(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                          const OutputRows&);
void gemm_blocks_avx2(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                      const OutputRows&);
void gemm_blocks_avx512(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                        const OutputRows&);
void gemm_blocks_dotprod(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                         const OutputRows&);
void gemm_blocks_i8mm(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                      const OutputRows&);
void gemm_blocks_amx(const QuantizedRows&, Range rows, const BlockWeights&, Range panels,
                     const OutputRows&);
void quantize_rows_portable(const FloatRows&, Range rows, const QuantizedRows&);
void quantize_rows_avx2(const FloatRows&, Range rows, const QuantizedRows&);
void quantize_rows_avx512(const FloatRows&, Range rows, const QuantizedRows&);

}  // namespace tokenmill
