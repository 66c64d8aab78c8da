"""Audio files written by soundfile must decode to the sines that were written."""

import math
import os
import shutil
import struct
import subprocess
import tarfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import soundfile
import torch

from asr.features import AudioError, NoSamples
from asr.features.audio import (
    audio_seconds,
    decoded_seconds,
    from_samples,
    read_audio,
    stream_audio,
)
from asr.features.cut import cut_audio
from asr.features.files import Window
from asr.features.sound import check_values, open_audio
from asr.features.tar import BLOCK

SECONDS, RATE = 0.73, 16_000
RATES = [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000]
WAV = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
LOSSLESS = [
    *[("WAV", subtype, 16_000) for subtype in WAV],
    *[("FLAC", "PCM_16", rate) for rate in RATES],
    *[("FLAC", "PCM_24", 16_000), ("AIFF", "PCM_16", 16_000), ("RF64", "PCM_16", 16_000)],
]
LOSSY = [
    *[("OGG", "VORBIS", rate) for rate in RATES],
    *[("WAV", "ULAW", rate) for rate in RATES],
    *[("MP3", "MPEG_LAYER_III", rate) for rate in RATES if rate <= 48_000],
    *[("OGG", "OPUS", rate) for rate in (8_000, 12_000, 16_000, 24_000, 48_000)],
]


def sines(rate: int, channels: int, seconds: float = SECONDS) -> np.ndarray:
    """(S, C): channel c is a sine of 300 + 170 c Hz, so the mean contains every channel."""
    time = np.arange(round(rate * seconds)) / rate
    return np.stack([0.4 * np.sin(2 * np.pi * (300 + 170 * c) * time) for c in range(channels)], 1)


def check(path, channels: int, least_decibels: float) -> None:
    """The file contains the mean of the sines at 16 kHz, except at its edges."""
    decoded = read_audio(path, RATE).double().numpy()
    expected = sines(16_000, channels).mean(axis=1)
    assert abs(len(decoded) - len(expected)) <= 1
    inner = slice(800, len(expected) - 800)
    error = decoded[inner] - expected[inner]
    decibels = 10 * math.log10((expected[inner] ** 2).sum() / ((error**2).sum() + 1e-20))
    assert decibels > least_decibels
    assert audio_seconds(path) == pytest.approx(SECONDS, abs=1e-3)


@pytest.mark.parametrize(("kind", "subtype", "rate"), LOSSLESS)
def test_lossless_files_give_the_mean_of_their_channels(tmp_path, kind, subtype, rate):
    for channels in (1, 2, 5):
        path = tmp_path / f"{channels}.audio"  # by content, not by name
        soundfile.write(path, sines(rate, channels), rate, format=kind, subtype=subtype)
        check(path, channels, 25 if subtype == "PCM_U8" else 45)


@pytest.mark.parametrize(("kind", "subtype", "rate"), LOSSY)
def test_lossy_files_are_close(tmp_path, kind, subtype, rate):
    for channels in (1, 2):
        path = tmp_path / f"{channels}.audio"
        soundfile.write(path, sines(rate, channels), rate, format=kind, subtype=subtype)
        check(path, channels, 15)


@pytest.mark.parametrize("rate", [7_919, 15_991, 44_101, 999_983])
def test_a_rate_without_a_common_divisor_needs_little_memory(tmp_path, rate):
    path = tmp_path / "odd.wav"
    soundfile.write(path, sines(rate, 1), rate)
    decoded = read_audio(path, RATE)
    assert len(decoded) == pytest.approx(SECONDS * 16_000, rel=6e-4)
    spectrum = np.abs(np.fft.rfft(decoded.numpy() * np.hanning(len(decoded))))
    assert spectrum.argmax() * 16_000 / len(decoded) == pytest.approx(300, abs=1)


def test_resampling_keeps_the_band_and_removes_aliases(tmp_path):
    time = np.arange(16_000) / 16_000
    low, high = np.sin(2 * np.pi * 1_000 * time), np.sin(2 * np.pi * 6_000 * time)
    soundfile.write(tmp_path / "a.wav", 0.3 * low + 0.3 * high, 16_000, subtype="FLOAT")
    decoded = read_audio(tmp_path / "a.wav", sample_rate=8_000).numpy()
    assert len(decoded) == 8_000
    np.testing.assert_allclose(decoded[100:-100], 0.3 * low[::2][100:-100], atol=2e-3)


