"""Layers of the Transformer (Vaswani et al. 2017): attention, residuals, feed-forward, stacks.

Multi-head attention (section 3.2.2), on scaled_dot_product_attention:

    head_h = softmax(Q_h K_h' / sqrt(E/H)) V_h,   output = W_o [head_1 .. head_H]

A query that may attend to nothing (a mask row without True) gets zeros, never NaN.

    encoder self-attention    attends to the valid frames of the utterance
    decoder self-attention    to the token itself and those before it, so never to right padding
    cross-attention           to the valid frames of the memory

Every sublayer has exactly one norm, in its Residual:

    pre    x <- alpha x + dropout(sublayer(norm(x)))      Nguyen & Salazar 2019; Xiong et al. 2020
    post   x <- norm(alpha x + dropout(sublayer(x)))      Vaswani et al. 2017

With `pre` nothing normalises the stream itself, so each stack ends with one more norm. alpha is 1
in these papers; DeepNet (Wang et al. 2022) raises it.

Shapes: B utterances, Q queries, T keys or frames, U tokens, K hypotheses, L layers, H heads,
E size, D = E/H.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.config.schema import DropPerStack, PerStack, TransformerLayersConfig, WindowsConfig
from asr.nn.conformer import ConvolutionModule
from asr.nn.dropout import DropHead, Dropout
from asr.nn.norm import make_norm

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "swish": nn.SiLU}

KeyValue = tuple[Tensor, Tensor]  # keys and values, each (B, H, T, D)


def attention_weights(
    query: Tensor, keys: Tensor, valid: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """query (B, H, Q, D), keys (B, H, T, D), valid bool like (B, 1, 1 or Q, T), bias (H, Q, T)
    that is added to the scores -> (B, H, Q, T).
    """
    scores = (query * query.size(-1) ** -0.5) @ keys.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if valid is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min  # not -inf: a row of those would be NaN
    scores = scores + torch.zeros_like(valid, dtype=scores.dtype).masked_fill_(~valid, lowest)
    return scores.softmax(-1) * valid.any(-1, keepdim=True).to(scores.dtype)


LOWEST = -30.0  # exp(-30) is practically 0, and half precision can represent it


class GaussianWindows(nn.Module):
    """A learned Gaussian window per head: initial offsets (H), frames after the query; width."""

    def __init__(self, offsets: Sequence[float], width: float) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.tensor(offsets, dtype=torch.get_default_dtype()))
        self.log_widths = nn.Parameter(torch.full_like(self.offsets, width).log())

    def forward(self, length: int) -> Tensor:
        """The bias on the scores of `length` frames for each other: (H, T, T), -30 to 0."""
        frames = torch.arange(length, device=self.offsets.device, dtype=self.offsets.dtype)
        ahead = frames - frames.unsqueeze(1)  # (T, T), of key before query
        distance = (ahead - self.offsets[:, None, None]) / self.log_widths.exp()[:, None, None]
        return (distance.square() / -2).clamp_min(LOWEST)


class _MultiHead(nn.Module):
    """The common part of both kinds of attention: heads, dropouts, output projection.

    Weights start Xavier-normal, with `gain` (DeepNet's beta) on values and output; biases at 0.
    """

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = Dropout(config.attention_dropout)  # of attention weights
        self.drop_head = DropHead(config.drop_head)
        self.out = _projections(config.d_model, gain)

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, H, T, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _merge(self, x: Tensor) -> Tensor:
        """(B, H, Q, D) -> (B, Q, E)."""
        return self.out(self.drop_head(x).transpose(1, 2).flatten(2))

    def _attend(
        self,
        query: Tensor,
        memory: KeyValue,
        valid: Tensor | None,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """-> (B, H, Q, D). `causal` excludes `valid`, since right padding is in the future anyway.

        It also excludes `bias` (H, Q, T), of which torch's kernels compute no gradient.
        """
        keys, values = memory
        if bias is not None:
            assert not causal, f"bias {tuple(bias.shape)} would let causal attention see the future"
            return self.dropout(attention_weights(query, keys, valid, bias)) @ values
        rate = self.dropout.rate if self.training else 0.0
        # On a CPU torch's kernel has no dropout and falls back to the same with a slower dropout;
        # in bf16 its backward pass takes 4 to 16 times as long as products that AMX computes.
        slow = rate > 0.0 or (self.training and query.dtype == torch.bfloat16)
        if slow and query.device.type == "cpu":
            if causal:
                valid = torch.ones(query.size(2), keys.size(2), dtype=torch.bool).tril()
            return self.dropout(attention_weights(query, keys, valid)) @ values
        return functional.scaled_dot_product_attention(
            query, keys, values, valid, dropout_p=rate, is_causal=causal
        )


class SelfAttention(_MultiHead):
    """Attention of a sequence to itself, by a fused projection. windows: not if causal."""

    def __init__(
        self, config: TransformerLayersConfig, gain: float, windows: WindowsConfig | None
    ) -> None:
        super().__init__(config, gain)
        self.windows = None if windows is None else GaussianWindows(windows.offsets, windows.width)
        self.query_key_value = _projections(config.d_model, 1.0, 1.0, gain)

    def forward(self, x: Tensor, valid: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (B, T, E), valid (B, 1, 1, T) bool: positions to attend to -> (B, T, E).

        With `causal` (and no `valid`) position t attends to 0 .. t.
        """
        query, keys, values = map(self._split, self.query_key_value(x).chunk(3, -1))
        bias = None if self.windows is None else self.windows(x.size(1))
        return self._merge(self._attend(query, (keys, values), valid, causal, bias))

    def step(self, x: Tensor, past: Tensor) -> Tensor:
        """One more position of N sequences, in evaluation: x (N, E) -> (N, E).

        past (T, N, 2, E): all keys and values so far, the last of which this call computes from x.
        """
        query, key_value = self.query_key_value(x).tensor_split((x.size(-1),), -1)
        past[-1] = key_value.unflatten(-1, (2, -1))
        keys, values = (self._split(past[:, :, i].transpose(0, 1)) for i in range(2))
        heads = self._attend(self._split(query.unsqueeze(1)), (keys, values), None)
        return self._merge(heads)[:, 0]


class CrossAttention(_MultiHead):
    """Attention to a memory, whose keys and values search projects once per utterance."""

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        super().__init__(config, gain)
        self.query = _projections(config.d_model, 1.0)
        self.key_value = _projections(config.d_model, 1.0, gain)

    def project(self, memory: Tensor) -> KeyValue:
        """memory (B, T, E) -> its keys and values, each (B, H, T, D)."""
        return tuple(map(self._split, self.key_value(memory).chunk(2, -1)))

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, Q, E), memory as from `project`, valid (B, 1, 1, T) -> (B, Q, E), weights.

        The weights (B, Q, T), mean over the heads before any dropout, are None unless needed.
        """
        query = self._split(self.query(x))
        if not need_weights:
            return self._merge(self._attend(query, memory, valid)), None
        weights = attention_weights(query, memory[0], valid)
        return self._merge(self.dropout(weights) @ memory[1]), weights.mean(1)


def _projections(size: int, *gains: float) -> nn.Linear:
    """Square projections fused into one, with a gain of its own for the weights of each."""
    linear = nn.Linear(size, len(gains) * size)
    for block, gain in zip(linear.weight.data.split(size), gains, strict=True):
        nn.init.xavier_normal_(block, gain)
    nn.init.zeros_(linear.bias)
    return linear


def extend_past(past: Tensor, rows: Tensor) -> Tensor:
    """The past (U, N, ...) of the hypotheses `rows` (B, K) of N, with room for one more token."""
    extended = past.new_empty(len(past) + 1, rows.numel(), *past.shape[2:])
    torch.index_select(past, 1, rows.flatten(), out=extended[:-1])
    return extended


class Residual(nn.Module):
    """The connection around a sublayer."""

    def __init__(self, config: TransformerLayersConfig, alpha: float) -> None:
        super().__init__()
        self.norm = make_norm(config.norm, config.d_model)
        self.pre = config.norm_position == "pre"
        self.alpha = alpha
        self.dropout = Dropout(config.dropout)

    def wrap(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The new stream from the old one, both (..., E)."""
        return self.leave(x, sublayer(self.enter(x)))

    def enter(self, x: Tensor) -> Tensor:
        """The sublayer's input, (..., E)."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, output: Tensor) -> Tensor:
        """The new stream from the old one and the sublayer's output, both (..., E)."""
        stream = self.dropout(output).add(x, alpha=self.alpha)
        return stream if self.pre else self.norm(stream)

    def extra_repr(self) -> str:
        return f"norm_position={'pre' if self.pre else 'post'}, alpha={self.alpha}"


