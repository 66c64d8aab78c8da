"""Sentences by the CTC head alone: prefix beam search, and sentences compared with silence.

A sentence's probability is the sum over all its paths, so the likeliest sentence need not be that
of the likeliest path. Prefix beam search (Hannun et al. 2014, algorithm 1) goes through the frames
and keeps, for each of the best prefixes, the probability of its paths that end in blank and of
those that end in its last token.

Shapes: B utterances, K prefixes of one, C labels tried in a frame, T frames, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence

from asr.data.tokenizer import BLANK
from asr.decoding.ctc import LEAST
from asr.decoding.scorer import Hypothesis


@torch.no_grad()
def ctc_beam_search(
    log_probs: Tensor, valid: Tensor, beam: int, *, nbest: int = 1, tokens: int = 20
) -> list[list[Hypothesis]]:
    """log_probs (B, T, V), valid (B, T) -> each utterance's nbest sentences, best first.

    score is the log-probability of all paths of the sentence that the beam kept. In each frame only
    blank and the `tokens` likeliest labels are tried.
    """
    best = log_probs.topk(min(tokens, log_probs.shape[2]), dim=2)
    columns = [
        kept.cpu().double().clamp_min(LEAST).numpy()
        for kept in (log_probs[..., BLANK], best.values)
    ]
    indices = best.indices.cpu().numpy()
    results = []
    for b, length in enumerate(valid.sum(dim=1).tolist()):
        search = _PrefixSearch(beam)
        for blank, scores, labels in zip(
            *(column[b, :length] for column in (*columns, indices)), strict=True
        ):
            real = labels != BLANK
            search.step(blank, labels[real], scores[real])
        results.append(search.best(nbest))
    return results


@torch.no_grad()
def ctc_gains(log_probs: Tensor, valid: Tensor, sentences: Sequence[Sequence[int]]) -> list[float]:
    """log_probs (B, T, V), valid (B, T) -> log P(sentence) - log P(no token at all) of each.

    -inf for tokens that do not fit into the frames.
    """
    log_probs = log_probs.float()
    lengths = torch.tensor([len(tokens) for tokens in sentences])
    targets = pad_sequence(
        [torch.tensor([*tokens, BLANK]) for tokens in sentences], batch_first=True
    )
    losses = ctc_loss(
        log_probs.transpose(0, 1),
        targets.to(log_probs.device),
        valid.sum(dim=1),
        lengths.to(log_probs.device),
        reduction="none",
    )
    empty = log_probs[..., BLANK].masked_fill(~valid, 0.0).sum(dim=1)
    return (-losses - empty).tolist()


class _PrefixSearch:
    """Prefix beam search on one utterance. A prefix is a node of a tree, its tokens the way there.

    A frame takes a fixed number of array operations on K prefixes times C labels, and a look-up in
    the tree for each prefix that has grown.
    """

    def __init__(self, beam: int) -> None:
        self.beam = beam
        self.tree = [(-1, BLANK)]  # node -> parent, last token; 0 is the empty prefix
        self.children: dict[tuple[int, int], int] = {}  # parent, token -> node
        self.nodes, self.parents = np.array([0]), np.array([-1])  # (K,)
        self.last = np.array([BLANK])  # (K,)
        # Log-probabilities (K,) of the paths that end in blank, and in the last token.
        self.blank, self.token = np.array([0.0]), np.array([-np.inf])

    def step(self, blank: float, labels: np.ndarray, scores: np.ndarray) -> None:
        """Every prefix takes a blank, its last token again, or a new token of `labels` (C,)."""
        K, C = len(self.nodes), len(labels)
        either = np.logaddexp(self.blank, self.token)
        repeats = self.last[:, None] == labels  # (K, C)
        again = np.where(repeats, scores, -np.inf).max(axis=1, initial=-np.inf)
        in_blank, in_token = either + blank, self.token + again  # (K,)
        # A token is repeated only after a blank.
        grown = np.where(repeats, self.blank[:, None], either[:, None]) + scores  # (K, C)
        # A prefix that grows into another of the beam joins it.
        parents, positions = self._parents_in_beam()
        known, columns = repeats[positions].nonzero()
        parents, positions = parents[known], positions[known]
        in_token[positions] = np.logaddexp(in_token[positions], grown[parents, columns])
        grown[parents, columns] = -np.inf

        totals = np.concatenate([np.logaddexp(in_blank, in_token), grown.ravel()])
        kept = np.arange(len(totals))
        if len(totals) > self.beam:
            kept = np.argpartition(-totals, self.beam - 1)[: self.beam]
        kept = kept[totals[kept] > -np.inf]
        same = kept[kept < K]
        before, columns = np.divmod(kept[kept >= K] - K, max(C, 1))
        tokens, ends = labels[columns], self.nodes[before]
        grown = grown[before, columns]
        nodes = [self._child(*pair) for pair in zip(ends.tolist(), tokens.tolist(), strict=True)]
        self.nodes = np.append(self.nodes[same], np.array(nodes, dtype=int))
        self.parents = np.append(self.parents[same], ends)
        self.last = np.append(self.last[same], tokens)
        self.blank = np.append(in_blank[same], np.full(len(grown), -np.inf))
        self.token = np.append(in_token[same], grown)

    def _parents_in_beam(self) -> tuple[np.ndarray, np.ndarray]:
        """Places of prefixes' parents, and of these prefixes, where both are in the beam."""
        order = self.nodes.argsort()
        found = order[
            np.searchsorted(self.nodes, self.parents, sorter=order).clip(max=len(order) - 1)
        ]
        positions = (self.nodes[found] == self.parents).nonzero()[0]
        return found[positions], positions

    def _child(self, node: int, token: int) -> int:
        """The node of a prefix and a token, the same whenever it is asked for."""
        child = self.children.setdefault((node, token), len(self.tree))
        if child == len(self.tree):
            self.tree.append((node, token))
        return child

    def best(self, nbest: int) -> list[Hypothesis]:
        """The likeliest sentences, best first."""
        scores = np.logaddexp(self.blank, self.token)
        ranked = (-scores).argsort(kind="stable")[:nbest].tolist()
        return [
            Hypothesis(self._tokens(int(self.nodes[k])), float(scores[k]), True) for k in ranked
        ]

    def _tokens(self, node: int) -> tuple[int, ...]:
        tokens = []
        while node:
            node, token = self.tree[node]
            tokens.append(token)
        return tuple(reversed(tokens))
