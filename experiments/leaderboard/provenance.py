"""How the leaderboard's classifiers were measured: exits, rates, hours, machines and checksums, from the records."""

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.figures import (
    ABOUT,
    BUDGETS,
    CONTROL,
    HEADLINE,
    REFERENCE,
    about_value,
    trained_on,
)
from mini_ee.experiments.leaderboard.legend import ENOUGH
from mini_ee.experiments.leaderboard.protocol import NOT_MOVED, SEARCH_SEEDS
from mini_ee.experiments.leaderboard.ranking import DRAWS
from mini_ee.experiments.leaderboard.runs import CHOSEN_BY, HELD_OUT_ROWS
from mini_ee.experiments.leaderboard.tables import Leaderboard, percent
from mini_ee.experiments.markdown import listed

ABOUT_NAMES = {
    "Processor": ("made", "processor"),
    "torch": ("made", "torch"),
    "numpy": ("made", "numpy"),
    "Python": ("made", "python"),
    "Commits": ("made", "commit"),
}


class Trained(NamedTuple):
    """One training, also one that only chose a rate."""

    task: str
    name: str  # of the first method that it serves
    seed: int
    factor: float | None  # of the default learning rates
    options: tuple[tuple[str, float], ...] = ()  # that were chosen or tried otherwise

    @property
    def pair(self) -> tuple[str, str]:
        return self.task, self.name


def bullets(lines: list[str]) -> list[str]:
    """A Markdown list."""
    return [line for each in lines for line in textwrap.wrap(each, 118, subsequent_indent="  ", break_on_hyphens=False)]


def measured_lines(board: Leaderboard) -> list[str]:
    """The section of the page."""
    made = [about for _, _, _, about in _abouts(board)]
    shared: dict[str, dict[str, None]] = {}
    for _, method, _, about in _abouts(board):
        shared.setdefault(about.get("trained_as", method), {})[method] = None
    groups = [f"{listed(list(names))} ({name})" for name, names in shared.items() if len(names) > 1]
    lines = [
        f"- {listed([name for name, each in board.plan.training.items() if each == text])}: {text}."
        for text in dict.fromkeys(board.plan.training.values())
    ]
    lines += _exits(board) + _rates(board) + [f"- {NOT_MOVED}"]
    lines += [
        f"- Intervals: a bootstrap with {DRAWS:,} draws of seeds and examples together, the same for all methods. Of S "
        f"seeds, S - 1 are drawn in each, so that the variance is unbiased. An interval is the mean ± t times the "
        f"standard deviation of the draws, with Student's t and Satterthwaite's degrees of freedom. {ENOUGH} "
        f"Without an interval, a method is not called better or worse.",
        "- Rules are chosen on held-out training examples, never on the reported ones. If several rules have the same "
        "score, the one with the deepest exits is chosen." + _flops_needed(made),
    ]
    lines += _hours(board)
    if groups:
        lines.append(f"- Methods that differ only in their exit rules share a training: {'; '.join(groups)}.")
    for gpu, count in sorted(Counter(filter(None, map(trained_on, made))).items()):
        lines.append(
            f"- Trained on a GPU ({gpu}): {count} of {len(made)} records; a record is of one method, task and "
            f"seed. Their training seconds are in no table. Their speed-ups were measured on the CPU of that machine "
            f"while other trainings ran, so they are less exact."
        )
    for name, path in ABOUT_NAMES.items():
        if values := sorted({str(found) for each in made if (found := about_value(each, path))}):
            several = name == "Processor" and len(values) > 1
            note = " Training seconds of different processors cannot be compared exactly." if several else ""
            lines.append(f"- {name}: {', '.join(values)}.{note}")
    lines += [f"- Checksums (sha256) of {name}: {'; '.join(sums)}." for name, sums in _checksums(board).items() if sums]
    return [*bullets(lines), ""]


