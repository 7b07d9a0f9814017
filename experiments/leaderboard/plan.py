"""What the leaderboard should contain: tasks, methods and seeds, and why a method is missing on a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mini_ee.data.files import read_json

NOT_RUN = "·"  # a cell of a run that is missing
EXAM = "reviews"  # the task of known hardness; it has a section of its own


class Plan(NamedTuple):
    """The tasks and methods of the tables, in their order."""

    records: Path  # TASK/METHOD.npz
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int  # of each method and task, unless a record says why it has fewer
    not_rows: Mapping[str, str]  # method that is in no table of classifiers -> why
    command: str

    @property
    def ranked_tasks(self) -> tuple[str, ...]:
        """The tasks of the headline: all but the exam, or the exam alone."""
        return tuple(name for name in self.tasks if name != EXAM) or self.tasks

    def missing(self, task: str) -> dict[str, str]:
        """Method without a record on a task -> why it has none, or NOT_RUN."""
        found = {}
        for name in self.methods:
            if not (self.records / task / f"{name}.npz").exists():
                path = self.records.parent / "leaderboard" / task / f"{name}.json"
                diverged = read_json(path, signed="tried")["diverged"] if path.exists() else {}
                found[name] = f"the training diverged with seed {', '.join(sorted(diverged))}" if diverged else NOT_RUN
        return found


def planned(out: Path, quick: bool) -> Plan:
    """The plan of the protocol."""
    from mini_ee.experiments.leaderboard import protocol
    from mini_ee.registry import METHODS

    reasons = {name: reason for name in METHODS if (reason := protocol.why_not(name))}
    names = tuple(exam.name for exam in protocol.exams(quick))
    command = "mini-ee reproduce leaderboard" + (" --quick" if quick else "")
    return Plan(out / "records", names, tuple(protocol.methods(quick)), protocol.seed_count(quick), reasons, command)
