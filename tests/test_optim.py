"""Schedules against the papers' formulae and torch's schedulers; the choice of decayed weights."""

import copy

import pytest
import torch
import yaml
from torch import nn, optim

from asr.config.loader import validate
from asr.config.schema import OptimizerConfig, TrainConfig
from asr.errors import UserError
from asr.tasks.speech import build_speech_objective
from asr.training import distributed
from asr.training.optim import (
    check_patterns,
    cosine,
    freeze,
    kind_of,
    load_moments,
    make_optimizer,
    noam,
    orthogonal,
    tri_stage,
)


def torch_rates(make, steps, lr=0.7):
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_constant_matches_torch_linear_warm_up():
    judge = torch_rates(lambda o: optim.lr_scheduler.LinearLR(o, 1 / 13, 1.0, 12), 40)
    rate = tri_stage(0.7, 13, hold=1.0, floor=0.5)
    assert [rate(step, 0.0) for step in range(1, 41)] == pytest.approx(judge)
    assert tri_stage(0.7, 0, hold=1.0, floor=0.5)(1, 1.0) == 0.7


def test_noam_is_the_formula():
    """Vaswani et al. 2017, eq. 3: d^-0.5 * min(step^-0.5, step * warmup^-1.5)."""
    rate = noam(2.0, 4000, 512)
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert rate(step, 0.5) == pytest.approx(expected, rel=1e-12)
    assert max(range(1, 9000, 7), key=lambda s: rate(s, 0)) == pytest.approx(4000, abs=7)
    assert noam(1.0, 0, 4)(1, 0.0) == 0.5


def test_tri_stage_matches_three_torch_schedulers_in_a_row():
    steps, warmup, hold, floor = 200, 10, 0.4, 0.01

    def judge(optimizer):
        gamma = floor ** (1 / (steps * (1 - hold)))
        parts = [
            optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1),
            optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            optim.lr_scheduler.ExponentialLR(optimizer, gamma),
        ]
        return optim.lr_scheduler.SequentialLR(optimizer, parts, [warmup, int(steps * hold) - 1])

    rate = tri_stage(0.7, warmup, hold, floor)
    ours = [rate(step, step / steps) for step in range(1, steps + 1)]
    assert ours == pytest.approx(torch_rates(judge, steps), rel=1e-9)
    assert ours[-1] == pytest.approx(0.7 * floor)


def test_tri_stage_at_its_edges():
    assert tri_stage(1.0, 0, 1.0, 0.1)(9, 1.0) == 1.0  # never falls
    assert tri_stage(1.0, 0, 0.0, 0.1)(9, 0.5) == pytest.approx(0.1**0.5)
    assert tri_stage(1.0, 0, 0.5, 0.1)(9, 1.7) == pytest.approx(0.1)  # beyond the end


def test_cosine_matches_torch_times_the_warm_up():
    steps, warmup, floor = 200, 13, 0.03
    judge = torch_rates(
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, steps, 0.7 * floor), steps + 1
    )
    rate = cosine(0.7, warmup, floor)
    ramp = [min(step / warmup, 1.0) for step in range(steps + 1)]
    expected = [value * slope for value, slope in zip(judge, ramp, strict=True)]
    assert [rate(step, step / steps) for step in range(steps + 1)] == pytest.approx(expected)
    assert cosine(0.7, 0, floor)(9, 1.7) == pytest.approx(0.7 * floor)  # beyond the end


