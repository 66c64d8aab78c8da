"""LibriSpeech (Panayotov et al. 2015) and Mini LibriSpeech: download, and folders to manifests.

A folder LibriSpeech/SUBSET/SPEAKER/CHAPTER/ holds files SPEAKER-CHAPTER-NUMBER.flac and one
SPEAKER-CHAPTER.trans.txt, with a line "ID TEXT" per utterance. Licence: CC BY 4.0.
"""

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asr.data.corpus import Utterance, link_audio, write_manifest
from asr.data.importers.download import fetch
from asr.data.importers.rows import Row, Split
from asr.errors import UserError
from asr.features.audio import audio_seconds
from asr.io import read_small_file

URL = "https://www.openslr.org/resources"
CORPUS = "LibriSpeech"  # the folder that every archive holds
THREADS = 16  # mostly waiting for the disk
# Text of 14,500 books, 1.5 GB packed. OpenSLR publishes no sum for it; public recipes check this.
LM_TEXT = "librispeech-lm-norm.txt.gz"
LM_MD5 = "c83c64c726a1aedfe65f80aa311de402"


class Archive(NamedTuple):
    """One subset's file NUMBER/SUBSET.tar.gz at OpenSLR."""

    number: int
    md5: str


# From https://www.openslr.org/resources/{12,31}/md5sum.txt.
SUBSETS = {
    "train-clean-5": Archive(31, "5df7d4e78065366204ca6845bb08f490"),
    "dev-clean-2": Archive(31, "6d7ab67ac6a1d2c993d050e16d61080d"),
    "train-clean-100": Archive(12, "2a93770f6d5c6c964bc36631d331a522"),
    "train-clean-360": Archive(12, "c0e676e450a7ff2f54aeade5171606fa"),
    "train-other-500": Archive(12, "d1a0fd59409feb2c614ce4d30c387708"),
    "dev-clean": Archive(12, "42e2234ba48799c1f50f24a7926300a1"),
    "dev-other": Archive(12, "c8d0bcc9cca99d4f8b62fcc847357931"),
    "test-clean": Archive(12, "32fa31d27d2e1cad72775fee3f4849a9"),
    "test-other": Archive(12, "fb5a50374b501bb3bac4815ee91d3135"),
}


def download(subset: str, to: str | Path, url: str = URL) -> Path:
    """Download a subset to TO/LibriSpeech/SUBSET, unless it exists -> that folder.

    The archive is removed once unpacked. Raises UserError as `fetch` does, and for an archive
    without the subset.
    """
    to = Path(to)
    folder, archive = to / CORPUS / subset, to / f"{subset}.tar.gz"
    if folder.is_dir():
        return folder
    number, md5 = SUBSETS[subset]
    fetch(f"{url.rstrip('/')}/{number}/{archive.name}", archive, md5)
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{subset}.") as part:
        unpacked = Path(part) / "tree"
        with tarfile.open(archive, "r:gz") as tar:
            # Python before 3.10.12 has no filters; the checksum is that of the published archive.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(unpacked)
        if not (unpacked / CORPUS / subset).is_dir():
            raise UserError(f"{archive}: holds no {CORPUS}/{subset}")
        folder.parent.mkdir(exist_ok=True)
        # The licence and the lists first: the subset's folder then marks completion.
        for file in sorted(p for p in (unpacked / CORPUS).iterdir() if p.is_file()):
            if not (folder.parent / file.name).exists():
                shutil.move(file, folder.parent / file.name)
        (unpacked / CORPUS / subset).rename(folder)
    archive.unlink()
    return folder


def download_text(to: str | Path, url: str = URL) -> Path:
    """Download the text for language models, unless it exists -> its path. Raises as `fetch`."""
    path = Path(to) / LM_TEXT
    fetch(f"{url.rstrip('/')}/11/{LM_TEXT}", path, LM_MD5)
    return path


def find(folder: str | Path, subset: str) -> Path:
    """The folder of a subset; `folder`: an unpacked tree, its LibriSpeech folder or the subset.

    Raises UserError with the folder's subsets if this one is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    found = subsets(folder)
    if subset not in found:
        raise UserError(f"{folder}: no subset {subset}; it has {', '.join(found) or 'nothing'}")
    return found[subset]


def recognise(source: Path) -> bool:
    """Whether the folder is a subset, or holds some. LibriTTS has the same names."""
    folders = subsets(source).values()
    return any(next(folder.glob("*/*/*.trans.txt"), None) for folder in folders)


def read(source: Path) -> list[Split]:
    """A split for each subset. Raises UserError if there is none."""
    found = subsets(source)
    if not found:
        raise UserError(f"{source}: neither a subset of {CORPUS} nor a folder with some")
    return [Split(s, folder, folder, partial(_rows, folder)) for s, folder in found.items()]


def subsets(source: Path) -> dict[str, Path]:
    """The subsets that an unpacked tree has, and their folders."""
    if source.name in SUBSETS and source.is_dir():
        return {source.name: source}
    folders = [parent / subset for parent in (source, source / CORPUS) for subset in SUBSETS]
    return {folder.name: folder for folder in folders if folder.is_dir()}


def _rows(folder: Path) -> Iterator[Row]:
    for number, (name, path, text) in enumerate(sorted(transcripts(folder)), start=1):
        audio = path.relative_to(folder).as_posix()
        yield Row(folder, number, name, audio, text, name.split("-")[0])


def write(subset: str, folder: Path, to: str | Path) -> Path:
    """Write TO/SUBSET.tsv for an unpacked subset -> its path.

    Raises UserError for a transcript without audio, audio without transcript and an invalid line,
    AudioError for a file whose header cannot be read.
    """
    manifest = Path(to) / f"{subset}.tsv"
    entries = sorted(transcripts(folder))
    if not entries:
        raise UserError(f"{folder}: no SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt in it")
    _check_complete(folder, {path for _, path, _ in entries})
    with ThreadPoolExecutor(THREADS) as pool:
        lengths = list(pool.map(audio_seconds, [path for _, path, _ in entries]))
    link = link_audio(manifest, folder)
    utterances = [
        Utterance(name, name.split("-")[0], link / path.relative_to(folder), length, text)
        for (name, path, text), length in zip(entries, lengths, strict=True)
    ]
    write_manifest(manifest, utterances)
    return manifest


def transcripts(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """(id, audio file, text) of every line of every transcript below a subset's folder."""
    for path in folder.glob("*/*/*.trans.txt"):
        chapter = f"{path.parent.parent.name}-{path.parent.name}-"
        try:
            lines = read_small_file(path).splitlines()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
        for number, line in enumerate(lines, start=1):
            name, _, text = line.partition(" ")
            if not name.startswith(chapter) or not text.strip():
                raise UserError(f"{path}:{number}: not a line '{chapter}NUMBER TEXT'")
            yield name, path.parent / f"{name}.flac", text.strip()


def _check_complete(folder: Path, listed: set[Path]) -> None:
    files = set(folder.glob("*/*/*.flac"))
    for wrong, fault in ((listed - files, "is missing"), (files - listed, "has no transcript")):
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise UserError(f"{min(wrong)}: {fault}{more}; unpack {folder.name} again")
