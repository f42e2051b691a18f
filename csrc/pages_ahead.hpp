// A thread that takes memory from the system before it is needed.
//
// The first write to a page of anonymous memory takes the page from the system, which clears it: 2 ms for
// each MiB on a virtual machine that has to ask its host. In a step that is time for which every request
// waits. So the pages some way ahead of the furthest one in use are taken by a thread of their own; the rest
// of a large pool stays untouched until use comes near it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace everystop {

class PagesAhead {
 public:
  // For the mapping of `num_bytes` at `data`, page-aligned: begins with the first `lead_bytes`.
  PagesAhead(uint8_t* data, size_t num_bytes, size_t lead_bytes);
  ~PagesAhead() { stop(); }
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

  // The first `num_bytes` are about to be used: those and the lead are wanted. Returns at once; one thread
  // calls it.
  void reach(size_t num_bytes);

  // Ends the thread; to be called before the mapping goes.
  void stop();

 private:
  void work();
  bool take_next();

  uint8_t* const data_;
  const size_t num_bytes_;
  const size_t lead_bytes_;
  const int64_t owner_process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t wanted_bytes_;     // guarded by mutex_
  bool stopping_ = false;   // guarded by mutex_
  size_t taken_bytes_ = 0;  // of the thread alone
  std::thread thread_;
};

}  // namespace everystop