def minutes_to_add(board: Leaderboard) -> str:
    """How long `--only` takes for a new method, measured by the trainings of joint training."""
    count = Counter(each.pair for each in _seconds(board))
    own = {task: number for (task, name), number in count.items() if name == REFERENCE}
    each = {task: seconds for (task, name), seconds in _all_on_the_cpu(board).items() if name == REFERENCE}
    if not own or own.keys() != each.keys():
        return ""
    minutes = math.fsum(own[task] * each[task] for task in own) / 60
    return (
        f" With {sum(own.values())} trainings as long as those of {REFERENCE} training, that takes about {minutes:.0f} "
        f"core minutes; recording and timing take more."
    )


# ---- Parts ----
def _abouts(board: Leaderboard) -> Iterator[tuple[str, str, int, dict]]:
    """Task, method, seed and `about` of all records."""
    for task in board.tasks.values():
        for method, runs in task.runs.items():
            yield from ((task.task, method, seed, run.about) for seed, run in runs.items() if run.about)


def _flops_needed(made: list[dict]) -> str:
    """The share of the FLOPs that the rules at 2x need on the reported examples, on which they were not chosen."""
    shares = [each for about in made if (each := about_value(about, ("half", "flops_ratio"))) is not None]
    if not shares:
        return ""
    low, middle, high = np.percentile(shares, (5, 50, 95))
    return (
        f" The rules of *accuracy at 2x* need {percent(low)} to {percent(high)} % of the FLOPs on the reported "
        f"examples (5th and 95th percentile over methods, tasks and seeds; median {percent(middle)} %)."
    )


def _exits(board: Leaderboard) -> list[str]:
    """Which methods have exits at other layers than all, and which of them need more than half of the FLOPs."""
    others: dict[str, dict[str, None]] = {}
    least: dict[str, list[float]] = defaultdict(list)
    for task in board.tasks.values():
        for method, runs in task.runs.items():
            for run in runs.values():
                if method != CONTROL and 1 < len(run.exits) < run.exits[-1]:
                    layers = f"{listed([str(layer) for layer in run.exits[:-1]])} of {run.exits[-1]}"
                    others.setdefault(method, {})[layers] = None
                    least[method].append(run.least_flops)
    if not others:
        return []
    line = (
        f"- Most methods have an exit after every layer. Some have fewer before the last layer: "
        f"{'; '.join(f'`{method}` after layer {listed(list(where))}' for method, where in others.items())}. There, an "
        f"exit starts again from the embeddings, so many exits would cost too much, the method chooses its exits, or "
        f"the row has those of its paper."
    )
    for method, shares in least.items():
        if min(shares) > BUDGETS[HEADLINE]:
            line += (
                f" The rule of `{method}` with the fewest FLOPs needs {percent(min(shares))} % of them, so it has no "
                f"accuracy at 2x with these exits."
            )
    return [line]


def _rates(board: Leaderboard) -> list[str]:
    """How learning rates are searched for, and which multiples of the defaults were chosen."""
    chosen = defaultdict(Counter)
    for task, method in _trainings(board):
        state = board.plan.state(task, method)
        if len({each["factor"] for each in state["tried"]}) > 1 and "factor" in state:
            chosen[task][state["factor"]] += 1
    if not chosen:
        return []
    each = [
        f"{task} {listed([f'{factor:g} ({number})' for factor, number in sorted(counts.items())])}"
        for task, counts in chosen.items()
    ]
    return [
        f"- Learning rates are multiples of the method's default. A search begins with the two that are named "
        f"above. While the largest or the smallest is the best, the next one beyond it is tried, by the same "
        f"ratio. Each is tried with {SEARCH_SEEDS} seeds. The one with the best {CHOSEN_BY} on at most "
        f"{HELD_OUT_ROWS:,} held-out examples is chosen; without such a rule, the accuracy of the full model "
        f"counts. Chosen multiples (number of searches): on {'; on '.join(each)}."
    ]


