"""asr.compare on event files whose curves, crossings and significance are known."""

import csv
import json
import os
import re
import shutil
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from event_files import events, scalar_event, write_events
from full_disk import full_disk
from scipy import stats
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tiny_speech import training_state
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import asr
from asr import compare
from asr.analysis import curves
from asr.analysis.comparison import compare_runs, group
from asr.analysis.curves import (
    Curve,
    band,
    choose_levels,
    first_below,
    median_reached,
    read_scalars,
)
from asr.analysis.effects import effects, large_interactions
from asr.analysis.report import Table, html, markdown
from asr.analysis.runs import HOURS, SECONDS, TRAIN, VALID, short_names
from asr.analysis.score_files import write_evaluation
from asr.analysis.statistics import detectable, holm, paired_t, pairs_needed, spread
from asr.analysis.wer import score
from asr.config.loader import read_recipe, write_recipe
from asr.config.registered import REGISTERED
from asr.errors import UserError
from asr.io import sha256_of_files
from asr.training.checkpoint import save_checkpoint
from asr.training.resume import SHA256

RECIPE = {
    "run": "made",
    "data": {"train": "train.tsv", "valid": "valid.tsv"},
    "model": {"kind": "las", "listener": {"norm": "ba"}, "speller": {"norm": "none"}},
}
STEPS = range(10, 110, 10)


def curve(values, steps=STEPS):
    steps = np.array(steps)[: len(values)]
    return Curve(steps, np.array(values, dtype=float))


def make_run(folder, overrides, losses, *, done=True, errors=None, vocabulary="{}"):
    """A run folder as asr.train writes it: step s has cost s / 1000 h of audio and 3 s seconds."""
    folder.mkdir(parents=True)
    base = folder / "base.yaml"
    base.write_text(yaml.safe_dump(RECIPE))
    write_recipe(read_recipe(base, overrides), folder / "recipe.yaml")
    base.unlink()
    (folder / "tokenizer.json").write_text(vocabulary)
    last = 10 * len(losses)
    (folder / "train.log").write_text(
        f"2026-11-27 09:08:07,006 finished at step {last}; x\n" if done else "started\n"
    )
    points = [
        scalar_event(name, step, value)
        for step, loss in zip(STEPS, losses, strict=False)
        for name, value in (
            (TRAIN, loss / 2), (VALID, loss), (HOURS, step / 1000), (SECONDS, 3 * step)
        )
    ]  # fmt: skip
    write_events(folder / "events.out.tfevents.0000000007.x", points)
    if errors is not None:
        hypotheses = ["a b c" if wrong else "a b d" for wrong in errors]
        write_evaluation(
            folder / "evaluate" / "test", score(["a b d"] * len(hypotheses), hypotheses)
        )
    return folder


def falling(floor, shift=0.0):
    """1 at step 10, then linear down to `floor` at step 100."""
    return list(np.linspace(1, floor, len(STEPS)) + shift)


@pytest.fixture
def two_groups(tmp_path):
    """Norm ba reaches 0.1, none 0.55; three seeds shift both in the same way."""
    for seed, shift in ((1, 0.0), (2, 0.01), (3, -0.02)):
        for norm, floor, wrong in (("ba", 0.1, 1), ("none", 0.55, 12)):
            make_run(
                tmp_path / "sweep" / f"{norm}-{seed}",
                [f"model.listener.norm={norm}", f"seed={seed}"],
                falling(floor, shift + 0.001 * seed * (norm == "ba")),
                errors=[number < wrong for number in range(20)],
            )
    return tmp_path / "sweep"


def rows(text, title):
    """The cells of a Markdown table, by heading."""
    block = text.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block[2:]]


def report(commands, *arguments):
    code, out, err = commands(compare, *arguments)
    assert code == 0, err
    return out


def test_losses_levels_and_differences_are_the_known_ones(two_groups, commands):
    report(commands, two_groups, "--levels", "0.8", "0.5", "0.01")
    text = (two_groups / "compare" / "compare.md").read_text()
    ba, none = rows(text, "Validation loss")
    assert ba[0] == "listener.norm=ba" and none[0] == "listener.norm=none"
    best = np.array([0.101, 0.112, 0.083])
    judge = stats.t.interval(0.95, 2, best.mean(), stats.sem(best))
    assert ba[2:4] == [f"{best.mean():.4f}", f"{best.std(ddof=1):.4f}"]
    assert ba[4] == f"{judge[0]:.4f} to {judge[1]:.4f}" and ba[7] == "100"
    levels = {
        (row[0], row[1]): row[2:] for row in rows(text, "Until the loss first passes a level")
    }
    # ba falls by 0.1 every 10 steps from 1 on: all three are below 0.8 at step 40 except the third,
    # at 30; none falls by 0.05 and is below 0.8 from step 50 or 60 on, and never at 0.5.
    assert levels["0.8", "listener.norm=ba"] == ["3 of 3", "40", "0.0400", "120"]
    assert levels["0.8", "listener.norm=none"][:2] == ["3 of 3", "60"]
    assert levels["0.5", "listener.norm=none"] == ["0 of 3", "–", "–", "–"]
    (pair,) = rows(text, "Pairs of settings: best loss")
    (rates,) = rows(text, "Pairs of settings: WER of test")
    other = np.array([0.55, 0.56, 0.53])
    judged = stats.ttest_rel(other, best)
    assert float(pair[2]) == pytest.approx((other - best).mean(), abs=1e-4) and pair[3] == "3"
    low, high = judged.confidence_interval()
    assert pair[4] == f"{low:+.4f} to {high:+.4f}"
    assert judged.pvalue < 0.001 and pair[5].replace("&lt;", "<") == "< 0.001"
    assert pair[-1] == "yes"
    # No seed differs from another: three of one sign show nothing.
    assert rates[4:6] == ["–", "0.250"]
    assert rates[-1] == "of these models only"
    assert float(rates[2]) == pytest.approx(100 * 11 / 60, abs=0.01)


def test_the_answer_comes_first_then_pictures_then_tables(two_groups, commands):
    out = report(commands, two_groups)
    text = (two_groups / "compare" / "compare.md").read_text()
    titles = re.findall("^## (.*)", text, re.MULTILINE)
    assert titles == [
        "Every run", "Loss curves", "WER of test, %", "Validation loss",
        "Until the loss first passes a level", "Pairs of settings: WER of test",
        "Pairs of settings: best loss", "Methods",
    ]  # fmt: skip
    best, other = np.array([0.101, 0.112, 0.083]), np.array([0.55, 0.56, 0.53])
    low, high = stats.ttest_rel(other, best).confidence_interval()
    mean = stats.t.interval(0.95, 2, best.mean(), stats.sem(best))
    # Each seed has the same WERs: the sign test of three pairs.
    assert out.splitlines()[:5] == [
        "WER of test: no difference is shown among 2 settings; best mean: listener.norm=ba, 1.67 %",
        "  Next: listener.norm=none, 18.33 points higher (p = 0.250, 3 seeds). Over utterances, "
        "for these trained models only, 1 of 1 pair differ significantly.",
        f"best loss: listener.norm=ba is the best of 2 settings, {best.mean():.4f} "
        f"(95 % interval {mean[0]:.4f} to {mean[1]:.4f})",
        f"  Next: listener.norm=none, {(other - best).mean():.4f} higher "
        f"(95 % interval {low:+.4f} to {high:+.4f}, p < 0.001, 3 seeds).",
        "6 runs in 2 groups by differences between their recipes, except the seed.",
    ]
    page = (two_groups / "compare" / "compare.html").read_text()
    assert page.count("<details>") == 3 and page.index("is the best") < page.index("<img")
    assert "<details><summary>Pairs of settings: best loss</summary>" in page


