// What every door to the kernels of one level shares: the level, its threads, and memory that grows to the largest call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.hpp"
#include "team.hpp"

namespace moesaic {

constexpr int64_t kTaskBytes = 64 * 1024;     // guess: weight bytes of a task; fits a second-level cache beside x
constexpr int64_t kSmallScratch = 32 * 1024;  // floats of x that one thread widens faster than two

std::vector<const LevelTable*> levels_here();
int check_threads(int num_threads);

// One call at a time: its door holds `turn` from the first use of scratch to the last.
class Kernels {
 public:
  Kernels(const std::string& level, int num_threads) : team(check_threads(num_threads)) {
    for (const LevelTable* of_level : levels_here())
      if (of_level->name == level) table = of_level;
    if (table == nullptr) throw std::invalid_argument("level " + level + " is not on this machine");
  }

  float* scratch_of(size_t num_floats) {
    if (scratch_.size() < num_floats) scratch_.resize(num_floats);
    return scratch_.data();
  }

  // Columns or panels of a task: two tasks a thread, or less where their weights would not stay in a cache.
  int64_t task_size(int64_t count, int64_t bytes_each) const {
    const int64_t fair = (count + 2 * team.num_threads() - 1) / (2 * team.num_threads());
    return std::max<int64_t>(1, std::min(fair, kTaskBytes / std::max<int64_t>(bytes_each, 1)));
  }

  const LevelTable* table = nullptr;
  std::mutex turn;
  Team team;

 private:
  std::vector<float> scratch_;
};

}  // namespace moesaic
