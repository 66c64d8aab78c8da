// The arguments from Python (asr/kernels/cpu/library.py mirrors the structures field by field), and
// the division of work: each worker owns one direction of some utterances and never waits.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

extern "C" {
struct Direction {
  const void *weight_ih, *weight_hh;                     // (4H, I), (4H, H)
  const void *bias, *gain_x, *gain_h, *gain_c, *bias_c, *gain_hidden, *bias_hidden;  // never null
  const void *h0, *c0, *mask;                            // (B, H); mask may be null
  void *h, *c;                                           // (B, H): the final state, or that of each step
  void *ax, *ah, *raw, *stats;  // saved: (rows, 4H) twice, (rows, H), (rows, 14); or null
  const void *dh, *dc;          // (B, H): gradient of the final state
  void *dh0, *dc0, *dx;         // (B, H) twice; dx (B, T, I) or null
  void *dweight_ih, *dweight_hh, *dvectors;  // (blocks, 4H, I), (blocks, 4H, H), (blocks, 16H)
  void *dax, *dah;              // (B, 4H) twice, of a single step
};

struct Call {
  int64_t B, T, I, H, D;
  int64_t mode, rms, norm_c, show, carry, norm_h, swap, threads, blocks, forked;
  double eps;
  const int64_t* lengths;       // (B,)
  const void* x;                // (B, T, I), the last dimension contiguous
  int64_t x_stride_b, x_stride_t;
  void* output;                 // (B, T, D * H); read in the backward pass
  const void* doutput;          // (B, T, D * H)
  Direction direction[2];
};
}

// The utterances of one worker, longest first, and the position of each time step's rows. Rows are
// the valid frames, ordered by time step.
struct Share {
  int d = 0;
  int64_t block = 0, base = 0, steps = 0;
  std::vector<int64_t> utterances, lengths;
  std::vector<int64_t> start, running;  // per time step

  int64_t time_of(int64_t step) const { return d == 0 ? step : steps - 1 - step; }
  int64_t rows() const { return start.empty() ? 0 : start.back() + running.back(); }
};

inline Share make_share(const Call& call, const std::vector<int64_t>& order, int d,
                        int64_t block) {
  Share share;
  share.d = d, share.block = block;
  for (int64_t k = block; k < call.B; k += call.blocks) {  // round robin balances the work
    share.utterances.push_back(order[k]);
    share.lengths.push_back(call.lengths[order[k]]);
  }
  share.steps = share.lengths.front();
  int64_t running = share.lengths.size(), start = 0;
  for (int64_t t = 0; t < share.steps; t++) {
    while (share.lengths[running - 1] <= t) running--;
    share.start.push_back(start);
    share.running.push_back(running);
    start += running;
  }
  return share;
}

inline std::vector<Share> make_shares(const Call& call) {
  std::vector<int64_t> order(call.B);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return call.lengths[a] > call.lengths[b]; });
  std::vector<Share> shares;
  for (int d = 0; d < call.D; d++) {
    int64_t base = 0;  // each direction has its own buffers
    for (int64_t block = 0; block < call.blocks; block++) {
      shares.push_back(make_share(call, order, d, block));
      shares.back().base = base;
      base += shares.back().rows();
    }
  }
  return shares;
}
