"""Tokenizers: from texts to padded integer arrays, and batches of rows of like length. No torch here."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from mini_ee.data.files import write_bytes
from mini_ee.data.table_files import text_flaw
from mini_ee.data.values import is_whole, shortened
from mini_ee.errors import WrongArguments

HEAD = 32  # characters for each token of max_length: as long a head of a text is tried before all of it

OF_CHARACTERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents")
"""Normalizers that change nothing before the second character of what follows, where the text ends there."""

LETTER_SPACE, MARKS, IDEOGRAPHS = r"[^\W_] ", r"[!-/:-@\[-`{-~]{2}", "[\u4e00-\u9fff]{2}"


# Tokens
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
        arrays = (each[rows] for each in (self.input_ids, self.attention_mask, self.token_type_ids))
        return Inputs(*arrays, tuple(self.texts[row] for row in rows))


@dataclass(frozen=True, eq=False)
class Encoded:
    """N tokenized rows of different lengths. truncated: how many were cut to the tokenizer's max_length."""

    ids: list[np.ndarray]
    type_ids: list[np.ndarray]
    texts: tuple[tuple[str, ...], ...]
    truncated: int
    pad_token_id: int
    special_ids: tuple[int, ...] = ()  # of the tokenizer's special tokens, such as [CLS], [SEP] and [UNK]

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
    """Rows of one text or two. Raises: ValueError for a text that is empty or no string."""
    rows = tuple(tuple(row) if isinstance(row, tuple | list) else (row,) for row in texts)
    for number, row in enumerate(rows):
        flaw = next(filter(None, map(text_flaw, row)), None if len(row) in (1, 2) else len(row))
        if flaw is not None:
            raise ValueError(f"row {number}: expected one text or two, found {flaw}; correct or drop the row")
    return rows


def check_rows(texts: Sequence[str | Sequence[str]], num_texts: int) -> None:
    """Raise ValueError for one string or another value in place of rows, and for a row of another number of texts."""
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        found = f"one string, {texts[:40]!r}; put it in a list" if isinstance(texts, str) else shortened(texts)
        raise ValueError(f"expected a list of texts, found {found}")
    for number, row in enumerate(texts):
        found = len(row) if isinstance(row, tuple | list) else 1
        if found != num_texts:
            raise ValueError(f"row {number}: expected {num_texts} texts, found {found}")


