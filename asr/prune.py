"""Fewer layers: python -m asr.prune RUN --to RUN2 [--encoder N] [--decoder M] [--how HOW]"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from asr import build, command, corpora, derived
from asr.data.loader import Utterances, load
from asr.data.plan import plan_evaluation
from asr.data.statistics import of_split
from asr.errors import UserError
from asr.models.pruning import Kept, check_count, every_other, prune, residual_alphas, search
from asr.models.transformer import Transformer
from asr.recipe import as_yaml
from asr.recipe import validate as checked
from asr.recognizer import Recognizer
from asr.settings import Recipe, SpeechRecipe
from asr.trained import run_recipe
from asr.training.checkpoint import TRAINING, choose, read_training
from asr.training.loop import validate
from asr.training.objective import SpeechObjective, means

Score = Callable[[Transformer], float]


def main() -> None:
    """Choose the layers, leave out the others, write the run."""
    parser = derived.arguments(
        "asr.prune",
        "A Transformer run with fewer layers, as a run of its own. Train the whole one "
        "with model.layer_drop, so that it can do without some.",
        source="the run folder of a Transformer",
        target="folder of the pruned run",
        examples="data.valid=my.tsv decode.average=5",
    )
    parser.add_argument("--encoder", type=int, help="encoder layers to keep (default: all)")
    parser.add_argument("--decoder", type=int, help="decoder layers to keep (default: all)")
    parser.add_argument(
        "--how",
        choices=("every-other", "search"),
        default="every-other",
        help="evenly spread (default), or those that the validation set misses most",
    )
    args = parser.parse_intermixed_args()
    if args.encoder is None and args.decoder is None:
        raise UserError("nothing to prune: give the layers to keep, --encoder N or --decoder M")
    prune_run(args.run, args.overrides, args.to, (args.encoder, args.decoder), args.how)


def prune_run(
    run: Path, overrides: Sequence[str], to: Path, keep: tuple[int | None, int | None], how: str
) -> None:
    """From run folder to run folder; `keep`: layers of the encoder and of the decoder, None all.

    UserError, before anything is written, where that cannot be.
    """
    recipe = run_recipe(run, overrides)
    if recipe.model.kind != "transformer":
        raise UserError(f"{run}: a {recipe.model.kind} model; only a transformer can be pruned")
    derived.check_new(to)
    recognizer = Recognizer.load(run, [*overrides, *derived.ALONE])
    model = recognizer.model
    whole = (len(model.encoder.layers), len(model.decoder.layers))
    counts = tuple(n if k is None else k for n, k in zip(whole, keep, strict=True))
    kept = spread(whole, counts, how)
    loss = validation_loss(recognizer, recipe) if how == "search" else None
    if loss:
        kept = search(model, *counts, loss)
    prune(model, *kept)
    smaller = pruned_recipe(recipe, model, to)
    save(run, to, smaller, recognizer, loss(model) if loss else math.inf)
    for name, indices, layers in zip(("encoder", "decoder"), kept, whole, strict=True):
        print(f"{name}: kept {' '.join(str(i + 1) for i in indices)} of {layers} layers")
    print(f"the run is in {to}")


def spread(whole: tuple[int, int], counts: tuple[int, ...], how: str) -> Kept:
    """Every other layer of each stack; UserError where the counts, or the rule, have none."""
    kept = []
    for name, layers, count in zip(("--encoder", "--decoder"), whole, counts, strict=True):
        with build.named(name):
            check_count(layers, count)
            kept.append(every_other(layers, count) if how == "every-other" else [])
    return kept[0], kept[1]


def validation_loss(recognizer: Recognizer, recipe: SpeechRecipe) -> Score:
    """The loss by which checkpoints are chosen, in nats per token of the validation split."""
    corpus = corpora.corpus(recipe.data, recipe.data.valid, "valid")
    front_end = of_split(recognizer.front_end, corpus, recipe.data.workers)
    heard = Utterances(corpus, front_end, recognizer.tokenizer, recipe.seed)
    plan = plan_evaluation(corpus.seconds, recipe.decode.batch_seconds)

    def score(model: Transformer) -> float:
        objective = SpeechObjective(model, recipe.model.ctc_weight, recipe.train.label_smoothing)
        batches = load(heard, plan.batches, recipe.data.workers)
        sums = means(validate(objective, batches, recipe.train.precision)[0])
        if "nats" not in sums:
            raise UserError(corpus.unreadable)
        return sums["nats"]

    return score


def pruned_recipe(recipe: SpeechRecipe, model: Transformer, to: Path) -> Recipe:
    """The run's recipe with the layers that the model has left."""
    tree = derived.plain_recipe(recipe, to)
    tree["model"]["encoder_layers"] = len(model.encoder.layers)
    tree["model"]["decoder_layers"] = len(model.decoder.layers)
    if recipe.model.residual_scale == "deepnet":  # would follow the new counts
        tree["model"]["residual_scale"] = residual_alphas(model)
    return checked(tree, f"--to {to}")


def save(run: Path, to: Path, recipe: SpeechRecipe, recognizer: Recognizer, loss: float) -> None:
    """An ordinary run folder, with one checkpoint; training goes on from it with --resume.

    Of an exported run, which holds weights alone, weights alone.
    """
    source = choose(run, recipe.decode.checkpoint, 1)[0]
    training = None
    if (source.folder / TRAINING).exists():
        objective = SpeechObjective(recognizer.model, 0.0, 0.0)
        training = read_training(source)
        data = training.get("content", {})
        if run_recipe(run).data.valid != recipe.data.valid:
            data = {key: what for key, what in data.items() if key != "data.valid"}
        training |= {
            "recipe": as_yaml(recipe),
            "optimizer": build.optimizer(recipe.train, objective).state_dict(),  # without moments
            "content": data,
            "validated": -1,  # the whole model was
            "metrics": {},
        }
    derived.write_run(to, recipe, recognizer, training, source.step, loss)


if __name__ == "__main__":
    command.run(main)
