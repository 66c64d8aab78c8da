"""An exported run: the same transcripts from half the bytes, and no local paths."""

import json
import re
import shutil

import pytest
import torch
from full_disk import full_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter

from asr import evaluate, export, train, transcribe
from asr.analysis.runs import HOURS, SECONDS
from asr.config.loader import override, read_recipe, write_recipe
from asr.config.schema import DataConfig
from asr.inference.load import load_run_recipe
from asr.inference.recognition import Recognizer
from asr.training.checkpoint import SUMS, WEIGHTS, list_checkpoints


def weights(run, *overrides):
    return Recognizer.load(run, overrides).model.state_dict()


def bytes_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_the_weights_are_those_decoded_with_in_fp16(tiny_run, commands, tmp_path):
    to = tmp_path / "small"
    assert commands(export, tiny_run, "--to", to, "decode.average=2")[0] == 0
    before, after = weights(tiny_run, "decode.average=2"), weights(to)
    assert all(torch.equal(after[name], before[name].half().float()) for name in before)
    assert any(not torch.equal(after[name], weights(tiny_run)[name]) for name in before)
    stored = load_file(list_checkpoints(to)[0].folder / WEIGHTS)
    assert {weight.dtype for weight in stored.values()} == {torch.float16}
    assert bytes_of(to / "checkpoints") < bytes_of(list_checkpoints(tiny_run)[0].folder) / 4


def test_an_export_is_a_run_without_local_paths(tiny, run, commands, tmp_path):
    to, noise = tmp_path / "small", tiny.parent / "noise.tsv"
    recipe = override(
        read_recipe(run), [f"features.noise_files={noise}", "features.noise=[5,20]"], "run"
    )
    write_recipe(recipe, run / "recipe.yaml")
    of_machine = "train.device=cuda:1", "train.threads=1", "data.workers=0"
    assert commands(export, run, "--to", to, *of_machine)[0] == 0
    assert load_run_recipe(to).features.noise_files.name == "noise.tsv"
    train_config = load_run_recipe(to).train
    assert train_config.device == "auto" and train_config.threads is None
    assert load_run_recipe(to).data.workers == DataConfig().workers
    for path in to.rglob("*"):
        assert path.is_dir() or str(tiny.parent).encode() not in path.read_bytes(), path
    transcribed = commands(transcribe, to, tiny.parent / "test-0.flac")
    assert transcribed[0] == 0 and transcribed[1]
    assert commands(evaluate, to, "--split", tiny.parent / "test.tsv")[0] == 0
    code, _, err = commands(evaluate, to, "--split", "valid")
    assert code == 2 and len(err.splitlines()) == 1
    code, _, err = commands(train, to / "recipe.yaml", "--run", to, "--resume")
    assert code == 2 and len(err.splitlines()) == 1 and f"train.init={to}" in err
    overrides = (f"train.init={to}", "train.steps=1")
    assert commands(train, tiny, *overrides, "--run", tmp_path / "more")[0] == 0


def test_the_card_names_the_run_that_training_began_with(tiny, tiny_run, commands, tmp_path):
    fine_tuned, to = tmp_path / "run", tmp_path / "to"
    init = f"train.init={tiny_run}", "train.steps=1", "--run", fine_tuned
    assert commands(train, tiny, *init)[0] == 0
    assert commands(export, fine_tuned, "--to", to)[0] == 0
    card = (to / "README.md").read_text()
    assert "\nIt was fine-tuned from tiny.\n" in card and str(tiny_run) not in card


def test_the_card_contains_the_facts_of_the_run(tiny, run, commands, tmp_path):
    (tmp_path / "about.md").write_text("Trained on tones, which are public.\n")
    assert commands(evaluate, run, "--split", "test", "--by", "speaker")[0] == 0
    assert commands(export, run, "--to", tmp_path / "to", "--about", tmp_path / "about.md")[0] == 0
    card = (tmp_path / "to" / "README.md").read_text()
    assert card.partition("---\n\n")[2].startswith(
        "# to\n\nTrained on tones, which are public.\n\nA las model of "
    )
    actual = json.loads((run / "evaluate/test/score.json").read_text())
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith("| test |")]
    speakers = actual["about"]["groups"]["speaker"]
    assert [row[1] for row in rows[1:]] == [f"speaker {name}" for name in sorted(speakers)]
    assert len(speakers) > 1
    assert [row[3] for row in rows] == [
        f"{100 * part['wer']:.2f} %" for part in (actual, *speakers.values())
    ]
    low, high = actual["wer_interval"]
    assert rows[0][4] == f"{100 * low:.2f} % to {100 * high:.2f} %"


