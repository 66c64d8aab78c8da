// C (M, N) = or += A (M, K) B (K, N), single-threaded, for rows that lie anywhere in memory.
//
// B is packed once into panels of up to three vectors of columns. The micro kernel keeps a tile
// of kRows rows by one panel in registers and streams K through it. Rows of A and C are given as
// pointers, so that ragged batches need no gathering.
//
// An element E is what one multiplication takes: a float, a double, or a Pair of bf16, which
// AVX512-BF16 multiplies and adds into one float.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if SIMD_BYTES == 64
constexpr int kRows = 8;  // 8 x 3 accumulators of 32 registers
#else
constexpr int kRows = 4;  // 4 x 3 of 16
#endif
constexpr int kPanel = 3;        // vectors in a panel
constexpr int64_t kDepth = 512;  // of K at a time: a panel of that depth stays in the L2 cache

struct Pair {
  uint32_t bits;
};

template <class E> struct Element {
  using Sum = E;  // what products are summed in
  static constexpr int kPer = 1;
};
template <> struct Element<Pair> {
  using Sum = float;
  static constexpr int kPer = 2;
};
template <class E> using Sum = typename Element<E>::Sum;
template <class E> constexpr int64_t packed_depth(int64_t K) {
  return (K + Element<E>::kPer - 1) / Element<E>::kPer;
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

// `count` elements from row k, and for pairs k + 1 (null: zeros), of a matrix.
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

// K values, one after the other, as elements; an odd last one is paired with zero.
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
  if (K % 2) half[K] = 0;
}

template <class T> inline Vec<T> multiply_add(Vec<T> acc, T a, Vec<T> b) { return acc + a * b; }
#if defined(__AVX512BF16__)
inline Vec<float> multiply_add(Vec<float> acc, Pair a, Vec<float> b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a.bits)),
                                      (__m512bh)b);
}
#endif

