"""Attention of the LAS speller over the encoder's memory: additive, dot-product, location-aware.

With query s, memory h_t, past weights alpha and their running sum:

    additive   e_t = v . tanh(W s + V h_t)                  Bahdanau et al. 2015
    dot        e_t = (W s) . (V h_t) / sqrt(A)              Luong et al. 2015; Vaswani et al. 2017
    location   e_t = v . tanh(W s + V h_t + U f_t),         Chorowski et al. 2015, equations 8 and 9
               f = F * [alpha, sum of all alpha]
    weights = softmax of e over the valid frames

We differ once: location-aware attention also reads the running sum of the weights, which separates
a repeated word from a new one. asr/kernels computes it: in torch's operators (reference.py), in C++
(cpu/attention.h) and in Triton (cuda/triton_attention.py).

B utterances, K hypotheses per utterance, T frames of memory, E encoder size, Q query size,
A attention size. Keys V h_t are computed once per utterance; its hypotheses share them.
Masks are called `valid`; True means real.
"""

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
    # Apple's GPUs may read the lengths after they have gone.
    lengths = lengths.to(device, non_blocking=device.type != "mps")
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


class Attention(nn.Module):
    """Weights over the memory for a query; kind: additive, dot or location.

    `filters` and `reach` (frames to each side) are for location-aware attention.
    `backend` as for an LSTM (asr/kernels/dispatch.py).
    Raises ValueError for a backend that does not exist or cannot run.
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
        _, v, weight_loc, conv = self.matrices()
        inputs = AttentionInput(keys, query, v, *past, weight_loc, conv)
        return AttentionState(*self.kernels.attend(inputs, valid))

    def matrices(self) -> tuple[Tensor | None, ...]:
        """W (A, Q), v (1, A), U (A, C), F (C, 2, W) for C filters of W taps; None if the kind has
        none.
        """
        W = self.to_query.weight
        if self.kind == "dot":
            return W, None, None, None
        if self.kind == "additive":
            return W, self.to_energy.weight, None, None
        return W, self.to_energy.weight, self.to_place.weight, self.conv.weight


def initial_attention(memory: Memory) -> AttentionState:
    """The state before the first step: all weight on the first frame, each (B, 1, T).

    Uniform weights would not show location-aware attention where to start.
    """
    start = torch.zeros_like(memory.valid, dtype=memory.states.dtype).unsqueeze(1)
    start[..., 0] = 1.0
    return AttentionState(start, start)
