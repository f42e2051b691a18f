// Rotary position embedding (Su et al., 2021) over pairs half a head apart, as transformers orders them.
#pragma once

#include <cstdint>

namespace everystop {

// The cosines and sines [half] of position · inv_freq [half], both times `factor`; angles are float32
// products.
void rope_angles(int64_t position, const float* inv_freq, int64_t half, float factor, float* cosines,
                 float* sines);

// Rotates the pairs (x[i], x[i + half]); the slow, obvious version, the fast one is rope_body.hpp.
void rotate_half_naive(float* x, const float* cosines, const float* sines, int64_t half);

}  // namespace everystop
