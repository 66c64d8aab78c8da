"""The commands end to end on a few tones: train, resume, evaluate, transcribe."""

import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from event_files import curve, events
from safetensors.torch import load_file
from tiny_speech import RATE, age

from asr import evaluate, train, transcribe
from asr.analysis.runs import unfinished_note
from asr.config.loader import read_recipe, write_recipe
from asr.data import loader
from asr.data.corpus import read_manifest, write_manifest
from asr.data.tokenizer import load_tokenizer
from asr.errors import EXIT_STOPPED
from asr.inference import tune
from asr.inference.recognition import Recognizer
from asr.tasks.speech import SpeechTask
from asr.training import distributed, losses, trainer
from asr.training.checkpoint import choose, list_checkpoints
from asr.training.losses import SpeechObjective


def last_state(run):
    """Weights, optimiser state and position of the last checkpoint, as one flat dict."""
    folder = list_checkpoints(run)[-1].folder
    state = torch.load(folder / "training.pt", weights_only=True)
    state["position"].pop("train_seconds")  # measured time
    moments = {
        f"{key}.{number}": value
        for number, one in state["optimizer"]["state"].items()
        for key, value in one.items()
    }
    random = {"random": state["random"]["cpu"]}
    return load_file(folder / "model.safetensors") | moments | random, state["position"]


def assert_same_state(run, other):
    (tensors, position), (expected, place) = last_state(run), last_state(other)
    assert position == place and tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_folder_contains_its_files(tiny, tiny_run):
    names = {path.name for path in tiny_run.iterdir()}
    assert {"recipe.yaml", "tokenizer.json", "train.log", "checkpoints"} <= names
    assert read_recipe(tiny_run / "recipe.yaml") == read_recipe(tiny)
    assert not [name for name in names if "part" in name]


def test_curves_images_and_texts_are_written(drawn, tiny, commands, tmp_path):
    assert commands(train, tiny, "--run", tmp_path, "train.samples=1")[0] == 0
    board = events(tmp_path)
    scalars = set(board.Tags()["scalars"])
    assert {f"train/{n}" for n in ("objective", "nll", "ctc", "accuracy")} <= scalars
    assert {f"valid/{n}" for n in ("nll", "accuracy", "wer", "ctc_wer", "diagonality")} <= scalars
    assert {"train/learning_rate", "train/gradient_norm", "speed/audio_per_second"} <= scalars
    groups = {name.partition("/")[0] for name in scalars}
    assert groups == {"train", "valid", "speed", "best"}
    (explained,) = board.Tensors("about/scalars/text_summary")
    meanings = explained.tensor_proto.string_val[0].decode()
    assert all(f"`{n}`" in meanings for n in scalars if not n.startswith("best/"))
    assert set(board.Tags()["images"]) == {"valid_attention/valid-0", "valid_features/valid-0"}
    assert (
        len(board.Images("valid_features/valid-0"))
        == 1
        < len(board.Images("valid_attention/valid-0"))
    )
    (shown, *_) = board.Tensors("decoded/valid-0/text_summary")
    assert "reference: cb a" in shown.tensor_proto.string_val[0].decode()
    for name in ("train/nll", "valid/nll", "valid/wer"):
        steps = [step for step, _ in curve(tmp_path, name)]
        assert steps == sorted(set(steps)) and steps[0] > 0, f"{name} has a point beside its curve"


def test_the_wer_curve_covers_the_whole_split(tiny, commands, tmp_path):
    """Of three utterances, which might be of three speakers, the first and the last."""
    two = "train.wer_utterances=2", "train.samples=2", "train.steps=1"
    assert commands(train, tiny, "--run", tmp_path, *two)[0] == 0
    texts = set(events(tmp_path).Tags()["tensors"])
    assert {f"decoded/valid-{n}/text_summary" for n in (0, 2)} <= texts
    assert "decoded/valid-1/text_summary" not in texts


def test_the_validation_loss_is_the_model_s_on_that_split(tiny, tiny_run):
    """Computed utterance by utterance with torch's cross_entropy; best by that loss."""
    recognizer = Recognizer.load(tiny_run, ["decode.checkpoint=last"])
    total, count = 0.0, 0
    for utterance in read_manifest(tiny.parent / "valid.tsv"):
        features = recognizer.front_end.features(recognizer.front_end.load(utterance.audio))
        ids = recognizer.tokenizer.encode(utterance.text)
        recognizer.model.eval()
        with torch.no_grad():
            memory = recognizer.model.encode(features[None], torch.tensor([len(features)]))
            logits = recognizer.model.decode(memory, torch.tensor([[2, *ids]]))[0]
        targets = torch.tensor([*ids, 3])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    step, value = curve(tiny_run, "valid/nll")[-1]
    assert value == pytest.approx(total / count, rel=1e-4)
    assert list_checkpoints(tiny_run)[-1].step == step
    assert list_checkpoints(tiny_run)[-1].loss == pytest.approx(value, rel=1e-5)


class Killed(KeyboardInterrupt):
    """An interruption by Ctrl-C."""


@pytest.mark.parametrize(("step", "workers"), [(2, 2), (5, 0)])
def test_resume_gives_the_same_bits(step, workers, tiny, tiny_run, commands, tmp_path, monkeypatch):
    """Killed in the middle of an epoch, resumed with another number of workers."""
    write = trainer.Training.write_checkpoint

    def killer(self):
        write(self)
        if self.state.step == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, "write_checkpoint", killer)
        code, *_ = commands(train, tiny, "--run", tmp_path, "train.save_every=1")
    _, position = last_state(tmp_path)
    assert code == 130 and position["step"] == step and position["batch"] > 0
    age(tmp_path)
    arguments = (tiny, "--run", tmp_path, "--resume", f"data.workers={workers}")
    code, out, _ = commands(train, *arguments)
    assert code == 0 and "resuming tiny" in out
    assert_same_state(tmp_path, tiny_run)
    steps = [at for at, _ in curve(tmp_path, "train/nll")]
    assert steps == sorted(set(steps)) == [at for at, _ in curve(tiny_run, "train/nll")]


