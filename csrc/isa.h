// What this processor can do, and how much of it we use.
#pragma once

namespace tokenmill {

// In rising order: each level has everything of the one before. The lowest level with kernels needs
// no more than the compiler's own vectors of 128 bits, which are NEON's on aarch64.
enum class Isa : int {
  reference,  // no kernel of ours; torch runs
#if defined(__x86_64__)
  portable,   // any x86-64
  avx2,       // AVX2, FMA, F16C
  avx512,     // AVX-512 F, BW, DQ, VL, VNNI, BF16
  amx,        // ... and AMX tiles with bf16 and int8
#elif defined(__aarch64__)
  neon,       // any aarch64
  dotprod,    // dot products of bytes
  i8mm,       // ... and matrix products of bytes and of bf16
#else
  portable,   // any processor
#endif
};

constexpr Isa kLowestLevel = static_cast<Isa>(1);  // with kernels

const char* isa_name(Isa isa);

// The number of levels, `reference` included.
int num_isas();

// The highest level of the processor and operating system. On x86-64 it asks the kernel once for the
// permission to use tile registers.
Isa detected_isa();

// The level in use: the detected one, or a lower one named by TOKENMILL_ISA. Throws
// std::runtime_error if the variable names no level, or one that this machine lacks.
Isa active_isa();

// Throws std::runtime_error where the level in use is the reference: a kernel was called for.
void require_kernels();

// For tests: use a lower level from now on. Throws like `active_isa`.
void set_active_isa(const char* name);

// A kernel on each level.
template <class Kernel>
struct Levels {
  Kernel lowest;
#if defined(__x86_64__)
  Kernel avx2, avx512, amx;
#elif defined(__aarch64__)
  Kernel dotprod, i8mm;
#endif
};

// What the level in use runs. Throws as `require_kernels` does.
template <class Kernel>
static Kernel at_level(const Levels<Kernel>& levels) {
  require_kernels();
  switch (active_isa()) {
#if defined(__x86_64__)
    case Isa::avx2: return levels.avx2;
    case Isa::avx512: return levels.avx512;
    case Isa::amx: return levels.amx;
#elif defined(__aarch64__)
    case Isa::dotprod: return levels.dotprod;
    case Isa::i8mm: return levels.i8mm;
#endif
    default: return levels.lowest;
  }
}

// The kernels `name_portable`, `name_avx2`, ..., of which the last ones may be those of a lower
// level. A kernel without a portable version does not compile.
#if defined(__x86_64__)
#define TOKENMILL_KERNELS(Kernel, name, amx, dotprod, i8mm) \
  ::tokenmill::Levels<Kernel>{name##_portable, name##_avx2, name##_avx512, name##_##amx}
#elif defined(__aarch64__)
#define TOKENMILL_KERNELS(Kernel, name, amx, dotprod, i8mm) \
  ::tokenmill::Levels<Kernel>{name##_portable, name##_##dotprod, name##_##i8mm}
#else
#define TOKENMILL_KERNELS(Kernel, name, amx, dotprod, i8mm) \
  ::tokenmill::Levels<Kernel>{name##_portable}
#endif

// What the level in use runs of a kernel that is one source for all levels.
#define TOKENMILL_AT_LEVEL(name) \
  ::tokenmill::at_level(         \
      TOKENMILL_KERNELS(decltype(&name##_portable), name, avx512, portable, portable))

}  // namespace tokenmill
