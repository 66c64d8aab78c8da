"""Several ranks train as one process does; what befalls one of them befalls all, in order."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from asr.data.plan import plan_epoch
from asr.data.sentence_plan import plan_sentences
from asr.training import distributed
from asr.training.checkpoint import list_checkpoints
from asr.training.distributed import add_gradients, add_sums, gather, joined
from asr.training.meeting import new_room
from asr.training.objective import Sum

SCRIPT = Path(__file__).parent / "rank_trainings.py"


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """saw(scenario) -> what rank_trainings.py saw, and its folder."""
    place = tmp_path_factory.mktemp("ranks")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    errors = place / "errors"
    with errors.open("w") as told:
        line = [sys.executable, str(SCRIPT), str(place)]
        process = subprocess.Popen(line, **pipes, stderr=told, env=env)

    @cache
    def run(scenario):
        process.stdin.write(f"{scenario}\n")
        found = process.stdout.readline()
        assert found, errors.read_text()
        return json.loads(found), place / scenario

    with process:
        yield run
        process.stdin.close()
    assert process.returncode == 0, errors.read_text()


@pytest.fixture(scope="module", params=["las", "transformer"])
def runs(request, saw):
    seen, folder = saw(request.param)
    assert {count: seen[count] for count in "123"} == {"1": [0], "2": [0, 0], "3": [0, 0, 0]}
    return folder


@pytest.fixture(scope="module")
def changed(saw):
    """LAS by 2 ranks, then by 3."""
    seen, folder = saw("las")
    assert seen["changed"] == [0, 0, 0]
    return folder


def assert_same_losses(one, other, points):
    for name in ("train/nats", "train/objective", "valid/nats"):
        found, expected = dict(curve(one, name)), dict(curve(other, name))
        assert len(found) == points or name == "valid/nats"
        assert 25 in found and 25 in expected
        # What was changed was validated, too, where it was cut off and at its end.
        for step in found.keys() & expected.keys():
            assert found[step] == pytest.approx(expected[step], rel=1e-5), (name, step)


@pytest.fixture(scope="module")
def faults(saw):
    return saw("faults")


@pytest.fixture(scope="module")
def ends(saw):
    return saw("ends")


def curve(run, name):
    board = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return [(point.step, point.value) for point in board.Scalars(name)]


def state(run):
    return torch.load(list_checkpoints(run)[-1].folder / "training.pt", weights_only=True)


def said(folder, name, ranks=2):
    """The errors of a training's ranks, in order of rank."""
    return [(folder / f"{name}.{rank}").read_text() for rank in range(ranks)]


class TestEqual:
    """50 steps over the same global batches; each epoch's last step is uneven."""

    @pytest.mark.parametrize("ranks", ["2", "3"])
    def test_losses_are_those_of_one_process(self, ranks, runs):
        assert_same_losses(runs / ranks, runs / "1", 50)

    @pytest.mark.parametrize("ranks", ["2", "3"])
    def test_no_utterance_is_lost_or_repeated(self, ranks, runs):
        found, expected = (state(runs / run)["position"] for run in (ranks, "1"))
        for name in ("step", "epoch", "batch", "utterances", "broken"):
            assert found[name] == expected[name], name
        assert found["audio_seconds"] == pytest.approx(expected["audio_seconds"])
        assert expected["epoch"] > 20 and expected["utterances"] > 20 * 14

    def test_the_rate_counts_the_audio_of_all(self, runs):
        for ranks in ("2", "3"):
            found, expected = (curve(runs / run, "run/audio_hours") for run in (ranks, "1"))
            assert dict(found) == pytest.approx(dict(expected))

    def test_another_world_size_goes_on_and_says_so(self, changed):
        assert_same_losses(changed / "changed", changed / "1", 30)
        log = (changed / "changed" / "train.log").read_text()
        assert "2 ranks trained so far, now 3: a step takes 3 x 2 batches" in log
        assert "14 utterances" in log and log.count("finished at step") == 2

    def test_the_first_rank_alone_writes(self, runs):
        for ranks in ("2", "3"):
            names = sorted(path.name.split(".")[0] for path in (runs / ranks).iterdir())
            assert names == sorted(path.name.split(".")[0] for path in (runs / "1").iterdir())
            log = (runs / ranks / "train.log").read_text()
            assert log.count("step 50/50") == 1 and f", {ranks} ranks" in log
            assert (runs / f"{ranks}.1.out").read_text() == ""


