"""Benchmarks by log-likelihood: what their files ask, as which tokens, and which option is the answer."""

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.multiple_choice import (
    Benchmark,
    Question,
    held_out_stories,
    load_benchmark,
    make_requests,
    standard_error,
)

SHARED = os.environ.get("MINI_EE_SHARED")
END = "<|endoftext|>"
STORIES = [f"One day, a cat sat. It saw {thing}. The end." for thing in ("a dog", "two dogs", "mom!", "red")]


def json_lines(folder, name, *rows):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


HELLASWAG = {"ctx": "A man sits. he", "label": 1, "endings": ["jumps.", "sits down.", "eats.", "is."]}
WINOGRANDE = {"context_options": ["Ann met Bo so Ann", "Ann met Bo so Bo"], "continuation": "smiled.", "gold": 0}


@pytest.fixture
def mmlu(tmp_path):
    """Five answered questions and two to answer, one with a comma in quotation marks."""
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
    (tmp_path / "dev" / "high_school_art_dev.csv").write_text("".join(f"d{i},p,q,r,s,{'ABCDA'[i]}\n" for i in range(5)))
    (tmp_path / "test" / "high_school_art_test.csv").write_text('What?,1,"2, 3",4,5,B\nWho?,a,b,c,d,D\n')
    return tmp_path


def characters(text):
    """A tokenizer without merges, whose bos token is 0."""
    return [0, *map(ord, text)]


# ---- What is asked ----


def test_hellaswag_scores_four_endings_of_one_context(tmp_path):
    benchmark = load_benchmark(json_lines(tmp_path, "hellaswag_val.jsonl", HELLASWAG))
    (question,) = benchmark.questions
    assert set(question.contexts) == {"A man sits. he"} and question.options[1] == " sits down."
    assert (question.answer, benchmark.choice) == (1, "log_p per character")


def test_winogrande_scores_what_follows_the_blank_after_either_name(tmp_path):
    benchmark = load_benchmark(json_lines(tmp_path, "winogrande_val.jsonl", WINOGRANDE))
    (question,) = benchmark.questions
    assert question.contexts == ("Ann met Bo so Ann", "Ann met Bo so Bo") and set(question.options) == {" smiled."}
    assert (question.answer, benchmark.choice) == (0, "log_p")


def test_mmlu_scores_letters_after_the_subjects_answered_questions(mmlu):
    first, second = load_benchmark(mmlu).questions
    assert first.contexts[0] == "What?\nA. 1\nB. 2, 3\nC. 4\nD. 5\nAnswer:" and first.options == (
        " A",
        " B",
        " C",
        " D",
    )
    assert (first.answer, second.answer) == (1, 3)
    assert first.shots[4] == "d4\nA. p\nB. q\nC. r\nD. s\nAnswer: A\n\n" and len(first.shots) == 5
    assert first.introduction.endswith("about high school art.\n\n")


def test_the_cloze_asks_for_the_last_word_of_every_sentence_but_the_first(tmp_path):
    (tmp_path / "tinystories.txt").write_text(END.join(["x" * 4000, *STORIES, "cut off here"]))
    benchmark = load_benchmark(tmp_path)
    questions = [(question.contexts[0], question.options[0], question.source) for question in benchmark.questions]
    assert questions[:2] == [
        ("One day, a cat sat. It saw a", " dog", 0),
        ("One day, a cat sat. It saw a dog. The", " end", 0),
    ]
    assert [source for *_, source in questions] == [0, 0, 1, 1, 2, 2, 3, 3] and benchmark.choice == "greedy"


def test_held_out_are_whole_stories_of_the_last_tenth_that_are_not_before_it(tmp_path):
    path = tmp_path / "tinystories.txt"
    path.write_text(END.join(["a" * 1000, " same ", "through the cut" * 20, "new", "same", "b" * 30, "cut off"]))
    assert held_out_stories(path) == ["new", "b" * 30]


OFFICIAL = {"sentence": "Ann met Bo so _ smiled.", "option1": "Ann", "option2": "Bo", "answer": "1", "qID": "x"}


def test_winogrande_as_it_is_distributed_asks_the_same(tmp_path):
    prepared = load_benchmark(json_lines(tmp_path / "a", "winogrande_val.jsonl", WINOGRANDE))
    official = load_benchmark(json_lines(tmp_path / "b", "dev.jsonl", OFFICIAL))
    assert official == prepared and official.split == "validation"


