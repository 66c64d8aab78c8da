// The part of a LayerNorm-LSTM step that is not a matrix product, for one utterance (one row),
// forward and backward. The formulas: asr/kernels/reference.py.
//
// The pre-activations are one of
//   kSum     z = a + b
//   kSplit   z = gx N(ax) + gh N(ah) + b                 gains of 1 where the setting has none
//   kGates   z = g N(a) + b, one N for each gate
//   kJoined  z = g N(a) + b, one N for all four
// where a is W_x x + W_h h. The gates have the order i, f, g, o. RMSNorm is a norm with a mean of 0.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

enum Mode { kSum = 0, kSplit = 1, kGates = 2, kJoined = 3 };

template <class T> struct Cell {
  Mode mode;
  bool rms;      // every norm is RMSNorm
  bool norm_c;   // c is normalised:
  bool show;     // the output is o tanh(N(c)) instead of o tanh(c)
  bool carry;    // N(c) is the next cell state
  bool norm_h;   // h is N(o tanh(.))
  bool swap;     // a step reads h as its cell and c as its h
  int64_t H;
  T eps;
  const T *gain_x, *gain_h, *bias;  // (4H,)
  const T *gain_c, *bias_c, *gain_hidden, *bias_hidden;  // (H,)
};

template <class T> struct Moments {
  T mean, scale;  // scale is 1 / sqrt(variance + eps), or 0 for a row without variance
};

template <class T> struct RowStats {
  Moments<T> x, h[4], c, hidden;
};

template <class T> struct Grads {  // sums over rows
  T *bias, *gain_x, *gain_h;  // (4H,)
  T *gain_c, *bias_c, *gain_hidden, *bias_hidden;  // (H,)
};
constexpr int64_t kVectorRows = 16;  // of H values, in all of them

// From one contiguous vector.
template <class T> Grads<T> grads_at(T* sums, int64_t H) {
  T* of_c = sums + 12 * H;
  return {sums, sums + 4 * H, sums + 8 * H, of_c, of_c + H, of_c + 2 * H, of_c + 3 * H};
}

template <class T> T mean_of(const T* x, int64_t n) {
  constexpr int lanes = Simd<T>::N;
  Vec<T> total[4] = {};  // four independent chains of additions
  int64_t j = 0;
  for (; j + 4 * lanes <= n; j += 4 * lanes)
    for (int k = 0; k < 4; k++) total[k] += load(x + j + k * lanes);
  for (; j < n; j += lanes) total[0] += load(x + j, n - j);
  return sum<T>(total[0] + total[1] + (total[2] + total[3])) / n;
}

// Is no element further than `noise` from the mean?
template <class T> bool is_flat(const T* x, int64_t n, T mean, T noise) {
  T furthest = 0;
  for (int64_t j = 0; j < n; j++) furthest = std::max(furthest, std::abs(x[j] - mean));
  return furthest <= noise;
}

// The guard: a variance within the rounding noise of the mean counts as zero. The squares of small
// values vanish, so that such a row is measured again without them.
template <class T> Moments<T> moments(const Cell<T>& cell, const T* x, int64_t n) {
  constexpr int lanes = Simd<T>::N;
  const T mean = cell.rms ? T(0) : mean_of(x, n);
  Vec<T> squares[4] = {};
  int64_t j = 0;
  for (; j + 4 * lanes <= n; j += 4 * lanes)
    for (int k = 0; k < 4; k++) {
      Vec<T> centred = load(x + j + k * lanes) - mean;
      squares[k] += centred * centred;
    }
  for (; j < n; j += lanes) {
    Vec<T> centred = first<T>(load(x + j, n - j) - mean, n - j);
    squares[0] += centred * centred;
  }
  const T variance = sum<T>(squares[0] + squares[1] + (squares[2] + squares[3])) / n;
  const T noise = Simd<T>::kNoise * std::abs(mean);
  bool flat = variance <= noise * noise;
  if (flat && variance < std::numeric_limits<T>::min()) flat = is_flat(x, n, mean, noise);
  return {mean, flat ? T(0) : T(1) / std::sqrt(variance + cell.eps)};
}

template <class T>
void measure(const Cell<T>& cell, const T* ax, const T* ah, RowStats<T>& stats) {
  const int64_t H = cell.H;
  for (Moments<T>& m : stats.h) m = {0, 1};
  if (cell.mode == kSplit) stats.x = moments(cell, ax, 4 * H);
  if (cell.mode == kSplit || cell.mode == kJoined) {
    Moments<T> whole = moments(cell, ah, 4 * H);
    for (Moments<T>& m : stats.h) m = whole;
  } else if (cell.mode == kGates) {
    for (int k = 0; k < 4; k++) stats.h[k] = moments(cell, ah + k * H, H);
  }
}

