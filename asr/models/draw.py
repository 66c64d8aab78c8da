"""DRAW: a Deep Recurrent Attentive Writer (Gregor et al. 2015, arXiv:1502.04623).

An image is drawn on a canvas in T glimpses; at each, with x the image and h the hidden states,

    x_hat = x - sigmoid(canvas)                                                   eq. 3
    r     = read(x, x_hat, h_dec)                                                 eq. 4, 27
    h_enc = LSTM(h_enc, [r, h_dec])                                               eq. 5
    z     ~ N(mean(h_enc), sigma(h_enc))                                          eq. 1, 2, 6
    h_dec = LSTM(h_dec, z)                                                        eq. 7
    canvas += write(h_dec)                                                        eq. 8, 29

The variational bound in nats per image: -log p(x | canvas) + sum_t KL(q(z_t) || N(0, 1)),
eq. 9 to 12. Ba et al. 2016 (section 6.5) put a LayerNorm-LSTM in both places, as here.

B images of R rows and C columns, T glimpses, N points along a side of a window, Z latent size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.nn.lstm import LayerNormLSTMCell
from asr.nn.lstm_cell import State


class Window(NamedTuple):
    """A grid of N x N Gaussian filters over an image, and the strength of what is read there."""

    rows: Tensor  # (B, N, R)  each filter sums to 1
    columns: Tensor  # (B, N, C)
    strength: Tensor  # (B, 1, 1)

    def read(self, image: Tensor) -> Tensor:
        """image (B, R, C) -> patch (B, N, N)."""
        return self.strength * (self.rows @ image @ self.columns.transpose(1, 2))

    def write(self, patch: Tensor) -> Tensor:
        """patch (B, N, N) -> image (B, R, C)."""
        return self.rows.transpose(1, 2) @ patch @ self.columns / self.strength


def place_window(wanted: Tensor, points: int, rows: int, columns: int) -> Window:
    """wanted (B, 5): centre x and y, log variance, log distance, log strength (eq. 19 to 26).

    A filter is a softmax over the pixels: the paper's normalised Gaussian without its division
    by nearly nothing where the window has left the image.
    """
    x, y, log_variance, log_distance, log_strength = wanted.unsqueeze(-1).unbind(1)  # (B, 1)
    distance = (max(rows, columns) - 1) / (points - 1) * log_distance.exp()
    offset = torch.arange(points, device=wanted.device) - (points - 1) / 2
    filters = []
    for centre, size in ((y, rows), (x, columns)):
        means = (size + 1) / 2 * (centre + 1) + offset * distance  # (B, N), the first pixel is 1
        pixel = torch.arange(1, size + 1, device=wanted.device)
        apart = (pixel - means.unsqueeze(-1)).square()  # (B, N, size)
        filters.append((-apart / (2 * log_variance.exp().unsqueeze(-1))).softmax(-1))
    return Window(*filters, log_strength.exp().unsqueeze(-1))


class Drawing(NamedTuple):
    """The two parts of the bound, in nats."""

    reconstruction: Tensor  # (B,)  -log p(x | canvas)
    divergence: Tensor  # (B, T)  KL of each glimpse


class Draw(nn.Module):
    """DRAW over black and white images of rows x columns.

    `encoder` and `decoder` are the arguments of their LayerNormLSTMCell: hidden_size, norm, eps.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        encoder: Mapping[str, Any],
        decoder: Mapping[str, Any],
        glimpses: int = 64,
        latent: int = 100,
        read: int = 2,
        write: int = 5,
    ) -> None:
        super().__init__()
        self.size, self.glimpses, self.points = (rows, columns), glimpses, (read, write)
        told = decoder["hidden_size"]
        self.encoder = LayerNormLSTMCell(2 * read**2 + told, **encoder)
        self.decoder = LayerNormLSTMCell(latent, **decoder)
        self.to_latent = nn.Linear(self.encoder.hidden_size, 2 * latent)  # mean, log sigma
        self.to_read = nn.Linear(told, 5)
        self.to_write = nn.Linear(told, 5)
        self.to_patch = nn.Linear(told, write**2)
        # The first state and canvas are learned (section 2.1). They begin at 0, where zero_rows
        # "guard" of a normed encoder lets no gradient through: then its first state stays there.
        self.first_encoder = nn.Parameter(torch.zeros(self.encoder.hidden_size))
        self.first_decoder = nn.Parameter(torch.zeros(told))
        self.first_canvas = nn.Parameter(torch.zeros(rows, columns))

    def set_step(self, step: int) -> None:
        """Told the training step, counted from 0; nothing here changes with it."""

    def forward(self, images: Tensor) -> Drawing:
        """images (B, R, C) of 0 and 1 -> the bound's parts; z is drawn once per glimpse."""
        encoder, decoder, canvas = self._start(len(images))
        divergences = []
        for _ in range(self.glimpses):
            window = place_window(self.to_read(decoder[0]), self.points[0], *self.size)
            seen = [window.read(image).flatten(1) for image in (images, images - canvas.sigmoid())]
            encoder = self.encoder(torch.cat([*seen, decoder[0]], dim=1), encoder)
            mean, log_sigma = self.to_latent(encoder[0]).chunk(2, dim=1)  # (B, Z)
            z = mean + log_sigma.exp() * torch.randn_like(mean)
            divergences.append(divergence(mean, log_sigma))
            decoder, canvas = self._write(z, decoder, canvas)
        misses = functional.binary_cross_entropy_with_logits(canvas, images, reduction="none")
        return Drawing(misses.flatten(1).sum(1), torch.stack(divergences, dim=1))

    def sample(self, count: int) -> Tensor:
        """New images, glimpse by glimpse: (T, count, R, C), each pixel's probability of white."""
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
        h, points = decoder[0], self.points[1]
        window = place_window(self.to_write(h), points, *self.size)
        return decoder, canvas + window.write(self.to_patch(h).view(-1, points, points))


def divergence(mean: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(mean, sigma) || N(0, 1)), summed over the last dimension (eq. 11)."""
    squares = mean.square() + (2 * log_sigma).exp() - 2 * log_sigma - 1
    return squares.sum(-1) / 2
