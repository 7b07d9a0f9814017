"""Fixtures and helpers of the tests of the lab: small checkpoints, runs and exports. conftest.py imports all names."""

import functools
import json
import os
import shutil
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from words import BAD, GOOD, THINGS, words_tokenizer

import mini_ee
from mini_ee.export.manifest import WEIGHTS
from mini_ee.export.torch_engine import read_weights
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.evaluation import plots, row_evaluation
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import sessions, verification, writer
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import Session
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.rules import Fixed, Threshold
from mini_ee.lab.training import default_rule
from mini_ee.lab.training.run_folder import Run

DECODERS = ("llama", "gemma", "phi")


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_graph():
    """A second thread of a graph would compete with the other test processes."""
    made = Session.__init__

    def one(self, path, provider, threads):
        made(self, path, provider, threads or 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "__init__", one)
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_graphs_share_a_session():
    """To open a graph takes longer than to run it. Sessions have no state: one serves all folders with equal files."""
    opened, known = sessions._opened, {}

    def shared(path, options, provider):
        weights, kind = path.with_name(Path(WEIGHTS).name), sessions.ort.InferenceSession
        if not path.exists() or weights.exists() and (weights.is_symlink() or weights.stat().st_nlink > 1):
            return opened(path, options, provider)
        file = (weights if weights.exists() else path).stat()
        key = (path.read_bytes(), file.st_ino, file.st_mtime_ns, file.st_size, provider, options.intra_op_num_threads)
        key += (options.use_per_session_threads, kind, getattr(kind, "_create_inference_session", None))
        if key not in known:
            while len(known) >= 50:
                del known[next(iter(known))]
            known[key] = opened(path, options, provider)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "_opened", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_candidates():
    """A default rule is chosen from fewer rules: each is replayed on all held-out rows of each training."""
    usual = default_rule.CANDIDATES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_rule, "CANDIDATES", 25)
        yield usual


@pytest.fixture(scope="session", autouse=True)
def short_verifications():
    """An export in int8, and of a decoder, compares fewer texts and tokens; tests of graphs compare their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROUNDED_TEXTS", 64)
        patch.setattr(verification, "VERIFIED_TOKENS", 8)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_pictures_and_short_measurements():
    """No test reads the pixels of a picture or trusts the seconds of a batch: each batch is timed once."""
    panels = plots.new_panels

    def not_arranged(*sizes, **settings):
        figure, axes = panels(*sizes, **settings)
        figure.set_layout_engine("none")  # to arrange the panels takes as long as to draw them
        return figure, axes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 20)
        patch.setattr(plots, "new_panels", not_arranged)
        patch.setattr(row_evaluation, "TIMED_REPEATS", 1)
        patch.setattr(row_evaluation.measure_seconds, "__defaults__", (1, time.perf_counter))
        yield


def answer(capsys, *argv):
    """The one JSON object that a command prints."""
    assert main([*map(str, argv), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys, *argv, status=None):
    """The one line of a command that fails, with this status if one is given."""
    expected = (1, 2) if status is None else (status,)
    try:
        status = main([*map(str, argv)])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status in expected and printed.out == "" and "Traceback" not in printed.err
    assert len(printed.err.splitlines()) == 1, printed.err
    return printed.err.rstrip("\n")


def all_schedules(num_exits):
    """Every way to cut the exits into groups of neighbours."""
    exits, schedules = list(range(num_exits)), []
    for count in range(num_exits):
        for cuts in combinations(range(1, num_exits), count):
            bounds = [0, *cuts, num_exits]
            schedules.append([exits[start:stop] for start, stop in zip(bounds, bounds[1:])])
    return schedules


SCHEDULES = ([[0], [1], [2]], [[0, 1, 2]])
"""restart and parallel with three exits. In graphs each is tested on every second set of adapters; torch runs all."""


def random_decoder(kind, num_layers):
    """A small Llama (two query heads share a key head), Gemma or Phi with its vocabulary head."""
    config = {
        "model_type": kind,
        "vocab_size": 60,
        "hidden_size": 24,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 3 if kind == "phi" else 4,
        "num_key_value_heads": 2 if kind == "llama" else None,
        "head_dim": 8 if kind == "gemma" else None,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "initializer_range": 0.3,
    }
    return Decoder(DecoderConfig.from_hugging_face(config)).eval()


def save_small_llama(folder, tokenizer, seed=0, **settings):
    """A random Llama of width 16 for this tokenizer; returns the folder. settings: entries of config.json."""
    config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        save_backbone(Decoder(DecoderConfig.from_hugging_face(config | settings)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tensors(inputs):
    """Ids, attention mask and token types of a batch, as torch tensors."""
    return tuple(torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))


def all_exits(model, inputs):
    """Logits (B, K, C) of every exit of a model, as it computes them in training."""
    with torch.no_grad():
        return torch.stack(model(*tensors(inputs)), dim=1).numpy()


def random_bert(model_type, num_layers):
    """A small BERT, or another encoder of its family, without heads."""
    config = BertConfig(
        model_type=model_type,
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.3,
        **({"embedding_size": 16} if model_type == "albert" else {}),
    )
    return Bert(config, False, False)


def lora_model(model_type="bert", targets=("query", "value"), exits=(1, 2, 4), rank=4, pool="mean"):
    """A LoRAExits with random parameters; also B, which is zero before a training."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        decoder = model_type in DECODERS
        backbone = (random_decoder if decoder else random_bert)(model_type, exits[-1])
        model = LoRAExits(backbone.without_heads(), exits, 3, pool, rank=rank, targets=targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        for head in model.heads:
            torch.nn.init.normal_(head.dense.weight, std=0.3)
            torch.nn.init.normal_(head.out.weight, std=0.3)
    return model


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory):
    """A random 3-layer BERT with pooler and masked-LM head, and its tokenizer.json."""
    folder = tmp_path_factory.mktemp("checkpoint") / "bert"
    tokenizer = words_tokenizer()
    config = BertConfig(
        model_type="bert",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(Bert(config), folder)
    Tokenizer(tokenizer, None).save_beside_model(folder)
    return folder


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory, checkpoint_folder):
    """The same BERT as transformers writes a fine-tuned classifier, with a drawn head for the labels of task_folder."""
    folder = tmp_path_factory.mktemp("checkpoint") / "classifier"
    shutil.copytree(checkpoint_folder, folder)
    weights = {name: part for name, part in read_tensors(folder / "model.safetensors").items() if "cls." not in name}
    draw = torch.Generator().manual_seed(1)
    encoder = load_backbone(folder)
    with torch.no_grad():
        texts = [f"the {thing} was {word}" for thing in THINGS for word in GOOD + BAD]
        inputs = Tokenizer.from_folder(folder, 30).encode([(text,) for text in texts]).batch(slice(None))
        first = encoder.pooled(encoder(*tensors(inputs)))
    weight = torch.randn(2, 16, generator=draw)
    weights |= {
        "classifier.weight": weight,
        "classifier.bias": -(first @ weight.T).mean(0),
    }  # both labels are predicted
    write_tensors(folder / "model.safetensors", weights)
    config = read_json(folder / "config.json") | {"architectures": ["BertForSequenceClassification"]}
    config.pop("sha256", None)
    write_json(folder / "config.json", config | {"id2label": {"0": "bad", "1": "good"}})
    return folder


