"""Texts as tokens: stories, continuations and copies. No torch here.

A text is its tokens and the position of the last that is given: what stands behind it is learned in training, and is
the reference in a test.
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
    """A text as token ids. What counts, in calibration, learning or as a reference, follows position `start`."""

    ids: list[int]
    start: int = 0


def cut_text(ids: Sequence[int], tokens: int, first: Sequence[int] = ()) -> list[Text]:
    """One long text in pieces of `tokens`, each after `first` (the bos token); what is left at the end is dropped."""
    if len(ids) < tokens:
        raise ValueError(f"expected a text of at least {tokens} tokens, got {len(ids)}; give a longer one")
    return [Text([*first, *ids[at : at + tokens]]) for at in range(0, len(ids) - tokens + 1, tokens)]


END = "<|endoftext|>"


def read_stories(path: str | Path) -> list[str]:
    """The stories of a file of text, which <|endoftext|> parts. Raises ValueError where there is none to be read."""
    stories = [story.strip() for story in read_text(Path(path)).split(END) if story.strip()]
    if not stories:
        raise ValueError(f"{path}: expected text, found none")
    return stories


def continuations(tokenizer: Backend, stories: Sequence[str], given: int, follow: int) -> list[Text]:
    """The beginnings of the stories that are long enough: `given` tokens, and as reference the `follow` after them."""
    ids = (encoding.ids[: given + follow] for encoding in tokenizer.encode_batch(list(stories)))
    return [Text(each, given - 1) for each in ids if len(each) == given + follow]


def copies(tokenizer: Backend, stories: Sequence[str], end: int, words: tuple[int, int] = (4, 10)) -> list[Text]:
    """A sentence, a new line, the sentence again and the end token; sentences of so many words, each but once."""
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
        start = sum(stop <= len(given) for _, stop in encoding.offsets) - 1
        texts.append(Text([*encoding.ids, end], start))
    return texts
