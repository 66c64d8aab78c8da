"""CTC decoding: the best path, and prefix scores for joint decoding.

A path has one label per frame; equal neighbours are merged and blanks dropped (Graves et al. 2006).

CTCPrefixScorer scores every next token of every hypothesis (Watanabe et al. 2017, Hybrid
CTC/Attention, algorithm 2). With y_t(c) the probability of c in frame t, and r^n_t(g), r^b_t(g)
those of all paths of exactly g in t frames that end in its last token or in blank:

    phi_t(h, c) = r^b_t(h)  if c is h's last token, else  r^n_t(h) + r^b_t(h)
    psi(h c)    = sum over t of phi_{t-1}(h, c) y_t(c)            (h c and any continuation)
    r^n_t(h c)  = (r^n_{t-1}(h c) + phi_{t-1}(h, c)) y_t(c)
    r^b_t(h c)  = (r^n_{t-1}(h c) + r^b_{t-1}(h c)) y_t(blank)

The paper loops over all frames for every candidate. We differ twice, with the same result: psi of
all candidates is one matrix product, since phi depends on c only where c repeats; and r, needed
only for the hypotheses that were selected, is a logcumsumexp over time. So no loop runs over time,
hypotheses or vocabulary. float64, since accumulated log-probabilities are large.

Shapes: B utterances, K hypotheses of each, T frames, V vocabulary, blank included.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr.data.tokenizer import BLANK, EOS
from asr.nn.attention import Memory, keeps_all

LEAST = -500.0  # smallest log-probability of a frame: its exp() is within the range of float64

# The CTC head alone -----------------------------------------------------------------------------


def collapse(path: list[int]) -> list[int]:
    """A path's labels -> its tokens: equal neighbours merged, blanks dropped."""
    neighbours = zip([BLANK, *path], path, strict=False)
    return [label for before, label in neighbours if label not in (before, BLANK)]


@torch.no_grad()
def ctc_greedy(log_probs: Tensor, valid: Tensor) -> list[list[int]]:
    """log_probs (B, T, V), valid (B, T) -> the tokens of each utterance's likeliest path."""
    paths = log_probs.argmax(dim=2).masked_fill(~valid, BLANK)
    return [collapse(path) for path in paths.tolist()]


# Prefix scores for joint decoding ---------------------------------------------------------------


class CTCFrames(NamedTuple):
    """Output of the CTC head, once per utterance."""

    logs: Tensor  # (B, V, T)
    probs: Tensor  # (B, T, V), 0 on padding
    valid: Tensor  # (B, T)


class PrefixState(NamedTuple):
    """Every hypothesis h: the probability of its paths by the number of frames they span."""

    frames: CTCFrames
    blank: Tensor  # (B, K, T + 1) log r^b
    either: Tensor  # (B, K, T + 1) log(r^n + r^b)
    prefix: Tensor  # (B, K) log psi(h)
    last: Tensor | None  # (B, K) last token; None before SOS


class CTCPrefixScorer:
    """A Scorer: log psi(h c) - log psi(h) for a token c, log P(h) - log psi(h) for EOS.

    So the scores of a sentence sum to its CTC log-probability log P(h), over all its paths.
    log_probs (B, T, V): of the CTC head.
    """

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def start(self, memory: Memory) -> PrefixState:
        """The empty prefix, whose paths are all blank; only memory.valid (B, T) is used."""
        valid = memory.valid
        assert valid.shape == self.log_probs.shape[:2], (valid.shape, self.log_probs.shape)
        logs = self.log_probs.double().clamp_min(LEAST)  # (B, T, V)
        probs = logs.exp().masked_fill(~valid[..., None], 0.0)
        frames = CTCFrames(logs.transpose(1, 2).contiguous(), probs, valid)
        blank = _cumulated(logs[:, None, :, BLANK])  # (B, 1, T + 1)
        return PrefixState(frames, blank, blank, blank[..., 0], None)

    def step(self, state: PrefixState, tokens: Tensor) -> tuple[Tensor, PrefixState]:
        """tokens (B, K), SOS first -> scores (B, K, V), next state."""
        if state.last is None:
            tokens = torch.full_like(tokens, BLANK)
        utterances = torch.arange(len(tokens), device=tokens.device)[:, None]
        logs = state.frames.logs[utterances, tokens]  # (B, K, T)
        if state.last is not None:
            state = _append(state, state.last, tokens, logs)
        state = state._replace(last=tokens)
        return _scores(state, tokens, logs), state

    def select(self, state: PrefixState, rows: Tensor) -> PrefixState:
        """rows (B', K'): numbers b * K + k of hypotheses."""
        utterances = rows[:, 0] // state.prefix.shape[1]
        frames = state.frames
        if not keeps_all(utterances, len(frames.valid)):  # copy V x T only when utterances leave
            frames = CTCFrames(*(values[utterances] for values in frames))
        selected = (values.flatten(0, 1)[rows] for values in state[1:] if values is not None)
        return PrefixState(frames, *selected)