@pytest.mark.parametrize(("kind", "judge"), [("adam", optim.Adam), ("adamw", optim.AdamW)])
def test_optimizer_matches_torch_and_does_not_decay_gains_and_biases(kind, judge):
    torch.manual_seed(1)
    ours, theirs = nn.Linear(5, 7), nn.Linear(5, 7)
    theirs.load_state_dict(ours.state_dict())
    settings = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-5}
    first = make_optimizer(OptimizerConfig(kind=kind, weight_decay=0.2, **settings), ours)
    second = [
        judge([theirs.weight], weight_decay=0.2, **settings),
        judge([theirs.bias], weight_decay=0.0, **settings),
    ]
    for _ in range(5):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.ones(3, 5)).square().sum().backward()
        first.step()
        for each in second:
            each.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def trained(make, module, steps=5, seed=3):
    """The module after some steps on random input, and its optimizer."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = make(module)
    for _ in range(steps):
        module.zero_grad()
        module(torch.randn(3, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return module, optimizer


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.gain = nn.Linear(5, 7), nn.Parameter(torch.ones(7))
        self.output = nn.Linear(7, 11)

    def forward(self, x):
        return self.output(self.hidden(x) * self.gain)


class TestMuon:
    CONFIG = OptimizerConfig(kind="muon", lr=0.03, betas=(0.8, 0.9), weight_decay=0.2)

    def test_hidden_matrices_take_orthogonal_steps_and_the_rest_those_of_adamw(self, monkeypatch):
        # torch's Muon computes in bf16 on every CPU.
        monkeypatch.setattr(distributed, "computes_bf16", lambda device: True)
        ours, _ = trained(lambda m: make_optimizer(self.CONFIG, m), TwoLayers())
        settings = {"lr": 0.03, "betas": (0.8, 0.9), "weight_decay": 0.0}

        class Both:
            def __init__(self, m):
                vectors = [m.hidden.bias, m.gain, m.output.bias]
                self.parts = [
                    optim.Muon([m.hidden.weight], 0.03, 0.2, adjust_lr_fn="match_rms_adamw"),
                    optim.AdamW([m.output.weight], **{**settings, "weight_decay": 0.2}),
                    optim.AdamW(vectors, **settings),
                ]

            def step(self):
                for part in self.parts:
                    part.step()

        theirs, _ = trained(Both, TwoLayers())
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

    @pytest.mark.parametrize("shape", [(13, 7), (7, 13), (11, 11)])
    @pytest.mark.parametrize("fast", [True, False])
    def test_a_direction_is_nearly_orthogonal(self, monkeypatch, shape, fast):
        """Jordan et al. 2024: the singular vectors of the matrix, singular values near 1."""
        monkeypatch.setattr(distributed, "computes_bf16", lambda device: fast)
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        settings = optim.Muon([torch.nn.Parameter(matrix)]).param_groups[0]
        direction = orthogonal(matrix, settings)
        both = orthogonal(torch.stack([-matrix, matrix]), settings)
        torch.testing.assert_close(both, torch.stack([-direction, direction]), rtol=0, atol=0.02)
        assert direction.dtype == (torch.bfloat16 if fast else torch.float32)
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ direction.float() @ v.T
        values = inner.diag()
        assert (values > 0.3).all() and (values < 1.5).all()
        error = (inner - values.diag()).abs().max()
        assert error < (0.1 if fast else 1e-4)

    @pytest.mark.parametrize(
        "model",
        [
            "{kind: las}",
            "{kind: las, speller: {tied: true}}",
            "{kind: transformer, tied: true}",
            "{kind: transformer}",
            "{kind: conformer}",
        ],
    )
    def test_of_each_model_exactly_the_matrices_without_tokens(self, model):
        tree = {"run": "x", "data": {}, "model": yaml.safe_load(model)}
        recipe, vocabulary = validate(tree, "recipe"), 997
        objective = build_speech_objective(recipe, 83, vocabulary)
        made = make_optimizer(self.CONFIG, objective)
        kinds = {id(p): kind_of(group) for group in made.param_groups for p in group["params"]}
        assert len(kinds) == len(list(objective.parameters()))
        for name, parameter in objective.named_parameters():
            hidden = parameter.dim() == 2 and vocabulary not in parameter.shape
            assert kinds[id(parameter)] == ("muon" if hidden else "adam"), name

    def test_its_state_resumes_it(self):
        straight, _ = trained(lambda m: make_optimizer(self.CONFIG, m), TwoLayers(), steps=9)
        module, optimizer = trained(lambda m: make_optimizer(self.CONFIG, m), TwoLayers(), steps=4)
        resumed = make_optimizer(self.CONFIG, module)
        load_moments(resumed, copy.deepcopy(optimizer.state_dict()))
        generator = torch.Generator().manual_seed(3)
        for step in range(9):
            x = torch.randn(3, 5, generator=generator)
            if step >= 4:
                module.zero_grad()
                module(x).square().sum().backward()
                resumed.step()
        assert all(map(torch.equal, straight.parameters(), module.parameters()))


KINDS = ["adam", "adamw", "muon", "schedule_free"]


def set_rates(optimizer, rate):
    """As the training loop sets them, which tests of the loop check."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_keep_their_bits_and_the_others_those_of_torch_s_selection(kind):
    config = OptimizerConfig(kind=kind, lr=0.03, weight_decay=0.2)
    ours, first = TwoLayers(), TwoLayers()
    freeze(ours, ["hidden.*"])
    trained(lambda m: make_optimizer(config, m), ours)
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, first.get_parameter(name)) == name.startswith("hidden."), name
        assert (weight.grad is None) == name.startswith("hidden.")
    judge = TwoLayers()
    optimizer = make_optimizer(config, judge)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):  # gradients of all, but those of the selection are applied
        judge.zero_grad()
        judge(torch.randn(3, 5, generator=generator)).square().sum().backward()
        judge.hidden.weight.grad = judge.hidden.bias.grad = None
        optimizer.step()
    assert all(map(torch.equal, ours.parameters(), judge.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_those_of_separate_optimizers(kind):
    """Each part of the model trained by its own optimizer, at its own rate."""
    settings = {"kind": kind, "weight_decay": 0.2}
    factors = {"hidden.w*": 0.1, "hidden.*": 7.0, "gain": 0.3}
    rates = {"hidden.weight": 0.1, "hidden.bias": 7.0, "gain": 0.3}
    ours, judge = TwoLayers(), TwoLayers()
    optimizer = make_optimizer(OptimizerConfig(lr_factors=factors, **settings), ours)
    others = {}
    for name, parameter in judge.named_parameters():
        holder = nn.Module()
        *_, last = name.split(".")
        inner = holder
        for part in name.split(".")[:-1]:  # with its name, by which muon selects
            inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, parameter)
        others[name] = make_optimizer(OptimizerConfig(**settings), holder)
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        x = torch.randn(3, 5, generator=generator)
        for module in (ours, judge):
            module.zero_grad()
            module(x).square().sum().backward()
        rate = 0.03 / (step + 1)
        set_rates(optimizer, rate)
        optimizer.step()
        for name, other in others.items():
            for group in other.param_groups:
                group["lr"] = rate * rates.get(name, 1.0)
            other.step()
    torch.testing.assert_close(ours.state_dict(), judge.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_and_frozen_weights_may_change_when_resumed(kind):
    """Every parameter finds its moments, also in a checkpoint of a version without factors."""
    plain = OptimizerConfig(kind=kind, lr=0.03)
    module, optimizer = trained(lambda m: make_optimizer(plain, m), TwoLayers())
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["lr_factor"]  # as of older versions
    varied = OptimizerConfig(kind=kind, lr=0.03, lr_factors={"*bias": 0.1, "output.*": 3.0})
    freeze(module, ["gain"])
    resumed = make_optimizer(varied, module)
    load_moments(resumed, state)
    before = moments_by_name(module, optimizer)
    after = moments_by_name(module, resumed)
    assert before.keys() == after.keys() and before
    assert all(torch.equal(before[key], after[key]) for key in before)
    back = make_optimizer(plain, module)
    load_moments(back, copy.deepcopy(resumed.state_dict()))
    assert [g["lr_factor"] for g in back.param_groups] == [1.0] * len(back.param_groups)
    module(torch.ones(3, 5)).sum().backward()
    back.step()


def moments_by_name(module, optimizer):
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        (names[id(p)], key): value
        for p, moments in optimizer.state.items()
        for key, value in moments.items()
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"freeze": ["hidden"]},
            "train.freeze: no parameter has a name like 'hidden'; names begin with gain, hidden, "
            "output. Did you mean hidden.*",
        ),
        ({"freeze": ["x*"]}, "'x*'; names begin with gain, hidden, output"),
        (
            {"optimizer": OptimizerConfig(lr_factors={"gain": 2.0, "gains": 1.0})},
            "train.optimizer.lr_factors: no parameter has a name like 'gains'; names begin "
            "with gain, hidden, output. Did you mean gain?",
        ),
        ({"freeze": ["*"]}, "train.freeze = ['*'] leaves no parameter to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(UserError) as error:
        check_patterns(TwoLayers(), TrainConfig(**settings))
    assert message in str(error.value)


def test_a_tied_weight_is_frozen_by_each_of_its_names():
    module = TwoLayers()
    module.tied = nn.Linear(7, 11, bias=False)
    module.tied.weight = module.output.weight
    freeze(module, ["tied.weight"])
    assert not module.output.weight.requires_grad and module.output.bias.requires_grad


@pytest.mark.parametrize(("kind", "judge"), [("adam", optim.Adam), ("adamw", optim.AdamW)])
def test_moments_are_loaded_and_settings_are_not(kind, judge):
    """Against torch's own optimizer, built with the old settings and changed by hand."""
    torch.manual_seed(1)
    ours, theirs = nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False)
    theirs.load_state_dict(ours.state_dict())
    first = make_optimizer(OptimizerConfig(lr=0.03, betas=(0.9, 0.99)), ours)
    second = judge([theirs.weight], lr=0.03, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)

    def steps(optimizer, module):
        for _ in range(3):
            module.zero_grad()
            module(torch.ones(3, 5)).square().sum().backward()
            optimizer.step()

    steps(first, ours)
    steps(second, theirs)
    after = {"betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.3}
    resumed = make_optimizer(OptimizerConfig(kind=kind, lr=0.03, **after), ours)
    load_moments(resumed, first.state_dict())
    second.param_groups[0].update(after)
    steps(resumed, ours)
    steps(second, theirs)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
