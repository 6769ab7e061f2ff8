// What this processor can do, and how much of it we use.
#pragma once

namespace tokenmill {

// In rising order: each level has everything of the one before.
enum class Isa : int {
  reference = 0,  // no kernel of ours; torch runs
  avx2 = 1,       // AVX2, FMA, F16C
  avx512 = 2,     // AVX-512 F, BW, DQ, VL, VNNI, BF16
  amx = 3,        // ... and AMX tiles with bf16 and int8
};

const char* isa_name(Isa isa);

// The highest level of the processor and operating system. Asks the kernel once for the permission
// to use tile registers.
Isa detected_isa();

// The level in use: the detected one, or a lower one named by TOKENMILL_ISA. Throws
// std::runtime_error if the variable names no level, or one that this machine lacks.
Isa active_isa();

// Throws std::runtime_error where the level in use is the reference: a kernel was called for.
void require_kernels();

// What the level in use runs. Throws as `require_kernels` does.
template <class Kernel>
static Kernel at_level(Kernel avx2, Kernel avx512, Kernel amx) {
  require_kernels();
  switch (active_isa()) {
    case Isa::amx: return amx;
    case Isa::avx512: return avx512;
    default: return avx2;
  }
}
template <class Kernel>
static Kernel at_level(Kernel avx2, Kernel avx512) {
  return at_level(avx2, avx512, avx512);
}

// For tests: use a lower level from now on. Throws like `active_isa`.
void set_active_isa(const char* name);

}  // namespace tokenmill
