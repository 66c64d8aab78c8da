"""Models as programs of torch.export and ONNX Runtime, against the models themselves."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from asr.features.fbank import Fbank, SlaneyMel
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from small_transformer import F
from small_transformer import model as transformer
from test_load import save_run
from tiny_speech import RATE, tones

from asr import export, transcribe
from asr.data.corpus import read_manifest
from asr.data.tokenizer import SOS, SentencePieces
from asr.inference import onnx_export
from asr.inference.programs import Features, speech_programs
from asr.inference.recognition import Recognizer

pytest.importorskip("onnxscript", reason="torch exports to ONNX by onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory):
    """The ONNX files of the tiny LAS, whose decoder has a pyramid, location and a CTC head."""
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    export.export_onnx(tiny_run, [], folder)
    return folder


def session(path):
    """-> a function from named inputs to named outputs."""
    loaded = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(**inputs):
        outputs = loaded.run(None, {name: np.asarray(part) for name, part in inputs.items()})
        names = (output.name for output in loaded.get_outputs())
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

    return run


@pytest.fixture(scope="module")
def las(exported, tiny_run):
    recognizer = Recognizer.load(tiny_run)
    steps = json.loads((exported / "model.json").read_text())["decoder"]
    programs = {path.stem: session(path) for path in exported.glob("*.onnx")}
    return recognizer.model.eval(), recognizer.front_end, steps, programs


def written(folder, model, front_end, *names):
    """As `las`, of some programs of a model."""
    programs = speech_programs(model, front_end)
    written = {}
    for name in names:
        traced = onnx_export.write_program(programs[name], folder / f"{name}.onnx")
        written[name] = session(folder / f"{name}.onnx")
        written[f"traced {name}"] = traced.module()
    steps = {"constants": programs["decoder"].module.constants}
    steps["state"] = programs["decoder"].module.state
    return model, front_end, steps, written


@pytest.fixture(scope="module")
def small_transformer(tmp_path_factory):
    windows = {"offsets": [-1.5, 2], "width": 0.7}
    model = transformer(encoder_layers=1, decoder_layers=2, encoder_windows=windows)
    front_end = FrontEnd(Fbank(RATE, num_mel_bins=F), MeanVarianceNorm())
    return written(tmp_path_factory.mktemp("onnx"), model, front_end, "encoder", "decoder")


@pytest.fixture(scope="module")
def conformer(tmp_path_factory):
    """With rotary positions and BatchNorm."""
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    model = transformer(kind="conformer", heads=1, convolution_norm="batch", **layers)
    return written(tmp_path_factory.mktemp("onnx"), model, front_end(), "encoder")


def front_end():
    """Of another kind than that of the tiny LAS."""
    norm = MeanVarianceNorm("global")
    norm.add(3 * torch.randn(50, F, generator=torch.Generator().manual_seed(1)) - 2)
    return FrontEnd(SlaneyMel(RATE, num_mel_bins=F), norm)


@pytest.fixture
def case(request):
    """One of the fixtures above."""
    return request.getfixturevalue(request.param)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("case", ["las", "small_transformer", "conformer"], indirect=True)
def test_encoder_and_ctc_equal_the_model(case):
    """For other sizes than those traced; padding, NaN included, changes nothing."""
    model, front_end, _, programs = case
    torch.manual_seed(1)
    # Not much longer: an untrained `ba` amplifies rounding errors with every frame.
    for lengths in ([41, 23, 1, 7], [1], [307], [5, 13]):
        features = torch.randn(len(lengths), max(lengths), front_end.size)
        for row, length in enumerate(lengths):
            features[row, length:] = torch.nan
        lengths = torch.tensor(lengths)
        memory = model.encode(features, lengths)
        actual = programs["encoder"](features=features, lengths=lengths)
        assert torch.equal(actual["valid"], memory.valid)
        close(actual["states"][memory.valid], memory.states[memory.valid])
        if "ctc" in programs:
            log_probs = programs["ctc"](states=actual["states"])["log_probs"]
            close(log_probs[memory.valid], model.ctc(memory)[memory.valid])


@torch.no_grad()
@pytest.mark.parametrize("case", ["las", "small_transformer"], indirect=True)
def test_steps_of_the_decoder_equal_the_model(case):
    """Three hypotheses of each of two utterances, which every step selects anew."""
    model, front_end, steps, programs = case
    features, lengths = torch.randn(2, 31, front_end.size), torch.tensor([31, 17])
    encoded = programs["encoder"](features=features, lengths=lengths)
    constants = {name: encoded[name] for name in steps["constants"]}
    now = {name: encoded[name] for name in steps["state"]}
    state = model.start(model.encode(features, lengths))
    tokens, parents = torch.full((2, 1), SOS), torch.zeros(2, 3, dtype=torch.long)
    for _ in range(5):
        log_probs, state = model.step(state, tokens)
        actual = programs["decoder"](tokens=tokens, **constants, **now)
        close(actual["log_probs"], log_probs)
        first = torch.tensor([[0], [tokens.size(1)]])
        state = model.select(state, first + parents)
        now = {name: actual[f"next_{name}"][[[0], [1]], parents] for name in now}
        tokens = torch.randint(4, log_probs.size(2), (2, 3))
        parents = torch.tensor([[2, 0, 1], [1, 1, 0]])


def test_features_equal_the_front_end(las):
    _, of_run, _, programs = las
    other = front_end()
    waveform = torch.from_numpy(tones("abc cab" * 9, seed=3)).float() + 0.1
    for samples in (len(waveform), of_run.extract.window, 1234):
        part = waveform[:samples]
        close(programs["features"](waveform=part)["features"], of_run.features(part))
        close(Features(other)(part), other.features(part))


@torch.no_grad()
@pytest.mark.parametrize("case", ["small_transformer", "conformer"], indirect=True)
def test_programs_of_torch_export_equal_the_model(case):
    model, front_end, _, programs = case
    features, lengths = torch.randn(3, 67, front_end.size), torch.tensor([29, 67, 2])
    memory = model.encode(features, lengths)
    states, valid, *_ = programs["traced encoder"](features, lengths)
    assert torch.equal(valid, memory.valid)
    close(states[valid], memory.states[valid])


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/onnx_transcribe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_gives_the_text_of_transcribe(exported, tiny, tiny_run, example, commands):
    """Greedily and by CTC; the tiny model is bad, so its texts reach the limit of length."""
    files = [utterance.audio for utterance in read_manifest(tiny.parent / "test.tsv")]
    for options, settings in (
        ([], ["decode.beam=1", "decode.ctc_weight=0"]),
        (["--ctc"], ["decode.beam=1", "decode.search=ctc"]),
    ):
        code, expected, _ = commands(transcribe, tiny_run, *files, *settings)
        assert code == 0 and len(set(expected.splitlines())) == len(files)
        commands.monkeypatch.setattr("sys.argv", ["", *map(str, [exported, *files, *options])])
        assert example.main() == 0 and commands.capsys.readouterr().out == expected


def test_the_example_needs_nothing_of_this_project(example):
    source = Path(example.__file__).read_text()
    assert "import asr" not in source and "from asr" not in source and "torch" not in source


def test_text_of_tokens_equals_the_tokenizer(example):
    """Also where a sentence begins with pieces of spaces."""
    pieces = SentencePieces.train(["a cab", "bad  cab", "dab a cad"], 20, "bpe")
    model = object.__new__(example.Model)
    model.settings = {"vocabulary": {"kind": "sentencepiece", "tokens": pieces.surfaces}}
    generator = np.random.default_rng(5)
    for _ in range(200):
        tokens = generator.integers(0, pieces.size, generator.integers(1, 9)).tolist()
        assert model.text(tokens) == pieces.decode(tokens), tokens


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["features.dither=1"], "features.dither has no ONNX program"),
        (["--about", "x.md"], "--about is for a run with its model card"),
    ],
)
def test_what_has_no_onnx_files_is_one_line(more, words, tiny_run, commands, tmp_path):
    line = commands.refused(export, tiny_run, "--onnx", "--to", tmp_path / "to", *more)
    assert words in line and not (tmp_path / "to").exists()


def test_mfcc_has_no_onnx_program(tiny_run, commands, tmp_path):
    mfcc = save_run(tmp_path / "mfcc", tiny_run, features={"kind": "mfcc", "ceps": 11})
    line = commands.refused(export, mfcc, "--onnx", "--to", tmp_path / "to")
    assert "features.kind=mfcc has no ONNX program" in line


def test_a_missing_package_is_one_line(tiny_run, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "PACKAGES", ("onnx_of_another_name",))
    line = commands.refused(export, tiny_run, "--onnx", "--to", tmp_path / "to")
    assert line.startswith("--onnx: the package onnx_of_another_name is not installed: pip")
