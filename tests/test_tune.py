"""Tuning against re-ranking by hand with jiwer, and a planted language model weight."""

import itertools
import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jiwer
import pytest
import soundfile
import torch
from test_fusion import save_language_run
from tiny_speech import RATE, tones
from tone_model import ToneModel, tone_recognizer

from asr import evaluate
from asr.config.loader import read_recipe, write_recipe
from asr.data.corpus import Utterance, read_manifest, write_manifest
from asr.decoding.scorer import Hypothesis
from asr.inference import tune
from asr.inference.evaluation import open_split
from asr.inference.recognition import Recognizer

A, B, C = 5, 6, 7  # tokens of tone_model.SYMBOLS
WORDS = {1: "one", 2: "two", 3: "three", 5: "five"}
TOKENIZER = SimpleNamespace(decode=lambda tokens: " ".join(WORDS[t] for t in tokens))
READER = SimpleNamespace(tokenizer=TOKENIZER)


def spoken(**texts):
    return [Utterance(name, "s", None, 1.0, text) for name, text in texts.items()]


def hypothesis(tokens, *parts):
    return Hypothesis(tokens, 0.0, True, parts=parts)


def reranked(setting, corpus, nbest):
    """Errors by jiwer if every n-best is ranked by Wu et al. 2016, equation 14, and an LM."""
    texts = []
    for utterance in corpus:

        def final(h):
            model, ctc, lm = h.parts
            share, length = setting["ctc_weight"], len(h.tokens) + 1
            total = (1 - share) * model + share * ctc + setting["lm_weight"] * lm
            total /= ((5 + length) / 6) ** setting["length_penalty"]
            return total + setting["token_reward"] * length

        texts.append(TOKENIZER.decode(max(nbest[utterance.id], key=final).tokens))
    actual = jiwer.process_words([utterance.text for utterance in corpus], texts)
    return actual.substitutions + actual.deletions + actual.insertions


def test_the_tuned_weight_makes_both_utterances_correct(monkeypatch):
    corpus = spoken(more="one two", less="three")
    nbest = {  # the first needs a weight above 0.25, the second one below 0.4
        "more": [hypothesis((1, 3), -4.5, -3.0), hypothesis((1, 2), -5.0, -1.0)],
        "less": [hypothesis((5,), -4.4, -3.0), hypothesis((3,), -4.0, -4.0)],
    }
    monkeypatch.setattr(tune, "nbests", lambda *_: [nbest])
    plain = dict.fromkeys(tune.PENALTIES, 0.0)
    grid = [{"beam": 4, "ctc_weight": 0.0, "lm_weight": tune.LM_WEIGHT, **plain}]
    (trial,) = tune.search(READER, corpus, None, grid, {})
    assert (trial.errors, trial.words) == (0, 3)
    assert trial.setting == {"beam": 4, "ctc_weight": 0.0, "lm_weight": 0.3, **plain}


@pytest.mark.parametrize("seed", range(5))
def test_the_best_setting_equals_an_exhaustive_search(monkeypatch, seed):
    draw = random.Random(seed)
    corpus = spoken(
        **{f"u{i}": " ".join(draw.choices(list(WORDS.values()), k=4)) for i in range(7)}
    )
    ids = {word: token for token, word in WORDS.items()}

    def rival(text):
        tokens = [
            ids[word] if draw.random() < 0.6 else draw.choice([*WORDS]) for word in text.split()
        ]
        parts = [draw.uniform(-4, 0) * len(tokens) for _ in range(3)]
        return hypothesis(tuple(tokens[: draw.randint(1, 4)]), *parts)

    nbest = {u.id: [rival(u.text) for _ in range(9)] for u in corpus}
    monkeypatch.setattr(tune, "nbests", lambda *_: [nbest])
    plain = dict.fromkeys(tune.PENALTIES, 0.0)
    grid = [{"beam": 8, "ctc_weight": 0.4, "lm_weight": tune.LM_WEIGHT, **plain}]
    (trial,) = tune.search(READER, corpus, None, grid, {})
    axes = {**tune.PENALTIES, "lm_weight": tune.LM_WEIGHTS}
    every = [
        reranked(dict(zip(axes, values, strict=True)) | {"ctc_weight": 0.4}, corpus, nbest)
        for values in itertools.product(*axes.values())
    ]
    assert trial.errors == min(every) < max(every)
    assert trial.errors == reranked(trial.setting, corpus, nbest)


class NoisyToneModel(ToneModel):
    """Recognises every letter as c with probability 2/3."""

    def step(self, state, tokens):
        log_probs, state = super().step(state, tokens)
        letter = log_probs[..., [A, B]].amax(dim=2) > -1.0
        log_probs[..., C] = torch.where(letter, log_probs.amax(dim=2) + 0.7, log_probs[..., C])
        return log_probs.log_softmax(dim=2), state


class FewCs:
    """A unigram language model: c is e^1.5 times as rare as a and b, so weight 0.47 corrects it."""

    def start(self, memory):
        return None

    def step(self, state, tokens):
        scores = torch.full((*tokens.shape, 8), -1.0)
        scores[..., C] = -2.5
        return scores, None

    def select(self, state, rows):
        return None


