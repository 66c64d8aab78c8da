// The entry points of attention that Python calls (asr/nn/kernels/cpu/attention.py).
#include "attention_backward.h"

template <class T> const LookWeights<T>& packed(const LookCall& call) {
  auto& weights = kept<LookWeights<T>>();
  weights.from(call);
  return weights;
}

template <class T> void look_forward(const LookCall& call) {
  const LookWeights<T>& weights = packed<T>(call);
  in_parallel(call.threads, call.threads, call.forked, [&](int64_t thread) {
    LookForward<T> look(call, weights);
    for (int64_t row = thread; row < call.B * call.K; row += call.threads) look.run(row);
  });
}

template <class T> void look_backward(const LookCall& call) {
  const LookWeights<T>& weights = packed<T>(call);
  in_parallel(call.threads, call.threads, call.forked,
              [&](int64_t thread) { LookBackward<T>(call, weights).run(thread); });
}

extern "C" {
int64_t look_call_size() { return sizeof(LookCall); }

void look_forward(const LookCall* call, int kind) {
  kind == 1 ? look_forward<double>(*call) : look_forward<float>(*call);
}
void look_backward(const LookCall* call, int kind) {
  kind == 1 ? look_backward<double>(*call) : look_backward<float>(*call);
}
}
