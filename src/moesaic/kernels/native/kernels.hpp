// What every door to the kernels of one level shares: the level, its threads, and memory that grows to the largest call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.hpp"
#include "team.hpp"

namespace moesaic {

// guess: weight bytes of a task. Few rows pass once, and a processor reads long runs of memory faster than short ones:
// tasks are as long as leaves each thread several, and short at the end, where threads wait for each other. More rows
// pass again and again: a second-level cache must hold a task's weights beside x.
constexpr int64_t kTaskBytes = 64 * 1024, kLongTaskBytes = 1280 * 1024, kLastTaskBytes = 32 * 1024;
constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kFewRows = 16;              // of x: multiplied at once
constexpr int64_t kSmallScratch = 8 * 1024;  // numbers of x that one thread prepares faster than two: some 5 us

// Of a task of so many rows of x, where all threads have `all_bytes` to read.
inline int64_t task_bytes(int64_t num_rows, int64_t all_bytes, int num_threads) {
  if (num_rows > kFewRows) return kTaskBytes;
  return std::clamp(all_bytes / (kTasksPerThread * num_threads), kTaskBytes, kLongTaskBytes);
}

// [0, count) in tasks of `size`, the last of them, one for each thread and at most a quarter, in tasks of `last_size`.
struct Cut {
  int64_t count, size, num_long, last_size;

  Cut() : Cut(0, 1) {}
  Cut(int64_t count, int64_t size) : count(count), size(size), num_long(count / size), last_size(size) {}
  Cut(int64_t count, int64_t size, int64_t last_size, int num_threads) : Cut(count, size) {
    if (last_size >= size) return;
    num_long = (count - std::min(count / 4, num_threads * size)) / size;
    this->last_size = last_size;
  }

  int64_t num_tasks() const { return num_long + (count - num_long * size + last_size - 1) / last_size; }
  int64_t first(int64_t task) const {
    const int64_t at = task <= num_long ? task * size : num_long * size + (task - num_long) * last_size;
    return at < count ? at : count;
  }
};

std::vector<const LevelTable*> levels_here();
int check_threads(int num_threads);

// Memory that grows to the largest request and starts at a cache line.
class Buffer {
 public:
  uint8_t* of(size_t num_bytes) {
    if (bytes_.size() < num_bytes + kLine) bytes_.resize(num_bytes + kLine);
    const uintptr_t start = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (kLine - start % kLine) % kLine;
  }

 private:
  static constexpr size_t kLine = 64;
  std::vector<uint8_t> bytes_;
};

struct MoeRun;

// One call at a time: its door holds `turn` from the first use of scratch to the last.
class Kernels {
 public:
  Kernels(const std::string& level, int num_threads)
      : memory_(new Memory(check_threads(num_threads))), team(memory_->team) {
    for (const LevelTable* of_level : levels_here())
      if (of_level->name == level) table = of_level;
    if (table == nullptr) throw std::invalid_argument("level " + level + " is not on this machine");
  }

  // What a thread that hangs may still use is never freed.
  ~Kernels() {
    if (team.is_broken()) memory_.release();
  }

  float* scratch_of(size_t num_floats) {
    return reinterpret_cast<float*>(memory_->scratch.of(num_floats * sizeof(float)));
  }

  MoeRun& moe_run() { return *memory_->moe; }

 private:
  struct Memory {
    explicit Memory(int num_threads);
    ~Memory();
    Team team;
    Buffer scratch;
    std::unique_ptr<MoeRun> moe;
  };
  std::unique_ptr<Memory> memory_;

 public:
  const LevelTable* table = nullptr;
  std::mutex turn;
  Team& team;
};

}  // namespace moesaic