def test_a_difference_that_is_not_shown_comes_with_what_could_have_been(tmp_path, commands):
    """The powers of the tests of both differences, by simulation."""
    best = {"ba": np.array([0.1, 0.15, 0.12, 0.2]), "none": np.array([0.14, 0.11, 0.17, 0.19])}
    for norm, losses in best.items():
        for seed, loss in enumerate(losses):
            run = tmp_path / "s" / f"{norm}{seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(loss))
    line, more = report(commands, tmp_path / "s").splitlines()[:2]
    judge = stats.ttest_rel(best["none"], best["ba"])
    assert line.startswith("best loss: no difference is shown among 2 settings; best mean: ")
    assert f"p = {judge.pvalue:.3f}, 4 seeds" in more
    found = re.search(
        r"4 seeds can show .* ([\d.]+) or more; to show ([\d.]+) takes about (\d+)", more
    )
    sd, generator = (best["none"] - best["ba"]).std(ddof=1), np.random.default_rng(7)
    for size, count in ((found[1], 4), (found[2], int(found[3]))):
        drawn = generator.normal(float(size), sd, size=(20_000, count))
        share = np.mean(stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05)
        assert share == pytest.approx(0.8, abs=0.02)


def test_the_seeds_of_the_best_two_count(tmp_path, commands):
    """A third setting, far off, has fewer."""
    found = {"ba": [0.1, 0.15, 0.12, 0.2], "none": [0.14, 0.11, 0.17, 0.19], "cell": [0.7, 0.8]}
    for norm, losses in found.items():
        for seed, loss in enumerate(losses):
            run = tmp_path / "s" / f"{norm}{seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(loss))
    assert "With this spread, 4 seeds can show" in report(commands, tmp_path / "s")


def grid_of(folder, losses, errors=None):
    """A run for each (listener norm, speller norm, seed) -> best loss."""
    for number, ((listener, speller, seed), loss) in enumerate(losses.items()):
        keys = [f"model.listener.norm={listener}", f"model.speller.norm={speller}", f"seed={seed}"]
        wrong = errors and [n < errors[listener, speller, seed] for n in range(50)]
        make_run(folder / f"{number}", keys, falling(loss), errors=wrong)
    return folder


CORNERS = [(a, b, seed) for a in ("none", "ba") for b in ("none", "ba") for seed in (1, 2, 3)]


def test_a_grid_is_answered_by_the_effects_of_its_factors(tmp_path, commands):
    """Six pairs and two figures, none significant: two answers and the effects, by scipy."""
    random = np.random.default_rng(3)
    losses = {c: 0.3 + 0.05 * (c[0] == "ba") + 0.01 * random.normal() for c in CORNERS}
    errors = {c: int(random.integers(5, 30)) for c in CORNERS}
    out = report(commands, grid_of(tmp_path / "s", losses, errors))
    assert out.count("no difference is shown among 4 settings; best mean: ") == 2
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    table = rows(text, "Effect of each factor, over the others")
    assert [row[:4] for row in table[2:]] == [
        ["best loss", "listener.norm", "none", "ba"], ["best loss", "speller.norm", "none", "ba"],
    ]  # fmt: skip
    for figure, start, factor, digits in ((errors, 0, 2 / 3, 2), (losses, 2, 1, 4)):
        judges = []
        for axis in (0, 1):
            sides = [
                [
                    np.mean([figure[c] for c in CORNERS if c[axis] == norm and c[2] == seed])
                    for seed in (1, 2, 3)
                ]
                for norm in ("none", "ba")
            ]
            judges.append(stats.ttest_rel(sides[1], sides[0]))
        small, large = sorted(j.pvalue for j in judges)
        holm_p = {small: min(1, 2 * small), large: min(1, max(2 * small, large))}
        for row, judge in zip(table[start : start + 2], judges, strict=True):
            low, high = (factor * end for end in judge.confidence_interval())
            assert row[5] == f"{low:+.{digits}f} to {high:+.{digits}f}" and row[7] == "3"
            expected = holm_p[judge.pvalue]
            assert row[6].replace("&lt;", "<") == (
                "< 0.001" if expected < 0.001 else f"{expected:.3f}"
            )
            assert row[8] == ("yes" if expected < 0.05 else "no")
    assert table[2][8] == "yes" and table[3][8] == "no"


def test_the_size_of_the_vocabulary_is_a_factor_of_wer_and_not_of_loss(tmp_path):
    for size, norm, seed in product((31, 53), ("ba", "none"), (1, 2)):
        wrong = 2 * seed + (size == 53) + 3 * (norm == "none")
        make_run(
            tmp_path / "grid" / f"{size}-{norm}-{seed}",
            ["text.kind=bpe", f"text.size={size}", f"model.listener.norm={norm}", f"seed={seed}"],
            falling(0.1 + wrong / 100),
            vocabulary=f'{{"size": {size}}}',
            errors=[number < wrong for number in range(20)],
        )
    comparison = compare_runs([tmp_path / "grid"])
    found = {e.factor: e for e in comparison.effects["WER of test"]}
    assert set(found) == {"listener.norm", "size"}
    assert found["size"].test.mean == pytest.approx(1 / 60)
    assert found["listener.norm"].test.mean == pytest.approx(3 / 60)
    assert comparison.effects["best loss"] == []  # of one vocabulary alone


def test_interactions_that_reverse_effects_are_named(tmp_path, commands):
    losses = {c: 0.3 + 0.1 * (c[0] != c[1]) + 0.02 * (c[2] == 1) * (c[0] == "ba") for c in CORNERS}
    losses["ba", "ba", 1] += 0.14
    out = report(commands, grid_of(tmp_path / "s", losses))
    at_none, at_ba = (
        np.array([losses["ba", n, seed] - losses["none", n, seed] for seed in (1, 2, 3)])
        for n in ("none", "ba")
    )
    p = stats.ttest_rel(at_ba, at_none).pvalue
    assert (
        "\nInteractions\n- best loss: listener.norm=ba instead of none: "
        f"{at_none.mean():+.4f} with speller.norm=none and {at_ba.mean():+.4f} with "
        f"speller.norm=ba (p = {p:.3f}, not significant)\n" in out
    )
    losses = {c: 0.3 + 0.1 * (c[0] == "ba") + 0.03 * (c[1] == "ba") for c in CORNERS}
    assert "Interactions" not in report(commands, grid_of(tmp_path / "t", losses))


def test_without_evaluations_the_report_names_the_command(two_groups, commands):
    folders = sorted(two_groups.glob("*-?"))
    out = report(commands, two_groups)
    assert "asr.evaluate" not in out
    for folder in folders[:2]:
        shutil.rmtree(folder / "evaluate")
    assert "WER of test: 2 of 6 runs are not evaluated.\n" in report(commands, two_groups)
    for folder in folders[2:]:  # no recipe names the split "test"
        (folder / "evaluate" / "test").rename(folder / "evaluate" / "valid")
    command = f"python -m asr.evaluate {folders[0]} --split valid"
    out = report(commands, two_groups)
    assert f"WER of valid: 2 of 6 runs are not evaluated; {command}" in out
    for folder in folders[2:]:
        shutil.rmtree(folder / "evaluate")
    recipe = folders[0] / "recipe.yaml"
    write_recipe(read_recipe(recipe, ["data.test={held-out: x.tsv}"]), recipe)
    out = report(commands, two_groups, "--ignore", "data.test.held-out")
    assert "No run has a WER. Evaluate each, then compare again: " in out
    assert f"python -m asr.evaluate {folders[0]} --split held-out" in out


def test_rates_of_untrained_models_are_named(tmp_path, commands):
    for norm, wrong in (("ba", 0), ("none", 50)):
        run = make_run(tmp_path / "s" / norm, [f"model.listener.norm={norm}"], falling(0.1))
        hypotheses = ["x y z" if number < wrong else "a b d" for number in range(50)]
        write_evaluation(run / "evaluate" / "test", score(["a b d"] * 50, hypotheses))
    out = report(commands, tmp_path / "s")
    assert "WER of test: that of listener.norm=none is typical of an untrained model: an" in out


