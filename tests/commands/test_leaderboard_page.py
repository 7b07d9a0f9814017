"""The leaderboard from records: figures and intervals against loops, verdicts that must be found, and no empty cell
without a reason. Nothing is trained."""

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest
from leaderboard_records import drawn_record, write_leaderboard

from mini_ee.data.metrics import spearman
from mini_ee.data.reviews import HARDNESS
from mini_ee.data.tasks import Split
from mini_ee.experiments.leaderboard import exam, figures, methods_page, page, ranking, tables
from mini_ee.experiments.leaderboard.figures import AREA, BUDGETS, CONTROL, SeedFigures, TaskFigures, Values
from mini_ee.experiments.leaderboard.plan import EXAM, Plan
from mini_ee.experiments.leaderboard.ranking import Drawn, Interval
from mini_ee.experiments.leaderboard.replays import replay_all, with_measures
from mini_ee.experiments.records import SeedRecord
from mini_ee.registry import METHODS
from mini_ee.rules import FixedExit, NeverExit, Patience, PatienceConfidence, Policy, QExit, Threshold
from mini_ee.training.default_rule import sweep

METHODS_OF_TEST = {"joint": 0.0, "two-stage": 0.03, "pabee": -0.02, "consistent": 0.1}


@pytest.fixture(scope="module")
def made():
    """A record of one run, of 150 and 120 examples."""
    random, chances = np.random.default_rng(0), np.linspace(0.6, 0.9, 6)
    return SeedRecord(drawn_record(chances, 150, random), drawn_record(chances, 120, random), {})


# ---- Figures ----
def test_all_rules_at_once_give_what_the_loop_gives(made):
    recorded = with_measures(made.reported)
    some = [Threshold(math.inf), Threshold(math.inf, "entropy"), Patience(1), Policy(), QExit()]
    some.append(PatienceConfidence(2, 0.5))
    rules = [NeverExit(), FixedExit(1), *sweep(*some)(recorded)[::9], Threshold((0.5, 0.9, 0.7, 0.6, 0.9, 0.5))]
    found = replay_all(recorded, rules)
    for number, rule in enumerate(rules):
        result = recorded.replay(rule)
        right = result.logits.argmax(axis=1) == recorded.labels
        assert (found.right[number] == right).all() and (found.depth[number] == result.cost.depth).all()
        share = result.cost.flops.mean() / recorded.full_flops
        assert found.flops[number] == (1.0 if rule == NeverExit() else pytest.approx(share))


def test_rules_are_chosen_on_held_out_examples_within_the_share_of_the_flops(made):
    """The oracle replays one rule after the other, and keeps the best that is seen first, from deep to shallow."""
    run = figures.seed_figures(made, "pcee-bert", reference=0.85)
    held_out, reported = with_measures(made.held_out), with_measures(made.reported)
    points = []
    for rule in figures.rules_for("pcee-bert", held_out):
        result = held_out.replay(rule)
        full = rule == NeverExit()
        share = 1.0 if full else result.cost.flops.mean() / held_out.full_flops
        score = np.mean(result.logits.argmax(axis=1) == held_out.labels)
        points.append((result.cost.depth.mean(), share, score, rule))
    points.sort(key=lambda point: -point[0])
    for most in {*BUDGETS.values(), *AREA}:
        best = None
        for point in points:
            if point[1] <= most + 1e-9 and (best is None or point[2] > best[2]):
                best = point
        assert (best is not None) == (most in run.at)
        if best is None:
            continue
        result = reported.replay(best[3])
        assert (run.at[most] == (result.logits.argmax(axis=1) == reported.labels)).all()
        assert (run.depth[most] == result.cost.depth).all()
    cheapest = min((point for point in points if point[2] >= 0.84), key=lambda point: point[1])
    assert (run.one_point[1] == reported.replay(cheapest[3]).cost.depth).all()
    assert figures.seed_figures(made, "pcee-bert", reference=1.2).one_point is None


