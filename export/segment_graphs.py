"""Graphs by segment of a model of rows: for rules that model.onnx does not hold, and for servers that take rows
together again after each exit.

    input_ids, ...  (B, T), of the rows that go on
    hidden          what the segment before has handed on, of all rows that it had; `carried` the same of a method's own
    rows            (B,) int64: which of those go on
    read            () bool: whether the head is read; of the last segment it always is
 -> hidden_out, carried_out for the next; logits (B, C), max_probability (B,) of classes, exit_logit (B,) of a policy,
    in float32, without rows where nobody reads
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mini_ee.confidence import max_probability
from mini_ee.segments import Segments


def segment_graphs(segments: Segments) -> dict[str, Callable]:
    """Name of a graph -> what writes it, given a Graph; in order, since each takes what the one before gives."""
    handed: dict[str, tuple] = {}
    return {f"segment_{layer}": partial(_write, segments, k, handed) for k, layer in enumerate(segments.exits)}


def _write(segments: Segments, k: int, handed: dict[str, tuple], g) -> None:
    """handed: name -> axes of what the segment before has handed on; then of what this one does."""
    with g.tracing():
        inputs = g.inputs()
        if handed:
            rows = g.tensor(g.input("rows", "batch"), "batch", dtype=np.int64)
            taken = {name: _rows_of(g, name, axes, rows) for name, axes in handed.items()}
            state = segments.taken_up(k, inputs, taken)
        else:
            state = segments.start(inputs)
        state, last = segments.advance(k, state), k == len(segments.exits) - 1
        given = {} if last else segments.handed_on(k, state)
        handed.clear()
        for name, value in given.items():
            streams = value.shape[: value.ndim - 3] if name == "hidden" else ()
            axes = (*streams, "batch", *_named(value.shape[len(streams) + 1 :]))
            g.output(f"{name}_out", value.name, *axes)
            handed[name] = axes
        _write_reading(segments, k, state, g, optional=not last)


def _rows_of(g, name: str, axes: tuple, rows):
    at = axes.index("batch")
    value = g.tensor(g.input(name, *axes[:at], "rows_before", *axes[at + 1 :], dtype=g.dtype), *axes)
    return value[(slice(None),) * at + (rows,)]


def _named(sizes) -> list:
    return [size if isinstance(size, int) else "states" for size in sizes]


def _write_reading(segments: Segments, k: int, state, g, optional: bool) -> None:
    """The head is in the graph of its segment, since a graph of its own costs more to call than to compute."""
    classes = segments.facts()["num_labels"]

    def reading() -> dict:
        read = segments.read(k, state)
        found = {"logits": g.value(read.logits.name, "batch", classes, dtype=np.float32)}
        if segments.tokens_exit:
            found["spent"] = g.value(read.token_cost.name, "batch", 2, dtype=np.float32)
        if classes > 1:  # judged in the graph: after a segment, numpy's code is no longer in the processor's caches
            found["max_probability"] = g.value(max_probability(read.logits).name, "batch", dtype=np.float32)
        if read.exit_logit is not None:
            found["exit_logit"] = g.value(read.exit_logit.name, "batch", dtype=np.float32)
        return found

    names: list[str] = []

    def said() -> list:
        found = reading()
        names[:] = found
        return list(found.values())

    values = g.only_if(g.input("read", dtype=bool), said) if optional else said()
    for name, value in zip(names, values):
        g.output(name, value.name, *value.axes, dtype=value.dtype)
