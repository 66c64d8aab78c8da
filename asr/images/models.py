"""Two models of small images: a row classifier, and DRAW, which generates images.

The row classifier reads an image row by row with a LayerNorm-LSTM: the smallest model that shows
what a cell does.

DRAW (Deep Recurrent Attentive Writer, Gregor et al. 2015, arXiv:1502.04623) draws an image on a
canvas in T glimpses; at each, with x the image and h the hidden states,

    x_hat = x - sigmoid(canvas)                                                   eq. 3
    r     = read(x, x_hat, h_dec)                                                 eq. 4, 27
    h_enc = LSTM(h_enc, [r, h_dec])                                               eq. 5
    z     ~ N(mean(h_enc), sigma(h_enc))                                          eq. 1, 2, 6
    h_dec = LSTM(h_dec, z)                                                        eq. 7
    canvas += write(h_dec)                                                        eq. 8, 29

The variational bound in nats per image: -log p(x | canvas) + sum_t KL(q(z_t) || N(0, 1)),
eq. 9 to 12. As in Ba et al. 2016 (section 6.5), both LSTMs are LayerNorm-LSTMs.

B images of R rows and C columns, H hidden size, T glimpses, N filters along a side of a grid,
Z latent size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.images.config import DrawConfig, RowClassifierConfig
from asr.nn.dropout import Dropout
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell, State


class RowClassifier(nn.Module):
    """A LayerNorm-LSTM over the rows, and a linear layer on the output of the last row."""

    def __init__(self, columns: int, classes: int, config: RowClassifierConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.lstm = LayerNormLSTM(
            columns,
            config.hidden,
            config.layers,
            batch_first=True,
            dropout=config.dropout,
            norm=config.settings,
            recurrent_dropout=config.recurrent_dropout,
            backend=config.backend,
        )
        self.out = nn.Linear(config.hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, R, C) -> logits (B, classes)."""
        outputs, _ = self.lstm(images)  # (B, R, H)
        return self.out(self.dropout(outputs[:, -1]))


class GridPlacement(NamedTuple):
    """A grid of N x N Gaussian filters over an image, and the strength with which it reads."""

    rows: Tensor  # (B, N, R)  each filter sums to 1
    columns: Tensor  # (B, N, C)
    strength: Tensor  # (B, 1, 1)

    def read(self, image: Tensor) -> Tensor:
        """image (B, R, C) -> patch (B, N, N)."""
        return self.strength * (self.rows @ image @ self.columns.transpose(1, 2))

    def write(self, patch: Tensor) -> Tensor:
        """patch (B, N, N) -> image (B, R, C)."""
        return self.rows.transpose(1, 2) @ patch @ self.columns / self.strength


def place_grid(parameters: Tensor, points: int, rows: int, columns: int) -> GridPlacement:
    """parameters (B, 5): centre x and y, log variance, log distance, log strength (eq. 19 to 26).

    A filter is a softmax over the pixels: the paper's normalised Gaussian, without its division by
    almost 0 when the grid is outside the image.
    """
    x, y, log_variance, log_distance, log_strength = parameters.unsqueeze(-1).unbind(1)  # (B, 1)
    distance = (max(rows, columns) - 1) / (points - 1) * log_distance.exp()
    offset = torch.arange(points, device=parameters.device) - (points - 1) / 2
    filters = []
    for centre, size in ((y, rows), (x, columns)):
        means = (size + 1) / 2 * (centre + 1) + offset * distance  # (B, N), the first pixel is 1
        pixel = torch.arange(1, size + 1, device=parameters.device)
        squares = (pixel - means.unsqueeze(-1)).square()  # (B, N, size)
        filters.append((-squares / (2 * log_variance.exp().unsqueeze(-1))).softmax(-1))
    return GridPlacement(*filters, log_strength.exp().unsqueeze(-1))


class Drawing(NamedTuple):
    """The two parts of the bound, in nats."""

    reconstruction: Tensor  # (B,)  -log p(x | canvas)
    divergence: Tensor  # (B, T)  KL of each glimpse


class Draw(nn.Module):
    """DRAW over black and white images of rows x columns."""

    def __init__(self, rows: int, columns: int, config: DrawConfig) -> None:
        super().__init__()
        self.size, self.glimpses = (rows, columns), config.glimpses
        self.read_points, self.write_points = config.read, config.write
        encoder, decoder, latent = config.encoder.hidden, config.decoder.hidden, config.latent
        inputs = 2 * config.read**2 + decoder
        cells = [(inputs, config.encoder), (latent, config.decoder)]
        self.encoder, self.decoder = (
            LayerNormLSTMCell(size, cell.hidden, norm=cell.settings, backend=cell.backend)
            for size, cell in cells
        )
        self.to_latent = nn.Linear(encoder, 2 * latent)  # mean, log sigma
        self.to_read = nn.Linear(decoder, 5)
        self.to_write = nn.Linear(decoder, 5)
        self.to_patch = nn.Linear(decoder, config.write**2)
        # The first states and canvas are learned (section 2.1). They start at 0, where
        # zero_variance "guard" of a normed encoder blocks the gradient: its first state stays 0.
        self.first_encoder = nn.Parameter(torch.zeros(encoder))
        self.first_decoder = nn.Parameter(torch.zeros(decoder))
        self.first_canvas = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, images: Tensor) -> Drawing:
        """images (B, R, C) of 0 and 1 -> the parts of the bound; z is drawn once per glimpse."""
        encoder, decoder, canvas = self._start(len(images))
        divergences = []
        for _ in range(self.glimpses):
            grid = place_grid(self.to_read(decoder[0]), self.read_points, *self.size)
            errors = images - canvas.sigmoid()
            patches = [grid.read(image).flatten(1) for image in (images, errors)]
            encoder = self.encoder(torch.cat([*patches, decoder[0]], dim=1), encoder)
            mean, log_sigma = self.to_latent(encoder[0]).chunk(2, dim=1)  # (B, Z)
            z = mean + log_sigma.exp() * torch.randn_like(mean)
            divergences.append(divergence(mean, log_sigma))
            decoder, canvas = self._write(z, decoder, canvas)
        nats = functional.binary_cross_entropy_with_logits(canvas, images, reduction="none")
        return Drawing(nats.flatten(1).sum(1), torch.stack(divergences, dim=1))

    def sample(self, count: int) -> Tensor:
        """Generated images after each glimpse: (T, count, R, C), the probability of white."""
        _, decoder, canvas = self._start(count)
        canvases = []
        for _ in range(self.glimpses):
            z = torch.randn(count, self.decoder.input_size, device=canvas.device)
            decoder, canvas = self._write(z, decoder, canvas)
            canvases.append(canvas.sigmoid())
        return torch.stack(canvases)

    def _start(self, count: int) -> tuple[State, State, Tensor]:
        encoder, decoder = (
            (first.expand(count, -1), torch.zeros_like(first).expand(count, -1))
            for first in (self.first_encoder, self.first_decoder)
        )
        return encoder, decoder, self.first_canvas.expand(count, -1, -1)

    def _write(self, z: Tensor, decoder: State, canvas: Tensor) -> tuple[State, Tensor]:
        decoder = self.decoder(z, decoder)
        h, points = decoder[0], self.write_points
        grid = place_grid(self.to_write(h), points, *self.size)
        return decoder, canvas + grid.write(self.to_patch(h).view(-1, points, points))


def divergence(mean: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(mean, sigma) || N(0, 1)), summed over the last dimension (eq. 11)."""
    squares = mean.square() + (2 * log_sigma).exp() - 2 * log_sigma - 1
    return squares.sum(-1) / 2
