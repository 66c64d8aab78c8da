"""Mean-variance normalisation against numpy over all frames at once."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asr.features import StatisticsError
from asr.features.normalize import MeanVarianceNorm

F = 5


def corpus() -> dict[str, list[torch.Tensor]]:
    """Three speakers with utterances of different length, spread and offset."""
    draw = torch.Generator().manual_seed(0)
    lengths = {"ann": (7, 11, 1), "bob": (13,), "cy": (2, 3)}
    return {
        speaker: [torch.randn(frames, F, generator=draw) * 3 + 10 * k for frames in counts]
        for k, (speaker, counts) in enumerate(lengths.items())
    }


def measured(kind: str, variance: bool = True) -> MeanVarianceNorm:
    norm = MeanVarianceNorm(kind, variance)
    for speaker, utterances in corpus().items():
        for features in utterances:
            norm.add(features, speaker)
    return norm


def judge(features, frames, variance=True) -> np.ndarray:
    """numpy's mean and population standard deviation of `frames`, applied to `features`."""
    frames = np.asarray(frames, dtype=np.float64)
    spread = frames.std(axis=0) if variance else 1.0
    return (np.asarray(features, dtype=np.float64) - frames.mean(axis=0)) / spread


@pytest.mark.parametrize("variance", [True, False])
def test_each_kind_takes_its_own_frames(variance):
    everyone = torch.cat([x for utterances in corpus().values() for x in utterances])
    for speaker, utterances in corpus().items():
        features = utterances[0]
        frames = {"utterance": features, "speaker": torch.cat(utterances), "global": everyone}
        for kind, known in frames.items():
            ours = measured(kind, variance)(features, speaker)
            assert ours.dtype == torch.float32
            np.testing.assert_allclose(ours, judge(features, known, variance), atol=1e-5)
        assert torch.equal(measured("none")(features, speaker), features)


def test_a_speaker_never_added_falls_back_to_the_utterance():
    norm, features = measured("speaker"), corpus()["bob"][0]
    for stranger in ("dee", None):
        np.testing.assert_allclose(norm(features, stranger), judge(features, features), atol=1e-5)


@pytest.mark.parametrize("kind", ["speaker", "global"])
def test_parts_measured_separately_merge_to_the_whole(kind):
    parts = [MeanVarianceNorm(kind) for _ in range(2)]
    utterances = [(s, x) for s, features in corpus().items() for x in features]
    for place, (speaker, features) in enumerate(utterances):
        parts[place % 2].add(features, speaker)
    full = measured(kind)
    merged = dict(parts[0].groups)
    for group, moments in parts[1].groups.items():
        merged[group] = merged[group] + moments if group in merged else moments
    assert merged.keys() == full.groups.keys()
    for group, moments in full.groups.items():
        other = merged[group]
        assert other.count == moments.count
        torch.testing.assert_close(other.mean, moments.mean, rtol=1e-14, atol=1e-13)
        torch.testing.assert_close(other.squares, moments.squares, rtol=1e-13, atol=1e-13)


def test_a_small_spread_on_a_large_mean_survives_streaming():
    draw, norm = np.random.default_rng(0), MeanVarianceNorm("global")
    frames = np.float32(30_000 + draw.standard_normal((1_999, F)))
    for part in np.array_split(frames, 97):
        norm.add(torch.from_numpy(part))
    torch.testing.assert_close(
        norm(torch.from_numpy(frames)), torch.from_numpy(judge(frames, frames)).float()
    )


@pytest.mark.parametrize("frames", [1, 7])
def test_a_constant_feature_passes_no_nan(frames):
    features = torch.randn(frames, F)
    features[:, 2] = 3.0
    features.requires_grad_()
    MeanVarianceNorm("utterance")(features).square().sum().backward()
    assert features.grad.isfinite().all() and (features.grad[:, 2] == 0).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -15.942385, 1e4, 1e-9])
@pytest.mark.parametrize("variance", [True, False])
def test_constant_features_become_zero(value, variance):
    constant = torch.full((97, F), value)
    constant[:, 2] = torch.randn(97)
    for kind in ("utterance", "speaker", "global"):
        norm = MeanVarianceNorm(kind, variance)
        for part in constant.split(13):
            norm.add(part, "ann")
        ours = norm(constant, "ann")
        assert ours[:, [0, 1, 3, 4]].abs().max() < 1e-9
        np.testing.assert_allclose(
            ours[:, 2],
            judge(constant, constant, variance=False)[:, 2]
            / (constant[:, 2].double().std(correction=0).item() if variance else 1.0),
            atol=1e-5,
        )


