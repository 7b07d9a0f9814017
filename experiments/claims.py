"""The claims of a recipe: their comparisons, their verdicts, and their text on a result page."""

from collections import Counter
from html import escape
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.markdown import folded, markdown_table
from mini_ee.experiments.page_data import PageData, filled_in, is_share, printed, with_unit
from mini_ee.experiments.recipe import comparisons_of, parts_of, sides
from mini_ee.experiments.verdicts import (
    ABOVE,
    ALL_SEEDS,
    BELOW,
    ELSEWHERE,
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    LEVEL,
    MISSING,
    MOST_SEEDS,
    UNDECIDED,
    UNTRIED,
    WIDE,
    Compared,
    compared,
    forecast,
    judged,
    verdict_of,
)

NO_SEED_HAS_IT = Compared(0.0, 0.0, 0.0, verdict=ELSEWHERE)  # all cases were run, and no seed has the figure
NEVER = f"{MOST_SEEDS} seeds would not decide"
MORE_ROWS = "more seeds would not help; more test examples might"
OR_RECORDS = "more seeds would not help; more test examples, or records of each prediction, might"
COLUMNS = (
    "comparison",
    "should be larger",
    "than",
    f"difference ({100 * (1 - LEVEL):g} % interval)",
    "seeds",
    "result",
)


class Judged(NamedTuple):
    """A claim with its comparisons and its verdict."""

    claim: dict
    comparisons: list[Compared | None]  # in the claim's order; None: its cases have not been run
    verdict: str

    def in_words(self) -> str:
        """The verdict with the claim's caveat, if it has one; why it cannot be decided, and what would decide it if the
        interval is too wide."""
        caveat = f" ({self.claim['caveat']})" if "caveat" in self.claim else ""
        if self.verdict not in UNDECIDED:
            return self.verdict + caveat
        more = f" ({self._what_decides()})" if self.verdict == WIDE else ""
        return f"cannot be decided: {self.verdict}{more}{caveat}"

    def _what_decides(self) -> str:
        if (expected := forecast(self.comparisons)) is None or expected.seeds == ALL_SEEDS:
            exact = forecast([each and each._replace(row_error=0.0) for each in self.comparisons])
            recorded = all(each is None or each.recorded for each in self.comparisons)
            return (MORE_ROWS if recorded else OR_RECORDS) if exact and exact.seeds != ALL_SEEDS else NEVER
        because = f", because of {expected.below} of {len(self.comparisons)} comparisons"
        because = because if expected.verdict == FAILS and len(self.comparisons) > 1 else ""
        return f"with about {expected.seeds} seeds in total it probably {expected.verdict}{because}"

    def counts(self) -> str:
        """The number of comparisons by result: "6 above, 1 undecided"."""
        results = [each.verdict if each else MISSING for each in self.comparisons]
        above, below = results.count(ABOVE), results.count(BELOW)
        counts = (above, ABOVE), (below, BELOW), (len(results) - above - below, "undecided")
        return ", ".join(f"{count} {word}" for count, word in counts if count)


def judge_claim(claim: dict, data: PageData) -> Judged:
    """Compare on the seeds that all cases of a comparison have, and decide the claim."""
    if "unseen" in claim:
        return Judged(claim, [], ELSEWHERE)
    comparisons = judged([compare_cases(each, data) for each in comparisons_of(claim)])
    verdict, tried = verdict_of(comparisons), claim.get("tried", {"cases": []})
    if verdict == FAILS and not all(data.found[name]["seeds"] for name in tried["cases"]):
        verdict = UNTRIED
    return Judged(claim, comparisons, verdict)


def compare_cases(compare: dict, data: PageData) -> Compared | None:
    """One comparison, a mean over its settings; None if its cases have not been run.

    If the cases were run with enough seeds and too few of these have the figure, other data are needed. For example,
    there is no loss of the rows that exit at a layer if no row exits there.
    """
    both = [_side(data, compare, side) for side in ("more", "than")]
    seeds = sorted(set.intersection(*(set(values) for values in both if values is not None)))
    names = {name for side in ("more", "than") for name, _ in sides(compare, side)}
    run = len(set.intersection(*(set(data.found[name]["seeds"]) for name in names)))
    if not seeds:
        return NO_SEED_HAS_IT if run >= LEAST_SEEDS else None
    more, than = ([values[seed] if values is not None else compare["than"] for seed in seeds] for values in both)
    more = [value * compare.get("times", 1) for value in more]
    row_error, recorded = _row_error(compare, data, seeds)
    found = compared(more, than, compare.get("by", 0.0), compare.get("exact", False), row_error)
    found = found._replace(recorded=recorded)
    return found._replace(verdict=ELSEWHERE) if found.seeds < LEAST_SEEDS <= run else found


