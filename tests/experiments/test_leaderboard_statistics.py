"""How sure the leaderboard is: draws and intervals against loops and formulas, and verdicts that must be found."""

import math

import numpy as np
import pytest

from mini_ee.experiments.leaderboard import exam, ranking, tables
from mini_ee.experiments.leaderboard.figures import SeedFigures, TaskFigures, Values
from mini_ee.experiments.leaderboard.plan import EXAM
from mini_ee.experiments.leaderboard.ranking import Drawn
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.data.tasks import Split


# ---- Draws and intervals ----
def values_of(shift=0.0, seeds=4, rows=30, seed=0, spread=0.0):
    random = np.random.default_rng(seed)
    chances = 0.6 + shift + spread * np.linspace(-1, 1, seeds)[:, None]
    return Values(
        tuple(range(seeds)),
        (np.random.default_rng(9).random((1, rows)) < chances) ^ (random.random((seeds, rows)) < 0.05),
    )


def drawn_of(**named):
    """Draws of one task in which each method has one figure."""
    task = TaskFigures("TREC", {}, {(name, "at 2x"): values for name, values in named.items()})
    return {name: drawn for (name, _), drawn in ranking.drawn_figures(task).items()}


def test_draws_are_those_of_a_loop_over_seeds_and_examples(monkeypatch):
    monkeypatch.setattr(ranking, "DRAWS", 7)
    values = {"a": values_of(), "b": values_of(0.1, seeds=3), "c": values_of(seeds=1)}
    drawn = drawn_of(**values)
    examples = ranking.drawn_numbers("TREC", 30, 30)
    for name, (seeds, numbers, _) in values.items():
        seed_draws = ranking.drawn_numbers(f"TREC, seeds {seeds}", max(1, len(seeds) - 1), len(seeds))
        for draw, chosen in enumerate(seed_draws):
            total = sum(numbers[seed][example] for seed in chosen for example in examples[draw])
            assert drawn[name].draws[draw] == pytest.approx(total / len(chosen) / 30)
        assert drawn[name].mean == pytest.approx(numbers.mean())


def test_the_spread_of_the_draws_is_the_standard_error():
    """Of seeds alone: s / sqrt(S), without bias, although there are only five seeds."""
    by_seed = np.array([0.1, 0.5, 0.4, 0.9, 0.2])
    values = Values(tuple(range(5)), np.repeat(by_seed[:, None], 10, axis=1))
    (drawn,) = drawn_of(a=values).values()
    error = by_seed.std(ddof=1) / 5**0.5
    interval = ranking.interval(drawn)
    assert drawn.draws.std() == pytest.approx(error, rel=0.03)
    assert interval.high - interval.mean == pytest.approx(2.776 * drawn.draws.std(), rel=0.02)  # 4 degrees of freedom


def test_degrees_of_freedom_are_few_if_seeds_differ_and_many_if_examples_do():
    one = Drawn(0.5, np.array([0.4, 0.6]), ((0.4, 0.5, 0.6),), ((0, 1, 2),))
    between = 0.01 / 3
    assert ranking.degrees_of_freedom(one, 0.1) == pytest.approx(round(0.1**4 / (between**2 / 2), 1))
    assert ranking.degrees_of_freedom(one, between**0.5) == 2
    equal = one._replace(by_seed=((0.5, 0.5, 0.5),))
    assert ranking.degrees_of_freedom(equal, 0.1) == math.inf


def test_a_difference_is_paired_if_the_seeds_are_the_same():
    base = values_of(spread=0.3)
    better = Values(base.seeds, base.values | (np.arange(30) < 3))
    drawn = drawn_of(a=base, b=better, c=better._replace(seeds=(5, 6, 7, 8)))
    paired, other = (ranking.difference(drawn[name], drawn["a"]) for name in "bc")
    assert ranking.degrees_of_freedom(paired, 0.05) > 20 * ranking.degrees_of_freedom(other, 0.05)
    assert paired.draws.std() < drawn["a"].draws.std() / 2


