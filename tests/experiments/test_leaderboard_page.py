"""The leaderboard from records: figures and intervals against loops, and pages that have the figures of the records.
Nothing is trained."""

import ast
import csv
import math
import os
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from leaderboard_records import drawn_record, write_leaderboard

from mini_ee.experiments.leaderboard import figures, made_tables, methods_page, page, pictures, ranking, tables
from mini_ee.experiments.leaderboard.figures import AREA, BUDGETS, CONTROL
from mini_ee.experiments.leaderboard.plan import EXAM, Plan
from mini_ee.experiments.leaderboard.replays import replay_all, with_measures
from mini_ee.experiments.pages import page_of
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
    replays = replay_all(recorded, rules)
    for number, rule in enumerate(rules):
        result = recorded.replay(rule)
        right = result.logits.argmax(axis=1) == recorded.labels
        assert (replays.right[number] == right).all() and (replays.depth[number] == result.cost.depth).all()
        passes = result.cost.depth if rule == Never() else result.cost.layer_passes
        assert (replays.passes[number] == passes).all()
        share = result.cost.flops.mean() / recorded.full_flops
        assert replays.flops[number] == (1.0 if rule == Never() else pytest.approx(share))


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
                right.append(mixed(part, [replayed.logits.argmax(axis=1) == reported.labels for replayed in both]))
                flops.append(mixed(part, [replayed.cost.flops.mean() / reported.full_flops for replayed in both]))
        near = [k for k, rights in enumerate(right) if np.abs(rights - run.at[most]).max() < 2 / figures.PARTS]
        assert min(abs(flops[k] - run.flops[most]) for k in near) < 2 / figures.PARTS
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
    own_point = figures._figure({"x": runs["x"]}, "x", "saved own")  # without a reference
    assert own_point.by_seed == pytest.approx([1 - reference.passes_at_own_point.mean() / 6] * 2)
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


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_of(text, first):
    """The rows of the table whose header begins with this cell, by their first cells."""
    lines = iter(text.splitlines())
    columns = next(cells_of(line) for line in lines if line.startswith(f"| {first} |"))
    next(lines)  # |---|
    rows = map(cells_of, takewhile(lambda line: line.startswith("|"), lines))
    return {row[0]: dict(zip(columns, row)) for row in rows}


