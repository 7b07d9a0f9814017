"""results/token-tasks.md: targets of the fine-tuning, draws from a record, and the page of a JSON."""

import numpy as np
import pytest
from words import words_tokenizer

from mini_ee.experiments.measured import make_page, token_tasks_page
from mini_ee.experiments.measured.add_exits_guarantee import LEVELS, summary
from mini_ee.experiments.measured.fine_tuning import SPECIAL
from mini_ee.experiments.measured.token_tasks_page import PARTS, SETS, record_from, repetition
from mini_ee.lab.data.files import write_json
from mini_ee.lab.token_tasks import LABELS, WEAKEST

TEXTS, N = ("the film was-very good", "a song"), 2_000


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_tokenizer(), model_max_length=12, **SPECIAL)


def test_the_first_token_of_a_word_has_its_tag(tokenizer):
    words = [text.split(" ") for text in TEXTS]
    tokens = tokenizer(words, is_split_into_words=True, padding=True)
    tags = [["O", "B", "O", "I"], ["O", "B"]]  # "was-very" is one word of three tokens
    targets = token_tasks_page._tag_targets(tokens, tags, {"O": 0, "B": 1, "I": 2})["labels"].tolist()
    none = token_tasks_page.IGNORED
    assert targets == [[none, 0, 1, 0, none, none, 2, none], [none, 0, 1, *[none] * 5]]


def test_a_span_has_the_tokens_of_its_ends_and_one_that_is_cut_is_ignored(tokenizer):
    questions, answers = ["the song is", "the very very very song is"], ["very good ", "very good "]
    gold = [{"text": answer, "answer_start": TEXTS[0].index("very")} for answer in answers]
    tokens = tokenizer(questions, [TEXTS[0]] * 2, padding=True, truncation="only_second")
    (start, beyond), (end, other) = (ends.tolist() for ends in token_tasks_page._span_targets(tokens, gold).values())
    assert tokenizer.convert_ids_to_tokens(tokens["input_ids"][0][start : end + 1]) == ["very", "good"]
    assert beyond == other == token_tasks_page.BEYOND > len(tokens["input_ids"][1])


@pytest.fixture(scope="module")
def recorded():
    """Two exits; the first one agrees with the last as often as its confidence says."""
    random = np.random.default_rng(0)
    weakest, numbers = random.random((N, 1)) ** 0.05, random.integers(1 << 60, size=(N, 2))
    agrees = random.random(N) < weakest[:, 0]
    numbers[agrees, 0] = numbers[agrees, 1]
    return record_from({"exits": [2, 6], "numbers": numbers.tolist(), "weakest": weakest.tolist()})


def test_draws_without_a_test_violate_the_agreement_and_draws_with_one_rarely(recorded):
    draws = [repetition(recorded, LABELS, seed) for seed in range(6)]
    violated = np.array([[one["guaranteed"] and one["agreement"] < one["level"] for one in draw] for draw in draws])
    tested, untested = violated.sum(axis=0).reshape(2, len(LEVELS))
    assert tested.sum() <= 1 and untested.sum() >= 3
    levels = [(one["level"], one["planted"]) for one in draws[0]]
    assert levels == [(level, planted) for planted in (None, "no test") for level in LEVELS]
    one, (first, last) = draws[0][LEVELS.index(0.95)], recorded.logits[:, :, 0].T
    exiting = round(one["saved"] * 6 / 4 * N)  # each of them saves four of six layers
    surest = np.argsort(-recorded.segments.measures[WEAKEST][:, 0])[:exiting]
    assert one["agreement"] == pytest.approx(1 - (first != last)[surest].sum() / N)


def of_set(name: str, found: bool) -> dict:
    """A measured set, with exits or without."""
    scores = {"f1": 0.8, "precision": 0.9, "recall": 0.7, "accuracy": 0.95}
    exits = {"exits": [2, 6], "exit_counts": [400, 600], "per_exit_agreement": [0.5, 1.0]}
    exits |= {"per_exit_scores": [scores, scores], "scores": scores, "full_scores": scores | {"f1": 0.81}}
    draws = [{"level": 0.95, "planted": None, "guaranteed": True, "agreement": at, "saved": 0.3} for at in (0.94, 0.96)]
    return {
        **{"minutes": 3.0, "recorded": 4000, "calls": {"texts": 3000, "processor_minutes": 2.5, "peak_mb": 900}},
        "summary": {"pays": found, "exits": [2, 6], "texts": {}, "guarantee": {"rows": 9}, "compared": "Equal."},
        "found": exits | {"agreement": 0.97, "layers_saved": 0.4, "speedup": 1.25} if found else None,
        "levels": [summary(draws)],
    }


def test_a_page_is_written_for_sets_with_exits_and_for_one_where_they_are_not_worth_it(tmp_path):
    made = {"processor": "A", "machine": "x86_64", "torch": "2", "commit": "c0", "core_hours": 0.5, "data": {}}
    measured = {name: of_set(name, found) for name, found in zip(SETS, (True, False))}
    write_json(tmp_path / "token-tasks.json", measured | {"measured": dict.fromkeys(PARTS, made)})
    assert make_page("token-tasks", out=tmp_path)["page"]
    text = (tmp_path / "token-tasks.md").read_text()
    assert "| BC5CDR-disease | every label | 3,000 | 97.0 | 81.0 | 80.0 | 40.0 | 80 | yes | 2.5 |" in text
    assert "**On SQuADShifts, exits are not worth it**" in text and "| SQuADShifts | every" not in text
    assert "none of the rows with the test shows more" in text  # 1 of 2 is not significantly more than 5%
    assert "| SQuADShifts | 95% | 2 of 2 | 1 |" in text and "| BC5CDR-disease | 2 | 400 | 50.0 | 80.0 |" in text
