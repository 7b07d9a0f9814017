"""RAEE: the datastore in memory and on disk, the rule, and the controls.

Its equations: tests/spec/test_3_raee.py.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import hnswlib
import numpy as np
import pytest
from safetensors.numpy import save

import mini_ee.lab.methods.raee_datastore as datastore_module
from mini_ee.lab.data.files import file_sha256, read_json, write_json
from mini_ee.lab.data.tasks import Task
from mini_ee.lab.data.tokenizer import Encoded, Inputs
from mini_ee.lab.early_exit import early_exit
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
from mini_ee.lab.methods.raee_datastore import Collected, Datastore, build, exact_search
from mini_ee.lab.methods.raee_files import read_manifest
from mini_ee.lab.methods.raee_index import HEADER
from mini_ee.lab.recording import plan_rows, record
from mini_ee.lab.rules import FixedExit, NeverExit, Planned, rule_from_dict
from mini_ee.raee import chosen_exit, exit_distribution, exit_values, neighbour_weights

SHARED = os.environ.get("MINI_EE_SHARED")
KILLS = int(os.environ.get("MINI_EE_KILLS", "1"))  # moments of each kind; 20 by hand
ENCODER = "a test's encoder"


def embedding_of(text, dimension=8):
    """A direction that only this text has."""
    return np.random.default_rng(zlib.crc32(text.encode())).normal(size=dimension).astype(np.float32)


def embed(inputs):
    return np.stack([embedding_of(text) for (text,) in inputs.texts])


def filled(count=60, exits=(1, 2, 4, 6), name="row", encoder=ENCODER):
    """A datastore of rows "row 0", "row 1", ..., with random values, some 0."""
    store = Datastore(encoder, 8, exits)
    random = np.random.default_rng(count)
    texts = [(f"{name} {i}",) for i in range(count)]
    values = random.uniform(0, 1, (count, len(exits))) * random.integers(0, 2, (count, len(exits)))
    store.add(np.stack([embedding_of(text) for (text,) in texts]), values, random.integers(0, 3, count), texts)
    return store


def add_all(store, other, threads=1):
    store.add(other.embeddings, other.values, other.labels, other.texts, threads)


def sentences(texts):
    """Encoded rows of one token and a text each, lengths in turn 1, 2, 3."""
    ids = [np.full(1 + i % 3, 7) for i in range(len(texts))]
    return Encoded(ids, [0 * each for each in ids], tuple((text,) for text in texts), 0, 0)


def assert_whole(store):
    """Index, values, labels and texts are of the same rows: each text's direction leads to its own row."""
    found = store.search(np.stack([embedding_of(text) for (text,) in store.texts]), 1)
    np.testing.assert_array_equal(found.rows[:, 0], np.arange(len(store)))
    np.testing.assert_array_equal(found.distances, 0)


# The datastore: search


def test_search_equals_brute_force():
    store = filled(500)
    queries = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    found = store.search(queries, 12)
    expected = np.array([[math.dist(query, each) ** 2 for each in store.embeddings] for query in unit])
    np.testing.assert_array_equal(found.rows, expected.argsort(axis=1)[:, :12])
    np.testing.assert_allclose(found.distances, np.sort(expected, axis=1)[:, :12], atol=1e-6)
    exact = exact_search(store.embeddings, unit, 12)
    np.testing.assert_array_equal(found.rows, exact.rows)
    np.testing.assert_allclose(found.distances, exact.distances, atol=1e-6)


def test_the_length_of_an_embedding_does_not_matter():
    store, queries = filled(), np.random.default_rng(0).normal(size=(5, 8))
    np.testing.assert_array_equal(store.search(queries, 3).rows, store.search(1000 * queries, 3).rows)
    np.testing.assert_allclose(np.linalg.norm(store.embeddings, axis=1), 1, atol=1e-6)


def test_a_database_of_one_answers_with_its_row():
    found = filled(1).search(np.ones((2, 8)), 12)
    assert found.rows.tolist() == [[0], [0]] and found.distances.shape == (2, 1)


@pytest.mark.parametrize("k", [60, 61, 1000])
def test_k_of_the_database_and_larger_finds_every_row_once(k):
    found = filled(60).search(np.ones((3, 8)), k)
    np.testing.assert_array_equal(np.sort(found.rows, axis=1), np.tile(np.arange(60), (3, 1)))
    assert (np.diff(found.distances, axis=1) >= 0).all()


