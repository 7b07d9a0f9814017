"""A backbone is one file and one line: a small one of its own, registered by a line, does what all others do.

The first half is the contract of backbones/backbone.py, asked of every registered family and of the new one. The new
one is written into a temporary package: an encoder whose attention falls off with distance (ALiBi, Press et al. 2022)
and reaches so many tokens only, with a norm of one number (Nguyen & Salazar 2019) before each part of a layer. The
decoder of test_new_decoder.py keeps the contract too.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import padded_rows
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mini_ee.lab import registry
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import backbone_class, generates, load_backbone, read_config, save_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.prompt_templates import Prompt
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.heads import exit_heads
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.tracing import Value
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, rule_from_dict
from mini_ee.lab.training.default_rule import CURVE_POINTS
from mini_ee.lab.training.run_folder import load_run

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4
"""Rows alone against padded batches; measured maximum 1.3e-5, in Gemma."""

LINE = {"distant": "new_house.distant"}  # what registry.py would say

SOURCE = '''
"""A small encoder whose attention falls off with distance."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import (
    Backbone,
    Layout,
    check_fields,
    check_tokens,
    known_fields,
    padding_mask,
    tensor_on,
    token_places,
)
from mini_ee.lab.backbones.layers import StackedLinear


@dataclass(frozen=True, kw_only=True)
class Config:
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    reach: int = 4
    max_position_embeddings: int = 512
    initializer_range: float = 0.02
    token_types = None

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def from_hugging_face(cls, config):
        return cls(**known_fields(cls, config, {}))

    def to_dict(self):
        return asdict(self)

    @property
    def head_width(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self):
        return self.max_position_embeddings


class LayerContext(NamedTuple):
    bias: Tensor  # (B or 1, H, T, T), added to the scores
    padding: Tensor | None

    def keep(self, rows):
        if self.padding is None:
            return self
        index = tensor_on(self.bias.device, rows)
        return LayerContext(self.bias[index], self.padding[index])

    def repeat(self, count):
        return self if self.padding is None else LayerContext(*(each.repeat(count, 1, 1, 1) for each in self))


class ScaleNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([width**0.5]))

    def forward(self, x):
        return self.scale * F.normalize(x, dim=-1)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.attention_norm, self.mlp_norm = ScaleNorm(width), ScaleNorm(width)
        self.qkv = StackedLinear(width, (width, width, width), bias=False)
        self.attention_output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)

    def forward(self, hidden, bias, adapt=None):
        def linear(name, x):
            y = getattr(self, name)(x)
            return y if adapt is None else adapt(name, x, y)

        heads = linear("qkv", self.attention_norm(hidden)).view(*hidden.shape[:2], 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
        hidden = hidden + linear("attention_output", attended)
        return hidden + linear("down", F.silu(linear("up", self.mlp_norm(hidden))))


class Distant(Backbone):
    Config = Config
    poolings = ("mean",)
    projections = {"query": ("qkv", 0), "key": ("qkv", 1), "value": ("qkv", 2)} | {
        name: (name, 0) for name in ("attention_output", "up", "down")
    }
    vocabulary = {"weight": "lm_head.weight", "bias": "lm_head.bias"}

    def __init__(self, config, lm_head=True):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size) if lm_head else None
        self.apply(self.initialise)

    def embed(self, inputs):
        ids = tensor_on(self.device, inputs.input_ids)
        check_tokens(ids, self.config.max_tokens)
        return self.embeddings(ids)

    def context(self, inputs):
        places = token_places(tensor_on(self.device, inputs.input_ids))
        distance = (places[:, None] - places).abs()
        slopes = 2.0 ** -torch.arange(1.0, self.config.num_attention_heads + 1, device=self.device)
        bias = (-slopes[:, None, None] * distance).masked_fill(distance > self.config.reach, -torch.inf)[None]
        padding = padding_mask(inputs.attention_mask, self.device)
        if padding is not None:  # a row of padding reads itself: no row of scores is empty
            bias = bias.masked_fill(~padding & (distance > 0), -torch.inf)
        return LayerContext(bias, padding)

    def run_layers(self, hidden, context, start, stop, adapt=None):
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context.bias, adapt and partial(adapt, depth))
        return hidden

    def lm_logits(self, hidden, words=None):
        if self.lm_head is None:
            raise self.no_lm_head()
        weight, bias = self.lm_head.weight, self.lm_head.bias
        return F.linear(hidden, *((weight, bias) if words is None else (weight[words], bias[words]))).float()

    def exit_norm(self):
        return ScaleNorm(self.config.hidden_size)


