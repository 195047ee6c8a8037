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

constexpr int64_t kTaskBytes = 64 * 1024;     // guess: weight bytes of a task; fits a second-level cache beside x
constexpr int64_t kSmallScratch = 32 * 1024;  // numbers of x that one thread prepares faster than two

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

  // Columns or panels of a task: two tasks a thread, or less where their weights would not stay in a cache.
  int64_t task_size(int64_t count, int64_t bytes_each) const {
    const int64_t fair = (count + 2 * team.num_threads() - 1) / (2 * team.num_threads());
    return std::max<int64_t>(1, std::min(fair, kTaskBytes / std::max<int64_t>(bytes_each, 1)));
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
