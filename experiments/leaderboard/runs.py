"""Train what the leaderboard lacks, and write a record for each method and seed. A killed process can be continued.

OUT/records/EXAM/METHOD.npz        the records of all seeds; from them all figures are computed
OUT/leaderboard/EXAM/METHOD.json   the rates and options that were tried, the chosen ones, and seeds whose training
                                   diverged; a record with other rates or options is made again
OUT/leaderboard/runs/EXAM/METHOD/  unfinished trainings; removed once they are recorded

Several processes share the work: one process at a time runs a training, which gives the records of all methods that
differ by their rules alone. Each of them has a search of its own, by its own rules; what another one has trained or
recorded is not trained again. The held-out examples of a record are those that chose epochs and temperatures,
`selection` of them, which come first, and others that the training never read. They choose the rates and the rules of
the tables.
The default rule has been chosen as by `mini-ee train`: tested on all held-out examples that the training never read.
Its guarantee is for one rate: it does not count that some of these examples have chosen among several.
"""

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mini_ee.experiments.leaderboard.figures import REFERENCE
from mini_ee.experiments.leaderboard.protocol import FEWER_SEEDS, LONG_SECONDS, SEARCH_SEEDS, Exam, Training, method_of
from mini_ee.experiments.records import SeedRecord, read_about, read_records, write_record
from mini_ee.experiments.trainings import CaseLocked, Sources, how_made, next_to_try, trained
from mini_ee.lab.data.files import read_json, sole_writer, write_json
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.evaluation.comparison import method_rules
from mini_ee.lab.evaluation.row_evaluation import (
    LOSSES,
    curve,
    fewest_flops,
    is_full,
    measure_seconds,
    read_rows,
    replayed,
    rows_of,
)
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.recording import Record, exit_scores
from mini_ee.lab.rules import Never, rule_from_dict
from mini_ee.lab.training.default_rule import choose, default_rule
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.loop import Diverged
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import Run

BATCH_SIZE = 32
HELD_OUT_ROWS = 1000  # in a record, at most
ROUNDING = 1e-9
CHOSEN_BY = "accuracy at 2x"  # on held-out examples; of the full model if no rule needs at most half of the FLOPs

Say = Callable[[str], None]


class Job(NamedTuple):
    """Some seeds of a training, which one process runs."""

    training: Training
    methods: tuple[str, ...]  # those that are recorded
    seeds: tuple[int, ...]


class Choice(NamedTuple):
    """What a search chooses, or tries."""

    factor: float  # of the default rates
    options: tuple[tuple[str, float], ...] = ()  # name and value, but for defaults


class Places(NamedTuple):
    """Where things are, for a whole call."""

    out: Path
    sources: Sources
    tasks: dict[str, Task]  # by the name of the exam
    say: Say


def record_path(out: Path, exam: str, method: str) -> Path:
    """The file of all seeds of a method."""
    return out / "records" / exam / f"{method}.npz"


def jobs(trainings: list[Training], methods: list[str], seeds: tuple[int, ...]) -> Iterator[Job]:
    """All jobs: the first seeds, which choose the rate, of each training, then the other seeds one by one.

    The reference of losses comes before the others.
    """
    parts = [seeds[:SEARCH_SEEDS], *((seed,) for seed in seeds[SEARCH_SEEDS:])]
    for part in parts:
        for training in sorted(trainings, key=lambda training: REFERENCE not in training.methods):
            if wanted := tuple(name for name in training.methods if name in methods):
                yield Job(training, wanted, part)


def missing(out: Path, job: Job, seeds: tuple[int, ...]) -> list[tuple[str, int]]:
    """(method, seed) of each record that the job should make. seeds: all those of the call."""
    training, lacking = job.training, []
    for method in job.methods:
        state = _read_state(out, training, method)
        made = read_about(record_path(out, training.exam.name, method))
        made = {seed: metadata for seed, metadata in made.items() if _is_of(metadata, training, _choice(state))}
        long = any(metadata["training"]["seconds"] > LONG_SECONDS for metadata in made.values())
        wanted = set(job.seeds) & set(seeds[:FEWER_SEEDS] if long else seeds)
        lacking += [(method, seed) for seed in wanted - made.keys() if str(seed) not in state["diverged"]]
    return sorted(lacking)


