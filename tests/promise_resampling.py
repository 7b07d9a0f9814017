"""How often the default rule breaks its promise, and what the promise costs: hold-outs drawn again and again.

    MINI_EE_SHARED=../shared python tests/promise_resampling.py [--work /tmp/promise] [--draws 200]

One training of `joint` on MiniLM for each task; every exit is recorded once on rows of the task's own train split that
the training never saw. Then, for each draw, a hold-out chooses the rule, and all other recorded rows say what it loses.
Where these are few, chance moves what they say by the printed standard error, and the more the hold-out was lucky the
less they can be: so it is also said how often the loss over all recorded rows is more than was promised. Recordings are
kept in the work folder, so that a second run only draws. `--bounds` compares the test with other bounds instead, by how
many rows each needs to promise a rule of known chances.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mini_ee.data.tasks import Task, load_task
from mini_ee.early_exit import Recorded
from mini_ee.measure.tables import table
from mini_ee.rules import NeverExit, Rule
from mini_ee.training.promise import POWER, paired_p_values
from mini_ee.training.rule import default_rule, thresholds
from mini_ee.training.run import load_run
from mini_ee.units.recording import Record, predictions, record

SEED = 0

EXITS = (2, 4, 6)

MAX_LOSS = 0.01

TASKS = {"SST-2": (6_000, 20_000, (600, 3_000)), "TREC": (2_000, None, (600, 1_500))}
"""name -> rows to train on, rows to record at most, sizes of the hold-out."""


def record_unseen(work: Path, shared: Path, name: str, rows: int, most: int | None) -> Path:
    """Train on `rows` rows of train, and record what every exit says of the others: logits (N, K, C), labels (N,)."""
    path = work / f"{name}.npz"
    if path.exists():
        return path
    header, *lines = (shared / "data" / name / "train.tsv").read_text().splitlines()
    lines = [lines[row] for row in np.random.default_rng(SEED).permutation(len(lines))]
    first = round(rows / 0.9)  # training holds a tenth of its rows out
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, some in (("train", lines[:first]), ("dev", lines[first:][:most])):
        (folder / f"{split}.tsv").write_text("\n".join([header, *some]) + "\n")
    model = shared / "weights" / "all-MiniLM-L6-v2"
    command = (
        "-m",
        "mini_ee",
        "train",
        "joint",
        "--model",
        model,
        "--task",
        folder,
        "--exits",
        ",".join(map(str, EXITS)),
    )
    subprocess.run([sys.executable, *command, "--out", work / f"{name}-run"], check=True)
    run, unseen = load_run(work / f"{name}-run"), load_task(folder).split("dev")
    recorded = record(run.segments(), run.encode(unseen.texts), 64, progress=f"recording {name}")
    partial = path.with_suffix(".part.npz")
    np.savez(partial, logits=recorded.logits, labels=unseen.labels)
    partial.rename(path)
    return path


def rows_of(logits: np.ndarray) -> Record:
    """Logits (N, K, C) as a record that rules are replayed on."""
    layers = np.diff((0, *EXITS)).tolist()
    return Record(Recorded(EXITS, logits, np.ones((*logits.shape[:2], 2)), layers), logits, 1.0)


def without_bound(recorded: Record, labels: np.ndarray) -> Rule:
    """The rule that saves most among those that lose at most MAX_LOSS on the hold-out itself."""
    best, most = NeverExit(), 0.0
    for rule in thresholds(recorded):
        loss, saved = outcome(recorded, labels, rule)
        if loss.mean() <= MAX_LOSS and saved.mean() > most:
            best, most = rule, saved.mean()
    return best


def outcome(recorded: Record, labels: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """For each row: right(last) - right(rule), and the share of the layers that is saved."""
    result = recorded.replay(rule)
    right = predictions(recorded.logits[:, -1]) == labels, predictions(result.logits) == labels
    return right[0].astype(int) - right[1], 1 - result.layers_run / EXITS[-1]


def resample(name: str, logits: np.ndarray, labels: np.ndarray, size: int, draws: int) -> dict:
    """One row of the table: so many hold-outs of this size."""
    task = Task(name, tuple(map(str, range(logits.shape[2]))), ("accuracy",), {})
    everything, random, found = rows_of(logits), np.random.default_rng(SEED), []
    for _ in tqdm(range(draws), desc=f"{name} {size}", delay=2):
        held = np.zeros(len(labels), bool)
        held[random.permutation(len(labels))[:size]] = True
        recorded = rows_of(logits[held])
        chosen = default_rule(recorded, task, labels[held], MAX_LOSS)
        loss, saved = outcome(everything, labels, chosen.rule)
        free_loss, free_saved = outcome(everything, labels, without_bound(recorded, labels[held]))
        found.append(
            {
                "promised": chosen.promise is not None,
                "exceeded": loss[~held].mean() > MAX_LOSS,
                "exceeded_all_rows": loss.mean() > MAX_LOSS,
                "saved": saved[~held].mean(),
                "standard_error": loss[~held].std() / np.sqrt((~held).sum()),
                "without_bound_exceeded": free_loss[~held].mean() > MAX_LOSS,
                "without_bound_saved": free_saved[~held].mean(),
                "rows_needed": chosen.rows_needed or np.nan,
            }
        )
    columns = {key: np.array([each[key] for each in found]) for key in found[0]}
    promised = columns["promised"]
    mean = {key: float(values.mean()) for key, values in columns.items() if key != "rows_needed"}
    return (
        {"task": name, "hold_out": size, "rest": len(labels) - size, "draws": draws}
        | mean
        | {
            "exceeded_a_promise": float((promised & columns["exceeded"]).mean()),
            "exceeded_a_promise_all_rows": float((promised & columns["exceeded_all_rows"]).mean()),
            "saved_where_promised": float(columns["saved"][promised].mean()) if promised.any() else None,
            "median_rows_needed": None if promised.all() else float(np.nanmedian(columns["rows_needed"])),
        }
    )


# ---- Other bounds ----
ALPHA = 0.05

SIZES = (300, 350, 400, 500, 600, 800, 1000, 1250, 1500, 2000, 2500, 3000, 4000, 5000, 6000, 8000, 10000, 14000)


def exact(losses: np.ndarray) -> np.ndarray:
    return paired_p_values(losses, MAX_LOSS) <= ALPHA


def betting(losses: np.ndarray) -> np.ndarray:
    """Waudby-Smith & Ramdas 2024: plug-in bets against a loss of MAX_LOSS, won at a capital of 1 / ALPHA."""
    seen = np.arange(1, losses.shape[1] + 1)
    mean = np.cumsum(losses, axis=1) / (seen + 1)
    variance = (0.01 + np.cumsum((losses - mean) ** 2, axis=1)) / (seen + 1)
    before = np.concatenate((np.full((len(losses), 1), 0.02), variance[:, :-1]), axis=1)
    bets = np.minimum(np.sqrt(2 * math.log(1 / ALPHA) / (losses.shape[1] * before)), 0.9 / (1 - MAX_LOSS))
    return np.cumsum(np.log1p(bets * (MAX_LOSS - losses)), axis=1).max(axis=1) >= math.log(1 / ALPHA)


def empirical_bernstein(losses: np.ndarray) -> np.ndarray:
    """Maurer & Pontil 2009, for losses of range 2."""
    rows, log = losses.shape[1], math.log(2 / ALPHA)
    bound = np.sqrt(2 * losses.var(axis=1, ddof=1) * log / rows) + 7 * 2 * log / (3 * (rows - 1))
    return losses.mean(axis=1) + bound <= MAX_LOSS


def compare_bounds(draws: int) -> None:
    """The fewest of SIZES with which a promise is made for POWER of the hold-outs."""
    rows, random = [], np.random.default_rng(SEED)
    for worse, better in ((0, 0), (0.005, 0.005), (0.01, 0.01), (0.02, 0.02), (0.03, 0.03), (0.007, 0.002)):
        row = {"worse": worse, "better": better}
        for bound in (exact, betting, empirical_bernstein):
            for size in SIZES:
                chances = [worse, better, 1 - worse - better]
                losses = random.choice(np.array([1, -1, 0], np.int8), size=(draws, size), p=chances)
                if bound(losses).mean() >= POWER:
                    break
            row[bound.__name__] = size if size < SIZES[-1] else f"{size} or more"
        rows.append(row)
    print(table(rows, {key: key for key in rows[0]}))
    print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("/tmp/promise"))
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--bounds", action="store_true", help="compare bounds on drawn losses instead")
    args = parser.parse_args()
    if args.bounds:
        return compare_bounds(args.draws)
    rows = []
    for name, (trained, most, sizes) in TASKS.items():
        with np.load(record_unseen(args.work, Path(os.environ["MINI_EE_SHARED"]), name, trained, most)) as saved:
            logits, labels = saved["logits"], saved["labels"]
        print(f"{name}: accuracy at the exits", (logits.argmax(-1) == labels[:, None]).mean(0).round(4).tolist())
        rows += [resample(name, logits, labels, size, args.draws) for size in sizes]
    shares = ("promised", "exceeded_a_promise", "exceeded_a_promise_all_rows", "saved", "saved_where_promised")
    shares += ("without_bound_exceeded", "without_bound_saved")
    columns = {"task": "task", "hold_out": "hold-out", "rest": "rest", **{key: f"{key}:.1%" for key in shares}}
    print(table([{key: np.nan if value is None else value for key, value in row.items()} for row in rows], columns))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
