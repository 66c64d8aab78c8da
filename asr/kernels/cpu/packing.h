// Packs the factors of a matrix product (gemm.h). For AMX tiles (amx.h) depths are padded with
// zeros.
#pragma once
#include "element.h"

#if SIMD_BYTES == 64
constexpr int kRows = 8;  // 8 x 3 accumulators of 32 registers
#else
constexpr int kRows = 4;  // 4 x 3 of 16
#endif
template <class E> constexpr int kPanel = kTiled<E> ? 2 : 3;  // vectors in a panel

// Only grows: shrinking and growing again would zero values that are overwritten anyway.
template <class T> T* at_least(std::vector<T>& memory, int64_t count) {
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// `count` elements at depth d, from column n on, of K rows; zeros beyond the last row.
template <class E>
void gather_at(E* to, const Sum<E>* const* rows, int64_t K, int64_t d, int64_t n, int64_t count) {
  const int64_t k = d * Element<E>::kPer;
  if (k >= K) {
    std::fill_n(to, count, E{});
    return;
  }
  const bool both = Element<E>::kPer == 2 && k + 1 < K;
  gather(to, rows[k] + n, both ? rows[k + 1] + n : nullptr, count);
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
      widths.push_back(left == 4 ? 2 : int(std::min<int64_t>(left, kPanel<E>)));
    at_least(data, depth * vectors * lanes);
  }

  // From K rows of N values.
  void from_rows(const Sum<E>* const* rows, int64_t k_count, int64_t columns) {
    shape(k_count, columns);
    E* to = data.data();
    int64_t begin = 0;
    for (int width : widths) {
      const int64_t wide = width * Simd<Sum<E>>::N, real = std::min(wide, N - begin);
      for (int64_t d = 0; d < depth; d++, to += wide) {
        gather_at(to, rows, K, d, begin, real);
        std::fill(to + real, to + wide, E{});
      }
      begin += wide;
    }
  }

  // From the transpose: N contiguous rows of K values.
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

  // A transposed block: elements from k on of the rows from n on; zeros beyond the matrix.
  void square(const Sum<E>* matrix, int64_t k, int64_t n, E* to, int64_t wide) {
    E line[kSquare][kSquare] = {};
    const int64_t high = std::min(kSquare, depth - k), from = k * Element<E>::kPer;
    const int64_t count = std::clamp<int64_t>(K - from, 0, high * Element<E>::kPer);
    for (int64_t c = 0; c < std::min(kSquare, N - n); c++)
      convert(line[c], matrix + (n + c) * K + from, count);
    for (int64_t d = 0; d < high; d++)
      for (int64_t c = 0; c < kSquare; c++) to[d * wide + c] = line[c][d];
  }
};

// A transposed: K rows of M values become blocks of kRows columns, each (depth, kRows); for tiles,
// which want rows, blocks of kTile columns, each (kTile, depth).
template <class E> struct Blocks {
  static constexpr int kWide = kTiled<E> ? kTile : kRows;
  static constexpr int kStride = kTiled<E> ? 1 : kRows;  // as for `multiply`
  std::vector<E> data;
  std::vector<const E*> columns;

  void from_rows(const Sum<E>* const* rows, int64_t K, int64_t M) {
    const int64_t depth = packed_depth<E>(K), blocks = (M + kWide - 1) / kWide;
    at_least(data, blocks * depth * kWide);
    columns.resize(blocks * kWide);
    for (int64_t m = 0; m < blocks * kWide; m++)
      columns[m] = data.data() + m / kWide * depth * kWide + m % kWide * (kTiled<E> ? depth : 1);
    // A few rows at a time: more rows, far apart in memory, would evict each other from the cache.
    for (int64_t low = 0; low < depth; low += kAtOnce)
      for (int64_t m = 0; m < M; m += kColumns)
        pack(rows, K, M, low, std::min(low + kAtOnce, depth), m);
  }

 private:
  static constexpr int64_t kAtOnce = kTiled<E> ? kTile : 8 / Element<E>::kPer;
  static constexpr int64_t kColumns = 16;  // a cache line of floats

  // Depths low to high of the columns from m on.
  void pack(const Sum<E>* const* rows, int64_t K, int64_t M, int64_t low, int64_t high, int64_t m) {
    const int64_t depth = packed_depth<E>(K), count = std::min(kColumns, M - m);
    E line[kAtOnce][kColumns] = {};
    for (int64_t d = low; d < high; d++) gather_at(line[d - low], rows, K, d, m, count);
    E* to = data.data() + m * depth;
    if constexpr (kTiled<E>) {
      for (int64_t c = 0; c < kColumns; c++)
        for (int64_t d = 0; d < kAtOnce; d++) to[c * depth + low + d] = line[d][c];
    } else {
      for (int64_t c = 0; c < whole(count, kRows); c += kRows, to += kRows * depth)
        for (int64_t d = low; d < high; d++)
          std::copy_n(line[d - low] + c, kRows, to + d * kRows);
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
      at_least(data, whole(M, kTile) * depth);
      for (int64_t m = 0; m < M; m++) {
        E* to = data.data() + m * depth;
        rows[m] = to;
        convert(to, values[m], K);
      }
    }
  }
};
