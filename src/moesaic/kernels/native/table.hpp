// The kernels of one level, as the door calls them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"
#include "packed.hpp"

namespace moesaic {

// A call first prepares its rows into scratch, then runs its columns; rows and columns may be split over threads.
struct LevelTable {
  const char* name;
  // Floats of scratch that `prepare` fills with x, widened and in the order in which the kernel reads it.
  size_t (*scratch_floats)(const Linear&);
  void (*prepare)(const Linear&, float* scratch, int64_t first_row, int64_t end_row);
  void (*run)(const Linear&, const float* scratch, int64_t first_column, int64_t end_column);
  // The same for packed weights: x is rounded to 8 bits, columns come in panels.
  size_t (*packed_scratch_floats)(const PackedLinear&);
  void (*quantise)(const PackedLinear&, float* scratch, int64_t first_row, int64_t end_row);
  void (*run_packed)(const PackedLinear&, const float* scratch, int64_t first_panel, int64_t end_panel);
};

const LevelTable& portable_level();
#if defined(MOESAIC_X86)
const LevelTable& avx2_level();
#endif

}  // namespace moesaic
