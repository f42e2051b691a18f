#include "decoder_kernels.hpp"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 on its own intrinsics
#include "decoder_vectors_avx512.hpp"

// Written over the vectors above.
#include "activation_body.hpp"
#include "attention_body.hpp"
#include "hadamard_body.hpp"
#include "norm_body.hpp"
#include "rope_body.hpp"
#include "sampling_body.hpp"

namespace everystop {

const DecoderKernels& decoder_kernels_avx512() {
  static const DecoderKernels kernels = {rms_norm, add_rms_norm,  add_in_place,   rotate_half,
                                         spread,   silu_mul,      widen,          write_token,
                                         attend,   attend_partly, merge_partials, max_of,
                                         index_of, count_greater, next_greater,   exp2_of};
  return kernels;
}

}  // namespace everystop
