"""`mini-ee reproduce leaderboard`: what is trained, resumption, shared trainings, and rules replayed from records."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import WORDS, refused, write_task

from mini_ee.experiments import leaderboard
from mini_ee.experiments import trainings as experiment_trainings
from mini_ee.experiments.leaderboard import decoders, figures, protocol, runs
from mini_ee.experiments.records import SeedRecord, read_records, write_record
from mini_ee.experiments.trainings import Sources
from mini_ee.lab import registry
from mini_ee.lab.backbones.hub import BUILT_IN_MODEL, load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, sole_writer, write_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.data.tokenizer import Tokenizer, batches
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.comparison import method_rules
from mini_ee.lab.recording import record
from mini_ee.lab.training import method
from mini_ee.lab.training.loop import Diverged
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import build_model, encode
from mini_ee.lab.training.train_run import exits_of, make_request, train

pytestmark = pytest.mark.slow
FEW = ("joint", "pabee", "pcee-bert", "sweet", "raee")  # each plan looks at all methods
EXAM = protocol.Exam("words", "words", "tiny", 30, 2, (1.0,), timed_rows=4)
OWN = '''"""Own: joint training, with a threshold on the entropy."""
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import joint_stage

METHOD = Method(
    recipe=lambda model, config: [joint_stage(model, name="own")],
    candidates=sweep(Threshold(-0.3, "entropy")),
    classes_only=True,
)
'''


PLANS = {}
"""What `protocol._planned` found: it is the same in all tests, and each command plans the training of every method."""


@pytest.fixture
def board(tmp_path, checkpoint_folder, monkeypatch):
    """A command on one tiny exam, the folder of its results, and the trainings that it has begun."""
    (tmp_path / "data").mkdir()
    shutil.copytree(checkpoint_folder, tmp_path / "weights" / "tiny")
    write_task(tmp_path / "data" / "words", 50)
    monkeypatch.setattr(protocol, "EXAMS", (EXAM,))
    monkeypatch.setattr(decoders, "EXAMS", ())
    monkeypatch.setattr(registry, "METHODS", {name: registry.METHODS[name] for name in FEW})
    monkeypatch.setattr(protocol, "SPARSE", {})
    plan = protocol._planned
    monkeypatch.setattr(
        protocol, "_planned", lambda *given: PLANS.get(given[:2]) or PLANS.setdefault(given[:2], plan(*given))
    )
    monkeypatch.setattr(leaderboard, "write_page", lambda out, quick: out / "leaderboard.md")
    begun, real = [], runs.trained

    def spied(folder, options, seed, sources):
        if not folder.exists():
            begun.append((options["method"], options["lr"], seed))
        return real(folder, options, seed, sources)

    monkeypatch.setattr(runs, "trained", spied)
    places = ["--sources", str(tmp_path), "--out", str(tmp_path / "out")]

    def run(*argv):
        begun.clear()
        return main(["reproduce", "leaderboard", *argv, *places])

    folders = {"sources": tmp_path, "out": tmp_path / "out"}
    return SimpleNamespace(run=run, out=tmp_path / "out", begun=begun, places=places, folders=folders)


@pytest.fixture
def two_rates(monkeypatch):
    monkeypatch.setattr(protocol, "EXAMS", (EXAM._replace(factors=(1.0, 2.0)),))


def test_rates_are_chosen_with_two_seeds_and_the_third_seed_has_the_chosen_one(board, two_rates):
    assert board.run("--only", "joint", "--seeds", "3") == 0
    assert board.begun[:4] == [("joint", lr, seed) for seed in (0, 1) for lr in (5e-5, 1e-4)]
    state = read_json(board.out / "leaderboard/words/joint.json")
    scores = {(trial["factor"], trial["seed"]): trial["score"] for trial in state["tried"]}
    assert state["factor"] == searched(lambda *trial: scores[trial])[0]
    assert board.begun[len(scores) :] == [("joint", 5e-5 * state["factor"], 2)]
    records = read_records(board.out / "records/words/joint.npz")
    assert [*records] == [0, 1, 2] and not (board.out / "leaderboard/runs").exists()
    metadata = records[2].about
    assert metadata["rates"]["lr"] == 5e-5 * state["factor"] and "gpu" not in state["tried"][0]
    assert metadata["settings"]["epochs"] == 2 and metadata["settings"]["exits"] == [1, 2, 3]
    assert (
        metadata["training"]["seconds"] > 0 and metadata["megabytes_added"] > 0 and metadata["one_point"]["speedup"] > 0
    )
    assert len(records[0].reported.logits) == 50 and metadata["held_out"]["selection"] == 3


def test_a_search_with_another_measure_is_done_again(board, two_rates):
    board.run("--only", "sweet", "--seeds", "2")
    path = board.out / "leaderboard/words/sweet.json"
    state = read_json(path)
    write_json(path, state | {"settings": state["settings"] | {"chosen_by": "mean accuracy"}})
    (board.out / "records/words/sweet.npz").unlink()
    board.run("--only", "sweet", "--seeds", "2")
    assert len(board.begun) == len(state["tried"]) and read_json(path)["settings"] == state["settings"]


def test_the_score_of_a_rate_is_held_out_accuracy_with_half_of_the_flops(board, two_rates):
    board.run("--only", "joint", "--seeds", "2")
    state = read_json(board.out / "leaderboard/words/joint.json")
    for seed, seed_record in read_records(board.out / "records/words/joint.npz").items():
        held, full, best = seed_record.held_out, seed_record.held_out.full_flops, 0.0
        for rule in method_rules("joint", held, replace(toy_task(), label_names=("a", "b"))):
            done = held.replay(rule)
            if (done.cost.flops / full).mean() <= 0.5:
                best = max(best, (done.logits.argmax(axis=1) == held.labels).mean())
        (score,) = (t["score"] for t in state["tried"] if (t["factor"], t["seed"]) == (state["factor"], seed))
        assert 0 < best == pytest.approx(score, abs=1e-5)


def searched(score):
    """The chosen factor and the trials of a search from 1 and 2, with seeds 0 and 1. score: of a factor and a seed."""
    tried = []
    while trial := runs.next_trial(tried, (1.0, 2.0), (0, 1)):
        tried.append({"factor": trial[0], "seed": trial[1], "score": score(*trial)})
    means = runs._means(tried)
    return max(means, key=means.get).factor, [(entry["factor"], entry["seed"]) for entry in tried[4:]]


@pytest.mark.parametrize(
    ("means", "gains", "chosen", "beyond"),
    [
        ({1: 0.5, 2: 0.6, 4: 0.5}, {}, 2, [4]),
        ({1: 0.5, 2: 0.6, 4: 0.7, 8: 0.2}, {}, 4, [4, 8]),
        ({1: 0.5, 2: 0.6, 4: 0.7, 8: 0.8, 16: 0.3}, {}, 8, [4, 8, 16]),
        ({1: 0.6, 2: 0.5, 0.5: 0.7, 0.25: 0.6}, {}, 0.5, [0.5, 0.25]),
        ({1: 0.5, 2: 0.6, 4: 0.54}, {(4, 0): 0.1}, 2, [4]),  # better with the first seed alone
        ({1: 0.0, 2: 0.0, 0.5: 0.0}, {}, 1, [0.5]),  # all diverge
        ({1: 0.5, 2: 0.6, 4: 0.7, 8: 0.1}, {(4, 0): -0.15}, 4, [4, 8]),  # better with the second seed alone
    ],
)
def test_a_search_goes_beyond_an_end_while_that_is_better(means, gains, chosen, beyond):
    trials = [(factor, seed) for factor in beyond for seed in (0, 1)]
    assert searched(lambda factor, seed: means[factor] + gains.get((factor, seed), 0)) == (chosen, trials)


def test_a_record_with_another_rate_than_the_chosen_one_is_made_again(board, two_rates):
    board.run("--only", "sweet", "--seeds", "2")
    path = board.out / "leaderboard/words/sweet.json"
    state = read_json(path)
    other = 0.125
    write_json(path, state | {"factor": other})
    board.run("--only", "sweet", "--seeds", "2")
    assert board.begun == [("sweet", 5e-5 * other, seed) for seed in (0, 1)]
    records = read_records(board.out / "records/words/sweet.npz")
    assert [seed_record.about["rates"]["factor"] for seed_record in records.values()] == [other, other]


def test_a_loss_counts_from_the_full_model_of_joint_training_as_it_is_now(board, two_rates):
    """A record of joint training that is made again does not count its loss from the old one."""
    board.run("--only", "joint", "--seeds", "2")
    path = board.out / "records/words/joint.npz"
    for seed, old in read_records(path).items():
        write_record(path, seed, old._replace(about=old.about | {"held_out_full": 2.0}))
    state = read_json(board.out / "leaderboard/words/joint.json")
    write_json(board.out / "leaderboard/words/joint.json", state | {"factor": 0.125})
    board.run("--only", "joint", "--seeds", "2")
    for seed_record in figures.read_task(path.parent, {}).runs["joint"].values():
        assert seed_record.about["one_point"]["flops_ratio"] == pytest.approx(seed_record.flops_at_one_point, abs=0.02)
        assert seed_record.flops_at_one_point < 0.9  # no rule would have been good enough for the old one


def test_a_finished_record_is_not_made_again_and_a_deleted_one_alone_is(board):
    board.run("--seeds", "1")
    folder = board.out / "records/words"
    before = {path.name: path.read_bytes() for path in sorted(folder.glob("*.npz"))}
    assert [*before] == ["joint.npz", "pabee.npz", "pcee-bert.npz", "sweet.npz"]
    board.run("--seeds", "1")
    assert board.begun == []
    for deleted, trained in (("sweet", "sweet"), ("pabee", "joint")):  # the training of joint serves pabee
        old = read_records(folder / f"{deleted}.npz")[0]
        (folder / f"{deleted}.npz").unlink()
        board.run("--seeds", "1")
        assert board.begun == [(trained, 5e-5, 0)]
        assert (read_records(folder / f"{deleted}.npz")[0].reported.logits == old.reported.logits).all()
        others = {path.name: path.read_bytes() for path in folder.glob("*.npz") if path.stem != deleted}
        assert others.items() <= before.items() and len(others) == 3
        before[f"{deleted}.npz"] = (folder / f"{deleted}.npz").read_bytes()
    assert len(np.load(folder / "joint.npz")["outputs"]) and not len(np.load(folder / "pabee.npz")["outputs"])
    (folder / "joint.npz").unlink()  # those of pabee and pcee-bert, too
    board.run("--seeds", "1")
    assert board.begun == [("joint", 5e-5, 0)]
    assert all([*read_records(folder / name)] == [0] for name in before)
    assert (folder / "sweet.npz").read_bytes() == before["sweet.npz"]


def test_a_killed_search_goes_on(board, two_rates, monkeypatch):
    calls, real = [], runs.trained

    def killed(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runs, "trained", killed)
    board.run("--only", "joint", "--seeds", "2")
    monkeypatch.setattr(runs, "trained", real)
    assert len(read_json(board.out / "leaderboard/words/joint.json")["tried"]) == 2
    board.run("--only", "joint", "--seeds", "2")
    assert board.begun[:2] == [("joint", 5e-5, 1), ("joint", 1e-4, 1)]
    tried = read_json(board.out / "leaderboard/words/joint.json")["tried"]
    assert [(trial["factor"], trial["seed"]) for trial in tried[:4]] == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_methods_are_grouped_by_what_is_trained(checkpoint_folder, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(checkpoint_folder)
    trainings = protocol.trainings_of(EXAM._replace(epochs=6), Sources(tmp_path, tmp_path))
    shared = [training.methods for training in trainings if len(training.methods) > 1]
    assert shared == [("joint", "pabee", "pcee-bert"), ("two-stage", "deebert", "adainfer")]
    options = {training.name: training.options for training in trainings}
    assert options["lora-exits"]["exits"] == [1, 3] and options["consistent"]["exits"] == [1, 2, 3]
    assert "exits" not in options["hashee"]


def test_stages_have_the_epochs_of_the_exam_or_those_of_their_authors_and_all_rates_are_searched(tmp_path):
    (exam,) = protocol.QUICK_EXAMS
    searched = exam._replace(factors=(1.0, 2.0), max_train=3000)
    trainings = {training.name: training for training in protocol.trainings_of(searched, Sources(tmp_path, tmp_path))}
    assert {training.options["epochs"] for training in trainings.values()} == {4}
    rates = {name: set(training.rates) - {"lr", "head_lr"} for name, training in trainings.items()}
    assert {name: names for name, names in rates.items() if names} == {
        "consistent": {"policy_lr", "task_lr"},
        "dree": {"adapter_lr"},
        "cat": {"temperature_lr", "meta_lr"},
        "tr-bert": {"policy_lr"},
    }
    dree = trainings["dree"]
    assert dree.at(2.0)["adapter_lr"] == 0.016 and dree.options["adapter_epochs"] == 22  # of 94 steps
    assert trainings["consistent"].options["task_epochs"] == 2 and set(trainings["consistent"].choices) == {"alpha"}
    assert trainings["sweet-every-second"].options == trainings["sweet"].options | {"exits": [2, 4, 6, 8, 10, 12]}
    for name, options in protocol.CHOICES.items():
        config = make_request(name, BUILT_IN_MODEL, toy_task(), tmp_path / "unused", False, {}).config
        assert {option: values[0] for option, values in options.items()}.items() <= asdict(config).items()


@pytest.mark.parametrize("names", [("joint", "pabee", "pcee-bert"), ("two-stage", "deebert", "adainfer")])
def test_methods_that_are_trained_alike_have_the_same_weights(names, checkpoint_folder, task_folder, tmp_path):
    assert len({load_method(name).trained_as or name for name in names}) == 1
    settings = {"model": checkpoint_folder, "task": task_folder, "epochs": 1, "exits": (1, 3)}
    first, *others = (train(name, out=tmp_path / name, **settings).model.state_dict() for name in names)
    assert all(torch.equal(value, other[key]) for other in others for key, value in first.items())


@pytest.fixture
def scored(monkeypatch):
    """A function of method and trial that is the score of every search."""

    def by(score):
        monkeypatch.setattr(
            runs, "_held_out_of", lambda training, trial, *more: (trial, *real(training, trial, *more)[1:])
        )
        monkeypatch.setattr(runs, "_score", lambda method, trial, task: score(method, trial))

    real = runs._held_out_of
    return by


def test_each_method_of_a_training_has_its_own_search_and_nothing_is_trained_twice(board, two_rates, scored):
    scored(lambda method, trial: float(trial.factor == (2.0 if method == "pabee" else 1.0)))
    board.run("--seeds", "2")
    trained = [(lr / 5e-5, seed) for method, lr, seed in board.begun if method == "joint"]
    assert sorted(trained) == [(factor, seed) for factor in (0.5, 1.0, 2.0, 4.0) for seed in (0, 1)]
    for name, factor in (("joint", 1.0), ("pabee", 2.0), ("pcee-bert", 1.0)):
        made = read_records(board.out / f"records/words/{name}.npz")
        assert [seed_record.about["rates"]["factor"] for seed_record in made.values()] == [factor] * 2
        assert read_json(board.out / f"leaderboard/words/{name}.json")["factor"] == factor
    (board.out / "leaderboard/words/pcee-bert.json").unlink()
    board.run("--seeds", "2")  # the record of joint training has rate 1, that of PABEE 2
    assert board.begun == [("joint", 2.5e-5, seed) for seed in (0, 1)]


def test_an_option_is_chosen_with_the_chosen_rates(board, two_rates, scored, monkeypatch):
    monkeypatch.setitem(registry.METHODS, "consistent", "mini_ee.lab.methods.consistent")
    monkeypatch.setattr(protocol, "CHOICES", {"consistent": {"alpha": (0.07, 5.0)}})
    scored(lambda method, trial: float(trial.factor == 2.0) + float(trial.options == (("alpha", 5.0),)))
    assert board.run("--only", "consistent", "--seeds", "2") == 0
    tried = read_json(board.out / "leaderboard/words/consistent.json")["tried"]
    assert [(trial["factor"], trial["seed"]) for trial in tried if "options" in trial] == [(2.0, 0), (2.0, 1)]
    made = read_records(board.out / "records/words/consistent.npz")
    assert [seed_record.about["chosen"] for seed_record in made.values()] == [{"alpha": 5.0}] * 2
    assert board.run("--only", "consistent", "--seeds", "2") == 0 and not board.begun


def test_methods_that_differ_by_their_rules_alone_share_a_training(board):
    board.run("--only", "pabee", "--seeds", "1")
    board.run("--only", "pcee-bert", "--seeds", "1")
    assert board.begun == [("joint", 5e-5, 0)]
    pabee, pcee = (read_records(board.out / f"records/words/{name}.npz")[0] for name in ("pabee", "pcee-bert"))
    assert (pabee.reported.logits == pcee.reported.logits).all()
    assert pabee.about["one_point"]["rule"]["name"] in ("patience", "never")
    assert pcee.about["one_point"]["rule"]["name"] in ("patience-confidence", "never")


def test_exits_are_read_on_the_device_of_the_training_and_rules_are_timed_on_the_cpu(board, monkeypatch):
    moved, real = [], (runs.trained, runs._read_held_out, runs._timed)

    def trained(folder, options, seed, sources):
        run = real[0](folder, options, seed, Sources(sources.folder, sources.made))
        run.model.to = lambda device: moved.append(device)
        return run

    monkeypatch.setattr(runs, "trained", trained)
    monkeypatch.setattr(runs, "_read_held_out", lambda *args: moved.append("read") or real[1](*args))
    monkeypatch.setattr(runs, "_timed", lambda *args: moved.append("timed") or real[2](*args))
    monkeypatch.setattr(experiment_trainings, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the card {device}")
    board.run("--only", "joint", "--seeds", "1", "--device", "cuda:1")
    assert moved == ["cuda:1", "read", "cpu", "timed"]
    metadata = read_records(board.out / "records/words/joint.npz")[0].about
    assert metadata["made"]["gpu"] == "the card cuda:1" and metadata["made"]["processor"]


def test_the_default_rule_is_that_of_the_run(board, monkeypatch):
    trained, real = [], runs.trained
    monkeypatch.setattr(runs, "trained", lambda *args: trained.append(real(*args)) or trained[-1])
    board.run("--only", "joint", "--seeds", "1")
    metadata = read_records(board.out / "records/words/joint.npz")[0].about
    (run,) = trained
    assert metadata["default_rule"] == run.config["rule"] and metadata["guarantee"] == run.config["guarantee"]
    assert metadata["guaranteed"] == run.metrics["guaranteed"]


def test_a_training_of_another_process_is_left_to_it(board, capsys):
    with sole_writer(board.out / "leaderboard/words/joint.json"):
        assert board.run("--only", "joint", "--seeds", "1") == 0
    assert board.begun == [] and "1 trainings are left to other processes" in capsys.readouterr().out


def test_two_calls_share_the_trainings(board):
    with ThreadPoolExecutor(2) as pool:
        given = {"seeds": (0, 1), "say": lambda line: None} | board.folders
        calls = [pool.submit(leaderboard.make_leaderboard, **given) for _ in range(2)]
        assert [call.result()["paper"] for call in calls] == ["leaderboard"] * 2
    assert sorted(board.begun) == [("joint", 5e-5, 0), ("sweet", 5e-5, 0)]
    names = [path.stem for path in sorted((board.out / "records/words").glob("*.npz"))]
    assert names == ["joint", "pabee", "pcee-bert", "sweet"]


def test_a_diverged_training_is_said_once_and_not_repeated(board, monkeypatch):
    def diverges(*args):
        board.begun.append(args)
        raise Diverged("the loss became nan")

    monkeypatch.setattr(runs, "trained", diverges)
    assert board.run("--only", "joint", "--seeds", "1") == 0 and len(board.begun) == 1
    assert board.run("--only", "joint", "--seeds", "1") == 0 and board.begun == []
    assert read_json(board.out / "leaderboard/words/joint.json")["diverged"] == {"0": "the loss became nan"}


def test_a_failure_does_not_stop_the_others(board, monkeypatch, capsys):
    real = runs.trained

    def fails(folder, options, *others):
        if options["method"] == "joint":
            raise ValueError("no such thing")
        return real(folder, options, *others)

    monkeypatch.setattr(runs, "trained", fails)
    assert board.run("--seeds", "1") == 1
    assert "1 trainings failed: words, joint: no such thing" in capsys.readouterr().err.splitlines()[-1]
    assert [*read_records(board.out / "records/words/sweet.npz")] == [0]


def test_quick_trains_each_classifier_with_three_seeds_and_each_decoder_with_one(board, monkeypatch):
    seeds = {"classifiers": [], "decoders": []}
    monkeypatch.setattr(protocol, "QUICK_EXAMS", (EXAM,))
    monkeypatch.setattr(decoders, "QUICK_EXAMS", ())

    def spied(work, *more):
        seeds["classifiers"] += [seed for job in work for seed in job.seeds]
        return []

    monkeypatch.setattr(leaderboard, "run_all", spied)
    monkeypatch.setattr(
        leaderboard, "run_decoders", lambda out, sources, few, *more: seeds["decoders"].extend(few) or 0
    )
    leaderboard.make_leaderboard(quick=True, say=lambda line: None, **board.folders)
    assert seeds == {"classifiers": [0, 1, 2], "decoders": [0]}


def test_what_does_not_fit_is_one_line(board, capsys):
    assert "raee is not in the tables" in refused(capsys, "reproduce", "leaderboard", "--only", "raee", *board.places)
    assert "expected one of" in refused(capsys, "reproduce", "leaderboard", "--only", "no-such", *board.places)
    assert protocol.why_not("one-depth") and protocol.why_not("sleb") and protocol.why_not("self-supervised")


def test_a_method_of_ones_own_needs_no_more_than_its_line(board, monkeypatch, tmp_path):
    (tmp_path / "own_method.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for methods in (registry.METHODS, method.METHODS):
        monkeypatch.setitem(methods, "own", "own_method")
    assert board.run("--only", "own", "--seeds", "1") == 0
    metadata = read_records(board.out / "records/words/own.npz")[0].about
    assert metadata["method"] == "own" and metadata["one_point"]["rule"].get("measure", "entropy") == "entropy"


def test_the_first_exit_of_each_method_costs_less_than_half_of_the_layers(tmp_path):
    """So that there can be an accuracy at 2x, also if an exit starts again from the embeddings."""
    (exam,) = protocol.QUICK_EXAMS
    exits_by_name = {
        training.name: training.options.get("exits")
        for training in protocol.trainings_of(exam, Sources(tmp_path, tmp_path))
    }
    assert exits_by_name["joint"] == [*range(1, 13)] and exits_by_name["lora-exits"] == [4, 12]
    assert all(2 * exits[0] < exits[-1] for exits in exits_by_name.values() if exits)


@pytest.mark.skipif("MINI_EE_SHARED" not in os.environ, reason="needs the real models of MINI_EE_SHARED")
def test_the_committed_records_were_made_by_this_protocol():
    """The command would make no record again."""
    sources, results = Sources(None, Path("unused")), Path(__file__).parents[2] / "results"
    seeds = tuple(range(protocol.SEEDS))
    lacking = [
        (exam.name, *record_name)
        for exam in protocol.EXAMS
        for job in runs.jobs(protocol.trainings_of(exam, sources), protocol.methods(quick=False), seeds)
        for record_name in runs.missing(results, job, seeds)
    ]
    assert not lacking


# ---- Rules replayed from records ----
ROWS = 48
FITTED = ("variance", "temperature", "frame", "table")  # these are not drawn


def spread_model(name, folder):
    """A method's model on a small backbone; its own parameters are drawn wide, so that rows stop at all exits."""
    method, request = load_method(name), make_request(name, folder, toy_task(), folder / "unused", False, {})
    backbone = load_backbone(folder)
    exits = exits_of(request, 3) if "exits" in method.lacks else (1, 2, 3)
    shape = {"exits": exits, "settings": asdict(request.config), "num_labels": 3, "pool": "mean", "head": "dense"}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = build_model(method, "rows", backbone, shape).eval()
        for label, parameter in model.named_parameters():
            if "backbone." not in label and not label.endswith(FITTED):
                parameter.normal_(std=0.7)
            if label.endswith("table"):
                parameter.copy_(torch.randint(1, 4, parameter.shape))
    return model


