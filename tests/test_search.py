"""Greedy search against a plain loop over one sentence at a time."""

import pytest
import torch
from toy_speller import ToySpeller, alone, beam_search, toy_memory

from asr.config.schema import DecodeConfig
from asr.data.tokenizer import BLANK, EOS, SOS
from asr.decoding.scorer import Hypothesis, greedy, length_limits
from asr.errors import UserError
from asr.inference.decode import Encoded, best_hypotheses, is_greedy
from asr.nn.attention import Memory


def greedy_loop(model, memory, limit):
    """The reference: always decode the whole sentence again, take the best allowed token."""
    tokens = []
    while len(tokens) < limit:
        log_probs = model.spell(memory, tokens)
        log_probs[:, [BLANK, SOS]] = -torch.inf
        best = int(log_probs[-1].argmax())
        if best == EOS:
            break
        tokens.append(best)
    log_probs = model.spell(memory, tokens)
    each = log_probs.gather(1, torch.tensor([*tokens, EOS])[:, None]).squeeze(1)
    log_probs[:, [BLANK, SOS]] = -torch.inf
    return tokens, each, int(log_probs[-1].argmax()) == EOS


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_the_plain_loop_for_every_utterance(seed):
    model, memory = ToySpeller(seed=seed), toy_memory(11, 3, 7, 2)
    hypotheses = greedy(model, memory, max_ratio=1.0, max_constant=2)
    for utterance, ours in enumerate(hypotheses):
        frames = int(memory.valid[utterance].sum())
        tokens, each, ended = greedy_loop(model, alone(memory, utterance), frames + 2)
        assert ours.tokens == tuple(tokens)
        assert ours.finished == ended
        assert ours.log_probs == pytest.approx(each.tolist(), abs=1e-9)
        assert ours.score == pytest.approx(float(each.sum()), abs=1e-9)


def test_ended_utterances_cost_no_more_steps():
    model, memory = ToySpeller(seed=3), toy_memory(11, 3, 7, 2)
    hypotheses = greedy(model, memory, 1.0)
    assert model.steps == sum(len(h.tokens) + 1 for h in hypotheses)


def test_an_utterance_without_frames_is_empty_and_changes_no_other():
    model, memory = ToySpeller(), toy_memory(5, 3)
    silent = Memory(memory.states, memory.valid & torch.tensor([[True], [False]]))
    assert greedy(model, silent, 1.0)[1] == Hypothesis((), 0.0, True)
    assert greedy(model, silent, 1.0)[0].tokens == greedy(model, memory, 1.0)[0].tokens
    nothing = Memory(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.bool))
    assert greedy(model, nothing, 1.0) == [Hypothesis((), 0.0, True)] * 2


def test_a_limit_of_0_tokens_leaves_only_eos():
    (hypothesis,) = greedy(ToySpeller(), toy_memory(5), max_ratio=0, max_constant=0)
    assert hypothesis.tokens == ()
    assert len(hypothesis.log_probs) == 1


def test_limits_count_real_frames_only():
    valid = toy_memory(7, 2, 5).valid
    assert length_limits(valid, 0.5, 1.4).tolist() == [4, 2, 3]
    assert length_limits(valid, 0, -3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"length_penalty": 0.0, "token_reward": 1.0, "max_ratio": 0.5}, True),
        *(({"eos_threshold": threshold}, True) for threshold in (None, 1.0, 2.0)),
        ({"eos_threshold": 0.9}, False),
        ({"beam": 2}, False),
        ({"ctc_weight": 0.1}, False),
    ],
)
def test_every_rule_that_greedy_search_lacks_asks_for_the_beam_search(keys, expected):
    assert is_greedy(DecodeConfig(**keys)) == expected


@pytest.mark.parametrize("ranking", [{"length_penalty": 3.0}, {"token_reward": 2.0}])
def test_a_beam_of_1_is_greedy_however_long_hypotheses_are_ranked(ranking):
    others = 0
    for seed in range(5):
        model, memory = ToySpeller(seed=seed), toy_memory(11, 3, 7, 2)
        expected = greedy(model, memory, 1.0)
        actual = best_hypotheses([Encoded(model, memory)], DecodeConfig(**ranking))
        assert [best for (best,) in actual] == expected
        ranked = beam_search(model, memory, 1, **ranking)
        others += [h.tokens for (h,) in ranked] != [h.tokens for h in expected]
    assert others  # a beam that ranks by length continues after the first EOS


def test_nan_is_reported_before_the_search():
    model = ToySpeller()
    model.output[:] = torch.nan
    with pytest.raises(UserError, match="log-probs are NaN"):
        greedy(model, toy_memory(3), 1.0)