def test_the_planted_weight_is_found_saved_and_decodes_without_errors(tiny_run, tmp_path):
    texts = ["ab", "ba", "b"]
    rows = []
    for number, text in enumerate(texts):
        soundfile.write(tmp_path / f"{text}.wav", tones(text, number), RATE)
        rows.append(Utterance(text, "s", tmp_path / f"{text}.wav", 0.24, text))
    write_manifest(tmp_path / "own.tsv", rows)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(tiny_run / "recipe.yaml", run)
    recipe = read_recipe(run / "recipe.yaml", [f"decode.lm={tmp_path}"])
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"ctc_weight": 0})})
    teacher = tone_recognizer(with_ctc=False)
    model = NoisyToneModel(with_ctc=False)
    parts = (model, teacher.tokenizer, teacher.front_end, recipe.decode)
    recognizer = Recognizer(*parts, max_segment_seconds=30.0, lm=FewCs())
    corpus = read_manifest(tmp_path / "own.tsv")
    lines = list(tune.tune(recognizer, corpus, recipe, run))
    written = read_recipe(run / "recipe.yaml").decode
    assert (written.beam, written.lm_weight, written.lm) == (4, 0.5, tmp_path)
    assert f"decode.lm={tmp_path}" in lines[-1] and "decode.lm_weight=0.5" in lines[-1]
    assert any(re.match(r"4 .* 0\.00 % +0 +decoded$", line) for line in lines)
    recognizer.decode = written
    assert [recognizer(u.audio).text for u in corpus] == texts


@pytest.mark.parametrize("threshold", ["null", "0"])
def test_a_decoded_setting_has_the_errors_of_its_evaluation(tiny_run, threshold):
    split = open_split(tiny_run, "valid", [f"decode.no_speech_log_prob={threshold}"])
    evaluation, recognizer = split.evaluate()
    assert any(one.text for one in evaluation.decoded) == (threshold == "null")
    setting = {key: getattr(split.recipe.decode, key) for key in ("beam", "ctc_weight")}
    setting |= dict.fromkeys(tune.PENALTIES, 0.0)
    (tuned,) = tune.decode(recognizer, split.corpus, split.recipe, [setting])
    assert tuned.errors == evaluation.score.errors


@pytest.mark.slow
def test_a_language_model_that_does_not_help_is_not_written(run, commands, tmp_path):
    lm = tmp_path / "lm"
    save_language_run(lm, Recognizer.load(run).tokenizer)
    code, out, _ = commands(
        evaluate, run, "--split", "valid", "--tune", f"decode.lm={lm}", "decode.lm_weight=9"
    )
    reported = dict(re.findall(r"decode\.(\w+)=(\S+)", out))
    decode = read_recipe(run / "recipe.yaml").decode
    assert code == 0 and "lm_weight" in out.splitlines()[1] and "note:" not in out
    assert float(reported["lm_weight"]) == decode.lm_weight
    assert decode.lm == (lm if decode.lm_weight else None)


def test_ctc_alone_has_no_weight_to_tune(tiny_run, commands):
    line = commands.refused(evaluate, tiny_run, "--split", "valid", "--tune", "--by", "speaker")
    assert "leave out --out, --by and --against" in line
    line = commands.refused(evaluate, tiny_run, "--split", "valid", "--tune", "decode.search=ctc")
    assert line == "--tune weighs what a beam adds up; set decode.search=beam"


def test_utterances_that_are_not_tuned_on_are_reported(tiny, run, commands, tmp_path):
    good = read_manifest(tiny.parent / "valid.tsv")[0]
    (tmp_path / "bad.wav").write_text("no sound")
    bad = Utterance("bad", "s", tmp_path / "bad.wav", 1.0, "a b")
    samples, _ = soundfile.read(good.audio)
    soundfile.write(tmp_path / "good.wav", samples, RATE)
    soundfile.write(tmp_path / "silent.wav", 0 * samples, RATE)
    silent = Utterance("silent", "s", tmp_path / "silent.wav", len(samples) / RATE, "")
    rows = [replace(good, audio=tmp_path / "good.wav"), bad, silent]
    write_manifest(tmp_path / "own.tsv", rows)
    split = "--split", tmp_path / "own.tsv", f"data.test={{own: {tmp_path / 'own.tsv'}}}"
    code, out, _ = commands(evaluate, run, *split, "--tune")
    assert f"note: after --tune the error rate of {tmp_path / 'own.tsv'} is too low" in out
    assert code == 0 and f"skipped: bad: {tmp_path / 'bad.wav'}: not readable" in out
    assert "\n3 utterances to decode under" in out
    assert "\nskipped: 1 utterances without speech or with more than decode.max_silence" in out
    write_manifest(tmp_path / "none.tsv", [bad])
    line = commands.refused(evaluate, run, "--split", tmp_path / "none.tsv", "--tune")
    assert line.startswith(f"{tmp_path / 'none.tsv'}: none of its 1 utterances could be read; ")


def test_a_removed_language_model_stays_removed(tiny_run, tmp_path):
    recipe = read_recipe(tiny_run / "recipe.yaml", ["decode.lm=away", "decode.lm_weight=0.3"])
    write_recipe(recipe, tmp_path / "recipe.yaml")
    without = recipe.decode.model_copy(update={"lm": None})
    reported = tune.save(tmp_path, without, {"beam": 8, "ctc_weight": 0.25})
    decode = read_recipe(tmp_path / "recipe.yaml").decode
    assert (decode.lm, decode.beam) == (None, 8) and reported["lm"] == "null"
    assert tune.save(tmp_path, recipe.decode, {"beam": 8, "lm_weight": 0.2})["lm"] == "away"
