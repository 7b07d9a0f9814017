"""ONNX: graphs say what torch says, a folder is whole and verified or not there, and the runtime needs no torch."""

import dataclasses
import functools
import io
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import all_schedules, random_decoder, weights_of
from onnx import numpy_helper

import mini_ee.lab.export.runtime as runtime
import mini_ee.lab.export.sessions as sessions
import mini_ee.lab.export.writer as writer
from mini_ee.export.manifest import FORMAT_VERSION, MODEL
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import write_tensors
from mini_ee.lab.baselines.multi_model import MultiModel
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import file_sha256, read_json, write_json
from mini_ee.lab.data.prompt_templates import Prompt
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.exits.row_exits import RowExits, RowSegments
from mini_ee.lab.export.builder import OPSET, Builder, branches_of
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments, WholeModel
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import CPU, CUDA, Session
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.tracing import LOWERINGS
from mini_ee.lab.export.writer import export, write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.raee import Retrieval
from mini_ee.lab.methods.raee_datastore import Datastore, unit_length
from mini_ee.lab.methods.raee_encoders import OwnStates, SentenceEncoder
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Planned, Policy, Threshold
from mini_ee.lab.training.policies import OneForAll
from mini_ee.lab.training.run_folder import Run, versions

SHARED = "MINI_EE_SHARED"
KINDS = ("bert", "roberta", "albert", "elasticbert")
DECODER_KINDS = ("llama", "llama3", "gemma", "phi")
DECODERS = ("llama", "gemma", "phi")  # as conftest draws them
GOLDEN = Path(__file__).parents[2] / "golden"
EXITS = (1, 2, 4)
K, C = 3, 3
LENGTHS = (5, 12, 3, 9, 12, 4, 7)
B, ALL = len(LENGTHS), np.arange(len(LENGTHS))
ATOL = 1e-5  # float32 logits of size 9 against torch; measured max 3.6e-6, onnxruntime 1.31 and torch 2.13 on CPU
HALF_ATOL = 0.05  # the same logits in float16; measured max 9.4e-3
REAL_ATOL = 1e-6  # float32 margins of heads with weights of .02; measured max 0
WORDS = "the a was is very and film meal book song room good great fine lovely bad awful poor dull".split()


def make_model(kind="bert", activation="gelu", pool="mean", exits=EXITS, num_labels=C, **shape):
    """A random RowExits with every parameter drawn; wide words and heads, so that rows leave at different exits."""
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
    model = RowExits(Bert(BertConfig(**config | shape), lm_head=False), exits, num_labels, pool).eval()
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
        output = model(*map(torch.from_numpy, (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)))
    return torch.stack(output, 1).numpy()


def engines_of(folder, manifest):
    """Graphs by segment, and model.onnx without early exits."""
    return OrtSegments(folder, manifest, threads=1), OrtModel(folder, manifest, threads=1).whole()


class Case(NamedTuple):
    """A model, the folder that was written of it, and a padded batch with torch's answer row by row."""

    model: RowExits
    folder: Path
    manifest: dict
    inputs: Inputs
    logits: np.ndarray  # (B, K, C), each row alone
    segments: OrtSegments
    whole: WholeModel


def make_case(folder, *shape):
    model = make_model(*shape)
    folder.mkdir(parents=True)
    inputs = make_inputs(LENGTHS, model.backbone.config.pad_token_id)
    logits = np.concatenate([torch_logits(model, alone(inputs, row)) for row in range(B)])
    manifest = write_graphs(model, model.segments(), Threshold(0.9), folder, segments=True)
    return Case(model, folder, manifest, inputs, logits, *engines_of(folder, manifest))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("cases")
    return functools.cache(lambda *shape: make_case(root / "-".join(shape), *shape))


WITHOUT_RUN = {
    "format_version": FORMAT_VERSION,
    "files": {},
    "max_length": 30,
    "task": {"name": "words", "label_names": list("abc"), "texts": 1},
    "method": "joint",
    "settings": {},
}
"""What a manifest says beside what write_graphs gives."""

SHAPES = [("bert", "gelu", "first"), ("bert", "gelu", "mean"), ("bert", "gelu_new", "mean"), ("bert", "relu", "first")]
SHAPES += [(kind, "gelu", "mean") for kind in KINDS[1:]]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids="-".join)


@pytest.fixture(params=[("bert", "gelu", "mean"), ("bert", "gelu", "first"), ("roberta", "gelu", "mean")], ids="-".join)
def case(request, case_of):
    return case_of(*request.param)


# The graphs say what torch says


def assert_says_what_torch_says(case, lengths):
    inputs = make_inputs(lengths, case.model.backbone.config.pad_token_id, seed=7)
    expected = torch_logits(case.model, inputs)
    logits, *_ = read_every_exit(case.segments, inputs)
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(early_exit(case.whole, Never(), inputs).logits, expected[:, -1], rtol=0, atol=ATOL)


@each_shape
def test_every_exit_says_what_torch_says_at_any_batch_size_and_length(case_of, shape):
    for lengths in ([1], [7], [38], [5, 12, 3], [2, 2], [30] * 5 + [1]):
        assert_says_what_torch_says(case_of(*shape), lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_padding_is_not_read(case_of, kind):
    case = case_of(kind, "gelu", "mean")
    junk = np.random.default_rng(1).integers(5, 60, case.inputs.input_ids.shape) * (1 - case.inputs.attention_mask)
    logits, *_ = read_every_exit(
        case.segments,
        dataclasses.replace(case.inputs, input_ids=case.inputs.input_ids * case.inputs.attention_mask + junk),
    )
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=ATOL)


# The invariants of the loop


def exit_by_hand(logits, rule):
    """Where one row leaves that is alone in the model. logits (K, C)."""
    memory, plan = {}, rule.plan([0])
    for k in range(K - 1):
        if plan is not None:
            if plan[0] <= k:
                return k
        elif rule.needs and rule.stop(k, logits[k : k + 1], memory)[0]:
            return k
    return K - 1


PLAN = np.array([0, 2, 1, 0, 1, 2, 1])
RULES = {
    "never": lambda rows: Never(),
    **{f"fixed {k}": lambda rows, k=k: Fixed(k) for k in range(K)},
    "always": lambda rows: Threshold(-np.inf),
    "threshold": lambda rows: Threshold(0.9),
    "one threshold an exit": lambda rows: Threshold((0.95, 0.6, 0.0)),
    "entropy": lambda rows: Threshold(-0.35, "entropy"),
    "patience": lambda rows: Patience(1),
    "patience-confidence": lambda rows: PatienceConfidence(2, 0.6),
    "planned": lambda rows: Planned(PLAN[rows]),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def assert_same(result, logits, exit_index):
    np.testing.assert_array_equal(result.exit_index, exit_index)
    np.testing.assert_array_equal(result.layers_run, np.array(EXITS)[exit_index])
    np.testing.assert_allclose(result.logits, logits, rtol=0, atol=ATOL)


def test_never_exit_equals_the_full_model(case):
    assert_same(early_exit(case.segments, Never(), case.inputs), case.logits[:, -1], np.full(B, K - 1))


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
    result = early_exit(case.segments, RULES[rule](ALL), case.inputs)
    expected = early_exit(RowSegments(case.model), RULES[rule](ALL), case.inputs)
    assert_same(result, expected.logits, expected.exit_index)
    assert result.logits.argmax(1).tolist() == expected.logits.argmax(1).tolist()
    np.testing.assert_allclose(result.cost.flops, expected.cost.flops)


@pytest.mark.parametrize("rule", ["threshold", "one threshold an exit", "patience", "planned"])
def test_these_batches_are_mixed_so_that_compaction_is_at_work(case, rule):
    assert len(set(early_exit(case.segments, RULES[rule](ALL), case.inputs).exit_index)) >= 2


def test_layers_run_does_not_grow_as_the_threshold_loosens(case):
    layers = [early_exit(case.segments, Threshold(t), case.inputs).layers_run for t in np.linspace(1, 1 / C, 21)]
    assert (np.diff(layers, axis=0) <= 0).all()
    assert len(np.unique(np.sum(layers, axis=1))) > 3, "the sweep has to meet more than both ends"


def test_a_row_that_left_is_not_computed_again(case, monkeypatch):
    sizes, run = [], sessions.Session.run

    def counted(self, inputs, read):
        sizes.append((len(inputs["attention_mask"]), len(inputs.get("rows", inputs["attention_mask"]))))
        return run(self, inputs, read)

    monkeypatch.setattr(sessions.Session, "run", counted)
    result = early_exit(case.segments, RULES["patience"](ALL), case.inputs).exit_index
    here = [int((result >= k).sum()) for k in range(result.max() + 1)]
    assert sizes == [(rows, rows) for rows in here]


# Prompts: the masked-LM head at one token, for the label words alone

MASK, LABEL_TOKENS = 4, (31, 7, 12)


def prompt_model(kind, exits):
    config = make_model(kind).backbone.config
    prompt = SimpleNamespace(
        prompt=Prompt("{text} {mask}", ("a", "b", "c")), mask_token_id=MASK, label_tokens=LABEL_TOKENS
    )
    model = PromptModel(Bert(config), prompt, exits).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                float(name.endswith("norm.weight")), 1.0 if ".word." in name else 0.15, generator=generator
            )
    return model