@pytest.mark.parametrize("sample_rate", [8_000, 16_000])
@pytest.mark.parametrize("rate", [1_000, 7_919, 8_000, 11_025, 16_000, 22_050, 44_101, 48_000])
def test_blocks_join_to_what_one_block_gives(tmp_path, monkeypatch, rate, sample_rate):
    """The resampling filter reaches over the borders of blocks."""
    samples = np.random.default_rng(rate).uniform(-1, 1, 40_003)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    whole = read_audio(tmp_path / "a.wav", sample_rate)
    for size in (40_003, 40_000, 4_096, 997):
        monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", size)
        blocks = list(stream_audio(tmp_path / "a.wav", sample_rate))
        torch.testing.assert_close(torch.cat(blocks), whole, atol=5e-7, rtol=0)


def test_samples_over_full_scale_are_clipped_and_unscaled_ones_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.array([0.5, 1.5, -1.5]), 16_000, subtype="FLOAT")
    assert read_audio(tmp_path / "a.wav", RATE).tolist() == [0.5, 1.0, -1.0]
    soundfile.write(tmp_path / "b.wav", np.array([0.5, 3000.0]), 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match=r"b.wav: samples reach 3000; scale"):
        read_audio(tmp_path / "b.wav", RATE)


def test_integer_samples_in_memory_are_refused():
    with pytest.raises(AudioError, match=r"torch.int16 samples; divide them by 32768"):
        check_values(torch.full((7,), 99, dtype=torch.int16), "a")


def test_samples_in_memory_are_processed_like_files():
    stereo = sines(48_000, 2)
    ours = from_samples(stereo, 48_000, RATE)
    torch.testing.assert_close(ours, from_samples(torch.tensor(stereo), 48_000, RATE))
    np.testing.assert_allclose(ours[99:-99], sines(16_000, 2).mean(1)[99:-99], atol=2e-3)
    frozen = np.zeros(7, np.float32)
    frozen.flags.writeable = False
    assert from_samples(frozen, 16_000, RATE).tolist() == [0.0] * 7
    with pytest.raises(AudioError, match=r"the waveform: expected shape .* got \(2, 3, 5\)"):
        from_samples(np.zeros((2, 3, 5)), 16_000, RATE)


@pytest.mark.parametrize(
    ("dtype", "subtype"), [("uint8", "PCM_U8"), ("int16", "PCM_16"), ("int32", "PCM_32")]
)
def test_integers_are_scaled_as_in_a_file(dtype, subtype, tmp_path):
    bounds = np.iinfo(dtype)
    samples = np.linspace(bounds.min, bounds.max, 997).astype(dtype)
    as_written = samples.astype(np.int16) - 128 if dtype == "uint8" else samples
    as_written = (as_written * 256).astype(np.int16) if dtype == "uint8" else as_written
    soundfile.write(tmp_path / "a.wav", as_written, RATE, subtype=subtype)
    expected = read_audio(tmp_path / "a.wav", RATE)
    torch.testing.assert_close(from_samples(samples, RATE, RATE), expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(
        from_samples(torch.tensor(samples), RATE, RATE), expected, atol=1e-7, rtol=0
    )
    for unknown in ("int64", "bool", "complex64", "object"):
        with pytest.raises(AudioError, match=f"{unknown} samples; give int16"):
            from_samples(samples.astype(unknown), RATE, RATE)


def test_the_longer_axis_is_time():
    stereo = sines(16_000, 2)
    for same in (stereo, stereo.T):
        np.testing.assert_allclose(from_samples(same, 16_000, RATE), stereo.mean(1), atol=1e-6)
    half = torch.tensor(stereo[:, 0]).bfloat16()
    assert from_samples(half[None], RATE, RATE).tolist() == half.tolist()
    assert from_samples(np.full((1, 1), 0.5), 16_000, RATE).tolist() == [0.5]
    for empty in (np.zeros((0, 2)), np.zeros((2, 0))):  # such as the first block of a stream
        with pytest.raises(NoSamples):
            from_samples(empty, 16_000, RATE)


@pytest.mark.parametrize("rate", [22_050.5, math.nan, 0, -16_000.0, math.inf])
def test_another_rate_is_refused(rate):
    with pytest.raises(AudioError, match=r"^the waveform: sample rate .* Hz is "):
        from_samples(np.zeros(7), rate, RATE)


# Files with false headers, truncated files, and files without audio.


def wav(claimed_bytes: int, data: bytes, channels: int = 1, rate: int = 16_000) -> bytes:
    width = 2 * channels
    riff = struct.pack("<4sI4s", b"RIFF", min(claimed_bytes + 36, 2**32 - 1), b"WAVE")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * width, width, 16)
    return riff + form + struct.pack("<4sI", b"data", claimed_bytes) + data


