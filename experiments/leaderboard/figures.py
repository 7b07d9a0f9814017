"""Figures of the methods on a task, computed from their records without a model.

Every rule is chosen on the held-out examples of its seed, and what it gives on the reported examples counts. A figure
is a number for each seed and each reported example, so that ranking.py can draw seeds and examples anew. Scores are
accuracies.

    full          the model without early exits
    at 1.5x ...   the best held-out score within this share of the FLOPs of the method's full model, of one of its rules
                  or of a mixture of two: a random part of the examples exits by the one, the rest by the other. The
                  expected values count. So no FLOPs are left over where a method has few rules
    saved         layers saved by the rule with the fewest FLOPs that loses at most ONE_POINT on the held-out examples,
                  against the full model of joint training with the same seed; 0 if every rule loses more. A layer
                  that an example runs twice, because exits start again from the embeddings, counts twice
    saved own     the same against the method's own full model
    lost          accuracy that this rule loses on the reported examples, against the same full model
    area          mean difference from joint training over the shares of AREA that both reach (ELUE, Liu et al. 2022),
                  if these are at least half of them
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.protocol import method_of
from mini_ee.experiments.leaderboard.replays import Replays, replay_all, with_measures
from mini_ee.experiments.records import SeedRecord, read_records
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.evaluation.comparison import method_rules
from mini_ee.lab.evaluation.failure_prediction import calibration_error, early_exit_failure_prediction
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Fixed, Never, Rule
from mini_ee.lab.training.default_rule import choose

REFERENCE = "joint"  # the method whose full model a loss is counted from, and whose curve others are compared with
CONTROL = "fixed depth"  # the exits of joint training, the same for all examples of a rule
BUDGETS = {"at 1.5x": 2 / 3, "at 2x": 1 / 2, "at 3x": 1 / 3}  # figure -> share of the full model's FLOPs
HEADLINE = "at 2x"
AREA = tuple(k / 20 for k in range(4, 21))  # shares of the full model's FLOPs from .2 to 1
ONE_POINT = 0.01
SAME_RULE = 0.03  # difference in the share of the FLOPs; records are rounded, so thresholds differ a little
SLACK = 1e-9  # of a share or a score: more than the rounding error, less than one example
SCORES = ("full", *BUDGETS)
FIGURES = (*SCORES, "saved", "saved own", "lost", "area")
PARTS = 1024  # of the examples; a mixture sends a whole number of them deeper, so that sums are exact
ABOUT = {  # figures that a record's `about` contains -> where
    "speedup": ("one_point", "speedup"),
    "half speedup": ("half", "speedup"),
    "seconds": ("training", "seconds"),
    "megabytes": ("megabytes_added",),
    "parameters": ("training", "parameters"),
}


class Values(NamedTuple):
    """A figure of a method on a task: the mean of `values` (S, N), over seeds and examples, divided by `scale`."""

    seeds: tuple[int, ...]
    values: np.ndarray
    scale: float = 1.0

    @property
    def by_seed(self) -> np.ndarray:
        """(S,): the figure of each seed."""
        return self.values.sum(axis=1) / self.values.shape[1] / self.scale


class SeedFigures(NamedTuple):
    """One trained run: N reported examples under the rules that were chosen on the held-out ones."""

    about: dict
    full: np.ndarray  # (N,) bool, whether the full model is right
    held_out_full: float  # held-out score of the full model
    at: dict[float, np.ndarray]  # share of the FLOPs -> (N,), whether the exit of the example is right: 0, 1 or between
    depth: dict[float, np.ndarray]  # share -> (N,), the exit layer
    flops: dict[float, float]  # share -> mean share on the reported examples
    passes_at_one_point: np.ndarray | None  # (N,), layers run; None if every rule loses more
    passes_at_own_point: np.ndarray  # (N,), of the rule that loses at most a point of the method's own full model
    at_one_point: np.ndarray  # (N,) bool, whether the exit of that rule is right; of the full model if there is none
    flops_at_one_point: float  # mean share of that rule on the reported examples
    exits: tuple[int, ...]
    failure: float  # EEFP: how well the largest probability of an exit predicts its failures, the mean over exits
    calibration: float  # ECE: the calibration error of the exits, the mean; both NaN if there is one exit
    least_flops: float  # the smallest share of the FLOPs that some rule needs on the held-out examples


class TaskFigures(NamedTuple):
    """All methods on one task. A figure is Values, or the reason why there is none."""

    task: str
    runs: dict[str, dict[int, SeedFigures]]  # method -> seed -> its run
    figures: dict[tuple[str, str], Values | str]  # (method, figure)

    @property
    def layers(self) -> int:
        """Layers of the full model."""
        return max(run.exits[-1] for runs in self.runs.values() for run in runs.values())


def read_task(folder: Path, missing: dict[str, str]) -> TaskFigures:
    """The figures of the records in a folder, METHOD.npz. missing: method -> why it has no record."""
    records = {path.stem: read_records(path) for path in sorted(folder.glob("*.npz"))}
    return task_figures(folder.name, records, missing)


def task_figures(task: str, records: dict[str, dict[int, SeedRecord]], missing: dict[str, str]) -> TaskFigures:
    """The figures from records by method and seed. Raises ValueError if methods have other examples than others."""
    _check_examples(task, records)
    reference = {seed: _held_out_full(made) for seed, made in records.get(REFERENCE, {}).items()}
    runs = {
        method: {seed: seed_figures(made, method, reference.get(seed)) for seed, made in seeds.items()}
        for method, seeds in records.items()
        if seeds
    }
    if REFERENCE in runs:
        runs[CONTROL] = {
            seed: seed_figures(made._replace(about={}), CONTROL, reference[seed])
            for seed, made in records[REFERENCE].items()
        }
    by_figure: dict[tuple[str, str], Values | str] = {}
    for method in (*runs, *missing):
        for figure in FIGURES:
            by_figure[method, figure] = _figure(runs, method, figure) if method in runs else missing[method]
    return TaskFigures(task, runs, by_figure)


def _check_examples(task: str, records: dict[str, dict[int, SeedRecord]]) -> None:
    """The labels of the reported examples are the same in all records, as far as they are known."""
    known: np.ndarray | None = None
    for method, seeds in records.items():
        for seed, made in seeds.items():
            labels = made.reported.labels
            assert labels is not None
            if known is None:
                known = labels.copy()
            both = known[: len(labels)], labels[: len(known)]
            if len(known) != len(labels) or (both[0] != both[1])[(both[0] >= 0) & (both[1] >= 0)].any():
                raise ValueError(
                    f"{task}: the record of {method}, seed {seed}, has other reported examples than the records before "
                    f"it; remove it, so that it is made again"
                )
            known = np.where(known < 0, labels, known)


def _held_out_full(made: SeedRecord) -> float:
    return float(replay_all(made.held_out, [Never()]).right.mean())


# ---- One run ----
def rules_for(method: str, held_out: Record) -> list[Rule]:
    """The full model and the candidates of a method; of the control all examples at one exit."""
    if method == CONTROL:
        return [Never(), *map(Fixed, reversed(range(len(held_out.segments.exits) - 1)))]
    return method_rules(method_of(method), held_out, toy_task())  # any task with classes


class Mixture(NamedTuple):
    """Two rules: `deeper` of PARTS of the examples, drawn at random, exit by the second one."""

    rules: tuple[int, int]
    deeper: int

    def expected(self, values: np.ndarray) -> np.ndarray:
        """Values by rule (R, ...) -> their expectation (...)."""
        one, other = self.rules
        return ((PARTS - self.deeper) * values[one] + self.deeper * values[other]) / PARTS


def seed_figures(made: SeedRecord, method: str, reference: float | None) -> SeedFigures:
    """The figures of one run. reference: the held-out score of the reference's full model, from which a loss counts."""
    made = made._replace(reported=with_measures(made.reported), held_out=with_measures(made.held_out))
    rules = rules_for(method, made.held_out)
    chosen_on = replay_all(made.held_out, rules)
    scores, order = chosen_on.right.mean(axis=1), _deepest_first(chosen_on)

    def cheapest(least: float) -> int | None:
        return choose(order, lambda r: -chosen_on.flops[r], lambda r: scores[r] >= least - ONE_POINT - SLACK)

    one_point = None if reference is None else cheapest(reference)
    own_point = cheapest(scores[0])
    mixtures = {share: best_mixture(chosen_on, share) for share in _shares()}
    mixed = {r for mixture in mixtures.values() if mixture for r in mixture.rules}
    picked = sorted(mixed | {r for r in (one_point, own_point, 0) if r is not None})
    reported, place = replay_all(made.reported, [rules[r] for r in picked]), {r: at for at, r in enumerate(picked)}
    chosen = {
        share: Mixture((place[mixture.rules[0]], place[mixture.rules[1]]), mixture.deeper)
        for share, mixture in mixtures.items()
        if mixture
    }
    at_one_point = place[one_point or 0]
    return SeedFigures(
        about=made.about,
        full=reported.right[place[0]],
        held_out_full=float(scores[0]),
        at={share: mixture.expected(reported.right) for share, mixture in chosen.items()},
        depth={share: mixture.expected(reported.depth) for share, mixture in chosen.items()},
        flops={share: float(mixture.expected(reported.flops)) for share, mixture in chosen.items()},
        passes_at_one_point=None if one_point is None else reported.passes[at_one_point],
        passes_at_own_point=reported.passes[place[own_point or 0]],
        at_one_point=reported.right[at_one_point],
        flops_at_one_point=float(reported.flops[at_one_point]),
        exits=made.reported.segments.exits,
        failure=_failure(made.reported),
        calibration=_calibration(made.reported),
        least_flops=float(chosen_on.flops.min()),
    )


