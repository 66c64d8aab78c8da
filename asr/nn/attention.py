"""Attention of the LAS speller over the encoder's memory: additive, dot-product, location-aware.

With query s, memory h_t, past weights alpha and their running sum:

    additive   e_t = v . tanh(W s + V h_t)                  Bahdanau et al. 2015
    dot        e_t = (W s) . (V h_t) / sqrt(A)              Luong et al. 2015; Vaswani et al. 2017
    location   e_t = v . tanh(W s + V h_t + U f_t),         Chorowski et al. 2015, equations 8 and 9
               f = F * [alpha, sum of all alpha]
    weights = softmax of e over the valid frames

We differ once: location-aware attention also reads the running sum of the weights, which separates
a repeated word from a new one. On a CPU, asr/kernels/cpu/attention.h computes the same in C++.

B utterances, K hypotheses per utterance, T frames of memory, E encoder size, Q query size,
A attention size. Keys V h_t are computed once per utterance; its hypotheses share them.
Masks are called `valid`; True means real.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.config.cell import CellSettings
from asr.kernels import dispatch
from asr.kernels.types import AttentionInput


def valid_mask(lengths: Tensor, size: int, device: torch.device) -> Tensor:
    """The mask of right-padded sequences: lengths (B,), padded size T -> valid (B, T) bool.

    It is on `device`. Pass lengths on the CPU, so that the CPU never waits for the device.
    """
    lengths = lengths.to(device, non_blocking=True)
    return torch.arange(size, device=device) < lengths.unsqueeze(1)


def keeps_all(utterances: Tensor, count: int) -> bool:
    """Whether `utterances` are 0 .. count - 1, so that a search need not copy their states.

    False on a GPU, where reading the answer would wait for the device.
    """
    if utterances.device.type != "cpu" or len(utterances) != count:
        return False
    return torch.equal(utterances, torch.arange(count))


class Memory(NamedTuple):
    """Encoded utterances: states (B, T, E) and valid (B, T) bool, True where a frame is real."""

    states: Tensor
    valid: Tensor


class AttentionState(NamedTuple):
    """One step's weights and the sum of the weights of all steps so far, each (B, K, T)."""

    weights: Tensor
    total: Tensor


KINDS = ("additive", "dot", "location")


class Attention(nn.Module):
    """Weights over the memory for a query.

    `filters` and `reach` (frames to each side) are for location-aware attention.
    `backend` as for an LSTM (asr/kernels/dispatch.py): cpu, or auto if that selects cpu, computes
    in C++; all others use torch's operators.
    Raises ValueError for an unknown kind, or a backend that does not exist or cannot run.
    """

    def __init__(
        self,
        kind: str,
        memory_size: int,
        query_size: int,
        size: int,
        filters: int,
        reach: int,
        backend: str,
    ) -> None:
        super().__init__()
        self.kernels = dispatch.Kernels(backend, CellSettings("none"))
        if kind not in KINDS:
            raise ValueError(f"attention {kind!r} is unknown: choose one of {', '.join(KINDS)}")
        self.kind = kind
        self.to_key = nn.Linear(memory_size, size)
        self.to_query = nn.Linear(query_size, size, bias=False)
        if kind == "location":
            self.conv = nn.Conv1d(2, filters, 2 * reach + 1, padding=reach, bias=False)
            # Attention weights are far below 1 at first; torch's initialisation is too small.
            nn.init.normal_(self.conv.weight, std=0.5)
            self.to_place = nn.Linear(filters, size, bias=False)
        if kind != "dot":
            self.to_energy = nn.Linear(size, 1, bias=False)

    def keys(self, memory: Memory) -> Tensor:
        """Keys (B, T, A) in the memory's dtype, even with autocast. Compute them once per batch."""
        return self.to_key(memory.states).to(memory.states.dtype)

    def forward(
        self, query: Tensor, keys: Tensor, valid: Tensor, past: AttentionState
    ) -> AttentionState:
        """query (B, K, Q), keys (B, T, A), valid (B, T) -> this step's weights and the new total.

        Each row of weights sums to 1 over the valid frames.
        """
        query = self.to_query(query)  # (B, K, A)
        v, location, conv = self.energy_weights()
        inputs = AttentionInput(keys, query, v, *past, location, conv)
        if (result := self.kernels.attend(inputs, valid)) is not None:
            return AttentionState(*result)
        if self.kind == "dot":
            energy = query @ keys.transpose(1, 2) / math.sqrt(keys.size(-1))  # (B, K, T)
        else:
            energy = self._energy(self._sum(query, keys, past))
        weights = energy.masked_fill(~valid.unsqueeze(1), -torch.inf).softmax(dim=-1)
        return AttentionState(weights, past.total + weights)

    def energy_weights(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """v (1, A), U (A, C), F (C, 2, W) for C filters of W taps; None if the kind has none."""
        if self.kind == "dot":
            return None, None, None
        if self.kind == "additive":
            return self.to_energy.weight, None, None
        return self.to_energy.weight, self.to_place.weight, self.conv.weight

    def _sum(self, query: Tensor, keys: Tensor, past: AttentionState) -> Tensor:
        """query (B, K, A), keys (B, T, A) -> (B, K, T, A), the largest tensor of a search.

        Added in place, since allocating memory for each sum takes longer than the sums.
        """
        query, keys = query.unsqueeze(2), keys.unsqueeze(1)
        if self.kind == "additive":
            return query + keys
        B, K, T = past.weights.shape
        weights = torch.stack([past.weights, past.total], dim=2).view(B * K, 2, T)
        location = self.to_place(self.conv(weights).transpose(1, 2)).view(B, K, T, -1)
        return location.add_(keys).add_(query)

    def _energy(self, summed: Tensor) -> Tensor:
        """v . tanh(summed), (B, K, T, A) -> (B, K, T), up to a constant that softmax cancels.

        tanh(x) = 2 sigmoid(2 x) - 1; on a CPU torch's sigmoid takes a sixth of the time of tanh.
        In half precision the sigmoid would round small x to 0.
        """
        if summed.device.type == "cpu" and summed.dtype in (torch.float32, torch.float64):
            return 2 * self.to_energy(summed.mul_(2).sigmoid_()).squeeze(-1)
        return self.to_energy(summed.tanh_()).squeeze(-1)


def initial_attention(memory: Memory) -> AttentionState:
    """The state before the first step: all weight on the first frame, each (B, 1, T).

    Uniform weights would not show location-aware attention where to start.
    """
    start = torch.zeros_like(memory.valid, dtype=memory.states.dtype).unsqueeze(1)
    start[..., 0] = 1.0
    return AttentionState(start, start)
