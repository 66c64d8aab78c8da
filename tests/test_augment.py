"""Augmentation: speed is checked by a sine, masks by counting, noise by its power."""

import math

import numpy as np
import pytest
import soundfile
import torch
from scipy.signal import fftconvolve
from tiny_speech import spec_augment

from asr.features import AudioError, augment
from asr.features.augment import AudioFiles, add_noise, change_speed, reverberate

T, F = 211, 83


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(frames: int = T, size: int = F) -> torch.Tensor:
    """Features of mean 3, all different."""
    return torch.randn(frames, size, generator=seeded(99)) + 3


def runs(hidden: torch.Tensor) -> list[int]:
    """Lengths of the stretches of True."""
    return [len(run) for run in "".join("x" if h else " " for h in hidden.tolist()).split()]


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.0, 0.83, 2.0, 0.25])
@pytest.mark.parametrize("samples", [1, 9, 16_000, 15_991])
def test_speed_divides_the_length(factor, samples):
    waveform = torch.zeros(samples)
    assert len(change_speed(waveform, factor)) == math.ceil(round(samples / factor, 6))


@pytest.mark.parametrize("factor", [0.9, 1.1, 0.83])
def test_speed_is_the_same_sine_played_at_another_pitch(factor):
    time = torch.arange(16_001, dtype=torch.float64) / 16_000
    ours = change_speed((0.5 * torch.sin(2 * math.pi * 440 * time)).float(), factor)
    later = torch.arange(len(ours), dtype=torch.float64) / 16_000
    judge = 0.5 * torch.sin(2 * math.pi * 440 * factor * later)
    torch.testing.assert_close(ours[99:-99].double(), judge[99:-99], rtol=0, atol=2e-3)


def test_speed_one_changes_nothing_and_a_fast_one_does_not_alias():
    waveform = torch.randn(997, generator=seeded())
    assert torch.equal(change_speed(waveform, 1.0), waveform)
    time = torch.arange(16_000) / 16_000
    above = change_speed(torch.sin(2 * math.pi * 7_000 * time), 1.5)  # would be 10.5 kHz
    assert above[99:-99].abs().max() < 0.02


@pytest.mark.parametrize("snr", [-5.0, 0.0, 20.0])
def test_noise_has_its_power_and_comes_from_the_generator(snr):
    waveform = 0.3 * torch.sin(torch.arange(160_000) / 7)
    noisy = add_noise(waveform, snr, seeded(3))
    noise = noisy - waveform
    decibels = 10 * math.log10(waveform.square().mean() / noise.square().mean())
    assert decibels == pytest.approx(snr, abs=0.05)
    assert abs(float(noise[1:] @ noise[:-1]) / float(noise @ noise)) < 0.02  # white
    assert torch.equal(add_noise(waveform, snr, seeded(3)), noisy)
    assert not torch.equal(add_noise(waveform, snr, seeded(4)), noisy)


def test_noise_leaves_silence_and_empty_input_unchanged():
    assert torch.equal(add_noise(torch.zeros(97), 10.0, seeded()), torch.zeros(97))
    assert add_noise(torch.zeros(0), 10.0, seeded()).shape == (0,)


@pytest.fixture
def files(tmp_path):
    """Stereo files at 11 kHz of these lengths in seconds, drawn with a probability at 8 kHz."""

    def make(lengths, probability=1.0):
        paths = [tmp_path / f"{number}.wav" for number in range(len(lengths))]
        for number, (path, seconds) in enumerate(zip(paths, lengths, strict=True)):
            size = round(seconds * 11_000), 2
            samples = 0.01 * np.random.default_rng(number).standard_normal(size)
            soundfile.write(path, samples, 11_000, subtype="FLOAT")
        return AudioFiles(paths, 8_000, probability)

    return make


