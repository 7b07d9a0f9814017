"""Verdicts of claims, against brute force, printed tables and simulated data; accuracy at a cost."""

import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from leaderboard_records import drawn_record

from mini_ee.experiments import page_data, student
from mini_ee.experiments.claims import compare_cases, judge_claim
from mini_ee.experiments.example_values import example_values
from mini_ee.experiments.measures import at_costs
from mini_ee.experiments.page_data import PageData
from mini_ee.experiments.recipe import Case, comparisons_of, parts_of, sides
from mini_ee.experiments.records import SeedRecord
from mini_ee.experiments.verdicts import (
    ABOVE,
    BELOW,
    EXCLUDED,
    FAILS,
    HOLDS,
    LEVEL,
    MISSING,
    UNDECIDED,
    UNTESTED,
    Compared,
    compared,
    judged,
    verdict_of,
)
from mini_ee.lab.rules import Fixed

SEEDS = {"above": ([3, 3.1, 2.9], [1, 1, 1]), "below": ([1, 1, 1], [3, 3.1, 2.9]), "wide": ([1, 2, 3], [3, 2, 1])}
SEEDS |= {"few": ([3], [1]), "constant": ([1] * 3, [3] * 3)}


def one(kind: str) -> Compared | None:
    return compared(*map(list, SEEDS[kind])) if kind in SEEDS else None


def result(more, than, **settings) -> str:
    (comparison,) = judged([compared(more, than, **settings)])
    return comparison.verdict


# ---- One comparison ----


def test_a_comparison_is_students_t_on_the_paired_differences():
    more, than = [0.92, 0.95, 0.91, 0.94], [0.90, 0.92, 0.90, 0.90]
    differences = [a - b for a, b in zip(more, than)]
    half = 3.182 * statistics.stdev(differences) / 2  # t of 3 degrees of freedom, from a printed table
    comparison = compared(more, than)
    assert comparison.low == pytest.approx(statistics.mean(differences) - half, abs=1e-5)
    assert comparison.high == pytest.approx(statistics.mean(differences) + half, abs=1e-5)
    assert result(more, than) == ABOVE and result(than, more) == BELOW
    assert result(more, than, by=0.02) == UNDECIDED and result(more, than, by=0.08) == BELOW


def test_pairing_sees_what_the_spread_between_seeds_hides():
    more, than = [0.71, 0.81, 0.91], [0.70, 0.799, 0.90]
    assert result(more, than) == ABOVE and result(more, than[::-1]) == UNDECIDED


@pytest.mark.parametrize(
    ("level", "freedom", "printed"),
    [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 4, 2.776), (0.05, 9, 2.262), (0.05, 99, 1.984), (0.01, 4, 4.604)]
    + [(0.02, 30, 2.457), (0.002, 3, 10.215), (0.001, 2, 31.599)],
)
def test_quantiles_of_students_t_are_those_of_printed_tables(level, freedom, printed):
    assert student.quantile(level, freedom) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("freedom", [3, 7.5])
