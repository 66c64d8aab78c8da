// Backward pass of one worker: the steps in reverse; the weights' gradients are computed for a
// chunk of steps at a time, while it is in the cache.
#pragma once
#include "worker.h"

template <class E> struct BackwardWeights {
  Panels<E> input, recurrent;
};

template <class E> class Backward : Worker<E> {
  using Base = Worker<E>;
  using T = Sum<E>;
  using Base::call, Base::cell, Base::share, Base::own, Base::H, Base::G;
  static constexpr int64_t kEnough = 512;

  const BackwardWeights<E>& weights;
  struct Memory {
    std::vector<T> dh, dc, dgates_x, dgates_h, scratch, state;
    Panels<E> panels;
    Blocks<E> blocks;
  };
  Memory& memory = kept<Memory>();
  std::vector<T>&dh = memory.dh, &dc = memory.dc, &scratch = memory.scratch, &state = memory.state;
  Grads<T> grads;

 public:
  Backward(const Call& call, const Share& share, const BackwardWeights<E>& packed)
      : Base(call, share), weights(packed) {
    grads = grads_at(out<T>(own.dvectors) + share.block * kVectorRows * H, H);
  }

  void run() {
    const int64_t n = share.utterances.size();
    dh.resize(n * H), dc.resize(n * H), scratch.resize(kScratch * H), state.resize(H);
    for (int64_t j = 0; j < n; j++) {
      std::copy_n(this->state_row(own.dh, j), H, &dh[j * H]);
      std::copy_n(this->state_row(own.dc, j), H, &dc[j * H]);
    }
    auto all = this->chunks(kEnough);
    for (auto chunk = all.rbegin(); chunk != all.rend(); ++chunk) run_chunk(*chunk);
    for (int64_t j = 0; j < n; j++) {
      std::copy_n(&dh[j * H], H, out<T>(own.dh0) + share.utterances[j] * H);
      std::copy_n(&dc[j * H], H, out<T>(own.dc0) + share.utterances[j] * H);
    }
  }

 private:
  void run_chunk(const typename Base::Chunk& chunk) {
    T* dah = at_least(memory.dgates_h, chunk.count * G);
    T* dax = this->split() ? at_least(memory.dgates_x, chunk.count * G) : dah;
    for (int64_t s = chunk.last - 1; s >= chunk.first; s--) {
      const int64_t t = share.time_of(s), offset = (share.start[t] - chunk.low) * G;
      run_step(t, dax + offset, dah + offset);
    }
    weight_gradients(chunk, row_pointers<const T>(dax, chunk.count, G),
                     row_pointers<const T>(dah, chunk.count, G));
    if (own.dx) input_gradient(chunk, row_pointers<const T>(dax, chunk.count, G));
  }

  void run_step(int64_t t, T* dax, T* dah) {
    const int64_t n = share.running[t];
    for (int64_t j = 0; j < n; j++) {
      const T* from_output = in<T>(call.doutput) + this->output_at(j, t);
      for (int64_t k = 0; k < H; k++) dh[j * H + k] += from_output[k];
      cell_backward(cell, saved_row(j, t), &dh[j * H], &dc[j * H], dax + j * G, dah + j * G,
                    grads, scratch.data());
    }
    auto from = row_pointers<const T>(dah, n, G);
    // The step read h as its cell and the cell as h.
    if (cell.swap) std::copy_n(dc.data(), n * H, dh.data());
    auto to = row_pointers(cell.swap ? dc.data() : dh.data(), n, H);
    this->rows.from(from.data(), n, G);
    multiply<E>(this->rows.rows.data(), n, weights.recurrent, to.data(), false);
  }

  Row<T> saved_row(int64_t j, int64_t t) {
    const int64_t row = share.base + share.start[t] + j;
    const T* ah = in<T>(own.ah) + row * G;
    return {this->split() ? in<T>(own.ax) + row * G : nullptr, ah, in<T>(own.raw) + row * H,
            cell_before(j, t), this->mask_row(j), in<RowStats<T>>(own.stats)[row]};
  }

  const T* cell_before(int64_t j, int64_t t) {
    if (cell.swap) return output_before(j, t);
    if (this->begins(j, t)) return this->state_row(own.c0, j);
    const int64_t row = row_before(j, t);
    if (!cell.carry) return in<T>(own.raw) + row * H;
    carried_state(cell, in<T>(own.raw) + row * H, in<RowStats<T>>(own.stats)[row], state.data());
    return state.data();
  }
  const T* output_before(int64_t j, int64_t t) const {
    if (this->begins(j, t)) return this->state_row(own.h0, j);
    return in<T>(call.output) + this->output_at(j, this->before(t));
  }
  int64_t row_before(int64_t j, int64_t t) const {
    return share.base + share.start[this->before(t)] + j;
  }

  // Input of the recurrent product. Swap and carry never occur together.
  const T* state_before(int64_t j, int64_t t) const {
    if (!cell.swap) return output_before(j, t);
    if (this->begins(j, t)) return this->state_row(own.c0, j);
    return in<T>(own.raw) + row_before(j, t) * H;
  }

  void weight_gradients(const typename Base::Chunk& chunk, const std::vector<const T*>& dax,
                        const std::vector<const T*>& dah) {
    std::vector<const T*> x(chunk.count), h(chunk.count);
    this->each_row(chunk, [&](int64_t row, int64_t j, int64_t t) {
      x[row] = this->x_row(j, t);
      h[row] = state_before(j, t);
    });
    add_product(dax, x, call.I, out<T>(own.dweight_ih) + share.block * G * call.I, true);
    add_product(dah, h, H, out<T>(own.dweight_hh) + share.block * G * H, this->split());
  }

  // to (4H, width) += dgates^T values
  void add_product(const std::vector<const T*>& dgates, const std::vector<const T*>& values,
                   int64_t width, T* to, bool fresh) {
    if (fresh) memory.blocks.from_rows(dgates.data(), dgates.size(), G);
    memory.panels.from_rows(values.data(), values.size(), width);
    auto target = row_pointers(to, G, width);
    multiply<E, Blocks<E>::kStride>(memory.blocks.columns.data(), G, memory.panels, target.data(), true);
  }

  void input_gradient(const typename Base::Chunk& chunk, const std::vector<const T*>& dax) {
    std::vector<T*> to(chunk.count);
    this->each_row(chunk, [&](int64_t row, int64_t j, int64_t t) {
      to[row] = out<T>(own.dx) + (share.utterances[j] * call.T + t) * call.I;
    });
    this->rows.from(dax.data(), chunk.count, G);
    multiply<E>(this->rows.rows.data(), chunk.count, weights.input, to.data(), false);
  }
};
