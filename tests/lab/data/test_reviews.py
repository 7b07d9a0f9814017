"""The built-in reviews and the grammar that made them: reproducible, balanced, and really as hard as it says."""

import math
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import mini_ee.weights.make_reviews as reviews
from mini_ee.lab.data.reviews import FILE, HARDNESS, Review, read_reviews
from mini_ee.weights.make_reviews import DOMAINS, GRAMMAR, SHARES, SLOT, make_reviews, table_of

EASY = HARDNESS[:2]
HARD = tuple(kind for kind in HARDNESS if kind not in EASY)
SEEDS = (0, 1)
PLAIN_ACCURACY = 0.9  # measured .98 and more
CHANCE = 0.65  # measured at most .60; 120 sentences: .5 + 3.3 standard errors


@cache
def splits(seed):
    return make_reviews(seed)


def words(text):
    return re.findall(r"[a-z'-]+", text.lower())


def naive_bayes(train):
    """An oracle that sees a bag of words: log odds with one added count. Returns text -> label."""
    counts = Counter((word, review.label) for review in train for word in set(words(review.text)))
    labels = Counter(review.label for review in train)
    odds = {
        word: math.log((counts[word, 1] + 1) / (labels[1] + 2)) - math.log((counts[word, 0] + 1) / (labels[0] + 2))
        for word, _ in counts
    }
    return lambda text: int(sum(odds.get(word, 0) for word in set(words(text))) > 0)


def accuracy(classify, rows):
    return sum(classify(row.text) == row.label for row in rows) / len(rows)


def of_kind(rows, kind):
    return [row for row in rows if row.hardness == kind]


def polar_words():
    """Every word or phrase of the polar lexicon -> its polarity, derived from the lists and not from the generator."""
    lists = [
        reviews.STRONG,
        reviews.MILD,
        reviews.MANNER,
        reviews.FELT,
        reviews.LOVE,
        reviews.LIKE,
        reviews.STIR,
        reviews.NOUN,
        reviews.PHRASE,
        reviews.ADVERB,
        reviews.BEST,
        reviews.ACT,
    ] + [domain.own for domain in DOMAINS]
    return {
        form: polarity for pair in lists for polarity in (0, 1) for entry in pair[polarity] for form in entry.split("/")
    }


# ---- reproducible, sized, disjoint, balanced --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_reviews_and_another_seed_others():
    assert make_reviews(3, train=200, dev=50, test=50) == make_reviews(3, train=200, dev=50, test=50)
    assert splits(0) != splits(1)


def test_the_file_in_the_package_is_what_the_grammar_makes_of_seed_0():
    assert FILE.read_bytes() == table_of(splits(0)).encode()
    assert read_reviews() == splits(0)
    packaging = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert FILE.name in packaging["package-data"]["mini_ee"]


def test_a_process_with_another_hash_seed_writes_the_same_file():
    code = "import mini_ee.weights.make_reviews as made; print(made.table_of(made.make_reviews(train=200, dev=50, test=50)), end='')"
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert printed == table_of(make_reviews(train=200, dev=50, test=50)).encode()


@pytest.mark.parametrize("sizes", [(4000, 600, 600), (100, 20, 10), (37, 11, 0)])
def test_sizes_are_exact(sizes):
    made = splits(0) if sum(sizes) == 5200 else make_reviews(0, **dict(zip(("train", "dev", "test"), sizes)))
    assert tuple(map(len, made.values())) == sizes and list(made) == ["train", "dev", "test"]