class TestFaults:
    def test_numbers_that_are_none_on_one_rank_are_skipped_by_all(self, faults):
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

    def test_too_many_of_them_stop_all_with_one_line_and_evidence_of_each(self, faults):
        seen, folder = faults
        assert seen["stopped"] == [2, 2]
        (line,) = "".join(said(folder, "stopped")).splitlines()
        assert "step 4: 2 steps in a row without a finite gradient" in line
        evidence = folder / "stopped" / "evidence" / "00000004"
        own = {"batch.pt", "batch-rank1.pt", "report.txt", "report-rank1.txt"}
        assert {path.name for path in evidence.iterdir()} == {"model.safetensors", *own}
        assert "features of a batch" in (evidence / "report-rank1.txt").read_text()
        assert "not finite: train-" in (evidence / "report-rank1.txt").read_text()

    def test_a_batch_that_does_not_fit_on_one_rank_is_cut_there(self, faults):
        seen, folder = faults
        assert seen["narrow"] == seen["wide"] == [0, 0]
        assert (
            "rank 1: out of memory with a batch of 2"
            in (folder / "narrow" / "train.log").read_text()
        )
        found, expected = (curve(folder / name, "train/nats") for name in ("narrow", "wide"))
        assert found == [(step, pytest.approx(value, rel=1e-4)) for step, value in expected]

    def test_fewer_batches_than_ranks_are_refused_before_there_is_a_run(self, faults):
        seen, folder = faults
        first, *others = said(folder, "few", 3)
        assert seen["few"] == [2, 1, 1] and first == (
            "error: rank 0: 1 batches an epoch are too few for 3 ranks: make them smaller "
            "(train.batch_seconds; of text data.batch_bytes, of images data.batch) or start fewer "
            "(--nproc-per-node)\n"
        )
        for number, other in enumerate(others, start=1):
            assert other.startswith(f"rank {number}: ends, another was killed or says why")
        assert not (folder / "few").exists()

    def test_what_cannot_be_read_is_named_wherever_it_stood(self, faults):
        seen, folder = faults
        assert seen["unreadable"] == [0, 0]
        log = (folder / "unreadable" / "train.log").read_text()
        assert (
            log.count("left out bad0: ") == 1
            and state(folder / "unreadable")["position"]["broken"] == 1
        )
        # The ranks have one each of validation's two.
        assert log.count("validation: 2 of 5 utterances left out: bad") == log.count(
            "validation: objective"
        )

    def test_too_much_that_cannot_be_read_ends_all_with_one_line(self, faults):
        seen, folder = faults
        assert seen["too many"] == [2, 2]
        (line,) = "".join(said(folder, "too many")).splitlines()
        assert "training utterances so far cannot be read, more than the share data.broken" in line


class TestEnds:
    def test_a_rank_that_fails_ends_the_others_with_its_error(self, ends):
        seen, folder = ends
        assert seen["straight"] == [0, 0] and seen["failed"] == [1, 1] and seen["failed in"] < 20
        first, second = said(folder, "failed")
        assert "ValueError: a fault of our own" in second
        assert first.startswith("rank 0: ends, another was killed or says why")
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


def test_torchrun_starts_again_what_was_killed(saw):
    """Without --resume: the second start goes on by itself."""
    seen, _ = saw("torchrun")
    assert seen["code"] == 0, seen["err"]
    assert "rank 0: ends, another was killed" in seen["err"]
    assert seen["out"].count("\nresuming tiny: ") == 1 and seen["differs"] == []


def test_ranks_leave_out_the_same_layers_but_not_the_same_units(saw):
    seen, _ = saw("drops")
    first, second = seen["seen"]
    assert seen["code"] == [0, 0]
    shared = min(len(first["kept"]), len(second["kept"]))  # one has a batch less in an epoch
    assert first["kept"][:4] == second["kept"][:4] and shared >= 16
    assert len({str(kept) for kept in first["kept"]}) > 4
    assert first["drop"] != second["drop"]


def test_bf16_by_two_is_bf16_by_one(saw):
    seen, folder = saw("half")
    assert seen == {"1": [0], "2": [0, 0]}
    found, expected = (curve(folder / ranks, "train/nats") for ranks in ("2", "1"))
    assert found == [(step, pytest.approx(value, rel=1e-3)) for step, value in expected]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
def test_ranks_share_every_plan_without_loss_or_repeat(world):
    lengths = torch.linspace(1, 9, 101).numpy()
    speech = plan_epoch(lengths, 20.0, 1, 1).batches
    text = plan_sentences(lengths.astype("int32"), 20, 99, 1, 1).batches
    for batches, items in ((speech, lambda b: [i.index for i in b]), (text, lambda b: b.tolist())):
        for skip in (0, 4):
            whole = [items(batches[n]) for n in range(skip, len(batches))]
            shares = [batches[skip + rank :: world] for rank in range(world)]
            dealt = [
                items(share[turn])
                for turn in range(len(shares[0]))
                for share in shares
                if turn < len(share)
            ]
            assert dealt == whole


def test_the_living_meet_where_the_dead_have_left_their_names():
    store = dist.HashStore()
    for number in (1, 2):
        for key, value in {"hello": "old", "answer": "tomb old", "confirmed": "tomb"}.items():
            store.set(f"{key} {number}", value)
    with ThreadPoolExecutor(3) as ranks:
        late = [ranks.submit(new_room, store, number, 3) for number in (0, 2, 1)]
        rooms = {one.result(timeout=20) for one in late}
        again = {one.result(20) for one in [ranks.submit(new_room, store, n, 3) for n in range(3)]}
    assert len(rooms) == len(again) == 1 and len(rooms | again | {"tomb"}) == 3


class TestAlone:
    """Without torchrun nothing is asked of torch.distributed."""

    def test_values_are_handed_back(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "1")  # one process under torchrun
        with joined("cpu"):
            layer, sums = nn.Linear(2, 3), {"nats": Sum(torch.tensor(1.0), torch.tensor(2))}
            add_gradients(layer)
            assert layer.weight.grad is None and gather("x") == ["x"]
            assert add_sums(sums, ["y"]) == (sums, ["y"])
            assert (distributed.world(), distributed.rank()) == (1, 0)
