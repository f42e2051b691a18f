// Runs this project's linear layers, as the module that is installed does, and prints what a test compares:
// every bit of the results, how many of them are not those of the naive version, and how many rows have other
// bits in some batch than alone. One thread.
#include "linear.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <vector>

#include "isa.hpp"

namespace {

using everystop::Dtype;

class Buffer {
 public:
  explicit Buffer(size_t bytes) : data_(std::aligned_alloc(64, (bytes + 64) / 64 * 64)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  uint8_t* get() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_;
};

uint32_t next_random(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// From -1 to 1, one in four of them at an end: their products are the largest there are.
std::vector<float> random_floats(uint32_t seed, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const uint32_t kind = next_random(seed) >> 21;  // 0 to 7
    const float random = static_cast<float>(static_cast<int32_t>(next_random(seed)) - (1 << 23)) / (1 << 23);
    value = kind == 0 ? 1.0f : kind == 1 ? -1.0f : random;
  }
  return values;
}

class Layer {
 public:
  Layer(Dtype dtype, const std::vector<float>& w, const float* bias, int64_t n, int64_t k)
      : dtype_(dtype), bias_(bias), n_(n), k_(k), packed_(everystop::packed_linear_bytes(dtype, n, k)) {
    everystop::pack_linear(dtype, w.data(), n, k, packed_.get(), team_);
  }

  std::vector<float> run(const float* x, int64_t m) {
    std::vector<float> y(static_cast<size_t>(m * n_));
    const Buffer scratch(everystop::activation_bytes(dtype_, m, k_));
    everystop::prepare_activations(dtype_, x, m, k_, k_, scratch.get(), team_);
    everystop::linear_forward(dtype_, packed_.get(), scratch.get(), m, n_, k_, bias_, y.data(), n_, team_);
    return y;
  }

  std::vector<float> run_naive(const float* x, int64_t m) const {
    std::vector<float> y(static_cast<size_t>(m * n_));
    everystop::linear_naive(dtype_, packed_.get(), x, m, n_, k_, bias_, y.data());
    return y;
  }

 private:
  Dtype dtype_;
  const float* bias_;
  int64_t n_, k_;
  Buffer packed_;
  everystop::ThreadTeam team_{1};
};

int count_differences(const std::vector<float>& one, const std::vector<float>& other) {
  int count = 0;
  for (size_t i = 0; i < one.size(); ++i) count += std::memcmp(&one[i], &other[i], sizeof(float)) != 0;
  return count;
}

// Rows that are not the same, bit for bit, in batches of every size that end with the last row, as each
// alone.
int count_rows_unlike_alone(Layer& layer, const std::vector<float>& x, int64_t m, int64_t n, int64_t k) {
  std::vector<std::vector<float>> alone;
  for (int64_t row = 0; row < m; ++row) alone.push_back(layer.run(x.data() + row * k, 1));
  int count = 0;
  for (int64_t first = 0; first < m; ++first) {
    const std::vector<float> batch = layer.run(x.data() + first * k, m - first);
    for (int64_t row = first; row < m; ++row) {
      const float* in_batch = batch.data() + (row - first) * n;
      count += std::memcmp(in_batch, alone[static_cast<size_t>(row)].data(),
                           static_cast<size_t>(n) * sizeof(float)) != 0;
    }
  }
  return count;
}

void print_bits(const std::vector<float>& y, int64_t n) {
  for (size_t i = 0; i < y.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &y[i], sizeof bits);
    std::printf("%08x%s", bits, (i + 1) % static_cast<size_t>(n) == 0 ? "\n" : "");
  }
}

void check(Dtype dtype, int64_t m, int64_t n, int64_t k, bool has_bias) {
  const std::vector<float> w = random_floats(1, n * k), x = random_floats(2, m * k),
                           bias = random_floats(3, n);
  Layer layer(dtype, w, has_bias ? bias.data() : nullptr, n, k);
  const std::vector<float> y = layer.run(x.data(), m);
  std::printf("%s m=%d n=%d k=%d bias=%d: %d unlike naive, %d rows unlike alone\n",
              dtype == Dtype::int8 ? "int8" : "float32", static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), has_bias, count_differences(y, layer.run_naive(x.data(), m)),
              count_rows_unlike_alone(layer, x, m, n, k));
  print_bits(y, n);
}

}  // namespace

int main() {
  try {
    std::printf("path %s\n", everystop::isa_name(everystop::active_isa()));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  for (const Dtype dtype : {Dtype::int8, Dtype::float32}) {
    for (const bool has_bias : {false, true}) {
      check(dtype, 1, 1, 1, has_bias);
      check(dtype, 6, 32, 64, has_bias);
      check(dtype, 7, 33, 65, has_bias);
      check(dtype, 3, 31, 63, has_bias);
      check(dtype, 5, 64, 1536, has_bias);
      check(dtype, 12, 96, 576, has_bias);
      check(dtype, 40, 50, 200, has_bias);
      check(dtype, 3, 1536, 576, has_bias);  // the last two are sizes of a model
      check(dtype, 3, 576, 1536, has_bias);
    }
  }
  return 0;
}
