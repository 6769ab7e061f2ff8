// What every kernel shares: number formats, alignment, the floating-point mode.
//
// Everything here has internal linkage, since files are compiled for different processors: a
// function shared among them could end up with instructions that this processor lacks.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

// For parts of a loop whose arrays must stay in registers.
#define TOKENMILL_INLINE __attribute__((always_inline)) inline
// The same, behind the parameters of a lambda.
#define TOKENMILL_INLINE_LAMBDA __attribute__((always_inline))

namespace tokenmill {

using bf16 = std::uint16_t;  // upper half of a float
using fp16 = std::uint16_t;  // IEEE half precision

constexpr std::size_t kCacheLine = 64;

template <class T>
static constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
static constexpr T round_up(T a, T multiple) {
  return ceil_div(a, multiple) * multiple;
}

template <class T>
static constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

static inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float bf16_to_float(bf16 value) {
  return float_from_bits(static_cast<std::uint32_t>(value) << 16);
}

// To the nearest, ties to even; a NaN stays a NaN.
static inline bf16 float_to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float fp16_to_float(fp16 half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);  // exact
  return float_from_bits(sign | float_bits(magnitude));
}

// To the nearest, ties to even; what is too large becomes infinite, and a NaN stays one.
static inline fp16 float_to_fp16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<fp16>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<fp16>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the step is 2^-24, that of floats from 0.5 on: an addition rounds to it.
    const std::uint32_t rounded = float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<fp16>(sign | rounded);
  }
  const std::uint32_t odd = magnitude >> 13 & 1u;
  return static_cast<fp16>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

// Denormal numbers count as zero while this object lives: they are slow, and the matrix
// instructions never keep them.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(mode()) { set_mode(saved_ | kFlush); }
  ~FlushDenormals() { set_mode(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr std::uint64_t kFlush = 0x8040;  // of results, and of operands
  static std::uint64_t mode() { return _mm_getcsr(); }
  static void set_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;  // both
  static std::uint64_t mode() {
    std::uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(std::uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr std::uint64_t kFlush = 0;  // they are kept
  static std::uint64_t mode() { return 0; }
  static void set_mode(std::uint64_t) {}
#endif

  std::uint64_t saved_;
};

}  // namespace tokenmill
