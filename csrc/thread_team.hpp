// A team of threads that shares out the tiles of one operation at a time.
//
// Tiles are taken one by one from a shared counter, so a thread that loses its core for a moment costs at
// most the tile it holds. The caller takes part and waits only for tiles that were taken, never for a thread
// that took none: a sleeping or descheduled worker delays nobody.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace everystop {

class ThreadTeam {
 public:
  // A team of `num_threads` including the caller of run(); workers start at the first run() that needs them.
  // Throws std::invalid_argument unless 1 <= num_threads <= 1024.
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return num_threads_; }

  // Calls body(tile, thread) once for each tile in [0, num_tiles), thread in [0, size()), and returns when
  // all are done. The bodies must not throw, must not call run(), and one thread at a time may call run().
  template <class F>
  void run(int64_t num_tiles, F&& body) {
    if (num_threads_ == 1 || num_tiles <= 1) {
      for (int64_t tile = 0; tile < num_tiles; ++tile) body(tile, 0);
      return;
    }
    using Body = std::remove_reference_t<F>;
    auto call = [](const void* context, int64_t tile, int thread) {
      (*static_cast<Body*>(const_cast<void*>(context)))(tile, thread);
    };
    run_shared(num_tiles, call, &body);
  }

 private:
  using Call = void (*)(const void* context, int64_t tile, int thread);

  void run_shared(int64_t num_tiles, Call call, const void* context);
  void start_workers();
  void work(int thread);
  int64_t take_tiles(int thread);
  bool has_work() const;
  bool wait_for_work();
  void sleep_until_woken();
  void wake_sleepers();
  void wait_until_done(int64_t num_tiles);

  const int num_threads_;
  std::vector<std::thread> workers_;
  int64_t owner_process_ = 0;

  // The job. Its fields change only while no tile of it is left or held.
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> num_tiles_{0};
  // High half: number of the job; low half: tiles not yet taken.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<uint32_t> num_wakes_{0};  // the futex that sleepers wait on
  std::atomic<bool> stopping_{false};
};

}  // namespace everystop