def test_runs_that_failed_are_listed_and_do_not_count(two_groups, commands, tmp_path):
    norm = "model.listener.norm=none"
    make_run(two_groups / "nan", [norm, "seed=4"], [1.0, 0.9, float("nan")])
    make_run(two_groups / "hung", [norm, "seed=5"], [1.0, 0.9], done=False)
    (two_groups / "half").mkdir()
    (two_groups / "half" / "recipe.yaml").write_text("run: half\nseed: 1\ntrain:\n  ep")
    (two_groups / "crashed").mkdir()
    (two_groups / "crashed" / "console.log").write_text("$ train\nerror: no such corpus\n")
    make_run(two_groups / "silent", [norm, "seed=6"], [])
    (two_groups / "silent" / "events.out.tfevents.0000000007.x").unlink()
    (two_groups / "lost").mkdir()
    (two_groups / "compare").mkdir()  # of a report that could not be written
    out = report(commands, two_groups)
    text = (two_groups / "compare" / "compare.md").read_text()
    failed = dict(rows(text, "Runs that are not counted"))
    assert set(failed) == {"nan", "hung", "half", "crashed", "silent", "lost"}
    assert "diverged: train/nll is not finite from step 30 on" in failed["nan"].replace("\\", "")
    assert "not finished, last seen at step 20" in failed["hung"]
    assert "no such corpus" in failed["crashed"]
    assert "no event file" in failed["silent"]
    counted = {row[0]: row[1] for row in rows(text, "Validation loss")}
    assert counted == {"listener.norm=ba": "3", "listener.norm=none": "3 + 3 not counted"}
    levels = [row[1:3] for row in rows(text, "Until the loss first passes a level")]
    assert ["listener.norm=none", "3 of 3 + 3 not counted"] in levels
    assert "listener.norm=none: 3 of 6 runs are not counted, which favours a setting" in out
    (answer,) = [line for line in out.splitlines() if "0.4480 higher" in line]
    assert answer.endswith(" Not counted (see Notes): 3 runs without a result.")


def test_a_run_that_two_sweeps_share_counts_once(two_groups, commands, tmp_path):
    before = report(commands, two_groups)
    for number in (1, 2, 3):
        shutil.copytree(two_groups / f"ba-{number}", tmp_path / "again" / f"ba-{number}")
    out = report(commands, two_groups, tmp_path / "again", "--out", tmp_path / "c")
    note = "listener.norm=ba: 3 runs repeat a seed; the last run of each seed counts"
    assert note in out and note not in before
    blocks = [text.split("\nWER of test, %\n")[1].split("\n\nfiles")[0] for text in (before, out)]
    assert blocks[0] == blocks[1]


def test_utterances_that_were_not_decoded_are_noted(two_groups, commands):
    folder = two_groups / "ba-2" / "evaluate" / "test"
    write_evaluation(folder, score(["a b d"] * 20, [""] * 20), {"not_decoded": 11})
    note = f"{folder}: 11 utterances not decoded, scored as empty."
    assert note in report(commands, two_groups)


def test_a_tiny_difference_is_not_called_equal(tmp_path, commands):
    for seed, shift in enumerate((0, 1e-7, 2e-7)):
        for norm, more in (("ba", 0), ("none", 3e-5 + shift)):
            run = tmp_path / "s" / f"{norm}{seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(0.1 + more))
    out = report(commands, tmp_path / "s")
    assert "Next: listener.norm=none, less than 0.0001 higher (" in out


def test_another_vocabulary_is_flagged_and_excluded(two_groups, commands):
    make_run(two_groups / "x", ["text.kind=bpe"], falling(0.01), vocabulary='{"a": 1}')
    out = report(commands, two_groups)
    assert "another vocabulary" in out and "not comparable" in out
    text = (two_groups / "compare" / "compare.md").read_text()
    assert [row[2] for row in rows(text, "Validation loss")].count("not comparable") == 1
    assert "kind=bpe" not in text.split("## Until")[1].split("##")[0]


