"""A default is stated once, in the recipe schema; a public name has one meaning."""

import ast
import inspect
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

from asr.config.cell import CellSettings
from asr.config.language import LanguageRecipe
from asr.config.schema import Config, FeaturesConfig, LSTMConfig, SpecAugmentConfig, SpeechRecipe
from asr.features.augment import SpecAugment
from asr.features.fbank import Fbank, Mfcc, SlaneyMel
from asr.features.normalize import MeanVarianceNorm
from asr.images.config import ImageRecipe
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("asr", "features") for path in (ROOT / folder).rglob("*.py"))
SCHEMA = {"asr/config/schema.py", "asr/config/language.py", "asr/images/config.py"}

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
EXEMPT = {kind.__name__ for kind, _, _ in LIBRARY} | {"make_norm"}
# Parameters that only share a name with a recipe key: (function or class, parameter) -> meaning.
HOMONYMS = {
    ("paired_bootstrap", "seed"): "of the bootstrap's resampling",
    ("score", "seed"): "of the bootstrap's resampling",
    ("summarize", "seed"): "of the bootstrap's resampling",
    ("alignment_text", "width"): "characters in a line",
    ("fetch", "max_bytes"): "largest download",
    ("prepare", "train"): "utterances of the generated corpus",
    ("prepare", "valid"): "utterances of the generated corpus",
    ("prepare", "test"): "utterances of the generated corpus",
    ("prepare", "seed"): "of the generated corpus",
    ("Sound.blocks", "start"): "first sample",
    ("try_lock", "start"): "first locked byte",
    ("unlock", "start"): "first locked byte",
    ("sample", "device"): "where the given model is",
    ("TrainState", "batch"): "batches finished",
}
SAME_MODULE_NAME = {
    "language": "config/ has a task's recipe keys, tasks/ the task",
    "loader": "of recipes in config/, of utterances in data/",
    "lstm": "nn/ has the layer, kernels/cpu/ and kernels/cuda/ its backends",
    "conformer": "nn/ has the layer, models/ the model",
    "transformer": "nn/ has the layers, models/ the model",
}


@pytest.mark.parametrize(("kind", "config", "keys"), LIBRARY)
def test_a_library_class_has_the_defaults_of_the_recipe(kind, config, keys):
    parameters = inspect.signature(kind).parameters
    for name, key in keys.items():
        assert parameters[name].default == config.model_fields[key].default, name


def recipe_keys(config):
    """Every key of a config class and of the groups within it, without the dots."""
    for name, field in config.model_fields.items():
        yield name
        for group in groups(field.annotation):
            yield from recipe_keys(group)


def groups(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [group for part in getattr(annotation, "__args__", ()) for group in groups(part)]


KEYS = {
    key for recipe in (SpeechRecipe, LanguageRecipe, ImageRecipe) for key in recipe_keys(recipe)
}


def callables(tree):
    """(name, parameters with a default, whether it takes **name: Any) of functions and classes.

    None and () are no values but the absence of a part, such as a language model.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    part.owner = node.name
            if is_record(node):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                yield (
                    node.name,
                    [field.target.id for field in fields if states_value(field.value)],
                    False,
                )
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            positional = positional[len(positional) - len(arguments.defaults) :]
            pairs = [*zip(positional, arguments.defaults, strict=True)]
            pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            names = [one.arg for one, default in pairs if states_value(default)]
            owner = getattr(node, "owner", "")
            name = owner if node.name == "__init__" else f"{owner}.{node.name}".strip(".")
            rest = arguments.kwarg and arguments.kwarg.annotation
            anything = bool(arguments.kwarg) and (rest is None or ast.unparse(rest) == "Any")
            yield name, names, node.name == "__init__" and anything


def states_value(default):
    return default is not None and ast.unparse(default) not in ("None", "()")


def is_record(node):
    """Whether the fields of a class are the parameters of its constructor."""
    names = {ast.unparse(one).split("(")[0] for one in (*node.decorator_list, *node.bases)}
    return bool(names & {"dataclass", "dataclasses.dataclass", "NamedTuple"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_default_of_a_recipe_key_outside_the_schema(path):
    if str(path.relative_to(ROOT)) in SCHEMA:
        return
    for name, parameters, takes_anything in callables(ast.parse(path.read_text())):
        assert not takes_anything, f"{name} takes **keywords: Any"
        if name not in EXEMPT:
            twice = [p for p in parameters if p in KEYS and (name, p) not in HOMONYMS]
            assert not twice, f"{name}: default of {', '.join(twice)}"


def test_no_two_modules_share_a_name():
    """asr/images is a separate task, which mirrors packages and files of asr/."""
    places = defaultdict(set)
    for path in FILES:
        place = path.relative_to(ROOT).with_suffix("")
        places[place.parent.name if place.name == "__init__" else place.name].add(str(place))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    mirrored = {name for name, files in twice.items() if f"asr/images/{name}" in files}
    assert mirrored == {"config", "data", "models", "task"}
    assert twice.keys() - mirrored == SAME_MODULE_NAME.keys(), twice


def test_no_two_public_classes_share_a_name():
    """A ctypes.Structure has the name of the C++ struct that it mirrors."""
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if "ctypes.Structure" not in map(ast.unparse, node.bases):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}
