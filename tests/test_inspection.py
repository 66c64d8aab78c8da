"""Inspection: health figures against hand computation, and the location found by the NaN tracer."""

import math

import pytest
import torch
from reference_lstm import CELLS
from torch import nn

from asr.images.config import RowClassifierConfig
from asr.images.data import ImageBatch
from asr.images.models import RowClassifier
from asr.images.task import ClassObjective
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell
from asr.nn.norm import RMSNorm
from asr.training import inspection
from asr.training.debug import NonFinite, stop_at_nan
from asr.training.inspection import gains, trace
from asr.training.state import TrainState


@pytest.mark.parametrize("norm", CELLS)
def test_a_trace_is_what_the_lstm_computes(norm):
    torch.manual_seed(1)
    lstm = LayerNormLSTM(
        3, 5, 2, batch_first=True, bidirectional=True, backend="reference", norm=CELLS[norm]
    )
    lstm.double()
    x, lengths = torch.randn(4, 7, 3).double(), torch.tensor([7, 2, 5, 7])
    output, frames = trace(lstm, x, lengths=lengths)
    torch.testing.assert_close(output, lstm(x, lengths=lengths)[0])
    assert [frame.layer for frame in frames[::7]] == ["l0", "l0_reverse", "l1", "l1_reverse"]
    assert [frame.time for frame in frames[7:14]] == [6, 5, 4, 3, 2, 1, 0]
    first, second = frames[0], frames[1]
    # The gates must reproduce each state from the one before.
    h, c = (first.c, first.h) if norm == "thesis" else (first.h, first.c)
    i, f, g, _ = second.internals.gates.chunk(4, dim=-1)
    made = f.sigmoid() * c[: len(f)] + i.sigmoid() * g.tanh()
    if lstm.settings.carries_norm:
        centred = made if "rms" in norm else made - made.mean(-1, keepdim=True)
        made = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(second.c, made)
    assert h.shape == first.h.shape


def test_gates_and_flat_rows_by_hand():
    cell = LayerNormLSTMCell(1, 2, norm="ba")
    with torch.no_grad():
        cell.weight_ih.zero_()
        cell.weight_ih[:4, 0] = torch.tensor([4.0, -4.0, 4.0, -4.0])
        cell.bias_ih.copy_(torch.tensor([9.0, -9.0, 0.0, 0.0, 1.0, 3.0, 0.0, 0.0]))
    with inspection.watch(nn.ModuleDict({"cell": cell})) as internals:
        cell(torch.tensor([[1.0], [0.0], [0.0]]))
    actual = internals.figures()
    # W_x x is (4, -4, 4, -4, 0 0 0 0), of variance 8, for the first row and flat for two of three.
    unit = 4 / math.sqrt(8 + 1e-5)
    values = [9 + unit, -9 - unit, 9.0, -9.0, 9.0, -9.0]
    assert actual["variance/cell/input"] == pytest.approx(sum(v * v for v in values) / 6, rel=1e-5)
    assert actual["saturated/cell/input"] == 1.0 and actual["saturated/cell/forget"] == 0.0
    assert actual["saturated/cell/candidate"] == 0.5  # 3 of (1, 3); tanh leaves 0.9 at 1.47
    assert actual["flat/cell/x"] == pytest.approx(2 / 3) and actual["flat/cell/h"] == 1.0
    before = dict(actual)
    cell(torch.ones(1, 1))  # the hooks are removed
    assert internals.figures() == before


def test_a_norm_without_a_gain_has_none():
    assert gains(nn.Sequential(nn.LayerNorm(7, elementwise_affine=False))) == {}


