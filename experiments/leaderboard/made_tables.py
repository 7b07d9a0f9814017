"""How the leaderboard's records were made: exams, exits, rates, hours and machines, as rows. No sentences."""

import math
from collections.abc import Iterator

import numpy as np

from mini_ee.experiments.leaderboard.figures import ABOUT, CONTROL, REFERENCE, about_value, trained_on
from mini_ee.experiments.leaderboard.tables import NOTHING, Leaderboard, measured

IN_THE_CSV = {  # column -> where `about` has it
    "trained as": ("trained_as",),
    "factor": ("rates", "factor"),
    "lr": ("rates", "lr"),
    "head_lr": ("rates", "head_lr"),
    "epochs": ("settings", "epochs"),
    "training seconds": ABOUT["seconds"],
    "gpu": ("made", "gpu"),
    "processor": ("made", "processor"),
    "torch": ("made", "torch"),
    "numpy": ("made", "numpy"),
    "python": ("made", "python"),
    "commit": ("made", "commit"),
}
Trained = tuple[str, str, int, float | None, tuple]  # task, name of the training, seed, factor of rates, other options


def made_figures(board: Leaderboard) -> dict:
    """What the page on the protocol shows."""
    trained, abouts = _seconds(board), [metadata for *_, metadata in _abouts(board)]
    cpu, gpu = ([seconds for seconds, on_gpu in trained.values() if on_gpu == where] for where in (False, True))
    shares = [ratio for metadata in abouts if (ratio := about_value(metadata, ("half", "flops_ratio"))) is not None]
    return {
        "exams": [_exam_row(board, name) for name in board.plan.tasks if REFERENCE in board.tasks[name].runs],
        "exits": _exits(board),
        "rates": _rates(board),
        "tasks": [f"factor on {name}" for name in board.plan.tasks],
        "shared": _shared(board),
        "flops": dict(zip(("low", "middle", "high"), np.percentile(shares, (5, 50, 95)).tolist())) if shares else None,
        "trainings": len(trained),
        "on_the_cpu": {"count": len(cpu), "hours": math.fsum(cpu) / 3600},
        "on_a_gpu": {"count": len(gpu), "hours": math.fsum(gpu) / 3600},
        "records": {"count": len(abouts), "on_a_gpu": sum(trained_on(metadata) is not None for metadata in abouts)},
        "checksums": _checksums(board),
        "not_run": _missing(board),
        "not_rows": [
            [", ".join(name for name, reason in board.plan.not_rows.items() if reason == why), why]
            for why in dict.fromkeys(board.plan.not_rows.values())
        ],
    }


def record_rows(board: Leaderboard) -> list[dict[str, str]]:
    """The rows of the CSV file: one for each record, with its rates, exits and machine."""
    rows = []
    for task, method, seed, metadata in _abouts(board):
        row = {"task": task, "method": method, "seed": str(seed)}
        row["exits"] = " ".join(map(str, board.tasks[task].runs[method][seed].exits))
        for column, path in IN_THE_CSV.items():
            value = about_value(metadata, path)
            row[column] = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        row["other options"] = " ".join(f"{name}={value:g}" for name, value in metadata.get("chosen", {}).items())
        rows.append(row)
    return rows


# ---- Parts ----
def _abouts(board: Leaderboard) -> Iterator[tuple[str, str, int, dict]]:
    """Task, method, seed and `about` of all records."""
    for task in board.tasks.values():
        for method, runs in task.runs.items():
            yield from ((task.task, method, seed, run.about) for seed, run in sorted(runs.items()) if run.about)


def _by_method(board: Leaderboard) -> dict[tuple[str, str], dict]:
    """(task, method) -> `about` of one of its records."""
    return {(task, method): metadata for task, method, _, metadata in _abouts(board)}


def _exam_row(board: Leaderboard, name: str) -> list[str]:
    """Task, model, layers, training and reported examples, epochs and seconds of joint training."""
    task = board.tasks[name]
    run = next(iter(task.runs[REFERENCE].values()))
    settings, seconds = run.about.get("settings", {}), measured(task, REFERENCE, "seconds")
    sizes = [str(settings.get(key, NOTHING)) for key in ("max_train", "epochs")]
    time = NOTHING if seconds is None else f"{seconds:.0f}"
    return [name, board.plan.models.get(name, NOTHING), str(task.layers), sizes[0], str(len(run.full)), sizes[1], time]


