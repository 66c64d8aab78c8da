// The entry points of a spelled transcript that Python calls (asr/nn/kernels/cpu/spell.py).
#include "spell_backward.h"

template <class E, template <class> class Packed, template <class> class Pass>
void run_blocks(const SpellCall& call) {
  auto& weights = kept<Packed<E>>();
  weights.from(call);
  in_parallel(call.blocks, call.threads, call.forked,
              [&](int64_t block) { Pass<E>(call, block, weights).run(); });
}

template <class E> void run_forward(const SpellCall& call) {
  run_blocks<E, SpellForwardWeights, SpellForward>(call);
}
template <class E> void run_backward(const SpellCall& call) {
  run_blocks<E, SpellBackwardWeights, SpellBackward>(call);
}

extern "C" {
int64_t spell_call_size() { return sizeof(SpellCall); }
int64_t spell_layer_size() { return sizeof(SpellLayer); }

void spell_forward(const SpellCall* call, int kind) { EACH_KIND(run_forward) }
void spell_backward(const SpellCall* call, int kind) { EACH_KIND(run_backward) }
}
