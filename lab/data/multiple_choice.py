"""Benchmarks that a decoder answers by log-likelihood: their questions, and how an option is chosen.

                  options                   the chosen option
    HellaSwag     four endings of a text    largest log p(ending) / its length in characters (Zellers et al. 2019)
    Winogrande    two names in the blank    largest log p(text after the blank): partial scoring (Trinh & Le 2018;
                                            Sakaguchi et al. 2019)
    MMLU          the letters A to D        largest log p(letter), after up to five answered questions of the same
                                            subject (Hendrycks et al. 2021), as many as fit into the context
    LAMBADA       none: a cloze             right if greedy decoding generates the last word of a passage (Paperno et
                                            al. 2016)
    TinyStories   none: a cloze             the same for the last word of a sentence, after the story up to there
    any other     choices after a context   largest log p(choice) / its length in characters

Prompts and lengths are those of lm-evaluation-harness (`acc_norm` for HellaSwag, `acc` for the others).

A benchmark is recognised by the files in its folder. Of several .jsonl files the one named dev or val is read, else
test, never train. Its keys determine the benchmark (in a file lambada*.jsonl: text):

    HellaSwag     ctx, endings, label (the number of the right ending, from 0)
    Winogrande    sentence (with the blank _), option1, option2, answer ("1" or "2"), as it is distributed; or
                  context_options, continuation, gold
    any other     context, choices, answer (the right choice, or its number from 0)

Other formats are test/*_test.csv with dev/*_dev.csv (MMLU), tinystories*.txt, and lambada*.txt with one passage per
line. Errors in a file are one line: file:line, what was expected, what was found, what to do.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.data.decoder_texts import END_OF_TEXT
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.values import text_flaw

LETTERS = "ABCD"

VALIDATION = ("dev", "development", "validation", "valid", "val")

LAST_WORD = re.compile(r"(?<=[.!?] )[^.!?]*?(?P<word>\s\w+)[.!?]")

LAST_OF_TEXT = re.compile(r"(?s)(?P<context>.*\S)(?P<word>\s+\S+)\s*")


class Question(NamedTuple):
    """One question: options[i] is scored after contexts[i]. A cloze has one option, the right one."""

    contexts: tuple[str, ...]
    options: tuple[str, ...]
    answer: int  # index of the right option
    source: int  # questions with the same source (a story) are not independent
    introduction: str = ""
    shots: tuple[str, ...] = ()  # answered questions, between the introduction and the context


class Request(NamedTuple):
    """Token ids of a context and its option; the option begins at `start`."""

    ids: list[int]
    start: int


class QuestionRequests(NamedTuple):
    """The requests of one question, one per option; the number of shots; and whether the context was cut."""

    requests: list[Request]
    shots: int
    cut: bool


@dataclass(frozen=True)
class Benchmark:
    """Questions, and the criterion for the answer: "log_p", "log_p per character" or "greedy"."""

    name: str
    split: str
    questions: tuple[Question, ...]
    choice: str = "log_p"

    def subset(self, rows: int, seed: int) -> "Benchmark":
        """A random subset of `rows` questions in the order of the file, drawn with the seed; all if there are fewer."""
        drawn = np.sort(np.random.default_rng(seed).permutation(len(self.questions))[:rows])
        return Benchmark(self.name, self.split, tuple(self.questions[row] for row in drawn), self.choice)

    def right(self, row: int, log_p: np.ndarray, greedy: np.ndarray) -> bool:
        """Whether question `row` is answered correctly. Of options with equal scores the first is chosen.

        log_p (O,): of each option. greedy (O,): whether greedy decoding generates the option.
        """
        question = self.questions[row]
        if self.choice == "greedy":
            return bool(greedy[0])
        if self.choice == "log_p per character":
            log_p = log_p / [len(option.strip()) for option in question.options]
        return int(np.argmax(log_p)) == question.answer


def make_requests(question: Question, encode: Callable[[str], Sequence[int]], max_tokens: int) -> QuestionRequests:
    """Token ids of a question for a model of at most max_tokens, with as many shots as fit.

    encode: the tokens of a text, including special tokens before it (bos) or after it (T5's eos). The option's tokens
    begin where the tokens of context + option first differ from those of the context alone. If even a question without
    shots does not fit, the beginning of the context is removed, but not the bos token.
    """
    for shots in range(len(question.shots), -1, -1):
        before = question.introduction + "".join(question.shots[:shots])
        pairs = [(before + context, before + context + option) for context, option in zip(*question[:2])]
        fits = all(len(encode(whole)) <= max_tokens for _, whole in pairs)
        if fits or not shots:
            requests = [_request(encode(context), encode(whole)) for context, whole in pairs]
            cut = [_cut(request, _first_tokens(request, encode("")), max_tokens) for request in requests]
            return QuestionRequests(cut, shots, not fits)
    raise AssertionError("a question without shots is always returned")


def _first_tokens(request: Request, empty: Sequence[int]) -> Sequence[int]:
    """The special tokens before a text: those of an empty text, if the request begins with them."""
    return empty if request.ids[: len(empty)] == list(empty) else ()


def _request(context: Sequence[int], whole: Sequence[int]) -> Request:
    """context, whole: the tokens of the context, and of context + option."""
    same = (mine == theirs for mine, theirs in zip(context, whole))
    start = next((at for at, equal in enumerate(same) if not equal), len(context))
    return Request(list(whole), min(max(start, 1), len(whole) - 1))  # at least one token before it and one in it


def _cut(request: Request, first: Sequence[int], max_tokens: int) -> Request:
    """The request with at most max_tokens. first: special tokens that stay at the beginning."""
    surplus = len(request.ids) - max_tokens
    if surplus <= 0:
        return request
    if request.start - surplus <= len(first):
        option = len(request.ids) - request.start
        raise ValueError(f"an option of {option} tokens leaves no room for its context in a model of {max_tokens}")
    return Request([*first, *request.ids[surplus + len(first) :]], request.start - surplus)


def standard_error(right: np.ndarray, sources: np.ndarray) -> float:
    """The standard error of the mean of `right` (N,), clustered by `sources` (N,): Miller 2024, Eq. 4.

    sqrt(G / (G - 1) sum_g (sum_(i in g) (x_i - mean))^2) / N over G sources; the usual one if each has one question.
    """
    _, group = np.unique(sources, return_inverse=True)
    totals = np.bincount(group, weights=right - right.mean())
    groups = len(totals)
    return float(np.sqrt(groups / max(groups - 1, 1) * (totals**2).sum()) / len(right))


# ---- Task folders ----
def load_benchmark(folder: str | Path) -> Benchmark:
    """The benchmark in a folder; the docstring of this file lists the formats.

    Raises FileNotFoundError if the folder does not exist, ValueError if it has no known file or a file has errors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one that holds {EXPECTED}")
    if paths := [path for path in sorted(folder.glob("*.jsonl")) if "train" not in _words_of(path)]:
        return _json_benchmark(_reported(paths))
    for pattern, read in READERS.items():
        if paths := sorted(folder.glob(pattern)):
            return read(paths)
    text = ", ".join(sorted(path.name for path in folder.iterdir())[:5])
    raise ValueError(f"{folder}: expected a folder that holds {EXPECTED}, found {text or 'nothing'}")


# ---- JSON Lines ----
ParsedRow = tuple[tuple[str, ...], tuple[str, ...], int]
"""The contexts, options and answer of a Question."""


def _hellaswag(where: str, row: dict) -> ParsedRow:
    endings = tuple(f" {ending}" for ending in _texts(where, "endings", row["endings"]))
    return (row["ctx"],) * len(endings), endings, _index(where, "label", row["label"], endings)


def _winogrande_contexts(where: str, row: dict) -> ParsedRow:
    contexts = _texts(where, "context_options", row["context_options"])
    return contexts, (f" {row['continuation']}",) * len(contexts), _index(where, "gold", row["gold"], contexts)


def _winogrande(where: str, row: dict) -> ParsedRow:
    before, _, after = row["sentence"].partition("_")
    if not after.strip():
        raise _error(where, "in sentence the blank _ and text behind it", row["sentence"])
    if row["answer"] not in ("1", "2"):
        raise _error(where, 'in answer "1" or "2"', row["answer"])
    contexts = before + row["option1"], before + row["option2"]
    return contexts, (f" {after.strip()}",) * 2, int(row["answer"]) - 1


def _context_and_choices(where: str, row: dict) -> ParsedRow:
    context, choices, answer = row["context"], _texts(where, "choices", row["choices"]), row["answer"]
    if isinstance(answer, str):
        if choices.count(answer) != 1:
            raise _error(where, "in answer one of the choices, or its number from 0", answer)
        answer = choices.index(answer)
    space = "" if context[-1:].isspace() else " "
    options = tuple(space + choice.strip() for choice in choices)
    return (context,) * len(options), options, _index(where, "answer", answer, options)


def _last_word(where: str, row: dict) -> ParsedRow:
    match = LAST_OF_TEXT.fullmatch(row["text"])
    if not match:
        raise _error(where, "a text of at least two words", row["text"])
    return (match["context"],), (match["word"],), 0


class _RowFormat(NamedTuple):
    """The format of a benchmark in JSON Lines: the types of its keys, and the function that reads a row."""

    name: str  # empty: that of the folder
    types: dict[str, tuple[type, ...]]
    parse: Callable[[str, dict], ParsedRow]
    choice: str = "log_p"


ROW_FORMATS = (
    _RowFormat("HellaSwag", {"ctx": (str,), "endings": (list,), "label": (int,)}, _hellaswag, "log_p per character"),
    _RowFormat(
        "Winogrande", {"context_options": (list,), "continuation": (str,), "gold": (int,)}, _winogrande_contexts
    ),
    _RowFormat("Winogrande", dict.fromkeys(("sentence", "option1", "option2", "answer"), (str,)), _winogrande),
    _RowFormat(
        "", {"context": (str,), "choices": (list,), "answer": (int, str)}, _context_and_choices, "log_p per character"
    ),
)

LAMBADA = _RowFormat("LAMBADA", {"text": (str,)}, _last_word, "greedy")


def _words_of(path: Path) -> list[str]:
    return re.split(r"[^a-z0-9]+", path.stem.lower())


def _reported(paths: list[Path]) -> Path:
    """The one of several files that is read: the validation file, else the test file, else the only one."""
    for names in (VALIDATION, ("test",)):
        if preferred := [path for path in paths if set(names) & set(_words_of(path))]:
            paths = preferred
            break
    return _only(paths, ".jsonl file", "call the one to read dev.jsonl")


def _json_benchmark(path: Path) -> Benchmark:
    words, rows = _words_of(path), _json_rows(path)
    formats = (LAMBADA,) if words[0] == LAMBADA.name.lower() else ROW_FORMATS
    where, first = rows[0]
    row_format = next((row_format for row_format in formats if row_format.types.keys() <= first.keys()), None)
    if row_format is None:
        expected = " or ".join(", ".join(row_format.types) for row_format in formats)
        raise _error(where, f"a JSON object with {expected}", json.dumps(first, ensure_ascii=False))
    questions: list[Question] = []
    for where, row in rows:
        if not all(type(row.get(key)) in types for key, types in row_format.types.items()):
            raise _error(
                where, f"a JSON object with {', '.join(row_format.types)}", json.dumps(row, ensure_ascii=False)
            )
        questions.append(Question(*row_format.parse(where, row), len(questions)))
    split = "validation" if set(VALIDATION) & set(words) else "test" if "test" in words else path.stem
    return Benchmark(row_format.name or path.resolve().parent.name, split, tuple(questions), row_format.choice)


def _json_rows(path: Path) -> list[tuple[str, dict]]:
    """("file:line", row) of every line. Only a line feed ends a line."""
    rows, text = [], read_text(path).rstrip("\r\n")
    if not text:
        raise _error(str(path), "a JSON object in each line", "an empty file")
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise _error(where, "a JSON object", line)
        if text_flaw(json.dumps(row, ensure_ascii=False)):
            raise _error(where, "text", "half of a surrogate pair, which is no character")
        rows.append((where, row))
    return rows


# ---- Other files ----
def _lambada(paths: list[Path]) -> Benchmark:
    """One passage per line."""
    path = _only(paths)
    rows = read_text(path).rstrip("\r\n").split("\n")
    passages = [_last_word(f"{path}:{number}", {"text": row}) for number, row in enumerate(rows, start=1)]
    questions = tuple(Question(*passage, source) for source, passage in enumerate(passages))
    split = "validation" if set(VALIDATION) & set(_words_of(path)) else "test"
    return Benchmark(LAMBADA.name, split, questions, LAMBADA.choice)


def _mmlu(paths: list[Path]) -> Benchmark:
    questions: list[Question] = []
    for path in paths:
        name = path.name.removesuffix("_test.csv")
        subject = name.replace("_", " ")
        introduction = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        answered = path.parent.parent / "dev" / f"{name}_dev.csv"
        shots = tuple(f"{question} {LETTERS[answer]}\n\n" for question, answer in _mmlu_rows(answered))
        for question, answer in _mmlu_rows(path):
            options = tuple(f" {letter}" for letter in LETTERS)
            questions.append(Question((question,) * 4, options, answer, len(questions), introduction, shots))
    return Benchmark("MMLU", "test", tuple(questions))


def _mmlu_rows(path: Path) -> list[tuple[str, int]]:
    """The text of each question with its options, and the index of the answer's letter."""
    rows = []
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; MMLU has a dev file of answered questions for each test file")
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    for fields in _fields(path, reader):
        if len(fields) != 6 or fields[5] not in tuple(LETTERS):
            raise _error(f"{path}:{reader.line_num}", "a question, four options and a letter A to D", fields)
        lines = [fields[0].strip(), *(f"{letter}. {option}" for letter, option in zip(LETTERS, fields[1:5]))]
        rows.append(("\n".join(lines) + "\nAnswer:", LETTERS.index(fields[5])))
    if not rows:
        raise _error(str(path), "a question in each row", "an empty file")
    return rows


def _fields(path: Path, reader: Any) -> Iterator[list[str]]:
    """The rows of a csv.reader, which raises errors that name the line."""
    try:
        yield from reader
    except csv.Error as error:
        raise _error(f"{path}:{reader.line_num}", "a row of CSV", str(error)) from None


def _only(paths: list[Path], what: str = "file", advice: str = "name a folder with one of them") -> Path:
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{paths[0].parent}: expected one {what}, found {names}; {advice}")
    return paths[0]


def _tinystories(paths: list[Path]) -> Benchmark:
    questions: list[Question] = []
    for number, story in enumerate(held_out_stories(_only(paths))):
        for match in LAST_WORD.finditer(story):
            start, end = match.span("word")
            questions.append(Question((story[:start],), (story[start:end],), 0, number))
    if not questions:
        raise _error(str(paths[0]), f"stories of several sentences with {END_OF_TEXT} between them", "none held out")
    return Benchmark("TinyStories", "held-out", tuple(questions), "greedy")


def held_out_stories(path: Path) -> list[str]:
    """The whole stories in the last tenth of a file, on which the built-in decoder was not trained."""
    text = read_text(path)
    cut = len(text) * 9 // 10
    # The cut goes through a story: the last one before it and the first one after it are left out.
    seen, held = text[:cut].split(END_OF_TEXT)[:-1], text[cut:].split(END_OF_TEXT)[1:-1]
    known = set(map(str.strip, seen))
    return [story for story in map(str.strip, held) if story and story not in known]


READERS = {"test/*_test.csv": _mmlu, "tinystories*.txt": _tinystories, "lambada*.txt": _lambada}

EXPECTED = (
    f"a .jsonl file ({'; '.join(', '.join(row_format.types) for row_format in ROW_FORMATS)}) or {' or '.join(READERS)}"
)


def _texts(where: str, key: str, values: list) -> tuple[str, ...]:
    if len(values) < 2 or not all(isinstance(value, str) and value.strip() for value in values):
        raise _error(where, f"at least two texts in {key}", values)
    return tuple(values)


def _index(where: str, key: str, value: int, options: tuple[str, ...]) -> int:
    if not 0 <= value < len(options):
        raise _error(where, f"in {key} the number of an option, from 0 to {len(options) - 1}", value)
    return value


def _error(where: str, expected: str, actual: object) -> ValueError:
    text = actual if isinstance(actual, str) else repr(actual)
    return ValueError(f"{where}: expected {expected}, found {text[:100]}; correct or remove it")
