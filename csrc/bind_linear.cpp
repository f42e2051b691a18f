// Python bindings of the linear layers and of dequantisation. Checks every size; the kernels check none.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dequantize.hpp"
#include "gil.hpp"
#include "isa.hpp"
#include "linear.hpp"
#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace nb = nanobind;

namespace everystop {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T, int kDims>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<kDims>, nb::c_contig>;

constexpr size_t kAlignment = 64;

struct FreeBuffer {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<uint8_t, FreeBuffer>;

Buffer allocate(size_t bytes) {
  const size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
  void* p = std::aligned_alloc(kAlignment, rounded);
  if (p == nullptr) throw std::bad_alloc();
  return Buffer(static_cast<uint8_t*>(p));
}

template <class T, int kDims>
Result<T, kDims> give(Buffer buffer, std::initializer_list<size_t> shape) {
  void* data = buffer.get();
  nb::capsule owner(buffer.release(), [](void* p) noexcept { std::free(p); });
  return Result<T, kDims>(data, shape, owner);
}

void require(bool condition, const std::string& message) {
  if (!condition) throw nb::value_error(message.c_str());
}

void require_sizes(std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  for (const auto& [name, size] : sizes) {
    require(size >= 0 && size < int64_t{1} << 31,
            std::string(name) + " must be between 0 and 2,147,483,647, not " + std::to_string(size));
  }
}

Dtype parse_dtype(const std::string& name) {
  if (name == "int8") return Dtype::int8;
  require(name == "float32", "dtype must be int8 or float32, not " + name);
  return Dtype::float32;
}

void require_packed(Dtype dtype, const Bytes& packed, int64_t n, int64_t k) {
  require_sizes({{"n", n}, {"k", k}});
  const size_t bytes = packed_linear_bytes(dtype, n, k);
  require(packed.size() == bytes, "packed weights of [" + std::to_string(n) + ", " + std::to_string(k) +
                                      "] take " + std::to_string(bytes) + " bytes, not " +
                                      std::to_string(packed.size()));
  require(reinterpret_cast<uintptr_t>(packed.data()) % kAlignment == 0,
          "packed weights must start at a multiple of 64 bytes in memory");
}

Result<uint8_t, 1> py_pack_linear(const std::string& dtype_name, Matrix w, int num_threads) {
  const Dtype dtype = parse_dtype(dtype_name);
  const int64_t n = static_cast<int64_t>(w.shape(0));
  const int64_t k = static_cast<int64_t>(w.shape(1));
  require_sizes({{"n", n}, {"k", k}});
  ThreadTeam team(num_threads);
  const size_t bytes = packed_linear_bytes(dtype, n, k);
  Buffer out = allocate(bytes);
  {
    const GilReleased released;
    pack_linear(dtype, w.data(), n, k, out.get(), team);
  }
  return give<uint8_t, 1>(std::move(out), {bytes});
}

Result<float, 2> py_linear(const std::string& dtype_name, Bytes packed, Matrix x, int64_t n, int64_t k,
                           std::optional<Vector> bias, int num_threads, bool naive) {
  const Dtype dtype = parse_dtype(dtype_name);
  require_packed(dtype, packed, n, k);
  require(static_cast<int64_t>(x.shape(1)) == k,
          "x has " + std::to_string(x.shape(1)) + " columns, the layer takes k = " + std::to_string(k));
  require(!bias || static_cast<int64_t>(bias->size()) == n,
          "bias has " + std::to_string(bias ? bias->size() : 0) +
              " entries, the layer has n = " + std::to_string(n));
  const int64_t m = static_cast<int64_t>(x.shape(0));
  require_sizes({{"m", m}});
  const float* bias_data = bias ? bias->data() : nullptr;
  ThreadTeam team(num_threads);
  Buffer y = allocate(static_cast<size_t>(m * n) * sizeof(float));
  float* y_data = reinterpret_cast<float*>(y.get());
  {
    const GilReleased released;
    if (naive) {
      linear_naive(dtype, packed.data(), x.data(), m, n, k, bias_data, y_data);
    } else {
      Buffer activations = allocate(activation_bytes(dtype, m, k));
      prepare_activations(dtype, x.data(), m, k, k, activations.get(), team);
      linear_forward(dtype, packed.data(), activations.get(), m, n, k, bias_data, y_data, n, team);
    }
  }
  return give<float, 2>(std::move(y), {static_cast<size_t>(m), static_cast<size_t>(n)});
}

std::tuple<Result<uint8_t, 2>, Result<float, 2>> py_quantize_activations(Matrix x) {
  const int64_t m = static_cast<int64_t>(x.shape(0));
  const int64_t k = static_cast<int64_t>(x.shape(1));
  require(k % kGroupSize == 0, "x must have a multiple of 64 columns, not " + std::to_string(k));
  Buffer values = allocate(static_cast<size_t>(m * k));
  Buffer scales = allocate(static_cast<size_t>(m * k / kGroupSize) * sizeof(float));
  for (int64_t group = 0; group < m * k / kGroupSize; ++group) {
    int8_t q[kGroupSize];
    reinterpret_cast<float*>(scales.get())[group] =
        quantize_group(x.data() + group * kGroupSize, kGroupSize, q);
    for (int64_t i = 0; i < kGroupSize; ++i) {
      values.get()[group * kGroupSize + i] = static_cast<uint8_t>(q[i] + 128);
    }
  }
  return {give<uint8_t, 2>(std::move(values), {static_cast<size_t>(m), static_cast<size_t>(k)}),
          give<float, 2>(std::move(scales), {static_cast<size_t>(m), static_cast<size_t>(k / kGroupSize)})};
}

size_t py_ggml_row_bytes(int type, int64_t k) {
  require_sizes({{"k", k}});
  return ggml_row_bytes(ggml_type(type), k);
}

Result<float, 2> py_dequantize(int type_id, Bytes raw, int64_t n, int64_t k, int num_threads) {
  require_sizes({{"n", n}, {"k", k}});
  const GgmlType type = ggml_type(type_id);
  const size_t bytes = static_cast<size_t>(n) * ggml_row_bytes(type, k);
  require(raw.size() == bytes, "[" + std::to_string(n) + ", " + std::to_string(k) + "] of GGML type " +
                                   std::to_string(type_id) + " take " + std::to_string(bytes) +
                                   " bytes, not " + std::to_string(raw.size()));
  ThreadTeam team(num_threads);
  Buffer out = allocate(static_cast<size_t>(n * k) * sizeof(float));
  {
    const GilReleased released;
    dequantize(type, raw.data(), n, k, reinterpret_cast<float*>(out.get()), team);
  }
  return give<float, 2>(std::move(out), {static_cast<size_t>(n), static_cast<size_t>(k)});
}

using Layer = std::tuple<Bytes, int64_t, int64_t, int64_t>;

// Scratch as large as the largest of the layers needs; as in a decoder, every layer uses the same.
struct Scratch {
  Scratch(Dtype dtype, const std::vector<Layer>& layers) {
    size_t num_inputs = 0, num_outputs = 0, num_bytes = 0;
    for (const auto& [packed, n, k, m] : layers) {
      require_packed(dtype, packed, n, k);
      require_sizes({{"m", m}});
      num_inputs = std::max(num_inputs, static_cast<size_t>(m * k));
      num_outputs = std::max(num_outputs, static_cast<size_t>(m * n));
      num_bytes = std::max(num_bytes, activation_bytes(dtype, m, k));
    }
    x_buffer = allocate(num_inputs * sizeof(float));
    y_buffer = allocate(num_outputs * sizeof(float));
    activations = allocate(num_bytes);
    for (size_t i = 0; i < num_inputs; ++i) x()[i] = static_cast<float>(static_cast<int>(i * 37 % 255) - 127);
  }
  float* x() const { return reinterpret_cast<float*>(x_buffer.get()); }
  float* y() const { return reinterpret_cast<float*>(y_buffer.get()); }
  Buffer x_buffer, y_buffer, activations;
};

std::vector<int64_t> py_measure_linear(const std::string& dtype_name, const std::vector<Layer>& layers,
                                       int num_threads, int repeats) {
  const Dtype dtype = parse_dtype(dtype_name);
  require_sizes({{"repeats", repeats}});
  ThreadTeam team(num_threads);
  const Scratch scratch(dtype, layers);
  std::vector<int64_t> durations;
  const GilReleased released;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (const auto& [packed, n, k, m] : layers) {
      prepare_activations(dtype, scratch.x(), m, k, k, scratch.activations.get(), team);
      linear_forward(dtype, packed.data(), scratch.activations.get(), m, n, k, nullptr, scratch.y(), n, team);
    }
    const auto end = std::chrono::steady_clock::now();
    durations.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count());
  }
  return durations;
}

