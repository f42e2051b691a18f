#include "isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
// Nobody defines this but a library that tests preload, which carries out AVX-VNNI's instructions where the
// CPU lacks them.
extern "C" [[gnu::weak, gnu::visibility("default")]] bool everystop_emulates_avxvnni();
#endif

namespace everystop {
namespace {

// Slowest first: the last supported one is the default.
constexpr Isa kPreference[] = {Isa::portable, Isa::neon, Isa::avx2, Isa::avxvnni, Isa::avx512vnni};

bool supported(Isa isa) {
  if (isa == Isa::portable) return true;
#if defined(__x86_64__)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avxvnni) {
    const bool emulated = everystop_emulates_avxvnni != nullptr && everystop_emulates_avxvnni();
    return avx2 && (__builtin_cpu_supports("avxvnni") || emulated);
  }
  if (isa == Isa::avx512vnni) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  }
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kHwcapDotProduct = 1UL << 20;
  if (isa == Isa::neon) return (getauxval(AT_HWCAP) & kHwcapDotProduct) != 0;
#endif
  return false;
}

std::string supported_names() {
  std::string names;
  for (Isa isa : kPreference) {
    if (supported(isa)) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return names;
}

Isa forced_isa(const std::string& name) {
  for (Isa isa : kPreference) {
    if (name != isa_name(isa)) continue;
    if (supported(isa)) return isa;
    throw std::invalid_argument("EVERYSTOP_ISA=" + name + ": this CPU cannot run it; it supports " +
                                supported_names() + " (unset the variable to let Everystop choose)");
  }
  throw std::invalid_argument("EVERYSTOP_ISA=" + name + " is unknown; this CPU supports " +
                              supported_names());
}

Isa choose_isa() {
  const char* forced = std::getenv("EVERYSTOP_ISA");
  if (forced != nullptr && *forced != '\0') return forced_isa(forced);
  Isa best = Isa::portable;
  for (Isa isa : kPreference) {
    if (supported(isa)) best = isa;
  }
  return best;
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avxvnni:
      return "avxvnni";
    case Isa::avx512vnni:
      return "avx512vnni";
    case Isa::neon:
      return "neon";
  }
  return "unknown";
}

}  // namespace everystop
