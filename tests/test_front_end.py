"""From a file to features, against each step called by hand."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import spec_augment
from torchaudio.compliance import kaldi

from asr.features import AudioError, StatisticsError
from asr.features.audio import read_audio
from asr.features.augment import AudioFiles, add_noise, change_speed, reverberate
from asr.features.fbank import Fbank, Mfcc
from asr.features.front_end import FrontEnd
from asr.features.normalize import MeanVarianceNorm


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def path(tmp_path) -> Path:
    """1.3 seconds of stereo noise at 44.1 kHz."""
    samples = 0.1 * np.random.default_rng(0).standard_normal((57_331, 2))
    soundfile.write(tmp_path / "a.flac", samples, 44_100)
    return tmp_path / "a.flac"


def test_evaluation_is_log_mel_normalised_and_the_same_every_time(path):
    augment = spec_augment()
    front = FrontEnd(Fbank(num_mel_bins=41), MeanVarianceNorm("utterance"), augment, (0, 9))
    waveform = front.load(path)
    mel = kaldi.fbank(waveform[None] * 32768, num_mel_bins=41).double()
    judge = (mel - mel.mean(0)) / mel.std(0, correction=0)
    ours = front.features(waveform, "ann")
    torch.testing.assert_close(ours, judge.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(front.features(waveform), ours)
    assert ours.shape == (front.num_frames(57_331 / 44_100), front.size) == (128, 41)


def test_other_speeds_are_features_of_the_resampled_waveform(path):
    front = FrontEnd(Fbank(num_mel_bins=41), MeanVarianceNorm("utterance"))
    waveform = front.load(path)
    plain, slow, fast = front.at_speeds(waveform, "ann", (0.9, 1.1))
    assert torch.equal(plain, front.features(waveform))
    for ours, speed in ((slow, 0.9), (fast, 1.1)):
        assert torch.equal(ours, front.features(change_speed(waveform, speed)))
    assert len(fast) < len(plain) < len(slow)


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (399, 0), (400, 1), (431, 1)])
def test_utterances_too_short_at_another_speed_keep_their_speed(samples, frames):
    front = FrontEnd(Fbank(), MeanVarianceNorm("none"))
    plain, fast = front.at_speeds(torch.randn(samples, generator=seeded()), None, (1.1,))
    assert len(plain) == frames and torch.equal(plain, fast)


def test_training_adds_speed_noise_and_masks_in_that_order(path):
    augment = spec_augment(time_masks=3, time_width=11)
    front = FrontEnd(
        Fbank(num_mel_bins=41), MeanVarianceNorm("utterance"), spec_augment=augment, noise=(7, 13)
    )
    waveform, generator = front.load(path), seeded(5)
    (ours,) = front.augmented(waveform, "ann", 0.9, seeded(5))
    snr = 7 + 6 * float(torch.rand((), generator=generator))
    noisy = add_noise(change_speed(waveform, 0.9), snr, generator)
    assert torch.equal(ours, augment(front.features(noisy), generator))
    assert torch.equal(front.augmented(waveform, "ann", 0.9, seeded(5))[0], ours)
    assert not torch.equal(front.augmented(waveform, "ann", 0.9, seeded(6))[0], ours)
    assert len(ours) == front.num_frames(len(waveform) / 16_000, speed=0.9)


def test_the_room_comes_before_the_noise_of_files(path, tmp_path):
    samples = np.random.default_rng(1).standard_normal((2, 3_001))
    for name, each in zip(("noise", "room"), samples, strict=True):
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * each, 16_000)
    front = FrontEnd(Fbank(num_mel_bins=41), MeanVarianceNorm("utterance"), noise=(7, 13))
    front.noise_files = AudioFiles([tmp_path / "noise.wav"], 16_000, 0.9)
    front.room_responses = AudioFiles([tmp_path / "room.wav"], 16_000, 0.9)
    waveform, generator = front.load(path), seeded(5)
    (ours,) = front.augmented(waveform, "ann", 0.9, seeded(5))
    wet = reverberate(change_speed(waveform, 0.9), front.room_responses.draw(generator))
    snr = 7 + 6 * float(torch.rand((), generator=generator))
    assert torch.equal(ours, front.features(add_noise(wet, snr, generator, front.noise_files)))


def test_of_two_views_only_the_masks_differ(path):
    augment = spec_augment(time_masks=3, time_width=11, time_warp=7)
    front = FrontEnd(Fbank(num_mel_bins=41), MeanVarianceNorm("utterance"), noise=(7, 13))
    waveform, generator = front.load(path), seeded(5)
    (bare,) = front.augmented(waveform, "ann", 0.9, generator)
    front.spec_augment = augment
    first, second = front.augmented(waveform, "ann", 0.9, seeded(5), views=2)
    bare = augment.warp(bare, generator)
    assert torch.equal(first, augment.mask(bare, generator))
    assert torch.equal(second, augment.mask(bare, generator)) and not torch.equal(first, second)


def test_a_frame_of_two_views_is_from_the_same_time():
    """A ramp over time shows the source of each frame."""
    warp = spec_augment(freq_masks=0, time_masks=0, time_warp=13)
    front = FrontEnd(Fbank(), MeanVarianceNorm("none"), warp)
    ramp, furthest = torch.arange(211.0)[:, None].expand(211, 3), 0.0
    for seed in range(50):
        first, second = front.masked(ramp, seeded(seed), views=2)
        assert torch.equal(first, second)
        furthest = max(furthest, float((first - ramp).abs().max()))
    assert 11 < furthest <= 14


def test_without_augmentation_training_equals_evaluation(path):
    front = FrontEnd(Fbank(), MeanVarianceNorm("utterance"))
    waveform = front.load(path)
    (ours,) = front.augmented(waveform, None, 1.0, seeded())
    assert torch.equal(ours, front.features(waveform, None))


@pytest.mark.parametrize("kind", ["speaker", "global"])
def test_statistics_are_measured_over_the_corpus(kind):
    front = FrontEnd(Mfcc(), MeanVarianceNorm(kind))
    waveforms = [
        0.1 * torch.randn(samples, generator=seeded(samples)) for samples in (2_003, 4_001)
    ]
    if kind == "global":
        with pytest.raises(StatisticsError, match="no statistics were measured"):
            front.features(waveforms[0], "ann")
    for waveform in waveforms:
        for features, whose in front.features_for_statistics(waveform, "ann", (1.0,)):
            front.norm.add(features, whose)
    frames = torch.cat([front.extract(waveform) for waveform in waveforms]).double()
    judge = (front.extract(waveforms[0]) - frames.mean(0)) / frames.std(0, correction=0)
    ours = front.features(waveforms[0], "ann")
    torch.testing.assert_close(ours, judge.float(), rtol=1e-4, atol=1e-4)


def test_a_speaker_has_statistics_of_each_speed():
    front = FrontEnd(Fbank(), MeanVarianceNorm("speaker"))
    ann, bob = 0.1 * torch.randn(2, 7_919, generator=seeded())
    for speaker, waveform in (("ann", ann), ("ann", -bob), ("bob", bob)):
        for features, whose in front.features_for_statistics(waveform, speaker, (0.9, 1.0)):
            front.norm.add(features, whose)
    for speed in (0.9, 1.0):
        mine, other = (front.extract(change_speed(w, speed)) for w in (ann, -bob))
        frames = torch.cat([mine, other]).double()
        judge = (mine - frames.mean(0)) / frames.std(0, correction=0)
        (ours,) = front.augmented(ann, "ann", speed, seeded())
        torch.testing.assert_close(ours, judge.float(), rtol=1e-4, atol=1e-4)


def test_an_utterance_shorter_than_a_window_has_no_frames():
    front = FrontEnd(Fbank(), MeanVarianceNorm("utterance"), spec_augment=spec_augment())
    assert front.features(torch.zeros(399)).shape == (0, 80)
    for view in front.augmented(torch.zeros(399), None, 1.1, seeded(), views=2):
        assert view.shape == (0, 80)
    assert front.num_frames(399 / 16_000) == 0


def test_audio_is_read_at_the_rate_of_the_features(path):
    front = FrontEnd(Fbank(8_000, 23), MeanVarianceNorm("none"))
    assert front.sample_rate == 8_000
    assert torch.equal(front.load(path), read_audio(path, 8_000))


def test_files_longer_than_the_limit_are_refused(path):
    front = FrontEnd(Fbank(), MeanVarianceNorm("none"), max_seconds=1.0)
    with pytest.raises(AudioError, match=r"a.flac: longer than the limit of 1 seconds"):
        front.load(path)


def test_mismatched_parts_are_refused():
    with pytest.raises(ValueError, match=r"noise \(9, 3\) must be \(lowest, highest\) in dB"):
        FrontEnd(Fbank(), MeanVarianceNorm("none"), noise=(9, 3))


def test_real_speech_is_processed(shared):
    speech = sorted(shared("librispeech-sample").rglob("*.flac"))[:3]
    assert speech
    front = FrontEnd(Fbank(), MeanVarianceNorm("utterance"))
    for path in speech:
        waveform = front.load(path)
        samples, rate = soundfile.read(path, dtype="float32")
        assert rate == 16_000
        assert torch.equal(waveform, torch.from_numpy(samples))
        features = front.features(waveform)
        assert features.shape == (1 + (len(samples) - 400) // 160, 80)
        torch.testing.assert_close(features.mean(0), torch.zeros(80), rtol=0, atol=1e-4)