// The sum of the words of [data, data + size), in as many chains as it takes to wait for nothing but memory.
uint64_t sum_words(const uint8_t* data, size_t size) {
  constexpr size_t kChains = 16;
  uint64_t sums[kChains] = {};
  size_t i = 0;
  for (; i + sizeof sums <= size; i += sizeof sums) {
    uint64_t words[kChains];
    std::memcpy(words, data + i, sizeof words);
    for (size_t chain = 0; chain < kChains; ++chain) sums[chain] += words[chain];
  }
  for (; i < size; ++i) sums[0] += data[i];
  return std::accumulate(sums, sums + kChains, uint64_t{0});
}

std::vector<int64_t> py_measure_read(const std::vector<Bytes>& arrays, int num_threads, int repeats) {
  constexpr size_t kPiece = size_t{1} << 18;
  require_sizes({{"repeats", repeats}});
  std::vector<std::pair<const uint8_t*, size_t>> pieces;
  for (const Bytes& array : arrays) {
    for (size_t first = 0; first < array.size(); first += kPiece) {
      pieces.emplace_back(array.data() + first, std::min(kPiece, array.size() - first));
    }
  }
  ThreadTeam team(num_threads);
  std::vector<int64_t> durations;
  std::atomic<uint64_t> sum{0};  // is used, or nothing would be read
  const GilReleased released;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    team.run(static_cast<int64_t>(pieces.size()), [&](int64_t piece, int) {
      const auto& [data, size] = pieces[static_cast<size_t>(piece)];
      sum.fetch_add(sum_words(data, size), std::memory_order_relaxed);
    });
    const auto end = std::chrono::steady_clock::now();
    durations.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count());
  }
  return durations;
}