def best_mixture(held_out: Replays, share: float) -> Mixture | None:
    """The rule, or the mixture of two, with the best score within a share of the FLOPs; None if every rule needs more.

    Of a mixture, one rule needs at most the share, and the other one more. A single rule is preferred, then a deep one.
    """
    flops, right, order = held_out.flops, held_out.right.sum(axis=1), np.array(_deepest_first(held_out))
    inside = order[flops[order] <= share + SLACK]
    outside = order[flops[order] > share + SLACK]
    if not len(inside):
        return None
    room = (share - flops[inside][:, None]) / (flops[outside] - flops[inside][:, None])
    deeper = np.concatenate((np.zeros((len(inside), 1)), np.floor(room.clip(0) * PARTS)), axis=1).astype(np.int64)
    others = np.concatenate((right[inside][:, None], np.tile(right[outside], (len(inside), 1))), axis=1)
    one, other = np.unravel_index(np.argmax((PARTS - deeper) * right[inside][:, None] + deeper * others), deeper.shape)
    second = outside[other - 1] if other else inside[one]
    return Mixture((int(inside[one]), int(second)), int(deeper[one, other]))


def _failure(reported: Record) -> float:
    if len(reported.segments.exits) < 2:
        return math.nan
    aurocs = early_exit_failure_prediction(reported.confidence("max_probability"), _right(reported))
    return float(np.nanmean(aurocs)) if np.isfinite(aurocs).any() else math.nan


