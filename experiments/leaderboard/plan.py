"""What the leaderboard should contain: tasks, methods and seeds, and why a method is missing on a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mini_ee.experiments.leaderboard import protocol
from mini_ee.lab.data.files import read_json
from mini_ee.lab.registry import METHODS

NOT_RUN = "·"  # the reason of a cell whose run is missing; such methods are named below a table
EXAM = "reviews"  # the task of known hardness; it has a section of its own


class Plan(NamedTuple):
    """The tasks and methods of the tables, in their order."""

    records: Path  # TASK/METHOD.npz
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int  # of each method and task, unless its training takes too long
    command: str
    not_rows: Mapping[str, str] = {}  # method that is in no table of classifiers -> why
    models: Mapping[str, str] = {}  # task -> the model in words

    @property
    def ranked_tasks(self) -> tuple[str, ...]:
        """The tasks of the headline: all but the exam, or the exam alone."""
        return tuple(name for name in self.tasks if name != EXAM) or self.tasks

    def missing(self, task: str) -> dict[str, str]:
        """Method without a record on a task -> why it has none, or NOT_RUN."""
        without = [name for name in self.methods if not (self.records / task / f"{name}.npz").exists()]
        diverged = {name: self.diverged(task, name) for name in without}
        return {
            name: f"the training diverged with seed {', '.join(seeds)}" if seeds else NOT_RUN
            for name, seeds in diverged.items()
        }

    def state(self, task: str, method: str) -> dict:
        """What a method `tried`, the chosen `factor` and `options`, and `diverged` seeds."""
        path = self.records.parent / "leaderboard" / task / f"{method}.json"
        return read_json(path, signed="tried") if path.exists() else {"tried": [], "diverged": {}}

    def diverged(self, task: str, method: str) -> list[str]:
        """The seeds with which the training of a method diverged."""
        return sorted(self.state(task, method)["diverged"])


def planned(out: Path, quick: bool) -> Plan:
    """The plan of the protocol."""
    exams = sorted(protocol.exams(quick), key=lambda exam: exam.name == EXAM)
    models = {exam.name: exam.model or "the built-in BERT" for exam in exams}
    reasons = {name: reason for name in METHODS if (reason := protocol.why_not(name))}
    return Plan(
        out / "records",
        tuple(exam.name for exam in exams),
        tuple(protocol.methods(quick)),
        protocol.seed_count(quick),
        "mini-ee reproduce leaderboard" + (" --quick" if quick else ""),
        reasons,
        models,
    )
