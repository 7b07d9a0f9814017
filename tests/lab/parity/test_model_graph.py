"""model.onnx, the graph that stops by itself: row by row what the loop does, on every model, under every rule."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import random_decoder
from test_builder import where_weights_stand
from torch import nn

from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.baselines.multi_model import MultiModel
from mini_ee.lab.baselines.palbert import Ponder, PonderExits
from mini_ee.lab.data.prompt_templates import Prompt
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.sessions import GraphRule
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.recording import Record, Recorded, read_and_measure, read_every_exit
from mini_ee.lab.row_thresholds import RowThresholds
from mini_ee.lab.rule_inputs import runtime_inputs, runtime_values, with_runtime
from mini_ee.lab.rules import (
    RULES,
    Fixed,
    Never,
    Patience,
    PatienceConfidence,
    Planned,
    Policy,
    QExit,
    Rule,
    Threshold,
)
from mini_ee.lab.sweep import compared
from mini_ee.lab.training.policies import OneForAll
from mini_ee.rules import max_probability

EXITS, K, C, B = (1, 2, 4), 3, 3, 16
ATOL = 2e-5  # float32 logits of size 4; measured at most 1.1e-5
MASK = 4


def backbone_of(kind):
    if kind in ("llama", "gemma", "phi"):
        return random_decoder(kind, EXITS[-1])
    sizes = {"hidden_size": 24, "num_hidden_layers": EXITS[-1], "num_attention_heads": 3, "intermediate_size": 48}
    sizes |= {"vocab_size": 60, "max_position_embeddings": 40}
    return Bert(BertConfig(model_type=kind, **sizes), pooler=False)


def prompt_model(kind):
    prompt = SimpleNamespace(
        prompt=Prompt("{text} {mask}", ("a", "b", "c")), mask_token_id=MASK, label_tokens=(31, 7, 12)
    )
    if kind == "llama":
        prompt.prompt = Prompt("{text} so", ("a", "b", "c"))
    return PromptModel(backbone_of(kind), prompt, (0, *EXITS))


def ended_by_ids():
    model = RowExits(backbone_of("llama").without_heads(), EXITS, C)
    model.backbone.text_end = MASK  # some rows end with it
    return model


MODELS = {
    "ended by ids": ended_by_ids,
    "bert": lambda: RowExits(backbone_of("bert").without_heads(), EXITS, C, "first"),
    "roberta": lambda: RowExits(backbone_of("roberta").without_heads(), EXITS, C),
    "llama": lambda: RowExits(backbone_of("llama").without_heads(), EXITS, C),
    "phi": lambda: RowExits(backbone_of("phi").without_heads(), EXITS, C),
    "a number": lambda: RowExits(backbone_of("bert").without_heads(), EXITS, 1),
    "policy": lambda: RowExits(backbone_of("bert").without_heads(), EXITS, C, policy=PolicyNetworks),
    "ponder": lambda: PonderExits(backbone_of("bert").without_heads(), EXITS, C, policy=Ponder),
    "certainty": lambda: RowExits(backbone_of("gemma").without_heads(), EXITS, C, policy=OneForAll),
    "lora": lambda: LoRAExits(backbone_of("bert").without_heads(), EXITS, C, rank=2),
    "cascade": lambda: MultiModel(backbone_of("bert").without_heads(), EXITS, C),
    "prompt": lambda: prompt_model("bert"),
    "prompt of a decoder": lambda: prompt_model("llama"),
    "exit 0": lambda: RowExits(backbone_of("bert").without_heads(), (0, 2, 4), C, "first"),
    "policy at exit 0": lambda: RowExits(backbone_of("roberta").without_heads(), (0, 1, 4), C, policy=PolicyNetworks),
    "one exit": lambda: RowExits(backbone_of("bert").without_heads(), EXITS[-1:], C),
}
OWN_STREAMS = ("lora", "cascade")


def made(name):
    """Drawn so that exits disagree and are sure of some rows."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = MODELS[name]().eval()
        for key, parameter in model.named_parameters():
            if not key.startswith("backbone.") or ".word." in key or key == "backbone.embeddings.weight":
                nn.init.normal_(parameter, std=0.6)
    return model