def test_rows_that_the_graph_does_not_lead_to_are_found_by_looking_at_all():
    store, copy, count = Datastore(ENCODER, 8, (1, 2, 4, 6), m=4, ef_construction=20), embedding_of("copy"), 3000
    add_all(store, filled(20))
    store.add(np.tile(copy, (count, 1)), np.zeros((count, 4)), np.zeros(count, int), [("copy",)] * count)
    with pytest.raises(RuntimeError, match="contiguous"):  # or this test would show nothing
        store._shards.indexes[0].knn_query(copy[None], len(store))
    found = store.search(copy[None], len(store))
    assert set(found.rows[0, :count]) == set(range(20, count + 20)) and set(found.rows[0]) == set(range(count + 20))
    np.testing.assert_array_equal(found.distances[0, :count], 0)


def test_distances_within_an_encoders_rounding_are_zero():
    store = filled(10)
    queries = np.stack([embedding_of("row 3")]).astype(np.float64)
    queries[0, 0] += 1e-6
    found = store.search(queries, 2)
    assert found.rows[0, 0] == 3 and found.distances[0, 0] == 0 < found.distances[0, 1]


@pytest.mark.parametrize("bad", [np.ones((2, 7)), np.ones(8)])
def test_embeddings_of_another_dimension_are_refused(bad):
    message = r"expected embeddings \(B, 8\) of the encoder a test's encoder, found .*built with"
    with pytest.raises(ValueError, match=message):
        filled().search(bad, 2)
    with pytest.raises(ValueError, match=message):
        filled().add(bad, np.zeros((2, 4)), [0, 0], [("a",), ("b",)])


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e-20, 1e30])
def test_embeddings_without_a_direction_are_refused_without_a_warning(value):
    """A warning is an error in these tests."""
    with pytest.raises(ValueError, match="finite and not zero"):
        filled().search(np.full((1, 8), value), 2)


def test_an_empty_datastore_cannot_be_searched():
    with pytest.raises(ValueError, match="found 0 rows to retrieve"):
        Datastore(ENCODER, 8, (1, 2)).search(np.ones((1, 8)), 3)


# The datastore: change


def test_added_rows_are_found_beside_the_old_ones():
    store, more = filled(50), filled(1100, name="more")
    before = store.values.copy()
    add_all(store, more, threads=2)
    assert len(store) == 1150 and store.texts[50] == ("more 0",)
    np.testing.assert_array_equal(store.values, np.concatenate([before, more.values]))
    assert_whole(store)


def test_parts_that_do_not_fit_are_refused_and_change_nothing():
    store = filled()
    for values, labels, texts in (
        (np.zeros((1, 3)), [0], [("a",)]),
        (np.zeros((1, 4)), [0, 1], [("a",)]),
        (np.zeros((1, 4)), [0], []),
    ):
        with pytest.raises(ValueError, match="expected 1 rows with values for 4 exits, found"):
            store.add(np.ones((1, 8)), values, labels, texts)
    assert len(store) == 60
    assert_whole(store)


def test_deleted_rows_are_never_found_and_the_others_keep_their_values():
    store, whole = filled(60), filled(60)
    gone, stay = [0, 7, 59, 7], np.setdiff1d(np.arange(60), [0, 7, 59])
    store.delete(gone)
    assert store.texts == [whole.texts[row] for row in stay]
    np.testing.assert_array_equal(store.values, whole.values[stay])
    np.testing.assert_array_equal(store.labels, whole.labels[stay])
    assert_whole(store)
    assert store.search(np.ones((1, 8)), 60).rows.shape == (1, 57)
    assert (store.search(whole.embeddings[[0, 7, 59]], 1).distances > 0.01).all()
    everything = store.search(np.ones((1, 8)), 57)
    np.testing.assert_array_equal(np.sort(everything.rows[0]), np.arange(57))
    store.delete([56])
    more = filled(5, name="more")
    add_all(store, more)
    assert len(store) == 61 and store.texts[-5:] == more.texts
    assert_whole(store)


def test_a_row_that_is_not_there_cannot_be_deleted():
    for row in (-1, 60):
        with pytest.raises(ValueError, match="expected rows from 0 to 59, found"):
            filled().delete([row])


