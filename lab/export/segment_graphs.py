"""One graph per segment of a model of rows, for rules that model.onnx does not contain, and for servers that batch
rows again after each exit.

    input_ids, ...  (B, T), of the rows that continue
    hidden, carried hidden_out and carried_out of the segment before, for all rows that it computed
    rows            (B,) int64: which of those rows continue
    read            () bool: whether the head is evaluated; the head of the last segment always is
 -> hidden_out      (B, T, D), the hidden states; with LoRA streams (n, B, T, D); with T5 (B, 1 + S, D): the one token
                    of the decoder, then the output of the encoder, so that no later segment runs the encoder
    carried_out     a further field of the state, if the segments name one in `carried`
    logits (B, C) or embedding (B, d), exit_logit (B,) of a policy: float32, with no rows if `read` is false

A segment that starts from the embeddings takes nothing from the one before (Segments.from_embeddings).
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.export.manifest import output_of
from mini_ee.lab.segments import Segments


def segment_graphs(segments: Segments) -> dict[str, Callable]:
    """Name of a graph -> the function that writes it, given a Graph. Call them in order."""
    handed: dict[str, tuple] = {}
    return {f"segment_{layer}": partial(_write, segments, k, handed) for k, layer in enumerate(segments.exits)}


def _write(segments: Segments, k: int, handed: dict[str, tuple], g) -> None:
    """handed: name -> axes of the values that the segment before hands on; replaced by those of this segment."""
    with g.tracing():
        inputs = g.inputs()
        state = segments.start(inputs)
        if handed:
            rows = g.tensor(g.input("rows", "batch"), "batch", dtype=np.int64)
            taken = {name: _rows_of(g, name, axes, rows) for name, axes in handed.items()}
            state = _resumed(segments, state, **taken)
        state, last = segments.advance(k, state), k == len(segments.exits) - 1
        given = {} if last or k + 1 in segments.from_embeddings else _handed_on(segments, state)
        handed.clear()
        for name, value in given.items():
            streams = value.shape[: value.ndim - 3] if name == "hidden" else ()
            axes = (*streams, "batch", *_named(value.shape[len(streams) + 1 :]))
            # OpenVINO takes an output that a branch reads, too, for an output of the branch: here they are two values.
            g.output(f"{name}_out", g.op("Identity", value.name), *axes)
            handed[name] = axes
        _write_reading(segments, k, state, g, optional=not last)


def _handed_on(segments: Segments, state) -> dict[str, Tensor]:
    """What the graph of a segment hands on to the next, by name."""
    hidden = state.hidden
    if segments.model.backbone.is_encoder_decoder:  # its output is too expensive to compute twice
        memory = state.context.memory
        hidden = torch.cat((hidden, memory.expand(*hidden.shape[:-2], *memory.shape[-2:])), dim=-2)
    carried = segments.carried and getattr(state, segments.carried)
    return {"hidden": hidden} if carried is None else {"hidden": hidden, "carried": carried}


def _resumed(segments: Segments, state, hidden: Tensor, carried: Tensor | None = None):
    """The state before a segment: that of `start`, with the values that the segment before has handed on."""
    context = state.context
    if segments.model.backbone.is_encoder_decoder:  # all streams have the same
        context = context._replace(memory=hidden[(0,) * (hidden.ndim - 3)][:, 1:])
        hidden = hidden[..., :1, :]
    fields = {} if carried is None else {segments.carried: carried}
    return state._replace(hidden=hidden, context=context, **fields)


def _rows_of(g, name: str, axes: tuple, rows):
    at = axes.index("batch")
    value = g.tensor(g.input(name, *axes[:at], "rows_before", *axes[at + 1 :], dtype=g.dtype), *axes)
    return value[(slice(None),) * at + (rows,)]


def _named(sizes) -> list:
    return [size if isinstance(size, int) else "states" for size in sizes]


def _write_reading(segments: Segments, k: int, state, g, optional: bool) -> None:
    """The head is part of the graph of its segment: a call of a separate graph would take longer than the head."""
    classes, output = segments.model.num_labels, output_of(segments.model.unit)

    def reading() -> dict:
        outputs = {output: g.value(segments.read(k, state).name, "batch", classes, dtype=np.float32)}
        if segments.tokens_exit:
            outputs["spent"] = g.value(segments.token_cost(k, state).name, "batch", 2, dtype=np.float32)
        if segments.has_policy and k < len(segments.exits) - 1:
            outputs["exit_logit"] = g.value(segments.exit_logit(k, state).name, "batch", dtype=np.float32)
        return outputs

    names: list[str] = []

    def written() -> list:
        outputs = reading()
        names[:] = outputs
        return list(outputs.values())

    values = g.only_if(g.input("read", dtype=bool), written) if optional else written()
    for name, value in zip(names, values):
        g.output(name, value.name, *value.axes, dtype=value.dtype)
