"""Features by a pretrained speech encoder: wav2vec 2.0, HuBERT, WavLM, or Whisper's encoder.

The models are those of the library transformers, read from a folder with config.json and
safetensors; no code and no pickle in the folder is used. Two steps:

    prepare(waveform)          (S,) -> inputs (T', F'): Whisper's log-mel, or the waveform itself in
                               rows of one stride, normalised if the model expects it
    encoder(inputs, lengths)   (B, T', F') -> hidden states (B, T, L * F), lengths (B,)

Each utterance of a batch has the hidden states that it has alone. We differ from transformers
twice: Whisper reads an utterance as it is, not padded to 30 seconds (as ESPnet does); and group
normalisation over time, of the base models of wav2vec 2.0 and HuBERT, does not see padding.

Shapes: S samples at 16 kHz, B utterances, T frames, L layers asked for, F hidden size.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.utils.rnn import pad_sequence

from asr.features import AudioError
from asr.features.fbank import FeatureExtractor

Layer = int | Literal["last", "weighted"]
# model_type in config.json -> its class and feature extractor in transformers.
CLASSES = {
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2FeatureExtractor"),
    "hubert": ("HubertModel", "Wav2Vec2FeatureExtractor"),
    "wavlm": ("WavLMModel", "Wav2Vec2FeatureExtractor"),
    "whisper": ("WhisperModel", "WhisperFeatureExtractor"),
}
WHISPER_PREFIXES = {r"^(model\.)?encoder\.": ""}  # of the whole model's weights
MAX_JSON = 1 << 20  # bytes
MAX_LAYERS, MAX_SIZE, MAX_CONVOLUTIONS = 100, 8192, 16
MAX_POSITIONS = 100_000
# Training options of the models themselves: SpecAugment is ours, and a skipped layer would leave
# a weighted sum without one of its terms.
CONFIG = {"apply_spec_augment": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0}
WINDOW = 400  # samples that a frame covers at least, of all these models
HALF_MAX = torch.finfo(torch.float16).max


class Source(NamedTuple):
    """Where an encoder is from."""

    folder: Path
    name: str  # as in a recipe, with the commit of one on the hub
    sha256: str  # of its weights and its configuration
    licence: str  # as its README.md states it; empty if it does not


class PretrainedEncoder(nn.Module):
    """The encoder of a folder, up to the layer asked for.

    layer: "last", the encoder's output; N, that of layer N (0: the input of the first), as
    hidden_states[N] of transformers; "weighted", all of these one after another in each frame.
    weights=False: weights are not read, but random, to be loaded by the caller.
    Raises ValueError for a folder that cannot be used, and ImportError without transformers.
    """

    source: Source | None = None  # for a recipe's encoder

    def __init__(self, folder: Path, layer: Layer = "last", weights: bool = True) -> None:
        super().__init__()
        config = read_config(folder)
        self.kind = config["model_type"]
        with explained(folder):
            self.model = _load(folder, config, weights)
            self.extractor = _load_extractor(folder, config)
        self.model.requires_grad_(False)
        if self.kind != "whisper":  # in training it would ask for the gradient of the waveform
            self.model.feature_extractor._freeze_parameters()
        blocks, self.layer = self.blocks, layer
        if isinstance(layer, int):
            if not 0 <= layer <= len(blocks):
                raise ValueError(f"layer {layer}: {folder} has layers 0 to {len(blocks)}")
            if layer < len(blocks):
                del blocks[layer:]
                self._drop_last_norm()
        self.count = len(blocks) + 1 if layer == "weighted" else 1
        self.hidden_size: int = self.model.config.hidden_size

    def _drop_last_norm(self) -> None:
        """Without the norm that follows the last layer in models of pre-norm layers."""
        if self.kind == "whisper":
            self.model.layer_norm = nn.Identity()
        elif self.model.config.do_stable_layer_norm:
            self.model.encoder.layer_norm = nn.Identity()

    @property
    def blocks(self) -> nn.ModuleList:
        """The Transformer's layers."""
        return self.model.layers if self.kind == "whisper" else self.model.encoder.layers

    @property
    def sample_rate(self) -> int:
        """Of the waveforms, in Hz."""
        return self.extractor.sampling_rate

    @property
    def input_shift(self) -> int:
        """Samples from one input frame to the next."""
        return self.extractor.hop_length if self.kind == "whisper" else self.shift

    @property
    def input_size(self) -> int:
        """F', values in an input frame."""
        return self.extractor.feature_size if self.kind == "whisper" else self.shift

    @property
    def shift(self) -> int:
        """Samples from one frame of hidden states to the next."""
        if self.kind == "whisper":
            return 2 * self.extractor.hop_length
        return prod(self.model.config.conv_stride)

    @property
    def max_samples(self) -> int | None:
        """The longest waveform: that of Whisper's positions, 30 seconds; None: any."""
        if self.kind == "whisper":
            return self.model.config.max_source_positions * self.shift
        return None

    def prepare(self, waveform: Tensor) -> Tensor:
        """(S,) -> inputs (T', F'), float32. Raises AudioError beyond `max_samples`."""
        longest = self.max_samples
        if longest is not None and len(waveform) > longest:
            seconds = len(waveform) / self.sample_rate
            most = longest / self.sample_rate
            raise AudioError(f"{seconds:.1f} s of audio: the encoder takes at most {most:g} s")
        options = {"sampling_rate": self.sample_rate, "return_tensors": "np"}
        if self.kind == "whisper":
            if len(waveform) < 2 * self.input_shift:  # one frame, after which two are lost
                return torch.zeros(0, self.input_size)
            options |= {"padding": "do_not_pad", "truncation": False}
            mel = self.extractor(waveform.numpy(), **options)["input_features"][0]
            return torch.as_tensor(mel.T, dtype=torch.float32).contiguous()
        rows = len(waveform) // self.shift
        if self._frames(rows) < 1:
            return torch.zeros(0, self.input_size)
        cut = waveform[: rows * self.shift].numpy()
        values = self.extractor(cut, **options)["input_values"][0]
        return torch.as_tensor(values, dtype=torch.float32).view(rows, self.shift)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of hidden states for `lengths` (B,) input frames, 0 for too few."""
        return self._frames(lengths.clamp_min(0)).clamp_min(0)

    def num_frames(self, samples: int) -> int:
        """T for S samples."""
        if self.kind == "whisper" and samples < 2 * self.input_shift:
            return 0
        return max(self._frames(samples // self.input_shift), 0)

    def _frames(self, rows: Any) -> Any:
        """T for a number, or a tensor of numbers, of input frames."""
        if self.kind == "whisper":
            return (rows + 1) // 2
        config, length = self.model.config, rows * self.shift
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        return length

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T', F'), lengths (B,) -> hidden states (B, T, L * F), lengths (B,).

        Frames after an utterance's end are finite but not meaningful.
        """
        after = self.output_lengths(lengths)
        if not int(after.max()):
            return inputs.new_zeros(len(inputs), 0, self.count * self.hidden_size), after
        encode = self._whisper if self.kind == "whisper" else self._waveforms
        return torch.cat(encode(inputs, lengths, after), dim=-1), after

    def _whisper(self, mel: Tensor, lengths: Tensor, after: Tensor) -> list[Tensor]:
        """WhisperEncoder.forward for any number of frames, with a mask."""
        model = self.model
        mel = mel.masked_fill(~_valid(lengths, mel)[..., None], 0.0)
        x = gelu(model.conv1(mel.mT)).mT
        x = x.masked_fill(~_valid(lengths, x)[..., None], 0.0)
        x = gelu(model.conv2(x.mT)).mT
        x = x + model.embed_positions.weight[: x.size(1)]
        x = nn.functional.dropout(x, model.dropout, model.training)
        valid = _valid(after, x)
        mask = None if bool(valid.all()) else valid[:, None, None].expand(-1, -1, x.size(1), -1)
        states = [x]
        for block in model.layers:
            states.append(block(states[-1], mask))
        states[-1] = model.layer_norm(states[-1])
        return states if self.layer == "weighted" else states[-1:]

    def _waveforms(self, rows: Tensor, lengths: Tensor, after: Tensor) -> list[Tensor]:
        """Wav2Vec2Model.forward with convolutions that do not see padding."""
        model, waves, samples = self.model, rows.flatten(1), lengths * self.shift
        if model.config.feat_extract_norm == "group":
            each = zip(waves, samples.tolist(), strict=True)
            local = [model.feature_extractor(wave[None, :end])[0].T for wave, end in each]
            x = pad_sequence(local, batch_first=True)
        else:
            x = model.feature_extractor(waves.masked_fill(~_valid(samples, waves), 0.0)).mT
        projected = model.feature_projection(x[:, : int(after.max())])
        x = projected if isinstance(projected, Tensor) else projected[0]
        valid = _valid(after, x)
        states: list[Tensor] = []
        blocks = self.blocks if self.layer == "weighted" else []
        with _recorded(blocks, states), warnings.catch_warnings():
            # WavLM passes torch masks of two types.
            warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
            last = model.encoder(x, attention_mask=None if valid.all() else valid)
        return [*states[:-1], last.last_hidden_state]  # which some models normalise


