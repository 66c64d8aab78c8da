"""The mean over models and speeds, against brute force over every sentence of a small space."""

import itertools

import pytest
from test_beam import WORDS, V, brute_force, ctc_sentence, random_ctc
from toy_speller import NO_FRAMES, ToySpeller, alone, beam_search, toy_memory

from asr.errors import UserError

FRAMES = ((7, 5), (6, 4), (11, 8))  # of two utterances, at three speeds
WEIGHT = 0.3


def views(*frames):
    """Another memory and CTC for each row of frames."""
    memories = [toy_memory(*lengths, seed=n + 1) for n, lengths in enumerate(frames)]
    return [(memory, random_ctc(memory, seed=n)) for n, memory in enumerate(memories)]


def of(one, utterance):
    """(memory, CTC) of one utterance, without padding."""
    memory = alone(one[0], utterance)
    return memory, one[1][utterance : utterance + 1, : memory.valid.shape[1]]


def searched(model, inputs, beam, more=(), **settings):
    """more: the models of the views after the first, if they differ from the first one's."""
    (memory, ctc), *others = inputs
    models = more or [model] * len(others)
    others = [(own, *one) for own, one in zip(models, others, strict=True)]
    return beam_search(model, memory, beam, ctc=ctc, others=others, **settings)


def mean_brute_force(models, inputs, longest):
    """One utterance: [(score, tokens)], best first; the mean over the views."""
    results = [
        brute_force(model, m, longest, ctc=c[0], ctc_weight=WEIGHT)
        for model, (m, c) in zip(models, inputs, strict=True)
    ]
    each = [{tokens: score for score, tokens in sentences} for sentences in results]
    means = ((sum(one[tokens] for one in each) / len(each), tokens) for tokens in each[0])
    return sorted(means, reverse=True)


@pytest.mark.parametrize("seeds", [(4, 4, 4), (4, 5, 7)], ids=["one model", "three models"])
def test_a_beam_as_wide_as_the_space_is_brute_force(seeds):
    models, inputs = [ToySpeller(V, sharpness=2.0, seed=seed) for seed in seeds], views(*FRAMES)
    limits = {"nbest": 5, "max_ratio": NO_FRAMES, "max_constant": 4, "ctc_weight": WEIGHT}
    ours = searched(models[0], inputs, 250, models[1:], **limits)
    for b, hypotheses in enumerate(ours):
        judge = mean_brute_force(models, [of(one, b) for one in inputs], 4)[:5]
        assert [h.tokens for h in hypotheses] == [tokens for _, tokens in judge]
        assert [h.score for h in hypotheses] == pytest.approx([s for s, _ in judge], abs=1e-6)
        first = mean_brute_force(models[:1], [of(inputs[0], b)], 4)[:5]
        assert [tokens for _, tokens in first] != [tokens for _, tokens in judge]


EVERYTHING = {
    "length_penalty": 0.6,
    "eos_threshold": 1.5,
    "ctc_weight": WEIGHT,
}


def test_other_utterances_change_nothing_with_or_without_frames():
    model, inputs = ToySpeller(V, sharpness=1.5), views((13, 0, 3, 11), (11, 0, 2, 13))
    together = searched(model, inputs, 4, nbest=3, **EVERYTHING)
    assert [h.tokens for h in together[1]] == [()]
    for b in (0, 2, 3):
        (judge,) = searched(model, [of(one, b) for one in inputs], 4, nbest=3, **EVERYTHING)
        assert [h.tokens for h in together[b]] == [h.tokens for h in judge]
        assert [h.score for h in together[b]] == pytest.approx([h.score for h in judge], abs=1e-6)


def test_a_sentence_needs_enough_frames_at_every_speed():
    """CTC requires at least as many frames as labels, at each of the speeds."""
    model, inputs = ToySpeller(V), views((11,), (2,))
    (hypotheses,) = searched(model, inputs, 30, nbest=30, max_constant=4, ctc_weight=0.5)
    assert hypotheses and max(len(h.tokens) for h in hypotheses) == 2


def test_every_view_needs_its_ctc():
    (memory, ctc), model = views((7, 5))[0], ToySpeller(V)
    with pytest.raises(UserError, match=r"ctc_weight is 0\.3, but this model has no CTC head"):
        beam_search(model, memory, 3, ctc=ctc, others=[(model, memory, None)], ctc_weight=0.3)


def test_an_utterance_without_frames_in_one_model_is_empty():
    """Only one of the models reduces its frames to none."""
    model, inputs = ToySpeller(V), views((7, 1, 5), (4, 0, 3))
    actual = searched(model, inputs, 4, nbest=2, **EVERYTHING)
    assert [h.tokens for h in actual[1]] == [()]
    for b in (0, 2):
        (judge,) = searched(model, [of(one, b) for one in inputs], 4, nbest=2, **EVERYTHING)
        assert [h.tokens for h in actual[b]] == [h.tokens for h in judge]


def test_ctc_of_each_speed_is_read_over_its_own_frames():
    """A search by CTC alone finds the sentence with the best mean of torch's losses."""
    inputs = views((5,), (7,))
    (best, *_), *_ = searched(
        ToySpeller(V), inputs, 250, max_ratio=NO_FRAMES, max_constant=3, ctc_weight=1.0
    )
    sentences = [s for n in range(4) for s in itertools.product(WORDS, repeat=n)]
    mean = {s: sum(ctc_sentence(ctc[0], s) for _, ctc in inputs) / 2 for s in sentences}
    assert best.tokens == max(mean, key=mean.get)
    assert best.score == pytest.approx(mean[best.tokens], abs=1e-6)