def test_taken_rows_make_a_datastore_of_their_own():
    store = filled(60)
    store.delete(range(10))
    part = store.take(full_model_is_right(store.values))
    rows = np.flatnonzero(store.values[:, -1])
    assert 0 < len(rows) < 50 and part.texts == [store.texts[row] for row in rows]
    np.testing.assert_array_equal(part.values, store.values[rows])
    assert len(part._shards) == len(rows)
    assert_whole(part)
    assert_whole(store)
    settings = {"m": 8, "ef_construction": 50, "ef": 30, "shards": 2}
    store = Datastore(ENCODER, 8, (1, 2, 4, 6), **settings)
    add_all(store, filled(20))
    part = store.take(np.arange(5))
    assert {name: getattr(part._shards, name) for name in ("m", "ef_construction", "ef")} | {"shards": 2} == settings
    assert part.shards == 2


# The datastore: on disk


def equal(store, other):
    queries = np.random.default_rng(5).normal(size=(10, store.dimension))
    one, two = store.search(queries, 5), other.search(queries, 5)
    return (
        (store.encoder, store.exits, store.texts) == (other.encoder, other.exits, other.texts)
        and np.array_equal(store.values, other.values)
        and np.array_equal(store.labels, other.labels)
        and np.array_equal(one.rows, two.rows)
        and np.array_equal(one.distances, two.distances)
    )


def test_a_saved_datastore_is_read_back_deletions_and_unicode_too(tmp_path):
    store = filled(60)
    store.add(np.ones((1, 8)), np.ones((1, 4)), [2], [("é \n\u2028", "a second text")])
    store.delete([3, 17])
    store.save(tmp_path / "store")
    loaded = Datastore.load(tmp_path / "store", ENCODER)
    assert equal(store, loaded) and loaded.values.dtype == np.float32
    add_all(loaded, filled(5, name="more"))
    loaded.delete([0])
    loaded.save(tmp_path / "store")
    assert equal(loaded, Datastore.load(tmp_path / "store", ENCODER))


def test_only_the_last_datastore_stays_on_disk(tmp_path):
    for count in (50, 60, 40):
        filled(count).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.hnsw", "entries.safetensors", "manifest.json"}
    assert len(Datastore.load(tmp_path, ENCODER)) == 40


@pytest.mark.parametrize("renamed", [(), ("index.hnsw",), ("index.hnsw", "entries.safetensors")], ids=str)
def test_a_datastore_that_was_killed_before_its_files_had_their_names_is_the_new_one(tmp_path, monkeypatch, renamed):
    filled(60).save(tmp_path / "store")
    filled(50).save(tmp_path / "new")
    for name in ("index.hnsw", "entries.safetensors"):
        (tmp_path / "new" / name).rename(tmp_path / "store" / (name if name in renamed else f"{name}.next"))
    (tmp_path / "new" / "manifest.json").rename(tmp_path / "store" / "manifest.json")
    assert equal(Datastore.load(tmp_path / "store", ENCODER), filled(50))

    def killed(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mini_ee.lab.methods.raee_files.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            filled(40).save(tmp_path / "store")
    assert equal(Datastore.load(tmp_path / "store", ENCODER), filled(50))
    filled(40).save(tmp_path / "store")
    assert (
        equal(Datastore.load(tmp_path / "store", ENCODER), filled(40))
        and len(list((tmp_path / "store").iterdir())) == 3
    )


def test_the_manifest_says_what_is_there(tmp_path):
    store = filled()
    store.delete([0])
    store.save(tmp_path)
    manifest = read_manifest(tmp_path)
    assert (manifest["rows"], manifest["vectors"], manifest["dimension"]) == (59, 60, 8)
    assert manifest["encoder"] == ENCODER and manifest["exits"] == [1, 2, 4, 6]
    assert manifest["index"]["space"] == "l2" and manifest["index"]["M"] == datastore_module.M


def test_equal_rows_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        filled(300).save(tmp_path / name)
    for name in ("index.hnsw", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["index.hnsw", "entries.safetensors"])
def test_a_changed_byte_anywhere_is_told(tmp_path, name):
    filled().save(tmp_path)
    content = (tmp_path / name).read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        (tmp_path / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match=f"{name}: damaged, or of another datastore"):
            Datastore.load(tmp_path, ENCODER)
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{name}: damaged"):
        Datastore.load(tmp_path, ENCODER)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file; build the datastore again"):
        Datastore.load(tmp_path, ENCODER)


def test_a_changed_manifest_is_told(tmp_path):
    filled().save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace(ENCODER, "another"))
    with pytest.raises(ValueError, match="manifest.json: damaged or edited"):
        Datastore.load(tmp_path, "another")