def prompt_inputs(kind="bert"):
    """One mask in each row, at another place in each."""
    inputs = make_inputs(LENGTHS, int(kind == "roberta"))
    inputs.input_ids[ALL, ALL % np.array(LENGTHS)] = MASK
    return inputs


@pytest.mark.parametrize(
    "kind, exits",
    [("bert", None), ("roberta", (0, 1, 2, 3, 4)), ("albert", (1, 4)), ("elasticbert", (0, 2, 4))],
    ids=str,
)
def test_each_layer_says_of_the_label_words_what_the_masked_lm_head_says(tmp_path, kind, exits):
    model, inputs = prompt_model(kind, exits), prompt_inputs(kind)
    ours, whole = engines_of(tmp_path, write_graphs(model, model.segments(), Never(), tmp_path, segments=True))
    logits, *_ = read_every_exit(ours, inputs)
    ids, mask, types = map(torch.from_numpy, (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))
    with torch.no_grad():
        states = model.backbone.hidden_states(ids, mask, types)
        for k, layer in enumerate(model.exits):
            expected = model.backbone.lm_logits(states[layer])[ids == MASK][:, LABEL_TOKENS]
            np.testing.assert_allclose(logits[:, k], expected, rtol=0, atol=ATOL)
    assert model.exits == (exits or (1, 2, 3, 4)) and logits.std(axis=0).min() > 0.1
    np.testing.assert_allclose(early_exit(whole, Never(), inputs).logits, logits[:, -1], rtol=0, atol=ATOL)
    plan = ALL % len(model.exits)
    result = early_exit(ours, Planned(plan), inputs)  # rows are dropped on the way, and masks with them
    np.testing.assert_allclose(result.logits, logits[ALL, plan], rtol=0, atol=ATOL)


# Decoders that are read through a prompt: whole rows at their last token


@pytest.mark.parametrize("kind, first", [("llama", 1), ("llama3", 0), ("gemma", 0), ("phi", 1)])
def test_each_layer_of_a_decoder_says_of_the_label_words_what_its_head_says(tmp_path, kind, first):
    backbone = load_backbone(GOLDEN / kind)
    prompt = SimpleNamespace(prompt=Prompt("{text} so", ("a", "b", "c")), label_tokens=LABEL_TOKENS)
    model = PromptModel(backbone, prompt, tuple(range(first, backbone.config.num_hidden_layers + 1))).eval()
    inputs = make_inputs(LENGTHS)
    ours, whole = engines_of(tmp_path, write_graphs(model, model.segments(), Never(), tmp_path, segments=True))
    logits, *_ = read_every_exit(ours, inputs)
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):  # alone, without padding, through decoder.py's own forward
            states = backbone.hidden_states(torch.from_numpy(inputs.input_ids[row : row + 1, :length]))
            for k, layer in enumerate(model.exits):
                expected = backbone.lm_logits(states[layer][0, -1])[list(LABEL_TOKENS)]
                np.testing.assert_allclose(logits[row, k], expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(early_exit(whole, Never(), inputs).logits, logits[:, -1], rtol=0, atol=ATOL)
    plan = ALL % len(model.exits)
    result = early_exit(ours, Planned(plan), inputs)
    np.testing.assert_allclose(result.logits, logits[ALL, plan], rtol=0, atol=ATOL)


def instead(monkeypatch, owner, name, wrong):
    """Plant a bug: `wrong` is called in place of the owner's function, and given the right one before its arguments."""
    if owner is LOWERINGS:
        right = owner[name]
        monkeypatch.setitem(owner, name, lambda *arguments, **settings: wrong(right, *arguments, **settings))
        return
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **settings: wrong(right, *arguments, **settings))


# LoRA exits and cascades: streams that start together or anew

EVERY_TARGET = ("query", "key", "value", "attention_output", "up", "down")


def backbone_of(kind):
    if kind not in DECODERS:
        return make_model(kind).backbone
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return random_decoder(kind, EXITS[-1]).without_heads()


def lora_model(kind="bert", targets=("query", "value")):
    model = LoRAExits(backbone_of(kind), EXITS, C, rank=3, alpha=5.0, targets=targets).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0, 0.3, generator=generator)
    return model


def assert_engines_agree(model, folder, inputs, rules, schedule=None):
    """The same logits at every exit, exits, layer passes, operations; and the whole graph is the last exit."""
    theirs = model.segments(schedule) if schedule else model.segments()
    manifest = write_graphs(model, theirs, Never(), folder, segments=True)
    ours, whole = engines_of(folder, manifest)
    (logits, costs, _), (expected, expected_costs, _) = read_every_exit(ours, inputs), read_every_exit(theirs, inputs)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)
    policies = [theirs.state_flops(k, "exit_logit") or 0.0 for k in range(len(theirs.exits))]
    expected_costs[:, :, 1] += policies  # a graph asks a policy too
    np.testing.assert_allclose(costs, expected_costs)
    np.testing.assert_allclose(early_exit(whole, Never(), inputs).logits, expected[:, -1], rtol=0, atol=ATOL)
    for rule in rules:
        result, right = early_exit(ours, rule, inputs), early_exit(theirs, rule, inputs)
        np.testing.assert_array_equal(result.exit_index, right.exit_index)
        np.testing.assert_array_equal(result.cost.layer_passes, right.cost.layer_passes)
        np.testing.assert_allclose(result.logits, right.logits, rtol=0, atol=ATOL)
    return manifest


ADAPTED = [
    ("bert", ("query", "value")),
    ("albert", EVERY_TARGET),
    ("llama", (*EVERY_TARGET, "gate")),
    ("phi", EVERY_TARGET),
]


