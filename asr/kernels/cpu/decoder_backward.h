// Backward pass of decoder.h: first the steps in reverse, then the gradients that are products over
// all steps.
#pragma once
#include "attention_backward.h"
#include "decoder.h"

template <class E> struct DecoderBackwardWeights {
  Panels<E> embedded, query;
  std::vector<Panels<E>> input, recurrent, states;
  AttentionWeights<Sum<E>> attention;

  void from(const DecoderCall& call) {
    using T = Sum<E>;
    from_matrix(embedded, call.weight_embedded, 4 * call.H, call.M);
    from_matrix(query, call.weight_query, call.A, call.H);
    input.resize(call.L), recurrent.resize(call.L), states.resize(call.B);
    for (int64_t l = 0; l < call.L; l++) {
      const Direction& cell = call.layers[l].cell;
      from_matrix(input[l], cell.weight_ih, 4 * call.H, l > 0 ? call.H : call.E);
      from_matrix(recurrent[l], cell.weight_hh, 4 * call.H, call.H);
    }
    for (int64_t b = 0; b < call.B; b++)
      states[b].from_columns(in<T>(call.states) + b * call.T * call.E, call.E, call.T);
    attention.from(call);
  }

 private:
  static void from_matrix(Panels<E>& panels, const void* matrix, int64_t rows, int64_t width) {
    auto pointers = row_pointers(in<Sum<E>>(matrix), rows, width);
    panels.from_rows(pointers.data(), rows, width);
  }
};

