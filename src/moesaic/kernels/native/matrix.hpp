// A weight as kernels read it, whatever its format.
//
// Rows of x meet it in a form of their own, one run of bytes a row:
//
//   float weights     float32, leaf by leaf, each padded with zeros to whole steps of the level; rows that meet
//                     bfloat16 are rounded to it, and stand as (even, odd) vectors of float32, or as they are on
//                     levels that have products of bfloat16
//   packed weights    bytes, then a scale for each block of 32, then less 8 times the sum of each block's bytes: what
//                     numbers of 4 bits start from where they have no zero points. Levels that have no product of
//                     signed bytes keep it as two halves of 16 bits, of the first two and of the last two of each
//                     four bytes, and rows that meet 8 bits as 32 sizes and then 32 signs, -1 or 0, block by block;
//                     a block's sum is then that of the sizes of its negative numbers:
//                     x * w = |x| * (w ^ sign) - |x| * sign. Levels that have it for unsigned ones alone start from
//                     the sum: x * w = x * (w + 128) - 128 * x
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic {

enum class Kind : int { kFloat32 = 0, kBfloat16 = 1 };

inline int64_t bytes_of(Kind kind) { return kind == Kind::kFloat32 ? 4 : 2; }

constexpr int64_t kPanelRows = 16;
constexpr int64_t kBlock = 32;  // numbers of x under one scale
constexpr int32_t kMiddle = 8;  // zero point of weights of 4 bits that store none

struct Matrix {
  const void* data;
  int64_t columns, width;  // of the result, and of a row
  int64_t shards;          // leaves of each sum: a power of two that divides width, or blocks and groups of packed rows
  Kind kind;               // of float weights
  int64_t stride;          // of float weights: numbers from row to row
  int64_t bits;            // of packed weights 8 or 4; 0: floats
  int64_t group;           // of packed weights: numbers of a row under one scale, whole blocks
  int64_t sections;        // of packed weights: equal parts of the columns, each of whole panels: gate and up
  bool has_zeros;

  static Matrix of_floats(const void* data, int64_t columns, int64_t width, int64_t shards, Kind kind,
                          int64_t stride) {
    return {data, columns, width, shards, kind, stride, 0, 0, 1, false};
  }
  static Matrix of_panels(const void* data, int64_t columns, int64_t width, int64_t shards, int64_t bits,
                          int64_t group, int64_t sections, bool has_zeros) {
    return {data, columns, width, shards, Kind::kFloat32, 0, bits, group, sections, has_zeros};
  }

  bool is_packed() const { return bits != 0; }
  int64_t padded_width() const { return (width + kBlock - 1) / kBlock * kBlock; }
  int64_t num_blocks() const { return padded_width() / kBlock; }
  int64_t num_groups() const { return (width + group - 1) / group; }
  int64_t section_columns() const { return columns / sections; }
  int64_t section_panels() const { return (section_columns() + kPanelRows - 1) / kPanelRows; }
  int64_t head_bytes() const { return kPanelRows * (has_zeros ? 3 : 2); }
  int64_t block_bytes() const { return kBlock * kPanelRows * bits / 8; }
  int64_t group_bytes() const { return head_bytes() + group / kBlock * block_bytes(); }
  int64_t panel_bytes() const { return num_groups() * group_bytes(); }

  // A strip is what is multiplied as a whole: a panel, or a row of floats.
  int64_t num_strips() const { return is_packed() ? sections * section_panels() : columns; }
  int64_t strip_bytes() const { return is_packed() ? panel_bytes() : width * bytes_of(kind); }
  // Where a column of a section begins; of packed weights the first of a panel.
  const uint8_t* strip(int64_t section, int64_t column) const {
    const uint8_t* begin = static_cast<const uint8_t*>(data);
    if (!is_packed()) return begin + (section * section_columns() + column) * stride * bytes_of(kind);
    return begin + (section * section_panels() + column / kPanelRows) * panel_bytes();
  }
  // Bytes that are read of all: those of packed weights are one run.
  int64_t weight_bytes() const { return num_strips() * strip_bytes(); }
};

}  // namespace moesaic