def test_resume_without_a_checkpoint_starts_anew(tiny, commands, tmp_path):
    run = tmp_path / "misspelt"
    code, out, _ = commands(train, tiny, "--run", run, "--resume", "train.steps=1")
    assert code == 0 and f"{run} has no checkpoint: training starts from step 0" in out


def last_weights(run):
    return load_file(list_checkpoints(run)[-1].folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "muon", "schedule_free"])
def test_frozen_parts_and_rates_by_part_resume_bit_for_bit(
    kind, tiny, commands, tmp_path, monkeypatch
):
    """The stage unfreezes the listener's lower layer; the run is killed before and after."""
    options = [
        tiny,
        f"train.optimizer.kind={kind}",
        f"train.schedule.kind={'constant' if kind == 'schedule_free' else 'cosine'}",
        "train.optimizer.lr_factors={speller.*: 0.5, '*': 0.9}",
        "train.freeze=[listener.*]",
        "stages=[{start: 0.5, train: {freeze: [listener.layers.1.*]}}]",
        "train.save_every=1",
        "train.keep=9",
    ]
    code, out, _ = commands(train, *options, "--run", tmp_path / "straight")
    assert code == 0, out
    assert re.search(r"0\.00 M parameters, of which 0\.00 M train, ", out)
    assert re.search(r"stage 2 of 2, .* train.freeze .*; 0\.00 M parameters, of which 0\.00 M", out)
    straight = {
        c.step: load_file(c.folder / "model.safetensors")
        for c in list_checkpoints(tmp_path / "straight")
    }
    assert sorted(straight) == [1, 2, 3, 4, 5, 6]
    listener = [name for name in straight[1] if name.startswith("listener.")]
    assert all(torch.equal(straight[1][name], straight[3][name]) for name in listener)
    moved = {name for name in listener if not torch.equal(straight[3][name], straight[6][name])}
    assert moved and moved == {name for name in listener if ".layers.1." not in name}
    for step in (2, 4):
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            assert commands(train, *options, "--run", tmp_path / "killed", *resumed(step))[0] == 130
    code, out, _ = commands(train, *options, "--run", tmp_path / "killed", "--resume")
    assert code == 0, out
    assert_same_state(tmp_path / "killed", tmp_path / "straight")


def resumed(step):
    return ["--resume"] if step > 2 else []


def killed_at(patch, step):
    write = trainer.Training.write_checkpoint

    def killer(self):
        write(self)
        if self.state.step == step:
            raise Killed

    patch.setattr(trainer.Training, "write_checkpoint", killer)


@pytest.mark.slow
def test_early_stopping_ends_the_run_and_more_patience_continues_it(
    tiny, commands, tmp_path, monkeypatch
):
    """The figures are replaced, so that the best is known: 0.4 at step 2."""
    values = dict(enumerate([0.5, 0.4, 0.6, 0.45, 0.4, 0.9], start=1))
    report = SpeechTask.report
    monkeypatch.setattr(
        SpeechTask,
        "report",
        lambda task, log, step: report(task, log, step) | {"wer": values[step]},
    )
    early = "train.early_stopping={metric: wer, patience: %d}"
    options = [tiny, "train.validate_every=1", "train.keep=1", "--run"]
    code, out, _ = commands(train, *options, tmp_path / "straight", early % 9)
    assert code == 0 and "stopped early" not in out
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, 3)  # with one of two validations without improvement
        assert commands(train, *options, run, early % 2)[0] == 130
    for _ in range(2):  # the second finds it stopped
        code, out, err = commands(train, *options, run, early % 2, "--resume")
        assert code == 0, err
        line = "stopped early: wer has not improved for 2 validations; best WER 40.0 % at step 2"
        assert line in out and "finished at step 4" in out
        kept = {c.step: c.loss for c in list_checkpoints(run)}
        assert kept == {2: 0.4, 4: 0.45}  # keep_best has the best, by the metric
    line = commands.refused(train, *options, run, "--resume", "--force")
    assert "checkpoints are ranked by wer, which cannot change to nll: restore train.early" in line
    code, out, _ = commands(train, *options, run, early % 9, "--resume")
    assert code == 0 and "patience 2 -> 9" in out
    assert_same_state(run, tmp_path / "straight")


def test_a_metric_that_is_not_measured_is_refused(tiny, commands, tmp_path):
    early = "train.early_stopping={metric: %s}"
    for metric, more in (("ctc_wer", "model.ctc_weight=0"), ("perplexity", "seed=2")):
        line = commands.refused(train, tiny, "--run", tmp_path, early % metric, more)
        assert f"train.early_stopping.metric = {metric} is not measured with this recipe" in line
    line = commands.refused(train, "demo_lm", "--run", tmp_path, early % "wer")
    assert "train.early_stopping.metric = wer is not measured" in line
    for name, metric in (("draw", "accuracy"), ("mnist_rows", "perplexity")):
        line = commands.refused(train, name, "--run", tmp_path, early % metric)
        assert f"train.early_stopping.metric = {metric} is not measured" in line


@pytest.fixture
def rooms(tmp_path):
    """Manifests of noise and room responses without the columns that speech needs."""
    random, folder = np.random.default_rng(1), tmp_path / "rooms"
    folder.mkdir()
    for name in ("noise", "rooms"):
        for number in range(2):
            samples = random.standard_normal(700) * 0.99 ** np.arange(700)
            soundfile.write(folder / f"{name}{number}.wav", 0.1 * samples, RATE)
        rows = "".join(f"{name}{number}\t{name}{number}.wav\n" for number in range(2))
        (folder / f"{name}.tsv").write_text(f"id\taudio\n{rows}")
    return folder