def test_p_values_are_integrals_of_the_density(freedom):
    x = np.geomspace(2, 4000, 20_000)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    whole = math.sqrt(freedom * math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    assert student.p_value(2, freedom) == pytest.approx(2 * np.trapezoid(density, x) / whole, rel=1e-3)
    assert student.quantile(0.05, math.inf) == pytest.approx(1.959964, abs=1e-6) and student.p_value(0, freedom) == 1


def test_both_errors_are_added_as_squares():
    seeds_alone = compared([0.2, 0.4, 0.0], [0.0] * 3)
    both = compared([0.2, 0.4, 0.0], [0.0] * 3, row_error=0.3)
    rows_alone = both._replace(spread=0.0)
    assert rows_alone.half_width() == pytest.approx(1.95996 * 0.3, abs=1e-5)
    assert both.half_width() ** 2 == pytest.approx(seeds_alone.half_width() ** 2 + rows_alone.half_width() ** 2)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_contains_the_true_difference_often_enough_whatever_the_ratio_of_the_errors(ratio, seeds):
    """4,000 experiments: a row error that all seeds share, of which only a bound on the spread is known."""
    draws = np.random.default_rng(seeds)
    of_rows, of_seeds = draws.normal(size=(4000, 1)) * ratio, draws.normal(size=(4000, seeds))
    differences = of_rows + of_seeds
    quantile = student.quantile(LEVEL, seeds - 1)
    comparison = Compared(0, 0, 0, 1.0, ratio, seeds)
    halves = np.hypot(
        quantile * differences.std(axis=1, ddof=1) / seeds**0.5, comparison._replace(spread=0).half_width()
    )
    missed = (abs(differences.mean(axis=1)) > halves).mean()
    assert missed <= LEVEL + 3 * (LEVEL * (1 - LEVEL) / 4000) ** 0.5
    some = Compared(0, 0, 0, float(differences[0].std(ddof=1)), ratio, seeds)
    assert some.half_width() == pytest.approx(halves[0])


def test_seeds_with_equal_figures_show_nothing_unless_the_figure_is_exact_or_has_an_error_from_test_examples():
    assert result([0.532] * 3, [0.552] * 3) == UNDECIDED
    assert result([230.0] * 3, [92.1] * 3, exact=True) == ABOVE
    assert result([0.532] * 3, [0.55, 0.552, 0.551]) == BELOW
    assert result([0.532] * 3, [0.552] * 3, row_error=0.01) == BELOW and result(
        [0.5] * 3, [0.5] * 3, row_error=0.01
    ) == (UNDECIDED)


def test_two_seeds_are_too_few():
    assert result([0.9, 0.9], [0.1, 0.1]) == MISSING


# ---- One claim ----


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ("above above above", HOLDS),
        ("above above wide", UNDECIDED),
        ("above constant wide", UNDECIDED),
        ("above above constant", UNDECIDED),
        ("above above below", FAILS),
        ("above wide below", FAILS),
        ("above wide few", MISSING),
        ("above wide few missing", MISSING),
        ("above missing", MISSING),
        ("above below missing", FAILS),
    ],
)
def test_a_claim_holds_if_all_are_above_and_does_not_if_one_is_below(kinds, verdict):
    assert verdict_of(judged([one(kind) for kind in kinds.split()])) == verdict


@pytest.mark.parametrize(
    ("more", "size", "verdict"),
    [
        ([0.01, 0.02, 0.0], 0.05, EXCLUDED),  # the interval is .01 +- .0248
        ([0.01, 0.02, 0.0], 0.03, UNDECIDED),
        ([0.01, 0.011, 0.009], 0.05, HOLDS),  # smaller than the paper's, but there
        ([-0.01, -0.011, -0.009], 0.05, FAILS),
        ([0.01, 0.02, 0.0], None, UNDECIDED),
    ],
)
def test_an_effect_of_the_papers_size_is_excluded_if_the_interval_lies_below_it(more, size, verdict):
    assert verdict_of(judged([compared(more, [0.0] * 3, size=size)])) == verdict


def test_the_papers_size_is_excluded_among_several_with_bonferronis_correction():
    """Half of the interval is .0248 for one comparison, .0358 for two: t of 2 degrees of freedom at .025 is 6.205."""
    close = compared([0.01, 0.02, 0.0], [0.0] * 3, size=0.04)
    far = compared([0.02, 0.021, 0.019], [0.0] * 3, size=0.02)  # it is above
    assert verdict_of(judged([close])) == EXCLUDED and verdict_of(judged([close, far])) == UNDECIDED
    assert verdict_of(judged([close._replace(size=0.05), far])) == EXCLUDED
    assert verdict_of(judged([close, far._replace(size=None)])) == EXCLUDED


def p_value(comparison: Compared) -> float:
    """The smallest two-sided level at which the interval lies below what is required; by bisection."""
    low, high = 1e-12, 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if comparison.is_below(comparison.required, middle) else (middle, high)
    return high if comparison.difference < comparison.required else 1.0


