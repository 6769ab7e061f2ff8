// One step of a panel, 32 values along K of 32 rows of a weight: what each instruction set packs.
#pragma once

#include <cstdint>

#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {

enum class SourceType { bf16, fp16, float32 };

// rows[32] point to 32 values each. Quantises them to the codes of `type`, Q8_0 or Q4_1, to the
// bits that block_formats.h has for one group.
using QuantizeStep = void (*)(SourceType source, const void* const* rows, BlockType type,
                              std::uint8_t* group);
void quantize_step_portable(SourceType source, const void* const* rows, BlockType type,
                            std::uint8_t* group);
void quantize_step_avx2(SourceType source, const void* const* rows, BlockType type,
                        std::uint8_t* group);
void quantize_step_avx512(SourceType source, const void* const* rows, BlockType type,
                          std::uint8_t* group);

// rows[32] point to 32 bfloat16 each.
using PlaceBf16Step = void (*)(const void* const* rows, bf16* target);
void place_bf16_step_portable(const void* const* rows, bf16* target);
void place_bf16_step_avx2(const void* const* rows, bf16* target);
void place_bf16_step_avx512(const void* const* rows, bf16* target);

}  // namespace tokenmill