@pytest.mark.parametrize("name", ["index.hnsw", "entries.safetensors"])
def test_index_and_values_of_two_datastores_are_told(tmp_path, name):
    filled(60).save(tmp_path / "a")
    filled(50).save(tmp_path / "b")
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ValueError, match=f"{name}: .*of another datastore"):
        Datastore.load(tmp_path / "a", ENCODER)
    manifest = read_json(tmp_path / "a" / "manifest.json")
    manifest["files"][name] = read_json(tmp_path / "b" / "manifest.json")["files"][name]
    write_json(tmp_path / "a" / "manifest.json", manifest)
    with pytest.raises(ValueError, match=f"{name}: (damaged index: expected|expected .* of 60 rows).*; build"):
        Datastore.load(tmp_path / "a", ENCODER)


def test_another_encoders_datastore_is_told(tmp_path):
    filled().save(tmp_path)
    with pytest.raises(ValueError, match="encoder: expected another, found a test's encoder; give that encoder"):
        Datastore.load(tmp_path, "another")


def test_a_datastore_with_the_names_of_old_is_told(tmp_path):
    filled().save(tmp_path)
    manifest = read_manifest(tmp_path)
    manifest["files"] = {"index.1.hnsw": "0", "entries.1.safetensors": "0"}
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(ValueError, match="built by an older mini_ee, which used other file names; build it again"):
        Datastore.load(tmp_path, ENCODER)


def test_a_newer_format_is_told(tmp_path):
    filled().save(tmp_path)
    write_json(tmp_path / "manifest.json", read_manifest(tmp_path) | {"format_version": 2})
    with pytest.raises(ValueError, match="expected a datastore of format_version 1, found 2; build it again"):
        Datastore.load(tmp_path, ENCODER)


def test_a_folder_without_a_datastore_is_told(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="no datastore here; expected a folder with manifest.json"):
            Datastore.load(folder, ENCODER)


def test_an_index_that_the_disk_has_no_room_for_is_told_and_the_old_datastore_stays(tmp_path, monkeypatch):
    filled(60).save(tmp_path)

    class HalfWritten(hnswlib.Index):
        def save_index(self, path):
            super().save_index(path)
            os.truncate(path, 1000)

    store = filled(50)
    monkeypatch.setattr(store._shards, "indexes", [HalfWritten(store._shards.indexes[0])])
    with pytest.raises(OSError, match=r"index.hnsw.next: could not be written completely; make room"):
        store.save(tmp_path)
    assert equal(Datastore.load(tmp_path, ENCODER), filled(60))


def forged(folder, name, content):
    """Write a file of a datastore, and its checksum into the manifest."""
    (folder / name).write_bytes(content)
    manifest = read_json(folder / "manifest.json")
    manifest["files"][name] = file_sha256(folder / name)
    write_json(folder / "manifest.json", manifest)


def deep_store(count=120, deleted=(3, 17)):
    """Few links an element, so that there are several upper layers; some rows deleted."""
    store = Datastore(ENCODER, 8, (1, 2, 4, 6), m=3, ef_construction=20)
    add_all(store, filled(count))
    store.delete(deleted)
    return store


def index_fields(content):
    header = {name: np.frombuffer(content, HEADER, 1)[name].item() for name in HEADER.names}
    return header, HEADER.itemsize + header["cur_element_count"] * header["size_data_per_element"]


def in_header(**change):
    def damaged(content):
        header = np.frombuffer(content, HEADER, 1).copy()
        for name, value in change.items():
            header[name] = value
        return header.tobytes() + content[HEADER.itemsize :]

    return damaged


def at(place, number, size=4):
    """place(header, where the upper layers begin) -> where in the file the number is written."""

    def damaged(content):
        where = place(*index_fields(content))
        return content[:where] + number.to_bytes(size, "little") + content[where + size :]

    return damaged