QUESTION = {"context": "The sky is", "choices": ["blue", "a dog"], "answer": 0}


@pytest.mark.parametrize("answer", [1, "a dog"])
def test_any_other_file_has_a_context_choices_and_the_answer(tmp_path, answer):
    rows = QUESTION | {"answer": answer}, QUESTION | {"context": "Say:\n", "choices": ["x", "y", "z"]}
    benchmark = load_benchmark(json_lines(tmp_path / "mine", "questions.jsonl", *rows))
    first, second = benchmark.questions
    assert (benchmark.name, benchmark.split, benchmark.choice) == ("mine", "questions", "log_p per character")
    assert first == Question(("The sky is",) * 2, (" blue", " a dog"), 1, 0)
    assert second == Question(("Say:\n",) * 3, ("x", "y", "z"), 0, 1)


def test_lambada_asks_for_the_last_word_of_a_passage(tmp_path):
    passages = "He saw the dog . The dog saw him", "two\u2028words \n"
    expected = [(("He saw the dog . The dog saw",), (" him",)), (("two",), ("\u2028words",))]
    as_json = json_lines(tmp_path / "a", "lambada_test.jsonl", *({"text": text} for text in passages))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "lambada_test_plain_text.txt").write_text("\n".join(map(str.strip, passages)) + "\n")
    for folder in (as_json, tmp_path / "b"):
        benchmark = load_benchmark(folder)
        assert [(question.contexts, question.options) for question in benchmark.questions] == expected
        assert (benchmark.name, benchmark.split, benchmark.choice) == ("LAMBADA", "test", "greedy")


def test_of_several_text_files_none_is_chosen(tmp_path):
    for name in ("control_test_data", "development"):
        (tmp_path / f"lambada_{name}_plain_text.txt").write_text("He saw him")
    names = "lambada_control_test_data_plain_text.txt, lambada_development_plain_text.txt"
    with pytest.raises(ValueError, match=f"expected one file, found {names}; name a folder with one of them"):
        load_benchmark(tmp_path)
    (tmp_path / "lambada_control_test_data_plain_text.txt").unlink()
    assert load_benchmark(tmp_path).split == "validation"


def test_a_byte_order_mark_is_no_text(mmlu, tmp_path):
    path = mmlu / "test" / "high_school_art_test.csv"
    path.write_text('"What, who?",1,2,3,4,B\n')
    plain = load_benchmark(mmlu).questions
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    assert load_benchmark(mmlu).questions == plain
    (tmp_path / "text.txt").write_bytes("\ufeffOnce".encode())
    assert read_text(tmp_path / "text.txt") == "Once"


def test_of_several_files_the_validation_file_is_read_then_the_test_file_and_never_train(tmp_path):
    for number, name in enumerate(("train", "hellaswag_train", "test", "val")):
        json_lines(tmp_path, f"{name}.jsonl", *[QUESTION] * (number + 1))
    benchmark = load_benchmark(tmp_path)
    assert (len(benchmark.questions), benchmark.split) == (4, "validation")
    (tmp_path / "val.jsonl").unlink()
    benchmark = load_benchmark(tmp_path)
    assert (len(benchmark.questions), benchmark.split) == (3, "test")
    json_lines(tmp_path, "other_test.jsonl", QUESTION)
    message = "expected one .jsonl file, found other_test.jsonl, test.jsonl; call the one to read dev.jsonl"
    with pytest.raises(ValueError, match=message):
        load_benchmark(tmp_path)


def test_only_a_line_feed_ends_a_line_of_json(tmp_path):
    text = "one\u2028two\x85three"
    content = "".join(json.dumps(QUESTION | {"context": text}, ensure_ascii=False) + "\r\n" for _ in range(2))
    (tmp_path / "dev.jsonl").write_bytes(content.encode())
    assert [question.contexts[0] for question in load_benchmark(tmp_path).questions] == [text] * 2


# ---- As which tokens ----


def test_an_options_tokens_are_those_behind_its_context():
    made = make_requests(Question(("ab", "abc"), (" x", " yz"), 0, 0), characters, 99)
    assert [request.ids[request.start :] for request in made.requests] == [[32, 120], [32, 121, 122]]
    assert (made.shots, made.cut) == (0, False)