def _row_error(compare: dict, data: PageData, seeds: list[str]) -> tuple[float, bool]:
    """The standard error of the difference that comes from the test examples, 0 for figures without one; and whether
    it is exact, not a bound. Tasks are independent.
    """
    by_task: dict[tuple[str, int], list[tuple[float, tuple[str, str]]]] = {}
    for sign, side in ((1, "more"), (-1, "than")):
        pairs = sides(compare, side)
        for pair in pairs:
            by_task.setdefault(data.rows(*pair), []).append((sign / len(pairs), pair))
    found = [_row_variance(parts, rows, data, seeds) for (_, rows), parts in by_task.items() if rows]
    return sum(variance for variance, _ in found) ** 0.5, all(recorded for _, recorded in found)


def _row_variance(parts: list, rows: int, data: PageData, seeds: list[str]) -> tuple[float, bool]:
    """The variance of a weighted sum of figures of one task, from N examples; whether all are recorded by example.

    parts: (weight, (case, figure)), with a positive weight on one side of the comparison and a negative one on the
    other. If all are recorded: the variance over the examples of the sum of their values, the mean over seeds, divided
    by N. Otherwise a bound: a share p has a variance of at most p (1 - p) / N. On the same examples, the variances of
    both sides add up if the sides are independent; models of the same data are right on the same examples more often
    than independent ones. The shares of a side are averaged first.
    """
    examples = [[data.examples(*pair, seed) for seed in seeds] for _, pair in parts]
    if all(each is not None for one in examples for each in one):
        total = sum(weight * np.mean(one, axis=0) for (weight, _), one in zip(parts, examples))
        return float(np.var(total, ddof=1)) / rows, True
    variance = 0.0
    for sign in (1, -1):
        own = [(sign * weight, data.values(*pair)) for weight, pair in parts if sign * weight > 0]
        if own:
            share = float(np.mean([values[seed] for _, values in own for seed in seeds]))
            variance += sum(weight for weight, _ in own) ** 2 * share * (1 - share) / rows
    return variance, False


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
    for verdict, one, many in ((HOLDS, "holds", "hold"), (FAILS, FAILS, "do not hold here")):
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
    rows = []
    for each, comparison in zip(comparisons_of(claim), comparisons):
        if comparison not in (None, NO_SEED_HAS_IT):
            rows.append(_comparison_row(each, comparison, data))
            parts = parts_of(each)
            same = len({figure for part in parts for _, figure in sides(part, "more")}) == 1
            for part in parts if len(parts) > 1 else []:
                if (found := compare_cases(part, data)) is not None:
                    rows.append(_part_row(part, found, data, same))
    lines = [*markdown_table(COLUMNS, rows), ""] if rows else []
    if verdict not in (HOLDS, FEW, MISSING) and (tried := claim.get("tried")):
        lines += _tried_lines(claim, tried, data)
    lines += [filled_in(claim["unseen"], data), ""] if "unseen" in claim else []
    lines += [f"The paper: {claim['paper']}."]
    control = "control: " if claim.get("control") else ""
    counts = f" (comparisons: {counts})" if (counts := judged.counts()) else ""
    text = escape(claim["text"], quote=False)
    return folded(f"<b>{number}. {judged.in_words()}</b>{counts} · {control}{text}", lines)


