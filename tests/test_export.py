"""ONNX: graphs say what torch says, a folder is whole and verified or not there, and the runtime needs no torch."""

import dataclasses
import functools
import inspect
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import load_file

from mini_ee.bert import Bert, BertConfig
from mini_ee.checkpoint import load_backbone, write_tensors
from mini_ee.confidence import max_probability
from mini_ee.early_exit import Reading, Segments, early_exit, read_every_exit
from mini_ee.exits import MultiExit, TorchSegments
from mini_ee.export import graphs, runtime, segments
from mini_ee.export.runtime import CPU, CUDA, OrtSegments, OrtState, Runtime, WholeGraph
from mini_ee.export.segments import export, torch_segments, write_segments
from mini_ee.files import read_json, write_json
from mini_ee.rules import FixedExit, NeverExit, Patience, PatienceConfidence, Rule, Threshold
from mini_ee.runs import Run, versions
from mini_ee.tasks import Inputs, Tokenizer, load_task

SHARED = "MINI_EE_SHARED"
KINDS = ("bert", "roberta", "albert", "elasticbert")
ACTIVATIONS = ("gelu", "gelu_new", "relu")
EXITS = (1, 2, 4)
K, C = 3, 3
LENGTHS = (5, 12, 3, 9, 12, 4, 7)
B, ALL = len(LENGTHS), np.arange(len(LENGTHS))
ATOL = 1e-5  # float32 logits of size 9 against torch; measured max 3.6e-6, onnxruntime 1.31 and torch 2.13 on CPU
HALF_ATOL = 0.05  # the same logits in float16; measured max 9.4e-3
WORDS = "the a was is very and film meal book song room good great fine lovely bad awful poor dull".split()


def make_model(kind="bert", activation="gelu", pool="mean", exits=EXITS, num_labels=C, **shape):
    """A random MultiExit with every parameter drawn; wide words and heads, so that rows leave at different exits."""
    config = {
        "model_type": kind,
        "vocab_size": 60,
        "hidden_size": 24,
        "num_hidden_layers": exits[-1],
        "num_attention_heads": 3,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": int(kind == "roberta"),
        "embedding_size": 16 if kind == "albert" else None,
        "hidden_act": activation,
    }
    model = MultiExit(Bert(BertConfig(**config | shape), lm_head=False), exits, num_labels, pool).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = float(name.endswith("norm.weight")), 1.0 if ".word." in name or ".out." in name else 0.15
            parameter.normal_(mean, std, generator=generator)
    return model


def make_inputs(lengths, pad=0, seed=0):
    """Rows of random tokens with these lengths, padded to the longest."""
    drawn = np.random.default_rng(seed)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask, drawn.integers(5, 60, mask.shape), pad)
    return Inputs(ids, mask, drawn.integers(0, 2, mask.shape) * mask, tuple((f"row {i}",) for i in range(len(ids))))


def alone(inputs, row):
    """One row without its padding."""
    length = inputs.attention_mask[row].sum()
    one = inputs.take([row])
    return Inputs(one.input_ids[:, :length], one.attention_mask[:, :length], one.token_type_ids[:, :length], one.texts)


def torch_logits(model, inputs):
    """(B, K, C) as the model itself computes them, not through segments."""
    with torch.no_grad():
        said = model(*map(torch.from_numpy, (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)))
    return torch.stack(said, 1).numpy()


class Case(NamedTuple):
    """A model, the folder that was written of it, and a padded batch with torch's answer row by row."""

    model: MultiExit
    folder: Path
    manifest: dict
    inputs: Inputs
    logits: np.ndarray  # (B, K, C), each row alone
    segments: OrtSegments
    whole: WholeGraph


def make_case(folder, *shape):
    model = make_model(*shape)
    folder.mkdir(parents=True)
    inputs = make_inputs(LENGTHS, model.backbone.config.pad_token_id)
    logits = np.concatenate([torch_logits(model, alone(inputs, row)) for row in range(B)])
    manifest = write_segments(model, folder)
    sessions = [engine(folder, manifest, threads=1) for engine in (OrtSegments, WholeGraph)]
    return Case(model, folder, manifest, inputs, logits, *sessions)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("cases")
    return functools.cache(lambda *shape: make_case(root / "-".join(shape), *shape))


