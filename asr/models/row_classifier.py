"""An image read row by row by a LayerNorm-LSTM: the smallest model that shows what a cell does.

B images of R rows and C columns, H hidden size.
"""

from typing import Any

from torch import Tensor, nn

from asr.nn.dropout import Dropout
from asr.nn.lstm import LayerNormLSTM


class RowClassifier(nn.Module):
    """The last row's output, through a linear layer. `lstm` goes to the LayerNormLSTM."""

    def __init__(
        self,
        columns: int,
        classes: int,
        hidden: int = 128,
        layers: int = 1,
        dropout: float = 0.0,
        **lstm: Any,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.lstm = LayerNormLSTM(columns, hidden, layers, dropout=dropout, **lstm)
        self.out = nn.Linear(hidden, classes)

    def set_step(self, step: int) -> None:
        """Told the training step, counted from 0; nothing here changes with it."""

    def forward(self, images: Tensor) -> Tensor:
        """images (B, R, C) -> logits (B, classes)."""
        outputs, _ = self.lstm(images)  # (B, R, H)
        return self.out(self.dropout(outputs[:, -1]))