@pytest.mark.parametrize("seconds", [0.3, 9.0])
@pytest.mark.parametrize("snr", [-5.0, 20.0])
def test_noise_of_a_file_has_its_level_and_is_cut_or_repeated(snr, seconds, files):
    noise, samples = files([seconds]), 17_011
    waveform = 0.3 * torch.sin(torch.arange(samples) / 7)
    noisy = add_noise(waveform, snr, seeded(3), noise)
    added = (noisy - waveform).double()
    decibels = 10 * math.log10(waveform.double().square().mean() / added.square().mean())
    assert decibels == pytest.approx(snr, abs=0.01)
    (mono,) = (noise._read(path).double() for path in noise.paths)
    if seconds < 1:  # whole periods of the file
        period = len(mono)
        torch.testing.assert_close(added[period:], added[:-period], rtol=1e-3, atol=1e-5)
        mono = mono.repeat(2)
    part = added[:2000]
    found = np.correlate(mono.numpy(), part.numpy())
    assert found.max() / float(part.norm() ** 2) > 0.9 * float(mono.norm() / added.norm()) * min(
        1.0, math.sqrt(samples / len(mono))
    )
    starts = {float(add_noise(torch.ones(97), 0.0, seeded(s), noise)[0]) for s in range(20)}
    assert len(starts) == 20


def test_noise_is_drawn_with_its_probability_from_all_files(files):
    noise, waveform = files([0.1, 0.2, 0.3], probability=0.4), torch.ones(53)
    generator = seeded()
    lengths = [None if (d := noise.draw(generator)) is None else len(d) for _ in range(2_000)]
    assert lengths.count(None) / 2_000 == pytest.approx(0.6, abs=0.04)
    for length in (800, 1600, 2400):
        assert lengths.count(length) / 2_000 == pytest.approx(0.4 / 3, abs=0.03)
    never = AudioFiles(noise.paths, 8_000, 0.0)
    assert torch.equal(add_noise(waveform, 0.0, seeded(), never), waveform)


def test_few_files_stay_in_memory_and_a_silent_one_is_refused(files, tmp_path, monkeypatch):
    monkeypatch.setattr(augment, "KEPT", 5_000)
    noise = files([0.1, 0.2, 0.3, 0.2])
    for seed in range(30):
        noise.draw(seeded(seed))
        assert sum(map(len, noise._kept.values())) <= 5_000
    monkeypatch.setattr(augment, "LONGEST", 1)
    soundfile.write(tmp_path / "long.wav", np.ones(99_991), 8_000)
    assert len(AudioFiles([tmp_path / "long.wav"], 8_000, 1.0).draw(seeded())) == 8_000
    soundfile.write(tmp_path / "none.wav", np.zeros(999), 8_000)
    with pytest.raises(AudioError, match=r"none.wav: silent, all samples are 0"):
        AudioFiles([tmp_path / "none.wav"], 8_000, 1.0).draw(seeded())


@pytest.mark.parametrize(("samples", "taps", "peak"), [(16_001, 4_003, 97), (31, 4_003, 2_999)])
def test_reverberation_is_scipy_s_convolution_without_delay_at_the_same_level(samples, taps, peak):
    random = np.random.default_rng(5)
    dry = random.standard_normal(samples).astype(np.float32)
    response = (0.1 * random.standard_normal(taps) * 0.999 ** np.arange(taps)).astype(np.float32)
    response[peak] = -0.9
    ours = reverberate(torch.from_numpy(dry), torch.from_numpy(response))
    judge = fftconvolve(dry.astype(np.float64), response)[peak : peak + samples]
    judge *= np.sqrt(np.mean(dry.astype(np.float64) ** 2) / np.mean(judge**2))
    np.testing.assert_allclose(ours.numpy(), judge, rtol=1e-5, atol=1e-5)
    assert ours.square().mean() == pytest.approx(float(np.mean(dry**2)), rel=1e-4)


