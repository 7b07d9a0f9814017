"""The leaderboard from records: figures and intervals against loops, verdicts that must be found, and no empty cell
without a reason. Nothing is trained."""

import ast
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from leaderboard_records import drawn_record, write_leaderboard

from mini_ee.experiments.leaderboard import (
    answer,
    decoder_section,
    exam,
    figures,
    methods_page,
    page,
    pictures,
    provenance,
    ranking,
    tables,
)
from mini_ee.experiments.leaderboard.figures import AREA, BUDGETS, CONTROL, SeedFigures, TaskFigures
from mini_ee.experiments.leaderboard.plan import EXAM, Plan
from mini_ee.experiments.leaderboard.ranking import Interval
from mini_ee.experiments.leaderboard.replays import replay_all, with_measures
from mini_ee.experiments.markdown import link
from mini_ee.experiments.records import SeedRecord, read_records, write_record
from mini_ee.lab.data.files import write_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Policy, QExit, Threshold
from mini_ee.lab.training import default_rule
from mini_ee.lab.training.default_rule import sweep

METHODS_OF_TEST = {"joint": 0.0, "two-stage": 0.03, "pabee": -0.02, "consistent": 0.1}


@pytest.fixture(scope="module")
def made():
    """A record of one run, of 150 and 120 examples, whose exits start again from the embeddings."""
    random, chances = np.random.default_rng(0), np.linspace(0.6, 0.9, 6)
    return SeedRecord(*(drawn_record(chances, rows, random, again=True) for rows in (150, 120)), {})


# ---- Figures ----
def test_all_rules_at_once_give_what_the_loop_gives(made):
    recorded = with_measures(made.reported)
    some = [Threshold(math.inf), Threshold(math.inf, "entropy"), Patience(1), Policy(), QExit()]
    some.append(PatienceConfidence(2, 0.5))
    rules = [Never(), Fixed(1), *sweep(*some)(recorded)[::9], Threshold((0.5, 0.9, 0.7, 0.6, 0.9, 0.5))]
    found = replay_all(recorded, rules)
    for number, rule in enumerate(rules):
        result = recorded.replay(rule)
        right = result.logits.argmax(axis=1) == recorded.labels
        assert (found.right[number] == right).all() and (found.depth[number] == result.cost.depth).all()
        passes = result.cost.depth if rule == Never() else result.cost.layer_passes
        assert (found.passes[number] == passes).all()
        share = result.cost.flops.mean() / recorded.full_flops
        assert found.flops[number] == (1.0 if rule == Never() else pytest.approx(share))


def test_rules_are_chosen_on_held_out_examples_within_the_share_of_the_flops(made):
    """The oracle replays one rule after the other, and tries all pairs, the second with what the first leaves over."""
    run = figures.seed_figures(made, "pcee-bert", reference=0.85)
    held_out, reported = with_measures(made.held_out), with_measures(made.reported)
    points = []
    for rule in figures.rules_for("pcee-bert", held_out):
        result = held_out.replay(rule)
        share = 1.0 if rule == Never() else result.cost.flops.mean() / held_out.full_flops
        points.append((share, np.mean(result.logits.argmax(axis=1) == held_out.labels), rule))
    for most in {*BUDGETS.values(), *AREA}:
        pairs = [
            (one[1] + part * (other[1] - one[1]), part, one[2], other[2])
            for one in points
            if one[0] <= most + 1e-9
            for other in points
            if (part := 0 if other is one else (most - one[0]) / (other[0] - one[0]) if other[0] > most else -1) >= 0
        ]
        assert bool(pairs) == (most in run.at)
        if not pairs:
            continue
        best = max(pair[0] for pair in pairs)
        right, flops = [], []
        for score, part, *rules in pairs:
            if score > best - 2 / figures.PARTS:
                both = [reported.replay(rule) for rule in rules]
                right.append(mixed(part, [each.logits.argmax(axis=1) == reported.labels for each in both]))
                flops.append(mixed(part, [each.cost.flops.mean() / reported.full_flops for each in both]))
        found = [k for k, each in enumerate(right) if np.abs(each - run.at[most]).max() < 2 / figures.PARTS]
        assert min(abs(flops[k] - run.flops[most]) for k in found) < 2 / figures.PARTS
    assert run.least_flops == pytest.approx(min(point[0] for point in points))
    for passes, least in ((run.passes_at_one_point, 0.84), (run.passes_at_own_point, run.held_out_full - 0.01)):
        cheapest = min((point for point in points if point[1] >= least - 1e-9), key=lambda point: point[0])
        result = reported.replay(cheapest[2])
        assert (passes == result.cost.layer_passes).all()
        assert least != 0.84 or (run.at_one_point == (result.logits.argmax(axis=1) == reported.labels)).all()
    none = figures.seed_figures(made, "pcee-bert", reference=1.2)
    assert none.passes_at_one_point is None and (none.at_one_point == none.full).all()
    assert (none.passes_at_own_point == run.passes_at_own_point).all()