def rows(seed=0):
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(2, 12, B)
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = drawn.integers(5, 60, mask.shape) * mask
    ids[np.arange(B), drawn.integers(0, lengths)] = MASK
    return Inputs(ids, mask, drawn.integers(0, 2, mask.shape) * mask, (("",),) * B)


def sure(model, inputs, measure):
    """Thresholds that some rows reach at each exit but the last."""
    logits, *_ = read_every_exit(model.segments(), inputs)
    confidences = [model_graph_measure(logits[:, k], measure) for k in range(len(model.exits))]
    return tuple(float(np.median(exit_confidence)) for exit_confidence in confidences)


def model_graph_measure(logits, measure):
    from mini_ee.lab.confidence import MEASURES

    return MEASURES[measure][0](logits)


def rules_of(name, model, inputs):
    """All rules of BERT; of another model those that it alone has, else one: rules read logits of any model alike."""
    if name == "a number":
        return [Patience(1, 1.0)]
    if name == "ponder":
        chances = compared(QExit(), record_of(model, inputs))
        return [*(QExit(float(np.median(chances[:, k]) + 1e-4)) for k in (0, 1)), QExit(1.0)]
    if name in ("policy", "policy at exit 0", "certainty"):
        decided = early_exit_logits(model, inputs)
        policies = [Policy(float(1 / (1 + np.exp(-np.median(decided[:, 0])))))]
        return [*policies, Policy(0.5), Threshold(0.6)] if name == "policy" else policies
    if name == "one exit":
        return [Threshold(0.5)]
    if name != "bert":
        return [Threshold(sure(model, inputs, "max_probability"))]
    measures = ("max_probability", "entropy", "normalised_entropy", "breaking_ties", "breaking_ties_logits")
    return [
        *(Threshold(sure(model, inputs, measure), measure) for measure in measures),
        Patience(1),
        PatienceConfidence(2, 0.5),
        PatienceConfidence(1, -0.9, "entropy"),
        Fixed(1),
        Never(),
    ]


def record_of(model, inputs):
    logits, flops, exit_logits = read_every_exit(model.segments(), inputs)
    return Record(Recorded(model.exits, logits, flops, [1] * K, {"exit_logit": exit_logits}), logits, 1.0)


def early_exit_logits(model, inputs):
    *_, exit_logits = read_every_exit(model.segments(), inputs)
    return exit_logits


def written(model, rule, folder):
    folder.mkdir(exist_ok=True)
    return OrtModel(folder, write_graphs(model, model.segments(), rule, folder), threads=1)


def assert_same(result, expected):
    np.testing.assert_array_equal(result.exit_index, expected.exit_index)
    np.testing.assert_allclose(result.logits, expected.logits, rtol=0, atol=ATOL)
    np.testing.assert_allclose(result.cost.flops, expected.cost.flops)


@pytest.mark.parametrize("name", MODELS)
def test_rows_leave_where_the_loop_lets_them_leave_with_what_it_says(tmp_path, name):
    model, inputs = made(name), rows()
    last, exit_index = len(model.exits) - 1, set()
    others = (Never(), Fixed(0), Planned(np.arange(B) % (last + 1)))
    full, *_ = others_expected = [early_exit(model.segments(), other, inputs) for other in others]
    for number, rule in enumerate(rules_of(name, model, inputs)):
        graph = written(model, rule, tmp_path / str(number))
        expected = early_exit(model.segments(), rule, inputs)
        assert_same(early_exit(graph, rule, inputs), expected)
        one = inputs.take([number])
        assert_same(early_exit(graph, rule, one), early_exit(model.segments(), rule, one))
        assert_same(early_exit(graph, Planned(np.full(B, last)), inputs), full)
        if last and "threshold" in runtime_inputs(rule):
            assert_rows_stop_by_their_own_thresholds(model, graph, rule, inputs)
        if number == 0:  # what does not depend on the rule in the graph
            for other, same in zip(others, others_expected):
                assert_same(early_exit(graph, other, inputs), same)
            whole = early_exit(graph.whole(), Never(), inputs)
            np.testing.assert_allclose(whole.logits, full.logits, rtol=0, atol=ATOL)
        exit_index |= set(expected.exit_index.tolist())
    assert len(exit_index) >= min(2, last + 1), "the rules have to send rows to several exits"


