"""Many rules on one record at once: where each example exits under each rule, and what that costs.

`Record.replay` runs the loop of early_exit.py once per rule. Here all rules of a kind are compared at once, because
`stop` also takes an array of settings in place of one (rule_inputs.py). The results are the same.

Confidence measures are computed in float64 and rounded to float32. So they do not depend on the processor's exp, and
the figures of a record are the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rule_inputs import runtime_inputs, runtime_settings, with_runtime
from mini_ee.lab.rules import Measured, Rule


class Replays(NamedTuple):
    """R rules on N examples."""

    right: np.ndarray  # (R, N) bool
    depth: np.ndarray  # (R, N), the exit layer
    passes: np.ndarray  # (R, N), layers run; more than the exit layer if exits start again from the embeddings
    flops: np.ndarray  # (R,), mean over the examples, relative to the full model


@dataclass(frozen=True)
class ExitsAt(Rule):
    """All examples exit at one exit, and everything that another rule reads and computes on the way is paid."""

    rule: Rule
    exit: int

    @property
    def needs(self) -> str | None:
        return self.rule.needs

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        return np.full(len(read.logits if isinstance(read, Measured) else read), k >= self.exit)

    def flops(self, classes: int) -> float:
        return self.rule.flops(classes)


def with_measures(recorded: Record) -> Record:
    """The record with all confidence measures of its logits, rounded to float32."""
    old, logits = recorded.segments, recorded.logits[:, :-1].astype(np.float64)
    rows, exits, classes = logits.shape
    if not exits:
        return recorded
    flat = logits.reshape(-1, classes)
    measures = {
        name: function(flat).reshape(rows, exits).astype(np.float32) for name, (function, *_) in MEASURES.items()
    }
    segments = Recorded(old.exits, old.logits, old.costs[0], old.costs[1], measures | old.measures, old.costs[2])
    return recorded._replace(segments=segments)


def replay_all(recorded: Record, rules: Sequence[Rule]) -> Replays:
    """What each rule does on the record, in the order of the rules. The record has labels."""
    rows, exits = recorded.logits.shape[:2]
    right = recorded.predictions == recorded.labels[:, None]
    replays = Replays(
        np.empty(shape := (len(rules), rows), bool), np.empty(shape), np.empty(shape), np.empty(len(rules))
    )
    for numbers in _kinds(rules, recorded):
        some = [rules[number] for number in numbers]
        if len(some) == 1:
            exit_index, depth, passes, flops = _replayed(recorded, some[0])
        else:
            exit_index = _exit_indices(recorded, some)
            cost = np.stack([recorded.replay(ExitsAt(some[0], k)).cost.flops for k in range(exits)], axis=1)
            depth = np.asarray(recorded.segments.exits)[exit_index]
            passes = np.cumsum(recorded.segments.costs[1])[exit_index]
            flops = np.take(cost, exit_index + exits * np.arange(rows)).sum(axis=1) / rows / recorded.full_flops
        replays.right[numbers] = np.take(right, exit_index + exits * np.arange(rows))
        replays.depth[numbers], replays.passes[numbers], replays.flops[numbers] = depth, passes, flops
    return replays


def _replayed(recorded: Record, rule: Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """The loop itself. If no example exits early under a rule that reads nothing, the model without exits runs."""
    result = recorded.replay(rule)
    depth = result.cost.depth.astype(np.float64)
    if rule.name == "never" and (depth == recorded.segments.exits[-1]).all():
        return result.exit_index, depth, depth, 1.0
    flops = float(result.cost.flops.sum()) / len(depth) / recorded.full_flops
    return result.exit_index, depth, result.cost.layer_passes, flops


def _kinds(rules: Sequence[Rule], recorded: Record) -> list[list[int]]:
    """Numbers of the rules that differ only by settings that `stop` also takes as arrays; other rules one by one."""
    kinds: dict[tuple, list[int]] = {}
    for number, rule in enumerate(rules):
        same = [(name, value) for name, value in rule.settings().items() if name not in runtime_settings(rule)]
        values = [getattr(rule, attribute) for attribute in runtime_inputs(rule).values()]
        alone = not values or any(map(np.ndim, values)) or "token_cost" in recorded.segments.measures
        key = (number,) if alone else (rule.name, *same)
        kinds.setdefault(key, []).append(number)
    return [*kinds.values()]


def _exit_indices(recorded: Record, rules: Sequence[Rule]) -> np.ndarray:
    """(R, N): the exit of each row under rules of one kind. Every exit is read for all rows; the first stop counts."""
    values = {}
    for name, attribute in runtime_inputs(rules[0]).items():
        column = np.array([[getattr(rule, attribute)] for rule in rules])
        values[name] = column.astype(np.float32) if column.dtype.kind == "f" else column
    rule, rows = with_runtime(rules[0], values), range(len(recorded.logits))
    segments, memory, stops = recorded.segments, dict[str, np.ndarray](), []
    state, read = segments.start(rows), getattr(segments, segments.needed(rule))
    for k in range(len(segments.exits) - 1):
        state = segments.advance(k, state)
        stops.append(rule.stop(k, read(k, state), memory))
    exit_index = np.full((len(rules), len(rows)), len(stops))
    for k in reversed(range(len(stops))):
        exit_index[stops[k]] = k
    return exit_index
