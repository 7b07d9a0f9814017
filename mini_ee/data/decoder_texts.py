"""Texts for a decoder: a file's texts, continuations and copies as token ids. No torch here.

A text is its token ids and the position of the last given one. What follows that position is learned in training, and
is the reference in a test.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as Backend

from mini_ee.data.files import read_text

TRAINING_PROMPTS = ("This is an example script:", "My name is", "I am a", "Welcome to", "what is a")
CALIBRATION_PROMPTS = (
    "A cat is",
    "In Python, a list is",
    "In C, we can define a function",
    "The capital of France is",
    "The derivative of x^2 is",
)
"""Of self-supervised exits, Table 1."""


class Text(NamedTuple):
    """A text as token ids. What is learned, calibrated on or compared with follows position `start`."""

    ids: list[int]
    start: int = 0


def cut_text(ids: Sequence[int], tokens: int, first: Sequence[int] = ()) -> list[Text]:
    """A long text cut into pieces of `tokens`, with `first` (the bos token) before each; a shorter rest is dropped.

    Raises ValueError for fewer than `tokens` ids.
    """
    if len(ids) < tokens:
        raise ValueError(f"expected a text of at least {tokens} tokens, got {len(ids)}; give a longer one")
    return [Text([*first, *ids[at : at + tokens]]) for at in range(0, len(ids) - tokens + 1, tokens)]


END = "<|endoftext|>"

BETWEEN_TEXTS = f"texts stand apart by {END} or, in a file without it, by blank lines"


def read_stories(path: str | Path) -> list[str]:
    """The texts of a file, which stand apart by <|endoftext|>; in a file without it, by blank lines.

    Raises WrongArguments where the file is not UTF-8, ValueError where it holds no text.
    """
    content = read_text(Path(path))
    parts = content.split(END) if END in content else re.split(r"\n\s*\n", content)
    stories = [part.strip() for part in parts if part.strip()]
    if not stories:
        raise ValueError(f"{path}: expected texts, found none; {BETWEEN_TEXTS}")
    return stories


def continuations(tokenizer: Backend, stories: Sequence[str], given: int, follow: int) -> list[Text]:
    """The first `given` tokens of each story, and as reference the `follow` after them; shorter stories are dropped."""
    ids = (encoding.ids[: given + follow] for encoding in tokenizer.encode_batch(list(stories)))
    return [Text(each, given - 1) for each in ids if len(each) == given + follow]


def copies(tokenizer: Backend, stories: Sequence[str], end: int, words: tuple[int, int] = (4, 10)) -> list[Text]:
    """A sentence, a new line, the sentence again and the end token.

    words: how many words a sentence may have, from and to. A sentence that occurs twice is taken once.
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
        ids, last = encoding.ids, max(at for at, special in enumerate(encoding.special_tokens_mask) if not special)
        start = sum(stop <= len(given) for _, stop in encoding.offsets[: last + 1]) - 1
        texts.append(Text([*ids[: last + 1], end], start))
    return texts
