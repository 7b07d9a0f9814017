"""Exit 0: a head on the mean of the embeddings, before the first layer."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import BAD, GOOD, THINGS, padded_rows, tensors
from http_server import ask, serving
from torch import nn

import mini_ee
from mini_ee.lab.backbones.hub import backbone_class, load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods import self_supervised
from mini_ee.lab.recording import read_every_exit, record
from mini_ee.lab.registry import BACKBONES
from mini_ee.lab.rules import Fixed, Never, Patience, Planned, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.stages import weighted_by_depth
from mini_ee.serve import Worker, engine_of

GOLDEN = Path(__file__).parents[1] / "golden"
EXITS = (0, 2, 3)
ATOL = 1e-5  # of logits, ONNX Runtime compared with torch
TEXTS = ["the film was good", "a very very very awful book", "the room is poor and the song is lovely", "dull"]
POOLS = ("first", "mean")
ENCODERS = [family for family in BACKBONES if (GOLDEN / family).is_dir() and not backbone_class(family).generates]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint_folder, task_folder):
    """(run, exported folder): the other exits read the first token. Those of test_conformance.py read the mean."""
    folder = tmp_path_factory.mktemp("zero")
    options = {"exits": EXITS, "pool": "first", "epochs": 6, "lr": 1e-3, "head_lr": 1e-2}
    run = mini_ee.train("joint", checkpoint_folder, task_folder, folder / "run", **options)
    mini_ee.export(run, folder / "exported", segments=True)
    return run, folder / "exported"


def by_hand(model, inputs):
    """Logits of exit 0 in numpy, row by row: the mean of the embeddings of its own tokens, then the head."""
    head, embeddings = model.heads[0], model.backbone.embed(inputs)
    embeddings = (embeddings if head.norm is None else head.norm(embeddings)).detach().numpy()
    dense, out = ((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in (head.dense, head.out))
    logits = []
    for row, mask in zip(embeddings, inputs.attention_mask):
        mean = np.mean([state for state, real in zip(row, mask) if real], axis=0)
        logits.append(out[0] @ np.tanh(dense[0] @ mean + dense[1]) + out[1])
    return np.array(logits)


@pytest.mark.parametrize("pool", POOLS)
def test_exit_0_reads_the_mean_of_the_embeddings_whatever_the_other_exits_read(random_model, padded_inputs, pool):
    model = random_model((0, 2, 6), 3, pool)
    assert [head.pool for head in model.heads] == ["mean", pool, pool]
    expected = by_hand(model, padded_inputs)
    assert np.ptp(expected, axis=0).min() > 0.01, "texts differ"
    with torch.no_grad():
        np.testing.assert_allclose(model(*tensors(padded_inputs))[0].numpy(), expected, atol=ATOL)
    result = early_exit(model.segments(), Fixed(0), padded_inputs)
    np.testing.assert_allclose(result.logits, expected, atol=ATOL)


@pytest.mark.parametrize("rule", [Fixed(0), Threshold(0.0), Planned((0,) * 7)], ids=str)
def test_an_example_that_exits_at_0_runs_no_layer_and_costs_none(random_model, padded_inputs, rule):
    model = random_model((0, 2, 6), 3, "first")

    def ran(*arguments):
        raise AssertionError("a layer ran")

    hooks = [layer.register_forward_pre_hook(ran) for layer in model.backbone.layers]
    try:
        result = early_exit(model.segments(), rule, padded_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    assert not result.layers_run.any() and not result.cost.layer_passes.any() and not result.cost.depth.any()
    assert result.cost.flops.max() < 0.1 * model.backbone.layer_flops(padded_inputs.input_ids.shape[1])


def test_the_layers_above_exit_0_are_those_of_a_model_without_it(random_model, padded_inputs):
    model = random_model((0, 2, 6), 3, "first")
    without = RowExits(model.backbone, (2, 6), 3, "first").eval()
    without.heads = nn.ModuleList(list(model.heads)[1:])
    mine, theirs = (read_every_exit(row_exits.segments(), padded_inputs) for row_exits in (model, without))
    np.testing.assert_array_equal(mine[0][:, 1:], theirs[0])
    np.testing.assert_array_equal(mine[1][:, 1:], theirs[1])


def test_a_training_gives_exit_0_the_weight_of_an_exit_after_layer_1(trained):
    run, _ = trained
    assert weighted_by_depth([8.0, 0.0, 0.0], EXITS) == pytest.approx(8 / 6)
    assert run.metrics["per_exit_accuracy"][0] > 0.9  # one word decides the label


def test_the_graph_that_stops_by_itself_and_the_chain_of_segments_equal_torch(trained):
    run, folder = trained
    runtime = Runtime(folder, threads=1)
    assert runtime.exits == EXITS and read_json(folder / "manifest.json")["layer_passes"] == [0, 2, 1]
    encoded = run.encode([(text,) for text in TEXTS])
    expected = record(run.segments(), encoded, 4).logits
    whole, chain = runtime.segments(), runtime.segments().by_segment(Never())
    for segments in (whole, chain):
        np.testing.assert_allclose(record(segments, encoded, 4).logits, expected, atol=ATOL)
    middle = float(np.median(record(run.segments(), encoded, 4).confidence("max_probability")[:, 0]))
    layers = early_exit(run.segments(), Threshold(middle), encoded.batch(slice(None))).layers_run
    assert not layers.all() and layers.any()
    for rule in (*map(Fixed, range(3)), Never(), Threshold(middle), Patience(1)):
        results = [
            early_exit(runnable, rule, encoded.batch(slice(None))) for runnable in (run.segments(), whole, chain)
        ]
        for result in results[1:]:
            assert result.layers_run.tolist() == results[0].layers_run.tolist()
            np.testing.assert_allclose(result.logits, results[0].logits, atol=ATOL)


@pytest.mark.parametrize("family", ENCODERS)
def test_exit_0_of_every_encoder_is_exported(family, tmp_path):
    """One example per length, and a padded batch; the layers above get the embeddings that exit 0 has read."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = load_backbone(GOLDEN / family).without_heads()
        model = RowExits(backbone, (0, 1, backbone.config.num_hidden_layers), 3, "first").eval()
        for head in model.heads:
            nn.init.normal_(head.out.weight, std=1.0)
    inputs = padded_rows(backbone)
    manifest = write_graphs(model, model.segments(), Threshold(0.5), tmp_path, segments=True)
    whole, chain = OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)
    expected = read_every_exit(model.segments(), inputs)[0]
    np.testing.assert_allclose(expected[:, 0], by_hand(model, inputs), atol=ATOL)
    for segments in (whole, chain):
        np.testing.assert_allclose(read_every_exit(segments, inputs)[0], expected, atol=ATOL)
        for row in range(len(inputs)):
            one = inputs.take([row])
            np.testing.assert_allclose(read_every_exit(segments, one)[0][0], expected[row], atol=ATOL)


