"""N-grams in a search: a sentence has the score of its text, whatever its tokens are."""

import math

import pytest
import torch

from asr.data.tokenizer import EOS, SOS, UNK, Characters, SentencePieces
from asr.decoding.fusion import SPACE, NgramScorer, load_ngrams
from asr.errors import UserError
from asr.nn.attention import Memory

BIGRAMS = {  # log10 P(second | first), and back-off to BACK
    ("<s>", "ONE"): -0.2,
    ("ONE", "TWO"): -0.3,
    ("TWO", "</s>"): -0.1,
    ("ONE", "ONE"): -1.5,
}
UNIGRAMS = {"ONE": -0.7, "TWO": -0.9, "</s>": -1.1}
UNKNOWN, BACK = -3.0, -0.25
TEXTS = ["ONE TWO", "TWO ONE", "ONE ONE ONE", "TOWN", "", "ONE"]


class State:
    word = ""


class Bigrams:
    """The interface of kenlm.Model over a table."""

    def BeginSentenceWrite(self, state):
        state.word = "<s>"

    def BaseScore(self, state, word, out):
        out.word = word
        backed = BACK + UNIGRAMS.get(word, UNKNOWN)
        return BIGRAMS.get((state.word, word), backed)


def judge(words):
    """Natural log-prob of a sentence and its end, in a plain loop."""
    total, before = 0.0, "<s>"
    for word in [*words, "</s>"]:
        total += BIGRAMS.get((before, word), BACK + UNIGRAMS.get(word, UNKNOWN))
        before = word
    return total * math.log(10)


def memory(size):
    return Memory(torch.zeros(size, 2, 3), torch.ones(size, 2, dtype=torch.bool))


def walked(scorer, ids):
    """The sum of a scorer's steps along a sentence, its end included."""
    state, total, last = scorer.start(memory(1)), 0.0, SOS
    for token in [*ids, EOS]:
        scores, state = scorer.step(state, torch.tensor([[last]]))
        assert (scores <= 0).all()  # the exact stop of the beam search requires it
        total, last = total + float(scores[0, 0, token]), token
    return total


