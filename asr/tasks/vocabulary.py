"""The vocabulary of a run that starts from another run's weights."""

from contextlib import suppress
from pathlib import Path

from asr.data.text import Tokenizer, load_tokenizer
from asr.errors import UserError
from asr.recipe import read_recipe
from asr.settings.data import Text

ASKED = {"kind", "size"}  # what `text` says of a vocabulary to be made


def kept_vocabulary(init: Path, text: Text) -> Tokenizer:
    """That of train.init, since weights mean nothing under another; says so where `text` differs.

    Raises UserError where the folder has none.
    """
    tokenizer = load_tokenizer(init)
    with suppress(UserError):  # a run of an older version may have a recipe that is none today
        theirs = read_recipe(init / "recipe.yaml").text
        if theirs.model_dump(include=ASKED) != text.model_dump(include=ASKED):
            print(f"the vocabulary of train.init={init} is kept; text.* is not used", flush=True)
    return tokenizer
