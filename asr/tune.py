"""The decode settings that do best on a split, for `asr.evaluate RUN --split dev --tune`.

Every beam and CTC weight is decoded for its n best hypotheses, without a language model and with
the one that decode.lm names; penalties and that model's weight are then tried by re-scoring those,
thousands a second. They also change what a beam keeps, so the few best are decoded in earnest,
beside the run's own settings, and the best of these wins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from asr.data.corpus import Corpus
from asr.decoding.score import Ranking
from asr.decoding.search import Hypothesis
from asr.errors import UserError
from asr.evaluation import batches, too_long
from asr.recipe import as_yaml, read_recipe
from asr.recognizer import Recognizer
from asr.scoring.files import percent, replace_files
from asr.scoring.groups import value_text
from asr.scoring.parts import table
from asr.scoring.wer import score
from asr.search import widest_beam
from asr.settings import Decode, SpeechRecipe

BEAMS = (1, 4, 8)
CTC_WEIGHTS = (0.0, 0.2, 0.4)  # where there is a CTC head
LM_WEIGHTS = (0.1, 0.2, 0.3, 0.5, 0.8)  # where decode.lm names a language model
LM_WEIGHT = 0.3  # of it, as n-bests are made
PENALTIES = {
    "length_penalty": (0.0, 0.3, 0.6, 1.0),
    "token_reward": (0.0, 0.2, 0.5),
    "coverage_penalty": (0.0, 0.05, 0.2),
}
FINALISTS = 3
TRACE = 1e-9  # of coverage penalty: too little to change a choice, enough to be counted

Setting = Mapping[str, float]  # decode key -> value
NBests = dict[str, list[Hypothesis]]  # utterance id -> hypotheses, best first


@dataclass(frozen=True)
class Trial:
    """A setting and what it gave; `decoded` is False where n-bests were only re-scored."""

    setting: Setting
    decoded: bool
    errors: int
    character_errors: int
    words: int

    @property
    def rank(self) -> tuple:
        """Fewest errors; among equals the cheapest beam and the smallest weights."""
        return self.errors, self.character_errors, self.setting["beam"], sum(self.setting.values())


def tune(recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe, run: Path) -> Iterator[str]:
    """Search, write the best into the run's recipe, and say so in lines.

    Raises UserError where no utterance can be read, and for decode.search=ctc.
    """
    if recipe.decode.search == "ctc":
        raise UserError("--tune weighs what a beam adds up; set decode.search=beam")
    grid = grid_of(recognizer, recipe)
    whole = corpus.take(np.flatnonzero(~too_long(recognizer, corpus.seconds)))
    if not len(whole):
        raise UserError(
            f"{corpus.path}: all are longer than decode.longest = {recognizer.longest:g}"
        )
    if len(whole) < len(corpus):
        yield f"left out: {len(corpus) - len(whole)} utterances, too long to be heard at once"
    yield f"{len(whole)} utterances, decoded under {len(grid)} settings for their n best"
    mine = {key: getattr(recipe.decode, key) for key in grid[0]}
    faults: dict[str, str] = {}
    rescored = search(recognizer, corpus, recipe, grid, faults)
    yield from (f"left out: {name}: {reason}" for name, reason in faults.items())
    tried = sorted(rescored, key=lambda trial: trial.rank)[:FINALISTS]
    finalists = {tuple(one.items()): one for one in (mine, *(t.setting for t in tried))}
    decoded = decode(recognizer, corpus, recipe, list(finalists.values()))
    best = min(decoded, key=lambda trial: trial.rank)
    yield from table([head(mine), *map(row, sorted([*rescored, *decoded], key=lambda t: t.rank))])
    settings = {key: f"{value:g}" for key, value in best.setting.items()}
    written = save(run, recipe.decode, best.setting)
    told = " ".join(f"decode.{key}={value}" for key, value in {**written, **settings}.items())
    how = f"written to {run / 'recipe.yaml'}" if written else "the run's own settings stay the best"
    yield f"{how}: {told}"


def grid_of(recognizer: Recognizer, recipe: SpeechRecipe) -> list[dict[str, float]]:
    """What is decoded for n-bests: beams, CTC weights, and with and without a language model."""
    beams = [beam for beam in BEAMS if beam <= widest_beam(recognizer.tokenizer)]
    axes: dict[str, Sequence[float]] = {"beam": beams}
    axes["ctc_weight"] = CTC_WEIGHTS if recipe.model.ctc_weight else (0.0,)
    if recognizer.lm is not None:
        axes["lm_weight"] = (0.0, LM_WEIGHT)
    plain = dict.fromkeys(PENALTIES, 0.0)
    return [one | plain for one in _combinations(axes)]


def search(
    recognizer: Recognizer,
    corpus: Corpus,
    recipe: SpeechRecipe,
    grid: Sequence[Setting],
    faults: dict[str, str],
) -> list[Trial]:
    """The best penalties and weight of the language model for every setting, by re-scoring.

    Why an utterance could not be read is noted in `faults`.
    """
    traced = [{**setting, "coverage_penalty": TRACE} for setting in grid]
    found = nbests(recognizer, corpus, recipe, traced, faults)
    trials = []
    for setting, nbest in zip(grid, found, strict=True):
        wrong = errors(recognizer, corpus, nbest)
        tries = [rescored(one, corpus, nbest, wrong) for one in variants(setting)]
        trials.append(min(tries, key=lambda trial: trial.rank))
    return trials


def variants(setting: Setting) -> Iterator[Setting]:
    """What re-scoring the n-bests of a setting can tell of; nothing where each holds but one."""
    if setting["beam"] == 1:
        yield setting
        return
    axes = PENALTIES | ({"lm_weight": LM_WEIGHTS} if setting.get("lm_weight") else {})
    for one in _combinations(axes):
        yield {**setting, **one}


def _combinations(axes: Mapping[str, Sequence[float]]) -> Iterator[dict[str, float]]:
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def nbests(
    recognizer: Recognizer,
    corpus: Corpus,
    recipe: SpeechRecipe,
    settings: Sequence[Setting],
    faults: dict[str, str],
) -> list[NBests]:
    """As many hypotheses as the beam is wide, for every setting; audio is encoded once.

    Raises UserError where no utterance can be read.
    """
    found: list[NBests] = [{} for _ in settings]
    decodes = [recipe.decode.model_copy(update=setting) for setting in settings]
    for batch in batches(recognizer, corpus, recipe):
        faults |= {broken.id: broken.reason for broken in batch.broken}
        if len(batch):
            memory, others = recognizer.encode(batch), recognizer.encode_others(batch)
            for own, decode in zip(found, decodes, strict=True):
                nbest = recognizer.nbest(memory, decode, decode.beam, others)
                own |= zip(batch.ids, nbest, strict=True)
    if not found[0]:
        raise UserError(corpus.unreadable)
    return found


def errors(
    recognizer: Recognizer, corpus: Corpus, nbest: NBests
) -> dict[str, list[tuple[int, int]]]:
    """Word and character errors of every hypothesis, by utterance id."""
    said = {utterance.id: utterance.text for utterance in corpus}
    pairs = [(name, recognizer.text(h)) for name, found in nbest.items() for h in found]
    scored = score([said[name] for name, _ in pairs], [text for _, text in pairs], draws=1)
    wrong: dict[str, list[tuple[int, int]]] = {}
    for (name, _), one in zip(pairs, scored.utterances, strict=True):
        wrong.setdefault(name, []).append((one.errors, one.character_errors))
    return wrong


def rescored(
    setting: Setting,
    corpus: Corpus,
    nbest: NBests,
    wrong: Mapping[str, Sequence[tuple[int, int]]],
    decoded: bool = False,
) -> Trial:
    """What would be wrong if the n-bests were ranked anew under these penalties."""
    ranking = Ranking(**{key: setting[key] for key in PENALTIES})
    ctc_weight = setting["ctc_weight"]
    extra = [weight for weight in (ctc_weight, setting.get("lm_weight", 0.0)) if weight]
    weights = (1 - ctc_weight, *extra)

    def final(hypothesis: Hypothesis) -> float:
        # A scorer of weight 0 took no part, and greedy search knows none.
        log_prob = sum(w * part for w, part in zip(weights, hypothesis.parts, strict=False) if w)
        return ranking.final(log_prob, len(hypothesis.tokens) + 1, hypothesis.covered)

    counts = [
        wrong[name][max(range(len(found)), key=lambda k, found=found: final(found[k]))]
        for name, found in nbest.items()
    ]
    words, characters = map(sum, zip(*counts, strict=True))
    spoken = sum(len(u.text.split()) for u in corpus if u.id in nbest)
    return Trial(setting, decoded, words, characters, spoken)


def decode(
    recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe, settings: Sequence[Setting]
) -> list[Trial]:
    """Every setting decoded for itself."""
    found = nbests(recognizer, corpus, recipe, settings, {})
    firsts = [{name: nbest[:1] for name, nbest in own.items()} for own in found]
    return [
        rescored(setting, corpus, own, errors(recognizer, corpus, own), decoded=True)
        for setting, own in zip(settings, firsts, strict=True)
    ]


def save(run: Path, decode: Decode, setting: Setting) -> dict[str, str]:
    """Write what was in force, with the setting, into RUN/recipe.yaml, whole at any moment.

    -> the keys that this changed, with their values as text.
    """
    recipe = read_recipe(run / "recipe.yaml")
    # A language model that does not help need not be loaded.
    lm = recipe.decode.lm if setting.get("lm_weight") == 0 else decode.lm
    found = Decode.model_validate({**decode.model_dump(), **setting, "lm": lm})
    before, after = recipe.decode.model_dump(mode="json"), found.model_dump(mode="json")
    changed = {key: value_text(value) for key, value in after.items() if value != before[key]}
    if changed:
        recipe = recipe.model_copy(update={"decode": found})
        replace_files(run, {"recipe.yaml": as_yaml(recipe)})
    return changed


def head(setting: Setting) -> tuple[str, ...]:
    """Of the table."""
    return (*setting, "WER", "CER errors", "how")


def row(trial: Trial) -> tuple[str, ...]:
    """One trial in the table."""
    values = [f"{value:g}" for value in trial.setting.values()]
    wer = percent(trial.errors / max(trial.words, 1))
    how = "decoded" if trial.decoded else "re-scored"
    return (*values, wer, str(trial.character_errors), how)
