"""A validation split for a corpus without one: speakers, or else utterances, of a manifest.

Who is held out depends on the names alone, so the same command gives the same split.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from asr.data.manifest import COLUMNS, read_header, read_rows, write_rows
from asr.errors import UserError

MIN_SPEAKERS = 10  # with fewer, one of them is too much to hold out


def hold_out(manifest: Path, share: float) -> tuple[Path, str]:
    """Move nearly `share` of the utterances of NAME.tsv to NAME-valid.tsv -> its path; a report.

    They are those of whole speakers where the manifest has MIN_SPEAKERS of them. Raises
    UserError if one of the two would be empty.
    """
    speakers, are_named = Counter(), False
    for _, row in read_rows(manifest, COLUMNS):
        speakers[row["speaker"]] += 1
        are_named |= row["speaker"] != row["id"]  # asr.prepare writes the id where there is none
    valid = manifest.with_name(f"{manifest.stem}-valid.tsv")
    key, counts = "speaker", speakers
    if not are_named or len(speakers) < MIN_SPEAKERS:
        key, counts = "id", Counter(row["id"] for _, row in read_rows(manifest, COLUMNS))
    chosen = _choose(counts, share)
    if not 0 < len(chosen) < len(counts):
        raise UserError(f"{manifest}: {share:g} of {counts.total()} utterances is none or all")
    _write_part(manifest, valid, lambda row: row[key] in chosen)
    _write_part(manifest, manifest, lambda row: row[key] not in chosen)
    if key == "speaker":
        return valid, f"{valid}: {len(chosen)} of {len(speakers)} speakers are held out"
    few = f"fewer than {MIN_SPEAKERS} speakers"
    none = "no speakers: voices may be in both splits, and error rates are higher for new voices"
    return valid, (
        f"{valid}: {len(chosen)} utterances are held out, since the corpus names "
        f"{few if are_named else none}"
    )


def overlap(train: Path, others: Iterable[Path]) -> Iterator[str]:
    """Warnings of texts and of speakers that other manifests have, too; tables that are no
    manifests are skipped.
    """
    known = [set(values) for values in _texts_and_speakers(train)]
    for other in others:
        with suppress(UserError):
            columns = zip(("text", "speaker"), known, _texts_and_speakers(other), strict=True)
            for column, in_train, values in columns:
                if count := sum(value in in_train for value in values):
                    new = {"text": "texts", "speaker": "voices"}[column]
                    yield (
                        f"warning: {count:,} of {len(values):,} utterances of {other} have a "
                        f"{column} that {train} has too: error rates are higher for new {new}"
                    )


def _texts_and_speakers(manifest: Path) -> tuple[list[int], list[int]]:
    """The hashes of both columns, of the second those that name a speaker.

    Raises UserError as read_rows does.
    """
    texts, speakers = [], []
    for _, row in read_rows(manifest, COLUMNS):
        texts.append(hash(row["text"]))
        if row["speaker"] != row["id"]:
            speakers.append(hash(row["speaker"]))
    return texts, speakers


def _choose(counts: Counter[str], share: float) -> set[str]:
    """Names, by their hashes, with nearly `share` of the utterances, else the smallest."""
    rest, chosen = share * counts.total(), set()
    for name in sorted(counts, key=lambda name: sha256(name.encode()).digest()):
        if rest >= counts[name] / 2:
            chosen.add(name)
            rest -= counts[name]
        if rest <= 0:
            break
    return chosen or {min(counts, key=counts.__getitem__)}


def _write_part(source: Path, to: Path, is_part: Callable[[Mapping[str, str]], bool]) -> None:
    rows = (list(row.values()) for _, row in read_rows(source, COLUMNS) if is_part(row))
    write_rows(to, read_header(source, COLUMNS), rows)
