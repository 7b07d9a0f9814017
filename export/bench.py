"""The benchmark onnx: exported segments over the whole graph, over torch, and int8 over float32."""

import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.data.tokens import Inputs
from mini_ee.early_exit import early_exit
from mini_ee.export.row_segments import OrtSegments, WholeGraph
from mini_ee.export.writer import write_graphs
from mini_ee.measure.bench.common import (
    BERT_BASE,
    MIN_ROUNDS,
    WARM_ROUNDS,
    forced_out,
    inputs_of,
    medians,
    minilm_of,
    random_encoder,
    row_of,
)
from mini_ee.measure.evaluate import REST
from mini_ee.rules import NeverExit
from mini_ee.units.rows import RowExits, RowSegments

DISPATCH = 100e-6  # seconds that the loop may take an exit


def bench_onnx(model: Path | None, seed: int) -> Iterator[dict]:
    """Segments in sequence over the whole graph; forced out at layer e, every head on the way read and judged, over
    e/L of the whole graph; the loop without its graphs, an exit; segments over torch; int8 over float32.
    """
    cases = (
        ("minilm", minilm_of(model, seed), (2, 4, 6), 32, (1, 8)),
        ("bert-base", random_encoder(BERT_BASE, seed), (3, 6, 9, 12), 128, (1, 8)),
    )
    for name, backbone, exits, tokens, sizes in cases:
        model = RowExits(backbone, exits, num_labels=2, pool="first").eval()
        with tempfile.TemporaryDirectory() as folder:
            opened = {kind: _exported(model, Path(folder) / kind, kind) for kind in ("float32", "int8")}
            for batch in sizes:
                inputs = inputs_of(backbone.config, batch, tokens, seed)
                yield from _onnx(f"{name} b{batch} t{tokens}", model, opened, inputs)


def _onnx(case: str, model: RowExits, opened: dict, inputs: Inputs) -> Iterator[dict]:
    (segments, whole), (int8, _) = opened["float32"], opened["int8"]
    exits, base = segments.exits, case.startswith("bert-base b1 ")
    forced = [
        partial(early_exit, segments, forced_out(k, len(exits)), inputs) for k in range(len(exits) if base else 0)
    ]
    runs = [partial(early_exit, each, NeverExit(), inputs) for each in (whole, segments)]
    full, chain, *times = medians([*runs, *forced], f"onnx {case}", seconds_a_case=24.0)
    yield row_of(f"{case} segments", chain, full, bar=1.03)
    for layer, seconds in zip(exits[:-1], times):
        yield row_of(f"{case} e{layer}", seconds, full * layer / exits[-1], bar=1.05)
    if base:
        yield row_of(f"{case} dispatch", _dispatch(segments, inputs), DISPATCH, bar=1.0)
        compared = [partial(early_exit, each, NeverExit(), inputs) for each in (RowSegments(model), segments, int8)]
        torch_seconds, onnx_seconds, int8_seconds = medians(compared, f"onnx {case} engines", REST)
        yield row_of(f"{case} torch", onnx_seconds, torch_seconds, bar=0.80)
        yield row_of(f"{case} int8", int8_seconds, onnx_seconds, bar=0.50)


def _exported(model: RowExits, folder: Path, precision: str) -> tuple[OrtSegments, WholeGraph]:
    """The segments of a model, and its whole graph, on as many threads as torch has."""
    folder.mkdir()
    manifest = write_graphs(model, model.segments(), folder, precision)
    threads = torch.get_num_threads()
    return OrtSegments(folder, manifest, threads=threads), WholeGraph(folder, manifest, threads=threads)


def _dispatch(segments: OrtSegments, inputs: Inputs) -> float:
    """Seconds an exit of a run to the last exit that are not spent in a graph."""
    rule, inside, outside = forced_out(len(segments.exits) - 1, len(segments.exits)), [], []

    def timed(run: Callable, *args):
        begin = time.perf_counter()
        value = run(*args)
        inside[-1] += time.perf_counter() - begin
        return value

    watched = copy(segments)
    watched.sessions = list(map(copy, segments.sessions))
    for session in watched.sessions:
        session.run = partial(timed, session.run)
    for _ in range(WARM_ROUNDS + MIN_ROUNDS):
        inside.append(0.0)
        outside.append(early_exit(watched, rule, inputs).cost.seconds - inside[-1])
    return float(np.median(outside[WARM_ROUNDS:])) / len(segments.exits)
