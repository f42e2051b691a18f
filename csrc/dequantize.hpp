// Conversion of GGML tensor data to float32.
//
// Block formats as in the GGUF specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_team.hpp"

namespace everystop {

// The values are the type ids of a GGUF file.
enum class GgmlType : int {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

// The type with GGUF id `id`; throws std::invalid_argument when it is not one of the above.
GgmlType ggml_type(int id);

// Bytes of a row of k values; throws std::invalid_argument unless k is a multiple of the type's block.
size_t ggml_row_bytes(GgmlType type, int64_t k);

// out [n_rows, k] from n_rows · ggml_row_bytes(type, k) bytes at `raw`, which needs no alignment.
void dequantize(GgmlType type, const uint8_t* raw, int64_t n_rows, int64_t k, float* out, ThreadTeam& team);

}  // namespace everystop
