"""A run as ONNX files and one of JSON: all that a program without this package needs.

    features.onnx   waveform (S,) -> features (T, F), normalised
    encoder.onnx    features (B, T, F), lengths (B,) -> memory, constants and first state
    decoder.onnx    tokens (B, K), constants, state -> log_probs (B, K, V), next state
    ctc.onnx        states (B, T', E) -> log_probs (B, T', V); only with a CTC head
    model.json      sample rate, vocabulary, limits, names of constants and state

All sizes in capitals but F, E and V are free. asr/inference/programs.py describes the programs,
asr/inference/onnx_check.py compares them with the model, examples/onnx_transcribe.py uses them.
"""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from asr.config.schema import TRAINING_ONLY_FEATURES, SpeechRecipe
from asr.data.tokenizer import BLANK, EOS, SOS, UNK, Characters
from asr.decoding.scorer import MAX_CONSTANT, NEVER
from asr.decoding.segmentation import SILENT
from asr.errors import UserError, missing_package
from asr.inference.onnx_check import check_programs
from asr.inference.programs import Program, speech_programs
from asr.inference.recognition import FEWEST_FRAMES, Recognizer, frame_seconds
from asr.io import made_folder, new_folder

PACKAGES = ("onnx", "onnxruntime", "onnxscript")


def write_onnx(recognizer: Recognizer, recipe: SpeechRecipe, to: Path) -> str:
    """Write the files into the folder `to`, which is empty or does not exist.

    Returns a line on their differences from the model. Raises UserError, and writes nothing, for a
    missing package, for features that have no ONNX program, for programs that do not compute the
    same as the model, and where the files cannot be written.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"--onnx: {missing_package(missing[0], 'onnx')}")
    features = recipe.features
    if features.kind == "encoder":
        raise UserError(
            "--onnx: features.kind=encoder has no ONNX program; export the encoder with optimum, "
            "and use asr.export without --onnx for the rest"
        )
    if features.kind == "mfcc" or features.dither:
        setting = "features.kind=mfcc" if features.kind == "mfcc" else "features.dither"
        raise UserError(f"--onnx: {setting} has no ONNX program; log-mel without dither has")
    programs = speech_programs(recognizer.model, recognizer.front_end)
    try:
        with made_folder(to.parent), new_folder(to) as part:
            for name, program in programs.items():
                write_program(program, part / f"{name}.onnx")
            text = json.dumps(describe(recognizer, recipe, programs), indent=1)
            (part / "model.json").write_text(text + "\n", encoding="utf-8")
            line = check_programs(part, programs, recognizer, recipe)
            part.replace(to)
            return line
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--to {to}: cannot be written ({reason}); make room, try again") from None


def write_program(program: Program, path: Path) -> None:
    """Trace a program and write it as an ONNX file."""
    # torch's exporter logs which packages it could use as well.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    names = {"input_names": program.inputs, "output_names": program.outputs}
    torch.onnx.export(program.trace(), **names, verbose=False).save(path)


def describe(
    recognizer: Recognizer, recipe: SpeechRecipe, programs: Mapping[str, Program]
) -> dict[str, Any]:
    """The content of model.json."""
    tokenizer, extract = recognizer.tokenizer, recognizer.front_end.extract
    steps = programs["decoder"].inputs[1:]
    state = [name for name in steps if f"next_{name}" in programs["decoder"].outputs]
    return {
        "format": 1,
        "model": recipe.model.kind,
        "sample_rate": extract.sample_rate,
        "features": recipe.features.model_dump(mode="json", exclude=TRAINING_ONLY_FEATURES),
        "frame_seconds": frame_seconds(recognizer),  # of memory
        "max_seconds": recognizer.max_segment_seconds,  # longer audio: split it
        # Audio of fewer samples, or without 10 ms above silence_db of full scale, their mean
        # removed, has no text.
        "min_samples": extract.window + (FEWEST_FRAMES - 1) * extract.shift,
        "silence_db": SILENT,
        # Tokens of a lower mean log-probability, EOS counted, are no text where the CTC head finds
        # them less likely than none; null: keep them.
        "no_speech_log_prob": recipe.decode.no_speech_log_prob,
        "vocabulary": {
            "kind": "characters" if isinstance(tokenizer, Characters) else "sentencepiece",
            "tokens": tokenizer.surfaces,  # joined they are the text; without its leading space
            "special": {"blank": BLANK, "unk": UNK, "sos": SOS, "eos": EOS},
        },
        "decoder": {
            "constants": [name for name in steps if name not in state],
            "state": state,
            "never": list(NEVER),  # tokens that no sentence contains
            # A sentence has at most max_ratio * frames of memory + max_constant tokens.
            "max_ratio": recipe.decode.max_ratio,
            "max_constant": MAX_CONSTANT,
        },
        "ctc": "ctc" in programs,
    }
