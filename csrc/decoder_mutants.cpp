// Bugs planted on purpose, so that the tests of "batching never changes an answer" can show that they would
// find them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.hpp"

namespace everystop {

// Rounds all rows to one grid, as a scale over the whole batch would.
void Decoder::project_quantized_over_batch(const Projection& p) {
  float largest = 0.0f;
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t i = 0; i < p.k; ++i) largest = std::max(largest, std::fabs(p.x[row * p.k + i]));
  }
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  std::vector<float> rounded(static_cast<size_t>(p.m * p.k));
  for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = std::nearbyint(p.x[i] / scale) * scale;
  Projection q = p;
  q.x = rounded.data();
  project_exactly(q);
}

// Sums the inputs in two halves where there is more than one row, as a kernel for few rows and one for many
// would.
void Decoder::project_split_by_rows(const Projection& p) {
  if (p.m == 1) return project_exactly(p);
  const int64_t half = p.k / 2;
  std::vector<float> part(static_cast<size_t>(p.m * p.k)), sum(static_cast<size_t>(p.m * p.n), 0.0f);
  for (int side = 0; side < 2; ++side) {
    for (int64_t row = 0; row < p.m; ++row) {
      for (int64_t i = 0; i < p.k; ++i) {
        part[static_cast<size_t>(row * p.k + i)] = (i < half) == (side == 0) ? p.x[row * p.k + i] : 0.0f;
      }
    }
    Projection q = p;
    q.x = part.data();
    if (side == 1) q.bias = nullptr;
    project_exactly(q);
    for (int64_t row = 0; row < p.m; ++row) {
      for (int64_t i = 0; i < p.n; ++i) sum[static_cast<size_t>(row * p.n + i)] += p.y[row * p.ldy + i];
    }
  }
  for (int64_t row = 0; row < p.m; ++row) {
    std::copy_n(sum.begin() + row * p.n, p.n, p.y + row * p.ldy);
  }
}

}  // namespace everystop
