"""Models and language models in the beam against brute force over every sentence; recipe keys."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from small_language_model import language_model
from tiny_speech import RATE
from toy_speller import NO_FRAMES, beam_search

from asr import evaluate, export
from asr.config.loader import read_recipe, validate, write_recipe
from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig, TransformerConfig
from asr.data.tokenizer import EOS, SOS, UNK, Characters
from asr.inference.load import find_language_model
from asr.inference.recognition import Recognizer
from asr.models import build
from asr.models.las import LAS
from asr.models.transformer import Transformer
from asr.nn.attention import Memory
from asr.training.checkpoint import save_checkpoint

F, V = 5, 6
WORDS = (UNK, 4, 5)
LENGTHS = (31, 19, 23)
LM_WEIGHT = 0.6
KINDS = ("lstm ba", "transformer pre")
SETTINGS = [
    {"ctc_weight": 0.0},
    {"ctc_weight": 0.3, "length_penalty": 0.6, "token_reward": 0.2},
]
TRANSFORMER = TransformerConfig(
    kind="transformer",
    d_model=8,
    encoder_layers=1,
    decoder_layers=2,
    heads=2,
    subsampling_channels=3,
)


def las(attention):
    listener = ListenerConfig(layers=2, hidden=7, pyramid=(2,), backend="reference")
    speller = SpellerConfig(layers=1, hidden=11, embedding=3, backend="reference")
    parts = {"listener": listener, "speller": speller}
    return LAS(F, V, LasConfig(kind="las", attention=attention, attention_size=7, **parts))


FAMILIES = {
    "las location": lambda: las("location"),
    "las dot": lambda: las("dot"),
    "transformer": lambda: Transformer(F, V, TRANSFORMER),
}


def tiny(family):
    """A model with weights large enough for its sentences to differ."""
    torch.manual_seed(11)
    model = FAMILIES[family]()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return model.double().eval()


def encoded(model):
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(len(LENGTHS), max(LENGTHS), F, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        memory = model.encode(features, torch.tensor(LENGTHS))
        return memory, model.ctc(memory)


def alone(memory, ctc, b):
    frames = int(memory.valid[b].sum())
    rows = slice(b, b + 1)
    return Memory(memory.states[rows, :frames], memory.valid[rows, :frames]), ctc[rows, :frames]


@torch.no_grad()
def sentence_log_probs(decode, sentences):
    """decode(tokens (N, U)) -> logits; the log-prob of every sentence with its end, (N,)."""
    many = torch.tensor(sentences, dtype=torch.long).view(len(sentences), -1)
    inputs = torch.cat([torch.full((len(many), 1), SOS), many], dim=1)
    targets = torch.cat([many, torch.full((len(many), 1), EOS)], dim=1)
    return decode(inputs).log_softmax(2).gather(2, targets[..., None]).sum((1, 2))


def ctc_log_probs(ctc, sentences):
    count, frames = len(sentences), ctc.shape[1]
    tokens = torch.tensor(sentences, dtype=torch.long).view(count, -1)
    return -torch.nn.functional.ctc_loss(
        ctc.expand(count, -1, -1).transpose(0, 1),
        tokens,
        torch.full((count,), frames),
        torch.full((count,), tokens.shape[1]),
        reduction="none",
    )


def brute_force(model, lm, lm_weight, memory, ctc, longest, settings):
    """One utterance: [(score, tokens)] of all sentences, best first."""
    weight, alpha = settings["ctc_weight"], settings.get("length_penalty", 0.0)
    results = []
    for length in range(longest + 1):
        sentences = list(itertools.product(WORDS, repeat=length))
        many = Memory(
            memory.states.expand(len(sentences), -1, -1), memory.valid.expand(len(sentences), -1)
        )
        total = (1 - weight) * sentence_log_probs(lambda t, m=many: model.decode(m, t), sentences)
        if weight:
            total = total + weight * ctc_log_probs(ctc, sentences)
        total = total + lm_weight * sentence_log_probs(lm, sentences)
        total = total / ((6 + length) / 6) ** alpha
        total = total + settings.get("token_reward", 0.0) * (length + 1)
        results += zip(total.tolist(), sentences, strict=True)
    return sorted(results, reverse=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_beam_as_wide_as_the_space_is_brute_force(family, kind, settings):
    model, lm = tiny(family), language_model(kind, V)
    memory, ctc = encoded(model)
    wide = {"beam": 150, "nbest": 4, "max_ratio": NO_FRAMES, "max_constant": 4, "ctc": ctc}
    results = beam_search(model, memory, scorers=[(LM_WEIGHT, lm)], **wide, **settings)
    for b, ours in enumerate(results):
        judge = brute_force(model, lm, LM_WEIGHT, *alone(memory, ctc, b), 4, settings)[:4]
        assert [h.tokens for h in ours] == [tokens for _, tokens in judge]
        assert [h.score for h in ours] == pytest.approx([s for s, _ in judge], abs=1e-6)


def save_language_run(run, tokenizer, task="language"):
    """An untrained language model's run."""
    model = {"kind": "lstm", "layers": 1, "hidden": 7, "embedding": 5, "backend": "reference"}
    texts = [str(run.parent / "a.txt")]
    tree = {"task": task, "run": "lm", "data": {"train": texts, "valid": texts}}
    recipe = validate({**tree, "model": model}, "test")
    run.mkdir()
    tokenizer.save(run)
    write_recipe(recipe, run / "recipe.yaml")
    torch.manual_seed(1)
    made = build.build_language_model(recipe.model, tokenizer.size)
    torch.nn.init.normal_(made.out.weight, std=3.0)
    save_checkpoint(run, made, {}, 1, 1.0, {"vocabulary": tokenizer.fingerprint()})


