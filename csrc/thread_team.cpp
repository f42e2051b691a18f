#include "thread_team.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace everystop {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads it as a plain word");

constexpr uint64_t kTilesMask = 0xffffffffu;
// Longer than the serial gaps inside a step, shorter than the gap between two steps of an idle server.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 32;
constexpr char kThreadName[] = "everystop-team";  // at most 15 letters

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads must be between 1 and 1024, not " + std::to_string(num_threads));
  }
}

ThreadTeam::~ThreadTeam() {
  stopping_.store(true);
  wake_sleepers();
  // After a fork the threads exist only in the parent.
  const bool forked = owner_process_ != static_cast<int64_t>(getpid());
  for (std::thread& worker : workers_) {
    if (forked) {
      worker.detach();
    } else {
      worker.join();
    }
  }
}

void ThreadTeam::start_workers() {
  owner_process_ = static_cast<int64_t>(getpid());
  workers_.reserve(static_cast<size_t>(num_threads_ - 1));
  for (int thread = 1; thread < num_threads_; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

void ThreadTeam::run_shared(int64_t num_tiles, Call call, const void* context) {
  assert(num_tiles <= static_cast<int64_t>(kTilesMask));
  if (workers_.empty()) start_workers();
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_tiles_.store(num_tiles, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(job << 32 | static_cast<uint64_t>(num_tiles), std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) > 0) wake_sleepers();
  const int64_t own = take_tiles(0);
  num_done_.fetch_add(own, std::memory_order_acq_rel);
  wait_until_done(num_tiles);
}

// Runs tiles of the current job until none is left; returns how many this thread ran. The job's fields are
// read before the exchange: if it succeeds, a tile of that same job was still to be taken, so they were its
// fields, and they stay until this tile is counted as done.
int64_t ThreadTeam::take_tiles(int thread) {
  int64_t num_taken = 0;
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & kTilesMask) != 0) {
    const Call call = call_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const int64_t num_tiles = num_tiles_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    call(context, num_tiles - static_cast<int64_t>(ticket & kTilesMask), thread);
    ++num_taken;
    ticket = ticket_.load(std::memory_order_acquire);
  }
  return num_taken;
}

void ThreadTeam::work(int thread) {
  pthread_setname_np(pthread_self(), kThreadName);
  while (wait_for_work()) {
    const int64_t num_taken = take_tiles(thread);
    if (num_taken > 0) num_done_.fetch_add(num_taken, std::memory_order_acq_rel);
  }
}

bool ThreadTeam::has_work() const {
  return (ticket_.load(std::memory_order_seq_cst) & kTilesMask) != 0 ||
         stopping_.load(std::memory_order_seq_cst);
}

// Waits until the current job has tiles left: spins for a short while, then sleeps. Returns false when the
// team is closing.
bool ThreadTeam::wait_for_work() {
  while (true) {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        if (has_work()) return !stopping_.load();
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    sleep_until_woken();
  }
}

// A job published after has_work() finds this thread counted as sleeping, so its wake-up changes the futex
// first.
void ThreadTeam::sleep_until_woken() {
  const uint32_t expected = num_wakes_.load(std::memory_order_seq_cst);
  num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
  if (!has_work()) syscall(SYS_futex, &num_wakes_, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
  num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
}

void ThreadTeam::wake_sleepers() {
  num_wakes_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &num_wakes_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void ThreadTeam::wait_until_done(int64_t num_tiles) {
  for (int spins = 0; num_done_.load(std::memory_order_acquire) != num_tiles; ++spins) {
    // A thread that holds a tile may have lost its core to this spin.
    if (spins > 500) std::this_thread::yield();
    pause_cpu();
  }
}

}  // namespace everystop
