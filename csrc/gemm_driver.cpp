// Products as a whole: choose the instruction set, split the work among the threads.
#include "common.h"
#include "gemm_kernels.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

// Rows whose values stay in a core's second-level cache while the panels pass by.
constexpr std::int64_t kRowBlockBytes = 768 << 10;
constexpr int kRowBlockStep = 32;
// So many claims a thread even out interruptions; one should not read less than this.
constexpr int kClaimsPerThread = 16;
constexpr std::int64_t kClaimBytes = 8 << 10;

struct Split {
  int row_block, num_row_blocks;
  int num_panels, claim_panels;

  Split(int m, int n, std::int64_t row_bytes, std::int64_t panel_bytes) {
    const int cached_rows = static_cast<int>(kRowBlockBytes / (row_bytes + 1));
    const int most_rows = cached_rows < kRowBlockStep ? kRowBlockStep : cached_rows;
    row_block = round_up(ceil_div(m, ceil_div(m, most_rows)), kRowBlockStep);
    num_row_blocks = ceil_div(m, row_block);
    num_panels = ceil_div(n, kPanel);
    const int wanted = ceil_div(num_threads() * kClaimsPerThread, num_row_blocks);
    const int fewest_panels = static_cast<int>(ceil_div(kClaimBytes, panel_bytes + 1));
    claim_panels = num_panels / wanted;
    if (claim_panels < fewest_panels) claim_panels = fewest_panels;
  }

  // A task is a panel of a block of rows; blocks follow one another.
  template <class F>
  void run(int m, F&& kernel) const {
    parallel_ranges(num_row_blocks * num_panels, claim_panels, [&](TaskRange tasks) {
      while (tasks.size() > 0) {
        const int block = tasks.begin / num_panels, first = block * num_panels;
        const int row = block * row_block, end = min_of(tasks.end, first + num_panels);
        kernel(Range{row, min_of(row + row_block, m)}, Range{tasks.begin - first, end - first});
        tasks.begin = end;
      }
    });
  }
};

// x with rows of zeros behind K, so that kernels see whole steps.
Bf16Rows pad_rows(const Bf16Rows& x, int m, int k) {
  const int padded = round_up(k, kStep);
  auto* copy = static_cast<bf16*>(thread_scratch(3, sizeof(bf16) * padded * std::size_t(m)));
  for (int row = 0; row < m; ++row) {
    bf16* target = copy + std::int64_t{row} * padded;
    std::memcpy(target, x.data + row * x.stride, sizeof(bf16) * k);
    std::memset(target + k, 0, sizeof(bf16) * (padded - k));
  }
  return {copy, padded};
}

}  // namespace

Bf16Kernel choose_bf16_kernel() {
  return at_level(TOKENMILL_KERNELS(Bf16Kernel, gemm_bf16, amx, portable, i8mm));
}

Float32Kernel choose_float32_kernel() { return TOKENMILL_AT_LEVEL(gemm_float32); }

BlockKernel choose_block_kernel() {
  return at_level(TOKENMILL_KERNELS(BlockKernel, gemm_blocks, amx, dotprod, i8mm));
}

void gemm_bf16(const Bf16Rows& x, int m, const Bf16Weights& weights, const OutputRows& out) {
  if (m == 0 || weights.n == 0) return;
  const Bf16Kernel kernel = choose_bf16_kernel();
  const Bf16Rows rows = weights.k % kStep == 0 ? x : pad_rows(x, m, weights.k);
  const std::int64_t row_bytes = std::int64_t{round_up(weights.k, kStep)} * sizeof(bf16);
  Split(m, weights.n, row_bytes, row_bytes * kPanel)
      .run(m, [&](Range block, Range panels) {
        kernel(rows, block, weights, panels, out);
      });
}

void gemm_float32(const Float32Rows& x, int m, const Float32Weights& weights,
                  const OutputRows& out) {
  if (m == 0 || weights.n == 0) return;
  const Float32Kernel kernel = choose_float32_kernel();
  const std::int64_t row_bytes = std::int64_t{weights.k} * sizeof(float);
  Split(m, weights.n, row_bytes, row_bytes * kPanel)
      .run(m, [&](Range block, Range panels) {
        kernel(x, block, weights, panels, out);
      });
}

void gemm_blocks(const QuantizedRows& x, int m, const BlockWeights& weights,
                 const OutputRows& out) {
  if (m == 0 || weights.n == 0) return;
  const BlockKernel kernel = choose_block_kernel();
  const std::int64_t row_bytes = x.num_groups * sizeof(QuantizedGroup) / QuantizedGroup::kRows;
  Split(m, weights.n, row_bytes, x.num_groups * weights.format.group_bytes())
      .run(m, [&](Range block, Range panels) {
        kernel(x, block, weights, panels, out);
      });
}

void quantize_rows(const FloatRows& x, int m, const QuantizedRows& out) {
  if (m == 0) return;
  const auto kernel = TOKENMILL_AT_LEVEL(quantize_rows);
  constexpr int kTaskGroups = 512;
  const int task_rows = kTaskGroups / (out.num_groups + 1) + 1;
  parallel_for(ceil_div(m, task_rows), [&](int task, int) {
    const int row = task * task_rows;
    kernel(x, Range{row, min_of(row + task_rows, m)}, out);
  });
}

}  // namespace tokenmill
