// Memory that the ranks of one machine share: a bell for each rank, and inboxes that others write into.
//
//   bells                     a line for each rank
//   lane 0   rank 0 from 1    taken | inbox of even turns | inbox of odd turns      inbox: head | body
//            rank 0 from 2    ...
//            rank 1 from 0    ...
//            returns of 0, 1  see moe_ranks.hpp; none in lanes of messages
//   lane 1   ...
//
// Who writes an inbox stores its turn last (release); who reads it loads the turn first (acquire). An inbox is written
// again when its reader has said that it is taken. Then the reader's bell is rung: who waits spins briefly and sleeps
// until its own bell rings, whatever for. Where everything lies, Python says: see parallel/shared_memory.py.
#pragma once

#include <poll.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <vector>

#include "team.hpp"

namespace moesaic {

constexpr int64_t kLine = 64;
constexpr int64_t kDepth = 2;  // inboxes of a pair: a rank may be one turn ahead of another

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes can share only atomics without locks");

struct Bell {
  std::atomic<uint32_t> rung, num_asleep;
};

// In front of an inbox. Lines of their own keep readers of flags from each other's way.
struct Head {
  std::atomic<uint64_t> turn;  // 1 + the turn whose message is here; 0: none yet
  int64_t num_bytes;
};

struct Lane {
  int64_t start, inbox_bytes, return_bytes;  // of the lane; of a body; of what a rank gets back
};

class Wire {
 public:
  Wire(uint8_t* memory, int rank, int num_ranks, std::vector<Lane> lanes, std::vector<int> watched)
      : rank(rank), num_ranks(num_ranks), lanes_(std::move(lanes)), memory_(memory) {
    for (const int descriptor : watched) watched_.push_back({descriptor, POLLIN, 0});
  }

  const int rank, num_ranks;

  const Lane& lane(int64_t at) const { return lanes_.at(static_cast<size_t>(at)); }
  int64_t num_lanes() const { return static_cast<int64_t>(lanes_.size()); }
  int64_t offset_of(const void* at) const { return static_cast<const uint8_t*>(at) - memory_; }

  std::atomic<uint64_t>& taken(int64_t lane, int to, int from) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(pair(lane, to, from));
  }
  Head& head(int64_t lane, int to, int from, uint64_t turn) const {
    return *reinterpret_cast<Head*>(pair(lane, to, from) + kLine +
                                    static_cast<int64_t>(turn % kDepth) * (kLine + lanes_[lane].inbox_bytes));
  }
  static uint8_t* body(Head& head) { return reinterpret_cast<uint8_t*>(&head) + kLine; }

  // Where results for `rank` of this lane are.
  uint8_t* returns(int64_t lane, int rank) const {
    return memory_ + lanes_[lane].start + num_ranks * (num_ranks - 1) * pair_bytes(lane) + rank * lanes_[lane].return_bytes;
  }

  void ring(int rank) const {
    Bell& of = bell(rank);
    of.rung.fetch_add(1);
    if (of.num_asleep.load() > 0) wake(of);
  }
  uint32_t heard() const { return bell(rank).rung.load(); }

  // Until the bell rings that had rung `heard` times, or for some time: a lost rank rings none.
  void sleep(uint32_t heard, Clock::time_point deadline) const {
    const auto left = std::max<Clock::duration>(std::min<Clock::duration>(deadline - Clock::now(), kNap), Clock::duration::zero());
    Bell& own = bell(rank);
    own.num_asleep.fetch_add(1);
    nap(own, heard, left);
    own.num_asleep.fetch_sub(1);
  }

  // The lowest rank for which `is_missed` holds and whose process has ended; -1: none. A system call.
  template <class IsMissed>
  int find_dead(IsMissed is_missed) const {
    if (watched_.empty() || poll(watched_.data(), watched_.size(), 0) <= 0) return -1;
    for (int at = 0; at < num_ranks; ++at)
      if (watched_[at].fd >= 0 && watched_[at].revents != 0 && is_missed(at)) return at;
    return -1;
  }

  static constexpr Clock::duration kNap = std::chrono::milliseconds(50);  // guess: how soon a dead rank is noticed

 private:
  int64_t pair_bytes(int64_t lane) const { return kLine + kDepth * (kLine + lanes_[lane].inbox_bytes); }
  uint8_t* pair(int64_t lane, int to, int from) const {
    const int64_t at = to * (num_ranks - 1) + (from < to ? from : from - 1);
    return memory_ + lanes_[lane].start + at * pair_bytes(lane);
  }
  Bell& bell(int rank) const { return *reinterpret_cast<Bell*>(memory_ + rank * kLine); }

#if defined(__linux__)
  static void nap(Bell& own, uint32_t heard, Clock::duration most) {
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
    const timespec time{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    syscall(SYS_futex, &own.rung, FUTEX_WAIT, heard, &time, nullptr, 0);
  }
  static void wake(Bell& of) { syscall(SYS_futex, &of.rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
  static void nap(Bell&, uint32_t, Clock::duration most) {
    std::this_thread::sleep_for(std::min<Clock::duration>(most, std::chrono::microseconds(50)));
  }
  static void wake(Bell&) {}
#endif

  std::vector<Lane> lanes_;
  uint8_t* memory_;
  mutable std::vector<pollfd> watched_;  // under the lock of whoever asks
};

// Waits for other ranks: spins while that is cheaper than to sleep, then sleeps at the own bell.
class RankPatience {
 public:
  // Whether there is time left; `heard` was read before what is waited for was looked at.
  bool wait(const Wire& wire, uint32_t heard, Clock::time_point deadline) {
    has_slept = false;
    if (num_waits_ == 0) spin_until_ = Clock::now() + kSpin;
    if (++num_waits_ % kLooks != 0) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return true;
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return false;
    if (now < spin_until_) return true;
    wire.sleep(heard, deadline);
    has_slept = true;
    num_waits_ = kLooks - 1;
    return true;
  }

  bool has_slept = false;

 private:
  static constexpr int kLooks = 16;  // between two looks at the clock
  static constexpr Clock::duration kSpin = std::chrono::microseconds(30);  // guess: what a sleep and a wake-up cost
  int num_waits_ = 0;
  Clock::time_point spin_until_{};
};

}  // namespace moesaic
