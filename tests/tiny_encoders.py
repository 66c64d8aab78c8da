"""Random encoders of each class of transformers, small enough for tests, as folders."""

import torch
import transformers

WAVEFORM = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 17,
    "conv_dim": (7, 11, 5),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),  # 80 samples, 5 ms at 16 kHz
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
    "vocab_size": 13,
}
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
# Group normalisation is over the channels of 7 = 7 groups in the first layer.
KINDS = {
    "wav2vec2": ("Wav2Vec2", {}),
    "wav2vec2_stable": ("Wav2Vec2", STABLE),
    "hubert": ("Hubert", {}),
    "hubert_stable": ("Hubert", STABLE),
    "wavlm": ("WavLM", {"num_buckets": 20, "max_bucket_distance": 50}),
    "wavlm_stable": ("WavLM", STABLE | {"num_buckets": 20, "max_bucket_distance": 50}),
    "whisper": ("Whisper", {}),
}
WHISPER = {
    "d_model": 12,
    "encoder_layers": 3,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 5,
    "num_mel_bins": 11,
    "max_source_positions": 150,
    "vocab_size": 60,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 4,
}


def make_encoder(folder, kind, seed=1):
    """Write a random model of that kind, with its preprocessing -> the model."""
    name, settings = KINDS[kind]
    settings = WHISPER if kind == "whisper" else WAVEFORM | settings
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**settings)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(folder)
    if kind == "whisper":
        transformers.WhisperFeatureExtractor(feature_size=11).save_pretrained(folder)
    else:
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nRandom.\n")
    return model
