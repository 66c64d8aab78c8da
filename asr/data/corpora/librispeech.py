"""LibriSpeech (Panayotov et al. 2015) and Mini LibriSpeech: download, and folders to manifests.

The corpus lies in LibriSpeech/SUBSET/SPEAKER/CHAPTER/ as SPEAKER-CHAPTER-NUMBER.flac with one
SPEAKER-CHAPTER.trans.txt, a line "ID TEXT" per utterance. Licence: CC BY 4.0.

Subsets and their MD5 sums: https://www.openslr.org/resources/{12,31}/md5sum.txt.
"""

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from asr.data.archive import unpack
from asr.data.corpus import Utterance, link_audio, write_manifest
from asr.data.download import fetch
from asr.errors import UserError
from features.audio import audio_seconds
from features.samples import AudioError

URL = "https://www.openslr.org/resources"
CORPUS = "LibriSpeech"  # the folder that every archive holds
THREADS = 16  # waiting for the disk, mostly


# The normalised text of 14,500 books, one sentence a line, 1.5 GB packed. OpenSLR publishes no sum
# for it; this one stands in public recipes that check it.
LM_TEXT = "librispeech-lm-norm.txt.gz"
LM_MD5 = "c83c64c726a1aedfe65f80aa311de402"


class Archive(NamedTuple):
    """One subset's file NUMBER/SUBSET.tar.gz at OpenSLR."""

    number: int
    md5: str


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


def download(subset: str, to: str | Path, url: str = URL, keep_archive: bool = False) -> Path:
    """Brings a subset to TO/LibriSpeech/SUBSET, unless it is there, and returns that folder.

    The archive is removed once unpacked, unless it shall be kept. Raises UserError as `fetch` and
    `unpack` do, and for an archive without the subset.
    """
    to = Path(to)
    folder = to / CORPUS / subset
    if folder.is_dir():
        return folder
    known = SUBSETS[subset]
    archive = to / f"{subset}.tar.gz"
    fetch(f"{url.rstrip('/')}/{known.number}/{archive.name}", archive, known.md5)
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{subset}.") as part:
        unpacked = Path(part) / "tree"
        # FLAC and text: an honest archive grows by a hundredth.
        unpack(archive, unpacked, max_bytes=2 * archive.stat().st_size + 2**30)
        if not (unpacked / CORPUS / subset).is_dir():
            raise UserError(f"{archive}: holds no {CORPUS}/{subset}")
        _move(unpacked / CORPUS, to / CORPUS, subset)
    if not keep_archive:
        archive.unlink()
    return folder


def download_text(to: str | Path, url: str = URL) -> Path:
    """Brings the text for language models to TO, unless it is there. UserError as from `fetch`."""
    path = Path(to) / LM_TEXT
    fetch(f"{url.rstrip('/')}/11/{LM_TEXT}", path, LM_MD5)
    return path


def _move(source: Path, to: Path, subset: str) -> None:
    """The licence and the lists first: once the subset's folder is there, all is."""
    to.mkdir(exist_ok=True)
    for file in sorted(p for p in source.iterdir() if p.is_file()):
        if not (to / file.name).exists():
            shutil.move(file, to / file.name)
    (source / subset).rename(to / subset)


def find(folder: str | Path, subset: str) -> Path:
    """A subset in an unpacked tree, by the tree, by its LibriSpeech folder or by itself.

    Raises UserError where it is not there, saying what is.
    """
    folder = Path(folder)
    places = [folder / subset, folder / CORPUS / subset]
    places += [folder] if folder.name == subset else []
    for place in places:
        if place.is_dir():
            return place
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    within = folder / CORPUS if (folder / CORPUS).is_dir() else folder
    there = ", ".join(sorted(p.name for p in within.iterdir() if p.is_dir())) or "nothing"
    raise UserError(f"{folder}: no subset {subset}; {there} is there")


def write(subset: str, folder: Path, to: str | Path) -> Path:
    """Writes TO/SUBSET.tsv for an unpacked subset, and returns its path.

    Raises UserError for a tree that is not whole: a transcript without audio, audio without
    transcript, a line that is none, a file whose header cannot be read.
    """
    manifest = Path(to) / f"{subset}.tsv"
    entries = sorted(transcripts(folder))
    if not entries:
        raise UserError(f"{folder}: no SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt in it")
    _match(folder, {path for _, path, _ in entries})
    lengths = _seconds([path for _, path, _ in entries])
    shown = link_audio(manifest, folder)
    utterances = [
        Utterance(name, name.split("-")[0], shown / path.relative_to(folder), length, text)
        for (name, path, text), length in zip(entries, lengths, strict=True)
    ]
    write_manifest(manifest, utterances)
    return manifest


def transcripts(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """(id, audio file, text) of every line of every transcript below a subset's folder."""
    for path in folder.glob("*/*/*.trans.txt"):
        chapter = f"{path.parent.parent.name}-{path.parent.name}-"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            name, _, text = line.partition(" ")
            if not name.startswith(chapter) or not text.strip():
                raise UserError(f"{path}:{number}: not a line '{chapter}NUMBER TEXT'")
            yield name, path.parent / f"{name}.flac", text.strip()


def _match(folder: Path, listed: set[Path]) -> None:
    there = set(folder.glob("*/*/*.flac"))
    for odd, what in ((listed - there, "is missing"), (there - listed, "has no transcript")):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise UserError(f"{min(odd)}: {what}{more}; unpack {folder.name} again")


def _seconds(paths: list[Path]) -> list[float]:
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(audio_seconds, paths))
    except AudioError as error:
        raise UserError(str(error)) from None
