// Linear layers y = x · wᵀ + bias over weights packed for this process's instruction-set path.
//
// int8 is group-wise W8A8: weights and activations are int8 with one float scale per row and group of 64
// inputs (symmetric, max|x| / 127). Inside a group the dot product is an exact integer; across groups
//   acc = fma(float(dot), weight_scale * activation_scale, acc)
// runs in ascending order of groups, and the bias is added last. float32 is one fma chain per output over
// ascending inputs (the portable path rounds product and sum apart). So an output depends on its own row of x
// alone: not on the number of rows, the row's position, the number of threads or how tiles are shared out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_team.hpp"

namespace everystop {

enum class Dtype { float32, int8 };

// Inputs that share one scale.
constexpr int64_t kGroupSize = 64;

// Names the packed layout; part of the key of any cache of packed weights.
const char* linear_layout_name(Dtype dtype);

// Bytes of the packed form of w [n, k].
size_t packed_linear_bytes(Dtype dtype, int64_t n, int64_t k);

// Packs w [n, k], row-major, into `out` (packed_linear_bytes, aligned to 64 bytes).
void pack_linear(Dtype dtype, const float* w, int64_t n, int64_t k, uint8_t* out, ThreadTeam& team);

// Bytes of scratch that prepare_activations needs for up to max_rows rows of k inputs.
size_t activation_bytes(Dtype dtype, int64_t max_rows, int64_t k);

// Called with the first of some rows of x and their number, before they are read; each row once, by any
// thread.
class RowMaker {
 public:
  RowMaker() = default;
  // Keeps a pointer to `make`, which must outlive this.
  template <class F>
  explicit RowMaker(const F& make)
      : call_([](const void* context, int64_t first, int64_t count) {
          (*static_cast<const F*>(context))(first, count);
        }),
        context_(&make) {}

  void operator()(int64_t first, int64_t count) const {
    if (call_ != nullptr) call_(context_, first, count);
  }

 private:
  void (*call_)(const void* context, int64_t first, int64_t count) = nullptr;
  const void* context_ = nullptr;
};

// Converts x [m, k] (consecutive rows ldx floats apart) into the form linear_forward reads. `scratch` holds
// activation_bytes(dtype, m, k), aligned to 64 bytes. One prepared x serves any number of layers of k inputs.
// `make_rows` writes rows of x while they are still in the cache when they are converted.
void prepare_activations(Dtype dtype, const float* x, int64_t m, int64_t k, int64_t ldx, uint8_t* scratch,
                         ThreadTeam& team, const RowMaker& make_rows = {});

// Memory that is read after a layer, which fetches it meanwhile: `num_blocks` blocks of block_bytes, whose
// numbers are in `blocks`, each block_stride bytes times its number behind `base`. It changes no result.
struct Upcoming {
  const uint8_t* base;
  const int32_t* blocks;
  int64_t num_blocks;
  int64_t block_stride;
  int64_t block_bytes;
};

// The layer that comes next, whose first weights are fetched at the end of this one; none where packed is
// null.
struct NextLayer {
  const uint8_t* packed;
  int64_t n, k;
};

// y [m, n] (rows ldy floats apart) = x · wᵀ + bias [n], where bias may be null. `packed` is aligned to 64
// bytes and only read. A NaN or infinity in a row of x makes that row of y not finite and leaves the others
// untouched.
void linear_forward(Dtype dtype, const uint8_t* packed, const uint8_t* activations, int64_t m, int64_t n,
                    int64_t k, const float* bias, float* y, int64_t ldy, ThreadTeam& team,
                    const Upcoming& upcoming = {}, const NextLayer& next = {});

// The slow, obvious version of prepare_activations and linear_forward together; the oracle of the tests.
void linear_naive(Dtype dtype, const uint8_t* packed, const float* x, int64_t m, int64_t n, int64_t k,
                  const float* bias, float* y);

}  // namespace everystop
