"""A decoder in ONNX writes what torch writes: every exit, both fills, padded batches; a folder is whole or absent."""

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from copy import copy as copy_of
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from conftest import weights_of

from mini_ee.export.manifest import WEIGHTS
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, backbone_sha256, load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import MISSING_KV, decode, gather
from mini_ee.lab.exits.generation import generate
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import verification
from mini_ee.lab.export.builder import Builder
from mini_ee.lab.export.decoder_blocks import GraphBlock
from mini_ee.lab.export.runtime import Runtime, TokenRuntime
from mini_ee.lab.export.sessions import CPU, CUDA, GraphRule, Session
from mini_ee.lab.export.token_segments import OrtTokenModel, OrtTokenSegments, Sessions, open_sessions
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.writer import export
from mini_ee.lab.rules import Fixed, Never, Patience, Policy, Rule, Threshold
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.policies import OneForAll
from mini_ee.lab.training.run_folder import Run, load_run, save_run

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("llama", "llama3", "gemma", "phi", "mistral", "qwen2", "qwen3", "phi3")
EXITS, V = (1, 2, 3), 64
MODEL = "model"  # model.onnx, which copies states
PROMPTS = [[5, 9, 33, 2, 60, 7, 7, 21], [11, 3], [40, 41, 42, 2, 17], [1]]
TEXTS = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS]
REAL_TEXTS = ["Once upon a time", "The dog", "Tom had a red ball and"]
B, NEW = len(PROMPTS), 12
FORCED = [[token] * len(PROMPTS) for token in range(3, 3 + NEW)]
MIXED = Threshold(0.24)
"""On the models and heads below, tokens leave at every exit."""
ATOL = 2e-5  # float32 logits of size 8; measured max 6.7e-6, onnxruntime 1.31 and torch 2.13 on CPU


class Made(NamedTuple):
    """What is exported."""

    method: str
    model: TokenExits
    tokenizer: Tokenizer
    rule: Rule

    def export(self, folder, prompts=TEXTS, precision="float32", segments=False):
        config = {"method": self.method, "unit": "tokens", "settings": {}}
        return export(Run(Path("run"), config, *self[1:]), folder, prompts, precision, segments=segments)

    def save(self, folder, checkpoint):
        """A run on disk."""
        source = {"folder": str(checkpoint), "sha256": backbone_sha256(checkpoint)}
        config = {"method": self.method, "unit": "tokens", "settings": {}, "backbone": source, "rank": self.model.rank}
        config |= {"text": {}, "seed": 0, "training": {}}
        save_run(folder, self.model, self.tokenizer, Chosen(self.rule, None, None, {}), config, {})


def words():
    """A tokenizer whose token i is the word w<i>."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend)


def with_heads(decoder, exits=EXITS, rule=MIXED):
    """Two drawn heads, norms and biases too, that are unsure to a different degree from token to token."""
    model = TokenExits(decoder, exits, "scratch").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.heads.named_parameters():
            spread = 2 * decoder.config.hidden_size**-0.5 if name.endswith("linear.weight") else 0.2
            mean = 1.0 if name.endswith("norm.weight") and decoder.config.model_type != "gemma" else 0.0
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    return Made("self-supervised", model, words(), rule)


def plain(decoder):
    return Made("none", TokenExits(decoder, (decoder.config.num_hidden_layers,)), words(), Never())


class Case(NamedTuple):
    """A decoder with heads, and the folder that was exported of it."""

    opened: Made
    folder: Path
    manifest: dict
    sessions: Sessions  # for both fills
    session: Session  # of model.onnx

    def segments(self, missing_kv, rows=B, capacity=40):
        if missing_kv == MODEL:
            return OrtTokenModel(self.session, GraphRule(self.folder, self.manifest), self.manifest, rows, capacity)
        return OrtTokenSegments(self.sessions, self.manifest, missing_kv, rows, capacity)

    def write(self, prompts, rule=MIXED, missing_kv="copy_state", new=NEW):
        return gather(decode(self.segments(missing_kv, len(prompts)), prompts, new, rule), len(prompts))

    def torch_writes(self, prompts, rule=MIXED, missing_kv="copy_state", new=NEW):
        model = self.opened.model
        missing_kv = "copy_state" if missing_kv == MODEL else missing_kv
        settings = {"exits": model.exits, "heads": model.heads, "rule": rule, "missing_kv": missing_kv}
        return gather(generate(model.backbone, prompts, max_new_tokens=new, **settings), len(prompts))


def make_case(folder, opened, precision="float32"):
    manifest = opened.export(folder, precision=precision, segments=True)
    session = Session(folder / "onnx/model.onnx", CPU, 1)
    return Case(opened, folder, manifest, open_sessions(folder, manifest, threads=1), session)


@pytest.fixture(autouse=True, scope="module")
def verified_in_short():
    """Fewer tokens are written to verify an export; the tests write their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 3)
        yield


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoders")
    return functools.cache(lambda kind: make_case(root / kind, with_heads(load_backbone(GOLDEN / kind))))