# ---- A job ----


def run_job(job: Job, seeds: tuple[int, ...], places: Places) -> None:
    """Choose rates and options unless that is done, train the missing seeds, and write their records.

    Raises CaseLocked if another process runs this training.
    """
    training, out = job.training, places.out
    with ExitStack() as alone:
        try:
            alone.enter_context(sole_writer(_state_path(out, training, training.name)))
        except FileExistsError:
            raise CaseLocked(training.name) from None
        if missing(out, job, seeds):
            chosen = {method: _chosen(training, method, seeds[0], places) for method in job.methods}
            needed = {_run_folder(training, choice, seed, out) for choice in chosen.values() for seed in job.seeds}
            for folder in {*_runs(out, training).glob("*")} - needed:
                shutil.rmtree(folder)
            for seed in job.seeds:
                wanted = [method for method, missing_seed in missing(out, job, seeds) if missing_seed == seed]
                for choice in dict.fromkeys(chosen[method] for method in wanted):
                    _record(training, choice, seed, [name for name in wanted if chosen[name] == choice], places)
        shutil.rmtree(_runs(out, training), ignore_errors=True)
        with suppress(OSError):  # other trainings are there
            os.removedirs(_runs(out, training).parent)


def _is_of(metadata: dict, training: Training, choice: Choice | None) -> bool:
    """Whether a record was made with the settings of the training and with what was chosen."""
    made = Choice(metadata["rates"]["factor"], tuple(metadata.get("chosen", {}).items()))
    return metadata["settings"] == training.settings and made == choice


def _choice(state: dict) -> Choice | None:
    """What the state says was chosen; None while the search goes on."""
    return Choice(state["factor"], tuple(state.get("options", {}).items())) if "factor" in state else None


def _chosen(training: Training, method: str, first_seed: int, places: Places) -> Choice:
    """The rates and options with the best score, the mean over SEARCH_SEEDS seeds. The JSON lists all trials.

    Options are chosen one after the other, with the chosen rates.
    """
    state, factors = _read_state(places.out, training, method), training.exam.factors
    seeds = range(first_seed, first_seed + SEARCH_SEEDS)
    if choice := _choice(state):
        return choice
    while trial := next_trial([entry for entry in state["tried"] if "options" not in entry], factors, seeds):
        _try(training, method, Choice(trial[0]), trial[1], state, places)
    choice = Choice(max(means := _means(state["tried"]), key=means.get, default=Choice(factors[0])).factor)
    for name, values in training.choices.items():
        trials = [choice, *(choice._replace(options=(*choice.options, (name, value))) for value in values[1:])]
        for seed, trial in product(seeds, trials):
            if (trial, seed) not in {(_tried(entry), entry["seed"]) for entry in state["tried"]}:
                _try(training, method, trial, seed, state, places)
        means = _means(state["tried"])
        choice = max(trials, key=means.get)
    state |= {"factor": choice.factor} | ({"options": dict(choice.options)} if training.choices else {})
    write_json(_state_path(places.out, training, method), state)
    return choice


def _try(training: Training, method: str, trial: Choice, seed: int, state: dict, places: Places) -> None:
    """Add the score of a trial to the state."""
    options = "".join(f", {name} {value:g}" for name, value in trial.options)
    places.say(f"{training.exam.name}, {method}, default rates x {trial.factor:g}{options}, seed {seed}")
    task = places.tasks[training.exam.name]
    try:
        held_out, seconds, gpu = _held_out_of(training, trial, seed, places)
        score = _score(method, held_out, task)
    except Diverged:
        score, seconds, gpu = 0.0, None, _gpu(places)
    tried = {"factor": trial.factor, "seed": seed} | ({"options": dict(trial.options)} if trial.options else {})
    state["tried"].append(tried | {"score": round(score, 5), "seconds": seconds} | ({"gpu": gpu} if gpu else {}))
    places.say(f"  held-out {CHOSEN_BY}: {score:.3f}")
    write_json(_state_path(places.out, training, method), state)