def one_number_of(classifier, folder, times):
    """A copy of a classifier of two labels in a folder that predicts `times` the difference of its two logits."""
    shutil.copytree(classifier, folder)
    weights = read_tensors(folder / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = times * (weights[name][1:] - weights[name][:1])
    write_tensors(folder / "model.safetensors", weights)
    config = read_json(folder / "config.json") | {"id2label": {"0": "LABEL_0"}}
    config.pop("sha256", None)
    write_json(folder / "config.json", config)
    return folder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory, checkpoint_folder):
    """A sentence encoder of 3 layers that change a text a lot, which scales its embeddings to length 1."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    backbone = load_backbone(checkpoint_folder)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in backbone.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    save_backbone(backbone, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


ENCODED = tuple(
    f"{'very ' * n}{word} {thing} is {other}" for thing in THINGS for word in GOOD for other in BAD for n in (0, 2)
)


@pytest.fixture(scope="session")
def embedding_run(tmp_path_factory, encoder_folder):
    """A run of embedding-maps on that encoder, with exits after each layer."""
    folder = tmp_path_factory.mktemp("embeddings")
    (folder / "texts.txt").write_text("\n".join(ENCODED) + "\n\n")
    options = {"epochs": 8, "head_lr": 0.01}
    return mini_ee.train("embedding-maps", encoder_folder, folder / "texts.txt", folder / "run", **options)


@pytest.fixture(scope="session")
def decoder_checkpoint(tmp_path_factory, checkpoint_folder):
    """A random 3-layer Llama with the same tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(random_decoder("llama", 3), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    return folder


def write_task(folder, count=200, splits=("train", "dev"), label=lambda name: name):
    """A task of sentences with different beginnings; one word decides the label."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split in splits:
        lines = []
        for row in range(count):
            name, words = (("bad", BAD), ("good", GOOD))[row % 2]
            before = " ".join(random.choice([*THINGS, "the", "a", "very"], 5))
            lines.append(json.dumps({"sentence": f"{before} was {words[row % 4]}", "label": label(name)}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def random_model():
    """random_model(exits, num_labels, pool): a RowExits on a random 6-layer BERT in eval mode, each made once.

    Every parameter is random, also of norms: with weights of one, a norm without its weight would not be noticed.
    Embeddings and heads have a larger variance than layers, so that rows differ and exit at different layers.
    """
    made = functools.cache(_random_model)
    return lambda exits=(1, 2, 4, 6), num_labels=3, pool="mean": made(exits, num_labels, pool)


def _random_model(exits, num_labels, pool):
    config = BertConfig(
        model_type="bert",
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=48,
        max_position_embeddings=40,
    )
    model = RowExits(Bert(config, lm_head=False), exits, num_labels, pool).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = float(name.endswith("norm.weight")), 1.0 if ".word." in name or ".out." in name else 0.15
            parameter.normal_(mean, std, generator=generator)
    return model


def padded_rows(backbone):
    """Four rows of 9, 6, 4 and 9 tokens, padded on the right, as the tokenizers' batches are."""
    lengths = np.array([9, 6, 4, 9])
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    pad = getattr(backbone.config, "pad_token_id", None) or 0
    ids = np.where(mask == 1, np.random.default_rng(0).integers(5, backbone.config.vocab_size, mask.shape), pad)
    return Inputs(ids, mask, np.zeros_like(ids), tuple((f"row {row}",) for row in range(4)))


@pytest.fixture(scope="session")
def padded_inputs():
    """Seven rows of 3 to 12 random tokens, padded to 12 with token 0."""
    random = np.random.default_rng(0)
    lengths = np.array([5, 12, 3, 9, 12, 4, 7])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = random.integers(5, 60, mask.shape) * mask
    return Inputs(ids, mask, random.integers(0, 2, mask.shape) * mask, tuple((f"row {i}",) for i in range(len(ids))))


@pytest.fixture(scope="session")
def runtime(tmp_path_factory, checkpoint_folder, random_model):
    """An untrained model of rows, exported with graphs by segment."""
    model, task = random_model((1, 2, 4, 6)), {"name": "words", "metrics": ["accuracy"], "texts": 1}
    task["label_names"] = ["bad", "fair", "good"]
    config = {"method": "joint", "unit": "rows", "num_labels": 3, "settings": {}, "task": task}
    run = Run(Path("run"), config, model, Tokenizer.from_folder(checkpoint_folder, 30), Threshold(0.875))
    folder = tmp_path_factory.mktemp("serving") / "exported"
    writer.export(run, folder, [(f"the {thing} was {word}",) for thing in THINGS for word in GOOD], segments=True)
    return Runtime(folder, threads=1)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory, decoder_checkpoint):
    """A random decoder, exported; with its copied heads, tokens exit at different layers."""
    model = TokenExits(load_backbone(decoder_checkpoint), (1, 2, 3), "copy").eval()
    config, tokenizer = {"method": "self-supervised", "unit": "tokens", "settings": {}}, decoder_checkpoint
    run = Run(Path("run"), config, model, Tokenizer.from_folder(tokenizer, 30), Threshold((0.25, 0.3, 0.0)))
    folder = tmp_path_factory.mktemp("serving") / "decoder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 4)
        writer.export(run, folder, ["the film was", "a meal", "the"])
    return Runtime(folder, threads=1, max_new_tokens=8)


