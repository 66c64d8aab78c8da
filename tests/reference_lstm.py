"""Slow LSTM loops written from the papers: one utterance, one frame, one gate at a time.

These functions share only parameter names with asr.nn. Ba et al. 2016, eq. 20-22 is `ba`; the
other settings are described in the docstring of asr/kernels/reference.py.
"""

import torch
from torch.nn import functional

from asr.config.cell import CellSettings

NORMS = ["none", "ba", "raw", "thesis", "per_gate", "cell"]
# Name in the tests -> arguments of CellSettings: a sample of what they can be combined to.
VARIED = {
    "joined": {"norm": "joined"},
    "joined carried": {"norm": "joined", "cell_norm": "carried"},
    "joined state rms": {"norm": "joined", "cell_norm": "state", "norm_kind": "rms"},
    "joined hidden rms": {"norm": "joined", "hidden_norm": True, "norm_kind": "rms"},
    "ba without c": {"norm": "ba", "cell_norm": "none"},
    "ba state": {"norm": "ba", "cell_norm": "state"},
    "ba hidden": {"norm": "ba", "hidden_norm": True},
    "ba rms": {"norm": "ba", "norm_kind": "rms"},
    "per_gate output rms": {"norm": "per_gate", "cell_norm": "output", "norm_kind": "rms"},
    "per_gate state hidden": {"norm": "per_gate", "cell_norm": "state", "hidden_norm": True},
    "cell rms": {"norm": "cell", "norm_kind": "rms"},
}
SETTINGS = {norm: {"norm": norm} for norm in NORMS} | VARIED
CELLS = {name: CellSettings(**keys) for name, keys in SETTINGS.items()}


def default_eps(name):
    return {"none": 0.0, "raw": 1e-3, "thesis": 1e-3}.get(name, 1e-5)


def layer_norm(z, eps, guard):
    variance = (z - z.mean()).square().mean()
    if guard and bool((z == z[0]).all()):
        return torch.zeros_like(z)
    return (z - z.mean()) / (variance + eps).sqrt()


def rms_norm(z, eps, guard):
    if guard and bool((z == 0).all()):
        return torch.zeros_like(z)
    return z / ((z * z).mean() + eps).sqrt()


def cell_step(x, h, c, w, name, eps, guard, mask=None):
    """x (I,), h and c (H,) -> the next h and c. w: a dict of parameters by name."""
    H, keys = len(h), SETTINGS[name]
    norm = keys["norm"]
    kind = rms_norm if keys.get("norm_kind") == "rms" else layer_norm

    def normed(z):
        return kind(z, eps, guard)

    if norm == "thesis":
        h, c = c, h
    from_x, from_h = w["weight_ih"] @ x, w["weight_hh"] @ h
    bias = w["bias_ih"] + w["bias_hh"]
    if norm == "ba":
        from_x, from_h = normed(from_x) * w["gain_ih"], normed(from_h) * w["gain_hh"]
    if norm in ("raw", "thesis"):
        from_x, from_h = normed(from_x), normed(from_h)
    total = from_x + from_h
    if norm == "joined":
        total = normed(total) * w["gain_gates"]
    gates = [total[k * H : (k + 1) * H] for k in range(4)]
    if norm == "per_gate":
        gains = [w["gain_gates"][k * H : (k + 1) * H] for k in range(4)]
        gates = [normed(z) * g for z, g in zip(gates, gains, strict=True)]
    i, f, g, o = (z + bias[k * H : (k + 1) * H] for k, z in enumerate(gates))
    candidate = torch.tanh(g) if mask is None else torch.tanh(g) * mask
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * candidate
    fixed = {"none": "none", "joined": "none", "per_gate": "carried"}.get(norm, "output")
    cell_norm = keys.get("cell_norm", fixed)
    h, c = output_and_state(o, c, cell_norm, normed, w)
    if keys.get("hidden_norm"):
        h = normed(h) * w["gain_hidden"] + w["bias_hidden"]
    return h, c


def output_and_state(o, c, cell_norm, normed, w):
    """The output gate before its sigmoid and the new cell (H,) -> h and the next cell state."""
    o = torch.sigmoid(o)
    if cell_norm == "none":
        return o * torch.tanh(c), c
    normed_c = normed(c) * w["gain_c"] + w["bias_c"]
    if cell_norm == "output":
        return o * torch.tanh(normed_c), c
    if cell_norm == "carried":
        return o * torch.tanh(normed_c), normed_c
    return o * torch.tanh(c), normed_c


def run_layer(x, lengths, h0, c0, weights, name, eps, guard=True, mask=None):
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
                h, c = cell_step(x[b, t], h, c, weights[d], name, eps, guard, drop)
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
