// One step of additive or location-aware attention over the memory (asr/nn/attention.py):
//     f[c, t]   = sum over i, w of conv[c, i, w] seen[i, t + w - W / 2]
//     energy[t] = v . tanh(keys[t] + query + weight_loc f[t])
//     weights   = softmax of the energy over the valid frames,  total = past total + weights
// where seen stacks the past weights and the past total; additive attention has no f.
#pragma once
#include <limits>

#include "correlate.h"
#include "parallel.h"

extern "C" {
struct AttentionCall {
  int64_t B, K, T, A;
  int64_t C, W;  // filters and their taps; no filters in additive attention
  int64_t threads, forked;
  const void *keys, *query, *v;           // (B, T, A), (B, K, A), (A)
  const void *weight_loc, *conv;          // (A, C), (C, 2, W)
  const void *past_weights, *past_total;  // (B, K, T)
  const bool* valid;                      // (B, T)
  void *weights, *total;                  // (B, K, T); the backward pass reads the weights
  const void *dweights, *dtotal;          // (B, K, T)
  void *dkeys, *dquery;                   // shapes of keys and query
  void *dv, *dweight_loc, *dconv;         // one per thread
  void *dpast_weights, *dpast_total;      // (B, K, T)
};
}

constexpr int kFrames = 8;  // frames per tile, processed together along A

// The weights that every row reads, padded with zeros to whole vectors.
template <class T> struct AttentionWeights {
  int64_t A, C, W, wide_A, wide_C;
  std::vector<T> v, weight_loc, loc_by_size;  // (A), (C, A), (A, C)
  std::vector<T> taps, mirrored;              // (2, W, C), (C, W, 2)

  template <class Sizes> void from(const Sizes& call) {
    A = call.A, C = call.C, W = call.W;
    wide_A = whole(A, Simd<T>::N), wide_C = whole(C, Simd<T>::N);
    v.assign(wide_A, T(0));
    std::copy_n(static_cast<const T*>(call.v), A, v.data());
    weight_loc.assign(C * wide_A, T(0)), loc_by_size.assign(A * wide_C, T(0));
    const T* from = static_cast<const T*>(call.weight_loc);
    for (int64_t a = 0; a < A; a++)
      for (int64_t c = 0; c < C; c++)
        weight_loc[c * wide_A + a] = loc_by_size[a * wide_C + c] = from[a * C + c];
    from = static_cast<const T*>(call.conv);
    taps.resize(2 * W * C), mirrored.resize(C * W * 2);
    for (int64_t c = 0; c < C; c++)
      for (int64_t i = 0; i < 2; i++)
        for (int64_t w = 0; w < W; w++, from++)
          taps[(i * W + w) * C + c] = mirrored[(c * W + W - 1 - w) * 2 + i] = *from;
  }
};

