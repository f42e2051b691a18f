// RMSNorm (Zhang and Sennrich, 2019), the slow, obvious version; the fast one is norm_body.hpp.
#pragma once

#include <cstdint>

namespace everystop {

// out[n] = x / sqrt(mean(x²) + eps) · weight.
void rms_norm_naive(const float* x, const float* weight, int64_t n, float eps, float* out);

}  // namespace everystop
