"""Metrics of labels for tokens, and of answers to questions, against gold labels. No torch here.

Sources: entities: Tjong Kim Sang and De Meulder 2003, "Introduction to the CoNLL-2003 Shared Task", whose program
         conlleval takes IOB1, IOB2 and IOBES alike; seqeval does the same by default.
         answers: Rajpurkar et al. 2018, arXiv:1806.03822, the program evaluate-v2.0.py.

All scores are in [0, 1]; they are 0.0 if their denominator is zero.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

PREFIXED = re.compile("O|[BIES]-.+")
"""A tag of entities: no entity, or the beginning, inside, end, or all of one."""

PUNCTUATION = str.maketrans("", "", string.punctuation)


def names_entities(tags: Iterable[str]) -> bool:
    """Whether tags have the prefixes of entities. Those of parts of speech have none.

    >>> names_entities(["O", "B-PER", "I-PER"]), names_entities(["NOUN", "VERB"])
    (True, False)
    """
    return all(map(PREFIXED.fullmatch, tags))


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of each entity. A tag I- or E- without a beginning begins one.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC"]))
    [('LOC', 3, 3), ('PER', 0, 1)]
    """
    spans, begin, before, kind_before = set(), 0, "O", ""
    for at, tag in enumerate((*tags, "O")):
        prefix, _, kind = tag.partition("-")
        goes_on = prefix in "IE" and before in "BI" and kind == kind_before
        if before != "O" and not goes_on:
            spans.add((kind_before, begin, at - 1))
        if not goes_on:
            begin = at
        before, kind_before = prefix, kind
    return spans


def tag_scores(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], of_entities: bool) -> dict:
    """Of texts: the accuracy over all words, and if tags are of entities their precision, recall and F1.

    >>> tag_scores([["B-X", "O"], ["O"]], [["B-X", "B-Y"], ["O"]], True)
    {'accuracy': 0.6666666666666666, 'precision': 1.0, 'recall': 0.5, 'f1': 0.6666666666666666}
    """
    pairs = [pair for tags, wanted in zip(predicted, gold, strict=True) for pair in zip(tags, wanted, strict=True)]
    scores = {"accuracy": _ratio(sum(tag == wanted for tag, wanted in pairs), len(pairs))}
    if not of_entities:
        return scores
    spans = [(entities(tags), entities(wanted)) for tags, wanted in zip(predicted, gold)]
    both = sum(len(here & wanted) for here, wanted in spans)
    named, there = (sum(map(len, side)) for side in zip(*spans))
    return scores | {
        "precision": _ratio(both, named),
        "recall": _ratio(both, there),
        "f1": _ratio(2 * both, named + there),
    }


def answer_scores(predicted: Sequence[str], gold: Sequence[Sequence[str]]) -> dict:
    """The means over questions of exact match and F1, each the largest over the gold answers of a question.

    A question without gold answers has none in its context: only an empty answer is right.

    >>> answer_scores(["the Nile", "1912"], [["Nile", "river"], ["in 1912"]])
    {'exact_match': 0.5, 'f1': 0.8333333333333333}
    """
    exact, shared = 0.0, 0.0
    for answer, texts in zip(predicted, gold, strict=True):
        wanted = [words for words in map(normalised, texts) if words] or [[]]
        words = normalised(answer)
        exact += words in wanted
        shared += max(_word_f1(words, other) for other in wanted)
    return {"exact_match": _ratio(exact, len(gold)), "f1": _ratio(shared, len(gold))}


def normalised(answer: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles.

    >>> normalised("The U.S. Army")
    ['us', 'army']
    """
    return re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(PUNCTUATION)).split()


def _word_f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    return _ratio(2 * (Counter(words) & Counter(wanted)).total(), len(words) + len(wanted))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
