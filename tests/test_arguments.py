"""The command line of every command: a mistake is one line, and nothing is written."""

import pytest

from asr import compare, evaluate, export, prepare, prune, recipe, sweep, train, transcribe

COMMANDS = {
    compare: ["RUN"],
    evaluate: ["RUN", "--split=test"],
    export: ["RUN", "--to=TO"],
    prune: ["RUN", "--to=TO", "--encoder=1"],
    recipe: ["r.yaml"],
    sweep: ["r.yaml"],
    train: ["r.yaml"],
    transcribe: ["RUN", "a.wav"],
}
PREPARE = [prepare, "table", "a.tsv", "--to", "TO"]


@pytest.fixture
def refused(commands, tmp_path, monkeypatch):
    """The one error line of a command, which writes nothing."""
    monkeypatch.chdir(tmp_path)

    def line(*words):
        message = commands.refused(*words)
        assert not list(tmp_path.iterdir())
        return message

    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_and_unknown_arguments(command, refused):
    either = command is recipe  # takes one of several
    expected = "give one of RECIPE" if either else "the following arguments are required: "
    assert expected in (line := refused(command)) and "key.path=value" not in line
    line = refused(command, *COMMANDS[command], "--unknown")
    assert line == (
        "unrecognized arguments: --unknown; "
        f"python -m {command.__name__} --help lists the arguments"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_path_is_not_the_current_folder(command, refused):
    first, *rest = COMMANDS[command]
    assert "must not be empty" in refused(command, "", *rest)
    flags = {train: "--run", export: "--to", prune: "--to", recipe: None}
    if flag := flags.get(command, "--out"):
        rest = [word for word in rest if not word.startswith(flag)]
        for empty in ([flag, ""], [f"{flag}="], [flag, " "]):
            assert f"argument {flag}: must not be empty" in refused(command, first, *rest, *empty)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ([train, "r.yaml", "--run=a", "--run", "b"], "--run"),
        ([evaluate, "RUN", "--split=test", "--split=test"], "--split"),
        ([evaluate, "RUN", "--split=test", "--pictures=1", "--pictures=2"], "--pictures"),
        ([export, "RUN", "--to", "a", "--to", "b"], "--to"),
        ([compare, "RUN", "--levels", "1", "--levels", "2"], "--levels"),
        ([transcribe, "RUN", "a.wav", "--format=srt", "--format=vtt"], "--format"),
        ([*PREPARE, "--text=lower", "--text=lower"], "--text"),
    ],
)
def test_a_flag_is_given_once(line, flag, refused):
    assert f"argument {flag}: given twice" in refused(*line)


def test_two_formats_are_refused(refused):
    line = refused(transcribe, "RUN", "a.wav", "--json", "--format=srt")
    assert "not allowed with argument" in line


@pytest.mark.parametrize(
    "line",
    [
        [train, "r.yaml", "--res"],
        [train, "r.yaml", "--ru=x"],
        [sweep, "r.yaml", "--dry"],
        [evaluate, "RUN", "--split=test", "--pic=3"],
        [*PREPARE, "--skip"],
    ],
)
def test_a_flag_is_not_shortened(line, refused):
    assert "unrecognized arguments: " in refused(*line)


def test_the_last_of_equal_keys_wins_with_a_note(commands):
    code, out, err = commands(recipe, "demo", "decode.beam=2", "seed=1", "decode.beam=3", "seed=1")
    assert code == 0 and "  beam: 3\n" in out
    assert err == "note: decode.beam=3 replaces decode.beam=2\n"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--model.listener.norm=ba"], "model.listener.norm"),
        (["--train.steps", "5"], "train.steps"),
        (["decode.beam=3", "--seed=2"], "seed"),
    ],
)
def test_a_key_of_the_recipe_is_no_flag(flags, key, refused):
    assert (
        refused(train, "r.yaml", *flags)
        == f"--{key}: drop the --: keys of a recipe are {key}=VALUE"
    )


def test_audio_before_the_run(tmp_path, commands):
    (tmp_path / "my.wav").touch()
    line = commands.refused(transcribe, tmp_path / "my.wav", "conformer")
    assert line == (
        f"{tmp_path}/my.wav: a file; the run comes first, then the audio: python -m asr.transcribe "
        f"RUN {tmp_path}/my.wav"
    )


def test_a_run_is_suggested_for_its_name(refused, tmp_path, monkeypatch, commands):
    (tmp_path / "runs" / "cv").mkdir(parents=True)
    (tmp_path / "runs" / "cv" / "recipe.yaml").write_text("task: speech\n")
    monkeypatch.chdir(tmp_path)
    line = commands.refused(train, "cv")
    assert line == "cv: there is no such recipe. Did you mean runs/cv?"
