"""Fewer layers: python -m asr.prune RUN --to RUN2 [--encoder N] [--decoder M] [--how HOW]

Removes layers of a Transformer that was trained with LayerDrop (Fan, Grave & Joulin 2019,
arXiv:1909.11556): by the paper's rule, `every_other`, or by `search_layers` on the validation set.
The result is a run without the state of a training, from which another run can start with
train.init. Its recipe states the residual scales of `deepnet` as numbers, since
they depend on the layer counts that the weights were trained with.

Functions import what takes time, so that --help is fast.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, run_folder
from asr.errors import UserError, run_command

if TYPE_CHECKING:
    from asr.config.schema import Recipe, SpeechRecipe
    from asr.inference.recognition import Recognizer
    from asr.models.transformer import Transformer

Layers = tuple[list[int], list[int]]  # indices of encoder layers and of decoder layers, from 0
Score = Callable[["Transformer"], float]  # the lower the better


def main() -> None:
    """Read the command line and prune a run."""
    parser = CommandParser(
        prog="python -m asr.prune",
        description="Write a run with fewer layers of a Transformer. Train the full model with "
        "model.layer_drop, so that it tolerates missing layers.",
        epilog="Keys of the run's recipe can be overridden: data.valid=my.tsv decode.average=5 ...",
    )
    parser.add_argument("run", type=run_folder, help="the run folder of a Transformer")
    parser.add_overrides()
    parser.add_argument("--to", type=Path, required=True, help="folder of the pruned run")
    parser.add_argument("--encoder", type=int, help="encoder layers to keep (default: all)")
    parser.add_argument("--decoder", type=int, help="decoder layers to keep (default: all)")
    ways = ("every-other", "search")
    how = "evenly spread (default), or the layers without which the validation loss is highest"
    parser.add_argument("--how", choices=ways, default=ways[0], help=how)
    args = parser.parse()
    if args.encoder is None and args.decoder is None:
        raise UserError("nothing to prune: give the layers to keep, --encoder N or --decoder M")
    prune_run(args.run, args.overrides, args.to, (args.encoder, args.decoder), args.how)


def prune_run(
    run: Path, overrides: Sequence[str], to: Path, keep: tuple[int | None, int | None], how: str
) -> None:
    """Write a pruned run folder; `keep`: encoder and decoder layers, None for all.

    Raises UserError before anything is written.
    """
    from asr.inference.derived import WITHOUT_OTHERS, check_new_folder, write_run
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import Recognizer
    from asr.models.build import config_errors
    from asr.training.checkpoint import choose

    recipe = load_run_recipe(run, overrides)
    if recipe.model.kind == "las":
        raise UserError(f"{run}: a las model; only a transformer or conformer can be pruned")
    if recipe.model.depth_scaled:
        raise UserError(f"{run}: model.depth_scaled makes its norms depend on the layers before")
    if recipe.model.intermediate_ctc:
        raise UserError(f"{run}: model.intermediate_ctc numbers its layers; it cannot be pruned")
    check_new_folder(to)
    recognizer = Recognizer.load(run, [*overrides, *WITHOUT_OTHERS])
    model, loss = recognizer.model, math.inf
    before = (len(model.encoder.layers), len(model.decoder.layers))
    counts = [n if k is None else k for n, k in zip(before, keep, strict=True)]
    kept: list[list[int]] = []
    for option, layers, count in zip(("--encoder", "--decoder"), before, counts, strict=True):
        with config_errors(option):
            check_count(layers, count)
            if how == "every-other":
                kept.append(every_other(layers, count))
    if how == "search":
        score = validation_loss(recognizer, recipe)
        kept = search_layers(model, *counts, score)
        keep_layers(model, *kept)
        loss = score(model)
    else:
        keep_layers(model, *kept)
    step = choose(run, recipe.decode.checkpoint, 1)[0].step
    write_run(to, pruned_recipe(recipe, model, to), recognizer, step, loss)
    for name, indices, layers in zip(("encoder", "decoder"), kept, before, strict=True):
        print(f"{name}: kept {' '.join(str(i + 1) for i in indices)} of {layers} layers")
    print(f"the run is in {to}")


def every_other(layers: int, keep: int) -> list[int]:
    """Indices of the layers to keep, evenly spread, of a stack of `layers`.

    The layer at depth d, counted from 1, is removed when d mod floor(1/p) == 0, with
    p = 1 - keep/layers. If 1/p is not an integer the rule may keep fewer than `keep`. Raises
    ValueError for p above 1/2, where floor(1/p) = 1 removes all.
    """
    removed = layers - keep
    if 2 * removed > layers:
        raise ValueError(
            f"every-other cannot prune {layers} layers to {keep}, fewer than half: use search"
        )
    period = layers // removed if removed else layers + 1  # floor(1/p), in integers
    return [depth - 1 for depth in range(1, layers + 1) if depth % period]


def search_layers(model: "Transformer", encoder: int, decoder: int, score: Score) -> Layers:
    """Which `encoder` and `decoder` layers to keep; the model is not changed.

    Greedy: removes one layer at a time, from either stack, each time the one without which
    score(model) is lowest, the first of equals. Removing d of N layers takes about d (N - d/2)
    scores.
    """
    stacks, keep = (model.encoder, model.decoder), (encoder, decoder)
    full = [stack.layers for stack in stacks]
    kept = tuple(list(range(len(layers))) for layers in full)

    def score_without(removed: tuple[int, int]) -> float:
        keep_layers(model, *([i for i in part if (s, i) != removed] for s, part in enumerate(kept)))
        loss = score(model)
        for stack, layers in zip(stacks, full, strict=True):
            stack.layers = layers
        return loss

    while choices := [(s, i) for s in (0, 1) if len(kept[s]) > keep[s] for i in kept[s]]:
        s, removed = min(choices, key=score_without)
        kept[s].remove(removed)
    return kept


def keep_layers(model: "Transformer", encoder: Sequence[int], decoder: Sequence[int]) -> None:
    """Keep exactly these layers of each stack, in place and in order."""
    from torch import nn

    for stack, kept in ((model.encoder, encoder), (model.decoder, decoder)):
        stack.layers = nn.ModuleList(stack.layers[i] for i in sorted(set(kept)))


def check_count(layers: int, keep: int) -> None:
    """Raise ValueError unless `keep` of a stack's `layers` can be kept."""
    if keep < 1:
        raise ValueError(f"pruning {layers} layers to {keep} would leave no layer: keep at least 1")
    if keep > layers:
        raise ValueError(f"pruning cannot keep {keep} layers: the stack has {layers}")