def _score(method: str, held_out: Record, task: Task) -> float:
    """CHOSEN_BY, with the rules of the method."""
    points = curve(held_out, method_rules(method_of(method), held_out, task), task, held_out.labels)
    return (_at_half(points) or _never(points))["accuracy"]


def _held_out_of(training: Training, trial: Choice, seed: int, places: Places) -> tuple[Record, float, str | None]:
    """The held-out examples under a training, its seconds and its GPU: from a record of it, if there is one."""
    for method in training.methods:
        path = record_path(places.out, training.exam.name, method)
        metadata = read_about(path).get(seed)
        if metadata and _is_of(metadata, training, trial):
            return read_records(path)[seed].held_out, metadata["training"]["seconds"], metadata["made"].get("gpu")
    run, metadata = _trained(training, trial, seed, places)
    run.model.to(places.sources.device)
    rows, _, stored = _held_out_rows(places.tasks[training.exam.name], seed, training.exam)
    rows = rows.take(stored)
    held_out = read_rows(run, run.encode(rows.texts), rows.labels, BATCH_SIZE)
    return held_out, metadata["training"]["seconds"], _gpu(places)


def _gpu(places: Places) -> str | None:
    return how_made(places.sources.device).get("gpu")


def next_trial(tried: list[dict], factors: Sequence[float], seeds: Sequence[int]) -> tuple[float, int] | None:
    """The factor and seed that a search tries next; None at its end, or if there is only one factor.

    Each of the given factors with each seed. Then, while the largest or the smallest factor is the best, the one beyond
    it, also with each seed.
    """
    if len(factors) == 1:
        return None
    done = {(entry["factor"], entry["seed"]) for entry in tried}
    begun = dict.fromkeys((*factors, *(entry["factor"] for entry in tried)))
    if left := [(factor, seed) for seed, factor in product(seeds, begun) if (factor, seed) not in done]:
        return left[0]
    beyond = next_to_try(list(factors), {choice.factor: mean for choice, mean in _means(tried).items()})
    return None if beyond is None else (beyond, seeds[0])


def _tried(entry: dict) -> Choice:
    return Choice(entry["factor"], tuple(entry.get("options", {}).items()))


def _means(tried: list[dict]) -> dict[Choice, float]:
    """Mean score over the seeds. The order is that of the trials, so that the first of equals is the best."""
    scores: dict[Choice, list[float]] = {}
    for entry in tried:
        scores.setdefault(_tried(entry), []).append(entry["score"])
    return {choice: float(np.mean(values)) for choice, values in scores.items()}