@pytest.mark.slow
def test_noise_and_rooms_from_files_do_not_depend_on_workers_and_resume(
    rooms, tiny, tiny_run, commands, tmp_path, monkeypatch
):
    options = [tiny, f"features.noise_files={rooms}/noise.tsv", "features.noise=[0, 10]"]
    options += [f"features.room_responses={rooms}/rooms.tsv", "train.save_every=1"]
    options += ["stages=[{start: 0.5, features: {room_probability: 1}}]"]
    assert commands(train, *options, "--run", tmp_path / "straight")[0] == 0
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, 2)
        assert commands(train, *options, "--run", run, "data.workers=2")[0] == 130
    changed = (rooms / "noise.tsv").read_text()
    (rooms / "noise.tsv").write_text(changed + "again\tnoise0.wav\n")
    line = commands.refused(train, *options, "--run", run, "--resume")
    assert "its data or objective have changed since: features.noise_files: 2 files -> 3" in line
    (rooms / "noise.tsv").write_text(changed)
    assert commands(train, *options, "--run", run, "--resume", "data.workers=1")[0] == 0
    assert_same_state(run, tmp_path / "straight")
    plain, noisy = last_weights(tiny_run), last_weights(run)
    assert not all(torch.equal(plain[name], noisy[name]) for name in plain)
    (rooms / "noise.tsv").unlink()
    Recognizer.load(run)  # needs none of the files


def test_files_of_noise_that_cannot_be_used_are_reported(rooms, tiny, commands, tmp_path):
    key = f"features.noise_files={rooms}/noise.tsv"
    options = [tiny, "--run", tmp_path / "run", key]
    line = commands.refused(train, *options, "features.noise=null")
    assert "features.noise_files = MANIFEST needs the SNR in dB" in line
    more = [*options, "features.noise_probability=1", "data.max_unreadable=1"]
    soundfile.write(rooms / "noise1.wav", np.zeros(500), RATE)
    code, out, err = commands(train, *more)
    assert code == 0, err
    assert re.search(r"skipped train-\d+: .*noise1.wav: silent, all samples are 0", out)
    (rooms / "noise0.wav").write_text("no audio")
    line = commands.refused(train, tiny, "--run", tmp_path / "other", key)
    assert line.startswith("features.noise_files: ") and "noise0.wav: not readable as audio" in line
    for content, fault in {
        "id\taudio\nx\t/etc/passwd\n": "is outside the manifest's folder",
        "id\ttext\nx\ty\n": "no column audio",
        "id\taudio\n": "the manifest is empty",
    }.items():
        (rooms / "noise.tsv").write_text(content)
        line = commands.refused(train, tiny, "--run", tmp_path / "other", key)
        assert line.startswith("features.noise_files: ") and fault in line
    (rooms / "noise.tsv").unlink()
    line = commands.refused(train, tiny, "--run", tmp_path / "other", key)
    assert line.startswith("features.noise_files: ") and "noise.tsv" in line


def test_a_pattern_of_a_stage_is_checked_at_the_start(tiny, commands, tmp_path):
    stage = "stages=[{start: 0.5, train: {freeze: [encoder.*]}}]"
    line = commands.refused(train, tiny, "--run", tmp_path / "run", stage)
    assert (
        "train.freeze: no parameter has a name like 'encoder.*'; names begin with listener" in line
    )
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.json"))


@pytest.mark.slow
def test_frozen_batch_norm_keeps_its_statistics(tiny, commands, tmp_path):
    """Also in a run with the nan checks, whose hooks want gradients."""
    model = "{kind: conformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 2, "
    model += "decoder_layers: 1, convolution_norm: batch, kernel: 3, reduction: 2}"
    options = [tiny, f"model={model}", "train.guided_attention=null", "train.debug=nan"]
    code, _, err = commands(train, *options, "train.freeze=[encoder.layers.0.*]", "--run", tmp_path)
    assert code == 0, err
    weights = last_weights(tmp_path)
    means = {name: w for name, w in weights.items() if name.endswith("running_mean")}
    assert len(means) == 2
    for name, mean in means.items():
        assert bool(mean.any()) == ("layers.1." in name), name


def test_a_run_is_not_resumed_to_an_end_before_its_last_step(tiny, run, commands):
    before = (run / "recipe.yaml").read_bytes(), last_state(run)[1]
    for end, reason in {
        "train.epochs=1": "2 epochs are done, more than train.epochs = 1",
        "train.steps=5": "6 steps are done, more than train.steps = 5",
    }.items():
        line = commands.refused(train, tiny, "--run", run, "--resume", "--force", end)
        assert line == f"{run}: {reason}: raise it, or choose another --run"
    assert before == ((run / "recipe.yaml").read_bytes(), last_state(run)[1])
    assert commands(train, tiny, "--run", run, "--resume", "train.steps=6")[0] == 0
    assert commands(train, tiny, "--run", run, "--resume", "train.steps=7")[0] == 0
    assert last_state(run)[1]["step"] == 7  # the first step of an epoch, which so has begun
    line = commands.refused(train, tiny, "--run", run, "--resume", "train.epochs=2")
    assert "3 epochs are done, more than train.epochs = 2" in line