def test_saved_layers_and_area_are_means_over_seeds_and_examples(made):
    reference = figures.seed_figures(made, "joint", 0.8)
    better = reference._replace(at={share: right | (np.arange(150) < 60) for share, right in reference.at.items()})
    runs = {"joint": {0: reference, 3: reference}, "x": {0: better, 3: reference._replace(one_point=None)}}
    saved, area = (figures._figure(runs, "x", name) for name in ("saved", "area"))
    assert saved.seeds == (0, 3) and saved.by_seed[1] == 0
    assert saved.by_seed[0] == pytest.approx(1 - reference.one_point[1].mean() / 6)
    shares = [share for share in AREA if share in reference.at]
    gain = np.mean([better.at[share].mean() - reference.at[share].mean() for share in shares])
    assert area.by_seed == pytest.approx([gain, 0])
    assert "joint training has no record with seed 3" == figures._figure({**runs, "joint": {0: reference}}, "x", "area")
    costly = {0: better._replace(at={}), 3: better}
    assert figures._figure({**runs, "x": costly}, "x", "at 2x") == "1 of 2 seeds have no rule with so few FLOPs"


def test_records_of_other_examples_are_refused(made):
    other = made._replace(reported=made.reported._replace(labels=1 - made.reported.labels))
    with pytest.raises(ValueError, match="pabee, seed 1, has other reported examples"):
        figures.task_figures("TREC", {"joint": {0: made}, "pabee": {1: other}}, {})


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
    found = drawn_of(**values)
    seed_draws, example_draws = ranking.uniforms_of("TREC", 30)
    for name, (seeds, numbers, _) in values.items():
        for draw in range(7):
            examples = [int(u * 30) for u in example_draws[draw]]
            chosen = [int(u * len(seeds)) for u in seed_draws[draw][: max(1, len(seeds) - 1)]]
            total = sum(numbers[seed][example] for seed in chosen for example in examples)
            assert found[name].draws[draw] == pytest.approx(total / len(chosen) / 30)
        assert found[name].mean == pytest.approx(numbers.mean())


def test_the_spread_of_the_draws_is_the_standard_error():
    """Of seeds alone: s / sqrt(S), without bias, although there are only five seeds."""
    by_seed = np.array([0.1, 0.5, 0.4, 0.9, 0.2])
    values = Values(tuple(range(5)), np.repeat(by_seed[:, None], 10, axis=1))
    (drawn,) = drawn_of(a=values).values()
    error = by_seed.std(ddof=1) / 5**0.5
    found = ranking.interval(drawn)
    assert drawn.draws.std() == pytest.approx(error, rel=0.03)
    assert found.high - found.mean == pytest.approx(2.776 * drawn.draws.std(), rel=0.02)  # 4 degrees of freedom


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


def test_holm_rejects_what_adjusted_p_values_reject():
    random = np.random.default_rng(0)
    for _ in range(50):
        p = random.random(6) ** 3
        order, adjusted, running = sorted(range(6), key=lambda i: p[i]), [0.0] * 6, 0.0
        for place, number in enumerate(order):
            running = max(running, min(1, (6 - place) * p[number]))
            adjusted[number] = running
        assert ranking.holm(p.tolist()) == [each <= 0.05 for each in adjusted]


def test_a_better_method_is_found_and_an_equal_one_is_not():
    means = {"a": 0.9, "b": 0.9, "c": 0.7, "few": 0.99}
    random, drawn = np.random.default_rng(0), {}
    for name, mean in means.items():
        seeds = 2 if name == "few" else 5
        noise = random.normal(0, 0.01, seeds)
        drawn[name] = Drawn(mean, mean + random.normal(0, 0.01, 500), (tuple(mean + noise),), (tuple(range(seeds)),))
    assert ranking.better_pairs(drawn) == {("a", "c"), ("b", "c")}  # two seeds decide nothing
    found = ranking.ranks(drawn)
    assert found["few"] == (1, 1, 1) and found["c"] == (4, 4, 4)
    assert found["a"] == found["b"] == (2, 2, 3)


