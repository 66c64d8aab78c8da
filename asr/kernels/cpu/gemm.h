// C (M, N) = or += A (M, K) B (K, N), single-threaded, with rows anywhere in memory.
//
// B is packed once into panels of up to three vectors of columns. The micro kernel keeps a tile
// of kRows rows by one panel in registers and streams K through it. Rows of A and C are given as
// pointers, so that ragged batches need no gathering. Pairs of bf16 use amx.h where the
// processor has AMX; their rows of A are `depth` apart.
#pragma once
#include "packing.h"

constexpr int64_t kDepth = 512;  // of K at a time: a panel of this depth fits in the L2 cache

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

#if HAS_AMX
inline void multiply_tiles(const Pair* a, int64_t M, const Panels<Pair>& b, float* const* c,
                           bool accumulate) {
  bool even = true;
  for (int64_t m = 2; m < M; m++) even = even && c[m] - c[m - 1] == c[1] - c[0];
  const Tiles tiles;
  int64_t column = 0;
  for (int width : b.widths) {
    const Pair* panel = b.data.data() + column * b.depth;
    for (int64_t m = 0; m < M; m += 2 * kTile) {
      auto run = M - m > kTile ? (width == 2 ? tile_block<2, 2> : tile_block<2, 1>)
                               : (width == 2 ? tile_block<1, 2> : tile_block<1, 1>);
      run(a + m * b.depth, b.depth, panel, {c + m, M - m, column, b.N, even, accumulate});
    }
    column += width * kTile;
  }
}
#endif

// kStride 1: a[m] is row m of A, of pairs b.depth behind row m - 1. kStride kRows: a[m] is column m
// of a block packed by Blocks.
template <class E, int kStride = 1>
void multiply(const E* const* a, int64_t M, const Panels<E>& b, Sum<E>* const* c,
              bool accumulate) {
#if HAS_AMX
  if constexpr (kTiled<E>)
    if (tiles_allowed()) return multiply_tiles(a[0], M, b, c, accumulate);
#endif
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
