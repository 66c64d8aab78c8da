"""Vocabularies: text to token numbers and back, by characters, sentencepiece subwords, or words.

A tag in the training texts, such as <noise> (tags.py), is one token. Tokens 0 to 3 are the same
special tokens in every vocabulary. `encode` adds neither <sos> nor <eos>, `decode` drops all four.
A tokenizer is saved in its run's folder; its fingerprint ties checkpoints to it.

Sentencepiece: Kudo & Richardson 2018 (arXiv:1808.06226); BPE: Sennrich et al. 2016
(arXiv:1508.07909); unigram: Kudo 2018 (arXiv:1804.10959).
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from asr.config.schema import TextConfig
from asr.data.tags import TAG, frequent_tags
from asr.errors import UserError
from asr.io import open_file, read_json

BLANK = 0  # CTC's empty label, also the padding
UNK = 1  # a character that the training text did not have
SOS = 2  # start of sentence: the decoder's first input
EOS = 3  # end of sentence: the decoder's last target
SPECIAL = ("<blank>", "<unk>", "<sos>", "<eos>")

DESCRIPTION = "tokenizer.json"
MODEL = "tokenizer.model"
FEW_PIECES = "the training text has no more pieces"
MAX_MODEL = 64 << 20  # bytes: of 32,000 pieces 0.8 MB


class Tokenizer(Protocol):
    """The interface and the common part of the vocabularies."""

    kind: Literal["characters", "bpe", "unigram", "word"]
    surfaces: list[str]  # the text of each token, with its spaces; "" for the special ones
    content: bytes  # what the fingerprint is of

    @property
    def size(self) -> int:
        """The number of tokens, with the four special ones."""
        return len(self.surfaces)

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def unknown(self, text: str) -> str:
        """The characters of `text`, each once and sorted, that encode to <unk>."""

    def fingerprint(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:16]

    def save(self, folder: str | Path) -> None: ...


def splitter(tags: Sequence[str]) -> Callable[[str], Iterable[str]]:
    """A function that splits a text into these tags and the characters between them."""
    if not tags:
        return iter
    longest_first = sorted(tags, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL).findall


class Characters(Tokenizer):
    """One token per character and per tag of the training text, in the order of code points."""

    kind: Literal["characters"] = "characters"

    def __init__(self, symbols: Sequence[str]) -> None:
        tags = [symbol for symbol in symbols if len(symbol) != 1]
        if sorted(set(symbols)) != list(symbols) or not all(map(TAG.fullmatch, tags)):
            raise UserError("a character vocabulary is characters and tags, sorted, each once")
        self.symbols = list(symbols)
        self.surfaces = [""] * len(SPECIAL) + self.symbols
        self.content = "".join(symbols).encode()
        self._ids = {s: i for i, s in enumerate(symbols, start=len(SPECIAL))}
        self._split = splitter(tags)

    @classmethod
    def train(cls, texts: Sequence[str]) -> "Characters":
        """All characters and tags of the texts. Raises UserError if there is none."""
        split = splitter(frequent_tags(texts))
        symbols = sorted(set().union(*map(split, texts)))
        if not symbols:
            raise UserError("data.train: every text is empty, no vocabulary can be made from it")
        return cls(symbols)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(symbol, UNK) for symbol in self._split(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.symbols[i - len(SPECIAL)] for i in ids if i >= len(SPECIAL))

    def unknown(self, text: str) -> str:
        return "".join(sorted(set(self._split(text)) - set(self._ids)))

    def save(self, folder: str | Path) -> None:
        _describe(folder, {"kind": "characters", "symbols": self.symbols})


class SentencePieces(Tokenizer):
    """Subwords or words by sentencepiece, from its serialised model."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece  # slow to import, and characters do not need it

        if not model:  # the library takes it for "load later"
            raise UserError("the sentencepiece model is empty")
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            pieces = [self._pieces.IdToPiece(i) for i in range(len(self._pieces))]
        except (RuntimeError, ValueError):  # ValueError: a piece that is not UTF-8
            raise UserError("not a sentencepiece model") from None
        ours = pieces[: len(SPECIAL)]
        if tuple(ours) != SPECIAL:
            raise UserError(f"a sentencepiece model whose first pieces are {ours}, not {SPECIAL}")
        self.surfaces = [""] * len(SPECIAL)
        self.surfaces += [piece.replace("▁", " ") for piece in pieces[len(SPECIAL) :]]
        self.content = model

    @classmethod
    def train(
        cls, texts: Sequence[str], size: int, kind: Literal["bpe", "unigram", "word"]
    ) -> "SentencePieces":
        """Learn up to `size` pieces, deterministically; a small text gives fewer.

        Raises UserError for an empty text and, but for `word`, whose rare words are then <unk>, for
        a size below the number of its characters.
        """
        import sentencepiece

        kept = [text for text in texts if text.strip(" ▁")]  # sentencepiece writes "▁" for a space
        if not kept:
            raise UserError("data.train: every text is empty, no vocabulary can be made from it")
        marked = ["▁" + text.replace(" ", "▁") for text in kept]
        tags = _tag_pieces(kept, marked)
        least = len(SPECIAL) + len(set().union(*map(splitter(tags), marked)))
        if size < least and kind != "word":
            raise UserError(
                f"text.size = {size}: too few pieces, this training text needs {least} or more; "
                "set it, or text.kind=characters for a script of many letters"
            )
        ids: dict[str, int | str] = {"pad_id": BLANK, "unk_id": UNK, "bos_id": SOS, "eos_id": EOS}
        pieces = {name.replace("id", "piece"): SPECIAL[int(token)] for name, token in ids.items()}
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(kept),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",  # the manifest's text is what is learned
            max_sentence_length=1 << 20,  # bytes; longer sentences are dropped without a warning
            num_threads=1,  # several threads would sum in no fixed order
            minloglevel=2,
            **ids,
            **pieces,
            **({"user_defined_symbols": tags} if tags else {}),
        )
        return cls(model.getvalue())

    @property
    def kind(self) -> Literal["bpe", "unigram", "word"]:
        pieces = self.surfaces[len(SPECIAL) :]
        if all(piece.startswith(" ") or TAG.fullmatch(piece) for piece in pieces):
            return "word"
        # BPE's scores are the negative numbers of its merges, a unigram model's log-probabilities.
        scores = map(self._pieces.GetScore, range(self.size))
        return "bpe" if all(score.is_integer() for score in scores) else "unigram"

    def encode(self, text: str) -> list[int]:
        return self._pieces.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._pieces.DecodeIds([int(i) for i in ids if i >= len(SPECIAL)])

    def unknown(self, text: str) -> str:
        pieces = zip(self.encode(text), self._pieces.EncodeAsPieces(text), strict=True)
        unknown = "".join(piece for token, piece in pieces if token == UNK)
        return "".join(sorted(set(unknown) - {"▁"}))

    def save(self, folder: str | Path) -> None:
        _describe(folder, {"kind": "sentencepiece", "size": self.size})
        (Path(folder) / MODEL).write_bytes(self.content)


