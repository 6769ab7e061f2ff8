// Passes over a row of logits: the instruction set in use is chosen here.
#include "isa.h"
#include "sampling_kernels.h"

namespace tokenmill {

Largest find_largest(const float* values, int count) {
  return TOKENMILL_AT_LEVEL(find_largest)(values, count);
}

double sum_exp(const float* values, int count, float shift) {
  return TOKENMILL_AT_LEVEL(sum_exp)(values, count, shift);
}

int count_at_least(const float* values, int count, float lowest) {
  return TOKENMILL_AT_LEVEL(count_at_least)(values, count, lowest);
}

void scale_logits(const float* values, int count, float best, float temperature, float* out) {
  return TOKENMILL_AT_LEVEL(scale_logits)(values, count, best, temperature, out);
}

void run_maxima(const float* values, int count, float* maxima) {
  return TOKENMILL_AT_LEVEL(run_maxima)(values, count, maxima);
}

int collect(const float* values, int count, float lowest, std::int32_t* indices) {
  return TOKENMILL_AT_LEVEL(collect)(values, count, lowest, indices);
}

double weigh(const Weighted& some) {
  return TOKENMILL_AT_LEVEL(weigh)(some);
}

Weighted gather(const Weighted& from, float lowest, const Weighted& to) {
  return TOKENMILL_AT_LEVEL(gather)(from, lowest, to);
}

int keep(const Weighted& some, float pivot, bool above) {
  return TOKENMILL_AT_LEVEL(keep)(some, pivot, above);
}

Split split(const Weighted& some, float pivot) {
  return TOKENMILL_AT_LEVEL(split)(some, pivot);
}

int find_equal(const float* values, int count, float value, int n) {
  return TOKENMILL_AT_LEVEL(find_equal)(values, count, value, n);
}

int draw(const float* values, int count, int start, const Kept& kept, std::uint64_t key) {
  return TOKENMILL_AT_LEVEL(draw)(values, count, start, kept, key);
}

}  // namespace tokenmill
