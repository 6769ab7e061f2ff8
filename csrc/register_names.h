// The names of AVX-512 that the sources written for it use, for what stands in for its registers and
// operations: see avx2_registers.h and portable_registers.h, which include this at their end. No
// header that needs the real ones may follow.

#undef _mm512_setr_epi32
#undef _mm512_setr_epi64

#define __m512 ::tokenmill::Floats
#define __m512i ::tokenmill::Integers
#define __m512bh ::tokenmill::Integers
#define __m512d ::tokenmill::Doubles

#define _mm512_add_ps ::tokenmill::wide_add_ps
#define _mm512_sub_ps ::tokenmill::wide_sub_ps
#define _mm512_mul_ps ::tokenmill::wide_mul_ps
#define _mm512_div_ps ::tokenmill::wide_div_ps
#define _mm512_max_ps ::tokenmill::wide_max_ps
#define _mm512_min_ps ::tokenmill::wide_min_ps
#define _mm512_abs_ps ::tokenmill::wide_abs_ps
#define _mm512_scalef_ps ::tokenmill::wide_scalef_ps
#define _mm512_fmadd_ps ::tokenmill::wide_fmadd_ps
#define _mm512_fmsub_ps ::tokenmill::wide_fmsub_ps
#define _mm512_fnmadd_ps ::tokenmill::wide_fnmadd_ps
#define _mm512_add_pd ::tokenmill::wide_add_pd
#define _mm512_xor_si512 ::tokenmill::wide_xor_si512
#define _mm512_add_epi64 ::tokenmill::wide_add_epi64
#define _mm512_max_epu32 ::tokenmill::wide_max_epu32
#define _mm512_mullo_epi64 ::tokenmill::wide_mullo_epi64
#define _mm512_sllv_epi64 ::tokenmill::wide_sllv_epi64
#define _mm512_slli_epi32 ::tokenmill::wide_slli_epi32
#define _mm512_srli_epi64 ::tokenmill::wide_srli_epi64
#define _mm512_castps_si512 ::tokenmill::wide_castps_si512
#define _mm512_castsi512_ps ::tokenmill::wide_castsi512_ps
#define _mm512_set1_ps ::tokenmill::wide_set1_ps
#define _mm512_set1_epi32 ::tokenmill::wide_set1_epi32
#define _mm512_set1_epi64 ::tokenmill::wide_set1_epi64
#define _mm512_setr_epi32 ::tokenmill::wide_setr_epi32
#define _mm512_setr_epi64 ::tokenmill::wide_setr_epi64
#define _mm512_setzero_ps ::tokenmill::wide_setzero_ps
#define _mm512_setzero_pd ::tokenmill::wide_setzero_pd
#define _mm512_setzero_si512 ::tokenmill::wide_setzero_si512
#define _mm512_load_ps ::tokenmill::wide_loadu_ps
#define _mm512_loadu_ps ::tokenmill::wide_loadu_ps
#define _mm512_store_ps ::tokenmill::wide_storeu_ps
#define _mm512_storeu_ps ::tokenmill::wide_storeu_ps
#define _mm512_mask_loadu_ps ::tokenmill::wide_mask_loadu_ps
#define _mm512_maskz_loadu_ps ::tokenmill::wide_maskz_loadu_ps
#define _mm512_mask_storeu_ps ::tokenmill::wide_mask_storeu_ps
#define _mm512_loadu_si512 ::tokenmill::wide_loadu_si512
#define _mm512_store_si512 ::tokenmill::wide_storeu_si512
#define _mm512_storeu_si512 ::tokenmill::wide_storeu_si512
#define _mm512_maskz_loadu_epi16 ::tokenmill::wide_maskz_loadu_epi16
#define _mm512_maskz_mov_epi16 ::tokenmill::wide_maskz_mov_epi16
#define _mm512_mask_storeu_epi16 ::tokenmill::wide_mask_storeu_epi16
#define _mm512_i32scatter_epi32(data, places, words, scale) \
  ::tokenmill::wide_scatter(data, places, words)
#define _mm512_reduce_max_ps ::tokenmill::wide_reduce_max_ps
#define _mm512_reduce_add_ps ::tokenmill::wide_reduce_add_ps
#define _mm512_reduce_add_pd ::tokenmill::wide_reduce_add_pd
#define _mm512_reduce_max_epu32 ::tokenmill::wide_reduce_max_epu32
#define _mm512_maskz_compress_ps ::tokenmill::wide_maskz_compress_ps
#define _mm512_maskz_add_epi32 ::tokenmill::wide_maskz_add_epi32
#define _mm512_maskz_mul_ps ::tokenmill::wide_maskz_mul_ps
#define _mm512_maskz_sub_ps ::tokenmill::wide_maskz_sub_ps
#define _mm512_cmpge_epu64_mask ::tokenmill::wide_cmpge_epu64_mask
#define _mm512_cmp_ps_mask(a, b, predicate) ::tokenmill::compare<predicate>(a, b)
#define _mm512_mask_cmp_ps_mask(mask, a, b, predicate) \
  static_cast<__mmask16>((mask) & ::tokenmill::compare<predicate>(a, b))
#define _mm512_roundscale_ps(x, mode) ::tokenmill::round_floats<mode>(x)
#define _mm512_cvt_roundps_epi32(x, mode) \
  ::tokenmill::wide_cvtps_epi32(::tokenmill::round_floats<mode>(x))
#define _mm512_cvtps_epi32 ::tokenmill::wide_cvtps_epi32
#define _mm512_cvtepi32_ps ::tokenmill::wide_cvtepi32_ps
#define _mm512_cvtepu16_epi32 ::tokenmill::wide_cvtepu16_epi32
#define _mm512_cvtepi8_epi16 ::tokenmill::wide_cvtepi8_epi16
#define _mm512_cvtepi32_epi64 ::tokenmill::wide_cvtepi32_epi64
#define _mm512_cvtepi32_epi16 ::tokenmill::wide_cvtepi32_epi16
#define _mm512_cvtsepi32_epi8 ::tokenmill::wide_cvtsepi32_epi8
#define _mm512_cvtps_pd ::tokenmill::wide_cvtps_pd
#define _mm512_cvtneps_pbh ::tokenmill::wide_cvtneps_pbh
#define _mm512_cvtne2ps_pbh ::tokenmill::wide_cvtne2ps_pbh
#define _mm512_dpbf16_ps ::tokenmill::wide_dpbf16_ps
#define _mm512_dpwssd_epi32 ::tokenmill::wide_dpwssd_epi32
#define _mm256_maskz_loadu_epi16 ::tokenmill::half_maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 ::tokenmill::half_mask_storeu_epi16
#define _mm256_mask_storeu_epi8 ::tokenmill::half_mask_storeu_epi8
#define _mm256_i32scatter_epi32(data, places, words, scale) \
  ::tokenmill::half_scatter(data, places, words)
