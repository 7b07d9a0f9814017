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
from mini_ee.experiments.markdown import markdown_rows
from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.measured.command import session_memory
from mini_ee.experiments.measured.guarantees_page import trained_on_part
from mini_ee.experiments.measured.one_file import Clock
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
    found = {name: stored(work, f"{name} figures", partial(_of_task, sources, work, name)) for name in TASKS}
    return {"tasks": found, "processor": processor()}


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
    found = {
        kind: _accuracy(each, recorded["float32"], run.rule, task, tested.labels) for kind, each in recorded.items()
    }
    for kind, seconds in _times(engines, tested).items():
        found[kind] |= seconds | _memory(engines[kind])
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
    return {"precisions": found, "rows": len(tested), "unseen": len(unseen), "guarantees": broken}


def _recorded(engine: Runtime, rows: Split, size: int) -> Record:
    return record(engine.segments(), engine.encode(rows.texts), size, progress=f"{engine.folder.name} {size}")


def _accuracy(recorded: Record, exact: Record, rule: Rule, task: Task, labels: np.ndarray) -> dict:
    """Accuracy of each exit and of the rule; agreement with float32, and exits that moved, under the same rule."""
    mine, theirs = (each.replay(rule) for each in (recorded, exact))
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
    return {"disk": engine.weight_bytes / 2**20} | session_memory(engine.folder / "model.onnx", 32)


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


SECTION = """## int8 and float16

`mini-ee export RUN --int8` rounds the weights and the inputs of the linear maps within the layers to 8 bits;
`--fp16` stores weights and states in 16 bits, for GPUs. MiniLM with exits after layers 2, 4 and 6 was trained by
`joint` on 2,000 examples of TREC and of SST-2, and each run was exported three times. All three exports use the run's
own rule. *By the rule* is the accuracy with it. *Equal* is the share of examples whose prediction with the rule is that
of float32; *equal, layer 6* is the same for the last exit. *Moved* is the share of examples that exit after another
layer than in float32. The figures are those of ONNX Runtime on the CPU with one thread, on the test set of TREC
({trec_rows} examples) and the dev set of SST-2 ({sst_rows} examples). For int8 and for all times, it computes one text
at a time. The accuracies differ from those in other sections, because other samples of the examples were drawn.

| task | precision | accuracy, layer 2 | layer 4 | layer 6 | by the rule | equal | equal, layer 6 | moved | layers |
|---|---|---|---|---|---|---|---|---|---|
{quality}

Times are medians of processor time on {timed} texts of each task, measured in turns and divided by those of float32; ms
per text is for all layers. Memory is that of a session that has run, in its own process.

| task | precision | ms per text | time, all layers | time, by the rule | disk, MB | private memory, MB | resident, MB |
|---|---|---|---|---|---|---|---|
{cost}

The processor is {processor}, {vnni}.

**Does a guarantee hold on the int8 graph?** {holds} `mini-ee calibrate EXPORTED --epsilon {epsilon} --delta {delta}`
guarantees that at each exit at least {share} of the examples that reach the threshold agree with the last exit of the
same graph. For each task we drew {sets} calibration sets, each a quarter of {unseen} training examples that the
training did not use, and counted how often the guarantee is violated on the other examples. In int8 a prediction
depends a little on the other examples of its batch; so we recorded batches of one and of {batch}.

| task | thresholds from | tested on | violated | 95 % interval | examples that exit early |
|---|---|---|---|---|---|
{guarantees}

A guarantee with delta {delta} may be violated in {allowed} of the sets. The other examples are a sample, too: if an
exit agrees in exactly {share} of all cases, about half of such samples show less.
"""


def section(figures: dict) -> str:
    """The section of the page."""
    tasks = figures["tasks"]
    quality, cost, guarantees = [], [], []
    for name, of in tasks.items():
        for kind, each in of["precisions"].items():
            numbers = (*each["per_exit"], each["score"], each["agreement"], each["full_agreement"], each["moved"])
            quality.append([name, kind, *(f"{number:.3f}" for number in numbers), f"{each['layers']:.2f}"])
            times = f"{each['ms']:.2f}", f"{each['time']:.2f}", f"{each['time_by_rule']:.2f}"
            sizes = (f"{each[key]:.1f}" for key in ("disk", "private", "resident"))
            cost.append([name, kind, *times, *sizes])
        for each in of["guarantees"]:
            ends = " to ".join(f"{100 * end:.1f} %" for end in each["interval"])
            where = (_recording(each[key]) for key in ("from", "on"))
            guarantees.append(
                [name, *where, f"{each['violated']} of {each['sets']}", ends, f"{100 * each['early']:.1f} %"]
            )
    found, unseen = figures["processor"], {of["unseen"] for of in tasks.values()}
    violated_most = max(each["violated"] for of in tasks.values() for each in of["guarantees"])
    return SECTION.format(
        trec_rows=tasks["TREC"]["rows"],
        sst_rows=tasks["SST-2"]["rows"],
        quality=markdown_rows(quality),
        cost=markdown_rows(cost),
        guarantees=markdown_rows(guarantees),
        timed=TIMED_TEXTS,
        processor=found["name"],
        vnni=f"with{'' if found['vnni'] else 'out'} VNNI, the instructions for products of int8",
        epsilon=f"{EPSILON:g}",
        delta=f"{DELTA:g}",
        share=f"{EPSILON:.0%}".replace("%", " %"),
        allowed=f"{DELTA:.0%}".replace("%", " %"),
        sets=SETS,
        unseen=" to ".join(f"{count:,}" for count in sorted(unseen)),
        holds=(
            f"Nothing speaks against it: it is violated in at most {violated_most} of {SETS} sets."
            if violated_most <= DELTA * SETS
            else f"Not always: it is violated in up to {violated_most} of {SETS} sets."
        ),
        batch=BATCH,
    )


def _recording(key: str) -> str:
    kind, size = key.split()
    return f"{kind}, batches of {'one' if size == '1' else size}"