def test_a_difference_is_of_the_seeds_that_both_have_and_of_all_if_they_share_none():
    """The same figures under the numbers of other seeds are of other trainings."""
    by_seed = np.repeat(np.array([0.2, 0.4, 0.5, 0.6, 0.8])[:, None], 20, axis=1)
    names = {"a": (0, 1, 2, 3, 4), "same": (0, 1, 2, 3, 4), "other": (5, 6, 7, 8, 9), "overlap": (0, 1, 2, 3, 5)}
    drawn = drawn_of(
        **{name: Values(seeds, by_seed) for name, seeds in names.items()}, few=Values((0, 1, 2), by_seed[1:4])
    )
    differences = {name: ranking.difference(figure, drawn["a"]) for name, figure in drawn.items()}
    error = by_seed[:, 0].std(ddof=1) / 5**0.5
    assert differences["same"].draws.std() == differences["overlap"].draws.std() == 0
    assert differences["other"].draws.std() == pytest.approx(error * 2**0.5, rel=0.05)
    few = by_seed[1:4, 0] - by_seed[:3, 0]  # of seeds 0, 1 and 2
    assert differences["few"].draws.std() == pytest.approx(few.std(ddof=1) / 3**0.5, rel=0.05)
    assert differences["few"].mean == pytest.approx(few.mean()) and differences["few"].seeds == ((0, 1, 2),)
    back = ranking.difference(drawn["a"], drawn["few"])
    assert back.mean == pytest.approx(-few.mean()) and (back.draws == -differences["few"].draws).all()


def test_a_difference_over_tasks_is_on_each_task_of_the_seeds_that_both_have():
    figures = {"A": ([0.2, 0.4, 0.9], [0.1, 0.2, 0.3]), "B": ([0.5, 0.6], [0.2, 0.1, 0.7])}
    both = []
    for task, counts in figures.items():
        values = [Values(tuple(range(len(some))), np.repeat(np.array(some)[:, None], 20, axis=1)) for some in counts]
        drawn = ranking.drawn_figures(TaskFigures(task, {}, {(name, "x"): one for name, one in zip("ab", values)}))
        both.append([drawn[name, "x"] for name in "ab"])
    one, other = (ranking.mean_of([task[at] for task in both]) for at in (0, 1))
    difference = ranking.difference(one, other)
    on_a, on_b = np.array([0.1, 0.2, 0.6]), np.array([0.3, 0.5])
    assert difference.mean == pytest.approx((on_a.mean() + on_b.mean()) / 2) and difference.seeds == ((0, 1, 2), (0, 1))
    assert np.concatenate(difference.by_seed) == pytest.approx(np.concatenate((on_a, on_b)) / 2)
    error = (on_a.var(ddof=1) / 3 + on_b.var(ddof=1) / 2) ** 0.5 / 2
    assert difference.draws.std() == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_one_or_two_seeds_nothing_has_an_interval_or_is_better(seeds):
    drawn = drawn_of(a=values_of(0.4, seeds=seeds), b=values_of(-0.4, seeds=seeds), five=values_of(seeds=5))
    interval = ranking.interval(drawn["a"])
    assert math.isnan(interval.low) and math.isnan(interval.high) and interval.p_value == 1
    assert tables.plus_minus(interval) == f"{100 * interval.mean:.1f} ±?"
    assert ranking.better_pairs(drawn) == set() and not math.isnan(ranking.interval(drawn["five"]).low)
    both = ranking.mean_of([drawn["a"], drawn["b"]])
    assert ranking.has_interval(both) == (seeds == 2)  # two tasks with two seeds each have two degrees of freedom
    assert ranking.has_interval(ranking.mean_of([drawn["five"], drawn["a"]])) == (seeds == 2)


def test_a_method_with_two_seeds_has_no_interval_against_one_with_five():
    drawn = drawn_of(two=values_of(0.2, seeds=2), five=values_of(seeds=5), other=values_of(seeds=5, seed=1))
    for one, another in (("two", "five"), ("five", "two")):
        difference = ranking.compare(drawn[one], drawn[another])
        gap = np.mean(drawn[one].by_seed[0][:2]) - np.mean(drawn[another].by_seed[0][:2])
        assert difference.mean == pytest.approx(gap) and math.isnan(difference.low) and difference.p_value == 1
    assert not math.isnan(ranking.compare(drawn["five"], drawn["other"]).low)


def test_a_difference_of_0_up_to_rounding_is_no_difference():
    equal = Drawn(1e-17, np.full(10, 1e-17), ((1e-17,) * 3,), ((0, 1, 2),))
    assert ranking.interval(equal).p_value == 1
    assert ranking.interval(equal._replace(mean=0.1, draws=np.full(10, 0.1))).p_value == 0


def test_holm_rejects_what_adjusted_p_values_reject():
    random = np.random.default_rng(0)
    for _ in range(50):
        p = random.random(6) ** 3
        order, adjusted, running = sorted(range(6), key=lambda i: p[i]), [0.0] * 6, 0.0
        for place, number in enumerate(order):
            running = max(running, min(1, (6 - place) * p[number]))
            adjusted[number] = running
        assert ranking.holm(p.tolist()) == [p_value <= 0.05 for p_value in adjusted]