def residual_alphas(model: "Transformer") -> dict[str, float]:
    """The model's alphas as a residual_scale setting."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return {name: stack.layers[0].around_feed_forward.alpha for name, stack in stacks.items()}


def validation_loss(recognizer: "Recognizer", recipe: "SpeechRecipe") -> Score:
    """The loss that selects checkpoints, in nats per token of the validation split."""
    from asr.data.batching import plan_evaluation
    from asr.data.loader import UtteranceDataset, load_batches, with_split_statistics
    from asr.data.splits import load_split_manifest
    from asr.training.losses import SpeechObjective, means
    from asr.training.trainer import validate

    corpus = load_split_manifest(recipe.data, recipe.data.valid, "valid")
    front_end = with_split_statistics(recognizer.front_end, corpus, recipe.data.workers, (1.0,))
    dataset = UtteranceDataset(corpus, front_end, recognizer.tokenizer, recipe.seed)
    plan = plan_evaluation(corpus.seconds, recipe.decode.batch_seconds)

    def score(model: "Transformer") -> float:
        objective = SpeechObjective(model, recipe.model.ctc_weight, recipe.train.label_smoothing)
        batches = load_batches(dataset, plan.batches, recipe.data.workers)
        sums = means(validate(objective, batches, recipe.train.precision)[0])
        if "nll" not in sums:
            raise UserError(corpus.unreadable())
        return sums["nll"]

    return score


def pruned_recipe(recipe: "SpeechRecipe", model: "Transformer", to: Path) -> "Recipe":
    """The run's recipe with the model's present layer counts."""
    from asr.config.loader import validate
    from asr.inference.derived import derived_recipe

    tree = derived_recipe(recipe, to)
    tree["model"]["encoder_layers"] = len(model.encoder.layers)
    tree["model"]["decoder_layers"] = len(model.decoder.layers)
    if recipe.model.residual_scale == "deepnet":
        tree["model"]["residual_scale"] = residual_alphas(model)
    return validate(tree, f"--to {to}")


if __name__ == "__main__":
    run_command(main)