// Grows only: shrinking and growing again would zero what is overwritten anyway.
template <class T> T* at_least(std::vector<T>& memory, int64_t count) {
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

template <class E> struct Panels {
  int64_t K = 0, N = 0, depth = 0;
  std::vector<int> widths;  // vectors in each panel
  std::vector<E> data;

  void shape(int64_t rows, int64_t columns) {
    constexpr int lanes = Simd<Sum<E>>::N;
    K = rows, N = columns, depth = packed_depth<E>(K);
    int64_t vectors = (N + lanes - 1) / lanes;
    widths.clear();
    for (int64_t left = vectors; left > 0; left -= widths.back())
      widths.push_back(left == 4 ? 2 : int(std::min<int64_t>(left, kPanel)));
    at_least(data, depth * vectors * lanes);
  }

  // From K rows of N values.
  void from_rows(const Sum<E>* const* rows, int64_t k_count, int64_t columns) {
    shape(k_count, columns);
    fill([&](int64_t k, int64_t n, int64_t count, E* to) {
      bool both = Element<E>::kPer == 2 && k + 1 < K;
      gather(to, rows[k] + n, both ? rows[k + 1] + n : nullptr, count);
    });
  }

  // From the transpose: N rows of K values, one after the other.
  void from_columns(const Sum<E>* matrix, int64_t k_count, int64_t columns) {
    shape(k_count, columns);
    E* to = data.data();
    int64_t begin = 0;
    for (int width : widths) {
      const int64_t wide = width * Simd<Sum<E>>::N;
      for (int64_t k = 0; k < depth; k += kSquare)
        for (int64_t n = 0; n < wide; n += kSquare)
          square(matrix, k, begin + n, to + k * wide + n, wide);
      begin += wide, to += depth * wide;
    }
  }

 private:
  static constexpr int64_t kSquare = Simd<Sum<E>>::N;

  // Elements k onwards of the rows n onwards, transposed; zeros beyond the matrix.
  void square(const Sum<E>* matrix, int64_t k, int64_t n, E* to, int64_t wide) {
    E line[kSquare][kSquare] = {};
    const int64_t high = std::min(kSquare, depth - k), from = k * Element<E>::kPer;
    for (int64_t c = 0; c < std::min(kSquare, N - n); c++)
      convert(line[c], matrix + (n + c) * K + from, std::min(high * Element<E>::kPer, K - from));
    for (int64_t d = 0; d < high; d++)
      for (int64_t c = 0; c < kSquare; c++) to[d * wide + c] = line[c][d];
  }

  template <class Get> void fill(Get get) {
    constexpr int lanes = Simd<Sum<E>>::N;
    E* to = data.data();
    int64_t begin = 0;
    for (int width : widths) {
      int64_t wide = width * lanes, real = std::min(wide, N - begin);
      for (int64_t k = 0; k < depth; k++, to += wide) {
        get(k * Element<E>::kPer, begin, real, to);
        std::fill(to + real, to + wide, E{});
      }
      begin += wide;
    }
  }
};

// One tile: R rows of A, elements kStride apart, times W vectors of a panel.
template <class E, int R, int W, int kStride>
inline void tile(const E* const* a, int64_t k, int64_t depth, const E* b, Sum<E>* const* c,
                 int64_t column, int64_t columns, bool accumulate) {
  using S = Sum<E>;
  constexpr int lanes = Simd<S>::N;
  Vec<S> acc[R][W] = {};
  const E* row[R];
  for (int r = 0; r < R; r++) row[r] = a[r] + k * kStride;
  for (int64_t d = 0; d < depth; d++, b += W * lanes) {
    Vec<S> from_b[W];
#pragma GCC unroll 3
    for (int w = 0; w < W; w++) {
      from_b[w] = load<S>((const S*)b + w * lanes);
      __builtin_prefetch((const S*)b + (8 * W + w) * lanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 3
      for (int w = 0; w < W; w++)
        acc[r][w] = multiply_add(acc[r][w], row[r][d * kStride], from_b[w]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) {
      S* to = c[r] + column + w * lanes;
      int64_t left = columns - column - w * lanes;
      if (accumulate) acc[r][w] += load<S>(to, left);
      store<S>(to, acc[r][w], left);
    }
}

template <class E, int W, int kStride, int R = kRows>
inline void tile_of(int64_t rows, const E* const* a, int64_t k, int64_t depth, const E* b,
                    Sum<E>* const* c, int64_t column, int64_t columns, bool accumulate) {
  if (rows >= R) return tile<E, R, W, kStride>(a, k, depth, b, c, column, columns, accumulate);
  if constexpr (R > 1)
    tile_of<E, W, kStride, R - 1>(rows, a, k, depth, b, c, column, columns, accumulate);
}

// kStride 1: a[m] is row m of A. kStride kRows: a[m] is column m of a block packed by Blocks.
template <class E, int kStride = 1>
void multiply(const E* const* a, int64_t M, const Panels<E>& b, Sum<E>* const* c,
              bool accumulate) {
  constexpr int lanes = Simd<Sum<E>>::N;
  constexpr int64_t block = kDepth / Element<E>::kPer;
  for (int64_t k = 0; k < b.depth; k += block) {
    int64_t depth = std::min(block, b.depth - k), column = 0;
    bool add = accumulate || k > 0;
    for (int width : b.widths) {
      const E* panel = b.data.data() + column * b.depth + k * width * lanes;
      for (int64_t m = 0; m < M; m += kRows) {
        auto run = width == 3   ? tile_of<E, 3, kStride>
                   : width == 2 ? tile_of<E, 2, kStride>
                                : tile_of<E, 1, kStride>;
        run(M - m, a + m, k, depth, panel, c + m, column, b.N, add);
      }
      column += width * lanes;
    }
  }
}

// A transposed: K rows of M values become blocks of kRows columns, each (depth, kRows).
template <class E> struct Blocks {
  std::vector<E> data;
  std::vector<const E*> columns;

  void from_rows(const Sum<E>* const* rows, int64_t K, int64_t M) {
    const int64_t depth = packed_depth<E>(K), blocks = (M + kRows - 1) / kRows;
    at_least(data, blocks * depth * kRows);
    columns.resize(blocks * kRows);
    for (int64_t m = 0; m < blocks * kRows; m++)
      columns[m] = data.data() + m / kRows * depth * kRows + m % kRows;
    // A few rows at a time: as wide apart as they lie, more would drive each other out of cache.
    for (int64_t low = 0; low < depth; low += kAtOnce)
      for (int64_t block = 0; block < blocks; block += kBlocks)
        pack(rows, K, M, low, std::min(low + kAtOnce, depth), block, blocks);
  }

 private:
  static constexpr int kAtOnce = 8 / Element<E>::kPer;
  static constexpr int kBlocks = 16 / kRows;  // a cache line of floats

  void pack(const Sum<E>* const* rows, int64_t K, int64_t M, int64_t low, int64_t high,
            int64_t block, int64_t blocks) {
    const int64_t depth = packed_depth<E>(K), m = block * kRows;
    const int64_t count = std::min<int64_t>(kBlocks * kRows, M - m);
    for (int64_t d = low; d < high; d++) {
      const int64_t k = d * Element<E>::kPer;
      E line[kBlocks * kRows] = {};
      gather(line, rows[k] + m, Element<E>::kPer == 2 && k + 1 < K ? rows[k + 1] + m : nullptr,
             count);
      for (int64_t b = 0; b < kBlocks && block + b < blocks; b++)
        std::copy_n(line + b * kRows, kRows, &data[((block + b) * depth + d) * kRows]);
    }
  }
};

// Rows of A as elements: the rows themselves, or their bf16 copies.
template <class E> struct Rows {
  std::vector<E> data;
  std::vector<const E*> rows;

  void from(const Sum<E>* const* values, int64_t M, int64_t K) {
    rows.resize(M);
    if constexpr (Element<E>::kPer == 1) {
      std::copy(values, values + M, rows.begin());
    } else {
      int64_t depth = packed_depth<E>(K);
      at_least(data, M * depth);
      for (int64_t m = 0; m < M; m++) {
        E* to = data.data() + m * depth;
        rows[m] = to;
        convert(to, values[m], K);
      }
    }
  }
};
