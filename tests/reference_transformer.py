"""The Transformer's equations as slow loops, written from the papers, in float64.

One utterance and one position at a time; no batch, no mask: a position attends to the list that is
passed. These functions import nothing of asr/ and take weights as plain tensors.
"""

import math

import torch
from torch.nn import functional

EPS = 1e-6


def layer_norm(x, gain, bias):
    """Ba, Kiros & Hinton 2016: biased variance. x (E,)."""
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return (x - mean) / torch.sqrt(variance + EPS) * gain + bias


def rms_norm(x, gain):
    """Zhang & Sennrich 2019, equation 4."""
    return x / torch.sqrt(sum(value**2 for value in x) / len(x) + EPS) * gain


def scale_norm(x, g):
    """Nguyen & Salazar 2019, equation 5."""
    return g * x / torch.sqrt(sum(value**2 for value in x))


def bias_norm(x, bias, log_scale):
    """Yao et al. 2024, equation 4."""
    power = sum((value - b) ** 2 for value, b in zip(x, bias, strict=True)) / len(x) + EPS
    return x / torch.sqrt(power) * torch.exp(log_scale)


def dyt(x, alpha, gain, bias):
    """Zhu et al. 2025: no statistics."""
    rising, falling = torch.exp(alpha * x), torch.exp(-alpha * x)
    return gain * (rising - falling) / (rising + falling) + bias


def derf(x, alpha, shift, gain, bias):
    """Chen et al. 2025."""
    return gain * (1 - torch.special.erfc(alpha * x + shift)) + bias


def fixnorm(row):
    """Nguyen & Chiang 2018: a word vector of length 1."""
    return row / math.sqrt(sum(float(value) ** 2 for value in row))


def norm(kind, parameters, x):
    """x (T, E), each position separately; parameters in the norm's own order."""
    one = {
        "layer": layer_norm,
        "rms": rms_norm,
        "scale": scale_norm,
        "bias": bias_norm,
        "dyt": dyt,
        "derf": derf,
    }[kind]
    return torch.stack([one(place, *parameters) for place in x])


def attend(query, keys, values):
    """One query (D,) over keys and values (T, D): sum of softmax(q k / sqrt(D)) v."""
    scores = [(query @ key).item() / math.sqrt(len(query)) for key in keys]
    highest = max(scores)
    total = sum(math.exp(score - highest) for score in scores)
    context = torch.zeros_like(query)
    weights = [math.exp(score - highest) / total for score in scores]
    for weight, value in zip(weights, values, strict=True):
        context = context + weight * value
    return context, torch.tensor(weights, dtype=query.dtype)


def multi_head(queries, keys, values, heads, causal=False):
    """Projected queries (Q, E), keys and values (T, E) -> contexts (Q, E), mean weights (Q, T)."""
    size = queries.size(1) // heads
    contexts = torch.zeros_like(queries)
    weights = torch.zeros(len(queries), len(keys), dtype=queries.dtype)
    for q, query in enumerate(queries):
        seen = q + 1 if causal else len(keys)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            context, weight = attend(query[part], keys[:seen, part], values[:seen, part])
            contexts[q, part] = context
            weights[q, :seen] += weight / heads
    return contexts, weights


def sinusoid(place, size):
    """Vaswani et al. 2017, section 3.5: sine on even, cosine on odd elements."""
    row = []
    for i in range(size):
        angle = place / 10000 ** ((i - i % 2) / size)
        row.append(math.cos(angle) if i % 2 else math.sin(angle))
    return torch.tensor(row, dtype=torch.float64)


def rotated(x, heads):
    """x (T, E): each head's elements i and i + D/2 as a complex number, turned at every position.

    Su et al. 2021, equation 34.
    """
    size = x.size(1) // heads
    out = x.clone()
    for place in range(len(x)):
        for h in range(heads):
            for i in range(size // 2):
                a, b = h * size + i, h * size + i + size // 2
                angle = place / 10000 ** (2 * i / size)
                turned = complex(x[place, a], x[place, b]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                out[place, a], out[place, b] = turned.real, turned.imag
    return out


def residual(x, norms, position, alpha, sublayer, is_attention):
    """The new stream; norms: functions of (T, E), the second for `peri` alone."""
    first, *second = norms
    if position in ("pre", "sub"):
        return alpha * x + sublayer(first(x))
    if position == "post":
        return first(alpha * x + sublayer(x))
    if position == "peri":
        return alpha * x + second[0](sublayer(first(x)))
    if position == "reordered":
        return alpha * x + first(sublayer(x))
    if is_attention:
        return alpha * x + sublayer(x)
    return alpha * first(x) + sublayer(first(x))


def linear(x, weight, bias):
    return torch.stack([weight @ place + bias for place in x])


def feed_forward(x, w1, b1, w2, b2, activation=functional.relu):
    return linear(activation(linear(x, w1, b1)), w2, b2)
