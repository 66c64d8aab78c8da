"""The pretrained encoder of features.encoder: where it is, and whether it is the one of a run.

A run folder has encoder.json: the encoder's name, the checksum of its weights and its licence. Its
folder encoder/, if there is one, has the encoder itself, or of a trained encoder, whose weights are
in the checkpoints, only what describes it.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import yaml

from asr.config.schema import FeaturesConfig
from asr.data.compute_features import make_cache
from asr.data.corpus import Corpus
from asr.data.feature_cache import FeatureCache, cache_key, open_cache
from asr.errors import UserError, missing_package
from asr.features.encoder import (
    EncoderFeatures,
    PretrainedEncoder,
    Source,
    read_config,
    read_preprocessing,
    weight_files,
)
from asr.features.front_end import FrontEnd
from asr.hub import download_encoder, is_name, local_run
from asr.io import read_front_matter, read_json, sha256_of_files

DESCRIPTION, FOLDER = "encoder.json", "encoder"
DESCRIBED = ("config.json", "preprocessor_config.json", "README.md")


def find_encoder(features: FeaturesConfig) -> Source:
    """The folder of features.encoder, downloaded from the hub if it is there.

    Raises UserError for one that is nowhere, cannot be downloaded or is no encoder.
    """
    name = features.encoder
    folder = Path(name)
    if not folder.is_dir():
        if not is_name(name):
            raise UserError(
                f"features.encoder = {name}: no such folder; name one, or NAME[@REVISION] on the "
                "Hugging Face Hub, such as openai/whisper-base"
            )
        folder, name = download_encoder(name)
    try:
        read_config(folder)
        files = [folder / "config.json", *weight_files(folder)]
        # The same weights have other features of waveforms that are not normalised.
        if not read_preprocessing(folder).get("do_normalize", True):
            files.append(folder / "preprocessor_config.json")
    except ValueError as error:
        raise UserError(f"features.encoder: {error}") from None
    return Source(folder, name, sha256_of_files(files), licence(folder))


def load_encoder(
    features: FeaturesConfig, source: Source, weights: bool = True
) -> PretrainedEncoder:
    """The encoder in a folder. Raises UserError for one that cannot be used."""
    try:
        encoder = PretrainedEncoder(source.folder, features.layer, weights)
    except ImportError:
        reason = missing_package("transformers", "encoders")
        raise UserError(f"features.encoder: {reason}") from None
    except ValueError as error:
        raise UserError(f"features.encoder: {error}") from None
    encoder.source = source
    return encoder


def load_run_encoder(run: Path, features: FeaturesConfig) -> PretrainedEncoder:
    """The encoder that a run was trained with. Raises UserError where another one is found.

    The weights of a trained encoder are in the checkpoints.
    """
    facts, inside = read_description(run), run / FOLDER
    if features.train != "none":
        return load_encoder(features, Source(inside, **facts), weights=False)
    name = features.encoder
    if (inside / "config.json").is_file():
        name = str(inside)
    elif facts["name"].startswith(f"{name}@"):
        name = facts["name"]  # the hub may have a newer commit
    features = features.model_copy(update={"encoder": name})
    found = find_encoder(features)
    if found.sha256 != facts["sha256"]:
        raise UserError(
            f"features.encoder = {features.encoder}: not the weights that {run} was trained with, "
            f"those of {facts['name']}; set features.encoder to the folder that has them"
        )
    return load_encoder(features, Source(found.folder, **facts))


def read_description(run: Path) -> dict[str, str]:
    """encoder.json of a run. Raises UserError for one that is missing or damaged."""
    path = run / DESCRIPTION
    try:
        found = read_json(path)
        return {key: str(found[key]) for key in ("name", "sha256", "licence")}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path}: cannot be read; the run needs it to find its encoder") from None


def check_init_encoder(init: Path, encoder: Source) -> None:
    """Raise UserError where train.init was trained on another encoder, or on none."""
    run, used = local_run(init), "features without an encoder"
    if (run / DESCRIPTION).exists():
        facts = read_description(run)
        if facts["sha256"] == encoder.sha256:
            return
        used = facts["name"]
    raise UserError(
        f"train.init = {init}: trained on {used}, not on features.encoder = {encoder.name}; set "
        "one of them so that it fits the other"
    )


def save_description(run: Path, encoder: PretrainedEncoder, trained: bool) -> None:
    """Write encoder.json, and of a trained encoder what describes it."""
    facts = encoder.source._asdict()
    folder = facts.pop("folder")
    (run / DESCRIPTION).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if trained:
        copy_files(folder, run, DESCRIBED)
    elif folder.name == FOLDER and (folder.parent / DESCRIPTION).is_file():  # within another run
        copy_files(folder, run)


def copy_files(folder: Path, run: Path, names: Iterable[str] | None = None) -> None:
    """Copy the named files of an encoder, those that it has, into a run; None: all it needs."""
    to = run / FOLDER
    to.mkdir(exist_ok=True)
    names = names or [*DESCRIBED, *(path.name for path in weight_files(folder))]
    for path in (folder / name for name in names):
        if path.is_file() and path.parent.absolute() != to.absolute():
            shutil.copyfile(path, to / path.name)


def check_shared(source: Source) -> None:
    """Raise UserError for an encoder that others cannot find by its name."""
    if "@" not in source.name:
        raise UserError(
            f"features.encoder = {source.name}: only this machine has it; add --with-encoder to "
            "copy its weights"
        )


def shared_name(name: str) -> str:
    """The name without the path of this machine's folder."""
    return name if "@" in name else Path(name).name


def cache_features(
    corpus: Corpus,
    front_end: FrontEnd,
    speeds: Sequence[float],
    workers: int,
    device: torch.device,
) -> FeatureCache | None:
    """The features of a corpus by a frozen encoder, stored; None for other features."""
    if (key := _key(front_end)) is None:
        return None
    return make_cache(corpus, front_end, key, speeds, workers, device)


def stored_features(corpus: Corpus, front_end: FrontEnd) -> FeatureCache | None:
    """As cache_features, but only what is stored already."""
    key = _key(front_end)
    return open_cache(corpus, key, front_end.size) if key else None


def _key(front_end: FrontEnd) -> str | None:
    extract = front_end.extract
    if not isinstance(extract, EncoderFeatures):
        return None
    layer = extract.encoder.layer
    if layer == "weighted" and getattr(extract.encoder.model.config, "do_stable_layer_norm", False):
        # Features stored by the name of the layer alone lack the last layer's norm.
        layer = "weighted, the last normalised"
    return cache_key(extract.encoder.source.sha256, layer, extract.sample_rate)


def licence(folder: Path) -> str:
    """The licence in the metadata of README.md; empty where there is none."""
    try:
        facts, _ = read_front_matter(folder / "README.md")
    except (OSError, ValueError, UserError, yaml.YAMLError):
        return ""
    found = facts.get("license") if isinstance(facts, dict) else None
    return found if isinstance(found, str) else ""
