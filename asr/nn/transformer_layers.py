"""Encoder and decoder layers of the Transformer (Vaswani et al. 2017, figure 1), and stacks.

Each sublayer (attention, cross-attention, feed-forward) stands in a Residual, which normalises
once: before the sublayer (`pre`) or after the addition (`post`); see asr/nn/residual.py. Layers are
put together from their parts; `residual()` makes a new Residual for each sublayer.

What each attention may see:

    encoder self-attention    the real frames of the utterance
    decoder self-attention    the token itself and those before it; right padding is never before
    cross-attention           the real frames of the memory

Shapes: B utterances, T frames, U tokens, K hypotheses, E size, L layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from asr.nn.activation import make_activation
from asr.nn.convolution import ConvolutionModule
from asr.nn.drop import VShape, kept_layers
from asr.nn.dropout import Dropout, check_rate
from asr.nn.multihead import CrossAttention, KeyValue, SelfAttention
from asr.nn.norm import make_norm
from asr.nn.residual import Residual, Scale


class FeedForward(nn.Sequential):
    """W_2 dropout(activation(W_1 x)), the same at every place: (..., E) -> (..., E).

    Weights start Xavier-normal with `gain`, biases at 0.
    """

    def __init__(
        self,
        size: int,
        hidden: int,
        activation: str = "relu",
        dropout: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        wide, narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        super().__init__(wide, make_activation(activation), Dropout(dropout), narrow)
        for linear in (wide, narrow):
            nn.init.xavier_normal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)


class EncoderLayer(nn.Module):
    """Self-attention, a convolution module where one is given, then feed-forward."""

    def __init__(
        self,
        self_attention: SelfAttention,
        feed_forward: FeedForward,
        residual: Callable[[], Residual],
        convolution: ConvolutionModule | None = None,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.around_self_attention = residual()
        self.convolution = convolution
        self.around_convolution = None if convolution is None else residual()
        self.feed_forward = feed_forward
        self.around_feed_forward = residual()

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (B, T, E), valid (B, 1, 1, T) bool -> (B, T, E)."""
        around = self.around_self_attention
        x = around.leave(x, self.self_attention(around.enter(x), valid))
        if self.convolution is not None:
            around = self.around_convolution
            x = around.leave(x, self.convolution(around.enter(x), valid[:, 0, 0]))
        around = self.around_feed_forward
        return around.leave(x, self.feed_forward(around.enter(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the memory, feed-forward."""

    def __init__(
        self,
        self_attention: SelfAttention,
        cross_attention: CrossAttention,
        feed_forward: FeedForward,
        residual: Callable[[], Residual],
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.around_self_attention = residual()
        self.cross_attention = cross_attention
        self.around_cross_attention = residual()
        self.feed_forward = feed_forward
        self.around_feed_forward = residual()

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """All tokens at once: x (B, U, E), valid (B, 1, 1, T) -> (B, U, E), weights (B, U, T).

        `memory` is what this layer's cross_attention.project made. The weights only on request.
        """

        def look_back(y: Tensor) -> Tensor:
            return self.self_attention(y, causal=True)

        return self._sublayers(x, look_back, memory, valid, need_weights)

    def step(
        self, x: Tensor, past: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """One more token of every hypothesis: x (B, K, E) -> (B, K, E), weights (B, K, T) or None.

        past (U, B*K, 2, E) as for SelfAttention.step. The K hypotheses of an utterance are K
        queries to its one memory.
        """

        def look_back(y: Tensor) -> Tensor:
            return self.self_attention.step(y.flatten(0, 1), past).view_as(y)

        return self._sublayers(x, look_back, memory, valid, need_weights)

    def _sublayers(
        self,
        x: Tensor,
        look_back: Callable[[Tensor], Tensor],
        memory: KeyValue,
        valid: Tensor,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        around = self.around_self_attention
        x = around.leave(x, look_back(around.enter(x)))
        around = self.around_cross_attention
        seen, weights = self.cross_attention(around.enter(x), memory, valid, need_weights)
        x = around.leave(x, seen)
        around = self.around_feed_forward
        return around.leave(x, self.feed_forward(around.enter(x))), weights


class Stack(nn.Module):
    """Layers, and the norm that a pre-norm stack ends with (`post`: none).

    layer_drop is LayerDrop's rate.
    """

    def __init__(
        self, layers: Iterable[nn.Module], last_norm: nn.Module | None, layer_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.last_norm = nn.Identity() if last_norm is None else last_norm
        self.layer_drop = check_rate("layer_drop", layer_drop)
        self.choice_seed: tuple[int, ...] | None = None
        self.draw: Callable[[], float] | None = None

    def choose_by(self, *seed: int) -> None:
        """From the next step on LayerDrop's choices depend on (seed, step) alone.

        Processes that train one model together leave out the same layers then, though what else
        they draw differs.
        """
        self.choice_seed = seed

    def set_step(self, step: int) -> None:
        """Tells LayerDrop the training step, counted from 0."""
        if self.choice_seed is not None:
            self.draw = np.random.default_rng([*self.choice_seed, step]).random

    def passing(self) -> Iterator[nn.Module]:
        """All layers; in training those that LayerDrop leaves for this pass."""
        return kept_layers(self.layers, self.layer_drop if self.training else 0.0, self.draw)


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What all layers of a Transformer share, each an argument of Transformer.

    dropout: on every sublayer output; attention_dropout: on attention weights;
    feed_forward_dropout: behind the activation; drop_head: a rate or a VShape.
    activation: relu | gelu | swish; norm: layer | rms | scale; norm_position: pre | post.
    encoder_windows: where its heads look first, as asr/nn/windows.py takes it.
    encoder_convolution: frames that a convolution module behind self-attention sees; odd.
    """

    heads: int = 4
    feed_forward: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    drop_head: float | VShape = 0.0
    activation: str = "relu"
    norm: str = "layer"
    norm_position: str = "pre"
    encoder_windows: Mapping[str, Any] | None = None
    encoder_convolution: int | None = None

    def encoder(self, size: int, count: int, scale: Scale, layer_drop: float) -> Stack:
        """A stack of `count` encoder layers of this size."""
        parts = (partial(SelfAttention, windows=self.encoder_windows),)
        layers = [
            EncoderLayer(*self._parts(size, scale, parts), self._convolution(size, scale))
            for _ in range(count)
        ]
        return Stack(layers, self._last_norm(size), layer_drop)

    def decoder(self, size: int, count: int, scale: Scale, layer_drop: float) -> Stack:
        """A stack of `count` decoder layers of this size."""
        parts = (SelfAttention, CrossAttention)
        layers = [DecoderLayer(*self._parts(size, scale, parts)) for _ in range(count)]
        return Stack(layers, self._last_norm(size), layer_drop)

    def _parts(
        self, size: int, scale: Scale, attentions: tuple[Callable[..., nn.Module], ...]
    ) -> Iterator[Any]:
        for attention in attentions:
            yield attention(size, self.heads, self.attention_dropout, self.drop_head, scale.gain)
        yield FeedForward(
            size, self.feed_forward, self.activation, self.feed_forward_dropout, scale.gain
        )
        yield partial(Residual, size, self.norm, self.norm_position, scale.alpha, self.dropout)

    def _convolution(self, size: int, scale: Scale) -> ConvolutionModule | None:
        if self.encoder_convolution is None:
            return None
        return ConvolutionModule(size, self.encoder_convolution, self.norm, scale.gain)

    def _last_norm(self, size: int) -> nn.Module | None:
        return make_norm(self.norm, size) if self.norm_position == "pre" else None
