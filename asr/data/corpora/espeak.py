"""The eSpeak NG speech engine, from the wheel `espeakng-loader` (extra `demo`), through ctypes.

One engine stands in a process: the library keeps one global voice and one callback. Not for
threads. Its C interface: espeak-ng's speak_lib.h.
"""

import atexit
import ctypes
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np

from asr.errors import UserError

# From speak_lib.h: espeak_Synth returns when all is said; a failure is returned, not exit().
SYNCHRONOUS, DONT_EXIT = 2, 0x8000
RATE, VOLUME, PITCH = 1, 2, 3
CHARS_UTF8, POS_CHARACTER = 1, 1
LONGEST_DATA_PATH = 150  # the library holds the path in 160 bytes and fails on a longer one

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Engine:
    """`say` gives the samples of a text at `sample_rate` Hz.

    Raises UserError where the extra is not installed or the library does not start.
    """

    def __init__(self) -> None:
        loader = _loader()
        self._library = ctypes.CDLL(str(loader.get_library_path()))
        data = _short(Path(loader.get_data_path()))
        self.sample_rate = self._library.espeak_Initialize(
            SYNCHRONOUS, 0, str(data).encode(), DONT_EXIT
        )
        if self.sample_rate <= 0:
            raise UserError(f"the speech engine eSpeak NG does not start with its data in {data}")
        self._voice: str | None = None
        self._heard: list[np.ndarray] = []
        self._callback = _Callback(self._hear)  # kept: C calls it later
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, voice: str, words_per_minute: int, pitch: int) -> np.ndarray:
        """The text spoken: (S,) int16. Pitch 0 to 99. Raises ValueError for an unknown voice."""
        if voice != self._voice and self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"eSpeak NG has no voice {voice!r}")
        self._voice = voice
        # Half the volume: at the default several voices run into the limits of int16.
        for parameter, value in ((RATE, words_per_minute), (PITCH, pitch), (VOLUME, 50)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._heard.clear()
        content = text.encode()
        self._library.espeak_Synth(
            content, ctypes.c_size_t(len(content) + 1), 0, POS_CHARACTER, 0, CHARS_UTF8, None, None
        )
        return np.concatenate([np.zeros(0, np.int16), *self._heard])

    def _hear(self, samples: "ctypes._Pointer", count: int, events: int | None) -> int:
        if samples and count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0  # go on


def require() -> None:
    """Raises UserError where the extra `demo` is not installed."""
    _loader()


def _loader() -> ModuleType:
    try:
        import espeakng_loader
    except ImportError:
        raise UserError(
            "the spoken numbers are made with espeakng-loader, which is not installed: "
            "pip install 'layernorm-asr[demo]'"
        ) from None
    return espeakng_loader


def _short(data: Path) -> Path:
    """The folder by a name that the library can hold: a link that lasts as long as the process."""
    if len(str(data)) <= LONGEST_DATA_PATH:
        return data
    folder = Path(tempfile.mkdtemp(prefix="espeak-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = folder / data.name
    link.symlink_to(data)
    return link