@contextmanager
def _recorded(blocks: Iterable[nn.Module], states: list[Tensor]) -> Iterator[None]:
    """Append the input of the first block and the output of each to `states`."""

    def record(block: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if not states:
            states.append(inputs[0])
        states.append(output if isinstance(output, Tensor) else output[0])

    hooks = [block.register_forward_hook(record) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class EncoderExtractor(FeatureExtractor):
    """Base of both: ValueError for another sample rate than the encoder's."""

    def __init__(self, encoder: PretrainedEncoder, sample_rate: int, shift: int) -> None:
        if sample_rate != encoder.sample_rate:
            rate = encoder.sample_rate
            raise ValueError(f"sample_rate = {sample_rate}: the encoder needs sample_rate={rate}")
        self.sample_rate, self.dither = sample_rate, 0.0
        self.window, self.shift = WINDOW, shift
        self.encoder, self.max_samples = encoder, encoder.max_samples


class EncoderFeatures(EncoderExtractor):
    """Hidden states of a frozen encoder as features: (S,) -> (T, L * F).

    They are rounded to float16, as feature_cache stores them.
    """

    def __init__(self, encoder: PretrainedEncoder, sample_rate: int) -> None:
        super().__init__(encoder.eval(), sample_rate, encoder.shift)
        self.size, self.groups = encoder.count * encoder.hidden_size, encoder.count

    def num_frames(self, samples: int) -> int:
        """T for S samples; 0 if they do not fill a frame."""
        return self.encoder.num_frames(samples)

    @torch.no_grad()
    def _extract(self, waveform: Tensor, generator: torch.Generator | None) -> Tensor:
        inputs = self.encoder.prepare(waveform.float())
        if not len(inputs):
            return torch.zeros(0, self.size)
        device = next(self.encoder.parameters()).device
        states, _ = self.encoder(inputs[None].to(device), torch.tensor([len(inputs)]))
        return states[0].clamp(-HALF_MAX, HALF_MAX).half().float().cpu()


class EncoderInputs(EncoderExtractor):
    """What an encoder within the model reads: (S,) -> (T', F')."""

    def __init__(self, encoder: PretrainedEncoder, sample_rate: int) -> None:
        super().__init__(encoder, sample_rate, encoder.input_shift)
        self.size = encoder.input_size

    def num_frames(self, samples: int) -> int:
        """T' for S samples; 0 if they do not fill a frame of the encoder."""
        return samples // self.shift if self.encoder.num_frames(samples) else 0

    def _extract(self, waveform: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.encoder.prepare(waveform.float())


def train_top(encoder: PretrainedEncoder, top: int | Literal["all"], checkpointing: bool) -> None:
    """Let the Transformer's top layers be trained; its convolutions never are.

    checkpointing: their activations are computed again in the backward pass. Raises ValueError for
    more layers than there are.
    """
    blocks = encoder.blocks
    if top != "all" and top > len(blocks):
        raise ValueError(f"train = {top}: the encoder has {len(blocks)} layers up to the one used")
    for block in blocks[0 if top == "all" else len(blocks) - top :]:
        block.requires_grad_(True)
    last = encoder.model if encoder.kind == "whisper" else encoder.model.encoder
    pre_norm = encoder.kind == "whisper" or encoder.model.config.do_stable_layer_norm
    if pre_norm:
        last.layer_norm.requires_grad_(True)
    if checkpointing:
        model = encoder.model  # the second name is that of versions before 5.24
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _valid(lengths: Tensor, x: Tensor) -> Tensor:
    """(B,), (B, T, ...) -> (B, T), True where a row has content."""
    return torch.arange(x.size(1), device=x.device) < lengths.to(x.device)[:, None]


# Reading a folder, of which nothing is trusted


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an encoder. Raises ValueError for one that is not usable, or too large."""
    path = folder / "config.json"
    config = _read_json(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        known = ", ".join(CLASSES)
        raise ValueError(f"{path}: model_type {str(kind)[:40]!r} is none of {known}")
    sizes = {k: v for k, v in config.items() if v is not None and _is_size(k)}
    for key, value in sizes.items():
        most = MAX_POSITIONS if "vocab" in key or "positions" in key else MAX_SIZE
        most = MAX_LAYERS if key.endswith("_layers") else most
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_CONVOLUTIONS or not all(
            isinstance(v, int) and 0 <= v <= most for v in values
        ):
            raise ValueError(f"{path}: {key} = {str(value)[:40]}: at most {most} is expected")
    return config


SIZES = ("_size", "_dim", "_layers", "_positions", "_bins", "_kernel", "_stride", "_heads")


def _is_size(key: str) -> bool:
    return key == "d_model" or key.endswith(SIZES)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder. Raises ValueError where there are none."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        found = "; its pytorch_model.bin is a pickle, which can run code and is not read"
        remedy = "convert it with transformers' save_pretrained, or name a revision that has one"
        raise ValueError(f"{folder}: no model.safetensors{found * pickled}; {remedy}")
    return files


def _load(folder: Path, config: dict[str, Any], weights: bool) -> nn.Module:
    import transformers

    made = getattr(transformers, CLASSES[config["model_type"]][0])
    settings = made.config_class.from_dict({**config, **CONFIG})
    if made is transformers.WhisperModel:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder as made
    if not weights:
        return made(settings)
    files = weight_files(folder)
    with torch.device("meta"):
        needed = sum(p.numel() for p in made(settings).parameters())
    present = sum(prod(shape) for file in files for shape in _shapes(file))
    if needed > present:
        raise ValueError(f"{folder}: config.json describes {needed} weights, {present} are there")
    prefixes = WHISPER_PREFIXES if config["model_type"] == "whisper" else None
    with _quiet():
        model, loaded = made.from_pretrained(
            folder,
            config=settings,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            key_mapping=prefixes,
            output_loading_info=True,
        )
    # masked_spec_embed, of pretraining, is missing from some.
    missing = sorted(key for key in loaded["missing_keys"] if "masked_spec_embed" not in key)
    if missing:
        raise ValueError(f"{folder}: {len(missing)} weights are missing, {missing[0]} first")
    return model


def _load_extractor(folder: Path, config: dict[str, Any]) -> Any:
    import transformers

    made = getattr(transformers, CLASSES[config["model_type"]][1])
    settings = read_preprocessing(folder)
    if config["model_type"] == "whisper":
        settings["feature_size"] = config.get("num_mel_bins", 80)
    return made(**settings)


def read_preprocessing(folder: Path) -> dict[str, Any]:
    """How inputs are computed, by preprocessor_config.json, which Whisper may lack.

    Raises ValueError as read_config does, and where it is unknown whether waveforms are normalised.
    """
    path = folder / "preprocessor_config.json"
    if path.exists():
        settings = _read_json(path)
        return {key: settings[key] for key in PREPROCESSING if key in settings}
    if read_config(folder)["model_type"] != "whisper":
        reason = "it states whether waveforms are normalised; copy it from where the model is from"
        raise ValueError(f"{path}: no such file; {reason}")
    return {}


PREPROCESSING = ("sampling_rate", "do_normalize", "hop_length", "n_fft", "chunk_length")


def _shapes(file: Path) -> Iterator[list[int]]:
    with safe_open(file, "pt") as weights:
        for key in weights.keys():  # noqa: SIM118
            yield weights.get_slice(key).get_shape()


def _read_json(path: Path) -> dict[str, Any]:
    """An object. Raises ValueError."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError("larger than 1 MB")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; it is no folder of a pretrained encoder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error)[:100]})") from None
    return value


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an error of transformers about a folder into a ValueError of one line."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the library has many for a configuration that is wrong
        if str(error).startswith(str(folder)):
            raise
        raise ValueError(f"{folder}: cannot be loaded ({_line(error)})") from None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bar, and its report of the weights that an encoder lacks."""
    from transformers.utils import logging as messages

    level, shown = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if shown:
            messages.enable_progress_bar()