@pytest.mark.parametrize("variance", [True, False])
def test_a_single_frame_is_zero_and_empty_input_stays_empty(variance):
    for kind in ("utterance", "speaker"):
        norm = MeanVarianceNorm(kind, variance)
        assert torch.equal(norm(torch.randn(1, F), "dee"), torch.zeros(1, F))
        assert norm(torch.zeros(0, F), "dee").shape == (0, F)


def test_global_without_statistics_reports_what_is_missing():
    with pytest.raises(StatisticsError, match="mvn is global, but no statistics were measured"):
        MeanVarianceNorm("global")(torch.randn(7, F))


def test_padding_and_batch_mates_change_nothing():
    """With fixed statistics, frames are normalised one by one."""
    norm, features = measured("global"), corpus()["ann"][1]
    padded = torch.cat([features, torch.zeros(13, F)])
    torch.testing.assert_close(norm(padded)[: len(features)], norm(features))


@pytest.mark.parametrize("kind", ["none", "utterance", "speaker", "global"])
def test_saved_statistics_are_the_same_to_the_bit(tmp_path, kind):
    norm, other = measured(kind), MeanVarianceNorm(kind)
    if kind == "speaker":
        norm.add(torch.randn(3, F), 'a "name", {with}\nall: signs\u2028é')
    norm.save(tmp_path / "mvn.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["mvn.safetensors"]
    other.load(tmp_path / "mvn.safetensors")
    assert other.groups.keys() == norm.groups.keys()
    features = torch.randn(11, F)
    for group in [*norm.groups, None]:
        assert torch.equal(other(features, group), norm(features, group))
    if kind == "global":  # and further utterances can be added
        other.add(features)
        assert other.groups[""].count == norm.groups[""].count + 11


def damage(path, **change) -> None:
    """A file of statistics of two groups, with some parts replaced."""
    tensors = {
        "count": torch.tensor([3, 7]),
        "mean": torch.zeros(2, F, dtype=torch.float64),
        "squares": torch.ones(2, F, dtype=torch.float64),
    }
    names = {"kind": "speaker", "groups": json.dumps(["ann", "bob"])}
    for key, value in change.items():
        (tensors if key in tensors else names)[key] = value
    save_file(tensors, path, metadata=names)


@pytest.mark.parametrize(
    "change",
    [
        {"count": torch.tensor([3, 0])},
        {"mean": torch.zeros(2, F - 1, dtype=torch.float64)},
        {"mean": torch.full((2, F), float("nan"), dtype=torch.float64)},
        {"squares": -torch.ones(2, F, dtype=torch.float64)},
        {"groups": '["ann", "ann"]'},
        {"groups": '["ann"]'},
    ],
)
def test_damaged_statistics_are_refused(tmp_path, change):
    path, norm = tmp_path / "mvn.safetensors", MeanVarianceNorm("speaker")
    damage(path)
    norm.load(path)  # the undamaged file is valid
    damage(path, **change)
    with pytest.raises(StatisticsError, match=r"mvn.safetensors: damaged feature statistics"):
        norm.load(path)
    assert norm.groups.keys() == {"ann", "bob"}


def test_files_that_are_no_statistics_are_reported(tmp_path):
    norm = MeanVarianceNorm("global")
    with pytest.raises(StatisticsError, match=r"gone: no such file of feature statistics"):
        norm.load(tmp_path / "gone")
    (tmp_path / "junk").write_bytes(b"\x80\x04" * 99)
    for path in (tmp_path / "junk", tmp_path):
        with pytest.raises(StatisticsError, match="not readable as feature statistics"):
            norm.load(path)
    damage(tmp_path / "other")
    with pytest.raises(StatisticsError, match="other: statistics of kind speaker, but mvn is glob"):
        norm.load(tmp_path / "other")


def test_misuse_is_reported():
    norm = measured("global")
    with pytest.raises(StatisticsError, match="of 5 features per frame, but these have 7"):
        norm(torch.randn(3, 7))
    with pytest.raises(StatisticsError, match="of 5 features per frame, but these have 7"):
        norm.add(torch.randn(3, 7))
    with pytest.raises(StatisticsError, match="features hold NaN or infinite values"):
        norm.add(torch.tensor([[1.0, float("inf"), 0, 0, 0]]))
    with pytest.raises(StatisticsError, match="need to know the speaker"):
        measured("speaker").add(torch.randn(3, F))
    with pytest.raises(ValueError, match="kind 'batch' must be one of none, utterance, speaker, g"):
        MeanVarianceNorm("batch")
