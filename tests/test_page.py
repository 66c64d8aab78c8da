"""asr.analysis.page: untrusted text stays text, and the page's data equals the scores."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from asr.analysis.page import write_page
from asr.analysis.wer import score

PNG = "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n?").decode()
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "&lt;b&gt;&amp;",
    "{{data}}",
    "\u2028\u2029]]>",
    "\\u003c/script\\u003e",
    "javascript:alert(1)//",
]


class Parsed(HTMLParser):
    """Elements with the names of their attributes, and the text of each kind of element."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.values, self.texts, self.open = [], [], {}, []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.values += attrs
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass  # void elements never end

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def data(self):
        return json.loads(self.texts["script"][0])


def test_audio_is_found_where_a_link_leads_to_the_page(tmp_path):
    (tmp_path / "scratch/deep").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch/deep")
    folder, audio = tmp_path / "runs", tmp_path / "a.wav"
    write_page(folder / "page.html", score(["a"], ["a"]), audio={"1": audio})
    (row,) = Parsed(folder / "page.html").data
    address = urljoin((folder / "page.html").resolve().as_uri(), row["audio"])
    assert address == audio.as_uri()


def test_an_unknown_speaker_is_none(tmp_path):
    write_page(tmp_path / "page.html", score(["a", "b"], ["a", ""], ids="xy", speakers="xy"))
    page = Parsed(tmp_path / "page.html")
    assert [row["speaker"] for row in page.data] == ["", ""]
    assert "The manifest names none." in page.texts["p"]


def scored(words):
    """Three utterances that use the words as references, hypotheses, ids and speakers."""
    a, b, c = words
    return score(
        [f"one {a} two", b, ""],
        [f"one {b}", f"{b} {c}", c],
        ids=[a, b, c],
        speakers=[c, a, a],
    )


def page(folder, words):
    path = folder / "page.html"
    links = {word: folder / f"{number}.png" for number, word in enumerate(words)}
    actual, more = scored(words), {"facts": {words[0]: words[1]}}
    more["groups"] = {words[1]: {words[2]: actual}}
    more["flags"] = {words[0]: [words[2], words[1]], words[1]: [words[1]]}
    pictures = dict.fromkeys(links, PNG)
    write_page(path, actual, title=words[2], audio=links, pictures=pictures, **more)
    return Parsed(path)


@pytest.mark.parametrize("start", range(len(HOSTILE)))
def test_hostile_text_adds_no_element_and_no_attribute(tmp_path, start):
    # White space would split a word and so give another, equally harmless, table.
    words = [re.sub(r"\s", "/", HOSTILE[(start + step) % len(HOSTILE)]) for step in (0, 1, 2)]
    # Same alphabetical order, as the tables are sorted.
    tame = [f"w{sorted(words).index(word)}" for word in words]
    hostile, harmless = page(tmp_path, words), page(tmp_path, tame)
    assert hostile.elements == harmless.elements
    assert hostile.texts["title"] == [words[2]]
    assert words[0] in hostile.texts["dt"]
    assert words[1] in hostile.texts["dd"]
    assert {f"flag:{word}" for word in words[1:]} < {v for k, v in hostile.values if k == "value"}
    assert {words[0], words[2]} <= {v for k, v in hostile.values if k == "data-speaker"}


@pytest.mark.parametrize("word", HOSTILE)
def test_data_are_unchanged_by_the_page(tmp_path, word):
    actual = score(
        [f"a {word} b", ""], [f"a {word}x b", word], ids=[word, "2"], speakers=[word, ""]
    )
    path = tmp_path / "page.html"
    write_page(path, actual)
    first, second = Parsed(path).data
    assert (first["id"], first["speaker"], second["speaker"]) == (word, word, "")
    for row, utterance in zip((first, second), actual.utterances, strict=True):
        for side, text in ((1, utterance.reference), (2, utterance.hypothesis)):
            assert " ".join(filter(None, (edit[side] for edit in row["edits"]))) == text
        marks = "".join(edit[0] for edit in row["edits"])
        assert [marks.count(mark) for mark in "SDI"] == [row["S"], row["D"], row["I"]]
        assert row["words"] == utterance.words
    raw = path.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    assert not set(raw) & set("<>&\u2028\u2029")


def test_correct_words_stand_together(tmp_path):
    write_page(tmp_path / "p.html", score(["a b c d"], ["a b x c d"]))
    edits = Parsed(tmp_path / "p.html").data[0]["edits"]
    assert edits == [["C", "a b", "a b"], ["I", "", "x"], ["C", "c d", "c d"]]
    write_page(tmp_path / "p.html", score(["今天 ok 气"], ["今天 ok 汽"]))
    edits = Parsed(tmp_path / "p.html").data[0]["edits"]
    assert edits == [["C", "今天ok", "今天ok"], ["S", "气", "汽"]]


