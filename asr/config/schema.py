"""The catalogue of recipe keys: type, bounds, default and meaning of each.

Every group of keys is a frozen class that refuses unknown keys. Sections appear in the order in
which a recipe has them: run, seed, data, features, text, model (las, transformer), train, decode.
The tasks `language` and `images` replace data, text and model: asr/config/language.py and
asr/images/config.py. The comment on a key, or directly above it, is its entry in docs/recipes.md.
"""

import os
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from asr.config.cell import CellSettings
from asr.config.registered import REGISTERED, is_registered

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=1.0)]
# Computed in float32, whose squares end at 1e38.
NotNegative = Annotated[float, Field(ge=0.0, le=1e9)]
Positive = Annotated[float, Field(gt=0.0, le=1e9)]
Speed = Annotated[float, Field(ge=0.5, le=2.0)]
Decibels = Annotated[float, Field(ge=-100.0, le=200.0)]
Natural = Annotated[int, Field(ge=0, le=1_000_000_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
LayerCount = Annotated[int, Field(ge=1, le=64)]  # of an LSTM
Depth = Annotated[int, Field(ge=1, le=200)]  # layers of a Transformer
Kernel = Annotated[int, Field(ge=1, le=255)]
MAX_NAME = 200  # bytes; file systems allow 255, of which endings take some


def _check_path(value: Any) -> Any:
    """Refuse what is no file's name, and an empty one, which would be the current folder."""
    text = str(value)
    if not text:
        raise ValueError("is empty; write null, or . for the current folder")
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if "\0" in text or longest > 255 or len(text) > 1000:
        raise ValueError("no file can have this name: it is too long, or has a NUL")
    return value


def _check_name(name: str) -> str:
    """A name for a folder that does not lead out of its parent, and is no flag."""
    if name.startswith((".", "-")) or not name or "/" in name:
        raise ValueError("must be a plain name: not empty, without /, and no . or - first")
    if len(name.encode()) > MAX_NAME:
        raise ValueError(f"a name may have at most {MAX_NAME} bytes")
    return name


Backend = Literal["auto", "reference", "python", "cpu", "cuda", "cluster"]  # of an LSTM
RecipePath = Annotated[Path, BeforeValidator(_check_path)]
Name = Annotated[str, AfterValidator(_check_name)]


class Config(BaseModel):
    """One group of recipe keys. Infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _one_line_error(message: str) -> WrapValidator:
    """One error for a key with several forms, where pydantic reports one for each form."""

    def check(value: Any, read: Callable[[Any], Any]) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check)


class DataConfig(Config):
    """Section `data:`: the manifests and how they are read."""

    # built in; spoken-numbers is made when missing, the others by asr.prepare
    corpus: Literal["spoken-numbers", "librispeech", "mini-librispeech"] | None = None
    train: RecipePath | None = None  # manifest of the training split
    valid: RecipePath | None = None  # manifest of the validation split
    test: dict[Name, RecipePath] = Field(default_factory=dict)  # split name -> manifest
    allow_outside_audio: bool = False  # manifests may name audio outside their folder
    workers: Annotated[int, Field(ge=0, le=256)] = 2  # loader processes, at most one per core
    min_seconds: NotNegative = 0.1  # shorter training utterances are skipped
    max_seconds: Positive = 35.0  # longer training utterances are skipped
    max_unreadable: Weight = 0.01  # a larger share of unreadable training utterances is an error


class SpecAugmentConfig(Config):
    """Section `features.spec_augment:`: masks on the log-mel features (Park et al. 2019)."""

    freq_masks: Annotated[int, Field(ge=0, le=100)] = 2  # frequency masks per utterance
    freq_width: Natural = 27  # largest width of a frequency mask, mel bins
    time_masks: Annotated[int, Field(ge=0, le=100)] = 2  # time masks per utterance
    time_width: Natural = 100  # largest width of a time mask, frames of 10 ms
    time_fraction: Weight = 0.2  # largest width of a time mask, share of its utterance
    time_warp: Natural = 0  # largest shift of one frame, others stretched to fit; ESPnet has 5


TRAINING_ONLY_FEATURES = {  # keys of FeaturesConfig
    "spec_augment", "speed_perturb", "noise", "noise_files", "noise_probability", "room_responses",
    "room_probability",
}  # fmt: skip


class FeaturesConfig(Config):
    """Section `features:`: the acoustic front end, the same for every model."""

    # slaney: librosa's log-mel; encoder: hidden states of a pretrained one (extra: encoders).
    kind: Literal["logmel", "mfcc", "slaney", "encoder"] = "logmel"
    # wav2vec 2.0, HuBERT, WavLM or Whisper: a folder, or NAME[@REVISION] on the Hugging Face Hub.
    encoder: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    # encoder: the last layer's output, that of layer N, or a learned weighted sum of all layers
    layer: Annotated[
        Literal["last", "weighted"] | Annotated[int, Field(ge=0, le=100)],
        _one_line_error("should be last, weighted, or the number of a layer from 0 on"),
    ] = "last"
    # encoder: layers that are trained with the model, `all` or the top N; none: computed once
    train: Annotated[
        Literal["none", "all"] | Annotated[int, Field(ge=1, le=100)],
        _one_line_error("should be none, all, or the number of the top layers from 1 on"),
    ] = "none"
    gradient_checkpointing: bool = False  # encoder: less memory, more time for its training
    project: Count | None = None  # size of a linear layer after the features; null: none
    sample_rate: Annotated[int, Field(ge=4000, le=48000)] = 16000  # Hz; audio is resampled to it
    mel_bins: Annotated[int, Field(ge=4, le=512)] = 80  # mel filters
    ceps: Annotated[int, Field(ge=1, le=512)] = 13  # mfcc: cepstral coefficients kept
    deltas: Annotated[int, Field(ge=0, le=2)] = 0  # mfcc: 1 adds deltas, 2 delta-deltas too
    # standard deviation of noise on 16-bit samples, as in Kaldi
    dither: Annotated[float, Field(ge=0.0, le=32768.0)] = 0.0
    # Mean and variance normalisation: over each utterance, each speaker or the training split.
    mvn: Literal["none", "utterance", "speaker", "global"] = "utterance"
    mvn_variance: bool = True  # false subtracts the mean only
    spec_augment: SpecAugmentConfig | None = None  # masks in training; null: none
    # Speed factors in training, one drawn per utterance and epoch.
    speed_perturb: Annotated[tuple[Speed, ...], Field(min_length=1)] = (1.0,)
    # noise in training: lowest and highest SNR, dB; white unless noise_files is set
    noise: tuple[Decibels, Decibels] | None = None
    # Manifest of noise for `noise`, with the columns id and audio.
    noise_files: RecipePath | None = None
    noise_probability: Weight = 0.5  # share of utterances with noise of noise_files
    # Manifest of room impulse responses, with the columns id and audio, for training.
    room_responses: RecipePath | None = None
    room_probability: Weight = 0.5  # share of utterances with a response of room_responses

    @model_validator(mode="after")
    def _encoder_fits(self) -> "FeaturesConfig":
        if self.kind != "encoder":
            if self.encoder or self.layer != "last" or self.train != "none":
                raise ValueError("features.encoder, layer and train need features.kind=encoder")
            return self
        if self.encoder is None:
            raise ValueError("features.kind = encoder: set features.encoder=FOLDER or NAME")
        if self.dither:
            raise ValueError("features.dither is for log-mel and mfcc: set features.dither=0")
        if self.train != "none" and self.mvn == "speaker":
            raise ValueError(
                "features.mvn = speaker has no statistics of an encoder that is trained: set "
                "features.mvn=utterance, global or none"
            )
        return self

    @model_validator(mode="after")
    def _noise_has_its_level(self) -> "FeaturesConfig":
        if self.noise_files and self.noise is None:
            raise ValueError(
                "features.noise_files = MANIFEST needs the SNR in dB: set features.noise=[5, 20], "
                "and features.noise_probability=0 where a stage has no noise"
            )
        return self


class TextConfig(Config):
    """Section `text:`: how transcripts become tokens."""

    # bpe, unigram: sentencepiece's subwords; word: each word is a token, as a phone or a command
    kind: Literal["characters", "bpe", "unigram", "word"] = "characters"
    size: Annotated[int, Field(ge=8, le=1_000_000)] = 500  # most tokens of bpe, unigram and word


def _read_norm(norm: Any, read: Callable[[Any], Any]) -> Any:
    """The name of a norm; a registered one need not be among those of the schema."""
    if is_registered(norm):
        return norm
    try:
        return read(norm)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Input ")
        known = ", ".join(REGISTERED) or "a name given to asr.register_norm"
        raise ValueError(f"{message}, or {known}") from None


# Serialised as text, since pydantic warns of a value that is not in the Literal.
READ_NORM = WrapValidator(_read_norm)
AS_TEXT = PlainSerializer(lambda norm: norm)


class LSTMConfig(Config):
    """Keys of every LayerNorm-LSTM: where it is normalised, and which backend computes it."""

    # docs/normalization.md
    norm: Literal["none", "ba", "raw", "thesis", "per_gate", "cell", "joined"] = "ba"
    # ba, per_gate, joined: what reads the normalised c: nothing, the output, both, or the next
    # step; null: the default of `norm`
    cell_norm: Literal["none", "output", "carried", "state"] | None = None
    hidden_norm: bool = False  # ba, per_gate, joined: normalise h
    # ba, per_gate, joined, cell: rms does not subtract the mean
    norm_kind: Annotated[Literal["layer", "rms"], READ_NORM, AS_TEXT] = "layer"
    # ba: initial gain of the norm of W_h h; 1.0 as published, 0.1 trains faster
    recurrent_gain: Annotated[float, Field(gt=0.0, le=1000.0)] = 0.1
    # null: 1e-3 for raw and thesis, else 1e-5
    eps: Annotated[float, Field(ge=1e-30, le=1.0)] | None = None
    # rows of zero variance: guard gives 0 and gradient 0, raw the textbook formula
    zero_variance: Literal["guard", "raw"] = "guard"
    backend: Backend = "auto"  # implementation

    @model_validator(mode="after")
    def _norms_fit(self) -> "LSTMConfig":
        _ = self.settings  # raises ValueError
        return self

    @property
    def settings(self) -> CellSettings:
        """The norms, as a layer takes them."""
        return CellSettings(**{f.name: getattr(self, f.name) for f in fields(CellSettings)})


class ListenerConfig(LSTMConfig):
    """Section `model.listener:`: the pyramidal bidirectional LSTM encoder."""

    norm_layers: Literal["all", "pyramid", "first"] = "all"  # layers with `norm`; others have none
    layers: LayerCount = 4  # LSTM layers
    hidden: Count = 256  # LSTM units per direction
    pyramid: tuple[LayerCount, ...] = (2, 3)  # layers, from 1, that read frames in pairs
    convolution: Literal[1, 2, 4, 6, 8] = 1  # reduction by strided convolutions before the LSTM
    dropout: Rate = 0.0  # after each layer
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per utterance

    @model_validator(mode="after")
    def _pyramid_layers_exist(self) -> "ListenerConfig":
        pyramid, layers = self.pyramid, self.layers
        if len(set(pyramid)) != len(pyramid) or any(n > layers for n in pyramid):
            raise ValueError(f"pyramid {list(pyramid)} must name different layers of 1 to {layers}")
        if self.norm_layers == "pyramid" and self.norm != "none" and not pyramid:
            raise ValueError("norm_layers pyramid needs a pyramid: else no layer has the norm")
        return self

    @property
    def reduction(self) -> int:
        """Input frames per frame of memory."""
        return self.convolution * 2 ** len(self.pyramid)


class SpellerConfig(LSTMConfig):
    """Section `model.speller:`: the LSTM decoder with input feeding."""

    layers: LayerCount = 1  # LSTM layers
    hidden: Count = 256  # LSTM units
    embedding: Count = 128  # size of a token's vector
    dropout: Rate = 0.0  # on embeddings, after each layer and before the output
    recurrent_dropout: Rate = 0.0  # on the candidate g, one mask per utterance
    # probability of feeding the predicted token in training (Bengio et al. 2015)
    scheduled_sampling: Rate = 0.0
    tied: bool = False  # output layer and embedding share weights


class IntermediateCtcConfig(Config):
    """Section `model.intermediate_ctc:`: CTC of inner encoder layers, by the same head.

    Lee & Watanabe 2021 (arXiv:2102.03216); with `self_conditioning` Nozaki & Komatsu 2021
    (arXiv:2104.02724).
    """

    layers: Annotated[tuple[Depth, ...], Field(min_length=1)]  # counted from 1
    weight: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3  # share of the CTC loss
    self_conditioning: bool = True  # later layers read the predictions


def check_intermediate_ctc(
    inner: IntermediateCtcConfig | None, ctc_weight: float, first: int, last: int, key: str
) -> None:
    """Raise ValueError unless all its layers are `first` to `last`, and there is a CTC head."""
    if inner is None:
        return
    if not ctc_weight:
        raise ValueError(
            "model.intermediate_ctc needs a CTC head, which model.ctc_weight = 0 removes: set "
            "model.ctc_weight=0.3 or model.intermediate_ctc=null"
        )
    if min(inner.layers) < first or max(inner.layers) > last:
        choice = f"choose {first} to {last}" if first <= last else "set model.intermediate_ctc=null"
        raise ValueError(f"model.intermediate_ctc.layers = {list(inner.layers)}: of {key} {choice}")


class LasConfig(Config):
    """Section `model:` with `kind: las`: Listen, Attend and Spell."""

    kind: Literal["las"]  # selects the model
    listener: ListenerConfig = ListenerConfig()
    # location: additive, with past weights as input (Chorowski et al. 2015)
    attention: Literal["additive", "dot", "location"] = "location"
    attention_size: Count = 128  # of queries and keys
    speller: SpellerConfig = SpellerConfig()
    ctc_weight: Weight = 0.3  # share of the CTC loss; 0: no CTC head
    # null: none
    intermediate_ctc: IntermediateCtcConfig | None = None

    @model_validator(mode="after")
    def _intermediate_ctc_fits(self) -> "LasConfig":
        layers, pyramid = self.listener.layers, self.listener.pyramid
        key = f"model.listener.layers = {layers} with pyramid = {list(pyramid)}"
        first = max(pyramid, default=1)
        check_intermediate_ctc(self.intermediate_ctc, self.ctc_weight, first, layers - 1, key)
        return self


class WindowsConfig(Config):
    """Section `model.encoder_windows:`: initial Gaussian windows of the encoder's heads.

    After Sperber et al. 2018; both are learned.
    """

    # one per head: centre minus the query's frame
    offsets: tuple[Annotated[float, Field(ge=-1e5, le=1e5)], ...]
    width: Annotated[float, Field(ge=1e-3, le=1e5)]  # standard deviation, frames


class PerStack(Config):
    """A number for each stack of layers."""

    encoder: Positive = 1.0  # of the encoder's layers
    decoder: Positive = 1.0  # of the decoder's layers


ResidualScale = Annotated[
    Positive | PerStack | Literal["deepnet"],
    _one_line_error("should be a number above 0, {encoder: NUMBER, decoder: NUMBER} or deepnet"),
]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$"),
    _one_line_error("should be auto, cpu, cuda or cuda:N with N from 0 to 99"),
]


NormKind = Literal["layer", "rms", "scale", "bias", "dyt", "derf"]


def _batch_is_for_convolutions(norm: Any) -> Any:
    if norm == "batch":
        raise ValueError(
            "normalises over a whole batch and is for convolution modules alone: choose one of "
            f"{', '.join(get_args(NormKind))}, and set model.convolution_norm = batch"
        )
    return norm


class TransformerLayersConfig(Config):
    """Keys of every Transformer: the speech models and the language model."""

    d_model: Count = 256  # size of the residual stream
    heads: Annotated[int, Field(ge=1, le=256)] = 4  # attention heads; must divide d_model
    feed_forward: Count = 1024  # hidden units of the feed-forward sublayers
    # docs/normalization.md
    norm: Annotated[NormKind, READ_NORM, AS_TEXT, BeforeValidator(_batch_is_for_convolutions)] = (
        "layer"
    )
    # docs/normalization.md
    norm_position: Literal["pre", "post", "peri", "reordered", "hybrid", "sub"] = "pre"
    depth_scaled: bool = False  # pre: divide the norm's output in layer l by sqrt(l)
    qk_norm: bool = False  # normalise queries and keys
    fixnorm: bool = False  # embedding vectors have length 1
    tied: bool = False  # output layer and embedding share weights
    activation: Literal["relu", "gelu", "swish"] = "relu"  # of the feed-forward sublayers
    # position encoding; rope: rotary
    positions: Literal["sinusoidal", "rope"] = "sinusoidal"
    dropout: Rate = 0.1  # on inputs and sublayer outputs
    attention_dropout: Rate = 0.0  # on attention weights
    feed_forward_dropout: Rate = 0.0  # after the activation
    drop_head: Rate = 0.0  # DropHead rate
    layer_drop: Rate = 0.0  # LayerDrop rate

    @field_validator("heads")
    @classmethod
    def _divides(cls, heads: int, info: ValidationInfo) -> int:
        size = info.data.get("d_model", heads)
        if size % heads:
            divisors = ", ".join(str(n) for n in range(1, 17) if size % n == 0)
            raise ValueError(f"must divide d_model = {size}: choose {divisors}")
        return heads

    @model_validator(mode="after")
    def _norms_fit(self) -> "TransformerLayersConfig":
        if self.depth_scaled and self.norm_position != "pre":
            raise ValueError(
                f"model.depth_scaled = true is for norm_position = pre, not {self.norm_position}: "
                "set model.norm_position=pre or model.depth_scaled=false"
            )
        if self.qk_norm and self.norm_position == "hybrid":
            raise ValueError(
                "model.qk_norm = true changes nothing with norm_position = hybrid, which has norms "
                "of queries and keys: set model.qk_norm=false or another norm_position"
            )
        size = self.d_model // self.heads
        if self.positions == "rope" and size % 2:
            raise ValueError(
                f"model.positions = rope needs an even d_model / heads, which is {self.d_model} / "
                f"{self.heads} = {size}: change model.heads, or set model.positions=sinusoidal"
            )
        position, scale = self.norm_position, self.residual_scale  # which each subclass declares
        if scale == "deepnet" and position != "post":
            raise ValueError(
                f"model.residual_scale = deepnet is for norm_position = post, not {position}: "
                "set model.norm_position=post or model.residual_scale=1"
            )
        if position == "sub" and scale != 1.0:
            raise ValueError(
                "model.norm_position = sub has fixed scales: set model.residual_scale=1, or "
                "model.norm_position=pre"
            )
        return self


class EncoderDecoderConfig(TransformerLayersConfig):
    """Keys of both speech models with a Transformer's decoder."""

    encoder_layers: Depth = 12  # encoder layers
    decoder_layers: Depth = 6  # decoder layers
    reduction: Literal[2, 4, 6, 8] = 4  # input frames per frame of memory
    subsampling_channels: Count = 32  # of the strided convolutions
    residual_scale: ResidualScale = 1.0  # alpha in sublayer(x) + alpha * x
    # in convolution modules; null: as `norm`
    convolution_norm: Annotated[Literal[NormKind, "batch"] | None, READ_NORM, AS_TEXT] = None
    ctc_weight: Weight = 0.3  # share of the CTC loss; 0: no CTC head
    intermediate_ctc: IntermediateCtcConfig | None = None  # null: none

    @model_validator(mode="after")
    def _intermediate_ctc_fits(self) -> "EncoderDecoderConfig":
        key, last = f"model.encoder_layers = {self.encoder_layers}", self.encoder_layers - 1
        check_intermediate_ctc(self.intermediate_ctc, self.ctc_weight, 1, last, key)
        return self


def _check_odd(kernel: int | None) -> int | None:
    if kernel is not None and kernel % 2 == 0:
        raise ValueError(f"must be odd: choose {kernel - 1} or {kernel + 1}")
    return kernel


OddKernel = Annotated[Kernel, AfterValidator(_check_odd)]


class TransformerConfig(EncoderDecoderConfig):
    """Section `model:` with `kind: transformer`: the speech encoder-decoder."""

    kind: Literal["transformer"]  # selects the model
    # learned Gaussian windows on the encoder's self-attention; null: none
    encoder_windows: WindowsConfig | None = None
    # odd kernel of a convolution module in each encoder layer, frames; null: none
    encoder_convolution: OddKernel | None = None

    @field_validator("encoder_windows")
    @classmethod
    def _has_a_window_per_head(
        cls, windows: WindowsConfig | None, info: ValidationInfo
    ) -> WindowsConfig | None:
        heads = info.data.get("heads")
        if windows and heads and len(windows.offsets) != heads:
            raise ValueError(f"has {len(windows.offsets)} offsets for {heads} heads: give one each")
        return windows

    @model_validator(mode="after")
    def _norm_has_its_module(self) -> "TransformerConfig":
        if self.convolution_norm is not None and self.encoder_convolution is None:
            raise ValueError(
                f"model.convolution_norm = {self.convolution_norm} needs a convolution module: set "
                "model.encoder_convolution=15, or model.convolution_norm=null"
            )
        return self


class ConformerConfig(EncoderDecoderConfig):
    """Section `model:` with `kind: conformer`: a Conformer encoder, a Transformer decoder."""

    kind: Literal["conformer"]  # selects the model
    kernel: OddKernel = 15  # of the convolution modules, odd, frames
    activation: Literal["relu", "gelu", "swish"] = "swish"  # of the feed-forward sublayers
    positions: Literal["sinusoidal", "rope"] = "rope"  # position encoding; rope: rotary

    @model_validator(mode="after")
    def _is_not_deepnet(self) -> "ConformerConfig":
        if self.residual_scale == "deepnet":
            raise ValueError(
                "model.residual_scale = deepnet is for layers of two sublayers, which kind = "
                "conformer has not: set model.residual_scale=1 or model.kind=transformer"
            )
        return self


class OptimizerConfig(Config):
    """Section `train.optimizer:`: how the gradient changes the weights (asr/training/optim.py)."""

    # muon: orthogonalised steps of matrices; schedule_free: AdamW with averaged weights, for a
    # constant schedule
    kind: Literal["adam", "adamw", "muon", "schedule_free"] = "adam"
    # peak learning rate; for noam the factor
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    betas: tuple[Rate, Rate] = (0.9, 0.999)  # decay of both moments
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8  # of Adam
    # of matrices alone
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    # factors of the learning rate by patterns of parameter names; the first match counts:
    # {"encoder.*": 0.1}
    lr_factors: dict[str, Positive] = Field(default_factory=dict)


class ScheduleConfig(Config):
    """Section `train.schedule:`: learning rate against steps, with a linear warm-up."""

    # after the warm-up
    kind: Literal["constant", "noam", "tri_stage", "cosine"] = "tri_stage"
    warmup: Natural = 200  # steps
    hold: Weight = 0.5  # tri_stage: share of the run before the decay
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05  # tri_stage, cosine: last rate / lr
    width: Count = 512  # noam: d_model in the formula


class GuidedAttentionConfig(Config):
    """Section `train.guided_attention:`: loss on non-diagonal attention (Tachibana et al. 2018)."""

    weight: Positive = 1.0  # factor beside the cross-entropy
    width: Annotated[float, Field(ge=1e-3, le=10.0)] = 0.2  # free band, share of the utterance
    steps: Count = 1000  # last step with this loss


class ConsistencyConfig(Config):
    """Section `train.consistency:`: equal outputs for two augmented views of each utterance.

    Takes twice the memory and time: halve batch_seconds.
    """

    ctc: NotNegative = 0.2  # weight beside the CTC loss (Yao et al. 2024)
    # weight beside the cross-entropy: half of alpha in R-Drop (Liang et al. 2021)
    decoder: NotNegative = 0.5


class AlarmConfig(Config):
    """Section `train.alarm:`: a warning when attention is not diagonal."""

    steps: Natural = 3000  # first step that is checked; 0: never
    diagonality: Weight = 0.6  # lowest without a warning


class EarlyStoppingConfig(Config):
    """Section `train.early_stopping:`: end a run whose validation stops improving."""

    # the curve valid/METRIC; it also ranks checkpoints
    metric: Literal[
        "nll", "objective", "ctc", "wer", "ctc_wer", "accuracy", "diagonality",
        "perplexity", "word_perplexity",
    ] = "nll"  # fmt: skip
    patience: Count = 5  # validations without improvement that end the run
    min_delta: NotNegative = 0.0  # a smaller change is no improvement; wer 0.01 is 1 %


class TrainConfig(Config):
    """Section `train:`: the training loop."""

    epochs: Count = 20  # passes over the training split
    steps: Count | None = None  # optimizer steps; overrides epochs
    batch_seconds: Positive = 120.0  # padded seconds per batch
    # pad batches to multiples of so many seconds: fewer shapes; 0: never
    round_seconds: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    accumulate: Count = 1  # batches per step
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip: Positive = 5.0  # largest gradient norm
    # decay per step of an exponential moving average of the weights; null: none
    ema: Rate | None = None
    bad_steps: Count = 10  # consecutive steps without a finite gradient that end the run
    label_smoothing: Rate = 0.1  # probability spread over all tokens
    guided_attention: GuidedAttentionConfig | None = None  # null: none
    consistency: ConsistencyConfig | None = None  # null: none
    short_first: bool = True  # sort the first epoch by length
    # bf16: autocast, but fp32 on a device without instructions for it
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Device = "auto"  # auto: GPU if any; cpu, cuda, cuda:N
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # CPU threads; null: torch's choice
    init: RecipePath | None = None  # run whose weights this one starts from
    # with init: the vocabulary of `text` instead of that of the run; its layers start at random
    new_vocabulary: bool = False
    # patterns of the names of parameters that are not trained, ["encoder.*"]
    freeze: tuple[str, ...] = ()
    validate_every: Count | None = None  # steps; null: once per epoch
    save_every: Count = 500  # steps
    keep: Count = 3  # latest checkpoints kept
    # best checkpoints kept too, by validation loss or train.early_stopping.metric
    keep_best: Count = 1
    early_stopping: EarlyStoppingConfig | None = None  # null: never
    log_every: Count = 20  # steps
    # besides TensorBoard: docs/sharing.md
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    samples: Natural = 4  # validation utterances shown in TensorBoard
    wer_utterances: Natural = 200  # validation utterances, evenly spread, decoded for WER curves
    alarm: AlarmConfig = AlarmConfig()
    health: Natural = 0  # log gates, norms and gradients every so many validations; 0: never
    debug: Literal["nan"] | None = None  # nan: stop at the first non-finite value; slow

    @property
    def metric(self) -> str:
        """The figure of the validation that ranks checkpoints."""
        return self.early_stopping.metric if self.early_stopping else "nll"

    @model_validator(mode="after")
    def _averages_fit(self) -> "TrainConfig":
        if self.optimizer.kind != "schedule_free":
            return self
        if self.schedule.kind != "constant":
            raise ValueError(
                "train.optimizer.kind = schedule_free needs a rate that does not fall, not "
                f"train.schedule.kind = {self.schedule.kind}: set train.schedule.kind=constant"
            )
        if self.ema is not None:
            raise ValueError(
                "train.ema is an average of the weights, and train.optimizer.kind = schedule_free "
                "averages them already: set train.ema=null or train.optimizer.kind=adamw"
            )
        if not self.optimizer.betas[0]:
            raise ValueError(
                "train.optimizer.kind = schedule_free needs train.optimizer.betas[0] above 0"
            )
        return self


class BeamConfig(Config):
    """Part of `decode:`: the beam search and its scores."""

    # width; 1 without CTC, language model, ensemble and other speeds: greedy search
    beam: Annotated[int, Field(ge=1, le=1000)] = 1
    # exponent alpha of Wu et al. 2016; no effect in greedy search
    length_penalty: Annotated[float, Field(ge=0.0, le=10.0)] = 0.6
    # added to the score per token; no effect in greedy search
    token_reward: Annotated[float, Field(ge=-1000.0, le=1000.0)] = 0.0
    # <eos> needs a log-probability of at least this factor times the best other token's (Hannun et
    # al. 2019); null: no limit
    eos_threshold: Positive | None = 1.5
    # longest hypothesis: this times the frames of memory, plus 10 tokens
    max_ratio: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    ctc_weight: Weight = 0.0  # share of the CTC prefix score (Watanabe et al. 2017)


class DecodeConfig(BeamConfig):
    """Section `decode:`: from logits to text, by greedy or beam search."""

    checkpoint: Literal["best", "last"] = "best"  # ranked by train.early_stopping.metric
    average: Count = 1  # best or last checkpoints to average
    # padded seconds per batch; null: 240, on a GPU 1,920, in training 240
    batch_seconds: Positive | None = None
    search: Literal["beam", "ctc"] = "beam"  # ctc: prefix beam search by the CTC head alone
    # encode each utterance at these speeds and average the log-probabilities; not in training
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1, max_length=20)] = (1.0,)
    # runs of the same vocabulary and features whose log-probabilities join that average
    ensemble: Annotated[tuple[RecipePath, ...], Field(max_length=20)] = ()
    # a language model's run (`lm` is shipped), or n-grams (.arpa, .arpa.gz, binary)
    lm: RecipePath | None = None
    lm_weight: NotNegative = 0.3  # factor of the language model's log-probabilities
    # n-grams: add the score at the end of each word, or at each token; with a large lm_weight
    # `word` favours words that never end
    lm_unit: Literal["word", "token"] = "word"
    # longer audio is cut at pauses; null: data.max_seconds
    max_segment_seconds: Annotated[float, Field(ge=1.0, le=1e9)] | None = None
    overlap: NotNegative = 2.0  # seconds, of segments cut without a pause
    # Longer silences, in seconds, are not decoded: they change the mean and variance of features.
    # null: all is decoded, for a model trained on utterances with long silences
    max_silence: Annotated[float, Field(ge=0.5, le=1e9)] | None = 1.5
    # The text of noise or music is dropped where its mean log-probability per token is below this
    # and the CTC head prefers no text; null: never.
    no_speech_log_prob: Annotated[float, Field(ge=-1000.0, le=0.0)] | None = -0.8

    def seconds_at_once(self, on_gpu: bool = False) -> float:
        """batch_seconds or its default: on a GPU launching takes longer than computing."""
        return self.batch_seconds or (1920.0 if on_gpu else 240.0)

    @property
    def other_speeds(self) -> list[float]:
        """The speeds besides 1."""
        return [speed for speed in self.speeds if speed != 1.0]

    @field_validator("speeds")
    @classmethod
    def _include_one(cls, speeds: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if 1.0 not in speeds or len(set(speeds)) < len(speeds):
            raise ValueError("speeds must differ and include 1.0")
        if len(speeds) > 1 and info.data.get("search") == "ctc":
            raise ValueError("search=ctc takes one: set decode.speeds=[1.0] or search=beam")
        return speeds

    @field_validator("ensemble")
    @classmethod
    def _needs_a_beam(cls, runs: tuple[Path, ...], info: ValidationInfo) -> tuple[Path, ...]:
        if runs and info.data.get("search") == "ctc":
            raise ValueError("search=ctc takes one run: set decode.ensemble=[] or search=beam")
        return runs


SpeechModelConfig = Annotated[
    LasConfig | TransformerConfig | ConformerConfig, Field(discriminator="kind")
]


# Keys that a stage may change, by their last part or with all before it: what else a run has, such
# as the shape of its model, is the same from its first step to its last.
STAGE_KEYS = {
    "features": (
        "spec_augment", "speed_perturb", "noise", "noise_probability", "room_probability",
    ),
    "model": ("dropout", "recurrent_dropout", "scheduled_sampling", "layer_drop", "drop_head"),
    "train": (
        "accumulate", "batch_seconds", "clip", "consistency", "freeze", "guided_attention",
        "label_smoothing", "optimizer.lr", "optimizer.lr_factors",
    ),
}  # fmt: skip


# Keys that a trained run may be decoded with other values of, besides decode and data.
LATER_KEYS = {"train.device", "train.threads", "features.dither"}
LATER_KEYS |= {"features.encoder"}  # the same weights elsewhere
LATER_MVN = {"utterance", "speaker"}  # the same statistics, over less or more speech
OF_TRAINING = TRAINING_ONLY_FEATURES | {*STAGE_KEYS["model"]}
TRAINING_ONLY = "has an effect in training only"


def unusable_later(key: str, trained: Any, now: Any) -> str | None:
    """Why a run that was trained with one value of a key is not decoded with another; None if it
    may be.
    """
    section, *rest = key.split(".")
    if section in ("decode", "data") or key in LATER_KEYS or rest[-1:] == ["backend"]:
        return None
    if key == "features.mvn" and {trained, now} <= LATER_MVN:
        return None
    if section not in ("features", "text", "model") or OF_TRAINING & set(rest):
        return TRAINING_ONLY
    return f"its model was trained with {trained}, and fits no other value"


def _check_stage_keys(changes: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    section, allowed = str(info.field_name), STAGE_KEYS[str(info.field_name)]

    def check(tree: dict[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if name in allowed or (section == "model" and key in allowed):
                continue
            if not isinstance(value, dict) or not value:
                raise ValueError(
                    f"{section}.{name} cannot change in a run; a stage may change "
                    f"{', '.join(allowed)}"
                )
            check(value, f"{name}.")

    check(changes, "")
    return changes


StageChanges = Annotated[dict[str, Any], AfterValidator(_check_stage_keys)]


class StageConfig(Config):
    """Part of `stages:`: keys that change in the course of a run."""

    start: Annotated[float, Field(gt=0.0, lt=1.0)]  # share of the run; from the next epoch on
    # spec_augment, speed_perturb, noise, noise_probability, room_probability
    features: StageChanges = Field(default_factory=dict)
    # dropout, recurrent_dropout, scheduled_sampling, layer_drop, drop_head: {listener: {dropout:
    # 0.2}}
    model: StageChanges = Field(default_factory=dict)
    # accumulate, batch_seconds, clip, consistency, freeze, guided_attention, label_smoothing,
    # optimizer.lr, optimizer.lr_factors
    train: StageChanges = Field(default_factory=dict)


class Recipe(Config):
    """What the recipes of all tasks have: the task, the run's folder, the seed and `train:`."""

    task: str = "speech"  # or `language`, `images`
    run: str  # folder under runs/
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1  # of weights, data order, dropout and masks
    train: TrainConfig = TrainConfig()
    # in order; each adds to those before it
    stages: Annotated[tuple[StageConfig, ...], Field(max_length=20)] = ()

    @property
    def unmeasured(self) -> set[str]:
        """Metrics that no validation of this recipe has."""
        return {"ctc", "wer", "ctc_wer", "diagonality"}

    @model_validator(mode="after")
    def _metric_is_measured(self) -> "Recipe":
        if self.train.metric in self.unmeasured:
            raise ValueError(
                f"train.early_stopping.metric = {self.train.metric} is not measured with this "
                "recipe: choose another, such as nll"
            )
        return self

    @field_validator("stages")
    @classmethod
    def _follow_one_another(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        starts = [stage.start for stage in stages]
        if any(later <= sooner for sooner, later in pairwise(starts)):
            raise ValueError("each stage must start after the one before it")
        return stages

    @field_validator("run")
    @classmethod
    def _is_below_runs(cls, name: str) -> str:
        if len(name.encode()) > MAX_NAME:
            raise ValueError(f"may have at most {MAX_NAME} bytes")
        if any(part.startswith((".", "-")) or not part for part in name.split("/")):
            raise ValueError("must be a plain folder name, it is put under runs/")
        if name.startswith("runs/"):
            raise ValueError(f"is put under runs/: run={name.removeprefix('runs/')}")
        return name


class SpeechRecipe(Recipe):
    """A recipe with `task: speech`: speech recognition."""

    task: Literal["speech"] = "speech"  # selects the task
    data: DataConfig
    features: FeaturesConfig = FeaturesConfig()
    text: TextConfig = TextConfig()
    model: SpeechModelConfig
    decode: DecodeConfig = DecodeConfig()

    @property
    def unmeasured(self) -> set[str]:
        """Metrics that no validation of this recipe has."""
        without_head = set() if self.model.ctc_weight else {"ctc", "ctc_wer"}
        undecoded = set() if self.train.wer_utterances else {"wer", "ctc_wer", "diagonality"}
        return {"perplexity", "word_perplexity"} | without_head | undecoded

    @model_validator(mode="after")
    def _ctc_decoding_has_its_head(self) -> "SpeechRecipe":
        alone, weight = self.decode.search == "ctc", self.decode.ctc_weight
        if (alone or weight) and not self.model.ctc_weight:
            key = "search=ctc" if alone else f"ctc_weight={weight:g}"
            raise ValueError(
                f"decode.{key} needs a CTC head, which model.ctc_weight = 0 removes: "
                "set decode.ctc_weight=0 and decode.search=beam, or train with a head"
            )
        return self


# Keys under `train:` that only speech has.
SPEECH_ONLY_KEYS = (
    "batch_seconds", "round_seconds", "short_first", "guided_attention", "consistency",
    "wer_utterances", "alarm", "new_vocabulary",
)  # fmt: skip


class NonSpeechRecipe(Recipe):
    """A recipe of a task without audio."""

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Keys under `train:` that change nothing in this task."""
        return SPEECH_ONLY_KEYS

    @model_validator(mode="after")
    def _sets_no_unused_key(self) -> "NonSpeechRecipe":
        defaults = TrainConfig()
        for key in self.unused_keys:
            if getattr(self.train, key) != getattr(defaults, key):
                raise ValueError(f"train.{key} changes nothing in task {self.task}: remove it")
        return self
