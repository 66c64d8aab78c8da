"""Recipe -> objects: small functions from one section of a recipe to what it describes."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from asr.config.language import LanguageModelConfig
from asr.config.schema import FeaturesConfig, SpeechModelConfig
from asr.errors import UserError
from asr.features.augment import SpecAugment
from asr.features.encoder import EncoderFeatures, EncoderInputs, PretrainedEncoder, train_top
from asr.features.fbank import Fbank, FeatureExtractor, Mfcc, SlaneyMel
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm
from asr.nn.frontend import Frontend

# model.kind -> its class, imported when a recipe names it, so that commands load no other model.
SPEECH_MODELS = {
    "las": "asr.models.las:LAS",
    "transformer": "asr.models.transformer:Transformer",
    "conformer": "asr.models.transformer:Conformer",
}
LANGUAGE_MODELS = {
    "lstm": "asr.models.language_model:LSTMLanguageModel",
    "transformer": "asr.models.language_model:TransformerLanguageModel",
}


@contextmanager
def config_errors(section: str) -> Iterator[None]:
    """Turn a constructor's ValueError into a UserError that names the recipe's section."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{section}: {error}") from None


def build_front_end(
    features: FeaturesConfig,
    max_seconds: float | None = None,
    encoder: PretrainedEncoder | None = None,
) -> FrontEnd:
    """Audio, up to max_seconds -> features. The norm's statistics are not set yet.

    encoder: that of features.encoder. One that is trained is a part of the model, and so are
    normalisation and masks of its output.
    """
    with config_errors("features"):
        norm = MeanVarianceNorm(features.mvn, features.mvn_variance)
        extract = build_extractor(features, encoder)
        if features.train == "none":
            return FrontEnd(extract, norm, _masks(features), features.noise, max_seconds)
        front_end = FrontEnd(
            extract, MeanVarianceNorm("none"), noise=features.noise, max_seconds=max_seconds
        )
        front_end.encoder_norm = norm
        return front_end


def _masks(features: FeaturesConfig) -> SpecAugment | None:
    masks = features.spec_augment
    return masks and SpecAugment(**masks.model_dump())


def build_extractor(
    features: FeaturesConfig, encoder: PretrainedEncoder | None = None
) -> FeatureExtractor:
    """Log-mel (Kaldi's or Slaney's), MFCC, or hidden states of a pretrained encoder."""
    rate, bins, dither = features.sample_rate, features.mel_bins, features.dither
    if encoder is not None:
        kind = EncoderFeatures if features.train == "none" else EncoderInputs
        return kind(encoder, rate)
    if features.kind == "mfcc":
        ceps, deltas = features.ceps, features.deltas
        return Mfcc(rate, num_mel_bins=bins, num_ceps=ceps, deltas=deltas, dither=dither)
    kind = {"logmel": Fbank, "slaney": SlaneyMel}[features.kind]
    return kind(rate, num_mel_bins=bins, dither=dither)


def build_frontend(features: FeaturesConfig, front_end: FrontEnd) -> Frontend | None:
    """The learned layers between features and model; None without any."""
    layers, encoder, extract = 1, None, front_end.extract
    if isinstance(extract, EncoderFeatures):
        layers = extract.groups
    if isinstance(extract, EncoderInputs):
        encoder, layers = extract.encoder, extract.encoder.count
        with config_errors("features"):
            train_top(encoder, features.train, features.gradient_checkpointing)
    if encoder is None and layers == 1 and features.project is None:
        return None
    if encoder is None:
        return Frontend(front_end.size, layers=layers, project=features.project)
    masks = _masks(features)
    return Frontend(
        layers * encoder.hidden_size,
        encoder,
        layers,
        front_end.encoder_norm if features.mvn != "none" else None,
        partial(masks, generator=None, groups=layers) if masks else None,
        features.project,
    )


def build_speech_model(
    model: SpeechModelConfig,
    features: int,
    vocabulary: int,
    frontend: Frontend | None = None,
) -> nn.Module:
    """LAS, Transformer or Conformer, for `features` values per frame."""
    make = pkgutil.resolve_name(SPEECH_MODELS[model.kind])
    with config_errors("model"):
        return make(features, vocabulary, model, frontend)


def build_language_model(model: LanguageModelConfig, vocabulary: int) -> nn.Module:
    """LSTM or Transformer over that many tokens."""
    make = pkgutil.resolve_name(LANGUAGE_MODELS[model.kind])
    with config_errors("model"):
        return make(vocabulary, model)
