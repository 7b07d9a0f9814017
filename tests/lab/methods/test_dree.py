"""DREE: frames, branches and whole models against the equations in float64, and what the published code gets wrong."""

import math

import numpy as np
import pytest
import torch
from conftest import random_decoder, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mini_ee
from mini_ee.lab.backbones.bert import Bert, BertConfig, Layer
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.baselines import dree
from mini_ee.lab.baselines.dree import BatchNorm, Config, DreeExits, branch_loss, equiangular_frame, last_loss
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Patience, Planned, Threshold
from mini_ee.lab.training.run_folder import encode, load_run
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import train

EXITS, C, D = (1, 2, 4), 3, 24
ONNX = 1e-5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


def made(kind="bert", pool="mean", exits=EXITS, classes=C, settings=Config(bottleneck=5, scale=3.0)):
    """A model in eval mode, every parameter drawn but the frames."""
    sizes = {"hidden_size": D, "num_hidden_layers": exits[-1], "num_attention_heads": 3, "intermediate_size": 48}
    config = BertConfig(model_type=kind, vocab_size=60, max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = DreeExits(Bert(config).without_heads(), exits, classes, pool, settings).eval()
        for name, value in model.named_parameters():
            if name.endswith("variance"):
                nn.init.uniform_(value, 0.5, 2)
            elif not name.endswith("frame"):
                nn.init.normal_(value, float(name.endswith("norm.weight")), 1.0 if ".word." in name else 0.2)
    return model


def normed(x, weight, bias, eps):
    """A layer norm, on the last axis."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


class ByHand:
    """The equations in float64, a row at a time; only the embeddings are the model's."""

    def __init__(self, model):
        self.model = model
        self.weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        return normed(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-12)

    def layer(self, depth, h):
        """a and FFN(a), (T, D) each, of the layer behind h (T, D)."""
        name = f"backbone.layers.{depth % len(self.model.backbone.layers)}"
        query, key, value = np.split(self.linear(f"{name}.qkv", h), 3, axis=1)
        attended, size = [], D // 3
        for head in range(3):
            q, k, v = (projection[:, head * size : (head + 1) * size] for projection in (query, key, value))
            weights = np.exp(q @ k.T / math.sqrt(size))
            attended.append(weights / weights.sum(axis=1, keepdims=True) @ v)
        a = self.norm(f"{name}.attention_norm", h + self.linear(f"{name}.attention_output", np.hstack(attended)))
        inner = self.linear(f"{name}.up", a)
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        return a, self.linear(f"{name}.down", inner)

    def states(self, h):
        """What each exit reads of one row, (T, D): z of the inner exits, the last layer's output."""
        read_by_exits, last = [], self.model.exits[-1]
        for depth in range(last):
            a, added = self.layer(depth, h)
            h = self.norm(f"backbone.layers.{depth % len(self.model.backbone.layers)}.output_norm", added + a)
            if depth + 1 in self.model.exits[:-1]:
                branch = f"heads.{self.model.exits.index(depth + 1)}.task_branch"
                adapted = self.linear(f"{branch}.up", np.maximum(self.linear(f"{branch}.down", a), 0))
                read_by_exits.append(self.norm(f"{branch}.norm", 3 * adapted + added + a))
        return [*read_by_exits, h]

    def classify(self, k, z):
        state = z.mean(axis=0) if self.model.pool == "mean" else z[0]
        v, head = np.tanh(self.linear("pooler", state)), f"heads.{k}"
        v = (v - self.weights[f"{head}.norm.mean"]) / np.sqrt(self.weights[f"{head}.norm.variance"] + 1e-5)
        v = v * self.weights[f"{head}.norm.weight"] + self.weights[f"{head}.norm.bias"]
        return v @ self.weights[f"{head}.frame"] / math.sqrt((v**2).sum())

    def rows(self, inputs):
        """h_0 of each row without its padding, (T, D)."""
        with torch.no_grad():
            embedded = self.model.backbone.embed(inputs).double().numpy()
        return [row[:length] for row, length in zip(embedded, inputs.attention_mask.sum(axis=1))]


def by_hand(model, inputs):
    """Logits of every exit, (B, K, C)."""
    hand = ByHand(model)
    return np.array([[hand.classify(k, z) for k, z in enumerate(hand.states(row))] for row in hand.rows(inputs)])


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
def test_exits_are_the_equations_in_training_and_in_segments(kind, pool, padded_inputs):
    model = made(kind, pool)
    expected = by_hand(model, padded_inputs)
    with torch.no_grad():
        logits = torch.stack(model(*tensors(padded_inputs)), 1).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(read_every_exit(model.segments(), padded_inputs)[0], expected, atol=1e-5)


def test_a_branch_without_adapter_is_the_layer(padded_inputs):
    """W_up = 0 and LN' = LN: the exit reads what the backbone goes on with."""
    model = made()
    hidden, context = model.backbone.embed(padded_inputs), model.backbone.context(padded_inputs)
    branch = dree.TaskBranch(model.backbone.split_layer(1), Config())
    assert branch.up.weight.std().item() == pytest.approx(0.02, rel=0.1) and not branch.up.bias.any()
    nn.init.zeros_(branch.up.weight)
    with torch.no_grad():
        state = model.advance(1, model.advance(0, hidden, context), context)
        torch.testing.assert_close(branch(state), model.backbone.run_layers(hidden, context, 0, 2))


def test_every_layer_is_run_once_up_to_the_exit_and_no_branch_that_is_not_read(padded_inputs, monkeypatch):
    model, calls = made(), []
    for name in ("attend", "mlp"):

        def counted(self, *given, method=getattr(Layer, name), name=name):
            calls.append((name, list(model.backbone.layers).index(self)))
            return method(self, *given)

        monkeypatch.setattr(Layer, name, counted)
    read = dree.TaskBranch.forward
    monkeypatch.setattr(dree.TaskBranch, "forward", lambda self, x: calls.append(("read", len(x))) or read(self, x))
    result = early_exit(model.segments(), Planned((1, 2, 1, 2, 2, 2, 2)), padded_inputs)
    assert result.layers_run.tolist() == [2, 4, 2, 4, 4, 4, 4]
    layers = [[("attend", depth), ("mlp", depth)] for depth in range(4)]
    assert calls == layers[0] + layers[1] + [("read", 2)] + layers[2] + layers[3]


def test_operations_are_those_of_whole_layers_and_the_exit_that_is_read(padded_inputs):
    model = made()
    T = padded_inputs.input_ids.shape[1]
    layer, head = 2 * T * (4 * D * D + 2 * D * 48) + 4 * T * T * D, 2 * D * (D + C) + T * D
    for k, depth in enumerate(EXITS):
        flops = early_exit(model.segments(), Fixed(k), padded_inputs).cost.flops
        assert flops == pytest.approx(depth * layer + head + (4 * T * D * 5 if depth < 4 else 0))


def test_operations_are_those_that_torch_counts(padded_inputs):
    one = [tensor[1:2] for tensor in tensors(padded_inputs)]
    model, one = made(), Inputs(*map(np.asarray, one), padded_inputs.texts[1:2])
    assert one.attention_mask.all()
    for k in range(3):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            flops = early_exit(model.segments(), Fixed(k), one).cost.flops
        averaged = one.input_ids.size * D  # additions, which torch does not count
        assert flops - averaged == pytest.approx(counter.get_total_flops())


# ---- Batch norm ----
def test_batch_norm_is_torchs(padded_inputs):
    ours, theirs = BatchNorm(D), nn.BatchNorm1d(D)
    for _ in range(3):
        x = torch.randn(9, D) * 3 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.mean.data, theirs.running_mean)


