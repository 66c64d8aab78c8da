// The LAS decoder over given tokens in one call: all steps of `Speller.advance` (asr/models/las.py,
// which has the equations), all layers of cells.
//
// A worker owns some utterances and never waits. Products with the embedding are computed for all
// steps at once; the matrices that each step multiplies by are packed before the first step.
#pragma once
#include "attention.h"
#include "worker.h"

extern "C" {
struct DecoderLayer {
  Direction cell;    // rows (U, B) of ax, ah, raw, stats, h, c, dax and dah; (B, H) of the mask
  const void* keep;  // (U, B, H): dropout's factors of h, or null
  void* output;      // (U, B, H): keep * h; may be h itself
};

struct DecoderCall {
  int64_t B, U, T, E, M, H, A, C, W, L;  // M: embedding size; else as in Python
  int64_t mode, rms, norm_c, show, carry, norm_h, swap, threads, blocks, forked;
  double eps;
  const DecoderLayer* layers;                  // layer 0: weight_ih has the context's columns
  const void *embedded;                        // (U, B, M)
  const void *weight_embedded, *weight_query;  // (4H, M), (A, H)
  const void *states, *keys, *first;           // (B, T, E), (B, T, A), (B, T): initial weights
  const void *v, *weight_loc, *conv;           // as in AttentionCall
  const bool* valid;                           // (B, T)
  void *query, *weights, *total, *context;     // (U, B, A), (U, B, T) twice, (U, B, E)
  const void *doutput, *dcontext, *dweights;   // of the last layer's output, of context and weights
  void *dcontext_sum;                          // (U, B, E): dcontext plus the next step's part
  void *dquery, *dembedded, *dstates, *dkeys;
  void *dweight_embedded, *dweight_query, *dv, *dweight_loc, *dconv;  // one for each block
};
}

// The part that both passes share, for a block of utterances: [low, low + count).
template <class E> class DecoderWorker {
 protected:
  using T = Sum<E>;
  const DecoderCall& call;
  const int64_t block, low, count, H, G;  // G: the width of all gates
  struct Memory {
    Rows<E> rows;
    std::vector<T> zeros;
  };
  Memory& memory = kept<Memory>();

  DecoderWorker(const DecoderCall& call_, int64_t block_)
      : call(call_), block(block_), low(block_ * call_.B / call_.blocks),
        count((block_ + 1) * call_.B / call_.blocks - low), H(call_.H), G(4 * call_.H) {
    memory.zeros.assign(std::max(call.E, H), T(0));
  }

  // The worker's rows of step u, of a tensor (U, B, width).
  const T* at(const void* p, int64_t u, int64_t width) const {
    return in<T>(p) + (u * call.B + low) * width;
  }
  T* at(void* p, int64_t u, int64_t width) const { return out<T>(p) + (u * call.B + low) * width; }

  // Contiguous rows (n, K) times a packed matrix (K, N).
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

  // The worker's rows of all steps, shifted `back` steps; rows before the first step are zeros.
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

  // The cell state (H,) that row j of step u starts from.
  const T* cell_before(const Direction& own, int64_t u, int64_t j) const {
    if (u == 0) return memory.zeros.data();
    return this->at(call.swap ? own.h : own.c, u - 1, H) + j * H;
  }

  AttentionCall attention_at(int64_t u) const {
    AttentionCall one = {};
    one.B = call.B, one.K = 1, one.T = call.T, one.A = call.A, one.C = call.C;
    one.W = call.W, one.threads = 1;
    one.keys = call.keys, one.v = call.v, one.weight_loc = call.weight_loc, one.conv = call.conv;
    one.valid = call.valid;
    one.query = in<T>(call.query) + u * call.B * call.A;
    const int64_t step = call.B * call.T;
    one.past_weights = u > 0 ? in<T>(call.weights) + (u - 1) * step : in<T>(call.first);
    one.past_total = u > 0 ? in<T>(call.total) + (u - 1) * step : in<T>(call.first);
    one.weights = out<T>(call.weights) + u * step, one.total = out<T>(call.total) + u * step;
    return one;
  }
};

template <class E> struct DecoderForwardWeights {
  Panels<E> embedded, query;
  std::vector<Panels<E>> input, recurrent, states;  // per layer, per layer, per utterance
  AttentionWeights<Sum<E>> attention;

  void from(const DecoderCall& call) {
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
    attention.from(call);
  }
};

template <class E> class DecoderForward : DecoderWorker<E> {
  using Base = DecoderWorker<E>;
  using T = Sum<E>;
  using Base::call, Base::memory, Base::low, Base::count, Base::H, Base::G;
  const DecoderForwardWeights<E>& weights;

 public:
  DecoderForward(const DecoderCall& call_, int64_t block, const DecoderForwardWeights<E>& packed)
      : Base(call_, block), weights(packed) {}

  void run() {
    const Direction& first = call.layers[0].cell;
    this->product(this->rows_of(call.embedded, call.M), weights.embedded,
                  this->rows_of(first.ax ? first.ax : first.ah, G), false);
    for (int64_t u = 0; u < call.U; u++) {
      for (int64_t l = 0; l < call.L; l++) run_layer(u, l);
      attend(u);
    }
  }

 private:
  void run_layer(int64_t u, int64_t l) {
    const Direction& own = call.layers[l].cell;
    T* ah = this->at(own.ah, u, G);
    T* ax = own.ax ? this->at(own.ax, u, G) : ah;
    if (l > 0)
      this->product(this->at(call.layers[l - 1].output, u, H), count, weights.input[l], ax, false);
    else if (u > 0)
      this->product(this->at(call.context, u - 1, call.E), count, weights.input[0], ax, true);
    if (u > 0)
      this->product(this->at(call.swap ? own.c : own.h, u - 1, H), count, weights.recurrent[l], ah,
                    !own.ax);
    else if (own.ax)
      std::fill_n(ah, count * G, T(0));
    run_cells(u, call.layers[l]);
  }

  void run_cells(int64_t u, const DecoderLayer& layer) {
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
    T* output = this->at(layer.output, u, H);
    for (int64_t k = 0; k < count * H; k++) output[k] = keep[k] * h[k];
  }

  void attend(int64_t u) {
    const T* query = this->at(call.layers[call.L - 1].output, u, H);
    this->product(query, count, weights.query, this->at(call.query, u, call.A), false);
    const AttentionCall attention = this->attention_at(u);
    AttentionForward<T> rows(attention, weights.attention);
    for (int64_t j = 0; j < count; j++) {
      rows.run(low + j);
      this->product(this->at(call.weights, u, call.T) + j * call.T, 1, weights.states[low + j],
                    this->at(call.context, u, call.E) + j * call.E, false);
    }
  }
};