def assert_rows_stop_by_their_own_thresholds(model, graph, rule, inputs):
    """A batch of rows with different thresholds equals batches of one, in torch and in the graph."""
    drawn, count = np.random.default_rng(1), len(model.exits) - 1
    cuts = runtime_values(rule, count)["threshold"]
    moved = np.where(np.isfinite(cuts), cuts, 0.5) + drawn.normal(0, 0.3, (B, count if type(rule) is Threshold else 1))
    moved[:4] = np.array([-np.inf, np.inf, np.nan, np.nan])[:, None]
    thresholds = moved.astype(np.float32) * np.ones(count, np.float32)
    alone = []
    for row, values in enumerate(np.where(np.isnan(thresholds), cuts, thresholds).tolist()):
        value = (*values, 0.0) if type(rule) is Threshold else values[0]
        row_rule = with_runtime(rule, {"threshold": value})
        alone.append(early_exit(model.segments(), row_rule, inputs.take([row])))
    exit_index = np.concatenate([result.exit_index for result in alone])
    assert len(set(exit_index.tolist())) > 1
    several = RowThresholds(rule, thresholds)
    for engine in (model.segments(), graph):
        batch = early_exit(engine, several, inputs)
        np.testing.assert_array_equal(batch.exit_index, exit_index)
        np.testing.assert_allclose(batch.logits, np.concatenate([result.logits for result in alone]), rtol=0, atol=ATOL)


@pytest.fixture(scope="module")
def written_bert(tmp_path_factory):
    """A folder of one model under a threshold on the largest probability, and a session of nothing but ONNX Runtime."""
    model, folder, inputs = made("bert"), tmp_path_factory.mktemp("graph") / "bert", rows()
    rule = Threshold(sure(model, inputs, "max_probability"))
    graph = written(model, rule, folder)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "onnx/model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    return SimpleNamespace(
        model=model, folder=folder, inputs=inputs, rule=rule, graph=graph, session=session, feeds=feeds
    )


def output(case, **feeds):
    names = [node.name for node in case.session.get_outputs()]
    return SimpleNamespace(**dict(zip(names, case.session.run(None, case.feeds | feeds))))


def test_it_says_label_confidence_and_layers_and_stops_by_the_runs_own_thresholds(written_bert):
    case = written_bert
    expected, outputs = early_exit(case.model.segments(), case.rule, case.inputs), output(case)
    np.testing.assert_array_equal(outputs.layers, expected.layers_run)
    np.testing.assert_array_equal(outputs.label, expected.logits.argmax(1))
    powers = np.exp(expected.logits)
    np.testing.assert_allclose(outputs.confidence, powers.max(1) / powers.sum(1), rtol=0, atol=1e-6)
    assert {node.name for node in case.session.get_overridable_initializers()} == {"threshold", "exit_at"}


def test_other_thresholds_may_be_fed(written_bert):
    case = written_bert
    for values in ((0.4, 0.9), (0.9, 0.4), (-np.inf, 0.0), (np.inf, 0.5), (np.inf, np.inf)):
        outputs = output(case, threshold=np.array(values, np.float32))
        expected = early_exit(case.model.segments(), Threshold((*values, 0.0)), case.inputs)
        np.testing.assert_array_equal(outputs.layers, expected.layers_run)


