"""What a GPU run does, as far as it can be seen without a GPU.

Tensors on the device `meta` have no values: reading one raises an error, where on a GPU the program
would wait for it, and so does mixing them with tensors on the CPU.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_speech import training_state
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asr.config.language import LSTMLanguageModelConfig, TransformerLanguageModelConfig
from asr.config.schema import (
    BeamConfig,
    ConformerConfig,
    ConsistencyConfig,
    GuidedAttentionConfig,
    LasConfig,
    ListenerConfig,
    OptimizerConfig,
    SpellerConfig,
    TrainConfig,
    TransformerConfig,
)
from asr.data.batching import Batch
from asr.data.text_corpus import SentenceBatch
from asr.decoding import beam_search, scorer
from asr.decoding.beam_search import BeamSearch, FinishedHypotheses
from asr.decoding.ctc import CTCPrefixScorer
from asr.errors import UserError
from asr.images.config import DrawConfig, RowClassifierConfig
from asr.images.data import ImageBatch
from asr.images.models import Draw, RowClassifier
from asr.images.task import BoundObjective, ClassObjective
from asr.kernels import dispatch
from asr.kernels.cuda import cluster
from asr.kernels.cuda.lstm import GraphCache, Recorded, graph_key
from asr.models.language_model import LSTMLanguageModel, TransformerLanguageModel
from asr.models.las import LAS
from asr.models.transformer import Conformer, Transformer
from asr.tasks.language import LanguageObjective
from asr.training import distributed, losses, trainer
from asr.training.checkpoint import load_weights, read_training, save_checkpoint
from asr.training.losses import SpeechObjective
from asr.training.optim import load_moments, make_optimizer

META = torch.device("meta")
F, V = 20, 11  # features, vocabulary
WAITS_OF_A_STEP = 1  # norm, loss and count, read together


class BlockingCopies(TorchDispatchMode):
    """Lists the copies from the CPU to the device that are waited for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and not kwargs.get("non_blocking"):
            moves = args[0].device.type == "cpu" and str(kwargs.get("device", "cpu")) == "meta"
            self.found += [caller()] if moves else []
        return function(*args, **kwargs)


