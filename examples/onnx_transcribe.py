"""Transcribe audio with ONNX files: python examples/onnx_transcribe.py FOLDER AUDIO... [--ctc]

FOLDER is what `python -m asr.export RUN --onnx --to FOLDER` wrote. This program needs numpy,
onnxruntime and soundfile (to read files), and nothing of layernorm-asr: copy it, or translate it
into another language. Its text is that of asr.transcribe with these settings, and decode.search=ctc
for --ctc:

    decode.beam=1 decode.ctc_weight=0 decode.speeds=[1.0] decode.max_silence=null

Audio must have the sample rate of the model and at most max_seconds of model.json: asr.transcribe
also resamples it, splits it at pauses and does not decode long silences.

Shapes: S samples, T frames of features, T' of memory, V vocabulary.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import soundfile


class Model:
    """The sessions and settings of a folder."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        names = ["features", "encoder", "decoder", *(["ctc"] if self.settings["ctc"] else [])]
        self.sessions = {
            name: onnxruntime.InferenceSession(
                folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"]
            )
            for name in names
        }

    def run(self, name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a program by name."""
        session = self.sessions[name]
        outputs = [output.name for output in session.get_outputs()]
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))

    def encode(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """samples (S,) in -1 to 1 -> the encoder's outputs for a batch of this utterance."""
        features = self.run("features", {"waveform": samples})["features"]  # (T, F)
        lengths = np.array([len(features)])
        return self.run("encoder", {"features": features[None], "lengths": lengths})

    def text(self, tokens: list[int]) -> str:
        """The text of tokens; the special ones, which come first, have none."""
        vocabulary = self.settings["vocabulary"]
        text = "".join(vocabulary["tokens"][token] for token in tokens)
        return text.lstrip(" ") if vocabulary["kind"] == "sentencepiece" else text


def has_speech(model: Model, samples: np.ndarray) -> bool:
    """False for audio that is too short, or silent but for a constant."""
    hop = round(0.01 * model.settings["sample_rate"])
    blocks = samples[: len(samples) // hop * hop].reshape(-1, hop)
    power = blocks.var(axis=1).max(initial=0.0)
    loud = 10 * np.log10(max(power, 1e-18)) > model.settings["silence_db"]
    return len(samples) >= model.settings["min_samples"] and bool(loud)


def greedy(model: Model, memory: dict[str, np.ndarray]) -> list[int]:
    """The likeliest token of the decoder at every step, up to <eos>; none if it is no speech."""
    settings, special = model.settings["decoder"], model.settings["vocabulary"]["special"]
    constants = {name: memory[name] for name in settings["constants"]}
    state = {name: memory[name] for name in settings["state"]}
    limit = int(settings["max_ratio"] * memory["valid"].sum() + settings["max_constant"])
    tokens: list[int] = []
    last, total = special["sos"], 0.0
    while True:
        inputs = {"tokens": np.array([[last]]), **constants, **state}
        outputs = model.run("decoder", inputs)
        log_probs = outputs["log_probs"][0, 0]  # (V,)
        log_probs[settings["never"]] = -np.inf
        last = int(log_probs.argmax()) if len(tokens) < limit else special["eos"]
        total += float(log_probs[last])
        if last == special["eos"]:
            break
        tokens.append(last)
        state = {name: outputs[f"next_{name}"] for name in state}
    least = model.settings["no_speech_log_prob"]
    if model.settings["ctc"] and least is not None and total / (len(tokens) + 1) < least:
        frames, blank = ctc_frames(model, memory), special["blank"]
        if ctc_log_prob(frames, tokens, blank) < frames[:, blank].sum():
            return []
    return tokens


def ctc_frames(model: Model, memory: dict[str, np.ndarray]) -> np.ndarray:
    """The log-probabilities (T', V) of the CTC head."""
    return model.run("ctc", {"states": memory["states"]})["log_probs"][0][memory["valid"][0]]


def ctc_log_prob(frames: np.ndarray, tokens: list[int], blank: int) -> float:
    """frames (T', V) -> log-probability of all paths of the tokens (Graves et al. 2006)."""
    labels = np.full(2 * len(tokens) + 1, blank)
    labels[1::2] = tokens
    skips = np.where((labels[2:] != blank) & (labels[2:] != labels[:-2]), 0.0, -np.inf)
    paths = np.append(0.0, np.full(len(labels) - 1, -np.inf))  # by the label that they end in
    for frame in frames:
        longer = np.append(paths[0], np.logaddexp(paths[1:], paths[:-1]))
        longer[2:] = np.logaddexp(longer[2:], paths[:-2] + skips)
        paths = longer + frame[labels]
    return float(np.logaddexp.reduce(paths[-2:]))


def ctc(model: Model, memory: dict[str, np.ndarray]) -> list[int]:
    """The likeliest label of every frame; repetitions merged, blanks dropped."""
    path = ctc_frames(model, memory).argmax(axis=1)
    first = np.append(True, path[1:] != path[:-1])
    blank = model.settings["vocabulary"]["special"]["blank"]
    return path[first & (path != blank)].tolist()


def transcribe(model: Model, file: Path, with_ctc: bool) -> str:
    """The text of a file. ValueError for a rate or length that the model does not take."""
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    own, longest = model.settings["sample_rate"], model.settings["max_seconds"]
    if rate != own:
        raise ValueError(f"{file}: {rate} Hz; resample it to {own} Hz")
    if len(samples) > longest * own:
        raise ValueError(f"{file}: more than {longest:g} seconds; split it at pauses")
    samples = samples.mean(axis=1).clip(-1.0, 1.0)
    if not has_speech(model, samples):
        return ""
    memory = model.encode(samples)
    return model.text((ctc if with_ctc else greedy)(model, memory))


def main() -> int:
    """Print the text of every file. Exit code 2 for what cannot be transcribed."""
    parser = argparse.ArgumentParser(description="Transcribe audio with ONNX files.")
    parser.add_argument("folder", type=Path, help="written by asr.export --onnx")
    parser.add_argument("audio", type=Path, nargs="+")
    parser.add_argument("--ctc", action="store_true", help="by the CTC head, not the decoder")
    args = parser.parse_args()
    try:
        model = Model(args.folder)
    except (OSError, ValueError) as error:
        parser.error(f"{args.folder}: not readable as a folder of asr.export --onnx: {error}")
    if args.ctc and not model.settings["ctc"]:
        parser.error(f"{args.folder}: this model has no CTC head")
    code = 0
    for file in args.audio:
        try:
            print(f"{file}: {transcribe(model, file, args.ctc)}", flush=True)
        except (soundfile.SoundFileError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main())
