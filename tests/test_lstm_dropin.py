"""LayerNormLSTM in the place of nn.LSTM, which is the judge."""

import copy
import inspect
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_lstm_backends import HERE, gradients
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

DOUBLE = {"dtype": torch.float64}


def pair(**options):
    """The two layers with the weights of nn.LSTM."""
    torch.manual_seed(1)
    judge = nn.LSTM(3, 7, 2, **options, **DOUBLE)
    ours = LayerNormLSTM(3, 7, 2, **options, **DOUBLE, norm="none")
    assert list(ours.state_dict()) == list(judge.state_dict())
    ours.load_state_dict(judge.state_dict())
    return ours, judge


OPTIONS = [
    {},
    {"batch_first": True, "bidirectional": True},
    {"bidirectional": True, "bias": False},
]


FORMS = {
    "batch": lambda batch, sequences: batch,
    "single": lambda batch, sequences: sequences[0],
    "packed": lambda batch, sequences: pack_sequence(sequences, enforce_sorted=False),
    "sorted": lambda batch, sequences: pack_sequence(sorted(sequences, key=len, reverse=True)),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_is_torchs(form, with_state, options):
    ours, judge = pair(**options)
    sequences = [torch.randn(n, 3, **DOUBLE, requires_grad=True) for n in (4, 11, 1, 7, 7)]
    batch = torch.randn(5, 11, 3, **DOUBLE, requires_grad=True)
    size = {"single": (), "batch": (5 if judge.batch_first else 11,)}.get(form, (5,))
    start = torch.randn(2, 2 * (1 + judge.bidirectional), *size, 7, **DOUBLE, requires_grad=True)
    outputs, results = [], []
    for lstm in (ours, judge):
        given = FORMS[form](batch, sequences)
        output, state = lstm(input=given, hx=tuple(start)) if with_state else lstm(given)
        inputs = [batch, *sequences, start, *lstm.parameters()]
        found = [output.data, *state]
        results.append([*found, *gradients(found, inputs)])
        outputs.append(output)
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)
    if "ed" in form:
        for own, true in zip(*(output[1:] for output in outputs), strict=True):
            assert own is true is None or torch.equal(own, true)
    else:
        assert outputs[0].is_contiguous()  # code for nn.LSTM may call .view


def test_arguments_have_the_order_of_torchs():
    theirs = list(inspect.signature(nn.RNNBase.__init__).parameters)[2:]
    ours = inspect.signature(LayerNormLSTM.__init__).parameters
    positional = [name for name, one in ours.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional[1:] == theirs
    assert list(inspect.signature(LayerNormLSTM.forward).parameters)[:3] == ["self", "input", "hx"]
    for name in theirs[2:]:
        if name != "dropout":
            judge = inspect.signature(nn.RNNBase.__init__).parameters[name].default
            assert ours[name].default == judge
    ours, judge = pair(bidirectional=True, batch_first=True, dropout=0.3, bias=False)
    for name in theirs[:-2]:  # without device and dtype
        assert getattr(ours, name) == getattr(judge, name), name
    ours.flatten_parameters()


def test_a_projection_is_refused():
    with pytest.raises(ValueError, match="proj_size is 5; LayerNormLSTM has no projection: leave"):
        LayerNormLSTM(3, 7, proj_size=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_have_the_dtype_and_device_asked_for(dtype):
    lstm = LayerNormLSTM(3, 7, device="cpu", dtype=dtype)
    gate = lstm.weight_hh_l0[:7].double()
    torch.testing.assert_close(gate @ gate.T, torch.eye(7, **DOUBLE), atol=2e-2, rtol=0)
    assert lstm(torch.randn(5, 2, 3, dtype=dtype))[0].dtype == dtype
    empty = LayerNormLSTM(3, 7, device="meta", dtype=dtype)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu").reset_parameters()
    assert empty(torch.randn(5, 2, 3, dtype=dtype))[0].isfinite().all()


def test_copies_compute_the_same():
    lstm, x = LayerNormLSTM(3, 7, 2, bidirectional=True), torch.randn(11, 5, 3)
    output = lstm(x)[0]
    output.sum().backward()
    saved = io.BytesIO()
    torch.save(lstm, saved)
    saved.seek(0)
    copies = copy.deepcopy(lstm), pickle.loads(pickle.dumps(lstm))
    for other in (*copies, torch.load(saved, weights_only=False), nn.DataParallel(lstm)):
        assert torch.equal(other(x)[0], output)


def test_replicas_of_data_parallel_run_in_threads():
    """As DataParallel on several GPUs: replicas whose weights are attributes, not parameters."""
    lstm = LayerNormLSTM(3, 7, bidirectional=True)
    chunks = torch.randn(4, 11, 5, 3).unbind()
    replicas = []
    for _ in chunks:
        replicas.append(lstm._replicate_for_data_parallel())
        for name, weight in lstm.named_parameters():
            setattr(replicas[-1], name, weight * 1)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda replica, x: replica(x)[0], replicas, chunks))
    together = gradients(outputs, list(lstm.parameters()))
    alone = gradients([lstm(x)[0] for x in chunks], list(lstm.parameters()))
    torch.testing.assert_close((outputs, together), ([lstm(x)[0] for x in chunks], alone))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("norm", ["none", "ba"])
def test_a_batch_of_no_sequences(norm, backend):
    ours = LayerNormLSTM(3, 7, 2, bidirectional=True, norm=norm, backend=backend)
    judge = nn.LSTM(3, 7, 2, bidirectional=True)
    x = torch.zeros(5, 0, 3, requires_grad=True)
    for lengths in (None, [], torch.zeros(0, dtype=torch.long)):
        output, states = ours(x, lengths=lengths)
        expected, true = judge(x)
        assert [t.shape for t in (output, *states)] == [t.shape for t in (expected, *true)]
        gradients([output, *states], [x, *ours.parameters()])
    cell = LayerNormLSTMCell(3, 7, norm=norm, backend=backend)
    assert cell(x[0])[0].shape == (0, 7)


