// One time step of some rows, for decoders; the matrix products are arguments.
#pragma once
#include "worker.h"

template <class T> RowStats<T>* stats_of(const Direction& own) { return out<RowStats<T>>(own.stats); }

template <class T> void step_forward(const Call& call) {
  const Direction& own = call.direction[0];
  const Cell<T> cell = make_cell<T>(call, own);
  const int64_t H = call.H, G = 4 * H;
  for (int64_t j = 0; j < call.B; j++)
    cell_forward(cell, own.ax ? in<T>(own.ax) + j * G : nullptr, in<T>(own.ah) + j * G,
                 own.mask ? in<T>(own.mask) + j * H : nullptr, in<T>(own.c0) + j * H,
                 out<T>(own.c) + j * H,
                 out<T>(own.raw) + j * H, out<T>(own.h) + j * H, stats_of<T>(own)[j]);
}

template <class T> void step_backward(const Call& call) {
  const Direction& own = call.direction[0];
  const Cell<T> cell = make_cell<T>(call, own);
  const int64_t H = call.H, G = 4 * H;
  const Grads<T> grads = grads_at(out<T>(own.dvectors), H);
  std::vector<T> scratch(kScratch * H);
  std::copy_n(in<T>(own.dc), call.B * H, out<T>(own.dc0));
  for (int64_t j = 0; j < call.B; j++) {
    const Row<T> row = {own.ax ? in<T>(own.ax) + j * G : nullptr,
                        in<T>(own.ah) + j * G,
                        in<T>(own.raw) + j * H,
                        in<T>(own.c0) + j * H,
                        own.mask ? in<T>(own.mask) + j * H : nullptr,
                        stats_of<T>(own)[j]};
    cell_backward(cell, row, in<T>(own.dh) + j * H, out<T>(own.dc0) + j * H,
                  own.dax ? out<T>(own.dax) + j * G : nullptr, out<T>(own.dah) + j * G, grads,
                  scratch.data());
  }
}
