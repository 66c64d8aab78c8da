"""CTC at inner encoder layers (Lee & Watanabe 2021, arXiv:2102.03216), with self-conditioning.

The head of the last layer predicts from inner ones too. With self-conditioning (Nozaki & Komatsu
2021, arXiv:2104.02724, eq. 7) the layers after them read the predictions:

    z = softmax(head(x))        x <- x + W z + b

B utterances, T frames, E encoder size, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor, nn

from asr.config.schema import IntermediateCtcConfig
from asr.nn.norm import at_least_float32


def self_conditioning(
    config: IntermediateCtcConfig | None, vocabulary: int, size: int
) -> nn.Linear | None:
    """W and b; None where the recipe has no self-conditioning."""
    return nn.Linear(vocabulary, size) if config and config.self_conditioning else None


class IntermediateCTC:
    """The predictions of one pass over an encoder.

    head: states (B, T, E) -> logits (B, T, V).
    """

    def __init__(
        self,
        config: IntermediateCtcConfig | None,
        head: Callable[[Tensor], Tensor],
        conditioning: nn.Linear | None,
    ) -> None:
        # By number: torch.export may call a layer by a proxy of another identity.
        self.layers = config.layers if config else ()
        self.head, self.conditioning = head, conditioning
        self.log_probs: list[Tensor] = []  # (B, T, V) of each of these layers

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """The output (B, T, E) of layer `number`, counted from 1 -> the input of the next."""
        if number not in self.layers:
            return x
        log_probs = at_least_float32(self.head(x)).log_softmax(-1)
        self.log_probs.append(log_probs)
        if self.conditioning is None:
            return x
        return x + self.conditioning(log_probs.exp().to(x.dtype))
