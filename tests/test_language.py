"""The task of predicting text, end to end: train, perplexity, resume, bad input."""

import gzip
import math
from pathlib import Path

import pytest
import torch
import yaml
from event_files import events
from safetensors.torch import load_file
from test_text_corpus import make_lines, manifest, write

from asr import train
from asr.config.loader import read_recipe
from asr.data.tokenizer import EOS, SOS, Characters, load_tokenizer
from asr.decoding.scorer import sample
from asr.inference.load import load_language_model
from asr.shipped import find_run
from asr.tasks.language import language_task
from asr.training.checkpoint import list_checkpoints

MODELS = {
    "lstm": {"kind": "lstm", "layers": 1, "hidden": 11, "embedding": 5, "backend": "reference"},
    "transformer": {"kind": "transformer", "d_model": 6, "heads": 2, "layers": 2},
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.txt.gz", make_lines(41))
    manifest(tmp_path / "more.tsv", make_lines(7, seed=5))
    write(tmp_path / "valid.txt", make_lines(9, seed=6))
    return tmp_path


def make_recipe(folder, model="lstm", **data):
    recipe = {
        "task": "language",
        "run": "lm",
        "data": {
            "train": [str(folder / "train.txt.gz"), str(folder / "more.tsv")],
            "valid": [str(folder / "valid.txt")],
            "batch_bytes": 150,
            "workers": 0,
            **data,
        },
        "model": {**MODELS[model], "dropout": 0.2},
        "train": {
            "epochs": 2,
            "accumulate": 2,
            "optimizer": {"lr": 0.02},
            "schedule": {"warmup": 2},
            "label_smoothing": 0.1,
            "log_every": 1,
            "samples": 3,
            "threads": 1,
            "device": "cpu",
        },
    }
    path = folder / f"{model}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def hand_nats(model, tokenizer, lines):
    """The reference: sentence by sentence, token by token, without padding -> (nats, tokens)."""
    total, count = 0.0, 0
    with torch.no_grad():
        for line in lines:
            tokens_read = [*tokenizer.encode(line), EOS]
            logits = model(torch.tensor([[SOS, *tokens_read[:-1]]]))[0]
            for row, token in zip(logits, tokens_read, strict=True):
                total -= math.log(float(row.exp()[token]) / float(row.exp().sum()))
                count += 1
    return total, count


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_gives_the_perplexity_of_its_model(commands, folder, kind):
    run = folder / "run"
    code, out, err = commands(train, make_recipe(folder, kind), "--run", run)
    assert code == 0, err
    assert "48 sentences" in out and "finished at step" in out
    tokenizer = load_tokenizer(run)
    model = load_language_model(run).model.eval()
    lines = make_lines(9, seed=6)
    nats, tokens = hand_nats(model, tokenizer, lines)
    words = sum(len(line.split()) + 1 for line in lines)
    board = events(run)
    shown = {tag: board.Scalars(tag)[-1].value for tag in board.Tags()["scalars"]}
    assert shown["valid/nll"] == pytest.approx(nats / tokens, rel=1e-4)
    assert shown["valid/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert shown["valid/word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert shown["train/perplexity"] == pytest.approx(math.exp(shown["train/nll"]), rel=1e-4)
    assert list_checkpoints(run)[-1].loss == pytest.approx(nats / tokens, rel=1e-4)
    (text,) = board.Tensors("samples/text_summary")[-1].tensor_proto.string_val
    assert text.decode().count("\n\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_resumed_in_mid_epoch_is_the_same_run(commands, folder, kind):
    recipe = make_recipe(folder, kind)
    full, cut = folder / "whole", folder / "cut"
    steps = ["train.steps=9", "train.save_every=5", "train.keep=99"]
    assert commands(train, recipe, *steps, "--run", full)[0] == 0
    assert commands(train, recipe, *steps, "--run", cut)[0] == 0
    for checkpoint in list_checkpoints(cut):
        if checkpoint.step > 5:
            for file in sorted(checkpoint.folder.iterdir()):
                file.unlink()
            checkpoint.folder.rmdir()
    assert [c.step for c in list_checkpoints(cut)] == [5]
    code, out, err = commands(train, recipe, *steps, "--run", cut, "--resume")
    assert code == 0, err
    assert "resuming" in out
    names = [run / "checkpoints" / "00000009" / "model.safetensors" for run in (full, cut)]
    first, second = map(load_file, names)
    assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())
    with (folder / "valid.txt").open("a") as file:
        file.write("one more\n")
    line = commands.refused(train, recipe, *steps, "--run", cut, "--resume")
    changed = "data.valid: 9 sentences -> 10. Restore the old ones"
    assert f"its data or objective have changed since: {changed}" in line


def test_the_vocabulary_of_a_run_is_reused(commands, folder):
    speech = folder / "speech"
    tokenizer = Characters.train(["ABCDEFGHIJKLMNOPQRSTUVWXYZ '"])
    tokenizer.save(speech)
    run = folder / "run"
    arguments = [f"text.run={speech}", "train.steps=1", "--run", run]
    assert commands(train, make_recipe(folder), *arguments)[0] == 0
    assert load_tokenizer(run).fingerprint() == tokenizer.fingerprint()
    assert read_recipe(run / "recipe.yaml").text.run == speech


def test_the_vocabulary_of_a_shipped_run_is_reused(commands, folder):
    run = folder / "shipped"
    arguments = ["text.run=las", "train.steps=1", "--run", run]
    assert commands(train, make_recipe(folder), *arguments)[0] == 0
    assert load_tokenizer(run).fingerprint() == load_tokenizer(find_run(Path("las"))).fingerprint()


def test_a_language_model_starts_from_the_weights_of_another(commands, folder):
    recipe, first = make_recipe(folder), folder / "first"
    assert commands(train, recipe, "train.steps=1", "--run", first)[0] == 0
    more = "text.run=null", "train.steps=1", "--run", folder / "second"
    code, _, err = commands(train, recipe, f"train.init={first}", *more)
    assert code == 0, err
    assert load_tokenizer(folder / "second").fingerprint() == load_tokenizer(first).fingerprint()
    line = commands.refused(train, recipe, "train.init=las", *more[:-1], folder / "third")
    assert line == "train.init = las: a run of the task speech; name one of language"


def test_two_runs_must_agree_on_the_vocabulary(commands, folder):
    recipe, first = make_recipe(folder), folder / "first"
    assert commands(train, recipe, "train.steps=1", "--run", first)[0] == 0
    more = [f"train.init={first}", "train.steps=1", "--run", folder / "second"]
    Characters.train(["ABCDEFGHIJKLMNOPQRSTUVWXYZ '"]).save(folder / "speech")
    line = commands.refused(train, recipe, f"text.run={folder / 'speech'}", *more)
    assert f"speech: its vocabulary is not that of train.init = {first}; start from" in line
    assert commands(train, recipe, f"text.run={first}", *more)[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, "data.train = []: Tuple should have at least 1 item"),
        ({"train": ["away.txt"]}, "data.train: away.txt is missing; name a .txt, .txt.gz or"),
        (
            {"train": ["d/librispeech-lm-norm.txt.gz"], "corpus": "librispeech-lm"},
            "make it with: python -m asr.prepare librispeech-lm --to d",
        ),
        (
            {"train": ["d/train-clean-100.tsv"], "corpus": "librispeech-lm"},
            "make it with: python -m asr.prepare librispeech --to d --subsets train-clean-100",
        ),
        (
            {"train": ["d/train.tsv"], "corpus": "spoken-numbers"},
            "asr.prepare spoken-numbers --to d, which has train.tsv, valid.tsv and test.tsv",
        ),
        ({"train": ["d/own.tsv"]}, "make it with: python -m asr.prepare auto SOURCE --to d, where"),
        ({"train": ["d/foo.txt"], "corpus": "spoken-numbers"}, "foo.txt is missing; name a .txt"),
        ({"max_bytes": 1}, "data.max_bytes = 1: each of the 48 lines is longer"),
        ({"batch_byte": 1}, "data.batch_byte is not a recipe key. Did you mean data.batch_bytes?"),
    ],
)
def test_errors_are_one_clear_line(commands, folder, change, message):
    refused = commands.refused(train, make_recipe(folder, **change), "--run", folder / "run")
    assert message in refused
    assert not (folder / "run").exists()