def mixed(part, values):
    """The expectation if a part of the examples exits by the second of two rules."""
    return (1 - part) * values[0] + part * values[1]


@pytest.mark.parametrize("method", [CONTROL, "pabee"])
@pytest.mark.parametrize("rises", [True, False])
def test_a_mixture_uses_all_flops_that_are_allowed(method, rises):
    """Half of six layers and a head is less than three layers and a head, so a single fixed depth leaves FLOPs over.

    rises: accuracy rises evenly with depth; else the second exit is best, and all examples exit there.
    """
    chances = np.linspace(0.5, 0.95, 6) if rises else np.array([0.5, 0.95, 0.6, 0.6, 0.6, 0.6])
    made = SeedRecord(*(drawn_record(chances, rows, np.random.default_rng(rows)) for rows in (400, 300)), {})
    run = figures.task_figures("TREC", {name: {0: made} for name in ("joint", "pabee")}, {}).runs[method][0]
    best = figures.best_mixture(
        figures.replay_all(with_measures(made.held_out), figures.rules_for(method, made.held_out)), 0.5
    )
    held_out = figures.seed_figures(made._replace(reported=made.held_out), method, 0.9)
    if rises:
        assert best.deeper and best.rules[0] != best.rules[1]
        assert 0.5 - 2 / figures.PARTS < held_out.flops[0.5] <= 0.5 + 1e-9
    elif method == CONTROL:
        assert not best.deeper and set(run.depth[0.5]) == {2}
        assert (run.at[0.5] == (made.reported.predictions == made.reported.labels[:, None])[:, 1]).all()
    assert all(share <= most + 1e-9 for most, share in held_out.flops.items())


def test_saved_layers_and_area_are_means_over_seeds_and_examples(made):
    reference = figures.seed_figures(made, "joint", 0.8)
    at = {share: np.maximum(right, np.arange(150) < 60) for share, right in reference.at.items()}
    better = reference._replace(at=at, full=~reference.full)
    runs = {"joint": {0: reference, 3: reference}, "x": {0: better, 3: reference._replace(passes_at_one_point=None)}}
    saved, area = (figures._figure(runs, "x", name) for name in ("saved", "area"))
    assert saved.seeds == (0, 3) and saved.by_seed[1] == 0
    assert saved.by_seed[0] == pytest.approx(1 - reference.passes_at_one_point.mean() / 6)
    own = figures._figure({"x": runs["x"]}, "x", "saved own")  # without a reference
    assert own.by_seed == pytest.approx([1 - reference.passes_at_own_point.mean() / 6] * 2)
    shares = [share for share in AREA if share in reference.at]
    gain = np.mean([better.at[share].mean() - reference.at[share].mean() for share in shares])
    assert area.by_seed == pytest.approx([gain, 0])
    lost = figures._figure(runs, "x", "lost")
    assert lost.by_seed == pytest.approx([reference.full.mean() - reference.at_one_point.mean()] * 2)
    few = {0: reference._replace(at={share: reference.at[share] for share in shares[-5:]})}
    assert "less than half of these shares" in figures._figure({**runs, "x": few}, "x", "area")
    assert "joint training has no record with seed 3" == figures._figure({**runs, "joint": {0: reference}}, "x", "area")
    costly = {0: better._replace(at={}), 3: better}
    assert figures._figure({**runs, "x": costly}, "x", "at 2x") == "1 of 2 seeds have no rule with so few FLOPs"


def test_records_of_other_examples_are_refused(made):
    other = made._replace(reported=made.reported._replace(labels=1 - made.reported.labels))
    with pytest.raises(ValueError, match="pabee, seed 1, has other reported examples"):
        figures.task_figures("TREC", {"joint": {0: made}, "pabee": {1: other}}, {})


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


