"""Several ranks train as one process does; an event on one rank stops all ranks in order."""

import itertools
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from event_files import curve
from safetensors.torch import load_file
from torch import nn

from asr.data.batching import plan_epoch
from asr.data.text_corpus import plan_sentences
from asr.errors import UserError
from asr.training import distributed
from asr.training.checkpoint import list_checkpoints
from asr.training.distributed import (
    LAUNCH,
    add_gradients,
    add_sums,
    gather,
    new_key_prefix,
    process_group,
    record_launch,
    restarted_by_torchrun,
)
from asr.training.losses import Sum

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "rank_trainings.py"


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """results_of(scenario) -> the results of rank_trainings.py, and its folder."""
    place = tmp_path_factory.mktemp("ranks")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    errors = place / "errors"
    with errors.open("w") as error_file:
        line = [sys.executable, str(SCRIPT), str(place)]
        process = subprocess.Popen(line, **pipes, stderr=error_file, env=env)

    @cache
    def run(scenario):
        process.stdin.write(f"{scenario}\n")
        actual = process.stdout.readline()
        assert actual, errors.read_text()
        return json.loads(actual), place / scenario

    with process:
        yield run
        process.stdin.close()
    assert process.returncode == 0, errors.read_text()


@pytest.fixture(scope="module", params=["las", "transformer"])
def runs(request, results_of):
    seen, folder = results_of(request.param)
    assert {count: seen[count] for count in "123"} == {"1": [0], "2": [0, 0], "3": [0, 0, 0]}
    return folder


@pytest.fixture(scope="module")
def changed(results_of):
    """LAS by 2 ranks, then by 3."""
    seen, folder = results_of("las")
    assert seen["changed"] == [0, 0, 0]
    return folder


def assert_same_losses(one, other, points):
    for name in ("train/nll", "train/objective", "valid/nll"):
        actual, expected = dict(curve(one, name)), dict(curve(other, name))
        assert len(actual) == points or name == "valid/nll"
        assert 4 in actual and 4 in expected
        # The run with another world size validated when it was stopped and at its end.
        for step in actual.keys() & expected.keys():
            assert actual[step] == pytest.approx(expected[step], rel=1e-5), (name, step)


@pytest.fixture(scope="module")
def faults(results_of):
    return results_of("faults")


@pytest.fixture(scope="module")
def ends(results_of):
    return results_of("ends")


def state(run):
    return torch.load(list_checkpoints(run)[-1].folder / "training.pt", weights_only=True)


def errors_of(folder, name, ranks=2):
    """The stderr lines of a training's ranks, in order of rank."""
    return [(folder / f"{name}.{rank}").read_text() for rank in range(ranks)]


class TestEqual:
    """8 steps over the same global batches; each epoch's last step is uneven."""

    @pytest.mark.parametrize("ranks", ["2", "3"])
    def test_losses_are_those_of_one_process(self, ranks, runs):
        assert_same_losses(runs / ranks, runs / "1", 8)

    @pytest.mark.parametrize("ranks", ["2", "3"])
    def test_no_utterance_is_lost_or_repeated(self, ranks, runs):
        actual, expected = (state(runs / run)["position"] for run in (ranks, "1"))
        for name in ("step", "epoch", "batch", "utterances", "broken"):
            assert actual[name] == expected[name], name
        assert actual["audio_seconds"] == pytest.approx(expected["audio_seconds"])
        assert expected["epoch"] > 3 and expected["utterances"] > 3 * 14

    def test_the_rate_counts_the_audio_of_all_ranks(self, runs):
        for ranks in ("2", "3"):
            actual, expected = (curve(runs / run, "speed/audio_hours") for run in (ranks, "1"))
            assert dict(actual) == pytest.approx(dict(expected))

    def test_another_world_size_resumes_and_is_reported(self, changed):
        assert_same_losses(changed / "changed", changed / "1", 6)
        log = (changed / "changed" / "train.log").read_text()
        assert "2 ranks trained so far, now 3: a step takes 3 x 2 batches" in log
        assert "14 utterances" in log and log.count("finished at step") == 2

    def test_only_rank_0_writes(self, runs):
        for ranks in ("2", "3"):
            names = sorted(path.name.split(".")[0] for path in (runs / ranks).iterdir())
            assert names == sorted(path.name.split(".")[0] for path in (runs / "1").iterdir())
            log = (runs / ranks / "train.log").read_text()
            assert log.count("step 8/8") == 1 and f", {ranks} ranks" in log
            assert (runs / f"{ranks}.1.out").read_text() == ""