def first_link(header, upper):
    return HEADER.itemsize + 4


def first_size(header, upper):
    return upper


def link_of_the_entry_point(content):
    """Onto its highest layer, an element that is on layer 0 alone: hnswlib would follow a null pointer."""
    header, where = index_fields(content)
    levels, lists = [], []
    for _ in range(header["cur_element_count"]):
        size = int.from_bytes(content[where : where + 4], "little")
        levels.append(size // (4 + 4 * header["m"]))
        lists.append(where + 4)
        where += 4 + size
    assert max(levels) > 1  # or this would be a poor test
    start = lists[header["enterpoint_node"]]
    number = (1).to_bytes(4, "little") + levels.index(0).to_bytes(4, "little")
    return content[:start] + number + content[start + 8 :]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda content: content[:50], "expected at least"),
        (lambda content: content[:-1], "bytes of upper layers|the size of an upper layer"),
        (lambda content: content + b"x", "bytes of upper layers, found"),
        (in_header(max_m=4), "its header does not agree with the manifest"),
        (in_header(mult=1e-300), "its header does not agree with the manifest"),
        (in_header(mult=float("nan")), "its header does not agree with the manifest"),
        (in_header(cur_element_count=2**40), "its header does not agree with the manifest"),
        (in_header(max_elements=119), "it reserves room for 119 vectors"),
        (in_header(max_elements=2**40), "it reserves room for"),
        (in_header(maxlevel=30), r"expected \d as its highest layer, found 30"),
        (in_header(enterpoint_node=2**31), "a search would begin at an element that is not on the highest layer"),
        (at(first_link, 120), "a link leads to an element that is not there"),
        (at(first_link, 2**32 - 1), "a link leads to an element that is not there"),
        (at(lambda *_: HEADER.itemsize, 7, 2), "an element has more links than there is room for"),
        (at(lambda *_: HEADER.itemsize + 2, 1, 1), "it marks other vectors as deleted than the entries do"),
        (at(lambda *_: HEADER.itemsize + 2, 2, 1), "a deletion mark is neither 0 nor 1"),
        (at(lambda header, _: HEADER.itemsize + header["offset_data"] + 3, 0x7F, 1), "a vector is not of length 1"),
        (
            at(lambda header, _: HEADER.itemsize + header["label_offset"], 1, 8),
            "its labels are not the numbers of its vectors",
        ),
        (at(first_size, 2**32 - 16), "the size of an upper layer is wrong"),
        (at(first_size, 3), "the size of an upper layer is wrong"),
        (link_of_the_entry_point, "a link leads to an element that is not there"),
    ],
)
def test_an_index_that_hnswlib_would_crash_on_is_told_although_its_checksum_is_right(tmp_path, damaged, message):
    deep_store().save(tmp_path)
    forged(tmp_path, "index.hnsw", damaged((tmp_path / "index.hnsw").read_bytes()))
    with pytest.raises(ValueError, match=f"index.hnsw: damaged index: .*({message}).*; build the datastore again"):
        Datastore.load(tmp_path, ENCODER)


def test_every_index_that_is_made_here_passes_the_check(tmp_path):
    grown = filled(1000)
    add_all(grown, filled(1100, name="more"), threads=2)
    part = deep_store().take(slice(50))
    for number, store in enumerate(
        (Datastore(ENCODER, 8, (1, 2)), filled(1), deep_store(120, range(120)), grown, part)
    ):
        store.save(tmp_path / str(number))
        assert len(Datastore.load(tmp_path / str(number), ENCODER)) == len(store)


FUZZ = """
random, original, told = np.random.default_rng(0), (folder / "index.hnsw").read_bytes(), 0
manifest = read_json(folder / "manifest.json")
for number in range({cases}):
    content = bytearray(original)
    where, bits = int(random.integers(len(content))), int(random.integers(1, 256))
    if number % 2:  # numbers rather than vectors
        where = int(random.choice([*range(96), *range(96, 124), *range(len(content) - 400, len(content))]))
    content[where] ^= bits if number % 3 else 1 << number % 8
    forged(folder, "index.hnsw", bytes(content))
    try:
        store = Datastore.load(folder, ENCODER)
        store.search(np.random.default_rng(1).normal(size=(4, 8)), 12)
        add_all(store, filled(30, name="more"))
        store.search(np.random.default_rng(1).normal(size=(4, 8)), 150)
        store.take(slice(10))
    except ValueError as error:
        assert "damaged" in str(error) and "\\n" not in str(error), error
        told += 1
print(told, flush=True)
"""


