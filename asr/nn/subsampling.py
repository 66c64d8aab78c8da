"""Strided convolutions that shorten the features before an encoder, with exact lengths.

Every convolution has stride s, kernel 2s - 1 and s - 1 zeros on both sides, in time and in
frequency, so a length T becomes ceil(T / s). Before every convolution the frames after an
utterance's end are set to 0, like the padding of the convolution. So the result does not depend on
other utterances in the batch or on the content of the padding, NaN included.

Shapes: B utterances, T frames, F features, C channels, T' and F' the shortened lengths.
"""

from torch import Tensor, nn

from asr.nn.attention import valid_mask

STRIDES = {2: (2,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}  # by the factor


class ConvSubsampling(nn.Module):
    """Two-dimensional convolutions (time, frequency) with ReLU, then one linear layer."""

    def __init__(self, size_in: int, size_out: int, factor: int, channels: int) -> None:
        super().__init__()
        self.strides = STRIDES[factor]
        inputs = (1,) + (channels,) * (len(self.strides) - 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(c, channels, 2 * s - 1, s, padding=s - 1)
            for c, s in zip(inputs, self.strides, strict=True)
        )
        self.activation = nn.ReLU()
        for stride in self.strides:
            size_in = _shorten(size_in, stride)
        self.out = nn.Linear(channels * size_in, size_out)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Output frames for `lengths` input frames, any integer shape; 0 stays 0."""
        for stride in self.strides:
            lengths = _shorten(lengths, stride)
        return lengths

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, T, F), lengths (B,) -> states (B, T', size_out), lengths (B,).

        States after the end of an utterance are finite but not meaningful.
        """
        if features.size(1) == 0:  # a convolution raises for an empty time axis
            return features.new_zeros(len(features), 0, self.out.out_features), lengths
        valid = valid_mask(lengths, features.size(1), features.device).unsqueeze(-1)  # (B, T, 1)
        # Filled, not multiplied: NaN times 0 is NaN.
        x = features.masked_fill(~valid, 0.0).unsqueeze(-1)  # (B, T, F, 1)
        x = x.permute(0, 3, 1, 2)  # (B, 1, T, F), channels last in memory: half the time on a CPU
        for conv, stride in zip(self.convs, self.strides, strict=True):
            lengths = _shorten(lengths, stride)
            x = conv(x)  # (B, C, T', F')
            kept = valid_mask(lengths, x.size(2), x.device)[:, None, :, None].to(x.dtype)
            # Multiplied: x is finite, and masked_fill's backward pass loses channels last.
            x = self.activation(x.mul_(kept))  # ReLU maps 0 to 0
        return self.out(x.permute(0, 2, 3, 1).flatten(2)), lengths


def _shorten(length: Tensor | int, stride: int) -> Tensor | int:
    """ceil(length / stride)."""
    return (length + stride - 1) // stride
