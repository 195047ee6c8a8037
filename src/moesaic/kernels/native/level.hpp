// What one instruction level offers to the kernels: a vector of floats, and how weights are widened into it.
// One file per level includes this with its own compiler flags. All of it stands in an unnamed namespace, and no
// template of the standard library is used: the linker would keep one copy, compiled for any of the levels.
#pragma once

#include <stdint.h>
#include <string.h>

#include "matrix.hpp"

namespace moesaic {
namespace {

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// Round to nearest even, as torch does; NaN stays NaN.
inline uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Whole numbers of -127 to 127 as bytes; returns less 8 times their sum, in two halves: see matrix.hpp.
inline int32_t store_block(const float* values, int8_t* bytes) {
  int32_t low = 0, high = 0;
  for (int i = 0; i < kBlock; i += 4) {
    for (int k = 0; k < 4; ++k) bytes[i + k] = static_cast<int8_t>(values[i + k]);
    low -= kMiddle * (bytes[i] + bytes[i + 1]);
    high -= kMiddle * (bytes[i + 2] + bytes[i + 3]);
  }
  return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (static_cast<uint32_t>(low) & 0xffffu));
}

inline int32_t add_halves(int32_t halves) { return static_cast<int16_t>(halves & 0xffff) + (halves >> 16); }

// float16, exactly.
inline float widen_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: a multiple of 2^-24
    const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace
}  // namespace moesaic

#if defined(MOESAIC_LEVEL_AVX2)
#include "vector_avx2.inc"
#elif defined(MOESAIC_LEVEL_NEON)
#include "vector_neon.inc"
#else
#include "vector_portable.inc"
#endif

#if defined(MOESAIC_LEVEL_AVX512)
#include "vector_avx512.inc"
#else
namespace moesaic {
namespace {

using Packed = Level;

}  // namespace
}  // namespace moesaic
#endif
