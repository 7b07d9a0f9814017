"""Texts for a decoder, as token ids: texts of a file, continuations and copies. No torch here.

A text is its token ids and the position of the last given token. The tokens after that position are the targets in
training and the reference in a test.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as Backend

from mini_ee.lab.data.files import read_text


class Text(NamedTuple):
    """A text as token ids. The tokens after position `start` are for training, calibration or comparison."""

    ids: list[int]
    start: int = 0


def cut_text(ids: Sequence[int], tokens: int, first: Sequence[int] = ()) -> list[Text]:
    """A long text cut into pieces of `tokens` tokens, each after `first` (the bos token); a shorter rest is dropped.

    Raises ValueError for fewer than `tokens` ids.
    """
    if len(ids) < tokens:
        raise ValueError(f"expected a text of at least {tokens} tokens, got {len(ids)}; give a longer one")
    return [Text([*first, *ids[at : at + tokens]]) for at in range(0, len(ids) - tokens + 1, tokens)]


END_OF_TEXT = "<|endoftext|>"

BETWEEN_TEXTS = f"texts are separated by {END_OF_TEXT} or, in a file without it, by blank lines"


def read_stories(path: str | Path) -> list[str]:
    """The texts of a file, separated by <|endoftext|>, or by blank lines if the file does not have it.

    Raises WrongArguments if the file is not UTF-8, ValueError if it has no text.
    """
    content = read_text(Path(path))
    parts = content.split(END_OF_TEXT) if END_OF_TEXT in content else re.split(r"\n\s*\n", content)
    stories = [part.strip() for part in parts if part.strip()]
    if not stories:
        raise ValueError(f"{path}: expected texts, found none; {BETWEEN_TEXTS}")
    return stories


def continuations(tokenizer: Backend, stories: Sequence[str], given: int, follow: int) -> list[Text]:
    """The first `given` tokens of each story and, as reference, the next `follow`; shorter stories are dropped."""
    ids = (encoding.ids[: given + follow] for encoding in tokenizer.encode_batch(list(stories)))
    return [Text(tokens, given - 1) for tokens in ids if len(tokens) == given + follow]


def copies(tokenizer: Backend, stories: Sequence[str], end: int, words: tuple[int, int] = (4, 10)) -> list[Text]:
    """Each sentence of the stories followed by a new line, the sentence again and the end token.

    words: minimum and maximum number of words in a sentence. A sentence that occurs twice is used once.
    """
    sentences = dict.fromkeys(
        sentence
        for story in stories
        for sentence in re.findall(r"[^.!?\n]+[.!?]", story)
        if words[0] <= len(sentence.split()) <= words[1]
    )
    texts = []
    for sentence in map(str.strip, sentences):
        given = f"{sentence}\n"
        encoding = tokenizer.encode(given + sentence)
        # The tokenizer may append special tokens; `last` is the last token of the text itself.
        ids, last = encoding.ids, max(at for at, special in enumerate(encoding.special_tokens_mask) if not special)
        start = sum(stop <= len(given) for _, stop in encoding.offsets[: last + 1]) - 1
        texts.append(Text([*ids[: last + 1], end], start))
    return texts
