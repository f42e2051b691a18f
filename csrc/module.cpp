// The native module: what Python sees of the kernels.
#include <nanobind/nanobind.h>

namespace everystop {
void bind_linear(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
}  // namespace everystop

NB_MODULE(_native, m) {
  // A decoder that a daemon thread still holds at the end is no leak, and users can do nothing about it.
  nanobind::set_leak_warnings(false);
  everystop::bind_linear(m);
  everystop::bind_decoder(m);
}
