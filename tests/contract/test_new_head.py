"""What a kind of head costs: one file and one line. This one weights the tokens by what it learns of each.

The file is written into a temporary package, registered by one line, and then trained with, evaluated, saved, loaded,
exported, and served in the graph like any other.
"""

import json
import sys

import numpy as np
import pytest
import torch

from mini_ee import load_run, train
from mini_ee.lab import registry
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.heads import ExitHead
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.stages import fine_tune_then_heads
from mini_ee.rules import max_probability

HEAD = '''\
"""Attention pooling: the mean over tokens, weighted by how much each of them says."""

import torch
from torch import nn

from mini_ee.lab.exits.heads import ExitHead


class AttentionHead(ExitHead):
    """Replaces the pooling of a drawn head; its dense layer and its linear map stay."""

    def __init__(self, drawn):
        super().__init__(drawn.out.in_features, drawn.out.out_features, drawn.pool, drawn.norm)
        self.weight = nn.Linear(drawn.out.in_features, 1)

    def state(self, hidden, mask):
        hidden = hidden if self.norm is None else self.norm(hidden)
        scores = self.weight(hidden)[..., 0]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0, 0].bool(), -1e9)
        return (torch.softmax(scores, dim=-1)[..., None] * hidden).sum(dim=1)

    def flops(self, tokens):
        return super().flops(tokens) + 4.0 * tokens * self.out.in_features
'''
TEXTS = ["the film was good", "an awful meal in a very dull place", "a song"]


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """The file and the line."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "my_attention_head.py").write_text(HEAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(registry.HEADS, "attention", "my_attention_head:AttentionHead")
        yield
        sys.modules.pop("my_attention_head", None)


@pytest.fixture(scope="module")
def trained(registered, checkpoint_folder, task_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("head") / "run"
    return train("joint", checkpoint_folder, task_folder, out, epochs=2, exits=(1, 2, 3), head="attention")


def test_it_is_an_option_of_every_training(registered, capsys):
    with pytest.raises(SystemExit):
        main(["train", "joint", "--help-all"])
    assert "{dense,linear,attention}" in capsys.readouterr().out


def test_it_learns_is_saved_and_loaded(trained):
    again = load_run(trained.folder)
    assert again.config["head"] == again.model.head == "attention"
    assert {type(head).__name__ for head in again.model.heads} == {"AttentionHead"}
    stored = trained.model.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in again.model.state_dict().items())
    assert "heads.0.weight.weight" in stored and again.classify(TEXTS) == trained.classify(TEXTS)


def test_its_weights_learn_from_tokens_on_a_frozen_backbone_too(registered, checkpoint_folder):
    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2)
    assert [stage.on_states for stage in fine_tune_then_heads(model)] == [False, True]
    model.use_heads("attention")
    assert [stage.on_states for stage in fine_tune_then_heads(model)] == [False, False]


def test_its_pooling_is_what_an_exit_reads(trained):
    encoded = trained.encode(TEXTS)
    inputs = encoded.batch(np.arange(len(TEXTS)))
    arrays = [torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]
    with torch.inference_mode():
        hidden = trained.model.backbone.hidden_states(*arrays)[1].double()
        state = trained.model.states(*arrays)[0]
        weight = trained.model.heads[0].weight
        scores = hidden @ weight.weight[0].double() + weight.bias.double()
    for row, count in enumerate(inputs.attention_mask.sum(axis=1)):
        share = torch.softmax(scores[row, :count], dim=0)
        torch.testing.assert_close(state[row].double(), share @ hidden[row, :count], atol=1e-5, rtol=0)


def test_it_is_evaluated(trained, task_folder, capsys):
    capsys.readouterr()
    assert main(["evaluate", str(trained.folder), "--task", str(task_folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = load_task(task_folder).split("dev")
    result = early_exit(trained.segments(), trained.rule, trained.encode(rows.texts).batch(np.arange(len(rows))))
    assert answer["exit_counts"] == np.bincount(result.exit_index, minlength=3).tolist()


def test_the_graph_computes_it(trained, tmp_path, capsys):
    out = tmp_path / "exported"
    inputs = trained.encode(TEXTS).batch(np.arange(len(TEXTS)))
    logits, *_ = read_every_exit(trained.segments(), inputs)
    rule = Threshold(float(np.median(max_probability(logits[:, 0]))))
    argv = ["--rule", "threshold", "--threshold", str(rule.threshold), "--out", str(out)]
    assert main(["export", str(trained.folder), *argv]) == 0
    served = Runtime(out)
    assert served.config["head"] == "attention"
    expected, result = (early_exit(one.segments(), rule, inputs) for one in (trained, served))
    assert result.exit_index.tolist() == expected.exit_index.tolist() and len(set(result.exit_index)) > 1
    np.testing.assert_allclose(result.logits, expected.logits, atol=1e-5)


def test_an_unknown_head_is_one_line(trained, checkpoint_folder, registered):
    model = RowExits(load_backbone(checkpoint_folder).without_heads(), (1, 2, 3), 2)
    with pytest.raises(ValueError, match="head must be one of dense, linear, attention, found 'other'"):
        model.use_heads("other")
    assert all(type(head) is ExitHead for head in model.heads)
    config = read_json(trained.folder / "config.json")
    write_json(trained.folder / "config.json", config | {"head": "other"})
    with pytest.raises(ValueError, match="head must be one of"):
        load_run(trained.folder)
    write_json(trained.folder / "config.json", config)
