"""Prompts of a sentence encoder: words that stand before each text, as sentence-transformers puts them there."""

from collections.abc import Sequence
from dataclasses import replace

import tokenizers

from mini_ee.lab.data.tokenizer import Encoded, Tokenizer, text_rows
from mini_ee.lab.errors import WrongArguments


class Prompted(str):
    """A text with its prompt in front. No other prompt is added to it."""


class PromptedTokenizer(Tokenizer):
    """A tokenizer that puts the default prompt before each text that is not Prompted."""

    def __init__(
        self, backend: tokenizers.Tokenizer, max_length: int | None, prompts: dict[str, str], default: str | None
    ):
        super().__init__(backend, max_length)
        self.prompts, self.prompt = prompts, "" if default is None else prompts[default]

    def encode(self, texts: Sequence[str | tuple[str, ...]]) -> Encoded:
        """As Tokenizer.encode. The result contains the texts without the default prompt."""
        rows = text_rows(texts)
        prompted = [
            tuple(text if isinstance(text, Prompted) else self.prompt + text for text in row) if self.prompt else row
            for row in rows
        ]
        return replace(super().encode(prompted), texts=rows)


def with_prompt(tokenizer: Tokenizer, texts: Sequence[str | tuple[str, ...]], name: str | None) -> Sequence:
    """The texts, or rows of one text, with the prompt of this name in front; None leaves them the default prompt.

    Raises WrongArguments for a name that the encoder does not have.
    """
    if name is None:
        return texts
    prompts = tokenizer.prompts if isinstance(tokenizer, PromptedTokenizer) else {}
    check_prompt_name(prompts, name)
    return [Prompted(prompts[name] + (text if isinstance(text, str) else text[0])) for text in texts]


def check_prompt_name(prompts: dict[str, str], name: object, where: str = "") -> None:
    """Raise WrongArguments for a name that is not among the prompts. where: the beginning of the message."""
    if not isinstance(name, str) or name not in prompts:
        expected = f"one of {', '.join(prompts)}" if prompts else "none, because the encoder has no prompts"
        raise WrongArguments(f"{where}expected as prompt name {expected}, found {name!s:.100}")
