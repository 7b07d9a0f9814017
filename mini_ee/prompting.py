"""RAEE's prompt mode: every layer is an exit, read through the model's own head, as the probabilities of label words.

Source: RAEE (see retrieval.py), Algorithm 3.1, lines 4 to 8; few_shot is LM-BFF's (Gao et al. 2021). An encoder is read
at its mask through the masked-LM head, a decoder at the last token of the row through the final norm and the LM head;
nothing is trained for it. Two departures: p is normalised over the label words, as in the paper's Fig. 2, where its
algorithm prints the softmax over the vocabulary; and prompts.json has Table 6 for encoders, but for decoders short
sentences of our own: several of Table 7's words are no single token of a small vocabulary.

Prompt            a template and a word for each class; prompts.json holds those of the paper's tasks
PromptTokenizer   texts in their template; what is too long loses text, never template
PromptModel       a backbone and its label words; its segments() are what the loop drives
few_shot          LM-BFF's prompt-based fine-tuning, as a recipe
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from mini_ee.bert import Bert, padding_mask
from mini_ee.decoder import Block, Decoder, token_positions
from mini_ee.early_exit import Reading, Segments
from mini_ee.files import read_json
from mini_ee.fitting import Stage, task_loss
from mini_ee.flops import backbone_layer_flops
from mini_ee.tasks import Encoded, Split, Task, Tokenizer, text_rows

PROMPTS = Path(__file__).with_name("prompts.json")
ENCODER, DECODER = KINDS = ("encoder", "decoder")
TEXT_FIELDS = (("text",), ("text_a", "text_b"))


# Prompts


@dataclass(frozen=True)
class Prompt:
    """A template and the word that stands for each class, in their order.

    template: {text}, or {text_a} and {text_b}, once each, and {mask} once where an encoder reads; a decoder goes on
    where the template ends. White space around a text or a whole prompt is dropped. Raises ValueError for another one.
    """

    template: str
    words: tuple[str, ...]

    def __post_init__(self):
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
        if len(self.words) < 2 or not all(word.strip() for word in self.words):
            raise ValueError(f"expected a label word for each of two classes or more, found {list(self.words)}")

    @classmethod
    def from_dict(cls, prompt: dict) -> "Prompt":
        """From `{"template": ..., "words": {"0": ..., "1": ...}}`, the classes by their number."""
        if not isinstance(prompt, dict) or set(prompt) != {"template", "words"}:
            found = ", ".join(prompt) if isinstance(prompt, dict) else type(prompt).__name__
            raise ValueError(f"expected the keys template and words, found {found or 'none'}")
        template, words = prompt["template"], prompt["words"]
        if not isinstance(template, str):
            raise ValueError(f"expected a template that is text, found {template!r}")
        numbers = [str(number) for number in range(len(words))] if isinstance(words, dict) else None
        if numbers is None or sorted(words) != sorted(numbers):
            raise ValueError(f'expected words by class, as {{"0": "terrible", "1": "great"}}, found {words!r}')
        if not all(isinstance(word, str) for word in words.values()):
            raise ValueError(f"expected words that are text, found {list(words.values())}")
        return cls(template, tuple(words[number] for number in numbers))

    def to_dict(self) -> dict:
        return {"template": self.template, "words": {str(number): word for number, word in enumerate(self.words)}}

    @property
    def kind(self) -> str:
        """Who can read it: "encoder" where there is a mask, else "decoder"."""
        return ENCODER if "mask" in self._fields else DECODER

    @property
    def texts(self) -> int:
        """How many texts a row has."""
        return len(self._fields - {"mask"})

    @property
    def _fields(self) -> set[str]:
        return {field for _, field, *_ in Formatter().parse(self.template) if field is not None}

    def fill(self, texts: Sequence[str], mask: str | None) -> tuple[str, list[tuple[int, int]]]:
        """The prompt of one row, and where in it each text stands: (start, stop) in characters."""
        values = dict(zip(TEXT_FIELDS[len(texts) - 1], (text.strip() for text in texts))) | {"mask": mask}
        filled, spans = "", {}
        for literal, field, *_ in Formatter().parse(self.template.strip()):
            filled += literal
            if field is not None:
                start, filled = len(filled), filled + values[field]
                spans[field] = start, len(filled)
        return filled, [spans[field] for field in TEXT_FIELDS[len(texts) - 1]]


def read_prompts(path: Path = PROMPTS) -> dict[str, dict[str, Prompt]]:
    """All prompts of a JSON file: "encoder" or "decoder" -> the task's name -> prompt.

    Raises FileNotFoundError, or ValueError that says what is wrong where.
    """
    prompts: dict[str, dict[str, Prompt]] = {}
    for kind, tasks in read_json(path).items():
        if kind not in KINDS or not isinstance(tasks, dict):
            raise ValueError(f"{path}: expected prompts by task under encoder and decoder, found the key {kind!r}")
        for name, prompt in tasks.items():
            try:
                prompts.setdefault(kind, {})[name] = made = Prompt.from_dict(prompt)
                check_kind(made, kind)
            except ValueError as error:
                raise ValueError(f"{path}: {kind}, {name}: {error}") from None
    return prompts


def prompt_of(task: str, kind: str, path: Path = PROMPTS) -> Prompt:
    """The prompt for a task, however its name is spelled. Raises ValueError where the file has none."""
    prompts = read_prompts(path).get(kind, {})
    for name, prompt in prompts.items():
        if _plain(name) == _plain(task):
            return prompt
    raise ValueError(
        f"{path}: expected a prompt for {task} under {kind}, found those for {', '.join(prompts) or 'no task'}; "
        f"give --template and --words, or --prompts FILE.json"
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def check_kind(prompt: Prompt, kind: str) -> None:
    """Raise ValueError where an encoder is given no mask to read, or a decoder one that it cannot."""
    if prompt.kind != kind:
        expected = "{mask} where an encoder reads" if kind == ENCODER else "no {mask}: a decoder goes on at the end"
        raise ValueError(f"template {prompt.template!r}: expected {expected}")


def check_prompt(prompt: Prompt, task: Task) -> None:
    """Raise ValueError where a prompt is not for a task's classes and texts."""
    texts = len(task.split("train").texts[0])
    if task.regression:
        raise ValueError(f"{task.name}: a regression, where no label word is right or wrong; give a task with classes")
    if len(prompt.words) != task.num_labels or prompt.texts != texts:
        raise ValueError(
            f"{task.name} has {task.num_labels} classes and rows of {texts} texts, the prompt {len(prompt.words)} "
            f"words ({', '.join(prompt.words)}) and {prompt.texts} texts; give another with --template and --words"
        )


