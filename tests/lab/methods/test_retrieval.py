"""RAEE: the datastore in memory and on disk, the rule, and the controls.

Its equations: tests/spec/test_3_raee.py.
"""

import json
import math
import os
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import hnswlib
import numpy as np
import pytest

import mini_ee
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import Task, load_task
from mini_ee.lab.data.tokenizer import Encoded, Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.methods.raee import Retrieval, collect, plan_ahead
from mini_ee.lab.methods.raee_controls import (
    KS,
    ablation,
    best_single_exit,
    earliest_right_exit,
    full_model_is_right,
    knn_labels,
    retrieved,
    shuffled_plan,
)
from mini_ee.lab.methods.raee_datastore import Datastore, exact_search, unit_length
from mini_ee.lab.recording import plan_rows, record
from mini_ee.lab.rules import Fixed, Never, Planned, rule_from_dict
from mini_ee.raee import chosen_exit, exit_distribution, exit_values, neighbour_weights

SHARED = os.environ.get("MINI_EE_SHARED")
ENCODER = "a test's encoder"
RESULTS = Path(__file__).parents[3] / "results"


def embedding_of(text, dimension=8):
    """A direction that only this text has."""
    return np.random.default_rng(zlib.crc32(text.encode())).normal(size=dimension).astype(np.float32)


def embed(inputs):
    return np.stack([embedding_of(text) for (text,) in inputs.texts])


def filled(count=60, exits=(1, 2, 4, 6), shards=1):
    """A datastore of rows "row 0", "row 1", ..., with random values, some 0."""
    random, texts = np.random.default_rng(count), [(f"row {i}",) for i in range(count)]
    values = random.uniform(0, 1, (count, len(exits))) * random.integers(0, 2, (count, len(exits)))
    vectors = unit_length(np.stack([embedding_of(text) for (text,) in texts]))
    return Datastore(ENCODER, exits, vectors, values, random.integers(0, 3, count), texts, shards)


def of_one(values, exits=(0, 1, 2)):
    """A datastore of the text "row"."""
    return Datastore(ENCODER, exits, unit_length(embedding_of("row")[None]), [values], [0], [("row",)])


def sentences(texts):
    """Encoded rows of one token and a text each, lengths in turn 1, 2, 3."""
    ids = [np.full(1 + i % 3, 7) for i in range(len(texts))]
    return Encoded(ids, [0 * row_ids for row_ids in ids], tuple((text,) for text in texts), 0, 0)


def assert_whole(store):
    """Index, values, labels and texts are of the same rows: each text's direction leads to its own row."""
    nearest = store.search(np.stack([embedding_of(text) for (text,) in store.texts]), 1)
    np.testing.assert_array_equal(nearest.rows[:, 0], np.arange(len(store)))
    np.testing.assert_array_equal(nearest.distances, 0)


def assert_equal(store, other):
    for name in ("encoder", "exits", "texts", "shards"):
        assert getattr(store, name) == getattr(other, name)
    queries = np.random.default_rng(5).normal(size=(10, store.dimension))
    matches = zip(store.search(queries, 5), other.search(queries, 5))
    for one, two in ((store.values, other.values), (store.labels, other.labels), *matches):
        np.testing.assert_array_equal(one, two)


# The datastore: search


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_the_nearest_of_all_shards_are_those_of_loops_over_all_rows(shards):
    store = filled(500, shards=shards)
    queries = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    nearest = store.search(queries, 12)
    expected = np.array([[math.dist(query, embedding) ** 2 for embedding in store.embeddings] for query in unit])
    np.testing.assert_array_equal(nearest.rows, expected.argsort(axis=1)[:, :12])
    np.testing.assert_allclose(nearest.distances, np.sort(expected, axis=1)[:, :12], atol=1e-6)
    exact = exact_search(store.embeddings, unit, 12)
    np.testing.assert_array_equal(nearest.rows, exact.rows)
    np.testing.assert_allclose(nearest.distances, exact.distances, atol=1e-6)
    assert_whole(store)


def test_the_length_of_an_embedding_does_not_matter():
    store, queries = filled(), np.random.default_rng(0).normal(size=(5, 8))
    np.testing.assert_array_equal(store.search(queries, 3).rows, store.search(1000 * queries, 3).rows)


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (2, 4), (60, 1), (60, 3)])
@pytest.mark.parametrize("more", [0, 1, 1000])
def test_k_of_the_datastore_and_larger_finds_every_row_once(count, shards, more):
    nearest = filled(count, shards=shards).search(np.ones((3, 8)), count + more)
    np.testing.assert_array_equal(np.sort(nearest.rows, axis=1), np.tile(np.arange(count), (3, 1)))
    assert (np.diff(nearest.distances, axis=1) >= 0).all()


