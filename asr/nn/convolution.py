"""What stands near a frame: the Conformer's convolution module (Gulati et al. 2020, section 2.2).

Self-attention weighs all frames alike until it has learned not to; a depthwise convolution over a
few of them is given it from the start:

    y = W_2 swish(norm(depthwise(GLU(W_1 x))))

The paper's norm is BatchNorm. Here it is the model's own, over the channels of one frame: it joins
the axis that is compared, and an utterance hears nothing of its batch mates or of padding.

Shapes: B utterances, T frames, E size.
"""

from torch import Tensor, nn

from asr.nn.norm import make_norm


class ConvolutionModule(nn.Module):
    """x (B, T, E) -> (B, T, E); each frame sees kernel // 2 frames to either side.

    norm: layer | rms | scale. Raises ValueError for an even kernel, which has no middle.
    """

    def __init__(self, size: int, kernel: int, norm: str = "layer", gain: float = 1.0) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"convolution over {kernel} frames: take an odd number")
        self.gated = nn.Sequential(nn.Linear(size, 2 * size), nn.GLU(dim=-1))
        # Two-dimensional over (T, 1): that keeps the channels last in memory, which takes a fifth
        # of Conv1d's time on a CPU.
        self.depthwise = nn.Conv2d(size, size, (kernel, 1), padding=(kernel // 2, 0), groups=size)
        self.norm = make_norm(norm, size)
        self.activation = nn.SiLU()
        self.out = nn.Linear(size, size)
        for linear in (self.gated[0], self.out):
            nn.init.xavier_normal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (B, T, E), valid (B, T) bool -> (B, T, E); padding is zero to its neighbours."""
        if x.size(1) == 0:  # a convolution refuses an empty time axis
            return x
        x = self.gated(x).masked_fill(~valid.unsqueeze(-1), 0.0)
        x = self.depthwise(x.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)
        return self.out(self.activation(self.norm(x)))
