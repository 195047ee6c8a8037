// Threads that share the tasks of one call. They spin briefly, then give way, then sleep: a busy neighbour must not be
// waited for by burning the core it runs on. Whoever is free takes the next task, the caller included.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace moesaic {

using Clock = std::chrono::steady_clock;

// Waits for others: at first by spinning, then by giving the core to whoever wants it, the one waited for too.
class Patience {
 public:
  // Whether there is time left.
  bool wait(Clock::time_point deadline) {
    if (++num_waits_ < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return true;
    }
    std::this_thread::yield();
    return Clock::now() < deadline;
  }

  static constexpr int kSpins = 2000;  // guess: some 50 us, longer than the gap between two layers' calls

 private:
  int num_waits_ = 0;
};

class Team {
 public:
  using Task = void (*)(void* context, int64_t task);

  // Throws where the system starts fewer threads; those that it did start have ended by then.
  explicit Team(int num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::exception& error) {
      const std::string had = std::to_string(this->num_threads());
      end();
      throw std::runtime_error("num_threads is " + std::to_string(num_threads) + ", and the system gave " + had +
                               " (" + error.what() +
                               "): ask for fewer, or raise its limit on threads (ulimit -u) or memory (ulimit -v)");
    }
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  ~Team() { end(); }

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Returns when every task has ended. One call at a time; others wait for their turn. Tasks are taken in ascending
  // order, so that a task may wait for those before it.
  void run(int64_t num_tasks, Task task, void* context) {
    run_until(num_tasks, task, context, Clock::time_point::max());
  }

  // Whether every task ended in time. If not, some may still run, and use `context`: this team takes no other call,
  // and neither may ever be freed.
  bool run_until(int64_t num_tasks, Task task, void* context, Clock::time_point deadline) {
    std::lock_guard<std::mutex> turn(turn_);
    check();
    if (threads_.empty() || num_tasks <= 1) {
      for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
      return true;
    }
    Job job{task, context, static_cast<uint32_t>(num_tasks), 0};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job.epoch = job_.epoch + 1;
      job_ = job;
      num_done_.store(0);
      next_.store(static_cast<uint64_t>(job.epoch) << 32);
    }
    epoch_.store(job.epoch);
    if (num_asleep_.load() > 0) wake_.notify_all();
    take_tasks(job);
    // All are taken; wait for those that others still work on.
    Patience patience;
    while (num_done_.load() < job.num_tasks) {
      if (patience.wait(deadline)) continue;
      is_broken_.store(true);
      return false;
    }
    return true;
  }

  bool is_broken() const { return is_broken_.load(); }
  void break_off() { is_broken_.store(true); }

  void check() const {
    if (is_broken())
      throw std::runtime_error("an earlier call of these kernels did not end in time, and its threads may still run");
  }

 private:
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  struct Job {
    Task task = nullptr;
    void* context = nullptr;
    uint32_t num_tasks = 0, epoch = 0;
  };

  // Ready for so long after a call, at the end of it for whoever wants the core more: to be woken takes some 100 us.
  // guess: longer than what a step does between its calls.
  static constexpr std::chrono::microseconds kDrowsy{300};

  // The counter holds the epoch too: whoever comes late finds another one and takes nothing.
  void take_tasks(const Job& job) {
    uint64_t next = next_.load();
    while (next >> 32 == job.epoch && static_cast<uint32_t>(next) < job.num_tasks) {
      if (!next_.compare_exchange_weak(next, next + 1)) continue;
      job.task(job.context, static_cast<uint32_t>(next));
      num_done_.fetch_add(1);
      next = next_.load();
    }
  }

  void work() {
    uint32_t seen = 0;
    while (true) {
      Patience patience;
      const Clock::time_point asleep_at = Clock::now() + kDrowsy;
      while (epoch_.load() == seen && patience.wait(asleep_at)) {
      }
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return job_.epoch != seen || is_ending_; });
        num_asleep_.fetch_sub(1);
        if (is_ending_) return;
        job = job_;
      }
      seen = job.epoch;
      take_tasks(job);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  Job job_;              // under mutex_, as is_ending_
  bool is_ending_ = false;
  std::atomic<uint32_t> epoch_{0};  // of job_, for those that spin
  std::atomic<uint64_t> next_{0};   // epoch | first task that nobody took
  std::atomic<uint32_t> num_done_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_broken_{false};
};

}  // namespace moesaic
