// y = x @ weight.T for weights of 8 or 4 bits, and x rounded to 8 bits per row and group of 32:
//
//   group of 32           the dot product of small integers, exact in any order
//   leaf of `shards`      adds float(dot) * (weight scale * x scale) over its groups, ascending, from +0
//   leaves                meet as neighbours (0, 1), (2, 3), ...; the root is rounded once
//
// Each product and each sum is rounded by itself, on every level: all levels, and the reference, give equal bits.
//
// A weight is panels of 16 rows, each one stream of bytes, group by group of the weight's own size:
//
//   16 scales, float16 | 16 zero points, a byte each, where there are any | blocks of 32 numbers by 16 rows
//
// A block holds 64 bytes at a time: [half of the panel][8 rows][4 bytes]. Of 8 bits, chunk c has the numbers
// 4c .. 4c + 3. Of 4 bits, byte i of pair j has number 8j + i in its low half and 8j + 4 + i in its high half, as
// value + zero point (8 where the format has none).
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"

namespace moesaic {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kBlock = 32;  // numbers of x under one scale

struct PackedLinear {
  const void* x;          // [rows, width], contiguous, of `kind`
  const uint8_t* weight;  // panels, back to back
  void* y;                // [rows, columns], contiguous, of `out`
  int64_t rows, columns, width;
  int64_t sections;  // equal parts of the columns, each of whole panels: gate and up
  int64_t group;     // numbers of a weight row under one scale: whole blocks
  int64_t bits;      // 8 or 4
  bool has_zeros;
  int64_t shards;  // a power of two; more than one only where each leaf is whole groups, or whole blocks of one group
  Kind kind, out;

  int64_t padded_width() const { return (width + kBlock - 1) / kBlock * kBlock; }
  int64_t num_blocks() const { return padded_width() / kBlock; }
  int64_t num_groups() const { return (width + group - 1) / group; }
  int64_t section_columns() const { return columns / sections; }
  int64_t section_panels() const { return (section_columns() + kPanelRows - 1) / kPanelRows; }
  int64_t num_panels() const { return sections * section_panels(); }
  int64_t head_bytes() const { return kPanelRows * (has_zeros ? 3 : 2); }
  int64_t block_bytes() const { return kBlock * kPanelRows * bits / 8; }
  int64_t group_bytes() const { return head_bytes() + group / kBlock * block_bytes(); }
  int64_t panel_bytes() const { return num_groups() * group_bytes(); }
};

}  // namespace moesaic