def _record(training: Training, choice: Choice, seed: int, methods: list[str], places: Places) -> None:
    """Train one seed and write the record of each of the methods."""
    name, say = training.exam.name, places.say
    say(f"{name}, {training.name}, seed {seed}: {', '.join(methods)}")
    try:
        run, metadata = _trained(training, choice, seed, places)
    except Diverged as error:
        for method in methods:
            state = _read_state(places.out, training, method)
            state["diverged"][str(seed)] = str(error)
            write_json(_state_path(places.out, training, method), state)
        say(f"  no record: {error}")
        return
    task = places.tasks[name]
    run.model.to(places.sources.device)
    read = _read_held_out(run, task, training.exam)
    _, rows = rows_of(task, None, None, seed)
    reported = read_rows(run, run.encode(rows.texts), rows.labels, BATCH_SIZE)
    run.model.to("cpu")  # where rules are timed
    metadata |= {
        "settings": training.settings,
        "rates": {rate: training.at(choice.factor)[rate] for rate in training.rates} | {"factor": choice.factor},
        "trained_as": training.name,
        "held_out": {"selection": len(read.selection.labels), "default_rule_tested_on": len(read.tested.labels)},
        "data": {"train": task.split("train").sha256(), task.default_split: rows_of(task, None, None, 0)[1].sha256()},
        "made": how_made(places.sources.device) | {"numpy": np.__version__, "python": platform.python_version()},
    }
    metadata |= {"chosen": dict(choice.options)} if training.choices else {}
    full = float(exit_scores(read.stored, task, read.stored.labels, "accuracy")[-1])
    reference = record_path(places.out, name, REFERENCE)
    of_reference = {} if REFERENCE in training.methods else read_about(reference).get(seed, {})
    least = of_reference.get("held_out_full", full) - LOSSES["one_point"]
    for method in methods:
        method_metadata = metadata | {"method": method, "held_out_full": full}
        method_metadata |= _points_and_guarantee(method, read, reported, task, least)
        method_metadata |= _timed(
            {name: method_metadata[name] for name in ("one_point", "half")}, run, task, training.exam.timed_rows
        )
        write_record(record_path(places.out, name, method), seed, SeedRecord(reported, read.stored, method_metadata))
        half, point = method_metadata["half"], method_metadata["one_point"]
        line = f"  {method}: accuracy {half['accuracy']:.3f} with half of the FLOPs; " if half else f"  {method}: "
        say(f"{line}{point['layers_saved']:.1%} of the layers saved at one point, measured {point['speedup']:.2f}x")


def _trained(training: Training, choice: Choice, seed: int, places: Places) -> tuple[Run, dict]:
    """The run, and what its training took. A run that is finished is loaded, one that was interrupted goes on."""
    folder = _run_folder(training, choice, seed, places.out)
    cost_path, began = folder / "cost.json", (time.process_time(), time.perf_counter())
    run = trained(folder / "run", training.at(*choice), seed, places.sources)
    if not cost_path.exists():
        seconds, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        # If an earlier process was killed, its processor time is unknown: it is in proportion to the epochs' wall time.
        in_epochs = sum(epoch["seconds"] for epoch in run.metrics["epochs"])
        cost = {"seconds": seconds * max(1.0, in_epochs / wall), "continued": in_epochs > wall}
        write_json(cost_path, cost | {"epochs": len(run.metrics["epochs"]), "rows": run.metrics["rows"]})
    cost = read_json(cost_path)
    parameters = run.model.named_parameters()
    cost |= {"parameters": sum(value.numel() for name, value in parameters if run.model.is_trainable(name))}
    return run, {"training": cost, "megabytes_added": (run.weight_bytes - _plain_bytes(run)) / 1e6}


def _plain_bytes(run: Run) -> int:
    """Bytes of the fine-tuned model without exits: backbone and one head."""
    backbone, names = run.model.backbone, run.label_names
    with torch.random.fork_rng():
        plain = RowExits(backbone, (backbone.config.num_hidden_layers,), max(1, len(names)), run.model.pool)
    return sum(parameter.nbytes for parameter in plain.parameters())


# ---- What is measured ----


class HeldOut(NamedTuple):
    """All exits of a run on held-out examples, recorded with labels."""

    selection: Record  # those that chose epochs and temperatures
    tested: Record  # those that the training never read
    stored: Record  # HELD_OUT_ROWS of both, for the file; they choose rates and rules


def _read_held_out(run: Run, task: Task, exam: Exam) -> HeldOut:
    rows, first, stored = _held_out_rows(task, run.config["seed"], exam)
    recorded = read_rows(run, run.encode(rows.texts), rows.labels, BATCH_SIZE)
    return HeldOut(recorded.take(np.arange(first)), recorded.take(np.arange(first, len(rows))), recorded.take(stored))


