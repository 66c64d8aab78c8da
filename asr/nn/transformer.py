"""Layers of the Transformer (Vaswani et al. 2017): attention, residuals, feed-forward, stacks.

Multi-head attention (section 3.2.2), on scaled_dot_product_attention:

    head_h = softmax(Q_h K_h' / sqrt(E/H)) V_h,   output = W_o [head_1 .. head_H]

A query that may attend to nothing (a mask row without True) gets zeros, never NaN. Attention is to:

    encoder self-attention    the valid frames of the utterance
    decoder self-attention    the token and previous tokens, so never right padding
    cross-attention           the valid frames of the memory

The connection around a sublayer F, with the norm N (`model.norm_position`):

    pre         x <- alpha x + F(N(x))           Nguyen & Salazar 2019; Xiong et al. 2020
    post        x <- N(alpha x + F(x))           Vaswani et al. 2017
    peri        x <- alpha x + N'(F(N(x)))       Kim et al. 2025, arXiv:2502.02732
    reordered   x <- alpha x + N(F(x))           OLMo 2 (2025), arXiv:2501.00656
    hybrid      x <- alpha x + F(x)              attention, with norms of queries, keys and values
                x <- alpha N(x) + F(N(x))        others; Zhuo et al. 2025, arXiv:2503.04598
    sub         as pre, with one more norm before the output projection of attention and
                feed-forward; Wang et al. 2022, arXiv:2210.06423 (Magneto)

Dropout is applied to the output of F, before its norm. Except with `post`, nothing normalises the
stream after the last addition, so each stack ends with one more norm; `peri` also normalises the
input of the stack. alpha is 1 in these papers; DeepNet (Wang et al. 2022) raises it for `post`.
`depth_scaled` multiplies the norm's output in layer l = 1, 2, .. by 1/sqrt(l) (Sun et al. 2025,
arXiv:2502.05795). `qk_norm` normalises queries and keys, all heads together as in OLMo 2 (Henry et
al. 2020; Dehghani et al. 2023), so that attention scores stay bounded.

Shapes: B utterances, Q queries, T keys or frames, U tokens, K hypotheses, L layers, H heads,
E size, D = E/H.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.config.schema import PerStack, TransformerLayersConfig, WindowsConfig
from asr.nn.convolution import ConvolutionModule
from asr.nn.dropout import DropHead, Dropout, LayerDrop
from asr.nn.norm import make_norm
from asr.nn.positions import RotaryPositions

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
    """The common part of both kinds of attention: heads, norms, dropouts, output projection.

    Initial weights are Xavier-normal, with `gain` (DeepNet's beta) for values and output; biases 0.
    """

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = Dropout(config.attention_dropout)  # of attention weights
        self.drop_head = DropHead(config.drop_head)
        self.out = _projections(config.d_model, gain)
        hybrid = config.norm_position == "hybrid"
        self.query_norm = optional_norm(config, config.qk_norm or hybrid)
        self.key_norm = optional_norm(config, config.qk_norm or hybrid)
        self.value_norm = optional_norm(config, hybrid)
        self.inner_norm = optional_norm(config, config.norm_position == "sub")

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, H, T, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _merge(self, x: Tensor) -> Tensor:
        """(B, H, Q, D) -> (B, Q, E)."""
        return self.out(self.inner_norm(self.drop_head(x).transpose(1, 2).flatten(2)))

    def _attend(
        self,
        query: Tensor,
        memory: KeyValue,
        valid: Tensor | None,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """-> (B, H, Q, D). `causal` excludes `valid`, since right padding is in the future.

        It also excludes `bias` (H, Q, T), for which torch's kernels compute no gradient.
        """
        keys, values = memory
        if bias is not None:
            assert not causal, f"bias {tuple(bias.shape)} would let causal attention see the future"
            return self.dropout(attention_weights(query, keys, valid, bias)) @ values
        rate = self.dropout.rate if self.training else 0.0
        # On a CPU torch's kernel has no dropout; its fallback is the same with a slower dropout. In
        # bf16 its backward pass takes 4 to 16 times as long as products that AMX computes.
        slow = rate > 0.0 or (self.training and query.dtype == torch.bfloat16)
        if slow and query.device.type == "cpu":
            if causal:
                valid = torch.ones(query.size(2), keys.size(2), dtype=torch.bool).tril()
            return self.dropout(attention_weights(query, keys, valid)) @ values
        return functional.scaled_dot_product_attention(
            query, keys, values, valid, dropout_p=rate, is_causal=causal
        )


class SelfAttention(_MultiHead):
    """Attention of a sequence to itself, with a fused projection. windows: None if causal."""

    def __init__(
        self, config: TransformerLayersConfig, gain: float, windows: WindowsConfig | None
    ) -> None:
        super().__init__(config, gain)
        self.windows = None if windows is None else GaussianWindows(windows.offsets, windows.width)
        size = config.d_model // config.heads
        self.rotary = RotaryPositions(size) if config.positions == "rope" else None
        self.query_key_value = _projections(config.d_model, 1.0, 1.0, gain)

    def forward(self, x: Tensor, valid: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (B, T, E), valid (B, 1, 1, T) bool: positions to attend to -> (B, T, E).

        With `causal` (and no `valid`) position t attends to 0 .. t.
        """
        query, *memory = self._project(x, 0)
        bias = None if self.windows is None else self.windows(x.size(1))
        return self._merge(self._attend(query, tuple(memory), valid, causal, bias))

    def step(self, x: Tensor, past: Tensor) -> Tensor:
        """One more position of N sequences, in evaluation: x (N, E) -> (N, E).

        past (T, N, 2, E): all keys and values so far, the last of which this call computes from x.
        """
        query, keys, values = self._project(x.unsqueeze(1), past.size(0) - 1)
        past[-1] = torch.stack([part.transpose(1, 2).flatten(1) for part in (keys, values)], 1)
        keys, values = (self._split(past[:, :, i].transpose(0, 1)) for i in range(2))
        return self._merge(self._attend(query, (keys, values), None))[:, 0]

    def _project(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, E), from position `start` on -> query, keys and values, each (B, H, T, D)."""
        query, keys, values = self.query_key_value(x).chunk(3, -1)
        query, keys = self._split(self.query_norm(query)), self._split(self.key_norm(keys))
        if self.rotary is not None:
            query, keys = self.rotary(query, start), self.rotary(keys, start)
        return query, keys, self._split(self.value_norm(values))


class CrossAttention(_MultiHead):
    """Attention to a memory, whose keys and values search projects once per utterance."""

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        super().__init__(config, gain)
        self.query = _projections(config.d_model, 1.0)
        self.key_value = _projections(config.d_model, 1.0, gain)

    def project(self, memory: Tensor) -> KeyValue:
        """memory (B, T, E) -> its keys and values, each (B, H, T, D)."""
        keys, values = self.key_value(memory).chunk(2, -1)
        return self._split(self.key_norm(keys)), self._split(self.value_norm(values))

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, Q, E), memory as from `project`, valid (B, 1, 1, T) -> (B, Q, E), weights.

        The weights (B, Q, T), mean over the heads before any dropout, are None unless needed.
        """
        query = self._split(self.query_norm(self.query(x)))
        if not need_weights:
            return self._merge(self._attend(query, memory, valid)), None
        weights = attention_weights(query, memory[0], valid)
        return self._merge(self.dropout(weights) @ memory[1]), weights.mean(1)


def _projections(size: int, *gains: float) -> nn.Linear:
    """Square projections fused into one; `gains`: of the initial weights of each."""
    linear = nn.Linear(size, len(gains) * size)
    for block, gain in zip(linear.weight.data.split(size), gains, strict=True):
        nn.init.xavier_normal_(block, gain)
    nn.init.zeros_(linear.bias)
    return linear


def optional_norm(config: TransformerLayersConfig, wanted: bool) -> nn.Module:
    """The model's norm, of d_model elements, or the identity."""
    return make_norm(config.norm, config.d_model) if wanted else nn.Identity()


def extend_past(past: Tensor, rows: Tensor) -> Tensor:
    """The past (U, N, ...) of hypotheses `rows` (B, K) of N, with space for one more token."""
    extended = past.new_empty(past.size(0) + 1, rows.numel(), *past.shape[2:])
    torch.index_select(past, 1, rows.flatten(), out=extended[:-1])
    return extended


class LayerScales(NamedTuple):
    """The factors of a layer: alpha on the residual stream, gain of the initial feed-forward, value
    and output weights, and that of the norms' outputs (depth_scaled).
    """

    alpha: float
    gain: float = 1.0
    norm_output: float = 1.0


class Residual(nn.Module):
    """The connection around a sublayer, as above; with `hybrid` that of attention differs."""

    def __init__(
        self, config: TransformerLayersConfig, scales: LayerScales, is_attention: bool = False
    ) -> None:
        super().__init__()
        position = config.norm_position
        self.norm = optional_norm(config, not (is_attention and position == "hybrid"))
        self.out_norm = optional_norm(config, position == "peri")
        self.position = position
        self.alpha, self.norm_scale = scales.alpha, scales.norm_output
        self.dropout = Dropout(config.dropout)

    def wrap(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], share: float = 1.0) -> Tensor:
        """The new stream from the old one, both (..., E). share: factor of the output."""
        x, entering = self.enter(x)
        return self.leave(x, sublayer(entering), share)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream for the addition and the input of the sublayer, both (..., E)."""
        if self.position in ("post", "reordered"):
            return x, x
        normed = self.norm(x)
        if self.position == "hybrid":
            return normed, normed
        return x, normed if self.norm_scale == 1.0 else normed * self.norm_scale

    def leave(self, x: Tensor, output: Tensor, share: float = 1.0) -> Tensor:
        """The new stream from the old one and the sublayer's output, both (..., E)."""
        output = self.out_norm(self.dropout(output))
        if self.position == "reordered":
            output = self.norm(output)
        if share != 1.0:
            output = output * share
        stream = output.add(x, alpha=self.alpha)
        return self.norm(stream) if self.position == "post" else stream

    def extra_repr(self) -> str:
        return f"norm_position={self.position}, alpha={self.alpha}"


