"""DREE: frames and branches against loops and numpy, and what the published code gets wrong, which is right here."""

import math

import numpy as np
import pytest
import torch
from conftest import random_decoder
from torch import nn

import mini_ee
from mini_ee import WrongArguments
from mini_ee.backbones.bert import Bert, BertConfig, Layer
from mini_ee.backbones.hub import read_tensors
from mini_ee.baselines import dree
from mini_ee.baselines.dree import BatchNorm, Config, DreeExits, branch_loss, equiangular_frame, last_loss
from mini_ee.early_exit import early_exit
from mini_ee.export.row_segments import OrtModel, OrtSegments
from mini_ee.export.runtime import Runtime
from mini_ee.export.torch_engine import torch_segments
from mini_ee.export.writer import write_graphs
from mini_ee.rules import FixedExit, NeverExit, Patience, Planned, Threshold
from mini_ee.training.fit import Batch
from mini_ee.training.run import load_run
from mini_ee.training.train import train

EXITS, C, D = (1, 2, 4), 3, 24
ONNX = 1e-5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


def made(kind="bert", pool="mean", exits=EXITS, classes=C, how=Config(bottleneck=5, scale=3.0)):
    """A model in eval mode, every parameter drawn but the frames."""
    sizes = {"hidden_size": D, "num_hidden_layers": exits[-1], "num_attention_heads": 3, "intermediate_size": 48}
    config = BertConfig(model_type=kind, vocab_size=60, max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = DreeExits(Bert(config).without_heads(), exits, classes, pool, how).eval()
        for name, value in model.named_parameters():
            if name.endswith("variance"):
                nn.init.uniform_(value, 0.5, 2)
            elif not name.endswith("frame"):
                nn.init.normal_(value, float(name.endswith("norm.weight")), 1.0 if ".word." in name else 0.2)
    return model


def tensors(inputs):
    return tuple(torch.from_numpy(each) for each in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))


