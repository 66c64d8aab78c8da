"""User errors: one clear line, exit code 2, no traceback, and nothing half-written."""

import io
import re
import shutil
from pathlib import Path

import pytest

from asr import errors, evaluate, train, transcribe
from asr.config.loader import flat, read_recipe
from asr.training.checkpoint import list_checkpoints, read_training
from asr.training.resume import is_harmless
from asr.training.trainer import train as train_recipe


@pytest.fixture
def manifest(tiny, tmp_path):
    """Write a manifest and links to the tiny corpus's audio: rows (id, audio, seconds, text)."""
    for path in tiny.parent.glob("*.flac"):
        (tmp_path / path.name).symlink_to(path)

    def write(rows, header="id\tspeaker\taudio\tseconds\ttext"):
        path = tmp_path / "own.tsv"
        lines = [header, *("\t".join([r[0], "s", *map(str, r[1:])]) for r in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def no_run(tmp_path):
    """A run folder that must not be created."""
    path = tmp_path / "run"
    yield path
    assert not path.exists(), "something was half-written"


def rows(count, text="ab c", audio="train-{}.flac"):
    return [(f"u{n}", audio.format(n), 0.36, text) for n in range(count)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.epoch=3",
            "command line: train.epoch is not a recipe key. Did you mean train.epochs?",
        ),
        ("features.noise=[20, 10]", r"features: noise \(20.0, 10.0\) must be \(lowest"),
        ("features.mel_bins=500", "features: .*500 mel bins at 8000 Hz"),
        (
            "features={kind: mfcc, mel_bins: 11, ceps: 12}",
            "features: num_ceps 12 must lie in 1 to num_mel_bins",
        ),
        ("model={kind: transformer, d_model: 9, heads: 2}", "model.heads = 2: must divide"),
        (
            "train.init=/nowhere",
            "train.init = /nowhere: there is no such run. Make it with: python -m asr.train RECIPE",
        ),
        ("train.device=cuda:99", "train.device = cuda:99: this machine has no such GPU"),
        ("model.listener.backend=cuda", "cuda"),
    ],
)
def test_recipe_errors_stop_train(override, message, tiny, no_run, commands):
    assert re.search(message, commands.refused(train, tiny, "--run", no_run, override))


def test_a_locale_that_lacks_a_character_is_accepted(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "latin-1", write_through=True))
    with pytest.raises(SystemExit, match="0"):
        errors.run_command(lambda: print("1 \u2013 2, caf\xe9"))
    assert raw.getvalue() == b"1 \\u2013 2, caf\xe9\n"


def test_decoding_out_of_memory_is_reported(tiny, tiny_run, monkeypatch, commands):
    def too_much(*arguments):
        raise MemoryError

    monkeypatch.setattr("asr.models.las.LAS.encode", too_much)
    line = commands.refused(evaluate, tiny_run, "--split", "test")
    assert "out of memory; lower decode." in line


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_missing_manifest_names_the_command_that_makes_it(split, tiny, no_run, commands):
    line = commands.refused(train, tiny, "--run", no_run, f"data.{split}=/x/dev.tsv")
    assert line.startswith(f"data.{split}: /x/dev.tsv is not there. Make it with: python -m asr.pr")
    more = ["data.corpus=librispeech", f"data.{split}=/x/dev-clean.tsv"]
    line = commands.refused(train, tiny, "--run", no_run, *more)
    assert "python -m asr.prepare librispeech --to /x --subsets dev-clean" in line
    more = ["data.corpus=spoken-numbers", f"data.{split}=/x/valid.tsv"]
    line = commands.refused(train, tiny, "--run", no_run, *more)
    assert line.endswith("spoken-numbers --to /x, which has train.tsv, valid.tsv and test.tsv")
    more[1] = f"data.{split}=/x/mine.tsv"  # with a recipe for the spoken numbers
    line = commands.refused(train, tiny, "--run", no_run, *more)
    assert line.endswith(
        "asr.prepare auto SOURCE --to /x, where SOURCE is your mine.tsv or a corpus in another form"
    )


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_folder_instead_of_a_manifest(split, tiny, no_run, commands, tmp_path):
    line = commands.refused(train, tiny, "--run", no_run, f"data.{split}={tmp_path}")
    assert line == f"data.{split}: {tmp_path} is a folder; name a manifest (.tsv)"
    line = commands.refused(train, tiny, "--run", no_run, f"data.{split}={tiny.parent}")
    assert "is a folder; name one of its tables (" in line and "train.tsv" in line


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_manifest_that_is_not_set(split, tiny, no_run, commands):
    line = commands.refused(train, tiny, "--run", no_run, f"data.{split}=null")
    assert line.startswith(f"data.{split} is not set: name a manifest")


