"""A fine-tuned classifier reads every text once: labels, states, thresholds and their test come from that pass."""

import numpy as np
import pytest

from mini_ee.lab.backbones.bert import Bert
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.row_exits import Known, RowData
from mini_ee.lab.recording import record
from mini_ee.lab.training.run_folder import encode
from mini_ee.lab.training.train_run import train

EXACT = 1e-6


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
    for found in (data.recorded(model, 8, "rows"), known.recorded(model, 8, "rows")):
        np.testing.assert_allclose(found.logits, expected.logits, atol=EXACT)
        np.testing.assert_array_equal(found.segments._flops, expected.segments._flops)
        assert (found.full == expected.full).all() and found.segments.exits == expected.segments.exits
        np.testing.assert_array_equal(found.labels, data.labels)


def test_known_states_are_found_by_their_layer(read):
    model, data, known = read
    fewer = FrozenClassifier(model.backbone, (2, 3), 2, "first").eval()
    np.testing.assert_allclose(known.states(fewer).states, data.states(fewer).states, atol=EXACT)


def test_a_training_reads_each_text_once(classifier_folder, task_folder, tmp_path, monkeypatch):
    counts, embed = [], Bert.embed

    def counting(backbone, inputs):
        counts.append(len(inputs.input_ids))
        return embed(backbone, inputs)

    monkeypatch.setattr(Bert, "embed", counting)
    train("self-supervised", classifier_folder, task_folder, tmp_path / "run", epochs=2)
    assert sum(counts) == len(load_task(task_folder).split("train"))
