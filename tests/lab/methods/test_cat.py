"""CAT: what meta classifiers read and learn, by loops and in numpy; exits that remember what was said before."""

import numpy as np
import pytest
import torch
from conftest import tensors
from torch import nn

import mini_ee
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.baselines import cat
from mini_ee.lab.baselines.cat import (
    CatExits,
    Config,
    balanced_loss,
    features,
    held_out_loss,
    meta_loss,
    part_loss,
    parts,
)
from mini_ee.lab.calibration import calibrate_conformal
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.recording import read_every_exit, record
from mini_ee.lab.rules import Fixed, Never, Planned, Policy, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import train

EXITS, C, D = (1, 2, 3, 5, 6), 3, 24
ONNX = 1e-5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


def made(exits=EXITS, pool="mean", settings=Config()):
    """A model in eval mode whose exits differ in what they say."""
    sizes = {"hidden_size": D, "num_hidden_layers": exits[-1], "num_attention_heads": 3, "intermediate_size": 48}
    config = BertConfig(model_type="bert", vocab_size=60, max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = CatExits(Bert(config).without_heads(), exits, C, pool, settings).eval()
        for name, value in model.named_parameters():
            if name.endswith("temperature"):
                nn.init.uniform_(value, 0.5, 2)
            elif ".word." in name or not name.startswith("backbone."):
                nn.init.normal_(value, std=0.6)
    return model


def by_hand(model, inputs):
    """Logits (B, K, C) and exit_logits (B, K - 1) in float64, row by row and number by number."""
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    with torch.no_grad():
        hidden = [state.double().numpy() for state in model.backbone.hidden_states(*tensors(inputs))]
    count = len(model.exits) - 1
    logits, exit_logits = np.zeros((len(inputs), count + 1, C)), np.zeros((len(inputs), count))
    for row in range(len(inputs)):
        output, length = [], inputs.attention_mask[row].sum()
        for k, layer in enumerate(model.exits):
            head, states = f"heads.{k}.", hidden[layer][row]
            state = states[0] if model.pool == "first" else states[:length].mean(axis=0)
            inner = np.tanh(weights[head + "dense.weight"] @ state + weights[head + "dense.bias"])
            logits[row, k] = weights[head + "out.weight"] @ inner + weights[head + "out.bias"]
            if k == count:
                break
            logits[row, k] /= weights[head + "temperature"]
            p = np.exp(logits[row, k]) / np.exp(logits[row, k]).sum()
            output.append(p)
            top = int(p.argmax())
            read = [float(c == top) for c in range(C)] + inner.tolist() + [p[top], p[top] - sorted(p)[-2]]
            history = [output[j][top] for j in range(k - 1, 0, -1)]
            read += history + [0.0] * (count - 2 - len(history)) + [k / count]
            net = f"policy.networks.{k if len(model.policy.networks) > 1 else 0}."
            values = np.tanh(weights[net + "0.weight"] @ np.array(read) + weights[net + "0.bias"])
            exit_logits[row, k] = (weights[net + "2.weight"] @ values + weights[net + "2.bias"]).item()
    return logits, exit_logits


# ---- What a meta classifier reads ----
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_exits_and_meta_classifiers_are_those_of_the_paper(pool, shared, padded_inputs):
    model = made(pool=pool, settings=Config(shared=shared))
    assert len(model.policy.networks) == (1 if shared else len(EXITS) - 1)
    logits, exit_logits = by_hand(model, padded_inputs)
    read_logits, _, output = read_every_exit(model.segments(), padded_inputs)
    np.testing.assert_allclose(read_logits, logits, atol=1e-5)
    np.testing.assert_allclose(output, exit_logits, atol=1e-5)
    with torch.no_grad():
        states = model.states(*tensors(padded_inputs))
        np.testing.assert_allclose(model.exit_logits(states).numpy(), exit_logits, atol=1e-5)


@pytest.mark.parametrize("exits", [(6,), (3, 6), (2, 4, 6)])
def test_a_history_needs_three_inner_exits(exits, padded_inputs):
    if len(exits) == 1:
        with pytest.raises(ValueError, match="at least two exits to choose from, got 1"):
            made(exits)
        return
    model = made(exits)
    _, exit_logits = by_hand(model, padded_inputs)
    np.testing.assert_allclose(read_every_exit(model.segments(), padded_inputs)[2], exit_logits, atol=1e-5)


def test_what_is_carried_stays_with_its_row(padded_inputs):
    model = made()
    _, exit_logits = by_hand(model, padded_inputs)
    for cut in np.linspace(0.02, 0.98, 9):
        bar = np.log(cut / (1 - cut))
        result = early_exit(model.segments(), Policy(float(cut)), padded_inputs)
        assert result.exit_index.tolist() == [next((k for k in range(4) if row[k] > bar), 4) for row in exit_logits]
    assert len(set(result.exit_index)) > 1


def test_where_heads_are_named_no_other_is_computed(padded_inputs, monkeypatch):
    model, calls = made(), []
    inner = cat.InnerHead.inner
    monkeypatch.setattr(cat.InnerHead, "inner", lambda self, state: calls.append(self) or inner(self, state))
    early_exit(model.segments(), Never(), padded_inputs)
    early_exit(model.segments(), Fixed(2), padded_inputs)
    assert calls == [model.heads[2]]


# ---- Learning ----
def test_parts_of_train_are_apart_and_the_same_in_every_stage():
    part = parts(None, range(1000), 0.2)
    assert np.bincount(part).tolist() == [800, 100, 100] and (part == parts(None, range(1000), 0.2)).all()
    for stage in cat.recipe(made(), Config(apart=0.5)):
        np.testing.assert_array_equal(stage.make_targets(None, range(200)), cat.parts(None, range(200), 0.5))


def test_losses_count_the_rows_of_their_part_alone():
    logits = [torch.randn(7, C) for _ in range(2)]
    rows = torch.tensor([True, False, True, True, False, False, False])
    expected = [-exit_logits.double().log_softmax(1)[row, LABELS[row]] for exit_logits in logits for row in (0, 2, 3)]
    assert part_loss(logits, LABELS, rows).item() == pytest.approx(np.mean(expected), rel=1e-5)
    assert part_loss(logits, LABELS, ~rows & rows) == 0


def test_either_class_of_agreement_weighs_the_same():
    logits, agrees = torch.randn(10), torch.arange(10) < 7
    losses = [np.log1p(np.exp(-x if yes else x)) for x, yes in zip(logits.double().tolist(), agrees)]
    expected = (np.mean(losses[:7]) + np.mean(losses[7:])) / 2
    assert balanced_loss(logits, agrees).item() == pytest.approx(expected, rel=1e-5)
    assert balanced_loss(logits, agrees | True).item() == pytest.approx(
        np.mean([np.log1p(np.exp(-x)) for x in logits.tolist()]), rel=1e-5
    )


def test_meta_classifiers_learn_where_an_exit_agrees_with_the_last_and_move_nothing_else(padded_inputs):
    model = made()
    logits, exit_logits = by_hand(model, padded_inputs)
    targets = torch.tensor([2, 0, 2, 2, 1, 2, 2])
    rows = [row for row in range(7) if targets[row] == 2]
    expected = 0.0
    for k in range(4):
        agrees = torch.tensor([logits[row, k].argmax() == logits[row, 4].argmax() for row in rows])
        expected += balanced_loss(torch.from_numpy(exit_logits[rows, k]), agrees).item() / 4
    with torch.no_grad():
        states = model.states(*tensors(padded_inputs))
    loss = meta_loss(model, Batch((), LABELS, states, targets))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved == {name for name, _ in model.named_parameters() if name.startswith("policy.")}
    none = meta_loss(model, Batch((), LABELS, states, torch.zeros(7)))
    assert none.item() == 0 and none.requires_grad


def test_dropout_lies_before_the_map_to_32_and_nowhere_else_in_an_inner_exit(padded_inputs):
    head, state = made().heads[1].train(), torch.randn(7, D)
    head.dropout = nn.Dropout(1.0)
    inner = torch.tanh(head.dense.bias).expand(7, -1)
    torch.testing.assert_close(head.classify(state), head.out(inner) / head.temperature)
    head.dropout = nn.Dropout(0.0)
    torch.testing.assert_close(head.classify(state), head.eval().classify(state))


def test_meta_classifiers_learn_from_states_and_hidden_values_with_dropout(padded_inputs, monkeypatch):
    """What a dropped-out state makes an exit say is in the features, and in whether it agrees with the last."""
    model = made()
    with torch.no_grad():
        states = model.states(*tensors(padded_inputs))
    monkeypatch.setattr(cat.F, "dropout", lambda x, p, training=True: x * x.abs().gt(0.3) if training else x)
    model.policy.train()
    loss = meta_loss(model, Batch((), LABELS, states, torch.full((7,), cat.META_PART)))
    before, expected, last = None, 0.0, model.classify(4, states[4]).argmax(1)
    for k, head in enumerate(model.heads[:-1]):
        inner = torch.tanh(head.dense(states[k] * states[k].abs().gt(0.3)))
        logits = head.out(inner) / head.temperature
        read = features(logits, inner * inner.abs().gt(0.3), before, k, 4)
        expected += balanced_loss(model.policy.networks[k](read)[:, 0], logits.argmax(1) == last) / 4
        before = cat.remember(before, logits, k)
    torch.testing.assert_close(loss, expected)
    model.policy.eval()
    assert (loss - meta_loss(model, Batch((), LABELS, states, torch.full((7,), cat.META_PART)))).abs() > 1e-3


def test_each_stage_teaches_its_own_and_together_they_teach_all():
    model = made()
    stages = cat.recipe(model, Config())
    trained = [{name for name, _ in model.named_parameters() if stage.trainable(name)} for stage in stages]
    assert sum(map(len, trained)) == len(set().union(*trained)) == len(list(model.named_parameters()))
    assert all(name.startswith(("backbone.", "heads.4.")) for name in trained[0])
    assert trained[2] == {f"heads.{k}.temperature" for k in range(4)}


def test_inner_exits_may_learn_what_the_last_one_says(padded_inputs):
    model = made()
    batch = Batch(tensors(padded_inputs), LABELS, None, torch.zeros(7))
    logits, _ = by_hand(model, padded_inputs)
    for target, labels in (("label", LABELS.numpy()), ("last", logits[:, -1].argmax(axis=1))):
        losses = (
            np.logaddexp.reduce(logits, axis=2) - np.take_along_axis(logits, labels[:, None, None], axis=2)[:, :, 0]
        )
        loss = cat.inner_loss(model, batch, cat.HEADS_PART, Config(target=target))
        assert loss.item() == pytest.approx(losses[:, :-1].mean(), rel=1e-4)
        scaled = batch._replace(
            inputs=(), states=model.states(*batch.inputs), targets=torch.full((7,), cat.TEMPERATURES_PART)
        )
        (stage,) = [part for part in cat.recipe(model, Config(target=target)) if part.name == "temperatures"]
        assert stage.loss(model, scaled).item() == pytest.approx(losses[:, :-1].mean(), rel=1e-4)


@pytest.fixture(scope="module")
def run(checkpoint_folder, task_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("cat") / "run"
    return train("cat", checkpoint_folder, task_folder, out, epochs=2, batch_size=16)


def test_a_run_keeps_its_temperatures_and_takes_the_conformal_guarantee(run, task_folder):
    saved = read_tensors(run.folder / "model.safetensors")
    assert all(saved[f"heads.{k}.temperature"] != 1 for k in range(2))
    rows = [f"the {thing} was {word}" for thing in ("film", "book", "song") for word in ("good", "bad", "fine", "dull")]
    recorded = record(load_run(run.folder).segments(), run.encode(rows * 4), 16)
    rule, answer = calibrate_conformal(recorded, 0.8, "exit_logit")
    assert isinstance(rule, Policy) and answer["end_to_end"] >= 0.5 and answer["thresholds"] == [rule.cut] * 2


def test_held_out_rows_are_all_of_the_part_that_is_asked(run, monkeypatch):
    seen = []
    held = type("Held", (), {"__len__": lambda self: 3, "batch": lambda self, *a: ([torch.zeros(3, 2)], torch.ones(3))})
    held_out_loss(lambda model, batch: seen.append(batch.targets.tolist()) or 0.0, cat.META_PART, run.model, held())
    assert seen == [[2, 2, 2]]
    report = {cat.inner_loss: (cat.TEMPERATURES_PART, 3.0), cat.meta_loss: (cat.META_PART, 5.0)}

    def output(loss, part, *_):
        expected, answer = report[getattr(loss, "func", loss)]
        return answer if part == expected else None

    monkeypatch.setattr(cat, "held_out_loss", output)
    assert [stage.validate(run.model, held())["score"] for stage in cat.recipe(run.model, Config())[2:]] == [-3.0, -5.0]


def test_what_cannot_be_is_one_line(task_folder, checkpoint_folder, tmp_path):
    for settings, output in (
        ({"head": "linear"}, "no option head"),
        ({"apart": 1.0}, "apart must be a number above 0"),
    ):
        with pytest.raises(WrongArguments, match=output):
            train("cat", checkpoint_folder, task_folder, tmp_path / "run", **settings)


# ---- ONNX ----
@pytest.mark.parametrize("exits", [EXITS, (2, 6)])
@pytest.mark.parametrize("settings", [Config(), Config(shared=True)])
def test_graphs_whole_and_by_segment_answer_as_torch_does(settings, exits, padded_inputs, tmp_path):
    model = made(exits, settings=settings)
    manifest = write_graphs(model, model.segments(), Policy(), tmp_path, segments=True)
    last = len(exits) - 1
    plan = Planned(tuple(row % (last + 1) for row in range(7)))
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        for rule in (Policy(0.3), Policy(0.7), Policy(0.95), Threshold(0.6), plan, Fixed(0), Never()):
            result, expected = (early_exit(segments, rule, padded_inputs) for segments in (engine, model.segments()))
            np.testing.assert_allclose(result.logits, expected.logits, atol=ONNX)
            assert (result.exit_index == expected.exit_index).all()


def test_a_carried_value_costs_no_more_than_it_does(padded_inputs):
    model, T = made(), padded_inputs.input_ids.shape[1]
    layer, head = model.backbone.layer_flops(T), 2 * 32 * (D + C)
    meta = 2 * 32 * (C + 32 + 2 + 2 + 1 + 1)
    flops = early_exit(model.segments(), Policy(0.0), padded_inputs).cost.flops
    assert flops == pytest.approx(layer + (meta + head + 1) + (head + T * D))


def test_an_exported_folder_runs_on_both_engines(run, tmp_path):
    run, texts = load_run(run.folder), ["the film was good", "a very very awful book"]
    mini_ee.export(run, tmp_path / "out", segments=True)
    engines = [Runtime(tmp_path / "out", threads=1)]
    engines.append(Runtime(tmp_path / "out", segments=torch_segments(tmp_path / "out")))
    for rule in (run.rule, Threshold(0.55), Fixed(1)):
        expected = early_exit(run.segments(), rule, run.encode(texts).batch(slice(None)))
        for engine in engines:
            answers = engine.run(texts, rule=rule)
            np.testing.assert_allclose([answer.logits for answer in answers], expected.logits, atol=ONNX)
            assert [answer.exit for answer in answers] == [run.exits[k] for k in expected.exit_index]
