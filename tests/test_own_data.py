"""Data and objectives of a program, in place of the recipe's."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_speech import RATE
from torch.utils.data import Dataset

import asr
from asr.config.loader import read_recipe
from asr.data.corpus import read_manifest
from asr.errors import UserError
from asr.features.audio import read_audio
from asr.training.checkpoint import list_checkpoints
from asr.training.losses import SpeechObjective, Sum

STEPS = ["train.steps=3", "data.workers=1", "train.schedule.kind=constant"]


class Recordings(Dataset):
    """A manifest as a user's Dataset of samples."""

    def __init__(self, manifest, **changes):
        self.corpus, self.changes = read_manifest(manifest), changes

    def __len__(self):
        return len(self.corpus)

    def __getitem__(self, index):
        u = self.corpus[index]
        audio = {"array": read_audio(u.audio, RATE).numpy(), "sampling_rate": RATE}
        return {"id": u.id, "speaker": u.speaker, "audio": audio, "text": u.text} | self.changes


def weights(run):
    return load_file(list_checkpoints(run.folder)[-1].folder / "model.safetensors")


def assert_equal(one, other):
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(other)[name], atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("as_list", [False, True])
def test_a_dataset_trains_as_its_manifest(as_list, tiny, tmp_path):
    """Samples in memory, or a list of examples that name files; also resumed."""
    data = {role: Recordings(tiny.parent / f"{role}.tsv") for role in ("train", "valid")}
    if as_list:
        data = {
            role: [{"id": u.id, "audio": str(u.audio), "text": u.text} for u in each.corpus]
            for role, each in data.items()
        }
    parts = {f"{role}_data": each for role, each in data.items()}
    judge = asr.api.train(tiny, STEPS, tmp_path / "judge")
    asr.api.train(tiny, ["train.steps=2", *STEPS[1:]], tmp_path / "ours", **parts)
    ours = asr.api.train(tiny, STEPS, tmp_path / "ours", resume=True, **parts)
    assert_equal(ours, judge)
    stored = read_recipe(tmp_path / "ours" / "recipe.yaml").data
    assert stored.train is None and stored.valid is None
    assert ours.evaluate(tiny.parent / "test.tsv").wer >= 0


def test_other_examples_on_resume_are_refused(tiny, tmp_path):
    data = Recordings(tiny.parent / "train.tsv")
    asr.api.train(tiny, ["train.steps=1"], tmp_path, train_data=data)
    data = Recordings(tiny.parent / "train.tsv", text="abc")
    with pytest.raises(UserError, match=r"its data or objective have changed since: data\.train"):
        asr.api.train(tiny, ["train.steps=2"], tmp_path, train_data=data, resume=True)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text": None}, r"train_data\[0\]: an example must be a mapping with"),
        ({"audio": np.zeros(99)}, r"train_data\[0\]: an example must be"),
        ({"audio": {"array": np.zeros(99)}}, r"train_data\[0\]: an example must be"),
        (
            {"audio": {"array": np.zeros(9), "sampling_rate": 0}},
            r"train_data\[0\]: an example must",
        ),
        ({"audio": "none.wav"}, r"train_data\[0\]: none.wav: .*no such file"),
        ({"id": "same"}, r"train_data\[1\]: the id same of train_data\[0\] again"),
    ],
)
def test_wrong_examples(changes, fault, tiny, tmp_path):
    data = Recordings(tiny.parent / "train.tsv", **changes)
    with pytest.raises(UserError, match=fault):
        asr.api.train(tiny, STEPS, tmp_path / "run", train_data=data)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        UserError, match=r"valid_data is missing, and the recipe has no data\.valid"
    ):
        asr.api.train(tiny, [*STEPS, "data.valid=null"], tmp_path / "run", train_data=[])
    with pytest.raises(UserError, match="valid_data: no examples"):
        asr.api.train(tiny, STEPS, tmp_path / "run", valid_data=[])


@pytest.mark.parametrize("data", [{"train": []}, iter([])])
def test_data_without_rows_are_refused(data, tiny, tmp_path):
    """Such as a DatasetDict or a generator."""
    with pytest.raises(UserError, match="train_data: must be a list or a Dataset with a length"):
        asr.api.train(tiny, STEPS, tmp_path / "run", train_data=data)


class WithTwice(SpeechObjective):
    """Twice the gradient, which the clipped step does not show, and one more figure."""

    def forward(self, batch):
        sums = super().forward(batch)
        loss, count = sums["objective"]
        return sums | {"objective": Sum(2 * loss, count), "twice": Sum(2 * loss.detach(), count)}


@pytest.mark.slow
def test_an_objective_of_the_program(tiny, tmp_path):
    run = asr.api.train(tiny, STEPS, tmp_path / "run", objective=WithTwice)
    plain = asr.api.train(tiny, STEPS, tmp_path / "plain")
    first, judge = (each.history()[0] for each in (run, plain))
    assert first["train/twice"] == pytest.approx(2 * judge["train/objective"], rel=1e-5)
    assert first["train/objective"] == pytest.approx(first["train/twice"], rel=1e-6)
    settings = asr.api.compare([run.folder, plain.folder]).settings
    assert [("objective" in one.factors, len(one.members)) for one in settings] == [
        (True, 1),
        (False, 1),
    ]
    fault = r"have changed since: objective: WithTwice class -> SpeechObjective\. Restore"
    with pytest.raises(UserError, match=fault):
        asr.api.train(tiny, ["train.steps=4", *STEPS[1:]], tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="only speech takes data or objective"):
        asr.api.train("mnist_rows", [], tmp_path / "x", objective=WithTwice)