// One hypothesis of one utterance at a time. Each pass lists the frames it needs in `frames`.
template <class T> class AttentionRow {
 protected:
  using V = Vec<T>;
  static constexpr int N = Simd<T>::N;
  struct Memory {
    std::vector<int64_t> frames;
    std::vector<T> energy, seen, f, near;
  };
  Memory& memory = kept<Memory>();
  std::vector<int64_t>& frames = memory.frames;
  const AttentionCall& call;
  const AttentionWeights<T>& own;
  const int64_t stride, reach;  // of the lines along time (correlate.h)
  int64_t b = 0, row = 0;

  AttentionRow(const AttentionCall& call_, const AttentionWeights<T>& weights)
      : call(call_), own(weights), stride(line_size<T>(call_.T, call_.W)), reach(call_.W / 2) {}

  void move_to(int64_t utterance, int64_t k) { b = utterance, row = utterance * call.K + k; }
  const T* times(const void* p) const { return static_cast<const T*>(p) + row * call.T; }
  T* times(void* p) const { return static_cast<T*>(p) + row * call.T; }
  int64_t key_at(int64_t t) const { return (b * call.T + t) * call.A; }
  bool is_valid(int64_t t) const { return call.valid[b * call.T + t]; }

  void filter_past() {
    if (own.C == 0) return;
    memory.seen.assign(2 * stride, T(0));
    std::copy_n(times(call.past_weights), call.T, &memory.seen[reach]);
    std::copy_n(times(call.past_total), call.T, &memory.seen[stride + reach]);
    memory.f.resize(own.C * stride);
    correlate(memory.seen.data(), 2, own.taps.data(), own.W, memory.f.data(), own.C, stride,
              call.T);
  }

  // kFrames listed frames from the n-th on; the last one is repeated where fewer are left.
  struct Tile {
    int count;
    int64_t frame[kFrames];
    const T* key[kFrames];
    const T* f;  // (C, kFrames)
  };
  Tile tile_at(int64_t n) const {
    Tile tile;
    memory.near.resize(own.C * kFrames);
    tile.count = int(std::min<int64_t>(kFrames, frames.size() - n));
    for (int r = 0; r < kFrames; r++) {
      tile.frame[r] = frames[n + std::min(r, tile.count - 1)];
      tile.key[r] = static_cast<const T*>(call.keys) + key_at(tile.frame[r]);
    }
    T* f = memory.near.data();
    tile.f = f;
    for (int64_t c = 0; c < own.C; c++)
      for (int r = 0; r < kFrames; r++) *f++ = memory.f[c * stride + tile.frame[r]];
    return tile;
  }

  // y = tanh(key + query + weight_loc), for one vector of A that begins at a.
  void tanh_at(const Tile& tile, int64_t a, V (&y)[kFrames]) const {
    const V query = load<T>(static_cast<const T*>(call.query) + row * own.A + a, own.A - a);
#pragma GCC unroll 8
    for (int r = 0; r < kFrames; r++) y[r] = query + load<T>(tile.key[r] + a, own.A - a);
    const T *f = tile.f, *at = own.weight_loc.data() + a;
    for (int64_t c = 0; c < own.C; c++, f += kFrames, at += own.wide_A) {
      const V weight_loc = load<T>(at);
#pragma GCC unroll 8
      for (int r = 0; r < kFrames; r++) y[r] += f[r] * weight_loc;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kFrames; r++) y[r] = tanh<T>(y[r]);
  }
};

template <class T> class AttentionForward : AttentionRow<T> {
  using Base = AttentionRow<T>;
  using typename Base::V, typename Base::Tile;
  using Base::call, Base::own, Base::frames, Base::memory, Base::N;
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  std::vector<T>& energy = memory.energy;  // of the listed frames

 public:
  AttentionForward(const AttentionCall& call_, const AttentionWeights<T>& weights)
      : Base(call_, weights) {}

  void run(int64_t row) {
    this->move_to(row / call.K, row % call.K);
    frames.clear();
    for (int64_t t = 0; t < call.T; t++)
      if (this->is_valid(t)) frames.push_back(t);
    this->filter_past();
    energy.assign(whole(frames.size(), N), -kInfinity);
    for (size_t n = 0; n < frames.size(); n += kFrames) energies(n);
    write(exponentials());
  }

 private:
  void energies(int64_t n) {
    const Tile tile = this->tile_at(n);
    V sums[kFrames] = {}, y[kFrames];
    for (int64_t a = 0; a < own.A; a += N) {
      this->tanh_at(tile, a, y);
      const V v = load<T>(&own.v[a]);
      for (int r = 0; r < kFrames; r++) sums[r] += v * y[r];
    }
    for (int r = 0; r < tile.count; r++) energy[n + r] = sum<T>(sums[r]);
  }

  // Replaces energies by exp(energy - largest) and returns their sum.
  T exponentials() {
    T largest = -kInfinity;
    for (T e : energy) largest = std::max(largest, e);
    V sums = {};
    for (size_t n = 0; n < energy.size(); n += N) {
      const V x = load<T>(&energy[n]) - largest;
      V scale, minus_one;
      exp_parts<T>(x, scale, minus_one);
      const V y = x < -Simd<T>::kLargest ? V{} : scale + scale * minus_one;
      store<T>(&energy[n], y);
      sums += y;
    }
    return sum<T>(sums);
  }

  // An utterance without any valid frame gets NaN, as from torch's softmax.
  void write(T sum) {
    T *weights = this->times(call.weights), *total = this->times(call.total);
    std::fill_n(weights, call.T, frames.empty() ? T(0) / sum : T(0));
    for (size_t n = 0; n < frames.size(); n++) weights[frames[n]] = energy[n] / sum;
    const T* past = this->times(static_cast<const void*>(call.past_total));
    for (int64_t t = 0; t < call.T; t++) total[t] = past[t] + weights[t];
  }
};
