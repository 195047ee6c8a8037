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

  static Vector spread_float(float value) { return _mm256_set1_ps(value); }
  static Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector root(Vector a) { return _mm256_sqrt_ps(a); }
  static Vector load_wide(const uint16_t* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Vector if_less(Vector a, Vector b, Vector then, Vector otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  // Of two numbers that cannot be compared, b.
  static Vector greater(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector less(Vector a, Vector b) { return _mm256_min_ps(a, b); }
  // 2 to the n, for whole n in -126 to 127.
  static Vector power_of_two(Vector n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }

  // Packed weights: a lane is one of the 8 rows of half a panel; a step of weights is 64 bytes from the next.
  using Ints = __m256i;
  static constexpr int kPackedRows = 4;  // of x, by half a panel: 8 sums, 2 weights, 2 constants of 16 registers
  static Vector scale(Vector a, float by) { return _mm256_mul_ps(a, _mm256_set1_ps(by)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector multiply(Ints a, Vector b) { return _mm256_mul_ps(_mm256_cvtepi32_ps(a), b); }
  static Vector load_halves(const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Ints load_bytes(const uint8_t* at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  }
  static Ints spread(int value) { return _mm256_set1_epi32(value); }
  static Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints subtract_product(Ints a, Ints b, int by) {
    return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, _mm256_set1_epi32(by)));
  }
  static __m256i broadcast(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return _mm256_set1_epi32(four);
  }
  // Has the sum in a register here and now: left alone, the compiler keeps all products of a block and adds them at
  // its end, out of memory. Where it pays was measured, row by row.
  static void settle(Ints& sum) { __asm__("" : "+x"(sum)); }
  // |w| unsigned by x with w's sign: pairs stay within 2 * 128 * 127, below the 32767 where maddubs saturates.
  template <int kRows>
  static void dot_int8(const uint8_t* weights, const int8_t* const (&x)[kRows], Ints (&sums)[kRows]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (Ints& sum : sums) sum = _mm256_setzero_si256();
    for (int chunk = 0; chunk < 8; ++chunk) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * chunk));
      const __m256i size = _mm256_abs_epi8(w);
      for (int r = 0; r < kRows; ++r) {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast(x[r] + 4 * chunk), w));
        sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
        if constexpr (kRows <= 2) settle(sums[r]);
      }
    }
  }
  // 16 products of at most 15 * 127 in a lane of 16 bits: 30480, below 32767, so a whole block needs no more.
  template <int kRows>
  static void dot_int4(const uint8_t* weights, const int8_t* const (&x)[kRows], Ints (&sums)[kRows]) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    for (Ints& sum : sums) sum = _mm256_setzero_si256();
    for (int pair = 0; pair < 4; ++pair) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * pair));
      const __m256i low = _mm256_and_si256(w, low_bits);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_bits);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(low, broadcast(x[r] + 8 * pair)));
        sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(high, broadcast(x[r] + 8 * pair + 4)));
        if constexpr (kRows > 1) settle(sums[r]);
      }
    }
    for (Ints& sum : sums) sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
  }
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

  static Vector spread_float(float value) {
    Vector a;
    for (float& lane : a.at) lane = value;
    return a;
  }
  static Vector subtract(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] -= b.at[i];
    return a;
  }
  static Vector multiply(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] *= b.at[i];
    return a;
  }
  static Vector divide(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] /= b.at[i];
    return a;
  }
  static Vector root(Vector a) {
    for (float& lane : a.at) lane = __builtin_sqrtf(lane);
    return a;
  }
  static Vector load_wide(const uint16_t* from) {
    Vector a;
    for (int i = 0; i < kLanes; ++i) a.at[i] = widen(from[i]);
    return a;
  }
  static Vector if_less(Vector a, Vector b, Vector then, Vector otherwise) {
    for (int i = 0; i < kLanes; ++i) otherwise.at[i] = a.at[i] < b.at[i] ? then.at[i] : otherwise.at[i];
    return otherwise;
  }
  static Vector greater(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
    return a;
  }
  static Vector less(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] = a.at[i] < b.at[i] ? a.at[i] : b.at[i];
    return a;
  }
  static Vector power_of_two(Vector n) {
    for (float& lane : n.at) {
      const uint32_t bits = lane >= -126.0f ? static_cast<uint32_t>(static_cast<int32_t>(lane) + 127) << 23 : 0u;
      memcpy(&lane, &bits, sizeof lane);
    }
    return n;
  }

  struct Ints {
    int32_t at[kLanes];
  };
  static constexpr int kPackedRows = 2;
  static Vector scale(Vector a, float by) {
    for (float& value : a.at) value *= by;
    return a;
  }
  static Vector add(Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] += b.at[i];
    return a;
  }
  static Vector multiply(Ints a, Vector b) {
    for (int i = 0; i < kLanes; ++i) b.at[i] *= static_cast<float>(a.at[i]);
    return b;
  }
  static Vector load_halves(const uint8_t* from) {
    Vector a;
    for (int i = 0; i < kLanes; ++i) {
      uint16_t bits;
      memcpy(&bits, from + 2 * i, sizeof bits);
      a.at[i] = widen_half(bits);
    }
    return a;
  }
  static Ints load_bytes(const uint8_t* from) {
    Ints a;
    for (int i = 0; i < kLanes; ++i) a.at[i] = from[i];
    return a;
  }
  static Ints spread(int value) {
    Ints a;
    for (int32_t& lane : a.at) lane = value;
    return a;
  }
  static Ints subtract(Ints a, Ints b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] -= b.at[i];
    return a;
  }
  static Ints subtract_product(Ints a, Ints b, int by) {
    for (int i = 0; i < kLanes; ++i) a.at[i] -= b.at[i] * by;
    return a;
  }
  template <int kRows>
  static void dot_int8(const uint8_t* weights, const int8_t* const (&x)[kRows], Ints (&sums)[kRows]) {
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Ints{};
      for (int chunk = 0; chunk < 8; ++chunk)
        for (int i = 0; i < kLanes; ++i)
          for (int k = 0; k < 4; ++k)
            sums[r].at[i] += static_cast<int8_t>(weights[64 * chunk + 4 * i + k]) * x[r][4 * chunk + k];
    }
  }
  template <int kRows>
  static void dot_int4(const uint8_t* weights, const int8_t* const (&x)[kRows], Ints (&sums)[kRows]) {
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Ints{};
      for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < kLanes; ++i)
          for (int k = 0; k < 4; ++k) {
            const int both = weights[64 * pair + 4 * i + k];
            sums[r].at[i] += (both & 15) * x[r][8 * pair + k] + (both >> 4) * x[r][8 * pair + 4 + k];
          }
    }
  }
};

#endif

}  // namespace
}  // namespace moesaic