class TestFaults:
    def test_nan_on_one_rank_is_skipped_by_all(self, faults):
        seen, folder = faults
        assert seen["skipped"] == [0, 0]
        log = (folder / "skipped" / "train.log").read_text()
        lines = [line for line in log.splitlines() if "not finite, not used; utterances" in line]
        assert ["step 5" in lines[0], "step 6" in lines[1], len(lines)] == [True, True, 2]
        assert all(line.count("train-") == 2 for line in lines)  # one on each rank
        weights = [
            load_file(c.folder / "model.safetensors") for c in list_checkpoints(folder / "skipped")
        ]
        assert len(weights) == 2  # after step 4 or 5, and at the end
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def test_too_many_nan_batches_stop_all_with_one_line_and_a_dump_of_each(self, faults):
        seen, folder = faults
        assert seen["stopped"] == [2, 2]
        (line,) = "".join(errors_of(folder, "stopped")).splitlines()
        assert "step 4: 2 steps in a row without a finite gradient" in line
        evidence = folder / "stopped" / "bad_batches" / "00000004"
        own = {"batch.pt", "batch-rank1.pt", "report.txt", "report-rank1.txt"}
        assert {path.name for path in evidence.iterdir()} == {"model.safetensors", *own}
        assert "features of a batch" in (evidence / "report-rank1.txt").read_text()
        assert "not finite: train-" in (evidence / "report-rank1.txt").read_text()

    def test_a_batch_too_large_for_one_rank_is_split_there(self, faults):
        seen, folder = faults
        assert seen["narrow"] == seen["wide"] == [0, 0]
        log = (folder / "narrow" / "train.log").read_text()
        assert "rank 1: out of memory with a batch of 2" in log
        assert log.count("out of memory") == 1  # of all steps
        actual, expected = (curve(folder / name, "train/nll") for name in ("narrow", "wide"))
        assert actual == [(step, pytest.approx(value, rel=1e-4)) for step, value in expected]

    def test_fewer_batches_than_ranks_are_refused_before_there_is_a_run(self, faults):
        seen, folder = faults
        first, *others = errors_of(folder, "few", 3)
        assert seen["few"] == [2, 1, 1] and first == (
            "error: rank 0: 1 batches an epoch are too few for 3 ranks: make them smaller "
            "(train.batch_seconds; of text data.batch_bytes, of images data.batch) or start fewer "
            "(--nproc-per-node)\n"
        )
        for number, other in enumerate(others, start=1):
            assert other.startswith(f"rank {number}: exits because another was killed or failed")
        assert not (folder / "few").exists()

    def test_unreadable_audio_is_reported_from_every_rank(self, faults):
        seen, folder = faults
        assert seen["unreadable"] == [0, 0]
        log = (folder / "unreadable" / "train.log").read_text()
        assert (
            log.count("skipped bad0: ") == 1
            and state(folder / "unreadable")["position"]["broken"] == 1
        )
        # Each rank has one of the two validation utterances.
        assert log.count("validation: 2 of 5 utterances skipped: bad") == log.count(
            "validation: objective"
        )

    def test_too_many_unreadable_files_stop_all_with_one_line(self, faults):
        seen, folder = faults
        assert seen["too many"] == [2, 2]
        (line,) = "".join(errors_of(folder, "too many")).splitlines()
        assert (
            "training utterances so far cannot be read, more than the share data.max_unreadable"
            in line
        )


