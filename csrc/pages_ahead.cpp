#include "pages_ahead.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace everystop {
namespace {

constexpr size_t kPiece = 2u << 20;  // a huge page: other threads wait for no longer than one takes

}  // namespace

PagesAhead::PagesAhead(uint8_t* data, size_t num_bytes, size_t lead_bytes)
    : data_(data),
      num_bytes_(num_bytes),
      lead_bytes_(lead_bytes),
      owner_process_(static_cast<int64_t>(getpid())),
      wanted_bytes_(std::min(num_bytes, lead_bytes)) {
  thread_ = std::thread([this] { work(); });
}

void PagesAhead::stop() {
  if (!thread_.joinable()) return;
  if (owner_process_ !=
      static_cast<int64_t>(getpid())) {  // after a fork the thread exists only in the parent
    thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void PagesAhead::reach(size_t num_bytes) {
  const size_t wanted = std::min(num_bytes_, num_bytes + lead_bytes_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (wanted <= wanted_bytes_) return;
  wanted_bytes_ = wanted;
  changed_.notify_one();
}

void PagesAhead::work() {
  while (take_next()) {
  }
}

// Waits for pages that are wanted and takes one piece of them; false at the end, or where the system cannot
// do it: then pages are taken when they are first written, as ever.
bool PagesAhead::take_next() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || taken_bytes_ < wanted_bytes_; });
    if (stopping_) return false;
  }
  const size_t size = std::min(kPiece, num_bytes_ - taken_bytes_);
  if (madvise(data_ + taken_bytes_, size, MADV_POPULATE_WRITE) != 0) return false;
  taken_bytes_ += size;
  return true;
}

}  // namespace everystop
