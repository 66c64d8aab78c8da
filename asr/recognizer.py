"""Speech to text in three lines of Python.

from asr.recognizer import Recognizer
recognizer = Recognizer.load("runs/demo")
print(recognizer.transcribe("hello.wav").text)
"""

from asr.inference.recognition import Recognizer
from asr.inference.transcript import Transcript

__all__ = ["Recognizer", "Transcript"]
