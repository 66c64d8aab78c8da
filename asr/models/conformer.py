"""The Conformer (Gulati et al. 2020): its encoder layers in front of the Transformer's decoder."""

from asr.config.schema import ConformerConfig
from asr.models.transformer import Transformer
from asr.nn.conformer import conformer_stack
from asr.nn.transformer import LayerScales, Stack


class Conformer(Transformer):
    """As Transformer; the encoder's layers are those of asr/nn/conformer.py."""

    @staticmethod
    def make_encoder(config: ConformerConfig, scales: LayerScales, layer_drop: float) -> Stack:
        """The encoder's layers."""
        return conformer_stack(config, config.encoder_layers, scales, layer_drop)
