// Weights of 8 or 4 bits, by rows of x that are rounded to 8 bits per group of 32:
//
//   group of 32           the dot product of small integers, exact in any order
//   leaf of `shards`      adds float(dot) * (weight scale * x scale) over its groups, ascending, from +0
//   leaves                meet as neighbours (0, 1), (2, 3), ...; the root is rounded once
//
// Each product and each sum is rounded by itself, on every level: all levels, and the reference, give equal bits.
//
// A weight is panels of 16 rows, each one stream of bytes, group by group of the weight's own size:
//
//   16 scales, float16 | 16 zero points of 0 to 15, a byte each, if any | blocks of 32 numbers by 16 rows
//
// A block holds 64 bytes at a time: [half of the panel][8 rows][4 bytes]. Of 8 bits, chunk c has the numbers
// 4c .. 4c + 3. Of 4 bits, byte i of pair j has number 8j + i in its low half and 8j + 4 + i in its high half, as
// value + zero point (8 where the format has none).
#pragma once

#include "matrix.hpp"
