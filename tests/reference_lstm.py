"""Slow LSTM loops written from the papers: one utterance, one frame, one gate at a time.

These functions share only parameter names with asr.nn. Ba et al. 2016, eq. 20-22 is `ba`; the
other settings are described in the docstring of asr/kernels/reference.py.
"""

import torch
from torch.nn import functional


def layer_norm(z, eps, guard):
    variance = (z - z.mean()).square().mean()
    if guard and bool((z == z[0]).all()):
        return torch.zeros_like(z)
    return (z - z.mean()) / (variance + eps).sqrt()


def cell_step(x, h, c, w, norm, eps, guard, mask=None):
    """x (I,), h and c (H,) -> the next h and c. w: a dict of parameters by name."""
    H = len(h)
    if norm == "thesis":
        h, c = c, h
    from_x, from_h = w["weight_ih"] @ x, w["weight_hh"] @ h
    bias = w["bias_ih"] + w["bias_hh"]
    if norm == "ba":
        from_x = layer_norm(from_x, eps, guard) * w["gain_ih"]
        from_h = layer_norm(from_h, eps, guard) * w["gain_hh"]
    if norm in ("raw", "thesis"):
        from_x, from_h = layer_norm(from_x, eps, guard), layer_norm(from_h, eps, guard)
    gates = [(from_x + from_h)[k * H : (k + 1) * H] for k in range(4)]
    if norm == "per_gate":
        gains = [w["gain_gates"][k * H : (k + 1) * H] for k in range(4)]
        gates = [layer_norm(z, eps, guard) * g for z, g in zip(gates, gains, strict=True)]
    i, f, g, o = (z + bias[k * H : (k + 1) * H] for k, z in enumerate(gates))
    candidate = torch.tanh(g) if mask is None else torch.tanh(g) * mask
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * candidate
    shown = c if norm == "none" else layer_norm(c, eps, guard) * w["gain_c"] + w["bias_c"]
    return torch.sigmoid(o) * torch.tanh(shown), shown if norm == "per_gate" else c


def run_layer(x, lengths, h0, c0, weights, norm, eps, guard=True, mask=None):
    """x (B, T, I), h0 and c0 (D, B, H), weights: a dict per direction -> output, h, c."""
    B, T, _ = x.shape
    D, _, H = h0.shape
    output = [[[torch.zeros(H, dtype=x.dtype)] * D for _ in range(T)] for _ in range(B)]
    ends = [[None] * B for _ in range(D)]
    for d in range(D):
        for b in range(B):
            h, c = h0[d, b], c0[d, b]
            frames = range(lengths[b]) if d == 0 else reversed(range(lengths[b]))
            for t in frames:
                drop = None if mask is None else mask[d, b]
                h, c = cell_step(x[b, t], h, c, weights[d], norm, eps, guard, drop)
                output[b][t][d] = h
            ends[d][b] = h, c
    stacked = torch.stack([torch.stack([torch.cat(f) for f in frames]) for frames in output])
    h, c = (torch.stack([torch.stack([e[k] for e in row]) for row in ends]) for k in (0, 1))
    return stacked, h, c


def naive_layer_norm_loop(x, w, eps):
    """Naive: nn.LayerNorm in a loop over frames: x (B, T, I) -> (B, T, H). Norm ba."""
    H = w["weight_hh"].shape[1]
    h = c = x.new_zeros(x.shape[0], H)
    outputs = []
    for frame in x.unbind(1):
        from_x = functional.layer_norm(frame @ w["weight_ih"].T, (4 * H,), w["gain_ih"], eps=eps)
        from_h = functional.layer_norm(h @ w["weight_hh"].T, (4 * H,), w["gain_hh"], eps=eps)
        gates = from_x + from_h + w["bias_ih"] + w["bias_hh"]
        i, f, g, o = gates.chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * functional.layer_norm(c, (H,), w["gain_c"], w["bias_c"], eps).tanh()
        outputs.append(h)
    return torch.stack(outputs, dim=1)
