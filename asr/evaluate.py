"""Error rates of a run: python -m asr.evaluate RUN --split NAME_OR_MANIFEST.tsv [key=value ...]"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from asr import command, corpora
from asr.data.corpus import Corpus, Utterance
from asr.data.table import read_rows
from asr.errors import UserError
from asr.evaluation import Evaluation, attention_uri, evaluate, health_columns
from asr.recognizer import Recognizer
from asr.scoring.alignment import tidy
from asr.scoring.files import (
    between,
    evaluation_name,
    percent,
    read_evaluation,
    write_evaluation,
)
from asr.scoring.page import write_page
from asr.scoring.parts import group_lines
from asr.scoring.significance import verdict
from asr.scoring.wer import Score
from asr.trained import run_recipe
from asr.tune import tune
from features.packed import member_of


def main() -> int:
    """Decode a split, print its error rates, write the files."""
    args = arguments()
    recipe = run_recipe(args.run, args.overrides)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    corpus = corpora.split(recipe.data, args.split)
    name = evaluation_name(args.split)
    labels = {column: groups_of(corpus, column) for column in args.by}
    other = result_of(args.against, name, corpus) if args.against else None
    recognizer = Recognizer.load(args.run, args.overrides)
    unknown = [recognizer.tokenizer.unknown(text) for text in corpus.texts]
    corpora.check_text(corpus.texts, unknown, corpus.path)
    if args.tune:
        for line in tune(recognizer, corpus, recipe, args.run):
            print(line, flush=True)
        return 0
    folder = args.out or args.run / "evaluate" / name
    check_writable(folder)  # before hours of decoding
    title = f"{args.run.resolve().name}: {name}"
    evaluation = evaluate(recognizer, corpus, recipe, labels, title, args.overrides)
    told = list(lines(evaluation))
    if other:
        told += [f"{args.run} against {args.against}, WER", *verdict(other, evaluation.score)]
    try:
        write(folder, evaluation, recognizer, args.pictures)
    finally:  # a full disk must not cost the result, nor `| head` the files
        print(*told, sep="\n")
    print(f"files: {folder}/score.json hypotheses.tsv alignment.txt")
    print(f"page:  {(folder / 'page.html').resolve().as_uri()}")
    return 2 if evaluation.reasons else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m asr.evaluate",
        description="Decode a split with a trained run and score it.",
        epilog="decode.* and data.* keys of the run's recipe can be overridden: decode.beam=8 ...",
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument(
        "--split", required=True, help="train, valid, a name under data.test, or a manifest (.tsv)"
    )
    parser.add_argument("--out", type=Path, help="folder of the result (RUN/evaluate/SPLIT)")
    parser.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="error rates of each group"
    )
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="a run evaluated on the same split: which wins?"
    )
    parser.add_argument(
        "--pictures", type=natural, default=20, help="worst utterances shown with attention (20)"
    )
    parser.add_argument(
        "--tune", action="store_true", help="search the decode settings, write them into the run"
    )
    return parser.parse_intermixed_args()


def natural(text: str) -> int:
    """A number from 0 on, as argparse wants to be told."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or above")
    return int(text)


def check_writable(folder: Path) -> None:
    """UserError where the folder can neither be written into nor be made; it is not made yet."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(f"{folder}: {there} cannot be written into; choose another --out")


def result_of(run: Path, name: str, corpus: Corpus) -> Score:
    """What a run's evaluation of the same split gave. UserError where it is of another split."""
    found = read_evaluation(run / "evaluate" / name).score
    texts = dict(zip(corpus.ids, map(tidy, corpus.texts), strict=True))
    there = {u.id: u.reference for u in found.utterances}
    if there != texts:
        what = "utterances" if there.keys() != texts.keys() else "texts"
        raise UserError(
            f"--against {run}: its evaluation {name} is of other {what} than {corpus.path}; "
            "evaluate it on that manifest first"
        )
    return found


def groups_of(corpus: Corpus, column: str) -> dict[str, str]:
    """Utterance id -> its value in a column of the manifest. UserError without such a column."""
    return {row["id"]: row[column] for _, row in read_rows(corpus.path, ("id", column))}


