// sampling_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define find_largest_avx512 find_largest_portable
#define sum_exp_avx512 sum_exp_portable
#define count_at_least_avx512 count_at_least_portable
#define scale_logits_avx512 scale_logits_portable
#define run_maxima_avx512 run_maxima_portable
#define collect_avx512 collect_portable
#define weigh_avx512 weigh_portable
#define gather_avx512 gather_portable
#define keep_avx512 keep_portable
#define split_avx512 split_portable
#define find_equal_avx512 find_equal_portable
#define draw_avx512 draw_portable
#include "sampling_avx512.cpp"
