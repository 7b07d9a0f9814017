"""A batch of the lab: the loop of mini_ee/loop.py, and what the batch cost. No torch.

One turn of the loop at a time also runs in the server (serve/engines.py). Two things exit early without it: model.onnx
contains the loop as nested Ifs (export/model_graph.py), and in lossless decoding an exit drafts tokens and the full
model verifies them (exits/generation.py).
"""

import time
from collections.abc import Sized
from typing import NamedTuple

import numpy as np

from mini_ee import loop
from mini_ee.lab.rules import Planned, Rule
from mini_ee.lab.segments import BatchResult, Cost, Segments


class ExitResult(NamedTuple):
    """The exit at which each of N rows stopped, and the logits of that exit."""

    logits: np.ndarray  # (N, C)
    exit_index: np.ndarray  # (N,) int64, index into segments.exits, from 0
    layers_run: np.ndarray  # (N,) int64, depth of that exit, in 0..L
    cost: Cost


def early_exit(segments: Segments, rule: Rule, inputs: Sized) -> ExitResult:
    """Run a batch of N rows; at each exit the rule decides which rows stop, and only the others continue.

    inputs: the argument of segments.start and rule.plan; len(inputs) is N. All remaining rows stop at the last exit.
    Raises ValueError if the rule does not fit the number of exits, or if the batch has no rows.
    """
    rule.check(len(segments.exits))
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    begin = time.perf_counter()
    with segments.running():
        batch = segments.run_batch(rule, inputs) or run_segments(segments, rule, inputs)
    layers_run = np.asarray(segments.exits)[batch.exit_index]
    seconds = time.perf_counter() - begin
    return ExitResult(batch.logits, batch.exit_index, layers_run, Cost(seconds, segments, rule, inputs, batch))


def run_segments(segments: Segments, rule: Rule, inputs: Sized) -> BatchResult:
    """The loop, after the plan: if the exits are known beforehand, an engine computes no other heads."""
    plan = rule.plan(inputs)
    segments, needs = select_heads(segments, rule, plan), rule.needs if plan is None else None
    if segments.tokens_exit:  # the rows themselves exit at the only exit
        state = segments.advance(0, segments.start(inputs))
        exit_index = np.zeros(len(inputs), np.int64)
        return BatchResult(segments.read(0, state), exit_index, needs, segments.token_cost(0, state))
    decides = rule if plan is None else Planned(tuple(plan.tolist()))
    result = loop.early_exit(segments, decides, inputs)  # type: ignore[arg-type]  # exits: a protocol wants no subtype
    return BatchResult(result.logits, result.exit_index, needs)


def select_heads(segments: Segments, rule: Rule, plan: np.ndarray | None) -> Segments:
    """The segments with only the heads that will be read, if the rule knows them before the model runs."""
    if plan is not None:
        return segments.select_heads(set(plan.tolist()))
    return segments.select_heads({len(segments.exits) - 1}) if rule.needs is None else segments