class Tokenizer:
    """A `tokenizers` tokenizer that truncates to max_length (None: never); `Encoded.batch` pads."""

    def __init__(self, backend: tokenizers.Tokenizer, max_length: int | None = 128):
        special = max(backend.num_special_tokens_to_add(pair) for pair in (False, True))
        if max_length is not None and max_length <= special:  # the backend would not truncate, and say nothing
            raise WrongArguments(f"expected max_length above the {special} special tokens, found {max_length}")
        backend.no_padding()
        backend.no_truncation() if max_length is None else backend.enable_truncation(max_length)
        self.backend = backend
        self.max_length = max_length

    @classmethod
    def from_folder(cls, folder: str | os.PathLike, max_length: int | None = 128) -> "Tokenizer":
        """From tokenizer.json, else from BERT's vocab.txt. The file's own truncation and padding are dropped.

        Raises: ValueError where neither is there, or the file is broken.
        """
        folder = Path(folder)
        readers = {"tokenizer.json": tokenizers.Tokenizer.from_file, "vocab.txt": _bert_wordpiece}
        for name, read in readers.items():
            path = folder / name
            if path.is_file():
                try:
                    with _errors_of_tokenizers(), _without_panic_messages():
                        backend = read(str(path))
                except ValueError as error:
                    raise ValueError(
                        f"{path}: expected a tokenizer, found {shortened(str(error))}; copy the file again"
                    ) from None
                return cls(backend, max_length)
        raise ValueError(f"{folder}: expected tokenizer.json or vocab.txt, found neither; copy one beside the model")

    def encode(self, texts: Sequence[str | tuple[str, ...]]) -> Encoded:
        """Tokenize rows of one text or two; a tokenizer that knows no pairs gets two lines of one text.

        Of two texts that are too long together the longer is cut.
        Raises: ValueError for a text that is empty or no string.
        """
        rows = text_rows(texts)
        # Without a template for pairs (many decoders) the backend drops "<s>" or glues the texts together.
        pairs = self.backend.num_special_tokens_to_add(True) > self.backend.num_special_tokens_to_add(False)
        sequences = [
            self._head(row[0]) if len(row) == 1 else self._heads(row) if pairs else "\n".join(row) for row in rows
        ]
        ids, type_ids, truncated = [], [], 0
        for start in range(0, len(rows), 1000):  # an Encoding is far larger than its ids
            for row, encoding in zip(rows[start:], self._encode_batch(sequences[start : start + 1000])):
                cut = bool(encoding.overflowing)
                if cut and len(row) == 2 and not pairs:
                    (encoding,) = self._encode_batch([self._shortened(row)])
                if not encoding.ids:
                    raise ValueError(f"row {len(ids)}: no token is left of this text; correct or drop the row")
                ids.append(np.array(encoding.ids, np.int64))
                type_ids.append(np.array(encoding.type_ids, np.int64))
                truncated += cut
        return Encoded(ids, type_ids, rows, truncated, self.pad_token_id, self.special_ids)

    def encode_for(
        self, texts: Sequence[str | tuple[str, ...]], vocab_size: int, token_types: int | None = None
    ) -> Encoded:
        """As `encode`, for a model with so many tokens and token types (None: it reads no types). A padding token that
        the model does not have becomes 0, which the attention mask hides.

        Raises: ValueError for a text with another token or type, too.
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

    def check_ids(self, ids: Sequence[int], vocab_size: int, text: str, where: str = "") -> None:
        """Raise ValueError where a text has a token that a model of so many does not have. where: the line's begin."""
        largest = int(np.max(ids, initial=0))
        if largest >= vocab_size:
            raise ValueError(
                f"{where}expected token ids below {vocab_size}, as the model has them, found {largest} "
                f"({self.backend.id_to_token(largest)!r}) in {shortened(text)}; remove that token from the text, or "
                f"use the tokenizer that belongs to the model"
            )

    def beyond(self, vocab_size: int) -> str | None:
        """One line about the tokens that a model of so many does not have; None where it has all."""
        ids = sorted(number for number in self.backend.get_vocab().values() if number >= vocab_size)
        if not ids:
            return None
        named = ", ".join(f"{self.backend.id_to_token(number)!r} ({number})" for number in ids[:3])
        return (
            f"the model has {vocab_size} tokens, its tokenizer has {len(ids)} beyond them: {named}"
            f"{', ...' if len(ids) > 3 else ''}. A text that contains one of these is refused."
        )

    def ids_of(self, text: str, special: bool = True) -> list[int]:
        """The token ids of one text, with the special tokens around it unless told otherwise."""
        (encoding,) = self._encode_batch([text], special)
        return encoding.ids

    def _head(self, text: str, more_than: int = 0) -> str:
        """The text, or as much of its beginning as has the same first tokens, and more of them than are kept, and than
        so many: it ends where a word of the whole text ends as well, see `_ends`.
        """
        size = HEAD * (self.max_length or 0)
        while self.max_length and 2 * size < len(text) and self._ends:
            end = self._ends.search(text, size)
            if end is None:
                break
            head = text[: end.start() + 1]
            if self._encode_batch([head])[0].overflowing and (not more_than or self._count(head) > more_than):
                return head
            size = 2 * len(head)
        return text

    def _heads(self, row: tuple[str, str]) -> tuple[str, str]:
        """The same of a pair. The backend's time grows with the product of the lengths of two long texts.

        It keeps half of the room for each of two that are longer than it. An odd token goes to the longer one, or to
        the second: so the longer one stays the longer.
        """
        heads = [self._head(text) for text in row]
        room = (self.max_length or 0) - self.backend.num_special_tokens_to_add(True)
        if heads != [*row] and room % 2 and all(self._count(head) > room for head in heads):
            longer = int(self._count(row[0]) <= self._count(row[1]))
            heads[longer] = self._head(row[longer], self._count(heads[1 - longer]))
        return tuple(heads)

    def _count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        (encoding,) = self._encode_batch([text], special=False)
        return sum(len(each.ids) for each in (encoding, *encoding.overflowing))

    @cached_property
    def _ends(self) -> re.Pattern | None:
        """Two characters of which the first ends a word, so that nothing behind it changes the tokens before; None
        where that is not known of any.

        The normalizer must look at single characters and their accents alone, the first splitting has to be between the
        two, whatever splits further, and no added token may reach over them.
        """
        normalizer, splitter = (_parts(each) for each in (self.backend.normalizer, self.backend.pre_tokenizer))
        known = bool(splitter) and all(part["type"] in OF_CHARACTERS for part in normalizer)
        if not known or getattr(self.backend.model, "dropout", None):
            return None
        normalized = self.backend.normalizer.normalize_str if normalizer else str
        added = [token.content for token in self.backend.get_added_tokens_decoder().values()]
        added += [normalized(token) for token in added]
        ends = _word_ends(splitter[0], normalizer)
        if not ends or any(re.search(rf"\s|{ends}", token) for token in added):
            return None
        return re.compile(ends)

    def _shortened(self, row: tuple[str, str]) -> str:
        """Two lines of one text that fit: the second keeps what the first leaves of the tokens, and at least half."""
        parts = [self.backend.encode(text, add_special_tokens=False) for text in row]
        room = self.max_length - self.backend.num_special_tokens_to_add(False) - 1  # for the end of the line
        first = min(len(parts[0]), max(room - len(parts[1]), room // 2))
        sizes = first, min(len(parts[1]), room - first)
        fitting = [text[: part.offsets[n - 1][1]] for text, part, n in zip(row, parts, sizes) if n > 0]
        return "\n".join(fitting)

    def _encode_batch(self, sequences: list, special: bool = True) -> list[tokenizers.Encoding]:
        """Other threads run meanwhile, as they do not in the backend's `encode`."""
        try:
            with _errors_of_tokenizers():
                return self.backend.encode_batch(sequences, add_special_tokens=special)
        except ValueError as error:
            raise ValueError(
                f"the tokenizer cannot read a text ({error}); copy the model's own tokenizer again"
            ) from None

    def token_id(self, word: str) -> int | None:
        """The id of a word that is one token, else None. RoBERTa: " word", as inside a sentence."""
        ids = self.ids_of(word, special=False)
        known = len(ids) == 1 and ids[0] not in (self._first("[UNK]", "<unk>"), None)
        return ids[0] if known else None

    @property
    def mask_token_id(self) -> int | None:
        return self._first("[MASK]", "<mask>")

    @property
    def pad_token_id(self) -> int:
        """0 where a decoder's tokenizer has no padding token: the attention mask hides it."""
        return self._first("[PAD]", "<pad>") or 0

    @cached_property  # a server encodes each request
    def special_ids(self) -> tuple[int, ...]:
        """Ids that the file declares special, that stand around every text, and that of unknown words."""
        declared = {number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}
        unknown = {self._first("[UNK]", "<unk>")} - {None}
        return tuple(sorted(declared | set(self.ids_of("")) | unknown))

    def _first(self, *tokens: str) -> int | None:
        return next((found for found in map(self.backend.token_to_id, tokens) if found is not None), None)

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json; a kill leaves the old file or the new one."""
        write_bytes(Path(path), self.backend.to_str().encode())


def _parts(component) -> list[dict]:
    """The settings of a normalizer or a pre-tokenizer, of a sequence those of its parts; none where there is none."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    if settings["type"] != "Sequence":
        return [settings]
    return [part for key in ("normalizers", "pretokenizers") for part in settings.get(key, ())]


def _word_ends(splitter: dict, normalizer: list[dict]) -> str | None:
    """A pattern of two characters between which a pre-tokenizer splits for certain, given both parts' settings."""
    of_option = {"ByteLevel": "use_regex", "Metaspace": "split"}
    if splitter["type"] != "BertPreTokenizer":
        known = splitter["type"] in ("Whitespace", "WhitespaceSplit")
        return LETTER_SPACE if known or splitter.get(of_option.get(splitter["type"])) else None
    ideographs = any(part.get("handle_chinese_chars") for part in normalizer)
    return "|".join((LETTER_SPACE, MARKS, *[IDEOGRAPHS] * ideographs))


@contextmanager
def _errors_of_tokenizers() -> Iterator[None]:
    """Turn what the library raises into ValueError: mere Exception, and for its own bugs a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from None
        raise


@contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Drop what is written to file descriptor 2: before the library raises a PanicException it prints a backtrace."""
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _bert_wordpiece(vocab: str) -> tokenizers.Tokenizer:
    """BERT's tokenizer; it lower-cases unless tokenizer_config.json beside the vocabulary says otherwise."""
    path = Path(vocab).with_name("tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    backend = tokenizers.Tokenizer(models.WordPiece.from_file(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    backend.normalizer = normalizers.BertNormalizer(lowercase=config.get("do_lower_case", True))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = ((token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]"))
    backend.post_processor = processors.BertProcessing(sep, cls)
    return backend


def batches(encoded: Encoded, batch_size: int, *, shuffle_seed: int | None = None) -> Iterator[np.ndarray]:
    """Row indices (B,) of one batch after the other, every row once, rows of similar length together.

    Without a seed the rows go from short to long. With one they are shuffled, sorted by length within pools
    of 50 batches, and the batches come in random order. Raises: ValueError for another batch_size than 1, 2, ...
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
    """Rows of one batch after the other, as they come. Raises: ValueError for another batch_size than 1, 2, ..."""
    _check_batch_size(batch_size)
    return (slice(start, start + batch_size) for start in range(0, count, batch_size))


def _check_batch_size(batch_size: int) -> None:
    if not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"expected batch_size of at least 1, a whole number, found {batch_size!r}")


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
