// A transcript spelled along its tokens in one call: all steps of asr/models/speller.py's
// `advance`, which is where the equations are, and every layer of its cells.
//
// A worker owns some utterances and never waits. Products with the embedding are made for all
// steps at once; what a step itself multiplies was packed before the first one.
#pragma once
#include "attention.h"
#include "worker.h"

extern "C" {
struct SpellLayer {
  Direction cell;    // rows (U, B) of ax, ah, raw, stats, h, c, dax and dah; (B, H) of the mask
  const void* keep;  // (U, B, H): what dropout multiplies h by, or null
  void* shown;       // (U, B, H): the product, which may be h itself
};

struct SpellCall {
  int64_t B, U, T, E, M, H, A, C, W, L;  // M: size of an embedding; else as in Python
  int64_t mode, norm_c, carry, swap, threads, blocks, forked;
  double eps;
  const SpellLayer* layers;     // the first one's weight_ih reads the memory
  const void *embedded;         // (U, B, M)
  const void *weight_embedded, *weight_query;  // (4H, M), (A, H)
  const void *states, *keys, *first;           // (B, T, E), (B, T, A), (B, T): the first look
  const void *v, *place, *conv;                // as LookCall's
  const bool* valid;                           // (B, T)
  void *wanted, *weights, *total, *read;       // (U, B, A), (U, B, T) twice, (U, B, E)
  const void *dshown, *dread, *dweights;       // of the last layer's shown, of read and weights
  void *dreads;                  // (U, B, E): dread and what the next step adds
  void *dwanted, *dembedded, *dstates, *dkeys;
  void *dweight_embedded, *dweight_query, *dv, *dplace, *dconv;  // one for each block
};
}

// What both passes know of a block of utterances: [low, low + count).
template <class E> class SpellWorker {
 protected:
  using T = Sum<E>;
  const SpellCall& call;
  const int64_t block, low, count, H, G;  // G: the width of all gates
  struct Memory {
    Rows<E> rows;
    std::vector<T> zeros;
  };
  Memory& memory = kept<Memory>();

  SpellWorker(const SpellCall& call_, int64_t block_)
      : call(call_), block(block_), low(block_ * call_.B / call_.blocks),
        count((block_ + 1) * call_.B / call_.blocks - low), H(call_.H), G(4 * call_.H) {
    memory.zeros.assign(std::max(call.E, H), T(0));
  }

  // The worker's rows of step u, of a tensor (U, B, width).
  const T* at(const void* p, int64_t u, int64_t width) const {
    return in<T>(p) + (u * call.B + low) * width;
  }
  T* at(void* p, int64_t u, int64_t width) const { return out<T>(p) + (u * call.B + low) * width; }

  // Rows (n, K), one after the other, times a packed matrix (K, N).
  void product(const T* from, int64_t n, const Panels<E>& matrix, T* to, bool accumulate) {
    auto sources = row_pointers(from, n, matrix.K);
    auto targets = row_pointers(to, n, matrix.N);
    product(sources, matrix, targets, accumulate);
  }
  void product(const std::vector<const T*>& from, const Panels<E>& matrix,
               const std::vector<T*>& to, bool accumulate) {
    memory.rows.from(from.data(), from.size(), matrix.K);
    multiply<E>(memory.rows.rows.data(), from.size(), matrix, to.data(), accumulate);
  }

  // The worker's rows of all steps, or of the steps before them: zeros come before the first.
  std::vector<const T*> rows_of(const void* p, int64_t width, int64_t back = 0) const {
    std::vector<const T*> rows;
    for (int64_t u = -back; u < call.U - back; u++)
      for (int64_t j = 0; j < count; j++)
        rows.push_back(u < 0 ? memory.zeros.data() : at(p, u, width) + j * width);
    return rows;
  }
  std::vector<T*> rows_of(void* p, int64_t width) const {
    std::vector<T*> rows;
    for (int64_t u = 0; u < call.U; u++)
      for (int64_t j = 0; j < count; j++) rows.push_back(at(p, u, width) + j * width);
    return rows;
  }

  // The cell (H,) that row j of step u reads.
  const T* cell_before(const Direction& own, int64_t u, int64_t j) const {
    if (u == 0) return memory.zeros.data();
    return this->at(call.swap ? own.h : own.c, u - 1, H) + j * H;
  }

  LookCall look_at(int64_t u) const {
    LookCall look = {};
    look.B = call.B, look.K = 1, look.T = call.T, look.A = call.A, look.C = call.C;
    look.W = call.W, look.threads = 1;
    look.keys = call.keys, look.v = call.v, look.place = call.place, look.conv = call.conv;
    look.valid = call.valid;
    look.wanted = in<T>(call.wanted) + u * call.B * call.A;
    const int64_t step = call.B * call.T;
    look.past_weights = u > 0 ? in<T>(call.weights) + (u - 1) * step : in<T>(call.first);
    look.past_total = u > 0 ? in<T>(call.total) + (u - 1) * step : in<T>(call.first);
    look.weights = out<T>(call.weights) + u * step, look.total = out<T>(call.total) + u * step;
    return look;
  }
};

