"""Parses one example, a line of text or a JSON object; errors are one line. No torch here."""

import json
from collections.abc import Sequence

from mini_ee.lab.data.values import shortened

KEYS = {
    1: (("text",), ("sentence",)),
    2: (("text", "text_b"), ("sentence1", "sentence2"), ("question", "context")),
}  # by the number of texts

TEXT_KEYS = {key for keys in KEYS.values() for names in keys for key in names}


def row_of_line(line: bytes, expected: int) -> tuple[str, ...]:
    """The texts of one line of plain text or JSON. Raises ValueError unless it has the expected number of texts."""
    text = decoded(line).rstrip("\r\n")
    if text.lstrip().startswith("{"):
        return row_of_object(json_object(text), expected)
    texts = tuple(text.split("\t")) if expected == 2 else (text,)
    if len(texts) != expected:
        raise ValueError(f"expected two texts with a tab between, or {_forms(KEYS[2])}, found {len(texts)} texts")
    return texts


def decoded(line: bytes) -> str:
    """Bytes in UTF-8 as text. Raises ValueError for other bytes."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found {error.reason} at byte {error.start}") from None


def json_object(text: str) -> dict:
    """The JSON object in a text. Raises ValueError if there is none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected one JSON object, found {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected one JSON object, found {shortened(text.strip())}")
    return fields


def row_of_object(fields: dict, expected: int) -> tuple[str, ...]:
    """The texts of an object. Raises ValueError unless it has the keys of the expected number of texts."""
    given = TEXT_KEYS & fields.keys()
    for names in KEYS[expected]:
        if given == set(names):
            return tuple(fields[name] for name in names)
    keys = ", ".join(map(repr, fields)) or "none"
    raise ValueError(f"expected {_forms(KEYS[expected])}, found the keys {keys[:200]}")


def rows_of_object(fields: dict, expected: int) -> list[tuple[str, ...]]:
    """The texts of the object's row, or of all rows of {"texts": [...]}, each row a text or a list of texts.

    Raises ValueError for anything else. It does not check that texts are strings.
    """
    if "texts" not in fields:
        return [row_of_object(fields, expected)]
    if others := sorted(TEXT_KEYS & fields.keys()):
        raise ValueError(f"expected texts or {others[0]}, found both; leave one out")
    rows = fields["texts"]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"expected texts as a list of at least one, found {str(rows)[:40]!r}")
    rows = [tuple(row) if isinstance(row, list) else (row,) for row in rows]
    wrong = next((number for number, row in enumerate(rows) if len(row) != expected), None)
    if wrong is not None:
        raise ValueError(f"expected {expected} texts in each row of texts, found {len(rows[wrong])} in row {wrong}")
    return rows


def _forms(keys: Sequence[Sequence[str]]) -> str:
    forms = ("{" + ", ".join(f'"{name}": ...' for name in names) + "}" for names in keys)
    return " or ".join(forms)
