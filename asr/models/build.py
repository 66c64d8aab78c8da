"""Recipe -> objects: small functions from one section of a recipe to what it describes."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from asr.config.language import LanguageModelConfig
from asr.config.schema import FeaturesConfig, SpeechModelConfig
from asr.errors import UserError
from asr.features.augment import SpecAugment
from asr.features.fbank import Fbank, FeatureExtractor, Mfcc, SlaneyMel
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm

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


def build_front_end(features: FeaturesConfig, max_seconds: float | None = None) -> FrontEnd:
    """Audio, up to max_seconds -> features. The norm's statistics are not set yet."""
    masks = features.spec_augment
    with config_errors("features"):
        augment = masks and SpecAugment(**masks.model_dump())
        norm = MeanVarianceNorm(features.mvn, features.mvn_variance)
        return FrontEnd(build_extractor(features), norm, augment, features.noise, max_seconds)


def build_extractor(features: FeaturesConfig) -> FeatureExtractor:
    """Log-mel (Kaldi's or Slaney's) or MFCC."""
    rate, bins, dither = features.sample_rate, features.mel_bins, features.dither
    if features.kind == "mfcc":
        ceps, deltas = features.ceps, features.deltas
        return Mfcc(rate, num_mel_bins=bins, num_ceps=ceps, deltas=deltas, dither=dither)
    kind = {"logmel": Fbank, "slaney": SlaneyMel}[features.kind]
    return kind(rate, num_mel_bins=bins, dither=dither)


def build_speech_model(model: SpeechModelConfig, features: int, vocabulary: int) -> nn.Module:
    """LAS, Transformer or Conformer, for `features` values per frame."""
    make = pkgutil.resolve_name(SPEECH_MODELS[model.kind])
    with config_errors("model"):
        return make(features, vocabulary, model)


def build_language_model(model: LanguageModelConfig, vocabulary: int) -> nn.Module:
    """LSTM or Transformer over that many tokens."""
    make = pkgutil.resolve_name(LANGUAGE_MODELS[model.kind])
    with config_errors("model"):
        return make(vocabulary, model)
