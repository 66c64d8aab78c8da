"""CTC prefix scores against the paper's slow loop and against sums over all paths."""

import itertools
import math

import pytest
import torch

from asr.data.tokenizer import BLANK, EOS, SOS
from asr.decoding.ctc import CTCPrefixScorer, collapse
from asr.nn.attention import Memory


def random_ctc(*shape, seed=0, sharpness=2.0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) * sharpness).log_softmax(-1)


def memory_of(ctc, lengths):
    valid = torch.arange(ctc.shape[1]) < torch.tensor(lengths)[:, None]
    return Memory(torch.zeros(*valid.shape, 1), valid)


def walk(scorer, memory, tokens):
    """Score a sentence's prefixes in turn: (U + 1, V)."""
    state, rows = scorer.start(memory), []
    for token in [SOS, *tokens]:
        scores, state = scorer.step(state, torch.tensor([[token]]))
        rows.append(scores[0, 0])
    return torch.stack(rows)


def algorithm_2(probs, h, c):
    """The paper's loop for label c after h, in plain probabilities: (psi, gamma at the end)."""
    frames = len(probs)

    def gammas(g):
        """r^n and r^b of g after t = 0..T frames."""
        if not g:
            blanks = [1.0]
            for t in range(frames):
                blanks.append(blanks[-1] * probs[t][BLANK])
            return [0.0] * (frames + 1), blanks, None
        token, blank, _ = gammas(g[:-1])
        r_n, r_b, psi = [0.0], [0.0], 0.0
        for t in range(frames):
            repeat = len(g) > 1 and g[-1] == g[-2]
            phi = blank[t] + (0.0 if repeat else token[t])
            r_n.append((r_n[t] + phi) * probs[t][g[-1]])
            r_b.append((r_n[t] + r_b[t]) * probs[t][BLANK])
            psi += phi * probs[t][g[-1]]
        return r_n, r_b, psi

    if c == EOS:
        token, blank, _ = gammas(h)
        return token[-1] + blank[-1]
    return gammas([*h, c])[2]


@pytest.mark.parametrize("sentence", [[], [4], [4, 4], [5, 1, 5], [4, 5, 5, 6, 4]])
def test_scores_are_the_papers_loop(sentence):
    ctc = random_ctc(1, 11, 7)
    probs = ctc[0].exp().tolist()
    rows = walk(CTCPrefixScorer(ctc), memory_of(ctc, [11]), sentence)
    prefix = 0.0
    for u, row in enumerate(rows):
        for c in range(1, 7):
            judge = math.log(algorithm_2(probs, sentence[:u], c)) - prefix
            assert float(row[c]) == pytest.approx(judge, abs=1e-9)
        if u < len(sentence):
            prefix += float(row[sentence[u]])


def test_scores_are_sums_over_all_paths():
    frames, vocabulary = 5, 6
    ctc = random_ctc(1, frames, vocabulary, seed=1)
    totals = {}
    for path in itertools.product(range(vocabulary), repeat=frames):
        score = sum(float(ctc[0, t, label]) for t, label in enumerate(path))
        key = tuple(collapse(list(path)))
        totals[key] = totals.get(key, 0.0) + math.exp(score)
    scorer, memory = CTCPrefixScorer(ctc), memory_of(ctc, [frames])
    for sentence in [(), (4,), (4, 4), (5, 4), (1, 1, 5)]:
        rows = walk(scorer, memory, sentence)
        prefix = sum(float(rows[u, token]) for u, token in enumerate(sentence))
        judge = sum(p for other, p in totals.items() if other[: len(sentence)] == sentence)
        assert prefix == pytest.approx(math.log(judge), abs=1e-9)
        full = prefix + float(rows[-1, EOS])
        assert full == pytest.approx(math.log(totals[sentence]), abs=1e-9)


