"""Mean and variance of a corpus' features, streamed by the loader's workers."""

from collections.abc import Sequence
from copy import copy
from itertools import chain

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asr.data.corpus import Corpus
from asr.data.workers import read
from features.front_end import FrontEnd
from features.normalize import MeanVarianceNorm
from features.samples import AudioError

MEASURED = 30_000  # utterances, about a hundred hours: their mean is that of any more


class _Raw(Dataset):
    """Features as extracted, with whose they are; nothing where the audio cannot be read."""

    def __init__(self, corpus: Corpus, front_end: FrontEnd, speeds: Sequence[float]) -> None:
        self.corpus, self.front_end, self.speeds = corpus, front_end, speeds

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> list[tuple[Tensor, str | None]]:
        utterance = self.corpus[index]
        try:
            waveform = self.front_end.load(utterance.audio)
        except AudioError:
            return []
        return self.front_end.to_measure(waveform, utterance.speaker, self.speeds)


def measure(
    corpus: Corpus, front_end: FrontEnd, workers: int, speeds: Sequence[float] = (1.0,)
) -> None:
    """Add the readable utterances to the front end's normalisation, where that needs any.

    Statistics of the whole corpus are taken at speed 1 and from MEASURED utterances where it has
    more, evenly spread; those of its speakers from all, since each needs their own, and for every
    one of `speeds` apart.
    """
    if not front_end.norm.needs_statistics:
        return
    if front_end.norm.kind == "global":
        corpus, speeds = corpus.sample(MEASURED), (1.0,)
    loader = DataLoader(
        _Raw(corpus, front_end, speeds),
        batch_size=16,
        num_workers=workers,
        collate_fn=_as_they_are,
    )
    for examples in read(loader):
        for features, speaker in chain.from_iterable(examples):
            front_end.norm.add(features, speaker)


def of_split(
    front_end: FrontEnd, corpus: Corpus, workers: int, speeds: Sequence[float] = (1.0,)
) -> FrontEnd:
    """The front end that knows the speakers of that split, and no other, where it tells speakers.

    Any other normalisation is the same for every split.
    """
    if front_end.norm.kind != "speaker":
        return front_end
    own = copy(front_end)
    own.norm = MeanVarianceNorm("speaker", front_end.norm.variance)
    measure(corpus, own, workers, speeds)
    return own


def _as_they_are(examples: Sequence) -> Sequence:
    return examples
