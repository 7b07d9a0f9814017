"""Files of token classification and of question answering, as CoNLL and SQuAD have them. No torch here.

    EU B-ORG            CoNLL: a token a line, its tag last, other columns between; a blank line after each text.
    rejects O           Texts are the tokens with blanks between; lines that begin with -DOCSTART- are passed over.

    {"data": [{"paragraphs": [{"context": ...,                                                SQuAD, a .json file
        "qas": [{"id": ..., "question": ..., "answers": [{"text": ...}]}]}]}]}

Tags and answers are the gold labels of `evaluate`. The exits of `add-exits` need none.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from mini_ee.lab.data.values import shortened

TAGGED = (".conll", ".bio", ".iob", ".iob2")
"""Suffixes of files with a token and its tag a line."""

DOCUMENT = "-DOCSTART-"

ANSWERS = "answers"
"""The name of a question's gold answers, also as a column of a table."""


def tagged_texts(lines: Iterable[Any]) -> Iterator[tuple[int, str, list[str], str | None]]:
    """(first line, text, tags, error or None) of each text; lines: Records of table_files.py with a line each."""
    tokens, tags = list[str](), list[str]()
    first = columns = 0
    error = None
    for line in lines:
        fields = line.fields[0].split()
        if line.error or fields and fields[0] != DOCUMENT:
            columns, first = columns or len(fields), first or line.line
            error = error or line.error or _flaw(fields, columns, line.line)
            tokens += fields[:1]
            tags += fields[-1:]
        elif tokens or error:
            yield first, " ".join(tokens), tags, error
            tokens, tags, first, error = [], [], 0, None
    if tokens or error:
        yield first, " ".join(tokens), tags, error


def _flaw(fields: list[str], columns: int, number: int) -> str | None:
    if len(fields) < 2:
        return f"expected a token and its tag, found {shortened(fields[0])} alone in line {number}; add the tag"
    if len(fields) != columns:
        return f"expected {columns} columns, as before, found {len(fields)} in line {number}; a token holds no blank"
    return None


def squad_data(text: str) -> list | None:
    """The `data` of a SQuAD file; None for other JSON."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    data = whole.get("data") if isinstance(whole, dict) else None
    return data if isinstance(data, list) and data else None


def questions_of(data: list) -> Iterator[tuple[dict, str | None]]:
    """({id, question, answers, context}, error or None) of each question."""
    for article, place in _objects(data, "data"):
        for paragraph, below in _objects(article, place, "paragraphs"):
            for question, at in _objects(paragraph, below, "qas"):
                flaw = question if isinstance(question, str) else None
                row = {} if flaw else {name: question.get(name) for name in ("id", "question", ANSWERS)}
                context = paragraph.get("context") if isinstance(paragraph, dict) else None
                for name, value in () if flaw else (("question", row["question"]), ("context", context)):
                    if not isinstance(value, str):
                        flaw = flaw or f"expected {name} of {at} as text, found {shortened(value)}; correct the file"
                yield row | {"context": context}, flaw


def gold_answers(answers: Any) -> list[str] | None:
    """The texts of a SQuAD file's [{"text": ...}], or of {"text": [...]}, as Hugging Face has them; None for others."""
    texts = answers.get("text") if isinstance(answers, dict) else answers
    if isinstance(answers, list):
        texts = [answer.get("text") if isinstance(answer, dict) else None for answer in answers]
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else None


def _objects(holder: Any, place: str, key: str | None = None) -> Iterator[tuple[Any, str]]:
    """The objects of a list, or of that under a key, with their places; a text in place of one is an error."""
    if isinstance(holder, str):
        yield holder, place
        return
    if key is not None:
        holder, place = holder.get(key), f"{place}.{key}"
    if not isinstance(holder, list):
        yield f"expected {place} as a list, found {shortened(holder)}; correct the file", place
        return
    for number, entry in enumerate(holder):
        at = f"{place}[{number}]"
        yield (entry if isinstance(entry, dict) else f"expected {at} as an object, found {shortened(entry)}"), at
