"""Averaged weights against slow means and schedulefree's own; resuming gives the same bits."""

import pytest
import torch
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch import nn

from asr.config.loader import RecipeError, read_recipe
from asr.config.schema import OptimizerConfig
from asr.training import averaging
from asr.training.averaging import EvaluationWeights
from asr.training.checkpoint import list_checkpoints, read_training
from asr.training.optim import load_moments, make_optimizer
from asr.training.trainer import train

SCHEDULE_FREE = OptimizerConfig(kind="schedule_free", lr=0.03, betas=(0.8, 0.9), weight_decay=0.1)


def layer():
    torch.manual_seed(1)
    return nn.Linear(5, 7)


def steps(module, optimizer, count, after=lambda step: None):
    generator = torch.Generator().manual_seed(3)
    for step in range(1, count + 1):
        module.zero_grad()
        module(torch.randn(3, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        after(step)


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def test_the_exponential_mean_is_that_of_a_loop():
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    weights = EvaluationWeights(module, optimizer, 0.7)
    expected = values(module)

    def after(step):
        weights.update(step)
        decay = min(0.7, (1 + step) / (10 + step))
        for mean, now in zip(expected, module.parameters(), strict=True):
            mean.copy_(decay * mean + (1 - decay) * now.detach())

    steps(module, optimizer, 9, after)
    trained = values(module)
    with weights.applied():
        torch.testing.assert_close(values(module), expected)
    assert all(map(torch.equal, values(module), trained))


def test_schedule_free_equals_its_own_code_and_is_not_rounded_by_an_evaluation():
    ours, theirs = layer(), layer()
    optimizer = make_optimizer(SCHEDULE_FREE, ours)
    weights = EvaluationWeights(ours, optimizer, None)
    judge = AdamWScheduleFree(
        [
            {"params": [theirs.weight], "weight_decay": 0.1},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        lr=0.03,
        betas=(0.8, 0.9),
    )
    judge.train()

    def evaluate(step):
        before = values(ours)
        with weights.applied():
            assert step == 1 or not torch.equal(ours.weight, before[0])
        assert all(map(torch.equal, values(ours), before))

    steps(ours, optimizer, 9, evaluate)
    steps(theirs, judge, 9)
    assert all(map(torch.equal, values(ours), values(theirs)))
    judge.eval()
    with weights.applied():
        assert all(map(torch.equal, values(ours), values(theirs)))


def test_schedule_free_counts_the_steps_of_weights_that_a_stage_trains_from_their_first():
    """With the steps of the others, the first one of theirs would be 31 times as long."""

    def two():
        module = nn.Sequential(layer(), nn.Tanh(), nn.Linear(7, 3))
        return module, list(module[0].parameters()), list(module[2].parameters())

    def judged(parameters):
        groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in parameters]
        made = AdamWScheduleFree(groups, lr=0.03, betas=(0.8, 0.9))
        made.train()
        return made

    (ours, early, _), (theirs, early_judged, late_judged) = two(), two()
    optimizer, judges = make_optimizer(SCHEDULE_FREE, ours), [judged(late_judged)]
    generator = torch.Generator().manual_seed(3)
    for step in range(17):
        if step == 11:
            judges.append(judged(early_judged))
        if step in (3, 11, 13):  # resumed before, with and after the beginning of a stage
            state, optimizer = optimizer.state_dict(), make_optimizer(SCHEDULE_FREE, ours)
            load_moments(optimizer, state)
        for p in (*early, *early_judged):
            p.requires_grad_(step >= 11)
        x = torch.randn(3, 5, generator=generator)
        for module, made in ((ours, [optimizer]), (theirs, judges)):
            module.zero_grad()
            module(x).square().sum().backward()
            for each in made:
                each.step()
    torch.testing.assert_close(values(ours), values(theirs), rtol=0, atol=0)
    with EvaluationWeights(ours, optimizer, None).applied():
        for judge in judges:
            judge.eval()
        torch.testing.assert_close(values(ours), values(theirs), rtol=0, atol=0)


def test_only_batch_statistics_are_saved_for_each_rank(monkeypatch):
    """Else the state of eight ranks would exceed what a checkpoint may have."""

    def module():
        return torch.nn.Sequential(layer(), torch.nn.BatchNorm1d(7))

    def on_ranks(own):
        return [own, *({name: tensor + n for name, tensor in own.items()} for n in (1, 2))]

    ours = module()
    weights = EvaluationWeights(ours, torch.optim.SGD(ours.parameters(), 0.1), 0.5)
    ours[0].weight.data += 1
    trained = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    monkeypatch.setattr(averaging, "gather", on_ranks)
    with weights.applied():
        assert torch.equal(ours[1].running_mean, trained["1.running_mean"] + 1)  # of 0, 1 and 2
        first, *others = weights.state()
        evaluated = ours.state_dict()
    assert {"0.weight", "1.running_mean"} < first.keys()
    assert [set(own) for own in others] == [{"1.running_mean", "1.running_var"}] * 2
    for rank, expected in ((0, 0), (2, 2), (5, 2)):
        monkeypatch.setattr(averaging, "rank", lambda rank=rank: rank)
        theirs = module()
        theirs.load_state_dict(evaluated)
        optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
        EvaluationWeights(theirs, optimizer, 0.5).load([first, *others])
        assert torch.equal(theirs[0].weight, trained["0.weight"])
        assert torch.equal(theirs[1].running_mean, trained["1.running_mean"] + expected)


CHOICES = {
    "ema": ["train.ema=0.6"],
    "schedule_free": ["train.optimizer.kind=schedule_free", "train.schedule={kind: constant}"],
    "muon": ["train.optimizer.kind=muon"],
    "batch": [
        "model={kind: conformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 1, "
        "decoder_layers: 1, kernel: 3, convolution_norm: batch}",
        "train.ema=0.6",
    ],
}


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("choice", CHOICES)
    def test_resuming_gives_the_same_bits(self, choice, tiny, tmp_path):
        constant = "train.schedule={kind: constant}"  # others depend on train.steps
        more = [constant, *CHOICES[choice], "train.save_every=2", "train.keep=9"]
        recipe, straight, resumed = read_recipe(tiny, more), tmp_path / "a", tmp_path / "b"
        assert train(recipe, straight) == 0
        for end in (3, 6):
            assert train(read_recipe(tiny, [*more, f"train.steps={end}"]), resumed, end > 3) == 0
        last, again = list_checkpoints(straight)[-1], list_checkpoints(resumed)[-1]
        assert last.step == again.step == 6 and last.loss == again.loss
        one, other = (read_training(c) for c in (last, again))
        assert same(one["trained"], other["trained"])
        assert same(one["optimizer"]["state"], other["optimizer"]["state"])
        weights, others = (load_file(c.folder / "model.safetensors") for c in (last, again))
        assert same(weights, others)

    @pytest.mark.slow
    def test_the_checkpoint_has_the_average_and_the_trained_weights(self, tiny, tmp_path):
        more = ["train.ema=0.6", "train.steps=4"]
        train(read_recipe(tiny, more), tmp_path / "ema")
        train(read_recipe(tiny, more[1:]), tmp_path / "plain")
        ema, plain = (list_checkpoints(tmp_path / name)[-1] for name in ("ema", "plain"))
        trained = read_training(ema)["trained"][0]
        weights, average = (load_file(c.folder / "model.safetensors") for c in (plain, ema))
        assert trained.keys() == weights.keys()
        assert all(torch.equal(trained[name], weights[name]) for name in weights)
        assert not any(torch.equal(trained[name], average[name]) for name in weights)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["train.optimizer.kind=schedule_free"], "schedule.kind = tri_stage: set train.sched"),
            (
                [*CHOICES["schedule_free"], "train.ema=0.9"],
                "train.ema is .* schedule_free averages .*: set train.ema=null",
            ),
            ([*CHOICES["schedule_free"], "train.optimizer.betas=[0,0.9]"], r"betas\[0\] above 0"),
        ],
    )
    def test_settings_that_do_not_fit(self, more, message, tiny):
        with pytest.raises(RecipeError, match=message):
            read_recipe(tiny, more)


def same(one, other):
    """Whether two nested containers have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
