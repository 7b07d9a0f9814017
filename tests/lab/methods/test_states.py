"""A fine-tuned classifier reads every text once: labels, states, thresholds and their test come from that pass.

States that do not fit in memory are in a file: the same run to the bit, also after a kill, and no file is left.
"""

import numpy as np
import pytest
from conftest import BAD, GOOD, THINGS

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import Split, Task, load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits import state_store
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.row_exits import Known, RowData
from mini_ee.lab.exits.state_store import Stored, free_memory, in_memory
from mini_ee.lab.recording import record
from mini_ee.lab.training import holdout, train_run
from mini_ee.lab.training.run_folder import encode

EXACT = 1e-6
TEXTS = tuple((f"the {thing} is {first} and {second}",) for thing in THINGS for first in GOOD + BAD for second in GOOD)
TASK = Task("texts", ("bad", "good"), ("accuracy",), {"train": Split(TEXTS, np.zeros(len(TEXTS), np.int64))})


def trained(model, out, **options):
    options = {"exits": (1, 2, 3), "epochs": 2, "max_train": 100} | options
    mini_ee.train("self-supervised", model, TASK, out, **options)
    return [(out / name).read_bytes() for name in ("model.safetensors", "metrics.json")]


@pytest.fixture
def on_disk(monkeypatch):
    monkeypatch.setattr(state_store, "IN_MEMORY", 0.0)
    monkeypatch.setattr(state_store, "SAVED", 0)


@pytest.fixture
def batch_sizes(monkeypatch):
    """The number of texts in each batch that the model reads."""
    sizes, states = [], FrozenClassifier.states

    def counted(self, input_ids, *others):
        sizes.append(len(input_ids))
        return states(self, input_ids, *others)

    monkeypatch.setattr(FrozenClassifier, "states", counted)
    return sizes


def without_seconds(files):
    weights, metrics = files
    return weights, [line for line in metrics.decode().splitlines() if '"sec' not in line and '"sha256' not in line]


def test_a_training_on_states_in_a_file_is_the_same_to_the_bit(classifier_folder, tmp_path, monkeypatch):
    expected = trained(classifier_folder, tmp_path / "memory")
    monkeypatch.setattr(state_store, "IN_MEMORY", 0.0)
    seen, fit = [], train_run.fit

    def watched(*given):
        seen.extend(path.stat().st_size for path in tmp_path.rglob("states.bin"))
        return fit(*given)

    monkeypatch.setattr(train_run, "fit", watched)
    result = trained(classifier_folder, tmp_path / "disk")
    assert seen == [len(TEXTS) * 3 * 16 * 4]
    assert without_seconds(result) == without_seconds(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "memory"]


def test_a_killed_call_reads_no_text_again_whose_states_are_in_the_file(
    classifier_folder, tmp_path, monkeypatch, on_disk, batch_sizes
):
    expected = trained(classifier_folder, tmp_path / "whole")
    batches = len(batch_sizes)
    batch_sizes.clear()
    wrote = Stored.wrote

    def killed(self, number, last):
        wrote(self, number, last)
        if number == batches - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stored, "wrote", killed)
        trained(classifier_folder, tmp_path / "killed")
    batch_sizes.clear()
    result = trained(classifier_folder, tmp_path / "killed")
    assert batches > 2 and len(batch_sizes) == 2  # the first, by which the width is known, and the last
    assert without_seconds(result) == without_seconds(expected)


def test_states_of_other_texts_or_exits_are_not_taken_from_the_file(tmp_path, on_disk):
    first = Stored((4, 2), tmp_path, "key")
    first.states[:] = 1
    first.wrote(2, last=True)
    assert Stored((4, 2), tmp_path, "key").done == 2 and Stored((4, 2), tmp_path, "key").states.sum() == 8
    other = Stored((4, 2), tmp_path, "other")
    assert other.done == 0 and other.states.sum() == 0


def test_in_memory_there_is_no_file(tmp_path):
    stored = Stored((4, 2), tmp_path / "states", "key")
    stored.wrote(1, last=True)
    assert not (tmp_path / "states").exists() and in_memory((4, 2)).states.shape == (4, 2)
    assert 1e6 < free_memory() < 1e15


def test_too_little_disk_is_refused_in_one_line(classifier_folder, tmp_path, monkeypatch, on_disk, capsys):
    monkeypatch.setattr(state_store.shutil, "disk_usage", lambda folder: type("", (), {"free": 100})())
    (tmp_path / "in.txt").write_text("\n".join(text for (text,) in TEXTS))
    argv = ["add-exits", classifier_folder, "--text", tmp_path / "in.txt", "--out", tmp_path / "fast"]
    assert main([str(word) for word in argv]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "GB for hidden states that do not fit in memory, found 0.0 GB" in error


def test_each_text_is_read_once_and_texts_that_are_in_no_part_are_not(
    classifier_folder, tmp_path, batch_sizes, monkeypatch
):
    monkeypatch.setattr(holdout, "TEST_ROWS", 10)
    trained(classifier_folder, tmp_path / "run")
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert sum(batch_sizes) == sum(metrics[name] for name in ("rows", "rows_held", "rows_tested")) < len(TEXTS)


@pytest.fixture(scope="module")
def read(classifier_folder, task_folder):
    """(model, data, data with known states)."""
    backbone = load_backbone(classifier_folder)
    task, model = load_task(task_folder), FrozenClassifier(backbone, (1, 2, 3), 2, "first").eval()
    rows = task.split("train")
    data = RowData(encode(Tokenizer.from_folder(classifier_folder, 30), rows.texts, backbone), rows.labels, task)
    return model, data, RowData(*data[:3], Known((1, 2, 3), data.states(model).states))


def test_what_is_recorded_from_known_states_is_what_the_model_computes(read):
    model, data, known = read
    expected = record(model.segments(), data.encoded, 8, whole=model.segments().whole())
    for recorded in (data.recorded(model, 8, "rows"), known.recorded(model, 8, "rows")):
        np.testing.assert_allclose(recorded.logits, expected.logits, atol=EXACT)
        np.testing.assert_array_equal(recorded.segments._flops, expected.segments._flops)
        assert (recorded.full == expected.full).all() and recorded.segments.exits == expected.segments.exits
        np.testing.assert_array_equal(recorded.labels, data.labels)


def test_known_states_are_found_by_their_layer(read):
    model, data, known = read
    fewer = FrozenClassifier(model.backbone, (2, 3), 2, "first").eval()
    np.testing.assert_allclose(known.states(fewer).states, data.states(fewer).states, atol=EXACT)
