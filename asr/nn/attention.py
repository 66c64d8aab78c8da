"""How a speller looks back over the memory: additive, dot-product or location-aware attention.

Bahdanau et al. 2015 (additive), Luong et al. 2015 (dot product, scaled as in Vaswani et al. 2017),
Chorowski et al. 2015, equation 9 (location-aware). Location-aware attention here reads, beside the
last step's weights, their running sum: what was written already tells a repeat from a new word.

B utterances, K hypotheses per utterance, T frames of memory, E encoder size, Q query size,
A attention size. Keys are made once per utterance and shared by its hypotheses.

On a CPU the C++ of asr/nn/kernels/cpu/attention.h computes what is here written with torch.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.nn.kernels import choice
from asr.nn.kernels.cpu import attention as cpu
from asr.nn.kernels.problem import Setting
from asr.nn.memory import Memory

KINDS = ("additive", "dot", "location")
ANY_LSTM = Setting("none", eps=0.0)  # to ask for the backend that LSTMs would get


class Look(NamedTuple):
    """One step's weights and the sum of all steps' so far, each (B, K, T)."""

    weights: Tensor
    total: Tensor


class Attention(nn.Module):
    """Weights over the memory for a query.

    `reach` is how many frames to each side location-aware attention reads of its past weights.
    `backend` is chosen as an LSTM's (asr/nn/kernels/choice.py): all but cpu, and auto where that
    is cpu, mean torch's operators.
    Raises ValueError for an unknown kind, or a backend that does not exist or cannot run.
    """

    def __init__(
        self,
        kind: str,
        memory_size: int,
        query_size: int,
        size: int,
        filters: int = 10,
        reach: int = 25,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = choice.check_name(backend)
        if kind not in KINDS:
            raise ValueError(f"attention {kind!r} is unknown: choose one of {', '.join(KINDS)}")
        self.kind = kind
        self.to_key = nn.Linear(memory_size, size)
        self.to_query = nn.Linear(query_size, size, bias=False)
        if kind == "location":
            self.conv = nn.Conv1d(2, filters, 2 * reach + 1, padding=reach, bias=False)
            # Weights of one frame are far below 1 at first: torch's own start would drown them.
            nn.init.normal_(self.conv.weight, std=0.5)
            self.to_place = nn.Linear(filters, size, bias=False)
        if kind != "dot":
            self.to_energy = nn.Linear(size, 1, bias=False)

    def keys(self, memory: Memory) -> Tensor:
        """(B, T, A), to be made once per utterance; of the memory's dtype under autocast too."""
        return self.to_key(memory.states).to(memory.states.dtype)

    def forward(self, query: Tensor, keys: Tensor, valid: Tensor, past: Look) -> Look:
        """query (B, K, Q), keys (B, T, A), valid (B, T) -> this step's look.

        Each row of weights sums to 1 over the valid frames.
        """
        wanted = self.to_query(query)  # (B, K, A)
        if self.runs_in_cpp(keys, *past):
            return Look(*cpu.look(self._given(wanted.to(keys.dtype), keys, past), valid))
        if self.kind == "dot":
            energy = wanted @ keys.transpose(1, 2) / math.sqrt(keys.size(-1))  # (B, K, T)
        else:
            energy = self._energy(self._mixed(wanted, keys, past))
        weights = energy.masked_fill(~valid.unsqueeze(1), -torch.inf).softmax(dim=-1)
        return Look(weights, past.total + weights)

    def runs_in_cpp(self, *tensors: Tensor) -> bool:
        """Do the C++ kernels compute this on these? Raises UserError where they must but cannot."""
        if self.kind == "dot":
            return False
        like = self.to_energy.weight
        if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
            return False
        if any(t.dtype != like.dtype or t.device != like.device for t in tensors):
            return False
        return choice.choose(self.backend, ANY_LSTM, like) == "cpu"

    def _given(self, wanted: Tensor, keys: Tensor, past: Look) -> cpu.Given:
        return cpu.Given(keys, wanted, self.to_energy.weight, *past, *self.location_weights())

    def location_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """(A, C) and (C, 2, W), of C filters with W taps; without location None twice."""
        if self.kind != "location":
            return None, None
        return self.to_place.weight, self.conv.weight

    def _mixed(self, wanted: Tensor, keys: Tensor, past: Look) -> Tensor:
        """wanted (B, K, A), keys (B, T, A) -> (B, K, T, A), the largest tensor of a search.

        It is added up in place: fresh memory for each sum costs more than the sums.
        """
        wanted, keys = wanted.unsqueeze(2), keys.unsqueeze(1)
        if self.kind == "additive":
            return wanted + keys
        return self._places(past).add_(keys).add_(wanted)

    def _energy(self, mixed: Tensor) -> Tensor:
        """v . tanh(mixed), (B, K, T, A) -> (B, K, T), up to a sum that softmax does not see.

        tanh(x) = 2 sigmoid(2 x) - 1, and on a CPU torch's sigmoid takes a sixth of tanh's time.
        In half precision the sigmoid would round small x away.
        """
        if mixed.device.type == "cpu" and mixed.dtype in (torch.float32, torch.float64):
            return 2 * self.to_energy(mixed.mul_(2).sigmoid_()).squeeze(-1)
        return self.to_energy(mixed.tanh_()).squeeze(-1)

    def _places(self, past: Look) -> Tensor:
        """What was looked at before, as (B, K, T, A)."""
        B, K, T = past.weights.shape
        seen = torch.stack([past.weights, past.total], dim=2).view(B * K, 2, T)
        return self.to_place(self.conv(seen).transpose(1, 2)).view(B, K, T, -1)


def first_look(memory: Memory) -> Look:
    """Where attention stands before the first step: on the first frame, each (B, 1, T).

    A start that is a place, not a uniform blur, tells location-aware attention where to begin.
    """
    start = torch.zeros_like(memory.valid, dtype=memory.states.dtype).unsqueeze(1)
    start[..., 0] = 1.0
    return Look(start, start)
