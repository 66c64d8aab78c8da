"""The JSON Schema of recipes, checked with the jsonschema library."""

import json
import re
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
import yaml

from asr import recipe as command
from asr.config.json_schema import recipe_schema
from asr.config.loader import RecipeError, read_recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "recipes" / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


class Yaml12(yaml.SafeLoader):
    """Reads 2e-3 as a number, as editors do."""

    yaml_implicit_resolvers: ClassVar = dict(yaml.SafeLoader.yaml_implicit_resolvers)


FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
Yaml12.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def faults(text):
    """The dotted place of every fault."""
    errors = VALIDATOR.iter_errors(yaml.load(text, Yaml12))
    return sorted(".".join(map(str, error.absolute_path)) for error in errors)


def test_the_shipped_schema_is_up_to_date(commands):
    code, out, _ = commands(command, "--schema")
    assert code == 0 and json.loads(out) == recipe_schema()
    remedy = "run python -m asr.recipe --schema > recipes/schema.json"
    assert (ROOT / "recipes" / "schema.json").read_text(encoding="utf-8") == out, remedy
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_the_schema_and_fits_it(path):
    text = path.read_text(encoding="utf-8")
    line = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert line and (path.parent / line[1]).is_file()
    assert faults(text) == []
    resolved = yaml.safe_dump(read_recipe(path).model_dump(mode="json"))  # every key
    assert faults(resolved) == []


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("trian: {epochs: 2}", [""]),
        ("train: {epoch: 2}", ["train"]),
        ("train: {optimizer: {lr: 0}}", ["train.optimizer.lr"]),
        ("train: {optimizer: {betas: [0.9]}}", ["train.optimizer.betas"]),
        ("train: {optimizer: {betas: [0.9, 1.0]}}", ["train.optimizer.betas.1"]),
        ("task: speach", ["task"]),
        ("model: {kind: lsa}", ["model.kind"]),
        ("model: {kind: las, listener: {nrom: ba}}", ["model.listener"]),
        ("model: {kind: las, listener: {norm: layer}}", ["model.listener.norm"]),
        ("model: {kind: las, d_model: 64}", ["model"]),
        ("model: {kind: transformer, norm: batch}", ["model.norm"]),
        ("model: {kind: conformer, residual_scale: {encodr: 1}}", ["model.residual_scale"]),
        ("model: {listener: {norm: ba}, d_model: 64}", ["model"]),
        ("base: demo.yaml\nmodel: {listener: {nrom: ba}}", [""]),
        ("task: language\nmodel: {kind: las}", ["model.kind"]),
        ("task: language\ndecode: {beam: 2}", [""]),
        ("task: images\ndata: {valid: 0.6}", ["data.valid"]),
    ],
)
def test_a_mistake_is_found_at_its_place(text, places):
    assert faults(text) == places


@pytest.mark.parametrize(
    "text",
    [
        "base: demo.yaml",
        "base: demo.yaml\nmodel: {d_model: 64}",
        "base: demo_lm.yaml\ndata: {batch_bytes: 5}",  # the base names the task
        "model: {kind: las, listener: {eps: 1e-3, cell_norm: null}}",
        "train: {optimizer: {lr: 2e-3}}\ndecode: {speeds: [1, 0.9]}",
        "features: {noise: null, spec_augment: {freq_masks: 0}}",
        "data: {test: {dev-clean: a.tsv}}",
    ],
)
def test_a_part_of_a_recipe_fits(text):
    assert faults(text) == []


def test_schema_and_loader_agree_on_bounds(tmp_path):
    """The lower bound of each number under `train:`."""
    path = tmp_path / "recipe.yaml"
    path.write_text((ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8"))
    agreed = 0
    for key, value in SCHEMA["$defs"]["TrainConfig"]["properties"].items():
        low = value.get("minimum", value.get("exclusiveMinimum"))
        if low is None:
            continue
        for number in (low - 1, low, low + 0.5, low + 1):
            try:
                read_recipe(path, [f"train.{key}={number}"])
                taken = True
            except RecipeError:
                taken = False
            assert taken == (faults(f"train: {{{key}: {number}}}") == []), (key, number)
            agreed += taken
    assert agreed > 20


def test_keys_have_their_comment_as_description():
    groups = SCHEMA["$defs"]
    assert groups["LSTMLanguageModelConfig"]["properties"]["tied"]["description"] == (
        "output layer and embedding share weights"
    )
    keys = [value for group in groups.values() for value in group["properties"].values()]
    explained = [value for value in keys if "description" in value or "$ref" in value]
    assert len(explained) >= 0.95 * len(keys)
    assert '"required": []' not in json.dumps(SCHEMA)
    assert not any("required" in group for group in groups.values())