@pytest.mark.parametrize("key", ["data.valid", "data.folder"])
def test_runs_that_were_validated_on_other_data_of_one_name_are_not_compared(
    two_groups, commands, monkeypatch, key
):
    """Even if the file of that name is now the same for all."""
    monkeypatch.chdir(two_groups)
    Path("valid.tsv").write_text("now the same for all\n")
    for run in sorted(two_groups.glob("*-*")):
        content = {key: {SHA256: run.name.partition("-")[0]}}
        save_checkpoint(run, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    out = report(commands, two_groups)
    assert "other validation data" in out and "not comparable" in out
    assert "Pairs of settings: best loss" not in (two_groups / "compare/compare.md").read_text()


def test_training_data_of_one_name_and_objectives_of_programs_are_settings(tmp_path, commands):
    """Recipes are equal; what was learned from differs."""
    plain, mine = {"class": "SpeechObjective", SHA256: "0"}, {"class": "Mine", SHA256: "12345678"}
    variants = {"a": ("first", plain), "b": ("second", plain), "c": ("first", mine)}
    for seed in (1, 2):
        for name, (data, objective) in variants.items():
            run = tmp_path / "s" / f"{name}{seed}"
            make_run(run, [f"seed={seed}"], falling(0.1))
            content = {"data.train": {SHA256: data}, "objective": objective}
            save_checkpoint(run, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    report(commands, tmp_path / "s")
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    losses = {row[0]: row[1] for row in rows(text, "Validation loss")}
    assert losses == {
        "A. training data=first": "2",
        "B. training data=second": "2",
        "C. training data=first objective=Mine@12345678": "2",
    }
    # The same data under another name are no other setting.
    for seed, path in ((3, "there.tsv"), (4, "elsewhere.tsv")):
        run = tmp_path / "u" / f"moved{seed}"
        make_run(run, [f"seed={seed}", f"data.train={path}"], falling(0.1))
        content = {"data.train": {SHA256: "third"}, "data.valid": {SHA256: "0"}}
        save_checkpoint(run, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    report(commands, tmp_path / "u")
    text = (tmp_path / "u" / "compare" / "compare.md").read_text()
    assert [row[1] for row in rows(text, "Validation loss")] == ["2"]
    # Another name of other data already distinguishes them.
    make_run(tmp_path / "t" / "named", ["data.train=other.tsv"], falling(0.1))
    content = {"data.train": {SHA256: "second"}}
    named = tmp_path / "t" / "named"
    save_checkpoint(named, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    out = report(commands, tmp_path / "s" / "a1", named, "--out", tmp_path / "c")
    assert "training data" not in out and "other.tsv" in out


def test_a_run_lost_before_its_first_checkpoint_keeps_its_setting(tmp_path, commands):
    """Its data are unknown; those of other runs still distinguish these."""
    for data, norm, seed in (
        *(("first", norm, seed) for norm in ("ba", "none") for seed in (1, 2)),
        *(("second", "ba", seed) for seed in (3, 4)),
    ):
        run = tmp_path / "s" / f"{norm}{seed}"
        make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(0.1 + seed / 100))
        content = {"data.train": {SHA256: data}, "data.valid": {SHA256: "0"}}
        save_checkpoint(run, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    lost = ["model.listener.norm=none", "seed=5"]
    make_run(tmp_path / "s" / "lost", lost, [1.0, np.nan], done=False)
    report(commands, tmp_path / "s")
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    found = {row[0].partition(". ")[2]: row[1:3] for row in rows(text, "Validation loss")}
    assert {name: row[0] for name, row in found.items()} == {
        "listener.norm=ba training data=first": "2",
        "listener.norm=none training data=first": "2 + 1 not counted",
        "listener.norm=ba training data=second": "2",
    }


def test_means_of_unequal_seeds_may_contradict_the_pairs(tmp_path, commands):
    for norm, seed, loss in (
        *(("ba", 1, 0.5), ("ba", 2, 0.52), ("ba", 3, 0.1)),
        *(("none", 1, 0.4), ("none", 2, 0.43)),
    ):
        run = tmp_path / "s" / f"{norm}{seed}"
        make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(loss))
    out = report(commands, tmp_path / "s")
    assert "best mean: listener.norm=ba" in out and "Next: listener.norm=none, 0.0950 lower" in out
    assert "On the 2 seeds of both it is better: they have unequal numbers of seeds." in out


def test_more_settings_than_are_paired_are_tested_against_the_first(tmp_path, commands):
    for size, seed in product(range(17), (1, 2)):
        loss = (0.1 if size else 0.5) + 1e-4 * seed * size
        settings = [f"model.listener.hidden={8 + 2 * size}", f"seed={seed}"]
        make_run(tmp_path / "s" / f"{size}-{seed}", settings, falling(loss))
    out = report(commands, tmp_path / "s")
    assert "17 groups: tested against the first, listener.hidden=8, only." in out
    assert "best mean: listener.hidden=10, significantly better than 1 of the 1 that it is" in out


def test_values_in_brackets_are_text_in_latex(tmp_path):
    for speeds in ("[0.9,1.1]", "[1.0]"):
        make_run(tmp_path / "s" / speeds, [f"features.speed_perturb={speeds}"], falling(0.1))
    table = compare_runs([tmp_path / "s"]).to_latex()
    assert "\n{}[0.9,1.1] & " in table and "\n{}[1.0] & " in table


@pytest.mark.parametrize("curve", ["valid/accuracy", "valid/diagonality", "speed/audio_hours"])
def test_a_curve_whose_highest_value_is_the_best_is_refused(curve, two_groups, commands):
    line = commands.refused(compare, two_groups, "--curve", curve)
    assert line.startswith(f"curve {curve}: no loss")


def test_a_figure_names_the_curve_whose_best_value_it_is(two_groups):
    figures = {row["figure"] for row in compare_runs([two_groups], "train/nll").rows()}
    assert "best train/nll" in figures and "best loss" not in figures


def test_a_full_disk_is_reported(drawn, two_groups, commands):
    with full_disk(1000):
        line = commands.refused(compare, two_groups)
    assert line == f"{two_groups / 'compare' / 'seeds.png'}: File too large"
    assert list((two_groups / "compare").iterdir()) == []


def test_no_report_is_written_through_a_link(two_groups, commands, tmp_path):
    (tmp_path / "mine").write_text("good")
    out = two_groups / "compare"
    out.mkdir()
    for name in ("curves.png", "seeds.svg", "compare.md", "compare.html"):
        (out / name).symlink_to(tmp_path / "mine")
    report(commands, two_groups)
    assert (tmp_path / "mine").read_text() == "good" and not (out / "curves.png").is_symlink()
    out.rename(tmp_path / "elsewhere")
    out.symlink_to(tmp_path / "elsewhere")
    assert commands.refused(compare, two_groups).startswith(f"{out}: a symbolic link")


def test_a_run_without_a_checkpoint_counts_as_the_same_data(two_groups, commands, monkeypatch):
    """The others' checkpoints contain the hash of the validation data."""
    monkeypatch.chdir(two_groups)
    Path("valid.tsv").write_text("unchanged\n")
    content = {"data.valid": {SHA256: sha256_of_files([Path("valid.tsv")])}}
    for run in sorted(two_groups.glob("*-*"))[1:]:
        save_checkpoint(run, nn.Linear(2, 3), training_state(content=content), 100, 0.5, {})
    assert "other validation data" not in report(commands, two_groups)


def test_runs_of_one_name_in_two_sweeps_are_two(tmp_path, commands):
    """Each sweep names its runs seed=1, seed=2; their curves are kept apart."""
    for norm, floor in (("none", 0.5), ("ba", 0.1)):
        for seed in (1, 2):
            run = tmp_path / norm / f"seed={seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(floor))
    (tmp_path / "none" / "seed=3").mkdir()
    report(commands, tmp_path / "none", tmp_path / "ba", "--out", tmp_path / "c")
    text = (tmp_path / "c" / "compare.md").read_text()
    losses = {row[0]: (*row[1:4], row[5]) for row in rows(text, "Validation loss")}
    assert losses == {
        "listener.norm=none": ("2", "0.5000", "0.0000", "0.5000"),
        "listener.norm=ba": ("2", "0.1000", "0.0000", "0.1000"),
    }
    assert [row[0] for row in rows(text, "Runs that are not counted")] == ["seed=3"]


@pytest.mark.slow
def test_long_setting_names_have_letters_where_two_share_a_row(drawn, tmp_path, commands):
    """The figure, which labels its levels beside the lines, has the full names."""
    for norm in ("none", "ba"):
        for dropout in (0.1, 0.2):
            changes = [f"model.listener.norm={norm}", f"model.listener.dropout={dropout}"]
            make_run(tmp_path / "s" / f"{norm}{dropout}", changes, falling(0.1))
    report(commands, tmp_path / "s", "--levels", "0.77")
    folder = tmp_path / "s" / "compare"
    text, picture = ((folder / f).read_text() for f in ("compare.md", "curves.svg"))
    settings = [row[0] for row in rows(text, "Validation loss")]
    assert settings[0].startswith("A. ") and "listener.dropout=0.1" in settings[0]
    pairs = [row[:2] for row in rows(text, "Pairs of settings: best loss")]
    assert pairs == [list(pair) for pair in ("AB", "AC", "AD", "BC", "BD", "CD")]
    letters = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    labels = {setting.partition(". ")[2] for setting in settings}
    assert {*labels, "0.77", "nll", "step", "valid/nll"} <= set(letters)


def test_accuracies_of_images_are_compared_too(tmp_path, commands):
    """Their score.json has no word counts; one of them is truncated."""
    right = {"ba": (0.98, 0.99, 0.985), "none": (0.95, 0.97, 0.96)}
    for norm, accuracies in right.items():
        for seed, accuracy in enumerate(accuracies):
            run = tmp_path / "s" / f"{norm}{seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(0.1))
            (run / "evaluate" / "test").mkdir(parents=True)
            score_json = {
                "accuracy": accuracy,
                "nll": 0.5,
                "images": 7,
                "accuracy_interval": [0, 1],
            }
            (run / "evaluate" / "test" / "score.json").write_text(json.dumps(score_json))
    broken = make_run(tmp_path / "s" / "x", ["model.listener.norm=ba", "seed=7"], falling(0.1))
    (broken / "evaluate" / "test").mkdir(parents=True)
    (broken / "evaluate" / "test" / "score.json").write_text('{"accu')
    out = report(commands, tmp_path / "s")
    assert out.count("skipped: ") == 1 and "x/evaluate/test: damaged" in out
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    ba, none = rows(text, "Accuracy of test, %")
    low, high = stats.t.interval(0.95, 2, 98.5, stats.sem([98, 99, 98.5]))
    assert ba[1:] == ["3", "98.50", "0.50", f"{low:.2f} to {high:.2f}", "98.00, 99.00, 98.50"]
    assert out.startswith("accuracy of test: listener.norm=ba is the best of 2 settings, 98.50 %")
    assert none[2] == "96.00"
    (pair,) = rows(text, "Pairs of settings: accuracy of test")
    judge = stats.ttest_rel(right["none"], right["ba"])
    assert pair[2] == "-2.50" and pair[5] == f"{judge.pvalue:.3f}" and pair[-1] == "yes"
    assert rows(text, "Nll of test")[0][2] == "0.5000"


def test_intervals_of_rates_are_cut_at_0_and_100_percent(tmp_path, commands):
    """That of word error rates above 100 % at 0 alone; losses are no rates."""
    for norm, rates in (("ba", (0.99, 0.93)), ("none", (0.02, 0.09)), ("cell", (0.5, 1.2))):
        for seed, rate in enumerate(rates):
            run = tmp_path / "s" / f"{norm}{seed}"
            make_run(run, [f"model.listener.norm={norm}", f"seed={seed}"], falling(0.1 + rate / 9))
            (run / "evaluate" / "test").mkdir(parents=True)
            content = {"accuracy": min(rate, 1.0), "nll": rate}
            (run / "evaluate" / "test" / "score.json").write_text(json.dumps(content))
            errors = round(100 * rate)
            hypothesis = " ".join(["x"] * errors + ["a"] * (100 - errors))
            write_evaluation(run / "evaluate" / "w", score(["a " * 100], [hypothesis]))
    report(commands, tmp_path / "s")
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    of = {row[0].partition("=")[2]: row[4] for row in rows(text, "Accuracy of test, %")}
    low, _ = stats.t.interval(0.95, 1, 96, stats.sem([99, 93]))
    _, high = stats.t.interval(0.95, 1, 5.5, stats.sem([2, 9]))
    assert of["ba"] == f"{low:.2f} to 100.00" and of["none"] == f"0.00 to {high:.2f}"
    of = {row[0].partition("=")[2]: row[4] for row in rows(text, "WER of w, %")}
    _, high = stats.t.interval(0.95, 1, 85, stats.sem([50, 120]))
    assert of["ba"] == f"{low:.2f} to 100.00" and of["cell"] == f"0.00 to {high:.2f}" and high > 100
    assert rows(text, "Nll of test")[1][4].startswith("-")


def test_one_run_alone(drawn, tmp_path, commands, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "only", [], falling(0.1))
    out = report(commands, run)
    assert out.startswith("1 run in 1 group by") and "best mean" not in out
    assert (tmp_path / "compare" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_long_names_are_spelled_out_once(drawn, tmp_path, commands):
    many = ["model.listener.dropout=0.2", "model.speller.dropout=0.3", "train.optimizer.lr=0.01"]
    many += ["features.mel_bins=40", "train.batch_seconds=30", "model.attention_size=96"]
    for name, overrides in (("a", []), ("b", many)):
        make_run(tmp_path / "s" / name, overrides, falling(0.1))
    out = report(commands, tmp_path / "s")
    assert "\n- B. " in out and out.count("mel_bins=40") == 1
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    assert [row[0] for row in rows(text, "Validation loss")] == ["A", "B"]
    picture = (tmp_path / "s" / "compare" / "curves.svg").read_text()
    assert ">train.batch_seconds=30.0 " in picture  # figures are often shown without the tables


def test_seeds_that_started_from_weights_of_their_own_can_be_pooled(tmp_path, commands):
    for seed, norm in ((1, "ba"), (2, "ba"), (1, "none"), (2, "none")):
        started = f"train.init=runs/{norm}{seed}"
        folder = tmp_path / "s" / f"{norm}{seed}"
        make_run(folder, [f"model.listener.norm={norm}", f"seed={seed}", started], falling(0.1))
    text = tmp_path / "s" / "compare" / "compare.md"
    report(commands, tmp_path / "s")
    assert [row[1] for row in rows(text.read_text(), "Validation loss")] == ["1"] * 4
    report(commands, tmp_path / "s", "--ignore", "train.init")
    pooled = rows(text.read_text(), "Validation loss")
    assert [row[:2] for row in pooled] == [["listener.norm=ba", "2"], ["listener.norm=none", "2"]]


def test_one_common_seed_gives_no_conclusion_for_other_seeds(tmp_path, commands):
    """However significant the difference of the two models is."""
    for norm, wrong in (("ba", 0), ("none", 40)):
        make_run(
            tmp_path / "s" / norm,
            [f"model.listener.norm={norm}"],
            falling(0.1),
            errors=[number < wrong for number in range(50)],
        )
    out = report(commands, tmp_path / "s")
    lines = out.splitlines()
    assert (
        "no difference can be tested over seeds among 2 settings; best mean: listener.norm=ba"
        in lines[0]
    )
    assert "p < 0.001, over utterances, for these two models). One seed in common" in lines[1]
    assert (
        "listener.norm=none, equal. One seed in common allows no conclusion for others" in lines[3]
    )
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    (loss,) = rows(text, "Pairs of settings: best loss")
    (rate,) = rows(text, "Pairs of settings: WER of test")
    assert loss[3:] == ["1", "–", "–", "unknown: one seed"]
    assert rate[3:6] == ["1", "–", "–"] and rate[-1] == "unknown: one seed"
    assert "&lt; 0.001" in rate  # for these two models it is significant


def test_no_seed_in_common_is_not_tested(tmp_path, commands):
    for seed, norm in enumerate(("ba", "none")):
        make_run(tmp_path / norm, [f"model.listener.norm={norm}", f"seed={seed}"], falling(0.1))
    out = report(commands, tmp_path / "ba", tmp_path / "none", "--out", tmp_path / "c")
    assert out.count("have no seed in common: their difference is not tested") == 1
    assert "No pair is tested (see Notes)." in out and "One seed" not in out
    assert "Pairs of settings" not in (tmp_path / "c" / "compare.md").read_text()


def test_a_figure_that_no_common_seed_has_is_named(tmp_path, commands):
    """Both settings have seeds 1 and 2; one was evaluated with seed 1, the other with seed 2."""
    for norm, seed in product(("ba", "none"), (1, 2)):
        errors = [seed == 1] * 20 if (norm == "ba") == (seed == 1) else None
        keys = [f"model.listener.norm={norm}", f"seed={seed}"]
        make_run(tmp_path / "s" / f"{norm}{seed}", keys, falling(0.1), errors=errors)
    out = report(commands, tmp_path / "s")
    assert out.count("have no seed in common") == 1
    assert "- WER of test: listener.norm=ba and listener.norm=none have no seed in common" in out
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    assert "Pairs of settings: best loss" in text and "Pairs of settings: WER" not in text


def test_seeds_that_disagree_leave_a_difference_to_the_models(tmp_path, commands):
    """Significant over utterances, but one seed has the opposite sign."""
    for norm, wrong in (("ba", (5, 5, 9)), ("none", (30, 20, 8))):
        for seed, count in enumerate(wrong):
            overrides = [f"model.listener.norm={norm}", f"seed={seed}"]
            errors = [number < count for number in range(50)]
            make_run(tmp_path / "s" / f"{norm}{seed}", overrides, falling(0.1), errors=errors)
    report(commands, tmp_path / "s")
    text = (tmp_path / "s" / "compare" / "compare.md").read_text()
    (rate,) = rows(text, "Pairs of settings: WER of test")
    judge = stats.ttest_rel([30, 20, 8], [5, 5, 9])
    assert rate[5] == f"{judge.pvalue:.3f}" and judge.pvalue > 0.05
    assert rate[-1] == "of these models only"


def test_tables_for_papers_have_the_results(two_groups, commands, tmp_path):
    """The CSV as its reader sees it; the LaTeX with figures by scipy, the winner alone in bold."""
    out = tmp_path / "new" / "t.csv"
    report(commands, two_groups, "--csv", out, "--latex", tmp_path / "t.tex")
    with out.open() as file:
        table = list(csv.DictReader(file))
    assert [(row["figure"], row["listener.norm"], row["best"]) for row in table] == [
        ("WER of test", "ba", "False"), ("WER of test", "none", "False"),
        ("best loss", "ba", "True"), ("best loss", "none", "False"),
    ]  # fmt: skip
    best = np.array([0.101, 0.112, 0.083])
    low, high = stats.t.interval(0.95, 2, best.mean(), stats.sem(best))
    numbers = [float(table[2][name]) for name in ("runs", "mean", "sd", "low", "high")]
    assert numbers == pytest.approx([3, best.mean(), best.std(ddof=1), low, high], abs=1e-6)
    latex = (tmp_path / "t.tex").read_text()
    assert "listener.norm & WER of test, \\% & best loss \\\\\n" in latex
    assert rf"ba & $1.67$ & $\mathbf{{{best.mean():.4f}}}$ (${low:.4f}$" in latex
    assert latex.count("mathbf") == 1 and "none & $20.00$ & $0.5467^{*}$" in latex
    others = np.array([0.55, 0.56, 0.53])
    p = stats.ttest_rel(others, best).pvalue
    assert [row["p"] for row in table[::2]] == ["", ""]
    assert float(table[3]["p"]) == pytest.approx(p, rel=1e-3)
    assert float(table[3]["difference"]) == pytest.approx(others.mean() - best.mean(), abs=1e-6)
    assert latex.count(" & ") == 6 and latex.rstrip().endswith(r"\end{tabular}")


def test_with_a_baseline_holm_counts_only_pairs_with_it(tmp_path, commands):
    """With p of scipy's paired t test, times 2 and 1 instead of 3, 2 and 1."""
    losses = {"ba": [0.10, 0.13, 0.11], "none": [0.15, 0.17, 0.17], "joined": [0.19, 0.24, 0.20]}
    for norm, values in losses.items():
        for seed, loss in enumerate(values):
            keys = [f"model.listener.norm={norm}", f"seed={seed}"]
            make_run(tmp_path / "s" / f"{norm}{seed}", keys, falling(loss))
    raw = {n: stats.ttest_rel(losses[n], losses["ba"]).pvalue for n in ("none", "joined")}
    small, large = sorted(raw, key=raw.get)
    wanted = {small: 2 * raw[small], large: max(2 * raw[small], raw[large])}
    comparison = compare_runs([tmp_path / "s"], baseline="listener.norm=ba")
    rows = {row["listener.norm"]: row for row in comparison.results()}
    assert {n: rows[n]["p"] for n in wanted} == pytest.approx(wanted, rel=1e-3)
    assert len(comparison.rows()) == 2 and rows["ba"]["p"] is None and rows["ba"]["best"]
    assert comparison.to_latex().count("^{*}$") == sum(p < 0.05 for p in wanted.values()) == 2
    out = report(commands, tmp_path / "s", "--baseline", "listener.norm=joined")
    assert "best mean: listener.norm=ba, significantly better than 1 of the 1" in out
    line = commands.refused(compare, tmp_path / "s", "--baseline", "norm=ba")
    assert line == (
        "--baseline norm=ba: no such setting; there are: listener.norm=ba; listener.norm=joined; "
        "listener.norm=none"
    )


def test_tables_for_papers_count_failed_runs(tmp_path):
    for norm, seeds, done in (("ba", 3, 3), ("none", 3, 1), ("joined", 2, 0)):
        for seed in range(seeds):
            settings = [f"model.listener.norm={norm}", f"seed={seed}"]
            make_run(tmp_path / f"{norm}{seed}", settings, falling(0.1), done=seed < done)
    comparison = compare_runs(sorted(tmp_path.iterdir()))
    rows = {row["listener.norm"]: row for row in comparison.results()}
    assert {n: (r["runs"], r["failed"]) for n, r in rows.items()} == {
        "ba": (3, 0), "none": (1, 2), "joined": (0, 2),
    }  # fmt: skip
    assert rows["joined"]["mean"] is None
    assert comparison.to_csv().count("\n") == 4
    latex = comparison.to_latex()
    assert "listener.norm & runs & best loss" in latex and "none & 1 of 3 & $" in latex
    assert "joined & 0 of 2 & -- " in latex
    assert "\n% listener.norm=none: 2 of 3 runs are not counted" in latex


def test_rates_over_words_are_compared_between_vocabularies(tmp_path):
    for size in (8, 9):
        run = make_run(tmp_path / str(size), ["text.kind=bpe", f"text.size={size}"], falling(0.1))
        (run / "tokenizer.json").write_text(f'{{"size": {size}}}')
        rates = [scalar_event("valid/wer", step, 0.1 * size) for step in STEPS[:3]]
        write_events(run / "events.out.tfevents.0000000008.y", rates)
    for curve, comparable in (("valid/nll", [True, False]), ("valid/wer", [True, True])):
        settings = compare_runs([tmp_path / "8", tmp_path / "9"], curve).settings
        assert [setting.comparable for setting in settings] == comparable


def test_a_norm_of_another_program_is_compared_by_its_name(tmp_path):
    asr.register_norm("mine", lambda size: nn.LayerNorm(size, elementwise_affine=False))
    for kind in ("mine", "rms"):
        make_run(tmp_path / kind, [f"model.listener.norm_kind={kind}"], falling(0.1))
    del REGISTERED["mine"]
    settings = compare_runs([tmp_path / "mine", tmp_path / "rms"]).settings
    assert [s.factors["listener.norm_kind"] for s in settings] == ["mine", "rms"]
    with pytest.raises(UserError, match=r"asr\.register_norm"):
        read_recipe(tmp_path / "mine")


def test_a_table_has_all_settings_of_unequal_models(tmp_path, commands):
    """Special characters are escaped; one run has no interval."""
    make_run(tmp_path / "a", ["text.kind=bpe", "data.train=a_b&c%#~^.tsv"], falling(0.1))
    make_run(tmp_path / "b", ["model.listener.norm=none", "data.train=x{}\\$.tsv"], falling(0.2))
    report(commands, tmp_path / "a", tmp_path / "b", "--latex", tmp_path / "t.tex")
    latex = (tmp_path / "t.tex").read_text()
    assert r"a\_b\&c\%\#\textasciitilde{}\textasciicircum{}.tsv" in latex
    assert r"\{\}\textbackslash{}\$.tsv" in latex and "$0.1000$ \\" in latex
    unescaped = re.sub(r"\\[&%$#_{}\\]|\\[a-z]+(\{[^}]*\})*", "", latex.partition("rule")[2])
    assert not re.search(r"[#_^~]", unescaped)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["good", "--csv", "good"], "--csv good: not a regular file"),
        (["good", "--latex", "/dev/null"], "--latex /dev/null: not a regular file"),
        (["good", "--csv", "good/recipe.yaml/x"], "good/recipe.yaml: File exists"),
        (["missing"], "missing: there is no such folder"),
        (["empty"], "empty: no run and no folder of runs"),
        (["bad"], "none of the 1 runs can be compared"),
        (["good", "--levels", "x"], "argument --levels: 'x': must be above 0, and finite"),
        (["good", "--ignore", "train.begin"], "--ignore train.begin: no run has such a setting"),
    ],
)
def test_errors_are_one_line(arguments, line, tmp_path, commands, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "good", [], falling(0.1))
    make_run(tmp_path / "bad", [], falling(0.1), done=False)
    assert line in commands.refused(compare, *arguments)


def test_events_are_read_as_tensorboard_reads_them(tmp_path):
    """A run killed after step 6 and resumed there, with images between, and a truncated record."""
    random = np.random.default_rng(1)
    with SummaryWriter(str(tmp_path), filename_suffix=".a") as first:
        for step in range(1, 400, 3):
            first.add_scalar("valid/nll", random.random(), step)
            first.add_scalar("valid/nll2", 9.0, step)
            first.add_image(
                "x", random.integers(0, 255, (8, 9, 3), dtype=np.uint8), step, dataformats="HWC"
            )
    (old,) = tmp_path.glob("*.a")
    old.rename(tmp_path / "events.out.tfevents.0000000001.a")
    with SummaryWriter(str(tmp_path), purge_step=200, filename_suffix=".b") as second:
        for step in range(200, 300):
            second.add_scalar("valid/nll", -step, step)
        second.add_scalar("valid/nll", float("nan"), 300)
    with next(tmp_path.glob("*.b")).open("ab") as file:
        file.write(scalar_event("valid/nll", 301, 1.0).SerializeToString()[:20])
    actual = read_scalars(tmp_path, ["valid/nll", "none"])
    expected = [(e.step, e.value) for e in events(tmp_path).Scalars("valid/nll")]
    ours = actual["valid/nll"]
    np.testing.assert_array_equal(np.transpose([ours.steps, ours.values]), expected)
    assert len(actual["none"]) == 0


def test_t_intervals_and_paired_tests_agree_with_scipy():
    random = np.random.default_rng(3)
    for count in (2, 3, 4, 5, 8, 30):
        a, b = random.normal(size=(2, count))
        actual = spread(a)
        assert actual.sd == pytest.approx(a.std(ddof=1))
        assert actual.interval == pytest.approx(
            stats.t.interval(0.95, count - 1, a.mean(), stats.sem(a))
        )
        assert paired_t(a, b).p == pytest.approx(stats.ttest_rel(b, a).pvalue)
    assert (
        spread([2.0]).interval is spread([0.1, 0.1]).interval is None
        and paired_t([1.0], [2.0]) is None
    )
    assert paired_t([1.0, 2.0], [1.0, 2.0]).p == 1


@pytest.mark.parametrize("unit", [1.0, 1 / 360, 1e6])
def test_seeds_with_equal_differences_are_tested_by_their_signs(unit):
    """Even if rounding makes them differ in the last digit, as error rates do."""
    for count in (2, 3, 6, 10):
        first = unit * np.arange(1, count + 1)
        actual = paired_t(first, first + unit)
        judge = stats.binomtest(count, count).pvalue
        assert actual.p == pytest.approx(judge) and actual.interval is None and actual.sd == 0


def test_equal_error_rates_are_rarely_called_different():
    draws = np.random.default_rng(1).poisson(3.0, size=(4000, 2, 2)) / 360
    assert np.mean([paired_t(a, b).p < 0.05 for a, b in draws]) < 0.05


@pytest.mark.parametrize(("count", "tests"), [(2, 1), (3, 1), (5, 1), (40, 1), (3, 6), (8, 45)])
def test_what_seeds_can_show_they_show_in_four_of_five_repetitions(count, tests):
    """Checked by simulated experiments."""
    size = detectable(count, 0.3, tests)
    drawn = np.random.default_rng(5).normal(size, 0.3, size=(20_000, count))
    share = np.mean(stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05 / tests)
    assert share == pytest.approx(0.8, abs=0.015)


@pytest.mark.parametrize(("difference", "tests"), [(3.5, 1), (1.0, 1), (1.0, 6), (0.3, 6)])
def test_the_pairs_needed_are_the_first_that_suffice(difference, tests):
    every = [count for count in range(2, 1001) if detectable(count, 1.0, tests) <= difference]
    assert pairs_needed(difference, 1.0, tests) == min(every)
    assert pairs_needed(1e-4, 1.0, tests) is None and pairs_needed(1e4, 1.0, tests) == 2


def three_factors(missing=()):
    """cells of a 2 x 3 x 2 grid with three seeds, and random figures."""
    random = np.random.default_rng(11)
    names = {"a": "01", "b": "xyz", "c": "pq"}
    return {
        (tuple(zip(names, values, strict=True)), seed): random.normal()
        for values in product(*names.values())
        for seed in (1, 2, 3)
        if (*values, seed) not in missing
    }


@pytest.mark.parametrize("missing", [(), (("0", "x", "p", 1), ("1", "z", "q", 3))])
def test_effects_are_means_over_all_other_factors_and_tested_over_seeds(missing):
    """By pairs that are searched for among all runs, and scipy."""
    cells = three_factors(missing)
    found = effects(cells)
    assert [(e.factor, e.first, e.second) for e in found] == [
        ("a", "0", "1"), ("b", "x", "y"), ("b", "x", "z"), ("b", "y", "z"), ("c", "p", "q")
    ]  # fmt: skip
    p = []
    for effect in found:
        seeds = {1: [], 2: [], 3: []}
        for (first, seed), one in cells.items():
            for (second, other), two in cells.items():
                if (
                    seed == other
                    and set(first) - set(second) == {(effect.factor, effect.first)}
                    and set(second) - set(first) == {(effect.factor, effect.second)}
                ):
                    seeds[seed].append(two - one)
        means = [np.mean(differences) for differences in seeds.values()]
        judge = stats.ttest_1samp(means, 0)
        assert effect.seeds == 3 and sum(map(len, seeds.values())) >= 10
        assert effect.test.mean == pytest.approx(np.mean(means))
        assert effect.test.interval == pytest.approx(judge.confidence_interval())
        p.append(judge.pvalue)
    assert [effect.test.p for effect in found] == pytest.approx(holm(p))


def test_settings_that_are_no_grid_have_no_effects():
    """Two settings that differ in both factors, or in one alone."""
    both = {((("a", v), ("b", v)), seed): 1.0 for v in "01" for seed in (1, 2)}
    one = {((("a", v),), seed): 1.0 for v in "01" for seed in (1, 2)}
    assert effects(both) == effects(one) == effects({}) == large_interactions(both) == []


def test_interactions_are_found_where_both_effects_reverse_or_it_is_significant():
    def grid(figure):
        return {
            ((("a", a), ("b", b)), seed): figure(int(a), int(b)) + 1e-3 * seed**2 * (a == b)
            for a, b in product("01", repeat=2)
            for seed in (1, 2, 3)
        }

    (reversed_,) = large_interactions(grid(lambda a, b: float(a != b)))
    assert reversed_.crosses and reversed_.test.p < 0.05 and reversed_.values == ("0", "1")
    assert reversed_.effects == pytest.approx((1 - 14e-3 / 3, -1 + 14e-3 / 3))
    (larger,) = large_interactions(grid(lambda a, b: a * (1 + b)))
    assert not larger.crosses and larger.test.p < 0.05
    assert large_interactions(grid(lambda a, b: 3.0 * a + 2.0 * b + 0.02)) == []
    whole = grid(lambda a, b: float(a != b))
    assert effects({cell: v for cell, v in whole.items() if cell[1] == 1}) == []
    # Only the first seed has all four corners, but two have both values of each factor.
    last = (("a", "1"), ("b", "1"))
    (untested,) = large_interactions({c: v for c, v in whole.items() if c[1] == 1 or c[0] != last})
    assert untested.test is None and untested.crosses


@pytest.mark.parametrize("shared", [0.0, 2.0])
def test_factors_without_effect_are_rarely_called_significant(shared):
    """A 2 x 3 grid with three seeds that shift all runs alike, and the runs of each value of `a`
    alike, as initial weights and the order of the data do; Holm's family.
    """
    random, count = np.random.default_rng(2), 2000
    settings = [(("a", a), ("b", b)) for a, b in product("01", "xyz")]
    wrong = 0
    for _ in range(count):
        shifts = random.normal(size=3)
        own = shared * random.normal(size=(3, 2))
        cells = {
            (s, n): shifts[n] + own[n, int(s[0][1])] + random.normal()
            for s in settings
            for n in (0, 1, 2)
        }
        wrong += any(e.test.p < 0.05 for e in effects(cells) if e.factor == "a")
    assert wrong / count < 0.05


def test_holm_by_hand():
    # Sorted 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1] and holm([]) == []


def test_levels_and_crossings():
    fast, slow = curve([1, 0.5, 0.2]), curve([1, 0.9, 0.6])
    assert [first_below(fast, level) for level in (0.5, 0.49, 0.1)] == [20, 30, None]
    assert choose_levels([[fast], [slow]]) == [0.8, 0.6, 0.2]
    assert choose_levels([[curve([float("nan")])], []]) == []
    # Of an even number of runs the typical one, which passes the level, is the worse of the middle.
    pair = [curve([1, 0.1]), curve([1, 0.3])]
    assert choose_levels([pair]) == [0.65, 0.3] and all(first_below(c, 0.3) for c in pair)
    assert median_reached([10, None, 30]) == 30 and median_reached([10, None]) is None
    assert median_reached([]) is None


def test_a_band_is_over_the_steps_that_all_runs_have():
    actual = band([curve([4, 2, 0]), curve([0, 4], steps=(10, 30))])
    assert list(actual.steps) == [10, 20, 30]
    assert list(actual.mean) == [2, 2, 2] and list(actual.low) == [0, 2, 0]
    assert list(actual.high) == [4, 2, 4]
    assert len(band([curve(np.arange(5000), range(5000))], 400).steps) == 400
    assert band([]) is None and band([curve([1]), curve([1], steps=(20,))]) is None


def test_families_with_different_keys_are_named_by_their_kind():
    las = {
        "model.kind": "las",
        "model.listener.norm": "ba",
        "seed": 1,
        "train.guided_attention": None,
    }
    other = {"model.kind": "transformer", "model.norm": "rms", "model.d": 7, "seed": 1}
    guided = {k: v for k, v in las.items() if k != "train.guided_attention"} | {
        "train.guided_attention.weight": 0.5
    }
    actual = group([las, las | {"seed": 2}, other, guided], ignore=["seed"])
    assert [g.members for g in actual] == [(0, 1), (2,), (3,)]
    assert [g.settings["kind"] for g in actual] == ["las", "transformer", "las"]
    assert actual[0].settings["weight"] == "null" and actual[2].settings["weight"] == "0.5"
    assert "listener.norm" not in actual[0].label and " d=" not in actual[1].label
    assert short_names(["model.listener.norm", "seed"], ["model.norm", "model.listener.norm"]) == {
        "model.listener.norm": "listener.norm", "seed": "seed"
    }  # fmt: skip


HOSTILE = "<script>alert(1)</script>|`*_[x](javascript:alert(1))&amp;"


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_a_value_beside_keys_of_a_group_is_a_setting():
    runs = [{"model.residual_scale": value} for value in (1.0, "deepnet", 2.0)]
    runs.append({"model.residual_scale.encoder": 1.2, "model.residual_scale.decoder": 1.0})
    groups = group([*runs, dict(runs[1])])
    assert [each.members for each in groups] == [(0,), (1, 4), (2,), (3,)]
    assert len({each.label for each in groups}) == 4


def test_hostile_text_stays_text():
    pages = [
        Elements(html(text, [text, f"{text}\n{text}"], [Table(text, [text], [[text]])]))
        for text in (HOSTILE, "x")
    ]
    assert pages[0].tags == pages[1].tags and pages[0].words.count(HOSTILE) == 8
    line = markdown("t", [], [Table("t", ["a", "b"], [[HOSTILE, "1"]])]).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 3 and "<" not in line and "\\[x\\]" in line


@pytest.mark.parametrize("other", [["q"], ["a", "b"]])
def test_evaluations_against_other_references_are_skipped(other, two_groups, commands):
    folders = sorted(two_groups.glob("*-?/evaluate/test"))
    for folder in folders:
        write_evaluation(folder, score(["a", "c"], ["a", "d"]))
    for folder in folders[-2:]:
        write_evaluation(folder, score(other, other))
    out = report(commands, two_groups)
    skipped = "skipped for none-2, none-3, scored against other references than ba-1"
    assert f"WER of test: {skipped}" in out
    comparison = compare_runs([two_groups])
    figures = [m.figures for setting in comparison.settings for m in setting.members]
    assert [one.get("WER of test") for one in figures] == [0.5] * 4 + [None] * 2
    (pair,) = comparison.differences["WER of test"]
    assert (pair.mean, pair.seeds) == (0, 1)
    assert {row["mean"] for row in comparison.results() if row["figure"] == "WER of test"} == {0.5}


def test_decoding_makes_no_group_but_a_note(two_groups, commands):
    """Runs of one training that were decoded or tuned differently."""
    for number, folder in enumerate(sorted(two_groups.glob("*-?/evaluate/test"))):
        about = {"decode": {"beam": 1 + number // 3, "batch_seconds": number, "lm": None}}
        about["decode"] |= {"speeds": [1.0]} if number % 2 else {}  # a key that old runs lack
        about["overrides"] = ["features.mvn=none"] * (number == 5)
        wrong = ["a b c" if index < number else "a b d" for index in range(20)]
        write_evaluation(folder, score(["a b d"] * 20, wrong), about)
        recipe = folder.parents[1] / "recipe.yaml"
        write_recipe(read_recipe(recipe, [f"decode.beam={1 + number // 3}"]), recipe)
    out = report(commands, two_groups)
    line = next(line for line in out.splitlines() if "not all decoded alike" in line)
    assert "beam 1 in ba-1, 2 in none-1" in line and not re.search("batch_seconds|speeds", line)
    assert "features.mvn as trained in ba-1, none in none-3" in line
    text = (two_groups / "compare" / "compare.md").read_text()
    assert [row[0] for row in rows(text, "Validation loss")] == [
        "listener.norm=ba", "listener.norm=none",
    ]  # fmt: skip
    assert out.splitlines()[1].endswith(" Not decoded alike (see Notes).")


@pytest.mark.parametrize(("steps", "stale"), [([30], False), ([20], True)])
def test_an_evaluation_of_older_checkpoints_is_named(steps, stale, two_groups, commands):
    folder = two_groups / "ba-1" / "evaluate" / "test"
    about = {"decode": {"checkpoint": "last", "average": 1}, "steps": steps}
    write_evaluation(folder, score(["a b d"] * 20, ["a b d"] * 20), about)
    for step in (20, 30):
        save_checkpoint(two_groups / "ba-1", nn.Linear(2, 3), None, step, 1.0, {})
    assert ("of older checkpoints than the run has now" in report(commands, two_groups)) is stale


def hostile_records():
    """Named contents of an event file after its sound records."""
    scalar = scalar_event("valid/nll", 1000, 5.0).SerializeToString()

    def framed(content, length=None, check=None):
        head = (len(content) if length is None else length).to_bytes(8, "little")
        sums = (masked_crc32c(part).to_bytes(4, "little") for part in (head, content))
        return head + next(sums) + content + (next(sums) if check is None else check)

    picture = Event(step=7, summary=Summary(value=[Summary.Value(tag="x" * (1 << 22))]))
    yield "a length of exabytes", framed(b"", 1 << 62)
    yield "a length beyond the end", framed(scalar, 10_000)
    yield "a wrong checksum", framed(scalar, check=b"abcd")
    yield "no event", framed(b"\xff" * 40)
    yield "zeros", bytes(1 << 16)
    yield "a name of megabytes", framed(picture.SerializeToString())
    yield "a step below 0", framed(scalar_event("valid/nll", -5, 5.0).SerializeToString())
    yield "an endless step", framed(scalar_event("valid/nll", 2**63 - 1, 5.0).SerializeToString())


@pytest.mark.parametrize(("name", "content"), list(hostile_records()))
def test_damaged_records_are_skipped(tmp_path, name, content):
    path = tmp_path / "events.out.tfevents.0000000001.a"
    write_events(path, [scalar_event("valid/nll", 3, 0.5)])
    with path.open("ab") as file:
        file.write(content)
    actual = read_scalars(tmp_path, ["valid/nll"])["valid/nll"]
    assert list(actual.steps) == [3] and list(actual.values) == [0.5]


def test_event_files_have_a_bounded_number_of_records(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MAX_RECORDS", 20)
    points = [scalar_event("valid/nll", step, 0.5) for step in range(25)]
    write_events(tmp_path / "events.out.tfevents.0000000001.a", points)
    with pytest.raises(UserError, match="more than 20 records in its event files"):
        read_scalars(tmp_path, ["valid/nll"])


def fifo(run):
    os.mkfifo(run / "events.out.tfevents.0000000009.x")


def linked(run):
    (run / "events.out.tfevents.0000000009.x").symlink_to("/dev/zero")


def sparse(run):
    os.truncate(run / "events.out.tfevents.0000000007.x", 1 << 40)


def endless_log(run):
    (run / "train.log").unlink()
    (run / "train.log").symlink_to("/dev/zero")


def huge_log(run):
    with (run / "train.log").open("ab") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(b"\n2026-11-27 09:08:07,006 finished at step 100; x\n")


def long_step(run):
    (run / "train.log").write_text(f"finished at step {'9' * 5000}\n")


def device_manifest(run):
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("valid: valid.tsv", "valid: /dev/zero"))


def evaluation(text):
    def write(run):
        (run / "evaluate" / "x").mkdir(parents=True)
        (run / "evaluate" / "x" / "score.json").write_text(text)

    return write


def odd_evaluation(run):
    """Values of wrong types under known keys."""
    about = {"decode": {"average": "x", "beam": [1]}, "steps": 7, "overrides": [3, "a=b"]}
    write_evaluation(run / "evaluate" / "x", score(["a"], ["a"]), about)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (fifo, "not a regular file"),
        (linked, "a symbolic link"),
        (sparse, ""),
        (endless_log, "a symbolic link"),
        (huge_log, ""),
        (long_step, "not finished"),
        (device_manifest, "not comparable"),
        (evaluation("[" * 200_000), "damaged evaluation"),
        (evaluation("{}"), "missing; run"),
        (evaluation('{"accuracy": NaN, "nll": 1e999}'), ""),
        (evaluation('{"wer": "\\ud800"}'), "damaged evaluation"),
        (odd_evaluation, ""),
    ],
)
def test_a_hostile_run_among_others_is_skipped(tmp_path, commands, damage, words):
    for seed in (1, 2):
        make_run(tmp_path / f"a-{seed}", [f"seed={seed}"], falling(0.1))
    damage(make_run(tmp_path / "b", ["model.listener.norm=none"], falling(0.2)))
    out = report(commands, *sorted(tmp_path.iterdir()), "--out", tmp_path / "out")
    assert words in out and "0.1000" in out


def test_hostile_names_are_escaped_in_the_report(drawn, tmp_path, commands):
    folder = tmp_path / "<b>\x1b[2J\n"
    for seed in (1, 2):
        run = make_run(folder / f"a-{seed}", [f"seed={seed}"], falling(0.1), errors=[1, 0])
        (run / "evaluate" / "test").rename(run / "evaluate" / "valid")
    make_run(folder / "b\x1b[31m\udcff<i>", [], falling(0.2), done=False)
    make_run(folder / "c\x1b d", ["model.listener.norm=none"], falling(0.2))
    out = report(commands, folder, "--out", tmp_path / "out")
    assert "\x1b" not in out and "python -m asr.evaluate '" in out
    for name in ("compare.html", "compare.md", "curves.svg"):
        content = (tmp_path / "out" / name).read_bytes().decode()
        assert "\x1b" not in content and "<i>" not in content and "<b>" not in content