def test_dropout_set_later_acts_from_the_next_call_on():
    torch.manual_seed(1)
    lstm, x = LayerNormLSTM(3, 7, 2), torch.randn(5, 2, 3)
    for rate in (0.0, 0.5, 0.0, 0.7):
        lstm.dropout = rate
        assert torch.equal(lstm(x)[0], lstm(x)[0]) == (rate == 0.0)
    assert f"dropout={rate}" in str(lstm)
    with pytest.raises(ValueError, match="dropout 2 is not a rate"):
        lstm.dropout = 2


# What PyTorch's own tests do with the weights of an nn.LSTM, each with the layer as argument.
def tie_biases(lstm):
    lstm.bias_ih_l0_reverse = lstm.bias_ih_l0


def replace_storage(lstm):
    with torch.no_grad():
        lstm.weight_ih_l0.set_(lstm.weight_ih_l0.detach().clone())


def transpose_storage(lstm):
    lstm.weight_hh_l0 = nn.Parameter(lstm.weight_hh_l0.detach().T.contiguous().T)


def delete_and_assign(lstm):
    weight = lstm.weight_hh_l1
    del lstm.weight_hh_l1
    lstm.double().weight_hh_l1 = weight


def prune_weights(lstm):
    prune.l1_unstructured(lstm, "weight_ih_l0", 0.5)


def normalise_weights(lstm):
    nn.utils.parametrizations.weight_norm(lstm, "weight_hh_l0")


def freeze(lstm):
    lstm.requires_grad_(False)


CHANGES = (
    tie_biases, replace_storage, transpose_storage, delete_and_assign, prune_weights,
    normalise_weights, freeze, nn.Module.share_memory, nn.LSTM.flatten_parameters,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_used_as_torch_does(change):
    x, results = torch.randn(5, 2, 3, **DOUBLE, requires_grad=True), []
    for lstm in pair(bidirectional=True):
        (type(lstm).flatten_parameters if change is nn.LSTM.flatten_parameters else change)(lstm)
        output, state = lstm(x)
        learned = [p for p in lstm.parameters() if p.requires_grad]
        results.append([output, *state, *gradients((output, *state), [x, *learned])])
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


def scattered(tensor):
    """The same values, not contiguous in any dimension."""
    return torch.stack([torch.zeros_like(tensor), tensor], -1)[..., 1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_memory_that_is_not_contiguous(batch_first, packed):
    """Of input, state and upstream gradients, as PyTorch compares its CPU with cuDNN."""
    lengths, generator = [7, 5, 5, 2, 1, 1], torch.Generator().manual_seed(2)
    x = scattered(torch.randn(*((6, 7) if batch_first else (7, 6)), 3, **DOUBLE)).requires_grad_()
    start = scattered(torch.randn(2, 4, 6, 7, **DOUBLE)).requires_grad_()
    upstream, results = None, []
    for lstm in pair(bidirectional=True, batch_first=batch_first):
        given = pack_padded_sequence(x, lengths, batch_first) if packed else x
        output, (h, c) = lstm(given, tuple(start))
        found = output.data if packed else output, h, c
        upstream = upstream or [
            scattered(torch.randn(y.shape, **DOUBLE, generator=generator)) for y in found
        ]
        inputs = [x, start, *lstm.parameters()]
        results.append([*found, *torch.autograd.grad(found, inputs, upstream)])
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_gradient_of_one_result_alone(used):
    x, results = torch.randn(5, 2, 3, **DOUBLE, requires_grad=True), []
    for lstm in pair():
        output, state = lstm(x)
        results.append(gradients([(output, *state)[used]], [x, *lstm.parameters()]))
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)


def test_where_torch_raises_we_do():
    """Wrong shapes, as in PyTorch's test_rnn_args_check; the type of the error differs."""
    good, bad = (2, 4, 7), 9
    states = [[*good[:i], bad, *good[i + 1 :]] for i in range(3)]
    inputs = [((6, 4, bad), good), ((0, 4, 3), good), ((6, bad, 3), good), ((3,), good)]
    for lstm in pair():
        for x, state in (*inputs, *(((6, 4, 3), state) for state in states)):
            for h, c in ((state, good), (good, state)):
                given = (
                    torch.zeros(x, **DOUBLE),
                    (torch.zeros(h, **DOUBLE), torch.zeros(c, **DOUBLE)),
                )
                with pytest.raises((ValueError, RuntimeError)):
                    lstm(*given)


def call(*given, **named):
    return LayerNormLSTM(3, 7, bidirectional=True)(*given, **named)


X, PACKED = torch.randn(5, 2, 3), pack_sequence([torch.randn(5, 3)])
MISTAKES = {
    r"input has shape \(0, 2, 3\)": lambda: call(X[:0]),
    r"packed data have shape \(5, 4\)": lambda: call(pack_sequence([torch.randn(5, 4)])),
    "a PackedSequence has its own lengths": lambda: call(PACKED, lengths=[5]),
    "lengths belong to a batch": lambda: call(X[:, 0], lengths=[5]),
    r"hx is not a pair \(h, c\) of tensors": lambda: call(X, torch.zeros(2, 2, 7)),
    "num_layers is 0; it must be at least 1": lambda: LayerNormLSTM(3, 7, 0),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_wrong_arguments_are_reported(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()