@pytest.mark.slow
def test_a_learning_rate_that_more_epochs_change_is_logged(tiny, run, commands, tmp_path):
    """Where the rate had fallen to its end; the log has the settings that keep it."""
    kept = shutil.copytree(run, tmp_path / "kept")
    arguments = tiny, "--resume", "train.epochs=3", "--run"
    code, out, _ = commands(train, *arguments, run)
    # After 2 of 5 batches of the third epoch; in the second half of the run it falls to 5 %.
    rate = 0.01 * 0.05 ** (((2 + 2 / 5) / 3 - 0.5) / 0.5)
    assert code == 0 and f"learning rate 0.0005 -> {rate:.3g} at step 7: train.schedule" in out
    rates = dict(curve(run, "train/learning_rate"))
    assert (rates[6], rates[7]) == pytest.approx((0.0005, rate))
    (settings,) = re.findall("end has changed; (.*) keeps the rate", out)
    code, out, _ = commands(train, *arguments, kept, *settings.split())
    assert code == 0 and "\nlearning rate " not in out
    rates = dict(curve(kept, "train/learning_rate"))
    assert [rates[step] for step in (6, 7, 8, 9)] == pytest.approx([0.0005] * 4)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_replaced_from_the_one_before_it(
    tiny, tiny_run, commands, tmp_path
):
    """The last checkpoint of a finished run is damaged: resuming recreates it bit for bit."""
    assert commands(train, tiny, "--run", tmp_path, "train.save_every=2")[0] == 0
    last = list_checkpoints(tmp_path)[-1].folder
    content = bytearray((last / "training.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (last / "training.pt").write_bytes(content)
    age(tmp_path)
    code, out, _ = commands(train, tiny, "--run", tmp_path, "--resume")
    assert code == 0 and f"{last}: damaged, its checksums differ; it is set aside" in out
    assert "resuming from the one before it, step " in out
    assert_same_state(tmp_path, tiny_run)
    assert curve(tmp_path, "train/nll") == curve(tiny_run, "train/nll")
    assert curve(tmp_path, "valid/nll") == curve(tiny_run, "valid/nll")


def test_torchrun_resumes_only_its_own_run(tiny, run, commands, monkeypatch):
    """torchrun's variables, here for one process: its restart count, and its own folder."""
    line = train, tiny, "--run", run, "train.epochs=3"

    def attempt(number, agent, *options):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{agent}/attempt_{number}/0/error.json")
        return commands(*line, *options)

    for number in (0, 1):
        code, _, err = attempt(number, "/logs/none_a")
        assert code == 2 and "already holds a run; add --resume" in err
    assert attempt(0, "/logs/none_b", "--resume")[0] == 0
    assert attempt(1, "/logs/none_b")[0] == 0
    assert attempt(1, "/logs/none_c")[0] == 2
    assert attempt(1, "/logs/none_c", "--resume")[0] == 0
    monkeypatch.setenv(
        "TORCHELASTIC_ERROR_FILE", "error.json"
    )  # another launch, which starts one process
    assert commands(*line, "--resume")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["step", "validation", "drawing"])
def test_a_signal_saves_and_the_run_can_be_resumed(
    number, where, tiny, tiny_run, commands, tmp_path, monkeypatch
):
    """In the middle of a step, of the first validation, or of its figures."""
    seen = []

    def signalled(original):
        def call(*args, **more):
            if not seen:
                seen.append(os.kill(os.getpid(), number))
            return original(*args, **more)

        return call

    name = {"step": "take_step", "validation": "validate"}.get(where)
    more = ["train.samples=1"] if where == "drawing" else []
    with monkeypatch.context() as patch:
        if name:
            patch.setattr(trainer, name, signalled(getattr(trainer, name)))
        else:
            patch.setattr(SpeechTask, "_pictures", signalled(SpeechTask._pictures))
        code, out, _ = commands(train, tiny, "--run", tmp_path, *more)
    assert code == EXIT_STOPPED == 3 and f"{number.name}: stopped after step " in out
    assert unfinished_note(tmp_path).endswith(
        f"asr.train {tmp_path}/recipe.yaml --run {tmp_path} --resume"
    )
    assert signal.getsignal(number) not in (None, signal.SIG_IGN)
    step = list_checkpoints(tmp_path)[-1].step
    assert step == 1 if where == "step" else step < list_checkpoints(tiny_run)[-1].step
    age(tmp_path)
    assert commands(train, tiny, "--run", tmp_path, "--resume")[0] == 0
    assert unfinished_note(tmp_path) is None
    assert_same_state(tmp_path, tiny_run)
    for name in ("train/nll", "valid/nll", "valid/wer"):
        assert curve(tmp_path, name) == curve(tiny_run, name)


def test_non_finite_losses_stop_the_run_and_the_batches_are_kept(
    tiny, commands, tmp_path, monkeypatch
):
    forward = SpeechObjective.forward

    def poisoned(self, batch):
        if self.training:
            batch.features[0, 1, 2] = math.nan
        return forward(self, batch)

    monkeypatch.setattr(SpeechObjective, "forward", poisoned)
    line = commands.refused(train, tiny, "--run", tmp_path, "train.bad_steps=2")
    folder = tmp_path / "bad_batches" / "00000002"
    assert "step 2: 2 steps in a row without a finite gradient" in line
    assert f"{folder}/report.txt names what is not finite" in line
    (first, *_) = torch.load(folder / "batch.pt", weights_only=True)
    assert first["features"].isnan().any() and first["ids"][0].startswith("train-")
    report = (folder / "report.txt").read_text()
    assert f"not finite: {first['ids'][0]}" in report and "weights: all finite" in report
    assert "gradients: not finite: " in report
    assert load_file(folder / "model.safetensors")
    assert "not used; utterances train-" in (tmp_path / "train.log").read_text()
    assert commands(train, tiny, "--run", tmp_path / "short", "train.steps=2")[0] == 0
    log = (tmp_path / "short" / "train.log").read_text()
    assert "the last 2 steps changed no weight: their gradients were not finite" in log


@pytest.mark.parametrize("every", [1, 100])
def test_weights_that_diverge_stop_the_run_and_are_not_saved(every, tiny, commands, tmp_path):
    more = "train.optimizer.lr=1e38", f"train.save_every={every}", "train.epochs=1"
    line = commands.refused(train, tiny, "--run", tmp_path, *more)
    fault = r"\S+ is (infinite|NaN|[\d.]+e\+37) after its update, and is not saved"
    assert re.match(rf"step 1: a weight of {fault}; lower train.optimizer.lr = 1e\+38", line)
    assert not (tmp_path / "checkpoints").exists()


def test_a_validation_loss_that_is_nan_stops_the_run(tiny, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "means", lambda sums: dict.fromkeys(losses.means(sums), math.nan))
    line = commands.refused(train, tiny, "--run", tmp_path, "train.optimizer.lr=0.5")
    assert line == "step 3: the validation loss is NaN; lower train.optimizer.lr = 0.5"
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_stops_the_run_with_one_line(tiny, commands, tmp_path, monkeypatch):
    write = torch.save

    def full(content, path):
        if content["position"]["step"] > 1:
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
        write(content, path)

    monkeypatch.setattr(torch, "save", full)
    line = commands.refused(train, tiny, "--run", tmp_path, "train.save_every=1")
    assert "00000002: cannot be saved" in line
    assert line.endswith("; step 1 is saved: make room, then resume with --resume")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]