double py_measure_peak(int num_threads) {
  constexpr int64_t kIterations = 2'000'000;
  const auto dot_in_registers = linear_kernels().dot_in_registers;
  if (dot_in_registers == nullptr) return 0;
  ThreadTeam team(num_threads);
  const GilReleased released;
  double best = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::atomic<int64_t> num_products{0};
    const auto start = std::chrono::steady_clock::now();
    team.run(num_threads, [&](int64_t, int) {
      int32_t sink = 0x01010101;
      num_products += dot_in_registers(kIterations, &sink);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * static_cast<double>(num_products.load()) / elapsed.count());
  }
  return best;
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  m.def("isa", [] { return isa_name(active_isa()); }, "Name of this process's instruction-set path.");
  m.def(
      "linear_layout", [](const std::string& dtype) { return linear_layout_name(parse_dtype(dtype)); },
      "dtype"_a, "Name of the layout that pack_linear writes for dtype ('int8' or 'float32') on this path.");
  m.def(
      "packed_linear_bytes",
      [](const std::string& dtype, int64_t n, int64_t k) {
        require_sizes({{"n", n}, {"k", k}});
        return packed_linear_bytes(parse_dtype(dtype), n, k);
      },
      "dtype"_a, "n"_a, "k"_a, "Bytes of the packed form of w [n, k].");
  m.def("pack_linear", &py_pack_linear, "dtype"_a, "w"_a.noconvert(), "num_threads"_a = 1,
        "Packs w [n, k] float32 into a new uint8 array, aligned to 64 bytes.");
  m.def("linear", &py_linear, "dtype"_a, "packed"_a.noconvert(), "x"_a.noconvert(), "n"_a, "k"_a,
        "bias"_a.noconvert() = nb::none(), "num_threads"_a = 1, "naive"_a = false,
        "y [m, n] = x [m, k] · wᵀ + bias [n], from packed weights; naive=True runs the oracle.");
  m.def("quantize_activations", &py_quantize_activations, "x"_a.noconvert(),
        "x [m, k] as (uint8 [m, k] with zero point 128, float32 scales [m, k / 64]).");
  m.def("ggml_row_bytes", &py_ggml_row_bytes, "type"_a, "k"_a,
        "Bytes of a row of k values of a GGML type id.");
  m.def("dequantize", &py_dequantize, "type"_a, "raw"_a.noconvert(), "n"_a, "k"_a, "num_threads"_a = 1,
        "float32 [n, k] from the raw bytes of a GGML tensor.");
  m.def("measure_peak", &py_measure_peak, "num_threads"_a,
        "The best int8 operations a second that this path's dot instructions reach in registers; 0 where it "
        "has none.");
  m.def(
      "measure_read", &py_measure_read, "arrays"_a, "num_threads"_a, "repeats"_a,
      "Nanoseconds of each of `repeats` walks over the bytes of uint8 arrays that do nothing but read them.");
  m.def(
      "measure_linear", &py_measure_linear, "dtype"_a, "layers"_a, "num_threads"_a, "repeats"_a,
      "Nanoseconds of each of `repeats` walks over layers of (packed, n, k, m rows), activations included.");
}

}  // namespace everystop