def _tag_pieces(texts: Sequence[str], marked: Sequence[str]) -> list[str]:
    """The tags of the texts as they occur in `marked`, where "▁" stands for a space: ▁<noise>."""
    tags = [tag.replace(" ", "▁") for tag in frequent_tags(texts)]
    pieces = [*tags, *(f"▁{tag}" for tag in tags)]
    found = set().union(*map(splitter(pieces), marked))
    return sorted(found & set(pieces) - set(SPECIAL))


def train_tokenizer(text: TextConfig, texts: Sequence[str]) -> Tokenizer:
    """The vocabulary of the training texts."""
    if text.kind == "characters":
        return Characters.train(texts)
    return SentencePieces.train(texts, text.size, text.kind)


def used_text(
    text: TextConfig, tokenizer: Tokenizer, reason: str = FEW_PIECES
) -> tuple[TextConfig, list[str]]:
    """Section `text` with the kind and size that the vocabulary has, and lines on what differs.

    reason: why it does.
    """
    size = text.size if tokenizer.kind == "characters" else tokenizer.size
    used = text.model_copy(update={"kind": tokenizer.kind, "size": size})
    lines = [
        f"text.{key} = {now} is used, not {asked}: {reason}"
        for key, now in used
        if (asked := getattr(text, key)) != now
    ]
    return used, lines


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote into the folder. Raises UserError if there is none."""
    path = Path(folder) / DESCRIPTION
    try:
        description = read_json(path)
        if description["kind"] == "sentencepiece":
            path = path.with_name(MODEL)
            with open_file(path, MAX_MODEL) as file:
                return SentencePieces(file.read(MAX_MODEL))
        symbols = description["symbols"]
        if description["kind"] == "characters" and isinstance(symbols, list):
            return Characters(symbols)
    except OSError:
        missing = f"no {path.name} that can be read; is this a run folder?"
        raise UserError(f"{folder}: {missing}") from None
    except (ValueError, KeyError, TypeError):
        pass
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    raise UserError(f"{path}: not a tokenizer's description")


def checkpoint_metadata(tokenizer: Tokenizer) -> dict[str, str]:
    """The part of a checkpoint's metadata that must agree with the run that reads it."""
    return {"vocabulary": tokenizer.fingerprint()}


def labels_of(tokens: Iterable[int], tokenizer: Tokenizer) -> list[str]:
    """The rows of an attention picture: the text of every token with its spaces, and <eos>."""
    surfaces = tokenizer.surfaces
    return [*(surfaces[token] or "?" for token in tokens), " <eos>"]


def _describe(folder: str | Path, description: dict[str, object]) -> None:
    path = Path(folder) / DESCRIPTION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(description, ensure_ascii=False) + "\n", encoding="utf-8")