def layer_scales(
    setting: float | PerStack | Literal["deepnet"],
    position: str,
    encoder_layers: int,
    decoder_layers: int,
) -> tuple[LayerScales, LayerScales]:
    """The scales of the encoder and of the decoder.

    `setting` is one alpha, one for each stack, or `deepnet`, for `post`: with N encoder and
    M decoder layers (Wang et al. 2022, arXiv:2203.00555, figure 2, beta is our gain)

        encoder   alpha = 0.81 (N^4 M)^(1/16)   beta = 0.87 (N^4 M)^(-1/16)
        decoder   alpha = (3 M)^(1/4)           beta = (12 M)^(-1/4)

    The gains for the norm position `sub` (Wang et al. 2022, arXiv:2210.06423, figure 2):

        encoder   sqrt(log(3 M) log(2 N) / 3)
        decoder   sqrt(log(3 M))
    """
    if setting == "deepnet":
        depth = (encoder_layers**4 * decoder_layers) ** (1 / 16)
        decoder = LayerScales((3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25)
        return LayerScales(0.81 * depth, 0.87 / depth), decoder
    encoder_alpha, decoder_alpha = per_stack(setting)
    gains = 1.0, 1.0
    if position == "sub":
        outer = math.log(3 * decoder_layers)
        gains = math.sqrt(outer * math.log(2 * encoder_layers) / 3), math.sqrt(outer)
    return LayerScales(encoder_alpha, gains[0]), LayerScales(decoder_alpha, gains[1])


def per_stack(setting: float | PerStack) -> tuple[float, float]:
    """(encoder's, decoder's): one number for both, or one for each."""
    pair = isinstance(setting, PerStack)
    return (setting.encoder, setting.decoder) if pair else (setting, setting)


class FeedForward(nn.Sequential):
    """W_2 dropout(activation(W_1 x)), (..., E) -> (..., E). gain: of the initial weights."""

    def __init__(self, config: TransformerLayersConfig, gain: float) -> None:
        size, hidden = config.d_model, config.feed_forward
        wide, narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        dropout = Dropout(config.feed_forward_dropout)
        inner = [make_norm(config.norm, hidden)] if config.norm_position == "sub" else []
        super().__init__(wide, ACTIVATIONS[config.activation](), dropout, *inner, narrow)
        for linear in (wide, narrow):
            nn.init.xavier_normal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)