# ---- The exam ----
def exam_task(depth_of):
    """A method whose exit layer is given by depth_of(kind, words), with some noise, for three seeds."""
    random = np.random.default_rng(0)
    kind, words = random.integers(0, 7, 400), random.integers(3, 30, 400)
    rows = Split(tuple((" ".join(["w"] * n),) for n in words), kind % 2, tuple(HARDNESS[k] for k in kind))
    runs = {}
    for seed in range(3):
        depth = np.clip(np.round(depth_of(kind, words) + random.normal(0, 1.5, 400)), 1, 12)
        right = random.random(400) < 0.9 - 0.05 * kind
        share = exam.EXAM_SHARE
        runs[seed] = SeedFigures({}, right, 0.8, {share: right}, {share: depth}, {share: 0.4}, None, (12,), 0.5, 0.1)
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
    found = exam.exam(task, rows)["x"]
    assert found.verdict == verdict
    depths = [run.depth[exam.EXAM_SHARE] for run in task.runs["x"].values()]
    assert found.correlations["hardness"].mean == pytest.approx(np.mean([spearman(d, kind) for d in depths]))
    partial = []
    for depth in depths:  # the partial correlation is that of the residuals of a regression of ranks
        d, h, w = (exam.double_ranks(each).astype(float) for each in (depth, kind, words))
        design = np.column_stack((w, np.ones(400)))
        residuals = [each - design @ np.linalg.lstsq(design, each, rcond=None)[0] for each in (d, h)]
        partial.append(np.corrcoef(*residuals)[0, 1])
    assert found.correlations["hardness at equal length"].mean == pytest.approx(np.mean(partial))
    assert found.depth[2] == pytest.approx(np.mean([depth[kind == 2].mean() for depth in depths]))
    assert found.accuracy[6] < found.accuracy[0]


def test_a_fixed_depth_has_no_correlation():
    task, rows, *_ = exam_task(lambda kind, words: -20.0)
    assert exam.exam(task, rows)["x"].correlations == exam.ONE_LAYER


# ---- The pages ----
@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    out = tmp_path_factory.mktemp("leaderboard")
    write_leaderboard(out / "records", ["TREC", "SST-2"], METHODS_OF_TEST, 3, 120, 80)
    write_leaderboard(out / "records", [EXAM], {"joint": 0.0, "consistent": 0.1}, 3, 600, 80)
    methods = ("lora-exits", *METHODS_OF_TEST)
    return Plan(
        out / "records", ("TREC", "SST-2", EXAM), methods, 3, "mini-ee reproduce x", {"sleb": "its tokens exit"}
    )


@pytest.fixture(scope="module")
def board(plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "DRAWS", 300)
        return tables.read_leaderboard(plan)


