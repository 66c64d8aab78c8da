"""Recipes: accepted values, refused values, and the one-line errors."""

import re
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from asr import recipe
from asr.config.loader import (
    RecipeError,
    as_yaml,
    flat,
    leaves,
    read_recipe,
    write_recipe,
)
from asr.config.schema import SpeechRecipe
from asr.shipped import missing_run, run_names, train_command

RECIPES = Path(__file__).parents[1] / "recipes"
PLAIN = "run: x\ndata: {train: a.tsv}\nmodel: {kind: las}\n"


@pytest.fixture
def read(tmp_path):
    """Write a recipe and read it with overrides."""

    def write_and_read(text, *overrides):
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return read_recipe(path, overrides)

    return write_and_read


def refusal(read, text, *overrides):
    """The one line of the RecipeError."""
    with pytest.raises(RecipeError) as error:
        read(text, *overrides)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_values_override_defaults(read):
    recipe = read(PLAIN + "train: {optimizer: {lr: 1e-3, betas: [0.8, 0.9]}, epochs: 7}\n")
    assert recipe.train.optimizer.lr == 1e-3  # PyYAML parses 1e-3 as text
    assert recipe.train.optimizer.betas == (0.8, 0.9) and recipe.train.epochs == 7
    assert recipe.seed == 1 and recipe.model.listener.norm == "ba"


def test_overrides_come_last_and_reach_any_depth(read):
    recipe = read(
        PLAIN + "train: {epochs: 7}\n",
        "train.epochs=9",
        "model.listener.norm=none",
        "model.listener.pyramid=[1]",
        "data.test={b: b.tsv}",
        "data.test.c=c=d.tsv",
        "train.steps=null",
        "seed=3",
        "seed=4",
    )
    assert (recipe.train.epochs, recipe.model.listener.norm) == (9, "none")
    assert recipe.model.listener.pyramid == (1,) and recipe.model.listener.reduction == 2
    assert {name: str(path) for name, path in recipe.data.test.items()} == {
        "b": "b.tsv",
        "c": "c=d.tsv",
    }
    assert recipe.train.steps is None and recipe.seed == 4


def test_a_run_may_be_named_after_a_day(read, tmp_path):
    assert read(PLAIN, "run=2026-11-22").run == "2026-11-22"
    recipe = read(PLAIN.replace("run: x", "run: 2026-11-22"))
    write_recipe(recipe, tmp_path / "out.yaml")
    assert read_recipe(tmp_path / "out.yaml").run == recipe.run == "2026-11-22"


def test_a_recipe_is_frozen(read):
    with pytest.raises(Exception, match="frozen"):
        read(PLAIN).train.epochs = 3


def test_a_base_provides_the_other_keys(tmp_path, read):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(
        "run: base\nseed: 5\ndata: {train: a.tsv, workers: 0}\n"
        "model: {kind: las, listener: {norm: none, hidden: 32}}\n"
    )
    (tmp_path / "middle.yaml").write_text("base: sub/base.yaml\ndata: {workers: 3}\nseed: 6\n")
    recipe = read("base: middle.yaml\nrun: top\nmodel: {listener: {norm: raw}}\n")
    assert (recipe.run, recipe.seed, recipe.data.workers) == ("top", 6, 3)
    assert str(recipe.data.train) == "a.tsv"
    assert (recipe.model.listener.norm, recipe.model.listener.hidden) == ("raw", 32)


def test_another_kind_of_model_replaces_the_whole_group(tmp_path, read):
    (tmp_path / "base.yaml").write_text(PLAIN.replace("las", "las, attention: dot, ctc_weight: 0"))
    model = read("base: base.yaml\nmodel: {kind: transformer}\n").model
    assert model.kind == "transformer" and model.ctc_weight == 0.3  # 0 belongs to the other kind


def test_other_groups_keep_their_keys_whatever_their_kind(tmp_path, read):
    rest = "features: {mvn: none, mel_bins: 23}\ntrain: {optimizer: {lr: 0.5}}\n"
    recipe = read(PLAIN + rest, "features.kind=mfcc", "train.optimizer.kind=adamw")
    assert (recipe.features.kind, recipe.features.mvn) == ("mfcc", "none")
    assert recipe.features.mel_bins == 23 and recipe.train.optimizer.lr == 0.5
    (tmp_path / "base.yaml").write_text(PLAIN + "text: {kind: bpe, size: 77}\n")
    assert read("base: base.yaml\ntext: {kind: unigram}\n").text.size == 77


