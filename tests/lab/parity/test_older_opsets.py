"""Graphs of opset 18 compute what those of opset 23 compute. `tests/oldest_runtime.py` runs tests/parity on them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.builder import branches_of
from mini_ee.lab.export.older_opsets import OPSETS, REPLACED, in_opset
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Threshold

GOLDEN = Path(__file__).parents[2] / "golden"
ATOL = 1e-5  # of float32 logits


def small_bert():
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
    return Bert(BertConfig(model_type="bert", vocab_size=60, max_position_embeddings=40, **sizes), lm_head=False)


MODELS = {
    "bert": small_bert,
    "gemma": lambda: load_backbone(GOLDEN / "gemma"),  # the tanh form of GELU, heads that share keys
    "phi": lambda: load_backbone(GOLDEN / "phi"),  # a part of each head is rotated
    "qwen2": lambda: load_backbone(GOLDEN / "qwen2"),  # RMS norm, a window of keys, heads that share keys
}


def nodes_of(graph):
    return [*graph.node, *(node for branch in branches_of(graph) for node in nodes_of(branch))]


@pytest.mark.parametrize(
    "kind, precision",
    [*(("bert", "float32"), ("gemma", "float16"), ("phi", "float16")), ("qwen2", "float32"), ("qwen2", "float16")],
)
def test_a_graph_of_opset_18_stops_and_answers_as_that_of_opset_23(kind, precision, tmp_path):
    torch.manual_seed(0)
    model = RowExits(MODELS[kind](), (1, 2, 3), 3, "mean").eval()
    for head in model.heads:
        torch.nn.init.normal_(head.dense.weight, std=0.5)
        torch.nn.init.normal_(head.out.weight, std=0.5)
    outputs = []
    ids = np.random.default_rng(0).integers(5, 60, (8, 9))
    mask = np.arange(9) < np.array([9, 9, 5, 1, 7, 9, 3, 2])[:, None]
    for opset in (23, 18):
        folder = tmp_path / str(opset)
        folder.mkdir()
        manifest = write_graphs(model, model.segments(), Threshold(0.7), folder, precision, opset=opset)
        proto = onnx.load(folder / "model.onnx", load_external_data=False)
        assert manifest["opset"] == proto.opset_import[0].version == opset
        assert proto.ir_version == OPSETS[opset]
        nodes = nodes_of(proto.graph)
        newer = {node.op_type for node in nodes} & (REPLACED.keys() - {"ReduceMax", "ArgMax"})
        assert bool(newer) == (opset == 23)
        assert opset == 23 or len({node.name for node in nodes} - {""}) == len(nodes)
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        given = {"input_ids": ids, "attention_mask": mask.astype(int), "token_type_ids": np.zeros_like(ids)}
        feeds = {each.name: given[each.name] for each in session.get_inputs()}
        outputs.append(session.run(["logits", "layers"], feeds))
    (logits, layers), (older, older_layers) = outputs
    assert len(set(layers)) > 1
    np.testing.assert_allclose(older, logits, rtol=0, atol=ATOL if precision == "float32" else 5e-3)
    np.testing.assert_array_equal(older_layers, layers)


def attention_of(*masks, **settings):
    sizes = {"q": (2, 6, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]
    inputs += [helper.make_tensor_value_info("mask", kind, (2, 1, 5, 5)) for kind in masks]
    node = helper.make_node("Attention", [each.name for each in inputs], ["y"], **settings)
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 6, 5, 8))]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.mark.parametrize("kind, settings", [(TensorProto.BOOL, {}), (TensorProto.FLOAT, {"scale": 0.3})])
def test_attention_of_heads_that_share_keys_reads_a_mask_or_adds_it(kind, settings):
    model, random = attention_of(kind, **settings), np.random.default_rng(0)
    feeds = {
        name: random.normal(size=size).astype(np.float32) for name, size in (("q", (2, 6, 5, 8)), ("k", (2, 2, 5, 8)))
    }
    feeds["v"] = random.normal(size=(2, 2, 5, 8)).astype(np.float32)
    mask = random.random((2, 1, 5, 5)) < 0.7
    mask[..., 0] = True
    feeds["mask"] = mask if kind == TensorProto.BOOL else random.normal(size=mask.shape).astype(np.float32)
    expected, found = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for each in (model, in_opset(model, 18))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


def test_what_an_older_opset_cannot_express_is_refused():
    with pytest.raises(ValueError, match="expected an opset from 18 to 23, got 17"):
        in_opset(attention_of(), 17)
    with pytest.raises(ValueError, match="Attention with is_causal has no form in opset 18"):
        in_opset(attention_of(is_causal=1), 18)