def flac(path, claimed_samples: int, samples: np.ndarray) -> None:
    """A FLAC file whose STREAMINFO claims another number of samples (36 bits at byte 21)."""
    soundfile.write(path, samples, 16_000, format="FLAC")
    raw = bytearray(path.read_bytes())
    raw[21] = (raw[21] & 0xF0) | (claimed_samples >> 32)
    raw[22:26] = struct.pack(">I", claimed_samples & 0xFFFFFFFF)
    path.write_bytes(raw)


def peak_megabytes(path) -> float:
    """The peak memory of reading, whether or not it succeeds."""
    tracemalloc.start()
    try:
        read_audio(path, RATE)
    except AudioError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / 2**20


def test_a_wav_header_that_claims_4_gb_allocates_only_its_data(tmp_path):
    path = tmp_path / "liar.wav"
    path.write_bytes(wav(2**32 - 16, struct.pack("<h", 8192) * 500))
    assert read_audio(path, RATE).tolist() == [0.25] * 500
    assert peak_megabytes(path) < 1


@pytest.mark.parametrize("block", [997, 2**22])
def test_a_flac_without_a_length_is_read_completely(tmp_path, monkeypatch, block):
    monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", block)
    samples = sines(16_000, 1, seconds=0.5)
    flac(tmp_path / "pipe.flac", 0, samples)
    decoded = read_audio(tmp_path / "pipe.flac", RATE)
    np.testing.assert_allclose(decoded, samples[:, 0], atol=1e-4)
    assert audio_seconds(tmp_path / "pipe.flac") == 0.5


def test_more_than_max_seconds_is_refused_without_decoding_it_all(tmp_path, monkeypatch):
    path = tmp_path / "long.flac"  # an hour of silence in a small file
    soundfile.write(path, np.zeros(3600 * 1_000, np.int16), 1_000)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", 1_000)
    with pytest.raises(AudioError, match=r"long.flac: longer than the limit of 7.5 seconds"):
        read_audio(path, RATE, max_seconds=7.5)
    tracemalloc.start()
    with pytest.raises(AudioError):
        read_audio(path, RATE, max_seconds=7.5)
    assert tracemalloc.get_traced_memory()[1] < 2**20  # all of it would be 14 MB
    tracemalloc.stop()
    assert len(read_audio(path, sample_rate=1_000, max_seconds=3600)) == 3_600_000


def test_truncated_files_give_their_samples_or_an_error(tmp_path):
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        path = tmp_path / f"cut.{kind}"
        soundfile.write(path, sines(16_000, 1, seconds=3), 16_000, format=kind)
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
        if kind in ("FLAC", "OGG"):
            with pytest.raises(AudioError, match=f"cut[.]{kind}: (broken|not readable)"):
                read_audio(path, RATE)
        else:
            assert 0 < len(read_audio(path, RATE)) < 3 * 16_000


@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "FLAC"])
def test_truncated_files_are_detected(tmp_path, kind):
    path = tmp_path / f"cut.{kind}"
    soundfile.write(path, sines(16_000, 1, seconds=3), 16_000, format=kind)
    assert decoded_seconds(path) == pytest.approx(3, abs=0.1)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(
        AudioError, match=f"cut[.]{kind}: (broken|breaks off: its header says (3|2.99))"
    ):
        decoded_seconds(path)


@pytest.mark.parametrize("kind", ["VORBIS", "OPUS"])
def test_a_complete_ogg_is_not_reported_as_truncated(tmp_path, kind):
    for rate in (8_000, 48_000):
        samples = sines(rate, 1, seconds=3)
        soundfile.write(tmp_path / "a.ogg", samples, rate, format="OGG", subtype=kind)
        assert decoded_seconds(tmp_path / "a.ogg") == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 - 1])
def test_a_wav_written_to_a_pipe_is_not_truncated(tmp_path, size):
    content = wav(size, bytes(2 * 16_000), rate=16_000)
    (tmp_path / "pipe.wav").write_bytes(content)
    assert decoded_seconds(tmp_path / "pipe.wav") == pytest.approx(1, abs=0.01)


