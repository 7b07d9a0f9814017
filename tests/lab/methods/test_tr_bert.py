"""TR-BERT: tokens taken out by hand, every selection of a short row, what a row cost against torch's own counter."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from conftest import random_decoder, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mini_ee.lab.baselines.tr_bert as tr_bert
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.baselines.tr_bert import Config, ReducedExits, explore
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import train

L, C, D = 4, 3, 24
ATOL, ONNX = 2e-5, 1e-5
KINDS = [("bert", "mean"), ("bert", "first"), ("albert", "mean"), ("roberta", "first")]


def made(kind="bert", pool="mean", layers=L):
    """A model in eval mode, every parameter drawn; policies keep some tokens."""
    sizes = {"hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": 3, "intermediate_size": 48}
    config = BertConfig(model_type=kind, vocab_size=60, max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ReducedExits(Bert(config).without_heads(), (layers,), C, pool, Config()).eval()
        for name, value in model.named_parameters():
            nn.init.normal_(value, float(name.endswith("norm.weight")), 1.0 if ".word." in name else 0.2)
            if name.startswith("selectors.") and name.endswith("2.weight"):
                nn.init.normal_(value, std=2.0)
    return model


def run_through(model, inputs):
    return early_exit(model.segments(), Never(), inputs)


def rows_of(inputs):
    """Each row on its own, without padding."""
    for row, length in enumerate(inputs.attention_mask.sum(axis=1)):
        arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
        one = [np.ascontiguousarray(array[row : row + 1, :length]) for array in arrays]
        yield Inputs(*one, inputs.texts[row : row + 1])


@torch.no_grad()
def by_hand(model, one, ends=(1, 2, L)):
    """(logits (C,), tokens that run each stretch) of one row: those that leave are taken out of a list."""
    hidden, counts, start = model.backbone.embed(one), [], 0
    for number, stop in enumerate(ends):
        counts.append(hidden.shape[1])
        for depth in range(start, stop):
            hidden = model.backbone.layers[depth % len(model.backbone.layers)](hidden, None)
        if number < len(ends) - 1:
            chances = torch.sigmoid(model.selectors[number](hidden[0])[:, 0]).tolist()
            hidden = hidden[:, [t for t, chance in enumerate(chances) if t == 0 or chance >= 0.5]]
        start = stop
    state = hidden[:, 0] if model.pool == "first" else hidden.mean(dim=1)
    return model.heads[0].classify(state)[0].numpy(), counts


# ---- Tokens leave ----
@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_tokens_leave_for_good_at_two_depths(kind, pool, padded_inputs):
    model = made(kind, pool)
    result, taken = run_through(model, padded_inputs), set()
    for row, one in enumerate(rows_of(padded_inputs)):
        logits, counts = by_hand(model, one)
        np.testing.assert_allclose(result.logits[row], logits, atol=ATOL)
        layers = counts[0] + counts[1] + 2 * counts[2]
        assert result.cost.depth[row] == result.cost.layer_passes[row] == pytest.approx(layers / counts[0])
        taken.add(tuple(counts))
    assert len(taken) > 3 and any(a > b > c for a, b, c in taken), "policies of this test keep some tokens"


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_a_rows_answer_does_not_depend_on_its_batch(kind, pool, padded_inputs):
    """The released code keeps as many tokens of every row as of the row with most."""
    model = made(kind, pool)
    together = run_through(model, padded_inputs)
    for row, one in enumerate(rows_of(padded_inputs)):
        alone = run_through(model, one)
        np.testing.assert_allclose(together.logits[row], alone.logits[0], atol=ATOL)
        assert together.cost.depth[row] == pytest.approx(alone.cost.depth[0])


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_all_tokens_in_all_layers_say_the_same(kind, pool, padded_inputs):
    """Those that leave are masked instead: what a speed-up is measured against."""
    model = made(kind, pool)
    result = run_through(model, padded_inputs)
    whole = early_exit(model.segments().whole(), Never(), padded_inputs)
    np.testing.assert_allclose(result.logits, whole.logits, atol=ATOL)
    assert (whole.cost.depth == L).all() and (whole.cost.flops > result.cost.flops).all()


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_before_policies_have_learned_it_is_the_full_model(kind, pool, padded_inputs):
    model = made(kind, pool)
    for network in model.selectors:
        nn.init.zeros_(network[2].weight)
        nn.init.constant_(network[2].bias, 2.0)
    full = RowExits(model.backbone, (L,), C, pool).eval()
    full.heads = model.heads
    result = run_through(model, padded_inputs)
    np.testing.assert_allclose(result.logits, run_through(full, padded_inputs).logits, atol=ATOL)
    assert (result.cost.depth == L).all()
    fresh = ReducedExits(model.backbone, (L,), C, pool, Config()).eval()
    assert (run_through(fresh, padded_inputs).cost.depth == L).all()


def test_the_first_token_is_always_kept(padded_inputs):
    model = made(pool="first")
    for network in model.selectors:
        nn.init.constant_(network[2].bias, -1000.0)
    assert model.run_reduced(padded_inputs).hidden.shape == (len(padded_inputs), 1, D)


@pytest.mark.parametrize(("layers", "ends"), [(2, (1, 2)), (3, (1, 3)), (12, (1, 6, 12))])
def test_policies_are_behind_layer_1_and_half_of_the_layers(layers, ends):
    model = made(layers=layers)
    assert model.ends == ends and len(model.selectors) == len(ends) - 1


def test_what_cannot_be_is_one_line(checkpoint_folder, task_folder, tmp_path):
    with pytest.raises(ValueError, match="TR-BERT chooses between layers, and the backbone has 1; give a deeper one"):
        made(layers=1)
    with pytest.raises(ValueError, match="expected a backbone of post-norm layers, .* found a llama"):
        ReducedExits(random_decoder("llama", L), (L,), C, "mean", Config())
    with pytest.raises(WrongArguments, match="tr-bert has no option exits"):
        train("tr-bert", checkpoint_folder, task_folder, tmp_path / "run", exits=(1, 3))


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
        assert (run_through(model, inputs).cost.flops - head).sum() == counted[1] - counted[0]


# ---- Every selection of a short row ----
IDS = torch.tensor([[2, 17, 9]])


def short():
    """A model in float64 and one row of [CLS] and two tokens."""
    model = made(pool="mean").double()
    return model, Tensors(IDS, torch.ones_like(IDS), torch.zeros_like(IDS))


def selections():
    """What is said of two tokens after layer 1, and of those that are left after layer 2."""
    for first in product((True, False), repeat=2):
        for second in product((True, False), repeat=sum(first)):
            yield first, second


def forced(*paths):
    """A `draw` that takes these paths, a row each; what is said of [CLS] and of padding is no matter."""
    turns = iter(range(2))

    def draw(logits):
        output, turn = torch.zeros_like(logits, dtype=torch.bool), next(turns)
        for row, path in enumerate(paths):
            for token, keeps in enumerate(path[turn], start=1):
                output[row, token] = keeps
        return output

    return draw


def chances_by_hand(model, path):
    """(pi_d(a), n_d) of both depths, the tokens being taken out of a list."""
    hidden, choices, start = model.backbone.embed(Tensors(IDS)), [], 0
    for number, (stop, keeps) in enumerate(zip((1, 2), path)):
        hidden = model.backbone.layers[start](hidden, None)
        chances = torch.sigmoid(model.selectors[number](hidden[0].detach())[1:, 0])
        p = torch.ones((), dtype=torch.float64)
        for chance, remaining in zip(chances, keeps):
            p = p * (chance if remaining else 1 - chance)
        choices.append((p, hidden.shape[1]))
        hidden, start = hidden[:, [0, *(t for t, remaining in enumerate(keeps, start=1) if remaining)]], stop
    return choices


def test_chances_are_those_of_the_policies_and_sum_to_one(padded_inputs):
    """Each depth's ln pi is divided by the tokens of the row that are still there, as in the released code."""
    model, row = short()
    total = 0.0
    for path in selections():
        (p, n), (q, m) = chances_by_hand(model, path)
        assert (n, m) == (3, 1 + sum(path[0]))
        passed = model.through(row, forced(path))
        torch.testing.assert_close(passed.log_p, (p.log() / n + q.log() / m)[None], atol=1e-9, rtol=0)
        total += (p * q).item()
    assert total == pytest.approx(1.0) and len(list(selections())) == 9
    alone = [made().through(one, tr_bert.likely).log_p.item() for one in rows_of(padded_inputs)]
    np.testing.assert_allclose(made().through(padded_inputs, tr_bert.likely).log_p.tolist(), alone, rtol=1e-5)


