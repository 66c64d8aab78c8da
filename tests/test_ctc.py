"""CTC decoding against sums over every path of a tiny space."""

import itertools
import math
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch

from asr.config.schema import DecodeConfig
from asr.decoding.ctc import collapse, ctc_greedy
from asr.decoding.ctc_search import ctc_beam_search, ctc_gains
from asr.errors import UserError
from asr.inference.decode import Encoded, best_hypotheses
from asr.nn.attention import Memory


def random_log_probs(*shape, seed=0, sharpness=2.0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) * sharpness).log_softmax(-1)


def test_collapse_joins_neighbours_and_drops_blanks():
    assert collapse([0, 4, 4, 0, 4, 5, 5, 0, 0, 5]) == [4, 4, 5, 5]
    assert collapse([7, 7, 0]) == [7]
    assert collapse([0, 0]) == []
    assert collapse([]) == []


def test_greedy_reads_the_best_path_of_real_frames_only():
    log_probs = random_log_probs(3, 13, 5)
    valid = torch.arange(13) < torch.tensor([13, 7, 0])[:, None]
    for utterance, length in enumerate([13, 7, 0]):
        best = [int(frame.argmax()) for frame in log_probs[utterance, :length]]
        tokens = [b for a, b in zip([0, *best], best, strict=False) if a != b and b != 0]
        assert ctc_greedy(log_probs, valid)[utterance] == tokens
    assert ctc_greedy(log_probs, valid)[2] == []


def sums_over_paths(log_probs):
    """log_probs (T, V) -> every sentence's log-prob, best first, from all V ** T paths."""
    sums = defaultdict(float)
    rows = log_probs.tolist()
    for path in itertools.product(range(len(rows[0])), repeat=len(rows)):
        score = sum(row[label] for row, label in zip(rows, path, strict=True))
        sums[tuple(collapse(list(path)))] += math.exp(score)
    return sorted(((math.log(p), tokens) for tokens, p in sums.items() if p), reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_sums_over_all_paths(seed):
    log_probs = random_log_probs(2, 6, 5, seed=seed, sharpness=1.0)
    valid = torch.arange(6) < torch.tensor([6, 4])[:, None]
    results = ctc_beam_search(log_probs, valid, beam=5000, nbest=7)
    for utterance, length in enumerate([6, 4]):
        judge = sums_over_paths(log_probs[utterance, :length])[:7]
        assert [h.tokens for h in results[utterance]] == [tokens for _, tokens in judge]
        ours = [h.score for h in results[utterance]]
        assert ours == pytest.approx([score for score, _ in judge], abs=1e-9)


def prefix_beam_search(log_probs, beam):
    """Hannun et al. 2014, algorithm 1, prefix by prefix: (T, V) -> sentences and scores."""
    prefixes = {(): (0.0, -math.inf)}
    for frame in log_probs.tolist():
        grown = defaultdict(lambda: [-math.inf, -math.inf])
        for prefix, (blank, token) in prefixes.items():
            both = np.logaddexp(blank, token)
            grown[prefix][0] = np.logaddexp(grown[prefix][0], both + frame[0])
            for label, score in enumerate(frame[1:], start=1):
                longer, before = grown[(*prefix, label)], both
                if prefix and prefix[-1] == label:
                    grown[prefix][1] = np.logaddexp(grown[prefix][1], token + score)
                    before = blank
                longer[1] = np.logaddexp(longer[1], before + score)
        prefixes = dict(sorted(grown.items(), key=lambda p: -np.logaddexp(*p[1]))[:beam])
    return [(prefix, np.logaddexp(*both)) for prefix, both in prefixes.items()]


@pytest.mark.parametrize(("beam", "sharpness"), [(3, 0.7), (7, 0.7), (29, 2.0)])
def test_a_narrow_beam_keeps_the_prefixes_of_the_slow_search(beam, sharpness):
    """Over enough frames that prefixes leave the beam and come back."""
    log_probs = random_log_probs(2, 61, 5, seed=beam, sharpness=sharpness)
    valid = torch.arange(61) < torch.tensor([61, 43])[:, None]
    results = ctc_beam_search(log_probs, valid, beam=beam, nbest=beam)
    for ours, own, length in zip(results, log_probs, (61, 43), strict=True):
        judge = prefix_beam_search(own[:length], beam)
        assert [h.tokens for h in ours] == [tokens for tokens, _ in judge]
        assert [h.score for h in ours] == pytest.approx([score for _, score in judge], abs=1e-9)


def test_the_gain_of_a_sentence_is_a_ratio_of_sums_over_paths():
    log_probs = random_log_probs(4, 6, 4, sharpness=1.0)
    valid = torch.arange(6) < torch.tensor([6, 4, 3, 2])[:, None]
    sentences = [(2, 1, 3), (), (3, 3), (1, 2, 3)]  # the last has too few frames
    gains = ctc_gains(log_probs.masked_fill(~valid[..., None], 9.0), valid, sentences)
    for own, length, tokens, gain in zip(log_probs, (6, 4, 3, 2), sentences, gains, strict=True):
        sums = {tokens: score for score, tokens in sums_over_paths(own[:length])}
        assert gain == pytest.approx(sums.get(tokens, -math.inf) - sums[()], abs=1e-5)


def test_the_best_sentence_need_not_be_the_best_path():
    log_probs = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert ctc_greedy(log_probs, valid) == [[]]  # 0.36 against 0.24 + 0.24 + 0.16
    (best,) = ctc_beam_search(log_probs, valid, beam=2)[0]
    assert best.tokens == (1,)
    assert math.exp(best.score) == pytest.approx(0.64)


def test_trying_fewer_tokens_drops_only_their_paths():
    log_probs = random_log_probs(1, 6, 5)
    valid = torch.ones(1, 6, dtype=torch.bool)
    (best,) = ctc_beam_search(log_probs, valid, beam=5000, tokens=2)[0]
    kept = log_probs.topk(2, dim=2).indices
    mask = torch.zeros(1, 6, 5, dtype=torch.bool).scatter(2, kept, True)
    mask[..., 0] = True
    score, tokens = sums_over_paths(log_probs.masked_fill(~mask, -1e4)[0])[0]
    assert (best.tokens, best.score) == (tokens, pytest.approx(score))


def test_no_frames_give_an_empty_sentence():
    log_probs = random_log_probs(1, 3, 5)
    (best,) = ctc_beam_search(log_probs, torch.zeros(1, 3, dtype=torch.bool), beam=8)[0]
    assert (best.tokens, best.score) == ((), 0.0)


@pytest.mark.parametrize("beam", [1, 4])
def test_nan_is_reported(beam):
    class Broken(torch.nn.Module):
        def ctc(self, memory):
            return memory.states

    states = torch.zeros(2, 3, 5)
    states[0, 2] = states[1, 1] = math.nan
    for length, fails in ((3, True), (1, False)):  # NaN in the padding changes nothing
        memory = Memory(states, torch.arange(3) < torch.tensor([[2], [length]]))
        config = DecodeConfig(search="ctc", beam=beam)
        decode = partial(best_hypotheses, [Encoded(Broken(), memory)], config)
        if fails:
            with pytest.raises(UserError, match="log-probs are NaN"):
                decode()
        else:
            assert len(decode()) == 2