def test_whole_sentence_is_torchs_ctc_loss():
    ctc, sentence = random_ctc(1, 41, 13), [4, 7, 7, 12, 5, 4]
    rows = walk(CTCPrefixScorer(ctc), memory_of(ctc, [41]), sentence)
    ours = rows.gather(1, torch.tensor([*sentence, EOS])[:, None]).sum()
    judge = -torch.nn.functional.ctc_loss(
        ctc.transpose(0, 1), torch.tensor([sentence]), [41], [6], reduction="sum"
    )
    torch.testing.assert_close(ours, judge)


def test_a_beam_of_mixed_hypotheses_equals_each_alone():
    """Rows of ragged utterances are shuffled, repeated and dropped between steps."""
    lengths = [11, 3, 7]
    ctc = random_ctc(3, 11, 7, seed=2)
    padded = ctc.masked_fill(
        ~memory_of(ctc, lengths).valid[..., None], 400.0
    )  # large values in the padding
    scorer = CTCPrefixScorer(padded)
    state = scorer.start(memory_of(ctc, lengths))
    _, state = scorer.step(state, torch.full((3, 1), SOS))
    state = scorer.select(state, torch.tensor([[0, 0], [1, 1], [2, 2]]))
    _, state = scorer.step(state, torch.tensor([[4, 5], [5, 4], [6, 4]]))
    state = scorer.select(state, torch.tensor([[5, 4, 4], [1, 0, 1]]))  # utterances 2 and 0
    scores, _ = scorer.step(state, torch.tensor([[4, 6, 5], [5, 1, 4]]))
    sentences = [[(4, 4), (6, 6), (6, 5)], [(5, 5), (4, 1), (5, 4)]]
    for line, utterance in enumerate([2, 0]):
        only = ctc[utterance : utterance + 1, : lengths[utterance]]
        for k, sentence in enumerate(sentences[line]):
            judge = walk(CTCPrefixScorer(only), memory_of(only, only.shape[1:2]), sentence)[-1]
            torch.testing.assert_close(scores[line, k, 1:], judge[1:])


def test_more_tokens_than_frames_are_impossible_not_nan():
    ctc = random_ctc(1, 3, 7)
    rows = walk(CTCPrefixScorer(ctc), memory_of(ctc, [3]), [4, 4, 5, 6])
    assert not rows.isnan().any()
    assert rows[2, 4] == -torch.inf  # 4 4 needs three frames, another 4 five
    assert (rows[3:] == -torch.inf).all()


def test_hopeless_hypotheses_over_long_audio_keep_their_order():
    """Peaked frames that contradict the tokens: float64 logs, where probabilities underflow."""
    frames = 1500
    logits = torch.full((1, frames, 7), -9.0, dtype=torch.float64)
    logits[0, :, BLANK] = 9.0
    logits[0, ::5, BLANK], logits[0, ::5, 4] = -9.0, 9.0
    logits[0, 750, 5] = 5.0
    ctc = logits.log_softmax(-1)
    rows = walk(CTCPrefixScorer(ctc), memory_of(ctc, [frames]), [5])
    sums = [-torch.nn.functional.ctc_loss(
        ctc.transpose(0, 1), torch.tensor([s]), [frames], [len(s)], reduction="sum"
    ) for s in ([5], [6], [4])]  # fmt: skip
    ours = [rows[0, 5] + rows[1, EOS]]
    for token in (6, 4):
        other = walk(CTCPrefixScorer(ctc), memory_of(ctc, [frames]), [token])
        ours.append(other[0, token] + other[1, EOS])
    assert max(ours) < -4000
    torch.testing.assert_close(torch.stack(ours), torch.stack(sums))


def test_a_probability_of_zero_counts_as_the_least():
    ctc = random_ctc(1, 7, 5)
    ctc[0, :, 4] = -torch.inf
    rows = walk(CTCPrefixScorer(ctc), memory_of(ctc, [7]), [4])
    assert float(rows[0, 4]) < -400
    assert not rows.isnan().any()