def test_the_gradient_is_that_of_the_reward(monkeypatch):
    """Over all pairs of selections that may be drawn -(R - b) sum_d ln pi_d / n_d has on average the gradient of
    -R sum_d ln pi_d / n_d: the baseline changes nothing.
    """
    model, row = short()
    config, label = Config(alpha=0.7, samples=2), torch.tensor([1])
    weights = [parameter for network in model.selectors for parameter in network.parameters()]
    paths, wanted, chances = list(selections()), 0.0, []
    for path in paths:
        passed = model.through(row, forced(path))
        loss = nn.functional.cross_entropy(model.logits_of(passed), label)
        layers = (3 + (1 + sum(path[0])) + 2 * (1 + sum(path[1]))) / 3
        (p, n), (q, m) = chances_by_hand(model, path)
        chances.append((p * q).item())
        wanted = wanted - chances[-1] * (-loss.item() - 0.7 * layers / L) * (p.log() / n + q.log() / m)
    expected, total = torch.autograd.grad(wanted, weights), 0.0
    for one, other in product(range(9), repeat=2):
        monkeypatch.setattr(tr_bert, "draw", forced(paths[one], paths[other]))
        losses, of_policies = explore(model, Batch(row, label, None, None), config)
        assert losses.shape == (1, 2)
        total = total + chances[one] * chances[other] * of_policies
    for gradient, wanted in zip(torch.autograd.grad(total, weights), expected):
        torch.testing.assert_close(gradient, wanted, atol=1e-8, rtol=1e-5)