def test_a_killed_worker_ends_the_run_with_one_line(tiny, commands, tmp_path, monkeypatch):
    """By the system when memory is short, at any point of the training."""
    item, parent = loader.UtteranceDataset.__getitem__, os.getpid()

    def killed(self, planned):
        if planned.epoch == 2 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return item(self, planned)

    monkeypatch.setattr(loader.UtteranceDataset, "__getitem__", killed)
    more = ("data.workers=1", "train.save_every=1")
    line = commands.refused(train, tiny, "--run", tmp_path, *more)
    assert line.startswith("a data loader process was killed") and "--resume" in line
    assert "ended: " in (tmp_path / "train.log").read_text().splitlines()[-1]
    assert list_checkpoints(tmp_path)


def test_the_last_step_before_a_kill_at_an_epoch_s_end(
    tiny, tiny_run, commands, tmp_path, monkeypatch
):
    """Before the validation of the epoch, and so without a checkpoint of its last step."""

    def killer(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, "validate_and_save", killer)
        commands(train, tiny, "--run", tmp_path, "train.save_every=1")
    assert commands(train, tiny, "--run", tmp_path, "--resume")[0] == 0
    assert_same_state(tmp_path, tiny_run)


def test_resuming_a_finished_run_changes_nothing(tiny, commands, tmp_path, tiny_run):
    assert (
        commands(train, tiny, "--run", tmp_path, "--resume")[0] == 0
    )  # an empty folder: starts a new run
    assert_same_state(tmp_path, tiny_run)
    code, out, _ = commands(train, tiny, "--run", tmp_path, "--resume")
    assert code == 0 and "finished at step" in out
    assert_same_state(tmp_path, tiny_run)


def test_resuming_keeps_decode_settings_that_tune_has_written(tiny, run, commands):
    path, resume = run / "recipe.yaml", [tiny, "--run", run, "--resume"]
    tune.save(run, read_recipe(path).decode, {"beam": 7, "length_penalty": 0.3})
    tuned = path.read_bytes()
    code, out, _ = commands(train, *resume)
    assert code == 0 and path.read_bytes() == tuned
    assert f"kept in {path}: decode.beam 1 -> 7\n" in out
    # Also after more steps, and beside a key that the command line sets, if to its old value.
    for _ in range(2):
        assert commands(train, *resume, "train.epochs=3", "decode.length_penalty=0.6")[0] == 0
        decode = read_recipe(path).decode
        assert (decode.beam, decode.length_penalty) == (7, 0.6)
    assert commands(train, *resume, "train.epochs=3", "decode={beam: 2}")[0] == 0
    assert read_recipe(path).decode.beam == 2
    path.write_text("x: [")
    code, out, _ = commands(train, *resume, "train.epochs=3")
    assert code == 0 and f"{path}:1: not valid YAML" in out and "It is written again" in out
    assert read_recipe(path).decode.beam == 1


def test_kept_decode_settings_must_fit_those_given(tiny, run, commands):
    path = run / "recipe.yaml"
    write_recipe(read_recipe(path, ["decode.speeds=[0.9,1.0]"]), path)
    resume = [tiny, "--run", run, "--resume", "decode.search=ctc"]
    assert "set decode.speeds=[1.0]" in commands.refused(train, *resume)
    assert commands(train, *resume, "decode.speeds=[1.0]")[0] == 0
    assert read_recipe(path).decode.search == "ctc"


def test_another_seed_is_another_run(tiny, tiny_run, commands, tmp_path):
    assert commands(train, tiny, "--run", tmp_path, "seed=2")[0] == 0
    assert not torch.equal(
        last_state(tmp_path)[0]["ctc_head.weight"], last_state(tiny_run)[0]["ctc_head.weight"]
    )


def test_training_lowers_the_loss(tiny, commands, tmp_path):
    still = [
        "features.spec_augment=null",
        "features.speed_perturb=[1.0]",
        "model.speller.scheduled_sampling=0",
    ]
    plain = ["model.listener.dropout=0", "model.listener.recurrent_dropout=0"]
    more = ["train.steps=40", "train.accumulate=1", "train.batch_seconds=9", "train.keep=2"]
    rates = ["train.optimizer.lr=0.02", "train.validate_every=20", "model.speller.dropout=0"]
    code, *_ = commands(train, tiny, "--run", tmp_path, *still, *plain, *more, *rates)
    assert code == 0
    nats = [value for _, value in curve(tmp_path, "train/nll")]
    assert nats[0] == pytest.approx(math.log(8), rel=0.2)  # 8 tokens, by chance
    assert nats[-1] < 0.75 * nats[0]
    assert [at for at, _ in curve(tmp_path, "valid/wer")] == [20, 40]