def test_the_first_lines_answer_the_question_and_every_cell_is_filled(board, plan, tmp_path, monkeypatch):
    text = page.page(board, exam.exam(board.tasks[EXAM]), tmp_path, [])
    first = text.split("|")[0]
    assert "**Which method for a classifier with half of the FLOPs?** `consistent` has the highest accuracy" in first
    assert "No method is clearly the best" not in first and "`consistent` trains fastest" not in first
    assert "**Is your model a decoder?** The section [Decoders](#decoders) has no runs yet." in first
    assert "has its own tables." in page.page(board, {}, tmp_path, ["| a |"])
    assert "**Is it the best elsewhere?** Yes: on reviews, its accuracy of " in first
    assert "| *joint, full model* |" in text
    depths = [cells_of(line) for line in text.partition("**Mean exit layer of each kind")[2].splitlines()]
    kinds, (counts,) = depths[2][1:], (row[1:] for row in depths if row[:1] == ["*number of sentences*"])
    reviews = toy_task().without_seen_rows()[0]
    known = Counter(reviews.split(reviews.default_split).hardness)
    assert {kind: int(count) for kind, count in zip(kinds, counts)} == known
    control = board.headline[CONTROL].mean
    lower = sum(board.headline[name].mean < control for name in board.ranks)
    are = "is" if lower == 1 else "are"
    assert f"{lower} of the 4 methods {are} less accurate than the fixed depth." in " ".join(first.split()) and lower
    worse = answer._elsewhere(board, "joint")
    assert re.search(r"Compared with a fixed depth of joint training \(see below\), `joint` is [\d.]+ points", worse)
    monkeypatch.setattr(ranking, "DRAWS", 300)  # as in the board
    few = board.headline["pabee"]._replace(seeds=((0,), (0,)))
    gaps = [answer._difference(board.headline["joint"], other) for other in (few, board.headline["pabee"])]
    assert ["on the seeds that both have" in gap for gap in gaps] == [True, False]
    open_ = answer._certainty(
        board._replace(headline=board.headline | {"pabee": few}),
        "two-stage",
        ["joint", "pabee"],
        4,
    )
    others = "better than 1 of the other 3 methods (consistent). It is not significantly better than joint; the other "
    assert f"{others}one has too few" in open_
    assert "No: on reviews, `consistent` has the highest accuracy" in worse and re.search(
        r"`joint` is \d.+ points lower", worse
    )
    assert re.search(
        r"Compared with that, joint training with its own rule is [\d.]+ points (high|low)er", first.replace("\n", " ")
    )
    gaps = [tables.compare(board.headline[name], board.headline["joint"]) for name in board.ranks if name != "joint"]
    half = sorted(each.high - each.mean for each in gaps)[1]  # of three
    assert f"from joint training is ±{100 * half:.1f} points (median over the methods)" in first.replace("\n", " ")
    assert "significantly better than" in first and "±?" not in text.replace("±?: ", "").replace("(±?", "")
    saved = {
        name: np.mean([board.tasks[task].found[name, "saved"].by_seed.mean() for task in board.compared])
        for name in board.ranks
    }
    most = max(saved, key=saved.get)
    plan = board.plan._replace(training=dict.fromkeys(board.compared, "a BERT, at most 9 examples; the rate is 1"))
    assert (
        "Model and training: a BERT, at most 9 examples. `mini-ee train" in answer.answer(board._replace(plan=plan))[0]
    )
    assert f"`{most}` saves the most layers: {100 * saved[most]:.1f} ±" in " ".join(first.split())
    state = "Run so far: 4 of 5 methods on TREC (3 of 3 seeds), 4 of 5 methods on SST-2 (3 of 3 seeds)"
    assert state in " ".join(first.split())
    better = "of the 3 other methods with an accuracy there, 1 (consistent) is significantly better and 1 (pabee)"
    assert better in " ".join(first.split()) and "points higher (95 % interval ±" in " ".join(first.split())
    assert "not measured" not in text and "- sleb: its tokens exit." in text
    first_table, *_ = sections = re.split(r"^###? ", text, flags=re.MULTILINE)
    assert [section.partition("\n")[0] for section in sections[2:4]] == ["TREC", "SST-2"]
    for section in sections:
        assert not {"", "·", "nan"} & {*cells_of(section)}
        for number in re.findall(r"\[(\d+)\](?!\()", "".join(cells_of(section))):
            assert f"\n{number}. " in section
    for section, where in ((first_table, " (on TREC and SST-2)"), (sections[2], ""), (sections[3], "")):
        assert "lora-exits" not in cells_of(section) and f"Not run yet: lora-exits{where}." in section
        columns = next(cells_of(line) for line in section.splitlines() if line.startswith("|"))
        joint = next(cells_of(line) for line in section.splitlines() if re.match(r"\|( \d.*\|)? joint \|", line))
        assert joint[columns.index("minus joint, points" if section is first_table else "area")] == tables.NOTHING
    gaps = {row[1]: row[3] for row in map(cells_of, first_table.splitlines()) if len(row) > 3}
    assert gaps["consistent"].endswith("▲") and gaps["pabee"].endswith("▼") and gaps["*fixed depth*"][-1] not in "▲▼"
    assert board.order[0] == "consistent" and board.order[-1] == "lora-exits"
    assert CONTROL in board.headline and CONTROL not in board.ranks
    alone = board._replace(ranks={"consistent": (1, 1, 1)}, headline={"consistent": board.headline["consistent"]})
    tied = board._replace(better=set())
    assert "No method is clearly the best. `consistent` has" in page.answer(tied)[0]
    assert page.answer(tied)[1].endswith("`joint` trains fastest, in about 10.0 processor seconds (on TREC and SST-2).")
    monkeypatch.setattr(answer, "SAME_TIME", 1.15)
    quick = "`two-stage` and `joint` train fastest, in about 10.0 processor seconds (on TREC and SST-2)."
    assert page.answer(tied)[1].endswith(quick)
    assert page.answer(alone)[1].endswith("No other method has been run on all of these tasks.")