@pytest.mark.parametrize("cases", [int(os.environ.get("MINI_EE_FLIPS", "75"))])
def test_no_changed_byte_of_an_index_crashes_the_process(tmp_path, cases):
    deep_store().save(tmp_path)
    code = WRITER.format(root=str(Path(__file__).parents[3]), tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code + FUZZ.format(cases=cases), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[-1]) > cases // 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimension": "8"}, "expected in dimension a whole number from 1 to 1048576, found '8'"),
        ({"dimension": 0}, "expected in dimension a whole number from 1 to 1048576, found 0"),
        ({"rows": None}, "expected in rows a whole number"),
        ({"rows": -1}, "expected in rows a whole number"),
        ({"rows": True}, "expected in rows a whole number from 0 to 2147483647, found True"),
        ({"vectors": 59}, "expected in vectors a whole number from 60 to 2147483647, found 59"),
        ({"index": []}, "expected in index.M a whole number from 2 to 10000, found None"),
        ({"index": {"M": 16, "ef_construction": 400, "ef": 0}}, "expected in index.ef a whole number from 1"),
        ({"encoder": 3}, "expected in encoder a text, found 3"),
        ({"exits": [2, 1]}, r"expected in exits ascending layers from 0, found \[2, 1\]"),
        ({"exits": []}, "expected in exits ascending layers"),
        ({"exits": 4}, "expected in exits ascending layers"),
        ({"files": ["index.hnsw"]}, "expected in files the sha256 of each"),
        ({"files": {"index.hnsw": 1, "entries.safetensors": 2}}, "expected in files the sha256 of each"),
    ],
)
def test_wrong_values_in_a_manifest_with_a_right_checksum_are_one_line(tmp_path, change, message):
    filled(60).save(tmp_path)
    write_json(tmp_path / "manifest.json", read_json(tmp_path / "manifest.json") | change)
    with pytest.raises(ValueError, match=f"manifest.json: {message}") as error:
        Datastore.load(tmp_path, change.get("encoder", ENCODER))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["dimension", "rows", "vectors", "index", "encoder", "exits", "files"])
def test_a_manifest_that_lacks_a_key_is_one_line(tmp_path, name):
    filled(60).save(tmp_path)
    manifest = read_json(tmp_path / "manifest.json")
    del manifest[name]
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(ValueError, match=f"manifest.json: expected in {name}"):
        Datastore.load(tmp_path, ENCODER)


ENTRIES = {
    "values": np.zeros((60, 4), np.float32),
    "labels": np.zeros(60, np.int64),
    "ids": np.arange(60),
    "texts": np.frombuffer(json.dumps([["a"]] * 60).encode(), np.uint8),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((60, 3), np.float32)}, r"found values float32 \(60, 3\)"),
        ({"values": np.full((60, 4), np.nan, np.float32)}, "expected finite values"),
        ({"labels": np.zeros(60, np.float32)}, "found .* labels float32"),
        ({"ids": np.arange(59)}, r"ids int64 \(59,\)"),
        ({"ids": np.arange(60)[::-1].copy()}, "it marks other vectors as deleted than the entries do"),
        ({"texts": np.frombuffer(b"[3]", np.uint8)}, "entries.safetensors: damaged: ValueError: row 0: expected one"),
        ({"texts": np.frombuffer(b"[[", np.uint8)}, "entries.safetensors: damaged: JSONDecodeError"),
        ({"texts": np.frombuffer(b'[["a"]]', np.uint8)}, "and 1 texts"),
    ],
)
def test_wrong_entries_with_a_right_checksum_are_one_line(tmp_path, change, message):
    filled(60).save(tmp_path)
    forged(tmp_path, "entries.safetensors", save(ENTRIES | change))
    with pytest.raises(ValueError, match=message) as error:
        Datastore.load(tmp_path, ENCODER)
    assert "\n" not in str(error.value) and str(error.value).endswith("; build the datastore again")


