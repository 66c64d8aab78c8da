// Entry points of the decoder for Python (asr/kernels/cpu/decoder.py).
#include "decoder_backward.h"

template <class E, template <class> class Packed, template <class> class Pass>
void run_blocks(const DecoderCall& call) {
  auto& weights = kept<Packed<E>>();
  weights.from(call);
  in_parallel(call.blocks, call.threads, call.forked,
              [&](int64_t block) { Pass<E>(call, block, weights).run(); });
}

template <class E> void run_forward(const DecoderCall& call) {
  run_blocks<E, DecoderForwardWeights, DecoderForward>(call);
}
template <class E> void run_backward(const DecoderCall& call) {
  run_blocks<E, DecoderBackwardWeights, DecoderBackward>(call);
}

extern "C" {
int64_t decoder_call_size() { return sizeof(DecoderCall); }
int64_t decoder_layer_size() { return sizeof(DecoderLayer); }

void decoder_forward(const DecoderCall* call, int kind) { EACH_KIND(run_forward) }
void decoder_backward(const DecoderCall* call, int kind) { EACH_KIND(run_backward) }
}
