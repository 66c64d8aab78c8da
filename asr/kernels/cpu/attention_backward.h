// Backward pass of attention. It stores nothing of size (T, A): every tanh is recomputed.
#pragma once
#include "attention.h"

template <class T> class AttentionBackward : AttentionRow<T> {
  using Base = AttentionRow<T>;
  using typename Base::V, typename Base::Tile;
  using Base::call, Base::own, Base::frames, Base::memory, Base::N, Base::stride, Base::reach;
  using Base::b, Base::row;

  struct Memory {
    std::vector<T> denergy, df, dseen, dquery;   // (T), (C, T), (2, T), (A)
    std::vector<T> dmixed;                       // (A / N, kFrames, N)
    std::vector<T> dv, dweight_loc, dtaps;       // (A), (C, A), (2, C, W)
  };
  Memory& own_memory = kept<Memory>();
  std::vector<T>&denergy = own_memory.denergy, &dmixed = own_memory.dmixed, &df = own_memory.df,
      &dseen = own_memory.dseen, &dquery = own_memory.dquery, &dv = own_memory.dv,
      &dweight_loc = own_memory.dweight_loc, &dtaps = own_memory.dtaps;
  const int64_t wide_W = whole(call.W, kGroup<T>);

 public:
  // Between rows `call_` may be replaced by another step of the same sizes.
  AttentionBackward(const AttentionCall& call_, const AttentionWeights<T>& weights)
      : Base(call_, weights) {}

  // A thread's share: whole utterances, because their hypotheses share one gradient of the keys.
  void run(int64_t thread) {
    begin();
    for (int64_t b = thread; b < call.B; b += call.threads)
      for (int64_t k = 0; k < call.K; k++) run_row(b, k, k == 0);
    write_weights(thread);
  }

  // Clears the sums of the weights' gradients.
  void begin() {
    dmixed.resize(kFrames * own.wide_A), dseen.resize(2 * stride), denergy.resize(call.T);
    dv.assign(own.wide_A, T(0)), dweight_loc.assign(own.C * own.wide_A, T(0));
    dtaps.assign(2 * own.C * wide_W, T(0));
  }

  // The first row of an utterance writes the gradient of its keys; later rows add to it.
  void run_row(int64_t utterance, int64_t k, bool first) {
    this->move_to(utterance, k);
    through_softmax();
    if (first) clear_other_keys();
    this->filter_past();
    dquery.assign(own.wide_A, T(0)), df.assign(own.C * stride, T(0));
    for (size_t n = 0; n < frames.size(); n += kFrames) {
      const Tile tile = this->tile_at(n);
      through_tanh(tile, first);
      if (own.C) to_filters(tile);
    }
    std::copy_n(dquery.data(), own.A, static_cast<T*>(call.dquery) + row * own.A);
    if (own.C) through_filters();
  }

  void write_weights(int64_t thread) {
    std::copy_n(dv.data(), own.A, static_cast<T*>(call.dv) + thread * own.A);
    T* to = static_cast<T*>(call.dweight_loc) + thread * own.A * own.C;
    for (int64_t a = 0; a < own.A; a++)
      for (int64_t c = 0; c < own.C; c++) *to++ = dweight_loc[c * own.wide_A + a];
    to = static_cast<T*>(call.dconv) + thread * own.C * 2 * own.W;
    for (int64_t c = 0; c < own.C; c++)
      for (int64_t i = 0; i < 2; i++)
        to = std::copy_n(&dtaps[(i * own.C + c) * wide_W], own.W, to);
  }

 private:
  // Lists the frames whose energy has a gradient; padding has none, whatever it contains.
  void through_softmax() {
    const T* y = this->times(static_cast<const void*>(call.weights));
    const T *dy = this->times(call.dweights), *dtotal = this->times(call.dtotal);
    double mean = 0;  // in double, because the difference below may be small
    for (int64_t t = 0; t < call.T; t++)
      if (this->is_valid(t)) mean += y[t] * (double(dy[t]) + dtotal[t]);
    frames.clear();
    for (int64_t t = 0; t < call.T; t++) {
      denergy[t] = this->is_valid(t) ? T(y[t] * (double(dy[t]) + dtotal[t] - mean)) : T(0);
      if (denergy[t] != 0) frames.push_back(t);
    }
  }

  void clear_other_keys() {
    T* dkeys = static_cast<T*>(call.dkeys);
    for (int64_t t = 0; t < call.T; t++)
      if (denergy[t] == 0) std::fill_n(dkeys + this->key_at(t), own.A, T(0));
  }

  void through_tanh(const Tile& tile, bool first) {
    T de[kFrames], *dkey[kFrames];
    for (int r = 0; r < kFrames; r++) {
      de[r] = r < tile.count ? denergy[tile.frame[r]] : T(0);
      dkey[r] = static_cast<T*>(call.dkeys) + this->key_at(tile.frame[r]);
    }
    T *dx = dmixed.data(), *along_v = dv.data(), *along_query = dquery.data();
    for (int64_t a = 0; a < own.A; a += N, dx += kFrames * N) {
      V y[kFrames], v_sum = load<T>(along_v + a), query_sum = load<T>(along_query + a);
      this->tanh_at(tile, a, y);
      const V v = load<T>(&own.v[a]);
#pragma GCC unroll 8
      for (int r = 0; r < kFrames; r++) {
        v_sum += de[r] * y[r];
        y[r] = de[r] * v * (T(1) - y[r] * y[r]);
        query_sum += y[r];
        store<T>(dx + r * N, y[r]);
      }
      store<T>(along_v + a, v_sum);
      store<T>(along_query + a, query_sum);
      add_loc(tile, a, y);
      for (int r = 0; r < tile.count; r++) add_key(dkey[r] + a, dx + r * N, own.A - a, first);
    }
  }

  static void add_key(T* to, const T* from, int64_t left, bool first) {
    V d = load<T>(from);
    if (!first) d += load<T>(to, left);
    store<T>(to, d, left);
  }

  void add_loc(const Tile& tile, int64_t a, const V (&d)[kFrames]) {
    const T* f = tile.f;
    T* at = dweight_loc.data() + a;
    for (int64_t c = 0; c < own.C; c++, f += kFrames, at += own.wide_A) {
      V even = load<T>(at), odd = {};
#pragma GCC unroll 8
      for (int r = 0; r < kFrames; r += 2) even += f[r] * d[r], odd += f[r + 1] * d[r + 1];
      store<T>(at, even + odd);
    }
  }

  // df[c, t] = sum over a of dmixed[t, a] weight_loc[a, c], with the filters in the vectors' lanes.
  void to_filters(const Tile& tile) {
    for (int64_t c = 0; c < own.C; c += N) {
      V sums[kFrames] = {};
      const T *dx = dmixed.data(), *weight_loc = own.loc_by_size.data() + c;
      for (int64_t a = 0; a < own.A; a += N, dx += kFrames * N)
        for (int64_t n = 0; n < std::min<int64_t>(N, own.A - a); n++, weight_loc += own.wide_C) {
          const V p = load<T>(weight_loc);
#pragma GCC unroll 8
          for (int r = 0; r < kFrames; r++) sums[r] += dx[r * N + n] * p;
        }
      for (int r = 0; r < tile.count; r++)
        for (int64_t lane = 0; lane < std::min<int64_t>(N, own.C - c); lane++)
          df[(c + lane) * stride + reach + tile.frame[r]] = sums[r][lane];
    }
  }

  void through_filters() {
    for (int i = 0; i < 2; i++)
      tap_gradients(&memory.seen[i * stride], &df[reach], own.C, stride, frames,
                    &dtaps[i * own.C * wide_W], wide_W);
    correlate(df.data(), own.C, own.mirrored.data(), own.W, dseen.data(), 2, stride, call.T);
    std::copy_n(dseen.data(), call.T, this->times(call.dpast_weights));
    const T* dtotal = this->times(call.dtotal);
    T* to = this->times(call.dpast_total);
    for (int64_t t = 0; t < call.T; t++) to[t] = dtotal[t] + dseen[stride + t];
  }
};