def test_rows_that_the_graph_does_not_lead_to_are_found_by_looking_at_all():
    store, copy, count = filled(20), unit_length(embedding_of("copy")), 3000
    vectors = np.concatenate([store.embeddings, np.tile(copy, (count, 1))])
    size = len(vectors)
    sparse = hnswlib.Index("l2", 8)
    sparse.init_index(size, M=4, ef_construction=20, random_seed=0)
    sparse.add_items(vectors, num_threads=1)
    rest = np.zeros((size, 4)), np.zeros(size), [("copy",)] * size
    store = Datastore(ENCODER, store.exits, vectors, *rest, indexes=[sparse])
    with pytest.raises(RuntimeError, match="contiguous"):  # or this test would show nothing
        sparse.knn_query(copy[None], size)
    nearest = store.search(copy[None], size)
    assert set(nearest.rows[0, :count]) == set(range(20, size)) and set(nearest.rows[0]) == set(range(size))
    np.testing.assert_array_equal(nearest.distances[0, :count], 0)


def test_distances_within_an_encoders_rounding_are_zero():
    store = filled(10)
    queries = np.stack([embedding_of("row 3")]).astype(np.float64)
    queries[0, 0] += 1e-6
    nearest = store.search(queries, 2)
    assert nearest.rows[0, 0] == 3 and nearest.distances[0, 0] == 0 < nearest.distances[0, 1]


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (np.ones((2, 7)), r"expected embeddings \(B, 8\) of the encoder a test's encoder, found .*built with"),
        (np.ones(8), r"expected embeddings \(B, 8\) of the encoder a test's encoder, found .*built with"),
        *((np.full((1, 8), value), "finite and not zero") for value in (np.nan, np.inf, 0.0, 1e-20, 1e30)),
    ],
)
def test_queries_that_are_no_embeddings_are_refused_without_a_warning(queries, message):
    """A warning is an error in these tests."""
    with pytest.raises(ValueError, match=message):
        filled().search(queries, 2)


def test_shards_are_searched_side_by_side():
    """Each waits in the middle until all are there: in turns none would come through."""
    together, store = threading.Barrier(3, timeout=20), filled(shards=3)

    class Waiting:
        def __init__(self, index):
            self.index = index

        def __getattr__(self, name):
            if name == "knn_query":
                together.wait()
            return getattr(self.index, name)

    store.indexes = [Waiting(index) for index in store.indexes]
    assert store.search(np.ones((1, 8)), 3).rows.shape == (1, 3)


@pytest.mark.parametrize("change", [{"values": np.ones((60, 3))}, {"labels": [0]}, {"texts": []}])
def test_parts_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="expected at least one row, and values of 4 exits, a label and a text for"):
        replace(filled(), **change)


@pytest.mark.parametrize("shards", [1, 3])
def test_taken_rows_make_a_datastore_of_their_own(shards):
    store = filled(60, shards=shards)
    part = store.take(full_model_is_right(store.values))
    rows = np.flatnonzero(store.values[:, -1])
    assert 0 < len(rows) < 60 and part.texts == [store.texts[row] for row in rows] and part.shards == shards
    np.testing.assert_array_equal(part.values, store.values[rows])
    assert_whole(part)
    assert_whole(store)


# The datastore: on disk


@pytest.mark.parametrize("shards", [1, 3])
def test_a_datastore_is_read_back_and_written_the_same_every_time(tmp_path, shards):
    store = filled(300, shards=shards)
    store.texts[0] = ("é \n\u2028", "a second text")
    for name in ("a", "b"):
        store.save(tmp_path / name)
    assert_equal(store, Datastore.load(tmp_path / "a", ENCODER))
    indexes = ["index.hnsw"] if shards == 1 else [f"index.{shard}.hnsw" for shard in range(3)]
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [*indexes, "manifest.json", "rows.safetensors"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"no index"), "other"])
def test_an_index_that_is_not_the_datastores_is_built_again(tmp_path, damage):
    """hnswlib would trust every number in the file, so it does not read it."""
    store = filled(200)
    store.save(tmp_path / "a")
    if damage == "other":
        filled(50).save(tmp_path / "b")
        (tmp_path / "b" / "index.hnsw").replace(tmp_path / "a" / "index.hnsw")
    else:
        damage(tmp_path / "a" / "index.hnsw")
    assert_equal(store, Datastore.load(tmp_path / "a", ENCODER))