def test_an_mp3_without_a_length_is_not_truncated(tmp_path):
    """Many encoders write an image first, from whose bytes libsndfile estimates the length."""
    path = tmp_path / "a.mp3"
    soundfile.write(path, sines(16_000, 1, seconds=3), 16_000, format="MP3")
    raw = path.read_bytes()
    tag = b"ID3\3\0\0" + bytes([0, 1 << 4, 0, 0]) + bytes(1 << 18)  # its size in 4 times 7 bits
    path.write_bytes(
        tag + raw[raw.find(raw[:2], 4) :]
    )  # and without the frame that states the length
    assert audio_seconds(path) == decoded_seconds(path) == pytest.approx(3, abs=0.1)


BAD = {
    "empty.wav": (b"", "the file is empty"),
    "header.wav": (wav(0, b""), "no audio, 0 samples"),
    "chunk.wav": (wav(0, b"LIST\4\0\0\0INFO"), "no audio, 0 samples"),
    "text.wav": (b"this is no audio\n" * 99, "not readable as audio (Format not recognised)"),
    "headerless.raw": (bytes(999), "not readable as audio"),
    "slow.wav": (wav(8, bytes(8), rate=1), "sample rate 1 Hz is outside 1000 to 1000000 Hz"),
    "fast.wav": (wav(8, bytes(8), rate=2**31 - 1), "sample rate 2147483647 Hz is outside"),
    "still.wav": (wav(8, bytes(8), rate=0), "not readable as audio"),
    "layer_2.mp3": (b"\xff\xfd\x80".ljust(417, b"\0") * 9, "MPEG audio, but no MP3; convert it"),
    "layer_1.mp3": (b"\xff\xff\x80".ljust(276, b"\0") * 9, "MPEG audio, but no MP3; convert it"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_reported_in_one_line(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    for read in (partial(read_audio, sample_rate=RATE), audio_seconds):
        with pytest.raises(AudioError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {message}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_samples_are_refused(tmp_path, value):
    samples = sines(16_000, 2)
    samples[4321, 1] = value
    soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match=r"a.wav: holds samples that are NaN or infinite"):
        read_audio(tmp_path / "a.wav", RATE)


def test_special_files_are_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening one would block forever
    for path, message in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "missing.flac", "no such file"),
        (tmp_path / "nul\0.flac", "no such file"),
        (tmp_path / "a" / ("x" * 300), "no such file|File name too long"),
    ):
        with pytest.raises(AudioError, match=message):
            read_audio(path, RATE)


def packed(tar, name, content, size):
    """A tar of one sparse member that begins with the content -> the member's place."""
    header = tarfile.TarInfo(name)
    header.size = size
    with tar.open("wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT) + content)
        file.truncate(BLOCK + size)
    return tar / f"{name}@{BLOCK}+{size}"


def test_a_disk_error_within_a_tar_is_one_line(tmp_path, monkeypatch, capfd):
    """soundfile would print a traceback of its own and take the audio for complete."""
    soundfile.write(tmp_path / "a.wav", sines(16_000, 1, seconds=3), 16_000)
    content = (tmp_path / "a.wav").read_bytes()
    path = packed(tmp_path / "x.tar", "a.wav", content, len(content))
    readinto = Window.readinto

    class Failing:
        def seek(self, position):
            raise OSError(5, "Input/output error")

    def fails_later(self, buffer):
        if self.position > len(content) / 2:
            self.file = Failing()
        return readinto(self, buffer)

    assert len(read_audio(path, RATE)) == 48_000
    monkeypatch.setattr(Window, "readinto", fails_later)
    monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", 1000)
    with pytest.raises(AudioError, match="the tar cannot be read: Input/output error"):
        read_audio(path, RATE)
    assert capfd.readouterr().err == ""


def test_a_file_name_that_is_not_utf8_is_read(tmp_path):
    soundfile.write(tmp_path / "a.mp3", sines(16_000, 1), 16_000, format="MP3")
    path = tmp_path / os.fsdecode(b"caf\xe9.mp3")
    (tmp_path / "a.mp3").rename(path)
    check(path, 1, 15)


def test_a_damaged_mp3_prints_nothing(tmp_path, capfd):
    """Its decoder would print a line for every damaged frame; several threads read at once."""
    draw, path, stderr = np.random.default_rng(3), tmp_path / "a.mp3", os.fstat(2)
    soundfile.write(path, sines(16_000, 1, seconds=2.0), 16_000)
    raw = bytearray(path.read_bytes())
    for place in draw.integers(400, len(raw) - 8, size=30):
        raw[place : place + 8] = draw.bytes(8)
    path.write_bytes(raw)
    with soundfile.SoundFile(path) as sound:
        sound.read()
    assert "mpg123" in capfd.readouterr().err  # the real amplitude
    with ThreadPoolExecutor(5) as threads:
        decoded = list(threads.map(read_audio, [path] * 23, [RATE] * 23))
    assert all(len(waveform) > 16_000 for waveform in decoded)
    os.write(2, b"and is printed again")
    assert capfd.readouterr().err == "and is printed again"
    assert os.fstat(2).st_ino == stderr.st_ino


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "OPUS", "MP3", "AIFF"])
def test_damaged_files_give_samples_or_a_clear_error(tmp_path, kind):
    """Random bytes overwritten, mostly in the header; seeded."""
    path, draw = tmp_path / f"damaged.{kind}", np.random.default_rng(17)
    options = {"format": "OGG", "subtype": "OPUS"} if kind == "OPUS" else {"format": kind}
    soundfile.write(path, sines(16_000, 2, seconds=0.3), 16_000, **options)
    good, refused = path.read_bytes(), 0
    for trial in range(30):
        raw = bytearray(good)
        reach = 64 if trial % 2 else len(raw)
        for place in draw.integers(0, reach, size=1 + trial % 5):
            raw[place] = draw.integers(256)
        path.write_bytes(raw)
        try:
            decoded = read_audio(path, RATE, max_seconds=60)
        except AudioError as error:
            refused += 1
            assert str(error).startswith(str(path))
            assert "\n" not in str(error)
        else:
            assert decoded.isfinite().all()
            assert decoded.abs().max() <= 1
    assert refused > 0


