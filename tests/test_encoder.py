"""Pretrained encoders as features: transformers' own models are the judge."""

import json
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra encoders")

from tiny_encoders import KINDS, make_encoder  # noqa: E402

from asr.features import AudioError  # noqa: E402
from asr.features.encoder import (  # noqa: E402
    EncoderFeatures,
    EncoderInputs,
    PretrainedEncoder,
    train_top,
)

LAYERS = 3


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """kind -> its folder and transformers' model."""
    folder = tmp_path_factory.mktemp("encoders")
    return {kind: (folder / kind, make_encoder(folder / kind, kind)) for kind in KINDS}


def wave(samples, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(samples, generator=generator)


def inputs_of(folder, waveform):
    """What transformers' feature extractor makes of an utterance alone, (1, ...)."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    options = {"sampling_rate": 16000, "return_tensors": "pt"}
    if isinstance(extractor, transformers.WhisperFeatureExtractor):
        options |= {"padding": "do_not_pad"}
    return next(iter(extractor(waveform.numpy(), **options).values()))


def theirs(folder, model, waveform):
    """last_hidden_state and hidden_states by transformers alone, for a waveform of whole rows."""
    judge = model.get_encoder() if folder.name == "whisper" else model
    with torch.no_grad():
        out = judge(inputs_of(folder, waveform), output_hidden_states=True)
    return out.last_hidden_state[0], [state[0] for state in out.hidden_states]


def ours(encoder, waveform):
    inputs = encoder.prepare(waveform)
    with torch.no_grad():
        states, lengths = encoder(inputs[None], torch.tensor([len(inputs)]))
    assert lengths.tolist() == [states.size(1)]
    return states[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_that_of_transformers(encoders, kind):
    folder, model = encoders[kind]
    # Whisper's own forward takes exactly max_source_positions: 3 s here, in which mel has 300.
    waveform = wave(48_000 if kind == "whisper" else 80 * 97)
    last, states = theirs(folder, model, waveform)
    encoder = PretrainedEncoder(folder).eval()
    torch.testing.assert_close(ours(encoder, waveform), last, atol=1e-5, rtol=1e-5)
    for layer in range(LAYERS):
        cut = PretrainedEncoder(folder, layer).eval()
        torch.testing.assert_close(ours(cut, waveform), states[layer], atol=1e-5, rtol=1e-5)
        assert len(cut.blocks) == layer
    weighted = PretrainedEncoder(folder, "weighted").eval()
    parts = ours(weighted, waveform).unflatten(1, (LAYERS + 1, -1)).unbind(1)
    for part, state in zip(parts, [*states[:-1], last], strict=True):
        torch.testing.assert_close(part, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_other_utterances_change_nothing(encoders, kind):
    encoder = PretrainedEncoder(encoders[kind][0], "weighted").eval()
    waves = [wave(samples, seed) for seed, samples in enumerate((4817, 7919, 1300))]
    inputs = [encoder.prepare(each) for each in waves]
    lengths = torch.tensor([len(each) for each in inputs])
    batch = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=float("nan"))
    with torch.no_grad():
        states, after = encoder(batch, lengths)
    assert after.tolist() == [encoder.num_frames(len(each)) for each in waves]
    for row, length, each in zip(states, after.tolist(), waves, strict=True):
        torch.testing.assert_close(row[:length], ours(encoder, each), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper"])
def test_the_number_of_frames_is_known_before(encoders, kind):
    encoder = PretrainedEncoder(encoders[kind][0])
    extract, inputs = EncoderFeatures(encoder, 16000), EncoderInputs(encoder, 16000)
    for samples in [0, 1, 79, 80, 159, 160, 319, 320, 321, 400, 479, 480, 640, 1003, 1600]:
        assert len(extract(wave(samples))) == extract.num_frames(samples)
        assert len(inputs(wave(samples))) == inputs.num_frames(samples)
        assert bool(inputs.num_frames(samples)) == bool(extract.num_frames(samples))


def test_features_are_what_float16_can_hold(encoders):
    extract = EncoderFeatures(PretrainedEncoder(encoders["hubert"][0]), 16000)
    features = extract(wave(3000))
    assert torch.equal(features, features.half().float())
    assert not features.requires_grad


def test_whisper_takes_as_much_as_its_positions(encoders):
    extract = EncoderFeatures(PretrainedEncoder(encoders["whisper"][0]), 16000)
    assert len(extract(wave(extract.max_samples))) == 150
    with pytest.raises(AudioError, match="at most 3 s"):
        extract(wave(extract.max_samples + 1))


def test_another_sample_rate_is_refused(encoders):
    with pytest.raises(ValueError, match="sample_rate=16000"):
        EncoderFeatures(PretrainedEncoder(encoders["hubert"][0]), 8000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wav2vec2_stable", "wavlm", "whisper"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_top_layers_are_trained(encoders, kind, checkpointing):
    """Gradients of the top layers, with and without checkpointing, by transformers."""
    folder, model = encoders[kind]
    waveform = wave(48_000 if kind == "whisper" else 80 * 97)
    encoder = PretrainedEncoder(folder).eval()
    train_top(encoder, 2, checkpointing)
    if checkpointing:  # it is for training, in which dropout is random
        encoder.train()
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for name in ("dropout", "activation_dropout", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    inputs = encoder.prepare(waveform)
    states, _ = encoder(inputs[None], torch.tensor([len(inputs)]))
    states.square().sum().backward()
    trained = {name for name, p in encoder.named_parameters() if p.grad is not None}
    assert trained and all(
        "layers.1." in n or "layers.2." in n or n.rpartition(".")[0].endswith("layer_norm")
        for n in trained
    )
    judge = model.get_encoder() if kind == "whisper" else model
    judge.zero_grad()
    judge(inputs_of(folder, waveform)).last_hidden_state.square().sum().backward()
    gradients = {name: p.grad for name, p in judge.named_parameters()}
    for name, parameter in encoder.model.named_parameters():
        if parameter.grad is not None:
            expected = gradients[name]
            torch.testing.assert_close(parameter.grad, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_below_the_trained_layers_is_not_differentiated(encoders, kind):
    """Its activations would be kept for a gradient that nobody reads."""
    encoder = PretrainedEncoder(encoders[kind][0]).train()
    train_top(encoder, 1, checkpointing=False)
    inputs = encoder.prepare(wave(4817))
    seen = []
    for block in encoder.blocks:
        block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    states, _ = encoder(inputs[None], torch.tensor([len(inputs)]))
    assert [each.requires_grad for each in (*seen, states)] == [False] * LAYERS + [True]


def test_more_layers_than_there_are_cannot_be_trained(encoders):
    with pytest.raises(ValueError, match="train = 4: the encoder has 3 layers"):
        train_top(PretrainedEncoder(encoders["hubert"][0]), 4, checkpointing=False)


# Folders of which nothing is trusted


@pytest.fixture
def folder(encoders, tmp_path):
    return shutil.copytree(encoders["wav2vec2"][0], tmp_path / "encoder")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder, *arguments):
    with pytest.raises(ValueError) as refused:
        PretrainedEncoder(folder, *arguments)
    line = str(refused.value)
    assert "\n" not in line and len(line) < 400
    return line


def test_weights_in_a_pickle_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "is a pickle" in refusal(folder)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"conv_dim": [512] * 1000}, "conv_dim"),
        ({"conv_kernel": [-1, 3, 3]}, "conv_kernel"),
        ({"intermediate_size": "many"}, "intermediate_size"),
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": ["wav2vec2"]}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": 4096}, "config.json describes"),
        ({"num_attention_heads": 5}, "cannot be loaded"),
        ({"conv_stride": [5, 4]}, "cannot be loaded"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(folder, values, key):
    change_config(folder, **values)
    assert key in refusal(folder)


def test_code_of_a_folder_is_not_run(folder):
    mark = folder / "run"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    change_config(folder, auto_map={"AutoModel": "code.Model", "AutoConfig": "code.Config"})
    PretrainedEncoder(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json"])
def test_damaged_files_are_refused(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:100])
    assert str(folder) in refusal(folder)


def test_normalisation_of_the_waveform_that_nothing_states_is_not_guessed(folder):
    (folder / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json: no such file" in refusal(folder)


def test_weights_of_another_size_are_refused(folder):
    change_config(folder, intermediate_size=16)
    assert "cannot be loaded" in refusal(folder) or "missing" in refusal(folder)


def test_a_folder_without_an_encoder_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path)


def test_a_layer_beyond_the_last_is_refused(folder):
    assert "layers 0 to 3" in refusal(folder, 4)