each_missing_kv = pytest.mark.parametrize("missing_kv", MISSING_KV)  # of graphs by segment
ENGINES = (MODEL, *MISSING_KV)
BY_DEFINITION = {(kind, ENGINES[number % 3]) for number, kind in enumerate(KINDS)} | {("llama", e) for e in ENGINES}
"""Compared with their definition, logit by logit; every other pair by the text and its exits."""
AS_TORCH = [
    (kind, engine) for kind in KINDS for engine in ENGINES if kind == "llama" or (kind, engine) not in BY_DEFINITION
]


# What is written


class Drawn(Rule):
    """Rows leave at exits that are drawn."""

    needs = None

    def __init__(self):
        self.random = np.random.default_rng(1)

    def plan(self, inputs):
        return self.random.integers(0, 3, len(inputs))


def logits_by_definition(model, prompt, tokens, layers, missing_kv):
    """(new, V): what is said before each token of a text whose tokens left at these layers. Nothing is cached.

    inputs[i][l] is what layer l + 1 computes the key and value of token i from: the token's own states, above its exit
    those (recompute) or that at its exit (copy_state).
    """
    heads = {layer: head for layer, head in zip(EXITS, [*model.heads, model.backbone.lm_logits])}
    inputs, output, text = [], [], prompt + tokens[:-1]
    for at, token in enumerate(text):
        states = [model.backbone.embed(Tensors(torch.tensor([[token]])))]
        for depth in range(3):
            read = torch.cat([token_inputs[depth] for token_inputs in inputs] + [states[-1]], dim=1)
            block = model.backbone.block(torch.arange(at + 1)[None])
            states.append(model.backbone.run_layers(read, block, depth, depth + 1)[:, -1:])
        step = at - len(prompt) + 1
        if step >= 0:
            layer = layers[step]
            output.append(heads[layer](states[layer][0, 0]))
            if missing_kv == "copy_state":
                states[layer:] = [states[layer]] * (4 - layer)
        inputs.append(states)
    return torch.stack(output).numpy()


def assert_every_exit_says_what_its_definition_says(case, missing_kv):
    output = [[] for _ in PROMPTS]

    def choose(logits, rows):
        for row, values in zip(rows, logits):
            output[row].append(values)
        return [(7 * len(output[row]) + row) % V for row in rows]

    written = gather(decode(case.segments(missing_kv), PROMPTS, NEW, Drawn(), choose), B)
    with torch.no_grad():
        for prompt, graph_logits, (tokens, layers) in zip(PROMPTS, output, written):
            expected = logits_by_definition(
                case.opened.model, prompt, tokens, layers, "copy_state" if missing_kv == MODEL else missing_kv
            )
            np.testing.assert_allclose(np.array(graph_logits), expected, rtol=0, atol=ATOL)
    assert {layer for text in written for layer in text.layers_run} == set(EXITS)


@pytest.mark.parametrize("kind, missing_kv", sorted(BY_DEFINITION))
def test_every_exit_says_what_its_definition_says_in_a_padded_batch(case_of, kind, missing_kv):
    assert_every_exit_says_what_its_definition_says(case_of(kind), missing_kv)


@pytest.mark.parametrize("kind, missing_kv", AS_TORCH)
def test_greedy_text_and_its_exits_are_those_of_torch(case_of, kind, missing_kv):
    case, rules = case_of(kind), [MIXED]
    if kind == "llama":
        rules += [Never(), Fixed(1), Threshold((0.2, 0.3, 0.0)) if missing_kv == MODEL else Patience(1)]
    for rule in rules:
        assert case.write(PROMPTS, rule, missing_kv) == case.torch_writes(PROMPTS, rule, missing_kv)
    assert {layers for text in case.write(PROMPTS, MIXED, missing_kv) for layers in text.layers_run} == set(EXITS)