def test_norms_of_a_transformer():
    model = nn.ModuleDict({"layer": nn.LayerNorm(3), "rms": RMSNorm(3, 1e-6)})
    with torch.no_grad():
        model["rms"].weight.copy_(torch.tensor([-3.0, 1.0, 2.0]))
    rows = torch.tensor([[5.0, 5.0, 5.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    with inspection.watch(model) as internals:
        model["layer"](rows), model["rms"](rows)
    assert internals.figures() == {"flat/layer": 0.5, "flat/rms": 0.25}
    actual = inspection.gains(model)
    assert (
        actual["gain/rms"] == 2.0 and actual["gain_max/rms"] == 3.0 and actual["gain/layer"] == 1.0
    )


def classifier(**model):
    config = RowClassifierConfig(kind="rows", **model)
    return ClassObjective(RowClassifier(3, 3, config), 0.0)


def image_batch(count=3):
    torch.manual_seed(2)
    ids = tuple(f"train-{i}" for i in range(count))
    return ImageBatch(ids, torch.rand(count, 5, 3), torch.arange(count) % 3)


@pytest.mark.parametrize("backend", ["reference", "python", "auto"])
def test_measure_returns_gradients_and_leaves_none(backend):
    torch.manual_seed(1)
    objective = classifier(hidden=4, norm="ba", backend=backend, recurrent_gain=0.25)
    figures = inspection.measure(objective, [image_batch(2), image_batch(3)])
    assert all(p.grad is None for p in objective.parameters())
    total = sum(objective(image_batch(n))["objective"].total for n in (2, 3))
    wanted = torch.autograd.grad(total, list(objective.model.out.parameters()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in wanted)) / 5
    assert figures["gradient/out"] == pytest.approx(norm, rel=1e-4)
    assert figures["gain/lstm.gain_hh_l0"] == 0.25


class Planted(nn.Module):
    """The identity, which fails as configured."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        if self.fault == "forward":
            return x / (x * 0)
        if self.fault == "backward":  # 0 * d sqrt(0)/dx = 0 * inf
            return x + (x * 0).abs().sqrt()
        return x


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.first, self.planted, self.last = nn.Linear(3, 4), Planted(fault), nn.Linear(4, 3)

    def forward(self, images):
        return self.last(self.planted(self.first(images.mean(1)).tanh()))


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_tracer_names_the_planted_module(fault):
    objective, messages = ClassObjective(Net(fault), 0.0), []
    stop_at_nan(objective, TrainState(step=6), messages.append)
    with pytest.raises(NonFinite) as raised:
        objective(image_batch())["objective"].total.backward()
    line = str(raised.value)
    assert "step 7" in line and "model.planted (Planted)" in line
    assert "train-0 train-1 train-2" in line and "\n" not in line
    (chain,) = messages
    assert "forward   model.first" in chain and ("model.last" in chain) == (fault == "backward")


def test_the_tracer_passes_a_sound_model_and_names_a_bad_weight():
    objective, messages = ClassObjective(Net(""), 0.0), []
    stop_at_nan(objective, TrainState(), messages.append)
    objective(image_batch())["objective"].total.backward()
    assert messages == []
    with torch.no_grad():
        objective.model.first.weight.fill_(math.nan)
    with pytest.raises(NonFinite, match=r"weight weight of model\.first"):
        objective(image_batch())


def test_the_tracer_shows_how_blank_rows_make_an_lstm_explode():
    torch.manual_seed(1)
    lstm = {"norm": "per_gate", "eps": 1e-12, "zero_variance": "raw", "backend": "reference"}
    objective, messages = classifier(hidden=8, **lstm), []
    batch = image_batch()
    batch.images[:, :4] = 0.0  # blank rows, as at the top of every digit
    stop_at_nan(objective, TrainState(), messages.append)
    with pytest.raises(NonFinite, match=r"model\.lstm \(LayerNormLSTM\)"):
        objective(batch)["objective"].total.backward()
    lines = messages[0].splitlines()
    frames = [line for line in lines if " frame " in line]
    assert "frame 4: " in frames[0] and "gates 0 %" in frames[0]
    assert all("gates 100 %" in line for line in frames[1:])
    assert "nan" in frames[-1] or "inf" in frames[-1]
    guarded = classifier(hidden=8, **{**lstm, "zero_variance": "guard"})
    stop_at_nan(guarded, TrainState(), messages.append)
    guarded(batch)["objective"].total.backward()