def test_entries_that_are_no_tensors_or_lack_one_are_one_line(tmp_path):
    filled(60).save(tmp_path)
    without = save({name: array for name, array in ENTRIES.items() if name != "ids"})
    for content, message in ((b"no tensors", "SafetensorError"), (without, "KeyError: 'ids'")):
        forged(tmp_path, "entries.safetensors", content)
        with pytest.raises(ValueError, match=f"entries.safetensors: damaged: {message}"):
            Datastore.load(tmp_path, ENCODER)


def test_only_a_datastore_needs_hnswlib(tmp_path, monkeypatch):
    filled().save(tmp_path)
    code = (
        "import sys; sys.modules['hnswlib'] = None; import mini_ee.lab.methods.raee, mini_ee.lab.methods.raee_datastore"
    )
    root = str(Path(__file__).parents[3])
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{root!r}]; {code}"], capture_output=True
    )
    assert found.returncode == 0, found.stderr
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    for opened in (lambda: Datastore(ENCODER, 8, (1, 2)), lambda: Datastore.load(tmp_path, ENCODER)):
        with pytest.raises(ValueError, match="a datastore needs hnswlib, which is not installed: pip install hnswlib"):
            opened()


# Building


def built(folder, texts, **options):
    values, labels = np.linspace(0, 1, 4 * len(texts)).reshape(-1, 4), np.arange(len(texts)) % 3
    collected = Collected(sentences(texts), values, labels, (1, 2, 4, 6))._replace(**options.pop("other", {}))
    return build(folder, ENCODER, options.pop("embed", embed), collected, **options)


TEXTS = [f"row {i}" for i in range(50)]


def test_a_built_datastore_holds_every_row_with_its_own_values(tmp_path):
    store = built(tmp_path / "store", TEXTS, batch_size=8)
    assert sorted(store.texts) == sorted((text,) for text in TEXTS) and [p.name for p in tmp_path.iterdir()] == [
        "store"
    ]
    assert_whole(store)
    rows = np.array([TEXTS.index(text) for (text,) in store.texts])
    np.testing.assert_allclose(store.values, np.linspace(0, 1, 200).reshape(-1, 4)[rows], atol=1e-7)
    np.testing.assert_array_equal(store.labels, rows % 3)
    assert equal(store, Datastore.load(tmp_path / "store", ENCODER))


