"""int8 and float16 compared with float32, for results/onnx.md: what rounding changes, and the guarantee of an export.

MiniLM with exits after layers 2, 4 and 6 is trained by `joint` on a part of TREC and SST-2, and exported three times.
The other training examples give and test guarantees. Logits are recorded by ONNX Runtime.
"""

import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import mini_ee
from mini_ee.experiments.bench import common
from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.measured.command import session_memory
from mini_ee.experiments.measured.guarantees_page import trained_on_part
from mini_ee.experiments.measured.one_file import Clock
from mini_ee.experiments.pages import percent
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.calibration import Observed, agreement, calibrate, calibration_sets, observe
from mini_ee.lab.data.tasks import Split, Task, load_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import Record, predictions, record
from mini_ee.lab.rules import Never, Rule
from mini_ee.lab.statistics import share_interval

TASKS = {"TREC": ("test", 2_000), "SST-2": ("dev", 2_000)}  # task -> its reported split, examples to train on
UNSEEN = 1_600  # at most: training examples that the training did not use
PRECISIONS = ("float32", "float16", "int8")
EPSILON, DELTA, SETS, SEED = 0.95, 0.05, 100, 0
BATCH = 32  # of the second recording in int8; the first has batches of one
TIMED_TEXTS, SECONDS = 8, 10.0


def precision(sources: Sources, work: Path) -> dict:
    """The figures of each task, and the processor."""
    torch.set_num_threads(1)
    work = work / "precision"
    work.mkdir(exist_ok=True)
    tasks = {name: stored(work, f"{name} figures", partial(_of_task, sources, work, name)) for name in TASKS}
    return {"tasks": tasks, "processor": processor()}


def processor() -> dict:
    """The name of the processor, and whether it has instructions for products of int8 (VNNI)."""
    text = Path("/proc/cpuinfo").read_text()
    (name, *_), (flags, *_) = (re.findall(rf"^{key}\s*: (.*)$", text, re.M) for key in ("model name", "flags"))
    return {"name": name, "vnni": any("vnni" in flag for flag in flags.split())}


def _of_task(sources: Sources, work: Path, name: str) -> dict:
    """What each precision predicts, where it exits, and what it costs; how often guarantees of int8 are violated."""
    split, rows = TASKS[name]
    run, unseen = trained_on_part(work, sources, name, rows, UNSEEN)
    engines = {}
    for kind in PRECISIONS:
        folder = work / f"{name}-{kind}"
        if not folder.exists():
            mini_ee.export(run, folder, texts=unseen.texts, precision=kind)
        engines[kind] = Runtime(folder, threads=1)
    task = load_task(sources.find("data", name))
    tested = task.split(split)
    sizes = {"float32": BATCH, "float16": BATCH, "int8": 1}  # only in int8 a prediction depends on its batch
    recorded = {kind: _recorded(engine, tested, sizes[kind]) for kind, engine in engines.items()}
    precisions = {
        kind: _accuracy(logits, recorded["float32"], run.rule, task, tested.labels) for kind, logits in recorded.items()
    }
    for kind, seconds in _times(engines, tested).items():
        precisions[kind] |= seconds | _memory(engines[kind])
    held = {
        f"float32 {BATCH}": (engines["float32"], BATCH),
        "int8 1": (engines["int8"], 1),
        f"int8 {BATCH}": (engines["int8"], BATCH),
    }
    observed = {key: observe(_recorded(engine, unseen, size)) for key, (engine, size) in held.items()}
    pairs = (
        ("int8 1", "int8 1"),
        (f"int8 {BATCH}", f"int8 {BATCH}"),
        (f"int8 {BATCH}", "int8 1"),
        (f"float32 {BATCH}", "int8 1"),
    )
    broken = [violated(observed[of], observed[on]) | {"from": of, "on": on} for of, on in pairs]
    return {"precisions": precisions, "rows": len(tested), "unseen": len(unseen), "guarantees": broken}


def _recorded(engine: Runtime, rows: Split, size: int) -> Record:
    return record(engine.segments(), engine.encode(rows.texts), size, progress=f"{engine.folder.name} {size}")