def write_pages(plan):
    """Name -> text of each file that is written from the records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "DRAWS", 300)
        page.write_pages(plan, out := plan.records.parent, {}, False)
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.suffix in (".md", ".csv")}


@pytest.fixture(scope="module")
def pages(plan):
    return write_pages(plan)


def test_the_first_page_has_the_figures_of_the_records(plan, pages):
    """Means over tasks and seeds; the full model from the logits alone."""
    text, means = pages["leaderboard.md"], {}
    rows = table_of(text, "method")
    for name in (*METHODS_OF_TEST, CONTROL):
        scores = []
        for task in ("TREC", "SST-2"):
            joint = read_records(plan.records / task / "joint.npz")
            for seed, made in (joint if name == CONTROL else read_records(plan.records / task / f"{name}.npz")).items():
                held_out = joint[seed].held_out
                least = (held_out.logits[:, -1].argmax(axis=1) == held_out.labels).mean()
                run = figures.seed_figures(made, name, least)
                full = (made.reported.logits[:, -1].argmax(axis=1) == made.reported.labels).mean()
                passes = 6 if run.passes_at_one_point is None else run.passes_at_one_point.mean()
                scores.append([run.at[0.5].mean(), full, 1 - passes / 6, 1 - run.passes_at_own_point.mean() / 6])
        means[name] = 100 * np.mean(scores, axis=0)
        _, half, gap, *saved = (cell.split(" ±")[0] for cell in rows[name].values())
        assert half == f"{means[name][0]:.1f}" and saved == [f"{score:.1f}" for score in means[name][2:]]
        assert gap == ("–" if name == "joint" else f"{means[name][0] - means['joint'][0]:+.1f}")
    half, full, saved, _ = (f"{score:.1f} ±" for score in means["joint"])
    words = " ".join(text.split())
    assert f"has an accuracy of {half}" in words and f"and {full}" in words and f"it saves {saved}" in words
    assert f"threshold gains {means['joint'][0] - means[CONTROL][0]:.1f} ±" in words
    counts = "1 are significantly better and 1 significantly worse"
    assert f"of the 3 other methods that have a rule with so few FLOPs, {counts}" in words
    assert "**Better than joint training at half of the FLOPs: consistent.**" in words and "Not fair yet" not in words
    best = max(
        ("joint", "consistent"),
        key=lambda name: figures.read_task(plan.records / EXAM, {}).figures[name, "at 2x"].by_seed.mean(),
    )
    assert f"On {EXAM}, `{best}` has the highest accuracy" in words


def test_the_tiers_are_those_of_the_significant_differences(board):
    tiers = {tier: [row[0] for row in rows] for tier, rows in tables.tiers(board).items()}
    expected = {"better": ["consistent"], "open": ["two-stage", "joint"], "control": [CONTROL], "worse": ["pabee"]}
    assert tiers == expected | {"without": []}  # lora-exits has no record, so it has no row
    costly = {name: figure for name, figure in board.headline.items() if name != "pabee"}
    ranks = {name: rank for name, rank in board.ranks.items() if name != "pabee"}
    (row,) = tables.tiers(board._replace(headline=costly, ranks=ranks))["without"]
    assert row[:3] == ["pabee", "–", "–"] and "±" in row[3]


def test_the_details_have_every_method_and_say_what_is_missing(board, pages):
    for name in ("TREC", "SST-2"):
        rows = table_of(pages["leaderboard/tasks.md"].partition(f"## {name}")[2], "method")
        assert [*rows] == ["consistent", "two-stage", "joint", "pabee", CONTROL]
        cells = rows["consistent"]["at 2x"], rows["consistent"]["seeds"], rows["consistent"]["speed-up"]
        assert cells[0].startswith(f"{100 * board.drawn[name]['consistent', 'at 2x'].mean:.1f} ±")
        assert rows["consistent"]["full model"].endswith("▲") and cells[1:] == ("3", "1.90")
    rows = [*csv.DictReader(pages["leaderboard/tasks.csv"].splitlines())]
    assert len(rows) == 2 * 5 + 3 and {row["megabytes"] for row in rows} == {"0.5", ""}
    for row in rows:
        drawn = board.drawn[row["task"]][row["method"], "saved own"]
        assert float(row["saved own"]) == pytest.approx(drawn.mean, abs=1e-4)
    absent = [row for row in pages["leaderboard/protocol.md"].splitlines() if "lora-exits | 0 of 3 | –" in row]
    assert len(absent) == 3 and "| sleb | its tokens exit |" in pages["leaderboard/protocol.md"]
    records = [*csv.DictReader(pages["leaderboard/records.csv"].splitlines())]
    assert len(records) == 3 * (2 * 4 + 2) and {row["exits"] for row in records if row["task"] == "TREC"} == {
        "1 2 3 4 5 6"
    }
    assert "No decoder has a record yet." in pages["leaderboard/decoders.md"]
    for text in pages.values():
        assert not {"nan", "None"} & set(re.findall(r"\w+", text)) and "| · |" not in text


def test_links_of_the_pages_lead_to_files(pages, plan):
    """Those to other results too, which a folder of one's own does not have."""
    for name in (name for name in pages if name.endswith(".md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", pages[name]):
            if not target.startswith("http"):
                place = (plan.records.parent / name).parent / target
                assert (
                    place.exists()
                    or (ROOT / "results" / name).parent.joinpath(target.replace("../results/", "", 1)).exists()
                ), (name, target)


def test_sentences_of_each_kind_are_counted(pages):
    reviews = toy_task().without_seen_rows()[0]
    known = Counter(reviews.split(reviews.default_split).hardness)
    text = pages["leaderboard/hardness.md"]
    counts = table_of(text.partition("## Mean exit layer")[2], "method")["*number of sentences*"]
    assert {kind: int(count) for kind, count in counts.items() if kind != "method"} == known
    accuracy = table_of(text.partition("## Accuracy of each kind")[2], "method")
    assert [*accuracy] == ["consistent", "joint", CONTROL, "joint, full model"]


def test_marks_are_against_joint_training_and_need_three_seeds(board):
    marks = tables.significant(board.drawn["TREC"])
    assert marks["consistent", "full"] == tables.BETTER and ("joint", "full") not in marks
    for changed in (("consistent", "two-stage", "pabee"), ("joint",)):  # of both methods
        drawn = board.drawn["TREC"].items()
        few = {key: value._replace(seeds=((0, 1),)) if key[0] in changed else value for key, value in drawn}
        assert not [key for key in tables.significant(few) if key[1] != "area"]


def test_properties_of_exits_are_correlated_with_saved_layers_if_there_are_enough_trainings(board):
    trec = board.tasks["TREC"]
    runs, values = {CONTROL: trec.runs["joint"]}, {(CONTROL, "saved"): trec.figures["joint", "saved"]}
    order = [3, 1, 2, 6, 5, 4]  # of the saved layers; EEFP has it backwards, ECE is the number of the method
    for number, place in enumerate(order):
        of_method = {"failure": 1 - place / 10, "calibration": number / 10}
        name = f"method {number}"
        runs[name] = {seed: run._replace(**of_method) for seed, run in trec.runs["joint"].items()}
        values[name, "saved"] = values[CONTROL, "saved"]._replace(values=np.full((3, 1), place / 10), scale=1.0)
    task = trec._replace(runs=runs, figures=values)
    off = sum((number + 1 - place) ** 2 for number, place in enumerate(order))
    expected = [["TREC", "-1.00", f"{1 - 6 * off / (6 * 35):.2f}", "6"]]
    assert tables.prediction_rows(board._replace(tasks={"TREC": task})) == expected
    fewer = task._replace(runs={name: seeds for name, seeds in runs.items() if name != "method 3"})
    assert tables.prediction_rows(board._replace(tasks={"TREC": fewer})) == []


def test_no_page_is_written_without_a_record_of_joint_training(tmp_path):
    plan = Plan(tmp_path / "records", ("TREC", EXAM), ("joint", "sweet"), 5, "mini-ee reproduce leaderboard")
    write_leaderboard(plan.records, ["TREC"], {"sweet": 0.0}, 1, 60, 40)
    assert page.write_pages(plan, tmp_path, {}, False) is None and not [*tmp_path.glob("*.md")]


def test_with_two_seeds_nothing_has_an_interval(tmp_path):
    plan = Plan(tmp_path / "records", ("TREC", "SST-2", "SICK"), ("joint", "sweet", "two-stage", "pabee"), 5, "x")
    write_leaderboard(plan.records, ["TREC"], {"joint": 0.0, "sweet": 0.1, "two-stage": 0.0}, 2, 60, 40)
    write_leaderboard(plan.records, ["SST-2"], {"joint": 0.0}, 1, 60, 40)
    made = write_pages(plan)
    assert not re.search(r"±\d", made["leaderboard.md"]) and "±?" in made["leaderboard.md"]
    assert "Ranks are over TREC alone." in made["leaderboard.md"] and "| 1 (1 to 3) |" in made["METHODS.md"]
    assert "| SICK | joint | 0 of 5 | – |" in made["leaderboard/protocol.md"]


@pytest.mark.parametrize(("apart", "shown"), [(0.02, True), (0.04, False), (-0.04, False)])
def test_a_speed_up_at_one_point_is_that_of_the_rule_that_is_chosen_now(board, apart, shown):
    task, runs = board.tasks["TREC"], {}
    for seed, run in task.runs["consistent"].items():
        timed = {"speedup": 1.5 + seed, "flops_ratio": run.flops_at_one_point + apart * (seed == 1)}
        runs[seed] = run._replace(about=run.about | {"one_point": timed})
        assert run.passes_at_one_point is not None
    speedup = tables.measured(task._replace(runs=task.runs | {"consistent": runs}), "consistent", "speedup")
    assert speedup == (2.5 if shown else None)


def test_seconds_are_of_trainings_on_the_cpu(tmp_path):
    write_leaderboard(tmp_path / "records", ["TREC"], {"joint": 0.0, "two-stage": 0.03}, 3, rows=60, held_out=60)
    for name, seeds in (("joint", (0,)), ("two-stage", (0, 1, 2))):
        path = tmp_path / "records" / "TREC" / f"{name}.npz"
        for seed, seed_record in read_records(path).items():
            seed_record.about["training"]["seconds"] = 50.0 + seed
            seed_record.about["made"] |= {"gpu": "G100"} if seed in seeds else {}
            write_record(path, seed, seed_record)
    task = figures.read_task(tmp_path / "records" / "TREC", {})
    assert tables.measured(task, "joint", "seconds") == 51.5 and tables.measured(task, "two-stage", "seconds") is None
    assert tables.measured(task, "joint", "megabytes") == 0.5


def write_state(out, task, name, tried, diverged=None):
    """What the leaderboard keeps of a search for learning rates."""
    path = out / "leaderboard" / task / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": {}, "tried": tried, "diverged": diverged or {}})


def test_trainings_are_counted_with_their_hours_exits_and_rates(tmp_path):
    """In hours: joint training takes 1 on TREC and 2 on SST-2; SWEET takes 2 on TREC, on SST-2 a third on a GPU."""
    hours = {("TREC", "joint"): 1, ("TREC", "sweet"): 2, ("SST-2", "joint"): 2, ("SST-2", "sweet"): 1 / 3}
    for (task, name), spent_hours in hours.items():
        gpu, chosen = {"gpu": "G100"} if spent_hours < 1 else {}, 1.0 if (task, name) == ("TREC", "sweet") else 4.0
        tried = [{"factor": factor, "seed": 0, "seconds": 3600 * spent_hours, **gpu} for factor in (1.0, 4.0)]
        write_state(tmp_path, task, name, tried)
        metadata = {"training": {"seconds": 3600 * spent_hours}, "rates": {"factor": chosen}}
        metadata["made"] = gpu | {"processor": "one" if task == "TREC" else "another"}
        for seed in (0, 1):
            random, exits = np.random.default_rng(seed), (1, 2, 3) if name == "joint" else (1, 3)
            chances, labels = np.linspace(0.6, 0.9, len(exits)), np.arange(40) % 2
            parts = (drawn_record(chances, 40, random, exits=exits, labels=labels) for _ in range(2))
            metadata |= {"trained_as": name, "half": {"flops_ratio": 0.4 if name == "joint" else 0.6}}
            write_record(tmp_path / "records" / task / f"{name}.npz", seed, SeedRecord(*parts, metadata))
    plan = Plan(tmp_path / "records", ("TREC", "SST-2"), ("joint", "sweet"), 2, "a command")
    counted = made_tables.made_figures(tables.read_leaderboard(plan))
    assert counted["trainings"] == 12 and counted["exits"] == [["sweet", "3", "1"]] and counted["shared"] == []
    assert counted["on_the_cpu"] == {"count": 9, "hours": 15} and counted["on_a_gpu"] == {"count": 3, "hours": 1}
    assert counted["records"] == {"count": 8, "on_a_gpu": 2} and counted["not_run"] == []
    assert counted["flops"] == {"low": 0.4, "middle": 0.5, "high": 0.6}
    assert counted["rates"] == [["joint", "–", "4 of 1, 4", "4 of 1, 4"], ["sweet", "–", "1 of 1, 4", "4 of 1, 4"]]
    write_state(tmp_path, "TREC", "joint", [], {"2": "NaN", "0": "NaN"})
    assert made_tables.made_figures(tables.read_leaderboard(plan._replace(seeds=5)))["not_run"][0][3] == "0, 2"
    assert plan.missing("SICK") == {"joint": "·", "sweet": "·"} and plan.missing("TREC") == {}


def test_the_pages_are_equal_to_the_byte_whatever_the_order_in_which_records_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)
    methods = {"joint": 0.0, "sweet": 0.1}
    plan = Plan(tmp_path / "a/records", ("TREC",), tuple(methods), 3, "mini-ee reproduce x")
    write_leaderboard(plan.records, plan.tasks, methods, 3, 60, 40)
    other = plan._replace(records=tmp_path / "b/records")
    for name in reversed(methods):
        made = read_records(plan.records / f"TREC/{name}.npz")
        for seed in reversed(made):
            write_record(other.records / f"TREC/{name}.npz", seed, made[seed])
    assert write_pages(plan) == write_pages(other) == write_pages(plan)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    pytest.importorskip("matplotlib")
    saved = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: saved.append(figure))
    return saved


