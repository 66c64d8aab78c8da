"""The pretrained runs of the project: size, integrity, error rate, and what the README shows."""

import re
import shutil
from pathlib import Path

import jiwer
import pytest
import soundfile
import torch

from asr import transcribe
from asr.data.corpus import read_manifest
from asr.data.tokenizer import SOS
from asr.inference.recognition import Recognizer
from asr.training.checkpoint import WEIGHTS, is_sound, list_checkpoints

ROOT = Path(__file__).parent.parent
FINALISTS = ("conformer", "las", "transformer")
LIMIT = 20_000_000  # bytes
MOST = 0.35  # errors per character


@pytest.mark.parametrize("name", FINALISTS)
def test_it_is_small_and_complete_and_has_a_card(name):
    folder = ROOT / "pretrained" / name
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < LIMIT
    (checkpoint,) = list_checkpoints(folder)
    assert is_sound(checkpoint, (WEIGHTS,))
    card = (folder / "README.md").read_text(encoding="utf-8")
    for text in ("CC BY 4.0", "CC BY-SA 3.0", "over speakers", "small_corpus_", "hours"):
        assert text in card


@pytest.mark.slow
@pytest.mark.parametrize("name", FINALISTS)
def test_it_recognises_unseen_speakers(name, shared):
    """Character errors by jiwer; on all of dev they are 12, 14 and 15 %."""
    some = read_manifest(shared("speech/dev.tsv"))[:300:100]
    assert len(some.speakers) == 3
    recognizer = Recognizer.load(ROOT / "pretrained" / name, ["decode.speeds=[1.0]"])
    hypotheses = [recognizer(utterance.audio).text for utterance in some]
    assert jiwer.cer([utterance.text for utterance in some], hypotheses) < MOST


@pytest.mark.parametrize("name", FINALISTS)
def test_the_shipped_language_model_prefers_english(name):
    """To the same words in reverse order; total log-probabilities by a plain loop."""
    recognizer = Recognizer.load(name, ["decode.lm=lm"])
    words = "HE", "WAS", "IN", "THE", "GARDEN", "WITH", "ONE", "OF", "THE", "OLD", "MEN"
    scores = []
    for text in (" ".join(words), " ".join(words[::-1])):
        row = torch.tensor([SOS, *recognizer.tokenizer.encode(text)])
        with torch.inference_mode():
            log_probs = recognizer.lm(row[None])[0].log_softmax(-1)
        scores.append(log_probs[range(len(row) - 1), row[1:]].sum())
    assert scores[0] > scores[1] + 10


def rates_on_test_clean(name):
    """The WER in the table of its card and the interval over speakers, with one decimal."""
    card = (ROOT / "pretrained" / name / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\| test-clean \| all.*", card, re.MULTILINE)
    rate, *_, low, high = (f"{float(value):.1f}" for value in re.findall(r"([0-9.]+) %", line))
    return rate, low, high


def test_the_readme_has_the_error_rates_of_the_cards():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row, name in (("Conformer, 17.0 hours of speech", "conformer"), ("LAS with Layer", "las")):
        rate, low, high = rates_on_test_clean(name)
        assert re.search(rf"\| .*{row}.* \| {rate} % \({low} to {high}\) \|", readme)


@pytest.mark.slow
def test_the_transcript_in_the_readme_is_that_of_the_shipped_model(shared, commands, monkeypatch):
    monkeypatch.chdir(shared("librispeech-sample/LibriSpeech/dev-clean/2902/9006"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    name, line = re.search(r"transcribe conformer (\S+\.flac) .*\n    (.+\n)", readme).groups()
    assert commands(transcribe, "conformer", name)[1] == line


def test_a_shipped_model_states_its_error_rate_once(commands, tiny_run, tmp_path, monkeypatch):
    """The value in its card's table; no line for a run of the user's, whatever its name."""
    soundfile.write(tmp_path / "a.wav", [0.1] * 16000, 16000)
    code, _, err = commands(transcribe, "conformer", tmp_path / "a.wav", tmp_path / "a.wav")
    assert code == 0
    rate, *_ = rates_on_test_clean("conformer")
    assert err.count("WER") == 2 and f"WER {rate} % on test-clean" in err
    shutil.copytree(tiny_run, tmp_path / "las")
    monkeypatch.chdir(tmp_path)
    assert "WER" not in commands(transcribe, "las", "a.wav")[2]