def test_a_room_without_echoes_changes_nothing():
    click = torch.zeros(499)
    click[211] = 0.3
    waveform = torch.randn(7_919, generator=seeded())
    torch.testing.assert_close(reverberate(waveform, click), waveform)
    assert torch.equal(reverberate(torch.zeros(97), click), torch.zeros(97))
    assert reverberate(torch.zeros(0), click).shape == (0,)


def test_one_time_mask_covers_consecutive_whole_frames():
    mask = spec_augment(freq_masks=0, time_masks=1, time_width=37)
    features, widths, starts, ends = picture(), [], [], []
    for seed in range(2_000):
        masked = mask(features, seeded(seed))
        hidden = (masked != features).any(dim=1)
        assert torch.equal(hidden, (masked == features.mean()).all(dim=1))
        widths.append(sum(runs(hidden)))
        assert len(runs(hidden)) <= 1
        starts.append(int(hidden[0]))
        ends.append(int(hidden[-1]))
    # Uniform over 0 to 37 inclusive, and the edges are within reach.
    counts = np.bincount(widths, minlength=38)
    assert len(counts) == 38
    assert counts.min() > 20  # 52.6 expected
    assert counts.max() < 100
    assert min(sum(starts), sum(ends)) > 0


def test_frequency_masks_cover_whole_features():
    mask = spec_augment(freq_masks=3, freq_width=11, time_masks=0)
    features, widest = picture(), 0
    for seed in range(300):
        masked = mask(features, seeded(seed))
        hidden = (masked != features).any(dim=0)
        assert torch.equal(hidden, (masked == features.mean()).all(dim=0))
        assert len(runs(hidden)) <= 3
        widest = max(widest, sum(runs(hidden)))
    assert 22 < widest <= 33  # all three at once


@pytest.mark.parametrize(("frames", "fraction"), [(100, 0.05), (211, 0.05), (19, 0.05), (13, 0.5)])
def test_no_time_mask_exceeds_its_fraction_of_the_utterance(frames, fraction):
    mask = spec_augment(freq_masks=0, time_masks=1, time_width=100, time_fraction=fraction)
    features, widest = picture(frames), 0
    for seed in range(200):
        hidden = (mask(features, seeded(seed)) != features).any(dim=1)
        widest = max(widest, int(hidden.sum()))
    assert widest == int(fraction * frames)


@pytest.mark.parametrize(("frames", "size"), [(0, 5), (1, 5), (2, 1), (7, 3)])
def test_pictures_smaller_than_their_masks(frames, size):
    mask = spec_augment(time_warp=5)
    for seed in range(50):
        masked = mask(picture(frames, size), seeded(seed))
        assert masked.shape == (frames, size)
        assert masked.isfinite().all()


def test_the_input_is_unchanged_and_the_seed_determines_the_result():
    mask, features = spec_augment(time_warp=7), picture()
    before = features.clone()
    first = mask(features, seeded(3))
    torch.manual_seed(1)
    assert torch.equal(mask(features, seeded(3)), first)
    assert not torch.equal(mask(features, seeded(4)), first)
    assert torch.equal(features, before)


def test_the_generator_advances_equally_for_every_length():
    """Otherwise one utterance's length would change the random numbers of the next."""
    states = []
    for frames in (0, 3, T):
        generator = seeded()
        spec_augment(time_warp=5)(picture(frames), generator)
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_time_warp_keeps_the_order_of_frames_and_its_limit():
    """A ramp over time shows the source of each frame."""
    warp, ramp = spec_augment(freq_masks=0, time_masks=0, time_warp=13), torch.arange(T).float()
    furthest = 0.0
    for seed in range(200):
        source = warp(ramp[:, None].expand(T, 3), seeded(seed))
        assert source.shape == (T, 3)
        assert (source[1:] >= source[:-1]).all()
        furthest = max(furthest, float((source[:, 0] - ramp).abs().max()))
    assert 11 < furthest <= 14
