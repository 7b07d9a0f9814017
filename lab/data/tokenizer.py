"""Tokenizers: from texts to padded integer arrays, and batches of rows of similar length. No torch here."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import normalizers

from mini_ee.lab.data.files import write_bytes, write_json
from mini_ee.lab.data.tokenizer_config import (
    NO_LIMIT,
    direction,
    errors_of_tokenizers,
    parts_of,
    read_file,
    read_tokenizer,
)
from mini_ee.lab.data.values import is_whole, shortened, text_flaw
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.token_tasks import Pieces

HEAD = 32  # a long text is first tokenized up to this many characters per token of max_length

OF_CHARACTERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents")
"""Normalizers that look at single characters and their accents only: see Tokenizer._ends."""

LETTER_SPACE, MARKS, IDEOGRAPHS = r"[^\W_] ", r"[!-/:-@\[-`{-~]{2}", "[\u4e00-\u9fff]{2}"
"""Patterns of two characters: a letter and a space, two punctuation marks, two Chinese characters."""


# ---- Tokens ----
@dataclass(frozen=True, eq=False)
class Inputs:
    """A padded batch. input_ids, attention_mask (1 at tokens, 0 at padding), token_type_ids: (B, T) int64."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray
    texts: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: np.ndarray) -> "Inputs":
        """The given rows (indices, a mask or a slice) at the same width T."""
        rows = np.arange(len(self))[rows]
        texts = tuple(self.texts[row] for row in rows)
        return Inputs(self.input_ids[rows], self.attention_mask[rows], self.token_type_ids[rows], texts)


@dataclass(frozen=True, eq=False)
class Encoded:
    """N tokenized rows of different lengths. truncated: the number of rows that were cut to max_length."""

    ids: list[np.ndarray]
    type_ids: list[np.ndarray]
    texts: tuple[tuple[str, ...], ...]
    truncated: int
    pad_token_id: int
    special_ids: tuple[int, ...] = ()  # ids of special tokens, such as [CLS], [SEP] and [UNK]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: np.ndarray | slice) -> Inputs:
        """The given rows (indices, a mask or a slice), padded on the right to the longest of them."""
        indices = np.arange(len(self))[rows]
        lengths = np.array([len(self.ids[row]) for row in indices], np.int64)
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        inputs = Inputs(
            np.full(mask.shape, self.pad_token_id, np.int64),
            mask.astype(np.int64),
            np.zeros(mask.shape, np.int64),
            tuple(self.texts[row] for row in indices),
        )
        for at, row in enumerate(indices):
            inputs.input_ids[at, : lengths[at]] = self.ids[row]
            inputs.token_type_ids[at, : lengths[at]] = self.type_ids[row]
        return inputs


