"""Strided convolutions that shorten the features before an encoder, with exact lengths.

Every convolution has stride s, kernel 2s - 1 and s - 1 zeros on both sides, in time and in
frequency, so a length T becomes ceil(T / s). Places behind an utterance's end are set to 0 before
every convolution: they are then what the convolution's own padding would be, and an utterance gives
the same result alone, in a batch, or behind any padding (NaN included).

Shapes: B utterances, T frames, F features, C channels, T' and F' the shortened lengths.
"""

from torch import Tensor, nn

from asr.nn.activation import make_activation
from asr.nn.masks import valid_places

STRIDES = {2: (2,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}


class ConvSubsampling(nn.Module):
    """Two-dimensional convolutions (time, frequency), then one linear layer to `size_out`.

    `factor` is 2, 4, 6 or 8; another one raises ValueError.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        factor: int = 4,
        channels: int = 32,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if factor not in STRIDES:
            raise ValueError(f"subsampling factor {factor} is unknown: choose 2, 4, 6 or 8")
        self.factor = factor
        self.strides = STRIDES[factor]
        inputs = (1,) + (channels,) * (len(self.strides) - 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(c, channels, 2 * s - 1, s, padding=s - 1)
            for c, s in zip(inputs, self.strides, strict=True)
        )
        self.activation = make_activation(activation)
        for stride in self.strides:
            size_in = _shorten(size_in, stride)
        self.out = nn.Linear(channels * size_in, size_out)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames that are left of `lengths` frames; any integer shape, 0 stays 0."""
        for stride in self.strides:
            lengths = _shorten(lengths, stride)
        return lengths

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, T, F), lengths (B,) -> states (B, T', size_out), lengths (B,).

        States behind an utterance's end are finite and mean nothing.
        """
        if features.size(1) == 0:  # a convolution refuses an empty time axis
            return features.new_zeros(len(features), 0, self.out.out_features), lengths
        valid = valid_places(lengths, features.size(1)).unsqueeze(-1)  # (B, T, 1)
        # Filled, not multiplied: NaN times 0 is NaN.
        x = features.masked_fill(~valid, 0.0).unsqueeze(-1)  # (B, T, F, 1)
        x = x.permute(0, 3, 1, 2)  # (B, 1, T, F), channels last in memory: half the time on a CPU
        for conv, stride in zip(self.convs, self.strides, strict=True):
            lengths = _shorten(lengths, stride)
            x = conv(x)  # (B, C, T', F')
            kept = valid_places(lengths, x.size(2))[:, None, :, None].to(x.dtype)
            # Multiplied here, for x is finite and masked_fill's backward pass loses channels last.
            x = self.activation(x.mul_(kept))  # every activation maps 0 to 0
        return self.out(x.permute(0, 2, 3, 1).flatten(2)), lengths


def _shorten(length: Tensor | int, stride: int) -> Tensor | int:
    """ceil(length / stride)."""
    return (length + stride - 1) // stride