def test_a_written_recipe_reads_back_the_same(tmp_path, read):
    recipe = read(PLAIN + "features: {speed_perturb: [0.9, 1.1], spec_augment: {freq_masks: 1}}\n")
    write_recipe(recipe, tmp_path / "out.yaml")
    assert read_recipe(tmp_path / "out.yaml") == recipe
    tree = yaml.safe_load(as_yaml(recipe))
    assert set(tree) == set(SpeechRecipe.model_fields)  # every key, including defaults


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("tarin: {}", "r.yaml: tarin is not a recipe key. Did you mean train?"),
        (
            "features: {spec_augment: {freq_mask: 2}}",
            "Did you mean features.spec_augment.freq_masks?",
        ),
        ("train: {optimizer: {learning_rate: 1}}", "train.optimizer.learning_rate is not a recipe"),
        ("train: {schedule: {warmpu: 1}}", "Did you mean train.schedule.warmup?"),
        ("train: {epochs: many}", "r.yaml: train.epochs = 'many': should be a valid integer"),
        ("train: {epochs: 0}", "train.epochs = 0: should be greater than or equal to 1"),
        ("train: {clip: .inf}", "train.clip = inf: should be a finite number"),
        ("train: {label_smoothing: 1.0}", "train.label_smoothing = 1.0: should be less than 1"),
        ("train: 5", "train = 5: should be a group of keys, {epochs: VALUE, ...}."),
        ("train: {consistency: {ctc: -1}}", "train.consistency.ctc = -1: should be greater"),
        ("seed: yes", "r.yaml: seed = True: should be a valid integer."),
        (
            "train: {optimizer: {kind: schedule_free}}",
            "r.yaml: train.optimizer.kind = schedule_free needs",
        ),
        ("features: {kind: logmels}", "features.kind = 'logmels': should be 'logmel', 'mfcc'"),
        ("features: {speed_perturb: [9.0]}", "features.speed_perturb.0 = 9.0"),
        ("text: {kind: bpe, size: 3}", "text.size = 3"),
        (
            "decode: {length_penalty: 1000}",
            "decode.length_penalty = 1000: should be less than or equal to 10",
        ),
        ("features: {noise: [-4000, 10]}", "features.noise.0 = -4000: should be greater than or"),
        (
            "decode: {speeds: [0.9, 1.1]}",
            "decode.speeds = [0.9, 1.1]: speeds must differ and include 1.0",
        ),
        (
            "decode: {speeds: [1, 0.9], search: ctc}",
            "decode.speeds = [1, 0.9]: search=ctc takes",
        ),
        (
            "decode: {ensemble: [a], search: ctc}",
            "decode.ensemble = ['a']: search=ctc takes one",
        ),
    ],
)
def test_a_wrong_key_type_or_range_is_named(read, more, message):
    assert message in refusal(read, PLAIN + more + "\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "{kind: las, listener: {nrom: ba}}",
            "model.listener.nrom is not a recipe key. Did you mean model.listener.norm?",
        ),
        ("{kind: las, speller: {norm: batch}}", "model.speller.norm = 'batch': should be 'none',"),
        ("{kind: las, listener: {layers: 2, pyramid: [3]}}", "must name different layers of 1 to"),
        ("{kind: las, listener: {pyramid: [2, 2]}}", "must name different layers"),
        ("{kind: las, listener: {pyramid: [], norm_layers: pyramid}}", "no layer has the norm"),
        ("{kind: las, speller: {recurrent_gain: 0}}", "should be greater than 0"),
        ("{kind: las, ctc_weight: 1.5}", "model.ctc_weight = 1.5"),
        ("{kind: los}", "r.yaml: model.kind = 'los': must be one of las, transformer, conformer."),
        ("{listener: {norm: ba}}", "model"),
    ],
)
def test_a_wrong_model_is_named_without_pydantics_tags(read, model, message):
    actual = refusal(read, f"run: x\ndata: {{train: a.tsv}}\nmodel: {model}\n")
    assert message in actual and "model.las" not in actual


@pytest.mark.parametrize("decode", ["search=ctc", "ctc_weight=0.4"])
def test_decoding_with_a_ctc_head_needs_one(read, decode):
    """Reported before training, not by its first validation."""
    assert read(PLAIN, f"decode.{decode}").model.ctc_weight > 0
    headless = [f"decode.{decode}", "model.ctc_weight=0"]
    assert f"decode.{decode} needs a CTC head" in refusal(read, PLAIN, *headless)


