"""LayerSkip (Elhoushi et al. 2024): dropout, weights and curricula against the printed sums, drafts against texts."""

import math

import numpy as np
import pytest
import torch
from conftest import random_decoder

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.baselines.layer_dropout import (
    CURRICULA,
    Config,
    exit_scale,
    exit_weights,
    layer_dropout,
    layerskip_loss,
    learning,
    leaving_out,
)
from mini_ee.lab.baselines.layerskip import build
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.token_exits import SharedExits
from mini_ee.lab.rules import Never
from mini_ee.lab.training.stages import Batch

EXACT = 2e-6  # measured maximum 5e-7


def at(step, steps=100):
    return Batch((), None, None, None, step, steps)


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return SharedExits(random_decoder("llama", 5), (1, 2, 3, 4, 5)).eval()


# ---- The equations ----
@pytest.mark.parametrize("layers", [2, 5, 32])
def test_dropout_grows_with_depth_and_time_as_printed(layers):
    for ramp, steps in (("constant", 10), ("exponential", 10), ("exponential", 7)):
        config = Config(dropout=0.2, ramp=ramp)
        for t in range(steps):
            s = math.exp(t * math.log(2) / (steps - 1)) - 1 if ramp == "exponential" else 1
            for layer in range(layers):
                expected = s * (math.exp(layer * math.log(2) / (layers - 1)) - 1) * 0.2
                assert layer_dropout(layer, layers, at(t, steps), config) == pytest.approx(expected, abs=1e-15)
    assert layer_dropout(0, layers, at(steps - 1, steps), config) == 0
    assert layer_dropout(layers - 1, layers, at(steps - 1, steps), config) == pytest.approx(0.2)
    assert layer_dropout(0, 1, at(0, 1), config) == 0


def test_scales_are_the_printed_sums():
    for layers in (2, 3, 6, 24):
        for scale in (0.0, 0.2, 1.0):
            for layer in range(layers - 1):
                assert exit_scale(layer + 1, layers, scale) == pytest.approx(scale * sum(range(layer + 1)))
            assert exit_scale(layers, layers, scale) == pytest.approx(layers - 1 + scale * sum(range(layers - 1)))


def test_rotation_gives_every_exit_one_turn_in_r_steps():
    exits = tuple(range(1, 9))
    for rotation in (1, 2, 3, 7):
        config = Config(rotation=rotation)
        turns = np.array([learning(exits, at(step), config) for step in range(5, 5 + rotation)])
        assert (turns[:, :-1].sum(axis=0) == 1).all() and turns[:, -1].all()
        assert (turns[:, :-1].sum(axis=1) <= math.ceil(len(exits) / rotation)).all()
    first, second = (learning(exits, at(step), Config(rotation=4)) for step in (0, 1))
    assert first == [True, False, False, False, True, False, False, True]
    assert second[1:-1] == first[:-2]  # circular
    assert all(sum(learning(exits, at(step), Config())[:-1]) == 1 for step in range(20))


def test_the_gradual_curriculum_goes_down_a_layer_every_t_over_2l_steps():
    layers, steps = 8, 160
    for step in range(steps):
        lowest = max(1, layers - step // (steps // (2 * layers)))
        expected = [layer >= lowest for layer in range(1, layers + 1)]
        assert learning(range(1, layers + 1), at(step, steps), Config(curriculum="gradual")) == expected


def test_weights_are_those_of_the_exits_that_learn_and_sum_to_one():
    exits = (2, 4, 6, 8)
    for curriculum in CURRICULA:
        config = Config(scale=0.5, curriculum=curriculum)
        for step in range(12):
            report = [exit_scale(e, 8, 0.5) * c for e, c in zip(exits, learning(exits, at(step, 12), config))]
            expected = np.array(report) / sum(report)
            np.testing.assert_allclose(exit_weights(exits, at(step, 12), config), expected, atol=1e-15)
    assert exit_weights((1,), at(0), Config()) == [1.0]


# ---- The layers ----
def passed_by_hand(model, ids, config, batch):
    """Row by row, layer by layer, each as often passed over as was drawn; hidden states of all layers."""
    layers = model.backbone.config.num_hidden_layers
    drawn = [torch.rand(len(ids)) for _ in range(layers)]
    rows = []
    for row, row_ids in enumerate(ids):
        inputs = Tensors(row_ids[None])
        hidden, states = model.backbone.embed(inputs), []
        for layer in range(layers):
            if drawn[layer][row] >= layer_dropout(layer, layers, batch, config):
                hidden = model.backbone.run_layers(hidden, model.backbone.context(inputs), layer, layer + 1)
            states.append(hidden[0])
        rows.append(states)
    return rows


@pytest.mark.parametrize("dropout", [0.0, 0.5, 0.95])
def test_a_row_passes_over_layers_as_drawn(model, dropout):
    config, batch = Config(dropout=dropout), at(3)
    ids = torch.randint(0, 60, (6, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        expected = passed_by_hand(model, ids, config, batch)
        torch.manual_seed(5)
        states = model.states(ids, torch.ones_like(ids, dtype=bool), run=leaving_out(model.backbone, batch, config))
    for k, state in enumerate(states):
        wanted = torch.cat([row[k] for row in expected])
        torch.testing.assert_close(state, wanted, atol=1e-5, rtol=1e-5)


def test_padded_rows_pass_over_layers_with_their_padding(random_model):
    rows = random_model((2, 6))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0], [1] * 4 + [0] * 2])
    ids, types = torch.randint(5, 60, (3, 6), generator=torch.Generator().manual_seed(0)), torch.zeros(3, 6).long()
    run = leaving_out(rows.backbone, at(0), Config(dropout=0.6))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        first = rows.states(ids, mask, types, run=run)
        torch.manual_seed(1)
        second = rows.states(torch.where(mask > 0, ids, 9), mask, types, run=run)
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


