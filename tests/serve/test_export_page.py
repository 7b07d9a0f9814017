"""The pages of export/ and serve/ name metrics, endpoints, options, tensors and versions that exist.

Their commands: test_serve_http.py.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from conftest import BAD, GOOD, THINGS
from http_server import ask, serving
from onnx import helper

from mini_ee.lab.cli.main import parser
from mini_ee.lab.export import builder
from mini_ee.lab.rules import Threshold
from mini_ee.serve import Worker, engine_of
from mini_ee.serve.canary import Compared
from mini_ee.serve.monitoring import Guarantee, Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "export" / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_alerts_are_on_metrics_that_exist(runtime):
    metrics = Metrics((4, 8, 12), Guarantee(0.5, 0.9), (1, 1, 1), "id")
    metrics.count_answer(4, 0.01)
    metrics.guarantee.observe(True, Threshold(0.9))
    with Worker(engine_of(runtime)) as worker:
        compared = Compared(worker, worker)
        compared.agreements.append(True)
        page = metrics.page({}) + compared.comparison()
    (group,) = yaml.safe_load((ROOT / "serve" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert f"`{rule['alert']}`" in PAGE and rule["annotations"].keys() == {"summary", "description"}
        assert "mini_ee_" in rule["expr"] and rule["for"]
        for name, labels in re.findall(r"(mini_ee_\w+)(?:{(.*?)})?", rule["expr"]):
            assert f"\n{name}" in page, name
            for label, values in re.findall(r'(\w+)=~?"(.*?)"', labels):
                for value in values.split("|"):
                    assert f'{name}{{{label}="{value}"}}' in page, (name, label, value)


def test_the_probes_and_the_container_use_endpoints_and_options_that_exist(runtime):
    deployment = blocks("yaml")[0]
    with serving(engine_of(runtime)) as (_, port):
        assert [ask(port, None, path, "GET")[0] for path in re.findall(r"path: (\S+),", deployment)] == [200, 200]
    (command,) = re.findall(r"^CMD (.*)$", blocks("dockerfile")[0], re.M)
    (arguments,) = re.findall(r"args: \[(.*)\]", deployment)
    for words in (json.loads(command), shlex.split(arguments.replace(",", ""))):
        assert words[0] == "mini-ee" and parser(words[1:]).parse_args(words[1:]).exported == [Path("/model")]


def test_the_commands_of_the_page_for_a_classifier_parse():
    page = (ROOT / "docs" / "your-classifier.md").read_text()
    commands = re.findall(r"^\$ (?:echo .* \| )?mini-ee (.*?)(?: &)?$", page, re.M)
    assert {command.split()[0] for command in commands} == {"add-exits", "export", "run", "serve", "calibrate"}
    for words in map(shlex.split, commands):
        assert parser(words).parse_args(words).command == words[0]


def test_the_script_that_compares_a_file_with_an_export_counts_labels_and_time(runtime, tmp_path, monkeypatch, capsys):
    """The file gives every text one label and computes nothing, so the export is slower, and equal at this label."""
    page = (ROOT / "docs" / "your-classifier.md").read_text().partition("<summary>yours.py</summary>")[2]
    texts = [f"the {thing} was {word}" for thing in THINGS for word in GOOD + BAD]
    labels = [runtime.label_names.index(answer.label) for answer in runtime.run(texts, batch_size=1)]
    ids = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ("B", "T"))
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, (1, 3))
    constant = onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32)[labels[:1]])
    graph = helper.make_graph([helper.make_node("Constant", [], ["logits"], value=constant)], "a", [ids], [logits])
    opsets = [helper.make_opsetid("", builder.OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=builder.IR_VERSION), tmp_path / "mine.onnx")
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    paths = tmp_path / "mine.onnx", runtime.folder, tmp_path / "texts.txt"
    monkeypatch.setattr(sys, "argv", ["yours.py", *map(str, paths)])
    exec(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1], {})
    ratio, *counts = re.findall(r"[\d.]+", capsys.readouterr().out)
    assert [*map(int, counts)] == [labels.count(labels[0]), len(texts)] and float(ratio) > 1
    assert 0 < labels.count(labels[0]) < len(texts)


def test_the_container_installs_what_the_server_needs():
    (packages,) = re.findall(r"pip install --no-cache-dir (numpy.*)", blocks("dockerfile")[0])
    assert f"pip install {packages} && pip install --no-deps" in (ROOT / "serve/README.md").read_text()


@pytest.mark.parametrize(
    "package, where", [("onnxruntime-node", "lab/export/clients"), ("onnxruntime-web", "lab/export/web")]
)
def test_the_versions_of_onnx_runtime_are_those_that_are_tested(package, where):
    version = json.loads((ROOT / where / "package.json").read_text())["dependencies"][package]
    (row,) = [line for line in PAGE.splitlines() if f"| {package} |" in line]
    assert row.endswith(f" {version} |")
    assert f"opset {builder.OPSET} and IR version {builder.IR_VERSION}" in PAGE


def test_triton_s_configuration_has_the_inputs_and_outputs_of_the_graph(runtime):
    (config,) = re.findall(r"^```pbtxt\n(.*?)^```$", (ROOT / "serve/README.md").read_text(), re.M | re.S)
    config = config.replace("dims: [2]", f"dims: [{len(runtime.label_names)}]").replace(
        "dims: [1], reshape: { shape: [] }", "dims: []"
    )
    kinds = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32"}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a line for each input that has a default
    session = onnxruntime.InferenceSession(runtime.folder / "onnx/model.onnx", options)
    for which, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        (block,) = re.findall(rf"^{which} \[\n(.*?)\n\]", config, re.M | re.S)
        configured = re.findall(r'{ name: "(\w+)", data_type: (\w+), dims: \[(.*?)\] }', block)
        axes = [[str(axis) if isinstance(axis, int) else "-1" for axis in node.shape] for node in values]
        assert all(batch == "-1" for batch, *_ in axes)  # Triton adds the axis of the batch itself
        expected = {(node.name, kinds[node.type], ", ".join(shape)) for node, (_, *shape) in zip(values, axes)}
        assert set(configured) == expected and len(configured) == block.count("name:")
