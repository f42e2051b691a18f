// The gated activation of the MLP, the slow, obvious version; the fast one is activation_body.hpp.
#pragma once

#include <cstdint>

namespace everystop {

// out[n] = gate / (1 + exp(-gate)) · up.
void silu_mul_naive(const float* gate, const float* up, int64_t n, float* out);

}  // namespace everystop
