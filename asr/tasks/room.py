"""Whether the encoder leaves the CTC loss a frame of memory for every token."""

import torch

from asr.data.corpus import Corpus
from asr.data.text import Tokenizer
from asr.decoding.times import fits
from asr.errors import UserError
from asr.settings import SpeechRecipe
from asr.settings.las import Las
from asr.training.objective import SpeechObjective
from features.front_end import FrontEnd

CHECKED_LENGTHS = 100_000  # utterances of a larger corpus, evenly spread


def check_room(
    recipe: SpeechRecipe,
    corpus: Corpus,
    tokenizer: Tokenizer,
    front_end: FrontEnd,
    objective: SpeechObjective,
) -> None:
    """CTC needs a frame of memory per token: name the utterances that have too few.

    Raises UserError where more than 1 % of them have.
    """
    if not recipe.model.ctc_weight:
        return
    whole, corpus = corpus, corpus.sample(CHECKED_LENGTHS)
    fastest = max(recipe.features.speed)
    frames = torch.tensor([front_end.num_frames(u.seconds, fastest) for u in corpus])
    room = objective.model.memory_lengths(frames).tolist()
    tight = [
        u.id
        for u, there in zip(corpus, room, strict=True)
        if not fits(tokenizer.encode(u.text), there)
    ]
    if not tight:
        return
    names = f"{' '.join(tight[:5])}{' ...' if len(tight) > 5 else ''}"
    looked = "" if corpus is whole else " looked at"
    line = f"{len(tight)} of {len(corpus)} utterances{looked} have more CTC labels than frames"
    line += f": {names}"
    if len(tight) > 0.01 * len(corpus):
        raise UserError(f"{line}; {_remedy(recipe)}")
    print(f"{line}; the CTC loss leaves them out", flush=True)


def _remedy(recipe: SpeechRecipe) -> str:
    """What this recipe can do for more frames or fewer tokens."""
    if isinstance(recipe.model, Las):
        listener = recipe.model.listener
        reducing = {"pyramid": listener.pyramid, "convolution": listener.convolution > 1}
        keys = [f"model.listener.{key}" for key, reduces in reducing.items() if reduces]
    else:
        keys = ["model.reduction"]
    frames = f"reduce fewer frames ({' and '.join(keys)}) or " if keys else ""
    return frames + ("use text.kind=bpe" if recipe.text.kind == "characters" else "raise text.size")
