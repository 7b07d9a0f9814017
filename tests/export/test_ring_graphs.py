"""The graphs that export/ writes from the core's models: equal to torch, for each kind of exits and each rule."""

import numpy as np
import onnx
import pytest
import torch
from small_models import EXITS, KINDS, median_threshold, model_of, rows_of

from mini_ee.export.graph import used
from mini_ee.export.manifest import IDS, MODEL
from mini_ee.export.runtime import Batch, Runtime
from mini_ee.export.torch_engine import torch_model
from mini_ee.export.writer import export
from mini_ee.loop import early_exit
from mini_ee.lora_exits import SideBySide
from mini_ee.rules import MEASURES, Fixed, Never, Patience, Policy, Rule, Threshold

ALONE = [Never(), Fixed(1), Patience(1), Patience(2)]
CASES = [(kind, rule) for kind in KINDS for rule in ALONE]
CASES += [("joint", median_threshold("joint", measure)) for measure in MEASURES]
CASES += [("lora", median_threshold("lora", "max_probability")), ("joint", Threshold((0.9, 0.4, 0.7)))]
CASES += [("regression", Patience(1, 0.1)), ("policies", Policy()), ("policies", Policy(0.9))]
HALF = median_threshold("joint", "max_probability")
TAU = HALF.threshold
NAMES = [
    f"{kind}, {type(rule).__name__} {getattr(rule, 'measure', number)}" for number, (kind, rule) in enumerate(CASES)
]


class Planned(Rule):
    """A rule that plans from the batch, as RAEE's does."""

    needs = None

    def plan(self, inputs) -> np.ndarray:
        return np.arange(len(inputs)) % 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """kind, rule -> an exported folder; with the rules Never and HALF also graphs by segment."""
    made = {}

    def get(kind, rule):
        if (kind, rule) not in made:
            made[kind, rule] = out = tmp_path_factory.mktemp("ring") / "exported"
            export(out, model_of(kind), rule, rows_of(kind), "bert", segments=rule in (Never(), HALF))
        return made[kind, rule]

    return get


def batch_of(inputs):
    ids = (values.numpy() for values in (inputs.ids, inputs.kinds, inputs.mask))
    return Batch(dict(zip(IDS, ids)), np.arange(len(inputs)))


@torch.inference_mode()
def both(kind, rule, runtime, rows):
    """The results of torch and of the graph on some rows."""
    inputs = rows_of(kind).batch(rows)
    return early_exit(model_of(kind), rule, inputs), runtime.run_batch(batch_of(inputs), rule)


def assert_equal(expected, result):
    assert expected.exit_index.tolist() == result.exit_index.tolist()
    assert expected.layers.tolist() == result.layers.tolist()
    np.testing.assert_allclose(result.logits, expected.logits, atol=1e-4)


@pytest.mark.parametrize("kind, rule", CASES, ids=NAMES)
def test_the_graph_stops_where_torch_stops_with_the_same_logits(folder, kind, rule):
    """In a batch with padding, and each row alone."""
    runtime = Runtime(folder(kind, rule), threads=1)
    expected, together = both(kind, rule, runtime, range(40))
    assert_equal(expected, together)
    for row in range(3):
        alone = both(kind, rule, runtime, [row])
        assert_equal(*alone)
        assert alone[1].exit_index[0] == together.exit_index[row]
        np.testing.assert_allclose(alone[1].logits[0], together.logits[row], atol=1e-4)


def test_the_table_has_rules_by_which_rows_stop_at_every_exit(folder):
    for kind, rule in (("joint", HALF), CASES[-5], ("policies", Policy()), ("joint", Patience(1))):
        stops = both(kind, rule, Runtime(folder(kind, rule), threads=1), range(40))[1].exit_index
        assert len(set(stops.tolist())) > 1, (kind, rule)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_each_row_is_an_input(folder, kind):
    expected, result = both(kind, Planned(), Runtime(folder(kind, Never()), threads=1), range(40))
    assert set(result.exit_index) == {0, 1, 2}
    assert_equal(expected, result)


def test_thresholds_patience_and_plans_are_inputs_with_defaults(folder):
    session = Runtime(folder("joint", HALF), threads=1).session
    ids = batch_of(rows_of("joint").batch(range(12))).ids
    layers_by_default = session.run(["layers"], ids)[0]
    for same in (TAU, np.nan, [TAU] * 2, [[TAU, np.nan]] * 12):
        assert (session.run(["layers"], ids | {"threshold": np.array(same, np.float32)})[0] == layers_by_default).all()
    by_row = np.full((12, 2), np.inf, np.float32)
    by_row[3], by_row[5, 1] = -1, 0
    layers = session.run(["layers"], ids | {"threshold": by_row})[0]
    assert layers.tolist() == [4, 4, 4, 1, 4, 3, 4, 4, 4, 4, 4, 4]
    plan = np.array([-1, 0] * 6)
    layers = session.run(["layers"], ids | {"exit_at": plan})[0]
    assert (layers == np.where(plan < 0, layers_by_default, 1)).all()
    with pytest.raises(Exception, match="out of data bounds|indices"):
        session.run(["layers"], ids | {"exit_at": np.array([3])})


