"""Training: Eq. 1, the stages of each recipe, seeds, and a kill that changes nothing."""

import json
import shutil
from dataclasses import replace
from importlib import import_module
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mini_ee
import mini_ee.lab.baselines.joint as joint_module
import mini_ee.lab.baselines.two_stage as two_stage_module
import mini_ee.lab.training.loop as loop
import mini_ee.lab.training.state as state_module
import mini_ee.lab.training.train_rows as train_rows
import mini_ee.lab.training.train_run as train_module
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import Split, Task, holdout, load_task, subset
from mini_ee.lab.data.tokenizer import Encoded, Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.row_evaluation import overthinking
from mini_ee.lab.exits.row_exits import RowData, RowExits
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Never, Threshold
from mini_ee.lab.training.default_rule import choose, default_rule
from mini_ee.lab.training.holdout import TEST_ROWS, split_rows
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.method import configured, load_method
from mini_ee.lab.training.run_folder import build_model, encode, training_folder
from mini_ee.lab.training.stages import Stage, fine_tune_then_heads, joint_stage
from mini_ee.lab.training.state import Saved
from mini_ee.lab.training.train_run import exits_of, make_request
from mini_ee.lab.training.train_settings import TrainConfig
from mini_ee.train import task_loss

FAST = {"epochs": 2, "lr": 1e-3, "head_lr": 1e-2, "batch_size": 8}
FEW = {"max_train": 24}  # 3 steps an epoch


def train(out, checkpoint, task_folder, method="joint", resume=False, **options):
    return mini_ee.train(method, checkpoint, task_folder, out, resume, **FAST | FEW | options)


def weights(run_folder):
    return read_tensors(run_folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_loss_is_cross_entropy_for_classes_and_squared_error_for_numbers():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    expected = np.mean([-np.log(np.exp(2) / (np.exp(2) + 1)), -np.log(1 / (1 + np.exp(1)))])
    assert task_loss(logits, torch.tensor([0, 0])).item() == pytest.approx(expected, abs=1e-6)
    assert task_loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])).item() == pytest.approx(2.5)


def test_two_stages_learn_disjoint_parts_that_together_are_all_that_exits_read(checkpoint_folder):
    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2)
    names = [name for name, _ in model.named_parameters()]
    first, second = ({name for name in names if stage.trainable(name)} for stage in fine_tune_then_heads(model))
    assert not first & second
    assert {name for name in first if name.startswith("heads.")} == {
        name for name in names if name.startswith("heads.2.")
    }
    assert all(name.startswith("heads.") for name in second)
    assert first | second == set(names) == {name for name in names if joint_stage(model).trainable(name)}


def test_the_heads_stage_leaves_backbone_and_last_head_as_they_were(
    tmp_path, checkpoint_folder, task_folder, monkeypatch
):
    only_first = tmp_path / "first"
    with monkeypatch.context() as patch:
        first_stage = replace(two_stage_module.METHOD, recipe=lambda model, config: fine_tune_then_heads(model)[:1])
        patch.setattr(two_stage_module, "METHOD", first_stage)
        train(only_first, checkpoint_folder, task_folder, "two-stage")
    train(tmp_path / "both", checkpoint_folder, task_folder, "two-stage")
    before, after = weights(only_first), weights(tmp_path / "both")
    changed = {name.rsplit(".", 2)[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"heads.0", "heads.1"}


@pytest.fixture(scope="module")
def words(checkpoint_folder, task_folder):
    """(train, held) of the task that one word decides: 3 steps of 8 rows an epoch."""
    task, tokenizer = load_task(task_folder), Tokenizer.from_folder(checkpoint_folder)
    parts = (subset(task.split(name), rows, seed=0) for name, rows in (("train", 24), ("dev", 20)))
    backbone = load_backbone(checkpoint_folder)
    return [RowData(encode(tokenizer, part.texts, backbone), part.labels, task) for part in parts]


def test_frozen_parts_are_in_eval_mode_so_that_dropout_does_not_blur_what_heads_read(
    tmp_path, checkpoint_folder, words
):
    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2)
    stage, met = fine_tune_then_heads(model)[1], []

    def loss(model, batch):
        met.append([part.training for part in (model.backbone.layers[0].dropout, *(h.dropout for h in model.heads))])
        return stage.loss(model, batch)

    fit(model, [stage._replace(loss=loss)], *words, TrainConfig(**FAST), Saved(tmp_path, {}))
    assert met == [[False, True, True, False]] * 6, "in the second epoch too, after the exits were scored"


