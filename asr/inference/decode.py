"""From features to hypotheses: encode a batch, in one or several models, and search.

Shapes: B utterances, T memory frames.
"""

from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor, nn

from asr.config.schema import BeamConfig, DecodeConfig
from asr.data.batching import Batch
from asr.data.tokenizer import Tokenizer
from asr.decoding.beam_search import beam_search
from asr.decoding.ctc import ctc_greedy
from asr.decoding.ctc_search import ctc_beam_search
from asr.decoding.scorer import Hypothesis, Scorer, check_not_nan, greedy
from asr.errors import UserError
from asr.nn.attention import Memory

Others = Sequence[tuple[nn.Module, Memory]]  # the utterances in other models or at other speeds


def is_greedy(config: BeamConfig) -> bool:
    """Whether the beam search over one model would be greedy search.

    Greedy search ignores length_penalty, token_reward and patience, by which a beam of 1 would
    continue after EOS. An eos_threshold of 1 or more rejects no EOS that is the likeliest token.
    """
    return (
        config.beam == 1
        and (config.eos_threshold is None or config.eos_threshold >= 1)
        and config.temperature == 1
        and not any((config.ngram, config.min_ratio, config.coverage_penalty, config.ctc_weight))
    )


@torch.no_grad()
def decode_memory(
    model: nn.Module,
    memory: Memory,
    decode: DecodeConfig,
    lm: Scorer | None = None,
    nbest: int = 1,
    others: Others = (),
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses of every utterance, best first, at least one.

    lm: from load_language_scorer; its weight is decode.lm_weight. others: the same utterances at
    other speeds or in other models; search=ctc ignores them. Raises UserError as the searches do.
    """
    if decode.search == "ctc":
        return _decode_ctc(model, memory, decode.beam, nbest)
    scorers = [(decode.lm_weight, lm)] if lm is not None and decode.lm_weight else []
    if is_greedy(decode) and not scorers and not others:
        return [[best] for best in greedy(model, memory, decode.max_ratio)]
    (_, _, ctc), *others = [
        (own, states, own.ctc(states) if decode.ctc_weight else None)
        for own, states in ((model, memory), *others)
    ]
    return beam_search(model, memory, decode, nbest=nbest, ctc=ctc, others=others, scorers=scorers)


def _decode_ctc(model: nn.Module, memory: Memory, beam: int, nbest: int) -> list[list[Hypothesis]]:
    """The CTC head alone: with a beam of 1 the best path, else prefix beam search."""
    log_probs = model.ctc(memory)
    if log_probs is None:
        raise UserError(
            "decode.search is ctc, but this model has no CTC head; set decode.search=beam"
        )
    check_not_nan(bool(log_probs[memory.valid].isnan().any()))
    if beam > 1:
        return ctc_beam_search(log_probs, memory.valid, beam, nbest=nbest)
    scores = log_probs.amax(dim=2).masked_fill(~memory.valid, 0.0).sum(dim=1).tolist()
    paths = ctc_greedy(log_probs, memory.valid)
    return [[Hypothesis(tuple(p), s, True)] for p, s in zip(paths, scores, strict=True)]


Self = TypeVar("Self", bound="SpeechDecoder")  # typing has its own from Python 3.11 on


class SpeechDecoder:
    """A model with its vocabulary and the search of a decode section.

    lm: from load_language_scorer. ensemble: models whose log-probabilities join the model's mean.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        decode: DecodeConfig,
        lm: Scorer | None = None,
        ensemble: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.tokenizer, self.decode, self.lm = model, tokenizer, decode, lm
        self.ensemble = tuple(ensemble)
        self.device = next(model.parameters()).device

    def to(self: Self, device: torch.device | str) -> Self:
        """Move all models to a device, such as "cuda:1"; errors as those of nn.Module.to."""
        for model in (self.model, self.lm, *self.ensemble):
            if isinstance(model, nn.Module):  # n-grams are on no device
                model.to(device)
        self.device = next(self.model.parameters()).device
        return self

    def encode(self, batch: Batch) -> Memory:
        """The model's memory at speed 1, without dropout."""
        return self._encode(self.model, batch.features, batch.lengths)

    def encode_other_speeds(self, batch: Batch) -> Others:
        """Every model of the ensemble with its memory at every speed, except that of `encode`."""
        _, *more = product((self.model, *self.ensemble), batch.all_speeds)
        return [(model, self._encode(model, *reading)) for model, reading in more]

    @torch.no_grad()
    def _encode(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Memory:
        model.eval()
        return model.encode(features.to(self.device, non_blocking=True), lengths)

    def hypotheses(self, memory: Memory, others: Others = ()) -> list[Hypothesis]:
        """The best hypothesis of every utterance."""
        ranked = decode_memory(self.model, memory, self.decode, self.lm, others=others)
        return [best for best, *_ in ranked]

    @torch.no_grad()
    def ctc_hypotheses(self, memory: Memory) -> list[Hypothesis]:
        """The CTC head's best paths, not scored; an empty list without a head."""
        log_probs = self.model.ctc(memory)
        if log_probs is None:
            return []
        return [Hypothesis(tuple(ids), 0.0, True) for ids in ctc_greedy(log_probs, memory.valid)]

    def text(self, hypothesis: Hypothesis) -> str:
        """The text of a hypothesis."""
        return self.tokenizer.decode(hypothesis.tokens)