class TestEnds:
    def test_a_rank_that_fails_ends_the_others_with_its_error(self, ends):
        seen, folder = ends
        assert seen["straight"] == [0, 0] and seen["failed"] == [1, 1] and seen["failed in"] < 20
        first, second = errors_of(folder, "failed")
        assert "ValueError: a fault of our own" in second
        assert first.startswith("rank 0: exits because another was killed or failed")
        assert len(first.splitlines()) == 1

    def test_a_killed_rank_ends_the_others_and_resuming_gives_the_same_bits(self, ends):
        seen, _ = ends
        assert seen["killed"] == [1, -9] and seen["killed in"] < 20
        assert seen["killed resumed"] == [0, 0] and seen["killed differs"] == []

    def test_a_signal_to_one_rank_saves_once_and_ends_all(self, ends):
        seen, folder = ends
        assert seen["signalled"] == [3, 3]
        assert "SIGTERM: stopped after step 5 and saved" in (folder / "signalled.0.out").read_text()
        assert seen["signalled resumed"] == [0, 0] and seen["signalled differs"] == []

    def test_a_signal_in_one_rank_s_validation_ends_that_of_all(self, ends):
        seen, folder = ends
        assert seen["validating"] == [3, 3]
        assert (
            "SIGTERM: stopped after step 4 and saved" in (folder / "validating.0.out").read_text()
        )
        assert seen["validating resumed"] == [0, 0] and seen["validating differs"] == []


def test_ranks_resume_with_their_own_statistics_and_the_same_averages(results_of):
    seen, _ = results_of("averages")
    assert (seen["straight"], seen["stopped"], seen["resumed"]) == ([0, 0], [3, 3], [0, 0])
    assert seen["differs"] == [] and seen["trained differs"] == [[], []]
    assert seen["losses"][0] == seen["losses"][1]
    assert set(seen["statistics"]) < set(seen["differs between ranks"])
    assert all("running_" in name for name in seen["of the second rank"])


def test_ranks_drop_the_same_layers_but_different_units(results_of):
    seen, _ = results_of("drops")
    first, second = seen["seen"]
    assert seen["code"] == [0, 0]
    shared = min(len(first["kept"]), len(second["kept"]))  # one rank has a batch less in an epoch
    assert first["kept"][:4] == second["kept"][:4] and shared >= 16
    assert len({str(kept) for kept in first["kept"]}) > 4
    assert first["drop"] != second["drop"]


def test_bf16_by_two_is_bf16_by_one(results_of):
    seen, folder = results_of("half")
    assert seen == {"1": [0], "2": [0, 0]}
    actual, expected = (curve(folder / ranks, "train/nll") for ranks in ("2", "1"))
    assert actual == [(step, pytest.approx(value, rel=1e-3)) for step, value in expected]


def test_ranks_that_share_the_work_of_muon_take_the_steps_of_one_process(results_of):
    codes, folder = results_of("muon")
    assert codes == {"1": [0], "3": [0, 0, 0]}
    alone, *ranks = (torch.load(folder / f"{name}.pt") for name in ("1.0", "3.0", "3.1", "3.2"))
    assert len(alone["state"]) == 8
    for one in ranks:
        torch.testing.assert_close(one, alone, rtol=0.0, atol=0.0)


def test_the_largest_share_of_the_work_is_at_most_a_third_above_the_best(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: 3)
    for costs in itertools.combinations_with_replacement([1, 2, 3, 7], 6):
        chosen = distributed.assign_owners(costs)
        best = min(largest_load(costs, owners) for owners in itertools.product(range(3), repeat=6))
        assert largest_load(costs, chosen) <= 4 / 3 * best


def largest_load(costs, owners):
    return max(sum(c for c, one in zip(costs, owners, strict=True) if one == n) for n in range(3))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
def test_ranks_share_every_plan_without_loss_or_repeat(world):
    lengths = torch.linspace(1, 9, 101).numpy()
    speech = plan_epoch(lengths, 20.0, 1, 1, (1.0,), False).batches
    text = plan_sentences(lengths.astype("int32"), 20, 99, 1, 1).batches
    for batches, items in ((speech, lambda b: [i.index for i in b]), (text, lambda b: b.tolist())):
        for skip in (0, 4):
            full = [items(batches[n]) for n in range(skip, len(batches))]
            shares = [batches[skip + rank :: world] for rank in range(world)]
            dealt = [
                items(share[turn])
                for turn in range(len(shares[0]))
                for share in shares
                if turn < len(share)
            ]
            assert dealt == full


def test_restarted_ranks_agree_on_a_prefix_in_a_store_of_finished_ones():
    store = dist.HashStore()
    for number in (1, 2):
        for key, value in {"request": "old", "answer": "stale old", "confirmed": "stale"}.items():
            store.set(f"{key} {number}", value)
    with ThreadPoolExecutor(3) as ranks:
        late = [ranks.submit(new_key_prefix, store, number, 3) for number in (0, 2, 1)]
        prefixes = {one.result(timeout=20) for one in late}
        again = {
            one.result(20) for one in [ranks.submit(new_key_prefix, store, n, 3) for n in range(3)]
        }
    assert len(prefixes) == len(again) == 1 and len(prefixes | again | {"stale"}) == 3