def test_a_batch_of_one_row_can_be_learned_from():
    norm = BatchNorm(D)
    assert (norm(torch.ones(1, D)) != 0).all() and not norm.mean.any()


# ---- Training ----
def test_shallow_exits_weigh_most_and_the_last_one_nothing():
    losses = [torch.tensor(value) for value in (1.0, 5.0, 2.0)]
    assert branch_loss(losses, (1, 2, 4, 7)).item() == pytest.approx((6 * 1 + 5 * 5 + 3 * 2) / (6 + 5 + 3))


def test_each_stage_moves_its_own_part_and_no_frame_moves(padded_inputs):
    model = made()
    inputs = tensors(padded_inputs)
    batch = Batch(inputs, LABELS, None, model.branch_inputs(*inputs).detach())
    first, second = dree.recipe(model, Config())
    for stage in (first, second):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(stage.trainable(name)).grad = None
        stage.loss(model, batch).backward()
        moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        statistics = {name for name, _ in model.named_parameters() if name.endswith((".mean", ".variance"))}
        assert moved == {name for name, _ in model.named_parameters() if stage.trainable(name)} - statistics
        assert not [name for name in moved if name.endswith("frame")]
    assert moved and all(name.startswith(("heads.0.", "heads.1.")) for name in moved)
    assert not [name for name, _ in model.named_parameters() if first.trainable(name) and second.trainable(name)]


def test_the_first_stage_is_plain_fine_tuning_through_the_frame(padded_inputs):
    model = made()
    logits = by_hand(model, padded_inputs)[:, -1]
    expected = np.mean(np.logaddexp.reduce(logits, axis=1) - logits[range(7), LABELS])
    assert last_loss(model, Batch(tensors(padded_inputs), LABELS, None, None)).item() == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_the_second_stage_learns_from_what_the_backbone_gives_computed_once(
    pool, checkpoint_folder, task_folder, monkeypatch
):
    monkeypatch.setattr(dree, "STATES_BATCH", 16)
    task, tokenizer = load_task(task_folder), Tokenizer.from_folder(checkpoint_folder)
    model = DreeExits(load_backbone(checkpoint_folder), (1, 2, 3), 2, pool, Config()).eval()
    rows = task.split("train")
    texts = [(text.rsplit(maxsplit=number % 3)[0],) for number, (text,) in enumerate(rows.texts)]  # of three lengths
    data = RowData(encode(tokenizer, texts, model.backbone), rows.labels, task)
    stage, units = dree.recipe(model, Config())[1], np.array([58, 3, 41, 7, 0])
    inputs, labels = data.batch(units, torch.device("cpu"))
    loss = stage.loss(model, Batch(inputs, labels, None, stage.make_targets(model, data)[units]))
    losses = [nn.functional.cross_entropy(logits, labels) for logits in model(*inputs)[:-1]]
    torch.testing.assert_close(loss, (2 * losses[0] + losses[1]) / 3)


