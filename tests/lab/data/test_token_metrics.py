"""Scores of tags and of answers: doctests, the published programs where they are installed, and plain loops."""

import doctest
import random
import re
import string

import pytest

import mini_ee.lab.data.token_metrics as metrics
from mini_ee.lab.data.token_metrics import answer_scores, entities, names_entities, tag_scores

TYPES = "PER", "LOC", "NEW-YORK"
TAGS = {
    "IOB2": ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in TYPES)],
    "IOBES": ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in TYPES)],
}
WORDS = "the a an Nile nile, river U.S. army (1912) 1912 theatre Anna ... of".split()


def test_the_examples_of_the_documentation_hold():
    assert doctest.testmod(metrics).failed == 0


def drawn_tags(scheme, seed):
    """Texts with gold tags and tags that are near them, also such as no model should give."""
    generator, gold, predicted = random.Random(seed), [], []
    for _ in range(40):
        gold.append(generator.choices(TAGS[scheme], [len(TAGS[scheme]), *[1] * (len(TAGS[scheme]) - 1)], k=12))
        predicted.append([tag if generator.random() < 0.7 else generator.choice(TAGS[scheme]) for tag in gold[-1]])
    return predicted, gold


def spans_by_regex(tags):
    """Entities, of any scheme, in a string with a letter for each tag, type by type."""
    spans = set()
    for kind in TYPES:
        letters = "".join(tag[0] if tag[2:] == kind else "O" for tag in tags)
        spans |= {(kind, match.start(), match.end() - 1) for match in re.finditer("S|BI*E?|I+E?|E", letters)}
    return spans


@pytest.mark.parametrize("scheme", TAGS)
@pytest.mark.parametrize("seed", range(20))
def test_entities_are_those_of_a_regular_expression(scheme, seed):
    predicted, gold = drawn_tags(scheme, seed)
    sides = [
        [(at, *span) for at, tags in enumerate(side) for span in spans_by_regex(tags)] for side in (predicted, gold)
    ]
    right = len(set(sides[0]) & set(sides[1]))
    scores = tag_scores(predicted, gold, True)
    assert all(entities(tags) == spans_by_regex(tags) for tags in gold)
    assert (scores["precision"], scores["recall"]) == (right / len(sides[0]), right / len(sides[1]))
    pairs = [pair for one, other in zip(predicted, gold) for pair in zip(one, other)]
    assert scores["accuracy"] == sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("scheme", TAGS)
def test_scores_are_those_of_seqeval(scheme):
    seqeval = pytest.importorskip("seqeval.metrics", reason="seqeval is not installed")
    for seed in range(20):
        predicted, gold = drawn_tags(scheme, seed)
        scores = tag_scores(predicted, gold, True)
        for name in ("accuracy", "precision", "recall", "f1"):
            theirs = getattr(seqeval, f"{name}_score")(gold, predicted)
            assert scores[name] == pytest.approx(theirs, abs=1e-12), (name, seed)


@pytest.mark.parametrize(
    ("gold", "predicted", "f1"),
    [
        (["O", "O"], ["O", "O"], 0.0),  # neither has entities
        (["B-PER", "I-PER"], ["B-PER", "O"], 0.0),  # a part is no entity
        (["B-PER", "B-PER"], ["B-PER", "I-PER"], 0.0),  # two neighbours are not one
        (["I-PER", "I-PER"], ["B-PER", "I-PER"], 1.0),  # IOB1 and IOB2
    ],
)
def test_an_entity_counts_when_its_type_and_both_ends_are_right(gold, predicted, f1):
    assert tag_scores([predicted], [gold], True)["f1"] == f1
    assert tag_scores([predicted], [gold], False).keys() == {"accuracy"}


def test_parts_of_speech_are_no_entities():
    assert names_entities(TAGS["IOBES"]) and not names_entities(["O", "NOUN"]) and not names_entities(["BE", "I"])


def drawn_answers(seed):
    generator = random.Random(seed)
    answer = lambda: " ".join(generator.choices(WORDS, k=generator.randrange(5)))  # noqa: E731
    gold = [[answer() for _ in range(generator.randrange(4))] for _ in range(60)]
    return [generator.choice([*texts, answer()]) for texts in gold], gold


def words_of(text):
    """Character by character: what is neither punctuation nor an article."""
    letters = "".join("" if letter in string.punctuation else letter for letter in text.lower())
    return [word for word in letters.split() if word not in ("a", "an", "the")]


def shared_f1(words, wanted):
    if not words or not wanted:
        return float(words == wanted)
    left, shared = list(wanted), 0
    for word in words:
        if word in left:
            left.remove(word)
            shared += 1
    precision, recall = shared / len(words), shared / len(wanted)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def test_answers_are_scored_against_the_gold_answer_that_is_nearest():
    for seed in range(20):
        predicted, gold = drawn_answers(seed)
        exact, shared = [], []
        for answer, texts in zip(predicted, gold):
            wanted = [words_of(text) for text in texts if words_of(text)] or [[]]
            exact.append(any(words_of(answer) == words for words in wanted))
            shared.append(max(shared_f1(words_of(answer), words) for words in wanted))
        expected = {"exact_match": sum(exact) / len(exact), "f1": pytest.approx(sum(shared) / len(shared))}
        assert answer_scores(predicted, gold) == expected and 0 < expected["exact_match"] < 1