def test_training_text_that_is_empty(tiny, no_run, commands, manifest):
    path = manifest(rows(3, text=""))
    line = commands.refused(train, tiny, "--run", no_run, f"data.train={path}")
    assert "data.train: every text is empty" in line


def test_too_few_subwords(tiny, no_run, commands, manifest):
    path = manifest(rows(3, text="abcdefg hij"))
    more = ["text={kind: bpe, size: 9}", f"data.train={path}"]
    assert "text.size = 9: too few pieces" in commands.refused(train, tiny, "--run", no_run, *more)


def test_text_with_no_known_characters(tiny, no_run, tiny_run, commands, manifest):
    path = manifest(rows(3, text="AB C"))
    line = commands.refused(train, tiny, "--run", no_run, f"data.valid={path}")
    assert line.startswith(f"{path}: 100 % of its letters are not in the vocabulary")
    line = commands.refused(evaluate, tiny_run, "--split", path, "--out", no_run)
    assert line.startswith(f"{path}: 100 % of its letters are not in the vocabulary")


def test_utterances_outside_the_limits(tiny, no_run, commands):
    line = commands.refused(train, tiny, "--run", no_run, "data.max_seconds=0.05")
    assert "no utterance between data.min_seconds = 0.1 and data.max_seconds = 0.05" in line


CONVOLUTION = ["model.listener.pyramid=[]", "model.listener.convolution=4"]
TRANSFORMER = ["model={kind: transformer, d_model: 6, heads: 2, feed_forward: 7}"]


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ([], "reduce fewer frames (model.listener.pyramid) or use text.kind=bpe"),
        (CONVOLUTION, "reduce fewer frames (model.listener.convolution) or use text.kind=bpe"),
        (["model.listener.pyramid=[]"], "have this. Otherwise use text.kind=bpe"),
        (["text={kind: bpe, size: 12}"], "(model.listener.pyramid) or raise text.size"),
        (TRANSFORMER, "reduce fewer frames (model.reduction) or use text.kind=bpe"),
    ],
)
def test_utterances_with_more_labels_than_frames(more, remedy, tiny, no_run, commands, manifest):
    path = manifest(rows(4, text="abcacbcabacbbacbcaabccba" * 3))
    line = commands.refused(train, tiny, "--run", no_run, f"data.train={path}", *more)
    assert "4 of 4 utterances have more CTC labels than frames: u0 u1 u2 u3" in line
    assert line.endswith(remedy)


def test_an_untrained_decoder_neither_ranks_nor_decodes(tiny, no_run, commands):
    """model.ctc_weight=1 trains CTC alone; each refusal names a remedy, and both are enough."""
    alone = (train, tiny, "model.ctc_weight=1", "train.steps=1", "--run")
    line = commands.refused(*alone, no_run)
    assert "checkpoints cannot be ranked by its nll" in line
    rank, decode = "train.early_stopping.metric=ctc", "decode.search=ctc"
    assert f"set {rank}, and" in line
    line = commands.refused(*alone, no_run, rank)
    assert line.endswith(f"so transcripts cannot be its: set {decode}")
    assert not no_run.exists()
    alarm = "train.alarm.steps=1"
    code, out, err = commands(*alone, no_run.parent / "trained", rank, decode, alarm)
    assert code == 0, err
    assert "attention is not diagonal" not in out  # it has no reason to be


