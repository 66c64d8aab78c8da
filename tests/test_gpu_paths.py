"""What a GPU run does, as far as it can be seen without a GPU.

Tensors on the device `meta` have no values: reading one raises an error, where on a GPU the program
would wait for it, and so does mixing them with tensors on the CPU.
"""

import sys
from dataclasses import replace

import pytest
import torch
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
    SpellerConfig,
    TrainConfig,
    TransformerConfig,
)
from asr.data.batching import Batch
from asr.data.text_corpus import SentenceBatch
from asr.images.config import DrawConfig, RowClassifierConfig
from asr.images.data import ImageBatch
from asr.images.models import Draw, RowClassifier
from asr.images.task import BoundObjective, ClassObjective
from asr.models.conformer import Conformer
from asr.models.language_model import LSTMLanguageModel, TransformerLanguageModel
from asr.models.las import LAS
from asr.models.transformer import Transformer
from asr.tasks.language import LanguageObjective
from asr.training import losses, trainer
from asr.training.losses import SpeechObjective

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
    return Batch(("a", "b", "c"), features, lengths, tokens, sizes, 1.0, again=again)


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


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """Autocast does not know the device meta."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)


def ctc_on_meta(log_probs, frames, tokens, lengths):
    """torch computes no CTC loss there. On a GPU it reads the lengths on the CPU."""
    places = [part.device.type for part in (log_probs, frames, tokens, lengths)]
    assert places == ["meta", "cpu", "meta", "cpu"]
    return log_probs.sum()


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