@pytest.mark.slow
def test_a_long_file_is_measured_with_the_memory_of_one_block(tmp_path):
    """A small file may contain hours of silence, and a table may list many such files."""
    seconds, rate = 2400, 16_000
    soundfile.write(tmp_path / "long.flac", np.zeros(seconds * rate, np.float32), rate)
    tracemalloc.start()
    try:
        assert decoded_seconds(tmp_path / "long.flac") == seconds
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < seconds * rate * 4 / 2  # half of the samples alone
    with pytest.raises(AudioError, match="longer than the limit of 7 seconds"):
        decoded_seconds(tmp_path / "long.flac", 7)


# Files that hold more than libsndfile reads of them.

FFMPEG = shutil.which("ffmpeg")
PADDING = 0.2  # seconds by which MP3 without a header exceed what was encoded, at 8 kHz


def speech_like(seconds: float, rate: int, channels: int, seed: int = 0) -> np.ndarray:
    """(S, C): a sweep with pauses and bursts of noise, so that a variable bit rate varies."""
    draw, time = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    sweep = 0.3 * np.sin(2 * np.pi * (200 + 100 * time) * time) * (np.sin(2 * time) > 0)
    noise = 0.05 * draw.standard_normal((len(time), channels)) * (np.sin(3 * time) > 0)[:, None]
    return (sweep[:, None] + noise).astype(np.float32)


def mp3(path, samples, rate, **settings):
    """Write the samples as MP3 -> the content."""
    soundfile.write(path, samples, rate, format="MP3", **settings)
    return path.read_bytes()


def without_header(content: bytes) -> bytes:
    """An MP3 of soundfile without its first frame, which states the length."""
    return content[content.find(content[:2], 4) :]


VARIABLE = {"bitrate_mode": "VARIABLE", "compression_level": 0.6}
CONSTANT = {"bitrate_mode": "CONSTANT", "compression_level": 0.6}


@pytest.mark.parametrize(
    ("rate", "channels"), [(8_000, 1), (12_000, 2), (22_050, 1), (32_000, 2), (48_000, 1)]
)
def test_mp3_is_read_to_its_end_with_and_without_a_header(tmp_path, rate, channels):
    samples, path = speech_like(5, rate, channels), tmp_path / "a.mp3"
    for settings in (VARIABLE, CONSTANT):
        content = mp3(path, samples, rate, **settings)
        assert audio_seconds(path) == decoded_seconds(path) == pytest.approx(5, abs=1e-4)
        path.write_bytes(without_header(content))
        assert audio_seconds(path) == decoded_seconds(path) == pytest.approx(5, abs=PADDING)
        assert decoded_seconds(path) >= 5


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_without_names_in_dev_fd(tmp_path, monkeypatch, format):
    """As on macOS, where such a name has the position of the file that is open."""
    soundfile.write(tmp_path / "a.x", speech_like(3, 16_000, 2), 16_000, format=format)
    expected = read_audio(tmp_path / "a.x", RATE)
    monkeypatch.setattr("asr.features.sound.HAS_FILE_NAMES", False)
    torch.testing.assert_close(read_audio(tmp_path / "a.x", RATE), expected, atol=0, rtol=0)