@pytest.mark.parametrize("kept", ["best", "last"])
def test_the_card_has_the_cost_up_to_its_step_and_a_licence(kept, run, commands, tmp_path):
    """Of an event file as a run of 6 steps writes it, a step in 100 s of 20 minutes of audio."""
    for file in run.glob("events.*"):
        file.unlink()
    with SummaryWriter(str(run)) as board:
        for step in (2, 4, 6):
            board.add_scalar(HOURS, step / 3, step)
            board.add_scalar(SECONDS, 100.0 * step, step)
    first, last = list_checkpoints(run)
    shutil.rmtree((last if kept == "best" else first).folder)
    licence = ["--license", "CC-BY-4.0"] if kept == "last" else []
    assert commands(export, run, "--to", tmp_path / "to", *licence)[0] == 0
    card = (tmp_path / "to" / "README.md").read_text()
    time, audio, terms = {
        "best": ("5.0 min", "1.0 h", "not stated; ask the author"),  # step 3
        "last": ("10.0 min", "2.0 h", "CC-BY-4.0."),
    }[kept]
    assert re.search(f"Training took {time} up to step [0-9]+, for {audio} of audio, ", card)
    assert "(12 times real time)" in card
    assert f"\nLicence: {terms}" in card


def test_rates_of_other_checkpoints_are_not_in_the_card(run, commands, tmp_path):
    assert commands(evaluate, run, "--split", "test")[0] == 0
    for number, (average, present) in enumerate((("1", True), ("2", False))):
        to = tmp_path / str(number)
        code, output, _ = commands(export, run, "--to", to, f"decode.average={average}")
        assert code == 0 and ("not in the card" in output) is not present
        assert ("| test |" in (to / "README.md").read_text()) is present


def test_the_card_names_the_search_and_what_was_not_decoded(run, commands, tmp_path):
    assert commands(evaluate, run, "--split", "test", "decode.search=ctc")[0] == 0
    file = run / "evaluate" / "test" / "score.json"
    rates = json.loads(file.read_text())
    rates["about"]["not_decoded"] = 3
    file.write_text(json.dumps(rates))
    assert commands(export, run, "--to", tmp_path / "to")[0] == 0
    (row,) = re.findall(r"\| test \| (all.*?) \|", (tmp_path / "to" / "README.md").read_text())
    beam = rates["about"]["decode"]["beam"]
    assert row == f"all, beam {beam}, CTC alone, 3 utterances not decoded, scored as empty"


def test_groups_of_two_columns_do_not_hide_each_other(tiny, run, commands, tmp_path):
    lines = (tiny.parent / "test.tsv").read_text().splitlines()
    added = [f"{line}\t{'ab'[n % 2]}\t{'ba'[n // 2 % 2]}" for n, line in enumerate(lines[1:])]
    table = tiny.parent / "columns.tsv"
    table.write_text("\n".join([f"{lines[0]}\tnoisy\tnative", *added]) + "\n")
    assert commands(evaluate, run, "--split", table, "--by", "noisy", "--by", "native")[0] == 0
    table.unlink()
    assert commands(export, run, "--to", tmp_path / "to")[0] == 0
    card = (tmp_path / "to" / "README.md").read_text()
    for part in ("noisy a", "noisy b", "native a", "native b"):
        assert f"| columns | {part} |" in card


def overflow(run):
    folder = list_checkpoints(run)[-1].folder
    present = load_file(folder / WEIGHTS)
    name = next(iter(present))
    with safe_open(folder / WEIGHTS, "pt") as file:
        about = file.metadata()
    save_file(present | {name: present[name] + 1e6}, folder / WEIGHTS, metadata=about)
    (folder / SUMS).unlink()


def damage(run):
    (run / "evaluate/test").mkdir(parents=True)
    (run / "evaluate/test/score.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "more", "words"),
    [
        (overflow, ["decode.checkpoint=last"], "has values that fp16 cannot hold"),
        (damage, [], "score.json: damaged evaluation"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "no checkpoint in it"),
        (lambda run: None, ["--about", "none.md"], "none.md: cannot be read"),
    ],
    ids=["too large for fp16", "damaged score", "no checkpoint", "no text"],
)
def test_runs_that_cannot_be_exported(run, commands, tmp_path, spoil, more, words):
    spoil(run)
    code, _, err = commands(export, run, "--to", tmp_path / "to", *more)
    assert code == 2 and words in err and len(err.splitlines()) == 1
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("limit", [500, 5000])
def test_a_full_disk_does_not_block_another_try(tiny_run, commands, tmp_path, limit):
    with full_disk(limit):
        code, _, err = commands(export, tiny_run, "--to", tmp_path / "to")
    assert code == 2 and err.startswith(f"error: --to {tmp_path / 'to'}: cannot be written (")
    assert err.endswith("make room, try again\n") and "--resume" not in err
    assert commands(export, tiny_run, "--to", tmp_path / "to")[0] == 0


def test_nothing_is_overwritten(tiny_run, commands):
    code, _, err = commands(export, tiny_run, "--to", tiny_run)
    assert code == 2 and "is there already" in err
