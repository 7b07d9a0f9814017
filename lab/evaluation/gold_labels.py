"""Labels of tokens, and answers to questions, against the gold labels of a file. No torch here."""

from collections.abc import Sequence

import numpy as np

from mini_ee.lab.data.token_metrics import answer_scores, names_entities, tag_scores
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.token_tasks import LABELS, Span, TokenLabel

Row = tuple[str, ...]
Gold = Sequence[list[str]]
"""Of each text the tags of its words, between blanks, or of each question its answers."""

NAMES = {
    "exact_match": "exact match",
    "f1": "F1",
    "precision": "precision",
    "recall": "recall",
    "accuracy": "accuracy of words",
}
"""Of scores, in words, the main one first."""

OUTSIDE = "O"  # the tag of a word of which the model reads no token


def unknown_tag(kind: str, names: Sequence[str], gold: Gold) -> str | None:
    """A gold tag that is none of the labels of a model of this kind; None if there is no such tag."""
    known = {*names, OUTSIDE}
    return next((tag for tags in gold for tag in tags if tag not in known), None) if kind == LABELS else None


def gold_scores(
    kind: str, names: Sequence[str], rows: Sequence[Row], gold: Gold, labels: Sequence[list | Span]
) -> dict:
    """Scores of token_metrics.py. labels: of each row, from a model of this kind, whose labels have these names."""
    if kind != LABELS:
        return answer_scores([label.answer for label in labels], gold)
    predicted = [word_tags(text, tokens) for (text,), tokens in zip(rows, labels, strict=True)]
    return tag_scores(predicted, gold, names_entities({*names, OUTSIDE}))


def scores_line(scores: dict, full: dict) -> str:
    """Scores with exits, in brackets those of the full model."""
    return ", ".join(f"{words} {scores[name]:.3f} ({full[name]:.3f})" for name, words in score_names(scores).items())


def score_names(scores: dict) -> dict[str, str]:
    """Their keys, and their names in words."""
    return {name: words for name, words in NAMES.items() if name in scores}


def word_tags(text: str, tokens: Sequence[TokenLabel]) -> list[str]:
    """Of each word, between blanks, the label of its first token; OUTSIDE if it has none, as in a text that is cut."""
    words = text.split(" ")
    begins = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
    tags = [OUTSIDE] * len(words)
    for token in reversed(tokens):  # a token may begin with the blank before its word
        tags[int(np.searchsorted(begins, token.end - 1, "right")) - 1] = token.label
    return tags


def check_tags(kind: str, names: Sequence[str], gold: Gold) -> None:
    """Raise WrongArguments for a tag that is none of the model's labels."""
    if (tag := unknown_tag(kind, names, gold)) is not None:
        raise WrongArguments(
            f"expected tags among the model's labels {', '.join(names)}, found {tag!r}; rename the tags"
        )
