"""Benchmarks: ratios of interleaved medians in one process, warm. A row is a case of DESIGN.md's list and its bar.

backbone    our forward over that of transformers, on the same weights
exit-tax    a run forced out at layer e, every head on the way read and judged, over e/L of the full model
            without heads
batch       32 rows that leave at mixed depths, over the layers alone at the batch sizes that remain
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from mini_ee.bert import Bert, BertConfig
from mini_ee.checkpoint import load_backbone, save_backbone
from mini_ee.early_exit import early_exit
from mini_ee.exits import MultiExit, TorchSegments
from mini_ee.rules import Rule, Threshold
from mini_ee.tasks import Inputs

MINILM = BertConfig(
    model_type="bert",
    vocab_size=30522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    max_position_embeddings=512,
)
BERT_BASE = BertConfig(
    model_type="bert",
    vocab_size=30522,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=512,
)
MIN_ROUNDS, SECONDS_A_CASE = 15, 12.0  # measured in turns until both are reached
WARM_ROUNDS = 3


def bench_backbone(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm bB tT`: ours over transformers (installed by the extra `bench`)."""
    try:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        from transformers import BertModel
        from transformers.utils import logging
    except ImportError:
        raise ValueError("bench backbone compares with transformers: pip install 'mini-ee[bench]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ours = _minilm(model, seed)
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(ours, Path(folder) / "model")
        theirs = BertModel.from_pretrained(Path(folder) / "model").eval()
    for batch, tokens in ((1, 32), (1, 128), (32, 32), (32, 128)):
        ids, mask, _ = _tensors(_inputs(ours.config, batch, tokens, seed))
        with torch.inference_mode():
            expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(ours(ids, mask), expected, atol=1e-5, rtol=0)
            runs = [partial(ours, ids, mask), partial(theirs, input_ids=ids, attention_mask=mask)]
            own, other = medians(runs, f"backbone b{batch} t{tokens}")
        yield _row(f"minilm b{batch} t{tokens}", own, other, bar=0.90 if (batch, tokens) == (1, 32) else 1.03)


def bench_exit_tax(model: Path | None, seed: int) -> Iterator[dict]:
    """`MODEL bB t32 eE`, heads on the first token as in the papers.

    The bar on the excess, a share of the full model's time, is printed as one on the ratio.
    """
    cases = (
        ("minilm", _minilm(model, seed), (2, 4, 6), {1: 0.05, 32: 0.03}),
        ("bert-base", _random(BERT_BASE, seed), (3, 6, 9, 12), {1: 0.03, 32: 0.03}),
    )
    for name, backbone, exits, bars in cases:
        for batch, bar in bars.items():
            yield from _exit_tax(name, backbone, exits, batch, bar, seed)


def _exit_tax(name: str, backbone: Bert, exits: tuple[int, ...], batch: int, bar: float, seed: int) -> Iterator[dict]:
    segments = TorchSegments(MultiExit(backbone, exits, num_labels=2, pool="first"))
    inputs, depth = _inputs(backbone.config, batch, 32, seed), exits[-1]
    ids, _, types = _tensors(inputs)

    @torch.inference_mode()
    def full_model():
        return backbone(ids, None, types)

    with segments.running():
        first_exit = segments.advance(0, segments.start(inputs))

    @torch.inference_mode()
    def one_head():
        return _forced_out(0, len(exits)).stop(0, segments.read(0, first_exit), {})

    forced = [partial(early_exit, segments, _forced_out(k, len(exits)), inputs) for k in range(len(exits))]
    full, head, *times = medians([full_model, one_head, *forced], f"exit-tax {name} b{batch}")
    for layer, seconds in zip(exits, times, strict=True):
        ideal = full * layer / depth
        yield _row(f"{name} b{batch} t32 e{layer}", seconds, ideal, bar=1 + bar * depth / layer) | {
            "excess": (seconds - ideal) / full,
            "excess_bar": bar,
            "head_share": head / full,
        }


def bench_batch(model: Path | None, seed: int) -> Iterator[dict]:
    """`minilm b32 t32 mixed`: 12 rows leave at layer 2, 10 at 4, 10 at 6."""
    backbone, exits = _minilm(model, seed), (2, 4, 6)
    segments = TorchSegments(MultiExit(backbone, exits, num_labels=2))
    inputs = _inputs(backbone.config, 32, 32, seed)
    ids, _, types = _tensors(inputs)
    rule = _AtExit(np.random.default_rng(seed).permutation(np.repeat([0, 1, 2], [12, 10, 10])))
    with torch.inference_mode():
        hidden = [backbone.embed(ids[:size], types[:size]) for size in (32, 20, 10)]

    @torch.inference_mode()
    def layers_alone():
        backbone.embed(ids, types)
        for states, start, stop in zip(hidden, (0, *exits), exits):
            backbone.run_layers(states, None, start, stop)

    own, ideal = medians([lambda: early_exit(segments, rule, inputs), layers_alone], "batch")
    yield _row("minilm b32 t32 mixed", own, ideal, bar=1.10)


class _AtExit(Rule):
    """Row i leaves at exit_of_row[i]; asked, not planned, so that every head is read on the way."""

    def __init__(self, exit_of_row: np.ndarray):
        self.exit_of_row = exit_of_row

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        rows = memory.setdefault("row", np.arange(len(self.exit_of_row)))
        Threshold(0.9).stop(k, reading, memory)
        return self.exit_of_row[rows] == k


BENCHES = {"backbone": bench_backbone, "exit-tax": bench_exit_tax, "batch": bench_batch}


def medians(runs: list[Callable], name: str) -> list[float]:
    """Median seconds of each, run in turns, after a warm-up, for MIN_ROUNDS and SECONDS_A_CASE at least."""
    for _ in range(WARM_ROUNDS):
        for run in runs:
            run()
    seconds = [[] for _ in runs]
    begin = time.perf_counter()
    with tqdm(desc=name, unit="round", delay=2, leave=False) as bar:
        while len(seconds[0]) < MIN_ROUNDS or time.perf_counter() - begin < SECONDS_A_CASE:
            for run, times in zip(runs, seconds):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            bar.update()
    return [float(np.median(times)) for times in seconds]


def _forced_out(k: int, num_exits: int) -> Threshold:
    """A threshold that is judged at every exit and reached at exit k only."""
    return Threshold(tuple(-np.inf if exit == k else np.inf for exit in range(num_exits)))


def _row(case: str, seconds: float, against: float, bar: float) -> dict:
    ratio = seconds / against
    return {
        "case": case,
        "seconds": seconds,
        "against_seconds": against,
        "ratio": ratio,
        "bar": bar,
        "holds": ratio <= bar,
    }


def _minilm(model: Path | None, seed: int) -> Bert:
    return load_backbone(model) if model else _random(MINILM, seed)


def _random(config: BertConfig, seed: int) -> Bert:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Bert(config, lm_head=False).eval()


def _inputs(config: BertConfig, batch: int, tokens: int, seed: int) -> Inputs:
    ids = np.random.default_rng(seed).integers(1000, config.vocab_size, (batch, tokens))
    return Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("",),) * batch)


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]
