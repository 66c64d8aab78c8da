"""Mean and variance of the training features, streamed by the loader's workers."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asr.data.corpus import Corpus
from features.audio import AudioError
from features.front_end import FrontEnd

MEASURED = 30_000  # utterances, about a hundred hours: their mean is that of any more


class _Raw(Dataset):
    """Features as extracted, with their speaker; None where the audio cannot be read."""

    def __init__(self, corpus: Corpus, front_end: FrontEnd) -> None:
        self.corpus, self.front_end = corpus, front_end

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> tuple[str, Tensor] | None:
        utterance = self.corpus[index]
        try:
            return utterance.speaker, self.front_end.extract(self.front_end.load(utterance.audio))
        except AudioError:
            return None


def measure(corpus: Corpus, front_end: FrontEnd, workers: int) -> None:
    """Add the readable utterances to the front end's normalisation, where that needs any.

    Statistics of the whole corpus are taken from MEASURED utterances where it has more, evenly
    spread; those of its speakers from all, since each needs their own.
    """
    if not front_end.norm.needs_statistics:
        return
    if front_end.norm.kind == "global":
        corpus = corpus.sample(MEASURED)
    loader = DataLoader(
        _Raw(corpus, front_end), batch_size=16, num_workers=workers, collate_fn=_as_they_are
    )
    for examples in loader:
        for speaker, features in filter(None, examples):
            front_end.norm.add(features, speaker)


def _as_they_are(examples: Sequence[tuple[str, Tensor] | None]) -> Sequence:
    return examples
