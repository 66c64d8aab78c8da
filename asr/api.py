"""Load, train, evaluate and compare from Python, as the commands do.

    run = asr.api.train("recipes/demo.yaml", ["train.steps=100"], run="runs/x")
    run.metrics                      # the last value of every scalar
    run.history()                    # a mapping for each logged step: pandas.DataFrame(...)
    run.evaluate("test").wer
    run.load()("my.wav").text
    asr.api.compare([run, "runs/y"]).rows()

A mistake of the caller raises UserError, RecipeError among them, with a message of one line;
unreadable audio raises AudioError. Nothing here changes os.environ or ends the process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asr.analysis import runs as run_folders
from asr.analysis.comparison import Comparison, compare_runs
from asr.analysis.curves import read_scalars
from asr.analysis.runs import VALID
from asr.analysis.wer import Score
from asr.arguments import key_of
from asr.config.loader import default_run, read_recipe
from asr.data.examples import Examples, corpus_of
from asr.errors import EXIT_STOPPED, UserError, check_list
from asr.hub import local_run
from asr.inference import evaluation
from asr.inference.recognition import Recognizer
from asr.io import check_writable
from asr.training import trainer
from asr.training.losses import SpeechObjective

AnyPath = str | os.PathLike[str]


def load(
    run: AnyPath,
    overrides: Sequence[str] = (),
    *,
    device: str | None = None,
    beam: int | None = None,
) -> Recognizer:
    """A trained model that transcribes audio.

    run: a Run, a run folder, the name of a shipped model (`conformer`), or hf:USER/NAME[@REVISION]
    on the Hugging Face Hub. overrides: recipe keys, such as `decode.lm=runs/lm`. device: `cpu`,
    `cuda` or `cuda:N`, by default a GPU if there is one. beam: hypotheses of the search, 1 for
    greedy search.

    Raises UserError for what is no run, has no checkpoint or cannot be downloaded.
    """
    check_list("overrides", overrides)
    named = {"train.device": device, "decode.beam": beam}
    chosen = [f"{key}={value}" for key, value in named.items() if value is not None]
    return Recognizer.load(run, [*overrides, *chosen])


class Run(os.PathLike):
    """A run folder, trained or in training; usable as its path.

    Attributes: folder, a Path; recipe, every setting of the run. Raises UserError where the folder
    holds no run.
    """

    def __init__(self, folder: AnyPath) -> None:
        self._address = os.fspath(folder)
        self.folder = local_run(folder)
        self.recipe = run_folders.recipe_of(self.folder)

    @property
    def finished(self) -> bool:
        """Whether training reached its last step."""
        return run_folders.finished(self.folder) is not None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every scalar: `valid/nll`, `valid/wer`, `train/accuracy`, ..."""
        curves = read_scalars(self.folder)
        return {name: float(c.values[-1]) for name, c in sorted(curves.items()) if len(c)}

    def history(self) -> list[dict[str, float]]:
        """A mapping for each step at which a scalar was logged, with the scalars of that step.

        `step` is one of its keys; pandas.DataFrame(run.history()) is a table of them all.
        """
        rows: dict[int, dict[str, float]] = {}
        for name, curve in sorted(read_scalars(self.folder).items()):
            for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]

    def evaluate(
        self, split: AnyPath, overrides: Sequence[str] = (), *, out: AnyPath | None = None
    ) -> Score:
        """Decode and score a split, and write what asr.evaluate writes.

        split: `train`, `valid`, a name under data.test of the recipe, or a manifest (.tsv). out:
        folder of the files, by default evaluate/SPLIT in the run, for hf:USER/NAME in the working
        directory evaluate/NAME/SPLIT. The result has wer and cer (fractions), wer_interval (95 %),
        speakers, and utterances with reference and hypothesis. Utterances that cannot be read are
        scored as empty. Raises UserError as asr.evaluate does.
        """
        opened = evaluation.open_split(  # of the folder: a new commit at the address is another run
            self.folder, os.fspath(split), overrides, address=self._address
        )
        folder = check_writable(Path(out)) if out is not None else opened.result_folder()
        with _same_threads():
            result, recognizer = opened.evaluate()
            evaluation.write(folder, result, recognizer, pictures=0)
        return result.score

    def load(self, overrides: Sequence[str] = ()) -> Recognizer:
        """The trained model; see load."""
        return load(self, overrides)

    def __fspath__(self) -> str:
        return str(self.folder)

    __str__ = __fspath__  # for overrides: f"train.init={run}"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def train(
    recipe: AnyPath,
    overrides: Sequence[str] = (),
    run: AnyPath | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    train_data: Examples | None = None,
    valid_data: Examples | None = None,
    objective: type[SpeechObjective] | None = None,
) -> Run:
    """Train the model that a recipe describes; -> its run.

    recipe: a YAML file, the name of a shipped recipe (`demo`) or a run folder, whose keys
    `overrides` change (`model.listener.norm=none`). run: the run's folder, by default that run
    folder, or runs/ and the key `run`.
    resume: continue from the last checkpoint, if there is one; a finished run returns at once.
    force: resume although recipe or data changed.

    train_data, valid_data: torch Datasets or lists in place of data.train and data.valid, whose
    examples are mappings with `audio` (a path, or {"array": samples, "sampling_rate": Hz}) and
    `text`, and if known `id`, `speaker` and `seconds`. objective: a subclass of
    asr.training.losses.SpeechObjective. To resume, pass the same again.

    SIGINT (a notebook's stop button) finishes the step and saves; then KeyboardInterrupt is raised.
    Raises UserError as asr.train does.
    """
    settings, overridden = read_recipe(recipe, overrides), set(map(key_of, overrides))
    folder = default_run(recipe, settings, overridden) if run is None else Path(run)
    parts: dict[str, Any] = {}
    data = {"train": train_data, "valid": valid_data}
    if named := {role: examples for role, examples in data.items() if examples is not None}:
        if valid_data is None and settings.task == "speech" and settings.data.valid is None:
            raise UserError("valid_data is missing, and the recipe has no data.valid: pass it too")
        parts["corpora"] = {role: corpus_of(named[role], f"{role}_data") for role in named}
        # The run's recipe must not name data that it was not trained on.
        others = settings.data.model_copy(update=dict.fromkeys(named))
        settings = settings.model_copy(update={"data": others})
    if objective is not None:
        parts["objective_class"] = objective
    if parts and settings.task != "speech":
        raise UserError(f"recipe of the task {settings.task}: only speech takes data or objective")
    with _same_threads():
        code = trainer.train(settings, folder, resume, force, overridden, parts)
    if code == EXIT_STOPPED:
        raise KeyboardInterrupt(f"{folder}: training was stopped and saved; resume=True continues")
    return Run(folder)


@contextmanager
def _same_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which `train.threads` sets."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compare(
    runs: Sequence[AnyPath],
    *,
    curve: str = VALID,
    ignore: Sequence[str] = (),
    baseline: str | None = None,
) -> Comparison:
    """Test the differences between runs, or between the settings of sweep folders.

    Runs that differ in nothing but the seed, in recipe, training data and objective, are one
    setting. curve: the loss on validation. ignore: keys that may differ within a setting, too.
    baseline: a setting (`norm=none`), the only one with which the others are tested. The
    evaluations of the runs are compared if they have any. `python -m asr.compare` writes a report
    from the same comparison.
    Raises UserError where no run can be compared.
    """
    check_list("runs", runs)
    check_list("ignore", ignore)
    return compare_runs([Path(run) for run in runs], curve, ignore, baseline)
