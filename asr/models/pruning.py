"""Fewer layers from a Transformer trained with LayerDrop (Fan, Grave & Joulin 2019).

Either `every_other`, the paper's rule, or `search`, which asks the validation set, names the layers
that stay; `prune` keeps them. What is left is an ordinary Transformer: build one with as many
layers and load its state. Give that one `residual_alphas` as its residual_scale: under `deepnet`
the layer counts would set others than the weights were trained with.
"""

from collections.abc import Callable, Sequence

from torch import nn

from asr.models.transformer import Transformer

Kept = tuple[list[int], list[int]]
"""Indices, from 0, of the encoder layers and of the decoder layers that stay."""


def every_other(layers: int, keep: int) -> list[int]:
    """Indices of the layers that stay, evenly spread, of a stack of `layers`.

    The layer at depth d, counted from 1, goes when d mod floor(1/p) == 0, with p = 1 - keep/layers.
    Where 1/p is no whole number the rule may leave fewer than `keep`. ValueError where none would
    be left, and for p above 1/2: floor(1/p) is 1 then and every layer would go.
    """
    check_count(layers, keep)
    going = layers - keep
    if 2 * going > layers:
        raise ValueError(
            f"every-other cannot prune {layers} layers to {keep}, fewer than half: use search"
        )
    period = layers // going if going else layers + 1  # floor(1/p), in whole numbers
    return [depth - 1 for depth in range(1, layers + 1) if depth % period]


def prune(model: Transformer, encoder: Sequence[int], decoder: Sequence[int]) -> Transformer:
    """Keeps exactly these layers of each stack, in place and in order; returns the model."""
    for stack, kept in ((model.encoder, encoder), (model.decoder, decoder)):
        check_count(len(stack.layers), len(kept))
        stack.layers = nn.ModuleList(stack.layers[i] for i in sorted(set(kept)))
    return model


def search(
    model: Transformer, encoder: int, decoder: int, score: Callable[[Transformer], float]
) -> Kept:
    """Which `encoder` and `decoder` layers to keep; the model is left as it was.

    Greedy: one layer after the other goes, from either stack, each time the one without which
    score(model) is lowest (validation loss or WER), the first of equals. With N layers of which d
    go, that asks for the score about d (N - d/2) times.
    """
    whole = (list(model.encoder.layers), list(model.decoder.layers))
    for layers, keep in zip(whole, (encoder, decoder), strict=True):
        check_count(len(layers), keep)

    def install(kept: Kept) -> None:
        for stack, layers, indices in zip((model.encoder, model.decoder), whole, kept, strict=True):
            stack.layers = nn.ModuleList(layers[i] for i in indices)

    def scored(kept: Kept) -> float:
        install(kept)
        return score(model)

    kept = everything = (list(range(len(whole[0]))), list(range(len(whole[1]))))
    try:
        while trials := _one_fewer(kept, encoder, decoder):
            kept = min(trials, key=scored)
    finally:
        install(everything)
    return kept


def check_count(layers: int, keep: int) -> None:
    """ValueError where `keep` of a stack's `layers` cannot be kept."""
    if keep < 1:
        raise ValueError(f"pruning {layers} layers to {keep} would leave no layer: keep at least 1")
    if keep > layers:
        raise ValueError(f"pruning cannot keep {keep} layers: the stack has {layers}")


def residual_alphas(model: Transformer) -> dict[str, float]:
    """The model's alphas as a residual_scale setting, whatever the setting was."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return {name: stack.layers[0].around_feed_forward.alpha for name, stack in stacks.items()}


def _one_fewer(kept: Kept, encoder: int, decoder: int) -> list[Kept]:
    """Every choice with one layer less, from a stack that still has too many."""
    trials = []
    if len(kept[0]) > encoder:
        trials += [([i for i in kept[0] if i != gone], kept[1]) for gone in kept[0]]
    if len(kept[1]) > decoder:
        trials += [(kept[0], [i for i in kept[1] if i != gone]) for gone in kept[1]]
    return trials