def write(folder: Path, evaluation: Evaluation, recognizer: Recognizer, pictures: int) -> None:
    """The page, with attention of the worst utterances, and the files."""
    corpus, heard, result = evaluation.corpus, evaluation.heard, evaluation.score
    errors = [utterance.errors for utterance in result.utterances]
    worst = sorted(range(len(corpus)), key=lambda i: -errors[i])[:pictures]
    uris = {corpus[i].id: attention_uri(recognizer, corpus, i, heard[i].tokens) for i in worst}
    write_page(
        folder / "page.html",
        result,
        title=evaluation.title,
        about=dict(facts(evaluation)),
        audio={u.id: u.audio for u in corpus if playable(u, evaluation.reasons)},
        pictures={name: uri for name, uri in uris.items() if uri},
        groups=evaluation.groups,
    )
    columns = health_columns(heard)
    if "ctc_wer" in evaluation.about:
        columns["ctc"] = [h.ctc for h in heard]
    write_evaluation(folder, result, evaluation.about, columns)


def playable(utterance: Utterance, reasons: Mapping[str, str]) -> bool:
    """Whether a page can link to the audio: it could be read, and is a file of its own."""
    return utterance.id not in reasons and member_of(utterance.audio) is None


def facts(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """What stands under the page's title."""
    about = evaluation.about
    yield "checkpoint", f"{about['decode']['checkpoint']}, of step {_steps(evaluation)}"
    for key in ("beam", "ctc_weight", "length_penalty"):
        yield key.replace("_", " "), str(about["decode"][key])
    if len(about["decode"]["speeds"]) > 1:
        yield "speeds", " ".join(f"{speed:g}" for speed in about["decode"]["speeds"])
    if about["decode"]["ensemble"]:
        yield "ensemble with", " ".join(about["decode"]["ensemble"])
    if about["decode"]["lm"] and about["decode"]["lm_weight"]:
        yield "language model", f"{about['decode']['lm']}, weight {about['decode']['lm_weight']}"
    if about["wer_interval_over_speakers"]:
        low, high = about["wer_interval_over_speakers"]
        yield "WER over speakers", f"{percent(low)} – {percent(high)}"
    if "ctc_wer" in about:
        yield "WER of CTC alone", percent(about["ctc_wer"])
    yield "ill", str(len(ill(evaluation)))


def ill(evaluation: Evaluation) -> list[str]:
    """Ids of utterances that were read but cut off, half left out, or half a loop."""
    return [
        name
        for name, heard in zip(evaluation.corpus.ids, evaluation.heard, strict=True)
        if name not in evaluation.reasons and (heard.health.ill or not heard.finished)
    ]


def _steps(evaluation: Evaluation) -> str:
    return " ".join(map(str, evaluation.about["steps"]))


def lines(evaluation: Evaluation) -> Iterator[str]:
    """What a person reads first."""
    result, sick = evaluation.score, ill(evaluation)
    average, there = evaluation.about["decode"]["average"], len(evaluation.about["steps"])
    if there < average:
        yield (
            f"mean of {there} checkpoints (step {_steps(evaluation)}): the run holds no more, "
            f"decode.average = {average} asks for more"
        )
    if pieces := evaluation.about["in_pieces"]:
        yield f"{pieces} utterances are too long to be heard at once (decode.longest): in pieces"
    for name, reason in evaluation.reasons.items():
        yield f"not decoded, scored as empty: {name}: {reason}"
    intervals = {
        result.interval_over: result.wer_interval,
        "speakers": evaluation.about["wer_interval_over_speakers"],
    }
    spread = ", ".join(
        f"{between(interval)} over {units}" for units, interval in intervals.items() if interval
    )
    yield f"{evaluation.title}: WER {percent(result.wer)}, CER {percent(result.cer)}"
    if spread:
        yield f"95 % intervals of WER: {spread}"
    yield (
        f"{result.sentences} utterances, {result.words} words: {result.substitutions} substituted, "
        f"{result.deletions} deleted, {result.insertions} inserted"
    )
    if sick:
        names = " ".join(sick[:5]) + (" ..." if len(sick) > 5 else "")
        yield f"{len(sick)} look ill (cut off, half left out, or a loop): {names}"
    for column, parts in evaluation.groups.items():
        yield from group_lines(column, parts)


if __name__ == "__main__":
    command.run(main)
