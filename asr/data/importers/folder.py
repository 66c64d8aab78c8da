"""A folder of recordings, each with its text in a file of the same name: a.wav and a.txt.

The text is in a .txt or .lab, or in a .json under one of rows.TEXT_KEYS; of LibriTTS the normalised
text is taken, of TIMIT that after the sample numbers. Subtitles (.srt, .vtt) and Audacity's labels
(.txt) have times: each of their parts is an utterance. Audio and texts may be in two trees, such as
wav/ and txt/. The first folder below these is the speaker, and folders train, dev, test or alike
are splits; so are train-clean-100, dev-clean or alike where all folders have such names.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

from asr.data.importers.records import Record, json_object, rows_of
from asr.data.importers.rows import (
    LONG,
    SPEAKER_KEYS,
    SPLITS,
    TEXT_KEYS,
    Fault,
    Row,
    Split,
    key_of,
    split_of,
    text_of,
)
from asr.data.importers.table import part_id, part_of
from asr.errors import UserError, print_line
from asr.features.files import FFMPEG_SUFFIXES, RECORDING_SUFFIXES
from asr.io import read_small_file

SUBTITLES = (".srt", ".vtt")
# The first of these is taken, of a long recording the subtitles.
TEXT_SUFFIXES = (".normalized.txt", ".original.txt", ".txt", ".lab", ".json", *SUBTITLES)
SHOWN_SUFFIXES = ".txt, .lab, .json, .srt or .vtt"
# Folders of one kind of file, which say nothing of the recording.
KINDS = {"wav", "wavs", "wav48", "audio", "clips", "txt", "text", "texts", "lab"}
KINDS |= {"transcript", "transcripts"}
KINDS |= {f"dr{region}" for region in range(1, 9)}  # TIMIT's dialects, with folders of speakers
OTHER_TEXTS = re.compile(r"(readme|licen[cs]e|copying|metadata|speakers?|.*info)\b", re.IGNORECASE)
TIMED = re.compile(r"\d+ \d+ \S+(\n\d+ \d+ \S+)*")  # HTK's labels
LABEL = re.compile(r"^(\d+\.\d+)\t(\d+\.\d+)\t(.*)", re.MULTILINE)  # Audacity's
# Of SubRip and WebVTT: the times, and the lines to the next empty one.
CUE = re.compile(r"^([\d:.,]+)[ \t]+-->[ \t]+([\d:.,]+).*((?:\n.*\S.*)*)", re.MULTILINE)
MARKUP = re.compile(r"<[^>\n]*>|\{\\[^}\n]*\}")  # <i>, <c.yellow>, {\an8}
TIMIT = re.compile(r"0 \d{4,} (?=\D)")  # before its sentences: the first and the last sample
MAX_TEXT = 1 << 18  # bytes

Key = tuple[str, ...]  # a path without folders of KINDS and without its suffix


def recognise(source: Path) -> bool:
    """Whether the folder has a recording with a text of the same name."""
    return any(_pairs(folder) for folder in _folders(source).values())


def read(source: Path) -> list[Split]:
    """A split for each folder train, dev or test, else one. UserError where no name matches."""
    splits = [
        Split(name, folder, folder, partial(_rows, folder))
        for name, folder in _folders(source).items()
        if _pairs(folder)
    ]
    if not splits:
        raise UserError(missing(source))
    if splits[0].root != source:
        read = {split.root for split in splits}
        others = sorted(
            path.name for path in source.iterdir() if path.is_dir() and path not in read
        )
        if others:
            print_line(f"{source}: not read: the folders {', '.join(others[:10])}")
    return splits


def _folders(source: Path) -> dict[str, Path]:
    """Name of a manifest -> its folder."""
    if not source.is_dir():
        return {}
    folders = [path for path in sorted(source.iterdir()) if path.is_dir()]
    splits = {SPLITS[f.name.lower()]: f for f in folders if f.name.lower() in SPLITS}
    others = [folder for folder in folders if folder not in splits.values()]
    if splits and "train" not in splits and any(map(_pairs, others)):
        splits = {}  # Dev and Val are names of speakers, too
    named = [split_of(folder.name) for folder in folders]
    if not splits and folders and all(named):
        below = (path for folder in folders for path in folder.iterdir())
        # As LibriTTS, not the speaker dev_patel alone.
        if len(set(named)) > 1 or any(p.name.lower() not in KINDS and p.is_dir() for p in below):
            splits = {folder.name: folder for folder in folders}
    return splits or {source.resolve().name: source}


def missing(source: Path) -> str:
    """What a source lacks."""
    if not source.is_dir():
        return f"{source}: not a folder"
    audio, texts = _files(source)
    if not audio:
        return f"{source}: no audio file in it or its folders"
    first = min(audio.values())[0]
    found = ""
    if texts:
        found = f", and no text has audio, such as {min(texts.values())[0]}; a list of recordings "
        found += "is a table, whose first line must name its columns, such as path,text"
    return (
        f"{source}: none of {len(audio)} audio files has a text ({SHOWN_SUFFIXES}) of the same "
        f"name, such as {first}{found}"
    )


def _pairs(folder: Path) -> set[Key]:
    audio, texts = _files(folder)
    return audio.keys() & texts.keys()


def _files(folder: Path) -> tuple[dict[Key, list[Path]], dict[Key, list[Path]]]:
    """Audio files and texts below a folder, by their keys; without hidden ones."""
    audio: dict[Key, list[Path]] = {}
    texts: dict[Key, list[Path]] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(root).relative_to(folder).parts
        parts = tuple(part for part in below if part.lower() not in KINDS)
        for name in sorted(names):
            if name.startswith("."):
                continue
            key = normalize("NFC", name)  # audio and texts may be of different systems
            stem, suffix = os.path.splitext(key)  # noqa: PTH122 (a Path each costs seconds)
            if suffix.lower() in RECORDING_SUFFIXES:
                audio.setdefault((*parts, stem), []).append(Path(root, name))
            elif suffix := next((s for s in TEXT_SUFFIXES if key.lower().endswith(s)), ""):
                texts.setdefault((*parts, key[: -len(suffix)]), []).append(Path(root, name))
    return audio, texts


def _rows(folder: Path) -> Iterator[Row | Fault]:
    audio, texts = _files(folder)
    for key, paths in sorted(audio.items()):
        # A recording that was converted may still be beside the result.
        readable = [p for p in paths if p.suffix.lower() not in FFMPEG_SUFFIXES]
        path, *others = readable or paths
        name, speaker = "/".join(key), key[0] if len(key) > 1 else ""
        yield from (Fault(other, 0, f"has the same name as {path}") for other in others)
        if key not in texts:
            yield Fault(path, 0, f"has no text: no {SHOWN_SUFFIXES} of the same name")
            continue
        text = _text_of(texts[key])
        read_row = partial(_row, text, name, str(path.relative_to(folder)), speaker)
        try:
            yield from rows_of(text, _records(text), read_row)
        except ValueError as error:
            yield Fault(text, 0, str(error))
    with_text = {path.parent for key in audio.keys() & texts.keys() for path in texts[key]}
    for key in sorted(texts.keys() - audio.keys()):
        path = texts[key][0]
        if path.parent in with_text and not OTHER_TEXTS.match(path.name):
            yield Fault(path, 0, "has no audio: no audio file of the same name")


def _text_of(paths: Sequence[Path]) -> Path:
    """Of several texts of a recording the subtitles, if it is a long one, else the first kind of
    TEXT_SUFFIXES.
    """

    def first(suffixes: Sequence[str]) -> Path | None:
        return next((p for s in suffixes for p in paths if p.name.lower().endswith(s)), None)

    if len(paths) > 1 and (subtitles := first(SUBTITLES)):
        with suppress(ValueError):
            *_, (_, last) = _records(subtitles)
            if part_of({"end": last["end"]})[1] > LONG:
                return subtitles
    return first(TEXT_SUFFIXES)


def _row(
    file: Path, name: str, audio: str, speaker: str, line: int, record: dict[str, Any]
) -> Iterator[Row]:
    start, length = part_of(record)
    speaker = text_of(record, "speaker") or speaker or ("" if start is None else name)
    text = " ".join(record["text"].split())
    yield Row(file, line, part_id(name, start), audio, text, speaker, "", start, length)


def _records(path: Path) -> list[Record]:
    """The text and perhaps a speaker, or those of parts. Raises ValueError for what is none."""
    try:
        content = read_small_file(path, MAX_TEXT).removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except (OSError, UserError) as error:
        raise ValueError(getattr(error, "strerror", None) or str(error)) from None
    if path.suffix.lower() in SUBTITLES:
        return _parts(unescape(MARKUP.sub("", content)), CUE)
    if path.suffix.lower() != ".json":
        if TIMED.fullmatch(content.strip()):
            raise ValueError("has times as of HTK; a file with the text alone is needed")
        if LABEL.match(content):
            return _parts(content, LABEL)
        text = " ".join(content.split())
        return [(0, {"text": text[sample.end() :] if (sample := TIMIT.match(text)) else text})]
    record = json_object(content)
    if record is None:
        raise ValueError("not a JSON object")
    record = {key_of(name): value for name, value in record.items()}
    if not any(key in record for key in TEXT_KEYS):
        raise ValueError(f"has none of {', '.join(TEXT_KEYS)}; it has {', '.join(record)[:200]}")
    speaker = text_of(record, *SPEAKER_KEYS)
    return [(0, {"text": text_of(record, *TEXT_KEYS), "speaker": speaker})]


def _parts(content: str, form: re.Pattern[str]) -> list[Record]:
    """The line, start, end and text of every part of a recording. Raises ValueError."""
    found = [(part.start(), part[1], part[2], part[3].strip()) for part in form.finditer(content)]
    if not found:
        raise ValueError("has no cue: no line START --> END")
    # Rolling captions show the line before again, above the new one, which alone is spoken.
    last_lines = [(part[3].rpartition("\n")[2], after[3]) for part, after in pairwise(found)]
    if 4 * sum(text.startswith(f"{line}\n") for line, text in last_lines) > len(found):
        raise ValueError("its cues begin with the line before, as automatic captions do")
    return [
        (content.count("\n", 0, place) + 1, {"start": start, "end": end, "text": text})
        for place, start, end, text in found
    ]
