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

import torch

from asr import command
from asr.bulk import job, work
from asr.decoding.subtitles import make_cues, srt, webvtt
from asr.errors import UserError
from asr.recognizer import Recognizer
from asr.scoring.files import replace_files
from asr.trained import run_recipe
from asr.transcript import Transcript, as_plain

KEY = re.compile(r"\w+(\.\w+)*=")  # begins a setting; a path has a slash before its =
SUFFIXES = {"text": "txt", "json": "json", "srt": "srt", "vtt": "vtt"}


def main() -> int:
    """One transcript per file; a file that cannot be read is said so and the rest goes on."""
    args = arguments()
    files, overrides = parted(args.audio)
    if args.list:
        return from_list(args, files, overrides)
    if not files:
        raise UserError("no audio file was named, only settings")
    if args.out:
        check_names(files)
    elif len(files) > 1 and args.format in ("srt", "vtt"):
        raise UserError(f"--format {args.format} makes a file of each recording: add --out FOLDER")
    recognizer = Recognizer.load(args.run, overrides)
    faults: dict[Path, str] = {}
    for path, transcript in recognizer.transcribe_files(files, faults):
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            name = f"{path.stem}.{SUFFIXES[args.format]}"
            replace_files(args.out, {name: content(path, transcript, args.format)})
            print(f"{path}: {args.out / name}", flush=True)
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
        epilog="Among the files may stand keys of the run's recipe: decode.beam=8 ... "
        "Exit code 2 if any file could not be read.",
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("audio", nargs="*", help="WAV, FLAC, OGG, Opus or MP3, any rate or length")
    parser.add_argument("--format", choices=SUFFIXES, default="text", help="json, srt, vtt: times")
    parser.add_argument("--json", dest="format", action="store_const", const="json")
    parser.add_argument("--out", type=Path, help="folder for a file per recording")
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILES",
        help="a text file that names an audio file a line, or a manifest (.tsv): all transcripts "
        "in OUT/transcripts.tsv (.jsonl); run it again to go on after any end, under torchrun "
        "with any number of processes",
    )
    parser.add_argument(
        "--shard-files",
        type=positive,
        default=64,
        metavar="N",
        help="files of --list that are written, or lost, together (default: %(default)s)",
    )
    parser.add_argument(
        "--attempt",
        type=positive,
        default=1,
        metavar="N",
        help="2, 3, ...: the shards of --list with files that failed before are done again",
    )
    return parser.parse_intermixed_args()


def positive(text: str) -> int:
    """A number above 0, as argparse wants to be told."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def parted(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Files, each once, and overrides: what begins as KEY.PATH=, unless it is a file's name."""
    overrides = [text for text in arguments if KEY.match(text) and not Path(text).exists()]
    files = [Path(text) for text in dict.fromkeys(arguments) if text not in overrides]
    return files, overrides


def from_list(args: argparse.Namespace, files: list[Path], overrides: list[str]) -> int:
    """The files of --list, together with the other processes of torchrun where it started any."""
    if files:
        raise UserError(f"{files[0]} and --list: name files or give a list of them, not both")
    if not args.out:
        raise UserError("--list needs a folder for the transcripts: --out FOLDER")
    if args.format in ("srt", "vtt"):
        raise UserError(
            f"--format {args.format} makes a file of each recording, --list one of all: "
            "--format json has the times"
        )
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    recipe = run_recipe(args.run, overrides)
    listed = job.read_list(args.list, recipe.data.outside)
    task = job.Job(args.out, listed, args.shard_files, args.format, args.attempt)
    job.open_folder(task, job.identity(args.run, recipe))
    rank, ranks = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    return work.transcribe_all(task, lambda: Recognizer.load(args.run, overrides), rank, ranks)


def check_names(files: list[Path]) -> None:
    """UserError where two recordings would be written to one file."""
    twice = [stem for stem, count in Counter(path.stem for path in files).items() if count > 1]
    if twice:
        both = " and ".join(str(path) for path in files if path.stem == twice[0])
        raise UserError(f"{both} would share a file in --out: give each call files of other names")


def content(path: Path, transcript: Transcript, kind: str) -> str:
    """A transcript as a file of that kind."""
    if kind == "json":
        text = json.dumps(as_plain(path, transcript), ensure_ascii=False) + "\n"
        # A name's bytes that are no text become \udcXX, which JSON reads as Python wrote them.
        return text.encode(errors="backslashreplace").decode()
    if kind == "text":
        return f"{transcript.text}\n"
    return {"srt": srt, "vtt": webvtt}[kind](make_cues(transcript.words))


if __name__ == "__main__":
    command.run(main)