def rejected_by_closed_testing(p_values: list[float], level: float) -> set[int]:
    """A hypothesis is rejected if every set of hypotheses that contains it is rejected by Bonferroni's test."""
    count = range(len(p_values))
    sets = [set(some) for size in count for some in itertools.combinations(count, size + 1)]
    return {k for k in count if all(min(p_values[i] for i in some) <= level / len(some) for some in sets if k in some)}


def test_comparisons_are_below_as_closed_testing_finds_by_brute_force():
    """Holm's procedure is closed testing with Bonferroni's tests."""
    draws, counts = np.random.default_rng(0), []
    for _ in range(20):
        some = []
        for _ in range(3):
            more = list(draws.normal(-draws.choice([0, 4]), 1, size=draws.choice([3, 5])))
            some.append(compared(more, [0.0] * len(more), row_error=draws.choice([0, 0.5])))
        below = {k for k, comparison in enumerate(judged(some)) if comparison.verdict == BELOW}
        assert below == rejected_by_closed_testing([p_value(comparison) for comparison in some], LEVEL)
        counts.append(len(below))
    assert {0, 1, 2} <= set(counts)


def claims_of(means: list[float], seeds: int, row_error: float, count: int) -> list[str]:
    """Verdicts of simulated claims: true mean differences, errors of size 1 by seed and of row_error for all seeds."""
    draws, verdicts = np.random.default_rng(1), []
    for _ in range(count):
        rows = draws.normal(size=len(means)) * row_error
        some = [
            compared(list(mean + row + draws.normal(size=seeds)), [0.0] * seeds, row_error=row_error)
            for mean, row in zip(means, rows)
        ]
        verdicts.append(verdict_of(judged(some)))
    return verdicts


@pytest.mark.parametrize(("seeds", "row_error"), [(3, 0.0), (5, 1.0)])
def test_a_claim_at_the_edge_of_truth_is_called_false_in_at_most_five_of_a_hundred_cases(seeds, row_error):
    """Six comparisons whose true differences are just what is required: without Holm's correction it is 14 of 100."""
    verdicts = claims_of([0.0] * 6, seeds, row_error, 600)
    assert verdicts.count(FAILS) / 600 <= LEVEL and verdicts.count(FAILS) > 0


def test_a_claim_that_is_false_in_one_comparison_holds_in_at_most_five_of_a_hundred_cases():
    """The others are far above, so that this one decides."""
    verdicts = claims_of([0.0, 50.0, 50.0], 5, 0.5, 600)
    assert 0 < verdicts.count(HOLDS) / 600 <= LEVEL


@pytest.mark.parametrize(("figures", "verdict"), [([0.2, 0.1], FAILS), ([0.2, None], MISSING), ([0.9], HOLDS)])
def test_a_claim_does_not_hold_once_the_other_settings_were_tried(figures, verdict):
    cases = {name: Case(name, "rows", {}) for name in ("first", "second")[: len(figures)]}
    seeds = [
        {} if value is None else {s: {"figures": {"x": value + 0.001 * int(s)}} for s in "012"} for value in figures
    ]
    values = {name: {"seeds": seed_values} for name, seed_values in zip(cases, seeds)}
    data = PageData(cases, values)
    compare, tried = [{"more": "first", "than": 0.5, "figure": "x"}], {"cases": list(cases), "figure": "x"}
    claim = {"text": "", "paper": "", "compare": compare, "tried": tried}
    assert judge_claim(claim, data).verdict == verdict


@pytest.mark.parametrize(
    ("having", "run", "verdict"),
    [
        ("012", "012", HOLDS),
        ("01", "012", UNTESTED),
        ("", "012", UNTESTED),
        ("01", "01", MISSING),
        ("", "01", MISSING),
    ],
)
def test_a_figure_that_seeds_do_not_have_though_they_were_run_cannot_be_seen(having, run, verdict):
    """No loss is there where no row left."""
    seeds = {seed: {"figures": {"x": 0.9 + 0.001 * int(seed)} if seed in having else {}} for seed in run}
    data = PageData({"first": Case("first", "rows", {})}, {"first": {"seeds": seeds}})
    claim = {"text": "", "paper": "", "compare": [{"more": "first", "than": 0.5, "figure": "x"}]}
    assert judge_claim(claim, data).verdict == verdict