template <class E> class DecoderBackward : DecoderWorker<E> {
  using Base = DecoderWorker<E>;
  using T = Sum<E>;
  using Base::call, Base::block, Base::low, Base::count, Base::H, Base::G;
  static constexpr int64_t kEnough = 512;  // rows whose product fits in the cache

  const DecoderBackwardWeights<E>& weights;
  struct Memory {
    std::vector<T> dh, dc;                     // (L, count, H): from the next step
    std::vector<T> doutput, dcontext;          // (count, H), (count, E): from the next step
    std::vector<T> dattention, dpast, dtotal;  // (B, T): of the weights; from the next step
    std::vector<T> scratch;
    Panels<E> panels;
    Blocks<E> blocks;
  };
  Memory& own = kept<Memory>();

 public:
  DecoderBackward(const DecoderCall& call_, int64_t block_, const DecoderBackwardWeights<E>& packed)
      : Base(call_, block_), weights(packed) {}

  void run() {
    clear();
    AttentionCall step = attention_gradients(call.U - 1);
    AttentionBackward<T> attention(step, weights.attention);
    attention.begin();
    for (int64_t u = call.U - 1; u >= 0; u--) {
      gradient_of_context(u);
      step = attention_gradients(u);
      for (int64_t j = 0; j < count; j++) attention.run_row(low + j, 0, u == call.U - 1);
      through_query(u);
      for (int64_t l = call.L - 1; l >= 0; l--) through_layer(u, l);
    }
    attention.write_weights(block);
    weight_gradients();
    this->product(this->rows_of(dgates(0), G), weights.embedded,
                  this->rows_of(call.dembedded, call.M), false);
    for (int64_t j = 0; j < count; j++) state_gradient(low + j);
  }

 private:
  void clear() {
    own.dh.assign(call.L * count * H, T(0)), own.dc.assign(call.L * count * H, T(0));
    own.dcontext.assign(count * call.E, T(0)), own.doutput.resize(count * H);
    own.scratch.resize(kScratch * H), own.dattention.resize(call.B * call.T);
    own.dpast.assign(call.B * call.T, T(0)), own.dtotal.assign(call.B * call.T, T(0));
  }

  // The context enters the next step; it is the memory's sum weighted by attention.
  void gradient_of_context(int64_t u) {
    T* dcontext_sum = this->at(call.dcontext_sum, u, call.E);
    const T* dcontext = this->at(call.dcontext, u, call.E);
    for (int64_t k = 0; k < count * call.E; k++) dcontext_sum[k] = dcontext[k] + own.dcontext[k];
    const T* dweights = this->at(call.dweights, u, call.T);
    const int64_t from = low * call.T;
    for (int64_t k = 0; k < count * call.T; k++)
      own.dattention[from + k] = dweights[k] + own.dpast[from + k];
    for (int64_t j = 0; j < count; j++)
      this->product(dcontext_sum + j * call.E, 1, weights.states[low + j],
                    &own.dattention[from + j * call.T], true);
  }

  AttentionCall attention_gradients(int64_t u) {
    AttentionCall attention = this->attention_at(u);
    attention.dweights = own.dattention.data(), attention.dtotal = own.dtotal.data();
    attention.dkeys = call.dkeys, attention.dquery = out<T>(call.dquery) + u * call.B * call.A;
    attention.dv = call.dv, attention.dweight_loc = call.dweight_loc, attention.dconv = call.dconv;
    attention.dpast_weights = own.dpast.data(), attention.dpast_total = own.dtotal.data();
    return attention;
  }

  void through_query(int64_t u) {
    std::copy_n(this->at(call.doutput, u, H), count * H, own.doutput.data());
    this->product(this->at(call.dquery, u, call.A), count, weights.query, own.doutput.data(), true);
  }

  // doutput becomes the gradient of the layer below; layer 0 sets dcontext of the previous step.
  void through_layer(int64_t u, int64_t l) {
    const DecoderLayer& layer = call.layers[l];
    const Direction& w = layer.cell;
    const Cell<T> cell = make_cell<T>(call, w);
    T *dh = &own.dh[l * count * H], *dc = &own.dc[l * count * H];
    const Grads<T> grads = grads_at(out<T>(w.dvectors) + block * kVectorRows * H, H);
    const T* keep = layer.keep ? this->at(layer.keep, u, H) : nullptr;
    for (int64_t k = 0; k < count * H; k++) dh[k] += own.doutput[k] * (keep ? keep[k] : T(1));
    for (int64_t j = 0; j < count; j++)
      cell_backward(cell, saved_row(u, w, j), dh + j * H, dc + j * H,
                    w.dax ? this->at(w.dax, u, G) + j * G : nullptr,
                    this->at(w.dah, u, G) + j * G, grads, own.scratch.data());
    if (call.swap) std::copy_n(dc, count * H, dh);
    this->product(this->at(w.dah, u, G), count, weights.recurrent[l], call.swap ? dc : dh, false);
    this->product(this->at(dgates(l), u, G), count, weights.input[l],
                  l > 0 ? own.doutput.data() : own.dcontext.data(), false);
  }

  Row<T> saved_row(int64_t u, const Direction& w, int64_t j) const {
    return {w.ax ? this->at(w.ax, u, G) + j * G : nullptr,
            this->at(w.ah, u, G) + j * G,
            this->at(w.raw, u, H) + j * H,
            this->cell_before(w, u, j),
            w.mask ? in<T>(w.mask) + (low + j) * H : nullptr,
            in<RowStats<T>>(w.stats)[u * call.B + low + j]};
  }

  // Gradient of the product with a layer's input, which may share a sum with the recurrent one.
  const void* dgates(int64_t l) const {
    const Direction& w = call.layers[l].cell;
    return w.dax ? w.dax : w.dah;
  }

  void weight_gradients() {
    for (int64_t l = 0; l < call.L; l++) {
      const Direction& w = call.layers[l].cell;
      auto dax = this->rows_of(dgates(l), G);
      if (l == 0) {
        add_product(dax, G, this->rows_of(call.embedded, call.M), call.M, call.dweight_embedded);
        add_product(dax, G, this->rows_of(call.context, call.E, 1), call.E, w.dweight_ih);
      } else {
        add_product(dax, G, this->rows_of(output(l - 1), H), H, w.dweight_ih);
      }
      add_product(this->rows_of((const void*)w.dah, G), G,
                  this->rows_of(call.swap ? w.c : w.h, H, 1), H, w.dweight_hh);
    }
    add_product(this->rows_of((const void*)call.dquery, call.A), call.A,
                this->rows_of(output(call.L - 1), H), H, call.dweight_query);
  }
  const void* output(int64_t l) const { return call.layers[l].output; }

  // The block's part of `to` (blocks, M, N) += a^T b, for rows (M) of a and (N) of b.
  void add_product(const std::vector<const T*>& a, int64_t M, const std::vector<const T*>& b,
                   int64_t N, void* to) {
    auto targets = row_pointers(out<T>(to) + block * M * N, M, N);
    for (size_t first = 0; first < a.size(); first += kEnough) {
      const int64_t rows = std::min<int64_t>(kEnough, a.size() - first);
      add_rows(&a[first], M, &b[first], N, rows, targets, true);
    }
  }
  void add_rows(const T* const* a, int64_t M, const T* const* b, int64_t N, int64_t rows,
                const std::vector<T*>& to, bool accumulate) {
    own.blocks.from_rows(a, rows, M);
    own.panels.from_rows(b, rows, N);
    multiply<E, Blocks<E>::kStride>(own.blocks.columns.data(), M, own.panels, to.data(),
                                    accumulate);
  }

  void state_gradient(int64_t b) {
    std::vector<const T*> all_weights, dcontexts;
    for (int64_t u = 0; u < call.U; u++) {
      all_weights.push_back(in<T>(call.weights) + (u * call.B + b) * call.T);
      dcontexts.push_back(in<T>(call.dcontext_sum) + (u * call.B + b) * call.E);
    }
    auto to = row_pointers(out<T>(call.dstates) + b * call.T * call.E, call.T, call.E);
    add_rows(all_weights.data(), call.T, dcontexts.data(), call.E, call.U, to, false);
  }
};