@pytest.mark.parametrize("seed", SEEDS)
def test_texts_are_distinct_even_without_case_and_punctuation_so_splits_are_disjoint(seed):
    texts = [re.sub(r"\W", "", row.text.lower()) for rows in splits(seed).values() for row in rows]
    assert len(set(texts)) == len(texts) == 5200


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_kinds_have_the_same_shares_in_every_split_and_labels_are_balanced_in_each_kind(split):
    rows = splits(0)[split]
    for kind, share in zip(HARDNESS, SHARES, strict=True):
        labels = Counter(row.label for row in of_kind(rows, kind))
        assert labels == {0: len(rows) * share // 200, 1: len(rows) * share // 200}, kind
    assert sum(SHARES) == 100


@pytest.mark.parametrize("seed", SEEDS)
def test_every_word_of_dev_and_test_occurs_in_train(seed):
    known = {word for row in splits(seed)["train"] for word in words(row.text)}
    assert {word for split in ("dev", "test") for row in splits(seed)[split] for word in words(row.text)} <= known


def test_the_lexicon_is_broad_and_no_word_has_both_polarities():
    lexicon = polar_words()
    assert min(Counter(lexicon.values()).values()) >= 120
    train = " ".join(" ".join(words(row.text)) for row in splits(0)["train"])
    used = [word for word in lexicon if f" {word} " in f" {train} "]
    assert len(used) > 0.9 * len(lexicon)  # drawn at random: a few rare ones are left out
    for slot in (
        reviews.STRONG,
        reviews.MILD,
        reviews.MANNER,
        reviews.FELT,
        reviews.LOVE,
        reviews.STIR,
        reviews.NOUN,
        reviews.ADVERB,
    ):
        assert not set(slot[0]) & set(slot[1])


# ---- the hardness is real -----------------------------------------------------------------------------------------------------------


def slots(template, sign):
    return Counter(slot + number for slot_sign, slot, number in SLOT.findall(template) if slot_sign == sign)


@pytest.mark.parametrize("kind", HARD)
def test_twins_of_a_hard_kind_contain_the_same_polar_words(kind):
    for entry in GRAMMAR[kind]:
        one, other = (entry, entry) if isinstance(entry, str) else entry
        assert slots(one, "+") == slots(other, "-") and slots(one, "-") == slots(other, "+"), entry


@pytest.mark.parametrize("split,kind", list(product(["train", "dev", "test"], HARD)))
def test_each_polar_word_occurs_equally_often_under_both_labels(split, kind):
    rows = of_kind(splits(0)[split], kind)
    joined = [f" {'  '.join(word for row in rows if row.label == label for word in words(row.text))} " for label in (0, 1)]
    for word in polar_words():
        counts = [text.count(f" {word.replace(' ', '  ')} ") for text in joined]
        assert counts[0] == counts[1], word


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bag_of_words_reads_plain_sentences_and_is_near_chance_on_hard_ones(seed):
    made = make_reviews(seed)  # not `splits`, which a bug of mutants.py must not leave to other tests
    train, held_out = made["train"], made["dev"] + made["test"]
    on_all = naive_bayes(train)
    assert accuracy(on_all, of_kind(held_out, "plain")) > PLAIN_ACCURACY
    for kind in HARD:  # neither a reader of all sentences nor one who studied this kind only
        on_kind = naive_bayes(of_kind(train, kind))
        assert accuracy(on_all, of_kind(held_out, kind)) < CHANCE, kind
        assert accuracy(on_kind, of_kind(held_out, kind)) < CHANCE, kind


def test_counting_polar_words_reads_plain_sentences_and_is_near_chance_on_hard_ones():
    lexicon = polar_words()
    pattern = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in sorted(lexicon, key=len, reverse=True)))
    held_out = splits(0)["dev"] + splits(0)["test"]
    for kind in HARDNESS:  # a tie is worth half
        totals = [
            (sum(2 * lexicon[word] - 1 for word in pattern.findall(row.text.lower())), row.label)
            for row in of_kind(held_out, kind)
        ]
        score = sum(0.5 if total == 0 else (total > 0) == label for total, label in totals) / len(totals)
        assert score > PLAIN_ACCURACY if kind in EASY else score == 0.5, kind


# ---- the labels follow from the sentences -----------------------------------------------------------------------------------------------