def test_two_ranks_train_under_torchrun(tiny, tmp_path):
    """The command in the README."""
    torchrun = Path(sys.executable).with_name("torchrun")
    line = [torchrun, "--nproc-per-node", "2", "-m", "--", "asr.train", tiny, "--run", tmp_path]
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    subprocess.run([*line, "train.steps=2"], check=True, env=env)
    assert ", 2 ranks, on cpu" in (tmp_path / "train.log").read_text()
    assert [step for step, _ in curve(tmp_path, "train/nll")] == [1, 2]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "a", "RANK = 'a': must be a number from 0 to 1;"),
        ("RANK", "", "RANK = '': must be a number from 0 to 1;"),
        ("RANK", "2", "RANK = '2': must be a number from 0 to 1;"),
        ("RANK", "9" * 5000, "RANK = '9999"),
        ("RANK", None, "RANK is not set: must be a number from 0 to 1;"),
        ("LOCAL_RANK", "x", "LOCAL_RANK = 'x': must be a number from 0 to 1;"),
        ("WORLD_SIZE", "0", "WORLD_SIZE = '0': must be a number from 1 to"),
        ("WORLD_SIZE", "\u0662", "WORLD_SIZE = '\u0662': must be"),
        ("WORLD_SIZE", "999999999", "WORLD_SIZE = '999999999': must be"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set: start the processes with torchrun"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
        ("MASTER_PORT", "99999999", "MASTER_PORT = '99999999': must be a number from 1 to 65535;"),
        ("MASTER_PORT", None, "MASTER_PORT is not set: must be"),
    ],
)
def test_an_environment_that_torchrun_does_not_make(name, value, message, monkeypatch):
    for variable, text in {**TORCHRUN, name: value}.items():
        monkeypatch.delenv(variable, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
    with pytest.raises(UserError) as refused, process_group("cpu"):
        pass
    assert (
        str(refused.value).startswith(f"environment: {message}") and len(str(refused.value)) < 200
    )


def test_a_port_in_use_is_reported(monkeypatch):
    with socket.socket() as busy:
        busy.bind(("localhost", 0))
        busy.listen()
        more = {"RANK": "0", "MASTER_PORT": str(busy.getsockname()[1])}
        for variable, text in (TORCHRUN | more).items():
            monkeypatch.setenv(variable, text)
        with pytest.raises(UserError, match=r"MASTER_PORT = .*: rank 0 cannot connect: "):
            process_group("cpu").__enter__()


@pytest.mark.parametrize("address", ["no.such.host.invalid", "x" * 64 + ".y", "a..b"])
def test_an_address_that_does_not_exist_is_reported(address, monkeypatch):
    for variable, text in (TORCHRUN | {"RANK": "0", "MASTER_ADDR": address}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(UserError, match=r"MASTER_ADDR = .*: rank 0 cannot connect: "):
        process_group("cpu").__enter__()


def test_a_count_of_restarts_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "x")
    with pytest.raises(UserError, match="environment: TORCHELASTIC_RESTART_COUNT = 'x': must be"):
        restarted_by_torchrun(tmp_path)


def test_a_launch_file_of_other_content_is_no_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/t/launch/attempt_0/0/error.json")
    record_launch(tmp_path)
    assert restarted_by_torchrun(tmp_path)
    for content in ("5", "null", '{"a": 1}', "[[]]", "[" * 9999, '"/t/launch"'):
        (tmp_path / LAUNCH).write_text(content)
        assert not restarted_by_torchrun(tmp_path)


class TestAlone:
    """Without torchrun, torch.distributed is not used."""

    def test_values_are_returned_unchanged(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "1")  # one process under torchrun
        with process_group("cpu"):
            layer, sums = nn.Linear(2, 3), {"nll": Sum(torch.tensor(1.0), torch.tensor(2))}
            add_gradients(layer)
            assert layer.weight.grad is None and gather("x") == ["x"]
            assert add_sums(sums, ["y"]) == (sums, ["y"])
            assert (distributed.world(), distributed.rank()) == (1, 0)
