"""Error rates of a run: python -m asr.evaluate RUN --split NAME_OR_MANIFEST.tsv [key=value ...]"""

import argparse
import os
from pathlib import Path

from asr.arguments import CommandParser, natural, run_folder
from asr.errors import UserError, run_command
from asr.io import check_run_folder
from asr.shipped import is_installed


def main() -> int:
    """Decode a split, print its error rates, write the files. Exit code 2 for unreadable audio."""
    args = arguments()
    if is_installed(args.run) and (args.tune or not args.out):
        raise UserError(f"{args.run}: is not written to; add --out, or give --tune a copy of it")
    import torch

    from asr.analysis.score_files import evaluation_name
    from asr.analysis.significance import compare_two
    from asr.data import splits
    from asr.inference import evaluation
    from asr.inference.hub import is_on_hub, local_run
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import Recognizer
    from asr.inference.tune import tune

    on_hub, run = is_on_hub(args.run), local_run(args.run)
    if args.tune and (on_hub or not os.access(run, os.W_OK)):
        raise UserError(f"--tune writes into the run: copy {run} to a folder, and tune that")
    recipe = load_run_recipe(run, args.overrides)
    name = evaluation_name(args.split)
    corpus = splits.load_split(recipe.data, args.split)
    if not args.out:
        splits.check_result_name(recipe.data, args.split, name)
    labels = {column: evaluation.groups_of(corpus, column) for column in args.by}
    other = None
    if args.against:
        check_run_folder(args.against)
        other = evaluation.evaluation_of_run(args.against, name, corpus)
    recognizer = Recognizer.load(run, args.overrides)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    if note := splits.check_vocabulary_coverage(corpus.texts, recognizer.tokenizer, corpus.path):
        print(note, flush=True)
    if args.tune:
        for line in tune(recognizer, corpus, recipe, run):
            print(line, flush=True)
        return 0
    place = Path("evaluate", args.run.name) if on_hub else run / "evaluate"
    folder = args.out or place / name
    check_writable(folder)  # before hours of decoding
    title = f"{(args.run if on_hub else run.resolve()).name}: {name}"
    result = evaluation.evaluate(recognizer, corpus, recipe, labels, title, args.overrides)
    lines = list(evaluation.summary(result))
    if other:
        lines += [f"{args.run} against {args.against}, WER"]
        lines += compare_two(other.score, result.score)
        lines += [f"  {note}" for note in evaluation.reservations(args.against, other, result)]
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
        epilog="decode.* and data.* keys of the run's recipe can be overridden: decode.beam=8 ...",
    )
    add = parser.add_argument
    add(
        "run",
        type=run_folder,
        help="a run folder, a shipped run (conformer) or hf:USER/NAME[@REVISION]",
    )
    parser.add_overrides()
    add("--split", required=True, help="train, valid, a name under data.test, or a manifest (.tsv)")
    out = "folder of the result (RUN/evaluate/SPLIT; of hf:USER/NAME evaluate/NAME/SPLIT)"
    add("--out", type=Path, help=out)
    add("--by", action="append", default=[], metavar="COLUMN", help="error rates of each group")
    add(
        "--against", type=Path, metavar="RUN", help="a run evaluated on the same split: which wins?"
    )
    add("--pictures", type=natural, default=20, help="worst utterances shown with attention (20)")
    add("--tune", action="store_true", help="search the decode settings, write them into the run")
    args = parser.parse()
    if args.tune and (args.out or args.by or args.against):
        parser.error("--tune writes no results: leave out --out, --by and --against")
    return args


def check_writable(folder: Path) -> None:
    """Raise UserError where the folder cannot be written into or made; it is not made yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(f"{folder}: {existing} cannot be written into; choose another --out")


if __name__ == "__main__":
    run_command(main)
