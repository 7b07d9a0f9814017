"""Token classification and question answering: a label for each token, or the span of a context. No torch here.

A text exits as a whole, at the first exit where the least confident of its decisions is confident enough:

    token classification   a decision for each token: its label, by a softmax over labels
    question answering     two decisions: the first and the last token of the answer, each by a softmax over tokens

Logits are (B, T, C). For a question C is 2, the logits of start and end. Tokens that decide are `counted`: those of the
text, or of the context of a question; not padding, and not the special tokens that the tokenizer puts around texts.
A Record has two numbers of an exit in place of its logits: the `weakest` confidence, and a `number` that is equal for
two exits when all their decisions are.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.segments import check_finite
from mini_ee.rules import log_softmax

LABELS, SPAN = "token-classification", "question-answering"
"""The two kinds, as Hugging Face names these tasks."""

ENDS = ("start", "end")
"""The two outputs of question answering, in place of names of labels."""

WEAKEST = "weakest_token"
"""The name of the confidence measure."""

LONGEST_ANSWER = 15  # tokens, as in transformers' pipeline

SHIFT = 1 << 20  # more tokens than any text has

FAR = np.float32(-1e9)  # the logit of a token that does not decide


class TokenLabel(NamedTuple):
    """The label of one token, and its place in the text, in characters."""

    token: str
    label: str
    score: float
    start: int
    end: int


class Span(NamedTuple):
    """The answer to a question, and its place in the context, in characters. Its text is empty if no token is left."""

    answer: str
    score: float
    start: int
    end: int


class Pieces(NamedTuple):
    """The tokens of one row, and the first and the last character of each and of its word, within its own text."""

    tokens: Sequence[str]
    places: Sequence[tuple[int, int]]
    words: Sequence[tuple[int, int]]


class TokenTask(NamedTuple):
    """What a model decides about tokens. around: ids of the special tokens around texts, the one at their end last."""

    kind: str  # LABELS or SPAN
    around: tuple[int, ...]

    @classmethod
    def of(cls, config: dict) -> "TokenTask | None":
        """That of a run or an export, from its config; None for one that predicts no tokens."""
        task = config.get("task", {})
        return cls(task["tokens"], tuple(task["around"])) if task.get("tokens") else None

    def counted(self, ids: Any, mask: Any) -> Any:
        """(B, T) bool: the tokens that decide. ids, mask: (B, T) int64, arrays or values of a graph."""
        counts = mask == 1
        for special in self.around:
            counts = counts & (ids != special)
        if self.kind == SPAN:  # the context stands after the end of the question
            counts = counts & ((ids == self.around[-1]).cumsum(1) > 0)
        return counts

    def weakest(self, logits: Any, counted: Any) -> Any:
        """(B,): the probability of the least confident decision; of a span the smaller of its two ends'.

        As in transformers, the first token takes part in the softmax over tokens: some models answer "none" there.
        """
        if self.kind == LABELS:
            likeliest = np.reciprocal(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1))
            return np.where(counted, likeliest, np.float32(1)).min(axis=1)
        of_context, of_first = np.where(counted[:, :, None], logits, FAR), logits[:, 0]
        best = of_context.max(axis=1)
        largest = np.maximum(best, of_first)
        total = np.exp(of_context - largest[:, None]).sum(axis=1) + np.exp(of_first - largest)
        return (np.exp(best - largest) / total).min(axis=1)

    def numbers(self, logits: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """(B,) int64, equal for rows whose decisions are equal: all labels, or the span."""
        if self.kind == SPAN:
            first, last = spans(logits, counted)
            return first * SHIFT + last
        return numbered([row[some] for row, some in zip(logits.argmax(axis=-1), counted)])

    def answers(self, logits: np.ndarray, inputs: Any, tokenizer: Any, names: Sequence[str]) -> tuple[list, list]:
        """The label of each row, a list of TokenLabel or a Span, and its confidence.

        inputs, tokenizer: of data/tokenizer.py. Raises ValueError if a logit is not finite.
        """
        counted = self.counted(inputs.input_ids, inputs.attention_mask)
        confidence, pieces = self.weakest(check_finite(logits), counted).tolist(), tokenizer.pieces(inputs.texts)
        if self.kind == LABELS:
            rows = zip(logits, counted, pieces)
            return [
                _labels(np.exp(log_softmax(row[some])), some, tokens, names) for row, some, tokens in rows
            ], confidence
        first, last = spans(logits, counted)
        shown = np.where(counted[:, :, None], logits, FAR)
        shown[:, 0] = logits[:, 0]
        scores = np.exp(np.stack([log_softmax(ends) for ends in shown.transpose(2, 0, 1)]))
        return [
            _span(float(scores[0, row, a] * scores[1, row, b]), tokens.words, a, b, inputs.texts[row][1], some)
            for row, (a, b, tokens, some) in enumerate(zip(first.tolist(), last.tolist(), pieces, counted))
        ], confidence


def decided(label: Any) -> Any:
    """What two answers agree in: a label, the names of several, the labels of all tokens, or the ends of a span."""
    if isinstance(label, Span):
        return label.start, label.end
    if isinstance(label, list):
        return [token_label.label for token_label in label]
    return label.keys() if isinstance(label, dict) else label


def as_json(label: list[TokenLabel] | Span) -> list[dict] | dict:
    """Labels of tokens, or a span, as JSON."""
    return label._asdict() if isinstance(label, Span) else [token_label._asdict() for token_label in label]


def numbered(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(N,) int64: a digest of each array, so that equal ones have equal numbers."""
    digests = (blake2b(row.astype(np.int32).tobytes(), digest_size=8).digest() for row in rows)
    return np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], np.int64)


def spans(logits: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last token (B,) of the likeliest answer of at most LONGEST_ANSWER tokens within the context.

    Of equally likely ones the shortest, and of these the first.
    """
    start, end = np.where(counted[:, :, None], logits.astype(np.float64), -np.inf).transpose(2, 0, 1)
    tokens = start.shape[1]
    scores = np.full((min(LONGEST_ANSWER, tokens), *start.shape), -np.inf)
    for more, of_length in enumerate(scores):
        of_length[:, : tokens - more] = start[:, : tokens - more] + end[:, more:]
    best = np.moveaxis(scores, 0, 1).reshape(len(start), -1).argmax(axis=1)
    more, first = np.divmod(best, tokens)
    return first, first + more


def _labels(probabilities: np.ndarray, some: np.ndarray, pieces: Pieces, names: Sequence[str]) -> list[TokenLabel]:
    places = np.flatnonzero(some).tolist()
    best = probabilities.argmax(axis=1).tolist()
    return [
        TokenLabel(pieces.tokens[at], names[label], float(row[label]), *pieces.places[at])
        for at, label, row in zip(places, best, probabilities)
    ]


def _span(
    score: float, words: Sequence[tuple[int, int]], first: int, last: int, context: str, some: np.ndarray
) -> Span:
    if not some.any():
        return Span("", 0.0, 0, 0)
    start, end = words[first][0], words[last][1]  # whole words, as transformers answers
    return Span(context[start:end], score, start, end)