def test_norms_are_copied_with_weight_and_bias_at_every_exit():
    """The published code copies the bias at the last inner exit alone."""
    model = made()
    dree.recipe(model, Config())[0].finish(model, None)
    for layer, head in zip(EXITS[:-1], model.heads):
        norm = model.backbone.layers[layer - 1].output_norm
        branch_norm = head.task_branch.norm
        assert torch.equal(branch_norm.bias, norm.bias) and torch.equal(branch_norm.weight, norm.weight)
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
        logits.append(early_exit(run.segments(), Never(), run.encode(["the film was good"]).batch(slice(None))))
    assert (logits[0].logits == logits[1].logits).all()


def test_statistics_of_the_batch_norms_are_learned_and_the_rule_is_a_patience(run_folder):
    saved = read_tensors(run_folder / "model.safetensors")
    assert all(saved[f"heads.{k}.norm.mean"].any() for k in range(3))
    assert load_run(run_folder).config["rule"]["name"] in ("patience", "never")


def test_what_cannot_be_is_one_line(task_folder, tmp_path):
    with pytest.raises(ValueError, match="expected a backbone of post-norm layers, .* found a llama"):
        DreeExits(random_decoder("llama", 4), EXITS, C, "mean", Config())
    numbers = tmp_path / "STS-B"
    numbers.mkdir()
    rows = "".join(f"a film\ta film {row}\t{row / 5:.1f}\n" for row in range(20))
    (numbers / "train.tsv").write_text("sentence1\tsentence2\tscore\n" + rows)
    with pytest.raises(
        WrongArguments, match="dree needs the confidence or the accuracy of an exit, and STS-B is a regression"
    ):
        train("dree", None, numbers, tmp_path / "run")
    with pytest.raises(WrongArguments, match="no option head"):
        train("dree", None, task_folder, tmp_path / "run", head="linear")


# ---- ONNX ----
@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_graphs_whole_and_by_segment_are_the_equations(kind, pool, padded_inputs, tmp_path):
    model = made(kind, pool)
    hand = by_hand(model, padded_inputs)
    manifest = write_graphs(model, model.segments(), Patience(1), tmp_path, segments=True)
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        np.testing.assert_allclose(read_every_exit(engine, padded_inputs)[0], hand, atol=ONNX)
        for rule in (Patience(1), Planned((0, 1, 2, 1, 0, 2, 2)), Fixed(0), Never()):
            result, expected = (early_exit(segments, rule, padded_inputs) for segments in (engine, model.segments()))
            np.testing.assert_allclose(result.logits, hand[range(7), expected.exit_index], atol=ONNX)
            assert (result.exit_index == expected.exit_index).all()
            np.testing.assert_allclose(result.cost.flops, expected.cost.flops)


def test_rows_of_two_batches_go_on_as_one(padded_inputs, tmp_path):
    """As a server takes them: a and FFN(a) of each row are padded anew."""
    model = made()
    manifest = write_graphs(model, model.segments(), Never(), tmp_path, segments=True)
    engine, order = OrtSegments(tmp_path, manifest, threads=1), [3, 0, 2, 5]
    states = {}
    for rows in ([0, 3], [5, 2]):
        lengths = padded_inputs.attention_mask[rows].sum(axis=1)
        ids = [tensor[rows, : lengths.max()] for tensor in tensors(padded_inputs)]
        inputs = Inputs(*map(np.ascontiguousarray, ids), tuple(padded_inputs.texts[row] for row in rows))
        state = engine.advance(0, engine.start(inputs))
        states |= {row: (state, at) for at, row in enumerate(rows)}
    state = engine.joined(padded_inputs.take(np.array(order)), [states[row] for row in order])
    for k in (1, 2):
        state = engine.advance(k, state)
        np.testing.assert_allclose(engine.read(k, state), by_hand(model, padded_inputs)[order, k], atol=ONNX)


def test_an_exported_folder_runs_on_both_engines(run_folder, tmp_path):
    run, texts = load_run(run_folder), ["the film was good", "a very very awful book"]
    mini_ee.export(run, tmp_path / "out", segments=True)
    engines = [Runtime(tmp_path / "out", threads=1)]
    engines.append(Runtime(tmp_path / "out", segments=torch_segments(tmp_path / "out")))
    for rule in (run.rule, Threshold(0.55), Fixed(1)):
        expected = early_exit(run.segments(), rule, run.encode(texts).batch(slice(None)))
        for engine in engines:
            answers = engine.run(texts, rule=rule)
            np.testing.assert_allclose([answer.logits for answer in answers], expected.logits, atol=ONNX)
            assert [answer.exit for answer in answers] == [run.exits[k] for k in expected.exit_index]