@pytest.mark.parametrize("kind", ["llama", "gemma"])  # with exits they are compared with torch, and torch with these
def test_without_exits_the_text_is_that_of_transformers(kind, tmp_path):
    decoder = load_backbone(GOLDEN / kind)
    golden = read_tensors(GOLDEN / kind / "expected.safetensors")
    prompts = [ids[real].tolist() for ids, real in zip(golden["input_ids"], golden["attention_mask"].bool())]
    plain(decoder).export(tmp_path / "plain")
    steps = Runtime(tmp_path / "plain", threads=1).generate(prompts, max_new_tokens=24)
    assert [text.tokens for text in gather(steps, 3)] == golden["greedy"].tolist()
    names = {path.stem for path in (tmp_path / "plain").rglob("*.onnx")}
    assert names == {"model"}


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_pytorch_tanh"])  # golden: silu, gelu_new
def test_every_activation_is_exported(activation, tmp_path):
    config = read_json(GOLDEN / "llama" / "config.json") | {"hidden_act": activation, "initializer_range": 0.3}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = Decoder(DecoderConfig.from_hugging_face(config)).eval()
    manifest = plain(decoder).export(tmp_path / "exported")
    assert manifest["verified"]["max_logit_difference"] < ATOL


POLICIES = {"consistent": PolicyNetworks, "calm": OneForAll}


def with_policies(method):
    """Drawn adapters, heads and policies, which leave at every exit."""
    model = TokenExits(load_backbone(GOLDEN / "llama"), EXITS, "copy", POLICIES[method], rank=8).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.is_trainable(name):
                parameter.copy_(float("norm" in name) + 0.4 * torch.randn(parameter.shape, generator=generator))
    model.fold()
    return Made(method, model, words(), Policy())


@pytest.mark.parametrize("method", POLICIES)
def test_policies_decide_as_in_torch(tmp_path, method):
    case = make_case(tmp_path / "exported", with_policies(method))
    model, texts = case.opened.model, []
    for cut, missing_kv in ((0.3, "copy_state"), (0.5, "recompute"), (0.7, "copy_state")):
        rule = Policy(cut)
        settings = {
            "exits": EXITS,
            "heads": model.heads,
            "policies": model.policies,
            "rule": rule,
            "missing_kv": missing_kv,
        }
        expected = gather(generate(model.backbone, PROMPTS, max_new_tokens=NEW, **settings), B)
        assert case.write(PROMPTS, rule, missing_kv) == expected
        assert gather(decode(torch_segments(case.folder)(missing_kv, B, 40), PROMPTS, NEW, rule), B) == expected
        if missing_kv == "copy_state":
            assert case.write(PROMPTS, rule, MODEL) == expected
        texts += expected
    assert {layers for text in texts for layers in text.layers_run} == set(EXITS)


# What it costs


@each_missing_kv
def test_a_graph_runs_only_where_a_token_needs_it(case_of, missing_kv, monkeypatch):
    case, ran = case_of("llama"), []
    for name in ("run", "run_bound"):
        right = getattr(Session, name)
        monkeypatch.setattr(Session, name, lambda self, *args, right=right: (ran.append(self), right(self, *args))[1])
    segments, _, heads, *_ = case.sessions
    case.write(PROMPTS, Fixed(0), missing_kv)
    assert ran == [*segments, *[segments[0], heads[0]] * NEW]  # the prompts, and nothing reads above exit 1


@each_missing_kv
def test_a_token_is_written_in_its_slot_of_its_own_row_and_nowhere_else(case_of, missing_kv):
    case = case_of("llama")
    segments = case.segments(missing_kv)
    caches = segments._segments[0]._caches
    before = {name: cache.numpy() for name, cache in caches.items()}
    assert all((values == 0).all() for values in before.values())
    address = {name: cache.data_ptr() for name, cache in caches.items()}
    at = [[-1, 4], [6, 7]]
    hidden = segments.embed(segments.array([[5, 8], [9, 4]]), at)
    segments.run(0, hidden, segments.block([3, 1], at))
    for name, cache in caches.items():
        rows, slots = np.nonzero(cache.numpy().any(axis=2))
        assert set(zip(rows.tolist(), slots.tolist())) == {(3, 40), (3, 4), (1, 6), (1, 7)}
        assert cache.data_ptr() == address[name]