def test_a_panel_shows_the_curve_of_its_method_or_says_that_it_lies_below(tmp_path, drawn):
    curves = {f"m{number}": ([20, 60, 100], [80 + number / 9] * 3) for number in range(27)}
    curves |= {"low": ([20, 60, 100], [79.0, 79.0, 79.0]), "failed": ([20, 60, 100], [50.0, 50.0, 50.0])}
    pictures.draw_methods(tmp_path / "a.png", curves, "TREC")
    seen = {}
    for axes in drawn[0].axes:
        name, texts = axes.get_title(), [text.get_text() for text in axes.texts]
        seen[name] = axes.get_ylim()[0] < max(curves[name][1]), texts
    assert seen.pop("failed") == (False, ["below: 50.0 % at most"])
    assert len(seen) == 28 and all(panel == (True, []) for panel in seen.values())


def test_the_front_names_its_lines_apart_and_has_the_interval_of_joint_training(board, tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(ranking, "DRAWS", 300)  # as in the board
    curves = pictures.task_curves(board, ["TREC", "SST-2"])
    ordered = {name: curves[name] for name in ("consistent", "two-stage", "joint", "pabee", CONTROL)}
    band = pictures.reference_band(board)
    assert band[0.5].mean == pytest.approx(board.headline["joint"].mean)
    assert band[0.5].high == pytest.approx(ranking.interval(board.headline["joint"]).high)
    pictures.draw_front(tmp_path / "a.png", ordered | {"grey": ([100.0], [75.0])}, band, "TREC, SST-2")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    colours = {lines[name].get_color() for name in ordered}
    assert len(colours) == 5 and lines["grey"].get_color() not in colours and lines[CONTROL].get_linestyle() == ":"
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert {text.get_text() for text in axes.texts} == {*ordered} and min(np.diff(heights)) > 0.03 * np.ptp(
        axes.get_ylim()
    )


def test_pictures_are_drawn(plan, pages):
    pytest.importorskip("matplotlib")
    for name in page.PICTURES[:3]:
        assert (plan.records.parent / name).read_bytes().startswith(b"\x89PNG")
    assert (
        "](leaderboard-front.png)" in pages["leaderboard.md"] and "decoders.png" not in pages["leaderboard/decoders.md"]
    )


ROOT = Path(__file__).parents[2]


def rows_of_methods(text):
    """The lines of the methods page, as cells."""
    return [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_the_methods_page_is_as_the_command_would_write_it(pages):
    """But for lines of code and figures: `mini-ee reproduce leaderboard` writes results/METHODS.md anew."""
    written, made = (
        rows_of_methods(text) for text in ((ROOT / "results" / "METHODS.md").read_text(), pages["METHODS.md"])
    )
    assert [row[:7] for row in written] == [row[:7] for row in made]


def test_the_committed_first_page_is_the_mean_of_the_tasks_and_has_joint_trainings_full_model():
    text, by_method, tasks = (ROOT / "results/leaderboard.md").read_text(), {}, ("TREC", "SST-2", "SICK")
    for row in csv.DictReader((ROOT / "results/leaderboard/tasks.csv").read_text().splitlines()):
        by_method.setdefault(row["method"], {})[row["task"]] = row
    shown = {name: [*row.values()] for name, row in table_of(text, "method").items() if not name.startswith("**")}
    assert {"joint", CONTROL} < shown.keys() and len(shown) > 15
    for name, (_, half, gap, *saved) in shown.items():
        for figure, cell in zip(("at 2x", "saved", "saved own"), (half, *saved)):
            values = [by_method[name][task][figure] for task in tasks]
            if cell == "–":
                assert not all(values)
            else:
                assert float(cell.split()[0]) == pytest.approx(100 * np.mean([*map(float, values)]), abs=0.06)
        if gap != "–":
            points = float(half.split()[0]) - float(shown["joint"][1].split()[0])
            assert float(gap.split()[0]) == pytest.approx(points, abs=0.11)
    made = [read_records(ROOT / f"results/records/{task}/joint.npz").values() for task in tasks]
    full = [
        [(seed_record.reported.logits[:, -1].argmax(1) == seed_record.reported.labels).mean() for seed_record in seeds]
        for seeds in made
    ]
    assert f" {100 * np.mean(full):.1f} ±" in text.partition("with all layers")[0][-20:]


@pytest.mark.slow
@pytest.mark.skipif("MINI_EE_FULL" not in os.environ, reason="replays all records: set MINI_EE_FULL=1")
def test_the_pages_have_the_figures_of_the_records(monkeypatch, few_candidates):
    """To the byte. Of METHODS.md all but the lines of code, which change with every edit."""
    pytest.importorskip("matplotlib")
    written = {}
    monkeypatch.setattr(
        page, "fill_page", lambda name, figures, out: written.update({f"{name}.md": page_of(name, figures)})
    )
    monkeypatch.setattr(
        page, "write_bytes", lambda path, content: written.update({f"leaderboard/{path.name}": content.decode()})
    )
    monkeypatch.setattr(default_rule, "CANDIDATES", few_candidates)  # as many as outside of tests
    monkeypatch.setattr(page, "draw_all", lambda *_: None)
    monkeypatch.setattr(page, "draw_decoders", lambda *_: None)
    page.write_page(results := ROOT / "results", quick=False)
    command, methods = "write the pages anew: mini-ee reproduce leaderboard", written.pop("METHODS.md")
    for name, text in written.items():
        assert text == (results / name).read_text(), f"{name}: {command}"
    old, new = (rows_of_methods(text) for text in ((results / "METHODS.md").read_text(), methods))
    lines = 7  # the column
    assert [row[:lines] + row[lines + 1 :] for row in old] == [row[:lines] + row[lines + 1 :] for row in new], command


def test_the_methods_page_has_each_method_of_the_registry_once(pages):
    text = pages["METHODS.md"]
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
    parts = {name: by_name[name][3].strip() for name in ("two-stage", "consistent", "sleb")}
    assert parts["two-stage"] == "backbone and heads → heads" and parts["sleb"].startswith("nothing")
    assert parts["consistent"] == "backbone and heads → policy, in turns"


def test_the_head_of_a_file_gives_name_paper_link_and_deviations():
    text = "X (Li and Ho 2021, EACL): it\nexits.\n\nSee 2021.eacl-main.8.\n\nDeviations, 1 to 2 of them pinned:\n"
    text += "1. a 2.5 b.\n2. c; 3. d"
    head = methods_page.parse_about(text)
    assert head == ("X", "Li and Ho 2021", "[EACL](https://aclanthology.org/2021.eacl-main.8)", "it exits", 3)
    with pytest.raises(ValueError, match="expected a docstring that begins with NAME"):
        methods_page.parse_about("Some words.")


def test_lines_of_code_are_neither_docstrings_nor_comments(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('"""Head."""\n\n# note\nx = 1  # why\n\n\ndef f():\n    """Doc\n    more."""\n    return x\n')
    assert methods_page.code_lines(path) == 3 and ast.parse(path.read_text())
