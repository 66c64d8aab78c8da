"""The listener of Listen, Attend and Spell: features -> memory.

Chan et al. 2016 (arXiv:1508.01211), section 3.1: a stack of bidirectional LSTMs in which a
pyramid layer reads the frames of the layer below in pairs, so that the speller attends over fewer
frames. We differ in two ways: the last frame of an odd length is paired with zeros instead of
being dropped, and strided convolutions may stand in front.

B utterances, T frames, F features, H hidden size per direction, E = 2 H.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asr.nn.dropout import Dropout
from asr.nn.lstm import LayerNormLSTM
from asr.nn.masks import valid_places
from asr.nn.memory import Memory
from asr.nn.subsampling import ConvSubsampling


class Listener(nn.Module):
    """Pyramidal bidirectional LayerNorm-LSTM.

    `pyramid` names the layers, counted from 1, that read pairs. `norm` holds in all layers, in
    those of the pyramid, or in the first only (`norm_layers`); the others are plain. What is left
    (recurrent_dropout and the keys of asr/settings/lstm.py) goes to every LayerNormLSTM.
    """

    def __init__(
        self,
        features: int,
        layers: int = 4,
        hidden: int = 256,
        pyramid: Sequence[int] = (2, 3),
        convolution: int = 1,
        norm: str = "ba",
        norm_layers: str = "all",
        dropout: float = 0.0,
        **lstm: Any,
    ) -> None:
        super().__init__()
        self.pyramid = frozenset(pyramid)
        self.dropout = Dropout(dropout)
        self.front = ConvSubsampling(features, 2 * hidden, convolution) if convolution > 1 else None
        size = features if self.front is None else 2 * hidden
        self.layers = nn.ModuleList()
        for number in range(1, layers + 1):
            here = {"all": True, "pyramid": number in self.pyramid, "first": number == 1}
            pair = 2 if number in self.pyramid else 1
            layer_norm = norm if here[norm_layers] else "none"
            self.layers.append(
                LayerNormLSTM(size * pair, hidden, bidirectional=True, norm=layer_norm, **lstm)
            )
            size = 2 * hidden
        self.size = size

    def forward(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), lengths (B,) of at least 1 -> Memory, its padding zero."""
        x = features
        if self.front is not None:
            x, lengths = self.front(x, lengths)
        # Whatever stands in the padding (NaN, or the bias of the front) must not reach a pair.
        padding = ~valid_places(lengths, x.size(1))
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        for number, layer in enumerate(self.layers, start=1):
            if number in self.pyramid:
                x, lengths = join_pairs(x, lengths)
            x, _ = layer(x, lengths)  # (B, T', E), zero in the padding
            x = self.dropout(x)
        return Memory(x, valid_places(lengths, x.size(1)))

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of memory for that many frames of features."""
        if self.front is not None:
            lengths = self.front.output_lengths(lengths)
        for _ in self.pyramid:
            lengths = (lengths + 1) // 2
        return lengths


def join_pairs(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, E), zero in its padding -> (B, ceil(T / 2), 2 E), lengths halved upwards."""
    if x.size(1) % 2:
        x = torch.cat([x, x.new_zeros(x.size(0), 1, x.size(2))], dim=1)
    return x.reshape(x.size(0), x.size(1) // 2, 2 * x.size(2)), (lengths + 1) // 2
