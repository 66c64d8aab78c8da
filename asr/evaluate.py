"""Error rates of a run: python -m asr.evaluate RUN --split NAME_OR_MANIFEST.tsv [key=value ...]"""

import argparse
from pathlib import Path

import torch

from asr import command, corpora
from asr.data.batch import Utterances, load, plan_evaluation
from asr.data.corpus import Corpus
from asr.data.statistics import measure
from asr.errors import UserError
from asr.recognizer import Recognizer, run_recipe
from asr.scoring.files import percent, write_evaluation
from asr.scoring.wer import Score, score
from asr.settings import SpeechRecipe


def main() -> int:
    """Decode a split, print its error rates, write the files."""
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
    args = parser.parse_intermixed_args()
    recipe = run_recipe(args.run, args.overrides)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    corpus = corpora.split(recipe.data, args.split)
    recognizer = Recognizer.load(args.run, args.overrides)
    texts, reasons = recognise(recognizer, corpus, recipe)
    unknown = [recognizer.tokenizer.unknown(text) for text in corpus.texts]
    corpora.check_text(corpus.texts, unknown, corpus.path)
    folder = args.out or args.run / "evaluate" / Path(args.split).stem
    result = write(folder, corpus, texts, reasons, recipe)
    for name, reason in reasons.items():
        print(f"not decoded, scored as empty: {name}: {reason}")
    print(summary(result, args.split))
    print(f"files: {folder}/score.json hypotheses.tsv alignment.txt")
    return 2 if reasons else 0


def recognise(
    recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Texts by utterance id, of attention and of CTC alone; and why some could not be read.

    Statistics per speaker are taken over the split itself, as at training over its corpus.
    """
    if recipe.features.mvn == "speaker":
        measure(corpus, recognizer.front_end, recipe.data.workers)
    utterances = Utterances(corpus, recognizer.front_end, recognizer.tokenizer, recipe.seed)
    plan = plan_evaluation(corpus.seconds, recipe.decode.batch_seconds)
    texts: dict[str, tuple[str, str]] = {}
    reasons: dict[str, str] = {}
    for batch in load(utterances, plan.batches, recipe.data.workers):
        reasons |= {broken.id: broken.reason for broken in batch.broken}
        if len(batch):
            memory = recognizer.encode(batch)
            found = [recognizer.text(h) for h in recognizer.hypotheses(memory)]
            ctc = recognizer.ctc_texts(memory) or [""] * len(found)
            texts |= zip(batch.ids, zip(found, ctc, strict=True), strict=True)
    if not texts:
        raise UserError(f"{corpus.path}: none of its {len(corpus)} utterances could be read")
    return texts, reasons


def write(
    folder: Path,
    corpus: Corpus,
    texts: dict[str, tuple[str, str]],
    reasons: dict[str, str],
    recipe: SpeechRecipe,
) -> Score:
    """Score every utterance, the unreadable ones as empty, and write the files."""
    references, ids = corpus.texts, corpus.ids
    found = [texts.get(name, ("", "")) for name in ids]
    result = score(references, [text for text, _ in found], ids, corpus.speakers)
    about = {"decode": recipe.decode.model_dump(mode="json"), "not_decoded": len(reasons)}
    columns = {}
    if recipe.model.ctc_weight:
        ctc = [text for _, text in found]
        about["ctc_wer"] = score(references, ctc, ids, corpus.speakers, draws=1).wer
        columns["ctc"] = ctc
    write_evaluation(folder, result, about, columns)
    return result


def summary(result: Score, split: str) -> str:
    """Two lines for a person."""
    spread = ""
    if result.wer_interval:
        low, high = result.wer_interval
        spread = f" (95 % interval {percent(low)} to {percent(high)})"
    return (
        f"{split}: WER {percent(result.wer)}{spread}, CER {percent(result.cer)}\n"
        f"{result.sentences} utterances, {result.words} words: {result.substitutions} substituted, "
        f"{result.deletions} deleted, {result.insertions} inserted"
    )


if __name__ == "__main__":
    command.run(main)