class ResidualScales(NamedTuple):
    """alpha on the residual stream; gain of the initial feed-forward, value and output weights."""

    alpha: float
    gain: float = 1.0


def residual_scales(
    setting: float | PerStack | Literal["deepnet"], encoder_layers: int, decoder_layers: int
) -> tuple[ResidualScales, ResidualScales]:
    """The scales of the encoder and of the decoder.

    `setting` is one alpha, one for each stack, or `deepnet`, meant for `post`: with N encoder and
    M decoder layers (Wang et al. 2022, arXiv:2203.00555, figure 2, beta is our gain)

        encoder   alpha = 0.81 (N^4 M)^(1/16)   beta = 0.87 (N^4 M)^(-1/16)
        decoder   alpha = (3 M)^(1/4)           beta = (12 M)^(-1/4)
    """
    if setting == "deepnet":
        depth = (encoder_layers**4 * decoder_layers) ** (1 / 16)
        decoder = ResidualScales((3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25)
        return ResidualScales(0.81 * depth, 0.87 / depth), decoder
    encoder_alpha, decoder_alpha = per_stack(setting)
    return ResidualScales(encoder_alpha), ResidualScales(decoder_alpha)


def per_stack(setting: float | PerStack | DropPerStack) -> tuple[float, float]:
    """(encoder's, decoder's) of one number for both, or of one for each."""
    pair = isinstance(setting, PerStack | DropPerStack)
    return (setting.encoder, setting.decoder) if pair else (setting, setting)


class FeedForward(nn.Sequential):
    """W_2 dropout(activation(W_1 x)), (..., E) -> (..., E). gain: of the initial weights."""

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        size, hidden = config.d_model, config.feed_forward
        wide, narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        dropout = Dropout(config.feed_forward_dropout)
        super().__init__(wide, ACTIVATIONS[config.activation](), dropout, narrow)
        for linear in (wide, narrow):
            nn.init.xavier_normal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)