def _calibration(reported: Record) -> float:
    if len(reported.segments.exits) < 2:
        return math.nan
    confidence, right = reported.confidence("max_probability"), _right(reported)
    return float(np.mean([calibration_error(confidence[:, k], right[:, k]) for k in range(confidence.shape[1])]))


def _shares() -> tuple[float, ...]:
    return (*BUDGETS.values(), *AREA)


def _deepest_first(replays: Replays) -> list[int]:
    """Numbers of the rules by decreasing mean depth. Of rules with equal scores the deepest is chosen."""
    return np.argsort(-replays.depth.mean(axis=1), kind="stable").tolist()


def _right(recorded: Record) -> np.ndarray:
    assert recorded.labels is not None
    return recorded.predictions == recorded.labels[:, None]


# ---- All seeds ----
def _figure(runs: dict[str, dict[int, SeedFigures]], method: str, figure: str) -> Values | str:
    """A figure of a method that has records."""
    by_seed = runs[method]
    if figure == "full":
        return _values(by_seed, {seed: run.full for seed, run in by_seed.items()})
    if figure in BUDGETS:
        share = BUDGETS[figure]
        reached = {seed: run.at[share] for seed, run in by_seed.items() if share in run.at}
        if len(reached) == len(by_seed):
            return _values(by_seed, reached)
        return f"{len(by_seed) - len(reached)} of {len(by_seed)} seeds have no rule with so few FLOPs"
    layers = max(run.exits[-1] for run in by_seed.values())
    if figure == "saved own":
        return _values(by_seed, {seed: layers - run.passes_at_own_point for seed, run in by_seed.items()}, layers)
    reference = runs.get(REFERENCE, {})
    if lacking := sorted(by_seed.keys() - reference.keys()):
        return f"joint training has no record with seed {', '.join(map(str, lacking))}"
    if figure == "saved":
        rows = len(next(iter(by_seed.values())).full)
        passes = {seed: run.passes_at_one_point for seed, run in by_seed.items()}
        saved = {
            seed: np.zeros(rows) if run_passes is None else layers - run_passes for seed, run_passes in passes.items()
        }
        return _values(by_seed, saved, layers)
    if figure == "lost":
        return _values(by_seed, {seed: reference[seed].full - 1.0 * run.at_one_point for seed, run in by_seed.items()})
    shares = shares_of([*by_seed.values(), *(reference[seed] for seed in by_seed)])
    if 2 * len(shares) < len(AREA):
        return "it reaches less than half of these shares of the FLOPs"
    more = {
        seed: sum((run.at[share].astype(float) - reference[seed].at[share] for share in shares), np.zeros(1))
        for seed, run in by_seed.items()
    }
    return _values(by_seed, more, len(shares))


