"""Records of runs: a rule gives the same on what was written and on what was recorded; damage is one line."""

import json
import zipfile

import numpy as np
import pytest

from mini_ee.experiments.records import SeedRecord, read_about, read_records, write_record
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Patience, Policy, Threshold

EXITS, CLASSES = (1, 2, 4), 3


def drawn(rows: int, seed: int, classes: int = CLASSES, policy: bool = True) -> Record:
    """A record of random logits that float16 stores exactly."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, len(EXITS), classes)).astype(np.float16).astype(np.float32)
    flops = random.integers(1, 9, (rows, len(EXITS), 2)).astype(np.float64)
    measures = {"exit_logit": random.normal(size=(rows, 2)).astype(np.float16).astype(np.float32)} if policy else {}
    segments = Recorded(EXITS, logits, flops, [1, 1, 2], measures)
    return Record(segments, logits, flops.sum(axis=(1, 2)), labels=random.integers(0, classes, rows))


def made(seed: int) -> SeedRecord:
    return SeedRecord(drawn(40, seed), drawn(30, seed + 100), {"lr": 1e-4})


@pytest.mark.parametrize("rule", [Threshold(0.6), Patience(1), Policy()])
def test_a_rule_gives_the_same_on_a_record_that_was_read_back(tmp_path, rule):
    path, original = tmp_path / "TREC" / "joint.npz", made(0)
    write_record(path, 3, made(1))
    write_record(path, 0, original)
    records = read_records(path)
    assert [*records] == [0, 3] and records[0].about == {"lr": 1e-4}
    for one, other in zip(records[0][:2], original[:2]):
        first, second = one.replay(rule), other.replay(rule)
        assert (first.exit_index == second.exit_index).all() and (one.full == other.full).all()
        assert np.allclose(first.cost.flops, second.cost.flops)
        assert ((one.predictions == one.labels[:, None]) == (other.predictions == other.labels[:, None])).all()


def test_predictions_survive_rounding_to_float16(tmp_path):
    logits = np.array([[[1.0, 1.00001, 0.0]] * 3], np.float32)
    segments = Recorded(EXITS, logits, np.ones((1, 3, 2)), [1, 1, 2])
    one = Record(segments, logits, 3.0, labels=np.array([1]))
    read = write_record(tmp_path / "a.npz", 0, SeedRecord(one, one, {}))
    assert (read.reported.predictions == 1).all() and read.reported.labels.tolist() == [1]


def test_a_seed_is_replaced_and_others_stay(tmp_path):
    path = tmp_path / "a.npz"
    write_record(path, 0, made(0))
    write_record(path, 1, made(1))
    before = read_records(path)[0].reported.logits
    write_record(path, 1, made(2))
    records = read_records(path)
    assert (records[1].reported.logits == drawn(40, 2).logits).all() and (records[0].reported.logits == before).all()
    assert not list(tmp_path.glob("*.tmp*"))


def test_damage_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    write_record(path, 0, made(0))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged file; remove it"):
        read_records(path)
    with pytest.raises(ValueError, match="found a regression"):
        write_record(tmp_path / "b.npz", 0, SeedRecord(drawn(4, 0, 1), drawn(4, 0, 1), {}))


def test_outputs_that_another_method_has_are_not_stored_again(tmp_path):
    first, second = tmp_path / "joint.npz", tmp_path / "pabee.npz"
    for seed in (0, 1):
        write_record(first, seed, made(seed))
        read = write_record(second, seed, made(seed)._replace(about={"patience": seed}))
        write_record(first, seed, made(seed))  # again: the file that has the outputs keeps them
        assert read.about == {"patience": seed}
    assert second.stat().st_size < first.stat().st_size / 3
    one, other = read_records(first), read_records(second)
    assert [*other] == [*read_about(second)] == [0, 1] and read_about(second)[1] == {"patience": 1}
    for part in (0, 1):
        assert (one[1][part].logits == other[1][part].logits).all()
        assert one[1][part].replay(Policy()).exit_index.tolist() == other[1][part].replay(Policy()).exit_index.tolist()

    write_record(first, 1, made(2))  # trained again, with other outputs
    assert [*read_records(second)] == [*read_about(second)] == [0]
    write_record(second, 1, made(1))  # has outputs of its own now
    assert (read_records(second)[1].reported.logits == drawn(40, 1).logits).all() and [*read_about(second)] == [0, 1]
    first.unlink()
    assert [*read_records(second)] == [*read_about(second)] == [1]


@pytest.mark.parametrize("kind, shape", [("<f2", [39, 3, 3]), ("|O", [40, 3, 3])])
def test_arrays_that_are_not_in_the_file_are_one_line(tmp_path, kind, shape):
    path = tmp_path / "a.npz"
    write_record(path, 0, made(0))
    with np.load(path) as arrays:
        metadata, outputs = json.loads(arrays["about"].tobytes()), arrays["outputs"]
    assert metadata["0"]["arrays"]["reported/logits"] == ["<f2", [40, 3, 3]]
    metadata["0"]["arrays"]["reported/logits"] = [kind, shape]
    np.savez(path, about=np.frombuffer(json.dumps(metadata).encode(), np.uint8), outputs=outputs)
    with pytest.raises(ValueError, match="damaged file; remove it"):
        read_records(path)


def test_the_same_records_are_the_same_bytes(tmp_path):
    for name, seeds in (("a", (0, 1)), ("b", (1, 0))):
        for seed in seeds:
            write_record(tmp_path / name / "joint.npz", seed, made(seed))
    assert (tmp_path / "a" / "joint.npz").read_bytes() == (tmp_path / "b" / "joint.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a" / "joint.npz") as file:
        assert {entry.compress_type for entry in file.infolist()} == {zipfile.ZIP_LZMA}
