"""The Conformer's convolution module (Gulati et al. 2020, section 2.2).

Untrained self-attention weighs all frames equally; a depthwise convolution starts with the
neighbouring frames:

    y = W_2 swish(norm(depthwise(GLU(W_1 x))))

The paper's norm is BatchNorm (`batch`), over the valid frames of a batch. All others normalise the
channels of one frame, so that neither padding nor other utterances of the batch change the result.

Shapes: B utterances, T frames, E size.
"""

from torch import Tensor, nn

from asr.nn.norm import EPS, BatchNorm, make_norm


class ConvolutionModule(nn.Module):
    """x (B, T, E) -> (B, T, E); the context of a frame is kernel // 2 frames to each side.

    kernel: odd; norm: batch or one of make_norm; gain: of the linear layers' initial weights.
    """

    def __init__(self, size: int, kernel: int, norm: str, gain: float) -> None:
        super().__init__()
        self.gated = nn.Sequential(nn.Linear(size, 2 * size), nn.GLU(dim=-1))
        # Two-dimensional over (T, 1), which keeps the channels last in memory: a fifth of the time
        # of Conv1d on a CPU.
        self.depthwise = nn.Conv2d(size, size, (kernel, 1), padding=(kernel // 2, 0), groups=size)
        self.norm = BatchNorm(size, EPS) if norm == "batch" else make_norm(norm, size)
        self.activation = nn.SiLU()
        self.out = nn.Linear(size, size)
        for linear in (self.gated[0], self.out):
            nn.init.xavier_normal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (B, T, E), valid (B, T) bool -> (B, T, E); the convolution reads padding as zeros."""
        if x.size(1) == 0:  # a convolution raises for an empty time axis
            return x
        x = self.gated(x).masked_fill(~valid.unsqueeze(-1), 0.0)
        x = self.depthwise(x.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)
        x = self.norm(x, valid) if isinstance(self.norm, BatchNorm) else self.norm(x)
        return self.out(self.activation(x))
