// Releasing the interpreter lock around native work.
#pragma once

#include <Python.h>

#if defined(__GLIBC__)
#include <cxxabi.h>
#include <unistd.h>
#endif

namespace everystop {

// Holds the interpreter lock released while it lives. A daemon thread that comes back when the interpreter
// has ended gets no lock any more: before Python 3.14 it is ended by pthread_exit, whose unwinding would
// abort the process at the first C++ frame that lets nothing pass. Such a thread sleeps here instead until
// the process is gone.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  ~GilReleased() {
#if defined(__GLIBC__)
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      while (true) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

 private:
  PyThreadState* state_;
};

}  // namespace everystop