def test_files_in_a_row_are_read_as_one(tmp_path):
    """`cat a b`: the judge is what each file gives by itself."""
    first, second = speech_like(7, 16_000, 1), speech_like(3, 16_000, 1, seed=1)
    kinds = {
        "mp3": {"format": "MP3", **VARIABLE},
        "ogg": {"format": "OGG", "subtype": "VORBIS"},
        "opus": {"format": "OGG", "subtype": "OPUS"},
        "flac": {"format": "FLAC"},
    }
    for kind, settings in kinds.items():
        parts = []
        for number, samples in enumerate((first, second[:39_999], first[:40_000])):
            soundfile.write(tmp_path / f"{number}.{kind}", samples, 16_000, **settings)
            parts.append((tmp_path / f"{number}.{kind}").read_bytes())
        expected = torch.cat([read_audio(tmp_path / f"{n}.{kind}", 16_000) for n in range(3)])
        path = tmp_path / f"all.{kind}"
        path.write_bytes(b"".join(parts))
        torch.testing.assert_close(read_audio(path, 16_000), expected, atol=0, rtol=0)
        assert decoded_seconds(path) == len(expected) / 16_000
        if kind != "flac":  # whose header alone is read for this
            assert audio_seconds(path) == len(expected) / 16_000


@pytest.mark.parametrize("length", [16_000, 15_999])
def test_wavs_in_a_row_are_not_read_in_part(tmp_path, length):
    samples, path = speech_like(1, 16_000, 1)[:length], tmp_path / "a.wav"
    for subtype in ("PCM_16", "PCM_U8"):
        soundfile.write(path, samples, 16_000, subtype=subtype)
        path.write_bytes(path.read_bytes() * 2)
        for read in (partial(read_audio, sample_rate=RATE), audio_seconds):
            with pytest.raises(AudioError, match=r"^[^\n]*a[.]wav: not readable as audio [^\n]*$"):
                read(path)


@pytest.mark.parametrize("kind", ["MP3", "OGG"])
def test_streams_of_two_rates_are_refused(tmp_path, kind):
    path, samples, content = tmp_path / "a.audio", speech_like(2, 16_000, 1), b""
    for rate in (16_000, 22_050):
        soundfile.write(path, samples, rate, format=kind)
        content += path.read_bytes()
    path.write_bytes(content)
    for read in (partial(read_audio, sample_rate=RATE), audio_seconds):
        with pytest.raises(AudioError, match=r"of 16000 Hz, 1 channels and 22050 Hz, 1 chann"):
            read(path)


def test_a_truncated_mp3_is_detected_by_its_header(tmp_path):
    path = tmp_path / "a.mp3"
    content = mp3(path, speech_like(9, 16_000, 1), 16_000, **VARIABLE)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AudioError, match=r"breaks off: its header says 9\.\d+ seconds and [3-6]\."):
        decoded_seconds(path)


def ogg_pages(content: bytes) -> list[int]:
    """Where the pages of an Ogg begin (RFC 3533, section 6)."""
    places = [0]
    while places[-1] < len(content):
        sizes = content[places[-1] + 27 :][: content[places[-1] + 26]]
        places.append(places[-1] + 27 + len(sizes) + sum(sizes))
    return places[:-1]


@pytest.fixture
def reported(monkeypatch) -> set[str]:
    """The files that were named in the log, none at first."""
    names: set[str] = set()
    monkeypatch.setattr("asr.features.sound._reported", names)
    return names