def test_incompatible_keys_are_attributed_to_their_file(read):
    """Even if the command line changes other keys."""
    text = (
        PLAIN.replace("{kind: las}", "{kind: las, ctc_weight: 0}") + "decode: {ctc_weight: 0.3}\n"
    )
    actual = refusal(read, text, "seed=2")
    assert (
        ".yaml: decode.ctc_weight=0.3 needs a CTC head" in actual and "command line" not in actual
    )


@pytest.mark.parametrize("recipe", ["demo_lm", "mnist_rows", "draw"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_seconds", "60"),
        ("guided_attention", "{}"),
        ("consistency", "{}"),
        ("alarm", "{steps: 0}"),
    ],
)
def test_speech_keys_are_refused_in_other_tasks(recipe, key, value, tmp_path):
    place, written = RECIPES / f"{recipe}.yaml", tmp_path / "recipe.yaml"
    write_recipe(read_recipe(place), written)
    assert key in written.read_text() and read_recipe(written) == read_recipe(place)
    task = "language" if recipe == "demo_lm" else "images"
    with pytest.raises(RecipeError, match=f"train.{key} changes nothing in task {task}: "):
        read_recipe(place, [f"train.{key}={value}"])


def test_keys_without_use_for_images_are_refused():
    """Keys for text; for DRAW also keys for classes."""
    rows, draw = RECIPES / "mnist_rows.yaml", RECIPES / "draw.yaml"
    for place in (rows, draw):
        with pytest.raises(RecipeError, match=r"train\.samples changes nothing in task images"):
            read_recipe(place, ["train.samples=2"])
    assert read_recipe(rows, ["train.label_smoothing=0.2"]).train.label_smoothing == 0.2
    with pytest.raises(RecipeError, match=r"train\.label_smoothing changes nothing in task images"):
        read_recipe(draw, ["train.label_smoothing=0.2"])


def test_an_empty_mapping_empties_one():
    path = Path(__file__).parents[1] / "recipes" / "librispeech100.yaml"
    assert read_recipe(path).data.test
    recipe = read_recipe(path, ["data.test={}", "data.corpus=null", "data.max_seconds=7"])
    assert recipe.data.test == {} and recipe.data.train == read_recipe(path).data.train
    for own in (["data.test={}", "data.test.own=own.tsv"], ["data.test={own: own.tsv}"]):
        recipe = read_recipe(path, own)
        assert ("own" in recipe.data.test) and len(recipe.data.test) == (1 if own[1:] else 5)


def test_overrides_of_another_kind_of_model_in_any_order():
    overrides = ["model.d_model=96", "model.kind=transformer", "model.heads=3"]
    models = [read_recipe("demo", order).model for order in permutations(overrides)]
    assert {(m.kind, m.d_model, m.heads) for m in models} == {("transformer", 96, 3)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.epoch=3",
            "command line: train.epoch is not a recipe key. Did you mean train.epochs?",
        ),
        ("train.epochs=x", "command line: train.epochs = 'x'"),
        ("train=5", "command line: train = 5"),
        ("train.epochs", "command line: 'train.epochs' is not of the form key.path=value"),
        ("=3", "command line: '=3' is not of the form"),
        ("train..epochs=3", "is not of the form"),
        ("seed=[1", "command line: the value in 'seed=[1' is not valid YAML"),
        ("model.listener.norm.x=1", "model.listener.norm"),
        ("stages=[3]", "stages.0 = 3: should be a group of keys, {start: VALUE, ...}."),
        ("train.device=gpu", "train.device = 'gpu': should be auto, cpu, cuda or cuda:N"),
        ("train.trackers=wandb", "train.trackers = 'wandb': should be a list, [VALUE, ...]."),
        ("data.test=x.tsv", "data.test = 'x.tsv': should hold names with values, {NAME: VALUE"),
        (
            "model.listener={norm: joined, recurrent_gain: 0.5}",
            "command line: model.listener.recurrent_gain = 0.5 does not fit model.listener.norm = "
            "joined: only ba has this gain.",
        ),
        (
            "model.listener={norm: none, eps: 1e-3}",
            "command line: model.listener.eps = 0.001 does not fit model.listener.norm = none: it "
            "changes nothing.",
        ),
        ("model.speller={norm: none, zero_variance: raw}", "model.speller.norm = none: it changes"),
        ("model.listener={norm: none, norm_layers: first}", "norm_layers = first does not fit"),
    ],
)
def test_a_wrong_override_is_attributed_to_the_command_line(read, override, message):
    assert message in refusal(read, PLAIN, override)


