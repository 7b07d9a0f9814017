"""How often is a guaranteed agreement violated if a few texts make up a large share of the lines, as in real traffic?

Lines are drawn from recorded outputs with known probabilities, so the true agreement of a rule is known exactly. They
are divided as add-exits divides them, and its default rule is chosen and tested. Every repetition draws its own
frequent texts and lines. The planted mistake tests each different text once, which add-exits once did.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from operator import itemgetter

import numpy as np

from mini_ee.experiments.markdown import share
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.export.add_exits import TRAINED
from mini_ee.lab.recording import Record, predictions
from mini_ee.lab.statistics import share_interval
from mini_ee.lab.training.default_rule import Chosen, default_rule
from mini_ee.lab.training.holdout import TEST_ROWS, split_rows

LINES, REPEATS, SEED, LEVELS = 3_000, 300, 0, (0.95, 0.98)
KINDS = (
    *((0.0, 0, False), (0.3, 15, False), (0.3, 40, False), (0.5, 15, False), (0.5, 40, False)),
    *((0.3, 15, True), (0.5, 40, True)),
)
"""(share of the lines, number of frequent texts, whether half of these are texts on which the first exit is wrong)."""

PROCESSES = 4

DROPPED = "each text once"


def probabilities(wrong: np.ndarray, share: float, count: int, unlike: bool, random: np.random.Generator) -> np.ndarray:
    """(N,): of each text to be a line. wrong (N,) bool: whether its first exit disagrees with the last."""
    order = random.permutation(len(wrong))
    if unlike:
        halves = order[wrong[order]][: count // 2], order[~wrong[order]][: count - count // 2]
        order = np.concatenate((*halves, np.setdiff1d(order, np.concatenate(halves))))
    found = np.full(len(wrong), (1 - share) / (len(wrong) - count))
    found[order[:count]] = share / max(1, count)
    return found


def chosen_from(recorded: Record, lines: np.ndarray, level: float, seed: int) -> Chosen:
    """The default rule for these lines (numbers of texts), which the parts of add-exits choose and test."""
    names = tuple(map(str, range(recorded.logits.shape[2])))
    rows = Split(tuple((str(line),) for line in lines), lines)
    task = Task("lines", names, ("accuracy",), {"train": rows})
    parts = split_rows(task, seed, max(int(TRAINED * len(lines)), len(lines) - 2 * TEST_ROWS))
    selection, test = (recorded.take(part.labels) for part in (parts.selection, parts.test))
    return default_rule(selection, test, task, round(1 - level, 6))


def repetition(recorded: Record, kind: tuple[float, int, bool], seed: int) -> list[dict]:
    """One draw of lines: for each level, without and with the planted mistake, the guarantee and whether it holds.

    recorded: its labels are the predictions of the last exit.
    """
    random, predicted = np.random.default_rng((SEED, seed)), predictions(recorded.logits)
    chance = probabilities(predicted[:, 0] != recorded.labels, *kind, random)
    lines = random.choice(len(chance), LINES, p=chance)
    first = np.sort(np.unique(lines, return_index=True)[1])  # where each different text stands first
    results = []
    for planted, drawn in ((None, lines), (DROPPED, lines[first])):
        for level in LEVELS:
            chosen = chosen_from(recorded, drawn, level, seed)
            result = recorded.replay(chosen.rule)
            agreement = float(chance @ (predictions(result.logits) == recorded.labels))
            guaranteed = chosen.guarantee is not None
            results.append({"planted": planted, "level": level, "guaranteed": guaranteed})
            saved = 1 - float(chance @ result.layers_run) / recorded.segments.exits[-1]
            results[-1] |= {"violated": guaranteed and agreement < level, "saved": saved}
    return results


def of_kind(kind: tuple[float, int, bool], recorded: Record) -> list[dict]:
    """The sums over all repetitions of a kind: for each level, without and with the planted mistake."""
    found, cases = [repetition(recorded, kind, seed) for seed in range(REPEATS)], []
    for each in zip(*found):
        violated = sum(one["violated"] for one in each)
        about = dict(zip(("share", "texts", "unlike"), kind)) | {key: each[0][key] for key in ("planted", "level")}
        about |= {"guaranteed": sum(one["guaranteed"] for one in each), "violated": violated}
        about |= {"saved": float(np.mean([one["saved"] for one in each]))}
        cases.append(about | {"interval": share_interval(violated, REPEATS)})
    return cases


def measure(recorded: Record) -> dict:
    """The violated guarantees of every kind and level, with their 95 % intervals. recorded: of different texts."""
    recorded = recorded._replace(labels=predictions(recorded.logits[:, -1]))
    size = {"recorded": len(recorded.logits), "lines": LINES, "repetitions": REPEATS, "seed": SEED}
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = pool.map(partial(of_kind, recorded=recorded), KINDS)
        return size | {"cases": [case for cases in found for case in cases]}


# ---- The page ----
TITLES = (
    *("agreement", "share of the lines", "from frequent texts", "guarantees", "violated", "95 % interval"),
    *("layers saved", "each text tested once: violated", "95 % interval"),
)


def rows(found: dict) -> list[list[str]]:
    """The table: a row for each kind of lines and each level."""
    repetitions, kind = found["repetitions"], itemgetter("share", "texts", "unlike", "level")
    planted = {kind(case): case for case in found["cases"] if case["planted"]}
    table = []
    for case in (case for case in found["cases"] if not case["planted"]):
        mistaken, frequent = planted[kind(case)], f"{case['texts']} texts" + ", unlike the rest" * case["unlike"]
        frequent = [share(case["share"]), frequent] if case["texts"] else ["-", "-"]
        row = [f"{case['level']:.0%}", *frequent, f"{case['guaranteed']} of {repetitions}"]
        row += [share(case["violated"] / repetitions), " to ".join(map(share, case["interval"])), share(case["saved"])]
        table.append([*row, share(mistaken["violated"] / repetitions), " to ".join(map(share, mistaken["interval"]))])
    return table


def fields(found: dict) -> dict:
    """The fields of the template."""
    named = {f"frequent_{key}": found[key] for key in ("task", "recorded", "lines", "repetitions", "seed")}
    return named | {"frequent_summary": summary(found)}


def summary(found: dict) -> str:
    """The largest shares of violated guarantees, in words."""
    cases = [
        [case for case in found["cases"] if case["texts"] and bool(case["planted"]) == planted]
        for planted in (False, True)
    ]
    most = [max(some, key=itemgetter("violated")) for some in cases]
    violated, mistaken = (share(case["violated"] / found["repetitions"]) for case in most)
    return (
        f"If 15 to 40 texts make up 30 % to 50 % of the lines, the agreement that `mini-ee add-exits` guarantees is "
        f"violated for at most {violated} of the draws (95 % interval {' to '.join(map(share, most[0]['interval']))}). "
        f"If each different text were tested once, as in an earlier version, it would be up to {mistaken}."
    )
