#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tokenmill {
namespace {

#if defined(__x86_64__)

constexpr const char* kNames[] = {"reference", "portable", "avx2", "avx512", "amx"};

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// The register files that the operating system saves when it switches threads (XCR0).
std::uint64_t saved_states() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

bool has_avx2() {
  constexpr std::uint64_t kYmmStates = 0x6;  // SSE, AVX
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  return (saved_states() & kYmmStates) == kYmmStates &&
         bit(basic.ecx, 12) && bit(basic.ecx, 29) &&  // FMA, F16C
         bit(extended.ebx, 5);                        // AVX2
}

bool has_avx512() {
  constexpr std::uint64_t kZmmStates = 0xe6;  // SSE, AVX, masks, both halves of zmm
  const Registers extended = cpuid(7, 0), more = cpuid(7, 1);
  return has_avx2() && (saved_states() & kZmmStates) == kZmmStates &&
         bit(extended.ebx, 16) && bit(extended.ebx, 17) &&   // F, DQ
         bit(extended.ebx, 30) && bit(extended.ebx, 31) &&   // BW, VL
         bit(extended.ecx, 11) &&                            // VNNI
         bit(more.eax, 5);                                   // BF16
}

#ifdef TOKENMILL_EMULATED_TILES
bool has_amx() { return true; }
#else
bool has_amx() {
  constexpr std::uint64_t kTileStates = 0x60000;
  const Registers extended = cpuid(7, 0);
  if ((saved_states() & kTileStates) != kTileStates || !bit(extended.edx, 22) ||
      !bit(extended.edx, 24) || !bit(extended.edx, 25))  // AMX-BF16, AMX-TILE, AMX-INT8
    return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa detect() {
  if (!has_avx2()) return Isa::portable;
  if (!has_avx512()) return Isa::avx2;
  return has_amx() ? Isa::amx : Isa::avx512;
}

#elif defined(__aarch64__)

constexpr const char* kNames[] = {"reference", "neon", "dotprod", "i8mm"};

Isa detect() {
  constexpr unsigned long kMatrices = HWCAP2_I8MM | HWCAP2_BF16;
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) == 0) return Isa::neon;
  return (getauxval(AT_HWCAP2) & kMatrices) == kMatrices ? Isa::i8mm : Isa::dotprod;
}

#else

constexpr const char* kNames[] = {"reference", "portable"};

Isa detect() { return Isa::portable; }

#endif

constexpr int kNumIsas = sizeof kNames / sizeof *kNames;

// The names from the highest level down: a, b or c.
std::string all_names() {
  std::string text = kNames[kNumIsas - 1];
  for (int i = kNumIsas - 2; i >= 0; --i) text += std::string(i == 0 ? " or " : ", ") + kNames[i];
  return text;
}

Isa parse(const std::string& name) {
  for (int i = 0; i < kNumIsas; ++i) {
    if (name != kNames[i]) continue;
    const Isa isa = static_cast<Isa>(i);
    if (isa > detected_isa())
      throw std::runtime_error("TOKENMILL_ISA is " + name + ", but this machine offers at most " +
                               isa_name(detected_isa()));
    return isa;
  }
  throw std::runtime_error("TOKENMILL_ISA is " + name + "; it takes " + all_names());
}

Isa initial() {
  const char* name = std::getenv("TOKENMILL_ISA");
  return name != nullptr && *name != '\0' ? parse(name) : detected_isa();
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{initial()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

int num_isas() { return kNumIsas; }

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

void require_kernels() {
  if (active_isa() == Isa::reference)
    throw std::runtime_error("TOKENMILL_ISA is reference: the native kernels are not in use");
}

void set_active_isa(const char* name) { active().store(parse(name)); }

}  // namespace tokenmill