def test_a_method_that_loses_more_with_every_rule_or_has_no_rule_at_2x_has_a_note(board):
    runs = {seed: run._replace(passes_at_one_point=None) for seed, run in board.tasks["TREC"].runs["pabee"].items()}
    task = board.tasks["TREC"]._replace(runs=board.tasks["TREC"].runs | {"pabee": runs})
    lines = tables.task_table(board._replace(tasks=board.tasks | {"TREC": task}), "TREC")
    (row,) = (dict(zip(cells_of(lines[0]), cells_of(line))) for line in lines if line.startswith("| pabee"))
    notes = {row[name].partition("[")[2].rstrip("]") for name in ("saved at 1 point", "speed-up at 1 point")}
    assert [line[: line.index(".")] for line in lines if "3 of 3 seeds lose more with every rule" in line] == [*notes]
    assert row["speed-up at 1 point"].startswith("1.00 [") and not row["speed-up at 2x"].startswith("1.00")
    found = board.tasks["TREC"].found | {("pabee", "at 2x"): "no rule"}
    costly = board._replace(
        tasks=board.tasks | {"TREC": board.tasks["TREC"]._replace(found=found)},
        headline={name: each for name, each in board.headline.items() if name != "pabee"},
        ranks={name: each for name, each in board.ranks.items() if name != "pabee"},
    )
    assert [line for line in tables.main_table(costly) if line.startswith("| – | pabee | [1] | [1] |")]


def test_marks_are_against_joint_training_and_need_three_seeds(board):
    marks = tables._marks(board.drawn["TREC"])
    assert marks["consistent", "full"] == tables.BETTER and ("joint", "full") not in marks
    for changed in (("consistent", "two-stage", "pabee"), ("joint",)):  # of both methods
        drawn = board.drawn["TREC"].items()
        few = {key: each._replace(seeds=((0, 1),)) if key[0] in changed else each for key, each in drawn}
        assert not [key for key in tables._marks(few) if key[1] != "area"]


def test_properties_of_exits_are_correlated_with_saved_layers_if_there_are_enough_trainings(board):
    trec = board.tasks["TREC"]
    runs, found = {CONTROL: trec.runs["joint"]}, {(CONTROL, "saved"): trec.found["joint", "saved"]}
    order = [3, 1, 2, 6, 5, 4]  # of the saved layers; EEFP has it backwards, ECE is the number of the method
    for number, place in enumerate(order):
        of_method = {"failure": 1 - place / 10, "calibration": number / 10}
        name = f"method {number}"
        runs[name] = {seed: run._replace(**of_method) for seed, run in trec.runs["joint"].items()}
        found[name, "saved"] = found[CONTROL, "saved"]._replace(values=np.full((3, 1), place / 10), scale=1.0)
    task = trec._replace(runs=runs, found=found)
    lines = page._prediction_lines(board._replace(tasks={"TREC": task}))
    off = sum((number + 1 - place) ** 2 for number, place in enumerate(order))
    assert lines[-2] == f"| TREC | -1.00 | {1 - 6 * off / (6 * 35):.2f} | 6 |"
    fewer = task._replace(runs={name: each for name, each in runs.items() if name != "method 3"})
    assert page._prediction_lines(board._replace(tasks={"TREC": fewer})) == []