@pytest.mark.parametrize("name", [name for name in protocol.methods(quick=False) if name not in protocol.SPARSE])
def test_rules_replayed_from_a_record_do_what_the_model_does(name, checkpoint_folder, tmp_path):
    model, random = spread_model(name, checkpoint_folder), np.random.default_rng(0)
    tokenizer = Tokenizer.from_folder(checkpoint_folder, 24)
    texts = [(" ".join(random.choice(WORDS, random.integers(2, 12))),) for _ in range(ROWS)]
    encoded = encode(tokenizer, texts, model.backbone)
    segments = model.segments()
    live = record(segments, encoded, ROWS, whole=segments.whole())._replace(labels=random.integers(0, 3, ROWS))
    read = write_record(tmp_path / "a.npz", 0, SeedRecord(live, live, {})).reported
    (rows,) = batches(encoded, ROWS)  # in one batch, because FLOPs depend on the longest row of a batch
    back = np.argsort(rows)
    rules = method_rules(name, read, replace(toy_task(), label_names=("a", "b", "c")))
    same = []
    for rule in [rules[0], *rules[1::9]]:
        result, replayed = early_exit(segments, rule, encoded.batch(rows)), read.replay(rule)
        equal = result.exit_index[back] == replayed.exit_index
        same.append(equal.mean())
        predicted = result.logits[back].argmax(axis=1) == replayed.logits.argmax(axis=1)
        assert predicted[equal].all()
        for cost in ("depth", "layer_passes", "flops"):
            one, other = getattr(result.cost, cost)[back], getattr(replayed.cost, cost)
            assert np.allclose(one[equal], other[equal], rtol=1e-5), cost
    assert min(same) >= 0.9 and np.mean(same) >= 0.98  # a confidence that equals its threshold may be rounded
    assert abs(read.full_flops / live.full_flops - 1) < 1e-6


def test_the_pages_come_before_the_trainings_and_after_them(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(leaderboard, "write_page", lambda out, quick: steps.append("page"))
    monkeypatch.setattr(leaderboard, "run_all", lambda work, *_: steps.append("train") or [])
    monkeypatch.setattr(leaderboard, "run_decoders", lambda *_: 0)
    leaderboard.make_leaderboard(quick=True, only="joint", out=tmp_path / "new", say=lambda line: None)
    assert steps[0] == steps[-1] == "page" and steps.count("page") == 2 and "train" in steps
