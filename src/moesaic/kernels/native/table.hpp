// The kernels of one level, as the doors call them.
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"
#include "moe.hpp"

namespace moesaic {

struct LevelTable {
  const char* name;
  // Bytes of a row of x in the form in which it meets a weight.
  size_t (*row_bytes)(const Matrix&);
  // A call first prepares its rows into scratch, then runs its strips; rows and strips may be split over threads.
  void (*prepare)(const Linear&, uint8_t* scratch, int64_t first_row, int64_t end_row);
  void (*run)(const Linear&, const uint8_t* scratch, int64_t first_strip, int64_t end_strip);
  void (*act_rows)(const Elementwise&, int64_t first_row, int64_t end_row);
  void (*softmax_rows)(const Softmax&, int64_t first_row, int64_t end_row);
  // The stages of a layer's routed experts.
  void (*moe_rows)(const Moe&, int64_t first_row, int64_t end_row);
  void (*moe_inner)(const Moe&, int64_t slot, int64_t first_column, int64_t end_column);
  void (*moe_down)(const Moe&, int64_t slot, int64_t first_column, int64_t end_column);
  void (*moe_combine)(const Moe&, int64_t first_token, int64_t end_token);
};

const LevelTable& portable_level();
#if defined(MOESAIC_X86)
const LevelTable& avx2_level();
#endif

}  // namespace moesaic