EXAMPLES = [  # kind, entry of GRAMMAR by its beginning, (positive, negative) as a reader judges
    ("plain", "What a {+adj}", "What a wonderful film!", "What a terrible film!"),
    ("plain", "{+verbed} it", "Loved it.", "Hated it."),
    (
        "wordy",
        "The {thing}, which",
        "The film, which I watched yesterday with two friends, was worth every penny.",
        "The film, which I watched yesterday with two friends, was a waste of money.",
    ),
    (
        "negated",
        "The {thing} was {+mild}, and",
        "The film was good, and it was not raining.",
        "The film was not good, and it was raining.",
    ),
    ("negated", "No joke", "Not a bad film.", "No joke, a bad film."),
    ("negated", "This {thing}", "This film isn't boring, is it?", "This film is boring, isn't it?"),
    (
        "contrasted",
        "The {early} was",
        "The poster was awful, but the film itself was great.",
        "The poster was great, but the film itself was awful.",
    ),
    (
        "contrasted",
        "The {thing} was {+any}, although",
        "The film was great, although the poster was awful.",
        "The film was awful, although the poster was great.",
    ),
    (
        "misleading",
        "{all} told me",
        "All my friends told me that the film was awful, dull and bad, and they were wrong.",
        "All my friends told me that the film was awful, dull and bad, and they were right.",
    ),
    (
        "misleading",
        "{said} told me",
        "My boss told me to expect an awful film, and what I got was a superb one.",
        "My boss told me to expect a superb film, and what I got was an awful one.",
    ),
    (
        "hedged",
        "It might",
        "It might have been a dull film if the actors had not been so superb.",
        "It might have been a superb film if the actors had not been so dull.",
    ),
    (
        "hedged",
        "Without",
        "Without the superb actors, it would have been a dull film.",
        "Without the dull actors, it would have been a superb film.",
    ),
    (
        "doubly negated",
        "Nobody could",
        "Nobody could say that the film was not good.",
        "Nobody paid me to say that the film was not good.",
    ),
    (
        "doubly negated",
        "Nobody could",
        "Nobody paid me to say that the film was not bad.",
        "Nobody could say that the film was not bad.",
    ),
]


def test_there_is_an_example_of_each_kind():
    assert {kind for kind, *_ in EXAMPLES} == set(HARDNESS)


@pytest.mark.parametrize("kind,start,positive,negative", EXAMPLES)
def test_the_grammar_gives_the_example_the_label_that_a_reader_gives_it(kind, start, positive, negative):
    """The example is parsed with its templates; each polar slot then says the label, and all of them must agree."""
    [entry] = [entry for entry in GRAMMAR[kind] if (entry if isinstance(entry, str) else entry[0]).startswith(start)]
    lexicon = polar_words()
    for text, label in ((positive, 1), (negative, 0)):
        labels = set()
        for template in dict.fromkeys((entry,) if isinstance(entry, str) else entry):
            pieces = re.split(r"(\{[+-]?[a-z]+\d?\})", template.replace("a {", "@ {").replace(" was", " W"))
            pattern = "".join("(.+)" if piece[:1] == "{" else re.escape(piece) for piece in pieces)
            pattern = pattern.replace("@", "an?").replace("\\ W", " (?:was|were)")
            match = re.fullmatch(pattern, text, re.IGNORECASE)
            signs = [piece[1] for piece in pieces if piece[:1] == "{"]
            for sign, word in zip(signs, match.groups() if match else ()):
                if sign in "+-" and word.lower() in lexicon:
                    labels.add(lexicon[word.lower()] if sign == "+" else 1 - lexicon[word.lower()])
        assert labels == {label}, (text, labels)


@pytest.mark.parametrize(
    "wrong",
    [
        r" \.",
        r"\ba [aeio]",
        r"\ban (?!hour)[^aeiou]",
        r"  ",
        r"[{}~@]",
        r"\bin?s (was|is)\b",
        r"^[a-z].*[A-Z]",
        r"\b(\w+) \1\b",
        r"(lyrics|characters|rooms|drinks) was",
    ],
)
def test_no_sentence_shows_a_seam_of_the_generator(wrong):
    assert [row.text for rows in splits(0).values() for row in rows if re.search(wrong, row.text)] == []


def test_sentences_differ_in_length_and_style():
    texts = [row.text for row in splits(0)["train"]]
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) <= 2 and max(lengths) <= 32 and 10 <= sum(lengths) / len(lengths) <= 15
    for mark in ("!", ".", "n't", " not ", "it's", "I'm", "i "):
        assert sum(mark in text for text in texts) > 20, mark


# ---- errors -------------------------------------------------------------------------------------------------------------------------------


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="0 or more, got dev=-1"):
        make_reviews(train=10, dev=-1)


def test_a_grammar_that_runs_out_is_an_error(monkeypatch):
    monkeypatch.setitem(GRAMMAR, "plain", ("{+phrase}.",))
    with pytest.raises(ValueError, match="distinct 'plain' reviews for train=200; ask for fewer"):
        make_reviews(train=200)


def test_a_review_is_text_label_hardness():
    assert Review._fields == ("text", "label", "hardness")
    assert {row.label for row in splits(0)["dev"]} == {0, 1}