def by_hand(model, inputs):
    """(B, K, C) in float64, row by row and token by token, from the attention states of one whole pass."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        attend = Layer.attend
        patch.setattr(Layer, "attend", lambda self, *given: seen.append(attend(self, *given)) or seen[-1])
        with torch.no_grad():
            last = model.backbone(*tensors(inputs)).double().numpy()
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    found = np.zeros((len(inputs), len(model.exits), model.num_labels))
    for row, k in np.ndindex(found.shape[:2]):
        head, states = f"heads.{k}.", []
        for token in range(inputs.attention_mask[row].sum() if model.pool == "mean" else 1):
            if k == len(model.exits) - 1:
                states.append(last[row, token])
                continue
            a = seen[model.exits[k] - 1][row, token].double().numpy()
            inner = weights[head + "branch.down.weight"] @ a + weights[head + "branch.down.bias"]
            outer = weights[head + "branch.up.weight"] @ np.maximum(inner, 0) + weights[head + "branch.up.bias"]
            z = 3 * outer + a
            z = (z - z.mean()) / np.sqrt(z.var() + 1e-12)
            states.append(z * weights[head + "branch.norm.weight"] + weights[head + "branch.norm.bias"])
        v = np.tanh(weights["pooler.weight"] @ np.mean(states, axis=0) + weights["pooler.bias"])
        v = (v - weights[head + "norm.mean"]) / np.sqrt(weights[head + "norm.variance"] + 1e-5)
        v = v * weights[head + "norm.weight"] + weights[head + "norm.bias"]
        found[row, k] = v @ weights[head + "frame"] / math.sqrt((v**2).sum())
    return found


# ---- The frame ----
@pytest.mark.parametrize("classes", [2, 3, 7, 24])
def test_the_vectors_of_a_frame_have_length_one_and_stand_equally_far_apart(classes):
    frame = equiangular_frame(D, classes).double().numpy()
    for one in range(classes):
        for other in range(classes):
            expected = 1 if one == other else -1 / (classes - 1)
            assert sum(frame[:, one] * frame[:, other]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("classes", "least"), [(2, 0.1269), (3, 0.3690)])
def test_no_cross_entropy_of_cosines_is_below_the_frames_own(classes, least, padded_inputs):
    bound = math.log(1 + (classes - 1) * math.exp(-classes / (classes - 1)))
    assert bound == pytest.approx(least, abs=5e-5)
    frame = equiangular_frame(D, classes)
    best = nn.functional.cross_entropy(frame.T @ frame, torch.arange(classes))
    assert best.item() == pytest.approx(bound, abs=1e-5)
    logits = torch.stack(made(classes=classes)(*tensors(padded_inputs)))
    assert logits.abs().max() <= 1 + 1e-6 and (-logits.log_softmax(-1)).min() >= bound - 1e-5


@pytest.mark.parametrize("classes", [1, D + 1])
def test_a_frame_that_cannot_be_is_refused(classes):
    with pytest.raises(ValueError, match=f"has from 2 to {D} vectors, got {classes}"):
        equiangular_frame(D, classes)


# ---- The branch ----
@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_exits_read_the_attention_of_their_layer_and_the_last_one_the_layer(kind, pool, padded_inputs):
    model = made(kind, pool)
    with torch.no_grad():
        found = torch.stack(model(*tensors(padded_inputs)), 1).numpy()
    np.testing.assert_allclose(found, by_hand(model, padded_inputs), atol=1e-5)


def test_a_branch_without_adapter_is_the_layers_norm_of_its_attention():
    layer = made().backbone.halves(0)
    branch, attended = dree.TaskBranch(layer, Config()), torch.randn(2, 5, D)
    torch.testing.assert_close(branch(attended), layer.output_norm(attended))


def test_an_exit_needs_no_feed_forward_part_of_its_own_layer(padded_inputs):
    """The published code computes it and drops it."""
    model, fed = made(), []
    expected = early_exit(model.segments(), FixedExit(1), padded_inputs).logits
    with pytest.MonkeyPatch.context() as patch:
        feed = Layer.feed
        patch.setattr(Layer, "feed", lambda self, *given: fed.append(self) or feed(self, *given))
        early_exit(model.segments(), FixedExit(1), padded_inputs)
    assert fed == [model.backbone.layers[0]]
    with torch.no_grad():
        model.backbone.layers[1].up.weight.fill_(math.nan)
    assert (early_exit(model.segments(), FixedExit(1), padded_inputs).logits == expected).all()


def test_operations_are_those_of_the_parts_that_were_run(padded_inputs):
    model = made()
    T = padded_inputs.input_ids.shape[1]
    half, rest = 2 * T * 4 * D * D + 4 * T * T * D, 2 * T * 2 * D * 48
    head = 4 * T * D * 5 + 2 * D * (D + C) + T * D
    for k, layer in enumerate(EXITS[:-1]):
        found = early_exit(model.segments(), FixedExit(k), padded_inputs).cost.flops
        assert found == pytest.approx(layer * half + (layer - 1) * rest + head)
    full = early_exit(model.segments(), NeverExit(), padded_inputs).cost.flops
    assert full == pytest.approx(4 * (half + rest) + head - 4 * T * D * 5)


# ---- Batch norm ----
def test_batch_norm_is_torchs(padded_inputs):
    own, theirs = BatchNorm(D), nn.BatchNorm1d(D)
    for _ in range(3):
        x = torch.randn(9, D) * 3 + 1
        torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(own.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(own.mean.data, theirs.running_mean)


def test_a_batch_of_one_row_can_be_learned_from():
    norm = BatchNorm(D)
    assert (norm(torch.ones(1, D)) != 0).all() and not norm.mean.any()


# ---- Training ----
def test_shallow_exits_weigh_most_and_the_last_one_nothing():
    losses = [torch.tensor(value) for value in (1.0, 5.0, 2.0)]
    assert branch_loss(losses, (1, 2, 4, 7)).item() == pytest.approx((6 * 1 + 5 * 5 + 3 * 2) / (6 + 5 + 3))


def test_each_stage_moves_its_own_part_and_no_frame_moves(padded_inputs):
    model = made()
    batch = Batch(tensors(padded_inputs), LABELS, None, None)
    first, second = dree.recipe(model, Config())
    for stage in (first, second):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(stage.learns(name)).grad = None
        stage.loss(model, batch).backward()
        moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        statistics = {name for name, _ in model.named_parameters() if name.endswith((".mean", ".variance"))}
        assert moved == {name for name, _ in model.named_parameters() if stage.learns(name)} - statistics
        assert not [name for name in moved if name.endswith("frame")]
    assert moved and all(name.startswith(("heads.0.", "heads.1.")) for name in moved)
    assert not [name for name, _ in model.named_parameters() if first.learns(name) and second.learns(name)]


def test_the_first_stage_is_plain_fine_tuning_through_the_frame(padded_inputs):
    model = made()
    logits = by_hand(model, padded_inputs)[:, -1]
    expected = np.mean(np.logaddexp.reduce(logits, axis=1) - logits[range(7), LABELS])
    assert last_loss(model, Batch(tensors(padded_inputs), LABELS, None, None)).item() == pytest.approx(
        expected, rel=1e-4
    )


def test_norms_are_copied_with_weight_and_bias_at_every_exit():
    """The published code copies the bias at the last inner exit alone."""
    model = made()
    dree.recipe(model, Config())[0].finish(model, None)
    for layer, head in zip(EXITS[:-1], model.heads):
        norm = model.backbone.layers[layer - 1].output_norm
        assert torch.equal(head.branch.norm.bias, norm.bias) and torch.equal(head.branch.norm.weight, norm.weight)
        assert norm.bias.any()


@pytest.fixture(scope="module")
def run_folder(checkpoint_folder, task_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("dree") / "run"
    train("dree", checkpoint_folder, task_folder, out, epochs=2, batch_size=16)
    return out


def test_frames_are_saved_and_do_not_hang_on_a_seed(run_folder):
    """The published code's frame is in no checkpoint."""
    saved = read_tensors(run_folder / "model.safetensors")
    logits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run = load_run(run_folder)
        for k in range(3):
            assert torch.equal(run.model.heads[k].frame, saved[f"heads.{k}.frame"])
        logits.append(early_exit(run.segments(), NeverExit(), run.encode(["the film was good"]).batch(slice(None))))
    assert (logits[0].logits == logits[1].logits).all()


