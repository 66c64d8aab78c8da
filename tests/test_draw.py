"""DRAW's grids against slow loops over the paper's equations, its bound against torch's."""

import math

import pytest
import torch
from torch import distributions

from asr.images.config import DrawConfig
from asr.images.data import ImageBatch
from asr.images.models import Draw, divergence, place_grid
from asr.images.task import BoundObjective, bound_of


def slow_filters(wanted, points, rows, columns):
    """Gregor et al. 2015, eq. 19 to 26, one number at a time; i and a counted from 1."""
    x, y, log_variance, log_distance, log_strength = wanted.tolist()
    distance = (max(rows, columns) - 1) / (points - 1) * math.exp(log_distance)
    filters = []
    for size, centre in ((rows, y), (columns, x)):
        middle, table = (size + 1) / 2 * (centre + 1), []
        for i in range(1, points + 1):
            mean = middle + (i - points / 2 - 0.5) * distance
            row = [
                math.exp(-((a - mean) ** 2) / (2 * math.exp(log_variance)))
                for a in range(1, size + 1)
            ]
            table.append([value / sum(row) for value in row])
        filters.append(table)
    return *filters, math.exp(log_strength)


def test_a_grid_matches_the_paper():
    torch.manual_seed(1)
    wanted = 0.3 * torch.randn(3, 5, dtype=torch.float64)
    wanted[:, 3] -= 0.7
    image = torch.rand(3, 11, 7, dtype=torch.float64)
    grid = place_grid(wanted, 5, 11, 7)
    patch = grid.read(image)
    back = grid.write(patch)
    for b in range(3):
        rows, columns, strength = slow_filters(wanted[b], 5, 11, 7)
        for i in range(5):
            for j in range(5):
                seen = sum(
                    rows[i][r] * float(image[b, r, c]) * columns[j][c]
                    for r in range(11)
                    for c in range(7)
                )
                assert float(patch[b, i, j]) == pytest.approx(strength * seen, rel=1e-9)
        for r, c in ((0, 0), (4, 6), (10, 3)):
            written = sum(
                rows[i][r] * float(patch[b, i, j]) * columns[j][c]
                for i in range(5)
                for j in range(5)
            )
            assert float(back[b, r, c]) == pytest.approx(written / strength, rel=1e-9)  # eq. 29


def test_a_grid_that_left_the_image_is_finite():
    wanted = torch.tensor([[9.0, -9.0, -12.0, 0.0, 0.0]], requires_grad=True)
    grid = place_grid(wanted, 3, 8, 8)
    torch.testing.assert_close(grid.rows.sum(-1), torch.ones(1, 3))
    grid.read(torch.ones(1, 8, 8)).sum().backward()
    assert torch.isfinite(wanted.grad).all()


def test_divergence_matches_torch():
    torch.manual_seed(1)
    mean, log_sigma = torch.randn(3, 7), torch.randn(3, 7)
    ours = distributions.Normal(mean, log_sigma.exp())
    judge = distributions.kl_divergence(ours, distributions.Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(divergence(mean, log_sigma), judge)


def small():
    torch.manual_seed(1)
    cell = {"hidden": 5, "backend": "reference", "norm": "ba"}
    cells = {"encoder": cell, "decoder": {**cell, "hidden": 11}}
    return Draw(7, 3, DrawConfig(kind="draw", **cells, glimpses=4, latent=2))


def test_the_bound_is_the_sum_of_its_parts():
    model, images = small(), torch.randint(2, (5, 7, 3)).float()
    torch.manual_seed(2)
    drawing = model(images)
    assert drawing.reconstruction.shape == (5,) and drawing.divergence.shape == (5, 4)
    torch.manual_seed(2)
    bounds = bound_of(model, images)
    torch.manual_seed(2)
    sums = BoundObjective(model)(ImageBatch(("a",) * 5, images, torch.zeros(5).long()))
    torch.testing.assert_close(bounds, drawing.reconstruction + drawing.divergence.sum(1))
    for name in ("objective", "nll"):
        torch.testing.assert_close(sums[name].total, bounds.sum())
    assert sums["nll"].count == 5 and not sums["nll"].total.requires_grad


def test_reconstruction_is_a_bernoulli_of_the_canvas():
    model, images = small(), torch.randint(2, (5, 7, 3)).float()
    torch.nn.init.zeros_(model.to_patch.weight)
    torch.nn.init.zeros_(model.to_patch.bias)  # the first canvas is empty
    torch.nn.init.normal_(model.first_canvas)
    judge = distributions.Bernoulli(logits=model.first_canvas).log_prob(images).sum((1, 2))
    torch.testing.assert_close(model(images).reconstruction, -judge)
    drawn = model.sample(2)
    assert drawn.shape == (4, 2, 7, 3)
    torch.testing.assert_close(drawn[-1, 1], model.first_canvas.sigmoid())


@pytest.mark.slow
def test_draw_learns_two_images():
    model = small()
    objective = BoundObjective(model)
    images = torch.zeros(8, 7, 3)
    images[::2, :3], images[1::2, 4:] = 1.0, 1.0
    batch = ImageBatch(("a",) * 8, images, torch.zeros(8).long())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    first = float(objective(batch)["nll"].total) / 8
    for _ in range(100):
        optimizer.zero_grad()
        loss = objective(batch)["objective"].total / 8
        loss.backward()
        optimizer.step()
    assert first > 13.0  # about 21 pixels of log 2
    assert float(loss.detach()) < 0.6 * first