def weights_of(graph):
    """Names of the weights that a graph computes with before any branch, and within branches."""
    branches = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    here = {name for node in graph.node for name in node.input}
    return here, set().union(*(set().union(*weights_of(branch)) for branch in branches))


def test_no_graph_computes_with_a_layer_before_exit_0_has_decided(trained):
    _, folder = trained
    graphs = {
        name: onnx.load(folder / f"onnx/{name}.onnx", load_external_data=False).graph
        for name in ("model", "segment_0", "segment_2")
    }
    first, later = weights_of(graphs["model"])
    assert not [name for name in first if "layers." in name]
    assert [name for name in later if "layers.0" in name] and [name for name in first if "embeddings" in name]
    assert not [name for weights in weights_of(graphs["segment_0"]) for name in weights if "layers." in name]
    assert [name for weights in weights_of(graphs["segment_2"]) for name in weights if "layers.0" in name]


def test_a_server_answers_as_the_runtime_and_counts_zero_layers(trained):
    _, folder = trained
    runtime = Runtime(folder, threads=1)
    runtime.rule = Threshold(float(np.median([answer.confidence for answer in runtime.run(TEXTS, rule=Fixed(0))])))
    alone = [runtime.run([text])[0] for text in TEXTS]
    assert 0 in [answer.layers for answer in alone] and len({answer.layers for answer in alone}) > 1
    with Worker(engine_of(runtime), batch=3) as worker:
        answers = [future.result(60) for future in [worker.submit(text) for text in TEXTS]]
        counts = worker.metrics.exit_counts
    assert [(answer.label, answer.layers) for answer in answers] == [(answer.label, answer.layers) for answer in alone]
    assert counts[0] == [answer.layers for answer in alone].count(0)


