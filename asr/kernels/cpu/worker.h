// One worker: one direction of some utterances, all time steps, no barrier.
//
// E is the element of the matrix products (gemm.h), T the type of everything else.
#pragma once
#include "call.h"
#include "cell.h"
#include "gemm.h"
#include "parallel.h"

template <class T> const T* in(const void* p) { return static_cast<const T*>(p); }
template <class T> T* out(void* p) { return static_cast<T*>(p); }

// `call` holds the norms' options, which all layers share.
template <class T, class C> Cell<T> make_cell(const C& call, const Direction& w) {
  return {Mode(call.mode),
          call.rms != 0,
          call.norm_c != 0,
          call.show != 0,
          call.carry != 0,
          call.norm_h != 0,
          call.swap != 0,
          call.H,
          T(call.eps),
          in<T>(w.gain_x),
          in<T>(w.gain_h),
          in<T>(w.bias),
          in<T>(w.gain_c),
          in<T>(w.bias_c),
          in<T>(w.gain_hidden),
          in<T>(w.bias_hidden)};
}

template <class E> class Worker {
 protected:
  using T = Sum<E>;
  const Call& call;
  const Share& share;
  const Direction& own;
  const Cell<T> cell;
  const int64_t H, G;  // G: the width of all gates
  Rows<E>& rows = kept<Rows<E>>();

  Worker(const Call& call_, const Share& share_)
      : call(call_), share(share_), own(call_.direction[share_.d]),
        cell(make_cell<T>(call_, own)), H(call_.H), G(4 * call_.H) {}

  const T* x_row(int64_t j, int64_t t) const {
    return in<T>(call.x) + share.utterances[j] * call.x_stride_b + t * call.x_stride_t;
  }
  int64_t output_at(int64_t j, int64_t t) const {
    return (share.utterances[j] * call.T + t) * call.D * H + share.d * H;
  }
  const T* state_row(const void* state, int64_t j) const {
    return in<T>(state) + share.utterances[j] * H;
  }
  const T* mask_row(int64_t j) const { return own.mask ? state_row(own.mask, j) : nullptr; }
  bool split() const { return cell.mode == kSplit; }

  // Is t the first frame of utterance j in this direction?
  bool begins(int64_t j, int64_t t) const {
    return share.d == 0 ? t == 0 : t == share.lengths[j] - 1;
  }
  int64_t before(int64_t t) const { return share.d == 0 ? t - 1 : t + 1; }

  // Successive steps with at least `enough` rows, fewer in the last chunk.
  struct Chunk {
    int64_t first, last;         // steps [first, last)
    int64_t low, count;          // rows [low, low + count)
  };
  std::vector<Chunk> chunks(int64_t enough) const {
    std::vector<Chunk> all;
    for (int64_t s = 0; s < share.steps;) {
      Chunk chunk{s, s, 0, 0};
      while (s < share.steps && chunk.count < enough) chunk.count += share.running[share.time_of(s++)];
      chunk.last = s;
      chunk.low = share.start[std::min(share.time_of(chunk.first), share.time_of(s - 1))];
      all.push_back(chunk);
    }
    return all;
  }

  // Calls visit(row within the chunk, utterance j, time t).
  template <class Visit> void each_row(const Chunk& chunk, Visit visit) const {
    for (int64_t s = chunk.first; s < chunk.last; s++) {
      const int64_t t = share.time_of(s);
      for (int64_t j = 0; j < share.running[t]; j++) visit(share.start[t] - chunk.low + j, j, t);
    }
  }
};

template <class T> std::vector<T*> row_pointers(T* base, int64_t count, int64_t width) {
  std::vector<T*> rows(count);
  for (int64_t k = 0; k < count; k++) rows[k] = base + k * width;
  return rows;
}
