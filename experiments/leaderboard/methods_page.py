"""results/METHODS.md: a line for each method of the registry, from its file and the leaderboard, so it cannot age."""

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mini_ee
from mini_ee.experiments.leaderboard.figures import rules_for
from mini_ee.experiments.leaderboard.protocol import trained_parts
from mini_ee.experiments.leaderboard.ranking import interval
from mini_ee.experiments.leaderboard.tables import Leaderboard
from mini_ee.experiments.leaderboard.token_figures import Decoders, flops_saved
from mini_ee.experiments.leaderboard.token_rules import LEVEL
from mini_ee.experiments.markdown import listed
from mini_ee.experiments.pages import plus_minus
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.registry import METHODS
from mini_ee.lab.registry import RULES as METHOD_RULES
from mini_ee.lab.rules import RULES, rule_class
from mini_ee.lab.training.method import Method, load_method

FIRST_LINE = re.compile(
    r"(?P<name>[^(]+) \((?P<authors>[^()]*?) (?P<year>\d{4})(?:, (?P<where>[^()]*))?\): (?P<what>.+)", re.S
)
ARXIV, ANTHOLOGY = (
    re.compile(r"arXiv:(\d{4}\.\d{4,5})"),
    re.compile(r"\b(\d{4}\.[a-z-]+-[a-z]+\.\d+|[A-Z]\d\d-\d{4})\b"),
)
UNITS = {"rows": "example", "prompts": "example", "tokens": "token", "embeddings": "embedding"}
EXIT_RULE = 4  # column of a row
PLANNED, INSIDE = "decided before the model runs", "tokens exit inside the model"


class About(NamedTuple):
    """What the head of a method's file says."""

    name: str
    paper: str  # authors and year
    link: str  # Markdown; empty if the head names no address
    what: str  # the rest of the first sentence
    deviations: int


def parse_about(text: str) -> About:
    """The head of a method's file. Raises ValueError if its first sentence is not NAME (AUTHORS YEAR, ...): WHAT."""
    match = FIRST_LINE.fullmatch(" ".join(text.partition("\n\n")[0].split()))
    if match is None:
        raise ValueError(
            f"expected a docstring that begins with NAME (AUTHORS YEAR, arXiv:...): WHAT, found {text[:60]!r}"
        )
    link = ""
    if address := ARXIV.search(text):
        link = f"[arXiv:{address[1]}](https://arxiv.org/abs/{address[1]})"
    if match["where"] and "arXiv" not in match["where"]:
        address = ANTHOLOGY.search(text)
        link = f"[{match['where']}](https://aclanthology.org/{address[1]})" if address else match["where"]
    return About(
        match["name"], f"{match['authors']} {match['year']}", link, match["what"].rstrip("."), deviations(text)
    )


def deviations(text: str) -> int:
    """The numbered points after the word Deviations or Decisions: 1., 2., 3. in this order."""
    begin = re.search(r"^(Deviations|Decisions)", text, flags=re.MULTILINE)
    count = 0
    if begin:
        for match in re.finditer(r"(?<![\w.])(\d+)\.\s", text[begin.start() :]):
            count += int(match[1]) == count + 1
    return count


def _head(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _of_the_core(path: Path) -> int:
    """The deviations that the core's file of the same paper lists."""
    core = Path(mini_ee.__file__).with_name(path.name)
    return deviations(_head(core)) if core.exists() else 0


def source_of(name: str) -> Path:
    """The file of a method, which is not imported."""
    spec = find_spec(METHODS[name])
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def code_lines(path: Path) -> int:
    """Lines of a method's files, NAME.py and NAME_*.py, without empty lines, comments and docstrings."""
    return sum(_code_lines(source) for source in [path, *sorted(path.parent.glob(f"{path.stem}_*.py"))])


def _code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and at not in texts for at, line in lines)


