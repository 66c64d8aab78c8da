"""The documents agree with the code: commands, recipes, keys, files, links and examples."""

import importlib
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import recipe_reference
import soundfile
from torch.distributed.run import get_args_parser

from asr.config.language import LanguageRecipe
from asr.config.loader import read_recipe
from asr.config.registered import REGISTERED
from asr.config.schema import SpeechRecipe
from asr.images.config import ImageRecipe
from asr.shipped import recipe_names
from asr.sweep import read_grid

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which also names removed files
GUIDES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "corpora", "api")),
]
CODE = re.compile(r"`([^`]+)`|^ {4}(.+)$", re.MULTILINE)  # inline, or an indented line
OVERRIDE = re.compile(r"[a-z_]+([.+][a-z_]+)*=")


def name_of(page):
    return page.name


def commands_of(page):
    """The words of every `python -m asr.NAME ...` or `layernorm-asr NAME ...`, from the name on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)  # Python
    for inline, line in CODE.findall(text):
        for call in re.split(r"&&|\n(?=python)", inline or line):
            call = re.sub(r"^\s*layernorm-asr (?=[a-z]+( |$))", "python -m asr.", call)
            _, actual, rest = re.sub(r" -m -- asr\.", " -m asr.", call).partition(" -m asr.")
            if actual:
                # A comment begins with spaces; an override such as {offsets: [-2, 2]} has one word.
                rest = re.split(r"\s#\s|\s{2,}[(a-z]", " ".join(rest.split("\n")))[0]
                yield shlex.split(re.sub(r"(\w=\{[^}]*\})", r"'\1'", rest))


COMMANDS = [
    pytest.param(page, words, id=f"{page.stem}-{number}-{words[0]}")
    for page in PAGES
    for number, words in enumerate(commands_of(page))
]


def test_the_pages_name_commands():
    """commands_of above finds commands."""
    assert {words[0] for page in GUIDES for words in commands_of(page)} >= {
        *("compare", "evaluate", "export", "prepare", "recipe", "sweep", "train"),
        "transcribe",
    }
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_command_exists_with_its_options(page, words, monkeypatch, capsys):
    name, *arguments = words
    part = arguments[:1] if name == "prepare" else []
    main = importlib.import_module(f"asr.{name}").main
    monkeypatch.setattr("sys.argv", [name, *part, "--help"])
    with pytest.raises(SystemExit):
        main()
    options = re.findall(r"--[a-z-]+", capsys.readouterr().out)
    wanted = [word for word in arguments if word.startswith("--")]
    assert set(wanted) <= set(options), f"{page.name}: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_torchrun_passes_the_options_of_our_commands_on(page):
    """By torchrun's own parser, which takes --run for its --run-path unless `-m --` is written."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace(" N ", " 2 ")
    lines = re.findall(r"^    torchrun (.* -m (?:-- )?)(asr\..*)$", text, re.MULTILINE)
    for options, command in lines:
        words = shlex.split(command)
        more = ["--run", "DIR"] if "-m -- " in options else []
        args = get_args_parser().parse_args([*shlex.split(options), *words, *more])
        assert [args.training_script, *args.training_script_args] == [*words, *more]
    assert lines or page.name not in ("README.md", "scaling.md")


