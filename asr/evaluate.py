"""Error rates of a run: python -m asr.evaluate RUN --split NAME_OR_MANIFEST.tsv [key=value ...]"""

import argparse
import os
from pathlib import Path

from asr.arguments import CommandParser, natural, run_folder
from asr.errors import UserError, run_command
from asr.io import check_writable
from asr.shipped import is_installed


def main() -> int:
    """Decode a split, print its error rates, write the files. Exit code 2 for unreadable audio."""
    args = arguments()
    from asr.analysis.significance import compare_two
    from asr.hub import is_on_hub, local_run
    from asr.inference import evaluation
    from asr.inference.tune import tune

    split = evaluation.open_split(args.run, args.split, args.overrides, args.by)
    if args.tune:
        run = split.run
        if is_on_hub(args.run) or is_installed(run) or not os.access(run, os.W_OK):
            raise UserError(f"--tune writes into the run: copy {run} to a folder, and tune that")
        for line in tune(split.load(), split.corpus, split.recipe, run):
            print(line, flush=True)
        return 0
    # Before hours of decoding.
    folder = check_writable(args.out) if args.out else split.result_folder()
    other = None
    if args.against:
        against = local_run(args.against)
        other = evaluation.evaluation_of_run(against, args.against, split.name, split.corpus)
    result, recognizer = split.evaluate()
    lines = list(evaluation.summary(result))
    if other:
        lines += [f"{args.run} against {args.against}, WER"]
        lines += compare_two(other.score, result.score)
        lines += [f"  {note}" for note in evaluation.reservations(against, other, result)]
    try:
        evaluation.write(folder, result, recognizer, args.pictures)
    finally:  # a full disk must not cost the result, nor `| head` the files
        print(*lines, sep="\n")
    print(f"files: {folder}/score.json hypotheses.tsv alignment.txt")
    print(f"page:  {(folder / 'page.html').resolve().as_uri()}")
    return 2 if result.reasons else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog="python -m asr.evaluate",
        description="Decode a split with a trained run and score it.",
        epilog="Keys of decode and data can be overridden, train.device, "
        "train.threads and features.mvn=utterance|speaker: decode.beam=8 ...",
    )
    add = parser.add_argument
    run = "a run folder, a shipped run (conformer) or hf:USER/NAME[@REVISION]"
    add("run", type=run_folder, help=run)
    parser.add_overrides()
    add("--split", required=True, help="train, valid, a name under data.test, or a manifest (.tsv)")
    out = "folder of the result (RUN/evaluate/SPLIT; of hf:USER/NAME evaluate/NAME/SPLIT)"
    add("--out", type=Path, help=out)
    by = "error rates also for each value of this column of the manifest"
    add("--by", action="append", default=[], metavar="COLUMN", help=by)
    against = "test the difference to a run evaluated on this split, or to an evaluation's --out"
    add("--against", type=run_folder, metavar="RUN", help=against)
    add("--pictures", type=natural, default=20, help="worst utterances shown with attention (20)")
    add("--tune", action="store_true", help="search the decode settings, write them into the run")
    args = parser.parse()
    if args.tune and (args.out or args.by or args.against):
        parser.error("--tune writes no results: leave out --out, --by and --against")
    return args


if __name__ == "__main__":
    run_command(main)
