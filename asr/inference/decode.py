"""From features to hypotheses: encode a batch, in one or several models, and search.

Shapes: B utterances, T memory frames, U tokens, V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.config.schema import BeamConfig, DecodeConfig
from asr.data.batching import Batch
from asr.data.tokenizer import BLANK
from asr.decoding.alignment import teacher_forced_attention
from asr.decoding.beam_search import beam_search
from asr.decoding.ctc import ctc_greedy
from asr.decoding.ctc_search import ctc_beam_search, ctc_gains
from asr.decoding.scorer import Hypothesis, Scorer, check_not_nan, greedy
from asr.nn.attention import Memory

NO_SPEECH = Hypothesis((), 0.0, True)


class Encoded:
    """A batch of utterances at one speed, encoded by one model."""

    def __init__(self, model: nn.Module, memory: Memory) -> None:
        self.model, self.memory = model, memory

    @cached_property
    def ctc(self) -> Tensor | None:
        """Log-probabilities (B, T, V) of the CTC head, computed once; None without a head."""
        with torch.no_grad():
            return self.model.ctc(self.memory)


@torch.no_grad()
def encode(models: Sequence[nn.Module], batch: Batch) -> list[Encoded]:
    """The batch in every model at every speed, without dropout; first in models[0] at speed 1."""
    encoded = []
    for model, (features, lengths) in product(models, batch.all_speeds):
        model.eval()
        device = next(model.parameters()).device
        memory = model.encode(features.to(device, non_blocking=True), lengths)
        encoded.append(Encoded(model, memory))
    return encoded


def is_greedy(config: BeamConfig) -> bool:
    """Whether the beam search over one model would be greedy search.

    Greedy search ignores length_penalty and token_reward, by which a beam of 1 would continue after
    EOS. An eos_threshold of 1 or more rejects no EOS that is the likeliest token.
    """
    return (
        config.beam == 1
        and (config.eos_threshold is None or config.eos_threshold >= 1)
        and not config.ctc_weight
    )


@torch.no_grad()
def best_hypotheses(
    encoded: Sequence[Encoded], decode: DecodeConfig, lm: Scorer | None = None, nbest: int = 1
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses of every utterance, best first, at least one.

    encoded: the mean of their log-probabilities is searched; search=ctc takes the first alone. lm:
    from load_language_scorer; its weight is decode.lm_weight. Raises UserError as the searches do.
    """
    first, *others = encoded
    if decode.search == "ctc":
        return _ctc_search(first, decode.beam, nbest)
    scorers = [(decode.lm_weight, lm)] if lm is not None and decode.lm_weight else []
    if is_greedy(decode) and not scorers and not others:
        return [[best] for best in greedy(first.model, first.memory, decode.max_ratio)]
    (model, memory, ctc), *others = [
        (each.model, each.memory, each.ctc if decode.ctc_weight else None) for each in encoded
    ]
    return beam_search(model, memory, decode, nbest=nbest, ctc=ctc, others=others, scorers=scorers)


def _ctc_search(encoded: Encoded, beam: int, nbest: int) -> list[list[Hypothesis]]:
    """The CTC head alone: with a beam of 1 the best path, else prefix beam search."""
    log_probs, valid = encoded.ctc, encoded.memory.valid
    check_not_nan(bool(log_probs[valid].isnan().any()))
    if beam > 1:
        return ctc_beam_search(log_probs, valid, beam, nbest=nbest)
    scores = log_probs.amax(dim=2).masked_fill(~valid, 0.0).sum(dim=1).tolist()
    paths = ctc_greedy(log_probs, valid)
    return [[Hypothesis(tuple(p), s, True)] for p, s in zip(paths, scores, strict=True)]


@torch.no_grad()
def drop_hallucinations(
    encoded: Encoded, hypotheses: Sequence[Hypothesis], threshold: float | None
) -> list[Hypothesis]:
    """The hypotheses, empty where decode.no_speech_log_prob judges that there is no speech."""
    unsure = [threshold is not None and _mean(best.log_probs) < threshold for best in hypotheses]
    if not any(unsure) or encoded.ctc is None:
        return list(hypotheses)
    gains = ctc_gains(encoded.ctc, encoded.memory.valid, [best.tokens for best in hypotheses])
    return [
        NO_SPEECH if doubt and gain < 0 else best
        for best, doubt, gain in zip(hypotheses, unsure, gains, strict=True)
    ]


def _mean(log_probs: Sequence[float]) -> float:
    """0 for none, as after a search of the CTC head alone."""
    return sum(log_probs) / max(len(log_probs), 1)


@torch.no_grad()
def ctc_hypotheses(encoded: Encoded) -> list[Hypothesis]:
    """The CTC head's best paths, not scored; an empty list without a head."""
    if encoded.ctc is None:
        return []
    paths = ctc_greedy(encoded.ctc, encoded.memory.valid)
    return [Hypothesis(tuple(ids), 0.0, True) for ids in paths]


def attention(encoded: Encoded, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """Attention weights (U + 1, T) for U tokens of each utterance, with a last row for EOS."""
    rows = [torch.tensor(ids, dtype=torch.long) for ids in tokens]
    padded = pad_sequence(rows, batch_first=True, padding_value=BLANK)
    lengths = torch.tensor([len(ids) for ids in tokens])
    return teacher_forced_attention(encoded.model, encoded.memory, padded, lengths)
