"""`mini-ee reproduce`: a tiny recipe to its page, pages next to their JSON. Verdicts: test_verdicts.py."""

import csv
import functools
import json
import math
import re
import shutil
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import write_task
from leaderboard_records import drawn_record

import mini_ee.lab.training.holdout as holdout_module
from mini_ee import train
from mini_ee.experiments import measures, pictures, recipe, reproduce, result_page, trainings
from mini_ee.experiments.example_values import example_values
from mini_ee.experiments.page_data import TEST_SHARE, PageData, cell, is_share, read_data
from mini_ee.experiments.pages import page_of
from mini_ee.experiments.recipe import PAGES, PAPERS, Case, cases_named, cases_of, load_recipe, panels_of
from mini_ee.experiments.records import SeedRecord, read_records, rounded, write_record
from mini_ee.experiments.result_page import (
    Claim,
    figures_of,
    mean_of,
    overview_figures,
    pages_of,
    runs_table,
    table_text,
)
from mini_ee.experiments.trainings import read_case
from mini_ee.experiments.verdicts import EXCLUDED, FAILS, HOLDS, LEAST_SEEDS, MISSING, UNDECIDED, UNTESTED, Compared
from mini_ee.lab.calibration import observe
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import file_sha256, json_sha256, read_json, sole_writer, write_json
from mini_ee.lab.data.multiple_choice import load_benchmark
from mini_ee.lab.data.tasks import holdout, load_task, toy_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation import row_evaluation, savings_estimate
from mini_ee.lab.evaluation.probes import Costs
from mini_ee.lab.evaluation.token_evaluation import EPSILONS, score_benchmark
from mini_ee.lab.recording import exit_scores, record, summary
from mini_ee.lab.rules import Never, Threshold, rule_from_dict
from mini_ee.lab.training import default_rule
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.loop import Diverged
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.train_settings import RowOptions, TextOptions, TrainConfig

RESULTS = Path(__file__).parents[2] / "results"
MADE = {"figures": {}, "lists": {}, "how": trainings.how_made(), "data": {}} | {
    "core_seconds": 0.0,
    "test_rows_dropped": 0,
}  # of one seed
JOINT = {"method": "joint", "lr": {"choose": [1e-4, 4e-4]}}
TINY = {
    "title": "Tiny",
    "source": "nobody",
    "template": "quick",
    "experiments": [
        {
            "name": "reviews {method}",
            "measure": "rows",
            "axes": {"method": {"joint": JOINT, "two-stage": {"method": "two-stage"}}},
            "options": {"model": None, "task": "reviews", "exits": [2, 12], "max_train": 40, "epochs": 1},
            "reference": "reviews joint",
        }
    ],
    "claims": [
        {
            "name": "one",
            "text": "One is above",
            "paper": ".5",
            "compare": [{"more": "reviews joint", "than": 0.1, "figure": "full"}],
        },
        {
            "name": "two",
            "text": "Two",
            "paper": ".6",
            "control": True,
            "compare": [{"more": "reviews joint", "than": "reviews two-stage", "figure": "full"}],
        },
        {"name": "large", "text": "Large", "paper": ".7", "unseen": "It needs another machine."},
    ],
    "tables": [
        {
            "id": "Table 1",
            "title": "scores",
            "case": "reviews {method}",
            "figure": "{figure}",
            "rows": {"joint": {"method": "joint"}, "two-stage": {"method": "two-stage"}},
            "columns": {"full": {"figure": "full"}, "saved": {"figure": "saved at one point"}},
            "theirs": {"columns": ["full"], "rows": {"joint": ["50.0"]}},
        }
    ],
    "pictures": [
        {
            "file": "fig.png",
            "title": "Fig. 3: a curve",
            "x": "share of the layers saved",
            "y": "accuracy",
            "series": {"joint": {"case": "reviews joint", "x": "curve saved", "y": "curve score"}},
        }
    ],
    "quick": {},
}  # fmt: skip


def recorded(figures):
    """What the measurement of a classifier returns: figures, lists, and a record, always with the same outputs."""
    part = drawn_record([0.5, 0.9], 8, np.random.default_rng(0), exits=(1, 2))
    return figures, {}, SeedRecord(part, part, {})


def only_counted(monkeypatch):
    """Nothing is trained; the returned list gets the method of each training. All have the same outputs."""
    trained = []

    def train(folder, options, *arguments):
        trained.append(options["method"])
        folder.mkdir(parents=True)
        return SimpleNamespace(config={})

    monkeypatch.setattr(trainings, "trained", train)
    monkeypatch.setattr(trainings, "_chosen", lambda *arguments: {})
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", lambda *arguments: recorded({"full": 0.5}))
    return trained


@functools.cache
def committed(paper):
    """The recipe of a page, and the figures that are committed."""
    of_paper = load_recipe(paper)
    return of_paper, read_data(RESULTS / paper, of_paper)


# ---- Recipes ----


def values_of(option):
    """The option's value; of a choice all."""
    return option["choose"] if recipe.is_choice(option) else [option]


@pytest.mark.parametrize(("paper", "quick"), [*((page, False) for page in PAGES), *((paper, True) for paper in PAPERS)])
def test_a_recipe_names_cases_that_its_experiments_make_and_options_that_methods_have(paper, quick):
    of_paper = load_recipe(paper, quick)
    cases = cases_of(of_paper)
    assert cases_named(of_paper, cases) == cases  # none is trained for nothing
    order = list(cases)
    assert all(order.index(case.reference or case.name) <= order.index(case.name) for case in cases.values())
    for case in cases.values():
        of = cases[case.reference or case.name]
        assert (case.seeds or LEAST_SEEDS) <= (of.seeds or LEAST_SEEDS), f"{case.name}: seeds that {of.name} lacks"
        for options in (case.options, case.options.get("base")):
            if options:
                known = {"method", "model", "task", "base"}
                parts = load_method(options["method"]).config, TrainConfig, RowOptions, TextOptions
                known |= {field.name for part in parts for field in fields(part)}
                given = {
                    key
                    for name, option in options.items()
                    for value in values_of(option)
                    for key in trainings._settings(name, value)
                }
                assert given <= known, (case.name, given - known)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_recipes_papers_own_numbers_are_in_its_tables_shape(paper):
    for table in load_recipe(paper)["tables"]:
        for name, row in table.get("theirs", {"rows": {}})["rows"].items():
            assert len(row) == len(table["theirs"]["columns"]), (table["id"], name)


def test_two_experiments_cannot_make_one_case_differently():
    other = {"name": "reviews joint", "measure": "rows", "axes": {}, "options": {"method": "joint"}}
    with pytest.raises(ValueError, match="two experiments make the case 'reviews joint'"):
        cases_of({"experiments": [*TINY["experiments"], other]})


def test_a_case_that_no_experiment_makes_is_named():
    claims = [{"text": "", "paper": "", "compare": [{"more": "nothing", "than": 1, "figure": "full"}]}]
    with pytest.raises(ValueError, match="no experiment makes nothing"):
        cases_named(TINY | {"claims": claims}, cases_of(TINY))


# ---- Measures ----


def test_streams_are_timed_in_every_way_for_each_number_of_rows(tmp_path, monkeypatch, checkpoint_folder):
    monkeypatch.setattr(holdout_module, "TEST_ROWS", 16)
    lora = train("lora-exits", checkpoint_folder, out=tmp_path / "run", exits=(1, 3), max_train=32, epochs=1)
    ran = []
    monkeypatch.setattr(measures, "medians", lambda ways, name, **_: ran.append([way() for way in ways]) or [2.0] * 5)
    figures, _ = measures.of_streams(lora, toy_task(), None)
    ways = ("SGMV", "loop over adapters", "one by one", "no adapters", "full model")
    assert figures == {f"{way}, {count} rows": 2000.0 for count in (1, 2, 4, 8) for way in ways}
    for count, (together, _, one_by_one, _, full) in zip((1, 2, 4, 8), ran):
        assert len(together.logits) == count
        np.testing.assert_allclose(together.logits, one_by_one.logits, atol=1e-4)
        np.testing.assert_allclose(together.logits, full.logits, atol=1e-4)


