"""Runs on the Hugging Face Hub, by its own library against a stand-in for its server."""

import json
import socket
from argparse import Namespace
from pathlib import Path

import pytest
from hub_server import HubServer

import asr
from asr import evaluate, export, train, transcribe
from asr import hub as ours
from asr.analysis.model_card import card_metadata, evaluation_result
from asr.config.loader import read_recipe
from asr.errors import UserError
from asr.inference.recognition import Recognizer

library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
constants = pytest.importorskip("huggingface_hub.constants")
# The library's own call of its HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server:
        url = server.url
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_owner")
        library.close_session()
        yield server
        library.close_session()


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory):
    to = tmp_path_factory.mktemp("exported") / "small"
    parts = {"about": None, "license": None, "with_encoder": False}
    export.export(Namespace(run=tiny_run, overrides=[], **parts), to)
    return to


@pytest.fixture
def pushed(hub, exported):
    """The hub with the exported run as owner/tiny."""
    ours.push_run(exported, "owner/tiny", private=False)
    return hub


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if ".cache" not in path.parts]  # the library's notes
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_pushed_run_is_the_exported_folder(pushed, exported):
    files = pushed.files("owner/tiny")
    assert files.pop(".gitattributes")
    assert files == contents(exported)
    assert not pushed.repos["owner/tiny"].private
    assert len(pushed.lfs) == 1  # the weights


def test_a_run_from_the_hub_transcribes_as_the_folder(pushed, exported, tiny, commands):
    audio = tiny.parent / "test-0.flac"
    code, out, err = commands(transcribe, "hf:owner/tiny", audio)
    assert code == 0 and err.count("downloading") == 1 and "downloading" not in out
    assert out == commands(transcribe, exported, audio)[1]
    copy = ours.local_run("hf:owner/tiny")
    files = contents(copy)
    kept = {name for name in contents(exported) if name != "README.md"}
    assert files == {name: content for name, content in contents(exported).items() if name in kept}
    assert not any(path.is_symlink() for path in copy.rglob("*"))


def test_the_second_load_downloads_nothing_and_works_offline(pushed, capsys):
    first = ours.local_run("hf:owner/tiny")
    count = len(pushed.downloads())
    assert count and ours.local_run("hf:owner/tiny") == first
    assert len(pushed.downloads()) == count
    asked = len(pushed.requests)
    assert ours.local_run(f"hf:owner/tiny@{first.name}") == first
    assert len(pushed.requests) == asked  # a commit never changes
    pushed.status = 503
    capsys.readouterr()
    assert ours.local_run("hf:owner/tiny") == first
    assert "cannot be reached; using the copy of" in capsys.readouterr().err
    pushed.shutdown()
    pushed.server_close()
    library.close_session()
    assert Recognizer.load("hf:owner/tiny").steps == Recognizer.load(first).steps


