"""Vocabularies: special tokens, round trips, unknown characters, saving, and errors."""

import json
from pathlib import Path

import pytest
import sentencepiece

from asr.config.schema import TextConfig
from asr.data import splits
from asr.data.tags import MAX_TAGS
from asr.data.tokenizer import (
    BLANK,
    EOS,
    SOS,
    SPECIAL,
    UNK,
    Characters,
    SentencePieces,
    load_tokenizer,
    train_tokenizer,
)
from asr.errors import UserError

TEXTS = ["THE CAT SAT", "ON THE MAT", "THAT'S THE HAT THE CAT ATE"]


def tokenizers():
    return [
        Characters.train(TEXTS),
        SentencePieces.train(TEXTS, 30, "bpe"),
        SentencePieces.train(TEXTS, 20, "unigram"),
    ]


@pytest.fixture(params=range(3), ids=["characters", "bpe", "unigram"])
def tokenizer(request):
    return tokenizers()[request.param]


def test_text_is_unchanged_by_a_round_trip(tokenizer):
    for text in [*TEXTS, "A HAT"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(isinstance(i, int) and len(SPECIAL) <= i < tokenizer.size for i in ids)


def test_special_tokens_are_dropped_and_never_encoded(tokenizer):
    ids = tokenizer.encode("THE CAT")
    assert tokenizer.decode([SOS, *ids, EOS, BLANK, BLANK, UNK]) == "THE CAT"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    for name in SPECIAL:  # a special token's name in a text is text, not the token
        assert not {BLANK, SOS, EOS} & set(tokenizer.encode(name))


def test_unknown_characters_become_unk_and_are_listed(tokenizer):
    assert UNK in tokenizer.encode("CAT?")
    assert tokenizer.unknown("THE CAT") == ""
    assert tokenizer.unknown("zé?CAT é") == "?zé"


def test_characters_are_sorted_and_counted():
    characters = Characters.train(["BA C", "A'"])
    assert characters.symbols == [" ", "'", "A", "B", "C"]
    assert characters.size == 9
    assert characters.encode("C A") == [8, 4, 6]


TAGGED = ["<noise> THE CAT SAT", "ON [loud music] THE MAT<noise>", "(laughter) THE H[A]T", "<unk>"]


@pytest.mark.parametrize("kind", ["characters", "bpe", "unigram"])
def test_a_tag_of_the_training_texts_is_one_token(kind, tmp_path):
    """Others than characters also have the space before it in the token."""
    tokenizer = train_tokenizer(TextConfig(kind=kind, size=60), TAGGED)
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        for tag in ("<noise>", "[loud music]", "(laughter)", "<unk>"):
            (token,) = each.encode(tag)
            assert each.surfaces[token].strip() == tag and each.unknown(tag) == ""
            tokens = each.encode(f"THE {tag} CAT")
            assert tokens.count(token) == 1 and each.decode(tokens) == f"THE {tag} CAT"
        assert each.decode(each.encode(TAGGED[1])) == TAGGED[1]
        assert len(each.encode("H[A]T")) > 3 and each.unknown("H[A]T") == ""  # no tag
        assert UNK in each.encode("[new]") and each.unknown("<noise> Q[new]") == "Qenw"
        assert len(each.encode("<noise><noise>")) == 2


@pytest.mark.parametrize("more", [[], ["<noise> h#"]], ids=["plain", "tag"])
def test_each_word_is_a_token(more, tmp_path):
    texts = ["h# sh iy hv ae dcl", "h# d ow sh", *more]
    tokenizer = train_tokenizer(TextConfig(kind="word", size=100), texts)
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert each.kind == "word"
        assert each.size - len(SPECIAL) == len(set(" ".join(texts).split()))
        for text in texts:
            tokens = each.encode(text)
            assert [each.surfaces[token] for token in tokens] == [f" {w}" for w in text.split()]
            assert each.decode(tokens) == text
        assert each.encode("sh zz iy")[1] == UNK and each.unknown("sh zz iy") == "z"
    line = "x.tsv: 25 % of its words are not in the vocabulary: zz"
    assert splits.check_vocabulary_coverage(["h# sh", "zz h#"], tokenizer, Path("x.tsv")) == line
    few = train_tokenizer(TextConfig(kind="word", size=8), texts)  # the most frequent
    assert few.size == 8 and UNK not in few.encode("h# sh") and UNK in few.encode(texts[0])


def test_of_many_tags_the_most_frequent_are_tokens():
    texts = [f"<{n}>" * (n + 1) for n in range(MAX_TAGS + 7)]
    symbols = Characters.train(texts).symbols
    assert {s for s in symbols if len(s) > 1} == {f"<{n}>" for n in range(7, MAX_TAGS + 7)}
    assert {s for s in symbols if len(s) == 1} == set("<0123456>")


def test_a_small_text_gives_fewer_pieces_than_asked():
    assert len(SPECIAL) < SentencePieces.train(["ABC ABD"], 500, "bpe").size < 500


def test_special_tokens_have_the_same_ids_in_the_library(tmp_path):
    SentencePieces.train(TEXTS, 30, "bpe").save(tmp_path)
    judge = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert (judge.pad_id(), judge.unk_id(), judge.bos_id(), judge.eos_id()) == (0, 1, 2, 3)
    assert judge.encode(TEXTS[0]) == load_tokenizer(tmp_path).encode(TEXTS[0])


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint() == tokenizer.fingerprint() and loaded.size == tokenizer.size
    assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_training_is_repeatable_and_fingerprints_differ():
    first, second = tokenizers(), tokenizers()
    assert [t.fingerprint() for t in first] == [t.fingerprint() for t in second]
    prints = {t.fingerprint() for t in [*first, Characters.train(["THE"])]}
    assert len(prints) == 4


def test_a_text_that_gives_no_vocabulary_is_refused():
    for train in (Characters.train, lambda t: SentencePieces.train(t, 50, "bpe")):
        with pytest.raises(UserError, match="every text is empty"):
            train([])
        with pytest.raises(UserError, match="every text is empty"):
            train(["", ""])
    with pytest.raises(UserError, match=r"^text.size = 5: too few pieces.*needs 8 or more"):
        SentencePieces.train(["ABC"], 5, "bpe")


@pytest.mark.parametrize(
    "description",
    [
        "",
        '{"kind": "characters", "symbols": ["B", "A"]}',
        '{"kind": "characters", "symbols": ["A", "A"]}',
        '{"kind": "sentencepiece"}',
        '{"kind": "words", "symbols": ["A"]}',
    ],
)
@pytest.mark.parametrize("model", [None, b"", b"no model at all"])
def test_a_broken_folder_is_refused_in_one_line(tmp_path, description, model):
    (tmp_path / "tokenizer.json").write_text(description)
    if model is not None:
        (tmp_path / "tokenizer.model").write_bytes(model)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_of_other_special_tokens_is_refused(tmp_path):
    prefix = tmp_path / "other"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(prefix),
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "sentencepiece"}))
    prefix.with_suffix(".model").rename(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match="first pieces"):
        load_tokenizer(tmp_path)


def test_unknown_letters_are_reported_and_many_are_refused(tokenizer):
    """The vocabularies contain capitals only."""

    def check(*texts):
        return splits.check_vocabulary_coverage(texts, tokenizer, Path("x.tsv"))

    assert check("THE HAT", "", "A CAT") is None
    line = "x.tsv: 30 % of its letters are not in the vocabulary: \u00dc \u00e9"
    assert check("TH\u00dc H\u00dcT", "CAT\u00e9") == line  # 3 of 10
    with pytest.raises(UserError, match=r"x\.tsv: 66.7 % of its letters .*: a e h t; its case"):
        check("The Hat")
    with pytest.raises(UserError, match=r"train.new_vocabulary=true"):
        check("今天")
