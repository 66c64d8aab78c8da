"""The Conformer's encoder layer (Gulati et al. 2020, arXiv:2005.08100, section 2.4).

    x <- x + F_1(x) / 2          feed-forward
    x <- x + attention(x)
    x <- x + convolution(x)
    x <- N(x + F_2(x) / 2)       feed-forward

Each sublayer is normalised as `model.norm_position` says (asr/nn/transformer.py); the paper's is
`pre`. With `post` there is no last norm, since the second feed-forward has one. Only attention uses
positions, by default rotary encodings; the paper has relative encodings with learned weights.

Shapes: B utterances, T frames, E size.
"""

from torch import Tensor, nn

from asr.config.schema import ConformerConfig
from asr.nn.convolution import ConvolutionModule
from asr.nn.transformer import FeedForward, LayerScales, Residual, SelfAttention, norms_around


class ConformerLayer(nn.Module):
    """Self-attention and convolution between two feed-forward sublayers of half weight."""

    def __init__(self, config: ConformerConfig, scales: LayerScales) -> None:
        super().__init__()
        size, kernel, norm = config.d_model, config.kernel, config.convolution_norm or config.norm
        self.first_feed_forward = FeedForward(config, scales.gain)
        self.around_first_feed_forward = Residual(config, scales)
        self.self_attention = SelfAttention(config, scales.gain, windows=None)
        self.around_self_attention = Residual(config, scales, is_attention=True)
        self.convolution = ConvolutionModule(size, kernel, norm, scales.gain)
        self.around_convolution = Residual(config, scales)
        self.feed_forward = FeedForward(config, scales.gain)
        self.around_feed_forward = Residual(config, scales)
        _, self.norm = norms_around(config)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (B, T, E), valid (B, 1, 1, T) bool -> (B, T, E)."""
        x = self.around_first_feed_forward.wrap(x, self.first_feed_forward, share=0.5)
        x = self.around_self_attention.wrap(x, lambda y: self.self_attention(y, valid))
        x = self.around_convolution.wrap(x, lambda y: self.convolution(y, valid[:, 0, 0]))
        return self.norm(self.around_feed_forward.wrap(x, self.feed_forward, share=0.5))
