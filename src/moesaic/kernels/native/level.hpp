// What one instruction level offers to the kernels: a vector of floats, and how weights are widened into it.
// One file per level includes this with its own compiler flags. All of it stands in an unnamed namespace, and no
// template of the standard library is used: the linker would keep one copy, compiled for any of the levels.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(MOESAIC_LEVEL_AVX2)
#include <immintrin.h>
#endif

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

#if defined(MOESAIC_LEVEL_AVX2)

struct Level {
  static constexpr const char* kName = "avx2";
  static constexpr int kLanes = 8;
  static constexpr int kTileColumns = 3;  // by 4 rows: 12 sums in 16 registers
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* at) { return _mm256_loadu_ps(at); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static void load_pair(const uint16_t* at, Vector& even, Vector& odd) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void store(float* at, Vector a) { _mm256_storeu_ps(at, a); }
};

#else

// No vector instructions assumed: the compiler may use what the base architecture has. Products and sums are
// rounded apart here, so this level's bits differ from those of the fused levels.
struct Level {
  static constexpr const char* kName = "portable";
  static constexpr int kLanes = 8;
  static constexpr int kTileColumns = 2;
  struct Vector {
    float at[kLanes];
  };
  static Vector zero() { return Vector{}; }
  static Vector load(const float* from) {
    Vector a;
    memcpy(a.at, from, sizeof a.at);
    return a;
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    for (int i = 0; i < kLanes; ++i) c.at[i] = c.at[i] + a.at[i] * b.at[i];
    return c;
  }
  static void load_pair(const uint16_t* from, Vector& even, Vector& odd) {
    for (int i = 0; i < kLanes; ++i) {
      even.at[i] = widen(from[2 * i]);
      odd.at[i] = widen(from[2 * i + 1]);
    }
  }
  static void store(float* to, Vector a) { memcpy(to, a.at, sizeof a.at); }
};

#endif

}  // namespace
}  // namespace moesaic