def test_a_text_in_other_letters_is_reported(commands, folder):
    Characters.train(["abc xyz"]).save(folder / "speech")
    line = commands.refused(train, make_recipe(folder), f"text.run={folder / 'speech'}")
    assert "train.txt.gz: 100 % of its letters are not in the vocabulary: " in line


def test_too_long_lines_are_counted(commands, folder):
    recipe = make_recipe(folder, "transformer")
    lengths = [len(line) for line in (*make_lines(41), *make_lines(7, seed=5))]
    longest = sorted(lengths)[20]
    overrides = ["train.steps=1", f"data.max_bytes={longest}"]
    code, out, err = commands(train, recipe, "--run", folder / "run", *overrides)
    assert code == 0, err
    rest = sum(length > longest for length in lengths)
    assert f"{48 - rest} sentences ({rest} more are over data.max_bytes = {longest})" in out


def test_health_figures_use_unpadded_sentences(folder):
    """Sentences from the whole text, not its shortest ones."""
    task = language_task(read_recipe(make_recipe(folder)), folder / "run", resume=False)
    batches = list(task.health_batches())
    assert len(batches) == 4 and all(len(batch) == 1 for batch in batches)
    assert all(batch.tokens.shape[1] == int(batch.token_lengths) for batch in batches)
    assert [batch.ids for batch in batches] == [("0",), ("2",), ("5",), ("8",)]


def test_a_model_that_diverged_is_one_line(commands, folder):
    given = ["train.optimizer.lr=1e6", "train.schedule.warmup=0", "train.clip=1e9"]
    line = commands.refused(
        train, make_recipe(folder, "transformer"), *given, "--run", folder / "r"
    )
    assert "NaN" in line or "not finite" in line


def test_a_damaged_text_is_reported(commands, folder):
    full = gzip.compress(b"ONE TWO THREE\n" * 300)
    (folder / "train.txt.gz").write_bytes(full[: len(full) // 2])
    assert "train.txt.gz: cannot be read" in commands.refused(train, make_recipe(folder))


class Bigrams:
    """From SOS to 4 or 5, from 4 to 5, from 5 to EOS."""

    def start(self, memory):
        return len(memory.valid)

    def step(self, state, tokens):
        assert len(tokens) == state
        probs = torch.tensor([0.9, 0, 0.1, 0, 0.25, 0.75]).repeat(len(tokens), 1, 1)
        probs[tokens == 4] = torch.tensor([0.5, 0, 0, 0, 0, 0.5])
        probs[tokens == 5] = torch.tensor([0, 0, 0.5, 0.5, 0, 0])
        return probs.log(), state


def test_samples_are_as_frequent_as_their_probability():
    tokens_read = sample(Bigrams(), 2000, 7, torch.Generator().manual_seed(1))
    assert {tuple(tokens) for tokens in tokens_read} == {(5,), (4, 5)}
    assert 440 < sum(tokens == [4, 5] for tokens in tokens_read) < 560  # 500 expected, deviation 19
    assert sample(Bigrams(), 2, 1, torch.Generator().manual_seed(1))[0] in ([4], [5])
    assert sample(Bigrams(), 0, 7, torch.Generator()) == []