@pytest.mark.parametrize(
    "kind, targets, schedule",
    [(*adapted, schedule) for adapted, schedule in zip(ADAPTED, all_schedules(K))],
    ids=lambda setting: str(len(setting)) if isinstance(setting, tuple) else str(setting),
)
def test_lora_streams_under_every_schedule_say_what_torch_says(tmp_path, kind, targets, schedule):
    """Each schedule once, each model once; test_bert_family.py has adapters of every kind on other encoders."""
    rules = [Planned(PLAN), Threshold(0.7), Fixed(1)]
    manifest = assert_engines_agree(lora_model(kind, targets), tmp_path, make_inputs(LENGTHS), rules, schedule)
    live = {k: [member for member in group if member >= k] for group in schedule for k in group}
    begins = {group[0] for group in schedule}
    by_hand = [len(live[k]) * (EXITS[k] - (0 if k in begins else EXITS[k - 1])) for k in range(K)]
    assert manifest["by_segment"]["layer_passes"] == by_hand and manifest["schedule"] == schedule
    assert manifest["layer_passes"] == list(EXITS), "model.onnx runs the stream of the exit that is asked"
    one, theirs, inputs = OrtModel(tmp_path, manifest, threads=1), lora_model(kind, targets), make_inputs(LENGTHS)
    result, expected = (early_exit(segments, Planned(PLAN), inputs) for segments in (one, theirs.segments()))
    np.testing.assert_array_equal(result.cost.flops, expected.cost.flops)
    unheld = early_exit(one, Patience(1), inputs), early_exit(theirs.segments(schedule), Patience(1), inputs)
    np.testing.assert_array_equal(*(answered.cost.layer_passes for answered in unheld))


def test_a_cascade_of_models_says_what_torch_says(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MultiModel(backbone_of("llama"), EXITS, C).eval()
    inputs = make_inputs(LENGTHS)
    manifest = assert_engines_agree(model, tmp_path, inputs, [Planned(PLAN), Patience(1), Fixed(1)])
    assert manifest["layer_passes"] == list(EXITS)


@pytest.mark.parametrize(
    "method, decoder, policy",
    [("joint", "llama", None), ("consistent", "gemma", PolicyNetworks), ("berxit", "phi", OneForAll)],
)
def test_exits_on_a_decoder_say_what_torch_says_and_so_does_the_folder_through_torch(tmp_path, method, decoder, policy):
    model = RowExits(backbone_of(decoder), EXITS, C, policy=policy).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.normal_(0, 0.6, generator=generator)
    inputs = make_inputs(LENGTHS)
    rules = [Planned(PLAN), Threshold(0.5), *([Policy(0.5)] if policy else [])]
    manifest = assert_engines_agree(model, tmp_path, inputs, rules)
    write_json(tmp_path / "manifest.json", manifest | WITHOUT_RUN | {"method": method})
    again, *_ = read_every_exit(torch_segments(tmp_path), inputs)
    np.testing.assert_array_equal(again, read_every_exit(model.segments(), inputs)[0])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_int8_leaves_heads_in_float32_and_of_a_decoder_the_maps_whose_inputs_have_outliers(tmp_path, kind):
    model = RowExits(backbone_of(kind), EXITS, C).eval()
    write_graphs(model, model.segments(), Never(), tmp_path, "int8")
    remaining = {name for name, value in weights_of(tmp_path).items() if value.dtype == np.float32}
    assert "heads.0.dense.weight" in remaining and "backbone.layers.0.up.weight" not in remaining
    assert ("backbone.layers.0.down.weight" in remaining) == (kind == "llama")


def test_exits_that_decide_themselves_say_when_to_leave_as_in_torch(tmp_path):
    model = RowExits(make_model().backbone, EXITS, C, policy=PolicyNetworks).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0, 0.6, generator=generator)
    inputs, rules = make_inputs(LENGTHS), [Policy(cut) for cut in (0.2, 0.5, 0.8)]
    assert_engines_agree(model, tmp_path, inputs, [*rules, Planned(PLAN)])
    assert len({exit for rule in rules for exit in early_exit(model.segments(), rule, inputs).exit_index}) > 1


# The exported folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint_folder):
    return Tokenizer.from_folder(checkpoint_folder, 30)


def make_run(tokenizer, model, rule=Threshold(0.9), texts=1):
    """A run as load_run gives it, untrained."""
    labels = ["bad", "fair", "good"] if model.num_labels > 1 else []
    task = {"name": "words", "label_names": labels, "metrics": ["accuracy"], "texts": texts}
    config = {"method": "joint", "unit": "rows", "num_labels": model.num_labels, "settings": {}, "task": task}
    return Run(Path("run"), config, model, tokenizer, rule)


def sentences(count, texts=1, seed=0):
    drawn = random.Random(seed)
    return [tuple(" ".join(drawn.choices(WORDS, k=drawn.randint(1, 9))) for _ in range(texts)) for _ in range(count)]


TEXTS = sentences(20)


@pytest.fixture(scope="module")
def run(tokenizer):
    return make_run(tokenizer, make_model())


@pytest.fixture(scope="module")
def exported(tmp_path_factory, run):
    folder = tmp_path_factory.mktemp("exported") / "bert"
    export(run, folder, TEXTS)
    return folder


@pytest.fixture(scope="module")
def by_segment(tmp_path_factory, run):
    """The same with graphs by segment beside."""
    folder = tmp_path_factory.mktemp("segments") / "bert"
    export(run, folder, TEXTS, segments=True)
    return folder


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


NAMES = sorted([*(f"onnx/segment_{layer}.onnx" for layer in EXITS), MODEL])  # with segments
FILES = ["config.json", "manifest.json", MODEL, "tokenizer.json", "tokenizer_config.json"]


def torch_answers(run, texts):
    """Label, exit layer and logits of each text alone."""
    for text in texts:
        result = early_exit(run.segments(), run.rule, run.encode([text]).batch(np.arange(1)))
        yield run.label_names[result.logits[0].argmax()], run.exits[result.exit_index[0]], result.logits[0]


def assert_answers_like_torch(answers, run, texts, atol=ATOL):
    assert len(answers) == len(texts)
    for answer, (label, exit, logits) in zip(answers, torch_answers(run, texts)):
        assert (answer.label, answer.exit, answer.layers) == (label, exit, exit)
        np.testing.assert_allclose(answer.logits, logits, rtol=0, atol=atol)
        powers = np.exp(logits - logits.max())
        assert answer.confidence == pytest.approx(powers.max() / powers.sum(), abs=1e-5) and answer.milliseconds > 0


def test_what_compare_says_of_a_folders_memory_is_the_weights_once_and_the_graphs(exported, run):
    graph = 40_000  # bytes, at most
    assert run.weight_bytes < Runtime(exported).weight_bytes < run.weight_bytes + graph


@pytest.mark.parametrize("batch_size", [1, 7, 32])  # 32: all of them at once
def test_the_runtime_answers_like_torch_in_the_order_of_the_texts(exported, run, batch_size):
    answers = Runtime(exported, threads=1).run(TEXTS, batch_size)
    assert len({answer.exit for answer in answers}) == K and len({answer.label for answer in answers}) == C
    assert_answers_like_torch(answers, run, TEXTS)


def test_another_rule_may_be_given_to_a_call(exported, by_segment, run):
    for rule in (Never(), Fixed(1), Threshold((0.8, 0.5, 0.0)), Patience(1)):
        folder = by_segment if isinstance(rule, Patience) else exported
        answers = Runtime(folder, threads=1).run(TEXTS, rule=rule)
        assert_answers_like_torch(answers, run._replace(rule=rule), TEXTS)


@pytest.mark.parametrize("rule", [Patience(1), Threshold(0.5, "breaking_ties"), Policy()], ids=lambda rule: rule.name)
def test_a_rule_that_the_graph_does_not_hold_is_told(exported, rule):
    with pytest.raises(ValueError, match="the rule of model.onnx, threshold, found .*--rule.*--segments"):
        Runtime(exported, threads=1).run(TEXTS, rule=rule)


