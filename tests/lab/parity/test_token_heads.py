"""Models for token classification and question answering, as transformers writes them: their logits are equal."""

import json
from pathlib import Path

import pytest
import torch

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.fine_tuned import label_names, token_kind_of
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.heads import TOKENS
from mini_ee.lab.token_tasks import ENDS, LABELS, SPAN

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted((GOLDEN / "token_heads").iterdir())
TOLERANCE = 1e-5
"""Of a logit, relative above one."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_logits_of_every_token_are_those_of_transformers(folder):
    expected = read_tensors(folder / "expected.safetensors")
    backbone, classes = load_backbone(folder), expected["logits"].shape[2]
    model = FrozenClassifier(backbone.without_heads(), (1, 2), classes, TOKENS).eval()
    with torch.no_grad():
        *_, logits = model(*Tensors(expected["input_ids"], expected["attention_mask"]))
    counts = expected["attention_mask"].bool()
    torch.testing.assert_close(logits[counts], expected["logits"][counts], atol=TOLERANCE, rtol=TOLERANCE)


def test_the_kind_and_the_labels_are_read_from_config_json():
    kinds = {folder.name: token_kind_of(folder) for folder in FOLDERS}
    assert kinds == {name: SPAN if name.endswith("span") else LABELS for name in kinds} and len(kinds) == 12
    assert label_names(GOLDEN / "token_heads" / "mpnet-span") == ENDS
    assert label_names(GOLDEN / "token_heads" / "mpnet-labels") == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert not token_kind_of(GOLDEN / "classifiers" / "bert")


def test_random_configurations_were_compared_with_transformers():
    """tests/golden/random_heads.py writes the record, and needs transformers."""
    record = json.loads((GOLDEN / "random_token_heads.json").read_text())
    assert record["equal"] >= 100 and record["equal"] == record["configurations"] and len(record["families"]) >= 5
