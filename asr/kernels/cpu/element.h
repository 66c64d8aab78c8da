// The factor type of matrix products: a float, a double, or a Pair of bf16, whose products
// AVX512-BF16 and AMX add into one float.
#pragma once
#include <algorithm>
#include <vector>

#include "amx.h"
#include "simd.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

struct Pair {
  uint32_t bits;
};

template <class E> struct Element {
  using Sum = E;  // type of the sums
  static constexpr int kPer = 1;
};
template <> struct Element<Pair> {
  using Sum = float;
  static constexpr int kPer = 2;
};
template <class E> using Sum = typename Element<E>::Sum;
template <class E> constexpr bool kTiled = HAS_AMX && Element<E>::kPer == 2;
template <class E> constexpr int64_t packed_depth(int64_t K) {
  return whole(whole(K, Element<E>::kPer) / Element<E>::kPer, kTiled<E> ? kTile : 1);
}

inline uint32_t bf16_bits(float x) {  // rounded to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : 0x7fc0u;
}

#if defined(__AVX512BF16__)
inline __m512i half_bits(const float* from) {  // 16 of them, each in 32 bits
  return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
}
#endif

// `count` elements from row k, for pairs also from row k + 1 (null: zeros).
template <class T> inline void gather(T* to, const T* row, const T*, int64_t count) {
  std::copy_n(row, count, to);
}
inline void gather(Pair* to, const float* row, const float* next, int64_t count) {
  int64_t n = 0;
#if defined(__AVX512BF16__)
  for (; n + 16 <= count; n += 16) {
    __m512i low = half_bits(row + n), high = next ? half_bits(next + n) : __m512i{};
    _mm512_storeu_si512(to + n, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
#endif
  for (; n < count; n++)
    to[n].bits = bf16_bits(row[n]) | (next ? bf16_bits(next[n]) << 16 : 0u);
}

// K contiguous values as elements, padded with zeros.
template <class T> inline void convert(T* to, const T* from, int64_t K) {
  std::copy_n(from, K, to);
}
inline void convert(Pair* to, const float* from, int64_t K) {
  uint16_t* half = (uint16_t*)to;
  int64_t k = 0;
#if defined(__AVX512BF16__)
  for (; k + 16 <= K; k += 16)
    _mm256_storeu_si256((__m256i*)(half + k),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + k)));
#endif
  for (; k < K; k++) half[k] = uint16_t(bf16_bits(from[k]));
  std::fill(half + K, half + 2 * packed_depth<Pair>(K), uint16_t(0));
}

template <class T> inline Vec<T> multiply_add(Vec<T> acc, T a, Vec<T> b) { return acc + a * b; }
#if defined(__AVX512BF16__)
inline Vec<float> multiply_add(Vec<float> acc, Pair a, Vec<float> b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a.bits)),
                                      (__m512bh)b);
}
#endif

// `kind` in Python (library.py): 0 float, 1 double, 2 float with products in bf16.
#if defined(__AVX512BF16__)
#define EACH_KIND(run)                   \
  if (kind == 0) run<float>(*call);      \
  else if (kind == 1) run<double>(*call); \
  else run<Pair>(*call);
#else
#define EACH_KIND(run)                   \
  if (kind == 1) run<double>(*call);     \
  else run<float>(*call);
#endif