def test_fine_tuning_starts_from_another_run_s_weights(tiny, tiny_run, commands, tmp_path):
    hardly = ["train.steps=1", "train.optimizer.lr=1e-12", "seed=9"]
    code, *_ = commands(train, tiny, "--run", tmp_path, f"train.init={tiny_run}", *hardly)
    assert code == 0
    best = min(list_checkpoints(tiny_run), key=lambda c: c.loss)
    expected = load_file(best.folder / "model.safetensors")
    actual = load_file(list_checkpoints(tmp_path)[-1].folder / "model.safetensors")
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "model",
    [
        "{listener: {layers: 3}, intermediate_ctc: {layers: [2], self_conditioning: true}}",
        "{kind: transformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 2,"
        " decoder_layers: 1, intermediate_ctc: {layers: [1], self_conditioning: true}}",
    ],
    ids=["las", "transformer"],
)
def test_a_new_vocabulary_keeps_all_other_weights(model, tiny, commands, tmp_path):
    """Those of the vocabulary are the ones whose shapes change with it."""
    runs, plain = (tmp_path / "first", tmp_path / "second"), (f"model={model}", "train.steps=1")
    code, _, err = commands(train, tiny, "--run", runs[0], *plain)
    assert code == 0, err
    new = "train.new_vocabulary=true", "text.kind=bpe", "text.size=13", "train.optimizer.lr=1e-12"
    init = f"train.init={runs[0]}", "seed=5"
    code, out, err = commands(train, tiny, "--run", runs[1], *plain, *init, *new)
    assert code == 0 and "conditioning.* start at random" in out, err
    first, second = (
        load_file(list_checkpoints(run)[-1].folder / "model.safetensors") for run in runs
    )
    assert first.keys() == second.keys()
    changed = {name for name in first if first[name].shape != second[name].shape}
    size = load_tokenizer(runs[1]).size
    assert changed and all(size in second[name].shape for name in changed)
    for name in first.keys() - changed - {"conditioning.bias"}:
        torch.testing.assert_close(second[name], first[name], atol=1e-9, rtol=0)
    assert commands(evaluate, runs[1], "--split", "test")[0] == 0
    more = "train.steps=2", f"model={model}", "seed=5", *new[1:]
    code, _, err = commands(train, tiny, "--run", runs[1], "--resume", *more)
    assert code == 0, err
    assert read_recipe(runs[1]).train.new_vocabulary  # a start that is repeated makes it again
    # Its own recipe continues it with the same vocabulary, whose weights are taken over.
    new_size = "train.steps=1", "text.size=11"
    hardly = f"train.init={runs[1]}", "--run", tmp_path / "third"
    code, out, err = commands(train, runs[1] / "recipe.yaml", *hardly, *new_size)
    assert code == 0 and "at random" not in out, err
    third = load_file(list_checkpoints(tmp_path / "third")[-1].folder / "model.safetensors")
    second = load_file(choose(runs[1], "best", 1)[0].folder / "model.safetensors")
    torch.testing.assert_close(third, second, atol=1e-9, rtol=0)


def test_fine_tuning_starts_from_the_weights_that_are_evaluated(tiny, run, commands, tmp_path):
    """The mean of the checkpoints that the run's own recipe chooses."""
    path, new = run / "recipe.yaml", tmp_path / "new"
    write_recipe(read_recipe(path, ["decode.checkpoint=last", "decode.average=2"]), path)
    hardly = f"train.init={run}", "train.steps=1", "train.optimizer.lr=1e-12"
    assert commands(train, tiny, "--run", new, *hardly)[0] == 0
    files = [c.folder / "model.safetensors" for c in list_checkpoints(run)[-2:]]
    first, second = map(load_file, files)
    assert len(files) == 2 and any(not torch.equal(first[name], second[name]) for name in first)
    actual = load_file(list_checkpoints(new)[-1].folder / "model.safetensors")
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    torch.testing.assert_close(actual, mean, atol=1e-6, rtol=0)


def test_a_fine_tuning_that_harms_keeps_the_weights_it_started_from(
    tiny, tiny_run, commands, tmp_path
):
    harm = f"train.init={tiny_run}", "train.optimizer.lr=1", "train.steps=4", "train.save_every=1"
    more = "train.validate_every=1", "train.schedule.warmup=0", "train.keep=1"
    code, out, err = commands(train, tiny, "--run", tmp_path, *harm, *more)
    assert code == 0 and out.index("step 0  validation: ") < out.index("step 1  validation: "), err
    losses = curve(tmp_path, "valid/nll")
    best = min(list_checkpoints(tiny_run), key=lambda c: c.loss)
    assert losses[0] == (0, pytest.approx(best.loss, rel=1e-5)) == min(losses, key=lambda at: at[1])
    (kept,) = choose(tmp_path, "best", 1)
    expected = load_file(best.folder / "model.safetensors")
    torch.testing.assert_close(
        load_file(kept.folder / "model.safetensors"), expected, atol=0, rtol=0
    )


def test_settings_that_the_weights_were_not_trained_with_are_named(
    tiny, tiny_run, commands, tmp_path
):
    """Their shapes agree, so that nothing else reports them."""
    init = "--run", tmp_path / "run", f"train.init={tiny_run}", "train.steps=1"
    other = "features.mvn=none", "features.kind=slaney", "model.speller.dropout=0.4"
    code, out, err = commands(train, tiny, *init, *other)
    line = f"train.init = {tiny_run}: its weights were trained with others: "
    assert code == 0 and line + "features.kind logmel -> slaney, features.mvn " in out, err
    assert "dropout" not in out
    _, out, _ = commands(train, tiny, "--run", tmp_path / "same", *init[2:])
    assert "its weights were trained with others" not in out


def test_a_resumed_fine_tuning_records_where_it_began(tiny, tiny_run, commands, tmp_path):
    start = "--run", tmp_path, f"train.init={tiny_run}", "train.steps=1"
    assert commands(train, tiny, *start)[0] == 0
    again = tiny, "--run", tmp_path, "--resume"
    code, out, err = commands(train, *again, "train.steps=2")
    assert code == 0 and "train.init" not in out, err
    code, out, err = commands(train, *again, "train.steps=3", "train.init=elsewhere")
    assert f"train.init = elsewhere is not read: the run began with {tiny_run}" in out, err
    assert read_recipe(tmp_path / "recipe.yaml").train.init == tiny_run
    late = "train.steps=4", "train.new_vocabulary=true"
    code, out, err = commands(train, tmp_path / "recipe.yaml", *again[1:], *late)
    assert "train.new_vocabulary = True is not read: the run began with False" in out, err