# ---- Means over settings, and errors from test examples ----


def data_of(values: dict[str, dict[str, dict[str, float]]], measure: str = "rows", **rows: int) -> PageData:
    """Case -> figure -> seed -> value; a case is named after its task. rows: test examples of a task."""
    measured = {}
    for case, figures in values.items():
        seeds = sorted({seed for of_seeds in figures.values() for seed in of_seeds})
        made = {seed: {"figures": {name: of_seeds[seed] for name, of_seeds in figures.items()}} for seed in seeds}
        task_rows = {"test_rows": rows.get(case.split()[0], 0)}
        measured[case] = {"seeds": {seed: seed_figures | task_rows for seed, seed_figures in made.items()}}
    cases = {name: Case(name, measure, {"task": name.split()[0]}) for name in values}
    return PageData(cases, measured)


def test_a_comparison_is_the_mean_over_its_settings_on_the_seeds_that_all_have():
    long, short = {"0": 0.5, "1": 0.6}, {"2": 0.1, "1": 0.2, "0": 0.4}
    other = dict.fromkeys("012", 0.3)
    data = data_of({"A ours": {"x": long}, "B ours": {"x": short}, "A base": {"x": other}, "B base": {"x": other}})
    claim = {"over": {"task": ["A", "B"]}, "compare": [{"more": "{task} ours", "than": "{task} base", "figure": "x"}]}
    (compare,) = comparisons_of(claim)
    comparison = compare_cases(compare, data)
    assert comparison.seeds == 2 and (comparison.more, comparison.than) == pytest.approx(((0.45 + 0.4) / 2, 0.3))
    assert comparison.spread == pytest.approx(statistics.stdev([0.45 - 0.3, 0.4 - 0.3]))
    parts = [compare_cases(part, data) for part in parts_of(compare)]
    assert [part.difference for part in parts] == pytest.approx([0.55 - 0.3, (0.1 + 0.2 + 0.4) / 3 - 0.3])


def test_a_claim_can_say_how_many_times_as_much_is_required():
    """At most one and a half times as long: 1.5 times the time of one example is more than that of eight."""
    data = data_of({"A": {"1 rows": {"0": 2.0, "1": 2.2, "2": 2.4}, "8 rows": {"0": 2.1, "1": 2.5, "2": 2.6}}})
    more, than = ({"case": "A", "figure": f"{count} rows"} for count in (1, 8))
    claim = {"text": "T", "paper": "P", "compare": [{"more": more, "times": 1.5, "than": than}]}
    answer = judge_claim(claim, data)
    assert answer.verdict == HOLDS and answer.comparisons[0].difference == pytest.approx(3.3 - 2.4)
    del claim["compare"][0]["times"]
    assert judge_claim(claim, data).verdict == UNDECIDED


def test_settings_of_a_claim_and_of_a_comparison_are_combined_and_figures_can_depend_on_them():
    claim = {"over": {"task": ["A", "B"]}, "compare": [{"more": "{task} m", "than": 1, "figure": "score at {cost}"}]}
    claim["compare"][0]["over"] = {"cost": ["a third", "half"]}
    (compare,) = comparisons_of(claim)
    costs = ("score at a third", "score at half")
    assert sides(compare, "more") == [(f"{task} m", cost) for task in "AB" for cost in costs]
    assert sides(compare, "than") == [] and len(parts_of(compare)) == 4