def cells_of(text):
    """Cells of all tables of a page, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [cell.strip() for line in lines for cell in line.strip("|").split("|")]


def test_the_first_lines_answer_the_question_and_every_cell_is_filled(board, plan, tmp_path):
    text = page.page(board, exam.exam(board.tasks[EXAM]), tmp_path, [])
    first = text.split("|")[0]
    assert "**Which method for a classifier with half of the FLOPs?** consistent has the highest accuracy" in first
    assert "significantly better than" in first and "This is preliminary: 10 of 15 pairs" in first
    assert "not measured" not in text and "- Its tokens exit: sleb." in text
    sections = re.split(r"^###? ", text, flags=re.MULTILINE)
    assert [section.partition("\n")[0] for section in sections[2:4]] == ["TREC", "SST-2"]
    for section in sections[2:4]:
        assert "" not in cells_of(section)[:-12]  # the last line is the control, of which nothing is measured
        for number in re.findall(r"\[(\d+)\]", "".join(cells_of(section))):
            assert f"\n{number}. " in section
    assert board.order[0] == "consistent" and board.order[-1] == "lora-exits"
    assert CONTROL in board.headline and CONTROL not in board.ranks
    assert text == page.page(board, exam.exam(board.tasks[EXAM]), tmp_path, [])


def test_marks_are_against_joint_training_and_need_three_seeds(board):
    marks = tables._marks(board.drawn["TREC"])
    assert marks["consistent", "full"] == tables.BETTER and ("joint", "full") not in marks
    few = {key: each._replace(seeds=((0, 1),)) for key, each in board.drawn["TREC"].items()}
    assert not tables._marks(few)


def test_a_page_without_records_says_so(tmp_path):
    plan = Plan(tmp_path / "records", ("TREC", EXAM), ("joint",), 5, "mini-ee reproduce leaderboard")
    board = tables.read_leaderboard(plan)
    text = page.page(board, {}, tmp_path, [])
    assert "No method has been run on all tasks" in text and "Not run yet." in text


def test_a_training_that_diverged_is_named(tmp_path):
    from mini_ee.data.files import write_json

    folder = tmp_path / "leaderboard" / "TREC"
    folder.mkdir(parents=True)
    write_json(folder / "joint.json", {"settings": {}, "tried": [], "diverged": {"2": "NaN", "0": "NaN"}})
    plan = Plan(tmp_path / "records", ("TREC",), ("joint", "sweet"), 5, "mini-ee reproduce leaderboard")
    assert plan.missing("TREC") == {"joint": "the training diverged with seed 0, 2", "sweet": "·"}


def test_pictures_are_drawn(board, tmp_path):
    passed = exam.exam(board.tasks[EXAM])
    small = board._replace(plan=board.plan._replace(tasks=("TREC",), methods=("joint", "consistent")))
    page.draw_all(small, passed, tmp_path, list(page.PICTURES))
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in page.PICTURES)
    assert all(f"({name})" in page.page(board, passed, tmp_path, []) for name in page.PICTURES)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0449, "+4.5 ±1.0"), (-0.0449, "-4.5 ±1.0"), (-0.0001, "0.0 ±1.0"), (0.0, "0.0 ±1.0")]
)
def test_differences_have_a_sign(value, text):
    assert tables.signed(Interval(value, value - 0.01, value + 0.01, 1.0)) == text


ROOT = Path(__file__).parents[2]


def rows_of_methods(text):
    """The lines of the methods page, as cells."""
    return [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_the_methods_page_is_as_the_command_would_write_it(board):
    """But for lines of code and figures: `mini-ee reproduce leaderboard` writes results/METHODS.md anew."""
    written = rows_of_methods((ROOT / "results" / "METHODS.md").read_text())
    made = rows_of_methods(methods_page.methods_page(board))
    assert [row[:7] for row in written] == [row[:7] for row in made]


def test_the_methods_page_has_each_method_of_the_registry_once(board):
    text = methods_page.methods_page(board)
    assert "| what it does | trains | who decides |" in text
    rows = rows_of_methods(text)
    assert [row[0].strip(" `") for row in rows] == [*METHODS]
    for row in rows:
        assert len(row) == 11 and all(cell.strip() for cell in row[:9]), row
        file = re.search(r"\(\.\./(.+)\)", row[6])[1]
        assert (ROOT / file).exists() and 0 < int(row[7]) <= 2000 and int(row[8]) >= 0
        assert re.search(r"\b(19|20)\d\d\b", row[1])
    by_name = {row[0].strip(" `"): row for row in rows}
    assert by_name["consistent"][9].strip() and not by_name["sleb"][9].strip()
    parts = {name: by_name[name][3].strip() for name in ("two-stage", "consistent", "sleb")}
    assert parts["two-stage"] == "backbone and heads → heads" and parts["sleb"].startswith("nothing")
    assert parts["consistent"] == "backbone and heads → policy, in turns"


def test_the_head_of_a_file_gives_name_paper_link_and_deviations():
    text = "X (Li and Ho 2021, EACL): it\nexits.\n\nSee 2021.eacl-main.8.\n\nDeviations, 1 to 2 of them pinned:\n"
    text += "1. a 2.5 b.\n2. c; 3. d"
    found = methods_page.about(text)
    assert found == ("X", "Li and Ho 2021", "[EACL](https://aclanthology.org/2021.eacl-main.8)", "it exits", 3)
    with pytest.raises(ValueError, match="expected a docstring that begins with NAME"):
        methods_page.about("Some words.")


def test_lines_of_code_are_neither_docstrings_nor_comments(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('"""Head."""\n\n# note\nx = 1  # why\n\n\ndef f():\n    """Doc\n    more."""\n    return x\n')
    assert methods_page.code_lines(path) == 3 and ast.parse(path.read_text())