def _accuracy(recorded: Record, exact: Record, rule: Rule, task: Task, labels: np.ndarray) -> dict:
    """Accuracy of each exit and of the rule; agreement with float32, and exits that moved, under the same rule."""
    mine, theirs = (exit_record.replay(rule) for exit_record in (recorded, exact))
    same = predictions(mine.logits) == predictions(theirs.logits)
    return {
        "per_exit": (recorded.predictions == labels[:, None]).mean(axis=0).tolist(),
        "score": float((predictions(mine.logits) == labels).mean()),
        "agreement": float(same.mean()),
        "full_agreement": float((recorded.predictions[:, -1] == exact.predictions[:, -1]).mean()),
        "moved": float((mine.exit_index != theirs.exit_index).mean()),
        "layers": float(mine.layers_run.mean()),
    }


def _times(engines: dict[str, Runtime], rows: Split) -> dict[str, dict]:
    """Median processor time of TIMED_TEXTS texts, one at a time, all layers and by the rule, relative to float32."""
    chosen = np.random.default_rng(SEED).permutation(len(rows))[:TIMED_TEXTS]

    def all_texts(engine: Runtime, rule: Rule) -> None:
        encoded = engine.encode([rows.texts[row] for row in chosen])
        for row in range(len(chosen)):
            early_exit(engine.segments(), rule, encoded.batch([row]))

    runs = [partial(all_texts, engine, rule) for engine in engines.values() for rule in (Never(), engine.rule)]
    with patch.object(common, "time", Clock):
        seconds = common.medians(runs, "precisions", seconds_a_case=SECONDS)
    pairs = list(zip(seconds[::2], seconds[1::2]))
    return {
        kind: {"ms": 1e3 * full / TIMED_TEXTS, "time": full / pairs[0][0], "time_by_rule": ruled / pairs[0][1]}
        for kind, (full, ruled) in zip(engines, pairs)
    }


def _memory(engine: Runtime) -> dict:
    """Megabytes on disk, and those of a session."""
    return {"disk": engine.weight_bytes / 2**20} | session_memory(engine.folder / "onnx/model.onnx", 32)


def violated(calibration: Observed, fresh: Observed) -> dict:
    """How often thresholds from a quarter of the rows violate their guarantee on the other rows of `fresh`.

    Violated: at some exit, less than EPSILON agree among the rows at or above the threshold.
    """
    count, saved = 0, []
    for drawn in calibration_sets(calibration, SETS, SEED):
        rule = calibrate(calibration.take(drawn), EPSILON, DELTA)
        shares = agreement(fresh.take(~drawn), rule)
        count += any(share is not None and share < EPSILON for share in shares)
        saved.append((fresh.confidence[~drawn] >= np.array(rule.threshold[:-1])).any(axis=1).mean())  # type: ignore[index]
    return {"violated": count, "sets": SETS, "interval": share_interval(count, SETS), "early": float(np.mean(saved))}


def precision_figures(figures: dict) -> dict:
    """The rows of the page's section, and the shares of time that int8 takes."""
    quality, cost, guarantees = [], [], []
    for name, of in figures["tasks"].items():
        for kind, one in of["precisions"].items():
            numbers = (*one["per_exit"], one["score"], one["agreement"], one["full_agreement"], one["moved"])
            quality.append([name, kind, *(f"{value:.3f}" for value in numbers), f"{one['layers']:.2f}"])
            times = f"{one['ms']:.2f}", f"{one['time']:.2f}", f"{one['time_by_rule']:.2f}"
            cost.append([name, kind, *times, *(f"{one[key]:.1f}" for key in ("disk", "private", "resident"))])
        for one in of["guarantees"]:
            where, interval = (_recording(one[key]) for key in ("from", "on")), map(percent, one["interval"])
            counted = f"{one['violated']} of {one['sets']}", " to ".join(interval), percent(one["early"])
            guarantees.append([name, *where, *counted])
    of_int8 = [of["precisions"]["int8"] for of in figures["tasks"].values()]
    all_layers, by_rule = ([one[key] for one in of_int8] for key in ("time", "time_by_rule"))
    cpu = figures["processor"]
    return {
        **{"quality_rows": quality, "cost_rows": cost, "int8_guarantee_rows": guarantees},
        **{"int8_least": min(all_layers), "int8_most": max(all_layers), "timed": TIMED_TEXTS, "batch": BATCH},
        **{"sets": SETS, "int8_rule_least": min(by_rule), "int8_rule_most": max(by_rule)},
        **{"epsilon": EPSILON, "delta": DELTA},
        "processor": f"{cpu['name']}, with{'' if cpu['vnni'] else 'out'} VNNI",
    }


def _recording(key: str) -> str:
    kind, size = key.split()
    return f"{kind}, batches of {'one' if size == '1' else size}"