def test_a_page_without_records_says_so(tmp_path):
    plan = Plan(tmp_path / "records", ("TREC", EXAM), ("joint",), 5, "mini-ee reproduce leaderboard")
    board = tables.read_leaderboard(plan)
    text = page.page(board, {}, tmp_path, [])
    assert "No method has a figure at half of the FLOPs yet. **What is missing?** Run so far: none." in text
    assert "Not run yet: TREC." in text and "Not run yet." in text and "|" not in text.partition("## Each")[0]


def test_a_page_with_two_seeds_of_some_methods_says_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "DRAWS", 50)
    records, methods = tmp_path / "records", ("joint", "sweet", "two-stage", "pabee")
    write_leaderboard(records, ["TREC"], dict.fromkeys(methods[:3], 0.0) | {"sweet": 0.1}, 2, 60, 40)
    write_leaderboard(records, ["SST-2"], {"joint": 0.0}, 1, 60, 40)
    board = tables.read_leaderboard(Plan(records, ("TREC", "SST-2", "SICK"), methods, 5, "mini-ee reproduce x"))
    text = page.page(board, {}, tmp_path, [])
    words = " ".join(text.split())
    assert "`sweet` has the highest accuracy" in words and " % on TREC." in words and "95 % interval 8" not in words
    assert "Not at all yet: `sweet` has 2 seeds of 5, and" in words and "±? points" not in words
    state = "3 of 4 methods on TREC (2 of 5 seeds) and 1 of 4 methods on SST-2 (1 of 5 seeds). SICK follows."
    assert state in words and "Ranks are computed on TREC alone." in words
    assert "Not run yet: pabee." in text and "Not run yet: SICK." in text
    assert not re.search(r"±\d", text) and {cell.split()[-1] for cell in cells_of(text) if "±" in cell} == {"±?"}
    assert "1 (1 to 3)" in text and "·" not in text and "nan" not in words.split()


@pytest.mark.parametrize(("apart", "shown"), [(0.02, True), (0.04, False), (-0.04, False)])
def test_a_speed_up_at_one_point_is_that_of_the_rule_that_is_chosen_now(board, apart, shown):
    task, runs = board.tasks["TREC"], {}
    for seed, run in task.runs["consistent"].items():
        timed = {"speedup": 1.5 + seed, "flops_ratio": run.flops_at_one_point + apart * (seed == 1)}
        runs[seed] = run._replace(about=run.about | {"one_point": timed})
        assert run.passes_at_one_point is not None
    found = tables._measured(task._replace(runs=task.runs | {"consistent": runs}), "consistent", "speedup")
    assert found == ([1.5, 2.5, 3.5] if shown else tables.OTHER_RULE)


def test_a_speed_up_that_is_not_given_has_one_note(board):
    task, runs = board.tasks["TREC"], dict(board.tasks["TREC"].runs["consistent"])
    runs[0] = runs[0]._replace(passes_at_one_point=None)  # the other seeds have no timed rule
    changed = board.tasks | {"TREC": task._replace(runs=task.runs | {"consistent": runs})}
    lines = tables.task_table(board._replace(tasks=changed), "TREC")
    (row,) = (dict(zip(cells_of(lines[0]), cells_of(line))) for line in lines if line.startswith("| consistent"))
    number = re.fullmatch(r"\[(\d+)\]", row["speed-up at 1 point"])[1]
    assert f"{number}. {tables.OTHER_RULE}" in lines


