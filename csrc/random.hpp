// A counter-based random number generator: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", 2011). A number is a function of its key and counter alone, so nobody's draw
// depends on another's.
#pragma once

#include <array>
#include <cstdint>

namespace everystop {

// What a number is drawn for; part of the counter, so that draws for one token are independent.
enum class DrawKind : uint32_t { token = 0 };

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A number in [0, 1) with 53 random bits: key is the seed; counter is (position, choice, kind).
double uniform_draw(uint64_t seed, uint32_t choice, uint64_t position, DrawKind kind);

}  // namespace everystop
