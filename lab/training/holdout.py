"""The held-out examples of a task's train split: some make choices, the others only test the default rule."""

from typing import NamedTuple

import numpy as np

from mini_ee.lab.data.rankings import queries_of
from mini_ee.lab.data.tasks import Split, Task, divided, holdout

TEST_ROWS = 2_000
"""Maximum number of examples that test the default rule. They guarantee a loss of at most .01 for a rule that is worse
than the last exit on 1% of them and better on 1% (results/guarantees.md). More may take longer than the training."""

SELECTING = 0.2
"""Share of the held-out tenth that selects, if few others test: a guarantee of .01 needs over 300 that test."""


class Parts(NamedTuple):
    """The train split by use. No example is in two parts."""

    train: Split
    selection: Split  # chooses epochs, temperatures, policies, candidate rules
    test: Split  # only tests the default rule. Empty if only one example is held out


def split_rows(task: Task, seed: int, max_train: int | None) -> Parts:
    """Hold out a tenth of the train split, drawn with the seed. With max_train this tenth shrinks in proportion.

    Examples that max_train does not use are held out too. If they are at least as many as the tenth, the whole tenth
    selects and they test. Else the share SELECTING of the tenth selects, and its other examples test with them. At most
    TEST_ROWS examples test. In a ranking the examples that are counted and drawn are queries, each with all its rows,
    because the texts of a query are not independent.
    """
    rows = task.split("train")
    if task.top_k is None:
        return _parts(rows, seed, max_train)
    query = queries_of(rows.texts)
    numbers = np.unique(query)
    parts = _parts(Split(tuple(("query",) for _ in numbers), numbers), seed, max_train)
    return Parts(*(rows.take(np.isin(query, part.labels)) for part in parts))


def _parts(rows: Split, seed: int, max_train: int | None) -> Parts:
    train, held = holdout(rows, seed)
    unused = held.take(slice(0))
    if max_train is not None:
        train, unused = divided(train, max_train, seed)
        held, more = divided(held, max(1, max_train // 9), seed)
        unused = unused + more
    if len(unused) < len(held):
        held, others = divided(held, max(1, round(SELECTING * len(held))), seed)
        unused = unused + others
    return Parts(train, held, divided(unused, TEST_ROWS, seed)[0])


def different(rows: Split) -> Split:
    """Each different text once, where it stands first: for what learns. What tests counts every line of a file."""
    first = {text: row for row, text in reversed(list(enumerate(rows.texts)))}
    return rows.take(np.array(sorted(first.values()), int))
