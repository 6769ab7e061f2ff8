// Passes over a row of logits: the instruction set in use is chosen here.
#include "isa.h"
#include "sampling_kernels.h"

namespace tokenmill {

Largest find_largest(const float* values, int count) {
  return at_level(find_largest_avx2, find_largest_avx512)(values, count);
}

double sum_exp(const float* values, int count, float shift) {
  return at_level(sum_exp_avx2, sum_exp_avx512)(values, count, shift);
}

int count_at_least(const float* values, int count, float lowest) {
  return at_level(count_at_least_avx2, count_at_least_avx512)(values, count, lowest);
}

void scale_logits(const float* values, int count, float best, float temperature, float* out) {
  return at_level(scale_logits_avx2, scale_logits_avx512)(values, count, best, temperature, out);
}

void run_maxima(const float* values, int count, float* maxima) {
  return at_level(run_maxima_avx2, run_maxima_avx512)(values, count, maxima);
}

int collect(const float* values, int count, float lowest, std::int32_t* indices) {
  return at_level(collect_avx2, collect_avx512)(values, count, lowest, indices);
}

double weigh(const Weighted& some) {
  return at_level(weigh_avx2, weigh_avx512)(some);
}

Weighted gather(const Weighted& from, float lowest, const Weighted& to) {
  return at_level(gather_avx2, gather_avx512)(from, lowest, to);
}

int keep(const Weighted& some, float pivot, bool above) {
  return at_level(keep_avx2, keep_avx512)(some, pivot, above);
}

Split split(const Weighted& some, float pivot) {
  return at_level(split_avx2, split_avx512)(some, pivot);
}

int find_equal(const float* values, int count, float value, int n) {
  return at_level(find_equal_avx2, find_equal_avx512)(values, count, value, n);
}

int draw(const float* values, int count, int start, const Kept& kept, std::uint64_t key) {
  return at_level(draw_avx2, draw_avx512)(values, count, start, kept, key);
}

}  // namespace tokenmill