def test_transformers_reads_the_config_and_the_tokenizer_of_the_folder(exported, run):
    config, texts = read_json(exported / "config.json"), ["the film", "a good film, not bad"]
    assert config["id2label"] == {str(at): name for at, name in enumerate(run.label_names)}
    with pytest.raises(ValueError, match="holds an export; expected a checkpoint"):
        load_backbone(exported)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.from_pretrained(exported)
    assert (theirs.architectures, theirs.id2label[0]) == (
        ["BertForSequenceClassification"],
        run.label_names[0],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.model_max_length == run.tokenizer.max_length
    assert [tokenizer(text).input_ids for text in texts] == [run.tokenizer.ids_of(text) for text in texts]


def test_the_folder_holds_the_files_of_the_design_and_nothing_else(exported):
    files = (path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file())
    assert sorted(files) == sorted([*FILES, "README.md"])
    assert [path.name for path in exported.parent.iterdir()] == ["bert"]


def test_the_manifest_says_what_was_exported(exported, run):
    manifest = read_json(exported / "manifest.json", signed="format_version")
    assert (
        manifest["format_version"] == FORMAT_VERSION
        and manifest["opset"] == OPSET
        and manifest["precision"] == "float32"
    )
    assert manifest["exits"] == list(EXITS) and manifest["rule"] == run.rule.to_dict()
    assert manifest["task"] == run.config["task"] and manifest["max_length"] == 30 and manifest["method"] == "joint"
    assert manifest["versions"] == versions() | {"onnx": onnx.__version__}
    assert BertConfig(**manifest["backbone"]) == run.model.backbone.config
    assert sorted(manifest["files"]) == sorted(set(FILES) - {"manifest.json"})
    assert list(manifest["graphs"]) == ["model"]
    verified = manifest["verified"]
    assert verified["texts"] == len(TEXTS) and 0 < verified["max_logit_difference"] < ATOL
    assert verified["prediction_agreement"] == verified["exit_agreement"] == 1


def test_a_guarantee_stays_with_the_rule_that_was_guaranteed(run, tmp_path):
    chosen = {"guarantee": {"max_loss": 0.01, "confidence": 0.95, "rows": 6}, "exit_counts": [3, 2, 1]}
    chosen |= {"curve": {"rows": 6}, "rule": run.rule.to_dict()}
    guaranteed = run._replace(config=run.config | chosen)
    for name, rule, remaining in (("own", run.rule, True), ("another", Threshold(0.5), False)):
        assert export(guaranteed._replace(rule=rule), tmp_path / name)
        manifest = read_json(tmp_path / name / "manifest.json", signed="format_version")
        assert [key in manifest for key in ("guarantee", "exit_counts", "curve")] == [remaining] * 3


@pytest.mark.parametrize(
    ("rule", "read"),
    [
        (Never(), [False, False]),
        (Fixed(0), [True]),
        (Fixed(1), [False, True]),
        (Planned(np.array([2, 0, 2])), [True, False]),
        (Threshold(1.0), [True, True]),
    ],
    ids=["never", "0", "1", "planned", "threshold"],
)
def test_a_graph_passes_over_a_head_that_nobody_reads(by_segment, run, rule, read):
    segments, reads = OrtSegments(by_segment, read_json(by_segment / "manifest.json"), threads=1), []
    for session in segments.sessions:
        session.run = lambda inputs, *read, run=session.run: reads.append(inputs.get("read")) or run(inputs, *read)
    inputs = run.encode(TEXTS[:3]).batch(slice(None))
    result = early_exit(segments, rule, inputs)
    assert [head_read.item() for head_read in reads if head_read is not None] == read  # the last graph is not asked
    expected = early_exit(run.segments(), rule, inputs)
    np.testing.assert_array_equal(result.exit_index, expected.exit_index)
    np.testing.assert_allclose(result.logits, expected.logits, rtol=0, atol=ATOL)


def test_a_head_that_nobody_reads_is_not_asked_what_it_says(by_segment, run):
    segments = OrtSegments(by_segment, read_json(by_segment / "manifest.json"), threads=1)
    state = segments.start(run.encode(TEXTS[:3]).batch(slice(None)))
    assert set(segments.select_heads({1}).advance(0, state).outputs) == {"hidden_out"}
    assert set(segments.select_heads({0}).advance(0, state).outputs) > {"hidden_out"}


def test_the_interface_in_the_manifest_is_that_of_the_graphs_and_its_axes_are_dynamic(by_segment):
    no_axes, settings = {"dtype": "bool", "axes": []}, {"exit_at": ["rows_planned"], "threshold": []}
    types = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}
    for name, interface in read_json(by_segment / "manifest.json")["graphs"].items():
        session = onnxruntime.InferenceSession(by_segment / f"onnx/{name}.onnx", providers=[CPU])
        given = [*session.get_inputs(), *session.get_overridable_initializers()]
        for kind, nodes in (("inputs", given), ("outputs", session.get_outputs())):
            expected = {node.name: {"dtype": types[node.type], "axes": node.shape} for node in nodes}
            assert interface[kind] == expected
            assert expected.pop("read", no_axes) == no_axes
            if kind == "inputs" and name == "model":
                assert {key: expected.pop(key)["axes"] for key in settings} == settings
            for value in expected.values():
                assert value["axes"][0] in ("batch", "rows_before")
                assert all(axis in ("tokens", "states") for axis in value["axes"][1:2] if len(value["axes"]) == 3)
        assert interface["inputs"]["attention_mask"]["axes"] == ["batch", "tokens"]
        expected = {"logits": {"dtype": "float32", "axes": ["batch", C]}}
        if name == "model":
            expected |= {key: {"dtype": "int64", "axes": ["batch"]} for key in ("label", "layers")}
            expected["confidence"] = {"dtype": "float32", "axes": ["batch"]}
        if name.startswith("segment") and name != f"segment_{EXITS[-1]}":
            expected["hidden_out"] = {"dtype": "float32", "axes": ["batch", "states", 24]}
        assert interface["outputs"] == expected


def initializers(graph):
    """Of a graph and its branches."""
    return [*graph.initializer, *(tensor for branch in branches_of(graph) for tensor in initializers(branch))]


@each_shape
def test_every_graph_passes_the_checker_and_holds_no_weight(case_of, shape):
    case = case_of(*shape)
    weights = weights_of(case.folder)
    used = set()
    for name in NAMES:
        onnx.checker.check_model(case.folder / name, full_check=True)
        graph = onnx.load(case.folder / name, load_external_data=False)
        assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", OPSET)]
        for tensor in initializers(graph.graph):
            if tensor.name in weights:
                assert {entry.key: entry.value for entry in tensor.external_data}["location"] == "model.onnx_data"
                used.add(tensor.name)
            else:
                assert numpy_helper.to_array(tensor).nbytes <= 32  # a plan's bars: (K + 1, K - 1)
        whole = onnx.load(case.folder / name)
        for tensor in initializers(whole.graph):
            if tensor.name in weights:
                np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
    assert used == weights.keys()


def assert_weights_are_those_of(folder, model):
    expected = {
        name: value.detach().numpy() for name, value in model.named_parameters() if not name.startswith("backbone.pool")
    }
    stored = weights_of(folder)
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert stored[name].dtype == np.float32 and stored[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_run_bit_by_bit_each_once(case_of, kind):
    case = case_of(kind, "gelu", "mean")
    assert_weights_are_those_of(case.folder, case.model)


@pytest.mark.parametrize("kind", ["bert", "albert"])  # albert: its layers share their weights
def test_weights_are_stored_once_the_folder_is_hardly_larger_than_the_run(tmp_path, tokenizer, kind):
    model = make_model(kind, exits=(1, 2, 3, 4), hidden_size=96, intermediate_size=384, vocab_size=4000)
    export(make_run(tokenizer, model), tmp_path / "out", TEXTS[:4])
    write_tensors(tmp_path / "run.safetensors", model.state_dict())
    tokenizer.save(tmp_path / "tokenizer.json")
    run_bytes = sum((tmp_path / name).stat().st_size for name in ("run.safetensors", "tokenizer.json"))
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) <= 1.05 * run_bytes


# Other engines, precisions and tasks


def test_the_torch_engine_reads_the_same_folder(exported, run):
    answers = Runtime(exported, segments=torch_segments(exported)).run(TEXTS)
    assert_answers_like_torch(answers, run, TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_segments_of_a_folder_say_what_the_model_says(case_of, kind):
    case = case_of(kind, "gelu_new" if kind == "bert" else "gelu", "mean")
    write_json(case.folder / "manifest.json", case.manifest | WITHOUT_RUN)
    logits, *_ = read_every_exit(torch_segments(case.folder), case.inputs)
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=ATOL)