def test_weights_are_stored_once_under_the_names_of_torch(case_of):
    case = case_of("phi")
    model = torch.nn.ModuleDict({"backbone": case.opened.model.backbone, "heads": case.opened.model.heads})
    stored = weights_of(case.folder)
    expected = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert stored.keys() == expected.keys()
    assert all(np.array_equal(stored[name], expected[name]) for name in stored)
    assert all(path.stat().st_size < 12_000 for path in case.folder.glob("onnx/*_*.onnx"))
    assert (case.folder / "onnx/model.onnx").stat().st_size < 40_000
    assert {path.stem for path in case.folder.glob("onnx/*.onnx")} == set(case.manifest["graphs"])


# A graph that computes something else


def future(right, g, kind, *inputs, **attributes):
    return right(g, "GreaterOrEqual" if kind == "LessOrEqual" else kind, *inputs, **attributes)


def padding_in_slot_0(right, g, kind, *inputs, **attributes):
    if kind == "Concat" and attributes.get("axis") == 2:
        inputs = inputs[0], g.op("Max", inputs[1], g.integers(0))
    return right(g, kind, *inputs, **attributes)


def forgotten_window(right, self, *where):
    changed = copy_of(self)
    changed.window_mask = changed.readable
    return right(changed, *where)


GRAPH_BUGS = {
    "the future is read": ("phi", Builder, "op", future),
    "padding in slot 0": ("llama", Builder, "op", padding_in_slot_0),
    "no window": ("mistral", GraphBlock, "attend", forgotten_window),
    "keys are written for values": (
        "llama",
        GraphBlock,
        "write",
        lambda right, self, depth, key, value: right(self, depth, key, key),
    ),
    "the next head": (
        "llama",
        TokenExits,
        "classify",
        lambda right, self, k, state: right(self, k if k == 2 or isinstance(state, torch.Tensor) else 1 - k, state),
    ),
    "keys of a copied state do not rotate": (
        "llama",
        GraphBlock,
        "rotate",
        lambda right, self, x, count: x if count == self.config.key_value_heads else right(self, x, count),
    ),
}


@pytest.mark.parametrize("bug", GRAPH_BUGS)
def test_a_wrong_graph_is_found_and_leaves_no_folder(monkeypatch, tmp_path, bug):
    """Every second one in graphs by segment; in model.onnx no padding stands in the place of slot 0."""
    kind, owner, name, wrong = GRAPH_BUGS[bug]
    made, right = with_heads(load_backbone(GOLDEN / kind)), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **settings: wrong(right, *given, **settings))
    with pytest.raises(ValueError, match="differ from torch"):
        made.export(tmp_path / "exported", segments=list(GRAPH_BUGS).index(bug) % 2 == 1)
    assert not list(tmp_path.iterdir())


# Served: without torch, by several threads at once, through torch, and in a damaged folder


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("llama")


@each_missing_kv
def test_the_runtime_answers_texts_in_order_whatever_the_batch(case, missing_kv):
    runtime = Runtime(case.folder, missing_kv=missing_kv, threads=1)
    answers = runtime.run(TEXTS, max_new_tokens=NEW, batch_size=3)
    stop = set(runtime.config["stop"])
    for expected, answer in zip(case.torch_writes(PROMPTS, MIXED, missing_kv), answers, strict=True):
        length = next((i + 1 for i, token in enumerate(expected.tokens) if token in stop), NEW)
        assert answer.tokens == expected.tokens[:length] and answer.layers == expected.layers_run[:length]
        assert answer.text.split() == [f"w{token}" for token in answer.tokens] and answer.milliseconds > 0
    decoded = runtime.tokenizer.backend.decode
    for prompt, answer in zip(PROMPTS, answers):  # the text is what stands behind the prompt, its first space too
        assert decoded(prompt) + answer.text == decoded([*prompt, *answer.tokens])
    with pytest.raises(ValueError, match="max_new_tokens"):
        runtime.run(TEXTS, max_new_tokens=0)


@each_missing_kv
def test_the_torch_engine_writes_the_same(case, missing_kv):
    through = Runtime(case.folder, missing_kv=missing_kv, segments=torch_segments(case.folder))
    assert (through.engine, through.provider) == ("torch", None)
    torch_answers = [answer._replace(milliseconds=0) for answer in through.run(TEXTS, max_new_tokens=NEW)]
    onnx_answers = Runtime(case.folder, missing_kv=missing_kv, threads=1).run(TEXTS, max_new_tokens=NEW)
    assert torch_answers == [answer._replace(milliseconds=0) for answer in onnx_answers]