def _held_out_rows(task: Task, seed: int, exam: Exam) -> tuple[Split, int, np.ndarray]:
    """All held-out examples, how many of them select, which come first, and the places of those for the file."""
    parts = split_rows(task, seed, exam.max_train)
    first = len(parts.selection)
    drawn = np.random.default_rng(seed).permutation(len(parts.test))[: max(0, HELD_OUT_ROWS - first)]
    stored = np.concatenate((np.arange(first)[:HELD_OUT_ROWS], first + np.sort(drawn)))
    return parts.selection + parts.test, first, stored


def _at_half(points: list[dict]) -> dict | None:
    """The most accurate rule with at most half of the FLOPs, None if there is none."""
    return choose(points, itemgetter("accuracy"), lambda point: point["flops_ratio"] <= 0.5 + ROUNDING)


def _never(points: list[dict]) -> dict:
    """The rule with which no example exits early."""
    return next(point for point in points if point["rule"]["name"] == "never")


def _points_and_guarantee(method: str, read: HeldOut, reported: Record, task: Task, least: float) -> dict:
    """The parts of a method's record that depend on its rules.

    one_point: the rule with the fewest FLOPs that reaches the held-out accuracy `least`, the full model if there is
    none; half: the best rule with at most half of the FLOPs, None if there is none. Chosen on held-out examples, with
    figures of the reported ones.
    """
    default = default_rule(read.selection, read.tested, task, candidates=load_method(method_of(method)).candidates)
    points = curve(read.stored, method_rules(method_of(method), read.stored, task), task, read.stored.labels)
    picked = {
        "one_point": choose(points, fewest_flops, lambda point: point["accuracy"] >= least - ROUNDING)
        or _never(points),
        "half": _at_half(points),
    }
    return {
        "default_rule": default.rule.to_dict(),
        "guarantee": default.guarantee,
        "guaranteed": default.metrics["guaranteed"],
        **{name: point and replayed(point, reported, task, reported.labels) for name, point in picked.items()},
    }


def _timed(points: dict[str, dict | None], run: Run, task: Task, count: int) -> dict[str, dict | None]:
    """The points with their processor time, and that of the model without exits, with batch size 1, in turns."""
    names = [name for name, point in points.items() if point and not is_full(point)]
    _, rows = rows_of(task, None, count, 0)
    encoded, order = run.encode(rows.texts), [np.array([row]) for row in range(len(rows))]
    timed = [(run.whole_model(), Never(), encoded)]
    timed += [(run.segments(), rule_from_dict(points[name]["rule"]), encoded) for name in names]
    full, *seconds = measure_seconds(timed, order, clock=time.process_time).tolist()
    answer = {name: point and point | {"speedup": 1.0} for name, point in points.items()}
    for name, point_seconds in zip(names, seconds):
        answer[name] |= {
            "speedup": full / point_seconds,
            "seconds": point_seconds,
            "full_seconds": full,
            "timed_rows": len(rows),
        }
    return answer


# ---- The state of a training ----


def _state_path(out: Path, training: Training, method: str) -> Path:
    return out / "leaderboard" / training.exam.name / f"{method}.json"


def _runs(out: Path, training: Training) -> Path:
    return out / "leaderboard" / "runs" / training.exam.name / training.name


def _run_folder(training: Training, choice: Choice, seed: int, out: Path) -> Path:
    options = "".join(f"-{name}-{value:g}" for name, value in choice.options)
    return _runs(out, training) / f"{choice.factor:g}-{seed}{options}"


def _read_state(out: Path, training: Training, method: str) -> dict:
    """What a method tried and chose; nothing, if it was with other settings."""
    settings = training.settings | {"factors": list(training.exam.factors), "chosen_by": CHOSEN_BY}
    if training.choices:
        settings["choices"] = {name: list(values) for name, values in training.choices.items()}
    path = _state_path(out, training, method)
    state = read_json(path, signed="tried") if path.exists() else {}
    return state if state.get("settings") == settings else {"settings": settings, "tried": [], "diverged": {}}
