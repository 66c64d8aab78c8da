"""From the settings under `decode:` to a search, and to the language model that they name."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from asr.data.text import Tokenizer
from asr.decoding.beam import BeamSettings, beam_search
from asr.decoding.ctc import ctc_beam_search, ctc_greedy
from asr.decoding.ngrams import load_ngrams
from asr.decoding.search import Hypothesis, Scorer, greedy
from asr.errors import UserError
from asr.nn.memory import Memory
from asr.settings import Decode
from asr.tasks.language import load_language_model
from asr.tokens import SPECIAL

Others = Sequence[tuple[nn.Module, Memory]]  # a model, and what it made of the utterances
SEARCH = {field.name for field in fields(BeamSettings)} & set(Decode.model_fields)
# Greedy search heeds max_ratio; with one hypothesis the others have nothing to rank or wait for.
FREE = {"max_ratio", "patience", "length_penalty", "token_reward"}
# A beam of 1 without scorers and other rules is greedy search.
GREEDY = Decode().model_dump(include=SEARCH - FREE)


@torch.no_grad()
def search(
    model: nn.Module,
    memory: Memory,
    decode: Decode,
    lm: Scorer | None = None,
    nbest: int = 1,
    others: Others = (),
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses of every utterance, best first, one at least.

    lm: what `language_scorer` gave; decode.lm_weight is its weight. others: the same utterances at
    other speeds or in other models, each memory with the model that made it; CTC alone takes none.
    Raises UserError as the searches do.
    """
    if decode.search == "ctc":
        return _ctc(model, memory, decode, nbest)
    settings = decode.model_dump(include=SEARCH)
    weighted = [(decode.lm_weight, lm)] if lm is not None and decode.lm_weight else []
    if not weighted and not others and GREEDY.items() <= settings.items():
        return [[best] for best in greedy(model, memory, max_ratio=decode.max_ratio)]

    def ctc(own: nn.Module, there: Memory) -> Tensor | None:
        return own.ctc(there) if decode.ctc_weight else None

    return beam_search(
        model,
        memory,
        ctc=ctc(model, memory),
        others=[(*one, ctc(*one)) for one in others],
        scorers=weighted,
        nbest=nbest,
        **settings,
    )


def _ctc(model: nn.Module, memory: Memory, decode: Decode, nbest: int) -> list[list[Hypothesis]]:
    """The CTC head alone: with a beam of 1 the best path, else prefix beam search."""
    log_probs = model.ctc(memory)
    if log_probs is None:
        raise UserError(
            "decode.search is ctc, but this model has no CTC head; set decode.search=beam"
        )
    if decode.beam > 1:
        return ctc_beam_search(log_probs, memory.valid, decode.beam, nbest=nbest)
    scores = log_probs.amax(dim=2).masked_fill(~memory.valid, 0.0).sum(dim=1).tolist()
    paths = ctc_greedy(log_probs, memory.valid)
    return [[Hypothesis(tuple(p), s, True)] for p, s in zip(paths, scores, strict=True)]


def language_scorer(decode: Decode, tokenizer: Tokenizer, device: torch.device) -> Scorer | None:
    """The language model that `decode.lm` names, for the beam; None where it names none.

    Raises UserError for a beam that this vocabulary cannot fill, a path that is neither a run's
    folder nor a file of n-grams, another vocabulary, and a missing kenlm.
    """
    _check_beam(decode, tokenizer)
    path = decode.lm
    if path is None:
        return None
    if decode.search == "ctc":
        raise UserError(
            "decode.lm needs decode.search=beam; decode.ctc_weight=1 is CTC alone there"
        )
    if path.is_dir():
        return load_language_model(path, tokenizer.fingerprint(), device)
    if path.is_file():
        return load_ngrams(path, tokenizer.surfaces, decode.lm_unit)
    raise UserError(f"decode.lm = {path}: neither a run's folder nor a file of n-grams")


def widest_beam(tokenizer: Tokenizer) -> int:
    """The first step offers each token and the end: a wider beam is a slip of the pen."""
    return tokenizer.size - len(SPECIAL) + 2  # with <unk> and <eos>


def _check_beam(decode: Decode, tokenizer: Tokenizer) -> None:
    most = widest_beam(tokenizer)
    if decode.beam > most:
        raise UserError(
            f"decode.beam is {decode.beam}, more than the {most} tokens that this vocabulary can "
            f"begin with; set decode.beam to {most} or less"
        )