def test_threads_that_share_a_runtime_do_not_disturb_each_other(case):
    runtime = Runtime(case.folder, threads=1)
    expected, tokens_of_threads = [answer.tokens for answer in runtime.run(TEXTS, max_new_tokens=NEW)], []

    def serve():
        for _ in range(3):
            tokens_of_threads.append([answer.tokens for answer in runtime.run(TEXTS, max_new_tokens=NEW)])

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert tokens_of_threads == [expected] * 12


def test_the_runtime_and_the_command_need_no_torch(case):
    code = """
        import runpy, sys

        class Blocked:
            def find_spec(self, name, *rest):
                if name.split(".")[0] in ("torch", "safetensors", "onnx", "transformers"):
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Blocked())
        sys.argv = ["mini-ee", "run", sys.argv[1], "--max-new-tokens", "12", "--threads", "1"]
        runpy.run_module("mini_ee", run_name="__main__", alter_sys=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(case.folder)]
    process = subprocess.run(command, input=TEXTS[0], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    expected = Runtime(case.folder, threads=1).run(TEXTS[:1], max_new_tokens=NEW)[0]
    answer = json.loads(process.stdout)
    assert (answer["tokens"], answer["layers"], answer["text"]) == (expected.tokens, expected.layers, expected.text)


class CopiesAtOnce:
    """A binding as on a GPU: it copies an input when it is bound, and not when the graph runs."""

    def __init__(self, binding):
        self._binding, self._copies = binding, {}

    def __getattr__(self, name):
        return getattr(self._binding, name)

    def bind_cpu_input(self, name, value):
        self._copies[name] = value.copy()
        self._binding.bind_cpu_input(name, self._copies[name])


def test_each_token_is_bound_anew_on_a_device_with_memory_of_its_own(case, monkeypatch):
    create, run_bound, expected = Session.io_binding, Session.run_bound, case.write(PROMPTS, missing_kv=MODEL)
    monkeypatch.setattr(Session, "io_binding", lambda self: CopiesAtOnce(create(self)))
    monkeypatch.setattr(Session, "run_bound", lambda self, binding: run_bound(self, binding._binding))
    segments = case.segments(MODEL, len(PROMPTS))
    monkeypatch.setattr(case.session, "provider", CUDA)
    assert gather(decode(segments, PROMPTS, NEW, MIXED), len(PROMPTS)) == expected


@pytest.fixture
def copied(case, tmp_path):
    return shutil.copytree(case.folder, tmp_path / "copied")


def changed_byte(folder):
    content = bytearray((folder / "onnx/fill_2.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "onnx/fill_2.onnx").write_bytes(content)


def of_rows(folder):
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"unit": "rows"})


@pytest.mark.parametrize(
    "damage, message",
    [
        (changed_byte, "fill_2.onnx"),
        (lambda folder: (folder / "onnx/fill_3.onnx").unlink(), "fill_3.onnx"),
        (of_rows, "no key 'task'"),
    ],  # other damage: FAULTS in test_export.py
)
def test_damage_of_a_folder_with_graphs_of_tokens_is_told(copied, damage, message):
    damage(copied)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Runtime(copied)


def test_one_class_opens_either_kind_of_folder(case):
    assert type(Runtime(case.folder, threads=1)) is TokenRuntime
    with pytest.raises(TypeError, match="providers_"):
        Runtime(case.folder, providers_=[])


def test_another_engine_may_be_any_callable(case):
    """Not only what functools.partial makes: the engine's name was read from its attribute `func`."""
    open_segments = torch_segments(case.folder)
    through = Runtime(
        case.folder, segments=lambda missing_kv, rows, capacity: open_segments(missing_kv, rows, capacity)
    )
    assert through.engine == "torch" and through.run(TEXTS[:1], max_new_tokens=2)[0].tokens


@pytest.mark.parametrize(
    "text, new, message",
    [
        (" ", 4, "expected a prompt, found no text"),
        (3, 4, "expected a prompt, found 3"),
        ("w1 " * 60, 5, "at most 64 tokens, prompt and continuation together, got 60 and 5"),
    ],
)
def test_prompts_that_cannot_be_continued_are_told(case, text, new, message):
    with pytest.raises(ValueError, match=message):
        Runtime(case.folder, threads=1).run([text], max_new_tokens=new)