@pytest.mark.parametrize("mvn", ["utterance", "global"])
@pytest.mark.parametrize("workers", [0, 1])
def test_missing_audio(workers, mvn, tiny, commands, manifest, tmp_path):
    path = manifest(rows(5, audio="gone-{}.flac"))
    more = [f"data.train={path}", f"data.workers={workers}", f"features.mvn={mvn}"]
    line = commands.refused(train, tiny, "--run", tmp_path / "run", *more)
    assert "cannot be read" in line or "could be read" in line
    assert f"python -m asr.prepare table {path} --to FOLDER" in line
    assert not list_checkpoints(tmp_path / "run")


def test_missing_validation_audio(tiny, commands, manifest, tmp_path):
    path = manifest(rows(3, audio="gone-{}.flac"))
    line = commands.refused(train, tiny, "--run", tmp_path / "run", f"data.valid={path}")
    assert line.startswith(f"{path}: none of its 3 utterances could be read")


def test_missing_validation_audio_is_reported_once(tiny, commands, manifest, tmp_path):
    """Including utterances that validation does not decode."""
    path = manifest([*rows(2), *((f"bad{n}", f"gone{n}.flac", 0.4, "ab") for n in range(6))])
    more = [f"data.valid={path}", "train.steps=1", "train.wer_utterances=1"]
    code, out, _ = commands(train, tiny, "--run", tmp_path / "run", *more)
    ((_, line),) = [line.split("  ", 1) for line in out.splitlines() if "skipped" in line]
    assert code == 0 and line == (
        "validation: 6 of 8 utterances skipped: bad0 bad1 bad2 bad3 bad4 ... "
        f"({path.parent / 'gone0.flac'}: no such file)"
    )
    assert line in (tmp_path / "run" / "train.log").read_text()


def test_a_run_is_not_overwritten(tiny, tiny_run, commands):
    before = {path: path.stat().st_mtime_ns for path in tiny_run.rglob("*")}
    line = commands.refused(train, tiny, "--run", tiny_run)
    assert line == f"{tiny_run}: already holds a run; add --resume, or choose another --run"
    assert before == {path: path.stat().st_mtime_ns for path in tiny_run.rglob("*")}


class TestResumingWithAnotherRecipe:
    def test_changes_are_listed_and_no_file_is_written(self, tiny, run, commands):
        before = (run / "recipe.yaml").read_text()
        more = ("model.listener.hidden=6", "train.clip=2", "train.epochs=9")
        line = commands.refused(train, tiny, "--run", run, "--resume", *more)
        assert line == (
            f"{run}: its recipe was another: model.listener.hidden 5 -> 6; train.clip 5.0 -> 2.0. "
            "Restore the old values, choose another --run, or resume nevertheless with "
            "--resume --force"
        )
        assert (run / "recipe.yaml").read_text() == before

    def test_harmless_changes_are_reported_and_kept(self, tiny, tiny_run, run, commands):
        more = ("train.epochs=3", "data.workers=1", "decode.beam=2", "train.log_every=5")
        code, out, _ = commands(train, tiny, "--run", run, "--resume", *more)
        assert code == 0 and "changed in the recipe: train.epochs 2 -> 3" in out
        assert list_checkpoints(run)[-1].step > list_checkpoints(tiny_run)[-1].step
        assert "epochs: 3" in (run / "recipe.yaml").read_text()

    @pytest.mark.parametrize("recipe", ["demo.yaml", "mnist_rows.yaml", "draw.yaml"])
    def test_a_machine_without_a_compiler_may_resume(self, recipe):
        """The keys of kernels differ between tasks."""
        keys = flat(read_recipe(Path(__file__).parents[1] / "recipes" / recipe))
        moved = {key for key in keys if key.endswith("backend")}
        assert moved and all(map(is_harmless, moved))
        assert not any(map(is_harmless, ("train.clip", "model.hidden", "data.train")))

    def test_force_resumes(self, tiny, run, commands):
        arguments = (tiny, "--run", run, "--resume", "--force")
        more = ("train.clip=2", "train.epochs=3", "train.optimizer.weight_decay=0.1")
        code, out, _ = commands(train, *arguments, *more)
        assert code == 0 and "changed in the recipe: train.clip 5.0 -> 2.0" in out
        state = read_training(list_checkpoints(run)[-1])
        assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.1, 0.0]
        before = (run / "recipe.yaml").read_bytes()
        assert "weights of another model" in commands.refused(
            train, *arguments, "train.epochs=3", "model.listener.hidden=6"
        )
        assert (run / "recipe.yaml").read_bytes() == before  # recorded with the weights


