"""The LayerNorm-LSTM as a module: arguments, initialisation, dropout, and errors."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from reference_lstm import CELLS
from torch import nn

from asr.config.cell import CellSettings
from asr.config.schema import SpellerConfig
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell


@pytest.mark.parametrize("bias", [True, False])
def test_the_cell_takes_what_torch_cell_takes(bias):
    args = 3, 7, bias, "cpu", torch.float64
    ours, judge = LayerNormLSTMCell(*args, norm="none"), nn.LSTMCell(*args)
    ours.load_state_dict(judge.state_dict())
    x, state = torch.randn(3, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64).unbind()
    torch.testing.assert_close(ours(x, state), judge(x, state))
    torch.testing.assert_close(ours(input=x, hx=None), judge(input=x, hx=None))
    torch.manual_seed(4)
    ours.reset_parameters()
    torch.manual_seed(4)
    again = LayerNormLSTMCell(*args, norm="none").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("norm", CELLS)
def test_start_values(norm):
    lstm = LayerNormLSTM(5, 7, norm=CELLS[norm])
    for gate in lstm.weight_hh_l0.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(7), atol=1e-5, rtol=0)
    _, forget, _, _ = (lstm.bias_ih_l0 + lstm.bias_hh_l0).chunk(4)
    assert (forget == 1).all()
    assert (lstm.bias_ih_l0 + lstm.bias_hh_l0).sum() == 7
    gains = {n: weight for n, weight in lstm.named_parameters() if n.startswith("gain")}
    for name, gain in gains.items():
        assert (gain == (0.1 if name.startswith("gain_hh") else 1.0)).all()
    counts = {"none": 0, "ba": 3, "per_gate": 2, "joined": 1, "joined hidden rms": 2}
    counts |= {"ba without c": 2, "per_gate state hidden": 3, "ba hidden": 4, "joined carried": 2}
    counts |= {"ba state": 3, "ba rms": 3, "joined state rms": 2, "per_gate output rms": 2}
    assert len(gains) == counts.get(norm, 1)


@pytest.mark.parametrize("norm", CELLS)
def test_recurrent_gain_scales_the_recurrence_of_norm_ba(norm):
    torch.manual_seed(6)
    x, h, c = torch.randn(5, 3), torch.randn(5, 7), torch.randn(5, 7)
    weak = LayerNormLSTMCell(3, 7, norm=replace(CELLS[norm], recurrent_gain=0.1))
    now, without = weak(x, (h, c)), weak(x, (torch.zeros_like(h), c))
    full = LayerNormLSTMCell(3, 7, norm=CELLS[norm])
    full.load_state_dict(weak.state_dict())
    if CELLS[norm].norm == "ba":
        nn.init.ones_(full.gain_hh)
        far = (full(x, (h, c))[1] - without[1]).abs().mean()
        assert 0 < (now[1] - without[1]).abs().mean() < 0.2 * far
    else:
        assert torch.equal(full(x, (h, c))[0], now[0])


@torch.no_grad()
def test_a_perturbation_persists_with_full_recurrent_gain_only():
    left = {}
    for gain in (1.0, 0.1):
        torch.manual_seed(7)
        lstm = LayerNormLSTM(11, 67, batch_first=True, norm=CellSettings("ba", recurrent_gain=gain))
        lstm.double()
        x = torch.randn(1, 101, 11, dtype=torch.double)
        other = torch.cat([x[:, :1] + 1e-6, x[:, 1:]], dim=1)
        distance = (lstm(x)[0] - lstm(other)[0]).norm(dim=-1)[0]
        left[gain] = distance[-1] / distance[0]
    assert left[1.0] > 0.5 and left[0.1] < 1e-6


def test_dropout_acts_between_layers_in_training_alone():
    torch.manual_seed(4)
    lstm = LayerNormLSTM(3, 7, 2, dropout=0.5)
    x = torch.randn(5, 11, 3)
    assert not torch.equal(lstm(x)[0], lstm(x)[0])
    lstm.eval()
    assert torch.equal(lstm(x)[0], lstm(x)[0])
    single = LayerNormLSTM(3, 7, 1, dropout=0.5)
    assert torch.equal(single(x)[0], single(x)[0])


def test_recurrent_dropout_keeps_one_mask_for_the_sequence():
    torch.manual_seed(5)
    lstm = LayerNormLSTM(3, 17, batch_first=True, recurrent_dropout=0.5, norm="none")
    nn.init.zeros_(lstm.weight_hh_l0)
    x = torch.randn(2, 1, 3).expand(-1, 5, -1)
    _, (_, c) = lstm(x)
    dropped = c[0] == 0  # a candidate dropped at every step leaves its cell at zero
    assert 0.2 < dropped.float().mean() < 0.8
    assert not torch.equal(dropped[0], dropped[1])
    assert (lstm.eval()(x)[1][1] != 0).all()


def test_cell_draws_its_mask_once_per_sequence():
    cell = LayerNormLSTMCell(3, 17, recurrent_dropout=0.5)
    mask = cell.dropout_mask(2)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    _, c = cell(torch.randn(2, 3), None, mask)
    assert torch.equal(c == 0, mask == 0)
    assert cell.eval().dropout_mask(2) is None


def test_a_section_of_a_recipe_is_the_cells_settings():
    """Each key has its value; other keys of a section are none of the cell's."""
    values = {"norm": "ba", "cell_norm": "state", "hidden_norm": True, "norm_kind": "rms"}
    values |= {"eps": 1e-6, "zero_variance": "raw", "recurrent_gain": 0.5}
    section = SpellerConfig(**values, hidden=3, backend="reference")
    assert section.settings == CellSettings(**values)
    assert asdict(section.settings) == values