def test_seconds_are_of_trainings_on_the_cpu_and_records_of_a_gpu_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)
    write_leaderboard(tmp_path / "records", ["TREC"], {"joint": 0.0, "two-stage": 0.03}, 3, rows=60, held_out=60)
    made = {name: tmp_path / "records" / "TREC" / f"{name}.npz" for name in ("joint", "two-stage")}
    for name, seeds in (("joint", (0,)), ("two-stage", (0, 1, 2))):
        for seed, each in read_records(made[name]).items():
            each.about["training"]["seconds"] = 50.0
            each.about["made"] |= {"gpu": "G100"} if seed in seeds else {}
            write_record(made[name], seed, each)
    monkeypatch.setattr(ranking, "DRAWS", 50)
    board = tables.read_leaderboard(Plan(tmp_path / "records", ("TREC",), ("joint", "two-stage"), 3, "a command"))
    task = board.tasks["TREC"]
    assert figures.about_figure(task, "joint", "seconds") == [50.0, 50.0]
    assert len(figures.about_figure(task, "joint", "megabytes")) == 3
    assert tables._measured(task, "joint", "seconds") == [50.0, 50.0]
    assert tables._measured(task, "two-stage", "seconds").startswith("every seed was trained on a GPU")
    assert tables.timed_tasks(board) == ()
    write_leaderboard(tmp_path / "records", ["SST-2"], {"joint": 0.0, "two-stage": 0.03}, 3, rows=60, held_out=60)
    both = Plan(tmp_path / "records", ("TREC", "SST-2"), ("joint", "two-stage"), 3, "a command")
    mixed = tables.read_leaderboard(both)
    assert tables.timed_tasks(mixed) == ("SST-2",)
    notes = tables.Notes()
    assert [tables._mean_cells(mixed, name, notes)[4] for name in ("joint", "two-stage")] == ["10.0", "11.0"]
    times = answer._certainty(mixed._replace(better=set()), "two-stage", ["joint"], 2)
    assert times.endswith("`joint` trains fastest, in about 10.0 processor seconds (on SST-2).")
    found = {name: task._replace(found=task.found | {("joint", "full"): name}) for name, task in mixed.tasks.items()}
    tables._why_no_mean(mixed._replace(tasks=found), "joint", "full", notes)
    assert "1. TREC: TREC; SST-2: SST-2" in notes.lines()
    assert tables._why({"A": "no", "B": [1.0], "C": "no"}, notes) == "[2]" and "2. A and C: no" in notes.lines()
    text = " ".join("\n".join(provenance.measured_lines(board)).split())
    assert "- Trained on a GPU (G100): 4 of 6 records; a record is of one method, task and seed." in text


def write_state(out, task, name, tried, diverged=None):
    """What the leaderboard keeps of a search for learning rates."""
    path = out / "leaderboard" / task / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": {}, "tried": tried, "diverged": diverged or {}})


def test_the_page_says_how_long_trainings_took_where_exits_are_and_which_rates_were_chosen(tmp_path):
    """In hours: joint training takes 1 on TREC and 2 on SST-2; SWEET takes 2 on TREC, on SST-2 a third on a GPU."""
    hours = {("TREC", "joint"): 1, ("TREC", "sweet"): 2, ("SST-2", "joint"): 2, ("SST-2", "sweet"): 1 / 3}
    for (task, name), each in hours.items():
        gpu, chosen = {"gpu": "G100"} if each < 1 else {}, 1.0 if (task, name) == ("TREC", "sweet") else 4.0
        tried = [{"factor": factor, "seed": 0, "seconds": 3600 * each, **gpu} for factor in (1.0, 4.0)]
        write_state(tmp_path, task, name, tried)
        about = {"training": {"seconds": 3600 * each}, "rates": {"factor": chosen}}
        about["made"] = gpu | {"processor": "one" if task == "TREC" else "another"}
        for seed in (0, 1):
            random, exits = np.random.default_rng(seed), (1, 2, 3) if name == "joint" else (1, 3)
            chances, labels = np.linspace(0.6, 0.9, len(exits)), np.arange(40) % 2
            parts = (drawn_record(chances, 40, random, exits=exits, labels=labels) for _ in range(2))
            about |= {"trained_as": name, "half": {"flops_ratio": 0.4 if name == "joint" else 0.6}}
            write_record(tmp_path / "records" / task / f"{name}.npz", seed, SeedRecord(*parts, about))
    plan = Plan(tmp_path / "records", ("TREC", "SST-2"), ("joint", "sweet"), 2, "a command")
    board = tables.Leaderboard(
        plan, {name: figures.read_task(plan.records / name, {}) for name in plan.tasks}, {}, (), {}, set(), {}
    )
    text = " ".join("\n".join(provenance.measured_lines(board)).split())
    assert "12 trainings of classifiers" in text and "`sweet` after layer 1 of 3." in text and "`joint`" not in text
    least = min(run.least_flops for task in board.tasks.values() for run in task.runs["sweet"].values())
    assert f"The rule of `sweet` with the fewest FLOPs needs {100 * least:.1f} % of them, so it has no accuracy" in text
    assert "need 40.0 to 60.0 % of the FLOPs on the reported examples (5th and 95th percentile over methods" in text
    assert "9 ran on the CPU. They took 15.0 processor hours. 3 ran on a GPU." in text
    assert "control it took 1.0 processor hours." in text
    assert "all trainings would take about 27 hours" in text  # on SST-2 twice as long as on TREC
    assert "Processor: another, one. Training seconds of different processors cannot be compared exactly." in text
    assert "Chosen multiples (number of searches): on TREC 1 (1) and 4 (1); on SST-2 4 (2)." in text
    added = provenance.minutes_to_add(board)
    tried = [{"factor": 4.0, "seed": 0, "seconds": 1.0, "gpu": "G100"}, {"factor": 1.0, "seed": 0, "seconds": 7200.0}]
    write_state(tmp_path, "TREC", "joint", tried)  # a search elsewhere; the record of seed 0 was made anew on the CPU
    found = provenance._seconds(board)
    assert found[provenance.Trained("TREC", "joint", 0, 4.0)] == (3600.0, False)
    assert found[provenance.Trained("TREC", "joint", 0, 1.0)] == (7200.0, False)
    assert "With 6 trainings as long as those of joint training, that takes about 540 core minutes" in added
    assert provenance.minutes_to_add(board) == added  # a search elsewhere says nothing about this machine


