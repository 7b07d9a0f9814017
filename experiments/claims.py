"""The claims of a recipe: their comparisons, their verdicts, and their text on a result page."""

from collections import Counter
from html import escape
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.markdown import folded, markdown_table
from mini_ee.experiments.page_data import PageData, is_share, printed, with_unit
from mini_ee.experiments.recipe import sides
from mini_ee.experiments.verdicts import (
    CONFIDENCE_LEVEL,
    ELSEWHERE,
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    MISSING,
    MOST_SEEDS,
    UNDECIDED,
    UNTRIED,
    WIDE,
    Compared,
    compared,
    seeds_to_decide,
    seeds_to_decide_claim,
    verdict_of,
)

NO_SEED_HAS_IT = Compared(0.0, 0.0, 0.0, 0.0, 0.0, 0, ELSEWHERE)  # all cases were run, and no seed has the figure
COLUMNS = ("comparison", "first", "second", f"difference ({CONFIDENCE_LEVEL:.0%} interval)", "seeds", "verdict")


class Judged(NamedTuple):
    """A claim with its comparisons and its verdict."""

    claim: dict
    comparisons: list[Compared | None]  # in the claim's order; None: its cases have not been run
    verdict: str

    def in_words(self) -> str:
        """The verdict, why it cannot be decided, and how many seeds would decide if the interval is too wide."""
        if self.verdict not in UNDECIDED:
            return self.verdict
        need = self.claim.get("need", "all")
        why = _wide(seeds_to_decide_claim(self.comparisons, need)) if self.verdict == WIDE else self.verdict
        return f"cannot be decided: {why}"


def judge_claim(claim: dict, data: PageData) -> Judged:
    """Compare on the seeds that all cases of a comparison have, and decide the claim.

    If the cases were run with enough seeds and too few of these have the figure, other data are needed. For example,
    there is no loss of the rows that exit at a layer if no row exits there.
    """
    comparisons = []
    for each in claim.get("compare", []):
        both = [_side(data, each, side) for side in ("more", "than")]
        seeds = sorted(set.intersection(*(set(values) for values in both if values is not None)))
        names = {name for side in ("more", "than") for name, _ in sides(each, side)}
        run = len(set.intersection(*(set(data.found[name]["seeds"]) for name in names)))
        if not seeds:
            comparisons.append(NO_SEED_HAS_IT if run >= LEAST_SEEDS else None)
            continue
        more, than = ([values[seed] if values is not None else each["than"] for seed in seeds] for values in both)
        comparison = compared(more, than, each.get("by", 0.0), each.get("exact", False))
        if comparison.seeds < LEAST_SEEDS <= run:
            comparison = comparison._replace(verdict=ELSEWHERE)
        comparisons.append(comparison)
    if "unseen" in claim:
        return Judged(claim, [], ELSEWHERE)
    verdict, tried = verdict_of(comparisons, claim.get("need", "all")), claim.get("tried", {"cases": []})
    if verdict == FAILS and not all(data.found[name]["seeds"] for name in tried["cases"]):
        verdict = UNTRIED
    return Judged(claim, comparisons, verdict)


def _side(data: PageData, compare: dict, side: str) -> dict[str, float] | None:
    """Seed -> the mean over the side's cases; None if the side is a number."""
    pairs = sides(compare, side)
    if not pairs:
        return None
    found = [data.values(*pair) for pair in pairs]
    shared = set.intersection(*(set(values) for values in found))
    return {seed: float(np.mean([values[seed] for values in found])) for seed in shared}


