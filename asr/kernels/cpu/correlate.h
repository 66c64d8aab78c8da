// Short filters along time, forward and backward. A line holds W / 2 zeros, the values of all
// frames, and zeros up to its end, so that filters need no checks at the edges.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "simd.h"

constexpr int kOutputs = 5, kVectors = 2;  // 10 sums in 16 or 32 registers

template <class T> constexpr int64_t kGroup = kVectors * Simd<T>::N;

template <class T> constexpr int64_t line_size(int64_t frames, int64_t W) {
  return whole(frames, kGroup<T>) + whole(W, kGroup<T>);
}

// Calls run(first, count as a constant) until all outputs are covered.
template <int O, class Run> inline void some_outputs(int64_t first, int64_t left, Run run) {
  if (left >= O) return run(first, std::integral_constant<int, O>{});
  if constexpr (O > 1) some_outputs<O - 1>(first, left, run);
}
template <class Run> inline void each_outputs(int64_t outputs, Run run) {
  for (int64_t o = 0; o < outputs; o += kOutputs) some_outputs<kOutputs>(o, outputs - o, run);
}

// sums[o] += factors[o * step] x, for the vectors of x that begin at `from`.
template <class T, int O>
inline void add_products(Vec<T> (&sums)[O][kVectors], const T* factors, int64_t step,
                         const T* from) {
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; j++) {
    const Vec<T> x = load<T>(from + j * Simd<T>::N);
#pragma GCC unroll 5
    for (int o = 0; o < O; o++) sums[o][j] += factors[o * step] * x;
  }
}

// to[o, t] = sum over i, w of taps[i, w, o] from[i, t + w] for all frames t; lines of `stride`.
template <class T>
void correlate(const T* from, int64_t inputs, const T* taps, int64_t W, T* to, int64_t outputs,
               int64_t stride, int64_t frames) {
  each_outputs(outputs, [&](int64_t first, auto several) {
    for (int64_t t = 0; t < frames; t += kGroup<T>) {
      Vec<T> sums[several][kVectors] = {};
      for (int64_t i = 0; i < inputs; i++)
        for (int64_t w = 0; w < W; w++)
          add_products<T>(sums, taps + (i * W + w) * outputs + first, 1,
                          from + i * stride + t + w);
      for (int o = 0; o < several; o++)
        for (int j = 0; j < kVectors; j++)
          store<T>(to + (first + o) * stride + t + j * Simd<T>::N, sums[o][j]);
    }
  });
}

// dtaps[o, w] += sum over the frames listed of dto[o, t] from[t + w]; W is whole in groups.
template <class T>
void tap_gradients(const T* from, const T* dto, int64_t outputs, int64_t stride,
                   const std::vector<int64_t>& frames, T* dtaps, int64_t W) {
  each_outputs(outputs, [&](int64_t first, auto several) {
    for (int64_t w = 0; w < W; w += kGroup<T>) {
      Vec<T> sums[several][kVectors] = {};
      for (int64_t t : frames) add_products<T>(sums, dto + first * stride + t, stride, from + t + w);
      for (int o = 0; o < several; o++)
        for (int j = 0; j < kVectors; j++) {
          T* at = dtaps + (first + o) * W + w + j * Simd<T>::N;
          store<T>(at, load<T>(at) + sums[o][j]);
        }
    }
  });
}
