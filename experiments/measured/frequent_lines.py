"""How often is a guaranteed agreement violated if a few texts make up a large share of the lines, as in real traffic?

Lines are drawn from recorded outputs with known probabilities, so the true agreement of a rule is known exactly. They
are divided as add-exits divides them, and its default rule is chosen and tested. Every repetition draws its own
frequent texts and lines. The planted mistake tests each different text once, which add-exits once did.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from operator import itemgetter

import numpy as np

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
    full = np.full(len(wrong), (1 - share) / (len(wrong) - count))
    full[order[:count]] = share / max(1, count)
    return full


def chosen_from(recorded: Record, lines: np.ndarray, level: float, seed: int, token_kind: str = "") -> Chosen:
    """The default rule for these lines (numbers of texts), which the parts of add-exits choose and test.

    token_kind: of token_tasks.py, if the model predicts tokens.
    """
    names = tuple(map(str, range(recorded.logits.shape[2])))
    rows = Split(tuple((str(line),) for line in lines), lines)
    task = Task("lines", names, ("accuracy",), {"train": rows}, token_kind=token_kind)
    parts = split_rows(task, seed, max(int(TRAINED * len(lines)), len(lines) - 2 * TEST_ROWS))
    selection, test = (recorded.take(part.labels) for part in (parts.selection, parts.test))
    return default_rule(selection, test, task, max_loss=round(1 - level, 6))


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
    repetitions, cases = [repetition(recorded, kind, seed) for seed in range(REPEATS)], []
    for outcomes in zip(*repetitions):
        violated = sum(one["violated"] for one in outcomes)
        case = dict(zip(("share", "texts", "unlike"), kind)) | {key: outcomes[0][key] for key in ("planted", "level")}
        case |= {"guaranteed": sum(one["guaranteed"] for one in outcomes), "violated": violated}
        case |= {"saved": float(np.mean([one["saved"] for one in outcomes]))}
        cases.append(case | {"interval": share_interval(violated, REPEATS)})
    return cases


def measure(recorded: Record) -> dict:
    """The violated guarantees of every kind and level, with their 95% intervals. recorded: of different texts."""
    recorded = recorded._replace(labels=predictions(recorded.logits[:, -1]))
    size = {"recorded": len(recorded.logits), "lines": LINES, "repetitions": REPEATS, "seed": SEED}
    with ProcessPoolExecutor(PROCESSES) as pool:
        by_kind = pool.map(partial(of_kind, recorded=recorded), KINDS)
        return size | {"cases": [case for cases in by_kind for case in cases]}


# ---- The figures of the page ----
def page_figures(figures: dict) -> dict:
    """The cases without and with the planted mistake, and the largest shares of violated guarantees of both."""
    pairs = zip(*([case for case in figures["cases"] if bool(case["planted"]) == planted] for planted in (False, True)))
    worst, mistaken = (
        max(
            (case for case in figures["cases"] if case["texts"] and bool(case["planted"]) == planted),
            key=itemgetter("violated"),
        )
        for planted in (False, True)
    )
    low, high = worst["interval"]
    most = {"share": worst["violated"] / figures["repetitions"], "low": low, "high": high}
    once = mistaken["violated"] / figures["repetitions"]
    return {"frequent_pairs": list(pairs), "frequent_most": most, "frequent_once": once}