def test_the_loss_is_the_weighted_sum_and_reads_only_heads_whose_turn_it_is(model, monkeypatch):
    ids = torch.randint(0, 60, (3, 6), generator=torch.Generator().manual_seed(0))
    labels, config, calls = ids.roll(-1, 1).flatten(), Config(dropout=0.0, rotation=2, scale=0.3), []
    batch = Batch((ids, torch.ones_like(ids, dtype=bool)), labels, None, None, 1, 10)
    classify = type(model).classify
    monkeypatch.setattr(type(model), "classify", lambda self, k, s: calls.append(k) or classify(self, k, s))
    with torch.no_grad():
        loss, hidden, expected = float(layerskip_loss(model, batch, config)), model.backbone.hidden_states(ids), 0.0
    assert calls == [1, 3, 4]
    weights = {2: 0.3 * 1, 4: 0.3 * 6, 5: 4 + 0.3 * 6}
    for layer, weight in weights.items():
        with torch.no_grad():
            logits = model.backbone.lm_logits(hidden[layer]).flatten(0, 1).double().numpy()
        losses = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, labels.tolist())]
        expected += weight / sum(weights.values()) * np.mean(losses)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_the_first_layer_always_runs(model):
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        run = leaving_out(model.backbone, at(0), Config(dropout=0.99))
        states = model.states(ids, torch.ones_like(ids, dtype=bool), run=run)[0]
    assert not torch.equal(states, model.backbone.embed(Tensors(ids)).flatten(0, 1))


# ---- Drafts ----
@pytest.mark.parametrize("layer", [1, 3])
def test_its_exits_draft_the_full_models_own_text_in_batches(model, layer):
    prompts = [[3, 4, 5], [7, 8], [9, 10, 11, 12]]
    full = gather(model.generate(prompts, Never(), max_new_tokens=12), 3)
    settings = {"max_new_tokens": 12, "exit_layer": layer, "head": model.heads[layer - 1]}
    drafted = gather(generate_lossless(model.backbone, prompts, **settings), 3)
    assert [text.tokens for text in drafted] == [text.tokens for text in full]
    assert {depth for text in drafted for depth in text.layers_run} <= {layer, 5}


def test_a_run_tells_what_its_exits_draft(tmp_path, decoder_checkpoint, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 6)
    monkeypatch.setattr("mini_ee.lab.training.training_text.GIVEN", 8)
    run = mini_ee.train("layerskip", decoder_checkpoint, out=tmp_path / "run", texts=8, new_tokens=4, epochs=1)
    metrics = mini_ee.lab.data.files.read_json(tmp_path / "run" / "metrics.json")
    assert (
        run.exits == (1, 2, 3) and len(metrics["drafts"]) == 2 and all(0 <= share <= 1 for share in metrics["drafts"])
    )
    (prompt,) = [run.tokenizer.backend.encode("the film").ids]
    settings = {"max_new_tokens": 6, "exit_layer": 2, "head": run.model.heads[1]}
    (drafted,) = gather(generate_lossless(run.model.backbone, [prompt], **settings), 1)
    (full,) = gather(run.model.generate([prompt], Never(), max_new_tokens=6, stop=()), 1)
    assert drafted.tokens == full.tokens


def test_rows_have_a_head_of_their_own_at_each_exit(random_model):
    made = build(random_model((2, 6)).backbone, (2, 6), 3, "mean", Config())
    assert isinstance(made, RowExits) and made.heads[0] is not made.heads[1]
