"""Text corpora: lines, sources, order and index."""

import gzip
import pickle

import numpy as np
import pytest

from asr.data import line_index
from asr.data.text_corpus import SentenceEpochs, Sentences, plan_sentences, read_lines
from asr.data.tokenizer import Characters
from asr.errors import UserError

WORDS = ["ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN"]


def packed(content):
    """Without the time, which would differ between test workers, whose test names contain it."""
    return gzip.compress(content, mtime=0)


def make_lines(count, seed=1):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 13))) for _ in range(count)]


def write(path, lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(packed(content) if path.suffix == ".gz" else content)
    return path


def manifest(path, lines):
    rows = [f"u{i}\ts\ta{i}.flac\t1.0\t{line}\n" for i, line in enumerate(lines)]
    path.write_text("id\tspeaker\taudio\tseconds\ttext\n" + "".join(rows))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.tsv"])
@pytest.mark.parametrize("large", [False, True], ids=["in memory", "mapped"])
def test_every_kind_of_text_is_read_as_lines(tmp_path, monkeypatch, capsys, name, large):
    lines = make_lines(211)
    path = (manifest if name.endswith("tsv") else write)(tmp_path / name, lines)
    monkeypatch.setattr(line_index, "SMALL", 0 if large else 1 << 20)
    read = read_lines(path)
    assert [read[i] for i in range(len(read))] == lines
    assert read.lengths.tolist() == [len(line) for line in lines]
    assert (tmp_path / f"{name}.text-index").is_file() == large
    assert ("writing" in capsys.readouterr().out) == large
    copy = pickle.loads(pickle.dumps(read))  # as for a loader's process
    assert [copy[i] for i in (210, 0)] == [lines[210], lines[0]]
    assert not large or len(pickle.dumps(read)) < 500
    read_lines(path)
    assert "writing" not in capsys.readouterr().out


def test_a_changed_text_is_indexed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(line_index, "SMALL", 0)
    path = write(tmp_path / "a.txt", ["OLD LINE"])
    assert read_lines(path)[0] == "OLD LINE"
    write(path, ["NEWER", "LINES"])
    assert [read_lines(path)[i] for i in (0, 1)] == ["NEWER", "LINES"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.text-index"]


def test_texts_of_one_name_share_no_index(tmp_path, monkeypatch, capsys):
    """Where nothing can be written beside them, their indexes are in one folder."""
    monkeypatch.setattr(line_index, "SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / name / "a.txt" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        write(path, [path.parent.name])
        path.with_name("a.txt.text-index").mkdir()  # in the way
    for _ in range(2):
        read = [read_lines(path) for path in paths]
        assert [pickle.loads(pickle.dumps(lines))[0] for lines in read] == ["one", "two"]
    assert capsys.readouterr().out.count("writing") == 2
    assert len([*tmp_path.glob("cache/*/a-*.text-index")]) == 2


def test_without_a_place_for_an_index_the_lines_are_in_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(line_index, "SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("in the way")
    (tmp_path / "a.txt.text-index").mkdir()
    lines = make_lines(31)
    read = read_lines(write(tmp_path / "a.txt", lines))
    assert list(read) == lines and read.file is None
    assert "a.txt: its index cannot be written, so each process reads it" in capsys.readouterr().out


def test_empty_texts_of_a_manifest_are_skipped(tmp_path):
    read = read_lines(manifest(tmp_path / "a.tsv", ["HI", "", "YO"]))
    assert [read[i] for i in range(len(read))] == ["HI", "YO"]
    with pytest.raises(UserError, match=r"b\.tsv: holds no sentence"):
        read_lines(manifest(tmp_path / "b.tsv", ["", ""]))


def test_lines_are_cleaned(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffÉIN  WORT \r\n\r\n \t\n\ufeffZWEI\tWÖRTER".encode())
    read = read_lines(path)
    assert [read[i] for i in range(len(read))] == ["ÉIN WORT", "ZWEI WÖRTER"]
    assert read.lengths.tolist() == [9, 12]  # bytes


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ok\n\xff\xfe\n", r"a\.txt:2: not UTF-8 text"),
        ("a.txt", b"\n \n", r"a\.txt: holds no sentence; one a line is expected"),
        ("a.txt", b"A" * (line_index.LONGEST + 1), r"a\.txt:1: longer than 1048576 bytes"),
        ("a.txt.gz", b"plain text", r"a\.txt\.gz: cannot be read: Not a gzipped file"),
        ("a.txt.gz", packed(b"ONE TWO\n" * 99)[:-9], r"a\.txt\.gz: cannot be read: "),
        ("a.txt", None, r"a\.txt: cannot be read: No such file"),
        ("a.tsv", b"id\tspeaker\nx\ty\n", r"a\.tsv: no column text"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line(
    tmp_path, monkeypatch, name, content, message, large
):
    monkeypatch.setattr(line_index, "SMALL", 0 if large else 1 << 20)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_lines(tmp_path / name)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob(".*"))


def test_several_texts_are_concatenated(tmp_path):
    parts = [make_lines(7, 2), make_lines(1, 3), make_lines(5, 4)]
    texts = [read_lines(write(tmp_path / f"{i}.txt", part)) for i, part in enumerate(parts)]
    full = Sentences(texts)
    lines = [line for part in parts for line in part]
    assert [full.line(i) for i in range(len(full))] == lines
    assert full.lengths.tolist() == [len(line) for line in lines]
    assert full.sample(3) == [lines[0], lines[6], lines[12]]
    assert full.sample(99) == lines


def test_letters_of_scripts_without_spaces_are_words(tmp_path):
    lines = ["今天很好", "我 写code", "a b"]
    corpus = Sentences([read_lines(write(tmp_path / "a.txt", lines))], Characters.train(lines))
    assert corpus[[0, 1, 2]].words.tolist() == [4, 3, 2]


def test_a_batch_holds_the_tokens_of_its_lines(tmp_path):
    lines = make_lines(13)
    tokenizer = Characters.train(lines)
    batch = Sentences([read_lines(write(tmp_path / "a.txt", lines))], tokenizer)[[5, 11, 2]]
    assert batch.ids == ("5", "11", "2")
    assert batch.words.tolist() == [len(lines[i].split()) for i in (5, 11, 2)]
    for row, index in enumerate((5, 11, 2)):
        length = int(batch.token_lengths[row])
        assert tokenizer.decode(batch.tokens[row, :length].tolist()) == lines[index]
        assert not batch.tokens[row, length:].any()


LENGTHS = np.random.default_rng(3).integers(1, 150, size=1009)


def test_every_line_appears_once_an_epoch_unless_too_long():
    for pool in (97, 1 << 20):
        plan = plan_sentences(LENGTHS, 700, 140, seed=5, epoch=2, pool=pool)
        rows = np.concatenate(list(plan.batches))
        assert sorted(rows) == np.flatnonzero(LENGTHS <= 140).tolist()
        for batch in plan.batches:
            assert len(batch) == 1 or len(batch) * (LENGTHS[batch].max() + 1) <= 700
        real = sum((LENGTHS[batch] + 1).sum() for batch in plan.batches)
        padded = sum(len(batch) * (LENGTHS[batch].max() + 1) for batch in plan.batches)
        assert plan.padding == pytest.approx(1 - real / padded)
        assert plan.padding < (0.2 if pool == 97 else 0.05)


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        batches = plan_sentences(LENGTHS, 700, 200, seed, epoch, pool=300).batches
        return [batch.tolist() for batch in batches]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 1) != order(1, 1)
    longest = [max(LENGTHS[batch]) for batch in order(1, 1)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3  # not by length


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_resumed_by_skipping_its_first_batches(tmp_path, workers):
    lines = make_lines(101)
    texts = [read_lines(write(tmp_path / "a.txt", lines))]
    full = Sentences(texts, Characters.train(lines))
    epochs = SentenceEpochs(full, 300, 10**6, seed=1, workers=workers)
    ids = [batch.ids for batch in epochs.batches(3)]
    assert [batch.ids for batch in epochs.batches(3, skip=4)] == ids[4:]
    assert sorted(int(name) for batch in ids for name in batch) == list(range(101))
    assert not list(epochs.batches(3, skip=len(ids)))


def test_evaluation_takes_lines_of_any_length(tmp_path):
    texts = [read_lines(write(tmp_path / "a.txt", ["SHORT", "A LONGER LINE"]))]
    with pytest.raises(UserError, match=r"data.max_bytes = 3: each of the 2 lines is longer"):
        SentenceEpochs(Sentences(texts), 100, 3, seed=1, workers=0).plan(1)