# ---- From a recipe to its page ----


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The tiny recipe in place of RAEE's."""
    (tmp_path / "raee.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(recipe, "RECIPES", tmp_path)
    monkeypatch.setattr(result_page, "PAPERS", ("loraexit", "raee"))  # the first has no page: no row, no recipe read
    monkeypatch.setattr(measures, "HELD_OUT_ROWS", 30)
    monkeypatch.setattr(measures, "TRAIN_ROWS", 30)
    monkeypatch.setattr(row_evaluation, "TIMED_ROWS", 4)
    monkeypatch.setattr(holdout_module, "TEST_ROWS", 16)
    return tmp_path / "out"


@pytest.mark.slow
def test_a_tiny_recipe_to_its_page(tiny, capsys, monkeypatch, checkpoint_folder):
    pytest.importorskip("matplotlib")
    (experiment,) = TINY["experiments"]
    small = experiment["options"] | {"model": str(checkpoint_folder), "exits": [1, 3]}
    (tiny.parent / "raee.json").write_text(json.dumps(TINY | {"experiments": [experiment | {"options": small}]}))
    labelled, rules_of = [], measures.rules_of
    monkeypatch.setattr(
        measures, "rules_of", lambda run, on, task: labelled.append(on.labels is not None) or rules_of(run, on, task)
    )
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1", "--json", "--threads", "1"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ran"] == 2
    assert "1 of 2 are done.\n" in printed.err and "2 of 2 are done.\n" in printed.err
    assert labelled == [True, True]  # rules may be fitted to the hold-out's labels
    text, made = (tiny / "raee.md").read_text(), read_json(tiny / "raee" / "reviews-joint.json")
    figures = made["seeds"]["0"]["figures"]
    assert 0.3 < figures["full"] < 1 and 0 <= figures["saved at one point"] < 1
    assert figures["steps"] == 2 and figures["trained parameters"] > 1e3
    seed = made["seeds"]["0"]
    task = toy_task().without_seen_rows()[0]
    assert seed["test_rows"] == len(task.split(task.default_split)) and seed["core_seconds"] > 0
    assert seed["data"] == {"reviews": json_sha256({name: rows.sha256() for name, rows in task.splits.items()})}
    joint, two_stage = csv.DictReader((tiny / "raee" / "runs.csv").read_text().splitlines())
    assert (joint["case"], two_stage["case"], joint["seeds"]) == ("reviews joint", "reviews two-stage", "1")
    assert json.loads(joint["sha256"]) == seed["data"] and joint["processor"] == trainings.processor()
    assert json.loads(joint["chosen"]) == made["chosen"] and joint["test_rows"] == str(seed["test_rows"])
    assert {trial["lr"] for trial in made["tried"]} > {1e-4, 4e-4}  # one of two is always an end, beyond which it looks
    assert made["chosen"]["lr"] == max(made["tried"], key=lambda trial: trial["hold-out"])["lr"]
    assert f"| joint | {100 * figures['full']:.1f} | {100 * figures['saved at one point']:.1f} |" in text
    assert "| the paper | full |" in text and "| joint | 50.0 |" in text
    assert "| one | open |" in text and "| large | untested |" in text
    claims = (tiny / "raee" / "claims.md").read_text()
    assert "## 3. large: untested\n\nLarge.\n\n**Why it is untested.** It needs another machine." in claims
    assert "## 2. two: open\n\n*A control: the paper makes no such claim.*\n\nTwo.\n" in claims
    assert f"| full: reviews joint, against a number | {100 * figures['full']:.1f}% | 10.0% |" in claims
    assert (tiny / "raee" / "fig.png").stat().st_size > 1000 and "![Fig. 3: a curve](raee/fig.png)" in text
    overview = (tiny / "README.md").read_text()
    assert "| [Tiny](raee.md) | 2 | 1 | 1 |" in overview and "2 claims" not in overview
    assert "Why one quantity" not in overview  # the other papers have no page
    assert (tiny / "judging.md").exists() and (tiny / "verdicts.png").stat().st_size > 400
    drawn = (tiny / "raee" / "fig.png").read_bytes()
    assert not list((tiny / "raee" / "runs").glob("*"))  # trainings are gone, their figures and records stay
    stored = read_records(tiny / "records" / "raee" / "reviews-joint.npz")[0]
    rule = rule_from_dict(stored.about["rules"]["at one point"])
    layers = stored.reported.replay(rule).cost.depth.mean()
    assert layers == pytest.approx(3 - 3 * figures["saved at one point"], rel=1e-4)  # the JSON has five digits
    assert stored.about["settings"]["lr"] == made["chosen"]["lr"]

    def refuse(*args, **settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(trainings, "train", refuse)
    assert main(command) == 0  # everything is there: nothing is trained
    assert (tiny / "raee.md").read_text() == text and (tiny / "README.md").read_text() == overview
    assert (tiny / "raee" / "fig.png").read_bytes() == drawn
    assert main([*command, "--only", ""]) == 2
    assert main([*command, "--only", "Table 9"]) == 2
    assert "expected one of Table 1; Fig. 3; claim 1; claim 2; claim 3; found Table 9" in capsys.readouterr().err


def test_a_text_read_by_a_case_has_the_checksum_of_its_file(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stories.txt").write_text("Once upon a time.")
    case = Case("a", "tokens", {"text": "continue"}, reads="stories.txt")
    sources = trainings.Sources(tmp_path, tmp_path)
    sums = trainings._checksums(case, None, sources)
    assert sums == {"stories.txt": file_sha256(tmp_path / "data" / "stories.txt")}
    benchmark = tmp_path / "data" / "HellaSwag"
    benchmark.mkdir()
    (benchmark / "val.jsonl").write_text("{}")
    several = case._replace(reads=["HellaSwag", "stories.txt"])
    assert sources.read_by(several) == [benchmark, tmp_path / "data" / "stories.txt"]
    of_folder = json_sha256({"val.jsonl": file_sha256(benchmark / "val.jsonl")})
    assert trainings._checksums(several, None, sources) == sums | {"HellaSwag": of_folder}


@pytest.mark.slow
def test_the_accuracy_on_a_benchmark_is_that_of_replayed_exits(tmp_path, llama_folder):
    rows = [{"ctx": "the cat", "endings": ["was good", "was bad", "is", "a"], "label": at % 4} for at in range(6)]
    (tmp_path / "HellaSwag").mkdir()
    (tmp_path / "HellaSwag" / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train("self-supervised", llama_folder, out=tmp_path / "run", exits=(1, 3), texts=4, new_tokens=4, epochs=1)
    swept = [{"epsilon": 0.5, "thresholds": [0.0]}, {"epsilon": 0.9, "thresholds": ["inf"]}]
    figures = measures._benchmark_over_epsilon(run, tmp_path / "HellaSwag", swept)
    scores = score_benchmark(run, load_benchmark(tmp_path / "HellaSwag"))
    early, full = (scores.accuracy(np.full(len(scores.recorded.logits), k))["accuracy"] for k in (0, 1))
    assert figures == {"HellaSwag": full, "HellaSwag at epsilon .5": early, "HellaSwag at epsilon .9": full}


@pytest.mark.parametrize(
    ("options", "joint", "two_stage"),
    [
        ([], [0, 1, 2], [0]),
        (["--seed", "4"], [4, 5, 6], [4]),
        (["--seeds", "2", "--seed", "4"], [4, 5], [4, 5]),
        (["--quick"], [0], [0]),
    ],
)
def test_a_case_is_run_with_the_seeds_of_its_page_unless_others_are_given(tiny, monkeypatch, options, joint, two_stage):
    (experiment,) = TINY["experiments"]
    methods = experiment["axes"]["method"]
    axes = {"method": methods | {"two-stage": methods["two-stage"] | {"seeds": 1}}}
    (tiny.parent / "raee.json").write_text(json.dumps(TINY | {"experiments": [experiment | {"axes": axes}]}))
    ran = []
    monkeypatch.setattr(reproduce, "is_done", lambda folder, case, seed: (case.name, seed) in ran)
    monkeypatch.setattr(reproduce, "run_case", lambda folder, case, seed, *rest: ran.append((case.name, seed)))
    assert main(["reproduce", "raee", "--out", str(tiny), *options]) == 0
    both = {"reviews joint": joint, "reviews two-stage": two_stage}
    assert ran == [(name, seed) for seed in joint for name in both if seed in both[name]]


def test_a_cell_shows_mean_and_standard_deviation_and_how_many_seeds_have_its_figure():
    assert (
        cell([0.2, 0.3, 0.4], "full", 3) == "30.0 ±10.0"
        and cell([0.2, 0.4], "layers", 3) == "0.30 ±0.14 (2 of 3 seeds)"
    )
    assert cell([0.2], "full", 3) == "20.0 (1 of 3 seeds)" and cell([0.2] * 3, "full", 3) == "20.0"
    assert cell([1234.0, 1236.0, 1238.0], "steps", 3, 0) == "1,236 ±2" and cell([12.34], "train seconds", 1) == "12.3"


def test_seconds_of_a_training_on_a_gpu_are_not_averaged_with_those_of_a_processor():
    figures = {"full": 0.5, "train seconds": 20.0}
    on_a_gpu = {"figures": figures, "how": MADE["how"] | {"gpu": "NVIDIA H200"}}
    seeds = {"0": on_a_gpu, "1": MADE | {"figures": figures | {"train seconds": 300.0}}}
    data = PageData({}, {"joint": {"seeds": seeds}, "two-stage": {"seeds": {"0": on_a_gpu}}})
    assert data.values("joint", "train seconds") == {"1": 300.0} and data.mean("two-stage", "train seconds") is None
    assert data.values("joint", "full") == {"0": 0.5, "1": 0.5}


def test_of_one_claim_only_what_it_compares_is_run():
    of_paper = recipe.load_recipe("consistentee")
    cases = recipe.cases_named(recipe.select(of_paper, "claim 2"), recipe.cases_of(of_paper))
    alphas = [f"consistent alpha {alpha}" for alpha in (0.05, 0.07, 0.1, 0.2)]  # of which one is selected for each seed
    methods = ("two-stage", *alphas, "consistent", "pabee", "berxit")  # the first is what all are measured against
    assert set(cases) == {f"{task} {method}" for task in ("TREC", "SST-2") for method in methods}


def test_held_out_examples_select_a_setting_for_each_seed(tmp_path):
    """By what a rule saves on them, not on the reported examples; only of seeds that all settings have."""
    figures = {  # alpha -> seed -> saved on the held-out and on the reported examples
        "0.1": {"0": (0.4, 0.1), "1": (0.2, 0.9), "2": (0.5, 0.5), "10": (0.1, 0.2)},
        "0.2": {"0": (0.3, 0.8), "1": (0.3, 0.2), "10": (0.3, 0.4)},
    }
    axes = {"alpha": {alpha: {"alpha": float(alpha)} for alpha in figures}}
    options = {"method": "consistent", "task": "reviews"}
    select = {"of": ["{task} alpha 0.1", "{task} alpha 0.2"], "by": "hold-out saved"}
    own_recipe = TINY | {
        "experiments": [
            {"name": "reviews alpha {alpha}", "measure": "rows", "axes": axes, "options": options},
            {
                "name": "{task} chosen",
                "measure": "rows",
                "axes": {"task": {"reviews": {}}},
                "options": options,
                "select": select,
            },
        ],
        "claims": [],
        "tables": [],
        "pictures": [],
    }
    cases, seed_made = cases_of(own_recipe), MADE | {"core_seconds": 3600, "data": {"reviews": "abc"}}
    for alpha, seeds in figures.items():
        case = cases[f"reviews alpha {alpha}"]
        made = {
            seed: seed_made | {"figures": {"hold-out saved": held_out, "saved": saved}}
            for seed, (held_out, saved) in seeds.items()
        }
        write_json(trainings.file_of(tmp_path, case.name), trainings.read_case(tmp_path, case) | {"seeds": made})
    data = read_data(tmp_path, own_recipe)
    assert data.values("reviews chosen", "saved") == {"0": 0.1, "1": 0.2, "10": 0.4}
    assert [*data.trained] == ["reviews alpha 0.1", "reviews alpha 0.2"]
    assert [*csv.DictReader(runs_table(data).splitlines())][1]["seeds"] == "3"


def test_a_selected_case_is_not_trained_but_those_it_is_selected_from_are(tiny, monkeypatch):
    (experiment,) = TINY["experiments"]
    select = {"of": ["reviews joint", "reviews two-stage"], "by": "hold-out full"}
    chosen = {key: value for key, value in experiment.items() if key != "reference"}
    chosen |= {"name": "chosen", "axes": {"task": {"reviews": {}}}, "select": select}
    claim = {"name": "one", "text": "One", "paper": "", "compare": [{"more": "chosen", "than": 0.1, "figure": "full"}]}
    own_recipe = TINY | {"experiments": [experiment, chosen], "claims": [claim], "tables": [], "pictures": []}
    (tiny.parent / "raee.json").write_text(json.dumps(own_recipe))
    ran = []
    monkeypatch.setattr(reproduce, "is_done", lambda folder, case, seed: (case.name, seed) in ran)
    monkeypatch.setattr(reproduce, "run_case", lambda folder, case, seed, *rest: ran.append((case.name, seed)))
    assert main(["reproduce", "raee", "--out", str(tiny), "--seeds", "1"]) == 0
    assert ran == [("reviews joint", 0), ("reviews two-stage", 0)]


def test_a_stopped_choice_goes_on_behind_what_was_tried(tmp_path, monkeypatch):
    """Killed in its third candidate: the two before are not trained again, the best of all is the seed's own run."""
    trained = []

    class Made:
        config = {}

        def __init__(self, folder):
            self.folder = folder

    def train(method, out, lr, seed, **options):
        if lr == 3.0 and trained.count(3.0) == 0:
            trained.append(lr)
            raise KeyboardInterrupt
        trained.append(lr)
        out.mkdir(parents=True)
        (out / "metrics.json").write_text(json.dumps({"per_exit_accuracy": [{1.0: 0.2, 2.0: 0.9, 3.0: 0.5}[lr]]}))
        return Made(out)

    monkeypatch.setattr(trainings, "train", train)
    monkeypatch.setattr(trainings, "load_run", Made)
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", lambda run, task, reference: ({"which": 1.0}, {}))
    case = Case("a", "rows", {"method": "joint", "task": "reviews", "lr": {"choose": [1.0, 2.0, 3.0]}})
    sources = trainings.Sources(tmp_path, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainings.run_case(tmp_path, case, 0, sources, lambda text: None)
    trainings.run_case(tmp_path, case, 0, sources, lambda text: None)
    made = read_json(tmp_path / "a.json")
    assert trained == [1.0, 2.0, 3.0, 3.0] and made["chosen"] == {"lr": 2.0} and set(made["seeds"]) == {"0"}
    trainings.run_case(tmp_path, case, 1, sources, lambda text: None)
    assert trained[-1] == 2.0 and len(trained) == 5  # other seeds take the chosen rate


def test_choices_are_made_one_after_the_other_and_none_is_trained_twice(tmp_path, monkeypatch):
    """T is chosen at the first rate and rank, then the rate at that T, then rank and alpha together."""
    trained = []

    class Made:
        config = {}

        def __init__(self, folder):
            self.folder = folder

    def train(method, out, seed, task, resume, device, lr, temperature, rank, alpha):
        trained.append((lr, temperature, rank, alpha))
        out.mkdir(parents=True)
        score = (temperature == 10.0) + ((rank, alpha) == narrow) - abs(np.log2(lr / 4.0)) / 2
        (out / "metrics.json").write_text(json.dumps({"per_exit_accuracy": [score]}))
        return Made(out)

    def measured(run, *arguments):
        return {"full": read_json(run.folder / "metrics.json")["per_exit_accuracy"][0]}, {}

    monkeypatch.setattr(trainings, "train", train)
    monkeypatch.setattr(trainings, "load_run", Made)
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", measured)
    wide, narrow = (64, 128.0), (8, 16.0)
    choices = {
        "T": {"choose": [{"temperature": 2.0}, {"temperature": 10.0}, {"temperature": 20.0}]},
        "lr": {"choose": [4.0, 2.0, 8.0]},
        "size": {"choose": [{"rank": rank, "alpha": alpha} for rank, alpha in (wide, narrow)]},
    }
    case = Case("a", "rows", {"method": "lora-exits", "task": "reviews"} | choices)
    trainings.run_case(tmp_path, case, 0, trainings.Sources(tmp_path, tmp_path), lambda text: None)
    assert trained[:3] == [(4.0, T, *wide) for T in (2.0, 10.0, 20.0)]
    assert trained[3:] == [(2.0, 10.0, *wide), (8.0, 10.0, *wide), (4.0, 10.0, *narrow)]
    made = read_json(tmp_path / "a.json")
    assert made["seeds"]["0"]["figures"]["full"] == 2.0  # the best of the tried runs is not trained again
    assert made["chosen"] == {"temperature": 10.0, "lr": 4.0, "rank": 8, "alpha": 16.0}
    names = ("lr", "temperature", "rank", "alpha")
    assert [tuple(trial[name] for name in names) for trial in made["tried"]] == trained


@pytest.mark.parametrize(
    "best, tried",
    [
        (2.0, [1.0, 2.0, 4.0]),
        (4.0, [1.0, 2.0, 4.0, 8.0]),
        (8.0, [1.0, 2.0, 4.0, 8.0, 16.0]),
        (0.5, [1.0, 2.0, 4.0, 0.5, 0.25]),
    ],
)
def test_while_the_best_value_is_at_an_end_one_beyond_it_is_tried(best, tried):
    scores = {}
    while value := trainings.next_to_try([1.0, 2.0, 4.0], scores):
        scores[value] = -abs(np.log(value / best))
    assert [*scores] == tried


def test_what_was_made_with_other_settings_or_another_reference_is_not_taken(tmp_path, monkeypatch):
    """A run that was stopped before it was measured, and then the recipe changed; a reference that was made anew."""
    trained = []

    class Made:
        config = {}

    def train(method, out, seed, **options):
        out.mkdir(parents=True)
        trained.append(options["epochs"])
        return Made()

    def measured(run, task, reference):
        return recorded({"full": 0.5 + len(trained) / 10} | ({"reference": reference["full"]} if reference else {}))

    monkeypatch.setattr(trainings, "train", train)
    sources, say = trainings.Sources(tmp_path, tmp_path), lambda text: None
    with monkeypatch.context() as patch:
        patch.setitem(trainings.MEASUREMENTS, "rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainings.run_case(tmp_path, Case("a", "rows", {"method": "joint", "epochs": 1}), 0, sources, say)
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", measured)
    first = Case("a", "rows", {"method": "joint", "epochs": 6})
    second = Case("b", "rows", {"method": "joint", "epochs": 2}, reference="a")
    for case in (first, second):
        trainings.run_case(tmp_path, case, 0, sources, say)
        assert trainings.is_done(tmp_path, case, 0)
    assert trained == [1, 6, 2]
    trainings.file_of(tmp_path, "a").unlink()
    trainings.run_case(tmp_path, first, 0, sources, say)
    assert not trainings.is_done(tmp_path, second, 0)
    trainings.run_case(tmp_path, second, 0, sources, say)
    assert trained == [1, 6, 2, 6, 2] and trainings.is_done(tmp_path, second, 0)


def test_a_score_that_was_rounded_for_json_is_reached_by_as_many_right_rows_and_by_no_row_less():
    for rows in (2452, 2500):
        for right in range(1, rows + 1):
            least = trainings._short(right / rows) - measures.ROUNDING
            assert (right - 1) / rows < least <= right / rows


def test_writing_has_no_figure_for_shares_that_its_curve_does_not_reach(monkeypatch):
    curve = [{"layers_saved": 0.0, "rouge_l": 1.0}, {"layers_saved": 0.2, "rouge_l": 0.6}]
    row = {"measure": "gap", "rouge_l": 0.7, "layers_saved": 0.15, "curve": curve}
    monkeypatch.setattr(measures, "compare_tokens", lambda *_: {"rows": [{"rouge_l_reference": 0.5}, row]})
    figures, _ = measures.of_writing(SimpleNamespace(config={"seed": 0}), None, None)
    assert figures["Rouge-L at 10% saved"] == pytest.approx(0.8) and figures["Rouge-L at 20% saved"] == 0.6
    assert "Rouge-L at 30% saved" not in figures


def test_the_guarantee_of_epsilon_is_that_of_each_head_that_decides_a_token(monkeypatch):
    row = dict.fromkeys(("end_to_end", "layers_saved", "decoded_agreement", "speedup", "decoded_layers"), 0.5)
    rows = [row | {"agreement": [0.9, None, 0.8], "exit_counts": [1, 0, 1, 2]} for _ in EPSILONS]
    monkeypatch.setattr(measures, "_training_of_heads", lambda *_: ({}, {}))
    monkeypatch.setattr(measures, "sweep", lambda *_: {"rows": rows, "measures": []})
    figures, _ = measures.of_tokens_over_epsilon(SimpleNamespace(config={"seed": 0}, exits=(1, 2, 3, 4)), None, None)
    heads = {name: share for name, share in figures.items() if name.startswith("head") and name.endswith(" .95")}
    assert heads == {"head 1 at epsilon .95": 0.9, "head 3 at epsilon .95": 0.8}


@pytest.mark.parametrize(("held", "ran"), [("reviews joint", 0), ("reviews two-stage", 1)])
def test_processes_share_the_cases(tiny, monkeypatch, capsys, held, ran):
    """What another process holds is left to it, and what is compared with that; the rest is run."""
    trained = only_counted(monkeypatch)
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1", "--json"]
    stale = trainings.file_of(tiny / "raee", "reviews joint")  # of older settings: nothing is compared with that
    stale.parent.mkdir(parents=True)
    write_json(stale, {"options": {}, "seeds": {"0": MADE | {"figures": {"full": 0.1}}}})
    with sole_writer(trainings.file_of(tiny / "raee", held)):
        assert main(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ran"] == len(trained) == ran
    assert f"{2 - ran} trainings are left to other processes" in printed.err
    assert main(command) == 0 and len(trained) == 2 and "are left" not in capsys.readouterr().err


@pytest.mark.parametrize("deleted", ["joint", "two-stage"])
def test_a_deleted_record_has_its_run_made_again_and_no_other(tiny, monkeypatch, deleted):
    """Both runs have the same outputs, so the record of two-stage training names that of joint training. It is found
    again when joint training was run.
    """
    trained = only_counted(monkeypatch)
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1"]
    assert main(command) == main(command) == 0 and trained == ["joint", "two-stage"]
    trainings.record_of(tiny / "raee", f"reviews {deleted}").unlink()
    assert main(command) == main(command) == 0 and trained[2:] == [deleted]


def test_figures_are_those_of_the_same_settings_and_text_and_have_a_checksum(tmp_path):
    case = Case("a", "writing", {"method": "calm", "epochs": 1}, reads="old.txt")
    made = read_case(tmp_path, case) | {"seeds": {"0": MADE}}
    (tmp_path / "a.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match="a.json: damaged or edited: the checksum that was written with it is gone"):
        read_case(tmp_path, case)
    write_json(tmp_path / "a.json", made)
    assert read_case(tmp_path, case)["seeds"] == {"0": MADE}
    for other in ({"options": {"method": "calm", "epochs": 2}}, {"reads": "new.txt"}):
        assert read_case(tmp_path, case._replace(**other))["seeds"] == {}


def test_sources_that_are_not_there_are_one_line(tmp_path, capsys):
    assert main(["reproduce", "lora-exits", "--sources", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert "no such file or folder; give --sources a folder with weights/ and data/" in line and line.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["README.md", "raee.md"])
def test_a_file_of_anothers_stays(tiny, capsys, name):
    tiny.mkdir()
    (tiny / name).write_text("# My notes\n")
    assert main(["reproduce", "raee", "--out", str(tiny), "--seeds", "1"]) == 2
    assert f"{name}: expected a page of `mini-ee reproduce`" in capsys.readouterr().err
    assert [path.name for path in tiny.iterdir()] == [name] and (tiny / name).read_text() == "# My notes\n"


def test_a_reference_that_is_made_anew_has_its_dependents_measured_anew_in_the_same_call(tiny, monkeypatch, capsys):
    made = []

    def measured(run, task, reference):
        made.append(reference)
        figures = {"full": 0.5, "hold-out full": len(made) / 10}  # as many right of the test, others of the hold-out
        counted = {"reference": 0.5, "reference hold-out": reference["hold-out full"]} if reference else {}
        return recorded(figures | counted)

    monkeypatch.setattr(
        trainings, "trained", lambda folder, *_: folder.mkdir(parents=True) or SimpleNamespace(config={})
    )
    monkeypatch.setattr(trainings, "_chosen", lambda *arguments: {})
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", measured)
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1", "--json"]
    assert main(command) == 0 and len(made) == 2
    trainings.file_of(tiny / "raee", "reviews joint").unlink()
    capsys.readouterr()
    assert main(command) == 0 and json.loads(capsys.readouterr().out)["ran"] == 2
    assert [full and full["hold-out full"] for full in made] == [None, 0.1, None, 0.3]
    assert main([*command[:-2], "2", "--json"]) == 0  # the second seed is counted from the reference's second
    assert made[5]["hold-out full"] == 0.5


def test_runs_are_trained_and_read_on_the_named_device_and_its_gpu_is_recorded(tiny, monkeypatch):
    trained_on, read_on = [], []
    model = SimpleNamespace(to=read_on.append)

    def train(method, out, device, **options):
        trained_on.append(device)
        out.mkdir(parents=True)
        return SimpleNamespace(config={}, model=model)

    monkeypatch.setattr(trainings, "train", train)
    monkeypatch.setattr(trainings, "_chosen", lambda *arguments: {})
    monkeypatch.setattr(trainings, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the card {device}")
    monkeypatch.setitem(
        trainings.MEASUREMENTS, "rows", lambda *arguments: recorded({"full": 0.5, "hold-out full": 0.5})
    )
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1"]
    assert main([*command, "--device", "cuda:1"]) == 0
    assert trained_on == read_on == ["cuda:1", "cuda:1"]
    made = [read_json(path)["seeds"]["0"]["how"] for path in (tiny / "raee").glob("*.json")]
    assert [entry["gpu"] for entry in made] == ["the card cuda:1"] * 2
    assert [run["gpu"] for run in csv.DictReader((tiny / "raee" / "runs.csv").read_text().splitlines())] == [
        "the card cuda:1"
    ] * 2
    shutil.rmtree(tiny / "raee")
    assert main(command) == 0 and trained_on[2:] == ["cpu", "cpu"] and len(read_on) == 2
    assert "gpu" not in read_json(next((tiny / "raee").glob("*.json")))["seeds"]["0"]["how"]
    assert "on a GPU" not in (tiny / "raee.md").read_text()


def test_cases_that_need_a_gpu_are_left_out_without_one_and_use_it_also_if_others_are_trained_on_the_cpu(
    tiny, monkeypatch, capsys
):
    (experiment,) = TINY["experiments"]
    streams = {"name": "streams", "axes": {}, "measure": measures.ON_A_GPU, "options": {"task": "reviews"}}
    claim = {"name": "one", "text": "One", "paper": "", "compare": [{"more": "streams", "than": 0.1, "figure": "full"}]}
    own_recipe = TINY | {"experiments": [experiment, streams], "claims": [*TINY["claims"], claim]}
    (tiny.parent / "raee.json").write_text(json.dumps(own_recipe))
    ran = []
    monkeypatch.setattr(reproduce, "is_done", lambda folder, case, seed: (case.name, seed) in ran)
    monkeypatch.setattr(reproduce, "run_case", lambda folder, case, seed, *rest: ran.append((case.name, seed)))
    command = ["reproduce", "raee", "--out", str(tiny), "--seeds", "1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command) == 0 and "1 of 3 cases need a GPU and are left out: streams." in capsys.readouterr().out
    assert ran == [("reviews joint", 0), ("reviews two-stage", 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(command) == 0 and ran[2:] == [("streams", 0)]
    used = []
    monkeypatch.setattr(
        trainings, "trained", lambda *arguments: SimpleNamespace(config={}, model=SimpleNamespace(to=used.append))
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the card {device}")
    monkeypatch.setitem(trainings.MEASUREMENTS, measures.ON_A_GPU, lambda *arguments: ({}, {}))
    case = Case("streams", measures.ON_A_GPU, {"task": "reviews"})
    (tmp := tiny / "raee" / "runs" / "streams" / trainings.json_sha256(case.options)[:12] / "0").mkdir(parents=True)
    trainings.run_case(tiny / "raee", case, 0, trainings.Sources(tiny, tiny), lambda text: None)
    made = read_json(tiny / "raee" / "streams.json")["seeds"]["0"]["how"]
    assert used == ["cuda"] and made["gpu"] == "the card cuda" and not tmp.exists()


@pytest.mark.parametrize("paper", ["raee", "leaderboard"])
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_written(paper, tmp_path, capsys):
    assert main(["reproduce", paper, "--quick", "--out", str(tmp_path / "out"), "--device", "tpu"]) == 2
    assert "--device tpu: cannot be used here (expected cpu, cuda or cuda:N); use cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_values_are_tried_with_one_seed_and_one_that_diverges_is_the_worst(tmp_path, monkeypatch):
    tried = []

    def train(folder, options, seed, sources):
        tried.append((options["lr"], seed))
        if len(tried) == 2:
            raise KeyboardInterrupt
        if options["lr"] == 4.0:
            raise Diverged("the loss became nan")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps({"per_exit_accuracy": [1 / options["lr"]]}))
        return SimpleNamespace(config={}, folder=folder)

    monkeypatch.setattr(trainings, "trained", train)
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", lambda run, task, reference: ({}, {}))
    case = Case("a", "rows", {"task": "reviews", "lr": {"choose": [2.0, 4.0, 1.0]}})
    sources = trainings.Sources(tmp_path, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainings.run_case(tmp_path, case, 0, sources, print)
    monkeypatch.setattr(
        trainings, "next_to_try", lambda values, scores: next((v for v in values if v not in scores), 0)
    )
    trainings.run_case(tmp_path, case, 1, sources, print)
    assert tried == [(2.0, 0), (4.0, 0), (2.0, 1), (4.0, 1), (1.0, 1), (1.0, 1)]
    made = read_json(tmp_path / "a.json")
    assert made["tried"][1] == {"lr": 4.0, "hold-out": 0.0} and made["chosen"] == {"lr": 1.0}


def test_sentences_for_sst2_are_sst5s_without_its_neutral_ones(tmp_path):
    for name, rows in (
        ("SST-5/train", ["bad\t0", "poor\t1", "so so\t2", "good\t3", "great\t4"]),
        ("SST-2/dev", ["fine\t1"]),
    ):
        path = tmp_path / "data" / f"{name}.tsv"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(["sentence\tlabel", *rows, ""]))
    folder = trainings.Sources(tmp_path, tmp_path / "made").find("data", "SST-2 sentences")
    assert folder.name == "SST-2"
    assert (folder / "train.tsv").read_text() == "sentence\tlabel\nbad\t0\npoor\t0\ngood\t1\ngreat\t1\n"
    assert (folder / "dev.tsv").read_text() == "sentence\tlabel\nfine\t1\n"
    shutil.rmtree(tmp_path / "made")  # several processes that start together: all find what one makes
    with ThreadPoolExecutor(4) as pool:
        sources = [trainings.Sources(tmp_path, tmp_path / "made") for _ in range(4)]
        assert set(pool.map(lambda source: source.find("data", "SST-2 sentences"), sources)) == {folder}


# ---- What is committed ----


@pytest.mark.parametrize("paper", PAGES)
def test_the_command_runs_what_a_page_shows_and_no_more(paper):
    of_paper, data = committed(paper)
    cases = cases_of(of_paper)
    seeds_of = {name: sorted(map(int, data.records[name]["seeds"])) for name in data.trained}
    assert seeds_of == {name: [*range(case.seeds or LEAST_SEEDS)] for name, case in data.trained.items()}
    assert len([*(RESULTS / paper).glob("*.json")]) == len(data.trained)
    assert all(trainings.is_done(RESULTS / paper, cases[name], seed) for name in seeds_of for seed in seeds_of[name])


@pytest.mark.parametrize("paper", PAGES)
def test_a_page_shows_what_its_json_contains(paper):
    for path, text in pages_of(paper, load_recipe(paper), RESULTS).items():
        assert text == (RESULTS / path).read_text(), f"write {path} anew: {recipe.command_of(paper)}"


@pytest.mark.parametrize("paper", PAGES)
def test_a_page_without_runs_shows_that_none_was_run(paper, tmp_path):
    """It is written after the first case of a fresh folder, when all others are missing."""
    for path, text in pages_of(paper, load_recipe(paper), tmp_path).items():
        assert "nan" not in text and ("not run" in text or path.endswith("runs.csv")), path


@pytest.mark.parametrize("paper", PAPERS)
def test_a_first_page_is_short(paper):
    text = (RESULTS / f"{paper}.md").read_text()
    assert 400 <= len(text.split()) <= 900 and text.count("\n![") == 1 and "not run" not in text


def test_a_figure_without_a_record_is_an_error():
    _, data = committed("raee")
    with pytest.raises(WrongArguments, match="no experiment of the recipe makes the case 'TREC'"):
        mean_of(data, "TREC", "full")
    with pytest.raises(WrongArguments, match="the records of 'TREC deebert' have no figure 'speed'"):
        mean_of(data, "TREC deebert", "speed")


@pytest.mark.parametrize("paper", PAPERS)
def test_the_papers_size_is_the_difference_of_the_numbers_that_are_printed(paper):
    """Percentages and, with an x, speed-ups, both printed with fewer digits."""
    for claim in load_recipe(paper)["claims"]:
        for compare in claim.get("compare", []):
            size, pair = compare.get("size"), re.match(r"([\d.]+)[%x]? → ([\d.]+)(x?)", compare.get("reported", ""))
            if size is not None and pair:
                scale = 1 if pair[3] else 100
                assert size * scale == pytest.approx(float(pair[2]) - float(pair[1]), abs=0.11 if scale > 1 else 0.011)
                assert size > compare.get("by", 0), claim["name"]


def test_a_model_for_each_exit_is_measured_as_exits_are(tmp_path, checkpoint_folder, task_folder):
    run = train("multi-model", checkpoint_folder, task_folder, tmp_path / "run", exits=(1, 2, 3), epochs=1)
    figures, *_ = measures.of_rows(run, load_task(task_folder), None)
    assert 0 < figures["full"] <= 1 and "policy saved" not in figures


def draw_weights(run):
    """So that exits say different things."""
    torch.manual_seed(0)
    for name, parameter in run.model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.3)


@pytest.mark.parametrize("is_reference", [True, False])
def test_rules_are_chosen_on_rows_that_were_not_trained_on_and_figures_are_of_the_reported_split(
    tmp_path, monkeypatch, checkpoint_folder, task_folder, is_reference
):
    """A loss is counted from the full model's own score on those rows, or from that of another model."""
    task, given = load_task(task_folder), {"exits": (1, 2, 3), "max_train": 30, "epochs": 1}
    run = train("joint", checkpoint_folder, task_folder, tmp_path / "run", **given)
    draw_weights(run)
    fitted, every, dev = split_rows(task, 0, 30).train, task.split("train"), task.split("dev")
    others = every.take(np.array([text not in fitted.texts for text in every.texts]))
    on_others, on_dev, on_fitted = (record(run.segments(), run.encode(rows.texts), 8) for rows in (others, dev, fitted))
    points = row_evaluation.curve(on_others, [Never(), *sweep(Threshold(math.inf))(on_others)], task, others.labels)
    full, there = (exit_scores(some, task, rows.labels)[-1] for some, rows in ((on_others, others), (on_dev, dev)))
    least = full if is_reference else max(point["score"] for point in points)
    monkeypatch.setattr(measures, "measure_seconds", lambda runs, *_, **more: [1.0] * len(runs))
    figures, lists, made = measures.of_rows(run, task, None if is_reference else {"full": 1.0, "hold-out full": least})
    assert figures["hold-out full"] == full != there == figures["full"]
    assert (figures["reference"], figures["reference hold-out"]) == (there if is_reference else 1.0, least)
    for name, loss in (("no loss", 0.0), ("one point", 0.01)):
        good = [point for point in points if point["score"] >= least - loss - measures.ROUNDING]
        rule = rule_from_dict(min(good, key=lambda point: point["flops_ratio"])["rule"])
        there = summary(on_dev.replay(rule), on_dev, task, dev.labels)
        assert (figures[f"score at {name}"], figures[f"saved at {name}"]) == (there["score"], there["layers_saved"])
        chosen_on = summary(on_others.replay(rule), on_others, task, others.labels)
        assert figures[f"hold-out saved at {name}"] == chosen_on["layers_saved"]
    scores = exit_scores(on_others, task, others.labels)
    assert [figures[f"hold-out score after {layer}"] for layer in run.exits] == list(scores)
    losses = [layer["loss"] for layer in row_evaluation.by_exit(on_fitted, np.zeros(len(fitted), int), fitted.labels)]
    assert [figures[f"loss after {layer}"] for layer in run.exits] == pytest.approx(losses)
    stored = write_record(tmp_path / "one.npz", 0, made)  # figures and curves come from it again, without the model
    for before, after in zip(made[:2], stored[:2]):  # measured on float16 numbers, as they are read back
        assert np.array_equal(before.logits, after.logits) and np.array_equal(before.labels, after.labels)
    for name, rule in stored.about["rules"].items():
        again = summary(stored.reported.replay(rule_from_dict(rule)), stored.reported, task, dev.labels)
        prefix, suffix = ("default ", "") if name == "default" else ("", f" {name}")
        assert figures[f"{prefix}score{suffix}"] == again["score"]
        assert figures[f"{prefix}saved{suffix}"] == again["layers_saved"]
    shares = {name: value for name, value in figures.items() if TEST_SHARE.fullmatch(name) and name != "majority"}
    assert shares.keys() >= {"full", "score after 1", "score at one point", "saved at no loss", "score at two thirds"}
    for name, value in shares.items():  # each example's own, of which the figure is the mean
        assert example_values(tmp_path / "one.npz", 0, name).mean() == pytest.approx(value, abs=1e-12), name
    rules = map(rule_from_dict, stored.about["curve"])
    again = [summary(stored.reported.replay(rule), stored.reported, task, dev.labels) for rule in rules]
    assert lists["curve score"] == [point["score"] for point in again] and len(again) > 2
    assert lists["curve saved"] == [point["layers_saved"] for point in again]


def test_savings_are_measured_on_the_reported_split_at_the_held_out_threshold(tmp_path, checkpoint_folder):
    folder = write_task(tmp_path / "words")
    run = train("joint", checkpoint_folder, folder, tmp_path / "run", exits=(1, 2, 3), max_train=30, epochs=1)
    draw_weights(run)
    task = load_task(folder)
    figures, _, made = measures.of_estimate(run, task, None)
    (fitted, held), dev = holdout(task.split("train"), 0), task.split("dev")
    some, others, there = (
        rounded(record(run.segments(), run.encode(rows.texts), 8)._replace(labels=rows.labels))
        for rows in (held, fitted, dev)
    )
    rules = [savings_estimate.threshold_at(observe(on)) for on in (some, others, there)]
    savings = [savings_estimate.savings_at(observe(there), rule, (1, 2, 3), Costs(0.0, 0.0)) for rule in rules]
    assert (figures["measured"], figures["agreement"]) == (savings[0].saved, savings[0].agreement)
    assert len({saving.saved for saving in savings}) == 3
    assert figures["full"] == exit_scores(there, task, dev.labels)[-1]
    stored = write_record(tmp_path / "one.npz", 0, made)  # the figures come from it again, without the model
    result = stored.reported.replay(rule_from_dict(stored.about["rules"]["at 95 % agreement"]))
    assert 1 - result.cost.depth.mean() / 3 == pytest.approx(figures["measured"])
    agrees = result.logits.argmax(axis=1) == stored.reported.predictions[:, -1]
    assert agrees.mean() == pytest.approx(figures["agreement"])
    assert example_values(tmp_path / "one.npz", 0, "full").mean() == pytest.approx(figures["full"])


@pytest.mark.parametrize("method", ["multi-model", "lora-exits"])
def test_if_no_example_exits_early_the_model_without_exits_is_timed(
    tmp_path, monkeypatch, checkpoint_folder, task_folder, method
):
    run = train(method, checkpoint_folder, task_folder, tmp_path / "run", exits=(1, 2, 3), epochs=1)
    monkeypatch.setattr(measures, "rules_of", lambda run, on, task: [Never()])
    timed = []
    monkeypatch.setattr(measures, "measure_seconds", lambda runs, *_, **more: timed.extend(runs) or [1.0] * len(runs))
    figures, *_ = measures.of_rows(run, load_task(task_folder), None)
    assert figures["operations at one point"] == 1 and figures["saved at one point"] == 0
    assert {segments.exits for segments, *_ in timed} == {(3,)}


def test_a_band_is_the_mean_and_one_standard_deviation_over_seeds():
    """Of a figure of each setting, and of the points of a curve."""
    scores = [0.4, 0.7, 0.7]
    spread = statistics.stdev(scores)
    seeds = {
        str(seed): MADE | {"figures": {"score": score}, "lists": {"x": [0.0, 1.0], "y": [0.0, score]}}
        for seed, score in enumerate(scores)
    }
    data = PageData({}, {"k 4": {"seeds": seeds}})
    (x, *band), *others = zip(*pictures._over({"case": "k {}", "over": ["4"], "y": "score"}, data))
    assert (x, others) == (4.0, []) and band == pytest.approx([0.6, 0.6 - spread, 0.6 + spread])
    grid, *curves = pictures._lists({"case": "k 4", "x": "x", "y": "y"}, data)
    assert grid[-1] == 1 and [curve[-1] for curve in curves] == pytest.approx([0.6, 0.6 - spread, 0.6 + spread])


@pytest.mark.parametrize("name", ["joint", "a decoder of some length, heads from scratch, lambda .95"])
def test_a_pictures_legend_is_inside_it(tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure))
    lists = {"x": [0.0, 1.0], "y": [0.5, 0.7]}
    series = {f"{name} {number}": {"case": "one", "x": "x", "y": "y"} for number in range(4)}
    data = SimpleNamespace(records={"one": {"seeds": {"0": {"lists": lists}}}})
    pictures.draw(tmp_path / "fig.png", {"x": "saved", "y": "score", "series": series}, data)
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,) = figure.legends
    inside = legend.get_window_extent()
    assert 0 <= inside.x0 and inside.x1 <= figure.bbox.width and len(legend.get_texts()) == 4


def test_a_picture_has_a_panel_for_each_series_next_to_another_or_for_each_of_its_panels():
    series = {name: {"case": f"{{task}} {name}"} for name in "abc"}
    pairs = panels_of({"series": series, "against": "b"})
    assert [(panel["panel"], [*panel["series"]]) for panel in pairs] == [("a", ["b", "a"]), ("c", ["b", "c"])]
    first, second = panels_of({"series": series, "y": "up", "panels": [{"with": {"task": "T"}}, {"y": "down"}]})
    assert first["series"]["a"] == {"case": "{task} a", "task": "T"} and (first["y"], second["y"]) == ("up", "down")
    assert second["series"] == series


def test_the_overview_shows_what_the_records_contain(few_candidates, monkeypatch):
    monkeypatch.setattr(default_rule, "CANDIDATES", few_candidates)
    figures = overview_figures(RESULTS, False)
    for name in reproduce.OVERVIEW:
        assert page_of(name, figures) == (RESULTS / f"{name}.md").read_text(), (
            "write it anew: mini-ee reproduce lora-exits"
        )


@pytest.mark.parametrize(
    ("share", "other"),
    [("score after 2", "loss after 2"), ("full", "full perplexity"), ("saved at .9", "speed-up at epsilon .8")]
    + [("kNN votes weighted", "layers k 2"), ("oracle", "oracle layers"), ("end to end at epsilon .5", "SGMV, 2 rows")],
)
def test_only_shares_are_in_percent(share, other):
    assert is_share(share) and not is_share(other)


def test_the_papers_columns_stand_next_to_ours_if_they_are_joined():
    data = PageData(
        cases_of(TINY), {name: {"seeds": {"0": MADE | {"figures": {"full": 0.5}}}} for name in cases_of(TINY)}
    )
    (table,) = TINY["tables"]
    lines = table_text(table | {"join": True}, data).splitlines()
    assert "| ours | full | saved | the paper: full |" in lines
    assert "| joint | 50.0 | none | 50.0 |" in lines and "| two-stage | 50.0 | none |  |" in lines


def test_dots_are_means_in_percent_and_stacked_bars_add_up(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure))
    seeds = {"0": {"figures": {"full": 0.4, "leave 1": 0.3, "leave 2": 0.7}}, "1": {"figures": {"full": 0.6}}}
    data = PageData({}, {"T one": {"seeds": seeds}, "T two": {"seeds": {}}})
    picture = {"x": "x", "y": "y", "level": {"case": "T one", "figure": "full", "name": "full model"}}
    rows, dot = {"one": {"of": "one"}, "two": {"of": "two"}}, {"case": "T {of}", "figure": "full"}
    pictures.draw(tmp_path / "dots.png", picture | {"kind": "dots", "rows": rows, "series": {"RAEE": dot}}, data)
    parts = {f"layer {k}": {"case": "T one", "over": [".5"], "y": f"leave {k}"} for k in (1, 2)}
    pictures.draw(tmp_path / "bars.png", picture | {"kind": "stacked", "series": parts}, data)
    (dots,), (bars,) = (figure.axes for figure in drawn)
    ((x,), (y,)) = dots.containers[0].lines[0].get_data()
    assert (x, y) == (pytest.approx(50), 0) and [text.get_text() for text in dots.get_yticklabels()] == ["one", "two"]
    assert [(bar.get_y(), bar.get_height()) for bar in bars.patches] == [(0, 0.3), (0.3, 0.7)]
    assert [text.get_text() for text in bars.texts] == ["full model"] and bars.lines[0].get_ydata()[0] == pytest.approx(
        0.5
    )


def test_each_claim_has_a_square_in_the_colour_of_its_verdict(tmp_path, monkeypatch):
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure))
    verdicts = [HOLDS, FAILS, EXCLUDED, UNDECIDED, UNTESTED, MISSING, HOLDS]
    claims = [Claim(k, f"claim {k}", {"control": k == 1}, verdict, [], [], "") for k, verdict in enumerate(verdicts)]
    pictures.draw_verdicts(tmp_path / "verdicts.png", {"Paper": claims})
    (axes,) = drawn[0].axes
    colours = [to_hex(square.get_facecolor()) for square in axes.patches]
    assert colours == [pictures.VERDICT_COLOURS[verdict] for k, verdict in enumerate(verdicts) if k != 1]
    names = [text.get_text() for text in axes.texts]
    assert names == ["Paper", *(f"claim {k}" for k in (0, 2, 3, 4, 5, 6))]
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == [HOLDS, EXCLUDED, UNDECIDED, UNTESTED, MISSING]


@pytest.mark.parametrize(
    "difference, half, shown",
    [
        (0.009, 0.0093, "+0.9 (-0.03 to +1.8)"),
        (0.005, 0.0046, "+0.5 (+0.04 to +1.0)"),
        (0.02, 0.01, "+2.0 (+1.0 to +3.0)"),
    ],
)
def test_a_bound_that_rounds_to_0_shows_its_sign_which_can_decide_a_verdict(difference, half, shown, monkeypatch):
    monkeypatch.setattr(Compared, "half_width", lambda comparison, level=0.05: half)
    assert result_page._interval(Compared(0.5, 0.5 - difference, difference), "score") == shown


def test_the_papers_numbers_stand_beside_ours_in_points(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure))
    ours = Compared(0.6, 0.5, 0.1, spread=0.01, seeds=5, size=0.25)
    claims = [
        Claim(1, "more", {}, HOLDS, [], [], "", [("more: 1 → 2", ours)] * 2),
        Claim(2, "no number", {}, FAILS, [], [], ""),
    ]
    pictures.draw_sizes(tmp_path / "sizes.png", {"Paper": claims})
    (axes,) = drawn[0].axes
    zero, theirs, here = axes.lines[:3]
    assert [*theirs.get_xdata()] == [25] and [*here.get_xdata()] == [pytest.approx(10)]
    (bar,) = axes.collections[0].get_segments()
    assert [bar[0][0], bar[1][0]] == [pytest.approx(100 * ours.low), pytest.approx(100 * ours.high)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Paper, more: 1 → 2"]
    pictures.draw_sizes(tmp_path / "none.png", {"Paper": claims[1:]})
    assert len(drawn) == 1


def test_a_claim_whose_cases_were_not_all_run_shows_which_were(tmp_path):
    cases = cases_of(TINY)
    name = "reviews joint"
    made = MADE | {"figures": {"full": 0.75}, "data": {"reviews": "abc"}, "test_rows": 0}
    made_before = {"case": name, "measure": "rows", "options": cases[name].options, "seeds": dict.fromkeys("012", made)}
    write_json(trainings.file_of(tmp_path, name), made_before)
    compare = [
        {"more": "reviews two-stage", "than": 0.1, "figure": "full"},
        {"more": name, "than": 0.5, "figure": "full", "exact": True},
    ]
    claims = [{"name": "both", "text": "Both", "paper": "-", "compare": compare}]
    (claim,) = figures_of(TINY | {"claims": claims}, read_data(tmp_path, TINY))["claims"]
    assert claim.verdict == MISSING
    assert claim.compared[0][1:] == ["not run", "not run", "not run", "–", 0, "not run"]
    assert claim.compared[1] == ["full: reviews joint, against a number", "75.0%", "50.0%", "+25.0", "–", 3, "above"]


def test_a_row_ends_with_the_verdict_of_another_page_if_it_names_one(tmp_path, monkeypatch):
    name = "reviews joint"
    exact = {"more": name, "than": 0.5, "figure": "full", "exact": True}
    compare = [exact, exact | {"than": 0.1}]
    both = TINY | {"claims": [{"name": "one", "text": "One", "paper": "-", "compare": compare}]}
    for page, full in (("larger", 0.75), ("small", 0.25)):
        made = MADE | {"figures": {"full": full}, "data": {"reviews": "abc"}, "test_rows": 0}
        case = {"case": name, "measure": "rows", "options": cases_of(TINY)[name].options}
        (tmp_path / page).mkdir()
        write_json(trainings.file_of(tmp_path / page, name), case | {"seeds": dict.fromkeys("012", made)})
    monkeypatch.setattr(result_page, "load_recipe", lambda page: both)
    row = figures_of(both, read_data(tmp_path / "larger", both))["row"]
    assert row("One", "one") == "| One | – | 75.0% | **holds** |"
    assert row("One", "one", other=("small", "one")) == "| One | – | 75.0% | **holds** | fails |"
    assert row("One", "one", 0, ("small", "one", 0)) == "| One | – | 75.0% | **holds** | fails |"
    assert row("One", "one", 1, ("small", "one", 1)) == "| One | – | 75.0% | **holds** | holds |"
    assert row("One", "one", other=("none", "one")) == "| One | – | 75.0% | **holds** | open |"


def test_quick_is_refused_for_a_page_without_a_small_version(tmp_path, capsys):
    assert main(["reproduce", "larger-models", "--quick", "--out", str(tmp_path / "out")]) == 2
    quick = "--quick is for lora-exits, self-supervised, raee, consistent; leave it out for larger-models"
    assert quick in capsys.readouterr().err and not (tmp_path / "out").exists()