def test_the_error_from_test_examples_is_that_of_two_independent_shares_and_smaller_for_means_over_tasks():
    """Against 20,000 simulated test sets with independent models, for the mean over two tasks of 50 and 200 rows."""
    shares = {"A ours": 0.9, "A base": 0.7, "B ours": 0.6, "B base": 0.5}
    data = data_of({case: {"score": dict.fromkeys("012", share)} for case, share in shares.items()}, A=50, B=200)
    compare = {"more": "{task} ours", "than": "{task} base", "figure": "score", "over": {"task": ["A", "B"]}}
    draws = np.random.default_rng(0)
    drawn = {case: draws.binomial({"A": 50, "B": 200}[case[0]], p, 20_000) for case, p in shares.items()}
    a, b = ((drawn[f"{task} ours"] - drawn[f"{task} base"]) / rows for task, rows in (("A", 50), ("B", 200)))
    assert compare_cases(compare, data).row_error == pytest.approx(((a + b) / 2).std(), rel=0.03)
    alone = compare_cases(compare | {"over": {"task": ["A"]}}, data)
    assert alone.row_error == pytest.approx(math.sqrt((0.9 * 0.1 + 0.7 * 0.3) / 50))
    assert compare_cases({"more": "A ours", "than": 0.5, "figure": "score"}, data).row_error == pytest.approx(
        math.sqrt(0.9 * 0.1 / 50)
    )


def recorded_data(monkeypatch, values: dict[str, np.ndarray], **rows: int) -> PageData:
    """Case -> (seeds, N): whether each example is right. The records contain it as long as `values` do."""
    of_file = {case.replace(" ", "-"): case for case in values}
    means = {case: {"score": {str(k): one.mean() for k, one in enumerate(rights)}} for case, rights in values.items()}

    def recorded(path: Path, seed: int, figure: str) -> np.ndarray | None:
        return values[case][seed] if (case := of_file[path.stem]) in values else None

    monkeypatch.setattr(page_data, "example_values", recorded)
    return data_of(means, **rows)._replace(folder=Path("results/page"))


def test_with_records_the_error_is_that_of_the_differences_of_examples(monkeypatch):
    """Models that are right on nearly the same examples, on two tasks, against 4,000 simulated test sets."""
    draws = np.random.default_rng(0)

    def test_set(rows: int) -> list[np.ndarray]:
        """Of one task: (seeds, rows) of ours and of the base. A seed changes one example of seven."""
        easy = draws.random(rows) < 0.8
        ours, base = np.tile(easy, (3, 1)), np.tile(easy & (draws.random(rows) < 0.95), (3, 1))
        return [np.where(draws.random(rights.shape) < 0.15, ~rights, rights).astype(float) for rights in (ours, base)]

    sizes = {"A": 400, "B": 100}
    values = {
        f"{task} {side}": rights
        for task, rows in sizes.items()
        for side, rights in zip(("ours", "base"), test_set(rows))
    }
    compare = {"more": "{task} ours", "than": "{task} base", "figure": "score", "over": {"task": ["A", "B"]}}
    data = recorded_data(monkeypatch, values, **sizes)
    comparison = compare_cases(compare, data)
    simulated = [
        np.mean([ours.mean() - base.mean() for ours, base in map(test_set, sizes.values())]) for _ in range(4000)
    ]
    assert comparison.row_error == pytest.approx(np.std(simulated), rel=0.25)
    without = compare_cases(compare, data._replace(folder=None))
    assert without.row_error > 2 * comparison.row_error
    one_side = compare_cases({**compare, "than": 0.5}, data)
    bound = compare_cases({**compare, "than": 0.5}, data._replace(folder=None))
    assert one_side.row_error < bound.row_error
    values.pop("B base")  # a run of before: the bound for its task alone
    mixed = compare_cases(compare, data)
    assert comparison.row_error < mixed.row_error < without.row_error


def test_a_record_of_another_run_is_refused(monkeypatch):
    """Two examples may exit elsewhere, since another processor may round the last bit of a confidence differently."""
    compare = {"more": "A ours", "than": 0.5, "figure": "score"}
    data = recorded_data(monkeypatch, {"A ours": np.ones((3, 900))}, A=900)
    for wrong in (2, 3):
        monkeypatch.setattr(page_data, "example_values", lambda *_: np.r_[np.ones(900 - wrong), np.zeros(wrong)])
        if wrong == 2:
            assert compare_cases(compare, data).row_error
            continue
        with pytest.raises(ValueError, match="expected the examples of seed 0 of A ours, found another mean of"):
            compare_cases(compare, data)