def test_a_stopped_build_goes_on_where_it_was_saved_and_ends_as_if_it_had_not_stopped(tmp_path):
    seen = []

    def embed_until(stop):
        def embedded(inputs):
            if len(seen) >= stop:
                raise KeyboardInterrupt
            seen.extend(inputs.texts)
            return embed(inputs)

        return embedded

    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "store", TEXTS, batch_size=8, save_every=16, embed=embed_until(40))
    assert not (tmp_path / "store").exists() and len(seen) == 40
    for other in (
        {"encoded": sentences(TEXTS[::-1])},
        {"values": np.ones((50, 4))},
        {"labels": np.zeros(50, np.int64)},
        {"exits": (1, 2, 3, 6)},
    ):
        with pytest.raises(ValueError, match="store.building: an unfinished build of other rows is there; remove it"):
            built(tmp_path / "store", TEXTS, other=other)
    seen.clear()
    store = built(tmp_path / "store", TEXTS, batch_size=8, save_every=16, embed=embed_until(1000))
    assert len(seen) == 18  # 32 rows of the 40 were saved
    assert equal(store, built(tmp_path / "other", TEXTS, batch_size=8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]


def test_a_build_does_not_write_over_anything(tmp_path):
    with pytest.raises(FileExistsError, match="is there already; name another folder"):
        built(tmp_path, TEXTS)


def test_a_build_without_rows_or_with_fewer_values_is_refused(tmp_path):
    with pytest.raises(ValueError, match="found 2 rows, 1 values and 2 labels"):
        collected = Collected(sentences(["a", "b"]), np.zeros((1, 4)), np.zeros(2), (1, 2, 4, 6))
        build(tmp_path / "a", ENCODER, embed, collected)
    with pytest.raises(ValueError, match="at least one row and as many"):
        built(tmp_path / "a", [])


WRITER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_retrieval import *
folder = Path(sys.argv[1])
print("ready", flush=True)
"""
ADDING = """
store = Datastore.load(folder, ENCODER)
for number in range(1, 10**6):
    add_all(store, filled(40, name=f"part {number}"))
    store.delete(range(10))
    store.save(folder)
    print(number, flush=True)
"""
BUILDING = """
built(folder, [f"row {i}" for i in range(600)], batch_size=4, save_every=4)
"""


def run_and_kill(script, folder, seconds):
    """Start the script, and kill -9 it so many seconds after it is ready."""
    code = WRITER.format(root=str(Path(__file__).parents[3]), tests=str(Path(__file__).parent)) + script
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return process.stdout.read().split()


@pytest.mark.parametrize("moment", range(KILLS))
def test_kill_9_while_adding_leaves_the_old_datastore_or_the_new_one(tmp_path, moment):
    filled(40, name="part 0").save(tmp_path / "store")
    output = run_and_kill(ADDING, tmp_path / "store", np.random.default_rng(moment).uniform(0, 0.3))
    store = Datastore.load(tmp_path / "store", ENCODER)
    done = int(output[-1]) if output else 0
    parts = (len(store) - 40) // 30  # each step adds 40 rows and deletes 10
    assert parts in (done, done + 1) and len(store) == 40 + 30 * parts
    everything = [(f"part {part} {row}",) for part in range(parts + 1) for row in range(40)]
    assert store.texts == everything[10 * parts :]
    np.testing.assert_array_equal(store.values[-40:], filled(40).values)
    assert_whole(store)
    store.save(tmp_path / "store")
    assert len(list((tmp_path / "store").iterdir())) == 3


@pytest.mark.parametrize("moment", range(KILLS))
def test_kill_9_while_building_leaves_nothing_or_the_whole_and_the_build_goes_on(tmp_path, moment):
    folder = tmp_path / "store"
    run_and_kill(BUILDING, folder, np.random.default_rng(moment).uniform(0, 0.5))
    texts = [f"row {i}" for i in range(600)]
    store = Datastore.load(folder, ENCODER) if folder.exists() else built(folder, texts, batch_size=4)
    assert sorted(store.texts) == sorted((text,) for text in texts)
    assert_whole(store)
    assert equal(store, Datastore.load(folder, ENCODER))


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
    store = Datastore(ENCODER, 8, (0, 1, 2))
    store.add(embedding_of("row")[None], [[0.99, 0.95, 0.0]], [0], [("row",)])
    inputs = Inputs(*3 * [np.ones((1, 2), np.int64)], (("row",),))
    assert bound(store).plan(inputs) == [1] and bound(store, include_embeddings=True).plan(inputs) == [0]
    assert store.values[0, 0] == np.float32(0.99)
    with pytest.raises(ValueError, match="include_embeddings needs values of layer 0"):
        bound(filled(), include_embeddings=True)


def test_the_votes_that_are_shown_are_those_that_count_where_layer_0_is_no_exit():
    """Layer 0 alone is sure enough: without it the neighbour falls back to its best right exits."""
    store = Datastore(ENCODER, 8, (0, 1, 2))
    store.add(embedding_of("row")[None], [[0.95, 0.6, 0.7]], [0], [("row",)])
    rule = bound(store, fallback_top=3)
    inputs = Inputs(*3 * [np.ones((1, 2), np.int64)], (("row",),))
    (found,) = retrieved(rule, Encoded([np.ones(2, int)], [np.zeros(2, int)], (("row",),), 0, 0), 1)
    assert found["layer"] == store.exits[rule.plan(inputs)[0]] == 2
    assert found["neighbours"][0]["votes"] == [1, 2]


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

    class Slow(FixedExit):
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
    assert list(plan_ahead(NeverExit(), [])) == []


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
    all_distances = np.array([[math.dist(query, each) ** 2 for each in store.embeddings] for query in queries])
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
    from mini_ee.lab.data.tasks import load_task
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
    store = Datastore(ENCODER, 384, (1,))
    store.add(embeddings[:400], np.zeros((400, 1)), np.zeros(400), encoded.texts[:400])
    queries = embeddings[400:] / np.linalg.norm(embeddings[400:], axis=1, keepdims=True)
    found, exact = store.search(queries, 12), exact_search(store.embeddings, queries, 12)
    recall = np.mean([len(set(a) & set(b)) / 12 for a, b in zip(found.rows, exact.rows)])
    assert recall >= 0.99
