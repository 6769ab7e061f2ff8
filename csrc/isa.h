// What this processor can do, and how much of it we use.
#pragma once

namespace tokenmill {

// In rising order: each level has everything of the one before.
enum class Isa : int {
  reference = 0,  // no kernel of ours; torch runs
  avx512 = 1,     // AVX-512 F, BW, DQ, VL, VNNI, BF16
  amx = 2,        // ... and AMX tiles with bf16 and int8
};

const char* isa_name(Isa isa);

// The highest level of the processor and operating system. Asks the kernel once for the permission
// to use tile registers.
Isa detected_isa();

// The level in use: the detected one, or a lower one named by TOKENMILL_ISA. Throws
// std::runtime_error if the variable names no level, or one that this machine lacks.
Isa active_isa();

// For tests: use a lower level from now on. Throws like `active_isa`.
void set_active_isa(const char* name);

}  // namespace tokenmill