def _append(state: PrefixState, last: Tensor, tokens: Tensor, logs: Tensor) -> PrefixState:
    """h -> h c, for c in tokens (B, K) with logs (B, K, T); last (B, K): the last tokens of h."""
    frames = state.frames
    phi = torch.where((tokens == last)[..., None], state.blank, state.either)[..., :-1]
    prefix = (phi + logs).masked_fill(~frames.valid[:, None], -torch.inf).logsumexp(dim=2)
    token = _solve(phi, logs)  # r^n
    blank = _solve(token[..., :-1], frames.logs[:, None, BLANK])
    return PrefixState(frames, blank, _logaddexp(token, blank), prefix, tokens)


def _scores(state: PrefixState, last: Tensor, logs: Tensor) -> Tensor:
    """last (B, K) tokens with their logs (B, K, T) -> (B, K, V)."""
    frames = state.frames
    padding = ~frames.valid[:, None]  # (B, 1, T)
    psi = _log_product(state.either[..., :-1].masked_fill(padding, -torch.inf), frames.probs)
    repeat = (state.blank[..., :-1] + logs).masked_fill(padding, -torch.inf)
    psi = psi.scatter(2, last[..., None], repeat.logsumexp(dim=2, keepdim=True))
    ends = frames.valid.sum(dim=1)[:, None, None].expand(-1, psi.shape[1], 1)  # (B, K, 1)
    psi[..., EOS] = state.either.gather(2, ends).squeeze(2)
    # All continuations of an impossible prefix are impossible; -inf - -inf would be NaN.
    prefix = state.prefix.masked_fill(state.prefix == -torch.inf, 0.0)
    return psi - prefix[..., None]


def _log_product(phi: Tensor, probs: Tensor) -> Tensor:
    """log(exp(phi) @ probs): phi (B, K, T), probs (B, T, V), none below exp(LEAST) -> (B, K, V)."""
    largest = phi.amax(dim=2, keepdim=True).nan_to_num(neginf=0.0)
    return ((phi - largest).exp() @ probs).log() + largest


def _solve(entering: Tensor, logs: Tensor) -> Tensor:
    """Solve r_t = (r_{t-1} + e_{t-1}) y_t, r_0 = 0, in logs: (B, K, T) each -> (B, K, T + 1).

    r_t = sum over s <= t of e_{s-1} y_s ... y_t, and the product is a difference of cumsums.
    """
    products = _cumulated(logs)
    sums = (entering - products[..., :-1]).logcumsumexp(dim=2)
    return pad(sums + products[..., 1:], (1, 0), value=-torch.inf)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), several times faster than torch.logaddexp on CPU."""
    larger = torch.maximum(a, b).nan_to_num(neginf=0.0)
    return ((a - larger).exp() + (b - larger).exp()).log() + larger


def _cumulated(logs: Tensor) -> Tensor:
    """(..., T) -> (..., T + 1): the sum over the first 0, 1, ..., T frames."""
    return pad(logs.cumsum(dim=-1), (1, 0))