def test_rules_that_the_graphs_do_not_serve_are_told(case):
    runtime = Runtime(case.folder, threads=1)
    for rule, message in (
        (Fixed(3), "one of the 3 exits"),
        (Threshold(0.9, "saturation"), "hidden states"),
        (Policy(), "policy"),
    ):
        with pytest.raises(ValueError, match=message):
            list(runtime.generate(PROMPTS, max_new_tokens=2, rule=rule))


def test_a_provider_that_is_not_there_and_an_unknown_fill_are_told(case):
    with pytest.raises(ValueError, match="expected a provider that is available here .*, found SomeProvider"):
        Runtime(case.folder, ["SomeProvider"])
    with pytest.raises(ValueError, match="missing_kv must be one of copy_state, recompute, got 'copy'"):
        Runtime(case.folder, missing_kv="copy")


# Exporting


def test_graphs_by_segment_are_refused_under_a_rule_that_reads_hidden_states(tmp_path):
    opened = with_heads(load_backbone(GOLDEN / "llama"), rule=Threshold(0.9, "saturation"))
    with pytest.raises(WrongArguments, match="which graphs by segment do not return"):
        opened.export(tmp_path / "exported", segments=True)
    assert not list(tmp_path.iterdir())


def test_a_rule_that_asks_for_more_than_the_model_says_is_told(tmp_path):
    with pytest.raises(ValueError, match="the rule policy needs a model with a policy"):
        with_heads(load_backbone(GOLDEN / "llama"), rule=Policy()).export(tmp_path / "exported")