def test_offline_mode_uses_the_copy(pushed, monkeypatch):
    copy = ours.local_run("hf:owner/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ours.local_run("hf:owner/tiny") == copy
    with pytest.raises(UserError, match=r"owner/other: the hub cannot be reached .* no copy"):
        ours.local_run("hf:owner/other")


def test_an_interrupted_download_is_no_copy_and_is_continued(pushed, exported):
    pushed.most_downloads = 3
    with pytest.raises(UserError, match="owner/tiny: the hub cannot be reached"):
        ours.local_run("hf:owner/tiny")
    pushed.status = 503  # of every answer
    with pytest.raises(UserError, match="no copy on this machine"):
        ours.local_run("hf:owner/tiny")
    pushed.status, pushed.most_downloads = 0, None
    before = len(pushed.downloads())
    copy = ours.local_run("hf:owner/tiny")
    del (expected := contents(exported))["README.md"]
    assert contents(copy) == expected
    assert len(pushed.downloads()) - before < len(expected)  # some were there already


def test_only_the_files_of_a_run_are_downloaded(pushed, exported):
    """A pickle could run code, and a name with .. could leave the folder."""
    more = ["training.pt", "checkpoints/00000007/training.pt", "checkpoints/1/model.safetensors"]
    more += ["model.pkl", "x.py", "checkpoints/../../../evil/model.safetensors"]
    pushed.commit("owner/tiny", pushed.files("owner/tiny") | dict.fromkeys(more, b""))
    copy = ours.local_run("hf:owner/tiny")
    assert contents(copy).keys() == contents(exported).keys() - {"README.md"}
    assert not any(name in line for line in pushed.downloads() for name in more)


def test_a_new_commit_is_a_new_copy(pushed):
    old = ours.local_run("hf:owner/tiny")
    files = pushed.files("owner/tiny")
    changed = files | {"recipe.yaml": files["recipe.yaml"] + b"# changed\n"}
    pushed.repos["owner/tiny"].tags["v1"] = old.name
    assert pushed.commit("owner/tiny", changed) == ours.local_run("hf:owner/tiny").name
    assert ours.local_run("hf:owner/tiny@v1") == old


def test_a_second_push_replaces_the_run(pushed, tiny_run, exported, tmp_path):
    extra = {
        **pushed.files("owner/tiny"),
        "LICENSE": b"MIT",
        "checkpoints/00000099/sha256.json": b"",
    }
    pushed.commit("owner/tiny", extra)
    ours.push_run(exported, "owner/tiny", private=False)
    files = pushed.files("owner/tiny")
    assert files.keys() == {*contents(exported), ".gitattributes", "LICENSE"}


def test_export_pushes_without_a_folder(hub, tiny_run, commands):
    command = (export, tiny_run, "--push-to", "owner/mine")
    code, out, err = commands(*command, "--private")
    assert code == 0 and not err and "load it as hf:owner/mine" in out
    assert hub.repos["owner/mine"].private
    card = hub.files("owner/mine")["README.md"].decode()
    assert "\n# mine\n" in card and "python -m asr.transcribe hf:owner/mine file.wav" in card
    assert commands(*command, "--private")[0] == 0
    hub.repos["owner/mine"].private = False
    assert "is public" in commands.refused(*command, "--private")


def test_evaluation_of_a_run_from_the_hub(pushed, tiny, commands, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    split = ("--split", tiny.parent / "test.tsv")
    assert commands(evaluate, "hf:owner/tiny", *split)[0] == 0
    assert json.loads((tmp_path / "evaluate/tiny/test/score.json").read_text())["wer"] >= 0
    assert not (ours.local_run("hf:owner/tiny") / "evaluate").exists()
    assert "--tune writes into the run" in commands.refused(
        evaluate, "hf:owner/tiny", *split, "--tune"
    )
    (tmp_path / "python").mkdir()
    monkeypatch.chdir(tmp_path / "python")
    asr.Run("hf:owner/tiny").evaluate(tiny.parent / "test.tsv")
    assert Path("evaluate/tiny/test/page.html").is_file()
    assert not (ours.local_run("hf:owner/tiny") / "evaluate").exists()


def test_a_run_from_the_hub_stands_wherever_a_run_does(pushed, tiny, tiny_run, commands, tmp_path):
    name, out = "hf:owner/tiny", tmp_path / "out"
    started = "--run", tmp_path / "run", f"train.init={name}", "train.steps=1"
    code, _, err = commands(train, tiny, *started)
    assert code == 0, err
    split = "--split", "test", "--out", out
    assert commands(evaluate, tiny_run, *split, f"decode.ensemble=[{name}]")[0] == 0
    line = commands.refused(evaluate, tiny_run, *split, f"decode.lm={name}")
    assert line.endswith("a run of the task speech, no language model")
    line = commands.refused(evaluate, tiny_run, *split, "--against", name)
    test = tiny.parent / "test.tsv"
    assert f"python -m asr.evaluate {name} --split {test} --out evaluate/tiny/test" in line
    assert commands(evaluate, name, "--split", test, "--out", out)[0] == 0
    code, _, err = commands(evaluate, tiny_run, *split, "--against", out)
    assert code == 0, err


def refuse_gated(hub):
    hub.repos["owner/tiny"].gated = True


def replace_by_another(hub):
    hub.commit("owner/tiny", {"config.json": b"{}", "tokenizer.json": b"{}"})


def enlarge(name, size):
    return lambda hub: hub.sizes.update({name: size})


def stop(hub):
    hub.status = 500


@pytest.mark.parametrize(
    ("address", "spoil", "words"),
    [
        ("owner/tiny", refuse_gated, "access is restricted"),
        ("owner/none", None, "no such repository, or it is private"),
        ("owner/tiny@v9", None, "has no revision v9"),
        ("owner/tiny", replace_by_another, "no recipe.yaml and tokenizer.json in it"),
        ("owner/tiny", enlarge("tokenizer.json", 1 << 60), "1152921504607 MB, but "),
        ("owner/tiny", stop, "cannot be reached"),
        ("tiny", None, "write hf:USER/NAME"),
        ("owner/tiny@", None, "write hf:USER/NAME"),
        ("../tiny", None, "write hf:USER/NAME"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(pushed, commands, tmp_path, address, spoil, words):
    if spoil:
        spoil(pushed)
    code, out, err = commands(transcribe, f"hf:{address}", "a.wav")
    assert code == 2 and not out
    (line,) = err.splitlines()
    assert line.startswith(f"error: hf:{address}: ")
    assert words in line
    assert not [path for path in tmp_path.rglob("*") if path.name == "recipe.yaml"]


@pytest.mark.parametrize(
    ("name", "prepare", "words"),
    [
        ("owner/tiny", lambda patch: patch.setenv("HF_TOKEN", "hf_other"), "not allowed (403)"),
        ("owner/other", None, "holds something else than a run"),
        ("tiny", None, "write USER/NAME"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    hub, tiny_run, commands, monkeypatch, name, prepare, words
):
    hub.create("owner/other")
    hub.commit("owner/other", {"config.json": b"{}"})
    if prepare:
        prepare(monkeypatch)
    line = commands.refused(export, tiny_run, "--push-to", name)
    assert line.startswith(f"--push-to {name}: ") and words in line


def test_a_server_that_does_not_answer(hub, monkeypatch, commands):
    monkeypatch.setattr(ours, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached" in commands.refused(transcribe, "hf:owner/tiny", "a.wav")


def test_without_the_library(monkeypatch, tiny_run, commands, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    install = "in the checkout pip install '.[hub]'"
    assert install in commands.refused(transcribe, "hf:owner/tiny", "a.wav")
    assert install in commands.refused(export, tiny_run, "--push-to", "owner/tiny")


def test_the_card_has_the_metadata_of_the_hub(run, tiny, commands, tmp_path):
    assert commands(evaluate, run, "--split", "test")[0] == 0
    about = tmp_path / "about.md"
    about.write_text("---\nlicense: cc-by-4.0\nlanguage: [en, de]\n---\nOn tones.\n")
    assert commands(export, run, "--to", tmp_path / "to", "--about", about)[0] == 0
    card = library.ModelCard.load(tmp_path / "to" / "README.md")
    assert card.text.strip().startswith("# to\n\nOn tones.\n")
    data = card.data
    assert (data.license, data.language) == ("cc-by-4.0", ["en", "de"])
    assert (data.library_name, data.pipeline_tag) == (
        "layernorm-asr",
        "automatic-speech-recognition",
    )
    rates = json.loads((run / "evaluate/test/score.json").read_text())
    results = {result.metric_type: result for result in data.eval_results}
    for kind in ("wer", "cer"):
        assert results[kind].metric_value == pytest.approx(100 * rates[kind], abs=0.005)
    assert {result.dataset_name for result in data.eval_results} == {"test"}
    assert data.model_name == "to"
    # Written again by the hub's library, it is the same.
    written = library.ModelCardData(**data.to_dict(), ignore_metadata_errors=False)
    assert written.to_dict() == data.to_dict()


ALONE = {"lm": None, "lm_weight": 0.2, "ensemble": []}  # the settings of a plain evaluation


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "WER"),
        ({"lm": "runs/lm"}, "WER with a language model"),
        ({"lm": "runs/lm", "lm_weight": 0.0}, "WER"),
        ({"ensemble": ["runs/b"]}, "WER in an ensemble"),
    ],
)
def test_rates_that_the_model_alone_does_not_reach_are_named_so(settings, name):
    rates = {"wer": 0.1, "cer": 0.1, "about": {"decode": ALONE | settings}}
    assert evaluation_result(None, "test", rates)["metrics"][0]["name"] == name


def test_librispeech_has_its_name_on_the_hub():
    rates = {"wer": 0.12345, "cer": 0.04, "about": {"decode": ALONE}}
    result = evaluation_result("librispeech", "dev-other", rates)
    assert result["dataset"] == {
        "name": "librispeech dev-other",
        "type": "openslr/librispeech_asr",
        "config": "other",
        "split": "validation",
    }
    assert result["metrics"][0] == {"type": "wer", "value": 12.35, "name": "WER"}
    # A part that the hub does not have.
    result = evaluation_result("mini-librispeech", "dev-clean-2", rates)
    assert result["dataset"] == {"name": "mini-librispeech dev-clean-2", "type": "mini-librispeech"}


def test_a_manifest_of_ones_own_is_not_called_librispeech():
    recipe = read_recipe(Path(__file__).parents[1] / "recipes" / "librispeech100.yaml")
    rates = {"wer": 0.1, "cer": 0.1, "about": {"decode": ALONE}}
    rated = dict.fromkeys(("test-clean", "own-other"), rates)
    (entry,) = card_metadata("las", recipe, rated)["model-index"]
    one, other = (result["dataset"] for result in entry["results"])
    assert one["type"] == "openslr/librispeech_asr"
    assert other == {"name": "own-other", "type": "other"}


def test_metadata_that_are_none(tiny_run, commands, tmp_path):
    about = tmp_path / "about.md"
    for text in ("---\n- a\n---\n", "---\na: [\n---\n"):
        about.write_text(text)
        line = commands.refused(export, tiny_run, "--to", tmp_path / "to", "--about", about)
        assert line.startswith(f"--about {about}: ")


def test_a_pretrained_encoder_is_downloaded_once(hub, tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs the extra encoders")
    from tiny_encoders import make_encoder

    from asr.config.schema import FeaturesConfig
    from asr.inference.encoders import find_encoder, load_encoder

    make_encoder(tmp_path / "hubert", "hubert")
    files = {path.name: path.read_bytes() for path in (tmp_path / "hubert").iterdir()}
    hub.create("facebook/hubert")
    sha = hub.commit("facebook/hubert", {**files, "pytorch_model.bin": b"pickle", "x.py": b""})
    features = FeaturesConfig(kind="encoder", encoder="facebook/hubert")
    source = find_encoder(features)
    assert (source.name, source.licence) == (f"facebook/hubert@{sha}", "mit")
    assert load_encoder(features, source).hidden_size == 24
    assert not {"pytorch_model.bin", "x.py"} & set(contents(source.folder))
    count = len(hub.downloads())
    again = find_encoder(features.model_copy(update={"encoder": source.name}))
    assert again == source and len(hub.downloads()) == count
    hub.status = 503
    assert find_encoder(features).folder == source.folder
    assert "using the copy" in capsys.readouterr().err


def test_an_encoder_whose_weights_are_a_pickle_is_refused(hub):
    from asr.config.schema import FeaturesConfig
    from asr.inference.encoders import find_encoder

    hub.create("facebook/old")
    hub.commit("facebook/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    features = FeaturesConfig(kind="encoder", encoder="facebook/old")
    with pytest.raises(UserError, match=r"no model\.safetensors .* pickle"):
        find_encoder(features)
    assert not hub.downloads()