// The four pre-activations of a vector of units from j on.
template <class T>
inline void pre_activation(const Cell<T>& cell, const T* ax, const T* ah, const RowStats<T>& stats,
                           int64_t j, Vec<T>* z) {
  const int64_t n = cell.H - j;
  for (int k = 0; k < 4; k++) {
    const int64_t at = k * cell.H + j;
    z[k] = load(ah + at, n);
    if (cell.mode != kSum)
      z[k] = (z[k] - stats.h[k].mean) * stats.h[k].scale * load(cell.gain_h + at, n);
    if (cell.mode == kSplit)
      z[k] += (load(ax + at, n) - stats.x.mean) * stats.x.scale * load(cell.gain_x + at, n);
    z[k] += load(cell.bias + at, n);
  }
}

// N of a vector (H,), with gain and bias, in place.
template <class T>
void apply_norm(T* x, Moments<T> m, const T* gain, const T* bias, int64_t n) {
  for (int64_t j = 0; j < n; j += Simd<T>::N)
    store<T>(x + j, (load(x + j, n - j) - m.mean) * m.scale * load(gain + j, n - j) +
                        load(bias + j, n - j), n - j);
}

// ax, ah (4H,) and the cell before (H,) -> the next c and h (H,), either of which may overwrite the
// cell before; raw (H,) receives the next c before its norm; mask (H,) may be null.
template <class T>
void cell_forward(const Cell<T>& cell, const T* ax, const T* ah, const T* mask, const T* before,
                  T* c, T* raw, T* h, RowStats<T>& stats) {
  constexpr int lanes = Simd<T>::N;
  const int64_t H = cell.H;
  measure(cell, ax, ah, stats);
  for (int64_t j = 0; j < H; j += lanes) {
    Vec<T> z[4];
    pre_activation(cell, ax, ah, stats, j, z);
    Vec<T> candidate = tanh<T>(z[2]);
    if (mask) candidate *= load(mask + j, H - j);
    Vec<T> next = sigmoid<T>(z[1]) * load(before + j, H - j) + sigmoid<T>(z[0]) * candidate;
    store<T>(raw + j, next, H - j);
    store<T>(h + j, sigmoid<T>(z[3]), H - j);  // holds o until c is normed
  }
  stats.c = cell.norm_c ? moments(cell, raw, H) : Moments<T>{0, 1};
  for (int64_t j = 0; j < H; j += lanes) {
    Vec<T> next = load(raw + j, H - j), normed = next;
    if (cell.norm_c)
      normed = (next - stats.c.mean) * stats.c.scale * load(cell.gain_c + j, H - j) +
               load(cell.bias_c + j, H - j);
    store<T>(c + j, cell.carry ? normed : next, H - j);
    store<T>(h + j, load(h + j, H - j) * tanh<T>(cell.show ? normed : next), H - j);
  }
  if (!cell.norm_h) return;
  stats.hidden = moments(cell, h, H);
  apply_norm(h, stats.hidden, cell.gain_hidden, cell.bias_hidden, H);
}

// The cell state that cell_forward wrote, recomputed from `raw`.
template <class T>
void carried_state(const Cell<T>& cell, const T* raw, const RowStats<T>& stats, T* state) {
  for (int64_t j = 0; j < cell.H; j++)
    state[j] = cell.carry ? (raw[j] - stats.c.mean) * stats.c.scale * cell.gain_c[j] +
                                cell.bias_c[j]
                          : raw[j];
}

// Backward of y = gain * (x - mean) * scale: dy -> dx, which may overwrite dy or x; adds to dgain.
template <class T>
void norm_backward(const Cell<T>& cell, const T* dy, const T* x, const T* gain, Moments<T> m,
                   int64_t n, T* dgain, T* dx) {
  constexpr int lanes = Simd<T>::N;
  Vec<T> total = {}, along = {};
  for (int64_t j = 0; j < n; j += lanes) {
    Vec<T> normed = (load(x + j, n - j) - m.mean) * m.scale, d = load(dy + j, n - j);
    if (dgain) store<T>(dgain + j, load(dgain + j, n - j) + d * normed, n - j);
    d *= load(gain + j, n - j);
    total += d;
    along += d * normed;
  }
  const T mean = cell.rms ? T(0) : sum<T>(total) / n, slope = sum<T>(along) / n;
  for (int64_t j = 0; j < n; j += lanes) {
    Vec<T> normed = (load(x + j, n - j) - m.mean) * m.scale;
    Vec<T> d = load(dy + j, n - j) * load(gain + j, n - j);
    store<T>(dx + j, (d - mean - normed * slope) * m.scale, n - j);
  }
}

// What the backward pass of one row needs from its forward pass.
template <class T> struct Row {
  const T *ax, *ah, *raw, *before, *mask;  // before: the cell before the step
  RowStats<T> stats;
};

// The argument of the output's tanh, from unit j on.
template <class T> inline Vec<T> shown_cell(const Cell<T>& cell, const Row<T>& row, int64_t j) {
  const int64_t n = cell.H - j;
  const Vec<T> raw = load(row.raw + j, n);
  if (!cell.show) return raw;
  return (raw - row.stats.c.mean) * row.stats.c.scale * load(cell.gain_c + j, n) +
         load(cell.bias_c + j, n);
}

