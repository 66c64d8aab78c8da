"""The task `speech`: corpus, objective, and the report of a validation.

The report has word error rates of the attention decoder and of CTC, and for a few fixed utterances
pictures of features and attention and the decoded texts.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from asr.analysis.plots import attention_picture, feature_picture
from asr.analysis.wer import score
from asr.config.loader import every_stage, training_speeds
from asr.config.schema import LasConfig, SpeechRecipe, TextConfig
from asr.data import loader, splits
from asr.data.batching import Batch, Item, collate, plan_evaluation
from asr.data.corpus import Corpus, audio_remedy
from asr.data.feature_cache import FeatureCache
from asr.data.loader import SpeechEpochs, UtteranceDataset, load_batches
from asr.data.manifest import check_row, read_rows
from asr.data.tokenizer import (
    Tokenizer,
    checkpoint_metadata,
    labels_of,
    load_tokenizer,
    train_tokenizer,
    used_text,
)
from asr.decoding.alignment import diagonality, has_ctc_path, teacher_forced_attention
from asr.decoding.scorer import Scorer
from asr.errors import UserError
from asr.features import AudioError
from asr.features.audio import audio_seconds
from asr.features.augment import AudioFiles
from asr.features.encoder import EncoderFeatures, PretrainedEncoder
from asr.features.front_end import FrontEnd
from asr.inference.decode import best_hypotheses, ctc_hypotheses, encode
from asr.inference.encoders import (
    cache_features,
    check_init_encoder,
    find_encoder,
    load_encoder,
    load_run_encoder,
    stored_features,
)
from asr.inference.load import STATISTICS, load_language_scorer, save_inputs
from asr.io import sha256_of_files
from asr.models.build import build_front_end, build_frontend, build_speech_model
from asr.nn.frontend import Frontend
from asr.training.distributed import choose_device, print_first
from asr.training.logging import Log
from asr.training.losses import SpeechObjective
from asr.training.resume import OBJECTIVE, SHA256, Content
from asr.training.task import Task
from asr.training.warm_start import starting_tokenizer

INSPECTED = 4  # utterances for train.health
# Of a larger corpus, utterances evenly spaced that are used before training begins.
VOCABULARY_UTTERANCES = 300_000
CHECKED_LENGTHS = 100_000
CHECKED_TEXTS = 1000
MEASURED_BY_ENCODER = 1000  # about five minutes of a core where nothing is stored


@dataclass(frozen=True)
class SpeechTask(Task):
    """Training of a speech recogniser. asr.evaluate, not the task, decodes the test splits."""

    recipe: SpeechRecipe
    objective: SpeechObjective
    epochs: SpeechEpochs
    validation: UtteranceDataset  # the validation split
    lm: Scorer | None
    metadata: dict[str, str]
    max_unreadable: float
    drawn: set[str] = field(default_factory=set)  # utterances whose features were logged
    pretrained: ClassVar[str] = "frontend.encoder."  # train.init may be a run with it frozen

    def as_used(self, recipe: SpeechRecipe) -> SpeechRecipe:
        features = {"encoder": self.recipe.features.encoder}
        features = recipe.features.model_copy(update=features)
        return recipe.model_copy(update={"text": self.recipe.text, "features": features})

    def prepare(self, run: Path) -> None:
        save_inputs(run, self.validation.tokenizer, self.epochs.utterances.front_end)

    def describe(self) -> str:
        corpus, plan = self.epochs.utterances.corpus, self.epochs.plan(1)
        return (
            f"{corpus.seconds.sum() / 3600:.2f} h in {len(corpus)} utterances, "
            f"{len(plan.batches)} batches an epoch, {100 * plan.padding:.1f} % padding"
        )

    @cached_property
    def content(self) -> Content:
        """Size and hash of the manifests of training, validation, noise and room responses, whose
        audio is not read, and the class of the objective.
        """
        corpora = {"train": self.epochs.utterances.corpus, "valid": self.validation.corpus}
        front_end, features = self.epochs.utterances.front_end, self.recipe.features
        augmentation = {
            f"features.{key}": {
                "files": len(getattr(front_end, key).paths),
                SHA256: sha256_of_files([path]),
            }
            for key in ("noise_files", "room_responses")
            if (path := getattr(features, key))
        }
        manifests = {
            f"data.{role}": {
                "utterances": len(corpus),
                "seconds": round(float(corpus.seconds.sum()), 1),
                SHA256: corpus.sha256(),
            }
            for role, corpus in corpora.items()
        }
        return augmentation | manifests | {OBJECTIVE: describe_objective(type(self.objective))}

    def validation_batches(self, share: slice = slice(None)) -> Iterator[Batch]:
        plan = plan_evaluation(self.validation.corpus.seconds, self.recipe.decode.seconds_at_once())
        return load_batches(self.validation, plan.batches[share], self.recipe.data.workers)

    def audio_remedy(self) -> str:
        return audio_remedy(self.epochs.utterances.corpus.path)

    def no_validation_data(self) -> str:
        return self.validation.corpus.unreadable()

    @cached_property
    def decoded(self) -> UtteranceDataset:
        """The utterances of the WER curves: evenly spread, for manifests are sorted by speaker."""
        corpus = self.validation.corpus.sample(self.recipe.train.wer_utterances)
        return replace(self.validation, corpus=corpus)

    def report(self, log: Log, step: int) -> dict[str, float]:
        """-> word error rates and diagonality of attention; logs pictures and texts."""
        train, corpus, model = self.recipe.train, self.decoded.corpus, self.objective.model
        decode = self.validation.tokenizer.decode
        plan = plan_evaluation(corpus.seconds, self.recipe.decode.seconds_at_once())
        texts: dict[str, str] = {}
        ctc_texts: dict[str, str] = {}
        slopes = []
        shown = set(corpus[: train.samples].ids)
        for batch in load_batches(self.decoded, plan.batches, self.recipe.data.workers):
            if not len(batch):
                continue
            (encoded,) = encode([model], batch)
            ranked = best_hypotheses([encoded], self.recipe.decode, self.lm)
            texts |= zip(batch.ids, (decode(best.tokens) for best, *_ in ranked), strict=True)
            paths = ctc_hypotheses(encoded)
            ctc_texts |= zip(batch.ids, (decode(path.tokens) for path in paths), strict=False)
            tokens = batch.tokens, batch.token_lengths
            attended = teacher_forced_attention(model, encoded.memory, *tokens)
            weights = [each.numpy() for each in attended]
            slopes += map(diagonality, weights)
            for row in (i for i, name in enumerate(batch.ids) if name in shown):
                self._pictures(log, step, batch, row, weights[row])
        self._texts(log, step, texts, ctc_texts)
        if not texts:
            return {}
        rates = {"wer": self._rate(texts)}
        if self.recipe.model.ctc_weight < 1:  # else the decoder does not learn to attend
            rates["diagonality"] = float(np.mean(slopes))
        return rates | ({"ctc_wer": self._rate(ctc_texts)} if ctc_texts else {})

    def health_batches(self) -> Iterator[Batch]:
        for number in range(min(INSPECTED, len(self.validation))):
            example = self.validation[Item(number, 0, 1.0)]
            batch = collate([example], frame_seconds=self.validation.front_end.frame_seconds)
            if len(batch):
                yield batch

    def _rate(self, texts: dict[str, str]) -> float:
        references = {utterance.id: utterance.text for utterance in self.decoded.corpus}
        return score([references[name] for name in texts], list(texts.values()), draws=1).wer

    def _pictures(self, log: Log, step: int, batch: Batch, row: int, weights: np.ndarray) -> None:
        name = batch.ids[row]
        tokens = batch.tokens[row, : batch.token_lengths[row]].tolist()
        features = batch.features[row, : batch.lengths[row]].numpy()
        front_end, labels = self.validation.front_end, labels_of(tokens, self.validation.tokenizer)
        seconds = len(features) * front_end.frame_seconds
        attention = attention_picture(weights, labels, seconds, name)
        log.picture(f"valid_attention/{name}", attention, step)
        if name not in self.drawn:  # once: they are the same in every validation
            self.drawn.add(name)
            log.picture(f"valid_features/{name}", feature_picture(features, seconds, name), step)

    def _texts(self, log: Log, step: int, texts: dict[str, str], ctc_texts: dict[str, str]) -> None:
        for utterance in self.decoded.corpus[: self.recipe.train.samples]:
            if utterance.id not in texts:  # unreadable
                continue
            lines = [f"reference: {utterance.text}", f"attention: {texts[utterance.id]}"]
            if ctc_texts:
                lines.append(f"CTC: {ctc_texts.get(utterance.id)}")
            log.text(f"decoded/{utterance.id}", lines, step)


def speech_task(
    recipe: SpeechRecipe,
    run: Path,
    resume: bool,
    stage: int = 0,
    *,
    corpora: Mapping[str, Corpus] | None = None,
    objective_class: type[SpeechObjective] = SpeechObjective,
) -> SpeechTask:
    """Read the corpus, make or load vocabulary and statistics, build the model of a stage.

    corpora: `train` and `valid`, in place of the recipe's manifests. Raises UserError for a corpus
    that is missing or does not fit the recipe at any stage, and for check_ctc_alone.
    """
    check_ctc_alone(recipe, resume)
    stages = every_stage(recipe)
    every_speed = training_speeds(stages)
    check_views(stages)
    recipe = stages[stage]
    data, speeds = recipe.data, recipe.features.speed_perturb
    whole, valid = (
        (corpora or {}).get(role) or splits.load_split_manifest(data, path, role)
        for role, path in (("train", data.train), ("valid", data.valid))
    )
    training, note = splits.filter_by_duration(whole, data.min_seconds, data.max_seconds)
    print_first(note, splits.check_longest(valid, 2 * data.max_seconds))
    # Longer files count as unreadable: a file without end must not end the run.
    encoder = None
    if recipe.features.kind == "encoder":
        encoder = open_encoder(recipe, run if resume else None)
        named = recipe.features.model_copy(update={"encoder": encoder.source.name})
        recipe = recipe.model_copy(update={"features": named})
    front_end = build_front_end(recipe.features, data.max_seconds * 2, encoder)
    check_longest(recipe, front_end, every_speed[0])
    front_end.noise_files = list_audio_files(recipe, "noise_files", "noise_probability")
    front_end.room_responses = list_audio_files(recipe, "room_responses", "room_probability")
    device = choose_device(recipe.train.device)
    valid_cache = cache_features(valid, front_end, [1.0], data.workers, device)
    if front_end.changes_audio:
        cache = None
        if valid_cache:
            print_first("noise and rooms change the audio: its features are computed in each epoch")
    else:
        cache = cache_features(training, front_end, every_speed, data.workers, device)
    if resume:
        tokenizer = load_tokenizer(run)
        if front_end.corpus_norm.needs_statistics:
            front_end.corpus_norm.load(run / STATISTICS)
    else:
        if recipe.train.init and encoder is not None:
            check_init_encoder(recipe.train.init, encoder.source)
        tokenizer, text, lines = choose_vocabulary(recipe, training)
        recipe = recipe.model_copy(update={"text": text})
        print_first(*lines)
        if front_end.corpus_norm.needs_statistics:
            print_first(f"measuring features for mvn: {recipe.features.mvn}")
            measure_statistics(training, front_end, data.workers, every_speed, cache, device)
    for part in (training, valid):
        texts = part.sample(CHECKED_TEXTS).texts
        print_first(splits.check_vocabulary_coverage(texts, tokenizer, part.path))
    torch.manual_seed(recipe.seed)
    frontend = build_frontend(recipe.features, front_end)
    objective = build_speech_objective(
        recipe, front_end.size, tokenizer.size, objective_class, frontend
    )
    check_ctc_lengths(recipe, training, tokenizer, front_end, objective, every_speed[-1])
    lm = load_language_scorer(recipe.decode, tokenizer, choose_device(recipe.train.device))
    train = recipe.train
    views = 2 if train.consistency else 1
    epochs = SpeechEpochs(
        UtteranceDataset(
            training,
            front_end,
            tokenizer,
            recipe.seed,
            views=views,
            cache=cache,
        ),
        train.batch_seconds,
        speeds,
        train.short_first,
        data.workers,
        train.round_seconds,
    )
    valid_front_end = loader.with_split_statistics(
        front_end, valid, data.workers, (1.0,), valid_cache
    )
    validation = UtteranceDataset(valid, valid_front_end, tokenizer, recipe.seed, cache=valid_cache)
    return SpeechTask(
        recipe,
        objective,
        epochs,
        validation,
        lm,
        checkpoint_metadata(tokenizer),
        data.max_unreadable,
    )


def open_encoder(recipe: SpeechRecipe, run: Path | None) -> PretrainedEncoder:
    """The encoder of features.encoder, or of a run that is resumed."""
    if run is not None:
        return load_run_encoder(run, recipe.features)
    return load_encoder(recipe.features, find_encoder(recipe.features))


def measure_statistics(
    corpus: Corpus,
    front_end: FrontEnd,
    workers: int,
    speeds: Sequence[float],
    cache: FeatureCache | None,
    device: torch.device,
) -> None:
    """Give the normalisation the statistics of the corpus.

    Those of an encoder within the model are of its output before training.
    """
    if front_end.encoder_norm is not None:
        extract = EncoderFeatures(front_end.extract.encoder.to(device), front_end.sample_rate)
        front_end = FrontEnd(extract, front_end.encoder_norm, max_seconds=front_end.max_seconds)
        cache, workers = stored_features(corpus, front_end), 0
        corpus = corpus.sample(MEASURED_BY_ENCODER)
    loader.measure_statistics(corpus, front_end, workers, speeds, cache)


def check_longest(recipe: SpeechRecipe, front_end: FrontEnd, slowest: float) -> None:
    """Raise UserError where training utterances may be longer than the encoder takes."""
    longest = front_end.longest * min(slowest, 1.0)
    if recipe.data.max_seconds > longest:
        at = f" at speed {slowest:g}" if slowest < 1.0 else ""
        raise UserError(
            f"data.max_seconds = {recipe.data.max_seconds:g}: {recipe.features.encoder} takes at "
            f"most {longest:g} s{at}; set data.max_seconds={longest:g}"
        )


def list_audio_files(recipe: SpeechRecipe, key: str, probability: str) -> AudioFiles | None:
    """The audio of the manifest in features.KEY, if it names one.

    Raises UserError for a faulty row and for a file whose header is not that of audio.
    """
    features, paths = recipe.features, []
    if (manifest := getattr(features, key)) is None:
        return None
    try:
        for line, row in read_rows(manifest, ("id", "audio")):
            audio, where = row["audio"], f"{manifest}:{line}"
            fields = row["id"], "", audio, row.get("seconds") or "1", ""
            check_row(fields, manifest.parent, where, recipe.data.allow_outside_audio)
            paths.append(manifest.parent / audio)
            audio_seconds(paths[-1])
    except (AudioError, UserError) as error:
        raise UserError(f"features.{key}: {error}") from None
    return AudioFiles(paths, features.sample_rate, getattr(features, probability))


def choose_vocabulary(
    recipe: SpeechRecipe, training: Corpus
) -> tuple[Tokenizer, TextConfig, list[str]]:
    """The vocabulary of train.init or of the training texts, section `text` as it has it, and
    lines on what differs from the recipe.
    """
    if init := recipe.train.init:
        tokenizer = starting_tokenizer(init, "speech")
        if not recipe.train.new_vocabulary:
            reason = f"the vocabulary is that of train.init = {init}"
            return tokenizer, *used_text(recipe.text, tokenizer, reason)
    tokenizer = train_tokenizer(recipe.text, training.sample(VOCABULARY_UTTERANCES).texts)
    return tokenizer, *used_text(recipe.text, tokenizer)


def check_views(stages: Iterable[SpeechRecipe]) -> None:
    """Raise UserError where the two views of an utterance would have different times."""
    for recipe in stages:
        masks, features = recipe.features.spec_augment, recipe.features
        if masks and masks.time_warp and features.train != "none" and recipe.train.consistency:
            raise UserError(
                "features.spec_augment.time_warp stretches the two views of train.consistency "
                "differently where an encoder is trained: set time_warp=0"
            )


def check_ctc_alone(recipe: SpeechRecipe, resume: bool) -> None:
    """Raises UserError if a decoder that is not trained would rank checkpoints or decode.

    Not for a run that exists: its recipe is readable as it is.
    """
    decode = recipe.decode
    if recipe.model.ctc_weight < 1 or resume:
        return
    if recipe.train.metric not in ("objective", "ctc", "ctc_wer"):
        fault = f"checkpoints cannot be ranked by its {recipe.train.metric}"
        remedy = "train.early_stopping.metric=ctc, and a train.early_stopping.patience"
    elif decode.search != "ctc" and decode.ctc_weight < 1:
        fault, remedy = "transcripts cannot be its", "decode.search=ctc"
    else:
        return
    raise UserError(f"model.ctc_weight = 1 leaves the decoder untrained, so {fault}: set {remedy}")


def check_ctc_lengths(
    recipe: SpeechRecipe,
    corpus: Corpus,
    tokenizer: Tokenizer,
    front_end: FrontEnd,
    objective: SpeechObjective,
    fastest: float,
) -> None:
    """Print the utterances with more CTC labels than frames of memory, which have no CTC path.

    fastest: the highest speed of training. Raises UserError where they are more than 1 %.
    """
    if not recipe.model.ctc_weight:
        return
    part = corpus.sample(CHECKED_LENGTHS)
    frames = torch.tensor([front_end.num_frames(u.seconds, fastest) for u in part])
    lengths = objective.model.memory_lengths(frames).tolist()
    sized = zip(part, lengths, strict=True)
    short = [u.id for u, length in sized if not has_ctc_path(tokenizer.encode(u.text), length)]
    if not short:
        return
    names = f"{' '.join(short[:5])}{' ...' if len(short) > 5 else ''}"
    count = f"{len(short)} of {len(part)} utterances{'' if part is corpus else ' checked'}"
    line = f"{count} have more CTC labels than frames: {names}"
    if len(short) > 0.01 * len(part):
        raise UserError(
            f"{line}; listen to these: audio at a wrong speed, or texts of other recordings, have "
            f"this. Otherwise {_ctc_remedy(recipe)}"
        )
    print_first(f"{line}; the CTC loss skips them")


def _ctc_remedy(recipe: SpeechRecipe) -> str:
    """How to get more frames or fewer tokens with this recipe."""
    if isinstance(recipe.model, LasConfig):
        listener = recipe.model.listener
        reducing = {"pyramid": listener.pyramid, "convolution": listener.convolution > 1}
        keys = [f"model.listener.{key}" for key, reduces in reducing.items() if reduces]
    else:
        keys = ["model.reduction"]
    frames = f"reduce fewer frames ({' and '.join(keys)}) or " if keys else ""
    tokens = {"characters": "use text.kind=bpe", "word": "use fewer labels a second"}
    return frames + tokens.get(recipe.text.kind, "raise text.size")


def describe_objective(kind: type[SpeechObjective]) -> dict[str, str]:
    """Its name, and the hash of its source where a program defines it and Python can read it."""
    source = kind.__name__
    if kind is not SpeechObjective:
        with suppress(OSError, TypeError):  # typed at a prompt
            source = inspect.getsource(kind)
    return {"class": kind.__name__, SHA256: hashlib.sha256(source.encode()).hexdigest()}


def build_speech_objective(
    recipe: SpeechRecipe,
    features: int,
    vocabulary: int,
    kind: type[SpeechObjective] = SpeechObjective,
    frontend: Frontend | None = None,
) -> SpeechObjective:
    """The model with its objective, on the recipe's device."""
    train, intermediate_ctc = recipe.train, recipe.model.intermediate_ctc
    objective = kind(
        build_speech_model(recipe.model, features, vocabulary, frontend),
        recipe.model.ctc_weight,
        train.label_smoothing,
        train.guided_attention,
        train.consistency,
        intermediate_ctc.weight if intermediate_ctc else 0.0,
    )
    return objective.to(choose_device(train.device))