@pytest.fixture(scope="module")
def wide_run(tokenizer):
    """Wide enough for weights to be most of a folder."""
    return make_run(tokenizer, make_model(hidden_size=48, intermediate_size=192))


@pytest.fixture(scope="module")
def precisions(tmp_path_factory, wide_run):
    root = tmp_path_factory.mktemp("precisions")
    for precision in ("float32", "float16", "int8"):
        export(wide_run, root / precision, TEXTS, precision)
    return root


def test_what_is_no_number_is_no_answer(exported, monkeypatch):
    opened = Runtime(exported, threads=1)
    inputs = opened.encode(TEXTS[:2]).batch(slice(None))
    outputs = {"logits": np.array([[0.5, np.nan, 0], [1, 2, 3]]), "layers": np.array([4, 4])}
    monkeypatch.setattr(sessions.Session, "run", lambda *_: outputs)
    for answer in (
        lambda: opened.answers(outputs["logits"], None, [0], [1.0]),
        lambda: opened.run(TEXTS[:2]),
        lambda: early_exit(opened.segments(), opened.rule, inputs),
        lambda: early_exit(opened.whole_model(), Never(), inputs),
    ):
        with pytest.raises(ValueError, match="the logits must be finite, found NaN or infinity"):
            answer()


def test_float16_halves_the_folder_and_its_logits_are_near(precisions, wide_run):
    weights = weights_of(precisions / "float16")
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float16)}
    manifest, answers = read_json(precisions / "float16" / "manifest.json"), Runtime(precisions / "float16").run(TEXTS)
    assert manifest["precision"] == "float16" and ATOL < manifest["verified"]["max_logit_difference"] < HALF_ATOL
    assert manifest["verified"]["prediction_agreement"] > 0.9 and manifest["verified"]["exit_agreement"] > 0.9
    rule, agreed = wide_run.rule, 0
    for answer, (label, exit, logits) in zip(answers, torch_answers(wide_run._replace(rule=rule), TEXTS)):
        if (answer.label, answer.exit) == (label, exit):
            agreed += 1
            np.testing.assert_allclose(answer.logits, logits, rtol=0, atol=HALF_ATOL)
    assert agreed >= 0.9 * len(TEXTS)


def test_int8_stores_matrices_in_a_byte_a_weight_and_says_how_far_it_agrees(precisions, wide_run):
    weights = weights_of(precisions / "int8")
    parameters = dict(wide_run.model.named_parameters())
    matrices = sum(value.numel() for name, value in parameters.items() if "layers" in name and value.dim() == 2)
    assert sum(value.size for value in weights.values() if value.dtype == np.int8 and value.ndim == 2) == matrices
    manifest, answers = read_json(precisions / "int8" / "manifest.json"), Runtime(precisions / "int8").run(TEXTS)
    expected = list(torch_answers(wide_run, TEXTS))
    output = [(answer.label, answer.exit) for answer in answers]
    labels = np.mean([answer[0] == wanted[0] for answer, wanted in zip(output, expected)])
    exits = np.mean([answer[1] == wanted[1] for answer, wanted in zip(output, expected)])
    assert manifest["precision"] == "int8" and min(labels, exits) > 0.7
    assert manifest["verified"]["prediction_agreement"] == pytest.approx(labels, abs=0.1)
    assert manifest["verified"]["exit_agreement"] == pytest.approx(exits, abs=0.1)
    assert ATOL < manifest["verified"]["max_logit_difference"] < 6


def test_the_torch_engine_refuses_an_int8_folder_in_one_line(precisions):
    with pytest.raises(ValueError, match="int8.*--engine torch") as error:
        torch_segments(precisions / "int8")
    assert "\n" not in str(error.value)


def test_the_torch_engine_runs_a_float16_folder(precisions, wide_run):
    folder = precisions / "float16"
    float16 = Runtime(folder, segments=torch_segments(folder))
    for answer, other in zip(float16.run(TEXTS, rule=Fixed(1)), Runtime(folder).run(TEXTS, rule=Fixed(1))):
        np.testing.assert_allclose(answer.logits, other.logits, rtol=0, atol=HALF_ATOL)


def test_a_regression_on_pairs_leaves_by_patience_and_answers_numbers(tmp_path, tokenizer):
    run = make_run(tokenizer, make_model(pool="first", num_labels=1), Patience(1, 2.0), texts=2)
    texts = sentences(20, texts=2)
    manifest = export(run, tmp_path / "out", texts)
    assert manifest["rule"] == run.rule.to_dict() and manifest["graphs"]["model"]["outputs"].keys() == {
        "logits",
        "layers",
        "label",
    }
    assert manifest["verified"]["prediction_agreement"] == 1, "numbers that differ by rounding are equal"
    answers = Runtime(tmp_path / "out", threads=1).run(texts, batch_size=8)
    assert len({answer.exit for answer in answers}) >= 2
    for answer, text in zip(answers, texts):
        expected = early_exit(run.segments(), run.rule, run.encode([text]).batch(np.arange(1)))
        assert answer.exit == run.exits[expected.exit_index[0]] and answer.confidence is None
        assert isinstance(answer.label, float) and answer.label == pytest.approx(expected.logits[0, 0], abs=ATOL)


def retrieving(tokenizer, encoder, rows=30):
    """A run whose rule asks a datastore: the values are drawn, so that rows are planned to every exit."""
    run = make_run(tokenizer, make_model())
    encoded, drawn = run.encode(sentences(rows, seed=5)), np.random.default_rng(5)
    right = np.eye(K, dtype=np.float32)[drawn.integers(0, K, rows)]
    embeddings, labels = unit_length(encoder(encoded.batch(slice(None)))), drawn.integers(0, C, rows)
    store = Datastore(encoder.name, EXITS, embeddings, right, labels, encoded.texts)
    return run._replace(rule=Retrieval(k=3).with_datastore(store, encoder))


@pytest.mark.parametrize("source", ["layer 2", "a checkpoint"])  # layer 0: test_raee_run.py
def test_a_rule_that_retrieves_is_served_with_its_encoder_and_datastore(
    tmp_path, tokenizer, checkpoint_folder, source, monkeypatch
):
    if source == "a checkpoint":
        run = retrieving(tokenizer, SentenceEncoder(checkpoint_folder))
    else:
        model = make_model()
        run = retrieving(tokenizer, OwnStates(model.backbone, int(source[-1])))._replace(model=model)
    manifest = export(run, tmp_path / "out", TEXTS)
    assert manifest["verified"]["exit_agreement"] == 1
    opened = Runtime(tmp_path / "out", threads=1)
    expected = list(torch_answers(run, TEXTS))
    for batch_size in (1, 8):
        answers = opened.run(TEXTS, batch_size)
        assert [(answer.label, answer.exit) for answer in answers] == [wanted[:2] for wanted in expected]
    assert len({answer.exit for answer in answers}) == K
    theirs = Runtime(tmp_path / "out", segments=torch_segments(tmp_path / "out"))
    assert [answer.exit for answer in theirs.run(TEXTS)] == [answer.exit for answer in answers]
    monkeypatch.setattr(
        runtime.OrtEncoder, "__call__", lambda self, inputs: np.ones((len(inputs), run.rule.datastore.dimension))
    )
    assert [answer.exit for answer in opened.run(TEXTS)] != [answer.exit for answer in answers]


def test_a_changed_datastore_is_told(tmp_path, tokenizer, checkpoint_folder):
    export(retrieving(tokenizer, SentenceEncoder(checkpoint_folder)), tmp_path / "out", TEXTS)
    for path in sorted((tmp_path / "out").rglob("*")):
        if path.is_file() and path.parent != tmp_path / "out":
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            refused(tmp_path / "out", match=f"{path.name}.*export the run again")
            path.write_bytes(content)
    assert Runtime(tmp_path / "out", threads=1).run(TEXTS[:1])