def test_the_policies_loss_teaches_policies_alone(padded_inputs):
    """In step 3, too, where all learns."""
    model = made()
    _, of_policies = explore(model, Batch(tensors(padded_inputs), torch.arange(7) % 3, None, None), Config())
    names, weights = zip(
        *((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    )
    gradients = torch.autograd.grad(of_policies, weights, allow_unused=True)
    reached = {name.split(".")[0] for name, gradient in zip(names, gradients) if gradient is not None}
    assert reached == {"selectors"}


def test_the_best_epoch_is_that_of_the_reward(padded_inputs):
    model = made()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    state = model.states(*tensors(padded_inputs))[0].detach()
    held = type("Held", (), {"batch": lambda self, rows, device: ([state], labels), "__len__": lambda self: 7})()
    result = run_through(model, padded_inputs)
    logits = result.logits.astype(np.float64)
    losses = np.logaddexp.reduce(logits, axis=1) - logits[range(7), labels]
    judged = tr_bert.held_out_reward(model, held, Config(alpha=0.5))
    assert judged["score"] == pytest.approx(np.mean(-losses - 0.5 * result.cost.depth / L), abs=1e-5)
    assert judged["mean_layers"] == pytest.approx(result.cost.depth.mean(), rel=1e-5)


# ---- ONNX ----
@pytest.mark.parametrize(("kind", "pool"), KINDS[:1] + KINDS[2:])
def test_graphs_whole_and_by_segment_answer_and_cost_as_torch_does(kind, pool, padded_inputs, tmp_path):
    model = made(kind, pool)
    manifest = write_graphs(model, model.segments(), Never(), tmp_path, segments=True)
    engines = OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)
    for inputs in (padded_inputs, *rows_of(padded_inputs)):
        expected = run_through(model, inputs)
        for engine in engines:
            result = early_exit(engine, Never(), inputs)
            np.testing.assert_allclose(result.logits, expected.logits, atol=ONNX)
            np.testing.assert_allclose(result.cost.depth, expected.cost.depth, rtol=1e-6)
            np.testing.assert_allclose(result.cost.flops, expected.cost.flops, rtol=1e-6)
    whole = early_exit(engines[0].whole(), Never(), padded_inputs)
    np.testing.assert_allclose(whole.logits, run_through(model, padded_inputs).logits, atol=ONNX)
    expected = early_exit(model.segments().whole(), Never(), padded_inputs)
    np.testing.assert_allclose(whole.cost.flops, expected.cost.flops)


# ---- On the command line ----
def test_it_is_trained_evaluated_compared_and_exported(checkpoint_folder, task_folder, tmp_path, capsys):
    def answer(*argv):
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run, data, out = tmp_path / "run", ("--task", task_folder), tmp_path / "exported"
    made = ("--model", checkpoint_folder, *data, "--out", run, "--epochs", 1, "--alpha", 5, "--policy-lr", 0.1)
    trained = answer("train", "tr-bert", *made, "--samples", 4)
    assert trained["layers_saved"] > 0.2 and trained["exits"] == [3] and trained["rule"] == {"name": "never"}
    epochs = json.loads((run / "metrics.json").read_text())["epochs"]
    assert [epoch["stage"] for epoch in epochs] == ["fine-tune", *["policies"] * 3, "everything"]
    assert load_run(run).config["settings"]["samples"] == 4
    evaluated = answer("evaluate", run, *data)
    assert evaluated["mean_layers"] == evaluated["layer_passes"] == pytest.approx(3 * (1 - evaluated["layers_saved"]))
    assert evaluated["layers_saved"] > 0.2 and evaluated["flops_ratio"] < 0.95
    (row,) = answer("compare", run, *data, "--sweep")["rows"]
    assert row["no_loss"]["layers_saved"] == pytest.approx(evaluated["layers_saved"])
    answer("export", run, "--out", out, "--segments", *data)
    exported = answer("evaluate", out, *data)
    for name in ("layers_saved", "flops_ratio", "score"):
        assert exported[name] == pytest.approx(evaluated[name])
