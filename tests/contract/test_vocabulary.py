"""One term for one thing: words that meant several things do not come back as names.

Help strings have their own tests, in tests/lab/commands/test_cli.py.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("mini_ee", "lab", "serve", "experiments", "weights", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

BETTER = {  # a name that is a puzzle -> names that say what it is
    "said": "logits, predictions, line",
    "told": "message, fields, row",
    "asked": "questions, test_rows, request",
    "kept": "agreement, kept_layers, saved",
    "heard": "probe_result",
    "hear": "probe_tokens",
    "left_by": "exit_cdf",
    "HeldRule": "GraphRule",
    "Held": "CaseLocked",
    "Hearing": "BenchmarkScores",
    "Heard": "ProbeResult",
    "Told": "HTTPError",
    "ToldSegments": "OnlineCalibrationSegments",
    "Ran": "BatchResult",
    "Exited": "ExitedRows",
    "NOBODY": "heads_evaluated",
    "spent": "token_cost",
    "will_read": "select_heads",
    "Around": "LayerContext",
    "GraphAround": "LayerContext",
    "Halves": "SplitLayer",
    "Writer": "GenerativeBackbone",
    "reads_apart": "is_encoder_decoder",
    "begins_with": "decoder_start_tokens",
    "lay_under": "bind_encoder_memory",
    "how": "config",
    "learns": "trainable",
    "judge": "validate",
    "watch": "log_metrics",
    "taught": "targets",
    "fed": "runtime_inputs",
    "facts": "metadata",
    "idle": "unused_when",
    "LOTS": "PERMUTATIONS",
    "suits": "estimate",
    "promise": "guarantee",
    "promised": "guaranteed",
    "promises": "guarantees",
}


def names_in(source: str) -> set[str]:
    """Every identifier that a file binds or reads, without leading underscores."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        for attribute in ("id", "name", "attr", "arg", "asname"):
            if isinstance(name := getattr(node, attribute, None), str):
                names.add(name.lstrip("_"))
    return names


def test_names_are_the_fields_terms():
    """Only files that contain such a word at all are parsed."""
    word, puzzles = re.compile(rf"\b_*({'|'.join(BETTER)})\b"), {}
    for path in SOURCES:
        source = path.read_text()
        names = names_in(source) & BETTER.keys() if word.search(source) else ()
        puzzles |= {f"{path.relative_to(ROOT)}: {name}": BETTER[name] for name in names}
    assert not puzzles


def test_a_private_name_would_be_found():
    """Planted: as a variable, a function, an argument, an attribute and an import."""
    for source in ("said = 1", "def hear(): ...", "def f(how): ...", "x.kept", "import a as told", "self._asked = 1"):
        assert names_in(source) & BETTER.keys(), source