# A folder is verified and whole, or not there


def nothing_left(folder):
    return not list(folder.iterdir())


def test_export_replaces_nothing(run, exported, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="out: is there already"):
        export(run, tmp_path / "out", TEXTS)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize("name", ["backbone.layers.1.up.bias", "heads.0.out.weight", "heads.2.out.weight"])
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_weight_that_is_no_number_is_told_and_leaves_no_folder(tokenizer, tmp_path, name, precision):
    model = make_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = np.nan
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        export(make_run(tokenizer, model), tmp_path / "out", TEXTS, precision)
    assert nothing_left(tmp_path)


def test_graphs_of_large_numbers_may_differ_by_as_much_more(tokenizer, tmp_path):
    model = make_model()
    with torch.no_grad():
        for head in model.heads:
            head.out.weight.mul_(1e4)
    verified = export(make_run(tokenizer, model), tmp_path / "out", TEXTS)["verified"]
    assert 1e-4 < verified["max_logit_difference"] < 1


def loose_norms(right, g, kind, *inputs, **attributes):
    return right(g, kind, *inputs, **attributes | ({"epsilon": 1e-2} if kind == "LayerNormalization" else {}))


@pytest.mark.parametrize(
    "bug",
    [(LOWERINGS, F.gelu, lambda right, x, **way: right(x, approximate="tanh")), (Builder, "op", loose_norms)],
    ids=["tanh gelu for gelu", "norms without epsilon"],  # the smallest differences
)
def test_graphs_that_say_something_else_are_told_and_leave_no_folder(run, tmp_path, monkeypatch, bug):
    instead(monkeypatch, *bug)
    with pytest.raises(ValueError, match="float32 graphs differ from torch by .* no folder was written"):
        export(run, tmp_path / "out", TEXTS)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("step", ["write_beside", "write_json", "file_sha256", "verify"])
def test_a_write_that_fails_leaves_no_folder(run, tmp_path, monkeypatch, step):
    def full(*arguments):
        raise OSError(28, "No space left on device", str(arguments[0]))

    monkeypatch.setattr(writer, step, full)
    with pytest.raises(OSError, match="No space left"):
        export(run, tmp_path / "out", TEXTS)
    assert nothing_left(tmp_path)


def test_a_graph_that_cannot_be_written_leaves_no_folder(run, tmp_path, monkeypatch):
    save = onnx.save

    def full(graph, path):
        if path.name == "model.onnx":
            raise OSError(28, "No space left on device", str(path))
        save(graph, path)

    monkeypatch.setattr(onnx, "save", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, tmp_path / "out", TEXTS)
    assert nothing_left(tmp_path)


# Damage is told, in one line, before anything is answered


def refused(folder, error=ValueError, match=""):
    with pytest.raises(error, match=match) as message:
        Runtime(folder, threads=1)
    assert "\n" not in str(message.value) and str(folder) in str(message.value)


def flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_byte_flipped_in_any_file_is_told(copy, name):
    drawn, content = random.Random(name), (copy / name).read_bytes()
    for position in (0, len(content) // 2, len(content) - 2, drawn.randrange(len(content))):
        flip(copy / name, position, 0)
        refused(copy, match=name)
        (copy / name).write_bytes(content)
    assert len(Runtime(copy, threads=1).run(TEXTS[:2])) == 2


def test_sixty_bits_flipped_anywhere_are_told_or_change_nothing(copy):
    """A bit that turns 1e-06 into 1E-06 is the same manifest."""
    drawn, report, manifest = random.Random(0), 0, read_json(copy / "manifest.json")
    for _ in range(60):
        path = copy / drawn.choice(FILES)
        content = path.read_bytes()
        flip(path, drawn.randrange(len(content)), drawn.randrange(8))
        try:
            Runtime(copy, threads=1)
        except ValueError as error:
            assert "\n" not in str(error) and path.name in str(error)
            report += 1
        else:
            assert path.name == "manifest.json" and read_json(path) == manifest
        path.write_bytes(content)
    assert report >= 58


def cut(name, share):
    return lambda folder: (folder / name).write_bytes((c := (folder / name).read_bytes())[: int(len(c) * share)])


def edited(old, new):
    """manifest.json in an editor, so that its checksum does not fit."""

    def change(folder):
        text = (folder / "manifest.json").read_text()
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new))

    return change


def forge(folder, **change):
    """Write the manifest anew, with the checksum that it should have."""
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | change)


def forged(**change):
    return lambda folder: forge(folder, **change)


def without_checksum(folder):
    path = folder / "manifest.json"
    lines = [line for line in path.read_text().splitlines() if not line.startswith('  "sha256"')]
    lines[-2] = lines[-2].rstrip(",")
    path.write_text("\n".join(lines))