@pytest.mark.parametrize("on_states", [False, True])
def test_targets_come_from_train_and_validation_from_the_held_out_set_without_dropout(
    tmp_path, checkpoint_folder, words, on_states
):
    model, seen = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2), set()

    def report(name, answer=None):
        return lambda model, data: seen.add((name, len(data), model.training)) or answer

    stage = Stage(
        "heads",
        lambda name: name.startswith("heads."),
        lambda model, batch: task_loss(
            model.classify(0, (batch.states or model.states(*batch.inputs))[0]), batch.labels
        ),
        on_states=on_states,
        make_targets=report("targets", np.zeros(24)),
        validate=report("validate", {"score": 0.0}),
        log_metrics=report("metrics", {}),
        finish=report("finish"),
    )
    fit(model, [stage], *words, TrainConfig(**FAST), Saved(tmp_path, {}))
    assert seen == {("targets", 24, False), *((name, 20, False) for name in ("validate", "metrics", "finish"))}


def test_units_come_in_another_order_in_every_epoch_and_stage_and_under_every_seed(tmp_path, checkpoint_folder, words):
    model, seen = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2), []

    def loss(model, batch):
        seen.append(batch.inputs[0].tolist())
        return task_loss(model(*batch.inputs)[-1], batch.labels)

    for seed in (0, 1):
        fit(model, [joint_stage(model, loss=loss)] * 2, *words, TrainConfig(**FAST, seed=seed), Saved(tmp_path, {}))
    assert len({str(seen[at : at + 3]) for at in range(0, 24, 3)}) == 8


