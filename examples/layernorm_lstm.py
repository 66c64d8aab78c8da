"""LayerNormLSTM in the place of nn.LSTM: classify noisy waves by their frequency.

python examples/layernorm_lstm.py [--norm none] [--steps 200]
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from asr.nn.lstm import LayerNormLSTM

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--norm", default="ba", help="none is nn.LSTM")
options.add_argument("--steps", type=int, default=200)
args = options.parse_args()
torch.manual_seed(1)
lstm = LayerNormLSTM(1, 32, bidirectional=True, norm=args.norm)
head = nn.Linear(64, 4)
optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=5e-3)


def wave(kind: int) -> Tensor:
    time = torch.arange(float(torch.randint(20, 60, ()))) + 10 * torch.rand(())
    return (torch.sin(0.2 * (kind + 1) * time) + 0.5 * torch.randn(len(time))).unsqueeze(1)


for step in range(1, args.steps + 1):
    kinds = torch.randint(4, (16,))
    _, (h, _) = lstm(pack_sequence([wave(int(kind)) for kind in kinds], enforce_sorted=False))
    logits = head(torch.cat([*h], dim=1))  # (B, 64): both directions
    loss = nn.functional.cross_entropy(logits, kinds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        accuracy = (logits.argmax(1) == kinds).float().mean()
        print(f"step {step}  loss {loss:.3f}  accuracy {accuracy:.2f}")
