// sampling_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define find_largest_avx512 find_largest_avx2
#define sum_exp_avx512 sum_exp_avx2
#define count_at_least_avx512 count_at_least_avx2
#define scale_logits_avx512 scale_logits_avx2
#define run_maxima_avx512 run_maxima_avx2
#define collect_avx512 collect_avx2
#define weigh_avx512 weigh_avx2
#define gather_avx512 gather_avx2
#define keep_avx512 keep_avx2
#define split_avx512 split_avx2
#define find_equal_avx512 find_equal_avx2
#define draw_avx512 draw_avx2
#include "sampling_avx512.cpp"