class NewTensors(TorchFunctionMode):
    """Lists the tensors that are made on the device from Python's numbers, a copy, too."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and str(kwargs.get("device", "cpu")) == "meta":
            self.found.append(caller())
        return function(*args, **kwargs)


def caller():
    frame = sys._getframe()
    while not ("/asr/" in frame.f_code.co_filename or frame.f_back is None):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def speech_batch():
    features, tokens = torch.randn(3, 37, F), torch.randint(4, V, (3, 5))
    lengths, sizes = torch.tensor([37, 23, 31]), torch.tensor([5, 3, 4])
    again = torch.randn(3, 37, F)
    return Batch(("a", "b", "c"), features, lengths, tokens, sizes, 1.0, second_view=again)


def las(**keys):
    listener = ListenerConfig(layers=2, hidden=7, pyramid=(2,), convolution=2, dropout=0.1)
    speller = SpellerConfig(hidden=7, embedding=3, dropout=0.1, **keys)
    parts = {"listener": listener, "speller": speller, "attention_size": 5, "ctc_weight": 0.3}
    return LAS(F, V, LasConfig(kind="las", **parts))


SMALL = {"d_model": 8, "heads": 2, "feed_forward": 13, "encoder_layers": 2, "decoder_layers": 2}
SMALL |= {"dropout": 0.1, "layer_drop": 0.2, "drop_head": 0.1, "ctc_weight": 0.3}


def transformer():
    return Transformer(F, V, TransformerConfig(kind="transformer", **SMALL))


def conformer():
    config = ConformerConfig(kind="conformer", kernel=3, convolution_norm="batch", **SMALL)
    return Conformer(F, V, config)


def speech(model, **parts):
    return SpeechObjective(model, 0.3, 0.1, **parts), speech_batch()


def language(model):
    tokens, counts = torch.randint(4, V, (3, 5)), torch.tensor([5, 3, 4])
    batch = SentenceBatch(("a", "b", "c"), tokens, counts, torch.tensor([2, 1, 1]))
    return LanguageObjective(model, 0.1), batch


def images(objective):
    return objective, ImageBatch(("a", "b", "c"), torch.rand(3, 8, 8), torch.tensor([0, 4, 2]))


GUIDE = GuidedAttentionConfig(weight=1.0, width=0.1, steps=9)
LANGUAGE = {"d_model": 8, "heads": 2, "feed_forward": 13, "layers": 2}
FAMILIES = {
    "las": lambda: speech(las(), guided_attention=GUIDE),
    "las sampled": lambda: speech(las(scheduled_sampling=0.2)),
    "transformer": lambda: speech(transformer()),
    "transformer consistent": lambda: speech(transformer(), consistency=ConsistencyConfig()),
    "conformer": lambda: speech(conformer()),
    "language lstm": lambda: language(
        LSTMLanguageModel(V, LSTMLanguageModelConfig(kind="lstm", hidden=7, embedding=5))
    ),
    "language transformer": lambda: language(
        TransformerLanguageModel(V, TransformerLanguageModelConfig(kind="transformer", **LANGUAGE))
    ),
    "images": lambda: images(
        ClassObjective(RowClassifier(8, 5, RowClassifierConfig(kind="rows", hidden=7)), 0.1)
    ),
    "draw": lambda: images(
        BoundObjective(Draw(8, 8, DrawConfig(kind="draw", glimpses=2, read=2, write=3)))
    ),
}


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Meta tensors take the path of a GPU's; autocast does not know them."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(dispatch, "is_traced", lambda *tensors: False, raising=False)


def ctc_on_meta(log_probs, frames, tokens, lengths):
    """torch computes no CTC loss there. On a GPU it reads the lengths on the CPU."""
    places = [part.device.type for part in (log_probs, frames, tokens, lengths)]
    assert places == ["meta", "cpu", "meta", "cpu"]
    return log_probs.sum()


@pytest.mark.slow
@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_waits_for_the_device_once(family, monkeypatch):
    objective, batch = FAMILIES[family]()
    objective.to(META)
    reads = []

    def read(values):
        reads.append(len(values))
        return torch.tensor([1.0, 2.0, 3.0])

    monkeypatch.setattr(trainer, "read", read)
    monkeypatch.setattr(losses, "ctc_loss", ctc_on_meta)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    with NewTensors() as made, BlockingCopies() as copies:
        step = trainer.take_step(objective, [batch.to(META)] * 2, optimizer, 0.1, TrainConfig())
    assert step.finite
    assert len(reads) == WAITS_OF_A_STEP
    assert not made.found + copies.found


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("family", ["las", "transformer", "conformer"])
def test_a_step_of_beam_search_reads_the_device_once_and_once_more_for_what_ended(
    family, monkeypatch
):
    made = {"las": las, "transformer": transformer, "conformer": conformer}
    models = made[family]().to(META).eval(), FAMILIES["language lstm"]()[0].model.to(META).eval()
    batch, reads = speech_batch().to(META), []

    def rows_of_numbers(*columns):
        reads.append(len(columns))
        width = sum(part[0].numel() for part in columns)
        return [[float(len(reads) == 2)] * width for _ in columns[0]]

    monkeypatch.setattr(beam_search, "rows_of_numbers", rows_of_numbers)
    config = BeamConfig(beam=3, ctc_weight=0.3)
    finished = [FinishedHypotheses(1) for _ in range(3)]
    with torch.no_grad(), NewTensors() as made, BlockingCopies() as copies:
        memory = models[0].encode(batch.features, batch.lengths)
        prefixes = CTCPrefixScorer(models[0].ctc(memory))
        search = BeamSearch(config, [(0.7, models[0]), (0.3, prefixes), (0.2, models[1])])
        state = search.start(memory, scorer.length_limits(memory.valid, 1.0, 10.0))
        for kept in ([0, 1, 2], [0, 2], [1]):
            candidates = search._step(state)
            with monkeypatch.context() as own:  # all NaN flags of the second step are set
                own.setattr(beam_search, "check_not_nan", lambda is_nan: None)
                search._collect_finished(candidates, finished)
            state = candidates.select(search.scorers, scorer.indices(kept, META))
            finished = [finished[b] for b in kept]
    assert reads == [4, 4, 5, 4]  # of the second step the hypotheses that ended, too
    assert not made.found + copies.found


def test_a_batch_keeps_its_lengths_on_the_cpu():
    moved = speech_batch().to(META)
    tensors = {name: part for name, part in vars(moved).items() if isinstance(part, torch.Tensor)}
    places = {name: part.device.type for name, part in tensors.items()}
    on_device = dict.fromkeys(("features", "tokens", "second_view"), "meta")
    assert places == on_device | dict.fromkeys(("lengths", "token_lengths"), "cpu")


def test_the_loader_pins_what_is_copied(monkeypatch):
    """torch pins the tensors of a class of ours only by its own method."""
    pinned = []

    def pin_memory(tensor, device=None):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pin = torch.utils.data._utils.pin_memory.pin_memory
    batch = replace(speech_batch(), other_speeds=((torch.rand(3, 5, F), torch.tensor([5, 4, 3])),))
    ours = pin(batch)
    copied = ours.features, ours.tokens, ours.second_view, ours.other_speeds[0][0]
    assert {id(part) for part in pinned} == {id(part) for part in copied}
    torch.testing.assert_close(ours.features, batch.features)
    sentences = FAMILIES["language lstm"]()[1]
    pinned.clear()
    ours = pin(sentences)
    assert {id(part) for part in pinned} == {id(ours.tokens), id(ours.words)}


class StandInGraph:
    def __init__(self, loop, inputs, outputs):
        self.loop, self.inputs, self.outputs = loop, inputs, outputs

    def replay(self):
        for out, new in zip(self.outputs, self.loop(*self.inputs), strict=True):
            if out is not None:
                out.copy_(new)


def test_replayed_graphs_read_new_inputs_and_are_dropped_beyond_their_memory():
    recorded = []

    def record(loop, inputs):
        outputs = loop(*inputs)
        recorded.append(len(inputs[0]))
        return Recorded(StandInGraph(loop, inputs, outputs), inputs, outputs)

    def loop(x, mask):
        return (2 * x,)

    graphs = GraphCache(record)
    room = 3 * 2 * 7 * 4  # three graphs, each with input and output of 7 numbers of 4 bytes
    first = graphs.replay(0, loop, room, torch.ones(7), None)
    again = graphs.replay(0, loop, room, torch.full((7,), 3.0), None)
    assert (first[0].tolist(), again[0].tolist()) == ([2.0] * 7, [6.0] * 7)
    for key in (1, 2, 0, 3):  # 1 is the one not used for the longest time
        graphs.replay(key, loop, room, torch.ones(7), None)
    assert list(graphs.recorded) == [2, 0, 3]
    assert recorded == [7] * 4
    for _ in range(2):  # larger than all room: kept alone
        graphs.replay(4, loop, room, torch.ones(70), None)
    assert list(graphs.recorded) == [4]


def test_loops_that_do_not_fit_together_are_not_recorded_again_in_each_step():
    recorded = []

    def record(loop, inputs):
        outputs = loop(*inputs)
        recorded.append(float(inputs[0][0]))
        return Recorded(StandInGraph(loop, inputs, outputs), inputs, outputs)

    graphs, room = GraphCache(record), 3 * 2 * 7 * 4  # three graphs, as above

    def run(*keys):
        for key in keys:
            (found,) = graphs.replay(key, lambda x: (2 * x,), room, torch.full((7,), float(key)))
            assert found.tolist() == [2.0 * key] * 7

    for _ in range(5):  # steps of five loops each
        run(0, 1, 2, 3, 4)
    assert recorded == [0, 1, 2, 3] and list(graphs.recorded) == [1, 2, 3]
    run(5, 6, 5, 6)  # other shapes, now more frequent than the first ones
    assert recorded == [0, 1, 2, 3, 5, 6] and list(graphs.recorded) == [3, 5, 6]
    graphs.clear()
    run(7)
    assert list(graphs.recorded) == [7]


def test_threads_that_share_a_graph_get_their_own_results():
    graphs = GraphCache(
        lambda loop, given: Recorded(StandInGraph(loop, given, out := loop(*given)), given, out)
    )
    before, wrong = sys.getswitchinterval(), []

    def work(number):
        x = torch.full((1000,), float(number))
        for _ in range(300):
            (found,) = graphs.replay(0, lambda x: (2 * x,), 1e9, x)
            wrong.extend([] if torch.equal(found, 2 * x) else [number])

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_a_graph_is_of_one_precision_of_products():
    x, before = torch.ones(3), torch.get_float32_matmul_precision()
    keys = {graph_key("plan", "loop", x, None), graph_key("plan", "loop", x.clone(), None)}
    try:
        torch.set_float32_matmul_precision("high")
        keys.add(graph_key("plan", "loop", x, None))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(keys) == 2


def test_a_lack_of_memory_frees_the_graphs_before_the_halves_are_tried(monkeypatch):
    freed = []
    monkeypatch.setattr(dispatch.cuda, "release_graphs", lambda: freed.append(True))

    class Full(losses.SpeechObjective):
        def forward(self, batch):
            if len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            assert freed
            return super().forward(batch)

    objective = Full(las(), 0.3, 0.1)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    lines = []
    trainer.take_step(objective, [speech_batch()], optimizer, 0.1, TrainConfig(), lines.append)
    assert len(lines) == 1 and freed == [True]


def test_a_checkpoint_saved_on_a_gpu_is_resumed_on_a_cpu(tmp_path, monkeypatch):
    """The file names the device of each tensor; it is loaded where there is no such device."""
    model = nn.Linear(5, 3)
    config = OptimizerConfig(kind="adamw")
    optimizer = make_optimizer(config, model)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    training = training_state(optimizer=optimizer.state_dict())
    tag = torch.serialization.location_tag
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    saved = save_checkpoint(tmp_path, model, training, 1, 0.5, {})
    monkeypatch.setattr(torch.serialization, "location_tag", tag)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(saved.folder / "training.pt", weights_only=True)
    other = nn.Linear(5, 3)
    resumed = make_optimizer(config, other)
    load_weights(other, [saved], {})
    load_moments(resumed, read_training(saved)["optimizer"])
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_missing_package_of_cuda_is_a_reason_and_no_error(monkeypatch):
    """torch for AMD GPUs has triton, but does not install cuda-bindings."""
    monkeypatch.setattr(cluster.lstm, "missing", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", None)  # import cuda fails
    monkeypatch.delitem(sys.modules, "cuda.bindings", raising=False)
    assert cluster.missing.__wrapped__() == "cuda-bindings is not installed"


@pytest.mark.parametrize(("major", "expected"), [(7, False), (8, True)])  # T4, A100
def test_bf16_is_used_on_gpus_that_have_instructions_for_it(major, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(major=major, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert distributed.computes_bf16(torch.device("cuda")) == expected


def test_each_rank_takes_its_own_gpu_and_sums_on_it(monkeypatch):
    selected = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    assert distributed._select_gpu("auto", 1) == "cpu:gloo,cuda:nccl"
    assert distributed._select_gpu("cpu", 1) == "gloo"
    assert selected == [1]
    assert distributed.choose_device("auto") == torch.device("cuda")  # the one selected
    with pytest.raises(UserError, match=r"train\.device = cuda:1 is one GPU for all ranks"):
        distributed._select_gpu("cuda:1", 1)
    with pytest.raises(UserError, match=r"2 GPUs for rank 2 .* take --nproc-per-node=2"):
        distributed._select_gpu("cuda", 2)
    with pytest.raises(UserError, match=r"train\.device = cuda:2: this machine has no such GPU"):
        distributed.choose_device("cuda:2")


def test_a_named_gpu_becomes_the_current_one(monkeypatch):
    """On which streams, graphs and kernels of Triton are made."""
    selected = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    for name in ("cpu", "cuda", "cuda:1"):
        assert distributed.choose_device(name) == torch.device(name)
    assert selected == [torch.device("cuda:1")]