EDITED, AGAIN = "manifest.json: damaged or edited", "export the run again"
FAULTS = {  # name: (the change, the message); a missing file is a FileNotFoundError
    **{f"{name}, {share} of it": (cut(name, share), name) for name in FILES for share in (0, 0.5, 0.99)},
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink(), name) for name in FILES},
    "another threshold": (edited('"threshold": 0.9', '"threshold": 0.8'), EDITED),
    "another key": (edited('"sha256"', '"sha255"'), EDITED),
    "other numbers": (edited("4", "5"), EDITED),
    "no checksum": (without_checksum, "checksum .* is gone"),
    "a newer format": (forged(format_version=6), "format_version 5, found 6; install a newer mini_ee"),
    "an older format": (forged(format_version=4), f"format_version 5, found 4; {AGAIN}"),
    "a format of another type": (forged(format_version="5"), f"format_version 5, found '5'; {AGAIN}"),
    "no format": (forged(format_version=None), "format_version 5, found None"),
    "an unknown rule": (forged(rule={"name": "oracle"}), "'oracle'"),
    "a threshold of 7": (forged(rule={"name": "threshold", "threshold": 7}), "got 7"),
    "two thresholds": (forged(rule={"name": "threshold", "threshold": [0.5, 0.5]}), "expected one threshold or 3"),
    "exit 3 of 0 .. 2": (forged(rule={"name": "fixed", "exit": 3}), "3 exits"),
    **{
        f"exits {exits}": (forged(exits=exits), "manifest.json has the exits .* of a model of 4 layers")
        for exits in ([1, 2, 5], [1, 2, 10**15], [1, 2], [2, 1, 4], [1, 1, 4])
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_or_forged_folder_is_one_line(copy, name):
    change, message = FAULTS[name]
    change(copy)
    refused(copy, FileNotFoundError if name.removeprefix("no ") in FILES else ValueError, message)


def test_a_folder_that_is_not_there_and_one_that_is_no_export_are_told(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        refused(folder, FileNotFoundError, "mini-ee export")


def test_a_file_of_another_run_is_refused(exported, precisions, tmp_path):
    copy = shutil.copytree(exported, tmp_path / "copy")
    shutil.copy(precisions / "float32" / MODEL, copy / MODEL)
    refused(copy, match=f"{MODEL}: expected the exported file, found another one")


def test_a_forged_graph_is_told_in_one_line(copy):
    """Onnxruntime's own words are several."""
    graph = onnx.load(copy / "onnx/model.onnx", load_external_data=False)
    for branch in branches_of(graph.graph):
        nodes = list(branch.node)
        del branch.node[:]
        branch.node.extend(reversed(nodes))
    onnx.save(graph, copy / "onnx/model.onnx")
    manifest = read_json(copy / "manifest.json")
    manifest["files"][MODEL] = file_sha256(copy / MODEL)
    write_json(copy / "manifest.json", manifest)
    refused(copy, match="model.onnx: ONNX Runtime cannot load .* topologically sorted.*; export the run again")


def test_exits_that_are_not_those_of_the_graph_are_told_at_the_first_row_that_leaves_there(copy, run):
    forge(copy, exits=[1, 3, 4])
    with pytest.raises(
        ValueError, match=r"copy: model.onnx stopped after .*2.* layers, which are no exits of manifest"
    ):
        Runtime(copy, threads=1).run(TEXTS, rule=Fixed(1))


# Links: ONNX Runtime reads none of them


def linked(source, folder, link):
    """A folder of links to the files of another."""
    for path in filter(Path.is_file, source.rglob("*")):
        (place := folder / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        link(path, place)
    return folder


def as_config_map(source, folder):
    """Kubernetes: ..data leads to a folder with a date, the files lead into ..data."""
    shutil.copytree(source, folder / "..2026")
    (folder / "..data").symlink_to("..2026")
    for path in source.iterdir():
        (folder / path.name).symlink_to(f"..data/{path.name}")
    return folder


def as_hub_cache(source, folder):
    """Hugging Face's: files have their checksums as names."""
    (folder / "blobs").mkdir(parents=True)
    return linked(
        source, folder / "snapshot", lambda path, link: link.symlink_to(shutil.copy(path, blob(folder, path)))
    )


def blob(folder, path):
    return folder / "blobs" / file_sha256(path)


def as_symbolic_links(source, folder):
    return linked(source, folder, lambda path, link: link.symlink_to(path))


@pytest.mark.parametrize("make", [as_config_map, as_symbolic_links])
def test_a_folder_of_links_answers_as_the_one_that_they_lead_to(by_segment, run, tmp_path, make):
    links, plain = (Runtime(path, threads=1) for path in (make(by_segment, tmp_path / "links"), by_segment))
    assert_answers_like_torch(links.run(TEXTS), run, TEXTS)
    by_the_segments = ([answer.exit for answer in opened.run(TEXTS, rule=Patience(1))] for opened in (links, plain))
    assert next(by_the_segments) == next(by_the_segments)


@pytest.mark.parametrize(
    "make, cause",
    [
        (lambda source, folder: linked(source, folder, lambda a, b: b.hardlink_to(a)), "has several hard links"),
        (as_hub_cache, "is a symbolic link to .*/blobs/[0-9a-f]{64}"),
    ],
    ids=["cp -l", "the hub's cache"],
)
def test_links_that_cannot_be_read_are_told_and_the_advice_works(exported, by_segment, run, tmp_path, make, cause):
    """Of weights beside the graphs; a graph that has its weights is read through links."""
    copy = shutil.copytree(by_segment, tmp_path / "copy")
    assert_answers_like_torch(Runtime(make(exported, tmp_path / "one"), threads=1).run(TEXTS), run, TEXTS)
    links = make(copy, tmp_path / "links")
    with pytest.raises(
        ValueError, match=f"model.onnx_data: .*this one {cause}: copy the folder with `cp -rL`"
    ) as error:
        Runtime(links, threads=1)
    assert str(links) in str(error.value) and "\n" not in str(error.value)
    subprocess.run(["cp", "-rL", links, tmp_path / "again"], check=True)
    assert len(Runtime(tmp_path / "again", threads=1).run(TEXTS)) == len(TEXTS)


# Providers


def test_onnx_runtimes_words_of_a_provider_that_fails_go_to_standard_error(exported, run, monkeypatch, capfd):
    create = sessions.ort.InferenceSession._create_inference_session

    def without_a_device(self, providers, *arguments):
        if len(providers) > 1:
            raise RuntimeError("CUDA failure 100: no device")
        return create(self, providers, *arguments)

    monkeypatch.setattr(runtime, "wanted_provider", lambda *_: CUDA)
    monkeypatch.setattr(sessions.ort.InferenceSession, "_create_inference_session", without_a_device)
    opened = Runtime(exported, threads=1)
    assert opened.provider == CPU
    assert_answers_like_torch(opened.run(TEXTS[:3]), run, TEXTS[:3])
    out, err = capfd.readouterr()
    assert out == "" and "no device" in err and str(exported / "onnx/model.onnx") in err


def test_a_provider_that_is_not_here_is_an_error_unless_a_fallback_is_allowed(exported, run, monkeypatch):
    monkeypatch.setattr(sessions, "_has_cuda_driver", lambda: False)
    for wanted in (CUDA, "TensorrtExecutionProvider", "NoSuchProvider"):
        with pytest.raises(ValueError, match=f"expected a provider that is available here \\({CPU}\\), found {wanted}"):
            Runtime(exported, [wanted])
        opened = Runtime(exported, [wanted], threads=1, allow_fallback=True)
        assert opened.provider == CPU
        assert_answers_like_torch(opened.run(TEXTS[:3]), run, TEXTS[:3])
    assert Runtime(exported, threads=1).provider == Runtime(exported, [CPU], threads=1).provider == CPU


def test_a_gpu_without_its_package_names_the_command_that_installs_it(exported, monkeypatch):
    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: [CPU])
    monkeypatch.setattr(sessions, "_has_cuda_driver", lambda: True)
    with pytest.raises(ValueError, match="pip uninstall -y onnxruntime && pip install onnxruntime-gpu$"):
        Runtime(exported, [CUDA], threads=1)
    assert sessions.FOR_A_GPU in (GOLDEN.parents[1] / "export" / "gpu.md").read_text()


def test_a_device_with_memory_of_its_own_takes_the_optional_inputs_of_the_graph(exported, monkeypatch):
    """ONNX Runtime's bindings know no input that has a default."""
    session = Session(exported / "onnx/model.onnx", CPU, 1)
    monkeypatch.setattr(session, "provider", CUDA)
    inputs = Runtime(exported, threads=1).encode(TEXTS[:3]).batch(slice(None))
    layers = session.run(session.of_rows(inputs) | {"exit_at": np.array([0, 1, 1])})["layers"]
    assert layers[0] < layers[1] == layers[2]


def test_a_provider_that_falls_back_by_itself_is_an_error(exported, monkeypatch):
    """Onnxruntime lists CUDA, there is a driver, and a library it needs is missing: the session runs on the CPU."""
    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(sessions.ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(sessions, "_has_cuda_driver", lambda: True)
    session = sessions.ort.InferenceSession
    monkeypatch.setattr(
        sessions.ort, "InferenceSession", lambda path, options, providers, **_: session(path, options, providers=[CPU])
    )
    with pytest.raises(ValueError, match=f"expected {CUDA}, but ONNX Runtime fell back to {CPU}"):
        Runtime(exported, [CUDA], threads=1)
    assert Runtime(exported, [CUDA], threads=1, allow_fallback=True).provider == CPU
    assert Runtime(exported, threads=1).provider == CPU


# Rows


def test_no_rows_give_no_answers(exported):
    assert Runtime(exported, threads=1).run([]) == []


@pytest.mark.parametrize(
    "rows, message",
    [
        ("film", "expected a list of texts, found one string, 'film'; put it in a list"),
        ([("a", "b")], "row 0: expected 1 texts, found 2"),
        (["the film", ()], "row 1: expected 1 texts, found 0"),
        (["the film", ""], "row 1: .*an empty text"),
        ([" \n"], "row 0: .*an empty text"),
        ([("the film",), (5,)], "row 1: .*5, which is no string"),
        (["\ud800"], "surrogate"),
        ([None], "row 0: .*None, which is no string"),
        (["the film", 5], "row 1: .*5, which is no string"),
        ([{"text": "the film"}], "row 0: .*which is no string"),
        ([b"the film"], "row 0: .*which is no string"),
        (None, "expected a list of texts, found None"),
        (5, "expected a list of texts, found 5"),
    ],
)
def test_a_row_that_is_no_text_is_told_by_both_engines(exported, run, rows, message):
    for answers in (Runtime(exported, threads=1).run, run.classify):
        with pytest.raises(ValueError, match=message):
            answers(rows)


@pytest.mark.parametrize("batch_size", [0, -1, "32", 1.5, True, None])
def test_a_batch_size_of_none_is_told_by_both_engines(exported, run, batch_size):
    for answers in (Runtime(exported, threads=1).run, run.classify):
        with pytest.raises(
            ValueError, match=f"expected batch_size of at least 1, a whole number, found {batch_size!r}"
        ):
            answers(TEXTS, batch_size=batch_size)


class Watched(OrtModel):
    """Writes down how many rows and tokens it is given at a time."""

    given = ()

    def run_batch(self, rule, inputs):
        self.given = (*self.given, inputs.input_ids.shape)
        return super().run_batch(rule, inputs)


def test_a_thousand_rows_are_run_a_batch_at_a_time(exported):
    watched = Watched(exported, read_json(exported / "manifest.json"), threads=1)
    texts = [(f"the {word}",) for word in WORDS] * 53
    texts = [*texts[:999], ("the film was very " * 10,)]
    answers = Runtime(exported, segments=watched).run(texts, batch_size=64)
    assert len(answers) == 1_000 and max(rows for rows, _ in watched.given) == 64 and len(watched.given) == 16
    assert sum(tokens > 4 for _, tokens in watched.given) == 1, "the long row widens one batch"
    for first, later in zip(answers[: len(WORDS)], answers[len(WORDS) * 50 :]):
        assert (first.label, first.exit) == (later.label, later.exit)


# Threads


def answers_in_threads(runtime, expected, seconds, count=8):
    """What went wrong, first of all, while `count` threads asked for their own texts under their own rule, at once."""
    wrong, end = [], time.monotonic() + seconds

    def ask(number):
        texts, size, rule, answers = expected[number]
        try:
            while not wrong and (not done[number] or time.monotonic() < end):
                for answer, other in zip(runtime.run(texts, size, rule), answers, strict=True):
                    assert (answer.label, answer.exit) == (other.label, other.exit)
                    np.testing.assert_allclose(answer.logits, other.logits, rtol=0, atol=ATOL)
                done[number] += 1
        except Exception as error:
            wrong.append(error)

    done = [0] * count
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, done


def requested(runtime, count=8):
    rules = [None, Patience(1), Threshold(0.7), Never()]
    for number in range(count):
        texts, size, rule = sentences(5 + number, seed=number), number + 1, rules[number % len(rules)]
        yield texts, size, rule, runtime.run(texts, size, rule)


def test_eight_threads_get_the_answers_that_one_gets(by_segment):
    opened = Runtime(by_segment, threads=1)
    wrong, done = answers_in_threads(opened, list(requested(opened)), seconds=0.2)
    assert not wrong and min(done) > 0


# Without torch

BLOCK = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {"torch", "safetensors", "transformers", "onnx", "onnxscript"}:
                raise ImportError(f"{name} is blocked")
    sys.meta_path.insert(0, Blocked())
"""


def python(code, *arguments, **options):
    command = [sys.executable, "-c", textwrap.dedent(BLOCK) + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_the_runtime_needs_no_torch_and_sessions_share_one_pool_of_threads_where_the_program_says_so(exported, run):
    process = python(
        """
        import onnxruntime
        from mini_ee.lab.export.runtime import Runtime
        from mini_ee.lab.export.sessions import share_threads
        onnxruntime.set_global_thread_pool_sizes(1, 1)
        share_threads(2)  # joins
        for answer in Runtime(sys.argv[1]).run(["the film was lovely", "a dull song"], batch_size=1):
            print(answer.label, answer.exit)
        try:
            onnxruntime.InferenceSession(sys.argv[1] + "/onnx/model.onnx", providers=["CPUExecutionProvider"])
        except RuntimeError:
            print("others are refused")
        try:
            import mini_ee.lab.export.writer
        except ImportError as error:
            print(error)
        """,
        exported,
    )
    texts = [("the film was lovely",), ("a dull song",)]
    expected = [f"{label} {exit}" for label, exit, _ in torch_answers(run, texts)]
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()  # onnxruntime prints some of its own
    assert lines[:2] == expected and lines[-2] == "others are refused" and lines[-1].endswith("is blocked")


def test_graphs_share_threads_in_the_commands_that_run_no_torch_model_beside_them(exported, monkeypatch, capsys):
    def requested(*words, from_words=True):
        pools, words = [], list(map(str, words))
        monkeypatch.setattr(sessions, "share_threads", pools.append)
        monkeypatch.setattr(sys, "argv", ["mini-ee", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a dull song\n")))
        assert main(None if from_words else words) == 0
        return pools

    monkeypatch.setattr("mini_ee.experiments.bench.onnx.bench_onnx", lambda *_, **__: iter(()))
    monkeypatch.setattr("mini_ee.experiments.bench.encoders.bench_batch", lambda model, seed: iter(()))
    threads = torch.get_num_threads()
    assert requested("run", exported, "--threads", threads) == requested("bench", "onnx") == [threads]
    assert requested("classify", exported, "--text", "a dull song") == [0]
    assert requested("run", exported, "--engine", "torch") == requested("bench", "batch") == []
    assert requested("run", exported, from_words=False) == requested("bench", "onnx", from_words=False) == []


def test_the_command_run_needs_no_torch_and_shares_threads_in_a_process_of_its_own(exported, run):
    """Called from another program it shares none: the last line of the test above."""
    code = """
        import runpy
        sys.argv = ["mini-ee", "run", sys.argv[1], "--threads", "1"]
        for _ in range(2):
            try:
                runpy.run_module("mini_ee", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert not end.code
        from mini_ee.lab.export.sessions import Session
        print(Session.shares_threads)
    """
    process = python(code, exported, input="the film was lovely\n")
    assert (process.returncode, process.stderr) == (0, "")
    (label, exit, _) = next(torch_answers(run, [("the film was lovely",)]))
    assert f'"label": "{label}"' in process.stdout and f'"exit": {exit}' in process.stdout
    assert process.stdout.endswith("True\n")


# Real weights and sentences


@pytest.mark.skipif(not os.environ.get(SHARED), reason=f"needs {SHARED}, the folder with the real data (2026-11)")
def test_real_weights_exported_say_what_torch_says_on_real_sentences(tmp_path):
    shared = Path(os.environ[SHARED])
    weights = shared / "weights" / "all-MiniLM-L6-v2"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RowExits(load_backbone(weights), (2, 4, 6), 2).eval()
    texts = load_task(shared / "data" / "SST-2").split("dev").texts[:16]
    task = {"name": "SST-2", "label_names": ["negative", "positive"], "metrics": ["accuracy"], "texts": 1}
    run = make_run(Tokenizer.from_folder(weights), model)
    run = run._replace(config=run.config | {"task": task})
    encoded = run.encode(texts)
    logits = np.concatenate([torch_logits(model, encoded.batch([row])) for row in range(16)])
    middle = float(np.median(np.abs(np.diff(logits[:, 0], axis=1))))
    rule = Threshold(middle, "breaking_ties_logits")  # heads are untrained: half of the sentences leave at layer 2
    manifest = export(run._replace(rule=rule), tmp_path / "out", texts)
    assert manifest["verified"]["max_logit_difference"] < 1e-4
    opened = Runtime(tmp_path / "out", threads=1)
    margins = np.abs(np.diff(logits, axis=2))[:, :-1, 0]
    clear = np.flatnonzero((np.abs(margins - middle) > REAL_ATOL).all(axis=1))  # none that sits on the threshold
    assert len(clear) > 14
    for batch_size in (1, 32):
        answers = opened.run(texts, batch_size)
        assert len({answer.exit for answer in answers}) >= 2
        for row in clear:
            left = next((k for k in range(2) if margins[row, k] >= middle), 2)
            assert (answers[row].exit, answers[row].logits.argmax()) == (run.exits[left], logits[row, left].argmax())
            np.testing.assert_allclose(answers[row].logits, logits[row, left], rtol=0, atol=1e-4)
