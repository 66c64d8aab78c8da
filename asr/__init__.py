"""Train attention-based speech recognisers and measure what normalisation does.

    import asr

    model = asr.load("conformer")                   # a shipped model, a run folder or hf:USER/NAME
    print(model("my.wav").text)

    run = asr.api.train("recipes/demo.yaml", ["train.steps=100"], run="runs/x")
    print(run.metrics["valid/wer"], run.evaluate("test").wer)

    lstm = asr.LayerNormLSTM(80, 256, bidirectional=True, norm="ba")    # in place of nn.LSTM

docs/api.md describes all names. Importing this package imports nothing else: torch takes seconds.
"""

import os.path
from importlib import import_module
from types import ModuleType
from typing import Any

# In a checkout the acoustic front end is the folder features/ beside this one. A wheel has it in
# here: as a separate package it would be mistaken for a features.py of the user's.
if not os.path.isdir(os.path.join(__path__[0], "features")):  # noqa: PTH112, PTH118 (fast to import)
    __path__.append(os.path.dirname(__path__[0]))  # noqa: PTH120

# Name -> the module that defines it.
_MODULES = {
    "CellSettings": "asr.config.cell",
    "LayerNormLSTM": "asr.nn.lstm",
    "LayerNormLSTMCell": "asr.nn.lstm",
    "Recognizer": "asr.inference.recognition",
    "RecipeError": "asr.config.loader",
    "Run": "asr.api",
    "Transcript": "asr.inference.transcript",
    "UserError": "asr.errors",
    "load": "asr.api",
    "register_norm": "asr.nn.norm",
}
__all__ = [
    "CellSettings", "LayerNormLSTM", "LayerNormLSTMCell", "RecipeError", "Recognizer", "Run",
    "Transcript", "UserError", "__version__", "api", "load", "register_norm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "api":
        return _imported("asr.api")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_imported(_MODULES[name]), name)
    return value


def _imported(module: str) -> ModuleType:
    """The module. Raises ImportError that names the extra where a package of it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if message := import_module("asr.errors").missing_asr_package(error):
            raise ImportError(message) from None
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """That of the installed package, else that of setup.cfg beside an uninstalled one."""
    from configparser import ConfigParser
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("layernorm-asr")
    except PackageNotFoundError:
        setup = ConfigParser()
        setup.read(Path(__file__).parents[1] / "setup.cfg")
        return setup["metadata"]["version"]