class TestResumingOverOtherData:
    """The content of the files changes, their names do not."""

    @pytest.fixture
    def copied(self, tiny, tiny_run, tmp_path):
        """-> (a copy of the corpus, the command line that resumes a run trained on it)."""
        corpus = tmp_path / "corpus"
        shutil.copytree(tiny.parent, corpus)
        recipe = corpus / "own.yaml"
        recipe.write_text(tiny.read_text().replace(str(tiny.parent), str(corpus)))
        run = tmp_path / "run"
        assert train_recipe(read_recipe(recipe, ["train.steps=2"]), run) == 0
        return corpus, (recipe, "--run", run, "--resume", "train.steps=3")

    def test_a_removed_row_of_a_manifest_is_detected(self, copied, commands):
        (corpus, line), run = copied, copied[1][2]
        rows = (corpus / "train.tsv").read_text().splitlines()
        (corpus / "train.tsv").write_text("\n".join(rows[:-1]) + "\n")
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        count, seconds = len(rows) - 1, sum(float(row.split("\t")[3]) for row in rows[1:])
        lost = float(rows[-1].split("\t")[3])
        assert commands.refused(train, *line) == (
            f"{run}: its data or objective have changed since: data.train: {count} utterances -> "
            f"{count - 1}, {seconds:.1f} seconds -> {seconds - lost:.1f}. Restore the old ones, "
            "choose another --run, or resume nevertheless with --resume --force"
        )
        after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert {p: t for p, t in before.items() if p != run} == {
            p: t for p, t in after.items() if p != run
        }

    @pytest.mark.parametrize("role", ["train", "valid"])
    def test_one_changed_letter_is_detected(self, role, copied, commands):
        corpus, line = copied
        manifest = corpus / f"{role}.tsv"
        manifest.write_text(manifest.read_text().replace("cb", "ca"))
        message = commands.refused(train, *line)
        assert f"changed since: data.{role}: the same size, but another content. Restore" in message

    def test_moved_files_are_no_change_but_other_content_is(self, copied, commands):
        (corpus, line), moved = copied, copied[0].with_name("moved")
        corpus.rename(moved)
        now = [f"data.{role}={moved / role}.tsv" for role in ("train", "valid")]
        recipe, *rest = line
        manifest = moved / "train.tsv"
        kept = manifest.read_text()
        manifest.write_text(kept.replace("cb", "ca"))
        message = commands.refused(train, moved / recipe.name, *rest, *now)
        assert "changed since: data.train: the same size, but another content" in message
        manifest.write_text(kept)
        code, out, _ = commands(train, moved / recipe.name, *rest, *now)
        assert code == 0 and f"data.valid {corpus / 'valid'}.tsv -> {moved / 'valid'}.tsv" in out

    def test_force_resumes_and_is_needed_once(self, copied, commands):
        corpus, line = copied
        manifest = corpus / "train.tsv"
        manifest.write_text(manifest.read_text().replace("cb", "ca"))
        code, out, _ = commands(train, *line, "--force")
        assert code == 0 and "changed since: data.train: the same size, but another" in out
        longer = [word.replace("train.steps=3", "train.steps=4") for word in map(str, line)]
        code, out, _ = commands(train, *longer)
        assert code == 0 and "changed since" not in out

    def test_rewritten_identical_content_is_no_change(self, copied, commands):
        corpus, line = copied
        manifest = corpus / "train.tsv"
        manifest.write_bytes(manifest.read_bytes())
        code, out, _ = commands(train, *line)
        assert code == 0 and "changed since" not in out