@pytest.mark.parametrize("given", ["seed=2", {"seed": 2}])
def test_overrides_are_a_list(given):
    with pytest.raises(RecipeError, match=r"overrides = .*: must be a list, \['seed=2'\]"):
        read_recipe("demo", given)


@pytest.mark.parametrize(
    ("recipe", "key", "end"),
    [
        (
            "demo",
            "model.norm",
            " of model.kind = las, but of transformer and conformer. "
            "Did you mean model.speller.norm?",
        ),
        (
            "demo_transformer",
            "model.listener.norm",
            " of model.kind = transformer, but of las. Did you mean model.norm?",
        ),
        ("demo_transformer", "model.kernel", " of model.kind = transformer, but of conformer."),
        (
            "demo_transformer",
            "model.encoder.layers",
            ". Did you mean model.encoder_layers?",
        ),
        ("demo", "start", ". docs/recipes.md lists all."),
        ("demo", "train.lr", ". Did you mean train.optimizer.lr?"),
        ("demo", "beam", ". Did you mean decode.beam?"),
        ("demo", "data.batch_seconds", ". Did you mean train.batch_seconds?"),
        ("demo_lm", "model.layer", ". Did you mean model.layers?"),
        ("demo", "train.batch_size", ". docs/recipes.md lists all."),
    ],
)
def test_a_key_of_another_place_or_model_is_found(recipe, key, end):
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe, [f"{key}=3"])
    assert f"is not a recipe key{end}" in str(caught.value) and str(caught.value).endswith(end)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((f"{key}={value}", f"{key} = True: should be a valid ")
          for key in ("train.epochs", "train.optimizer.lr", "seed") for value in ("true", "yes")),
        ("train.epochs='3'", "train.epochs = '3': should be a valid integer"),
        ("train.epochs=1e3", "train.epochs = 1000.0: should be a valid integer"),
        ("features.mvn_variance=1", "features.mvn_variance = 1: should be a valid boolean"),
        ("run=5", "run = 5: should be text; write it in quotes"),
    ],
)  # fmt: skip
def test_types_are_strict(read, override, message):
    assert message in refusal(read, PLAIN, override)


@pytest.mark.parametrize("text", ["1e3", "2.e-7", "3E+1", "1.5e8"])
def test_a_number_with_an_exponent(read, tmp_path, text):
    """Without quotes a number, as in YAML 1.2; in quotes text, also once it is written."""
    assert read(PLAIN, f"train.clip={text}").train.clip == float(text)
    recipe = read(PLAIN, f"data.train='{text}'")
    write_recipe(recipe, tmp_path / "out.yaml")
    assert str(read_recipe(tmp_path / "out.yaml").data.train) == text


def test_several_errors_are_counted_and_the_unknown_key_is_first(read):
    actual = refusal(read, PLAIN + "train: {epochs: 0, clip: 0}\nsede: 1\n")
    assert actual.endswith("sede is not a recipe key. Did you mean seed? (2 more like it)")


@pytest.mark.parametrize("missing", ["run", "data", "model"])
def test_a_missing_key_is_reported(read, missing):
    rest = "\n".join(line for line in PLAIN.splitlines() if not line.startswith(missing))
    assert f"r.yaml: {missing} is missing" in refusal(read, rest + "\n")


@pytest.mark.parametrize(
    "run", ["/etc", "../x", "a/../../b", "''", ".hidden", "-x", "a//b", "a/", "a/./b", "a/-b"]
)
def test_run_stays_under_runs(read, run):
    actual = refusal(read, PLAIN.replace("run: x", f"run: {run}"))
    assert "must be a plain folder name" in actual


