// Bugs planted on purpose, so that the tests of "batching never changes an answer" can show that they would
// find them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.hpp"

namespace everystop {

namespace {

// Some rows of n numbers, ldx apart, rounded to one grid of int8.
std::vector<float> on_one_grid(const float* x, int64_t num_rows, int64_t n, int64_t ldx) {
  float largest = 0.0f;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[row * ldx + i]));
  }
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  std::vector<float> rounded;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < n; ++i) rounded.push_back(std::nearbyint(x[row * ldx + i] / scale) * scale);
  }
  return rounded;
}

}  // namespace

// Rounds all rows to one grid, as a scale over the whole batch would.
void Decoder::project_quantized_over_batch(const Projection& p) {
  const std::vector<float> rounded = on_one_grid(p.x, p.m, p.k, p.k);
  Projection q = p;
  q.x = rounded.data();
  project_exactly(q);
}

// Stores keys, and values, of all tokens of a step once more, on one grid, as a scale that tokens share
// would.
void Decoder::store_on_one_grid(int64_t layer) {
  const int64_t row = config_.qkv_size(), size = config_.kv_size();
  const float* first = qkv_.get() + config_.q_size();
  const std::vector<float> keys = on_one_grid(first, num_tokens_, size, row);
  const std::vector<float> values = on_one_grid(first + size, num_tokens_, size, row);
  for (int64_t t = 0; t < num_tokens_; ++t)
    store(tokens_[static_cast<size_t>(t)], layer, keys.data() + t * size, values.data() + t * size);
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
