"""One model.onnx with four exits of a 22-layer ModernBERT: does the time at each exit follow the share of layers?"""

import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from mini_ee.experiments.bench import common
from mini_ee.experiments.bench.onnx import exit_at, exported
from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.backbones.modernbert import ModernBert, ModernBertConfig
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.rules import Never

CONFIG = ModernBertConfig(
    model_type="modernbert",
    vocab_size=50368,
    hidden_size=768,
    num_hidden_layers=22,
    num_attention_heads=12,
    intermediate_size=1152,
)
"""answerdotai/ModernBERT-base."""

EXITS, TOKENS, SECONDS = (6, 11, 16, 22), 128, 90.0


class Clock:
    """Replaces the module `time` in bench/common.py: seconds of processor time, so that other programs count little."""

    perf_counter, sleep = staticmethod(time.process_time), staticmethod(time.sleep)


def one_file(sources: Sources, work: Path) -> dict:
    """Median times of all exits and of the model without exits, in turns."""
    return {"one-file": stored(work, "one file", measure)}


def measure() -> dict:
    """Export, then run at batch size 1; each run is timed when its weights are in the caches, see bench.medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backbone = ModernBert(CONFIG, lm_head=False).eval()
    ids = np.random.default_rng(0).integers(1_000, 50_000, (1, TOKENS))
    inputs = Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("",),))
    model, plain = (RowExits(backbone, exits, 2, "first").eval() for exits in (EXITS, EXITS[-1:]))
    with tempfile.TemporaryDirectory() as folder:
        graph, without = (
            exported(variant, Path(folder) / name) for variant, name in ((model, "exits"), (plain, "plain"))
        )
        rules = [Never(), *(exit_at(k, len(EXITS)) for k in range(len(EXITS)))]
        runs = [*(partial(early_exit, graph, rule, inputs) for rule in rules)]
        runs.append(partial(early_exit, without, Never(), inputs))
        with patch.object(common, "time", Clock):
            full, *times, plain_time = common.medians(runs, "one file", seconds_a_case=SECONDS)
    exits = [
        {"layer": layer, "share": layer / EXITS[-1], "time": seconds / full, "ms": 1e3 * seconds}
        for layer, seconds in zip(EXITS, times)
    ]
    return {"exits": exits, "full_ms": 1e3 * full, "plain_ms": 1e3 * plain_time, "tokens": TOKENS}