def test_a_better_method_is_found_and_an_equal_one_is_not():
    means = {"a": 0.9, "b": 0.9, "c": 0.7, "few": 0.99}
    random, drawn = np.random.default_rng(0), {}
    for name, mean in means.items():
        seeds = 2 if name == "few" else 5
        noise = random.normal(0, 0.01, seeds)
        drawn[name] = Drawn(mean, mean + random.normal(0, 0.01, 500), (tuple(mean + noise),), (tuple(range(seeds)),))
    better = ranking.better_pairs(drawn)
    assert better == {("a", "c"), ("b", "c")}  # two seeds decide nothing
    ranks = ranking.ranks(drawn, better)
    assert ranks["few"] == (1, 1, 4) and ranks["c"] == (4, 3, 4)
    assert ranks["a"] == ranks["b"] == (2, 1, 3)


# ---- The exam ----
def exam_task(depth_of, seeds=3):
    """A method whose exit layer is given by depth_of(kind, words), with some noise."""
    random = np.random.default_rng(0)
    kind, words = random.integers(0, 7, 400), random.integers(3, 30, 400)
    rows = Split(tuple((" ".join(["w"] * n),) for n in words), kind % 2, tuple(HARDNESS[k] for k in kind))
    runs = {}
    for seed in range(seeds):
        depth = np.clip(np.round(depth_of(kind, words) + random.normal(0, 1.5, 400)), 1, 12)
        right = random.random(400) < 0.9 - 0.05 * kind
        at, depths, flops = ({exam.EXAM_SHARE: values} for values in (right, depth, 0.4))
        full = right | (kind == 6)
        runs[seed] = SeedFigures({}, full, 0.8, at, depths, flops, None, depth, right, 1.0, (12,), 0.5, 0.1, 0.4)
    return TaskFigures(EXAM, {"x": runs}, {}), rows, kind, words


@pytest.mark.parametrize(
    ("depth_of", "verdict"),
    [
        (lambda kind, words: 1 + kind, exam.EASY),
        (lambda kind, words: 1 + words / 4, exam.SHORT),
        (lambda kind, words: 6.0, exam.OPEN),
        (lambda kind, words: 8 - words / 4, exam.OPEN),  # hardness counts more than length, and for nothing
    ],
)
def test_the_exam_tells_easy_from_short(depth_of, verdict):
    task, rows, kind, words = exam_task(depth_of)
    result = exam.exam(task, rows)["x"]
    assert result.verdict == verdict
    depths = [run.depth[exam.EXAM_SHARE] for run in task.runs["x"].values()]
    assert result.correlations["hardness"].mean == pytest.approx(np.mean([spearman(d, kind) for d in depths]))
    partial = []
    for depth in depths:  # the partial correlation is that of the residuals of a regression of ranks
        d, h, w = (exam.double_ranks(column).astype(float) for column in (depth, kind, words))
        design = np.column_stack((w, np.ones(400)))
        residuals = [column - design @ np.linalg.lstsq(design, column, rcond=None)[0] for column in (d, h)]
        partial.append(np.corrcoef(*residuals)[0, 1])
    assert result.correlations["hardness at equal length"].mean == pytest.approx(np.mean(partial))
    assert result.depth[2] == pytest.approx(np.mean([depth[kind == 2].mean() for depth in depths]))
    assert result.accuracy[6] < result.accuracy[0] and (result.full[6], result.full[0]) == (1.0, result.accuracy[0])


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_decide_nothing_in_the_exam(seeds):
    task, rows, *_ = exam_task(lambda kind, words: 1 + kind, seeds)
    result = exam.exam(task, rows)["x"]
    assert result.verdict == exam.OPEN and result.correlations["hardness"].mean > 0.5


def test_a_fixed_depth_has_no_correlation():
    task, rows, *_ = exam_task(lambda kind, words: -20.0)
    assert exam.exam(task, rows)["x"].correlations == exam.ONE_LAYER


def test_a_fixed_depth_with_one_seed_is_said_to_be_of_that_seed():
    task, rows, *_ = exam_task(lambda kind, words: 1 + kind)
    task.runs["x"][1].depth[exam.EXAM_SHARE][:] = 3
    result = exam.exam(task, rows)["x"]
    assert (result.correlations, result.verdict) == ("with 1 of 3 seeds, " + exam.ONE_LAYER, "")