def _trainings(board: Leaderboard) -> dict[tuple[str, str], str]:
    """(task, method) -> the name of its training."""
    return {(task, method): about.get("trained_as", method) for task, method, _, about in _abouts(board)}


def _recorded_seconds(board: Leaderboard) -> dict[Trained, tuple[float, bool]]:
    """Training that has records -> its processor seconds, and whether it ran on a GPU."""
    found = {}
    for task, method, seed, about in _abouts(board):
        seconds, factor = (about_value(about, path) for path in (ABOUT["seconds"], ("rates", "factor")))
        key = Trained(task, about.get("trained_as", method), seed, factor, tuple(about.get("chosen", {}).items()))
        found[key] = seconds or 0.0, trained_on(about) is not None
    return found


def _seconds(board: Leaderboard) -> dict[Trained, tuple[float, bool]]:
    """The same of all trainings, with those that only chose a rate."""
    found = _recorded_seconds(board)
    for (task, method), name in _trainings(board).items():
        for each in board.plan.state(task, method)["tried"]:
            key = Trained(task, name, each["seed"], each["factor"], tuple(each.get("options", {}).items()))
            found.setdefault(key, (each["seconds"] or 0.0, "gpu" in each))
    return found


def _all_on_the_cpu(board: Leaderboard) -> dict[tuple[str, str], float]:
    """(task, training) -> seconds of one training on the CPU, the mean over those with records that ran there. If none
    did, they are estimated from another task, by the ratio of the methods that were trained there on both tasks.
    """
    values = defaultdict(list)
    for each, (seconds, on_a_gpu) in _recorded_seconds(board).items():
        values[each.pair] += [] if on_a_gpu else [seconds]
    means = {pair: math.fsum(seconds) / len(seconds) for pair, seconds in values.items() if seconds}
    found = dict(means)
    for task, name in values.keys() - means.keys():
        bases = [other for other, each in means if each == name]
        shared = {base: [each for other, each in means if other == base and (task, each) in means] for base in bases}
        if base := max(shared, key=lambda base: len(shared[base]), default=None):
            if of_both := sorted(shared[base]):
                ratio = [math.fsum(means[at, each] for each in of_both) for at in (task, base)]
                found[task, name] = means[base, name] * ratio[0] / ratio[1]
    return found


def _hours(board: Leaderboard) -> list[str]:
    """The processor hours of all trainings, on the CPU and on a GPU, and what the CPU alone would take."""
    trained = _seconds(board)
    line = f"- There were {len(trained)} trainings of classifiers, including those that chose the learning rate."
    for where, time, gpu in (("the CPU", "They", False), ("a GPU", "The processes that control it", True)):
        own = [seconds for seconds, on_a_gpu in trained.values() if on_a_gpu == gpu]
        if own:
            line += f" {len(own)} ran on {where}. {time} took {math.fsum(own) / 3600:.1f} processor hours."
    line += " Recording and timing took more."
    if any(on_a_gpu for _, on_a_gpu in trained.values()):
        each, count = _all_on_the_cpu(board), Counter(one.pair for one in trained)
        if each.keys() == count.keys():
            hours = math.fsum(each[pair] * number for pair, number in count.items()) / 3600
            line += (
                f" On one core of a CPU, all trainings would take about {hours:.0f} hours. This is an estimate "
                f"from the trainings that have records: for one on a GPU, we take the time of the same method on the "
                f"CPU, on the same task or another one."
            )
    return [line]


def _checksums(board: Leaderboard) -> dict[str, list[str]]:
    """Task -> the checksums of its splits, as the records have them."""
    found = {}
    for name, task in board.tasks.items():
        abouts = [run.about for runs in task.runs.values() for run in runs.values()]
        splits = {(split, value[:16]) for about in abouts for split, value in about.get("data", {}).items()}
        found[name] = [f"{split} {value}" for split, value in sorted(splits)]
    return found
