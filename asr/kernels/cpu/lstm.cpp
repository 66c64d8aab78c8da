// Entry points of the LSTM for Python (asr/kernels/cpu/lstm.py). Plain C without torch headers
// compiles in seconds and works with every version of torch.
#include <array>

#include "backward.h"
#include "forward.h"
#include "step.h"

template <class E> void run_forward(const Call& call) {
  auto& packed = kept<std::array<ForwardWeights<E>, 2>>();
  in_parallel(2 * call.D, call.threads, call.forked, [&](int64_t k) {
    const Direction& own = call.direction[k / 2];
    if (k % 2 == 0)
      packed[k / 2].input.from_columns(in<Sum<E>>(own.weight_ih), call.I, 4 * call.H);
    else
      packed[k / 2].recurrent.from_columns(in<Sum<E>>(own.weight_hh), call.H, 4 * call.H);
  });
  auto shares = make_shares(call);
  in_parallel(shares.size(), call.threads, call.forked,
              [&](int64_t k) { Forward<E>(call, shares[k], packed[shares[k].d]).run(); });
}

template <class E> void run_backward(const Call& call) {
  using T = Sum<E>;
  auto& packed = kept<std::array<BackwardWeights<E>, 2>>();
  in_parallel(2 * call.D, call.threads, call.forked, [&](int64_t k) {
    const Direction& own = call.direction[k / 2];
    const bool input = k % 2 == 0;
    const int64_t width = input ? call.I : call.H;
    auto rows = row_pointers<const T>(in<T>(input ? own.weight_ih : own.weight_hh), 4 * call.H,
                                      width);
    (input ? packed[k / 2].input : packed[k / 2].recurrent)
        .from_rows(rows.data(), 4 * call.H, width);
  });
  auto shares = make_shares(call);
  in_parallel(shares.size(), call.threads, call.forked,
              [&](int64_t k) { Backward<E>(call, shares[k], packed[shares[k].d]).run(); });
}

extern "C" {
int64_t lstm_call_size() { return sizeof(Call); }

int lstm_has_bf16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

void lstm_forward(const Call* call, int kind) { EACH_KIND(run_forward) }
void lstm_backward(const Call* call, int kind) { EACH_KIND(run_backward) }

void lstm_step_forward(const Call* call, int kind) {
  kind == 1 ? step_forward<double>(*call) : step_forward<float>(*call);
}
void lstm_step_backward(const Call* call, int kind) {
  kind == 1 ? step_backward<double>(*call) : step_backward<float>(*call);
}
}