def test_over_http_texts_exit_at_0_with_the_runtimes_answers(trained):
    pytest.importorskip("uvicorn", reason="the extra serve")
    runtime = Runtime(trained[1], threads=1)
    for rule, layers in ((Fixed(0), 0), (Fixed(1), 2)):
        runtime.rule = rule
        with serving(engine_of(runtime)) as (_, port):
            status, reply, _ = ask(port, {"texts": TEXTS})
        expected = runtime.run(TEXTS)
        assert status == 200 and [answer["layers"] for answer in reply["answers"]] == [layers] * len(TEXTS)
        assert [answer["label"] for answer in reply["answers"]] == [answer.label for answer in expected]


def run_command(capsys, *arguments):
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_calibrate_gives_exit_0_a_threshold_of_its_own(trained, task_folder, tmp_path, capsys):
    run = shutil.copytree(trained[0].folder, tmp_path / "run")
    wanted = ("--task", task_folder, "--split", "train", "--epsilon", 0.6, "--json")
    answer = run_command(capsys, "calibrate", run, *wanted)
    assert answer["exits"] == list(EXITS) and len(answer["thresholds"]) == 2
    chosen = load_run(run).rule
    assert isinstance(chosen, Threshold) and math.isfinite(chosen.threshold[0])
    evaluation = run_command(capsys, "evaluate", run, "--task", task_folder, "--json")
    assert evaluation["exit_counts"][0] > 0 and evaluation["mean_layers"] < 3


def test_evaluate_sweep_and_the_picture_begin_at_0(trained, task_folder, tmp_path, capsys):
    run, folder = trained
    task = ("--task", task_folder, "--json")
    fixed = run_command(capsys, "evaluate", run.folder, *task, "--rule", "fixed", "--layer", 0)
    assert fixed["mean_layers"] == 0 and fixed["layers_saved"] == 1 and fixed["exit_counts"] == [20, 0, 0]
    for trained_or_exported in (run.folder, folder):
        answer = run_command(capsys, "evaluate", trained_or_exported, *task, "--sweep")
        assert answer["exits"] == list(EXITS)
        assert min(row["mean_layers"] for row in answer["rows"]) == 0
    picture = tmp_path / "exits.png"
    answer = run_command(capsys, "compare", run.folder, *task, "--picture", picture)
    assert [by_exit["layer"] for by_exit in answer["rows"][0]["by_exit"]] == list(EXITS)
    assert picture.stat().st_size


def test_exit_0_can_be_added_to_a_fine_tuned_classifier(classifier_folder, task_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(self_supervised.METHOD.defaults["rows"], "epochs", 8)
    words = [(thing, first, last) for thing in THINGS for first in GOOD + BAD for last in GOOD + BAD]
    texts = ["{1} {0} is {2}".format(*pair) for pair in words]
    run = mini_ee.add_exits(classifier_folder, texts, tmp_path / "fast", exits=(0, 3), agreement=0.9)
    assert run.exits == (0, 3) and [head.pool for head in run.model.heads] == ["mean", "first"]
    assert read_json(tmp_path / "fast" / "summary.json")["per_exit_agreement"][0] > 0.6
    options = ("--task", task_folder, "--split", "train", "--epsilon", 0.9, "--json")
    assert run_command(capsys, "calibrate", run.folder, *options)["exits"] == [0, 3]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_decoder_cannot_have_an_exit_0(kind):
    backbone = load_backbone(GOLDEN / kind)
    with pytest.raises(ValueError, match=f"exit 0 is for encoders, found a {kind}: let --exits begin with 1 or more"):
        RowExits(backbone, (0, backbone.config.num_hidden_layers), 2, backbone.poolings[0])
