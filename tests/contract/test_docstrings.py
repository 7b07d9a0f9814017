"""The examples in docstrings hold, in every file that has one."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path.relative_to(ROOT).with_suffix("")
    for room in ("mini_ee", "lab", "serve", "experiments")
    for path in sorted((ROOT / room).rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_examples_in_docstrings_hold(file):
    parts = file.parts if file.parts[0] == "mini_ee" else ("mini_ee", *file.parts)
    result = doctest.testmod(importlib.import_module(".".join(parts)))
    assert result.attempted and not result.failed
