"""Text of audio files: python -m asr.transcribe RUN AUDIO... [decode.key=value ...]

Of very many, by any number of processes:
torchrun --nproc-per-node N -m asr.transcribe RUN --list FILES.txt --out DIR
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from asr.errors import UserError, run_command
from asr.io import atomic_write

if TYPE_CHECKING:
    from asr.inference.transcript import Transcript

OVERRIDE = re.compile(r"\w+(\.\w+)*=")  # the begin of a setting; a path has a slash before its =
SUFFIXES = {"text": "txt", "json": "json", "srt": "srt", "vtt": "vtt"}


def main() -> int:
    """Transcribe the files, or those of --list. Exit code 2 if any could not be read."""
    args = arguments()
    files, overrides = split_arguments(args.audio)
    if args.list:
        return transcribe_list(args, files, overrides)
    if not files:
        raise UserError("no audio file was named, only settings")
    if args.out:
        check_names(files)
    elif len(files) > 1 and args.format in ("srt", "vtt"):
        raise UserError(f"--format {args.format} makes a file of each recording: add --out FOLDER")
    from asr.inference.recognition import Recognizer

    recognizer = Recognizer.load(args.run, overrides)
    faults: dict[Path, str] = {}
    for path, transcript in recognizer.transcribe_files(files, faults):
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            target = args.out / f"{path.stem}.{SUFFIXES[args.format]}"
            atomic_write(target, content(path, transcript, args.format))
            print(f"{path}: {target}", flush=True)
        elif args.format == "text":
            print(f"{path}: {transcript.text}", flush=True)
        else:
            print(content(path, transcript, args.format), end="", flush=True)
    for reason in faults.values():
        print(f"error: {reason}", file=sys.stderr, flush=True)
    return 2 if faults else 0


def arguments() -> argparse.Namespace:
    """The command line, with files and overrides together in `audio`."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.transcribe",
        description="Transcribe audio files with a trained run.",
        epilog="Keys of the run's recipe can be given among the files: decode.beam=8 ... "
        "Exit code 2 if any file could not be read.",
    )
    add = parser.add_argument
    add("run", type=Path, help="a run folder")
    add("audio", nargs="*", help="WAV, FLAC, OGG, Opus or MP3, any rate or length")
    add("--format", choices=SUFFIXES, default="text", help="json, srt, vtt: times")
    add("--json", dest="format", action="store_const", const="json")
    add("--out", type=Path, help="folder for a file per recording")
    listed = (
        "a text file that names an audio file a line, or a manifest (.tsv): all transcripts in "
        "OUT/transcripts.tsv (.jsonl); the same command resumes it, under torchrun with any number "
        "of processes"
    )
    add("--list", type=Path, metavar="FILES", help=listed)
    together = "files of --list that are written, or lost, together (default: %(default)s)"
    add("--shard-files", type=positive, default=64, metavar="N", help=together)
    again = "2, 3, ...: try the shards of --list again whose files failed before"
    add("--attempt", type=positive, default=1, metavar="N", help=again)
    return parser.parse_intermixed_args()


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Files, each once, and overrides: KEY.PATH=..., unless it is a file's name."""
    overrides = [text for text in arguments if OVERRIDE.match(text) and not Path(text).exists()]
    files = [Path(text) for text in dict.fromkeys(arguments) if text not in overrides]
    return files, overrides


def transcribe_list(args: argparse.Namespace, files: list[Path], overrides: list[str]) -> int:
    """Transcribe the files of --list, together with the other processes of torchrun."""
    if files:
        raise UserError(f"{files[0]} and --list: name files or give a list of them, not both")
    if not args.out:
        raise UserError("--list needs a folder for the transcripts: --out FOLDER")
    if args.format in ("srt", "vtt"):
        raise UserError(
            f"--format {args.format} makes a file of each recording, --list one of all: "
            "--format json has the times"
        )
    import torch

    from asr.inference import bulk
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import Recognizer

    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    recipe = load_run_recipe(args.run, overrides)
    listed = bulk.read_list(args.list, recipe.data.allow_outside_audio)
    job = bulk.BulkJob(args.out, listed, args.shard_files, args.format, args.attempt)
    bulk.open_folder(job, bulk.identity(args.run, recipe))
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return bulk.transcribe_all(job, lambda: Recognizer.load(args.run, overrides), rank, ranks)


def check_names(files: list[Path]) -> None:
    """Raise UserError where two recordings would be written to one file."""
    counts = Counter(path.stem for path in files)
    if repeated := [stem for stem, count in counts.items() if count > 1]:
        both = " and ".join(str(path) for path in files if path.stem == repeated[0])
        raise UserError(f"{both} would share a file in --out: give each call files of other names")


def content(path: Path, transcript: "Transcript", kind: str) -> str:
    """The transcript's file of that kind."""
    from asr.decoding.subtitles import make_cues, srt, webvtt
    from asr.inference.transcript import json_row

    if kind == "json":
        text = json.dumps(json_row(path, transcript), ensure_ascii=False) + "\n"
        # A name's bytes that are not text become \udcXX, which JSON reads as Python wrote them.
        return text.encode(errors="backslashreplace").decode()
    if kind == "text":
        return f"{transcript.text}\n"
    return {"srt": srt, "vtt": webvtt}[kind](make_cues(transcript.words))


if __name__ == "__main__":
    run_command(main)