def _tried_lines(claim: dict, tried: dict, data: PageData) -> list[str]:
    """For each kind of data of the claim, the best of the other settings and its own, on the seeds that all have.

    Cases have the same kind of data if they share the task, the model and the case that their loss is measured against.
    Settings with fewer seeds than LEAST_SEEDS have a line of their own, so that the others are compared on all seeds.
    """
    figure, groups, lines = tried["figure"], {}, []
    side = "than" if tried.get("least") else "more"
    methods = {data.cases[name].options.get("method") for name in tried["cases"]}
    pairs = [pair for compare in comparisons_of(claim) for pair in sides(compare, side)]
    own = {name for name, key in pairs if key == figure and data.cases[name].options.get("method") in methods}
    for name in dict.fromkeys([*tried["cases"], *sorted(own)]):
        case = data.cases[name]
        if data.values(name, figure):
            kind = case.reference, case.options.get("task"), case.options.get("model")
            groups.setdefault(kind, {})[name] = data.values(name, figure)
    for values in (part for group in groups.values() for part in _by_seeds(group, own)):
        if len(values) < 2 or not set(values) & set(tried["cases"]) or (own and not own & set(values)):
            continue
        shared = sorted(set.intersection(*map(set, values.values())))
        if not shared:
            continue
        means = {name: float(np.mean([each[seed] for seed in shared])) for name, each in values.items()}
        best = (min if tried.get("least") else max)(means, key=means.get)
        seeds = "one seed" if len(shared) == 1 else f"{len(shared)} seeds"
        line = f"Best of {len(means)} settings on {seeds}, by this figure itself: "
        line += f"*{data.name_of_case(best)}*, {data.name_of(figure)} {with_unit(means[best], figure)}"
        mine = [name for name in own if name in means]
        if len(mine) == 1 and mine[0] != best:
            line += f"; the claim's own, *{data.name_of_case(mine[0])}*: {with_unit(means[mine[0]], figure)}"
        lines += [f"{line}.", ""]
    return lines


def _by_seeds(values: dict[str, dict[str, float]], own: set[str]) -> list[dict[str, dict[str, float]]]:
    """The settings with LEAST_SEEDS seeds or more, and the others, each next to the claim's own; all together if its
    own have fewer, or if it has none.
    """
    several = {name for name, each in values.items() if len(each) >= LEAST_SEEDS}
    mine = own & values.keys()
    if not mine or not mine <= several or len(several) == len(values):
        return [values]
    return [
        {name: each for name, each in values.items() if (name in several) == which or name in mine}
        for which in (True, False)
    ]


def _comparison_row(compare: dict, comparison: Compared, data: PageData) -> list:
    """What is compared, both means, their difference with its interval and the required one, seeds and result."""
    ((_, figure), *_) = sides(compare, "more")
    low, high = (_signed(value, figure) for value in (comparison.low, comparison.high))
    difference = _signed(comparison.difference, figure) + (
        f" ({low} to {high})" if comparison.high > comparison.low else ""
    )
    if compare.get("by"):
        difference += f", required: above {_signed(compare['by'], figure)}"
    result = comparison.verdict
    if result == WIDE and comparison.high < comparison.required:
        result = f"{WIDE} after Holm's correction"
    first, second = (with_unit(value, figure) for value in (comparison.more, comparison.than))
    return [_compared_names(compare, data), first, second, difference, int(comparison.seeds), result]


def _part_row(compare: dict, comparison: Compared, data: PageData, same_figure: bool) -> list:
    """One of the settings whose mean decides: without an interval, a result, and the figure if all parts share it."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    cases = dict.fromkeys(_case_names(pairs, data) for pairs in (more, than) if pairs)
    names = ", against ".join(cases) if same_figure else _compared_names(compare, data)
    ((_, figure), *_) = more
    means = with_unit(comparison.more, figure), with_unit(comparison.than, figure)
    return [f"*part:* {names}", *means, _signed(comparison.difference, figure), int(comparison.seeds), ""]


def _signed(value: float, figure: str) -> str:
    text = printed(abs(value), figure, None if is_share(figure) or abs(value) >= 10 else 3)
    return f"{'-' if value < 0 else '+'}{text}"


def _compared_names(compare: dict, data: PageData) -> str:
    """The figure, and the cases of both sides; the second side may be a number."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    first, figure = _case_names(more, data), _figure_names(more, data)
    figure = f"{compare['times']:g} times {figure}" if "times" in compare else figure
    if not than:
        return f"{figure}: {first}, against a number"
    second, other = _case_names(than, data), _figure_names(than, data)
    if first == second:
        return f"{first}: {figure}, against {other}"
    return f"{figure}: {first}, against {second if figure == other else f'{other}, {second}'}"


def _figure_names(pairs: list[tuple[str, str]], data: PageData) -> str:
    first, *rest = [data.name_of(figure) for figure in dict.fromkeys(figure for _, figure in pairs)]
    return f"mean of {len(rest) + 1} figures ({first}, ...)" if rest else first


def _case_names(pairs: list[tuple[str, str]], data: PageData) -> str:
    names = [data.name_of_case(case) for case in dict.fromkeys(case for case, _ in pairs)]
    if len(names) > 2:
        return f"mean of {len(names)} cases ({names[0]}, ...)"
    return f"mean of {names[0]} and {names[1]}" if len(names) == 2 else names[0]
