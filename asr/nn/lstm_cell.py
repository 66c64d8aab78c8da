"""One time step of a LayerNorm-LSTM as a module, for decoders that feed their output back.

What the norms mean and where they come from: asr/nn/kernels/reference.py.
"""

import torch
from torch import Tensor, nn

from asr.nn.dropout import check_rate, draw_mask
from asr.nn.kernels import choice
from asr.nn.kernels.loop import LoopWeight
from asr.nn.kernels.problem import DEFAULT_EPS, NORMS, Setting, Weights, weight_shapes

State = tuple[Tensor, Tensor]


class LayerNormLSTMCell(nn.Module):
    """nn.LSTMCell with layer normalisation; the parameters keep its names and layout.

    eps None takes the norm's own (problem.DEFAULT_EPS). zero_rows "guard" normalises a row
    without variance to zero and passes no gradient there, "raw" keeps the textbook formula.
    recurrent_gain is where norm "ba" starts the gain of W_h h.
    Raises ValueError for a norm, zero_rows, precision or backend that does not exist.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        norm: str = "ba",
        *,
        recurrent_dropout: float = 0.0,
        eps: float | None = None,
        zero_rows: str = "guard",
        recurrent_gain: float = 1.0,
        precision: str = "fp32",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.setting = make_setting(norm, eps, zero_rows, precision)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.backend = choice.check_name(backend)
        add_weights(self, norm, input_size, hidden_size, recurrent_gain)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        weights: Weights | None = None,
    ) -> State:
        """x (B, I), state (h, c) each (B, H) or None for zeros -> the next (h, c).

        mask (B, H) is what dropout_mask gave, weights what loop_weights gave at the beginning of
        the sequence.
        Raises ValueError where a shape, dtype or device does not fit.
        """
        if x.dim() != 2 or x.shape[1] != self.input_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, {self.input_size})")
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.hidden_size, dtype=self.weight_hh.dtype)
            state = zeros, zeros
        weights = weights or get_weights(self, self.setting.norm)
        return choice.run_step(self.backend, x, state, mask, weights, self.setting)

    def loop_weights(self) -> Weights:
        """This cell's weights for one sequence of steps, their gradients faster (LoopWeight)."""
        weights = get_weights(self, self.setting.norm)
        matrices = (weights.weight_ih, weights.weight_hh)
        return weights._replace(
            **dict(zip(("weight_ih", "weight_hh"), map(LoopWeight, matrices), strict=True))
        )

    def dropout_mask(self, batch_size: int) -> Tensor | None:
        """A fresh recurrent-dropout mask (B, H) for one sequence; None where nothing is dropped."""
        if not self.training or self.recurrent_dropout == 0.0:
            return None
        return draw_mask(self.weight_hh, (batch_size, self.hidden_size), self.recurrent_dropout)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, norm={self.setting.norm!r}"


def make_setting(norm: str, eps: float | None, zero_rows: str, precision: str) -> Setting:
    """Checked Setting. Raises ValueError naming the value that is not known."""
    check_one_of("norm", norm, NORMS)
    check_one_of("zero_rows", zero_rows, ("guard", "raw"))
    check_one_of("precision", precision, ("fp32", "bf16"))
    if eps is not None and eps < 0:
        raise ValueError(f"eps is {eps}; it must not be negative")
    chosen = DEFAULT_EPS[norm] if eps is None else eps
    return Setting(norm, chosen, zero_rows == "guard", precision)


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not known; choose one of {', '.join(allowed)}")


def add_weights(
    module: nn.Module,
    norm: str,
    input_size: int,
    hidden_size: int,
    recurrent_gain: float,
    suffix: str = "",
) -> None:
    """Registers and initialises one direction's weights, called as in nn.LSTM."""
    for name, shape in weight_shapes(norm, input_size, hidden_size).items():
        module.register_parameter(name + suffix, nn.Parameter(torch.empty(shape)))
    reset_weights(get_weights(module, norm, suffix), recurrent_gain)


def get_weights(module: nn.Module, norm: str, suffix: str = "") -> Weights:
    """The weights that add_weights registered."""
    names = weight_shapes(norm, 1, 1)
    return Weights(**{name: getattr(module, name + suffix) for name in names})


@torch.no_grad()
def reset_weights(weights: Weights, recurrent_gain: float) -> None:
    """Xavier W_x, orthogonal W_h (each per gate), gains 1, biases 0 but for the forget gate's 1.

    A forget bias of 1 lets memory survive long utterances. Two biases are added, as in
    nn.LSTM; only one of them gets the 1. A norm gives W_h h the strength of the input from the
    first step on; a recurrent_gain below 1 lets the recurrence begin quietly (Cooijmans et al.
    2017, arXiv:1603.09025, for batch normalisation).
    """
    for block in weights.weight_ih.chunk(4):
        nn.init.xavier_uniform_(block)
    for block in weights.weight_hh.chunk(4):
        nn.init.orthogonal_(block)
    for name, weight in weights._asdict().items():
        if weight is not None and name.startswith(("bias", "gain")):
            weight.fill_(1.0 if name.startswith("gain") else 0.0)
    weights.bias_ih.chunk(4)[1].fill_(1.0)
    if weights.gain_hh is not None:
        weights.gain_hh.fill_(recurrent_gain)