def test_a_recognizer_takes_the_language_model_of_a_run(tiny_run, tmp_path):
    overrides = ["decode.beam=4", "decode.ctc_weight=0.3", "decode.no_speech_log_prob=null"]
    plain = Recognizer.load(tiny_run, overrides)
    save_language_run(tmp_path / "lm", plain.tokenizer)
    named = [*overrides, f"decode.lm={tmp_path / 'lm'}"]
    fused = Recognizer.load(tiny_run, [*named, "decode.lm_weight=2"])
    silent = Recognizer.load(tiny_run, [*named, "decode.lm_weight=0"])
    audio = torch.randn(8000, generator=torch.Generator().manual_seed(1)) * 0.3
    assert len(fused.lm.start(_memory()).h) == 1
    assert silent(audio, RATE) == plain(audio, RATE)
    assert fused(audio, RATE).score != plain(audio, RATE).score


def _memory():
    return encoded(tiny("las dot"))[0]


def test_a_file_of_the_user_comes_before_a_shipped_language_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_language_model(Path("lm"))
    assert shipped.name == "lm" and (shipped / "recipe.yaml").is_file()
    (tmp_path / "lm").write_text("\\data\\\n")
    assert find_language_model(Path("lm")) == Path("lm")


def test_an_exported_language_model_is_the_same_in_fp16(tiny_run, commands, tmp_path):
    """Transcripts and scores; no path of the machine in it."""
    lm, to = tmp_path / "lm", tmp_path / "to"
    save_language_run(lm, Recognizer.load(tiny_run).tokenizer)
    (tmp_path / "about.md").write_text("---\nlanguage: en\n---\nOf a.txt.\n")
    assert commands(export, lm, "--to", to, "--about", tmp_path / "about.md")[0] == 0
    audio = torch.randn(8000, generator=torch.Generator().manual_seed(1)) * 0.3
    weight = "decode.lm_weight=0.5", "decode.beam=4"
    before, after = (
        Recognizer.load(tiny_run, [f"decode.lm={run}", *weight])(audio, RATE) for run in (lm, to)
    )
    assert after.text == before.text and after.score == pytest.approx(before.score, abs=0.05)
    card = (to / "README.md").read_text()
    assert "Of a.txt." in card and "language: en\n" in card and "(lstm) of 0.00 M" in card
    recipe = read_recipe(to / "recipe.yaml")
    assert recipe.data.train == (Path("a.txt"),) and recipe.text.run is None
    assert "changes nothing in" in commands.refused(export, lm, "--to", tmp_path / "b", "seed=3")
    assert "is there already" in commands.refused(export, lm, "--to", to)


def refused(commands, tiny_run, *overrides):
    return commands.refused(evaluate, tiny_run, "--split", "test", *overrides)


def test_another_vocabulary_is_one_clear_line(commands, tiny_run, tmp_path):
    save_language_run(tmp_path / "lm", Characters.train(["xyz"]))
    line = refused(commands, tiny_run, f"decode.lm={tmp_path / 'lm'}", "decode.beam=2")
    assert line == (
        f"decode.lm = {tmp_path / 'lm'}: its vocabulary is not this speech model's; "
        "train a language model with text.run=SPEECH_RUN"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.lm=away"], "decode.lm = away: neither a run folder nor a file of n-grams"),
        (["decode.lm=."], "no recipe.yaml in it, so it is no run folder"),
        (["decode.lm=away", "decode.search=ctc"], "decode.lm needs decode.search=beam"),
        (["decode.lm_weight=-1"], "decode.lm_weight = -1: should be greater than or equal to 0"),
        (["decode.lm_weight=0.5"], "decode.lm_weight = 0.5 changes nothing without a language"),
        (["decode.lm_unit=token"], "decode.lm_unit = token changes nothing without a language"),
    ],
)
def test_errors_are_one_clear_line(commands, tiny_run, overrides, message):
    assert message in refused(commands, tiny_run, *overrides)


def test_a_speech_run_is_no_language_model(commands, tiny_run):
    line = refused(commands, tiny_run, f"decode.lm={tiny_run}")
    assert line == f"decode.lm: {tiny_run}: a run of the task speech, no language model"


def test_without_kenlm_the_error_names_the_package(commands, tiny_run, tmp_path, monkeypatch):
    (tmp_path / "three.arpa").write_text("\\data\\\n")
    monkeypatch.setitem(sys.modules, "kenlm", None)  # import kenlm fails
    line = refused(commands, tiny_run, f"decode.lm={tmp_path / 'three.arpa'}")
    assert "n-grams need kenlm: the package kenlm is not installed: pip install kenlm" in line


@pytest.mark.parametrize("beam", [1, 4])
def test_ctc_alone_is_searched_on_request(commands, tiny_run, tmp_path, beam):
    overrides = ["decode.search=ctc", f"decode.beam={beam}", "--out", tmp_path]
    code, _, err = commands(evaluate, tiny_run, "--split", "test", *overrides)
    assert code == 0, err
    header, *rows = (
        line.split("\t") for line in (tmp_path / "hypotheses.tsv").read_text().splitlines()
    )
    columns = [dict(zip(header, row, strict=True)) for row in rows]
    assert len(columns) == 4
    assert beam > 1 or all(row["hypothesis"] == row["ctc"] for row in columns)