def _exits(board: Leaderboard) -> list[list[str]]:
    """The methods that do not have an exit after every layer, and where their exits are before the last layer."""
    exits: dict[tuple[str, int], dict[str, None]] = {}
    for task in board.tasks.values():
        for method, runs in task.runs.items():
            for run in runs.values():
                if method != CONTROL and 1 < len(run.exits) < run.exits[-1]:
                    exits.setdefault((method, run.exits[-1]), {})[", ".join(map(str, run.exits[:-1]))] = None
    return [[method, str(layers), " or ".join(where)] for (method, layers), where in exits.items()]


def _rates(board: Leaderboard) -> list[list[str]]:
    """Method, its epochs, and for each task the factor of its default rates, out of those that were tried."""
    abouts = _by_method(board)
    rows = []
    for method in dict.fromkeys(method for _, method in abouts if method != CONTROL):
        of_task = {task: abouts[task, method] for task in board.plan.tasks if (task, method) in abouts}
        epochs = {about_value(metadata, ("settings", "epochs")) for metadata in of_task.values()} - {None}
        cells = []
        for task in board.plan.tasks:
            tried = sorted({trial["factor"] for trial in board.plan.state(task, method)["tried"]})
            chosen = about_value(of_task[task], ("rates", "factor")) if task in of_task else None
            of_these = f" of {', '.join(f'{factor:g}' for factor in tried)}" if tried else ""
            cells.append(NOTHING if chosen is None else f"{chosen:g}{of_these}")
        rows.append([method, ", ".join(map(str, sorted(epochs))) or NOTHING, *cells])
    return rows


def _shared(board: Leaderboard) -> list[list[str]]:
    """The trainings that serve several methods, which differ by their rules alone."""
    serves: dict[str, dict[str, None]] = {}
    for _, method, _, metadata in _abouts(board):
        serves.setdefault(metadata.get("trained_as", method), {})[method] = None
    return [[name, ", ".join(methods)] for name, methods in serves.items() if len(methods) > 1]


def _seconds(board: Leaderboard) -> dict[Trained, tuple[float, bool]]:
    """Training -> its processor seconds, and whether it ran on a GPU; also of those that only chose a rate."""
    by_training: dict[Trained, tuple[float, bool]] = {}
    for task, method, seed, metadata in _abouts(board):
        seconds, factor = (about_value(metadata, path) for path in (ABOUT["seconds"], ("rates", "factor")))
        key = task, metadata.get("trained_as", method), seed, factor, tuple(metadata.get("chosen", {}).items())
        by_training[key] = seconds or 0.0, trained_on(metadata) is not None
    for (task, method), metadata in _by_method(board).items():
        name = metadata.get("trained_as", method)
        for trial in board.plan.state(task, method)["tried"]:
            key = task, name, trial["seed"], trial["factor"], tuple(trial.get("options", {}).items())
            by_training.setdefault(key, (trial["seconds"] or 0.0, "gpu" in trial))
    return by_training


def _checksums(board: Leaderboard) -> list[list[str]]:
    """Task, split and checksum, as the records have them."""
    checksums = {(task, *item) for task, *_, metadata in _abouts(board) for item in metadata.get("data", {}).items()}
    return [[task, split, value[:16]] for task, split, value in sorted(checksums)]


def _missing(board: Leaderboard) -> list[list[str]]:
    """Methods with fewer records than planned on a task: task, method, seeds with a record, seeds that diverged."""
    rows = []
    for name in board.plan.tasks:
        for method in board.plan.methods:
            runs = board.tasks[name].runs.get(method, {})
            if len(runs) < board.plan.seeds:
                diverged = ", ".join(board.plan.diverged(name, method)) or NOTHING
                rows.append([name, method, f"{len(runs)} of {board.plan.seeds}", diverged])
    return rows