def test_rules_with_other_settings_and_other_rules(folder):
    """Other thresholds are inputs of model.onnx; rules that it does not contain run on the graphs by segment."""
    runtime = Runtime(folder("joint", HALF), threads=1)
    for rule in (Threshold(0.5), Threshold((0.9, 0.4)), Patience(1), Threshold(-0.8, "entropy"), Fixed(1), Never()):
        assert_equal(*both("joint", rule, runtime, range(40)))
    with_policy = Runtime(folder("policies", HALF), threads=1)
    assert_equal(*both("policies", Policy(), with_policy, range(40)))


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_an_engine_of_the_loop(folder, kind):
    runtime, inputs = Runtime(folder(kind, Never()), threads=1), rows_of(kind).batch(range(40))
    for rule in (Never(), Fixed(0), Patience(1), Planned(), *([Policy()] if kind == "policies" else [])):
        with torch.inference_mode():
            expected = early_exit(model_of(kind), rule, inputs)
        assert_equal(expected, early_exit(runtime.segments, rule, batch_of(inputs)))


def test_pairs_and_label_and_confidence(tmp_path):
    rows = rows_of("joint", pairs=True)
    export(tmp_path / "out", model_of("joint"), Threshold(0.6), rows, "bert")
    runtime = Runtime(tmp_path / "out", threads=1)
    answers = runtime.run([("A warm film.", "It is good."), ("Dull.", "Bad.")])
    outputs = runtime.session.run(["label", "confidence", "layers"], batch_of(rows.batch(range(2))).ids)
    assert [output.dtype for output in outputs] == [np.int64, np.float32, np.int64]
    encoding = runtime.encode([("A warm film.", "It is good.")])
    logits, label, confidence = runtime.session.run(["logits", "label", "confidence"], runtime.batch(encoding).ids)
    assert answers[0].label == ("bad", "fair", "good")[label[0]]
    assert answers[0].confidence == pytest.approx(confidence[0])
    np.testing.assert_allclose(answers[0].logits, logits[0], atol=1e-4)


def test_weights_stand_once_and_layers_in_branches(folder):
    """A layer that only later exits need is inside a branch, where ONNX Runtime does not run it for nothing."""
    path = folder("joint", HALF)
    assert {file.name for file in path.iterdir()} == {
        *("manifest.json", "onnx", "config.json", "tokenizer.json", "tokenizer_config.json")
    }
    graphs = {f"{name}.onnx" for name in ("model", *(f"segment_{layer}" for layer in EXITS))}
    assert {file.name for file in (path / "onnx").iterdir()} == graphs | {"model.onnx_data"}
    for graph in path.glob("onnx/*.onnx"):
        assert graph.stat().st_size < 60_000
    graph = onnx.load(path / MODEL, load_external_data=False).graph
    names = {name for node in graph.node for name in node.input}
    assert "backbone.layers.0.up.weight" in names
    assert not any(name.startswith(("backbone.layers.1", "backbone.layers.3", "heads")) for name in names)
    assert "backbone.layers.3.up.weight" in used(graph)


def test_the_model_in_torch_from_the_folder_and_side_by_side(folder):
    """torch's SGMV, which the graph does not have: all exits at once, rows at different exits."""
    for kind in ("joint", "policies", "lora", "first token"):
        model = torch_model(folder(kind, Never()))
        for name, parameter in model_of(kind).named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
    inputs, runtime = rows_of("lora").batch(range(40)), Runtime(folder(*CASES[-5]), threads=1)
    with torch.inference_mode():
        expected = early_exit(SideBySide(torch_model(runtime.folder)), CASES[-5][1], inputs)
    assert_equal(expected, runtime.run_batch(batch_of(inputs), CASES[-5][1]))


def test_the_export_compares_and_leaves_no_folder(tmp_path, monkeypatch):
    from mini_ee.export import nested_if

    monkeypatch.setattr(nested_if.Parts, "norm", lambda self, x, name: self.g.op("Identity", x))
    with pytest.raises(ValueError, match="graphs and torch differ by [0-9.e+]+ .*no folder was written"):
        export(tmp_path / "out", model_of("joint"), Never(), rows_of("joint"), "bert")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind, rule, message",
    [
        ("joint", Policy(), "Policy needs a model with policies"),
        ("regression", Threshold(0.5), "Threshold one with classes"),
        ("joint", Threshold((0.5,) * 5), "one threshold or 3"),
        ("joint", type("Own", (Rule,), {})(), "the graph has the rules never, fixed, threshold, patience, policy"),
    ],
)
def test_rules_that_do_not_fit(tmp_path, kind, rule, message):
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "out", model_of(kind), rule, rows_of(kind), "bert")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="is there already"):
        export(tmp_path / "out", model_of("joint"), Never(), rows_of("joint"), "bert")
