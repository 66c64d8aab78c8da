// Entry points of attention for Python (asr/kernels/cpu/decoder.py).
#include "attention_backward.h"

template <class T> const AttentionWeights<T>& packed(const AttentionCall& call) {
  auto& weights = kept<AttentionWeights<T>>();
  weights.from(call);
  return weights;
}

template <class T> void attention_forward(const AttentionCall& call) {
  const AttentionWeights<T>& weights = packed<T>(call);
  in_parallel(call.threads, call.threads, call.forked, [&](int64_t thread) {
    AttentionForward<T> attention(call, weights);
    for (int64_t row = thread; row < call.B * call.K; row += call.threads) attention.run(row);
  });
}

template <class T> void attention_backward(const AttentionCall& call) {
  const AttentionWeights<T>& weights = packed<T>(call);
  in_parallel(call.threads, call.threads, call.forked,
              [&](int64_t thread) { AttentionBackward<T>(call, weights).run(thread); });
}

extern "C" {
int64_t attention_call_size() { return sizeof(AttentionCall); }

void attention_forward(const AttentionCall* call, int kind) {
  kind == 1 ? attention_forward<double>(*call) : attention_forward<float>(*call);
}
void attention_backward(const AttentionCall* call, int kind) {
  kind == 1 ? attention_backward<double>(*call) : attention_backward<float>(*call);
}
}
