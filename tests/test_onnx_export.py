"""Models as programs of torch.export and ONNX Runtime, against the models themselves."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_transformer import F, V
from small_transformer import model as transformer
from test_load import save_run
from tiny_speech import RATE, tones

from asr import export, transcribe
from asr.config.schema import LasConfig
from asr.data.corpus import read_manifest
from asr.data.tokenizer import SOS, SentencePieces
from asr.features.fbank import Fbank, SlaneyMel
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from asr.inference import onnx_export
from asr.inference.programs import Features, speech_programs
from asr.inference.recognition import Recognizer
from asr.models.las import LAS

pytest.importorskip("onnxscript", reason="torch exports to ONNX by onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

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
    return recognizer.model, recognizer.front_end, steps | {"fewest": 1}, programs


def of_torch_export(program):
    """As `session`, of a program before it becomes an ONNX file, which takes twice as long."""
    traced = program.trace().module()

    def run(**inputs):
        parts = (inputs[name] for name in program.inputs)
        nested = [tuple(next(parts) for _ in p) if isinstance(p, tuple) else next(parts)
                  for p in program.first]  # fmt: skip
        outputs = traced(*nested)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(program.outputs, outputs, strict=True))

    return run


def programs_of(model, front_end, folder=None):
    """As `las`; ONNX files where there is a folder."""
    programs = speech_programs(model, front_end)
    del programs["features"]
    decoder, run = programs["decoder"].module, {}
    # Of utterances, frames and hypotheses: a program of torch.export asserts two of each.
    steps = {"constants": decoder.constants, "state": decoder.state, "fewest": 1 if folder else 2}
    for name, program in programs.items():
        if folder:
            onnx_export.write_program(program, folder / f"{name}.onnx")
        run[name] = session(folder / f"{name}.onnx") if folder else of_torch_export(program)
    return model, front_end, steps, run


CTC = {"layers": [1]}
# Every option that changes what a model computes in evaluation, in one model at least; the tiny LAS
# above has others. E is 10, so rotary positions need one head.
MODELS = {
    "pre": {
        "intermediate_ctc": CTC, "encoder_layers": 2, "depth_scaled": True, "fixnorm": True,
        "tied": True, "encoder_convolution": 5, "reduction": 2,
        "encoder_windows": {"offsets": [-1.5, 2], "width": 0.7},
    },
    "post": {
        "norm": "rms", "residual_scale": "deepnet", "qk_norm": True,
        "encoder_convolution": 3, "convolution_norm": "bias", "reduction": 6, "activation": "gelu",
    },
    "peri": {
        "norm": "scale", "residual_scale": {"encoder": 1.3, "decoder": 0.7}, "ctc_weight": 0.0,
        "encoder_convolution": 3, "convolution_norm": "dyt", "reduction": 8, "activation": "swish",
    },
    "reordered": {
        "kind": "conformer", "heads": 1, "norm": "bias", "convolution_norm": "batch",
        "intermediate_ctc": CTC, "encoder_layers": 2,
    },
    "hybrid": {
        "kind": "conformer", "positions": "sinusoidal", "norm": "derf", "convolution_norm": "scale",
        "residual_scale": 1.3,
    },
    "sub": {
        "kind": "conformer", "heads": 1, "norm": "dyt", "convolution_norm": "derf", "kernel": 3,
        "qk_norm": True,
    },
    "additive": {
        "listener": {
            "layers": 2, "pyramid": [1], "convolution": 2, "norm": "per_gate",
            "cell_norm": "carried", "hidden_norm": True, "norm_layers": "pyramid",
        },
        "speller": {"layers": 2, "tied": True, "norm": "cell", "norm_kind": "rms"},
        "intermediate_ctc": CTC,
    },
    "dot": {
        "listener": {"convolution": 6, "norm": "joined", "cell_norm": "state", "norm_kind": "rms"},
        "speller": {"norm": "raw", "zero_variance": "raw"},
        "ctc_weight": 0.0,
    },
    "location": {
        "listener": {"norm": "thesis", "eps": 0.01},
        "speller": {"norm": "ba", "cell_norm": "none", "recurrent_gain": 0.1},
    },
}  # fmt: skip


def las_of(attention, listener, speller, **settings):
    """In evaluation mode, with biases and norms moved from their initial values."""
    listener, sizes = {"layers": 1, "hidden": 5, "pyramid": []} | listener, {"attention_size": 5}
    speller = {"hidden": 7, "embedding": 3} | speller
    parts = {"listener": listener, "speller": speller, "attention": attention}
    torch.manual_seed(0)
    made = LAS(F, V, LasConfig(kind="las", **parts, **sizes, **settings)).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """The tiny LAS and one of MODELS as ONNX files, the others as programs of torch.export."""
    name = request.param
    if name == "las":
        return request.getfixturevalue("las")
    settings, folder = MODELS[name], None
    if name == "reordered":
        folder = tmp_path_factory.mktemp("onnx")
    if "speller" in settings:
        made = las_of(name, **settings)
    else:
        layers = {"encoder_layers": 1, "decoder_layers": 1}
        made = transformer(**(layers | {"norm_position": name} | settings))
    return programs_of(made, front_end(), folder)


def front_end(kind=SlaneyMel, mvn="global", variance=True):
    """Of another kind than that of the tiny LAS."""
    norm = MeanVarianceNorm(mvn, variance)
    norm.add(3 * torch.randn(50, F, generator=torch.Generator().manual_seed(1)) - 2, "speaker")
    return FrontEnd(kind(RATE, num_mel_bins=F), norm)


every_model = pytest.mark.parametrize("case", ["las", *MODELS], indirect=True)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@every_model
def test_encoder_and_ctc_equal_the_model(case):
    """For other sizes than those traced; padding, NaN included, changes nothing."""
    model, front_end, steps, programs = case
    torch.manual_seed(1)
    # Not much longer: an untrained `ba` amplifies rounding errors with every frame.
    for lengths in ([41, 23, 1, 7], [1], [307], [5, 13]):
        features = torch.randn(len(lengths), max(lengths), front_end.size)
        for row, length in enumerate(lengths):
            features[row, length:] = torch.nan
        lengths = torch.tensor(lengths)
        memory = model.encode(features, lengths)
        if min(memory.valid.shape) < steps["fewest"]:
            continue
        actual = programs["encoder"](features=features, lengths=lengths)
        assert torch.equal(actual["valid"], memory.valid)
        close(actual["states"][memory.valid], memory.states[memory.valid])
        if "ctc" in programs:
            log_probs = programs["ctc"](states=actual["states"])["log_probs"]
            close(log_probs[memory.valid], model.ctc(memory)[memory.valid])


@torch.no_grad()
@every_model
def test_steps_of_the_decoder_equal_the_model(case):
    """Three hypotheses of each of two utterances, which every step selects anew."""
    model, front_end, steps, programs = case
    features, lengths = torch.randn(2, 31, front_end.size), torch.tensor([31, 17])
    encoded = programs["encoder"](features=features, lengths=lengths)
    constants = {name: encoded[name] for name in steps["constants"]}
    now = {name: encoded[name] for name in steps["state"]}
    state = model.start(model.encode(features, lengths))
    tokens = torch.full((2, steps["fewest"]), SOS)
    state = model.select(state, torch.tensor([[0], [1]]).expand_as(tokens))
    now = {name: part[:, [0] * tokens.size(1)] for name, part in now.items()}
    parents = torch.zeros(2, 3, dtype=torch.long)
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
    others = [
        front_end(),
        front_end(Fbank, "none"),
        front_end(Fbank, "speaker", variance=False),  # as of an unknown speaker
    ]
    waveform = torch.from_numpy(tones("abc cab" * 9, seed=3)).float() + 0.1
    for samples in (len(waveform), of_run.extract.window, 1234):
        part = waveform[:samples]
        close(programs["features"](waveform=part)["features"], of_run.features(part))
        for other in others:
            close(Features(other)(part), other.features(part))


@pytest.fixture
def unchecked(exported, monkeypatch):
    """asr.export --onnx writes the files of `exported`, whatever model it has: f(change of it)."""
    monkeypatch.setattr(
        onnx_export, "write_program", lambda _, path: shutil.copy(exported / path.name, path)
    )
    load = Recognizer.load

    def changed(change):
        def load_and_change(*arguments):
            recognizer = load(*arguments)
            change(recognizer)
            return recognizer

        monkeypatch.setattr(Recognizer, "load", load_and_change)

    return changed


def changed_norm(recognizer):
    recognizer.front_end.norm.variance = False


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        ("features", changed_norm),
        ("encoder", lambda r: r.model.listener.layers[0].weight_ih_l0.data[3, 2].add_(0.01)),
        ("decoder", lambda r: r.model.speller.out.bias.data[4].add_(1e-3)),
        ("ctc", lambda r: r.model.ctc_head.bias.data[4].add_(1e-3)),
    ],
)
def test_a_program_that_differs_from_the_model_is_not_written(
    wrong, change, tiny, tiny_run, unchecked, commands, tmp_path
):
    unchecked(change)
    line = commands.refused(export, tiny_run, "--onnx", "--to", tmp_path / "new" / "to")
    start, _, end = line.partition(": not written, since programs differ from the model by more ")
    assert start == "--onnx" and end.startswith(f"than 0.0001: {wrong} ")
    assert f"on 3 utterances of {tiny.parent / 'valid.tsv'}; please report" in end
    named = {name for name in ("features", "encoder", "decoder", "ctc") if f" {name} " in end}
    assert named <= {wrong, "decoder"}  # which reads what the encoder gives
    assert not list(tmp_path.iterdir())


def test_without_its_audio_a_run_is_compared_on_noise(tiny_run, unchecked, commands, tmp_path):
    unchecked(lambda recognizer: None)
    missing = f"data.valid={tmp_path}/valid.tsv"
    code, out, err = commands(export, tiny_run, "--onnx", "--to", tmp_path / "to", missing)
    assert code == 0 and len(list((tmp_path / "to").iterdir())) == 5, err
    assert out.startswith("greatest differences from the model, on noise (")


def test_a_file_that_does_not_run_is_one_line(tiny_run, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "write_program", lambda _, path: path.write_bytes(b"no model"))
    line = commands.refused(export, tiny_run, "--onnx", "--to", tmp_path / "to")
    assert line.startswith("--onnx: not written, since ONNX Runtime fails: ")
    assert not list(tmp_path.iterdir())


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