@pytest.mark.parametrize("kind", ["VORBIS", "OPUS"])
def test_a_truncated_ogg_is_reported(tmp_path, kind, caplog, reported):
    """The judge of what is there are the positions that the pages state."""
    path = tmp_path / "a.ogg"
    soundfile.write(path, speech_like(9, 16_000, 1), 16_000, format="OGG", subtype=kind)
    content, line = path.read_bytes(), f"{path}: the file ends before its stream does: "
    assert decoded_seconds(path) == 9 and not caplog.text
    pages = ogg_pages(content)
    middle = pages[len(pages) // 2]
    rate, skipped = (16_000, 0) if kind == "VORBIS" else (48_000, 312)
    before = struct.unpack("<q", content[pages[len(pages) // 2 - 1] + 6 :][:8])[0] - skipped
    there = f"{before / rate:.2f}"
    for end in (middle + 5, middle + 29, middle + 999, pages[-1] + 26, len(content) - 1):
        caplog.clear()
        reported.clear()
        path.write_bytes(content[:end])
        with pytest.raises(AudioError, match=r"breaks off: [2-9][.]\d+ seconds are there, and a p"):
            decoded_seconds(path)
        read_audio(path, RATE)
        assert f"{line}{there if end < pages[-1] else ''}" in caplog.text
        assert caplog.text.endswith(" seconds are there, and a part of a page\n")
    caplog.clear()
    for _ in range(2):  # contents, which have no name of their own
        list(stream_audio(content[: middle + 5], RATE))
    assert caplog.text.count("the audio: the file ends before its stream does: ") == 2
    for _ in range(2):  # whole pages without the one that is marked as the last
        path.write_bytes(content[:middle])
        reported.clear()
        caplog.clear()
        assert f"{decoded_seconds(path):.2f}" == there
        read_audio(path, RATE)  # is reported once
        assert caplog.text.count(line) == 1
        assert caplog.text.endswith(" seconds are there, and no page that ends it\n")
        content = content[:middle] + content[:middle]  # two streams


@pytest.mark.parametrize("kind", ["MP3", "WAV"])
def test_reading_a_truncated_file_is_reported(tmp_path, kind, caplog, reported):
    path = tmp_path / "a.audio"
    soundfile.write(path, speech_like(9, 16_000, 1), 16_000, format=kind)
    read_audio(path, RATE)
    assert not caplog.text
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    read_audio(path, RATE)
    assert f"{path}: the file ends before its stream does: its header says 9." in caplog.text


@pytest.mark.parametrize("stated", [0, 1000, 2**31 - 1])
def test_a_wav_whose_header_states_less_is_read_to_its_end(tmp_path, caplog, reported, stated):
    samples = np.random.default_rng(0).integers(-9999, 9999, 16_000, dtype="<i2")
    path = tmp_path / "a.wav"
    path.write_bytes(wav(stated, samples.tobytes()))
    np.testing.assert_array_equal(read_audio(path, RATE), samples / np.float32(32768))
    assert audio_seconds(path) == decoded_seconds(path) == 1
    line = f"{path}: its header states {stated} bytes of samples, and 32000 are there"
    assert (line in caplog.text) == (stated < 32_000)
    # Chunks behind the samples are none of them.
    path.write_bytes(
        wav(32_000, samples.tobytes() + b"LIST" + struct.pack("<I", 9000) + bytes(9000))
    )
    assert decoded_seconds(path) == 1


def test_a_wav_over_4_gib_is_read_to_its_end(tmp_path):
    path, size = tmp_path / "a.wav", 5 << 30
    for stated in (2**32 - 1, size % 2**32):  # written to a pipe; a number that overflowed
        path.write_bytes(wav(stated, b""))
        os.truncate(path, 44 + size)
        assert audio_seconds(path) == size / 32_000


ENCODERS = [
    *[("mp3", ["-c:a", "libmp3lame", *kind, *rate]) for kind in (["-q:a", "4"], ["-b:a", "64k"])
      for rate in (["-ar", "44100", "-ac", "2"], ["-ar", "8000"])],
    *[("mp3", ["-c:a", "libmp3lame", *kind, "-write_xing", "0"])
      for kind in (["-q:a", "2"], ["-q:a", "9"], ["-b:a", "8k"], ["-abr", "1", "-b:a", "48k"])],
    *[("ogg", ["-c:a", "libvorbis", "-q:a", quality]) for quality in ("1", "8")],
    *[("opus", ["-c:a", "libopus", "-b:a", rate]) for rate in ("12k", "64k")],
    *[(kind, []) for kind in ("flac", "wav", "aiff", "au", "w64")],
    *[("wav", ["-c:a", coding]) for coding in ("pcm_f32le", "pcm_s24le", "adpcm_ima_wav")],
    ("wav", ["-rf64", "always"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed")
def test_durations_of_files_written_by_encoders_and_to_a_pipe(tmp_path):
    """The judge is the number of samples that went in."""
    soundfile.write(tmp_path / "in.wav", speech_like(6, 16_000, 1), 16_000)
    with ThreadPoolExecutor(2) as threads:

        def encode(case):
            kind, settings = case
            line = [FFMPEG, "-v", "error", "-i", tmp_path / "in.wav", *settings, "-f", kind, "-"]
            return subprocess.run(line, capture_output=True, check=True).stdout

        for (kind, settings), content in zip(ENCODERS, threads.map(encode, ENCODERS), strict=True):
            path = tmp_path / "a.audio"
            path.write_bytes(content)
            padding = PADDING if kind == "mp3" or settings[-1:] == ["adpcm_ima_wav"] else 0
            for measure in (audio_seconds, decoded_seconds):
                assert 6 - 1e-3 <= measure(path) <= 6 + padding + 1e-3, (kind, settings, measure)


def whole(path, dtype="int16") -> np.ndarray:
    with open_audio(path) as sound:
        return np.concatenate([block.copy() for block in sound.blocks(dtype, 1 << 22)])


CUT = {
    "VBR": {"format": "MP3", **VARIABLE},
    "CBR": {"format": "MP3", **CONSTANT},
    "VORBIS": {"format": "OGG", "subtype": "VORBIS"},
    "OPUS": {"format": "OGG", "subtype": "OPUS", "compression_level": 0.95},
    "FLAC": {"format": "FLAC"},
    "PCM": {"format": "WAV"},
    "ADPCM": {"format": "WAV", "subtype": "IMA_ADPCM"},
    "GSM": {"format": "WAV", "subtype": "GSM610"},
    "G723": {"format": "AU", "subtype": "G723_24"},
}


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", CUT)
def test_a_part_has_the_samples_of_the_whole(tmp_path, kind, channels):
    """Also of a headerless MP3, at the end of the file, and over the border of two streams."""
    if kind in ("GSM", "G723") and channels == 2:
        pytest.skip("one channel only")
    path, draw, rate = tmp_path / "a.audio", np.random.default_rng(3), 16_000
    soundfile.write(path, speech_like(14, rate, channels), rate, **CUT[kind])
    contents = [path.read_bytes()]
    if CUT[kind]["format"] == "MP3":
        contents.append(without_header(contents[0]))
    if CUT[kind]["format"] in ("MP3", "OGG", "FLAC"):
        contents.append(contents[0] * 2)
    for content in contents:
        path.write_bytes(content)
        samples = whole(path)
        last = len(samples) / rate
        starts = [0.0, 0.01, last - 0.3, 13.7, *draw.uniform(0, last - 0.3, 5)]
        for start in starts:
            part, seconds = cut_audio(path, start, 0.3, None)
            begin = math.floor(round(start * rate, 8) + 0.5)
            decoded = soundfile.read(BytesIO(part), dtype="int16", always_2d=True)[0]
            np.testing.assert_array_equal(decoded, samples[begin : begin + 4800])
            assert seconds == 0.3


def test_parts_to_the_end_of_a_flac_without_a_length(tmp_path):
    samples = (9999 * sines(16_000, 1, seconds=3)).astype(np.int16)
    flac(tmp_path / "pipe.flac", 0, samples)
    for length in (1.0, 1.4, None):  # ends with the file, after it, with it
        part, seconds = cut_audio(tmp_path / "pipe.flac", 2.0, length, None)
        assert seconds == 1.0
        np.testing.assert_array_equal(
            soundfile.read(BytesIO(part), dtype="int16")[0], samples[32_000:, 0]
        )
    with pytest.raises(AudioError, match=r"the part from 3.500 s is not in the file of 3.000 s"):
        cut_audio(tmp_path / "pipe.flac", 3.5, 0.2, None)


def test_an_mp3_of_many_blocks_is_read_as_one_block(tmp_path, monkeypatch):
    """soundfile seeks behind every block, which damages an MP3 of variable bit rate."""
    mp3(tmp_path / "a.mp3", speech_like(9, 16_000, 1), 16_000, **VARIABLE)
    expected = read_audio(tmp_path / "a.mp3", RATE)
    monkeypatch.setattr("asr.features.audio.BLOCK_VALUES", 9_973)
    torch.testing.assert_close(read_audio(tmp_path / "a.mp3", RATE), expected, atol=0, rtol=0)