def trains(name: str, method: Method) -> str:
    """What a method trains, stage by stage."""
    if method.search or method.train:
        return "nothing: a search" if method.search else "nothing: it reads a trained model"
    if method.keeps_model or method.units == ("embeddings",) and not method.trains_encoder:
        return "exits; the model is frozen"
    if "rows" not in method.units:
        return "encoder" if method.trains_encoder else "decoder"
    stages = list(map(listed, trained_parts(name)))
    different = list(dict.fromkeys(stages))
    changes = sum(before != after for before, after in zip(stages, stages[1:]))
    return f"{' → '.join(different)}{', in turns' if changes >= len(different) > 1 else ''}"


def decides(name: str, method: Method) -> str:
    """Who decides where to exit: the kinds of the rules that the method proposes for a record
    that has the outputs of a policy."""
    for rule, module in METHOD_RULES.items():
        if module == METHODS[name]:
            return rule if method.candidates else f"{rule}, {PLANNED}"
    if "embeddings" in method.units and method.candidates is None:
        return "policy" if method.policy else "fixed"
    if method.search:
        return f"a search, {PLANNED}"
    if isinstance(exits := method.exits(6) if callable(method.exits) else (), tuple) and exits == (6,):
        return INSIDE
    rules = rules_for(name, _example())
    return ", ".join(dict.fromkeys(_kind(rule.to_dict()) for rule in rules if rule.name != "never"))


def _kind(rule: dict) -> str:
    return f"{rule['name']} on {rule['measure']}" if rule["name"] == "threshold" else rule["name"]


def _example() -> Record:
    """A record of a few rows, on which a method proposes rules."""
    random, exits = np.random.default_rng(0), (2, 4, 6)
    logits = random.normal(size=(40, len(exits), 2)).astype(np.float32)
    measures = {"exit_logit": random.normal(size=(40, len(exits) - 1)).astype(np.float32)}
    segments = Recorded(exits, logits, np.ones((40, len(exits), 2)), [2, 2, 2], measures)
    return Record(segments, logits, 6.0, labels=random.integers(0, 2, 40))


def methods_figures(board: Leaderboard, decoders: Decoders) -> dict:
    """What the page shows: a row for each method of the registry, and the rules and measures that these rows name."""
    decoder, saved = flops_saved(decoders)
    rows = [_row(board, name, saved) for name in METHODS]
    words = set(re.findall(r"[\w-]+", " ".join(row[EXIT_RULE] for row in rows)))
    classes = {name: rule_class(name) for name in (*RULES, *METHOD_RULES)}
    measures = {name: measure for name, (measure, *_) in MEASURES.items()}
    explained = [
        [[name, _first_paragraph(described)] for name, described in named.items() if name in words]
        for named in (classes, measures)
    ]
    return {"rows": rows, "decoder": decoder, "level": LEVEL, "rules": explained[0], "measures": explained[1]}


def _row(board: Leaderboard, name: str, saved: dict[str, str]) -> list[str]:
    path, method = source_of(name), load_method(name)
    head = parse_about(_head(path))
    file = METHODS[name].removeprefix("mini_ee.").replace(".", "/") + ".py"
    rule = decides(name, method)
    units = ["token"] if rule == INSIDE else ["–"] if method.search else [UNITS[unit] for unit in method.units]
    return [
        f"`{name}`",
        f"{head.paper}{', ' if head.link else ''}{head.link}",
        f"{head.name}: {head.what}",
        trains(name, method),
        rule,
        ", ".join(dict.fromkeys(units)),
        f"[{file.rpartition('/')[2]}](../{file})",
        str(code_lines(path)),
        str(head.deviations + _of_the_core(path)),
        plus_minus(interval(board.headline[name])) if name in board.headline else "",
        "{} ({} to {})".format(*board.ranks[name]) if name in board.ranks else "",
        saved.get(name, ""),
    ]


def _first_paragraph(explained: object) -> str:
    """How the code explains a rule or a measure."""
    return " ".join((inspect.getdoc(explained) or "").partition("\n\n")[0].split())
