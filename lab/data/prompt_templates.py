"""Prompts: a template around a text, and a label word for each class. No torch here.

Prompt            a template and its label words; prompts.json has those of RAEE's tasks
PromptTokenizer   puts texts into a template; if a prompt is too long, the text is cut, never the template

prompts.json has the prompts of RAEE's Table 6 for encoders. The prompts for decoders are our own, because several label
words of Table 7 are more than one token in a small vocabulary. In the built-in decoder's 1,024 tokens only bad and good
are one token each (SST-2, MR, CR, MPQA, reviews); for other tasks give it words with --words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import numpy as np
import tokenizers

from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import Task, plain_name
from mini_ee.lab.data.tokenizer import Encoded, Tokenizer, text_rows
from mini_ee.lab.data.values import text_flaw

PROMPTS = Path(__file__).with_name("prompts.json")

ENCODER, DECODER = PROMPT_KINDS = ("encoder", "decoder")

TEXT_FIELDS = (("text",), ("text_a", "text_b"))


@dataclass(frozen=True)
class Prompt:
    """A template, and a label word for each class, in the order of the classes.

    template: {text}, or {text_a} and {text_b}, once each; for an encoder also {mask} once, in place of the label word.
    For a decoder the label word follows the template. White space around texts and the prompt is removed.
    Raises ValueError for a template with other fields, and for words that are not text.
    """

    template: str
    words: tuple[str, ...]

    def __post_init__(self):
        for text in (self.template, *self.words):
            if flaw := text_flaw(text):
                raise ValueError(f"expected a template and label words that are text, found {flaw}: {text!r}")
        try:
            fields = [field for _, field, *_ in Formatter().parse(self.template) if field is not None]
        except ValueError as error:
            raise ValueError(f"template {self.template!r}: {error}") from None
        texts = tuple(field for field in fields if field != "mask")
        if tuple(sorted(texts)) not in TEXT_FIELDS or fields.count("mask") > 1:
            raise ValueError(
                f"template {self.template!r}: expected {{text}}, or {{text_a}} and {{text_b}}, once each, and {{mask}} "
                f"at most once, found {', '.join(f'{{{field}}}' for field in fields) or 'none of them'}"
            )
        if len(self.words) < 2:
            raise ValueError(f"expected a label word for each of two classes or more, found {list(self.words)}")

    @classmethod
    def from_dict(cls, prompt: dict, label_names: Sequence[str] = ()) -> "Prompt":
        """From `{"template": ..., "words": {"0": ..., "1": ...}}`; the keys of words are class numbers or label names.

        label_names: those of the task, in the order of its classes. Raises ValueError for any other dict.
        """
        if not isinstance(prompt, dict) or set(prompt) != {"template", "words"}:
            actual = ", ".join(prompt) if isinstance(prompt, dict) else type(prompt).__name__
            raise ValueError(f"expected the keys template and words, found {actual or 'none'}")
        template, words = prompt["template"], prompt["words"]
        if not isinstance(template, str):
            raise ValueError(f"expected a template that is text, found {template!r}")
        if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
            raise ValueError(f'expected words by class, as {{"0": "terrible", "1": "great"}}, found {words!r}')
        for classes in (label_names, [str(number) for number in range(len(words))]):
            if sorted(words) == sorted(classes):
                return cls(template, tuple(words[name] for name in classes))
        by_name = f", or by label name ({', '.join(label_names)})" if label_names else ""
        raise ValueError(
            f"expected words by class number (0 to {max(len(label_names), len(words), 2) - 1}){by_name}, "
            f"found words for {', '.join(words) or 'no class'}"
        )

    def to_dict(self) -> dict:
        return {"template": self.template, "words": {str(number): word for number, word in enumerate(self.words)}}

    @property
    def kind(self) -> str:
        """The models that it is for: "encoder" if there is a mask, else "decoder"."""
        return ENCODER if "mask" in self._fields else DECODER

    @property
    def texts(self) -> int:
        """The number of texts in a row."""
        return len(self._fields - {"mask"})

    @property
    def _fields(self) -> set[str]:
        return {field for _, field, *_ in Formatter().parse(self.template) if field is not None}

    def fill(self, texts: Sequence[str], mask: str | None) -> tuple[str, list[tuple[int, int]]]:
        """The prompt of one row, and the place of each text in it: (start, stop) in characters."""
        values = dict(zip(TEXT_FIELDS[len(texts) - 1], (text.strip() for text in texts))) | {"mask": mask or ""}
        filled, spans = "", {}
        for literal, field, *_ in Formatter().parse(self.template.strip()):
            filled += literal
            if field is not None:
                start, filled = len(filled), filled + values[field]
                spans[field] = start, len(filled)
        return filled, [spans[field] for field in TEXT_FIELDS[len(texts) - 1]]


def read_prompts(path: Path = PROMPTS, task: Task | None = None) -> dict[str, dict[str, Prompt]]:
    """All prompts of a JSON file: "encoder" or "decoder" -> the task's name -> prompt.

    Words may have label names as keys. Those of `task` are sorted by its classes; those of other tasks, whose classes
    are unknown here, stay in the order of the file. Raises FileNotFoundError, and ValueError for an invalid entry.
    """
    prompts: dict[str, dict[str, Prompt]] = {}
    for kind, tasks in read_json(path).items():
        if kind not in PROMPT_KINDS or not isinstance(tasks, dict):
            raise ValueError(f"{path}: expected prompts by task under encoder and decoder, found the key {kind!r}")
        for name, prompt in tasks.items():
            try:
                is_own = task is not None and plain_name(name) == plain_name(task.name)
                names = task.label_names if task and is_own else _names_in_file(prompt)
                prompts.setdefault(kind, {})[name] = made = Prompt.from_dict(prompt, names)
                check_kind(made, kind)
            except ValueError as error:
                raise ValueError(f"{path}: {kind}, {name}: {error}") from None
    return prompts


def _names_in_file(prompt: object) -> tuple[str, ...]:
    """The label names of an entry, in the order of the file; none if its words have class numbers as keys."""
    words = prompt.get("words") if isinstance(prompt, dict) else None
    return tuple(words) if isinstance(words, dict) and not any(map(str.isdecimal, words)) else ()


def prompt_of(task: Task, kind: str, path: Path = PROMPTS) -> Prompt:
    """The prompt for a task (names compared by `plain_name`). Raises ValueError if the file has none."""
    prompts = read_prompts(path, task).get(kind, {})
    for name, prompt in prompts.items():
        if plain_name(name) == plain_name(task.name):
            return prompt
    raise ValueError(
        f"{path}: expected a prompt for {task.name} under {kind}, found those for {', '.join(prompts) or 'no task'}; "
        f"give --template and --words, or --prompts FILE.json"
    )


def check_kind(prompt: Prompt, kind: str) -> None:
    """Raise ValueError for a prompt without a mask for an encoder, or with a mask for a decoder."""
    if prompt.kind != kind:
        expected = "{mask}, which an encoder reads" if kind == ENCODER else "no {mask}: a decoder continues the prompt"
        raise ValueError(f"template {prompt.template!r}: expected {expected}")


def check_prompt(prompt: Prompt, task: Task) -> None:
    """Raise ValueError if the number of classes or texts differs between prompt and task."""
    texts = len(task.split("train").texts[0])
    if task.regression:
        raise ValueError(
            f"{task.name}: a regression, for which no label word is right or wrong; give a task with classes"
        )
    if len(prompt.words) != task.num_labels or prompt.texts != texts:
        raise ValueError(
            f"{task.name} has {task.num_labels} classes and rows of {texts} texts, the prompt {len(prompt.words)} "
            f"words ({', '.join(prompt.words)}) and {prompt.texts} texts; give another with --template and --words"
        )


# ---- Tokens ----
class PromptTokenizer(Tokenizer):
    """A tokenizer that puts each row into a template. If a prompt is too long, the longest text is cut."""

    max_length: int

    def __init__(self, backend: tokenizers.Tokenizer, max_length: int, prompt: Prompt):
        """Raises ValueError if a label word is several tokens, or the template leaves no room for a text."""
        super().__init__(backend, max_length)
        self._truncate(None)  # `_cut` cuts the texts instead
        self.prompt, self.mask = prompt, None
        if prompt.kind == ENCODER:
            if self.mask_token_id is None:
                raise ValueError(f"the tokenizer has no mask token, which {prompt.template!r} needs")
            self.mask = backend.id_to_token(self.mask_token_id)
            if backend.encode(self.mask, add_special_tokens=False).ids != [self.mask_token_id]:
                backend.add_special_tokens([self.mask])  # so far it is an ordinary word of the vocabulary
        self.label_tokens = tuple(map(self._label_token, prompt.words))
        if len(set(self.label_tokens)) < len(self.label_tokens):
            raise ValueError(f"the label words {', '.join(prompt.words)} must be different tokens; choose others")
        ids, texts = self._tokens(("x",) * prompt.texts)
        alone = len(ids) - sum(map(len, texts))
        if alone + prompt.texts > max_length:
            raise ValueError(
                f"the template {prompt.template!r} is {alone} tokens of {max_length}, and leaves no room for a text; "
                f"shorten it or give a larger --max-length"
            )

    def _label_token(self, word: str) -> int:
        """The token of a label word inside a sentence, else of the word alone. Raises ValueError if neither is one."""
        for form in (f" {word}", word):
            if (token := self.token_id(form)) is not None:
                return token
        pieces = self.backend.encode(f" {word}", add_special_tokens=False).tokens
        raise ValueError(
            f"the label word {word!r} must be one token of this model, found {len(pieces)} ({', '.join(pieces)}); "
            f"choose another with --words"
        )

    def encode(self, texts: Sequence[str | tuple[str, ...]]) -> Encoded:
        """Token ids of each row in the template. Mask tokens inside texts are removed.

        Raises ValueError if a row does not have as many texts as the template.
        """
        rows = text_rows(texts)
        for number, row in enumerate(rows):
            if len(row) != self.prompt.texts:
                raise ValueError(f"row {number}: the template takes {self.prompt.texts} texts, found {len(row)}")
        cut = [self._cut(row) for row in rows]
        ids = [row for row, _ in cut]
        types = [np.zeros_like(row) for row in ids]
        return Encoded(ids, types, rows, sum(truncated for _, truncated in cut), self.pad_token_id)

    def _tokens(self, row: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """All token ids of one row in the template, and for each of its texts the positions of its tokens."""
        filled, spans = self.prompt.fill(row, self.mask)
        (encoding,) = self._encode_batch([filled])
        # A token belongs to a text if it ends in the text: some tokens begin with the blank before it.
        ends = np.array([end for _, end in encoding.offsets])
        return np.array(encoding.ids, np.int64), [
            np.flatnonzero((start < ends) & (ends <= stop)) for start, stop in spans
        ]

    def _cut(self, row: tuple[str, ...]) -> tuple[np.ndarray, bool]:
        """The token ids of one row in the template, at most max_length, and whether a text was cut."""
        ids, texts = self._tokens(row)
        keep = np.ones(len(ids), bool)
        for tokens in texts if self.mask else ():  # a text that contains the mask token would add a second mask
            keep[tokens[ids[tokens] == self.mask_token_id]] = False
        surplus = int(keep.sum()) - self.max_length
        remaining = [list(tokens[keep[tokens]]) for tokens in texts]
        for _ in range(surplus):
            keep[max(remaining, key=len).pop(0 if self.side == "left" else -1)] = False
        return ids[keep], surplus > 0
