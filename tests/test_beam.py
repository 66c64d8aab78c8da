"""Beam search against brute force over every sentence of a small space."""

import itertools
import math

import pytest
import torch
from toy_speller import NO_FRAMES, ToySpeller, alone, beam_search, toy_memory

from asr.data.tokenizer import BLANK, EOS, SOS, UNK
from asr.decoding.beam_search import Ranking
from asr.decoding.scorer import Hypothesis, greedy
from asr.errors import UserError
from asr.nn.attention import Memory

V = 6
WORDS = (UNK, 4, 5)  # the tokens of sentences


class Bigrams:
    """A bigram language model."""

    def __init__(self, vocabulary=V, seed=9):
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocabulary, vocabulary, generator=draw).double().log_softmax(1)

    def start(self, memory):
        return torch.zeros(len(memory.valid), 1)

    def step(self, state, tokens):
        assert state.shape == tokens.shape
        return self.table[tokens], state

    def select(self, state, rows):
        return state.flatten()[rows]

    def sentence(self, tokens):
        pairs = zip([SOS, *tokens], [*tokens, EOS], strict=True)
        return sum(float(self.table[pair]) for pair in pairs)


def random_ctc(memory, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*memory.valid.shape, V, generator=draw).double() * 2).log_softmax(-1)


def ctc_sentence(ctc, tokens):
    """A sentence's CTC log-prob by torch's loss."""
    loss = torch.nn.functional.ctc_loss(
        ctc[:, None],
        torch.tensor([tokens], dtype=torch.long),
        torch.tensor([len(ctc)]),
        torch.tensor([len(tokens)]),
        reduction="sum",
    )
    return -float(loss)


def brute_force(model, memory, longest, *, ctc=None, lm=None, **settings):
    """All sentences of one utterance, scored in a plain loop, best first: [(score, tokens)]."""
    ctc_weight, lm_weight = settings.get("ctc_weight", 0.0), settings.get("lm_weight", 0.0)
    results = []
    for length in range(longest + 1):
        for tokens in itertools.product(WORDS, repeat=length):
            log_probs = model.spell(memory, tokens)
            best_other = float(log_probs[-1, list(WORDS)].max())
            threshold = settings.get("eos_threshold", math.inf)
            if float(log_probs[-1, EOS]) < threshold * best_other and length < longest:
                continue
            score = sum(float(log_probs[u, t]) for u, t in enumerate([*tokens, EOS]))
            score *= 1 - ctc_weight
            if ctc_weight:
                score += ctc_weight * ctc_sentence(ctc, tokens)
            if lm_weight:
                score += lm_weight * lm.sentence(tokens)
            score /= ((5 + length + 1) / 6) ** settings.get("length_penalty", 0.0)
            score += settings.get("token_reward", 0.0) * (length + 1)
            results.append((score, tokens))
    return sorted(results, reverse=True)