def changed(name, old, new):
    """A file with other bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes().replace(old, new, 1))


def of_another(folder):
    filled(50).save(folder / "other")
    (folder / "other" / "rows.safetensors").replace(folder / "rows.safetensors")


def of_version_1(folder):
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"format_version": 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("rows.safetensors", b"values", b"volues"), "rows.safetensors: missing, damaged, or of another datast"),
        (lambda folder: os.truncate(folder / "rows.safetensors", 100), "rows.safetensors: missing, damaged, or of an"),
        (lambda folder: (folder / "rows.safetensors").unlink(), "rows.safetensors: missing, damaged, .*collect again"),
        (of_another, "rows.safetensors: missing, damaged, or of another datastore"),
        (changed("manifest.json", b"encoder", b"decoder"), "manifest.json: damaged or edited"),
        (lambda folder: os.truncate(folder / "manifest.json", 50), "manifest.json: expected a JSON object"),
        (lambda folder: (folder / "manifest.json").unlink(), "no datastore here; expected a folder with manifest.json"),
        (of_version_1, "expected a datastore of format_version 2, found 1; collect it again .*: mini-ee train raee"),
    ],
)
def test_a_damaged_datastore_is_one_line(tmp_path, damage, message):
    filled().save(folder := tmp_path / "store")
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        Datastore.load(folder, ENCODER)
    assert "\n" not in str(error.value)


def test_another_encoders_datastore_is_told(tmp_path):
    filled().save(tmp_path / "store")
    with pytest.raises(ValueError, match="encoder: expected another, found a test's encoder; give that encoder"):
        Datastore.load(tmp_path / "store", "another")


def test_an_index_that_the_disk_has_no_room_for_is_told(tmp_path):
    class HalfWritten(hnswlib.Index):
        def save_index(self, path):
            super().save_index(path)
            os.truncate(path, 1000)

    store = filled(50)
    store.indexes = [HalfWritten(store.indexes[0])]
    with pytest.raises(OSError, match=r"index.hnsw: could not be written completely; make room"):
        store.save(tmp_path / "store")


def test_only_a_datastore_needs_hnswlib_and_nothing_here_torch(tmp_path, monkeypatch):
    filled().save(tmp_path / "store")
    code = (
        "import sys; sys.modules['hnswlib'] = None; import mini_ee.lab.methods.raee; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    for opened in (filled, lambda: Datastore.load(tmp_path / "store", ENCODER)):
        with pytest.raises(ValueError, match="a datastore needs hnswlib, which is not installed: pip install hnswlib"):
            opened()


def test_a_run_and_what_is_exported_of_it_have_the_shards_that_were_asked_for(tmp_path, checkpoint_folder, task_folder):
    given = {"template": "{text} the {mask}", "words": ("bad=awful", "good=great"), "k": 3}
    one, run = (
        mini_ee.train("raee", checkpoint_folder, task_folder, tmp_path / str(shards), shards=shards, **given)
        for shards in (1, 3)
    )
    assert (one.rule.datastore.shards, run.rule.datastore.shards) == (1, 3)
    texts = load_task(task_folder).split("dev").texts
    inputs = run.encode(texts).batch(slice(None))
    np.testing.assert_array_equal(run.rule.plan(inputs), one.rule.plan(inputs))
    mini_ee.export(run, tmp_path / "exported", texts=texts)
    runtime = Runtime(tmp_path / "exported")
    assert runtime.rule.datastore.shards == 3
    assert [answer.exit for answer in runtime.run(texts)] == [run.exits[k] for k in run.rule.plan(inputs)]


def test_the_recall_that_was_measured_is_at_least_99_percent():
    figures = read_json(RESULTS / "shards.json")
    assert [case["shards"] for case in figures["cases"]] == [1, 2, 4, 8] and figures["rows"] == 67_349
    assert all(case["recall"] >= 0.99 for case in figures["cases"])


# The rule


def test_every_exit_of_the_model_is_collected(random_model):
    encoded, segments = sentences([f"row {i}" for i in range(7)]), random_model().segments()
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    expected = exit_values(record(segments, encoded, 4).logits, labels)
    np.testing.assert_array_equal(collect(segments, encoded, labels, 4), expected)


def bound(store=None, **settings):
    return Retrieval(**settings).with_datastore(store or filled(), embed)


def rows_like(count, name="query"):
    """A batch for planning and for random_model: 5 tokens and a text each."""
    ids = np.random.default_rng(count).integers(5, 60, (count, 5))
    return Inputs(ids, np.ones_like(ids), 0 * ids, tuple((f"{name} {i}",) for i in range(count)))


def test_a_copy_of_a_collected_row_leaves_where_that_row_was_surest():
    store = filled()
    surest = np.flatnonzero(store.values.max(axis=1) >= 0.9)
    inputs = Inputs(*3 * [np.ones((len(surest), 2), np.int64)], tuple(store.texts[row] for row in surest))
    assert len(surest) > 3
    np.testing.assert_array_equal(bound().plan(inputs), store.values[surest].argmax(axis=1))


def test_planned_groups_equal_row_by_row(random_model):
    segments, inputs, rule = random_model().segments(), rows_like(16), bound(tau=0.5, k=4)
    together = early_exit(segments, rule, inputs)
    assert len(set(together.exit_index.tolist())) > 2
    np.testing.assert_array_equal(together.exit_index, rule.plan(inputs))
    every = record(
        segments, Encoded(list(inputs.input_ids), list(inputs.token_type_ids), inputs.texts, 0, 0), 16
    ).logits
    for row in range(16):
        alone = early_exit(segments, rule, inputs.take([row]))
        assert alone.exit_index[0] == together.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], together.logits[row], atol=1e-6)
        np.testing.assert_allclose(together.logits[row], every[row, together.exit_index[row]], atol=1e-6)


def test_the_head_runs_only_where_a_row_leaves(random_model):
    segments, inputs, rule = random_model().segments(), rows_like(16), bound(tau=0.5, k=4)
    result = early_exit(segments, rule, inputs)
    flops = np.array([segments.flops(k, inputs) for k in range(4)])
    expected = [flops[: exit + 1, 0].sum() + flops[exit, 1] for exit in result.exit_index]
    np.testing.assert_allclose(result.cost.flops, expected)


def test_layer_0_is_an_exit_only_where_it_is_asked_for():
    store = of_one([0.99, 0.95, 0.0])
    inputs = Inputs(*3 * [np.ones((1, 2), np.int64)], (("row",),))
    assert bound(store).plan(inputs) == [1] and bound(store, include_embeddings=True).plan(inputs) == [0]
    assert store.values[0, 0] == np.float32(0.99)
    with pytest.raises(ValueError, match="include_embeddings needs values of layer 0"):
        bound(filled(), include_embeddings=True)


def test_the_votes_that_are_shown_are_those_that_count_where_layer_0_is_no_exit():
    """Layer 0 alone is sure enough: without it the neighbour falls back to its best right exits."""
    store = of_one([0.95, 0.6, 0.7])
    rule = bound(store, fallback_top=3)
    inputs = Inputs(*3 * [np.ones((1, 2), np.int64)], (("row",),))
    (shown,) = retrieved(rule, Encoded([np.ones(2, int)], [np.zeros(2, int)], (("row",),), 0, 0), 1)
    assert shown["layer"] == store.exits[rule.plan(inputs)[0]] == 2
    assert shown["neighbours"][0]["votes"] == [1, 2]


def test_the_rules_settings_stand_in_json_and_its_datastore_does_not():
    rule = bound(k=4, tau=0.8, fallback_top=3)
    config = json.loads(json.dumps(rule.to_dict()))
    assert config == {"name": "raee", "k": 4, "tau": 0.8, "fallback_top": 3, "include_embeddings": False}
    assert rule_from_dict(config) == rule
    rule_from_dict(config).check(4)


def test_a_rule_without_a_datastore_or_with_one_of_other_exits_says_so():
    with pytest.raises(ValueError, match="plans from a datastore, this one has none; give it one with with_datastore"):
        Retrieval().plan(rows_like(1))
    with pytest.raises(ValueError, match="collected at 4 exits, the model has 3; collect it again"):
        bound().check(3)
    bound().check(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be a whole number of at least 1, got 0"),
        ({"k": 2.0}, "k must be a whole number"),
        ({"tau": 1.1}, "tau must be a number from 0 to 1, got 1.1"),
        ({"fallback_top": -1}, "fallback_top must be a whole number of at least 0"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rule_from_dict({"name": "raee"} | settings)


def test_a_plan_of_all_rows_replays_on_a_record(random_model):
    encoded, segments = sentences([f"row {i}" for i in range(30)]), random_model().segments()
    rule = bound(tau=0.3, k=3)
    planned = plan_rows(rule, encoded, 4)
    np.testing.assert_array_equal(planned.exit_index, rule.plan(encoded.batch(np.arange(30))))
    recorded = record(segments, encoded, 8)
    np.testing.assert_array_equal(recorded.replay(planned).exit_index, planned.exit_index)
    with pytest.raises(ValueError, match="expected the 30 planned rows, found 29"):
        planned.plan(range(29))
    with pytest.raises(ValueError, match="must name the 2 exits by index"):
        planned.check(2)


def test_the_next_batch_is_planned_in_a_thread_while_this_one_runs():
    planning, calls = threading.Event(), []

    class Slow(Fixed):
        def plan(self, inputs):
            calls.append((len(inputs), threading.current_thread() is threading.main_thread()))
            if len(inputs) == 2:
                planning.set()
            return np.arange(len(inputs))

    batches = [rows_like(count) for count in (1, 2, 3)]
    for number, (inputs, planned) in enumerate(plan_ahead(Slow(0), batches)):
        assert inputs is batches[number] and planned == Planned(range(number + 1))
        if number == 0:
            assert planning.wait(10)  # the model runs on batch 0, nobody has asked for batch 1
    assert calls == [(1, False), (2, False), (3, False)]
    assert list(plan_ahead(Never(), [])) == []


def test_planning_ahead_changes_no_result(random_model):
    segments, rule, batches = random_model().segments(), bound(tau=0.5, k=4), [rows_like(5), rows_like(7, "other")]
    for inputs, planned in plan_ahead(rule, batches):
        ahead, plain = early_exit(segments, planned, inputs), early_exit(segments, rule, inputs)
        np.testing.assert_array_equal(ahead.logits, plain.logits)
        np.testing.assert_array_equal(ahead.exit_index, plain.exit_index)


def test_an_error_in_the_thread_reaches_the_caller():
    with pytest.raises(ValueError, match="has none"):
        list(plan_ahead(Retrieval(), [rows_like(1)]))


# The controls


def test_the_label_vote_is_the_most_frequent_label_and_the_nearest_of_equals():
    labels = np.array([[0, 1, 1, 2], [2, 1, 1, 2], [1, 2, 2, 1], [3, 3, 0, 0], [0, 1, 2, 1]])
    assert knn_labels(labels).tolist() == [1, 2, 1, 3, 1]
    assert knn_labels(np.array([[4], [0]])).tolist() == [4, 0]


def test_a_weighted_vote_is_the_label_whose_neighbours_weigh_most_by_eq5():
    labels = np.array([[0, 1, 1], [0, 1, 1], [0, 1, 1]])
    distances = np.array([[0.1, 0.3, 0.4], [0.1, 0.15, 0.2], [0.1, 0.2, 0.2]])  # 1 against 7/12, 7/6 and 1
    assert knn_labels(labels, neighbour_weights(distances)).tolist() == [0, 1, 0]
    assert knn_labels(labels).tolist() == [1, 1, 1]


def test_the_best_single_exit_is_right_most_often_the_earliest_of_equals():
    assert best_single_exit(np.array([[0.5, 0.0, 0.9], [0.5, 0.9, 0.9], [0.0, 0.9, 0.0]])) == 0
    assert best_single_exit(np.array([[0.0, 0.6, 0.6], [0.9, 0.6, 0.6]])) == 1


def test_a_shuffled_plan_has_the_same_exits_in_another_order():
    plan = np.arange(100) % 5
    lot = shuffled_plan(plan, seed=3)
    assert sorted(lot) == sorted(plan) and (lot != plan).mean() > 0.5
    np.testing.assert_array_equal(lot, shuffled_plan(plan, seed=3))
    assert (lot != shuffled_plan(plan, seed=4)).any()


def test_the_oracle_is_the_first_exit_that_is_right_and_the_last_where_none_is():
    values = np.array([[0.0, 0.4, 0.99], [0.3, 0.0, 0.9], [0.0, 0.0, 0.0]])
    assert earliest_right_exit(values > 0).tolist() == [1, 0, 2]


# The tables


def test_table2_without_keeps_the_examples_that_the_full_model_predicts_correctly():
    values = np.array([[0.9, 0.0], [0.0, 0.6], [0.0, 0.0], [0.7, 0.8]])
    np.testing.assert_array_equal(full_model_is_right(values), [False, True, False, True])


def ablation_of(random_model, monkeypatch, seed):
    """The points of `ablation` on 24 rows, and which collected rows each database was made of."""
    store, texts, made = filled(60), [f"query {i}" for i in range(24)], {}
    recorded = record(random_model().segments(), sentences(texts), 8)
    recorded.logits[:] = np.random.default_rng(7).normal(size=recorded.logits.shape)
    labels = np.random.default_rng(8).integers(0, 3, 24)
    take = Datastore.take
    with monkeypatch.context() as patch:
        patch.setattr(Datastore, "take", lambda self, rows: made.setdefault(len(rows), (rows, take(self, rows)))[1])
        task = Task("t", ("a", "b", "c"), ("accuracy",), {})
        points = ablation(bound(store, tau=0.5), recorded, sentences(texts), task, labels, 8, seed)
    return store, recorded.logits, labels, texts, points, {count: rows for count, (rows, _) in made.items()}


def test_the_parts_of_the_datastore_are_drawn_and_without_are_the_rows_that_the_full_model_gets_right(
    random_model, monkeypatch
):
    store, *_, points, made = ablation_of(random_model, monkeypatch, seed=0)
    right = np.flatnonzero(store.values[:, -1] > 0)
    assert [*dict.fromkeys((point["database"], point["rows"]) for point in points)] == [
        ("20%", 12),
        ("50%", 30),
        ("100%", 60),
        ("w/o", len(right)),
    ]
    np.testing.assert_array_equal(made[len(right)], right)
    for share in (12, 30):
        assert len(set(made[share])) == share and not np.array_equal(np.sort(made[share]), np.arange(share))
    again, other = (ablation_of(random_model, monkeypatch, seed)[-1] for seed in (0, 1))
    np.testing.assert_array_equal(made[30], again[30])
    assert set(made[30]) != set(other[30])


def test_each_figure_of_the_tables_is_the_rule_on_its_part_of_the_datastore(random_model, monkeypatch):
    store, logits, labels, texts, points, made = ablation_of(random_model, monkeypatch, seed=0)
    assert len(points) == 4 * len(KS)
    queries = [embedding_of(text) / np.linalg.norm(embedding_of(text)) for text in texts]
    all_distances = np.array(
        [[math.dist(query, embedding) ** 2 for embedding in store.embeddings] for query in queries]
    )
    for point in points:
        rows = made.get(point["rows"], np.arange(60))
        exits = []
        for distances in all_distances[:, rows]:
            nearest = np.argsort(distances)[: point["k"]]
            near = distances[None, nearest]
            exits.append(int(chosen_exit(exit_distribution(store.values[None, rows[nearest]], near, 0.5))[0]))
        predictions = logits[np.arange(24), exits].argmax(axis=1)
        assert point["accuracy"] == pytest.approx(np.mean(predictions == labels))
        assert point["mean_layers"] == pytest.approx(np.mean(np.array([1, 2, 4, 6])[exits]))


# Real embeddings


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_recall_at_12_on_real_sentences_is_at_least_99_percent():
    import torch

    from mini_ee.lab.backbones.hub import load_backbone
    from mini_ee.lab.data.tokenizer import Tokenizer, batches
    from mini_ee.lab.exits.heads import pooled

    folder = Path(SHARED) / "weights" / "all-MiniLM-L6-v2"
    backbone = load_backbone(folder)
    encoded = Tokenizer.from_folder(folder).encode(
        load_task(Path(SHARED) / "data" / "SST-2").split("train").texts[:500]
    )
    embeddings = np.empty((500, 384), np.float32)
    for rows in batches(encoded, 64):
        inputs = encoded.batch(rows)
        with torch.inference_mode():
            context = backbone.context(inputs)
            hidden = backbone.run_layers(backbone.embed(inputs), context, 0, 6)
            embeddings[rows] = pooled(hidden, context.padding, "mean").numpy()
    rows = unit_length(embeddings[:400]), np.zeros((400, 1)), np.zeros(400), encoded.texts[:400]
    store = Datastore(ENCODER, (1,), *rows)
    queries = embeddings[400:] / np.linalg.norm(embeddings[400:], axis=1, keepdims=True)
    nearest, exact = store.search(queries, 12), exact_search(store.embeddings, queries, 12)
    recall = np.mean([len(set(a) & set(b)) / 12 for a, b in zip(nearest.rows, exact.rows)])
    assert recall >= 0.99