def test_if_a_merge_crosses_the_border_the_option_begins_with_the_merged_token():
    def merging(text):
        return [0, *(ord(letter) for letter in text.replace("b x", "\1"))]

    (request,) = make_requests(Question(("ab",), (" xy",), 0, 0), merging, 99).requests
    assert request.ids == [0, ord("a"), 1, ord("y")] and request.start == 2


def test_a_text_without_a_bos_token_scores_from_its_second_token():
    (request,) = make_requests(Question(("a",), ("b",), 0, 0), lambda text: [] if text == "a" else [7, 8], 99).requests
    assert request == ([7, 8], 1)


def test_an_option_always_has_a_token(tmp_path):
    (request,) = make_requests(
        Question(("a",), ("?",), 0, 0), lambda text: [0, 7], 99
    ).requests  # 7 is the unknown token
    assert request == ([0, 7], 1)


@pytest.mark.parametrize("room", range(8, 40))
def test_so_many_shots_as_fit_and_no_more(room):
    question = Question(("q:",) * 2, (" A", " BB"), 0, 0, "in\n", ("shot1\n", "shot2\n", "shot3\n"))
    longest = [1 + len("in\n" + "".join(question.shots[:n]) + "q: BB") for n in range(4)]
    made = make_requests(question, characters, room)
    fits = [n for n in range(4) if longest[n] <= room]
    assert made.shots == max(fits, default=0) and made.cut == (not fits)
    assert all(len(request.ids) <= room for request in made.requests)
    if fits:
        text = "in\n" + "".join(question.shots[: made.shots]) + "q: BB"
        assert made.requests[1].ids == characters(text)


def test_a_long_context_is_cut_behind_the_bos_token():
    made = make_requests(Question(("abcdefgh",), (" x",), 0, 0), characters, 6)
    assert made.cut and made.requests == [([0, *map(ord, "fgh x")], 4)]


def test_a_tokenizer_that_ends_texts_puts_nothing_before_a_cut_context():
    def ended(text):
        return [*map(ord, text), 1]

    made = make_requests(Question(("abcdefgh",), (" x",), 0, 0), ended, 6)
    assert made.cut and made.requests == [([*map(ord, "fgh x"), 1], 3)]


def test_an_option_too_long_for_any_context_is_an_error():
    with pytest.raises(ValueError, match="an option of 4 tokens leaves no room for its context in a model of 5"):
        make_requests(Question(("abc",), (" xyz",), 0, 0), characters, 5)


# ---- Which option is the answer ----


def test_hellaswag_divides_by_characters_and_winogrande_does_not():
    question = Question(("c",) * 2, (" a", " bbbb"), 1, 0)
    log_p, greedy = np.array([-1.0, -3.0]), np.zeros(2, bool)  # -1 and -3/4 a character; -1/2 and -3/5 with the space
    assert Benchmark("", "", (question,), "log_p per character").right(0, log_p, greedy)
    assert not Benchmark("", "", (question,), "log_p").right(0, log_p, greedy)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_cloze_is_right_if_greedy_decoding_writes_the_word(greedy):
    benchmark = Benchmark("", "", (Question(("c",), (" word",), 0, 0),), "greedy")
    assert benchmark.right(0, np.array([-1.0]), np.array([greedy])) is greedy


def test_a_subset_is_seeded_and_in_the_order_of_the_file():
    questions = tuple(Question((str(i),), (" x",), 0, i) for i in range(50))
    drawn = [question.source for question in Benchmark("", "", questions).subset(10, 3).questions]
    assert drawn == sorted(drawn) and len(set(drawn)) == 10
    assert drawn == [question.source for question in Benchmark("", "", questions).subset(10, 3).questions]
    assert drawn != [question.source for question in Benchmark("", "", questions).subset(10, 4).questions]
    assert len(Benchmark("", "", questions).subset(99, 0).questions) == 50


def test_the_standard_error_of_independent_rows_is_the_usual_one():
    right = np.array([True, False, True, True, False])
    assert standard_error(right, np.arange(5)) == pytest.approx(right.std(ddof=1) / math.sqrt(5))


def test_rows_of_one_source_count_together():
    random = np.random.default_rng(0)
    right, sources = random.random(40) < 0.4, random.integers(0, 7, 40)
    total = 0.0
    for source in set(sources):
        total += sum(x - right.mean() for x, s in zip(right, sources) if s == source) ** 2
    assert standard_error(right, sources) == pytest.approx(math.sqrt(7 / 6 * total) / 40)
    copied = standard_error(np.repeat(right, 4), np.repeat(np.arange(40), 4))  # nothing new is learnt from copies
    assert copied == pytest.approx(standard_error(right, np.arange(40)))


