// The instruction-set path: which kernels this process runs.
#pragma once

namespace everystop {

enum class Isa { portable, avx2, avxvnni, avx512vnni, neon };

// The path of this process: the best this CPU supports, or the one EVERYSTOP_ISA names. Decided at the first
// call and kept, so that every kernel and every cached weight agrees. Throws std::invalid_argument when
// EVERYSTOP_ISA is unknown or this CPU cannot run it.
Isa active_isa();

const char* isa_name(Isa isa);

}  // namespace everystop
