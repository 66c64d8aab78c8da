"""A class of the library has the defaults of the recipe."""

import inspect
from dataclasses import fields

import pytest

from asr.config.cell import CellSettings
from asr.config.schema import FeaturesConfig, LSTMConfig, SpecAugmentConfig
from asr.features.augment import SpecAugment
from asr.features.fbank import Fbank, Mfcc, SlaneyMel
from asr.features.normalize import MeanVarianceNorm
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

CELL_KEYS = {field.name: field.name for field in fields(CellSettings)}
LSTM_KEYS = {"norm": "norm", "backend": "backend"}
FBANK_KEYS = {"sample_rate": "sample_rate", "num_mel_bins": "mel_bins", "dither": "dither"}
# Classes usable without a recipe keep defaults in their signature: parameter -> key.
LIBRARY = [
    (CellSettings, LSTMConfig, CELL_KEYS),
    (LayerNormLSTM, LSTMConfig, LSTM_KEYS),
    (LayerNormLSTMCell, LSTMConfig, LSTM_KEYS),
    (Fbank, FeaturesConfig, FBANK_KEYS),
    (SlaneyMel, FeaturesConfig, FBANK_KEYS),
    # Not num_mel_bins: 23 is Kaldi's default for MFCC, and a recipe always passes its own.
    (
        Mfcc,
        FeaturesConfig,
        {"sample_rate": "sample_rate", "num_ceps": "ceps", "deltas": "deltas", "dither": "dither"},
    ),
    (MeanVarianceNorm, FeaturesConfig, {"kind": "mvn", "variance": "mvn_variance"}),
    (SpecAugment, SpecAugmentConfig, {key: key for key in SpecAugmentConfig.model_fields}),
]


@pytest.mark.parametrize(("kind", "config", "keys"), LIBRARY)
def test_a_library_class_has_the_defaults_of_the_recipe(kind, config, keys):
    parameters = inspect.signature(kind).parameters
    for name, key in keys.items():
        assert parameters[name].default == config.model_fields[key].default, name
