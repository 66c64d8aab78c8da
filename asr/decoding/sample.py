"""Sentences drawn from a model, token by token: what it believes, not what is likeliest."""

import torch

from asr.decoding.search import NEVER, Scorer, checked
from asr.nn.memory import Memory
from asr.tokens import EOS, SOS


@torch.no_grad()
def sample(
    model: Scorer,
    count: int,
    longest: int,
    chance: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """`count` sentences of at most `longest` tokens, without <sos> and <eos>.

    The random numbers are drawn on the CPU, so that they are the same on every device. Raises
    UserError where the model gives NaN.
    """
    if count == 0:
        return []
    nothing = torch.ones(count, 1, dtype=torch.bool, device=device)
    state = model.start(Memory(torch.zeros(count, 1, 1, device=device), nothing))
    token = torch.full((count, 1), SOS, device=device)
    said = []
    for _ in range(longest):
        log_probs, state = model.step(state, token)
        log_probs = checked(log_probs)
        never = torch.tensor(NEVER, device=device)
        probs = log_probs[:, 0].index_fill(1, never, -torch.inf).exp()  # (count, V)
        token = torch.multinomial(probs.float().cpu(), 1, generator=chance).to(device)
        said.append(token)
    return [_before_the_end(row) for row in torch.cat(said, dim=1).tolist()]


def _before_the_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens
