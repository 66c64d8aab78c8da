"""Log-mel, MFCC and Slaney-mel against Kaldi's formulae in slow loops, torchaudio and librosa."""

import math

import librosa.filters
import numpy as np
import pytest
import scipy.signal
import torch
from torchaudio.compliance import kaldi

from asr.features.fbank import Fbank, Mfcc, SlaneyMel, add_deltas

KINDS = [Fbank, Mfcc, SlaneyMel]


def waveform(samples: int, seed: int = 0) -> torch.Tensor:
    """Noise over a falling tone, in [-1, 1]."""
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    time = torch.arange(samples) / 16_000
    return 0.05 * noise + 0.3 * torch.sin(2 * math.pi * (900 - 200 * time) * time)


def slow_log_mel(wave: np.ndarray, bins: int, rate: int = 16_000) -> np.ndarray:
    """Kaldi's compute-fbank-feats from its description, one frame and one filter at a time."""
    window, shift, fft = rate * 25 // 1000, rate // 100, 512
    povey = [(0.5 - 0.5 * math.cos(2 * math.pi * n / (window - 1))) ** 0.85 for n in range(window)]
    lowest, highest = (1127 * math.log(1 + hertz / 700) for hertz in (20.0, rate / 2))
    step = (highest - lowest) / (bins + 1)
    rows = []
    for start in range(0, len(wave) - window + 1, shift):
        frame = wave[start : start + window] * 32768
        frame = frame - frame.mean()
        emphasised = [frame[n] - 0.97 * frame[max(0, n - 1)] for n in range(window)]
        power = np.abs(np.fft.rfft(np.multiply(emphasised, povey), fft)) ** 2
        row = []
        for b in range(bins):
            left, centre, right = (lowest + (b + side) * step for side in range(3))
            energy = 0.0
            for k in range(fft // 2):
                mel = 1127 * math.log(1 + k * rate / fft / 700)
                if left < mel < right:
                    rising, falling = (
                        (mel - left) / (centre - left),
                        (right - mel) / (right - centre),
                    )
                    energy += min(rising, falling) * power[k]
            row.append(math.log(max(energy, 2.0**-23)))
        rows.append(row)
    return np.array(rows)


def test_log_mel_is_kaldis_by_a_slow_loop():
    wave = waveform(400 + 160 * 6 + 11)
    ours = Fbank(num_mel_bins=37)(wave)
    assert ours.shape == (7, 37)
    np.testing.assert_allclose(ours, slow_log_mel(wave.double().numpy(), 37), atol=2e-3)


def test_log_mel_and_mfcc_are_torchaudios_over_block_edges():
    wave = waveform(400 + 160 * 2_310)
    judge = kaldi.fbank(wave[None] * 32768, num_mel_bins=41)
    torch.testing.assert_close(Fbank(num_mel_bins=41)(wave), judge)
    judge = kaldi.mfcc(wave[None] * 32768, num_ceps=17, num_mel_bins=41)
    torch.testing.assert_close(Mfcc(num_ceps=17, num_mel_bins=41)(wave), judge)


def test_mfcc_is_the_cosine_transform_of_the_slow_log_mel():
    wave, bins, ceps = waveform(1_999), 23, 13
    mel = slow_log_mel(wave.double().numpy(), bins)
    expected = np.zeros((len(mel), ceps))
    for c in range(ceps):
        scale = math.sqrt((1 if c == 0 else 2) / bins) * (1 + 11 * math.sin(math.pi * c / 22))
        cosine = [math.cos(math.pi * c * (b + 0.5) / bins) for b in range(bins)]
        expected[:, c] = scale * mel @ np.array(cosine)
    np.testing.assert_allclose(Mfcc()(wave), expected, atol=2e-2)


@pytest.mark.parametrize("frames", [1, 2, 3, 11])
def test_deltas_are_kaldis(frames):
    """delta_t = sum n (c_{t+n} - c_{t-n}) / 10, twice over; frames outside repeat the edge."""
    static = np.random.default_rng(3).standard_normal((frames, 5))

    def derivative(at):
        return lambda t: sum(n * (at(t + n) - at(t - n)) for n in (1, 2)) / 10

    def edge(t):
        return static[min(max(t, 0), frames - 1)]

    first, second = derivative(edge), derivative(derivative(edge))
    expected = [np.concatenate([edge(t), first(t), second(t)]) for t in range(frames)]
    np.testing.assert_allclose(add_deltas(torch.tensor(static), 2), expected, atol=1e-6)
    once = add_deltas(torch.tensor(static), 1)
    np.testing.assert_allclose(once, np.array(expected)[:, :10], atol=1e-6)


def test_mfcc_with_deltas_begins_with_the_mfcc():
    wave = waveform(3_001)
    static, both = Mfcc(num_ceps=11)(wave), Mfcc(num_ceps=11, deltas=2)
    assert both.size == 33
    torch.testing.assert_close(both(wave), add_deltas(static, 2))
    assert both(wave[:399]).shape == (0, 33)


@pytest.mark.parametrize(("rate", "bins"), [(16_000, 80), (22_050, 41)])
def test_slaney_mel_is_librosas(rate, bins):
    wave = waveform(9_973)
    ours = SlaneyMel(rate, bins)
    # Its filters and scipy's windowed spectra: librosa.feature compiles for half a minute.
    filters = librosa.filters.mel(sr=rate, n_fft=ours.window, n_mels=bins)
    frames = np.lib.stride_tricks.sliding_window_view(wave.double().numpy(), ours.window)
    windowed = frames[:: ours.shift] * scipy.signal.get_window("hann", ours.window)
    judge = np.abs(np.fft.rfft(windowed)) ** 2 @ filters.T
    np.testing.assert_allclose(ours(wave), np.log(np.maximum(judge, 1e-10)), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_that_fit_whole(kind):
    extract = kind()
    for samples in (0, 1, 399, 400, 559, 560, 1_999):
        frames = max(0, 1 + (samples - 400) // 160)
        assert extract.num_frames(samples) == frames
        assert extract(waveform(samples)).shape == (frames, extract.size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_depends_on_its_own_samples_only(kind):
    wave, extract = waveform(400 + 160 * 20), kind()
    longer = torch.cat([wave, waveform(997, seed=1)])
    torch.testing.assert_close(extract(longer)[:21], extract(wave))
    torch.testing.assert_close(extract(wave[160 * 4 :]), extract(wave)[4:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"dither": 1.0}, {"deltas": 2}])
def test_padding_and_batch_mates_change_nothing(kind, settings):
    if "deltas" in settings and kind is not Mfcc:
        pytest.skip("MFCC alone")
    extract, sizes = kind(**settings), torch.tensor([3_001, 397, 7_919, 0])
    waves = [waveform(int(size), seed) for seed, size in enumerate(sizes)]
    batch = torch.full((4, 8_009), 0.7)  # padding that features would show
    for row, wave in zip(batch, waves, strict=True):
        row[: len(wave)] = wave
    features, lengths = extract(batch, sizes)
    assert features.shape == (4, 47, extract.size) and lengths.tolist() == [17, 0, 47, 0]
    for row, length, wave in zip(features, lengths, waves, strict=True):
        assert torch.equal(row[:length], extract(wave)) and not row[length:].any()
    features, lengths = extract(batch)
    assert torch.equal(features[2], extract(batch[2])) and lengths.tolist() == [48] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_digital_silence_is_finite(kind):
    features = kind()(torch.zeros(1_999))
    assert features.isfinite().all()
    assert (features == features[0]).all()


def test_dither_comes_from_the_generator_and_is_the_same_without_one():
    extract, silence = Fbank(dither=1.0), torch.zeros(16_000)
    torch.manual_seed(1)
    first = extract(silence)
    torch.manual_seed(2)
    assert torch.equal(extract(silence), first)
    drawn = [extract(silence, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 7)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    # One unit in 16 bits: the energy of 398 samples of white noise of variance 1, by Parseval.
    noise = torch.randn(16_000, generator=torch.Generator().manual_seed(5)) / 32768
    torch.testing.assert_close(drawn[0], Fbank()(noise))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fbank(8_000, 127), r"\d+ of 127 mel bins at 8000 Hz are narrower than the FFT"),
        (lambda: SlaneyMel(8_000, 127), r"\d+ of 127 mel bins at 8000 Hz are narrower"),
        (lambda: Fbank(num_mel_bins=3), "num_mel_bins 3: Kaldi's filterbank needs 4 or more"),
        (lambda: Mfcc(num_ceps=24), r"num_ceps 24 must lie in 1 to num_mel_bins \(23\)"),
        (lambda: Mfcc(deltas=3), "deltas 3 must be 0, 1 or 2"),
        (lambda: Fbank()(torch.zeros(1, 2, 999)), r"\(samples,\), or .* got shape \(1, 2, 999\)"),
        (lambda: Fbank()(torch.zeros(999), torch.tensor([9])), r"got shape \(999,\)"),
        (
            lambda: Fbank()(torch.zeros(2, 9), torch.tensor([9])),
            r"\[9\] must be 2 numbers of 0 to 9",
        ),
        (lambda: Fbank()(torch.zeros(1, 9), torch.tensor([-1])), r"\[-1\] must be 1 numbers"),
    ],
)
def test_invalid_settings_are_reported(make, message):
    with pytest.raises(ValueError, match=message):
        make()