WRONG_LENGTHS = {
    "parts of the longest": torch.tensor([1.0, 0.6]),
    "a fraction": [5, 3.7],
    "rows": torch.tensor([[5], [3]]),
    "a mask": torch.ones(2, 5, dtype=torch.bool),
    "flags": torch.ones(2, dtype=torch.bool),
    "one number": torch.tensor(5),
}


@pytest.mark.parametrize("kind", WRONG_LENGTHS)
def test_lengths_are_whole_numbers_of_frames(kind):
    with pytest.raises(ValueError, match=r"lengths must be \(B,\) whole numbers of frames"):
        call(lengths=WRONG_LENGTHS[kind])
    call(lengths=np.array([5, 3]))


def test_a_parametrized_weight_starts_anew():
    """Judge: the same layer without parametrization."""
    plain, normed = LayerNormLSTM(3, 7), LayerNormLSTM(3, 7)
    nn.utils.parametrizations.weight_norm(normed, "weight_hh_l0")
    for lstm in (plain, normed):
        torch.manual_seed(8)
        lstm.reset_parameters()
    torch.testing.assert_close(normed.weight_hh_l0, plain.weight_hh_l0)


def call(**changes):
    given = {"input": torch.randn(2, 5, 3)} | changes
    LayerNormLSTM(3, 7, 2, batch_first=True, bidirectional=True)(**given)


MISTAKES = {
    "norm 'batch' is not known; choose one of none, ba": lambda: LayerNormLSTM(3, 7, norm="batch"),
    "cell_norm = carried does not fit norm = raw": lambda: CellSettings("raw", cell_norm="carried"),
    "backend 'gpu' is not known": lambda: LayerNormLSTM(3, 7, backend="gpu"),
    "eps is -1": lambda: CellSettings(eps=-1),
    "recurrent_gain is nan": lambda: CellSettings(recurrent_gain=float("nan")),
    "dropout 1.0 is not a rate": lambda: LayerNormLSTM(3, 7, dropout=1.0),
    r"input has shape \(2, 5, 4\)": lambda: call(input=torch.randn(2, 5, 4)),
    "input is torch.float64": lambda: call(input=torch.randn(2, 5, 3).double()),
    "input is on meta": lambda: call(input=torch.randn(2, 5, 3, device="meta")),
    "length 6 of utterance 1 is not within 1 to 5": lambda: call(lengths=torch.tensor([5, 6])),
    "length 0 of utterance 0 is not": lambda: call(lengths=[0, 5]),
    "3 lengths for a batch of 2": lambda: call(lengths=[1, 2, 3]),
    r"c has shape \(4, 2, 8\)": lambda: call(hx=(torch.zeros(4, 2, 7), torch.zeros(4, 2, 8))),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_wrong_arguments_are_reported(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()