class EncoderLayer(nn.Module):
    """Self-attention, a convolution module unless `kernel` (frames) is None, feed-forward.

    A language model has the same layers with causal attention.
    """

    def __init__(
        self,
        config: TransformerLayersConfig,
        scales: LayerScales,
        windows: WindowsConfig | None,
        kernel: int | None,
        convolution_norm: str,
    ) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, scales.gain, windows)
        self.around_self_attention = Residual(config, scales, is_attention=True)
        # Created before the convolution, so that a seed gives the same weights without one.
        feed_forward = FeedForward(config, scales.gain)
        self.convolution = self.around_convolution = None
        if kernel is not None:
            size = config.d_model
            self.convolution = ConvolutionModule(size, kernel, convolution_norm, scales.gain)
            self.around_convolution = Residual(config, scales)
        self.feed_forward = feed_forward
        self.around_feed_forward = Residual(config, scales)

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

    def __init__(self, config: TransformerLayersConfig, scales: LayerScales) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, scales.gain, windows=None)
        self.around_self_attention = Residual(config, scales, is_attention=True)
        self.cross_attention = CrossAttention(config, scales.gain)
        self.around_cross_attention = Residual(config, scales, is_attention=True)
        self.feed_forward = FeedForward(config, scales.gain)
        self.around_feed_forward = Residual(config, scales)

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """All tokens at once: x (B, U, E), valid (B, 1, 1, T) -> (B, U, E), weights (B, U, T).

        `memory`: the result of this layer's cross_attention.project. weights: None unless needed.
        """
        attend = functools.partial(self.self_attention, causal=True)
        return self._sublayers(x, attend, memory, valid, need_weights)

    def step(self, x: Tensor, past: Tensor, memory: KeyValue, valid: Tensor) -> Tensor:
        """One more token of every hypothesis: x (B, K, E) -> (B, K, E).

        past (U, B*K, 2, E) as for SelfAttention.step; K hypotheses are K queries to one memory.
        """

        def attend(y: Tensor) -> Tensor:
            return self.self_attention.step(y.flatten(0, 1), past).view_as(y)

        return self._sublayers(x, attend, memory, valid, need_weights=False)[0]

    def _sublayers(
        self,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        memory: KeyValue,
        valid: Tensor,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        x = self.around_self_attention.wrap(x, attend)
        x, query = self.around_cross_attention.enter(x)
        context, weights = self.cross_attention(query, memory, valid, need_weights)
        x = self.around_cross_attention.leave(x, context)
        return self.around_feed_forward.wrap(x, self.feed_forward), weights


class Stack(nn.Module):
    """Layers, with LayerDrop at the rate `layer_drop`, and norms around them."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        first_norm: nn.Module,
        last_norm: nn.Module,
        layer_drop: float,
    ) -> None:
        super().__init__()
        self.first_norm = first_norm
        self.layers = nn.ModuleList(layers)
        self.last_norm = last_norm
        self.layer_drop = LayerDrop(layer_drop)

    def passing(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers of one pass, numbered from 1; in training LayerDrop skips some."""
        return self.layer_drop.passing(self.layers)


def make_stack(
    config: TransformerLayersConfig,
    count: int,
    scales: LayerScales,
    make: Callable[..., nn.Module],
    *settings: Any,
) -> Stack:
    """`count` layers by make(config, scales, *settings), and the norms around them.

    With depth_scaled the outputs of the norms in layer l have a factor of 1/sqrt(l).
    """
    layers = []
    for number in range(1, count + 1):
        if config.depth_scaled:
            scales = scales._replace(norm_output=number**-0.5)
        layers.append(make(config, scales, *settings))
    return Stack(layers, *norms_around(config), config.layer_drop)


def norms_around(config: TransformerLayersConfig) -> tuple[nn.Module, nn.Module]:
    """The norms of a stack's input and output, or identities."""
    first = optional_norm(config, config.norm_position == "peri")
    return first, optional_norm(config, config.norm_position != "post")