def counted(judged: list[Judged], control: bool = False) -> str:
    """The number of claims, or of controls, by verdict: "3 hold, 1 does not hold"; empty if there are none."""
    verdicts = Counter(one.verdict for one in judged if bool(one.claim.get("control")) == control)
    undecided = {each: verdicts.pop(each) for each in UNDECIDED if each in verdicts}
    parts = []
    for verdict, one, many in ((HOLDS, "holds", "hold"), (FAILS, "does not hold", "do not hold")):
        if count := verdicts.pop(verdict, 0):
            parts.append(f"{count} {one if count == 1 else many}")
    parts += [f"{count} *{verdict}*" for verdict, count in verdicts.items()]
    if undecided:
        reasons = ", ".join(f"{count} {verdict}" for verdict, count in undecided.items())
        parts.append(f"{sum(undecided.values())} cannot be decided ({reasons})")
    return ", ".join(parts)


# ---- On a page ----


def claim_lines(number: int, judged: Judged, data: PageData) -> list[str]:
    """A claim, folded: its verdict and text, then its comparisons, and what the paper reports."""
    claim, comparisons, verdict = judged
    rows = [
        _comparison_row(each, comparison, data)
        for each, comparison in zip(claim.get("compare", []), comparisons)
        if comparison not in (None, NO_SEED_HAS_IT)
    ]
    lines = [*markdown_table(COLUMNS, rows), ""] if rows else []
    if verdict not in (HOLDS, FEW, MISSING) and (tried := claim.get("tried")):
        means = {name: mean for name in tried["cases"] if (mean := data.mean(name, tried["figure"])) is not None}
        if len(means) > 1:
            best = (min if tried.get("least") else max)(means, key=means.get)
            about = f"{data.name_of(tried['figure'])} {with_unit(means[best], tried['figure'])}"
            lines += [f"Best of {len(means)} settings tried: *{data.name_of_case(best)}*, {about}.", ""]
    lines += [claim["unseen"], ""] if "unseen" in claim else []
    lines += [f"The paper: {claim['paper']}."]
    control = "control: " if claim.get("control") else ""
    return folded(f"<b>{number}. {judged.in_words()}</b> · {control}{escape(claim['text'], quote=False)}", lines)


def _comparison_row(compare: dict, comparison: Compared, data: PageData) -> list:
    """What is compared, both means, their difference with its interval and the required one, seeds and verdict."""
    ((_, figure), *_) = sides(compare, "more")
    low, high = (_signed(value, figure) for value in (comparison.low, comparison.high))
    difference = _signed(comparison.difference, figure) + (
        f" ({low} to {high})" if comparison.high > comparison.low else ""
    )
    if compare.get("by"):
        difference += f", required: above {_signed(compare['by'], figure)}"
    verdict = _wide(seeds_to_decide(comparison)) if comparison.verdict == WIDE else comparison.verdict
    first, second = (with_unit(value, figure) for value in (comparison.more, comparison.than))
    return [_compared_names(compare, data), first, second, difference, comparison.seeds, verdict]


def _signed(value: float, figure: str) -> str:
    text = printed(abs(value), figure, None if is_share(figure) or abs(value) >= 10 else 3)
    return f"{'-' if value < 0 else '+'}{text}"


def _wide(seeds: int | None) -> str:
    return f"{WIDE} ({f'about {seeds} seeds would' if seeds else f'{MOST_SEEDS} seeds would not'} decide)"


def _compared_names(compare: dict, data: PageData) -> str:
    """The figure, and the cases of both sides; the second side may be a number."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    first, figure = _case_names(more, data), data.name_of(more[0][1])
    if not than:
        return f"{figure}: {first}, against a number"
    second, other = _case_names(than, data), data.name_of(than[0][1])
    if first == second:
        return f"{first}: {figure}, against {other}"
    return f"{figure}: {first}, against {second if figure == other else f'{other}, {second}'}"


def _case_names(pairs: list[tuple[str, str]], data: PageData) -> str:
    names = [data.name_of_case(case) for case in dict.fromkeys(case for case, _ in pairs)]
    if len(names) > 2:
        return f"mean of {len(names)} cases ({names[0]}, ...)"
    return f"mean of {names[0]} and {names[1]}" if len(names) == 2 else names[0]
