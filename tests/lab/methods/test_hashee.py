"""HashEE: tokens against a loop in float64, tables against counts, what a row cost against torch's own counter."""

import json
from collections import Counter
from math import erf, log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_decoder, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mini_ee.lab.baselines.hashee as hashee
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.baselines.hashee import Config, HashExits, exit_layers
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tasks import Task
from mini_ee.lab.data.tokenizer import Encoded, Inputs, Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.row_evaluation import evaluate, read_rows
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.train_run import train

L, C, D, HEADS, VOCABULARY = 4, 3, 24, 3, 60
ATOL, ONNX = 2e-5, 1e-5
KINDS = [("bert", "mean"), ("bert", "first"), ("albert", "mean"), ("roberta", "first")]


def made(kind="bert", pool="mean", layers=L):
    """A model in eval mode, every parameter drawn, and a table with tokens that leave after each layer."""
    sizes = {"hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": HEADS, "intermediate_size": 48}
    config = BertConfig(model_type=kind, vocab_size=VOCABULARY, max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = HashExits(Bert(config).without_heads(), (layers,), C, pool, Config()).eval()
        for name, value in model.named_parameters():
            nn.init.normal_(value, float(name.endswith("norm.weight")), 1.0 if ".word." in name else 0.2)
        model.table.data = torch.randint(1, layers + 1, (VOCABULARY,)).float()
    return model


def run_through(model, inputs):
    return early_exit(model.segments(), Never(), inputs)


def output(model, inputs):
    return run_through(model, inputs).logits


def rows_of(inputs):
    """Each row on its own, without padding."""
    for row, length in enumerate(inputs.attention_mask.sum(axis=1)):
        one = [np.ascontiguousarray(tensor[row : row + 1, :length]) for tensor in tensors(inputs)]
        yield Inputs(*map(np.asarray, one), inputs.texts[row : row + 1])


def norm(x, weight, bias, eps):
    return (x - x.mean()) / np.sqrt(x.var() + eps) * weight + bias


def states_by_hand(model, one):
    """h_L (T, D) of one row in float64, token by token; only the embeddings are the model's."""
    with torch.no_grad():
        h = model.backbone.embed(one)[0].double().numpy()
    weights, eps = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}, 1e-12
    leaves_after = [L, *(int(model.table[token]) for token in one.input_ids[0, 1:])]
    for depth in range(L):
        stored = f"backbone.layers.{depth % len(model.backbone.layers)}."
        w = {name.removeprefix(stored): weight for name, weight in weights.items() if name.startswith(stored)}
        qkv = h @ w["qkv.weight"].T + w["qkv.bias"]
        after = h.copy()
        for token, leaves in enumerate(leaves_after):
            if depth >= leaves:
                continue
            read = []
            for head in range(HEADS):
                at = slice(head * D // HEADS, (head + 1) * D // HEADS)
                scores = np.array([qkv[token, :D][at] @ qkv[other, D : 2 * D][at] for other in range(len(h))])
                odds = np.exp(scores / np.sqrt(D / HEADS))
                read.append(odds / odds.sum() @ qkv[:, 2 * D :][:, at])
            a = w["attention_output.weight"] @ np.concatenate(read) + w["attention_output.bias"]
            a = norm(h[token] + a, w["attention_norm.weight"], w["attention_norm.bias"], eps)
            up = w["up.weight"] @ a + w["up.bias"]
            up = np.array([x * (1 + erf(x / 2**0.5)) / 2 for x in up])
            down = w["down.weight"] @ up + w["down.bias"]
            after[token] = norm(a + down, w["output_norm.weight"], w["output_norm.bias"], eps)
        h = after
    return h


# ---- Tokens leave ----
@pytest.mark.parametrize(("kind", "pool"), [("bert", "mean"), ("bert", "first")])
def test_a_token_that_has_left_is_still_read_and_changes_no_more(kind, pool, padded_inputs):
    model = made(kind, pool)
    expected = []
    for one in rows_of(padded_inputs):
        h = states_by_hand(model, one)
        with torch.no_grad():
            read = torch.from_numpy(h[0] if pool == "first" else h.mean(axis=0)).float()
            expected.append(model.classify(0, read[None]).numpy())
    np.testing.assert_allclose(output(model, padded_inputs), np.concatenate(expected), atol=ATOL)


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_where_no_token_leaves_it_is_the_full_model(kind, pool, padded_inputs):
    model = made(kind, pool)
    model.table.data.fill_(L)
    full = RowExits(model.backbone, (L,), C, pool).eval()
    full.heads = model.heads
    np.testing.assert_allclose(output(model, padded_inputs), output(full, padded_inputs), atol=ATOL)


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_a_rows_answer_does_not_depend_on_its_batch(kind, pool, padded_inputs):
    """The released code has no attention mask: padding is read."""
    model = made(kind, pool)
    alone = np.concatenate([output(model, one) for one in rows_of(padded_inputs)])
    np.testing.assert_allclose(output(model, padded_inputs), alone, atol=ATOL)


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_all_tokens_in_all_layers_say_the_same(kind, pool, padded_inputs):
    """What a speed-up is measured against."""
    model = made(kind, pool)
    whole = early_exit(model.segments().whole(), Never(), padded_inputs)
    np.testing.assert_allclose(output(model, padded_inputs), whole.logits, atol=ATOL)
    assert (whole.cost.depth == L).all() and whole.cost.flops[0] > run_through(model, padded_inputs).cost.flops[0]


def test_the_first_token_runs_all_layers_whatever_the_table_says(padded_inputs):
    model = made(pool="first")
    model.table.data.fill_(1)
    assert (model.depths(padded_inputs)[:, 0] == L).all()
    before = model.backbone.embed(padded_inputs)[:, 0]
    left = model.run_reduced(padded_inputs).hidden
    assert (left[:, 0] != before).all(), "it is still the first in order"


def test_gradients_are_those_of_the_equation(padded_inputs):
    model = made()
    gradients = []
    for way in (model.run_reduced, model.run_all):
        model.zero_grad()
        left = way(padded_inputs)
        model.heads[0](left.hidden, left.mask).square().sum().backward()
        gradients.append(model.backbone.layers[0].qkv.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


# ---- Tables ----
ROWS = [[2, 7, 8, 8, 3], [2, 7, 9, 1, 3], [2, 8, 10, 11, 7, 3], [2, 12, 8, 1, 1, 1, 3], [2, 13, 3]]
SPECIAL = (0, 1, 2, 3, 77)  # [PAD], [UNK], [CLS], [SEP], and one that the model has no embedding for


def rows(labels=(0, 1, 1, 0, 1), regression=False):
    """What training gives."""
    ids = [np.array(row) for row in ROWS]
    task = SimpleNamespace(regression=regression, name="words")
    encoded = Encoded(ids, ids, (("",),) * 5, 0, 0, SPECIAL)
    return SimpleNamespace(encoded=encoded, labels=np.array(labels), task=task, __len__=lambda: 5)


@pytest.mark.parametrize(
    ("layers", "groups", "expected"),
    [
        (12, 6, [1, 3, 5, 7, 9, 11, 12]),  # the last type is left over
        (12, 3, [1, 1, 5, 5, 9, 9, 12]),
        (6, 6, [1, 2, 3, 4, 5, 6, 6]),
        (7, 2, [1, 1, 1, 4, 4, 4, 7]),
        (3, 6, [1, 1, 2, 2, 3, 3, 3]),
        (12, 9, [1, 2, 3, 4, 5, 6, 7]),
        (6, 1, [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_commonest_types_leave_first_and_groups_are_as_in_the_published_code(layers, groups, expected):
    counts = Counter(token for row in ROWS for token in row if token not in SPECIAL)
    table = exit_layers(rows(), VOCABULARY, layers, Config(groups=groups))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    assert ranked == [8, 7, 9, 10, 11, 12, 13] and [table[token] for token in ranked] == expected
    assert {table[token] for token in set(range(VOCABULARY)) - set(ranked)} == {layers}, "special and unseen ones"


@pytest.mark.parametrize("table", ["frequency", "mi", "random"])
def test_special_tokens_run_all_layers_under_every_table(table):
    """[UNK] is as common as any word here; the published code sends it to the last layer, too."""
    layers = exit_layers(rows(), VOCABULARY, 12, Config(table=table))
    assert layers[[0, 1, 2, 3]].tolist() == [12] * 4 and min(layers) == 1


def test_special_tokens_are_those_of_the_tokenizer(checkpoint_folder):
    """Those that stand around a text, that of unknown words, and what tokenizer.json declares."""
    for declared in ([], ["[MASK]", "[EXTRA]"]):
        tokenizer = Tokenizer.from_folder(checkpoint_folder)
        tokenizer.backend.add_special_tokens(declared)
        names = {tokenizer.backend.id_to_token(token) for token in tokenizer.special_ids}
        assert names == {"[CLS]", "[SEP]", "[UNK]", *declared}
        assert tokenizer.encode(["a film"]).special_ids == tokenizer.special_ids


def test_mutual_information_counts_every_occurrence():
    """The released code loses the first of each type."""
    labels = np.repeat((0, 1, 1, 0, 1), [len(row) for row in ROWS])
    tokens = [token for row in ROWS for token in row]
    pairs = Counter(zip(tokens, labels.tolist()))
    expected = {}
    for token in set(tokens):
        expected[token] = 0.0
        for label in (0, 1):
            both, of, at = (n / len(tokens) for n in (pairs[token, label], tokens.count(token), sum(labels == label)))
            expected[token] += both * log(both / (of * at)) if both else 0.0
    information = hashee.mutual_information(np.array(tokens), labels, VOCABULARY)
    assert all(information[token] == pytest.approx(expected.get(token, 0.0)) for token in range(VOCABULARY))
    table = exit_layers(rows(), VOCABULARY, 6, Config(table="mi", groups=3))
    most = sorted(set(tokens) - set(SPECIAL), key=lambda token: (-round(expected[token], 12), token))
    assert [table[token] for token in most] == [1, 1, 3, 3, 5, 5, 6]


def test_a_random_table_is_drawn_once():
    tables = [exit_layers(rows(), VOCABULARY, 6, Config(table="random")) for _ in range(2)]
    assert (tables[0] == tables[1]).all() and set(tables[0]) == set(range(1, 7))
    model = SimpleNamespace(table=torch.nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False), layers=6)
    hashee.recipe(model, Config(table="random"))[0].begin(model, rows())
    assert (model.table.numpy() == tables[0]).all()


def test_what_cannot_be_is_one_line(checkpoint_folder, task_folder, tmp_path):
    with pytest.raises(ValueError, match="--table mi needs classes, and words is a regression; give frequency"):
        exit_layers(rows(regression=True), VOCABULARY, 6, Config(table="mi"))
    with pytest.raises(ValueError, match="expected a backbone of post-norm layers, .* found a llama"):
        HashExits(random_decoder("llama", L), (L,), C, "mean", Config())
    with pytest.raises(WrongArguments, match="hashee has no option exits"):
        train("hashee", checkpoint_folder, task_folder, tmp_path / "run", exits=(1, 3))


# ---- What a row cost ----
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_operations_are_those_that_torch_counts(kind, padded_inputs):
    model = made(kind)
    for inputs in (padded_inputs, next(rows_of(padded_inputs))):
        counted = []
        for way in (model.backbone.embed, model.run_reduced):
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                way(inputs)
            counted.append(counter.get_total_flops())
        head = model.heads[0].flops(inputs.input_ids.shape[1])
        cost = run_through(model, inputs).cost
        assert (cost.flops - head).sum() == counted[1] - counted[0]


def test_layers_are_the_mean_over_a_rows_own_tokens(padded_inputs):
    model = made()
    for row, one in enumerate(rows_of(padded_inputs)):
        depths = [L, *model.table[torch.from_numpy(one.input_ids[0, 1:])].tolist()]
        for cost, at in ((run_through(model, one).cost, 0), (run_through(model, padded_inputs).cost, row)):
            assert cost.depth[at] == cost.layer_passes[at] == pytest.approx(np.mean(depths))


def test_a_record_tells_what_the_run_told(padded_inputs):
    model = made()
    ids = [one.input_ids[0] for one in rows_of(padded_inputs)]
    types = [one.token_type_ids[0] for one in rows_of(padded_inputs)]
    encoded = Encoded(ids, types, padded_inputs.texts, 0, 0)
    recorded = record(model.segments(), encoded, 3, whole=model.segments().whole())
    replayed = recorded.replay(Never()).cost
    alone = [run_through(model, one).cost for one in rows_of(padded_inputs)]
    np.testing.assert_allclose(replayed.depth, [cost.depth[0] for cost in alone])
    assert (replayed.flops >= [cost.flops[0] for cost in alone]).all() and replayed.flops.mean() < recorded.full_flops
    assert recorded.take(np.array([4, 1])).replay(Never()).cost.flops.tolist() == replayed.flops[[4, 1]].tolist()


def test_an_evaluation_says_the_score_with_all_tokens_in_all_layers(padded_inputs):
    """That of the plain model: its own predictions are the labels here, which the model that tokens leave misses."""
    model = made()
    with torch.no_grad():
        state = model.backbone.hidden_states(*tensors(padded_inputs))[-1]
        real = torch.from_numpy(padded_inputs.attention_mask)[..., None]
        labels = model.classify(0, (state * real).sum(1) / real.sum(1)).argmax(1).numpy()
    ids, types = zip(*((one.input_ids[0], one.token_type_ids[0]) for one in rows_of(padded_inputs)))
    encoded = Encoded(ids, types, padded_inputs.texts, 0, 0)
    one = SimpleNamespace(segments=model.segments, whole_model=lambda: model.segments().whole())
    task = Task("words", ("a", "b", "c"), ("accuracy",), {})
    scores = evaluate(one, Never(), read_rows(one, encoded, labels, 4), task, encoded, 4)
    assert scores["all_tokens_score"] == 1 and scores["score"] < 1


# ---- ONNX ----
@pytest.mark.parametrize(("kind", "pool"), KINDS[:1] + KINDS[2:])
def test_graphs_whole_and_by_segment_answer_and_cost_as_torch_does(kind, pool, padded_inputs, tmp_path):
    model = made(kind, pool)
    manifest = write_graphs(model, model.segments(), Never(), tmp_path, segments=True)
    engines = OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)
    for inputs in (padded_inputs, *rows_of(padded_inputs)):
        expected = early_exit(model.segments(), Never(), inputs)
        for engine in engines:
            result = early_exit(engine, Never(), inputs)
            np.testing.assert_allclose(result.logits, expected.logits, atol=ONNX)
            np.testing.assert_allclose(result.cost.depth, expected.cost.depth, rtol=1e-6)
            np.testing.assert_allclose(result.cost.flops, expected.cost.flops, rtol=1e-6)
    whole = early_exit(engines[0].whole(), Never(), padded_inputs)
    np.testing.assert_allclose(whole.logits, output(model, padded_inputs), atol=ONNX)
    expected = early_exit(model.segments().whole(), Never(), padded_inputs)
    np.testing.assert_allclose(whole.cost.flops, expected.cost.flops)


# ---- On the command line ----
@pytest.mark.slow
def test_it_is_trained_evaluated_compared_and_exported(checkpoint_folder, task_folder, tmp_path, capsys):
    def answer(*argv):
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run, data, out = tmp_path / "run", ("--task", task_folder), tmp_path / "exported"
    made = ("--model", checkpoint_folder, *data, "--out", run, "--epochs", 1, "--groups", 3)
    trained = answer("train", "hashee", *made)
    assert trained["layers_saved"] > 0.2 and trained["exits"] == [3] and trained["rule"] == {"name": "never"}
    model = load_run(run).model
    assert set(model.table.tolist()) == {1, 2, 3} and load_run(run).config["settings"]["table"] == "frequency"
    evaluated = answer("evaluate", run, *data)
    assert evaluated["mean_layers"] == evaluated["layer_passes"] == pytest.approx(3 * (1 - evaluated["layers_saved"]))
    assert evaluated["layers_saved"] > 0.2 and evaluated["flops_ratio"] < 0.95 and evaluated["exit_counts"] == [20]
    capsys.readouterr()
    assert main(["evaluate", str(run), *map(str, data)]) == 0
    line = f"If every token runs all 3 layers: accuracy {evaluated['all_tokens_score']:.3f}."
    assert line in capsys.readouterr().out
    (row,) = answer("compare", run, *data, "--sweep")["rows"]
    assert row["no_loss"]["layers_saved"] == row["layers_saved"] == evaluated["layers_saved"]
    for precision in ((), ("--fp16",), ("--int8",)):
        folder = tmp_path / f"exported{''.join(precision)}"
        assert answer("export", run, "--out", folder, "--segments", *precision, *data)["verified"]["texts"] == 20
    out, texts = tmp_path / "exported", ["the film was good", "a very very awful book"]
    exported = answer("evaluate", out, *data)
    assert exported["layers_saved"] == pytest.approx(evaluated["layers_saved"])
    assert exported["flops_ratio"] == pytest.approx(evaluated["flops_ratio"])
    both = [Runtime(out, threads=1), Runtime(out, segments=torch_segments(out))]
    answers, others = (runtime.run(texts) for runtime in both)
    np.testing.assert_allclose([row.logits for row in others], [row.logits for row in answers], atol=ONNX)
    expected = load_run(run).classify(texts)
    for answered, other in zip((*answers, *others), expected * 2):
        assert answered.layers == pytest.approx(other.layers) and 1 < other.layers < 3
    result = answer("classify", run, "--text", texts[0])
    assert result["layers"] == 3 and result["layers_saved"] == pytest.approx(1 - expected[0].layers / 3)