# The commands


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of self-supervised exits on a checkpoint with a tokenizer."""
    root = tmp_path_factory.mktemp("run")
    opened = with_heads(load_backbone(GOLDEN / "llama"))
    save_backbone(opened.model.backbone, root / "llama")
    opened.tokenizer.save(root / "llama" / "tokenizer.json")
    opened.save(root / "run", root / "llama")
    return root / "run"


def test_export_and_run_answer(run_folder, tmp_path, capsys, monkeypatch):
    out, answers = tmp_path / "exported", tmp_path / "answers.jsonl"
    assert main(["export", str(run_folder), "--out", str(out), "--segments", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["method"], answer["exits"], answer["precision"]) == ("self-supervised", [1, 2, 3], "float32")
    assert answer["verified"].keys() >= {"max_logit_difference", "token_agreement", "exit_agreement"}
    assert answer["bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())

    lines = tmp_path / "prompts.txt"
    strange = b'\n\xff\n{"text": 7}\n{"text": "\\ud800"}\n'
    lines.write_bytes(b'w5 w9\n{"text": "w40 w41"}\n' + strange + b"w1 " * 60 + b"\n")
    options = ["--max-new-tokens", "6", "--missing-kv", "recompute", "--threads", "1"]
    with open(lines) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert main(["run", str(out), "--out", str(answers), "--json", *options]) == 1
    summary, error = json.loads((printed := capsys.readouterr()).out), printed.err.splitlines()
    assert (summary["rows"], summary["failed"], summary["engine"]) == (7, 5, "onnxruntime")
    assert [line.split(": ")[1] for line in error] == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    opened = load_run(run_folder)
    settings = {"exits": EXITS, "heads": opened.model.heads, "rule": MIXED, "missing_kv": "recompute", "stop": [2]}
    steps = generate(opened.model.backbone, [[5, 9], [40, 41]], max_new_tokens=6, **settings)
    for row, text in zip(rows, gather(steps, 2)):
        assert row.keys() == {"line", "text", "tokens", "layers", "mean_layers", "milliseconds"}
        assert (row["tokens"], row["layers"]) == text
        assert row["mean_layers"] == pytest.approx(sum(row["layers"]) / len(row["layers"]))
    layers = rows[0]["layers"] + rows[1]["layers"]
    assert summary["mean_layers"] == pytest.approx(sum(layers) / len(layers))
    assert all(row.keys() == {"line", "error"} for row in rows[2:])


def test_a_run_with_policies_is_exported(run_folder, tmp_path, capsys):
    with_policies("calm").save(tmp_path / "run", run_folder.parent / "llama")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["method"], answer["rule"]["name"], answer["exits"]) == ("calm", "policy", [1, 2, 3])
    assert sorted(path.name for path in (tmp_path / "exported/onnx").iterdir()) == ["model.onnx"]


# Smaller weights


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_float16_halves_the_weights_and_says_nearly_the_same_at_every_exit(tmp_path, case_of, kind):
    right = case_of(kind)
    half = make_case(tmp_path / "exported", right.opened, "float16")
    for missing_kv in (MODEL, *MISSING_KV):
        halved, expected = (
            verification.drawn_text(opened.segments(missing_kv), PROMPTS, NEW, 0, FORCED)[0] for opened in (half, right)
        )
        difference = max(abs(mine - theirs).max() for mine, theirs in zip(halved, expected, strict=True))
        assert 1e-5 < difference < 0.1
    weights = [(folder / WEIGHTS).stat().st_size for folder in (tmp_path / "exported", right.folder)]
    assert weights[0] < 0.6 * weights[1]
    through = functools.partial(torch_segments(tmp_path / "exported"), "copy_state")
    assert len(gather(decode(through(B, 40), PROMPTS, NEW, MIXED), B)) == B


def test_int8_of_the_built_in_decoder_writes_nearly_the_same(tmp_path):
    model = TokenExits(load_backbone(BUILT_IN_DECODER), (6, 12), "copy").eval()
    made = Made("self-supervised", model, Tokenizer.from_folder(BUILT_IN_DECODER), Threshold(0.7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 8)
        manifest = made.export(tmp_path / "exported", REAL_TEXTS, "int8")
    verified = manifest["verified"]
    assert (
        verified["token_agreement"] > 0.5 and verified["exit_agreement"] > 0.5
    )  # after one other token all may differ
    assert 0.01 < verified["max_logit_difference"] < 2
    assert all(row.tokens for row in Runtime(tmp_path / "exported", threads=1).run(REAL_TEXTS, max_new_tokens=4))
    with pytest.raises(ValueError, match="expected float weights for --engine torch, found int8"):
        torch_segments(tmp_path / "exported")


def test_what_is_exported_already_is_told(case, tmp_path, capsys):
    again = ["export", str(case.folder), "--out", str(tmp_path / "again")]
    for argv in (again, ["generate", str(case.folder), "--prompt", "w1"]):
        assert main(argv) == 2
        assert capsys.readouterr().err.startswith(
            f"mini-ee {argv[0]}: {case.folder}: expected a run, found an export; "
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rule", "policy"], "policy"),
        (["--task", "SST-2"], "--task is for classifiers"),
        (["--rule", "fixed", "--layer", "4"], "1,2,3"),
    ],
)
def test_wrong_arguments_of_an_export_are_one_line(run_folder, tmp_path, capsys, options, message):
    assert main(["export", str(run_folder), "--out", str(tmp_path / "exported"), *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not list(tmp_path.iterdir())


# The real one


@pytest.mark.skipif("MINI_EE_SHARED" not in os.environ, reason="needs the real stories260K (2026-11)")
def test_200_tokens_of_the_real_stories260k_are_those_of_transformers_and_with_exits_those_of_torch(tmp_path):
    folder = Path(os.environ["MINI_EE_SHARED"]) / "weights" / "stories260K"
    golden, tokenizer = read_tensors(GOLDEN / "stories260K" / "expected.safetensors"), Tokenizer.from_folder(folder)
    prompts, expected = golden["input_ids"].tolist(), golden["greedy"][0].tolist()
    plain(load_backbone(folder))._replace(tokenizer=tokenizer).export(tmp_path / "plain", REAL_TEXTS)
    steps = Runtime(tmp_path / "plain", threads=1).generate(prompts, max_new_tokens=200)
    assert len(expected) == 200 and gather(steps, 1)[0].tokens == expected

    prompts = [tokenizer.backend.encode(text).ids for text in REAL_TEXTS]
    model, rule = TokenExits(load_backbone(folder), (2, 4, 5), "copy"), Threshold((0.999, 0.7, 0.0))
    Made("self-supervised", model, tokenizer, rule).export(tmp_path / "exits", REAL_TEXTS, segments=True)
    for missing_kv in MISSING_KV:
        runtime = Runtime(tmp_path / "exits", missing_kv=missing_kv, threads=1)
        texts = gather(runtime.generate(prompts, max_new_tokens=200), 3)
        settings = {"exits": model.exits, "heads": model.heads, "rule": rule, "missing_kv": missing_kv}
        steps = generate(model.backbone, prompts, max_new_tokens=200, stop=runtime.config["stop"], **settings)
        assert texts == gather(steps, 3)
        assert {layers for text in texts for layers in text.layers_run} == {2, 4, 5}