@pytest.fixture(scope="session")
def encoder(embedding_run, tmp_path_factory):
    """That sentence encoder, exported with graphs by segment."""
    folder = tmp_path_factory.mktemp("serving") / "encoder"
    mini_ee.export(embedding_run, folder, segments=True)
    return Runtime(folder, threads=1)


@pytest.fixture(scope="session")
def classifier(checkpoint_folder, task_folder, tmp_path_factory):
    """A trained classifier of two labels, exported without graphs by segment."""
    folder = tmp_path_factory.mktemp("serving")
    run = mini_ee.train("joint", checkpoint_folder, task_folder, folder / "run", epochs=1)
    mini_ee.export(run, folder / "classifier")
    return Runtime(folder / "classifier", threads=1)


@pytest.fixture(scope="session")
def reranker(random_model, checkpoint_folder, tmp_path_factory):
    """An untrained model of pairs with one label."""
    task = {"name": "pairs", "metrics": ["pearson"], "texts": 2, "label_names": []}
    config = {"method": "joint", "unit": "rows", "num_labels": 1, "settings": {}, "task": task}
    run = Run(Path("run"), config, random_model((2, 6), 1), Tokenizer.from_folder(checkpoint_folder, 30), Fixed(1))
    writer.export(run, folder := tmp_path_factory.mktemp("serving") / "pairs", [("the film", "was good")] * 8)
    return Runtime(folder, threads=1)


@pytest.fixture
def smollm2_folder():
    """SmolLM2-135M-Instruct, a real model; its tokenizer is read through transformers."""
    if "MINI_EE_MODELS" not in os.environ:
        pytest.skip("needs MINI_EE_MODELS, the folder of real models")
    pytest.importorskip("transformers", reason="pip install transformers")
    return Path(os.environ["MINI_EE_MODELS"]) / "smollm2"


def weights_of(folder):
    """The weights of an export by name, without the constants of its graphs and the defaults of their inputs."""
    others = ("constant_", "threshold", "exit_at", "patience")
    return {name: value.numpy() for name, value in read_weights(folder).items() if not name.startswith(others)}
