"""backbone, exit-tax, batch and onnx: one encoder, with exits and without."""

import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.backbones.bert import Bert
from mini_ee.data.tokens import Inputs
from mini_ee.early_exit import early_exit
from mini_ee.export.row_segments import OrtSegments, WholeGraph
from mini_ee.export.writer import write_graphs
from mini_ee.measure.bench.common import (
    BERT_BASE,
    MIN_ROUNDS,
    WARM_ROUNDS,
    forced_out,
    from_transformers,
    inputs_of,
    medians,
    minilm_of,
    random_encoder,
    row_of,
    tensors_of,
)
from mini_ee.measure.evaluate import REST
from mini_ee.rules import NeverExit, Rule, Threshold
from mini_ee.units.rows import RowExits, RowSegments

DISPATCH = 100e-6  # seconds that the loop may take an exit


def bench_backbone(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm bB tT`: ours over transformers (installed by the extra `bench`)."""
    ours = minilm_of(model, seed)
    theirs = from_transformers("AutoModel", ours)
    for batch, tokens in ((1, 32), (1, 128), (32, 32), (32, 128)):
        ids, mask, _ = tensors_of(inputs_of(ours.config, batch, tokens, seed))
        with torch.inference_mode():
            expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(ours(ids, mask), expected, atol=1e-5, rtol=0)
            runs = [partial(ours, ids, mask), partial(theirs, input_ids=ids, attention_mask=mask)]
            own, other = medians(runs, f"backbone b{batch} t{tokens}")
        yield row_of(f"minilm b{batch} t{tokens}", own, other, bar=0.90 if (batch, tokens) == (1, 32) else 1.03)


def bench_exit_tax(model: Path | None, seed: int) -> Iterator[dict]:
    """`MODEL bB t32 eE`, heads on the first token as in the papers.

    The bar on the excess, a share of the full model's time, is printed as one on the ratio.
    """
    cases = (
        ("minilm", minilm_of(model, seed), (2, 4, 6), {1: 0.05, 32: 0.03}),
        ("bert-base", random_encoder(BERT_BASE, seed), (3, 6, 9, 12), {1: 0.03, 32: 0.03}),
    )
    for name, backbone, exits, bars in cases:
        for batch, bar in bars.items():
            yield from _exit_tax(name, backbone, exits, batch, bar, seed)


def _exit_tax(name: str, backbone: Bert, exits: tuple[int, ...], batch: int, bar: float, seed: int) -> Iterator[dict]:
    segments = RowSegments(RowExits(backbone, exits, num_labels=2, pool="first"))
    inputs, depth = inputs_of(backbone.config, batch, 32, seed), exits[-1]
    ids, _, types = tensors_of(inputs)

    @torch.inference_mode()
    def full_model():
        return backbone(ids, None, types)

    with segments.running():
        first_exit = segments.advance(0, segments.start(inputs))

    @torch.inference_mode()
    def one_head():
        return forced_out(0, len(exits)).stop(0, segments.read(0, first_exit), {})

    forced = [partial(early_exit, segments, forced_out(k, len(exits)), inputs) for k in range(len(exits))]
    full, head, *times = medians([full_model, one_head, *forced], f"exit-tax {name} b{batch}")
    for layer, seconds in zip(exits, times, strict=True):
        ideal = full * layer / depth
        yield row_of(f"{name} b{batch} t32 e{layer}", seconds, ideal, bar=1 + bar * depth / layer) | {
            "excess": (seconds - ideal) / full,
            "excess_bar": bar,
            "head_share": head / full,
        }


def bench_batch(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm b32 t32 mixed`: 12 rows leave at layer 2, 10 at 4, 10 at 6."""
    backbone, exits = minilm_of(model, seed), (2, 4, 6)
    segments = RowSegments(RowExits(backbone, exits, num_labels=2))
    inputs = inputs_of(backbone.config, 32, 32, seed)
    ids, _, types = tensors_of(inputs)
    rule = _AtExit(np.random.default_rng(seed).permutation(np.repeat([0, 1, 2], [12, 10, 10])))
    with torch.inference_mode():
        hidden = [backbone.embed(inputs.take(slice(size))) for size in (32, 20, 10)]
        around = backbone.around(inputs)

    @torch.inference_mode()
    def layers_alone():
        backbone.embed(inputs)
        for states, start, stop in zip(hidden, (0, *exits), exits):
            backbone.run_layers(states, around, start, stop)

    own, ideal = medians([lambda: early_exit(segments, rule, inputs), layers_alone], "batch")
    yield row_of("minilm b32 t32 mixed", own, ideal, bar=1.10)


class _AtExit(Rule):
    """Row i leaves at exit_of_row[i]; asked, not planned, so that every head is read on the way."""

    def __init__(self, exit_of_row: np.ndarray):
        self.exit_of_row = exit_of_row

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        rows = memory.setdefault("row", np.arange(len(self.exit_of_row)))
        Threshold(0.9).stop(k, reading, memory)
        return self.exit_of_row[rows] == k


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