VOCABULARIES = {
    "characters": lambda: Characters.train(TEXTS),
    "subwords": lambda: SentencePieces.train(TEXTS * 3, 17, "bpe"),
    "words": lambda: SentencePieces.train(TEXTS[:3], 17, "word"),  # without TOWN
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_words_score_the_same_as_their_text(vocabulary, text):
    tokenizer = VOCABULARIES[vocabulary]()
    scorer = NgramScorer(Bigrams(), State, tokenizer.surfaces, "word")
    assert walked(scorer, tokenizer.encode(text)) == pytest.approx(judge(text.split()), abs=1e-5)


def test_spaces_without_a_word_score_nothing():
    tokenizer = Characters.train(TEXTS)
    scorer = NgramScorer(Bigrams(), State, tokenizer.surfaces, "word")
    ids = tokenizer.encode(" ONE   TWO ")
    assert walked(scorer, ids) == pytest.approx(judge(["ONE", "TWO"]), abs=1e-5)


def test_tokens_score_as_words_of_their_own(monkeypatch):
    monkeypatch.setitem(BIGRAMS, ("E", SPACE), -0.4)
    monkeypatch.setitem(UNIGRAMS, "O", -0.6)
    tokenizer = Characters.train(TEXTS)
    scorer = NgramScorer(Bigrams(), State, tokenizer.surfaces, "token")
    expected = judge(list("ONE" + SPACE + "TWO"))
    assert walked(scorer, tokenizer.encode("ONE TWO")) == pytest.approx(expected, abs=1e-5)


def test_an_unknown_token_scores_as_that_of_the_file():
    tokenizer = Characters.train(TEXTS)
    scorer = NgramScorer(Bigrams(), State, tokenizer.surfaces, "token")
    o, n = tokenizer.encode("ON")
    assert walked(scorer, [o, UNK, n]) == pytest.approx(judge(["O", "<unk>", "N"]), abs=1e-5)


@pytest.mark.parametrize("unit", ["word", "token"])
def test_selected_hypotheses_continue_their_own_history(unit):
    tokenizer = Characters.train(TEXTS)
    scorer = NgramScorer(Bigrams(), State, tokenizer.surfaces, unit)
    ids = tokenizer.encode("ONE T")
    state = scorer.start(memory(2))
    state = scorer.select(state, torch.tensor([[0, 0], [1, 1]]))
    _, state = scorer.step(state, torch.full((2, 2), SOS))
    _, state = scorer.step(state, torch.tensor([[ids[4], ids[1]], [ids[2], ids[0]]]))
    state = scorer.select(state, torch.tensor([[3, 2, 3]]))
    ours, _ = scorer.step(state, torch.tensor([[ids[1], ids[0], ids[4]]]))
    for row, places in enumerate([(0, 1), (2, 0), (0, 4)]):
        alone = scorer.start(memory(1))
        for token in [SOS, *(ids[place] for place in places)]:
            expected, alone = scorer.step(alone, torch.tensor([[token]]))
        assert torch.equal(ours[0, row], expected[0, 0])


def arpa():
    """The bigrams above as an ARPA file."""
    words = {"<unk>": UNKNOWN, "<s>": -99.0, **UNIGRAMS}
    lines = ["\\data\\", f"ngram 1={len(words)}", f"ngram 2={len(BIGRAMS)}", "", "\\1-grams:"]
    lines += [f"{p}\t{w}" + ("" if w == "</s>" else f"\t{BACK}") for w, p in words.items()]
    lines += ["", "\\2-grams:", *(f"{p}\t{a} {b}" for (a, b), p in BIGRAMS.items()), "", "\\end\\"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("text", TEXTS)
def test_kenlm_reads_an_arpa_file(tmp_path, text):
    kenlm = pytest.importorskip("kenlm", reason="kenlm (the extra lm) is not installed")
    path = tmp_path / "two.arpa"
    path.write_text(arpa())
    tokenizer = Characters.train(TEXTS)
    actual = walked(load_ngrams(path, tokenizer.surfaces, "word"), tokenizer.encode(text))
    assert actual == pytest.approx(kenlm.Model(str(path)).score(text) * math.log(10), abs=1e-4)
    assert "W" in text or actual == pytest.approx(judge(text.split()), abs=1e-4)


def test_words_that_the_file_lacks_are_reported(tmp_path):
    pytest.importorskip("kenlm", reason="kenlm (the extra lm) is not installed")
    path, surfaces = tmp_path / "two.arpa", Characters.train(TEXTS).surfaces
    path.write_text(arpa())
    scorer = load_ngrams(path, surfaces, "word")
    assert scorer.note(["ONE TWO"] * 9 + ["TWO FOUR"]) is None
    lower = scorer.note(["one two", "ONE"])
    assert lower.startswith("66.7 % of the words are not in it, such as 'one'; check its case")
    path.write_text(arpa().replace(f"{UNKNOWN}\t<unk>\t{BACK}\n", "").replace("1=5", "1=4"))
    closed = load_ngrams(path, surfaces, "word")
    assert closed.note(["ONE TWO"]) is None
    line = closed.note(["ONE TWO"] * 9 + ["TWO FOUR"])
    assert line.startswith("5 % of the words are not in it, such as 'FOUR', and it has no <unk>")


def test_n_grams_of_another_unit_are_refused(tmp_path):
    pytest.importorskip("kenlm", reason="kenlm (the extra lm) is not installed")
    path = tmp_path / "two.arpa"
    path.write_text(arpa())
    with pytest.raises(UserError, match=r"has 0 of the vocabulary's 6 tokens.*decode.lm_unit=word"):
        load_ngrams(path, Characters.train(TEXTS).surfaces, "token")


def test_n_grams_of_words_need_spaces(tmp_path):
    pytest.importorskip("kenlm", reason="kenlm (the extra lm) is not installed")
    path = tmp_path / "two.arpa"
    path.write_text(arpa())
    with pytest.raises(UserError, match="no space ends a word after tokens such as '今'"):
        load_ngrams(path, Characters.train(["今天"]).surfaces, "word")


@pytest.mark.parametrize("text", ["nothing of the kind\n", arpa().replace("\t", " ")])
def test_a_file_that_kenlm_cannot_read_is_one_line(text, tmp_path):
    pytest.importorskip("kenlm", reason="kenlm (the extra lm) is not installed")
    (tmp_path / "bad.arpa").write_text(text)
    with pytest.raises(UserError, match="kenlm cannot read it") as error:
        load_ngrams(tmp_path / "bad.arpa", [], "word")
    assert ".hh" not in str(error.value)
    assert "\n" not in str(error.value)