@pytest.mark.parametrize("unplanned", [-1, -7])
def test_a_plan_may_be_fed_for_some_rows_and_the_rule_decides_of_the_others(written_bert, unplanned):
    case, plan = written_bert, np.arange(B) % (K + 1) - 1
    plan[plan < 0] = unplanned
    by_rule = early_exit(case.model.segments(), case.rule, case.inputs).exit_index
    exit_index = np.where(plan < 0, by_rule, plan)
    outputs = output(case, exit_at=plan)
    np.testing.assert_array_equal(outputs.layers, np.array(EXITS)[exit_index])
    logits, *_ = read_every_exit(case.model.segments(), case.inputs)
    np.testing.assert_allclose(outputs.logits, logits[np.arange(B), exit_index], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("feeds", "heads"),
    [
        ({"exit_at": [K - 1]}, 1),
        ({"exit_at": [1]}, 1),
        ({"threshold": [np.inf, np.inf]}, 1),
        ({"threshold": [np.inf, -np.inf]}, 1),
        ({"threshold": [1.0, 1.0]}, K),
        ({"exit_at": [0] + [2] * (B - 1)}, 2),
    ],
    ids=str,
)
def test_a_head_that_nobody_asks_is_not_read(written_bert, tmp_path, feeds, heads):
    case, options = written_bert, onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(case.folder / "onnx/model.onnx", options, providers=["CPUExecutionProvider"])
    types = {"exit_at": np.int64, "threshold": np.float32}
    session.run(None, case.feeds | {name: np.array(value, types[name]) for name, value in feeds.items()})
    with open(session.end_profiling()) as file:
        names = [event["name"] for event in json.load(file) if event["name"].endswith("_kernel_time")]
    assert sum("heads." in name and ".out.weight" in name for name in names) == heads


@pytest.mark.parametrize(
    "feeds",
    [
        {"threshold": np.zeros(K, np.float32)},
        {"threshold": np.zeros((B, K), np.float32)},
        {"threshold": np.zeros((B - 1, K - 1), np.float32)},
        {"threshold": np.zeros((2, B, K - 1), np.float32)},
        {"exit_at": np.array([K])},
        {"exit_at": np.zeros(B - 1, np.int64)},
        {"input_ids": np.full((B, 3), 60)},
        {"attention_mask": np.ones((B + 1, 3), np.int64)},
    ],
    ids=lambda feeds: next(f"{name} {value.shape} {value.flat[0]}" for name, value in feeds.items()),
)
def test_bad_input_is_an_error_and_no_answer(written_bert, feeds):
    with pytest.raises(Exception) as error:  # noqa: B017  onnxruntime has types of its own for each
        output(written_bert, **feeds)
    assert type(error.value).__module__.startswith("onnxruntime")