def test_the_targets_of_make_exist():
    targets = re.findall(
        r"^([-.\w]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for page in PAGES:
        codes = CODE.findall(page.read_text(encoding="utf-8"))
        for target in re.findall(r"^make (\S+)", "\n".join(map("".join, codes)), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


# Placeholders of the pages.
PLACEHOLDERS = {"N": "1", "LR": "1e-3", "NORM": "none"}


def filled(override):
    key, _, value = override.partition("=")
    return f"{key}={PLACEHOLDERS.get(value, value)}"


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_the_recipe_of_a_command_takes_its_keys(page, words, monkeypatch):
    """Keys beside a run folder are checked against the recipe of the demo."""
    monkeypatch.chdir(ROOT)
    name, *arguments = words
    overrides = [filled(word) for word in arguments if OVERRIDE.match(word)]
    recipes = [word for word in arguments if word.endswith(".yaml") and word != "RECIPE.yaml"]
    for recipe in recipes:
        assert Path(recipe).is_file(), f"{page.name}: {recipe} does not exist"
    recipes += [word for word in arguments[:1] if word in recipe_names()]
    recipe = Path(recipes[0] if recipes else "recipes/demo.yaml")
    if name == "sweep" and overrides:  # a page may name the command alone
        read_grid(recipe, overrides)
    elif name != "prepare":
        read_recipe(recipe, overrides)


@pytest.mark.parametrize("page", GUIDES[:2], ids=name_of)
def test_a_setting_outside_of_commands_is_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for code, _ in CODE.findall(page.read_text(encoding="utf-8")):
        if OVERRIDE.match(code) and " -m " not in code:
            read_grid(Path("recipes/demo.yaml"), re.split(r"\s(?=[a-z_.]+=)", code))


@cache
def known_keys():
    """Every key and group of keys of every task by its dotted path."""
    recipes = (SpeechRecipe, LanguageRecipe, ImageRecipe)
    keys = [key.split(".") for recipe in recipes for key, _ in recipe_reference.rows(recipe)]
    return {".".join(parts[:end]) for parts in keys for end in range(1, len(parts) + 1)}


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_the_keys_that_a_page_names_exist(page):
    for code, _ in CODE.findall(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"(data|features|text|model|train|decode)(\.[a-z_]+)+", code):
            assert code in known_keys() or code.endswith(
                (".py", ".tsv", ".onnx", ".json", ".gz")
            ), f"{page.name}: no key {code}"


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "asr|features|recipes|tests|docs|examples|pretrained"
    kinds = rf"(?:{folders})/[\w./-]*\.(?:py|yaml|md|png|h|cpp)"
    for path in set(re.findall(rf"(?<![\w/]){kinds}", text)):
        assert (ROOT / path).is_file(), f"{page.name}: {path} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: no heading for {link}"


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_files_of_the_reading_order_exist():
    """Lines such as `asr/nn/  lstm.py attention.py`; at most 20 files up to the loss."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = []
    for title in ("From audio to loss:", "From audio to text:"):
        _, actual, rest = text.partition(title)
        assert actual
        block = rest.strip("\n").partition("\n\n")[0]
        files = [
            ROOT / folder / file
            for folder, *names in map(str.split, block.splitlines())
            for file in names
        ]
        assert [file for file in files if not file.is_file()] == []
        counts.append(len(files))
    assert 10 <= counts[0] <= 20 and counts[1] >= 5


def test_the_file_tree_of_the_readme_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## How it is built")[2].partition("Read from")[0]
    folders = re.findall(r"(?<!\S)((?:[a-z_]+/)+)(?=\s)", tree)
    assert len(folders) >= 12
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    packages = {path.parent for path in (ROOT / "asr").glob("*/__init__.py")}
    assert packages <= {ROOT / folder for folder in folders}


def test_the_reference_of_recipe_keys_is_up_to_date():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    remedy = "run python tests/recipe_reference.py > docs/recipes.md"
    assert page == recipe_reference.reference(), remedy


@pytest.mark.parametrize("recipe", [SpeechRecipe, LanguageRecipe, ImageRecipe])
def test_every_recipe_key_has_a_meaning(recipe):
    rows = dict(recipe_reference.rows(recipe))
    assert len(rows) > 40
    missing = [key for key, meaning in rows.items() if len(meaning.split()) < 1]
    assert missing == []


@pytest.mark.parametrize(
    ("page", "fewest"), [("README.md", 1), ("docs/api.md", 6), ("docs/lstm.md", 3)]
)
def test_the_examples_of_the_python_interface_run(page, fewest, tmp_path, monkeypatch):
    """All blocks of a page, in one namespace and a folder with `my.wav`."""
    seconds = np.arange(24_000) / 16_000
    soundfile.write(tmp_path / "my.wav", 0.3 * np.sin(2 * np.pi * 220 * seconds), 16_000)
    for name in ("pretrained", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= fewest
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # the project's own pages
    REGISTERED.clear()  # the norms of the example


def test_the_example_of_the_layer_trains(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["layernorm_lstm.py", "--steps", "60"])
    runpy.run_path(str(ROOT / "examples" / "layernorm_lstm.py"), run_name="__main__")
    losses = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(losses) == 3 and float(losses[-1]) < 1.1  # untrained: log 4
