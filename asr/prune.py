"""Fewer layers: python -m asr.prune RUN --to RUN2 [--encoder N] [--decoder M]

Removes layers of a Transformer that was trained with LayerDrop (Fan, Grave & Joulin 2019,
arXiv:1909.11556), evenly spread, by the rule that the paper recommends. The result is a run without
the state of a training, from which another run can start with train.init. Its recipe states the
residual scales of `deepnet` as numbers, since they depend on the layer counts that the weights were
trained with.

Functions import what takes time, so that --help is fast.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr.arguments import CommandParser, run_folder
from asr.errors import UserError, run_command

if TYPE_CHECKING:
    from asr.config.schema import Recipe, SpeechRecipe
    from asr.models.transformer import Transformer


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
    args = parser.parse()
    if args.encoder is None and args.decoder is None:
        raise UserError("nothing to prune: give the layers to keep, --encoder N or --decoder M")
    prune_run(args.run, args.overrides, args.to, (args.encoder, args.decoder))


def prune_run(
    run: Path, overrides: Sequence[str], to: Path, keep: tuple[int | None, int | None]
) -> None:
    """Write a pruned run folder; `keep`: encoder and decoder layers, None for all.

    Raises UserError before anything is written.
    """
    from torch import nn

    from asr.inference.derived import load_alone, write_run
    from asr.models.build import config_errors
    from asr.training.checkpoint import choose

    recipe, recognizer = load_alone(run, overrides, to)
    if recipe.model.kind == "las":
        raise UserError(f"{run}: a las model; only a transformer or conformer can be pruned")
    if recipe.model.depth_scaled:
        raise UserError(f"{run}: model.depth_scaled makes its norms depend on the layers before")
    if recipe.model.intermediate_ctc:
        raise UserError(f"{run}: model.intermediate_ctc numbers its layers; it cannot be pruned")
    model = recognizer.model
    before = (len(model.encoder.layers), len(model.decoder.layers))
    counts = [n if k is None else k for n, k in zip(before, keep, strict=True)]
    kept: list[list[int]] = []
    for option, layers, count in zip(("--encoder", "--decoder"), before, counts, strict=True):
        with config_errors(option):
            kept.append(every_other(layers, count))
    for stack, indices in zip((model.encoder, model.decoder), kept, strict=True):
        stack.layers = nn.ModuleList(stack.layers[i] for i in indices)
    step = choose(run, recipe.decode.checkpoint, 1)[0].step
    write_run(to, pruned_recipe(recipe, model, to), recognizer, step, math.inf)
    for name, indices, layers in zip(("encoder", "decoder"), kept, before, strict=True):
        print(f"{name}: kept {' '.join(str(i + 1) for i in indices)} of {layers} layers")
    print(f"the run is in {to}")


def every_other(layers: int, keep: int) -> list[int]:
    """Indices of the layers to keep, evenly spread, of a stack of `layers`.

    The layer at depth d, counted from 1, is removed when d mod floor(1/p) == 0, with
    p = 1 - keep/layers. If 1/p is not an integer the rule may keep fewer than `keep`. Raises
    ValueError for p above 1/2, where floor(1/p) = 1 removes all, and below 0.
    """
    if not layers <= 2 * keep <= 2 * layers:
        raise ValueError(
            f"cannot keep {keep} of {layers} layers: keep half or more; for fewer, prune the result"
        )
    removed = layers - keep
    period = layers // removed if removed else layers + 1  # floor(1/p), in integers
    return [depth - 1 for depth in range(1, layers + 1) if depth % period]


def pruned_recipe(recipe: "SpeechRecipe", model: "Transformer", to: Path) -> "Recipe":
    """The run's recipe with the model's present layer counts."""
    from asr.config.loader import validate
    from asr.inference.derived import derived_recipe

    tree = derived_recipe(recipe, to)
    stacks = {"encoder": model.encoder.layers, "decoder": model.decoder.layers}
    tree["model"] |= {f"{name}_layers": len(layers) for name, layers in stacks.items()}
    if recipe.model.residual_scale == "deepnet":
        alphas = {name: layers[0].around_feed_forward.alpha for name, layers in stacks.items()}
        tree["model"]["residual_scale"] = alphas
    return validate(tree, f"--to {to}")


if __name__ == "__main__":
    run_command(main)