def shares_of(runs: Sequence[SeedFigures]) -> list[float]:
    """The shares of AREA that all these runs reach on the held-out examples."""
    return [share for share in AREA if all(share in run.at for run in runs)]


def _values(seeds: dict[int, SeedFigures], values: dict[int, np.ndarray], scale: float = 1.0) -> Values:
    order = sorted(seeds)
    return Values(tuple(order), np.array([values[seed] for seed in order], np.float64), scale)


def about_figure(task: TaskFigures, method: str, name: str) -> list[float]:
    """A figure that the records of a method contain, of each seed that has it.

    The seconds of a training are those of the CPU: the trainings that share a GPU slow each other down. The speed-up at
    one point of a seed whose every rule loses more is that of its full model, 1. It is left out if another rule was
    timed: the choice depends on the record of joint training, which may be newer.
    """
    runs = [run for _, run in sorted(task.runs.get(method, {}).items())]
    if name == "seconds":
        runs = [run for run in runs if trained_on(run.about) is None]
    if name == "speedup":
        values = [_speed_up_at_one_point(run) for run in runs]
    else:
        values = [about_value(run.about, ABOUT[name]) for run in runs]
    return [float(value) for value in values if value is not None]


def _speed_up_at_one_point(run: SeedFigures) -> float | None:
    if run.passes_at_one_point is None:
        return 1.0
    timed = about_value(run.about, ("one_point", "flops_ratio"))
    other = timed is None or abs(timed - run.flops_at_one_point) > SAME_RULE
    return None if other else about_value(run.about, ABOUT["speedup"])


def trained_on(metadata: dict) -> str | None:
    """The GPU of a training; None if it was trained on the CPU."""
    return about_value(metadata, ("made", "gpu"))


def confidence_figures(task: TaskFigures, method: str) -> tuple[float, float] | None:
    """EEFP and ECE of a method, the means over seeds; None if it has one exit."""
    runs = [run for _, run in sorted(task.runs.get(method, {}).items())]
    pairs = [(run.failure, run.calibration) for run in runs if not math.isnan(run.failure)]
    return tuple(np.mean(pairs, axis=0).tolist()) if pairs else None


def about_value(metadata: dict, path: Sequence[str]) -> Any:
    """What a record contains under keys within keys, or None."""
    for key in path:
        metadata = metadata.get(key) or {}
    return metadata if metadata != {} else None
