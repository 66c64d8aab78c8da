"""Multi-head attention (Vaswani et al. 2017, section 3.2.2), on scaled_dot_product_attention.

    head_h = softmax(Q_h K_h' / sqrt(E/H)) V_h,   output = W_o [head_1 .. head_H]

Two faces over one computation: SelfAttention makes query, key and value with one fused projection,
CrossAttention keeps those of the memory apart so that search computes them once per utterance.
A place that may see nothing (a mask row without True) gets zeros, never NaN.

Shapes: B utterances, Q queries, T keys, H heads, E size, D = E/H.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.nn.drop import DropHead, VShape
from asr.nn.dropout import Dropout
from asr.nn.windows import Windows

KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each (B, H, T, D)."""


def attention_weights(
    query: Tensor, keys: Tensor, valid: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """query (B, H, Q, D), keys (B, H, T, D), valid bool like (B, 1, 1 or Q, T) -> (B, H, Q, T).

    `bias` (H, Q, T) is added to the scores.
    """
    scores = (query * query.size(-1) ** -0.5) @ keys.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if valid is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min  # not -inf: a row of those would be NaN
    scores = scores + torch.zeros_like(valid, dtype=scores.dtype).masked_fill_(~valid, lowest)
    return scores.softmax(-1) * valid.any(-1, keepdim=True).to(scores.dtype)


class _MultiHead(nn.Module):
    """What both kinds of attention share: heads, dropouts, output projection.

    dropout is on the attention weights, drop_head on the heads. Weights start Xavier-normal, with
    `gain` (DeepNet's beta) on values and output; biases at 0. ValueError where heads do not divide
    size.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        dropout: float = 0.0,
        drop_head: float | VShape = 0.0,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        if heads < 1 or size % heads:
            raise ValueError(f"model size {size} is not divisible by heads {heads}")
        self.heads = heads
        self.dropout = Dropout(dropout)
        self.drop_head = DropHead(drop_head)
        self.out = _projections(size, gain)

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
        """-> (B, H, Q, D). `causal` excludes `valid`: right padding lies in the future anyway.

        It excludes `bias` (H, Q, T) too, whose gradient torch's kernels do not give.
        """
        keys, values = memory
        if bias is not None:
            assert not causal, f"bias {tuple(bias.shape)} would let causal attention see the future"
            return self.dropout(attention_weights(query, keys, valid, bias)) @ values
        if self.training and query.device.type == "cpu" and self._is_cheaper_by_hand(query):
            if causal:
                valid = torch.ones(query.size(2), keys.size(2), dtype=torch.bool).tril()
            return self.dropout(attention_weights(query, keys, valid)) @ values
        rate = self.dropout.rate if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, keys, values, valid, dropout_p=rate, is_causal=causal
        )

    def _is_cheaper_by_hand(self, query: Tensor) -> bool:
        """torch's CPU kernel has no dropout and falls back to this, with a dearer dropout.

        In bf16 its backward pass takes four to sixteen times as long as products that AMX computes.
        """
        return self.dropout.rate > 0.0 or query.dtype == torch.bfloat16


class SelfAttention(_MultiHead):
    """Every place looks at the places of its own sequence.

    windows: where the heads look first, as Windows takes it; not for causal attention.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        dropout: float = 0.0,
        drop_head: float | VShape = 0.0,
        gain: float = 1.0,
        windows: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(size, heads, dropout, drop_head, gain)
        self.windows = None if windows is None else Windows(heads, **windows)
        self.query_key_value = _projections(size, 1.0, 1.0, gain)

    def forward(self, x: Tensor, valid: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (B, T, E) -> (B, T, E).

        valid (B, 1, 1, T) bool: the places that may be seen. With `causal` (and no `valid`) place t
        sees 0 .. t.
        """
        query, keys, values = map(self._split, self.query_key_value(x).chunk(3, -1))
        bias = None if self.windows is None else self.windows(x.size(1))
        return self._merge(self._attend(query, (keys, values), valid, causal, bias))

    def step(self, x: Tensor, past: Tensor) -> Tensor:
        """One more place of N sequences, in evaluation.

        x (N, E); past (T, N, 2, E): keys and values of all places so far, the last of which this
        call fills in for x -> (N, E).
        """
        query, key_value = self.query_key_value(x).tensor_split((x.size(-1),), -1)
        past[-1] = key_value.unflatten(-1, (2, -1))
        keys, values = (self._split(past[:, :, i].transpose(0, 1)) for i in range(2))
        heads = self._attend(self._split(query.unsqueeze(1)), (keys, values), None)
        return self._merge(heads)[:, 0]


class CrossAttention(_MultiHead):
    """Every place looks at a memory: queries from here, keys and values from there."""

    def __init__(
        self,
        size: int,
        heads: int,
        dropout: float = 0.0,
        drop_head: float | VShape = 0.0,
        gain: float = 1.0,
    ) -> None:
        super().__init__(size, heads, dropout, drop_head, gain)
        self.query = _projections(size, 1.0)
        self.key_value = _projections(size, 1.0, gain)

    def project(self, memory: Tensor) -> KeyValue:
        """memory (B, T, E) -> its keys and values, each (B, H, T, D)."""
        keys, values = map(self._split, self.key_value(memory).chunk(2, -1))
        return keys, values

    def forward(
        self, x: Tensor, memory: KeyValue, valid: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, Q, E), memory as from `project`, valid (B, 1, 1, T) -> (B, Q, E), weights.

        The weights (B, Q, T), mean over the heads and before any dropout, only on request.
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
