"""Learned layers between the features of a pretrained encoder and a model: ESPnet's preencoder.

In turn, each only if a recipe asks for it: the encoder itself, where it is trained with the model;
a weighted sum of its layers (Yang et al. 2021, arXiv:2105.01051, section 3); normalisation and
SpecAugment, where features before the encoder have none; a linear layer.

B utterances, T frames, L layers of the encoder, F features.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Change = Callable[[Tensor], Tensor]  # of one utterance, (T, F) -> (T, F)


class Frontend(nn.Module):
    """features (B, T, F), lengths (B,) -> inputs (B, T', size) of the model, lengths (B,).

    size_in: of the features, or of the encoder's output. encoder: a module of features and lengths,
    with output_lengths. layers: that are summed, 1 for no sum. normalise, mask: of the encoder's
    output, mask in training only.
    """

    def __init__(
        self,
        size_in: int,
        encoder: nn.Module | None = None,
        layers: int = 1,
        normalise: Change | None = None,
        mask: Change | None = None,
        project: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.normalise, self.mask = encoder, normalise, mask
        self.layer_weights = nn.Parameter(torch.zeros(layers)) if layers > 1 else None
        self.size = size_in // layers
        self.project = nn.Linear(self.size, project) if project else None
        self.size = project or self.size

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of output for `lengths` frames of features."""
        return lengths if self.encoder is None else self.encoder.output_lengths(lengths)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As the class says; the output is finite, but not meaningful, after an utterance's end."""
        x = features
        if self.encoder is not None:
            x, lengths = self.encoder(features, lengths)
            x = self._change(x, lengths)
        if self.layer_weights is not None:
            parts = x.unflatten(-1, (len(self.layer_weights), -1))  # (B, T, L, F)
            x = torch.einsum("btlf,l->btf", parts, self.layer_weights.softmax(0).to(x.dtype))
        if self.project is not None:
            x = self.project(x)
        return x, lengths

    def _change(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Normalise and mask each utterance, without its padding."""
        changes = [self.normalise, self.mask if self.training else None]
        rows = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
        for change in filter(None, changes):
            rows = [change(row) if len(row) else row for row in rows]
        return pad_sequence(rows, batch_first=True)