class EncoderLayer(nn.Module):
    """Self-attention, a convolution module if `kernel` (frames) is given, feed-forward.

    A language model stacks the same layers with causal attention.
    """

    def __init__(
        self,
        config: TransformerLayersConfig,
        scale: ResidualScales,
        windows: WindowsConfig | None,
        kernel: int | None,
    ) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, scale.gain, windows)
        self.around_self_attention = Residual(config, scale.alpha)
        # Made before the convolution, so that the same seed gives the same weights as ever.
        feed_forward = FeedForward(config, scale.gain)
        self.convolution = self.around_convolution = None
        if kernel is not None:
            self.convolution = ConvolutionModule(config.d_model, kernel, config.norm, scale.gain)
            self.around_convolution = Residual(config, scale.alpha)
        self.feed_forward = feed_forward
        self.around_feed_forward = Residual(config, scale.alpha)

    def forward(self, x: Tensor, valid: Tensor | None, causal: bool = False) -> Tensor:
        """x (B, T, E), valid (B, 1, 1, T) bool, or None if causal -> (B, T, E)."""
        x = self.around_self_attention.wrap(x, lambda y: self.self_attention(y, valid, causal))
        if self.convolution is not None:
            x = self.around_convolution.wrap(x, lambda y: self.convolution(y, valid[:, 0, 0]))
        return self.around_feed_forward.wrap(x, self.feed_forward)

    def step(self, x: Tensor, past: Tensor) -> Tensor:
        """One more token of N sequences: x (N, E), past as for SelfAttention.step -> (N, E)."""
        x = self.around_self_attention.wrap(x, lambda y: self.self_attention.step(y, past))
        return self.around_feed_forward.wrap(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the memory, feed-forward."""

    def __init__(self, config: TransformerLayersConfig, scale: ResidualScales) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, scale.gain, windows=None)
        self.around_self_attention = Residual(config, scale.alpha)
        self.cross_attention = CrossAttention(config, scale.gain)
        self.around_cross_attention = Residual(config, scale.alpha)
        self.feed_forward = FeedForward(config, scale.gain)
        self.around_feed_forward = Residual(config, scale.alpha)

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """All tokens at once: x (B, U, E), valid (B, 1, 1, T) -> (B, U, E), weights (B, U, T).

        `memory`: the result of this layer's cross_attention.project. weights: None unless needed.
        """
        attend = functools.partial(self.self_attention, causal=True)
        return self._sublayers(x, attend, memory, valid, need_weights)

    def step(
        self, x: Tensor, past: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """One more token of every hypothesis: x (B, K, E) -> (B, K, E), weights (B, K, T) or None.

        past (U, B*K, 2, E) as for SelfAttention.step; K hypotheses are K queries to one memory.
        """

        def attend(y: Tensor) -> Tensor:
            return self.self_attention.step(y.flatten(0, 1), past).view_as(y)

        return self._sublayers(x, attend, memory, valid, need_weights)

    def _sublayers(
        self,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        memory: KeyValue,
        valid: Tensor,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        x = self.around_self_attention.wrap(x, attend)
        around = self.around_cross_attention
        context, weights = self.cross_attention(around.enter(x), memory, valid, need_weights)
        x = around.leave(x, context)
        return self.around_feed_forward.wrap(x, self.feed_forward), weights


class Stack(nn.Module):
    """Layers, with LayerDrop (Fan, Grave & Joulin 2019, arXiv:1909.11556), and the last norm.

    last_norm: for `pre`; None for `post`. layer_drop: the probability with which a pass in training
    skips a layer, for the whole batch; nothing is rescaled.
    """

    def __init__(
        self, layers: Iterable[nn.Module], last_norm: nn.Module | None, layer_drop: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.last_norm = nn.Identity() if last_norm is None else last_norm
        self.layer_drop = layer_drop
        self.choice_seed: tuple[int, ...] | None = None
        self.draw: Callable[[], float] | None = None  # uniform in [0, 1); None: torch's generator

    def choose_by(self, *seed: int) -> None:
        """From the next step on, draw LayerDrop's choices from (seed, step) alone.

        So processes that train one model together skip the same layers.
        """
        self.choice_seed = seed

    def set_step(self, step: int) -> None:
        """Set the training step of LayerDrop's choices, counted from 0."""
        if self.choice_seed is not None:
            self.draw = np.random.default_rng([*self.choice_seed, step]).random

    def passing(self) -> Iterator[nn.Module]:
        """The layers of one pass: in training without those that LayerDrop skips, else all."""
        rate = self.layer_drop if self.training else 0.0
        for layer in self.layers:
            if rate == 0.0 or (self.draw() if self.draw else torch.rand(())) >= rate:
                yield layer


def encoder_stack(
    config: TransformerLayersConfig,
    count: int,
    scale: ResidualScales,
    layer_drop: float,
    windows: WindowsConfig | None,
    kernel: int | None,
) -> Stack:
    """`count` encoder layers and their last norm."""
    layers = [EncoderLayer(config, scale, windows, kernel) for _ in range(count)]
    return Stack(layers, _last_norm(config), layer_drop)


def decoder_stack(
    config: TransformerLayersConfig, count: int, scale: ResidualScales, layer_drop: float
) -> Stack:
    """`count` decoder layers and their last norm."""
    layers = [DecoderLayer(config, scale) for _ in range(count)]
    return Stack(layers, _last_norm(config), layer_drop)


def _last_norm(config: TransformerLayersConfig) -> nn.Module | None:
    return make_norm(config.norm, config.d_model) if config.norm_position == "pre" else None
