"""The command line of every command: a mistake is one line, and nothing is written."""

from pathlib import Path

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
    "line",
    [
        [transcribe, "RUN", ""],
        [transcribe, "RUN", "a.wav", ""],
        [transcribe, "RUN", "--list="],
        [evaluate, "RUN", "--split="],
        [evaluate, "RUN", "--split=test", "--against="],
        [evaluate, "RUN", "--split=test", "--by="],
        [export, "RUN", "--to=TO", "--about="],
        [sweep, "r.yaml", "--evaluate="],
        [compare, "RUN", "--curve="],
        [train, "r.yaml", ""],
        [*PREPARE, "--audio="],
        [prepare, "table", "a.tsv", "--to="],
    ],
)
def test_no_argument_is_empty(line, refused):
    assert "must not be empty" in refused(*line)


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


def test_a_flag_without_value_may_be_repeated(refused):
    line = refused(train, "none.yaml", "--resume", "--resume", "--force", "--force")
    assert line == "none.yaml: there is no such recipe."


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


@pytest.mark.parametrize("command", [train, recipe, evaluate, export, prune, transcribe])
def test_an_override_is_given_once(command, refused):
    more = ["decode.beam=2", "seed=1", "decode.beam=3"]
    line = refused(command, *COMMANDS[command], *more)
    assert line == "command line: decode.beam: given twice; remove one of them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([train, "-0"], "-0: there is no such recipe"),
        ([train, "r.yaml", "-x"], "unrecognized arguments: -x"),
        ([sweep, "r.yaml", "--jobs", "1" * 5000], "argument --jobs: '1111"),
        ([sweep, "r.yaml", "--jobs", "\u0663"], "argument --jobs: '\u0663' is not a whole number"),
        ([evaluate, "RUN", "--split=test", "--pictures=-1"], "argument --pictures: '-1' is not"),
        ([transcribe, "RUN", "--list=l", "--out=o", "--shard-files=0"], "--shard-files: '0' is"),
        ([prune, "RUN", "--to=TO", "--encoder=x"], "argument --encoder: "),
        ([prune, "RUN", "--to=TO", "--encoder=" + "1" * 5000], "argument --encoder: "),
        ([train, "\x1b[2J" * 9, "--unknown" * 99], "unrecognized arguments: --unknown"),
        ([transcribe, "RUN", "a.wav", f"--format={'x' * 9999}"], "argument --format: invalid"),
        ([train, "r.yaml", "x" * 9999], None),
    ],
)
def test_odd_values_are_one_short_line(line, message, refused):
    assert (message or "") in (shown := refused(*line)) and shown.isprintable()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("loop", "'loop': Too many levels of symbolic links"),
        ("loop/x", "'loop/x': Too many levels of symbolic links"),
        ("x" * 256, "File name too long"),
        ("\u00e9" * 128, "File name too long"),
        ("a/" * 501, "longer than 1000 bytes"),
    ],
)
def test_a_path_that_no_file_can_have(command, path, message, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert message in commands.refused(command, path, *COMMANDS[command][1:])
    assert [member.name for member in tmp_path.iterdir()] == ["loop"]