template <class E> struct SpellForwardWeights {
  Panels<E> embedded, query;
  std::vector<Panels<E>> input, recurrent, states;  // of each layer twice, of each utterance
  LookWeights<Sum<E>> look;

  void from(const SpellCall& call) {
    using T = Sum<E>;
    const int64_t G = 4 * call.H;
    embedded.from_columns(in<T>(call.weight_embedded), call.M, G);
    query.from_columns(in<T>(call.weight_query), call.H, call.A);
    input.resize(call.L), recurrent.resize(call.L), states.resize(call.B);
    for (int64_t l = 0; l < call.L; l++) {
      const Direction& cell = call.layers[l].cell;
      input[l].from_columns(in<T>(cell.weight_ih), l > 0 ? call.H : call.E, G);
      recurrent[l].from_columns(in<T>(cell.weight_hh), call.H, G);
    }
    for (int64_t b = 0; b < call.B; b++) {
      auto rows = row_pointers(in<T>(call.states) + b * call.T * call.E, call.T, call.E);
      states[b].from_rows(rows.data(), call.T, call.E);
    }
    look.from(call);
  }
};

template <class E> class SpellForward : SpellWorker<E> {
  using Base = SpellWorker<E>;
  using T = Sum<E>;
  using Base::call, Base::memory, Base::low, Base::count, Base::H, Base::G;
  const SpellForwardWeights<E>& weights;

 public:
  SpellForward(const SpellCall& call_, int64_t block, const SpellForwardWeights<E>& packed)
      : Base(call_, block), weights(packed) {}

  void run() {
    const Direction& first = call.layers[0].cell;
    this->product(this->rows_of(call.embedded, call.M), weights.embedded,
                  this->rows_of(first.ax ? first.ax : first.ah, G), false);
    for (int64_t u = 0; u < call.U; u++) {
      for (int64_t l = 0; l < call.L; l++) run_layer(u, l);
      look_and_read(u);
    }
  }

 private:
  void run_layer(int64_t u, int64_t l) {
    const Direction& own = call.layers[l].cell;
    T* ah = this->at(own.ah, u, G);
    T* ax = own.ax ? this->at(own.ax, u, G) : ah;
    if (l > 0)
      this->product(this->at(call.layers[l - 1].shown, u, H), count, weights.input[l], ax, false);
    else if (u > 0)
      this->product(this->at(call.read, u - 1, call.E), count, weights.input[0], ax, true);
    if (u > 0)
      this->product(this->at(call.swap ? own.c : own.h, u - 1, H), count, weights.recurrent[l], ah,
                    !own.ax);
    else if (own.ax)
      std::fill_n(ah, count * G, T(0));
    run_cells(u, call.layers[l]);
  }

  void run_cells(int64_t u, const SpellLayer& layer) {
    const Direction& own = layer.cell;
    const Cell<T> cell = make_cell<T>(call, own);
    T *c = this->at(own.c, u, H), *h = this->at(own.h, u, H), *raw = this->at(own.raw, u, H);
    for (int64_t j = 0; j < count; j++)
      cell_forward(cell, own.ax ? this->at(own.ax, u, G) + j * G : nullptr,
                   this->at(own.ah, u, G) + j * G,
                   own.mask ? in<T>(own.mask) + (low + j) * H : nullptr,
                   this->cell_before(own, u, j), c + j * H, raw + j * H, h + j * H,
                   out<RowStats<T>>(own.stats)[u * call.B + low + j]);
    if (!layer.keep) return;
    const T* keep = this->at(layer.keep, u, H);
    T* shown = this->at(layer.shown, u, H);
    for (int64_t k = 0; k < count * H; k++) shown[k] = keep[k] * h[k];
  }

  void look_and_read(int64_t u) {
    const T* query = this->at(call.layers[call.L - 1].shown, u, H);
    this->product(query, count, weights.query, this->at(call.wanted, u, call.A), false);
    const LookCall look = this->look_at(u);
    LookForward<T> rows(look, weights.look);
    for (int64_t j = 0; j < count; j++) {
      rows.run(low + j);
      this->product(this->at(call.weights, u, call.T) + j * call.T, 1, weights.states[low + j],
                    this->at(call.read, u, call.E) + j * call.E, false);
    }
  }
};