def test_the_exam_is_compared_if_no_other_task_has_been_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "DRAWS", 50)
    write_leaderboard(tmp_path, [EXAM], {"joint": 0.0}, 1, 60, 40)
    board = tables.read_leaderboard(Plan(tmp_path, ("TREC", EXAM), ("joint", "sweet"), 5, "mini-ee reproduce x"))
    assert board.compared == (EXAM,) and page.answer(board)[0].endswith(
        "% on the built-in reviews. `mini-ee train joint` trains it."
    )


def test_a_reason_is_each_seed_that_is_missing(tmp_path):
    write_state(tmp_path, "TREC", "joint", [], {"2": "NaN"})
    plan = Plan(tmp_path / "records", ("TREC",), ("joint",), 5, "mini-ee reproduce x")
    training, right = {"training": {"seconds": 1.0}}, np.ones(2)
    run = SeedFigures(training, right, 1, {}, {}, {}, None, right, right, 1.0, (6,), math.nan, math.nan, 1.0)
    for count, why in (
        (2, f"the training diverged with seed 2; {tables.NOT_YET}"),
        (4, "diverged with seed 2"),
        (5, ""),
    ):
        found = tables.why_fewer(plan, TaskFigures("TREC", {"joint": dict.fromkeys(range(count), run)}, {}), "joint")
        assert found.endswith(why) and bool(found) == bool(why)
    long = run._replace(about={"training": {"seconds": 1000.0}})
    task = TaskFigures("TREC", {"x": dict.fromkeys(range(3), long)}, {})
    assert tables.why_fewer(plan, task, "x") == "a training takes more than 15 minutes"


def test_the_page_is_equal_to_the_byte_whatever_the_order_in_which_records_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "DRAWS", 50)
    monkeypatch.setattr(page, "can_draw", lambda: False)
    monkeypatch.setattr(page, "write_methods", lambda *given: None)
    methods = {"joint": 0.0, "sweet": 0.1}
    plan = Plan(tmp_path / "a/records", ("TREC",), tuple(methods), 3, "mini-ee reproduce x")
    write_leaderboard(plan.records, plan.tasks, methods, 3, 60, 40)
    other = plan._replace(records=tmp_path / "b/records")
    for name in reversed(methods):
        made = read_records(plan.records / f"TREC/{name}.npz")
        for seed in reversed(made):
            write_record(other.records / f"TREC/{name}.npz", seed, made[seed])
    for each in (plan, other, plan):
        path = page.write_pages(each, each.records.parent, {}, False)
        assert path.read_bytes() == (tmp_path / "a/leaderboard.md").read_bytes() and b"`sweet` has" in path.read_bytes()


def test_links_lead_to_files_that_exist(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "raee.md").touch()
    for folder, expected in (("results", "[R](raee.md#a)"), ("results-quick", "[R](../results/raee.md#a)"), (".", "R")):
        (tmp_path / folder).mkdir(exist_ok=True)
        assert link(tmp_path / folder, "R", "raee.md#a") == expected
    lines = "".join(page._other_lines(Plan(tmp_path, (), (), 5, ""), tmp_path) + page.adding(tmp_path, ""))
    lines += page.other_figures(tmp_path)
    assert "](" not in lines.replace("[METHODS.md](METHODS.md)", "").replace("[Decoders](#decoders)", "")


def test_a_training_that_diverged_is_named(tmp_path):
    write_state(tmp_path, "TREC", "joint", [], {"2": "NaN", "0": "NaN"})
    plan = Plan(tmp_path / "records", ("TREC",), ("joint", "sweet"), 5, "mini-ee reproduce leaderboard")
    assert plan.missing("TREC") == {"joint": "the training diverged with seed 0, 2", "sweet": "·"}