NAMES = {
    "embeddings": "wte",
    "layers.{i}.attention_norm": "h.{i}.ln_1",
    "layers.{i}.qkv": "h.{i}.attn.{q|k|v}",
    "layers.{i}.attention_output": "h.{i}.attn.out",
    "layers.{i}.mlp_norm": "h.{i}.ln_2",
    "layers.{i}.up": "h.{i}.mlp.fc_in",
    "layers.{i}.down": "h.{i}.mlp.fc_out",
    "lm_head": "lm_head",
}

BACKBONE = Distant
LAYOUTS = {"distant": Layout(names=NAMES, prefix="transformer.", architecture="Distant")}
'''

KINDS = (*registry.BACKBONES, "distant", "sloped")


@pytest.fixture(scope="module")
def new_house(tmp_path_factory):
    """The package with the new backbone, and its line."""
    package = tmp_path_factory.mktemp("package") / "new_house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "distant.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package.parent)
        for model_type, module in (LINE | {"sloped": "own_decoder"}).items():  # test_new_decoder.py
            patch.setitem(registry.BACKBONES, model_type, module)
        yield


@pytest.fixture(params=KINDS)
def backbone(request, new_house):
    """One of every kind, with three layers and drawn weights."""
    return golden(request.param)


def golden(kind):
    return new_backbone(kind) if kind in ("distant", "sloped") else load_backbone(GOLDEN / kind)


def new_backbone(model_type="distant"):
    shape = dict(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40)
    shape |= {"model_type": model_type, "max_position_embeddings": 512}
    kind = backbone_class(model_type)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = kind(kind.Config.from_hugging_face(shape)).eval()
        for parameter in backbone.parameters():
            torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return backbone


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def states_of(backbone, inputs):
    return backbone.hidden_states(*(torch.from_numpy(getattr(inputs, name)) for name in Tensors._fields))


def own_tokens(backbone, inputs):
    """The mask of the hidden states, (B, T) bool: the text's; of an encoder-decoder the one token of its answer."""
    return torch.from_numpy(inputs.attention_mask[:, : backbone.embed(inputs).shape[1]]).bool()


def assert_close(hidden, expected):
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)


# ---- The contract ----


def test_layers_chained_one_by_one_are_the_whole_model(backbone):
    inputs, layers = padded_rows(backbone), backbone.config.num_hidden_layers
    states, context, hidden = states_of(backbone, inputs), backbone.context(inputs), backbone.embed(inputs)
    assert len(states) == layers + 1 and torch.equal(hidden, states[0])
    for depth in range(layers):
        hidden = backbone.run_layers(hidden, context, depth, depth + 1)
        assert torch.equal(hidden, states[depth + 1])
    whole = backbone.run_layers(states[0], context, 0, layers)
    assert torch.equal(whole, states[-1]) and not torch.equal(states[-1], states[-2])


def test_a_padded_batch_is_its_rows_alone(backbone):
    inputs = padded_rows(backbone)
    states = states_of(backbone, inputs)
    for row, length in enumerate(inputs.attention_mask.sum(1)):
        alone = backbone.hidden_states(torch.from_numpy(inputs.input_ids[row : row + 1, :length]))
        for padded, plain in zip(states, alone, strict=True):
            assert_close(padded[row, :length], plain[0])


def test_too_many_tokens_are_refused(backbone):
    most = backbone.config.max_tokens
    backbone(torch.full((1, most), 5))
    with pytest.raises(ValueError, match=f"at most {most} tokens, got {most + 1}: truncate the input"):
        backbone(torch.full((1, most + 1), 5))


def test_gradients_reach_every_parameter_and_dropout_acts_in_training_alone(backbone):
    ids, poolers = torch.arange(5, 17)[None], getattr(backbone, "poolers", None)
    with torch.enable_grad():
        loss = backbone.lm_logits(backbone(ids)).square().sum()
        if poolers:
            loss = loss + sum(backbone.pooled(backbone(ids), int(depth)).sum() for depth in poolers)
        loss.backward()
    without = [
        name for name, parameter in backbone.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == ["biases.table.weight"] * backbone.is_encoder_decoder  # of a decoder that reads one token
    assert torch.equal(backbone(ids), backbone(ids))
    drops = any(value for name, value in vars(backbone.config).items() if "dropout" in name)
    assert torch.equal(backbone.train()(ids), backbone(ids)) == (not drops)


@pytest.mark.parametrize("rows", [[1, 3], [2], [3, 0, 1]], ids=str)
def test_rows_that_are_kept_go_on_as_if_the_others_had_never_been_there(backbone, rows):
    inputs, layers = padded_rows(backbone), backbone.config.num_hidden_layers
    hidden, context = (
        backbone.run_layers(backbone.embed(inputs), backbone.context(inputs), 0, 1),
        backbone.context(inputs),
    )
    expected = states_of(backbone, inputs)[-1][rows]
    real = own_tokens(backbone, inputs)[rows]
    for index in (np.array(rows, np.int64), torch.tensor(rows, dtype=torch.int64)):
        remaining = context.keep(index)
        states = backbone.run_layers(hidden[rows], remaining, 1, layers)
        assert_close(states[real], expected[real])
        assert remaining.padding is None or torch.equal(remaining.padding[:, 0, 0], real)


def test_the_context_of_a_repeated_batch_repeats_it(backbone):
    inputs, layers = padded_rows(backbone), backbone.config.num_hidden_layers
    hidden, context = backbone.embed(inputs), backbone.context(inputs)
    once = backbone.run_layers(hidden, context, 0, layers)
    twice = backbone.run_layers(hidden.repeat(2, 1, 1), context.repeat(2), 0, layers)
    assert_close(twice, once.repeat(2, 1, 1))
    padding, repeated = context.padding, context.repeat(2).padding
    assert padding is repeated is None or torch.equal(repeated, padding.repeat(2, 1, 1, 1))


def test_inputs_may_be_arrays_or_tensors_and_what_is_not_padded_needs_no_mask(backbone):
    inputs = padded_rows(backbone)
    tensors = Tensors(*(torch.from_numpy(getattr(inputs, name)) for name in Tensors._fields))
    assert torch.equal(backbone.embed(tensors), backbone.embed(inputs))
    for context in (backbone.context(tensors), backbone.context(inputs)):
        real = own_tokens(backbone, inputs)
        assert real.all() if context.padding is None else torch.equal(context.padding[:, 0, 0], real)
        assert context.padding is not None or real.shape[1] == 1
    full = inputs.take(np.array([0, 3]))
    assert backbone.context(full).padding is None
    assert_close(backbone(torch.from_numpy(full.input_ids)), states_of(backbone, full)[-1])


def test_the_first_layers_are_a_copy_that_ends_there(backbone):
    inputs = padded_rows(backbone)
    small, states = backbone.first_layers(2), states_of(backbone, inputs)
    assert small.config.num_hidden_layers == 2 and not small.has_lm_head and backbone.has_lm_head
    assert torch.equal(states_of(small, inputs)[-1], states[2])
    next(small.parameters()).zero_()
    assert torch.equal(states_of(backbone, inputs)[-1], states[-1])


def test_the_logits_of_some_words_are_those_of_the_vocabulary(backbone):
    hidden, words = states_of(backbone, padded_rows(backbone))[-1], torch.tensor([7, 50, 6])
    whole = backbone.lm_logits(hidden)
    assert whole.shape == (*hidden.shape[:2], backbone.config.vocab_size) and whole.dtype == torch.float32
    assert_close(backbone.lm_logits(hidden, words), whole[..., words])
    assert backbone.get_parameter(backbone.vocabulary["weight"]).shape[0] == backbone.config.vocab_size
    with pytest.raises(ValueError, match=f"this {backbone.config.model_type} has no .*LM head: load a checkpoint"):
        backbone.without_heads().lm_logits(hidden)


def test_adapters_see_every_projection_of_every_layer_that_runs(backbone):
    inputs, seen = padded_rows(backbone), []

    def adapt(layer, name, x, y):
        seen.append((layer, name))
        linear = getattr(backbone.layers[layer], name)
        assert torch.equal(y, linear(x)) and x.shape[-1] == linear.in_features
        return y

    hidden, context = backbone.embed(inputs), backbone.context(inputs)
    states = backbone.run_layers(hidden, context, 0, 2, adapt)
    assert torch.equal(states, backbone.run_layers(hidden, context, 0, 2))
    maps = {linear for linear, _ in backbone.projections.values()}
    stored = min(2, len(backbone.layers))
    assert set(seen) == {(layer, name) for layer in range(stored) for name in maps}
    assert len(seen) >= 2 * len(maps)  # a map of what is shared is asked again
    other = backbone.run_layers(hidden, context, 0, 2, lambda layer, name, x, y: y + 1 if layer == stored - 1 else y)
    assert not torch.equal(other, states)


def test_exits_have_heads_with_the_norm_and_the_pools_that_the_backbone_says(backbone):
    hidden = states_of(backbone, padded_rows(backbone))[1]
    for pool in ("first", "mean", "none such"):
        if pool not in backbone.poolings:
            kind = backbone.config.model_type
            with pytest.raises(
                ValueError, match=f"pool must be {' or '.join(backbone.poolings)} for a {kind}, got '{pool}'"
            ):
                exit_heads(backbone, (1, 2), 3, pool)
        else:
            heads = exit_heads(backbone, (1, 2), 3, pool)
            assert heads[0](hidden, backbone.context(padded_rows(backbone)).padding).shape == (4, 3)
            assert (heads[0].norm is None) == (backbone.exit_norm() is None)


@pytest.mark.parametrize("tokens", [1, 12])
def test_what_runs_costs_what_torch_counts(backbone, tokens):
    ids = np.arange(5, 5 + tokens)[None]
    inputs = Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("a row",),))
    counts = []
    backbone.requires_grad_(False)  # the counter asks where gradients come from
    with sdpa_kernel(SDPBackend.MATH):
        for depth in (1, 2):
            with FlopCounterMode(display=False) as counter:
                backbone.run_layers(backbone.embed(inputs), backbone.context(inputs), 0, depth)
            counts.append(counter.get_total_flops())
    first, second = counts
    assert second - first == backbone.layer_flops(tokens) > 0
    assert first - (second - first) == backbone.start_flops(tokens)


def test_the_head_to_words_costs_what_torch_counts(backbone):
    if backbone.has_lm_head:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            backbone.lm_logits(torch.zeros(1, backbone.config.hidden_size), torch.tensor([3, 5, 7]))
        assert counter.get_total_flops() == backbone.lm_head_flops(3) > 0


def test_adapters_are_charged_for_the_vectors_that_they_see(backbone, monkeypatch):
    """In a T5 most see one token; in a DeBERTa those of positions, and of what is shared with them, the positions."""
    seen = []
    monkeypatch.setattr(
        "mini_ee.lab.methods.lora_exits_sgmv.sgmv",
        lambda y, x, A, B, *more: seen.append(2.0 * len(x) * (A[0].numel() + B[0].numel())),
    )
    exits, targets = (1, 3), tuple(backbone.projections)
    model = LoRAExits(backbone, exits, 2, backbone.poolings[0], rank=2, targets=targets)
    ids = np.arange(5, 11)[None]
    inputs, segments = Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("a row",),)), model.segments()
    with torch.no_grad():
        segments.advance(0, segments.start(inputs))
    assert seen and segments.flops(0, inputs)[0] == backbone.start_flops(6) + backbone.layer_flops(6) + sum(seen)


def test_a_backbone_is_saved_and_loaded_and_is_the_same(backbone, tmp_path):
    save_backbone(backbone, tmp_path / "saved")
    again = load_backbone(tmp_path / "saved")
    assert type(again) is type(backbone) and again.config == backbone.config
    assert again.state_dict().keys() == backbone.state_dict().keys()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in again.state_dict().items())
    assert generates(backbone.config.model_type) == backbone.generates


# ---- The new one's folder ----


def test_the_folder_is_written_under_the_names_of_the_layout(new_house, tmp_path):
    save_backbone(new_backbone(), tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert {"transformer.wte.weight", "transformer.h.2.attn.k.weight", "lm_head.bias"} <= names
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["DistantForMaskedLM"] and config["reach"] == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 10**60}, "hidden_size must be a whole number from 1 to 1048576, got an integer of about 10"),
        ({"hidden_size": 25}, "hidden_size must be a multiple of num_attention_heads, got 25 and 4"),
        ({"reach": "far"}, "reach must be a whole number from 1 to [0-9]*, got 'far'"),
        ({"vocab_size": None}, "missing key vocab_size"),
    ],
)
def test_a_wrong_config_is_told_with_its_file(new_house, tmp_path, change, message):
    save_backbone(new_backbone(), tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(new_backbone().config.to_dict() | change))
    with pytest.raises(ValueError, match=message) as info:
        read_config(path)
    assert str(path) in str(info.value)


def test_without_its_line_a_model_type_is_refused_and_the_others_are_named(tmp_path, monkeypatch):
    monkeypatch.delitem(registry.BACKBONES, "distant", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distant"}))
    with pytest.raises(ValueError, match="model_type must be one of bert, .*, llama, .*, found 'distant'"):
        read_config(tmp_path / "config.json")
    assert not generates("distant") and not generates(["distant"]) and not generates(None)


# ---- Train, evaluate, calibrate, compare, export, run on it, on both engines ----


@pytest.fixture(scope="module")
def checkpoint(new_house, checkpoint_folder, tmp_path_factory):
    """Its folder, with a tokenizer beside it."""
    folder, config = tmp_path_factory.mktemp("checkpoint") / "distant", new_backbone().config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(backbone_class("distant")(replace(config, initializer_range=0.2)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint, task_folder, tmp_path_factory):
    """method -> its run on the new backbone."""
    root = tmp_path_factory.mktemp("runs")
    options = ["--model", checkpoint, "--task", task_folder, "--epochs", 5, "--batch-size", 8, "--lr", 3e-3]
    for method in ("joint", "lora-exits"):
        more = ["--exits", "1,2,3", "--head-lr", 1e-2, "--out", root / method]
        assert main([str(word) for word in ("train", method, *options, *more)]) == 0
    return lambda method: root / method


def answer(capsys, *argv):
    """What a command prints with --json."""
    capsys.readouterr()
    status = main([*map(str, argv), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out)


LINES = [
    f"the {thing} was {settings}"
    for thing in ("film", "song")
    for settings in ("good", "very very awful", "fine", "dull")
]


def test_it_is_trained_evaluated_calibrated_and_compared(trained, task_folder, tmp_path, capsys):
    run, task = shutil.copytree(trained("joint"), tmp_path / "run"), ("--task", task_folder)
    assert type(load_run(run).model.backbone).__name__ == "Distant"
    swept = answer(capsys, "evaluate", run, *task, "--sweep")
    assert swept["per_exit_accuracy"][-1] > 0.8 and len(swept["rows"]) == CURVE_POINTS + 1
    calibrated = answer(capsys, "calibrate", run, *task, "--epsilon", 0.5)
    assert load_run(run).rule.threshold[:2] == tuple(map(float, calibrated["thresholds"]))
    compared = answer(capsys, "compare", run, trained("lora-exits"), *task, "--sweep")
    assert [row["method"] for row in compared["rows"]] == ["joint", "lora-exits"]
    assert compared["rows"][0]["accuracy"] == answer(capsys, "evaluate", run, *task)["accuracy"]


@pytest.mark.parametrize("method, more", [("joint", []), ("lora-exits", ["--schedule", "parallel", "--segments"])])
def test_it_is_exported_and_both_engines_run_it_as_torch_runs_the_run(
    trained, task_folder, tmp_path, capsys, method, more
):
    run, out, lines = load_run(trained(method)), tmp_path / "exported", tmp_path / "in.txt"
    lines.write_text("\n".join(LINES) + "\n")
    sure = np.sort([classified.confidence for classified in run._replace(rule=Fixed(0)).classify(LINES)])
    rule = f"--threshold={sure[3:5].mean()},inf,0"  # half of them leave at once
    result = answer(capsys, "export", trained(method), "--out", out, rule, *more)
    assert result["verified"]["max_logit_difference"] < 1e-4 and result["verified"]["exit_agreement"] == 1
    run = run._replace(rule=rule_from_dict(result["rule"]))
    expected = [(classified.label, classified.layers) for classified in run.classify(LINES)]
    assert sorted(layers for _, layers in expected) == [1] * 4 + [3] * 4
    for engine in ("onnxruntime", "torch"):
        answers = tmp_path / f"{engine}.jsonl"
        report = answer(capsys, "run", out, lines, "--out", answers, "--engine", engine, "--batch-size", 3)
        assert (report["rows"], report["failed"]) == (len(LINES), 0)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [(row["label"], row["layers"]) for row in rows] == expected
    one, other = (answer(capsys, "evaluate", folder, "--task", task_folder) for folder in (out, trained(method)))
    assert one["per_exit_accuracy"] == other["per_exit_accuracy"]


def test_its_label_words_are_read_in_onnx_as_in_torch(new_house, tmp_path):
    backbone, words = new_backbone(), (31, 7, 12)
    prompt = SimpleNamespace(prompt=Prompt("{text} {mask}", ("a", "b", "c")), mask_token_id=4, label_tokens=words)
    model, inputs = PromptModel(backbone, prompt).eval(), padded_rows(backbone)
    inputs.input_ids[range(4), [3, 5, 0, 8]] = 4
    manifest = write_graphs(model, model.segments(), Never(), tmp_path)
    logits, *_ = read_every_exit(OrtModel(tmp_path, manifest, threads=1), inputs)
    expected, *_ = read_every_exit(model.segments(), inputs)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def reaches_all(patch, kind):
    def context(self, inputs, right=kind.context):
        far = SimpleNamespace(config=replace(self.config, reach=100), device=self.device)
        return right(far if isinstance(inputs.input_ids, Value) else self, inputs)

    patch.setattr(kind, "context", context)


def reads_padding(patch, kind):
    def context(self, inputs, right=kind.context):
        if isinstance(inputs.input_ids, Value):
            inputs = Tensors(inputs.input_ids, torch.ones_like(inputs.attention_mask))
        return right(self, inputs)

    patch.setattr(kind, "context", context)


@pytest.mark.parametrize("bug", [reaches_all, reads_padding], ids=lambda bug: bug.__name__)
def test_a_wrong_graph_is_told_and_leaves_no_folder(trained, tmp_path, monkeypatch, capsys, bug):
    bug(monkeypatch, backbone_class("distant"))
    assert main(["export", str(trained("joint")), "--out", str(tmp_path / "exported")]) == 1
    assert "graphs differ from torch by" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_operation_that_no_graph_holds_is_told_in_one_line(trained, tmp_path, monkeypatch, capsys):
    kind = backbone_class("distant")
    right = kind.embed
    monkeypatch.setattr(kind, "embed", lambda self, inputs: right(self, inputs).erfinv())
    assert main(["export", str(trained("joint")), "--out", str(tmp_path / "exported")]) == 1
    error = capsys.readouterr().err
    assert "test_new_backbone.py:" in error and "erfinv has no lowering to ONNX" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
