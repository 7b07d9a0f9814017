"""The invariants on a real checkpoint and real sentences: all-MiniLM-L6-v2 on SST-2's dev split."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowExits, RowSegments
from mini_ee.lab.recording import predictions, record
from mini_ee.lab.rules import Never, Threshold

SHARED = os.environ.get("MINI_EE_SHARED")
ATOL = 1e-6  # float32 logits of single rows against padded batches; measured max 5.6e-8, torch 2.13 on CPU

pytestmark = pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RowExits(load_backbone(Path(SHARED) / "weights" / "all-MiniLM-L6-v2"), (2, 4, 6), 2)


@pytest.fixture(scope="module")
def encoded():
    tokenizer = Tokenizer.from_folder(Path(SHARED) / "weights" / "all-MiniLM-L6-v2")
    return tokenizer.encode(load_task(Path(SHARED) / "data" / "SST-2").split("dev").texts[:24])


def test_never_exit_equals_the_full_model_on_real_sentences(model, encoded):
    inputs = encoded.batch(np.arange(24))
    result = early_exit(RowSegments(model), Never(), inputs)
    arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
    with torch.inference_mode():
        expected = model(*map(torch.from_numpy, arrays))[-1].numpy()
    np.testing.assert_array_equal(result.logits, expected)


def test_a_padded_batch_of_real_sentences_equals_each_sentence_alone(model, encoded):
    segments = RowSegments(model)
    recorded = record(segments, encoded, batch_size=24)
    middle = float(np.median(np.abs(np.diff(recorded.logits[:, 0], axis=1))))
    rule = Threshold(middle, "breaking_ties_logits")  # heads are untrained: half of the sentences leave at layer 2
    together = early_exit(segments, rule, encoded.batch(np.arange(24)))
    assert 0 < (together.layers_run == 2).mean() < 1
    margins = np.abs(np.diff(recorded.logits, axis=2))[:, :-1, 0]
    clear = (np.abs(margins - middle) > 10 * ATOL).all(axis=1)  # no sentence that sits on the threshold
    for row in np.flatnonzero(clear):
        alone = early_exit(segments, rule, encoded.batch([row]))
        assert alone.layers_run[0] == together.layers_run[row]
        np.testing.assert_allclose(alone.logits[0], together.logits[row], atol=ATOL, rtol=0)
    assert clear.mean() > 0.9
    assert len(predictions(together.logits)) == 24