@pytest.mark.parametrize(
    "method, unit", [("joint", "rows"), ("multi-model", "rows"), ("lora-exits", "rows"), ("joint", "tokens")]
)
def test_backbone_and_adapters_learn_at_lr_heads_at_head_lr_and_matrices_alone_decay(
    method, unit, checkpoint_folder, decoder_checkpoint
):
    made, folder = load_method(method), checkpoint_folder if unit == "rows" else decoder_checkpoint
    shape = {"exits": (1, 2, 3), "num_labels": 2, "pool": "mean", "settings": {}, "rank": 2}
    model = build_model(made, unit, load_backbone(folder), shape)
    config = TrainConfig(lr=0.1, head_lr=0.2, weight_decay=0.3)
    stage = next(iter(made.recipe(model, configured(made, {}))))
    groups = loop.make_optimizer(model, stage, config).param_groups
    lr_and_decay = {
        trained: (group["peak_lr"], group["weight_decay"]) for group in groups for trained in group["params"]
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    for weight, report in lr_and_decay.items():
        assert report == (0.2 if "heads." in names[weight] else 0.1, 0.3 if weight.dim() > 1 else 0.0), names[weight]
    assert len({rate for rate, _ in lr_and_decay.values()}) == 2


def test_a_seed_gives_the_same_weights_twice_and_another_seed_others(tmp_path, checkpoint_folder, task_folder):
    """Every method and its seed: test_conformance.py, where a training that was killed equals one that was not."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tmp_path / name, checkpoint_folder, task_folder, "two-stage", epochs=1, seed=seed)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_training_leaves_the_callers_random_state_alone(tmp_path, checkpoint_folder, task_folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(tmp_path / "run", checkpoint_folder, task_folder)
    assert torch.equal(torch.rand(3), expected)


def test_a_training_that_was_stopped_and_resumed_ends_with_the_same_weights_and_metrics(
    tmp_path, checkpoint_folder, task_folder, monkeypatch
):
    """Stopped before the first step, in the first stage and in the second.

    The clock counts steps, so that the seconds of an epoch are those before the stop and those after it.
    """
    steps, most, step = 0, float("inf"), torch.optim.AdamW.step

    def counted(self, *args, **kwargs):
        nonlocal steps
        if steps == most:
            raise KeyboardInterrupt
        steps += 1
        return step(self, *args, **kwargs)

    monkeypatch.setattr(state_module, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(state_module.time, "perf_counter", lambda: float(steps))
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    train(tmp_path / "whole", checkpoint_folder, task_folder, "two-stage")
    assert steps == 12
    for stop_after in (0, 4, 7):
        given = tmp_path / str(stop_after), checkpoint_folder, task_folder, "two-stage"
        most = steps + stop_after
        with pytest.raises(KeyboardInterrupt):
            train(*given)
        most = float("inf")
        assert not given[0].exists()
        if not stop_after:
            with pytest.raises(FileNotFoundError, match="no unfinished training"):
                train(*given, resume=True)
            continue
        train(*given, resume=True)
        assert same(weights(given[0]), weights(tmp_path / "whole"))
        assert read_json(given[0] / "metrics.json") == read_json(tmp_path / "whole" / "metrics.json")
        assert not training_folder(given[0]).exists()


def test_the_seconds_of_an_epoch_do_not_hold_what_is_written(tmp_path, checkpoint_folder, task_folder, monkeypatch):
    now, write = [0.0], state_module.write_tensors

    def slow(*args):
        now[0] += 100.0
        return write(*args)

    monkeypatch.setattr(state_module, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(state_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(state_module, "write_tensors", slow)
    train(tmp_path / "run", checkpoint_folder, task_folder)
    assert now[0] > 100 and {epoch["seconds"] for epoch in read_json(tmp_path / "run" / "metrics.json")["epochs"]} == {
        0.0
    }


def test_a_run_beside_the_state_of_its_training_is_over(tmp_path, checkpoint_folder, task_folder, unfinished):
    state = unfinished.read_bytes()
    train(tmp_path / "run", checkpoint_folder, task_folder, resume=True)
    unfinished.parent.mkdir()
    unfinished.write_bytes(state)  # a kill between the last two steps
    with pytest.raises(FileExistsError, match="run: is there already; this training is over: remove .*run.training"):
        train(tmp_path / "run", checkpoint_folder, task_folder, resume=True)


@pytest.fixture
def unfinished(tmp_path, checkpoint_folder, task_folder, monkeypatch):
    """The state of a training that was stopped when all steps were done."""
    with monkeypatch.context() as patch:
        patch.setattr(train_rows, "default_rule", lambda *args, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "run", checkpoint_folder, task_folder)
    return tmp_path / "run.training" / "state.safetensors"


def without_checksum(state):
    save_file(read_tensors(state), state)


def truncated(state):
    state.write_bytes(state.read_bytes()[:-9])


def whole(state):
    pass


OTHER = "run.training: was started with {}; resume with the same settings$"


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (without_checksum, {}, "damaged: the checksum that was written with it is gone; remove .*training and begin"),
        (truncated, {}, "state.safetensors: truncated or damaged .*; remove .*training and begin anew$"),
        (whole, {"lr": 2e-3}, OTHER.format("lr 0.001")),
        (whole, {"pool": "first"}, OTHER.format("pool mean")),
        (whole, {"head": "linear"}, OTHER.format("head dense")),
        (whole, {"resume": False}, "go on with --resume"),
    ],
    ids=("no-checksum", "truncated", "lr", "pool", "head", "no-resume"),
)
def test_a_damaged_state_and_other_settings_are_refused(
    tmp_path, checkpoint_folder, task_folder, unfinished, damage, options, message
):
    damage(unfinished)
    with pytest.raises((ValueError, FileExistsError), match=message):
        train(tmp_path / "run", checkpoint_folder, task_folder, **{"resume": True} | options)


@pytest.mark.usefixtures("unfinished")
def test_resume_refuses_other_data_of_the_same_name_and_size(tmp_path, checkpoint_folder, task_folder):
    other = tmp_path / task_folder.name
    other.mkdir()
    for split in ("train", "dev"):
        text = (task_folder / f"{split}.jsonl").read_text()
        (other / f"{split}.jsonl").write_text(
            text.replace('"bad"', '"x"').replace('"good"', '"bad"').replace('"x"', '"good"')
        )
    with pytest.raises(ValueError, match="was started with data [0-9a-f]{64}; resume"):
        train(tmp_path / "run", checkpoint_folder, other, resume=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "1_Pooling/config.json"])
def test_resume_refuses_a_model_with_another_file(tmp_path, checkpoint_folder, task_folder, monkeypatch, name):
    model = shutil.copytree(checkpoint_folder, tmp_path / "model")
    monkeypatch.setattr(train_module, "save_run", None)  # the training ends before its run is written
    with pytest.raises(TypeError):
        train(tmp_path / "run", model, task_folder)
    monkeypatch.undo()
    (model / name).parent.mkdir(exist_ok=True)
    (model / "README.md").write_text("read by nobody")
    (model / name).write_text((checkpoint_folder / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ValueError, match=f"run.training: was started with another {name}; resume with the same"):
        train(tmp_path / "run", model, task_folder, resume=True)


def test_an_existing_run_is_never_overwritten(tmp_path, checkpoint_folder, task_folder):
    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError, match="name another folder"):
        train(tmp_path / "run", checkpoint_folder, task_folder)
    assert not list((tmp_path / "run").iterdir())


def test_the_best_epoch_is_kept_not_the_last(tmp_path, checkpoint_folder, task_folder, monkeypatch):
    monkeypatch.setattr(loop, "schedule", lambda step, total, warmup: 1.0)  # the first epoch of one and of two alike
    train(tmp_path / "one", checkpoint_folder, task_folder, epochs=1)
    scored = replace(
        joint_module.METHOD, recipe=lambda model, config: [joint_stage(model, score=lambda _: next(scores))]
    )
    monkeypatch.setattr(joint_module, "METHOD", scored)
    for given, first_is_best in (([0.9, 0.1], True), ([0.1, 0.9], False), ([0.5, 0.5], True)):
        scores, two = iter(given), tmp_path / str(given)
        train(two, checkpoint_folder, task_folder, epochs=2)
        assert same(weights(tmp_path / "one"), weights(two)) == first_is_best


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero():
    rates = [loop.schedule(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and rates[99] == pytest.approx(1 / 90)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert loop.schedule(0, 1, 0.0) == 1.0


def test_a_training_that_diverges_says_so_and_writes_no_run(tmp_path, checkpoint_folder, task_folder):
    with pytest.raises(ValueError, match="diverged.*smaller --lr"):
        train(tmp_path / "run", checkpoint_folder, task_folder, epochs=3, lr=1e30)
    assert not (tmp_path / "run").exists()


def numbered(rows):
    texts = tuple((f"text {i}",) for i in range(rows))
    return Task("t", ("a", "b"), ("accuracy",), {"train": Split(texts, np.arange(rows) % 2)})


@pytest.mark.parametrize(
    "rows, max_train, sizes",  # of train, selection and test
    [
        (100, None, (90, 2, 8)),  # a fifth of the tenth selects
        (4000, None, (3600, 80, 320)),
        (9, None, (8, 1, 0)),
        (100, 1000, (90, 2, 8)),
        (100, 88, (88, 2, 10)),  # 3 rows are left over: fewer than the 9 of the tenth
        (100, 81, (81, 9, 10)),  # 10 are: the whole tenth selects
        (100, 45, (45, 5, 50)),
        (100, 5, (5, 1, 94)),
        (5000, 600, (600, 66, TEST_ROWS)),
    ],
)
def test_held_out_rows_select_or_test_and_rows_left_over_test_too(rows, max_train, sizes):
    task = numbered(rows)
    parts = split_rows(task, 3, max_train)
    assert tuple(map(len, parts)) == sizes
    texts = [text for part in parts for text in part.texts]
    assert len(set(texts)) == len(texts)
    for part in parts:
        numbers = [int(text.split()[1]) for (text,) in part.texts]
        np.testing.assert_array_equal(part.labels, np.array(numbers) % 2)
    again, other = split_rows(task, 3, max_train), split_rows(task, 4, max_train)
    assert again.test.texts == parts.test.texts and (not parts.test or other.test.texts != parts.test.texts)


SHORT = {"consistent": {"policy_epochs": 1, "rounds": 1}, "cat": {"meta_epochs": 1}, "tr-bert": {"policy_epochs": 1}}
OF_ROWS = [name for name in METHODS if "rows" in load_method(name).units and load_method(name).train is None]
OF_LABELS = [name for name in OF_ROWS if not load_method(name).keeps_model]  # the others label all rows themselves


def read_before_the_rule_is_chosen(method, checkpoint, task_folder, out, monkeypatch):
    """The texts that a training reads until the default rule is chosen, and what that is chosen from."""
    read, chosen_from, batch, fit, choose = set(), [], Encoded.batch, train_module._fit, train_rows.default_rule

    def reading(encoded, rows):
        read.update(encoded.texts[row] for row in np.arange(len(encoded))[rows])
        return batch(encoded, rows)

    def fitting_first(*given):
        with monkeypatch.context() as patch:
            patch.setattr(Encoded, "batch", reading)
            return fit(*given)

    def choosing(*records, **settings):
        chosen_from.extend(records)
        return choose(*records, **settings)

    monkeypatch.setattr(train_module, "_fit", fitting_first)
    monkeypatch.setattr(train_rows, "default_rule", choosing)
    train(out, checkpoint, task_folder, method, epochs=1, max_train=24, **SHORT.get(method, {}))
    return read, chosen_from


@pytest.mark.parametrize("method", OF_LABELS)
def test_nothing_that_a_training_chooses_has_read_the_rows_that_test_the_default_rule(
    method, checkpoint_folder, task_folder, tmp_path, monkeypatch
):
    parts = split_rows(load_task(task_folder), 0, 24)
    assert tuple(map(len, parts)) == (24, 2, 34)
    given = method, checkpoint_folder, task_folder, tmp_path / "run", monkeypatch
    read, (selection, test, _) = read_before_the_rule_is_chosen(*given)
    assert read and not read & set(parts.test.texts)
    assert read <= {*parts.train.texts, *parts.selection.texts}
    np.testing.assert_array_equal(selection.labels, parts.selection.labels)
    np.testing.assert_array_equal(test.labels, parts.test.labels)
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert (metrics["rows"], metrics["rows_held"], metrics["rows_tested"]) == (24, 2, 34)


def test_losses_of_a_regression_are_scaled_by_the_labels_that_were_trained_on(checkpoint_folder, tmp_path, monkeypatch):
    folder = tmp_path / "STS-B"
    folder.mkdir()
    rows = [f"{i % 7}\tthe film was good {i}\tthe song was {i}\t{i / 40}" for i in range(200)]
    (folder / "train.tsv").write_text("\n".join(["genre\tsentence1\tsentence2\tscore", *rows]) + "\n")
    given, choose = {}, train_rows.default_rule
    monkeypatch.setattr(train_rows, "default_rule", lambda *some, **more: given.update(more) or choose(*some, **more))
    train(tmp_path / "run", checkpoint_folder, folder, "pabee", epochs=1, max_train=20)
    parts = split_rows(load_task(folder), 0, 20)
    assert given["label_range"] == np.ptp(parts.train.labels) < np.ptp(parts.test.labels)


@pytest.mark.parametrize("max_train", [None, 45, 88])
def test_the_rows_to_train_on_are_those_that_the_holdout_leaves(max_train):
    """As they were when all of the tenth did everything; and if enough rows are left over, the tenth still selects."""
    task = numbered(100)
    train_part, held = holdout(task.split("train"), 3)
    if max_train:
        train_part, held = subset(train_part, max_train, 3), subset(held, max_train // 9, 3)
    parts = split_rows(task, 3, max_train)
    assert parts.train.texts == train_part.texts
    assert parts.selection.texts == held.texts if max_train == 45 else set(parts.selection.texts) < set(held.texts)


# ---- What is asked for ----


@pytest.mark.parametrize("method", [name for name in METHODS if load_method(name).has_stages])
def test_every_method_builds_a_model_whose_stages_all_learn_something(
    method, checkpoint_folder, classifier_folder, decoder_checkpoint
):
    made = load_method(method)
    for unit in made.units:
        config = {"exits": (1, 2, 3), "num_labels": 2, "pool": "mean", "settings": {}, "rank": 2, "normalize": False}
        of_rows = classifier_folder if made.keeps_model else checkpoint_folder
        folder = decoder_checkpoint if unit == "tokens" else of_rows
        model = build_model(made, unit, load_backbone(folder), config)
        stages = list(made.recipe(model, configured(made, {})))
        assert stages
        for stage in stages:
            assert any(stage.trainable(name) and model.is_trainable(name) for name, _ in model.named_parameters())


@pytest.mark.parametrize("method", OF_LABELS)
def test_the_best_epoch_of_a_stage_is_that_of_the_exits_that_it_teaches(method, checkpoint_folder):
    made = load_method(method)
    shape = {
        "exits": made.exits(3) if callable(made.exits) else (1, 2, 3),
        "num_labels": 2,
        "pool": "mean",
        "settings": {},
    }
    model = build_model(made, "rows", load_backbone(checkpoint_folder), shape)
    exits = range(len(model.exits))
    for stage in made.recipe(model, configured(made, {})):
        if stage.score:
            trained = [
                k for k in exits if stage.trainable(f"heads.{k}.out.weight") or stage.trainable(f"models.{k}.heads")
            ]
            better = [stage.score(np.array([0.6 if at == k else 0.5 for at in exits])) for k in exits]
            assert [k for k in exits if better[k] > stage.score(np.full(len(exits), 0.5)) + 1e-9] == trained, stage.name


@pytest.mark.parametrize(
    "method, stage, loss, settings",
    [
        ("self-supervised", 0, "heads_loss", {"penalty": 0.5}),
        ("consistent", 1, "learn_policy", {"estimator": "exact"}),
        ("consistent", 2, "learn_task", {"estimator": "exact"}),
        ("sweet", 0, "separate_loss", {}),
        ("mixed", 1, "mean_loss", {}),
        ("fastbert", 1, "self_distillation_loss", {}),
        ("berxit", 0, "alternating_loss", {}),
        ("cat", 1, "inner_loss", {"target": "last"}),
        ("elasticbert", 0, "equilibrium_loss", {}),
        ("palbert", 0, "loss", {"beta": 0.1}),
        ("free", 0, "shallow_deep_loss", {"alpha": 0.1}),
        ("layerskip", 0, "layerskip_loss", {"dropout": 0.5}),
        ("tr-bert", 2, "joint_loss", {"alpha": 0.1}),
        ("balcony", 0, "self_distillation_loss", {}),
    ],
)
def test_a_stage_learns_by_its_methods_own_loss_under_the_settings(method, stage, loss, settings, monkeypatch):
    calls, config = [], configured(load_method(method), settings)
    monkeypatch.setattr(
        import_module(METHODS[method]), loss, lambda model, batch, config=None, **_: calls.append(config)
    )
    model = SimpleNamespace(exits=(1, 2, 3), unit=load_method(method).units[0], heads=(), head="")
    list(load_method(method).recipe(model, config))[stage].loss(model, None)
    assert calls == [config if settings else None]


@pytest.mark.parametrize("method", [name for name in METHODS if load_method(name).has_stages])
def test_epochs_and_rates_of_a_methods_own_are_those_of_its_stages(
    method, checkpoint_folder, classifier_folder, decoder_checkpoint
):
    made = load_method(method)
    fields = [name for name in made.config.__dataclass_fields__ if name.endswith(("_epochs", "_lr"))]
    given = {name: 50 + at if name.endswith("_epochs") else 0.5 + at / 100 for at, name in enumerate(fields)}
    for unit in made.units:
        shape = {"exits": (1, 2, 3), "num_labels": 2, "pool": "mean", "settings": {}, "rank": 2, "normalize": False}
        of_rows = classifier_folder if made.keeps_model else checkpoint_folder
        folder = decoder_checkpoint if unit == "tokens" else of_rows
        stages = list(made.recipe(build_model(made, unit, load_backbone(folder), shape), configured(made, given)))
        taken = {item for stage in stages for item in stage.settings.items()}
        assert taken >= {("epochs" if name.endswith("_epochs") else "head_lr", given[name]) for name in fields}
        for stage in stages:
            if stage.trainable("backbone.layers.0.qkv.weight") and "head_lr" in stage.settings:
                assert "lr" in stage.settings, "of its own, as its heads have one"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("joint", {"rank": 4}, "joint on rows has no option rank; see `mini-ee train joint --help-all`"),
        ("consistent", {"temperature": 2.0}, "has no option temperature"),
        ("pabee", {"alpha": 2.0, "k": 3}, "has no option alpha, k; see"),
        ("lora-exits", {"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ("lora-exits", {"distill": "vanilla", "weight": 0.5}, "--lambda has no effect with --distill vanilla"),
        ("lora-exits", {"distill": "vanilla", "temperature": 2.0}, "--temperature has no effect with --distill"),
        ("lora-exits", {"distill": "vanilla", "t_squared": True}, "--t-squared has no effect"),
        (
            "consistent",
            {"estimator": "exact", "trajectories": 4},
            "--trajectories has no effect with --estimator",
        ),
        ("consistent", {"alpha": -1.0}, "alpha must be"),
        ("joint", {"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ("joint", {"batch_size": 0}, "batch_size must be"),
        ("joint", {"lr": -1.0}, "lr must be"),
        ("joint", {"lr": float("nan")}, "lr must be"),
        ("joint", {"warmup": 2.0}, "warmup must be"),
        ("joint", {"exits": (2, 1, 3)}, "exits must ascend .* end at the last layer, 3, got 2,1,3"),
        ("joint", {"pool": "last"}, "pool must be one of mean, first, got 'last'"),
        ("joint", {"device": "tpu"}, "--device tpu: cannot be used here"),
        ("oracle", {}, "the method must be one of lora-exits, .*, got 'oracle'"),
    ],
)
def test_options_of_another_method_and_wrong_ones_are_refused(
    name, options, message, tmp_path, checkpoint_folder, task_folder
):
    with pytest.raises(WrongArguments, match=message):
        mini_ee.train(name, checkpoint_folder, task_folder, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name, options", [("layerskip", {"curriculum": "gradual", "rotation": 2}), ("free", {"alpha": 0, "match": "last"})]
)
def test_a_decoders_option_that_would_be_passed_over_is_refused(name, options, tmp_path, decoder_checkpoint):
    *others, unused = options
    make_request(name, decoder_checkpoint, None, tmp_path / "run", False, {other: options[other] for other in others})
    with pytest.raises(WrongArguments, match=f"--{unused} has no effect with --{others[0]} {options[others[0]]}; "):
        make_request(name, decoder_checkpoint, None, tmp_path / "run", False, options)


def test_where_no_exits_are_named_they_are_the_methods_own(tmp_path, checkpoint_folder, task_folder):
    def exits(method, layers, model=checkpoint_folder, task=task_folder, **options):
        return exits_of(make_request(method, model, task, tmp_path / "run", False, options), layers)

    assert exits("joint", 12) == tuple(range(1, 13)), "after every layer"
    assert exits("lora-exits", 12) == (6, 12)
    assert exits("joint", 12, exits=(4, 12)) == (4, 12)


@pytest.mark.parametrize(
    "layers, expected",
    [(32, (6, 12, 18, 24, 32)), (16, (3, 6, 9, 12, 16)), (5, (1, 2, 3, 4, 5)), (2, (1, 2)), (1, (1,))],
)
def test_self_supervised_heads_stand_where_the_paper_has_them(layers, expected, tmp_path, decoder_checkpoint):
    """Section 4: after 6, 12, 18 and 24 of the 32 layers of Phi-2; other depths in proportion."""
    request = make_request("self-supervised", decoder_checkpoint, None, tmp_path / "run", False, {})
    assert exits_of(request, layers) == expected


def test_a_decoders_other_exits_are_even_and_named_ones_end_with_the_lm_head(tmp_path, decoder_checkpoint):
    request = make_request("calm", decoder_checkpoint, None, tmp_path / "run", False, {})
    assert exits_of(request, 32) == (8, 16, 24, 32)
    request = make_request("calm", decoder_checkpoint, None, tmp_path / "run", False, {"exits": (2, 5)})
    assert exits_of(request, 32) == (2, 5, 32)


# ---- What is told ----


def recorded(logits, exits):
    logits = np.asarray(logits, np.float32)
    flops = np.ones((*logits.shape[:2], 2))
    return Record(Recorded(exits, logits, flops, list(np.diff((0, *exits)))), logits, 1.0)


def test_metrics_tell_every_epoch_and_exit(tmp_path, checkpoint_folder, task_folder):
    train(tmp_path / "run", checkpoint_folder, task_folder, "two-stage", exits=(2, 3))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [(epoch["stage"], epoch["epoch"]) for epoch in metrics["epochs"]] == [
        ("fine-tune", 1),
        ("fine-tune", 2),
        ("heads", 1),
        ("heads", 2),
    ]
    assert all(len(epoch["exit_scores"]) == 2 for epoch in metrics["epochs"])
    for epoch in metrics["epochs"]:
        assert 1 - len(epoch["wrong"]) / metrics["rows_held"] == pytest.approx(epoch["exit_scores"][-1])
        assert epoch["seconds"] > 0


@pytest.fixture(scope="module")
def many_rows(task_folder, tmp_path_factory):
    """The same rows again and again: 78 test the default rule, which is enough for one that exits early."""
    folder = tmp_path_factory.mktemp("many") / "words"
    folder.mkdir()
    rows = (task_folder / "train.jsonl").read_text() * 4
    (folder / "train.jsonl").write_text(rows)
    return folder


def test_joint_training_learns_the_task(tmp_path, checkpoint_folder, many_rows):
    run = train(tmp_path / "run", checkpoint_folder, many_rows, epochs=3, lr=3e-3, max_train=160)
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert min(metrics["epochs"][-1]["exit_scores"]) > 0.9
    assert run.rule != Never() and metrics["fallback"]["rows"] == metrics["rows_tested"] >= 59


def test_the_default_rule_computes_fewest_layers_where_an_exit_costs_more_than_its_depth():
    """Streams that begin anew: two layers to the first exit, eight to the second, where the whole model has six."""
    logits = np.zeros((6, 3, 2))
    logits[:, :, 1] = [[0.1, 4, 5]] * 5 + [[0.2, 0.3, 6]]  # five rows are sure at the second exit, one at the last
    task = Task("t", ("a", "b"), ("accuracy",), {})
    cheap, dear = (recorded(logits, (2, 4, 6)) for _ in range(2))
    dear.segments._layer_passes = [2, 6, 6]
    rule = [Threshold(0.9)]
    taken = [record._replace(labels=np.ones(6, int)).take(np.arange(600) % 6) for record in (cheap, dear)]
    chosen = [default_rule(record, record, task, candidates=lambda *_: rule).rule for record in taken]
    assert chosen == [Threshold(0.9), Never()]


def test_the_choice_within_a_share_of_the_operations_is_the_best_score_that_it_buys():
    points = [
        {"flops_ratio": share, "score": score} for share, score in ((0.2, 0.7), (0.3, 0.8), (0.33, 0.6), (0.9, 0.95))
    ]
    chosen = [choose(points, itemgetter("score"), lambda point: point["flops_ratio"] <= most) for most in (1 / 3, 0.1)]
    assert chosen == [points[1], None]
    assert choose(points, lambda point: 0.0, lambda point: point["score"] > 0.7) == points[1]  # the first of equal ones


def test_overthinking_shows_the_rows_that_an_exit_gets_right_and_a_later_one_wrong():
    right_at = [(1, 1, 1), (1, 0, 1), (0, 0, 0), (0, 1, 0), (0, 0, 1)]  # of five rows, at three exits
    labels = np.array([0, 1, 1, 0, 1])
    logits = [
        [[3.0, 0.0] if label == (not right) else [0.0, 3.0] for right in row] for row, label in zip(right_at, labels)
    ]
    texts = tuple((f"row {number}",) for number in range(5))
    task = Task("t", ("a", "b"), ("accuracy",), {"dev": Split(texts, labels)})
    counted = overthinking(recorded(logits, (1, 2, 3)), task, task.split("dev"))
    assert counted["share"] == 2 / 5 and [row["text"] for row in counted["rows"]] == ["row 1", "row 3"]
    assert counted["share_at_the_end"] == 1 / 5
    assert [exit_answer["label"] for exit_answer in counted["rows"][0]["exits"]] == ["b", "a", "b"]
    output, p = counted["rows"][1]["exits"][1], np.exp(3) / (np.exp(3) + 1)
    assert output["confidence"] == pytest.approx(p)
    assert output["entropy"] == pytest.approx(-p * np.log(p) - (1 - p) * np.log(1 - p))
    with pytest.raises(ValueError, match="regression"):
        overthinking(recorded(np.zeros((5, 3, 1)), (1, 2, 3)), replace(task, label_names=()), task.split("dev"))
