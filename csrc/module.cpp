// The native module: what Python sees of the kernels.
#include <nanobind/nanobind.h>

namespace everystop {
void bind_linear(nanobind::module_& m);
#ifdef EVERYSTOP_HAS_DECODER
void bind_decoder(nanobind::module_& m);
#endif
}  // namespace everystop

NB_MODULE(_native, m) {
  everystop::bind_linear(m);
#ifdef EVERYSTOP_HAS_DECODER
  everystop::bind_decoder(m);
#endif
}