def text_rows(texts: Sequence[str | tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Rows of one text or two. Raises ValueError for a text that is empty or not a string."""
    rows = tuple(tuple(row) if isinstance(row, tuple | list) else (row,) for row in texts)
    for number, row in enumerate(rows):
        flaw = next(filter(None, map(text_flaw, row)), None if len(row) in (1, 2) else len(row))
        if flaw is not None:
            raise ValueError(f"row {number}: expected one text or two, found {flaw}; correct or drop the row")
    return rows


def check_rows(texts: Sequence[str | Sequence[str]], num_texts: int) -> None:
    """Raise ValueError unless `texts` is a list of rows with this number of texts each, for example for one string."""
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        actual = f"one string, {texts[:40]!r}; put it in a list" if isinstance(texts, str) else shortened(texts)
        raise ValueError(f"expected a list of texts, found {actual}")
    for number, row in enumerate(texts):
        count = len(row) if isinstance(row, tuple | list) else 1
        if count != num_texts:
            raise ValueError(f"row {number}: expected {num_texts} texts, found {count}")


class Tokenizer:
    """A tokenizer of the library `tokenizers` that truncates to max_length (None: never); `Encoded.batch` pads."""

    max_length: int | None

    def __init__(self, backend: tokenizers.Tokenizer, max_length: int | None = 128):
        special = max(backend.num_special_tokens_to_add(pair) for pair in (False, True))
        if max_length is not None and max_length <= special:  # the backend would silently not truncate
            raise WrongArguments(f"expected max_length above the {special} special tokens, found {max_length}")
        backend.no_padding()
        self.backend = backend
        self.max_length = max_length
        self.side = direction(backend)  # on which texts are cut, right or left
        self._truncate(max_length)

    def _truncate(self, max_length: int | None) -> None:
        """Let the backend cut texts, on its own side; None: not, but a left side stays in the file."""
        if max_length is None and self.side == "right":
            self.backend.no_truncation()
        else:
            length = NO_LIMIT if max_length is None else max_length
            self.backend.enable_truncation(length, direction=self.side)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike, max_length: int | None = 128, lower: bool = False) -> "Tokenizer":
        """That of a Hugging Face folder, as transformers reads it (`read_tokenizer`, with its errors).

        lower: texts become lower case before everything else, also in the file that `save` writes.
        """
        backend = read_tokenizer(Path(folder))
        if lower:
            normalizer = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *normalizer])
        return cls(backend, max_length)

    @classmethod
    def from_file(cls, path: str | os.PathLike, max_length: int | None = 128) -> "Tokenizer":
        """That of a file that `save` wrote. Raises ValueError if it does not exist or is damaged."""
        return cls(read_file(Path(path)), max_length)

    def encode(self, texts: Sequence[str | tuple[str, ...]]) -> Encoded:
        """Tokenize rows of one text or two. If a tokenizer has no template for pairs, the two texts are two lines.

        If two texts are too long together, the longer is cut.
        Raises ValueError for a text that is empty or not a string.
        """
        rows = text_rows(texts)
        ids: list[np.ndarray] = []
        type_ids: list[np.ndarray] = []
        truncated = 0
        for row, (_, encoding) in zip(rows, self._encodings(rows)):
            cut = bool(encoding.overflowing)
            if cut and len(row) == 2 and not self.separates_pairs:
                (encoding,) = self._encode_batch([self._shortened(row)])
            if not encoding.ids:
                raise ValueError(f"row {len(ids)}: no token is left of this text; correct or drop the row")
            ids.append(np.array(encoding.ids, np.int64))
            type_ids.append(np.array(encoding.type_ids, np.int64))
            truncated += cut
        return Encoded(ids, type_ids, rows, truncated, self.pad_token_id, self.special_ids)

    def _encodings(self, rows: Sequence[tuple[str, ...]]) -> Iterator[tuple]:
        """The text or the two texts of each row, as far as they are read, and their Encoding."""
        pairs = self.separates_pairs
        sequences = [
            self._head(row[0]) if len(row) == 1 else self._heads(row) if pairs else "\n".join(row) for row in rows
        ]
        for start in range(0, len(rows), 1000):  # in parts, because an Encoding is much larger than its ids
            some = sequences[start : start + 1000]
            yield from zip(some, self._encode_batch(some))

    def pieces(self, rows: Sequence[tuple[str, ...]]) -> list[Pieces]:
        """The tokens of rows of one text, or of two that are separated, with their places in these texts."""
        all_pieces = []
        for row, (read, encoding) in zip(rows, self._encodings(rows)):
            read = (read,) if isinstance(read, str) else read
            before = [len(whole) - len(part) if self.side == "left" else 0 for whole, part in zip(row, read)]
            of = [at or 0 for at in encoding.sequence_ids]  # the text of each token; None: a special token
            triples = zip(encoding.offsets, encoding.word_ids, of)
            words = [span if word is None else encoding.word_to_chars(word, at) for span, word, at in triples]
            of_both = (
                [(a + before[at], b + before[at]) for (a, b), at in zip(spans, of)]
                for spans in (encoding.offsets, words)
            )
            all_pieces.append(Pieces(encoding.tokens, *of_both))
        return all_pieces

    def around(self, texts: int) -> tuple[int, ...]:
        """The ids of the special tokens around this number of texts, in their order: the one at the end is the last."""
        encoding = self.backend.encode("a", "a" if texts == 2 else None)
        return tuple(dict.fromkeys(id for id, special in zip(encoding.ids, encoding.special_tokens_mask) if special))

    def encode_for(
        self, texts: Sequence[str | tuple[str, ...]], vocab_size: int, token_types: int | None = None
    ) -> Encoded:
        """As `encode`, for a model with this number of tokens and token types (None: it does not use types). A padding
        token that the model does not have becomes 0, which the attention mask hides.

        Also raises ValueError for a text with a token or a type that the model does not have.
        """
        encoded = self.encode(texts)
        for number, (ids, types, row) in enumerate(zip(encoded.ids, encoded.type_ids, encoded.texts)):
            self.check_ids(ids, vocab_size, " / ".join(row), f"row {number}: ")
            if token_types is not None and types.max() >= token_types:
                raise ValueError(
                    f"row {number}: expected token types below {token_types}, as the model has them, found "
                    f"{types.max()}; use the tokenizer that belongs to the model"
                )
        return encoded if encoded.pad_token_id < vocab_size else replace(encoded, pad_token_id=0)

    def check_ids(self, ids: npt.ArrayLike, vocab_size: int, text: str, where: str = "") -> None:
        """Raise ValueError if a text has a token id from vocab_size on. where: the beginning of the message."""
        largest = int(np.max(ids, initial=0))
        if largest >= vocab_size:
            raise ValueError(
                f"{where}expected token ids below {vocab_size}, as the model has them, found {largest} "
                f"({self.backend.id_to_token(largest)!r}) in {shortened(text)}; remove that token from the text, or "
                f"use the tokenizer that belongs to the model"
            )

    def beyond(self, vocab_size: int) -> str | None:
        """A warning, of one line, about tokens with ids from vocab_size on; None if there are none."""
        ids = sorted(number for number in self.backend.get_vocab().values() if number >= vocab_size)
        if not ids:
            return None
        named = ", ".join(f"{self.backend.id_to_token(number)!r} ({number})" for number in ids[:3])
        return (
            f"the model has {vocab_size} tokens, its tokenizer has {len(ids)} beyond them: {named}"
            f"{', ...' if len(ids) > 3 else ''}. A text that contains one of these is refused."
        )

    @property
    def separates_pairs(self) -> bool:
        """Whether special tokens stand between two texts. Without a template for pairs (many decoders) the backend
        drops "<s>" or joins the texts without a separator.
        """
        return self.backend.num_special_tokens_to_add(True) > self.backend.num_special_tokens_to_add(False)

    def ids_of(self, text: str, special: bool = True) -> list[int]:
        """The token ids of one text. special: with the special tokens around it."""
        (encoding,) = self._encode_batch([text], special)
        return encoding.ids

    def _head(self, text: str, more_than: int = 0) -> str:
        """The text, or a part of it with the same max_length tokens, because long texts would take long.

        It is the beginning, or the end if texts are cut on the left. It ends between two words (`_ends`), so its tokens
        are those of the whole text. It must overflow max_length, and have more than `more_than` tokens; else twice the
        length is tried.
        """
        size = HEAD * (self.max_length or 0)
        while self.max_length and 2 * size < len(text) and self._ends:
            end = self._ends.search(text, len(text) - size if self.side == "left" else size)
            if end is None:
                break
            head = text[end.start() + 1 :] if self.side == "left" else text[: end.start() + 1]
            if self._encode_batch([head])[0].overflowing and (not more_than or self._count(head) > more_than):
                return head
            size = 2 * max(size, len(head))
        return text

    def _heads(self, row: tuple[str, ...]) -> tuple[str, str]:
        """`_head` of both texts of a pair. The backend's time grows with the product of the lengths of two long texts.

        If both texts are longer than `room`, the backend gives half of it to each, and an odd token to the longer text,
        or to the second if they are equally long. So the head of the longer text must stay the longer head.
        """
        first, second = (self._head(text) for text in row)
        room = (self.max_length or 0) - self.backend.num_special_tokens_to_add(True)
        if (first, second) == row or not room % 2 or any(self._count(head) <= room for head in (first, second)):
            return first, second
        if self._count(row[0]) > self._count(row[1]):
            return self._head(row[0], self._count(second)), second
        return first, self._head(row[1], self._count(first))

    def _count(self, text: str) -> int:
        """The number of tokens of a text, without special ones."""
        (encoding,) = self._encode_batch([text], special=False)
        return sum(len(part.ids) for part in (encoding, *encoding.overflowing))

    @cached_property
    def _ends(self) -> re.Pattern | None:
        """A pattern of two characters between which a word always ends, so that later text does not change the tokens
        before; None if that is not certain for this tokenizer.

        It is certain if the normalizer looks at single characters and their accents only, the first pre-tokenizer
        splits between the two characters, and no added token contains them or depends on what is around it.
        """
        normalizer, splitter = (parts_of(stage) for stage in (self.backend.normalizer, self.backend.pre_tokenizer))
        known = bool(splitter) and all(part["type"] in OF_CHARACTERS for part in normalizer)
        if not known or getattr(self.backend.model, "dropout", None):
            return None
        normalized = self.backend.normalizer.normalize_str if normalizer else str
        tokens = self.backend.get_added_tokens_decoder().values()
        if any(token.single_word or token.rstrip and self.side == "left" for token in tokens):
            return None
        added = [token.content for token in tokens]
        added += [normalized(token) for token in added]
        ends = _word_ends(splitter[0], normalizer)
        if not ends or any(re.search(rf"\s|{ends}", token) for token in added):
            return None
        return re.compile(ends)

    def _shortened(self, row: tuple[str, ...]) -> str:
        """A pair as two lines of one text that fits; each text may use at least half of the tokens."""
        assert self.max_length is not None  # a text was truncated
        parts = [self.backend.encode(text, add_special_tokens=False) for text in row]
        room = self.max_length - self.backend.num_special_tokens_to_add(False) - 1  # one token for the line end
        first = min(len(parts[0]), max(room - len(parts[1]), room // 2))
        sizes = first, min(len(parts[1]), room - first)
        fitting = [
            text[part.offsets[-n][0] :] if self.side == "left" else text[: part.offsets[n - 1][1]]
            for text, part, n in zip(row, parts, sizes)
            if n > 0
        ]
        return "\n".join(fitting)

    def _encode_batch(self, sequences: list, special: bool = True) -> list[tokenizers.Encoding]:
        """encode_batch releases Python's lock, so other threads can run; the backend's `encode` does not."""
        try:
            with errors_of_tokenizers():
                return self.backend.encode_batch(sequences, add_special_tokens=special)
        except ValueError as error:
            raise ValueError(
                f"the tokenizer cannot read a text ({error}); copy the model's own tokenizer again"
            ) from None

    def token_id(self, word: str) -> int | None:
        """The id of a word that is one token, else None. For RoBERTa give " word", its form inside a sentence."""
        ids = self.ids_of(word, special=False)
        known = len(ids) == 1 and ids[0] not in (self._first("[UNK]", "<unk>"), None)
        return ids[0] if known else None

    @property
    def mask_token_id(self) -> int | None:
        return self._first("[MASK]", "<mask>")

    @property
    def pad_token_id(self) -> int:
        """0 if a decoder's tokenizer has no padding token; the attention mask hides it."""
        return self._first("[PAD]", "<pad>") or 0

    @cached_property  # a server encodes each request
    def special_ids(self) -> tuple[int, ...]:
        """Ids of tokens that the file declares special, of those around every text, and of the unknown token."""
        declared = {number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}
        unknown = self._first("[UNK]", "<unk>")
        return tuple(sorted(declared | set(self.ids_of("")) | (set() if unknown is None else {unknown})))

    def _first(self, *tokens: str) -> int | None:
        return next((token_id for token_id in map(self.backend.token_to_id, tokens) if token_id is not None), None)

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json, atomically (`write_bytes`)."""
        write_bytes(Path(path), self.backend.to_str().encode())

    def save_beside_model(self, folder: str | os.PathLike) -> None:
        """Write tokenizer.json, and the tokenizer_config.json with which transformers reads it as it is."""
        self.save(Path(folder) / "tokenizer.json")
        types = ["token_type_ids"] * any(self.backend.encode("a", "a").type_ids)
        named: tuple = (("pad_token", ("[PAD]", "<pad>")), ("mask_token", ("[MASK]", "<mask>")))
        if self.backend.num_special_tokens_to_add(is_pair=True) > 2:  # clients find the end of a question by its token
            named += (("cls_token", ("[CLS]", "<s>")), ("sep_token", ("[SEP]", "</s>")))
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask", *types],
            **({} if self.max_length is None else {"model_max_length": self.max_length}),
            **{key: token for key, names in named for token in names if token in special},
        }
        write_json(Path(folder) / "tokenizer_config.json", config)


def _word_ends(splitter: dict, normalizer: list[dict]) -> str | None:
    """A pattern of two characters between which a pre-tokenizer always splits, from the settings of both components."""
    of_option = {"ByteLevel": "use_regex", "Metaspace": "split"}
    if splitter["type"] != "BertPreTokenizer":
        known = splitter["type"] in ("Whitespace", "WhitespaceSplit")
        return LETTER_SPACE if known or splitter.get(of_option.get(splitter["type"])) else None
    ideographs = any(part.get("handle_chinese_chars") for part in normalizer)
    return "|".join((LETTER_SPACE, MARKS, *[IDEOGRAPHS] * ideographs))


def batches(encoded: Encoded, batch_size: int, *, shuffle_seed: int | None = None) -> Iterator[np.ndarray]:
    """Row indices (B,) of each batch; every row occurs once, and rows of similar length are in the same batch.

    Without a seed, rows are sorted from short to long. With one, they are shuffled, sorted by length within pools of 50
    batches, and the batches are shuffled. Raises ValueError unless batch_size is an integer of at least 1.
    """
    _check_batch_size(batch_size)
    lengths = np.array([len(ids) for ids in encoded.ids], np.int64)
    if shuffle_seed is None:
        return iter(_cut(np.argsort(lengths, kind="stable"), batch_size))
    random = np.random.default_rng(shuffle_seed)
    pools = _cut(random.permutation(len(encoded)), 50 * batch_size)
    by_length = (pool[np.argsort(lengths[pool], kind="stable")] for pool in pools)
    cut = [rows for pool in by_length for rows in _cut(pool, batch_size)]
    return iter([cut[at] for at in random.permutation(len(cut))])


def in_order(count: int, batch_size: int) -> Iterator[slice]:
    """The rows of each batch, in the given order. Raises ValueError unless batch_size is an integer of at least 1."""
    _check_batch_size(batch_size)
    return (slice(start, start + batch_size) for start in range(0, count, batch_size))


def _check_batch_size(batch_size: int) -> None:
    if not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"expected batch_size of at least 1, a whole number, found {batch_size!r}")


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
