"""Text of audio files: python -m asr.transcribe RUN AUDIO... [--json]"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from asr import command
from asr.recognizer import Recognizer, Transcript
from features.audio import AudioError


def main() -> int:
    """One line per file; a file that cannot be read is said so and the rest goes on."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.transcribe",
        description="Transcribe audio files with a trained run.",
        epilog="Exit code 2 if any file could not be read.",
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("audio", nargs="+", type=Path, help="WAV, FLAC, OGG, Opus or MP3, any rate")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_intermixed_args()
    recognizer = Recognizer.load(args.run)
    code = 0
    for path in args.audio:
        try:
            print(line(path, recognizer.transcribe(path), args.json), flush=True)
        except AudioError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = 2
    return code


def line(path: Path, transcript: Transcript, as_json: bool) -> str:
    """`path: text`, or the whole transcript as JSON."""
    if as_json:
        return json.dumps({"audio": str(path), **asdict(transcript)}, ensure_ascii=False)
    return f"{path}: {transcript.text}"


if __name__ == "__main__":
    command.run(main)
