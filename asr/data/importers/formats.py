"""The forms of corpora by the names that `asr.prepare` gives them."""

from pathlib import Path
from types import ModuleType

from asr.data.importers import (
    audiofolder,
    common_voice,
    datasets,
    kaldi,
    lhotse,
    librispeech,
    ljspeech,
    nemo,
    tsv,
    webdataset,
    wenet,
)
from asr.data.importers.rows import Split
from asr.errors import UserError

FORMATS: dict[str, ModuleType] = {
    "kaldi": kaldi,
    "common-voice": common_voice,
    "ljspeech": ljspeech,
    "nemo": nemo,
    "wenet": wenet,
    "audiofolder": audiofolder,
    "datasets": datasets,
    "lhotse": lhotse,
    "webdataset": webdataset,
    "librispeech": librispeech,
    "tsv": tsv,
}
WITH_TEXT_COLUMN = ("audiofolder", "datasets")


def recognise(source: Path) -> list[str]:
    """The formats that a source may have, the most likely one first.

    Raises UserError if there is none, or no such source.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    found = [name for name, importer in FORMATS.items() if importer.recognise(source)]
    if not found:
        raise UserError(
            f"{source}: not recognised as any of {', '.join(FORMATS)}; name the format to read why "
            "(python -m asr.prepare FORMAT SOURCE --to DIR)"
        )
    return found


def read(name: str, source: Path, text_column: str | None = None) -> list[Split]:
    """The splits of a source in a format. Raises UserError as its importer does."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    importer = FORMATS[name]
    if name in WITH_TEXT_COLUMN:
        return importer.read(source, text_column)
    if text_column:
        names = " and ".join(WITH_TEXT_COLUMN)
        raise UserError(f"--text-column {text_column}: only {names} let you choose; this is {name}")
    return importer.read(source)