SETTINGS = {
    "plain": {},
    "length": {"length_penalty": 0.9},
    "reward": {"token_reward": 0.7},
    "fine": {"token_reward": -0.4, "length_penalty": 0.3},
    "threshold": {"eos_threshold": 1.5},
    "ctc": {"ctc_weight": 0.4},
    "ctc alone": {"ctc_weight": 1.0},
    "language model": {"lm_weight": 0.5},
    "subtracted": {"lm_weight": -0.3},
    "all": {
        "length_penalty": 0.6,
        "token_reward": 0.2,
        "eos_threshold": 2.0,
        "ctc_weight": 0.3,
        "lm_weight": 0.4,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_beam_as_wide_as_the_space_is_brute_force(name):
    settings = dict(SETTINGS[name])
    model, memory, lm = ToySpeller(V, sharpness=2.0, seed=4), toy_memory(7, 5), Bigrams()
    ctc = random_ctc(memory)
    results = beam_search(
        model,
        memory,
        beam=250,
        nbest=5,
        ctc=ctc,
        max_ratio=0.5,
        max_constant=1,  # 4 and 3 tokens
        scorers=[(settings["lm_weight"], lm)] if "lm_weight" in settings else [],
        **{key: value for key, value in settings.items() if key != "lm_weight"},
    )
    for utterance, (frames, longest) in enumerate([(7, 4), (5, 3)]):
        judge = brute_force(
            model,
            alone(memory, utterance),
            longest,
            ctc=ctc[utterance, :frames],
            lm=lm,
            **settings,
        )[:5]
        ours = results[utterance]
        assert [h.tokens for h in ours] == [tokens for _, tokens in judge]
        assert [h.score for h in ours] == pytest.approx([score for score, _ in judge], abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_beam_1_is_greedy(seed):
    model, memory = ToySpeller(11, seed=seed), toy_memory(13, 4, 0, 7)
    for ours, judge in zip(beam_search(model, memory, 1), greedy(model, memory, 1.0), strict=True):
        assert len(ours) == 1
        assert ours[0].tokens == judge.tokens
        assert ours[0].score == pytest.approx(judge.score, abs=1e-5)
        assert ours[0].log_probs == pytest.approx(judge.log_probs, abs=1e-5)
        assert ours[0].parts == pytest.approx(judge.parts, abs=1e-5)
        assert ours[0].finished == judge.finished


EVERYTHING = {
    "length_penalty": 0.6,
    "token_reward": 0.1,
    "eos_threshold": 1.5,
    "ctc_weight": 0.3,
}


def test_a_batch_equals_its_utterances_one_by_one():
    lengths = [13, 3, 11, 5]
    model, memory = ToySpeller(V, sharpness=1.5), toy_memory(*lengths)
    ctc, lm = random_ctc(memory), [(0.2, Bigrams())]
    together = beam_search(model, memory, 4, nbest=3, ctc=ctc, scorers=lm, **EVERYTHING)
    for utterance, frames in enumerate(lengths):
        one = ctc[utterance : utterance + 1, :frames]
        mine = alone(memory, utterance)
        (judge,) = beam_search(model, mine, 4, nbest=3, ctc=one, scorers=lm, **EVERYTHING)
        assert [h.tokens for h in together[utterance]] == [h.tokens for h in judge]
        for ours, other in zip(together[utterance], judge, strict=True):
            assert ours.score == pytest.approx(other.score, abs=1e-5)
            assert ours.log_probs == pytest.approx(other.log_probs, abs=1e-5)
            assert ours.parts == pytest.approx(other.parts, abs=1e-5)


def test_scores_add_up_from_their_parts():
    model, memory, lm = ToySpeller(V, sharpness=1.5), toy_memory(7, 5), Bigrams()
    ctc = random_ctc(memory)
    results = beam_search(model, memory, 5, nbest=5, ctc=ctc, scorers=[(0.2, lm)], **EVERYTHING)
    ranking = Ranking(0.6, 0.1)
    for utterance, frames in enumerate([7, 5]):
        for hypothesis in results[utterance]:
            attention_part, ctc_part, lm_part = hypothesis.parts
            assert attention_part == pytest.approx(sum(hypothesis.log_probs), abs=1e-5)
            judge = ctc_sentence(ctc[utterance, :frames], hypothesis.tokens)
            assert ctc_part == pytest.approx(judge, abs=1e-5)
            assert lm_part == pytest.approx(lm.sentence(hypothesis.tokens), abs=1e-5)
            total = 0.7 * attention_part + 0.3 * ctc_part + 0.2 * lm_part
            score = ranking.final(total, len(hypothesis.tokens) + 1)
            assert hypothesis.score == pytest.approx(score, abs=1e-5)


STOPPED = {**SETTINGS, "long": {"length_penalty": 3.0}, "unlike": {"lm_weight": -0.9}}


@pytest.mark.parametrize("name", STOPPED)
def test_the_early_stop_changes_nothing(name, monkeypatch):
    settings = dict(STOPPED[name])
    scorers = [(settings.pop("lm_weight"), Bigrams())] if "lm_weight" in settings else []
    memory = toy_memory(5, 3)
    settings |= {"nbest": 2, "ctc": random_ctc(memory), "scorers": scorers, "max_constant": 0}

    def results():
        return [
            [(h.tokens, h.score, h.finished) for h in hypotheses]
            for seed in range(16)
            for hypotheses in beam_search(
                ToySpeller(V, sharpness=2.0, seed=seed), memory, 3, **settings
            )
        ]

    stopped = results()
    monkeypatch.setattr(Ranking, "bound", lambda *_: math.inf)
    assert stopped == results()


def test_the_early_stop_saves_steps(monkeypatch):
    model, memory = ToySpeller(V, seed=2), toy_memory(31, 29)
    beam_search(model, memory, 3, length_penalty=0.6)
    early, model.steps = model.steps, 0
    monkeypatch.setattr(Ranking, "bound", lambda *_: math.inf)
    beam_search(model, memory, 3, length_penalty=0.6)
    assert early < model.steps / 2


def test_the_bound_is_reached_by_no_longer_sentence():
    for alpha, reward in itertools.product([0.0, 0.6, 2.0], [-0.5, 0.0, 0.5]):
        ranking = Ranking(alpha, reward)
        bound = ranking.bound(-3.0, 4, 9)
        for length, loss in itertools.product(range(4, 10), [0.0, 2.0]):
            assert ranking.final(-3.0 - loss, length) <= bound + 1e-12
    assert Ranking(0.0, 0.0).bound(0.1, 1, 2) == math.inf


def test_without_eos_hypotheses_have_the_maximum_length():
    model, never = ToySpeller(V, seed=1), 1e-9  # a threshold that EOS does not reach
    results = beam_search(
        model,
        toy_memory(7, 3),
        4,
        nbest=4,
        max_ratio=NO_FRAMES,
        max_constant=5,
        eos_threshold=never,
    )
    assert {len(h.tokens) for hypotheses in results for h in hypotheses} == {5}
    assert model.steps == 2 + 2 * 3 + 2 * 4 * 4  # 1, then 3, then 4 rows an utterance


def test_no_hypothesis_has_a_special_token_or_is_repeated():
    results = beam_search(ToySpeller(V, sharpness=0.1), toy_memory(5, 3), 20, nbest=20)
    for hypotheses in results:
        assert len({h.tokens for h in hypotheses}) == len(hypotheses) == 20
        assert not {BLANK, SOS, EOS} & {token for h in hypotheses for token in h.tokens}
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


def test_limits_that_allow_nothing_leave_an_unfinished_hypothesis():
    """The model refuses EOS, and CTC more tokens than the two frames: the best is unfinished."""
    memory = toy_memory(2)
    ctc = random_ctc(memory)
    ((best,),) = beam_search(ToySpeller(V), memory, 2, ctc=ctc, ctc_weight=0.3, eos_threshold=1e-9)
    assert len(best.tokens) == 2 and not best.finished
    assert len(best.log_probs) == 2


@pytest.mark.parametrize("seed", range(5))
def test_ctc_alone_does_not_ask_the_model_for_the_end(seed):
    """Its eos_threshold would forbid the end that CTC is certain of."""
    path = [4, BLANK, 5, BLANK, 6, BLANK, 4]
    log_probs = torch.full((1, len(path), 7), -9.0)
    log_probs[0, range(len(path)), path] = 0.0
    memory = Memory(torch.zeros(1, len(path), 5).double(), torch.ones(1, len(path)).bool())
    ctc = log_probs.log_softmax(dim=2).double()
    ((best,),) = beam_search(ToySpeller(seed=seed), memory, 8, ctc=ctc, ctc_weight=1.0)
    assert best.tokens == (4, 5, 6, 4)


def test_ctc_without_room_for_a_token_gives_an_empty_sentence():
    memory = Memory(torch.randn(1, 1, 5).double(), torch.ones(1, 1, dtype=torch.bool))
    ctc = torch.full((1, 1, V), -50.0)
    ctc[..., BLANK] = 0.0
    (hypotheses,) = beam_search(ToySpeller(V), memory, 3, ctc=ctc, ctc_weight=1.0)
    assert hypotheses[0].tokens == ()


def test_an_utterance_without_frames_is_empty_and_changes_no_other():
    memory = toy_memory(5, 3)
    valid = memory.valid & torch.tensor([[False], [True]])
    ctc = random_ctc(memory)
    silent = beam_search(ToySpeller(V), Memory(memory.states, valid), 3, ctc=ctc, ctc_weight=0.3)
    both = beam_search(ToySpeller(V), memory, 3, ctc=ctc, ctc_weight=0.3)
    assert silent[0] == [Hypothesis((), 0.0, True)]
    assert silent[1][0].tokens == both[1][0].tokens
    nothing = Memory(torch.zeros(1, 0, 5), torch.zeros(1, 0, dtype=torch.bool))
    assert beam_search(ToySpeller(V), nothing, 3) == [[Hypothesis((), 0.0, True)]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nbest": 9}, r"nbest is 9; it must be between 1 and beam \(8\)"),
        ({"nbest": 0}, r"nbest is 0; it must be between 1 and beam \(8\)"),
        ({"ctc_weight": 0.3}, r"ctc_weight is 0.3, but this model has no CTC head; set it to 0"),
    ],
)
def test_errors_are_one_clear_line(settings, message):
    with pytest.raises(UserError, match=message) as error:
        beam_search(ToySpeller(V), toy_memory(3), **settings)
    assert "\n" not in str(error.value)


def test_nan_is_reported_before_the_search():
    model = ToySpeller(V)
    model.output[:] = torch.nan
    with pytest.raises(UserError, match="log-probs are NaN"):
        beam_search(model, toy_memory(3))