def test_a_damaged_record_is_named_with_what_to_remove(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(
        ValueError, match="a.npz: expected records of runs, found a damaged file; remove it, so that its case"
    ):
        example_values(tmp_path / "a.npz", 0, "score")
    assert example_values(tmp_path / "none.npz", 0, "score") is None


def test_a_selected_case_has_the_examples_of_the_setting_that_was_selected(monkeypatch):
    data = recorded_data(monkeypatch, {"A ours": np.ones((3, 4))}, A=4)
    data.records["A ours"]["selected"] = {"0": "A alpha 1", "1": "A alpha 2", "2": "A alpha 1"}
    files = []
    monkeypatch.setattr(page_data, "example_values", lambda path, seed, _: files.append((path.stem, seed)))
    compare_cases({"more": "A ours", "than": 0.5, "figure": "score"}, data)
    assert files == [("A-alpha-1", 0), ("A-alpha-2", 1), ("A-alpha-1", 2)]


def test_figures_on_the_same_test_examples_share_their_error():
    """The mean of two exits of one task is a share of the same rows: its error is not that of twice as many."""
    data = data_of({"A ours": {f"score after {k}": dict.fromkeys("012", 0.8) for k in (1, 2)}}, A=100)
    compare = {"more": "A ours", "than": 0.5, "figure": "score after {k}", "over": {"k": [1, 2]}}
    assert compare_cases(compare, data).row_error == pytest.approx(math.sqrt(0.8 * 0.2 / 100))


@pytest.mark.parametrize(
    ("figure", "measure", "has"),
    [("score after 2", "rows", True), ("saved at one point", "rows", True), ("full", "prompts", True)]
    + [("kNN votes", "prompts", True), ("AdaInfer", "compared through prompts", True), ("megabytes", "rows", False)]
    + [("speed-up at one point", "rows", False), ("loss after 2", "rows", False), ("saved at .9", "tokens", False)]
    + [("hold-out full", "rows", False), ("left after 2", "rows", False), ("AdaInfer layers", "prompts", False)],
)
def test_only_shares_of_a_tasks_test_examples_have_an_error_from_them(figure, measure, has):
    data = data_of({"A ours": {figure: dict.fromkeys("012", 0.8)}}, measure, A=100)
    assert bool(compare_cases({"more": "A ours", "than": 0.5, "figure": figure}, data).row_error) == has


def test_the_number_of_test_examples_is_the_smallest_of_all_seeds():
    data = data_of({"A ours": {"score": dict.fromkeys("012", 0.8)}}, A=100)
    assert data.rows("A ours", "score") == ("A", 100)
    data.records["A ours"]["seeds"]["1"]["test_rows"] = 90
    assert data.rows("A ours", "score") == ("A", 90)


# ---- Accuracy at a cost ----


def test_accuracy_at_a_cost_is_that_of_the_best_rule_that_needs_at_most_so_much():
    """Two of three exits, the best one on held-out examples, cost .65 of the full model. The last exit, which was not
    trained, does not count. At a third, only the first is left."""
    held_out = drawn_record([0.5, 0.9, 0.6], 400, np.random.default_rng(0), exits=(1, 2, 3))
    reported = drawn_record([0.6, 0.8, 0.5], 300, np.random.default_rng(1), exits=(1, 2, 3))._replace(full=3100.0)
    made = SeedRecord(reported, held_out, {"rules": {}, "curve": [Fixed(k).to_dict() for k in (2, 1, 0)]})
    right = (reported.predictions == reported.labels[:, None]).mean(axis=0)
    assert at_costs(made) == {"score at two thirds": right[1], "score at a third": right[0]}
    made.about["curve"].pop()  # the first exit
    assert at_costs(made) == {"score at two thirds": right[1]}