def test_only_the_page_own_script_and_style_may_run(tmp_path):
    write_page(tmp_path / "p.html", score(["a"], ["b"]))
    parsed = Parsed(tmp_path / "p.html")
    policy = next(value for _, value in parsed.values if value and value.startswith("default-src"))
    allowed = dict(part.split(maxsplit=1) for part in policy.split("; "))
    for kind, text in (("script", parsed.texts["script"][1]), ("style", parsed.texts["style"][0])):
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert allowed[f"{kind}-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == "'none'"
    assert "http" not in policy
    assert not re.search("innerHTML|outerHTML|insertAdjacent|write|eval", parsed.texts["script"][1])
    assert not {"link", "iframe", "img", "base", "object"} & {tag for tag, _ in parsed.elements}
    assert not {"src", "href"} & {name for name, _ in parsed.values}


@pytest.mark.parametrize(
    "name", ["a b.flac", "50%.flac", "a#b?c.flac", "javascript:alert(1)", "é語.flac", "x/../y"]
)
def test_links_are_relative_and_point_to_the_file(tmp_path, name):
    folder = tmp_path / "evaluate" / "test"
    file = tmp_path / "audio" / name
    write_page(folder / "p.html", score(["a"], ["b"]), audio={"1": file})
    link = Parsed(folder / "p.html").data[0]["audio"]
    parts = urlsplit(link)
    assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("", "", "", "")
    assert link.startswith("../../audio/")
    assert (folder / unquote(parts.path)).resolve() == file.resolve()


def test_a_file_beside_the_page_cannot_be_named_like_a_scheme(tmp_path):
    file = tmp_path / "javascript:alert(1)"
    write_page(tmp_path / "p.html", score(["a"], ["b"]), audio={"1": file})
    assert Parsed(tmp_path / "p.html").data[0]["audio"] == "javascript%3Aalert%281%29"


def test_an_utterance_needs_no_picture(tmp_path):
    actual = score(["a", "b"], ["a", "b"])
    write_page(tmp_path / "p.html", actual, pictures={"1": PNG})
    first, second = Parsed(tmp_path / "p.html").data
    assert first["picture"] == PNG and "picture" not in second and "audio" not in first


def test_figures_and_tables_are_on_the_page(tmp_path):
    actual = score(["a b c", "a"], ["a x", "a"], speakers=["ann", ""])
    write_page(tmp_path / "p.html", actual, title="demo & test")
    parsed = Parsed(tmp_path / "p.html")
    assert parsed.texts["h1"] == ["demo & test"]
    assert parsed.texts["dd"][:1] == ["50.00 %"]
    assert parsed.texts["small"][0] == "0.00 % – 66.67 %"
    assert parsed.texts["button"] == ["ann", "(no name)", "b → x", "c"]
    assert "2 utterances, 4 words, 6 characters. Ranges are 95 %" in parsed.texts["p"][0]


def test_groups_have_a_table_of_their_own(tmp_path):
    actual = score(["a b c", "a"], ["a x", "a"])
    write_page(tmp_path / "p.html", actual, groups={"source": {"web": actual}})
    parsed = Parsed(tmp_path / "p.html")
    assert parsed.texts["summary"][0] == "By source"
    assert parsed.texts["td"][:7] == ["web", "2", "4", "1", "1", "0", "50.00 %"]


def test_a_perfect_single_utterance_has_no_interval_and_no_confusions(tmp_path):
    write_page(tmp_path / "p.html", score([""], [""]))
    parsed = Parsed(tmp_path / "p.html")
    assert parsed.texts["small"][0] == "no interval"
    assert "No errors." in parsed.texts["p"]
    assert parsed.data[0]["edits"] == []


def test_every_place_of_the_template_is_filled(tmp_path):
    write_page(tmp_path / "p.html", score(["a"], ["b"]))
    assert "{{" not in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_flags_stand_by_their_utterances_and_each_kind_is_a_choice(tmp_path):
    actual = score(["a", "b", "c"], ["a", "b", "c"])
    flags = {"1": ("low coverage", "repetition"), "3": ["repetition"]}
    write_page(tmp_path / "p.html", actual, flags=flags)
    parsed = Parsed(tmp_path / "p.html")
    assert [row["flags"] for row in parsed.data] == [["low coverage", "repetition"], [], flags["3"]]
    choices = [text for text in parsed.texts["option"] if text.startswith("flagged")]
    assert choices == ["flagged: low coverage", "flagged: repetition"]


@pytest.mark.parametrize(("hypothesis", "words"), [("", True), ("x y z w", True), ("a b", False)])
def test_the_rate_of_an_untrained_model_is_named(tmp_path, hypothesis, words):
    write_page(tmp_path / "p.html", score(["a b c"], [hypothesis]))
    remarks = Parsed(tmp_path / "p.html").texts.get("strong", [])
    assert bool(remarks) is words and all("of an untrained model" in text for text in remarks)