// Recomputes h before its norm; dh (H,) -> dhidden (H,), its gradient.
template <class T>
void hidden_backward(const Cell<T>& cell, const Row<T>& row, const T* dh, const Grads<T>& grads,
                     T* dhidden) {
  const int64_t H = cell.H;
  for (int64_t j = 0; j < H; j += Simd<T>::N) {
    Vec<T> z[4];
    pre_activation(cell, row.ax, row.ah, row.stats, j, z);
    store<T>(dhidden + j, sigmoid<T>(z[3]) * tanh<T>(shown_cell(cell, row, j)), H - j);
  }
  for (int64_t j = 0; j < H; j++) grads.bias_hidden[j] += dh[j];
  norm_backward(cell, dh, dhidden, cell.gain_hidden, row.stats.hidden, H, grads.gain_hidden,
                dhidden);
}

// Recomputes the gates and the normed cell; dh -> gradients of o's pre-activation and of the
// argument of tanh. gates (4H,) receives i, f and tanh g.
template <class T>
void output_backward(const Cell<T>& cell, const Row<T>& row, const T* dh, T* gates, T* dz_o,
                     T* dshown) {
  constexpr int lanes = Simd<T>::N;
  const int64_t H = cell.H;
  for (int64_t j = 0; j < H; j += lanes) {
    const int64_t n = H - j;
    Vec<T> z[4];
    pre_activation(cell, row.ax, row.ah, row.stats, j, z);
    Vec<T> o = sigmoid<T>(z[3]), d = load(dh + j, n), bounded = tanh<T>(shown_cell(cell, row, j));
    store<T>(gates + j, sigmoid<T>(z[0]), n);
    store<T>(gates + H + j, sigmoid<T>(z[1]), n);
    store<T>(gates + 2 * H + j, tanh<T>(z[2]), n);
    store<T>(dz_o + j, d * bounded * o * (T(1) - o), n);
    store<T>(dshown + j, d * o * (T(1) - bounded * bounded), n);
  }
}

constexpr int64_t kScratch = 6;  // H times this is the scratch memory of cell_backward

// dh (H,), dc (H,) -> dax, dah (4H,); dc (H,) becomes the gradient of the cell before. Only mode
// kSplit writes dax: elsewhere it equals dah.
template <class T>
void cell_backward(const Cell<T>& cell, const Row<T>& row, const T* dh, T* dc, T* dax, T* dah,
                   const Grads<T>& grads, T* scratch) {
  constexpr int lanes = Simd<T>::N;
  const int64_t H = cell.H;
  T *gates = scratch, *d = scratch + 4 * H;
  if (cell.norm_h) {
    hidden_backward(cell, row, dh, grads, scratch + 5 * H);
    dh = scratch + 5 * H;
  }
  output_backward(cell, row, dh, gates, dah + 3 * H, d);
  const bool both = cell.show && cell.carry;
  if (cell.norm_c) {
    T* normed = cell.show ? d : dc;  // the gradient that passes through the norm
    for (int64_t j = 0; j < H; j++) {
      if (both) d[j] += dc[j];
      grads.bias_c[j] += normed[j];
    }
    norm_backward(cell, normed, row.raw, cell.gain_c, row.stats.c, H, grads.gain_c, normed);
  }
  for (int64_t j = 0; j < H; j += lanes) {
    const int64_t n = H - j;
    Vec<T> i = load(gates + j, n), f = load(gates + H + j, n), g = load(gates + 2 * H + j, n);
    Vec<T> drop = row.mask ? load(row.mask + j, n) : splat<T>(1), total = load(d + j, n);
    if (!both) total += load(dc + j, n);
    store<T>(dah + j, total * g * drop * i * (T(1) - i), n);
    store<T>(dah + H + j, total * load(row.before + j, n) * f * (T(1) - f), n);
    store<T>(dah + 2 * H + j, total * i * drop * (T(1) - g * g), n);
    store<T>(dc + j, total * f, n);
  }
  for (int64_t j = 0; j < 4 * H; j++) grads.bias[j] += dah[j];
  if (cell.mode == kSplit)
    norm_backward(cell, dah, row.ax, cell.gain_x, row.stats.x, 4 * H, grads.gain_x, dax);
  if (cell.mode == kSplit || cell.mode == kJoined) {
    norm_backward(cell, dah, row.ah, cell.gain_h, row.stats.h[0], 4 * H, grads.gain_h, dah);
  } else if (cell.mode == kGates) {
    for (int k = 0; k < 4; k++)
      norm_backward(cell, dah + k * H, row.ah + k * H, cell.gain_h + k * H, row.stats.h[k], H,
                    grads.gain_h + k * H, dah + k * H);
  }
}