def test_no_rows_and_a_thousand_rows(written_bert):
    case = written_bert
    many = {name: np.tile(value, (1_000 // B + 1, 1))[:1_000] for name, value in case.feeds.items()}
    outputs = output(case, **many)
    np.testing.assert_array_equal(outputs.layers, np.tile(output(case).layers, 1_000 // B + 1)[:1_000])
    with pytest.raises(Exception, match="empty set"):
        output(case, **{name: value[:0] for name, value in case.feeds.items()})


def test_nothing_of_ours_is_needed(written_bert, tmp_path):
    code = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1] + "/onnx/model.onnx", providers=["CPUExecutionProvider"])
feeds = dict(numpy.load(sys.argv[2]))
numpy.savez(sys.argv[3], *session.run(["logits", "layers"], feeds))
assert not {"torch", "mini_ee", "onnx", "tokenizers"} & sys.modules.keys()
"""
    case, given, answer = written_bert, tmp_path / "given.npz", tmp_path / "answer.npz"
    np.savez(given, **case.feeds)
    subprocess.run([sys.executable, "-c", code, case.folder, given, answer], check=True, capture_output=True)
    outputs, expected = np.load(answer), output(case)
    np.testing.assert_array_equal(outputs["arr_0"], expected.logits)
    np.testing.assert_array_equal(outputs["arr_1"], expected.layers)


def test_a_weight_stands_in_the_branch_that_uses_it(written_bert):
    stands = where_weights_stand(onnx.load(written_bert.folder / "onnx/model.onnx").graph)
    assert [stands[f"backbone.layers.{layer}.up.weight"] for layer in range(4)] == [0, 1, 2, 2]
    assert [stands[f"heads.{k}.dense.weight"] for k in range(K)] == [1, 2, 2]


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_leave_near_where_torch_leaves(tmp_path, precision):
    model, inputs = made("bert"), rows()
    manifest = write_graphs(model, model.segments(), Threshold(0.6), tmp_path, precision)
    result = early_exit(OrtModel(tmp_path, manifest, threads=1), Threshold(0.6), inputs)
    expected = early_exit(model.segments(), Threshold(0.6), inputs)
    assert (result.exit_index == expected.exit_index).mean() > 0.8


@pytest.mark.parametrize("name", ["bert", "policy", "lora"])
def test_a_replay_of_the_graph_costs_what_the_graph_costs(tmp_path, name):
    model, inputs = made(name), rows()
    for number, rule in enumerate({type(rule): rule for rule in rules_of(name, model, inputs)}.values()):
        graph = written(model, rule, tmp_path / str(number))
        logits, flops, measures = read_and_measure(graph, inputs)
        costs = (
            [graph.layer_passes(k) for k in range(K)],
            measures,
            {"exit_logit": [graph.state_flops(k, "exit_logit") for k in range(K)]},
        )
        replayed = early_exit(Recorded(graph.exits, logits, flops, *costs), rule, range(B))
        run = early_exit(graph, rule, inputs)
        np.testing.assert_array_equal(replayed.exit_index, run.exit_index)
        np.testing.assert_array_equal(replayed.cost.flops, run.cost.flops)
        np.testing.assert_array_equal(replayed.cost.layer_passes, run.cost.layer_passes)


def test_threads_with_rules_of_their_own_feed_their_own(written_bert):
    """What was fed last is kept for the next batch; here another thread changes it right after it was set."""
    case, other = written_bert, Threshold(0.9)

    class Raced(GraphRule):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_latest" and value[0] not in (None, other):
                self.feeds(other, None)

    manifest = {"rule": case.rule.to_dict(), "exits": EXITS}
    given_inputs = Raced(case.folder, manifest).feeds(Threshold(0.4), None)
    assert given_inputs["threshold"].tolist() == [np.float32(0.4)] * (K - 1)


def test_a_rule_that_no_graph_can_hold_is_refused_with_its_line_unless_there_are_segments(tmp_path):
    class Coin(Rule):
        name = "coin"

        def stop(self, k, read, memory):
            return np.arange(len(read)) % 2 == 0

    model, inputs = made("bert"), rows()
    line = r"test_model_graph.py:\d+: the size rows_0 is known only when the graph runs: .* --engine torch"
    with pytest.raises(ValueError, match=line):
        write_graphs(model, model.segments(), Coin(), tmp_path)
    manifest = write_graphs(model, model.segments(), Coin(), tmp_path, segments=True)
    manifest["rule"] = {"name": "never"}
    assert_same(early_exit(OrtModel(tmp_path, manifest), Coin(), inputs), early_exit(model.segments(), Coin(), inputs))


def test_a_rule_remembers_what_an_exit_says_at_which_nobody_may_leave(tmp_path, monkeypatch):
    class Mean(Threshold):
        """Leave where the mean of the confidences so far reaches the threshold."""

        name = "mean"

        def stop(self, k, read, memory):
            memory["sum"] = memory.get("sum", 0) + max_probability(read)
            threshold = self.threshold[k] if isinstance(self.threshold, tuple) else self.threshold
            return memory["sum"] / (k + 1) >= threshold

    monkeypatch.setitem(RULES, "mean", Mean)
    model, inputs = made("bert"), rows()
    logits, *_ = read_every_exit(model.segments(), inputs)
    means = (max_probability(logits[:, 0]) + max_probability(logits[:, 1])) / 2
    rule = Mean((np.inf, float(np.quantile(means, 0.5)) + 1e-4, 0.0))
    manifest = write_graphs(model, model.segments(), rule, tmp_path)
    result, expected = (
        early_exit(segments, rule, inputs) for segments in (OrtModel(tmp_path, manifest), model.segments())
    )
    assert set(expected.exit_index.tolist()) == {1, 2}
    assert_same(result, expected)
