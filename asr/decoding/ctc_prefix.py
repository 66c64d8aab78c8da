"""CTC's opinion on every next token of every hypothesis, for joint decoding with attention.

Watanabe et al. 2017 (Hybrid CTC/Attention), algorithm 2. With y_t(c) the CTC probability of c in
frame t, and r^n_t(g), r^b_t(g) those of all paths that say exactly g in t frames and end in its
last token or in blank:

    phi_t(h, c) = r^b_t(h)  if c is h's last token, else  r^n_t(h) + r^b_t(h)
    psi(h c)    = sum over t of phi_{t-1}(h, c) y_t(c)                  (h c and anything after it)
    r^n_t(h c)  = (r^n_{t-1}(h c) + phi_{t-1}(h, c)) y_t(c)
    r^b_t(h c)  = (r^n_{t-1}(h c) + r^b_{t-1}(h c)) y_t(blank)

The paper walks all frames for every candidate. We differ twice, with the same result. psi of all
candidates is one product of matrices, for phi depends on c only where c repeats. And r is needed
only of the hypotheses that were chosen, where each recursion is a logcumsumexp over time. So
no loop runs over time, hypotheses or vocabulary. float64, as cumulated log-probs are large.

Shapes: B utterances, K hypotheses of each, T frames, V vocabulary, blank included.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr.nn.memory import Memory
from asr.tokens import BLANK, EOS

# A frame's log-prob below this counts as this: exp() stays above what float64 can hold.
LEAST = -500.0


class Frames(NamedTuple):
    """What the CTC head said of each utterance, once per utterance."""

    logs: Tensor  # (B, V, T)
    probs: Tensor  # (B, T, V), 0 on padding
    valid: Tensor  # (B, T)


class Prefixes(NamedTuple):
    """Every hypothesis h: the mass of its paths, by how many frames they have used."""

    frames: Frames
    blank: Tensor  # (B, K, T + 1) log r^b
    either: Tensor  # (B, K, T + 1) log(r^n + r^b)
    prefix: Tensor  # (B, K) log psi(h)
    last: Tensor | None  # (B, K) last token; None before SOS


class CTCPrefixScorer:
    """A Scorer over ctc (B, T, V) log-probs: log psi(h c) - log psi(h), EOS: log P(h) - log psi(h).

    A sentence's scores so add up to its CTC log-prob log P(h), of all paths that say it.
    """

    def __init__(self, ctc: Tensor) -> None:
        self.ctc = ctc

    def start(self, memory: Memory) -> Prefixes:
        """Only memory.valid (B, T) is read. -> the empty prefix: all blank so far."""
        assert memory.valid.shape == self.ctc.shape[:2], (memory.valid.shape, self.ctc.shape)
        logs = self.ctc.double().clamp_min(LEAST)  # (B, T, V)
        probs = logs.exp().masked_fill(~memory.valid[..., None], 0.0)
        frames = Frames(logs.transpose(1, 2).contiguous(), probs, memory.valid)
        blank = _before(logs[:, None, :, BLANK])  # (B, 1, T + 1)
        return Prefixes(frames, blank, blank, blank[..., 0], None)

    def step(self, state: Prefixes, tokens: Tensor) -> tuple[Tensor, Prefixes]:
        """tokens (B, K), SOS first -> scores (B, K, V), Prefixes."""
        if state.last is None:
            tokens = torch.full_like(tokens, BLANK)
        logs = _logs_of(state.frames, tokens)  # (B, K, T)
        if state.last is not None:
            state = _extended(state, state.last, tokens, logs)
        state = state._replace(last=tokens)
        return _scores(state, tokens, logs), state

    def select(self, state: Prefixes, rows: Tensor) -> Prefixes:
        """rows (B', K') number old hypotheses b * K + k."""
        utterances = rows[:, 0] // state.prefix.shape[1]
        frames = state.frames
        everyone = torch.arange(len(frames.valid), device=rows.device)
        if not torch.equal(utterances, everyone):  # copy V x T only when utterances leave
            frames = Frames(*(kept[utterances] for kept in frames))
        moved = (kept.flatten(0, 1)[rows] for kept in state[1:] if kept is not None)
        return Prefixes(frames, *moved)


def _extended(state: Prefixes, last: Tensor, tokens: Tensor, logs: Tensor) -> Prefixes:
    """h -> h c, for c in tokens (B, K) with their logs (B, K, T); last (B, K) ends h."""
    frames = state.frames
    phi = torch.where((tokens == last)[..., None], state.blank, state.either)[..., :-1]
    prefix = (phi + logs).masked_fill(~frames.valid[:, None], -torch.inf).logsumexp(dim=2)
    token = _accumulated(phi, logs)  # r^n
    blank = _accumulated(token[..., :-1], frames.logs[:, None, BLANK])
    return Prefixes(frames, blank, _added(token, blank), prefix, tokens)


def _scores(state: Prefixes, last: Tensor, logs: Tensor) -> Tensor:
    """last (B, K) tokens with their logs (B, K, T) -> (B, K, V)."""
    frames = state.frames
    padding = ~frames.valid[:, None]  # (B, 1, T)
    psi = _mixed(state.either[..., :-1].masked_fill(padding, -torch.inf), frames.probs)
    repeat = (state.blank[..., :-1] + logs).masked_fill(padding, -torch.inf)
    psi = psi.scatter(2, last[..., None], repeat.logsumexp(dim=2, keepdim=True))
    ends = frames.valid.sum(dim=1)[:, None, None].expand(-1, psi.shape[1], 1)  # (B, K, 1)
    psi[..., EOS] = state.either.gather(2, ends).squeeze(2)
    # An impossible prefix has only impossible continuations, where -inf - -inf would be NaN.
    known = state.prefix.masked_fill(state.prefix == -torch.inf, 0.0)
    return psi - known[..., None]


def _mixed(phi: Tensor, probs: Tensor) -> Tensor:
    """log(exp(phi) @ probs): phi (B, K, T), probs (B, T, V) -> (B, K, V).

    What underflows beside phi's largest frame is lost beside that frame's own share too, as
    no probability is below exp(LEAST).
    """
    largest = phi.amax(dim=2, keepdim=True).nan_to_num(neginf=0.0)
    return ((phi - largest).exp() @ probs).log() + largest


def _accumulated(entering: Tensor, logs: Tensor) -> Tensor:
    """Solve r_t = (r_{t-1} + e_{t-1}) y_t, r_0 = 0, in logs: (B, K, T) each -> (B, K, T + 1).

    r_t = sum over s <= t of e_{s-1} y_s ... y_t, and the product is a difference of cumsums.
    """
    products = _before(logs)
    sums = (entering - products[..., :-1]).logcumsumexp(dim=2)
    return pad(sums + products[..., 1:], (1, 0), value=-torch.inf)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), several times faster than torch.logaddexp on CPU."""
    larger = torch.maximum(a, b).nan_to_num(neginf=0.0)
    return ((a - larger).exp() + (b - larger).exp()).log() + larger


def _before(logs: Tensor) -> Tensor:
    """(..., T) -> (..., T + 1): the sum of all frames before each point in time."""
    return pad(logs.cumsum(dim=-1), (1, 0))


def _logs_of(frames: Frames, tokens: Tensor) -> Tensor:
    """tokens (B, K) -> their log-probs over time (B, K, T)."""
    utterances = torch.arange(len(tokens), device=tokens.device)[:, None]
    return frames.logs[utterances, tokens]
