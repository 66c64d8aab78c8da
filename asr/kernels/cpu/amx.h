// Products of bf16 pairs on AMX. A tile instruction multiplies 16 rows of 16 pairs by 16 pairs of
// 16 columns. The second factor is a panel of packing.h, one pair of depth a row. The first is rows
// of pairs, `depth` apart; 16 of them must always be readable.
#pragma once
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif
#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int kTile = 16;  // rows of a tile, pairs in each of them, columns of a result

#if HAS_AMX
// Linux enables the tile registers of a process only on request.
inline bool tiles_allowed() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// Configures this thread's tiles to their full size for the lifetime of the object.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    std::fill_n(shape.bytes, 8, 64);
    std::fill_n(shape.rows, 8, kTile);
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// Destination of a block's sums: `rows` rows from c on, columns from `column` to `columns`.
struct TileTarget {
  float* const* c;
  int64_t rows, column, columns;
  bool even;  // rows are equally spaced
  bool accumulate;

  // Can tiles be moved without an intermediate buffer?
  bool is_direct(int r, int w) const {
    return even && rows >= kTile * (r + 1) && columns >= column + kTile * (w + 1);
  }
  float* at(int r, int w) const { return c[kTile * r] + column + kTile * w; }
  int64_t stride() const { return rows > 1 ? (c[1] - c[0]) * int64_t(sizeof(float)) : 0; }

  void write(int r, int w, const float* sums) const {
    const int64_t wide = std::min<int64_t>(kTile, columns - column - kTile * w);
    for (int64_t n = 0; n < std::min<int64_t>(kTile, rows - kTile * r); n++) {
      float* to = c[kTile * r + n] + column + kTile * w;
      for (int64_t k = 0; k < wide; k++) to[k] = sums[n * kTile + k] + (accumulate ? to[k] : 0.0f);
    }
  }
};

// The compilers' intrinsics need a literal register, and gcc's do not declare the memory access.
template <int kRegister> inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister> inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kRegister) : "memory");
}

// Registers 0 to 3 hold sums, two rows of two; 4 and 5 hold rows, 6 and 7 columns.
template <int kRegister> inline void begin(const TileTarget& to) {
  constexpr int r = kRegister / 2, w = kRegister % 2;
  if (to.accumulate && to.is_direct(r, w))
    load_tile<kRegister>(to.at(r, w), to.stride());
  else
    asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kRegister> inline void finish(const TileTarget& to) {
  constexpr int r = kRegister / 2, w = kRegister % 2;
  if (to.is_direct(r, w)) return store_tile<kRegister>(to.at(r, w), to.stride());
  alignas(64) float sums[kTile * kTile];
  store_tile<kRegister>(sums, 64);
  to.write(r, w, sums);
}

// Up to 32 rows of `depth` pairs, times a panel of W vectors.
template <int R, int W>
inline void tile_block(const void* a, int64_t depth, const void* b, const TileTarget& to) {
  const char *row = (const char*)a, *below = row + kTile * depth * 4, *panel = (const char*)b;
  begin<0>(to);
  if constexpr (W == 2) begin<1>(to);
  if constexpr (R == 2) begin<2>(to);
  if constexpr (R == 2 && W == 2) begin<3>(to);
  for (int64_t d = 0; d < depth; d += kTile, panel += kTile * W * 64) {
    load_tile<4>(row + d * 4, depth * 4);
    load_tile<6>(panel, W * 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (W == 2) {
      load_tile<7>(panel + 64, W * 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2) {
      load_tile<5>(below + d * 4, depth * 4);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (R == 2 && W == 2) _tile_dpbf16ps(3, 5, 7);
  }
  finish<0>(to);
  if constexpr (W == 2) finish<1>(to);
  if constexpr (R == 2) finish<2>(to);
  if constexpr (R == 2 && W == 2) finish<3>(to);
}
#endif
