"""Search the decode settings that do best on a split: `asr.evaluate RUN --split dev --tune`.

Every beam and CTC weight is decoded for its n best hypotheses, without a language model and with
that of decode.lm. Re-scoring these n-bests tries penalties and the model's weight, thousands of
combinations a second. Penalties also change which hypotheses a beam keeps, so the best few settings
and the run's settings are decoded again, and the best of these wins.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from asr.analysis.runs import value_text
from asr.analysis.wer import percent, score, table
from asr.config.loader import as_yaml, read_recipe
from asr.config.schema import DecodeConfig, SpeechRecipe
from asr.data.corpus import Corpus
from asr.decoding.beam_search import Ranking
from asr.decoding.scorer import Hypothesis
from asr.errors import UserError
from asr.inference.decode import best_hypotheses, drop_hallucinations, encode
from asr.inference.evaluation import for_split, read_batches, too_long
from asr.inference.recognition import Recognizer
from asr.io import write_files
from asr.words import split_words

BEAMS = (1, 4, 8)
CTC_WEIGHTS = (0.0, 0.2, 0.4)  # where there is a CTC head
LM_WEIGHTS = (0.1, 0.2, 0.3, 0.5, 0.8)  # where decode.lm names a language model
LM_WEIGHT = 0.3  # for the n-bests
PENALTIES = {
    "length_penalty": (0.0, 0.3, 0.6, 1.0),
    "token_reward": (0.0, 0.2, 0.5),
}
FINALISTS = 3

DecodeSetting = Mapping[str, float]  # decode key -> value
NBests = dict[str, list[Hypothesis]]  # utterance id -> hypotheses, best first


@dataclass(frozen=True)
class TunedSetting:
    """A setting and its errors; `decoded` is False where n-bests were only re-scored."""

    setting: DecodeSetting
    decoded: bool
    utterances: int
    errors: int
    character_errors: int
    words: int

    @property
    def rank(self) -> tuple:
        """Sort key: errors, then the cheapest beam and the smallest weights."""
        return self.errors, self.character_errors, self.setting["beam"], sum(self.setting.values())


def tune(recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe, run: Path) -> Iterator[str]:
    """Search, write the best setting into the run's recipe, and report in lines.

    Raises UserError where no utterance can be read, and for decode.search=ctc.
    """
    if recipe.decode.search == "ctc":
        raise UserError("--tune weighs what a beam adds up; set decode.search=beam")
    if corpus.path.resolve() in map(Path.resolve, recipe.data.test.values()):
        yield f"note: after --tune the error rate of {corpus.path} is too low to be reported"
    recognizer = for_split(recognizer, corpus, recipe)
    grid = grid_of(recognizer, recipe)
    used = int((~too_long(recognizer, corpus.seconds)).sum())
    if not used:
        limit = f"decode.max_segment_seconds = {recognizer.max_segment_seconds:g}"
        raise UserError(f"{corpus.path}: all are longer than {limit}")
    if used < len(corpus):
        yield f"skipped: {len(corpus) - used} utterances longer than decode.max_segment_seconds"
    yield f"{used} utterances to decode under {len(grid)} settings for their n best"
    current = {key: getattr(recipe.decode, key) for key in grid[0]}
    faults: dict[str, str] = {}
    rescored = search(recognizer, corpus, recipe, grid, faults)
    yield from (f"skipped: {name}: {reason}" for name, reason in faults.items())
    if silent := used - len(faults) - rescored[0].utterances:
        yield f"skipped: {silent} utterances without speech or with more than decode.max_silence"
    best_rescored = sorted(rescored, key=lambda result: result.rank)[:FINALISTS]
    finalists = {tuple(one.items()): one for one in (current, *(r.setting for r in best_rescored))}
    decoded = decode(recognizer, corpus, recipe, list(finalists.values()))
    best = min(decoded, key=lambda result: result.rank)
    results = sorted([*rescored, *decoded], key=lambda result: result.rank)
    yield from table([(*current, "WER", "CER errors", "how"), *map(_row, results)])
    written = save(run, recipe.decode, best.setting)
    values = written | {key: f"{value:g}" for key, value in best.setting.items()}
    how = f"written to {run / 'recipe.yaml'}" if written else "the run's settings stay the best"
    yield f"{how}: {' '.join(f'decode.{key}={value}' for key, value in values.items())}"


def grid_of(recognizer: Recognizer, recipe: SpeechRecipe) -> list[dict[str, float]]:
    """The settings to decode for n-bests: beam, CTC weight, with and without language model."""
    axes: dict[str, Sequence[float]] = {"beam": BEAMS}
    has_ctc = recipe.model.ctc_weight and all(model.ctc_head for model in recognizer.ensemble)
    axes["ctc_weight"] = CTC_WEIGHTS if has_ctc else (0.0,)
    if recognizer.lm is not None:
        axes["lm_weight"] = (0.0, LM_WEIGHT)
    return [one | dict.fromkeys(PENALTIES, 0.0) for one in _combinations(axes)]


def search(
    recognizer: Recognizer,
    corpus: Corpus,
    recipe: SpeechRecipe,
    grid: Sequence[DecodeSetting],
    faults: dict[str, str],
) -> list[TunedSetting]:
    """The best penalties and language model weight for every setting, by re-scoring.

    `faults` receives the reason for every utterance that could not be read.
    """
    decoded = nbests(recognizer, corpus, recipe, grid, faults)
    results = []
    for setting, nbest in zip(grid, decoded, strict=True):
        wrong = errors(recognizer, corpus, nbest)
        tried = [rescore(one, corpus, nbest, wrong) for one in variants(setting)]
        results.append(min(tried, key=lambda result: result.rank))
    return results


def variants(setting: DecodeSetting) -> Iterator[DecodeSetting]:
    """The settings that re-scoring the n-bests of a setting can judge: for a beam of 1 itself."""
    if setting["beam"] == 1:
        yield setting
        return
    axes = PENALTIES | ({"lm_weight": LM_WEIGHTS} if setting.get("lm_weight") else {})
    yield from ({**setting, **one} for one in _combinations(axes))


def _combinations(axes: Mapping[str, Sequence[float]]) -> Iterator[dict[str, float]]:
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def nbests(
    recognizer: Recognizer,
    corpus: Corpus,
    recipe: SpeechRecipe,
    settings: Sequence[DecodeSetting],
    faults: dict[str, str],
    final: bool = False,
) -> list[NBests]:
    """As many hypotheses as the beam is wide, for every setting; audio is encoded only once.

    final: the first alone, as evaluation scores it: empty where there is no speech.
    Raises UserError where no utterance can be read.
    """
    results: list[NBests] = [{} for _ in settings]
    decodes = [recipe.decode.model_copy(update=setting) for setting in settings]
    for batch in read_batches(recognizer, corpus, recipe):
        faults |= {broken.id: broken.reason for broken in batch.broken}
        if len(batch):
            encoded = encode((recognizer.model, *recognizer.ensemble), batch)
            for found, decode in zip(results, decodes, strict=True):
                ranked = best_hypotheses(encoded, decode, recognizer.lm, decode.beam)
                if final:
                    first, threshold = [best for best, *_ in ranked], decode.no_speech_log_prob
                    ranked = [[h] for h in drop_hallucinations(encoded[0], first, threshold)]
                found |= zip(batch.ids, ranked, strict=True)
    if not results[0]:
        raise UserError(corpus.unreadable())
    return results


def errors(
    recognizer: Recognizer, corpus: Corpus, nbest: NBests
) -> dict[str, list[tuple[int, int]]]:
    """Word and character errors of every hypothesis, by utterance id."""
    references = {utterance.id: utterance.text for utterance in corpus}
    text = recognizer.tokenizer.decode
    pairs = [(name, text(h.tokens)) for name, ranked in nbest.items() for h in ranked]
    scored = score([references[name] for name, _ in pairs], [text for _, text in pairs], draws=1)
    wrong = defaultdict(list)
    for (name, _), one in zip(pairs, scored.utterances, strict=True):
        wrong[name].append((one.errors, one.character_errors))
    return wrong


def rescore(
    setting: DecodeSetting,
    corpus: Corpus,
    nbest: NBests,
    wrong: Mapping[str, Sequence[tuple[int, int]]],
    decoded: bool = False,
) -> TunedSetting:
    """The errors if the n-bests were ranked again under these penalties."""
    ranking = Ranking(**{key: setting[key] for key in PENALTIES})
    ctc_weight = setting["ctc_weight"]
    extra = [weight for weight in (ctc_weight, setting.get("lm_weight", 0.0)) if weight]
    weights = (1 - ctc_weight, *extra)

    def final(hypothesis: Hypothesis) -> float:
        # Scorers of weight 0 have no part; greedy search has no scorer.
        log_prob = sum(w * part for w, part in zip(weights, hypothesis.parts, strict=False) if w)
        return ranking.final(log_prob, len(hypothesis.tokens) + 1)

    counts = [
        wrong[name][max(range(len(ranked)), key=lambda k, ranked=ranked: final(ranked[k]))]
        for name, ranked in nbest.items()
    ]
    word_errors, character_errors = map(sum, zip(*counts, strict=True))
    words = sum(len(split_words(u.text)) for u in corpus if u.id in nbest)
    return TunedSetting(setting, decoded, len(nbest), word_errors, character_errors, words)


def decode(
    recognizer: Recognizer, corpus: Corpus, recipe: SpeechRecipe, settings: Sequence[DecodeSetting]
) -> list[TunedSetting]:
    """The errors of each setting's search."""
    every = nbests(recognizer, corpus, recipe, settings, {}, final=True)
    return [
        rescore(setting, corpus, best, errors(recognizer, corpus, best), decoded=True)
        for setting, best in zip(settings, every, strict=True)
    ]


def save(run: Path, decode: DecodeConfig, setting: DecodeSetting) -> dict[str, str]:
    """Write `decode` with the setting into RUN/recipe.yaml -> the changed keys, values as text."""
    recipe = read_recipe(run / "recipe.yaml")
    # A language model that does not help need not be loaded.
    lm = recipe.decode.lm if setting.get("lm_weight") == 0 else decode.lm
    new = DecodeConfig.model_validate({**decode.model_dump(), **setting, "lm": lm})
    before, after = recipe.decode.model_dump(mode="json"), new.model_dump(mode="json")
    changed = {key: value_text(value) for key, value in after.items() if value != before[key]}
    if changed:
        recipe = recipe.model_copy(update={"decode": new})
        write_files(run, {"recipe.yaml": as_yaml(recipe)})
    return changed


def _row(result: TunedSetting) -> tuple[str, ...]:
    values = [f"{value:g}" for value in result.setting.values()]
    wer = percent(result.errors / max(result.words, 1))
    how = "decoded" if result.decoded else "re-scored"
    return (*values, wer, str(result.character_errors), how)