def test_a_panel_shows_the_curve_of_its_method_or_says_that_it_lies_below(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    curves = {f"m{number}": ([20, 60, 100], [80 + number / 9] * 3) for number in range(27)}
    curves |= {"low": ([20, 60, 100], [79.0, 79.0, 79.0]), "failed": ([20, 60, 100], [50.0, 50.0, 50.0])}
    figures_drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures_drawn.append(figure))
    pictures.draw_methods(tmp_path / "a.png", curves, "TREC")
    seen = {}
    for axes in figures_drawn[0].axes:
        name, texts = axes.get_title(), [text.get_text() for text in axes.texts]
        seen[name] = axes.get_ylim()[0] < max(curves[name][1]), texts
    assert seen.pop("failed") == (False, ["below: 50.0 % at most"])
    assert len(seen) == 28 and all(each == (True, []) for each in seen.values())


def test_methods_of_the_front_look_different_though_they_are_more_than_the_colours(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shares = [100 * share for share in AREA]
    tasks = {
        task: {f"{task}{best}": (shares, [80.0 + (best == at) for at in range(len(shares))]) for best in range(6)}
        for task in "AB"
    }
    tasks["A"] |= {"joint": (shares, [70.0] * len(shares)), "one point": ([100.0], [75.0])}
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure))
    pictures.draw_fronts(tmp_path / "a.png", tasks, {"A": math.nan, "B": math.nan})
    lines = [line for axes in drawn[0].axes for line in axes.lines]
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in lines if line.get_linewidth() == 2}
    assert len(looks) == len(set(looks.values())) == 13
    assert {len(line.get_xdata()) for line in lines if line.get_marker() == "o"} == {1}


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
    made = rows_of_methods(methods_page.methods_page(board, "small", {"sleb": "9.5 ±0.3"}))
    assert [row[:7] for row in written] == [row[:7] for row in made]


@pytest.mark.slow
def test_both_pages_have_the_figures_of_the_records(monkeypatch, few_candidates):
    """The leaderboard to the byte. Of METHODS.md all but the lines of code, which change with every edit."""
    pytest.importorskip("matplotlib")
    written = {}
    for module in (page, methods_page):
        monkeypatch.setattr(module, "write_bytes", lambda path, content: written.update({path.name: content.decode()}))
    monkeypatch.setattr(default_rule, "CANDIDATES", few_candidates)  # as many as outside of tests
    monkeypatch.setattr(page, "draw_all", lambda *_: None)
    monkeypatch.setattr(decoder_section, "draw_saved", lambda *_: None)
    page.write_page(results := ROOT / "results", quick=False)
    command = "write the pages anew: mini-ee reproduce leaderboard"
    assert written["leaderboard.md"] == (results / "leaderboard.md").read_text(), command
    old, new = (rows_of_methods(text) for text in ((results / "METHODS.md").read_text(), written["METHODS.md"]))
    lines = 7  # the column
    assert [row[:lines] + row[lines + 1 :] for row in old] == [row[:lines] + row[lines + 1 :] for row in new], command


def test_the_methods_page_has_each_method_of_the_registry_once(board):
    text = methods_page.methods_page(board, "small", {"sleb": "9.5 ±0.3"})
    assert "| what it does | trains | exit rule |" in text
    rows = rows_of_methods(text)
    assert [row[0].strip(" `") for row in rows] == [*METHODS]
    for row in rows:
        assert len(row) == 12 and all(cell.strip() for cell in row[:9]), row
        file = re.search(r"\(\.\./(.+)\)", row[6])[1]
        assert (ROOT / file).exists() and 0 < int(row[7]) <= 2000 and int(row[8]) >= 0
        assert re.search(r"\b(19|20)\d\d\b", row[1])
    by_name = {row[0].strip(" `"): row for row in rows}
    assert by_name["consistent"][9].strip() and not by_name["sleb"][9].strip()
    exits = {name: by_name[name][5].strip() for name in ("hashee", "sleb", "joint")}
    assert exits == {"hashee": "token", "sleb": "–", "joint": "example, token"}
    explained = re.findall(r"^- \*([\w-]+)\*: ", text.partition("## Exit rules")[2], re.MULTILINE)
    named = {word for row in rows for cell in row[4].split(", ") for word in cell.removeprefix("threshold on ").split()}
    assert {"raee", "adainfer", "q-exit", "entropy", "fixed"} <= set(explained) - {"threshold"} <= named
    assert "- *patience*: Exit if `patience` consecutive exits repeat the prediction" in text
    assert by_name["sleb"][11].strip() == "9.5 ±0.3" and not by_name["consistent"][11].strip()
    assert "on the decoder small, with a rule that keeps 90 % of the predictions" in " ".join(text.split())
    assert "on no decoder yet" in " ".join(methods_page.methods_page(board, "", {}).split())
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
