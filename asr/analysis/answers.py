"""The differences between settings in plain words: the first paragraphs of a comparison."""

import shlex
from collections.abc import Iterable, Sequence

from asr.analysis.report import plain_text
from asr.analysis.runs import PERCENT, RunRecord, SettingRuns
from asr.analysis.significance import ALPHA, SettingDifference, corrected
from asr.analysis.statistics import POWER, PairedT, detectable
from asr.analysis.wer import between, untrained

NOTE = (
    "Significant: p below 0.05 in the paired t test over seeds, corrected for the number of pairs "
    "(Holm). Can show: a true difference of this size would be significant, tested alone, in "
    f"{100 * POWER:.0f} % of repetitions."
)
_MOST_SENTENCES = 12  # on one figure; a table has all pairs


def sentences(figure: str, differences: Sequence[SettingDifference]) -> list[str]:
    """A sentence for each pair of settings; of very many those with the smallest p."""
    p_seeds = corrected(d.over_seeds for d in differences)
    p_utterances = corrected(d.over_utterances for d in differences)
    tests = sum(p is not None for p in p_seeds)
    rows = list(zip(differences, p_seeds, p_utterances, strict=True))
    if len(rows) > _MOST_SENTENCES:
        rows.sort(key=lambda row: 2.0 if row[1] is None else row[1])
    lines = [_sentence(figure, *row, tests) for row in rows[:_MOST_SENTENCES]]
    if rest := len(rows) - len(lines):
        lines.append(f"{figure}: the other {rest} pairs are in the table.")
    return lines


def _sentence(
    figure: str,
    pair: SettingDifference,
    p: float | None,
    p_utterances: float | None,
    tests: int,
) -> str:
    """p: over seeds, corrected for the number of tests."""
    unit, form, points = 1.0, "{:.4f}", ""
    if figure.startswith(PERCENT):
        unit, form, points = 100.0, "{:.2f}", " points"
    first, second = (form.format(unit * value) + " %" * bool(points) for value in pair.values)
    size, way = form.format(abs(unit * pair.mean)), "lower" if pair.mean < 0 else "higher"
    if float(size) == 0 and pair.mean:
        size = f"less than {form.format(0)[:-1]}1"
    size = f"{size}{points} {way} than" if pair.mean else "equal to"
    line = f"{figure}: {pair.second} is {size} {pair.first}, {second} against {first}"
    only_models = p_utterances is not None and p_utterances < ALPHA
    if pair.over_seeds is None or p is None:
        line += ". Significant over utterances, for these two models" * only_models
        line += ". One seed in common allows no conclusion for others: train or evaluate more"
        return f"{line}.{_reservations(pair)}"
    line += f" ({_test(pair.over_seeds, p, tests, form, unit)}, {pair.seeds} seeds): "
    if p < ALPHA:
        return f"{line}significant over seeds.{_reservations(pair)}"
    line += "not significant over seeds"
    line += ", only over utterances, for these trained models" * only_models
    if pair.over_seeds.sd:
        smallest = form.format(unit * detectable(pair.seeds, pair.over_seeds.sd))
        line += f"; {pair.seeds} seeds that vary like these can show {smallest}{points} or more"
    return f"{line}.{_reservations(pair)}"


def _reservations(pair: SettingDifference) -> str:
    """Sentences on what else may cause the difference."""
    failed = f" {pair.failed} runs without a result are not counted." * bool(pair.failed)
    return failed + " Not decoded alike (see Notes)." * (not pair.decoded_alike)


def _test(test: PairedT, p: float, tests: int, form: str, unit: float) -> str:
    """p = 0.300, corrected for 3 pairs; 95 % interval of this difference alone -0.1 to +0.2"""
    text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    text += f", corrected for {tests} pairs" * (tests > 1)
    if test.interval is None:
        return f"{text} by the sign test"
    low, high = (unit * side for side in test.interval)
    interval = between((low, high), form.replace(":", ":+"))
    of = "this difference alone" if tests > 1 else "the difference"
    return f"{text}; 95 % interval of {of} {interval}"


def untrained_settings(settings: Sequence[SettingRuns], split: str) -> list[str]:
    """A note where the WER of some settings is that of an untrained model."""
    names, remark = [], ""
    for setting in settings:
        rates = [m.scores[split].wer for m in setting.members if split in m.scores]
        if rates and (own := untrained(sum(rates) / len(rates))):
            names, remark = [*names, setting.short], own
    return [f"WER of {split}: that of {', '.join(names)} is {remark}."] if names else []


def missing_evaluations(runs: Sequence[RunRecord], settings: Iterable[SettingRuns]) -> list[str]:
    """How to get the word error rates that speech runs lack."""
    scores = {m.name: set(m.scores) for setting in settings for m in setting.members}
    speech = [r for r in runs if r.name in scores and r.settings.get("task") == "speech"]
    splits = sorted({split for run in speech for split in scores[run.name]})
    missing = {split: [r for r in speech if split not in scores[r.name]] for split in splits}
    lines = [
        f"WER of {split}: {len(lacking)} of {len(speech)} runs are not evaluated"
        + (f"; {_evaluate(lacking[0], split)}" if _has(lacking[0], split) else ".")
        for split, lacking in missing.items()
        if lacking
    ]
    if speech and not splits:
        keys = [key for key in speech[0].settings if key.startswith("data.test.")]
        split = keys[0].removeprefix("data.test.") if keys else "valid"
        line = "No run has a WER. Evaluate each, then compare again: "
        lines.append(line + _evaluate(speech[0], split))
    return lines


def _has(run: RunRecord, split: str) -> bool:
    """Whether the run's recipe names the split; other evaluations are of a manifest."""
    return split in ("train", "valid") or f"data.test.{split}" in run.settings


def _evaluate(run: RunRecord, split: str) -> str:
    folder, split = (shlex.quote(plain_text(text)) for text in (str(run.folder), split))
    return f"python -m asr.evaluate {folder} --split {split}"