def test_a_run_folder_in_the_way(tiny, commands, tmp_path):
    (tmp_path / "file").write_text("mine")
    line = commands.refused(train, tiny, "--run", tmp_path / "file")
    assert str(tmp_path / "file") in line and (tmp_path / "file").read_text() == "mine"


class TestNoRun:
    @pytest.mark.parametrize("command", [evaluate, transcribe])
    def test_a_folder_that_is_no_run(self, command, tiny, commands, tmp_path):
        last = ["--split", "test"] if command is evaluate else [tiny.parent / "test-0.flac"]
        for folder in (tmp_path, tiny):
            line = commands.refused(command, folder, *last)
            assert line == f"{folder}: no recipe.yaml in it, so it is no run folder"
        line = commands.refused(command, tmp_path / "demo", *last)
        assert line.startswith(f"{tmp_path / 'demo'}: there is no such run. Make it with: python")
        assert line.endswith(f"asr.train demo --run {tmp_path / 'demo'}")

    @pytest.mark.parametrize(
        ("lost", "message"),
        [
            ("checkpoints", "no checkpoint in it; train it first"),
            ("tokenizer.json", "no tokenizer.json that can be read; is this a run folder?"),
        ],
    )
    def test_an_incomplete_run(self, lost, message, tiny, tiny_run, commands, tmp_path):
        run = tmp_path / "copy"
        shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns(lost))
        assert message in commands.refused(transcribe, run, tiny.parent / "test-0.flac")
        assert message in commands.refused(evaluate, run, "--split", "test")
        assert not (run / "evaluate").exists()

    def test_a_checkpoint_of_another_vocabulary(self, tiny, run, commands):
        text = (run / "tokenizer.json").read_text()
        (run / "tokenizer.json").write_text(text.replace('"c"', '"d"'))
        for module, *last in (
            (transcribe, tiny.parent / "test-0.flac"),
            (evaluate, "--split", "test"),
        ):
            line = commands.refused(module, run, *last)
            assert "model.safetensors: of another vocabulary" in line
        assert "of another vocabulary" in commands.refused(train, tiny, "--run", run, "--resume")


def test_resuming_with_only_damaged_checkpoints(tiny, run, commands):
    """Training must neither continue silently with damaged weights nor restart."""
    for checkpoint in list_checkpoints(run):
        path = checkpoint.folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 64
        path.write_bytes(content)
    line = commands.refused(train, tiny, "--run", run, "--resume")
    assert line.startswith(f"{run / 'checkpoints'}: all of its checkpoints are damaged")
    assert "damaged, its checksum differs" in commands.refused(
        transcribe, run, tiny.parent / "test-0.flac"
    )


def test_audio_outside_the_manifest_s_folder_needs_an_option(tiny, commands, tmp_path):
    text = (tiny.parent / "train.tsv").read_text()
    path = tmp_path / "own.tsv"
    path.write_text(re.sub(r"(train-\d+\.flac)", rf"{tiny.parent}/\1", text))
    more = ("--run", tmp_path / "run", f"data.train={path}", "train.steps=1")
    line = commands.refused(train, tiny, *more)
    assert re.search(
        r"own\.tsv:2: .* data\.allow_outside_audio=true reads it .* audio .* is outside", line
    )
    assert not (tmp_path / "run").exists()
    assert commands(train, tiny, *more, "data.allow_outside_audio=true")[0] == 0


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            "tset",
            "--split tset: the run has train, valid, test; name one of them, or set "
            "data.test={tset: MANIFEST.tsv}",
        ),
        ("none.tsv", "none.tsv: cannot be read: No such file or directory"),
    ],
)
def test_an_unknown_split(split, message, tiny_run, commands):
    assert commands.refused(evaluate, tiny_run, "--split", split) == message


def test_evaluating_unreadable_audio(tiny_run, commands, manifest, no_run):
    path = manifest(rows(3, audio="gone-{}.flac"))
    line = commands.refused(evaluate, tiny_run, "--split", path, "--out", no_run)
    assert line.startswith(f"{path}: none of its 3 utterances could be read: ")