def test_a_run_s_recipe_trains_into_the_run_that_is_named(
    tiny_run, commands, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, _, err = commands(train, tiny_run, "run=mine", "train.steps=1")
    assert code == 0 and list_checkpoints(tmp_path / "runs" / "mine"), err


def test_patience_beyond_the_run_is_named(tiny, commands, tmp_path):
    early = "train.early_stopping={metric: wer, patience: 2}", "train.steps=4"
    line = "train.early_stopping.patience = 2 cannot end this run, which has 2 validations: lower "
    for every, expected in ((2, True), (1, False)):
        run = tmp_path / str(every)
        _, out, _ = commands(train, tiny, "--run", run, *early, f"train.validate_every={every}")
        assert (f"{line}train.validate_every = {every}" in out) == expected


def test_the_highest_rate_of_noam_is_logged(tiny, commands, tmp_path):
    """With the default of train.optimizer.lr, which is a rate, noam's factor is far too low."""
    noam = "train.schedule={kind: noam, warmup: 3, width: 7}", "train.optimizer.lr=0.02"
    _, out, _ = commands(train, tiny, "--run", tmp_path / "run", *noam, "train.steps=1")
    assert f"the learning rate rises to {0.02 / math.sqrt(7 * 3):.2g}, with the factor" in out


def test_fine_tuning_keeps_the_vocabulary(tiny, tiny_run, commands, tmp_path):
    """The new text has fewer letters, and one that the old text did not have."""
    corpus = read_manifest(tiny.parent / "train.tsv")
    manifest = tiny.parent / "tune.tsv"
    write_manifest(manifest, [replace(u, text=u.text.replace("c", "x")) for u in corpus])
    more = [f"train.init={tiny_run}", f"data.train={manifest}", "train.steps=1"]
    code, out, err = commands(train, tiny, "--run", tmp_path, *more)
    assert code == 0 and "is used, not" not in out, err
    old, new = (load_tokenizer(run).fingerprint() for run in (tiny_run, tmp_path))
    assert old == new


def test_the_run_folder_has_the_vocabulary_that_is_used(tiny, commands, tmp_path):
    """The text has fewer pieces than the recipe asks for; both recipes resume the run."""
    bpe = "text.kind=unigram", "text.size=500", "train.steps=1"
    code, out, err = commands(train, tiny, "--run", tmp_path, *bpe)
    size = load_tokenizer(tmp_path).size
    line = f"text.size = {size} is used, not 500: the training text has no more pieces\n"
    assert code == 0 and line in out, err
    assert (tmp_path / "train.log").read_text().count(line) == 1
    text = read_recipe(tmp_path / "recipe.yaml").text
    assert (text.kind, text.size) == ("unigram", size) and size < 500
    events = b"".join(file.read_bytes() for file in tmp_path.glob("events.*"))
    assert f"size: {size}\n".encode() in events and b"size: 500\n" not in events
    for again in ([tmp_path], [tiny, "--run", tmp_path, *bpe]):
        code, out, err = commands(train, *again, "train.steps=2", "--resume")
        assert code == 0 and "text." not in out, err
        assert read_recipe(tmp_path / "recipe.yaml").text == text
    line = commands.refused(train, tmp_path, "text.size=9", "--resume")
    assert "its recipe was another: text.size" in line
    write_recipe(read_recipe("mnist_rows"), tmp_path / "recipe.yaml")
    code, _, err = commands(train, tiny, "--run", tmp_path, *bpe[:2], "train.steps=2", "--resume")
    assert code == 0, err


def test_fine_tuning_reports_what_it_ignores_or_cannot_load(tiny, tiny_run, commands, tmp_path):
    init = f"train.init={tiny_run}"
    _, out, _ = commands(train, tiny, "--run", tmp_path, init, "text.kind=bpe", "train.steps=1")
    reason = f"the vocabulary is that of train.init = {tiny_run}"
    assert f"text.kind = characters is used, not bpe: {reason}\n" in out
    assert read_recipe(tmp_path / "recipe.yaml").text.kind == "characters"
    line = commands.refused(train, tiny, "--run", tmp_path / "x", init, "model.speller.hidden=9")
    assert line.endswith(
        "do not fit; model.* and features.* must be those of their run's recipe.yaml"
    )


def test_the_true_last_step_is_on_the_curves(tiny, commands, tmp_path, monkeypatch):
    """Although more steps were planned than the later epochs have batches for."""
    monkeypatch.setattr(trainer, "planned_steps", lambda epochs, limits, position: 99)
    code, out, _ = commands(train, tiny, "--run", tmp_path, "train.log_every=100")
    last = list_checkpoints(tmp_path)[-1].step
    assert code == 0 and f"step {last}/{last}  epoch 2  " in out and "  0.0 min left" in out
    assert [step for step, _ in curve(tmp_path, "train/nll")] == [last]


def test_a_sound_model_is_traced_without_output(tiny, commands, tmp_path):
    """With the kernels that a recipe selects, some of whose outputs are unused."""
    code, out, err = commands(train, tiny, "--run", tmp_path, "train.debug=nan", "train.steps=1")
    assert code == 0 and "finished at step 1" in out and not err


def test_the_alarms_name_remedies_once(tiny, commands, tmp_path):
    alarm = ["train.alarm.steps=1", "train.alarm.diagonality=1.0", "train.steps=3"]
    _, out, _ = commands(train, tiny, "--run", tmp_path, *alarm, "train.validate_every=1")
    assert out.count("ALARM: attention is not diagonal yet") == 1 and "model.ctc_weight" in out
    assert out.count("ALARM: hardly a word is recognised yet. Compare transcripts and audio") == 1
    assert "ALARM" in (tmp_path / "train.log").read_text()


def test_unreadable_audio_is_reported_skipped_and_counted(tiny, commands, tmp_path):
    lines = (tiny.parent / "train.tsv").read_text().splitlines()
    broken = [*lines, "bad\ts0\tmissing.flac\t0.400\tab"]
    manifest = tiny.parent / "broken.tsv"
    manifest.write_text("\n".join(broken) + "\n")
    arguments = ["--run", tmp_path, f"data.train={manifest}", "train.epochs=1"]
    code, out, _ = commands(train, tiny, *arguments)
    assert code == 0 and "skipped bad: " in out and "missing.flac: no such file" in out
    assert last_state(tmp_path)[1]["broken"] == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["features.mvn=global", "text.kind=bpe", "text.size=9"],
        ["features.mvn=speaker", "features.kind=mfcc", "features.ceps=7", "features.deltas=2"],
        ["features.mvn=none", "features.kind=slaney", "model.ctc_weight=0", "decode.beam=3"],
        ["model.attention=dot", "model.speller.tied=true", "train.precision=bf16"],
        ["model={kind: transformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 1,"
         " decoder_layers: 1}"],
        ["model={kind: transformer, d_model: 8, heads: 2, feed_forward: 11, encoder_layers: 1,"
         " decoder_layers: 1, encoder_convolution: 5}", "train.consistency={}"],
    ],
    ids=["global-bpe", "speaker-mfcc", "slaney-without-ctc-beam", "tied-bf16", "transformer",
         "convolution-consistency"],
)  # fmt: skip
def test_every_configuration_trains_evaluates_and_transcribes(
    overrides, tiny, commands, monkeypatch, tmp_path
):
    monkeypatch.setattr(distributed, "computes_bf16", lambda device: True)
    code, out, _ = commands(train, tiny, "--run", tmp_path, "train.steps=2", *overrides)
    expected = any(text in overrides for text in ("features.mvn=global", "features.mvn=speaker"))
    assert code == 0 and expected == ("measuring features" in out)
    code, out, _ = commands(evaluate, tmp_path, "--split", "test")
    assert code == 0 and "WER" in out
    code, out, _ = commands(transcribe, tmp_path, tiny.parent / "test-0.flac")
    assert code == 0 and "test-0.flac:" in out


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_on_a_cpu_without_its_instructions_is_fp32(
    fast, tiny, commands, monkeypatch, tmp_path
):
    monkeypatch.setattr(distributed, "computes_bf16", lambda device: fast)
    for precision in ("fp32", "bf16"):
        options = ["--run", tmp_path / precision, "train.steps=2", f"train.precision={precision}"]
        code, out, _ = commands(train, tiny, *options)
        assert code == 0 and ("computes in fp32 here" in out) == (precision == "bf16" and not fast)
    single, mixed = (last_state(tmp_path / name)[0] for name in ("fp32", "bf16"))
    assert single.keys() == mixed.keys()
    assert all(torch.equal(single[name], mixed[name]) for name in single) != fast


