"""A datastore in shards: nearest of all is nearest in its shard, and nothing else changes with their number."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

import mini_ee
from mini_ee.experiments.measured import page_of
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Encoded
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.methods.raee_datastore import Collected, Datastore, build

RESULTS = Path(__file__).parents[3] / "results"
ENCODER, WIDTH = "a test's encoder", 8


def drawn(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def filled(count=200, shards=3, vectors=None, **settings):
    """A datastore whose row i has the label i; added in parts of unequal size."""
    store = Datastore(ENCODER, WIDTH, (1, 2), shards=shards, **settings)
    vectors = drawn(count) if vectors is None else vectors
    for rows in np.split(np.arange(len(vectors)), [1, 5, 90]):
        store.add(vectors[rows], np.ones((len(rows), 2)), rows, [(f"row {row}",) for row in rows])
    return store


def nearest(vectors, queries, k):
    """By loops: the k nearest of unit vectors to each query, and squared distances; the earlier of equals."""
    unit = [v.astype(np.float64) / np.linalg.norm(v.astype(np.float64)) for v in vectors]
    found = []
    for query in queries.astype(np.float64):
        query = query / np.linalg.norm(query)
        found.append(sorted((float(sum((v - query) ** 2)), row) for row, v in enumerate(unit))[:k])
    return np.array([[row for _, row in each] for each in found]), np.array([[d for d, _ in each] for each in found])


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_the_nearest_of_all_shards_are_those_of_loops_over_all_rows(shards):
    vectors, queries = drawn(200), drawn(30, seed=1)
    rows, distances = nearest(vectors, queries, 12)
    found = filled(shards=shards, vectors=vectors).search(
        queries, 12
    )  # ef is above 200: a shard misses none of its own
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_allclose(found.distances, distances, atol=1e-5)


def test_rows_are_added_and_deleted_as_in_one_index():
    store, vectors = filled(), drawn(230)
    gone = [0, 3, 4, 100, 199]
    store.delete(gone)
    store.add(drawn(230)[200:], np.ones((30, 2)), np.arange(200, 230), [("new",)] * 30)
    remaining = np.delete(np.arange(230), gone)
    np.testing.assert_array_equal(store.labels, remaining)
    unit = vectors[remaining] / np.linalg.norm(vectors[remaining], axis=1, keepdims=True)
    np.testing.assert_allclose(store.embeddings, unit, atol=1e-6)
    queries = drawn(20, seed=1)
    np.testing.assert_array_equal(store.search(queries, 12).rows, nearest(vectors[remaining], queries, 12)[0])
    part = store.take(slice(10, 60))
    assert part.shards == 3 and len(part) == 50


@pytest.mark.parametrize("left", [1, 2, 7])
def test_shards_without_rows_are_passed_over(left):
    store = filled(shards=4)
    store.delete(range(left, 200))
    rows, _ = nearest(drawn(200)[:left], drawn(3, seed=1), left)
    np.testing.assert_array_equal(store.search(drawn(3, seed=1), 12).rows, rows)


def test_a_shard_grows_and_many_copies_of_one_text_are_still_found():
    vectors = np.repeat(drawn(1), 2100, axis=0)
    found = filled(shards=2, vectors=vectors).search(drawn(1), 1500)
    assert sorted(found.rows[0]) == sorted(set(found.rows[0])) and (found.distances == 0).all()


def test_shards_are_the_same_every_time_and_saved_and_loaded_too(tmp_path):
    for name in ("a", "b"):
        filled().save(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["entries.safetensors", "index.0.hnsw", "index.1.hnsw", "index.2.hnsw", "manifest.json"]
    for name in names:
        a, b = (hashlib.sha256((tmp_path / folder / name).read_bytes()).digest() for folder in ("a", "b"))
        assert a == b, name
    store, again = filled(), Datastore.load(tmp_path / "a", ENCODER)
    store.delete([7, 8])
    store.save(tmp_path / "a")
    again = Datastore.load(tmp_path / "a", ENCODER)
    assert again.shards == 3 and len(again) == 198
    for one, other in zip(store.search(drawn(9, seed=1), 12), again.search(drawn(9, seed=1), 12)):
        np.testing.assert_array_equal(one, other)


def test_a_shard_that_is_gone_or_of_another_place_is_told(tmp_path):
    filled().save(tmp_path)
    (tmp_path / "index.1.hnsw").rename(tmp_path / "index.9.hnsw")
    with pytest.raises(FileNotFoundError, match=r"index.1.hnsw: no such file; build the datastore again"):
        Datastore.load(tmp_path, ENCODER)
    (tmp_path / "index.1.hnsw").write_bytes((tmp_path / "index.0.hnsw").read_bytes())
    with pytest.raises(ValueError, match=r"index.1.hnsw: damaged, or of another datastore"):
        Datastore.load(tmp_path, ENCODER)


def test_a_manifest_with_a_wrong_number_of_shards_is_told(tmp_path):
    filled().save(tmp_path)
    manifest = read_json(tmp_path / "manifest.json")
    for shards, message in ((0, "expected in index.shards a whole number from 1"), (2, "which used other file names")):
        write_json(tmp_path / "manifest.json", manifest | {"index": manifest["index"] | {"shards": shards}})
        with pytest.raises(ValueError, match=message):
            Datastore.load(tmp_path, ENCODER)


def test_a_datastore_without_a_number_of_shards_has_one(tmp_path):
    """As older ones were written."""
    filled(shards=1).save(tmp_path)
    manifest = read_json(tmp_path / "manifest.json")
    del manifest["index"]["shards"]
    write_json(tmp_path / "manifest.json", manifest)
    assert Datastore.load(tmp_path, ENCODER).shards == 1


def test_shards_are_built_and_searched_side_by_side(monkeypatch):
    """Each waits in the middle until all are there: in turns none would come through."""
    import threading

    together = threading.Barrier(3, timeout=20)
    store = filled()

    class Waiting:
        def __init__(self, index):
            self.index = index

        def __getattr__(self, name):
            if name in ("knn_query", "add_items"):
                together.wait()
            return getattr(self.index, name)

    monkeypatch.setattr(store._shards, "indexes", [Waiting(index) for index in store._shards.indexes])
    store.add(drawn(6, seed=2), np.ones((6, 2)), np.zeros(6), [("",)] * 6)
    store.search(drawn(2), 3)


def test_an_unfinished_build_in_other_shards_is_told(tmp_path):
    encoded = Encoded([np.ones(1, np.int64)] * 4, [np.zeros(1, np.int64)] * 4, tuple((f"{i}",) for i in range(4)), 0, 0)

    def collected(shards):
        return Collected(encoded, np.ones((4, 2)), np.arange(4), (1, 2), shards)

    embeds = iter([drawn(2)])
    settings = {"batch_size": 2, "save_every": 1}
    with pytest.raises(StopIteration):
        build(tmp_path / "store", ENCODER, lambda inputs: next(embeds), collected(2), **settings)
    with pytest.raises(ValueError, match="an unfinished build of other rows is there; remove it"):
        build(tmp_path / "store", ENCODER, lambda inputs: drawn(2), collected(3), **settings)
    store = build(tmp_path / "store", ENCODER, lambda inputs: drawn(2), collected(2), **settings)
    assert store.shards == 2 and len(store) == 4


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
    assert [answer.exit for answer in runtime.run(texts)] == run.rule.plan(inputs).tolist()


def test_the_page_is_made_of_the_figures_that_are_kept_and_recall_is_at_least_99_percent():
    figures = read_json(RESULTS / "shards.json")
    assert page_of("shards", figures) == (RESULTS / "shards.md").read_text(), (
        "write the page anew: mini-ee reproduce shards"
    )
    assert [case["shards"] for case in figures["cases"]] == [1, 2, 4, 8] and figures["rows"] == 67_349
    assert all(case["recall"] >= 0.99 for case in figures["cases"])


def test_shards_in_actors_on_ray_are_those_in_threads(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mini-ee[ray]'")
    from mini_ee.lab.methods.raee_actors import ActorDatastore

    def same():
        for one, other in zip(near.search(drawn(30, seed=1), 12), far.search(drawn(30, seed=1), 12)):
            np.testing.assert_array_equal(one, other)

    filled(shards=2).save(tmp_path / "near")
    near = Datastore.load(tmp_path / "near", ENCODER)
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR")
    try:
        far = ActorDatastore.load(tmp_path / "near", ENCODER)
        same()
        for store in (near, far):
            store.delete([0, 7, 8])
            store.add(drawn(30, seed=2), np.ones((30, 2)), np.arange(30), [("new",)] * 30)
        same()
        np.testing.assert_array_equal(near.embeddings, far.embeddings)
        for store, name in ((near, "near"), (far, "far")):
            store.save(tmp_path / name)
        for path in (tmp_path / "near").iterdir():
            assert path.read_bytes() == (tmp_path / "far" / path.name).read_bytes()
        with pytest.raises(
            RuntimeError, match="Cannot return the results"
        ):  # as hnswlib's own, by which Datastore goes
            far._shards.indexes[0].knn_query(drawn(1), 500)
    finally:
        ray.shutdown()