# Tokens


class PromptTokenizer(Tokenizer):
    """A tokenizer that puts every row into its template. What is too long is cut at the end of its longest text."""

    def __init__(self, backend: tokenizers.Tokenizer, max_length: int, prompt: Prompt):
        """Raises ValueError where a label word is several tokens, or the template leaves no room for a text."""
        super().__init__(backend, max_length)
        backend.no_truncation()  # here it is the text that is cut
        self.prompt, self.mask = prompt, None
        if prompt.kind == ENCODER:
            if self.mask_token_id is None:
                raise ValueError(f"the tokenizer has no mask token, which {prompt.template!r} asks for")
            self.mask = backend.id_to_token(self.mask_token_id)
            if backend.encode(self.mask, add_special_tokens=False).ids != [self.mask_token_id]:
                backend.add_special_tokens([self.mask])  # only a word of the vocabulary so far
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
        """The token of a label word, as inside a sentence or, where that is none, as it stands alone."""
        for form in (f" {word}", word):
            if (token := self.token_id(form)) is not None:
                return token
        pieces = self.backend.encode(f" {word}", add_special_tokens=False).tokens
        raise ValueError(
            f"the label word {word!r} must be one token of this model, found {len(pieces)} ({', '.join(pieces)}); "
            f"choose another with --words"
        )

    def encode(self, texts: Sequence[str | tuple[str, ...]]) -> Encoded:
        """Rows of as many texts as the template has, each in the template, and with no more than one mask."""
        rows = text_rows(texts)
        for number, row in enumerate(rows):
            if len(row) != self.prompt.texts:
                raise ValueError(f"row {number}: the template takes {self.prompt.texts} texts, found {len(row)}")
        cut = [self._cut(row) for row in rows]
        ids = [kept for kept, _ in cut]
        types = [np.zeros_like(kept) for kept in ids]
        return Encoded(ids, types, rows, sum(truncated for _, truncated in cut), self.pad_token_id)

    def _tokens(self, row: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The token ids of one row in its template, all of them, and which of them are of each text."""
        filled, spans = self.prompt.fill(row, self.mask)
        (encoding,) = self._encode_batch([filled])
        ends = np.array([end for _, end in encoding.offsets])
        return np.array(encoding.ids, np.int64), [
            np.flatnonzero((start < ends) & (ends <= stop)) for start, stop in spans
        ]

    def _cut(self, row: tuple[str, ...]) -> tuple[np.ndarray, bool]:
        """The token ids of one row in its template that there is room for, and whether text had to go."""
        ids, texts = self._tokens(row)
        keep = np.ones(len(ids), bool)
        for tokens in texts if self.mask else ():  # a mask that a text writes out would be a second one
            keep[tokens[ids[tokens] == self.mask_token_id]] = False
        surplus = int(keep.sum()) - self.max_length
        left = [list(tokens[keep[tokens]]) for tokens in texts]
        for _ in range(surplus):
            keep[max(left, key=len).pop()] = False
        return ids[keep], surplus > 0


# The model


class PromptModel(nn.Module):
    """A backbone whose every layer is an exit, through its own head; logits (B, C) are those of the label words.

    include_embeddings: layer 0, the embedding output, is one too, for rules that plan.
    """

    def __init__(self, backbone: Bert | Decoder, tokenizer: PromptTokenizer, include_embeddings: bool = False):
        """Raises ValueError for an encoder without masked-LM head, and for a prompt of the other kind of model."""
        super().__init__()
        check_kind(tokenizer.prompt, DECODER if isinstance(backbone, Decoder) else ENCODER)
        if isinstance(backbone, Bert) and backbone.lm_head is None:
            raise ValueError(
                "this encoder has no masked-LM head, which prompts are read through; give a checkpoint that was saved "
                "with one, or a trained run"
            )
        self.backbone = backbone
        self.mask_token_id = tokenizer.mask_token_id if tokenizer.prompt.kind == ENCODER else None
        self.exits = tuple(range(0 if include_embeddings else 1, backbone.config.num_hidden_layers + 1))
        self.num_labels, self.pool = len(tokenizer.label_tokens), "last" if self.mask_token_id is None else "mask"
        self.register_buffer("label_tokens", torch.tensor(tokenizer.label_tokens), persistent=False)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """hidden[0]: (B, T) int64 -> (B, T, D)."""
        decoder = isinstance(self.backbone, Decoder)
        return self.backbone.embed(input_ids) if decoder else self.backbone.embed(input_ids, token_type_ids)

    def around(self, attention_mask: Tensor) -> Tensor | Block | None:
        """What the layers must know of (B, T) of 1 and 0: an encoder's padding mask, a decoder's block."""
        if isinstance(self.backbone, Decoder):
            return self.backbone.block(token_positions(attention_mask))
        return padding_mask(attention_mask)

    def read_at(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The token of each row that the head reads, (B,): the mask, or the last one that is no padding."""
        if self.mask_token_id is None:
            return attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        masks = input_ids == self.mask_token_id
        if not bool((masks.sum(1) == 1).all()):
            raise ValueError("expected one mask token in every row, found another number; encode with PromptTokenizer")
        return masks.int().argmax(1)

    def label_logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """hidden (B, T, D) of any layer, read at (B,) -> (B, C) float32: the head's logits of the label words."""
        read = hidden[torch.arange(len(hidden), device=hidden.device), at]
        return self.backbone.lm_logits(read)[:, self.label_tokens].float()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Logits (B, C) of the last exit. The three inputs are (B, T) int64."""
        hidden, around = self.embed(input_ids, token_type_ids), self.around(attention_mask)
        hidden = self.backbone.run_layers(hidden, around, 0, self.exits[-1])
        return self.label_logits(hidden, self.read_at(input_ids, attention_mask))

    def segments(self) -> "PromptSegments":
        """What early_exit drives."""
        return PromptSegments(self)

    def whole(self) -> Segments:
        """The model without early exits, for NeverExit: what a speed-up is measured against."""
        return self.segments()


class PromptState(NamedTuple):
    """The rows still in the model."""

    model: PromptModel
    hidden: Tensor  # (B, T, D)
    attention_mask: Tensor  # (B, T)
    around: Tensor | Block | None
    at: Tensor  # (B,)

    def keep(self, rows: np.ndarray) -> "PromptState":
        index = torch.from_numpy(rows).to(self.hidden.device)
        attention_mask = self.attention_mask[index]
        around = self.model.around(attention_mask)
        return PromptState(self.model, self.hidden[index], attention_mask, around, self.at[index])


class PromptSegments(Segments):
    """The segments of a PromptModel in eval mode. Inputs are tasks.Inputs, encoded by a PromptTokenizer."""

    engine = "torch"

    def __init__(self, model: PromptModel):
        self.model = model.eval()
        self.exits = model.exits
        self.starts = (0, *model.exits)

    def running(self) -> torch.inference_mode:
        return torch.inference_mode()

    def start(self, inputs) -> PromptState:
        device = self.model.label_tokens.device
        arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
        ids, attention_mask, types = (torch.from_numpy(array).to(device) for array in arrays)
        at = self.model.read_at(ids, attention_mask)
        return PromptState(
            self.model, self.model.embed(ids, types), attention_mask, self.model.around(attention_mask), at
        )

    def advance(self, k: int, state: PromptState) -> PromptState:
        hidden = self.model.backbone.run_layers(state.hidden, state.around, self.starts[k], self.exits[k])
        return state._replace(hidden=hidden)

    def read(self, k: int, state: PromptState) -> Reading:
        return Reading(self.model.label_logits(state.hidden, state.at).numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        """The head is read at one token, and gives the whole vocabulary."""
        config = self.model.backbone.config
        layers = self.layer_passes(k) * backbone_layer_flops(self.model.backbone, inputs.input_ids.shape[1])
        return layers, 2.0 * config.hidden_size * config.vocab_size


# Prompt-based fine-tuning


def few_shot(model: PromptModel) -> list[Stage]:
    """LM-BFF's prompt-based fine-tuning: all of the backbone learns from cross-entropy over the label words."""
    return [
        Stage(
            name="prompt",
            learns=lambda name: True,
            loss=lambda model, batch: task_loss(model(*batch.inputs), batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]


def draw_shots(split: Split, num_labels: int, shots: int, seed: int) -> tuple[Split, Split, Split]:
    """(train, held, rest): `shots` rows of each class to train on, as many to choose the best epoch, and the others.

    Raises ValueError where a class has too few rows.
    """
    order = np.random.default_rng(seed).permutation(len(split))
    part = np.zeros(len(split), np.int64)  # 0 for the rest
    for label in range(num_labels):
        rows = order[split.labels[order] == label]
        if len(rows) < 2 * shots:
            raise ValueError(f"expected {2 * shots} rows of class {label} for {shots} shots, found {len(rows)}")
        part[rows[:shots]], part[rows[shots : 2 * shots]] = 1, 2
    train, held, rest = (split.take(part == number) for number in (1, 2, 0))
    return train, held, rest
