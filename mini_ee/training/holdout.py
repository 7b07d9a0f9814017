"""Which rows of a task's train split are held out: some choose, others test the default rule and nothing else."""

from typing import NamedTuple

from mini_ee.data.tasks import Split, Task, divided, holdout

TEST_ROWS = 2_000
"""Examples at most that test the default rule. So many guarantee a loss of at most .01 for a rule that is worse than
the last exit on 1 % of them and better on 1 % (results/guarantees.md). More may take longer than the training."""

SELECTING = 0.2
"""Share of the held-out tenth that selects, if few rows are left over: a guarantee of .01 needs over 300 that test."""


class Parts(NamedTuple):
    """The rows of a task's train split, by their use. No row is in two parts."""

    train: Split
    selection: Split  # chooses epochs, temperatures, policies and candidate rules: whatever a training chooses
    test: Split  # tests the default rule; nothing else reads it. Empty if only one row is held out


def split_rows(task: Task, seed: int, max_train: int | None) -> Parts:
    """A seeded tenth of the train split is held out; with max_train the train part and this tenth shrink alike.

    Rows that max_train leaves over are held out too. If they are at least as many as the tenth, the whole tenth
    selects and they test. Else the share SELECTING of the tenth selects, and the others of it test with them. At most
    TEST_ROWS test.
    """
    train, held = holdout(task.split("train"), seed)
    unused = held.take(slice(0))
    if max_train is not None:
        train, unused = divided(train, max_train, seed)
        held, more = divided(held, max(1, max_train // 9), seed)
        unused = unused + more
    if len(unused) < len(held):
        held, others = divided(held, max(1, round(SELECTING * len(held))), seed)
        unused = unused + others
    return Parts(train, held, divided(unused, TEST_ROWS, seed)[0])