SHAPES = [(kind, activation, pool) for kind in KINDS for activation in ACTIVATIONS for pool in ("first", "mean")]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids="-".join)


@pytest.fixture(params=[("bert", "gelu", "mean"), ("bert", "gelu", "first"), ("roberta", "gelu", "mean")], ids="-".join)
def case(request, case_of):
    return case_of(*request.param)


# The graphs say what torch says


def assert_says_what_torch_says(case, lengths):
    inputs = make_inputs(lengths, case.model.backbone.config.pad_token_id, seed=7)
    expected = torch_logits(case.model, inputs)
    found, _ = read_every_exit(case.segments, inputs)
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(read_every_exit(case.whole, inputs)[0][:, 0], expected[:, -1], rtol=0, atol=ATOL)


@each_shape
def test_every_exit_says_what_torch_says_at_any_batch_size_and_length(case_of, shape):
    for lengths in ([1], [7], [38], [5, 12, 3], [2, 2], [30] * 5 + [1]):
        assert_says_what_torch_says(case_of(*shape), lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_padding_is_not_read(case_of, kind):
    case = case_of(kind, "gelu", "mean")
    junk = np.random.default_rng(1).integers(5, 60, case.inputs.input_ids.shape) * (1 - case.inputs.attention_mask)
    found, _ = read_every_exit(
        case.segments,
        dataclasses.replace(case.inputs, input_ids=case.inputs.input_ids * case.inputs.attention_mask + junk),
    )
    np.testing.assert_allclose(found, case.logits, rtol=0, atol=ATOL)


def test_the_largest_probability_is_judged_in_the_graph(case):
    state = case.segments.advance(0, case.segments.start(case.inputs))
    reading = case.segments.read(0, state)
    powers = np.exp(reading.logits.astype(float))
    expected = [max(row) / sum(row) for row in powers]
    np.testing.assert_allclose(reading.max_probability, expected, rtol=0, atol=1e-6)


# The invariants of the loop


def exit_by_hand(logits, rule):
    """Where one row leaves that is alone in the model. logits (K, C)."""
    memory, plan = {}, rule.plan([0])
    for k in range(K - 1):
        if plan is not None:
            if plan[0] <= k:
                return k
        elif rule.reads and rule.stop(k, Reading(logits[k : k + 1]), memory)[0]:
            return k
    return K - 1


class Planned(Rule):
    """Knows the exit of each row beforehand."""

    reads = False

    def __init__(self, exits):
        self.exits = exits

    def plan(self, inputs):
        return self.exits


PLAN = np.array([0, 2, 1, 0, 1, 2, 1])
RULES = {
    "never": lambda rows: NeverExit(),
    **{f"fixed {k}": lambda rows, k=k: FixedExit(k) for k in range(K)},
    "always": lambda rows: Threshold(-np.inf),
    "threshold": lambda rows: Threshold(0.9),
    "one threshold an exit": lambda rows: Threshold((0.95, 0.6, 0.0)),
    "entropy": lambda rows: Threshold(-0.35, "entropy"),
    "patience": lambda rows: Patience(1),
    "patience-confidence": lambda rows: PatienceConfidence(2, 0.6),
    "planned": lambda rows: Planned(PLAN[rows]),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def assert_same(found, logits, exit_index):
    np.testing.assert_array_equal(found.exit_index, exit_index)
    np.testing.assert_array_equal(found.layers_run, np.array(EXITS)[exit_index])
    np.testing.assert_allclose(found.logits, logits, rtol=0, atol=ATOL)


def test_never_exit_equals_the_full_model(case):
    assert_same(early_exit(case.segments, NeverExit(), case.inputs), case.logits[:, -1], np.full(B, K - 1))


@pytest.mark.parametrize("rule", ["fixed 0", "always"])
def test_always_exit_equals_the_first_head(case, rule):
    assert_same(early_exit(case.segments, RULES[rule](ALL), case.inputs), case.logits[:, 0], np.zeros(B, int))


@each_rule
def test_a_batch_of_B_equals_B_batches_of_one(case, rule):
    together = early_exit(case.segments, RULES[rule](ALL), case.inputs)
    single = [early_exit(case.segments, RULES[rule]([row]), alone(case.inputs, row)) for row in range(B)]
    assert_same(together, *(np.concatenate(parts) for parts in list(zip(*single))[:2]))


@each_rule
def test_rows_leave_where_the_logits_of_torch_say_and_with_what_they_say(case, rule):
    expected = np.array([exit_by_hand(case.logits[row], RULES[rule]([row])) for row in range(B)])
    assert_same(early_exit(case.segments, RULES[rule](ALL), case.inputs), case.logits[ALL, expected], expected)


@each_rule
def test_the_torch_engine_exits_and_predicts_the_same(case, rule):
    found = early_exit(case.segments, RULES[rule](ALL), case.inputs)
    expected = early_exit(TorchSegments(case.model), RULES[rule](ALL), case.inputs)
    assert_same(found, expected.logits, expected.exit_index)
    assert found.logits.argmax(1).tolist() == expected.logits.argmax(1).tolist()
    np.testing.assert_allclose(found.cost.flops, expected.cost.flops)


@pytest.mark.parametrize("rule", ["threshold", "one threshold an exit", "patience", "planned"])
def test_these_batches_are_mixed_so_that_compaction_is_at_work(case, rule):
    assert len(set(early_exit(case.segments, RULES[rule](ALL), case.inputs).exit_index)) >= 2


def test_layers_run_does_not_grow_as_the_threshold_loosens(case):
    layers = [early_exit(case.segments, Threshold(t), case.inputs).layers_run for t in np.linspace(1, 1 / C, 21)]
    assert (np.diff(layers, axis=0) <= 0).all()
    assert len(np.unique(np.sum(layers, axis=1))) > 3, "the sweep has to meet more than both ends"


def test_a_row_that_left_is_not_computed_again(case, monkeypatch):
    sizes, run = [], runtime.Session.run

    def counted(self, stays, inputs):
        sizes.append((stays, len(inputs["attention_mask"]), len(inputs.get("rows", inputs["attention_mask"]))))
        return run(self, stays, inputs)

    monkeypatch.setattr(runtime.Session, "run", counted)
    left = early_exit(case.segments, RULES["patience"](ALL), case.inputs).exit_index
    here = [int((left >= k).sum()) for k in range(left.max() + 1)]
    assert sizes == [(stays, rows, rows) for rows in here for stays in (True, False)]


# These tests can fail: bugs planted in the graphs and in the state


def mutant(monkeypatch, old, new):
    """graphs.py with one piece of its source replaced."""
    found = {}
    for name, thing in vars(graphs).items():
        if inspect.isfunction(thing) or thing is graphs.Graph:
            if inspect.getsource(thing).count(old) == 1:
                found[name] = inspect.getsource(thing).replace(old, new)
    assert len(found) == 1, f"{old!r} is not in graphs.py once: plant this bug anew"
    namespace = dict(vars(graphs))
    ((name, source),) = found.items()
    exec(source, namespace)
    monkeypatch.setattr(graphs, name, namespace[name])


GRAPH_BUGS = {
    "exact gelu for gelu_new": ('"none" if kind == "gelu" else "tanh"', '"none"'),
    "tanh gelu for gelu": ('"none" if kind == "gelu" else "tanh"', '"tanh"'),
    "gelu for relu": ('kind == "relu"', "False"),
    "the next head": (
        "_exit_head(graph, _rows_that_go_on(graph), _mask(graph), number, pool)",
        "_exit_head(graph, _rows_that_go_on(graph), _mask(graph), (number + 1) % 3, pool)",
    ),
    "the other pool": ('pool == "first"', 'pool != "first"'),
    "padding counted in the mean": (
        'weights = graph.op("Unsqueeze", mask, graph.integers(2))',
        'weights = graph.op("Unsqueeze", graph.op("Or", mask, graph.op("Not", mask)), graph.integers(2))',
    ),
    "padding read": (
        'graph.op("Unsqueeze", mask, graph.integers(1, 2))',
        'graph.op("Unsqueeze", graph.op("Or", mask, graph.op("Not", mask)), graph.integers(1, 2))',
    ),
    "plain positions": ('config.model_type == "roberta"', "False"),
    "a layer skipped": ("range(start, stop)", "range(start + 1, stop)"),
    "a layer twice": ("range(start, stop)", "range(max(start - 1, 0), stop)"),
    "norms without epsilon": ("epsilon=self.config.layer_norm_eps", "epsilon=1e-2"),
    "rows ignored": (
        'return graph.op("Gather", hidden, graph.input("rows", "batch"))',
        'return graph.op("Slice", hidden, graph.integers(0), graph.op("Shape", graph.input("rows", "batch")))',
    ),
}


@pytest.mark.parametrize(
    "bug, shape",
    [
        ("exact gelu for gelu_new", ("bert", "gelu_new", "mean")),
        ("tanh gelu for gelu", ("bert", "gelu", "mean")),
        ("gelu for relu", ("bert", "relu", "mean")),
        ("the next head", ("bert", "gelu", "mean")),
        ("the other pool", ("bert", "gelu", "first")),
        ("padding counted in the mean", ("bert", "gelu", "mean")),
        ("padding read", ("bert", "gelu", "first")),
        ("plain positions", ("roberta", "gelu", "mean")),
        ("a layer skipped", ("bert", "gelu", "mean")),
        ("a layer twice", ("albert", "gelu", "mean")),
        ("norms without epsilon", ("elasticbert", "gelu", "mean")),
    ],
)
def test_the_comparison_with_torch_can_fail(monkeypatch, tmp_path, bug, shape):
    mutant(monkeypatch, *GRAPH_BUGS[bug])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_says_what_torch_says(make_case(tmp_path / "case", *shape), [5, 12, 3])


def test_the_tests_of_compaction_can_fail_where_the_graphs_ignore_rows(monkeypatch, tmp_path):
    mutant(monkeypatch, *GRAPH_BUGS["rows ignored"])
    case = make_case(tmp_path / "case", "bert", "gelu", "mean")
    assert_says_what_torch_says(case, [5, 12, 3])
    for caught in (test_a_batch_of_B_equals_B_batches_of_one, test_the_torch_engine_exits_and_predicts_the_same):
        with pytest.raises(AssertionError):
            caught(case, "planned")


@pytest.mark.parametrize(
    "keep",
    [
        lambda self, rows: self._replace(rows=self.rows[rows], mask=self.mask[: len(rows)]),
        lambda self, rows: self._replace(rows=self.rows[: len(rows)], mask=self.mask[rows]),
        lambda self, rows: self._replace(rows=self.rows[rows], mask=np.ones_like(self.mask[rows])),
        lambda self, rows: self._replace(rows=rows % 2, mask=self.mask[rows]),
    ],
    ids=["forgets the mask", "forgets the rows", "unmasks", "takes others"],
)
def test_the_tests_of_compaction_can_fail_where_keep_loses_track(monkeypatch, case_of, keep):
    case = case_of("bert", "gelu", "mean")
    monkeypatch.setattr(OrtState, "keep", keep)
    for caught in (
        test_a_batch_of_B_equals_B_batches_of_one,
        test_rows_leave_where_the_logits_of_torch_say_and_with_what_they_say,
        test_the_torch_engine_exits_and_predicts_the_same,
    ):
        with pytest.raises(AssertionError):
            caught(case, "planned")


def test_the_full_model_and_first_head_tests_can_fail(monkeypatch, case_of):
    case = case_of("bert", "gelu", "mean")
    read = OrtSegments.read
    monkeypatch.setattr(OrtSegments, "read", lambda self, k, state: read(self, (k + 1) % K, state))
    with pytest.raises(AssertionError):
        test_never_exit_equals_the_full_model(case)
    with pytest.raises(AssertionError):
        test_always_exit_equals_the_first_head(case, "always")


def test_the_monotone_test_can_fail(monkeypatch, case_of):
    monkeypatch.setattr(
        Threshold, "stop", lambda self, k, reading, memory: max_probability(reading.logits) < self.threshold
    )
    with pytest.raises(AssertionError):
        test_layers_run_does_not_grow_as_the_threshold_loosens(case_of("bert", "gelu", "mean"))


# The exported folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint_folder):
    return Tokenizer.from_folder(checkpoint_folder, 30)


def make_run(tokenizer, model, rule=Threshold(0.9), texts=1):
    """A run as load_run gives it, untrained."""
    labels = ["bad", "fair", "good"] if model.num_labels > 1 else []
    task = {"name": "words", "label_names": labels, "metrics": ["accuracy"], "texts": texts}
    return Run({"method": "joint", "task": task}, model, tokenizer, rule)


def sentences(count, texts=1, seed=0):
    drawn = random.Random(seed)
    return [tuple(" ".join(drawn.choices(WORDS, k=drawn.randint(1, 9))) for _ in range(texts)) for _ in range(count)]


TEXTS = sentences(40)


@pytest.fixture(scope="module")
def run(tokenizer):
    return make_run(tokenizer, make_model())


@pytest.fixture(scope="module")
def exported(tmp_path_factory, run):
    folder = tmp_path_factory.mktemp("exported") / "bert"
    export(run, folder, TEXTS)
    return folder


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


NAMES = sorted([*(f"{part}_{e}.onnx" for part in ("body", "head") for e in EXITS), "full.onnx"])
FILES = sorted([*NAMES, "manifest.json", "model.safetensors", "tokenizer.json"])


def torch_answers(run, texts):
    """Label, exit and logits of each text alone."""
    for text in texts:
        result = early_exit(run.segments(), run.rule, run.encode([text]).batch(np.arange(1)))
        yield run.label_names[result.logits[0].argmax()], result.exit_index[0], result.logits[0]


def assert_answers_like_torch(answers, run, texts, atol=ATOL):
    assert len(answers) == len(texts)
    for answer, (label, exit, logits) in zip(answers, torch_answers(run, texts)):
        assert (answer.label, answer.exit, answer.layers) == (label, exit, run.exits[exit])
        np.testing.assert_allclose(answer.logits, logits, rtol=0, atol=atol)
        powers = np.exp(logits - logits.max())
        assert answer.confidence == pytest.approx(powers.max() / powers.sum(), abs=1e-5) and answer.milliseconds > 0


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_the_runtime_answers_like_torch_in_the_order_of_the_texts(exported, run, batch_size):
    answers = Runtime(exported, threads=1).run(TEXTS, batch_size)
    assert len({answer.exit for answer in answers}) == K and len({answer.label for answer in answers}) == C
    assert_answers_like_torch(answers, run, TEXTS)


def test_that_test_can_fail_where_answers_come_in_the_order_of_their_length(exported, run, monkeypatch):
    monkeypatch.setattr(runtime, "batches", lambda encoded, size: [np.arange(len(encoded))[::-1]])
    test_the_runtime_answers_like_torch_in_the_order_of_the_texts(exported, run, 32)
    monkeypatch.setattr(runtime, "early_exit", lambda s, rule, inputs: early_exit(s, rule, inputs.take(np.s_[::-1])))
    with pytest.raises(AssertionError):
        test_the_runtime_answers_like_torch_in_the_order_of_the_texts(exported, run, 32)


def test_another_rule_may_be_given_to_a_call(exported, run):
    for rule in (NeverExit(), FixedExit(1), Patience(1)):
        answers = Runtime(exported, threads=1).run(TEXTS, rule=rule)
        assert_answers_like_torch(answers, run._replace(rule=rule), TEXTS)


def test_the_folder_holds_the_files_of_the_design_and_nothing_else(exported):
    assert sorted(path.name for path in exported.iterdir()) == FILES
    assert [path.name for path in exported.parent.iterdir()] == ["bert"]


def test_the_manifest_says_what_was_exported(exported, run):
    manifest = read_json(exported / "manifest.json", signed="format_version")
    assert manifest["format_version"] == 1 and manifest["opset"] == graphs.OPSET and manifest["precision"] == "float32"
    assert manifest["exits"] == list(EXITS) and manifest["rule"] == run.rule.to_dict()
    assert manifest["task"] == run.config["task"] and manifest["max_length"] == 30 and manifest["method"] == "joint"
    assert manifest["versions"] == versions() | {"onnx": onnx.__version__}
    assert BertConfig(**manifest["backbone"]) == run.model.backbone.config
    assert sorted(manifest["files"]) == sorted(set(FILES) - {"manifest.json"})
    assert sorted(manifest["graphs"]) == [name.removesuffix(".onnx") for name in NAMES]
    verified = manifest["verified"]
    assert verified["texts"] == len(TEXTS) and 0 < verified["max_logit_difference"] < ATOL
    assert verified["prediction_agreement"] == verified["exit_agreement"] == 1


def test_the_interface_in_the_manifest_is_that_of_the_graphs_and_its_axes_are_dynamic(exported):
    types = {"tensor(float)": "float32", "tensor(int64)": "int64"}
    for name, interface in read_json(exported / "manifest.json")["graphs"].items():
        session = onnxruntime.InferenceSession(exported / f"{name}.onnx", providers=[CPU])
        for kind, found in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
            expected = {each.name: {"dtype": types[each.type], "axes": each.shape} for each in found}
            assert interface[kind] == expected
            for value in expected.values():
                assert value["axes"][0] in ("batch", "rows_before")
                assert all(axis == "tokens" for axis in value["axes"][1:2] if len(value["axes"]) == 3)
        assert interface["inputs"]["attention_mask"]["axes"] == ["batch", "tokens"]
        logits = {"logits": {"dtype": "float32", "axes": ["batch", C]}}
        surest = {"max_probability": {"dtype": "float32", "axes": ["batch"]}}
        hidden = {"hidden_out": {"dtype": "float32", "axes": ["batch", "tokens", 24]}}
        assert interface["outputs"] == (hidden if name.startswith("body") else logits | surest)


@each_shape
def test_every_graph_passes_the_checker_and_holds_no_weight(case_of, shape):
    case = case_of(*shape)
    weights = load_file(case.folder / "model.safetensors")
    used = set()
    for name in NAMES:
        onnx.checker.check_model(case.folder / name, full_check=True)
        graph = onnx.load(case.folder / name, load_external_data=False)
        assert [(each.domain, each.version) for each in graph.opset_import] == [("", graphs.OPSET)]
        for tensor in graph.graph.initializer:
            if tensor.name in weights:
                assert (
                    dict((entry.key, entry.value) for entry in tensor.external_data)["location"] == "model.safetensors"
                )
                used.add(tensor.name)
            else:
                assert numpy_helper.to_array(tensor).nbytes <= 24
        whole = onnx.load(case.folder / name)
        for tensor in whole.graph.initializer:
            if tensor.name in weights:
                np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
    assert used == weights.keys()


def assert_weights_are_those_of(folder, model):
    expected = {
        name: value.detach().numpy() for name, value in model.named_parameters() if not name.startswith("backbone.pool")
    }
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32 and found[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_run_bit_by_bit_each_once(case_of, kind):
    case = case_of(kind, "gelu", "mean")
    assert_weights_are_those_of(case.folder, case.model)


def test_that_test_can_fail_where_one_bit_of_a_weight_is_another(case_of, tmp_path):
    case = case_of("bert", "gelu", "mean")
    model = make_model()
    with torch.no_grad():
        model.heads[1].out.bias.view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError):
        assert_weights_are_those_of(case.folder, model)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_stored_once_the_folder_is_hardly_larger_than_the_run(tmp_path, tokenizer, kind):
    model = make_model(kind, exits=(1, 2, 3, 4), hidden_size=96, intermediate_size=384, vocab_size=4000)
    export(make_run(tokenizer, model), tmp_path / "out", TEXTS[:4])
    write_tensors(tmp_path / "run.safetensors", model.state_dict())
    tokenizer.save(tmp_path / "tokenizer.json")
    run_bytes = sum((tmp_path / name).stat().st_size for name in ("run.safetensors", "tokenizer.json"))
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 1.05 * run_bytes
