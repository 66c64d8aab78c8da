// Vectors of the machine's width, written with the compilers' vector types: -march alone selects
// AVX-512, AVX2, NEON or SSE code.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define SIMD_BYTES 64
#elif defined(__AVX__)
#define SIMD_BYTES 32
#else
#define SIMD_BYTES 16
#endif

constexpr int64_t whole(int64_t count, int64_t parts) { return (count + parts - 1) / parts * parts; }

template <class T> struct Simd;

template <> struct Simd<float> {
  static constexpr int N = SIMD_BYTES / 4;
  typedef float V __attribute__((vector_size(SIMD_BYTES)));
  typedef int32_t I __attribute__((vector_size(SIMD_BYTES)));
  static constexpr int kBias = 127, kMantissa = 23, kTerms = 7;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440054690583e-4f;
  static constexpr float kLargest = 87.0f, kNoise = 4.8e-7f;
};

template <> struct Simd<double> {
  static constexpr int N = SIMD_BYTES / 8;
  typedef double V __attribute__((vector_size(SIMD_BYTES)));
  typedef int64_t I __attribute__((vector_size(SIMD_BYTES)));
  static constexpr int kBias = 1023, kMantissa = 52, kTerms = 14;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0x1.62e42fefap-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double kLargest = 700.0, kNoise = 8.9e-16;
};

template <class T> using Vec = typename Simd<T>::V;

template <class T> inline Vec<T> splat(T value) { return Vec<T>{} + value; }

template <class T> inline Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T> inline void store(T* to, Vec<T> v) { std::memcpy(to, &v, sizeof v); }

// The first n lanes; load zeroes the others, store leaves them unchanged in memory.
template <class T> inline Vec<T> load(const T* from, int64_t n) {
  if (__builtin_expect(n >= Simd<T>::N, 1)) return load(from);
  Vec<T> v = {};
  for (int k = 0; k < n; k++) v[k] = from[k];
  return v;
}

template <class T> inline void store(T* to, Vec<T> v, int64_t n) {
  if (__builtin_expect(n >= Simd<T>::N, 1)) return store(to, v);
  for (int k = 0; k < n; k++) to[k] = v[k];
}

template <class T> inline Vec<T> first(Vec<T> v, int64_t n) {
  for (int64_t k = n; k < Simd<T>::N; k++) v[k] = 0;
  return v;
}

template <class T> inline T sum(Vec<T> v) {
  T lane[Simd<T>::N];
  std::memcpy(lane, &v, sizeof v);
  for (int half = Simd<T>::N / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) lane[k] += lane[k + half];
  return lane[0];
}

// 2^n for a vector of whole numbers.
template <class T> inline Vec<T> power_of_two(Vec<T> n) {
  auto exponent = __builtin_convertvector(n, typename Simd<T>::I) + Simd<T>::kBias;
  return (Vec<T>)(exponent << Simd<T>::kMantissa);
}

constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }

// exp(x) - 1 = 2^n (e^r - 1) + (2^n - 1) with x = n ln 2 + r: exact near zero, where 2^n is 1.
// e^r - 1 is its Taylor series; |r| <= ln 2 / 2 leaves an error below half a unit.
template <class T> inline void exp_parts(Vec<T> x, Vec<T>& scale, Vec<T>& minus_one) {
  using S = Simd<T>;
  const T inverse = T(1.4426950408889634);
  x = x > S::kLargest ? splat<T>(S::kLargest) : x;
  x = x < -S::kLargest ? splat<T>(-S::kLargest) : x;
  Vec<T> n = (x * inverse + S::kRound) - S::kRound;
  Vec<T> r = x - n * S::kLn2High - n * S::kLn2Low;
  Vec<T> series = splat<T>(T(1.0 / factorial(S::kTerms)));
#pragma GCC unroll 16
  for (int k = S::kTerms - 1; k >= 1; k--) series = series * r + T(1.0 / factorial(k));
  minus_one = series * r;
  scale = power_of_two<T>(n);
}

template <class T> inline Vec<T> sigmoid(Vec<T> x) {
  Vec<T> scale, minus_one;
  exp_parts<T>(-x, scale, minus_one);
  return T(1) / (T(1) + scale + scale * minus_one);
}

template <class T> inline Vec<T> tanh(Vec<T> x) {
  Vec<T> scale, minus_one;
  exp_parts<T>(x + x, scale, minus_one);
  Vec<T> expm1 = scale * minus_one + (scale - T(1));
  return expm1 / (expm1 + T(2));
}