def test_statistics_of_the_batch_norms_are_learned_and_the_rule_is_a_patience(run_folder):
    saved = read_tensors(run_folder / "model.safetensors")
    assert all(saved[f"heads.{k}.norm.mean"].any() for k in range(3))
    assert load_run(run_folder).config["rule"]["name"] in ("patience", "never")


def test_what_cannot_be_is_one_line(task_folder, tmp_path):
    with pytest.raises(ValueError, match="a llama has no layers that end with a norm and can be left halfway"):
        DreeExits(random_decoder("llama", 4), EXITS, C, "mean", Config())
    numbers = tmp_path / "STS-B"
    numbers.mkdir()
    rows = "".join(f"a film\ta film {row}\t{row / 5:.1f}\n" for row in range(20))
    (numbers / "train.tsv").write_text("sentence1\tsentence2\tscore\n" + rows)
    with pytest.raises(WrongArguments, match="dree asks how sure or how right an exit is, and STS-B is a regression"):
        train("dree", None, numbers, tmp_path / "run")
    with pytest.raises(WrongArguments, match="no option head"):
        train("dree", None, task_folder, tmp_path / "run", head="linear")


# ---- ONNX ----
@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_graphs_whole_and_by_segment_answer_as_torch_does(kind, pool, padded_inputs, tmp_path):
    model = made(kind, pool)
    manifest = write_graphs(model, model.segments(), Patience(1), tmp_path, segments=True)
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        for rule in (Patience(1), Planned((0, 1, 2, 1, 0, 2, 2)), FixedExit(0), NeverExit()):
            found, expected = (early_exit(each, rule, padded_inputs) for each in (engine, model.segments()))
            np.testing.assert_allclose(found.logits, expected.logits, atol=ONNX)
            assert (found.exit_index == expected.exit_index).all()
            np.testing.assert_allclose(found.cost.flops, expected.cost.flops)


def test_an_exported_folder_runs_on_both_engines(run_folder, tmp_path):
    run, texts = load_run(run_folder), ["the film was good", "a very very awful book"]
    mini_ee.export(run, tmp_path / "out", segments=True)
    engines = [Runtime(tmp_path / "out", threads=1)]
    engines.append(Runtime(tmp_path / "out", segments=torch_segments(tmp_path / "out")))
    for rule in (run.rule, Threshold(0.55), FixedExit(1)):
        expected = early_exit(run.segments(), rule, run.encode(texts).batch(slice(None)))
        for engine in engines:
            answers = engine.run(texts, rule=rule)
            np.testing.assert_allclose([each.logits for each in answers], expected.logits, atol=ONNX)
            assert [each.exit for each in answers] == expected.exit_index.tolist()


# ---- The tests can fail ----
def test_an_exit_that_reads_its_whole_layer_is_found(monkeypatch, padded_inputs):
    """Planted bug: the exit sits behind the layer."""

    def advance(self, k, hidden, around):
        return self.backbone.run_layers(hidden, around, self.exits[k - 1] if k else 0, self.exits[k])

    monkeypatch.setattr(DreeExits, "advance", advance)
    for broken in (
        lambda: test_exits_read_the_attention_of_their_layer_and_the_last_one_the_layer("bert", "mean", padded_inputs),
        lambda: test_an_exit_needs_no_feed_forward_part_of_its_own_layer(padded_inputs),
    ):
        with pytest.raises(AssertionError):
            broken()


def test_a_frame_of_orthogonal_vectors_is_found(monkeypatch):
    """Planted bug: nothing is centred."""
    monkeypatch.setitem(globals(), "equiangular_frame", lambda width, classes: torch.eye(width)[:, :classes])
    with pytest.raises(AssertionError):
        test_the_vectors_of_a_frame_have_length_one_and_stand_equally_far_apart(3)
