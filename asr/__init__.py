"""Train attention-based speech recognisers and measure normalisation; LayerNormLSTM as a layer."""


def __getattr__(name: str) -> str:
    """`__version__`: of the installed package, else of setup.cfg beside an uninstalled one."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported here: a quarter of the time of --help.
    from configparser import ConfigParser
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("layernorm-asr")
    except PackageNotFoundError:
        setup = ConfigParser()
        setup.read(Path(__file__).parents[1] / "setup.cfg")
        return setup["metadata"]["version"]