def test_evaluate_scores_its_transcripts(tiny, tiny_run, commands, tmp_path):
    code, out, _ = commands(evaluate, tiny_run, "--split", "test", "--out", tmp_path / "e")
    assert code == 0 and "4 utterances, 6 words" in out
    score = json.loads((tmp_path / "e" / "score.json").read_text())
    header, *rows = [
        line.split("\t") for line in (tmp_path / "e" / "hypotheses.tsv").read_text().splitlines()
    ]
    column = {name: [row[n] for row in rows] for n, name in enumerate(header)}
    truth = {u.id: u.text for u in read_manifest(tiny.parent / "test.tsv")}
    assert dict(zip(column["id"], column["reference"], strict=True)) == truth
    assert score["wer"] == pytest.approx(jiwer.wer(column["reference"], column["hypothesis"]))
    assert score["cer"] == pytest.approx(jiwer.cer(column["reference"], column["hypothesis"]))
    assert score["about"]["ctc_wer"] == pytest.approx(jiwer.wer(column["reference"], column["ctc"]))
    recognizer = Recognizer.load(tiny_run)
    for utterance, hypothesis in zip(column["id"], column["hypothesis"], strict=True):
        assert recognizer(tiny.parent / f"{utterance}.flac").text == hypothesis
    assert (tmp_path / "e" / "alignment.txt").stat().st_size


def test_evaluate_takes_a_manifest_and_overrides(tiny, tiny_run, commands, tmp_path):
    manifest = tiny.parent / "valid.tsv"
    first, second = tmp_path / "1", tmp_path / "2"
    assert commands(evaluate, tiny_run, "--split", manifest, "--out", first)[0] == 0
    more = ["decode.batch_seconds=0.5", "decode.average=2", "data.workers=2"]
    assert commands(evaluate, tiny_run, "--split", "valid", "--out", second, *more[:1])[0] == 0
    assert (first / "hypotheses.tsv").read_text() == (second / "hypotheses.tsv").read_text()
    assert commands(evaluate, tiny_run, "--split", "valid", "--out", second, *more)[0] == 0


def test_evaluate_counts_unreadable_audio_as_empty_and_reports_it(
    tiny, tiny_run, commands, tmp_path
):
    lines = (tiny.parent / "test.tsv").read_text().splitlines()
    manifest = tiny.parent / "half.tsv"
    manifest.write_text("\n".join([*lines[:2], "gone\ts0\tgone.flac\t0.4\tab c"]) + "\n")
    code, out, _ = commands(evaluate, tiny_run, "--split", manifest, "--out", tmp_path)
    assert code == 2 and "not decoded, scored as empty: gone: " in out
    assert f"cannot be read: to list them: python -m asr.prepare table {manifest} --to " in out
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["deletions"] >= 2 and score["about"]["not_decoded"] == 1