# ---- Wrong folders and files ----


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("hellaswag.jsonl", "", "expected a JSON object in each line, found an empty file"),
        ("hellaswag.jsonl", json.dumps(HELLASWAG) + "\n{", "hellaswag.jsonl:2: expected a JSON object, found {; cor"),
        ("hellaswag.jsonl", json.dumps(HELLASWAG | {"label": True}), ":1: expected a JSON object with ctx, endings, l"),
        ("hellaswag.jsonl", json.dumps(HELLASWAG | {"label": 4}), "in label the number of an option, from 0 to 3, fou"),
        ("hellaswag.jsonl", json.dumps(HELLASWAG | {"endings": ["a"]}), "at least two texts in endings"),
        ("winogrande.jsonl", json.dumps(WINOGRANDE | {"gold": -1}), "in gold the number of an option, from 0 to 1"),
        ("winogrande.jsonl", json.dumps({"gold": 1}), ":1: expected a JSON object with ctx, endings, label or context"),
        ("dev.jsonl", json.dumps({"text": "a b"}), ":1: expected a JSON object with ctx, endings, label or context_op"),
        ("dev.jsonl", json.dumps(OFFICIAL | {"sentence": "no blank"}), "in sentence the blank _ and text behind it, f"),
        ("dev.jsonl", json.dumps(OFFICIAL | {"answer": ""}), 'dev.jsonl:1: expected in answer "1" or "2", found'),
        ("dev.jsonl", json.dumps(QUESTION | {"answer": "red"}), "in answer one of the choices, or its number from 0, "),
        ("dev.jsonl", json.dumps(QUESTION | {"answer": 2}), "in answer the number of an option, from 0 to 1, found 2"),
        ("dev.jsonl", json.dumps(QUESTION | {"answer": 0.0}), "expected a JSON object with context, choices, answer"),
        ("lambada.jsonl", json.dumps({"text": "word"}), ":1: expected a text of at least two words, found word"),
        ("lambada.jsonl", json.dumps(QUESTION), "lambada.jsonl:1: expected a JSON object with text, found"),
        (
            "dev.jsonl",
            json.dumps(QUESTION | {"context": "\ud800"}),
            "dev.jsonl:1: expected text, found half of a surrogate",
        ),
        ("tinystories.txt", "One day. The end.", "expected stories of several sentences"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        load_benchmark(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_row_of_mmlu_is_named(mmlu):
    path = mmlu / "test" / "high_school_art_test.csv"
    path.write_text("What?,1,2,3,4,B\nWho?,1,2,3,4,E\n")
    with pytest.raises(ValueError, match="art_test.csv:2: expected a question, four options and a letter A to D"):
        load_benchmark(mmlu)
    csv.field_size_limit(131_072)  # a table that was read before has raised it
    path.write_text('"' + "x" * 140_000 + '",1,2,3,4,B\n')
    with pytest.raises(
        ValueError, match=r"art_test.csv:\d: expected a row of CSV, found field larger than field limit"
    ):
        load_benchmark(mmlu)
    path.write_text("")
    with pytest.raises(ValueError, match="art_test.csv: expected a question in each row, found an empty file"):
        load_benchmark(mmlu)
    path.with_name("low_test.csv").write_text("What?,1,2,3,4,B\n")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="low_dev.csv: no such file; MMLU has a dev file"):
        load_benchmark(mmlu)


@pytest.mark.parametrize("name", ["hellaswag.jsonl", "tinystories.txt"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=f"{name}: expected text in UTF-8, found invalid start byte at byte"):
        load_benchmark(tmp_path)


def test_a_folder_without_a_benchmark_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds a .jsonl file \(.*; context, choices, answer\) or test/.*, found n"):
        load_benchmark(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_benchmark(tmp_path / "missing")


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
@pytest.mark.parametrize(
    "name, rows, options", [("HellaSwag", 10042, 4), ("Winogrande", 1267, 2), ("MMLU", 14042, 4), ("TinyStories", 0, 1)]
)
def test_the_real_files_are_read_whole(name, rows, options):
    questions = load_benchmark(Path(SHARED) / "data" / name).questions
    assert len(questions) == rows or name == "TinyStories" and len(questions) > 3000
    assert all(len(question.options) == len(question.contexts) == options for question in questions)