def test_run_does_not_repeat_its_parent(read):
    assert "run = 'runs/a/b': is put under runs/: run=a/b" in refusal(read, PLAIN, "run=runs/a/b")
    assert read(PLAIN, "run=runs").run == "runs"


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", ".", "..", "''", "-x", ".x", "x" * 201])
def test_the_name_of_a_test_split_is_plain(read, name):
    """It becomes the name of a folder."""
    more = f"data: {{train: a.tsv, test: {{{name}: b.tsv}}}}\n"
    assert "name" in (line := refusal(read, PLAIN.replace("data: {train: a.tsv}\n", more)))
    assert "data.test" in line or "a key = " in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is a mapping of keys to values"),
        ("run: [1\n", "r.yaml:2: not valid YAML"),
        ("a: &x {b: 1}\nc: *x\n", "r.yaml:2: not valid YAML: aliases are not allowed"),
        ("run: !!python/object/apply:os.system ['touch owned']\n", "r.yaml:1: not valid YAML"),
        ("[" * 5000, "not valid YAML: nested more than 20 deep"),
        ("1: 2\n", "r.yaml:1: not valid YAML: a key must be text; write it in quotes"),
        ("a: 1\n---\nb: 2\n", "another document"),
    ],
)
def test_an_invalid_recipe_is_refused_and_runs_nothing(read, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(read, text)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("1" + ":30" * 20 + ".5", "1" + ":30" * 20 + ".5"),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_a_value_without_quotes_is_text_unless_it_is_a_number(read, text, value):
    """YAML 1.1 would read numbers in base 60."""
    assert read(PLAIN, f"data.train={text}").data.train == Path(value)


def test_bytes_that_are_not_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"run: \xff\xfe\n")
    with pytest.raises(RecipeError, match=r"r\.yaml: not valid YAML"):
        read_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text(PLAIN, encoding="utf-16")
    with pytest.raises(RecipeError, match=r"r\.yaml: not valid YAML"):
        read_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text(PLAIN, encoding="utf-8-sig")
    assert read_recipe(tmp_path / "r.yaml").run == "x"


def test_a_missing_recipe_hints_at_its_neighbour(tmp_path):
    (tmp_path / "demo.yaml").write_text(PLAIN)
    with pytest.raises(
        RecipeError, match=r"demi\.yaml: there is no such recipe. Did you mean .*demo"
    ):
        read_recipe(tmp_path / "demi.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(tmp_path)


def test_a_missing_or_circular_base(tmp_path, read):
    line = refusal(read, "base: b.yaml\n")
    assert f"{tmp_path}/b.yaml: there is no such recipe." in line
    assert line.endswith(f"(a base of {tmp_path}/r.yaml)")
    for value in ("5", "''", "false", "[]", "b" * 256):
        assert "must be the name of a recipe file" in refusal(read, f"base: {value}\n")
    (tmp_path / "b.yaml").write_text("base: r.yaml\n")
    assert re.search("remove the loop", refusal(read, "base: b.yaml\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["none.yaml"], "error: none.yaml: there is no such recipe."),
        (["r.yaml", "seed=x"], "error: command line: seed = 'x': should be a valid integer"),
        ([], "give one of RECIPE"),
    ],
)
def test_the_command_prints_a_recipe_or_an_error(line, message, tmp_path, monkeypatch, commands):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(PLAIN)
    code, out, _ = commands(recipe, "r.yaml", "seed=7")
    assert code == 0 and yaml.safe_load(out)["seed"] == 7
    code, _, err = commands(recipe, *line)
    assert code == 2 and message in err


def test_a_project_recipe_repeats_no_key_of_its_base():
    for path in sorted(RECIPES.glob("*.yaml")):
        tree = yaml.safe_load(path.read_text())
        if "base" in tree:
            base, own = flat(read_recipe(path.parent / tree.pop("base"))), flat(read_recipe(path))
            if base["model.kind"] != own["model.kind"]:  # its keys are not those of the base
                del tree["model"]
            assert not [key for key, _ in leaves(tree) if base.get(key, ...) == own[key]], path


# A run that is not there: the error names the command that makes it.


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_each_predecessor_of_a_recipe_has_its_command(recipe):
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    named = [content.get("train", {}).get("init"), content.get("text", {}).get("run")]
    for run in {*filter(None, named)} - {*run_names()}:
        command = train_command(Path(run)).split()
        assert command[:3] == ["python", "-m", "asr.train"] and len(command) == 4
        assert f"runs/{read_recipe(command[3]).run}" == run


def test_a_run_of_that_name_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert str(missing_run(Path("mine"))) == "mine: there is no such run. Did you mean runs/mine?"
    for name, near in {"runs/mime": "runs/mine", "conformerr": "conformer"}.items():
        assert str(missing_run(Path(name))).endswith(f"no such run. Did you mean {near}?")


def test_other_folders_and_recipes(tmp_path):
    assert train_command(Path("runs/demo")) == "python -m asr.train demo"
    assert train_command(Path("my runs/demo")) == "python -m asr.train demo --run 'my runs/demo'"
    assert train_command(Path("runs/x y")) == "python -m asr.train RECIPE.yaml --run 'runs/x y'"
    run = tmp_path / "begun"
    run.mkdir()
    (run / "recipe.yaml").touch()
    assert train_command(run) == f"python -m asr.train {run}/recipe.yaml --run {run} --resume"
    line = str(missing_run(Path("runs/demo"), "text.run"))
    assert line.startswith("text.run = runs/demo: there is no such run. Make it with: python -m")
