"""RAEE as a run: collected from a trained one or through a prompt, read back whole or refused in one line, controls."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import answer, called, is_served_end_to_end, refused

import mini_ee
import mini_ee.lab.evaluation.row_evaluation as evaluating
import mini_ee.lab.methods.raee_collect as collecting
from mini_ee.experiments import retrieval_measures
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone, save_backbone
from mini_ee.lab.baselines.adainfer import svm
from mini_ee.lab.data.files import read_json, sole_writer
from mini_ee.lab.data.tasks import holdout, load_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.prompt_exits import draw_shots
from mini_ee.lab.methods.raee import Retrieval
from mini_ee.lab.methods.raee_controls import ablation, controls, embed_all
from mini_ee.lab.methods.raee_datastore import exact_search
from mini_ee.lab.recording import Recorded, plan_rows, read_every_exit, record, summary
from mini_ee.lab.training import prompt_run
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.run_folder import load_run, training_folder

FAST = ("--epochs", "2", "--batch-size", "8", "--lr", "3e-3", "--head-lr", "1e-2")


@pytest.fixture(scope="module")
def base(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("base") / "run"
    options = ("--model", checkpoint_folder, "--task", task_folder, "--out", out)
    assert called("train", "joint", *options, *FAST) == 0
    return out


@pytest.fixture(scope="module")
def task(task_folder):
    return load_task(task_folder)


THREE = {"k": 3, "tau": 0.5}


def collect(out, model, task_folder, **options):
    """The run that `train raee` writes."""
    return mini_ee.train("raee", model, task_folder, out, **options)


@pytest.fixture(scope="module")
def collected(tmp_path_factory, base, task_folder):
    out = tmp_path_factory.mktemp("own") / "raee"
    collect(out, base, task_folder, **THREE)
    return out


@pytest.fixture
def encoder(tmp_path, checkpoint_folder):
    return shutil.copytree(checkpoint_folder, tmp_path / "encoder")


def test_the_datastore_holds_the_rows_held_out_with_what_each_exit_says_of_them(base, collected, task):
    store, trained = load_run(collected).rule.datastore, load_run(base)
    _, held = holdout(task.split("train"), trained.config["seed"])
    assert sorted(store.texts) == sorted(held.texts)
    label_of = dict(zip(held.texts, held.labels))
    for row, text in enumerate(store.texts):
        logits, *_ = read_every_exit(trained.segments(), trained.encode([text]).batch(slice(None)))
        p = torch.from_numpy(logits[0]).double().softmax(dim=1).numpy()
        assert store.labels[row] == label_of[text]
        right = p.argmax(axis=1) == label_of[text]
        np.testing.assert_allclose(store.values[row], np.where(right, p.max(axis=1), 0), atol=1e-5)


def test_the_model_is_the_runs_and_the_rule_is_given(base, collected):
    of_base, of_collected = load_run(base), load_run(collected)
    assert (collected / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert of_collected.config["method"] == "raee" and of_base.config["method"] == "joint"
    assert (
        of_collected.rule.to_dict() == Retrieval(k=3, tau=0.5, fallback_top=3).to_dict()
        and not training_folder(collected).exists()
    )


def test_exit_0_of_a_run_is_an_exit_of_the_plan(tmp_path, checkpoint_folder, task_folder):
    mini_ee.train("joint", checkpoint_folder, task_folder, tmp_path / "base", exits=(0, 3), epochs=1)
    run = collect(tmp_path / "raee", tmp_path / "base", task_folder, k=1, tau=1.0, fallback_top=1)
    store = run.rule.datastore
    assert run.rule.include_embeddings and store.exits == (0, 3)
    store.values[:] = [(0.9, 0.8), (0.5, 0.7)] * (len(store) // 2)
    assert run.rule.plan(run.encode(store.texts).batch(slice(None))).tolist() == [0, 1] * (len(store) // 2)


def test_max_train_collects_so_many_rows_drawn_with_the_seed(tmp_path, base, task_folder):
    one, other = (
        collect(tmp_path / str(seed), base, task_folder, max_train=3, seed=seed).rule.datastore for seed in (0, 1)
    )
    assert len(one) == len(other) == 3 and set(one.texts) != set(other.texts)


def test_the_datastore_holds_all_rows_that_a_training_with_max_train_left(
    tmp_path, checkpoint_folder, task, task_folder
):
    trained = mini_ee.train("joint", checkpoint_folder, task_folder, tmp_path / "run", max_train=20, epochs=1, seed=4)
    fitted, selection, test = split_rows(task, 4, 20)
    store = collect(tmp_path / "raee", trained.folder, task_folder, **THREE).rule.datastore
    train = task.split("train").texts
    assert tuple(map(len, (train, fitted, selection, test, store))) == (60, 20, 2, 38, 40)
    assert sorted(store.texts) == sorted(set(train) - set(fitted.texts))


def test_a_collected_run_can_be_collected_again(tmp_path, collected, task_folder):
    again = collect(tmp_path / "out", collected, task_folder, k=1, layer=2)
    assert again.rule.k == 1 and again.rule.datastore.encoder.startswith("layer 2 of ")
    assert len(list((tmp_path / "out" / "datastore").iterdir())) == 3


# Durability


def test_a_run_is_not_written_over(collected, base, task_folder):
    with pytest.raises(FileExistsError, match="is there already; name another folder or remove it"):
        collect(collected, base, task_folder)


@pytest.mark.parametrize("step", ["Datastore", "write_json"])
def test_a_collection_that_was_killed_leaves_no_run_and_the_same_call_ends_as_if_it_had_not(
    tmp_path, base, collected, task_folder, monkeypatch, step
):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collecting, step, killed)
        with pytest.raises(KeyboardInterrupt):
            collect(tmp_path / "out", base, task_folder, **THREE)
    assert not (tmp_path / "out").exists()
    run, whole = collect(tmp_path / "out", base, task_folder, **THREE), load_run(collected)
    np.testing.assert_array_equal(run.rule.datastore.values, whole.rule.datastore.values)
    np.testing.assert_array_equal(run.rule.datastore.embeddings, whole.rule.datastore.embeddings)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_without_its_datastore_is_told(tmp_path, collected):
    shutil.copytree(collected, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "datastore")
    with pytest.raises(FileNotFoundError, match="datastore: no datastore here"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["rows.safetensors", "manifest.json"])
def test_a_changed_byte_in_the_datastore_is_told(tmp_path, collected, name):
    shutil.copytree(collected, tmp_path / "run")
    path = tmp_path / "run" / "datastore" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|expected a JSON object"):
        load_run(tmp_path / "run")


def test_a_datastore_of_another_layer_is_told(tmp_path, base, collected, task_folder):
    collect(tmp_path / "other", base, task_folder, layer=1)
    shutil.rmtree(tmp_path / "other" / "datastore")
    shutil.copytree(collected / "datastore", tmp_path / "other" / "datastore")
    with pytest.raises(ValueError, match=r"encoder: expected layer 1 of \w+, found layer 0 of \w+; give that encoder"):
        load_run(tmp_path / "other")


def test_an_encoder_that_moved_or_changed_is_told(tmp_path, base, task_folder, encoder):
    run = collect(tmp_path / "out", base, task_folder, encoder=encoder)
    assert run.rule.datastore.encoder == run.rule.embed.name and run.rule.embed.tokenizer is not None
    changed = load_backbone(encoder)
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    encoder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="encoder: no sentence encoder here"):
        load_run(tmp_path / "out")
    save_backbone(changed, encoder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "moved" / name, encoder)
    with pytest.raises(ValueError, match=r"encoder: expected encoder \w+, found encoder \w+; give that encoder"):
        load_run(tmp_path / "out")


def test_a_regression_is_refused(tmp_path, base):
    folder = tmp_path / "STS-B"
    folder.mkdir()
    rows = "".join(f"a film\ta film {row}\t{row / 5:.1f}\n" for row in range(20))
    (folder / "train.tsv").write_text("sentence1\tsentence2\tscore\n" + rows)
    with pytest.raises(
        WrongArguments, match="raee needs the confidence or the accuracy of an exit, and STS-B is a regression"
    ):
        collect(tmp_path / "out", base, folder)


# The controls


@pytest.fixture(scope="module")
def drawn(collected, task):
    """The run with values drawn, and a record of logits drawn: exits that differ, the middle one best of the collected.

    The model of this small task is right at every exit, and would not tell one control from another.
    """
    run, random = load_run(collected), np.random.default_rng(1)
    values = run.rule.datastore.values
    values[:] = random.uniform(0.4, 1, values.shape) * (random.random(values.shape) < (0.5, 0.9, 0.6))
    recorded = record(run.segments(), run.encode(task.split("dev").texts), 8)
    recorded.logits[:] = random.normal(size=recorded.logits.shape)
    return run, recorded


def scores_by_hand(run, recorded, task):
    """Accuracy of each control, row by row."""
    texts, labels = task.split("dev").texts, task.split("dev").labels
    store = run.rule.datastore
    right_by = {name: [] for name in ("knn_labels", "knn_weighted", "best_single_layer", "oracle", "full_model")}
    best = max(range(3), key=lambda k: (sum(row[k] > 0 for row in store.values), -k))
    for row, (text, label) in enumerate(zip(texts, labels)):
        predictions = recorded.logits[row].argmax(axis=1).tolist()
        query = run.rule.embed(run.encode([text]).batch(slice(None)))[0]
        distances = ((store.embeddings - query / np.linalg.norm(query)) ** 2).sum(axis=1)
        order = np.argsort(distances, kind="stable")[: run.rule.k]
        near, far = store.labels[order].tolist(), distances[order]
        votes = {voted: sum(far[0] / d for other, d in zip(near, far) if other == voted) for voted in near}
        right_by["knn_labels"].append(max(near, key=lambda voted: (near.count(voted), -near.index(voted))) == label)
        right_by["knn_weighted"].append(max(near, key=votes.get) == label)
        right_by["best_single_layer"].append(predictions[best] == label)
        right_by["oracle"].append(label in predictions)
        right_by["full_model"].append(predictions[-1] == label)
    return {name: float(np.mean(right)) for name, right in right_by.items()}


def controls_of(run, recorded, task):
    encoded = run.encode(task.split("dev").texts)
    return controls(run.rule, recorded, encoded, task, task.split("dev").labels, 8)


def test_controls_are_those_of_loops_over_rows(drawn, task):
    measured, expected = controls_of(*drawn, task), scores_by_hand(*drawn, task)
    assert {name: measured[name]["accuracy"] for name in expected} == pytest.approx(expected)
    assert measured["best_single_layer"]["mean_layers"] == measured["best_single_layer"]["layer"] == 2
    assert measured["full_model"]["mean_layers"] == 3 and measured["knn_labels"]["mean_layers"] == 0


def test_the_layers_of_a_vote_are_those_of_its_queries(tmp_path, base, task, task_folder, encoder):
    for name, options, layers in (("own", {"layer": 2}, 2), ("other", {"encoder": encoder}, 3)):
        run = collect(tmp_path / name, base, task_folder, **options)
        encoded = run.encode(task.split("dev").texts)
        recorded = record(run.segments(), encoded, 8)
        measured = controls(run.rule, recorded, encoded, task, task.split("dev").labels, 8)
        for vote in ("knn_labels", "knn_weighted"):
            assert measured[vote]["mean_layers"] == pytest.approx(layers, rel=0.01)
            assert measured[vote]["flops_ratio"] == pytest.approx(layers / 3, rel=0.01)


def test_random_layers_have_the_plans_mean_and_a_spread_over_lots(drawn, task):
    run, recorded = drawn
    inputs = run.encode(task.split("dev").texts).batch(slice(None))
    depth = early_exit(run.segments(), run.rule, inputs).layers_run
    one, same = (controls_of(*drawn, task)["random_layers"] for _ in range(2))
    assert len(set(depth)) > 1, "all rows leave at one exit, and no lot changes anything"
    assert one == same and one["mean_layers"] == pytest.approx(depth.mean()) and one["spread"] > 0
    plan, labels, rows = run.rule.plan(inputs), task.split("dev").labels, np.arange(len(inputs))
    lots = [np.random.default_rng(lot).permutation(plan) for lot in range(10)]
    right = [np.mean(recorded.logits[rows, lot].argmax(axis=1) == labels) for lot in lots]
    assert (one["accuracy"], one["spread"]) == pytest.approx((np.mean(right), np.std(right)))


# The command line


def test_train_evaluate_and_compare_answer(capsys, tmp_path, base, task_folder):
    result = answer(
        capsys, "train", "raee", "--model", base, "--task", task_folder, "--out", tmp_path / "raee", "--k", 2
    )
    assert result["method"] == "raee" and result["rule"]["k"] == 2 and result["rows"] == 6
    assert result["datastore_bytes"] == sum(path.stat().st_size for path in (tmp_path / "raee" / "datastore").iterdir())
    result = answer(capsys, "evaluate", tmp_path / "raee", "--task", task_folder, "--batch-size", 8)
    names = ["knn_labels", "knn_weighted", "best_single_layer", "random_layers", "oracle", "full_model"]
    assert result["rule"]["k"] == 2 and list(result["controls"]) == names
    rows = answer(capsys, "compare", base, tmp_path / "raee", "--task", task_folder)["rows"]
    assert rows[1]["mean_layers"] == result["mean_layers"] and rows[1]["accuracy"] == result["accuracy"]


def test_evaluate_prints_the_controls_beside_the_figure(capsys, collected, task_folder):
    assert called("evaluate", collected, "--task", task_folder) == 0
    printed = capsys.readouterr().out
    for line in ("kNN label vote", "best single layer", "random layers", "oracle", "full model"):
        assert line in printed


def test_neighbours_are_as_far_from_a_row_as_their_values_are(collected, task):
    opened, rows = load_run(collected), task.split(task.default_split)
    encoded, store = opened.encode(rows.texts), opened.rule.datastore
    recorded = record(opened.segments(), encoded, 8)
    queries, _ = embed_all(opened.rule, encoded, 8)
    distances = retrieval_measures.profile_distances(opened, recorded, queries, rows.labels)
    apart, by_lot = [], []
    lot = np.random.default_rng(0).integers(len(store), size=(len(rows), min(8, len(store))))
    for row, label in enumerate(rows.labels):
        p = torch.from_numpy(recorded.logits[row]).double().softmax(1).numpy()
        values = np.where(p.argmax(1) == label, p[:, label], 0)
        near = store.search(opened.rule.embed(encoded.batch([row])), 8).rows[0]
        for some, report in ((near, apart), (lot[row], by_lot)):
            report.append(np.abs(np.mean([store.values[neighbour] for neighbour in some], axis=0) - values).mean())
    assert distances["neighbours"] == pytest.approx(np.mean(apart), abs=1e-6)
    assert distances["by lot"] == pytest.approx(np.mean(by_lot), abs=1e-6)
    assert distances["by lot"] != distances["neighbours"]


def test_figures_of_a_page_are_those_of_evaluate_and_the_means_of_single_rows(monkeypatch, tuned, task):
    run, rows = load_run(tuned), task.split("dev")
    run = run._replace(rule=replace(run.rule, k=4))  # one of those of the tables
    encoded = run.encode(rows.texts)
    read = record(run.segments(), encoded, 8)
    logits = np.random.default_rng(0).normal(size=read.logits.shape)  # those of a small model are all alike
    drawn = read._replace(segments=Recorded(read.segments.exits, logits, *read.segments.costs[:2]), logits=logits)
    monkeypatch.setattr(retrieval_measures, "record", lambda *_: drawn)
    figures, _, made = retrieval_measures.of_retrieval(run, task, None)
    given = run.rule, drawn, encoded, task, rows.labels, 8, run.config["seed"]
    by_rule = summary(drawn.replay(plan_rows(run.rule, encoded, 8)), drawn, task, rows.labels)
    expected = {"score": by_rule["score"], "layers": by_rule["mean_layers"], "saved": by_rule["layers_saved"]}
    keys = {"full": "full_model", "kNN votes": "knn_labels", "kNN votes weighted": "knn_weighted"}
    keys |= {name: name.replace(" ", "_") for name in ("best single layer", "random layers", "oracle")}
    of_controls = controls(*given)
    expected |= {name: of_controls[key]["score"] for name, key in keys.items()}
    expected["oracle layers"] = of_controls["oracle"]["mean_layers"]
    for point in ablation(*given):
        for name, shown in ((f"k {point['k']}", "100%"), (f"store {point['database']}", point["database"])):
            if point["database"] == shown and (name.startswith("k") or point["k"] == 4):
                expected |= {f"score {name}": point["score"], f"layers {name}": point["mean_layers"]}
    values = made.about["values"]
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value) and np.mean(values[name]) == pytest.approx(value, abs=1e-5), name
        assert len(values[name]) == len(rows)
    assert len({tuple(values[name]) for name in ("score", "full", "kNN votes", "oracle")}) == 4


def test_evaluate_shows_the_rows_that_the_store_has_nearest_and_their_votes(capsys, base, collected, task_folder, task):
    given = ("evaluate", collected, "--task", task_folder, "--neighbours", 2)
    output, opened = answer(capsys, *given)["neighbours"], load_run(collected)
    store, rows = opened.rule.datastore, task.split(task.default_split)
    inputs = opened.encode(rows.texts[:2]).batch(slice(None))
    queries = np.asarray(opened.rule.embed(inputs))
    near = exact_search(store.embeddings, queries / np.linalg.norm(queries, axis=1, keepdims=True), 3)
    plan = opened.rule.plan(inputs)
    assert [entry["text"] for entry in output] == [" / ".join(text) for text in rows.texts[:2]]
    assert [entry["layer"] for entry in output] == [opened.exits[k] for k in plan]
    for query, stored, distances in zip(output, near.rows, near.distances):
        assert [one["text"] for one in query["neighbours"]] == [" / ".join(store.texts[row]) for row in stored]
        assert [one["label"] for one in query["neighbours"]] == [task.label_names[store.labels[row]] for row in stored]
        assert [one["weight"] for one in query["neighbours"]] == pytest.approx(list(distances[0] / distances), rel=1e-4)
        for one, row in zip(query["neighbours"], stored):
            passing = store.values[row] >= 0.5
            best = store.values[row] >= sorted(store.values[row])[-3]
            votes = passing if passing.any() else best & (store.values[row] > 0)
            assert one["votes"] == [layer for layer, vote in zip(opened.exits, votes) if vote]
    assert called(*given) == 0
    printed = capsys.readouterr().out
    assert f"exits after {output[0]['layer']} layers. Its neighbours vote:" in printed
    assert printed.count("\n    1.00 for ") == 2
    assert "unrecognized arguments for a classifier: --neighbours 2" in refused(capsys, "evaluate", base, *given[2:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"layer": 99}, "the layer must be from 0 to 3, got 99"), ({"encoder": "none"}, "no such folder")],
)
def test_wrong_queries_are_told_before_anything_is_trained(
    tmp_path, monkeypatch, checkpoint_folder, task_folder, wrong, message
):
    monkeypatch.setattr(prompt_run, "fit", lambda *given: pytest.fail("trained"))
    given = {"shots": 2, "template": "{text} it was {mask}", "words": ("0=bad", "1=good", "2=fine")} | wrong
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        collect(tmp_path / "raee", checkpoint_folder, task_folder, **given)


def test_a_missing_index_is_told_before_a_row_is_read(tmp_path, monkeypatch, base, task_folder):
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    monkeypatch.setattr("mini_ee.lab.methods.raee_collect.collect", lambda *given, **config: pytest.fail("read"))
    with pytest.raises(ValueError, match="a datastore needs hnswlib"):
        collect(tmp_path / "raee", base, task_folder, **THREE)


def test_all_that_evaluate_says_of_rows_comes_from_reading_them_once(capsys, monkeypatch, collected, task_folder):
    read = []
    monkeypatch.setattr(evaluating, "record", lambda *given: read.append(given) or record(*given))
    result = answer(capsys, "evaluate", collected, "--task", task_folder, "--overthinking")
    assert len(read) == 1 and {"overthinking", "controls"} <= result.keys()


def test_a_collected_run_expects_no_exits_of_its_bases_rule(tmp_path, base, task_folder):
    copy = shutil.copytree(base, tmp_path / "base")
    assert called("calibrate", copy, "--task", task_folder, "--epsilon", 0.5) == 0
    assert "exit_counts" in read_json(copy / "config.json")
    assert "exit_counts" not in collect(tmp_path / "raee", copy, task_folder, **THREE).config


def test_settings_of_the_rule_can_be_given_at_evaluation(capsys, collected, task_folder):
    result = answer(
        capsys,
        "evaluate",
        collected,
        "--task",
        task_folder,
        "--k",
        1,
        "--tau",
        "0",
        "--fallback-top",
        2,
        "--batch-size",
        8,
    )
    expected = {"name": "raee", "k": 1, "tau": 0.0, "fallback_top": 2, "include_embeddings": False}
    assert result["rule"] == expected and read_json(collected / "config.json")["rule"]["k"] == 3


def test_settings_of_raee_for_another_rule_are_refused(capsys, base, collected, task_folder):
    assert "unrecognized arguments for a classifier: --k 3" in refused(
        capsys, "evaluate", base, "--task", task_folder, "--k", 3
    )
    message = "--k is for a run of raee under its own rule"
    assert message in refused(capsys, "evaluate", collected, "--task", task_folder, "--rule", "never", "--k", 3)


def test_a_missing_model_and_a_wrong_tau_are_told(capsys, tmp_path, base, task_folder):
    assert "no such folder" in refused(capsys, "train", "raee", "--model", tmp_path / "no", "--out", tmp_path / "out")
    options = ("--task", task_folder, "--out", tmp_path / "out", "--tau", 2)
    message = "tau must be a number from 0 to 1, got 2.0"
    assert message in refused(capsys, "train", "raee", "--model", base, *options)


# Prompt mode


TUNED = {"shots": 4, "epochs": 2, "lr": 3e-3, "batch_size": 8, "seed": 5}
WORDS = {"template": "{text} is {mask}", "words": ("0=awful", "1=great")}
TERRIBLE = ("--template", "{text} is {mask}", "--words", "0=awful,1=great")


@pytest.fixture(scope="module")
def prompted(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("prompted") / "raee"
    collect(out, checkpoint_folder, task_folder, **WORDS, **THREE)
    return out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("tuned") / "raee"
    collect(out, checkpoint_folder, task_folder, **WORDS, **THREE, **TUNED)
    return out


def p_of_label_words(backbone, tokenizer, ids):
    """(L, C): softmax over the vocabulary at the mask of every layer, restricted to the label words, renormalised."""
    with torch.no_grad():
        states = backbone.hidden_states(torch.from_numpy(ids)[None])[1:]
        at = ids.tolist().index(tokenizer.mask_token_id)
        p = [backbone.lm_logits(state[0, at]).double().softmax(0)[list(tokenizer.label_tokens)] for state in states]
    return np.array([logits / logits.sum() for logits in p])


def test_zero_shot_every_row_of_train_is_collected_through_the_checkpoints_own_head(prompted, checkpoint_folder, task):
    run, train = load_run(prompted), task.split("train")
    assert sorted(run.rule.datastore.texts) == sorted(train.texts) and run.exits == (1, 2, 3)
    label_of, backbone = dict(zip(train.texts, train.labels)), load_backbone(checkpoint_folder)
    for row, text in enumerate(run.rule.datastore.texts):
        p = p_of_label_words(backbone, run.tokenizer, run.encode([text]).ids[0])
        right = p.argmax(axis=1) == label_of[text]
        np.testing.assert_allclose(run.rule.datastore.values[row], np.where(right, p.max(axis=1), 0), atol=1e-5)


def test_a_run_without_shots_names_the_checkpoint_and_holds_no_weights(prompted, checkpoint_folder, tmp_path):
    config = read_json(prompted / "config.json")
    assert config["backbone"] == {"folder": str(checkpoint_folder), "sha256": backbone_sha256(checkpoint_folder)}
    assert config["prompt"] == {"template": "{text} is {mask}", "words": {"0": "awful", "1": "great"}}
    assert config["pool"] == "mask" and not list(prompted.rglob("model.safetensors"))
    moved = shutil.copytree(checkpoint_folder, tmp_path / "moved")
    assert load_run(prompted, moved).model.num_labels == 2
    with torch.no_grad():
        changed = load_backbone(moved)
        changed.embeddings.word.weight.mul_(2)
    save_backbone(changed, tmp_path / "changed")
    with pytest.raises(ValueError, match="was trained on another backbone than the one in"):
        load_run(prompted, tmp_path / "changed")


def test_adainfer_reads_the_same_model_through_the_same_prompt(tuned, task):
    run = load_run(tuned)
    figures, _, made = retrieval_measures.of_compared(run, task, None)
    rows, known = task.split("dev"), collecting.untrained_rows(run, task)
    fitted = record(run.segments(), run.encode(known.texts), 8)
    rule = svm(fitted, fitted.predictions[:, :-1] == known.labels[:, None])
    right, layers = [], []
    for ids, label in zip(run.encode(rows.texts).ids, rows.labels):
        for k, p in enumerate(p_of_label_words(run.model.backbone, run.tokenizer, ids)):
            top, gap = p.max(), p.max() - p.min()
            if k == 2 or rule.gap[k] * gap + rule.top[k] * top + rule.bias[k] > 0:
                break
        right.append(p.argmax() == label)
        layers.append(k + 1)
    assert figures["AdaInfer"] == pytest.approx(np.mean(right)) and figures["AdaInfer layers"] == np.mean(layers)
    assert figures["SLEB layers"] == 2 and figures["RAEE index megabytes"] > 0
    assert made.about["values"]["AdaInfer"] == right  # of each row, not only their mean
    assert all(np.mean(values) == pytest.approx(figures[name]) for name, values in made.about["values"].items())


def test_calm_through_a_prompt_runs_as_many_layers_as_sleb_on_rows_that_it_may_see(tuned, task):
    run = load_run(tuned)
    figures, _, made = retrieval_measures.of_compared(run, task, None)

    def left(split):
        output = [list(p_of_label_words(run.model.backbone, run.tokenizer, ids)) for ids in run.encode(split.texts).ids]
        return output, np.array([[abs(p[0] - p[1]) for p in row_p[:-1]] for row_p in output])

    def depth(gaps, gap):
        return np.where((gaps >= gap).any(axis=1), (gaps >= gap).argmax(axis=1), 2) + 1

    _, seen = left(collecting.untrained_rows(run, task))
    output, gaps = left(task.split("dev"))
    gap = min(np.percentile(seen, range(101)), key=lambda gap: abs(depth(seen, gap).mean() - 2))
    layers = depth(gaps, gap)
    right = [row_p[at - 1].argmax() == label for row_p, at, label in zip(output, layers, task.split("dev").labels)]
    assert figures["CALM layers"] == layers.mean() and made.about["values"]["CALM"] == right


def test_with_shots_the_backbone_is_the_runs_own_and_its_shots_are_not_in_the_datastore(tuned, checkpoint_folder, task):
    run, train = load_run(tuned), task.split("train")
    shots, held, rest = draw_shots(train, 2, 4, seed=5)
    assert sorted(run.rule.datastore.texts) == sorted(rest.texts) and len(rest) == 60 - 16
    backbone, before = load_backbone(tuned / "backbone"), load_backbone(checkpoint_folder)
    assert not torch.equal(backbone.embeddings.word.weight, before.embeddings.word.weight)
    assert torch.equal(backbone.embeddings.word.weight, run.model.backbone.embeddings.word.weight)
    text = rest.texts[0]
    logits, *_ = read_every_exit(run.segments(), run.encode([text]).batch(slice(None)))
    p = torch.from_numpy(logits[0]).double().softmax(dim=1).numpy()
    np.testing.assert_allclose(p, p_of_label_words(backbone, run.tokenizer, run.encode([text]).ids[0]), atol=1e-5)
    assert [epoch["epoch"] for epoch in read_json(tuned / "metrics.json")["epochs"]] == [1, 2]
    assert read_json(tuned / "config.json")["training"]["from"]["folder"] == str(checkpoint_folder)


def test_the_same_seed_gives_the_same_weights_and_a_moved_run_is_read_where_it_is(tuned, task_folder, tmp_path):
    source = read_json(tuned / "config.json")["training"]["from"]["folder"]
    collect(tmp_path / "again", source, task_folder, **WORDS, **THREE, **TUNED)
    (tmp_path / "again").rename(tmp_path / "moved")
    names = ("backbone", "model.safetensors")
    assert tuned.joinpath(*names).read_bytes() == (tmp_path / "moved").joinpath(*names).read_bytes()
    assert load_run(tmp_path / "moved").rule.datastore.encoder == load_run(tuned).rule.datastore.encoder
    path = (tmp_path / "moved").joinpath(*names)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="another backbone"):
        load_run(tmp_path / "moved")


def test_a_plan_is_known_before_the_model_runs(prompted, monkeypatch):
    run = load_run(prompted)
    inputs = run.encode([("the film was good",), ("a dull and awful meal",)]).batch(slice(None))
    expected = run.rule.plan(inputs)
    order = []
    segments, plan = run.segments(), type(run.rule).plan
    monkeypatch.setattr(type(run.rule), "plan", lambda self, rows: order.append("plan") or plan(self, rows))
    advance, read = segments.advance, segments.read
    segments.advance = lambda k, state: order.append(f"layers {k}") or advance(k, state)
    segments.read = lambda k, state: order.append(f"head {k}") or read(k, state)
    result = early_exit(segments, run.rule, inputs)
    assert order[0] == "plan" and order.count("plan") == 1 and (result.exit_index == expected).all()
    assert [step for step in order if "head" in step] == [f"head {k}" for k in sorted(set(expected))]


def test_the_exits_of_a_prompt_are_those_that_are_asked_for(capsys, tmp_path, checkpoint_folder, base, task_folder):
    options = ("--task", task_folder, "--out", tmp_path / "run")
    through = ("--model", checkpoint_folder, *options, *TERRIBLE)
    assert answer(capsys, "train", "raee", *through, "--exits", "2,3", "--include-embeddings")["exits"] == [0, 2, 3]
    assert load_run(tmp_path / "run").model.exits == (0, 2, 3)
    is_served_end_to_end(capsys, tmp_path, tmp_path / "run", task_folder, "torch", ())
    shutil.rmtree(tmp_path / "run")
    message = "exits must ascend from at least 1 and end at the last layer, 3, got 3,2"
    assert message in refused(capsys, "train", "raee", *through, "--exits", "3,2")
    for option, value in (("--exits", "3"), ("--lr", "1")):
        message = f"{option} is set by {base}, a trained run"
        assert message in refused(capsys, "train", "raee", "--model", base, *options, option, value)
    assert "--lr is for fine-tuning on a few examples: give --shots too" in refused(
        capsys, "train", "raee", *through, "--lr", "1"
    )
    message = "--layer selects the states of the model that are the queries: leave out --layer or --encoder"
    queries = ("--layer", 1, "--encoder", checkpoint_folder)
    assert message in refused(capsys, "train", "raee", *through, *queries)
    for option in ("--pool", "--head-lr", "--max-loss", "--confidence"):
        assert f"unrecognized arguments: {option} 1" in refused(capsys, "train", "raee", *through, option, "1")


def test_a_plan_is_not_calibrated_and_another_methods_training_stays(capsys, tmp_path, prompted, base, task_folder):
    message = "its datastore chooses the exits; calibrate the run that it was collected on"
    assert message in refused(capsys, "calibrate", prompted, "--task", task_folder, "--epsilon", ".9")
    state = tmp_path / "run.training" / "state.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"another's")
    for model in (("--model", base), TERRIBLE):
        line = refused(capsys, "train", "raee", "--task", task_folder, "--out", tmp_path / "run", *model)
        assert "run.training: an unfinished training is there" in line and state.read_bytes() == b"another's"
    state.unlink()
    with sole_writer(state.parent):
        line = refused(capsys, "train", "raee", "--task", task_folder, "--out", tmp_path / "run", "--model", base)
        assert "another process is writing it" in line and not (tmp_path / "run").exists()


def test_layer_0_is_an_exit_where_it_is_asked_for_and_only_a_plan_may_use_it(
    capsys, tmp_path, checkpoint_folder, task_folder
):
    options = ("--model", checkpoint_folder, "--task", task_folder, "--out", tmp_path / "run", *TERRIBLE, "--tau", "0")
    result = answer(capsys, "train", "raee", *options, "--include-embeddings")
    assert result["exits"] == [0, 1, 2, 3] and result["rule"]["include_embeddings"] is True
    result = answer(capsys, "evaluate", tmp_path / "run", "--task", task_folder)
    assert sum(result["exit_counts"]) == 20 and len(result["exit_counts"]) == 4
    message = refused(capsys, "evaluate", tmp_path / "run", "--task", task_folder, "--threshold", ".9")
    assert "only a rule that plans can exit at layer 0 of a prompt: use never, fixed or" in message


def test_a_decoder_is_read_through_its_prompt_too(capsys, tmp_path, task_folder, decoder_checkpoint):
    words = ("--template", "{text} It was", "--words", "0=bad,1=good", "--shots", 2, "--epochs", 1)
    options = ("--model", decoder_checkpoint, "--task", task_folder, "--out", tmp_path / "run", "--max-train", 6)
    result = answer(capsys, "train", "raee", *options, *words)
    assert result["rows"] == 6 and result["exits"] == [1, 2, 3] and result["shots"] == 2
    result = answer(capsys, "evaluate", tmp_path / "run", "--task", task_folder)
    assert result["method"] == "raee" and list(result["controls"])[0] == "knn_labels"
    is_served_end_to_end(capsys, tmp_path, tmp_path / "run", task_folder, "onnxruntime", ())
    is_served_end_to_end(capsys, tmp_path, tmp_path / "run", task_folder, "torch", ())
    is_served_end_to_end(capsys, tmp_path, tmp_path / "run", task_folder, "onnxruntime", ("--int8",))


def test_classify_shows_the_label_words_layer_by_layer(capsys, prompted):
    assert called("classify", prompted, "--text", "the film was good") == 0
    heading = capsys.readouterr().out.splitlines()[0].split()
    assert heading == ["layer", "label", "awful", "great"]
    result = answer(capsys, "classify", prompted, "--text", "the film was good")
    for row in result["rows"]:
        assert sum(row["words"].values()) == pytest.approx(1)
        assert max(row["words"].values()) == pytest.approx(row["confidence"])


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("onnxruntime", ()), ("onnxruntime", ("--fp16",)), ("torch", ("--fp16",))],
    ids=str,
)
def test_a_prompted_run_is_served_without_torch_end_to_end(capsys, tmp_path, prompted, task_folder, engine, precision):
    """In int8, and in float32 by torch: the tests of a decoder and of named exits."""
    is_served_end_to_end(capsys, tmp_path, prompted, task_folder, engine, precision)


def test_a_sweep_is_the_rules_figure_for_each_k_and_share_of_the_datastore(capsys, tmp_path, prompted, task_folder):
    options = ("--task", task_folder, "--batch-size", 8, "--k", 4)
    result = answer(capsys, "evaluate", prompted, *options, "--sweep", "--picture", tmp_path / "sweep.png")
    points = {(point["database"], point["k"]): point for point in result["rows"]}
    wrong = (load_run(prompted).rule.datastore.values[:, -1] == 0).sum()
    assert {point["database"]: point["rows"] for point in result["rows"]} == {
        "20%": 12,
        "50%": 30,
        "100%": 60,
        "w/o": 60 - wrong,
    }
    assert {key: points["100%", 4][key] for key in ("accuracy", "mean_layers", "exit_counts", "flops_ratio")} == {
        key: result[key] for key in ("accuracy", "mean_layers", "exit_counts", "flops_ratio")
    }
    assert len(points) == 24 and (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_prompted_collection_goes_on_with_the_same_call(tmp_path, checkpoint_folder, task_folder, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    arguments, options = (tmp_path / "out", checkpoint_folder, task_folder), WORDS | TUNED | {"epochs": 1}
    for module, step in ((prompt_run, "fit"), (prompt_run, "save_run"), (collecting, "Datastore")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, killed)
            with pytest.raises(KeyboardInterrupt):
                collect(*arguments, **options)
        assert not (tmp_path / "out").exists()
    assert len(collect(*arguments, **options).rule.datastore) == 44
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_few_shot_training_goes_on_to_the_same_weights(
    tmp_path, tuned, checkpoint_folder, task_folder, monkeypatch
):
    arguments, options = (tmp_path / "out", checkpoint_folder, task_folder), WORDS | THREE | TUNED
    step, done = torch.optim.AdamW.step, []

    def stepping(self, *rest):
        if done == ["a step"]:
            raise KeyboardInterrupt
        done.append("a step")
        return step(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stepping)
        with pytest.raises(KeyboardInterrupt):
            collect(*arguments, **options)
    with pytest.raises(ValueError, match="was started with shots 4, .*; resume with the same settings"):
        collect(*arguments, **options | {"shots": 3})
    done[:] = ["another"]
    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    expected = load_run(tuned).model.state_dict()
    weights = collect(*arguments, **options).model.state_dict()
    assert done == ["another", "a step"] and all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected a prompt for words under encoder, found those for SST-2"),
        (("--template", "{text} {mask}"), "give --template and --words together, or --prompts alone"),
        (("--template", "{text}", "--words", "0=bad,1=good"), "expected {mask}, which an encoder reads"),
        (("--template", "{text} {mask}", "--words", "0=bad,2=good"), "expected words by class"),
        (
            ("--template", "{text} {mask}", "--words", "bad=awful,up=great"),
            "or by label name (bad, good), found words",
        ),
        (("--template", "{text} {mask}", "--words", "good=nasty,bad=bad"), "the label word 'nasty' must be one token"),
        (("--template", "{text} {mask}", "--words", "0=bad,1=nasty"), "the label word 'nasty' must be one token"),
        ((*TERRIBLE, "--shots", "40"), "expected 80 rows of class 0 for 40 shots, found 3"),
        ((*TERRIBLE, "--layer", "9"), "the layer must be from 0 to 3, got 9"),
        (("--prompts", "nothing.json"), "nothing.json: no such file"),
    ],
)
def test_wrong_prompts_are_told(capsys, tmp_path, checkpoint_folder, task_folder, options, message):
    base = ("--model", checkpoint_folder, "--task", task_folder, "--out", tmp_path / "out")
    assert message in refused(capsys, "train", "raee", *base, *options)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_head_to_words_is_told_that_a_trained_run_will_do(
    capsys, tmp_path, checkpoint_folder, task_folder
):
    bare, heads, out = tmp_path / "bare", tmp_path / "heads", tmp_path / "out"
    save_backbone(load_backbone(checkpoint_folder).without_heads(), bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, bare)
    line = refused(capsys, "train", "raee", "--model", bare, "--task", task_folder, "--out", out, *TERRIBLE)
    assert f"{bare}: this bert has no masked-LM head: load a checkpoint that was saved with one, or train " in line
    assert "(mini-ee train joint) and give that run as --model" in line and not out.exists()
    given = ("--model", bare, "--task", task_folder, "--out")
    assert called("train", "joint", *given, heads, *FAST) == 0  # as the line says
    assert called("train", "raee", "--model", heads, "--task", task_folder, "--out", out) == 0


@pytest.mark.parametrize("kind", [Path, str])
def test_a_file_of_prompts_says_what_a_template_and_words_say(tmp_path, checkpoint_folder, task_folder, prompted, kind):
    prompt, file = {"template": WORDS["template"], "words": {"0": "awful", "1": "great"}}, tmp_path / "prompts.json"
    file.write_text(json.dumps({"encoder": {"words": prompt}}))
    run = collect(tmp_path / "out", checkpoint_folder, task_folder, prompts=kind(file), max_train=9, **THREE)
    assert run.config["prompt"] == load_run(prompted).config["prompt"]
    assert run.config["settings"]["prompts"] == str(file)


def test_words_that_are_no_pairs_are_told(capsys, tmp_path):
    given = ("--template", "{text} {mask}", "--words", "bad,good")
    line = refused(capsys, "train", "raee", "--out", tmp_path / "out", *given)
    assert "expected a word for each class, as 0=terrible,1=great, found bad,good" in line


def test_prompts_are_for_a_checkpoint_and_pictures_for_a_sweep(capsys, tmp_path, base, prompted, task_folder):
    run = ("--model", base, "--task", task_folder, "--out", tmp_path / "out")
    assert "--shots is for a checkpoint that is read through a prompt" in refused(
        capsys, "train", "raee", *run, "--shots", 2
    )
    assert "is a trained run, which has heads" in refused(capsys, "train", "raee", *run, *TERRIBLE)
    message = "mini-ee train joint: unrecognized arguments: --template"
    assert message in refused(capsys, "train", "joint", "--out", tmp_path / "out", *TERRIBLE)
    picture = ("--task", task_folder, "--picture", tmp_path / "a.png")
    assert "--picture is for --sweep: add it" in refused(capsys, "evaluate", prompted, *picture)
