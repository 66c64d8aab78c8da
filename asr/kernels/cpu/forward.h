// Forward pass of one worker.
#pragma once
#include "worker.h"

template <class E> struct ForwardWeights {  // packed once per direction, read by its workers
  Panels<E> input, recurrent;
};

template <class E> class Forward : Worker<E> {
  using Base = Worker<E>;
  using T = Sum<E>;
  using Base::call, Base::cell, Base::share, Base::own, Base::H, Base::G;
  static constexpr int64_t kEnough = 96;  // rows of the input product at a time: they fit in the cache

  const ForwardWeights<E>& weights;
  struct Memory {
    std::vector<T> h, c, gates_x, gates_h, raw;
  };
  Memory& memory = kept<Memory>();
  std::vector<T>&h = memory.h, &c = memory.c, &raw = memory.raw;

 public:
  Forward(const Call& call, const Share& share, const ForwardWeights<E>& packed)
      : Base(call, share), weights(packed) {}

  void run() {
    const int64_t n = share.utterances.size();
    h.resize(n * H), c.resize(n * H), raw.resize(H);
    for (int64_t j = 0; j < n; j++) {
      std::copy_n(this->state_row(own.h0, j), H, &h[j * H]);
      std::copy_n(this->state_row(own.c0, j), H, &c[j * H]);
    }
    for (const auto& chunk : this->chunks(kEnough)) run_chunk(chunk);
    for (int64_t j = 0; j < n; j++) {
      std::copy_n(&h[j * H], H, out<T>(own.h) + share.utterances[j] * H);
      std::copy_n(&c[j * H], H, out<T>(own.c) + share.utterances[j] * H);
    }
  }

 private:
  void run_chunk(const typename Base::Chunk& chunk) {
    T *ax = saved(own.ax, memory.gates_x, chunk), *ah = saved(own.ah, memory.gates_h, chunk);
    if (!this->split()) ax = ah;  // both products are summed in one place
    std::vector<const T*> x(chunk.count);
    this->each_row(chunk, [&](int64_t row, int64_t j, int64_t t) { x[row] = this->x_row(j, t); });
    this->rows.from(x.data(), chunk.count, call.I);
    auto to = row_pointers(ax, chunk.count, G);
    multiply<E>(this->rows.rows.data(), chunk.count, weights.input, to.data(), false);
    for (int64_t s = chunk.first; s < chunk.last; s++) {
      const int64_t t = share.time_of(s), offset = (share.start[t] - chunk.low) * G;
      run_step(t, ax + offset, ah + offset);
    }
  }

  // Rows of the buffer saved for the backward pass, or of a temporary one per chunk.
  T* saved(void* kept, std::vector<T>& passing, const typename Base::Chunk& chunk) {
    if (kept) return out<T>(kept) + (share.base + chunk.low) * G;
    return at_least(passing, chunk.count * G);
  }

  void run_step(int64_t t, T* ax, T* ah) {
    const int64_t n = share.running[t];
    auto from = row_pointers<const T>(cell.swap ? c.data() : h.data(), n, H);
    auto to = row_pointers(ah, n, G);
    this->rows.from(from.data(), n, H);
    multiply<E>(this->rows.rows.data(), n, weights.recurrent, to.data(), !this->split());
    for (int64_t j = 0; j < n; j++) {
      const int64_t row = share.base + share.start[t] + j;
      RowStats<T> passing;
      RowStats<T>& stats = own.stats ? out<RowStats<T>>(own.stats)[row] : passing;
      cell_forward(cell, ax + j * G, ah + j * G, this->mask_row(j),
                   cell.swap ? &h[j * H] : &c[j * H], &c[j * H],
                   own.raw ? out<T>(own.raw) + row * H : raw.data(), &h[j * H], stats);
      std::copy_n(&h[j * H], H, out<T>(call.output) + this->output_at(j, t));
    }
  }
};
