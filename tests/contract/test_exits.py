"""Exit heads against numpy, where exits may stand, what RowExits's forward gives, and who gets a gradient."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import random_decoder

import mini_ee
from mini_ee.lab.backbones.backbone import padding_mask
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.heads import HEAD_DROPOUT, ExitHead, pooled
from mini_ee.lab.exits.row_exits import RowExits, check_exits, even_exits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.training.policies import OneForAll

FLOAT64_ATOL = 1e-12  # measured max 6.7e-16
ATOL = 2e-5  # float32 logits of size 7, alone or padded; measured max 1.9e-6, torch 2.13 on CPU

each_pool = pytest.mark.parametrize("pool", ["first", "mean"])

LENGTHS = (4, 1, 6, 3)


def random_head(pool, num_labels=3, width=8):
    head = ExitHead(width, num_labels, pool).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    return head


def random_hidden(rows=len(LENGTHS), tokens=max(LENGTHS), width=8):
    return torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attention_mask(lengths=LENGTHS):
    return torch.tensor([[int(t < length) for t in range(max(lengths))] for length in lengths])


# Heads


def head_by_hand(head, hidden, lengths):
    """Row by row: linear(tanh(dense(pooled))), the mean over the row's own tokens only."""
    dense, out = ((w.weight.detach().numpy(), w.bias.detach().numpy()) for w in (head.dense, head.out))
    logits = []
    for row, length in zip(hidden.numpy(), lengths):
        vector = row[0] if head.pool == "first" else sum(row[t] for t in range(length)) / length
        vector = [math.tanh(w @ vector + b) for w, b in zip(*dense)]
        logits.append([w @ np.array(vector) + b for w, b in zip(*out)])
    return np.array(logits)


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi"])
def test_on_a_decoder_an_exit_reads_the_mean_of_the_normed_states_of_each_row_alone(kind, padded_inputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = random_decoder(kind, 4)
        model = RowExits(deepcopy(whole).without_heads(), (1, 3, 4), 3).eval()
        for head in model.heads:
            for parameter in head.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
    logits, *_ = read_every_exit(model.segments(), padded_inputs)
    for row, length in enumerate(padded_inputs.attention_mask.sum(1)):
        ids = torch.from_numpy(padded_inputs.input_ids[row : row + 1, :length])
        with torch.no_grad():
            states = [state[0].double() for state in whole.hidden_states(ids)]
        for k, layer in enumerate(model.exits):
            head, state = model.heads[k], states[layer].numpy()
            weight = head.norm.weight.detach().double().numpy()
            if kind == "phi":
                state = (state - state.mean(1, keepdims=True)) / np.sqrt(state.var(1, keepdims=True) + 1e-5)
                state = state * weight + head.norm.bias.detach().numpy()
            else:
                state = state / np.sqrt((state**2).mean(1, keepdims=True) + 1e-6) * (weight + (kind == "gemma"))
            expected = head_by_hand(head, torch.from_numpy(state)[None], [length])
            np.testing.assert_allclose(logits[row, k], expected[0], rtol=0, atol=ATOL)


def test_each_exit_that_decides_reads_through_its_own_norm_in_training_as_in_use(padded_inputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RowExits(random_decoder("llama", 3).without_heads(), (1, 2, 3), 3, policy=OneForAll).eval()
        for head in model.heads:
            torch.nn.init.normal_(head.norm.weight)
    inputs = [
        torch.from_numpy(getattr(padded_inputs, name)) for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    logits, *_ = read_every_exit(model.segments(), padded_inputs)
    with torch.no_grad():
        np.testing.assert_allclose(torch.stack(model(*inputs), 1), logits, rtol=0, atol=ATOL)
        output = [
            model.heads[k].state(
                model.backbone.run_layers(
                    model.backbone.embed(padded_inputs), model.backbone.context(padded_inputs), 0, k + 1
                ),
                padding_mask(inputs[1]),
            )
            for k in range(3)
        ]
    for state, expected in zip(model.states(*inputs), output, strict=True):
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("rule", [Threshold(0.6), Fixed(1), Never()], ids=repr)
def test_rows_of_a_decoder_leave_as_they_would_alone(rule, padded_inputs):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = RowExits(random_decoder("llama", 4).without_heads(), (1, 2, 4), 3).eval()
        for head in model.heads:
            torch.nn.init.normal_(head.out.weight, std=3.0)
    result = early_exit(model.segments(), rule, padded_inputs)
    assert rule != Threshold(0.6) or len(set(result.exit_index)) > 1
    for row, length in enumerate(padded_inputs.attention_mask.sum(1)):
        one = padded_inputs.take([row])
        ids, attention, types = (array[:, :length] for array in (one.input_ids, one.attention_mask, one.token_type_ids))
        alone = early_exit(model.segments(), rule, Inputs(ids, attention, types, one.texts))
        assert alone.exit_index[0] == result.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], result.logits[row], rtol=0, atol=ATOL)


def test_the_first_token_of_a_decoder_is_no_pool():
    with pytest.raises(ValueError, match="pool must be mean for a llama, got 'first'"):
        RowExits(random_decoder("llama", 2).without_heads(), (1, 2), 3, "first")


@each_pool
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_head_is_linear_of_tanh_of_dense_of_the_pooled_vector(pool, num_labels):
    head, hidden = random_head(pool, num_labels), random_hidden()
    with torch.no_grad():
        padded = head(hidden, padding_mask(attention_mask())).numpy()
        full = head(hidden, None).numpy()
    np.testing.assert_allclose(padded, head_by_hand(head, hidden, LENGTHS), rtol=0, atol=FLOAT64_ATOL)
    np.testing.assert_allclose(full, head_by_hand(head, hidden, [6] * 4), rtol=0, atol=FLOAT64_ATOL)
    assert padded.shape == (4, num_labels)


def test_the_mean_is_over_real_tokens_only_whatever_stands_under_the_padding():
    hidden, mask = random_hidden(), padding_mask(attention_mask())
    junk = torch.where(mask[:, 0, 0, :, None], hidden, 1e6)
    torch.testing.assert_close(pooled(junk, mask, "mean"), pooled(hidden, mask, "mean"), rtol=0, atol=FLOAT64_ATOL)
    torch.testing.assert_close(pooled(hidden, mask, "mean")[1], hidden[1, 0], rtol=0, atol=FLOAT64_ATOL)


def test_the_first_token_is_the_first_token():
    hidden = random_hidden()
    assert torch.equal(pooled(hidden, padding_mask(attention_mask()), "first"), hidden[:, 0])


@each_pool
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pooling_keeps_the_dtype(pool, dtype):
    assert pooled(random_hidden().to(dtype), padding_mask(attention_mask()), pool).dtype == dtype


def test_a_new_head_has_small_weights_no_biases_and_drops_a_tenth_in_training_only():
    head = ExitHead(256, 2, "first")
    assert head.dense.bias.abs().max() == head.out.bias.abs().max() == 0
    assert head.dense.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert head.dropout.p == HEAD_DROPOUT == 0.1
    hidden = torch.randn(2, 3, 256)
    assert not torch.equal(head(hidden, None), head(hidden, None))
    head.eval()
    assert torch.equal(head(hidden, None), head(hidden, None))


# Where exits stand


@pytest.mark.parametrize(
    "num_layers, count, expected",
    [
        (12, 4, (3, 6, 9, 12)),
        (12, 3, (4, 8, 12)),
        (6, 6, (1, 2, 3, 4, 5, 6)),
        (6, 1, (6,)),
        (6, 4, (2, 3, 4, 6)),
    ],
)
def test_even_exits_of_common_models(num_layers, count, expected):
    assert even_exits(num_layers, count) == expected


def test_even_exits_are_as_many_as_asked_valid_and_as_even_as_whole_layers_allow():
    for num_layers in range(1, 41):
        for count in range(1, num_layers + 1):
            exits = even_exits(num_layers, count)
            gaps = np.diff((0, *exits))
            assert len(exits) == count and gaps.max() - gaps.min() <= 1, (num_layers, count, exits)
            assert check_exits(exits, num_layers) == exits
        assert even_exits(num_layers, num_layers + 3) == tuple(range(1, num_layers + 1))


@pytest.mark.parametrize(
    "wrong, listed",
    [
        ((3, 2, 6), "3,2,6"),
        ((2, 2, 6), "2,2,6"),
        ((2, 7), "2,7"),
        ((2, 4), "2,4"),
        ((-1, 6), "-1,6"),
        ((), "none"),
    ],
    ids=["not ascending", "twice", "beyond the last layer", "not up to the last layer", "negative", "empty"],
)
def test_exits_that_no_model_can_have_are_refused(random_model, wrong, listed):
    output = "exits must ascend from at least {} and end at the last layer, 6, got " + f"{listed}$"
    with pytest.raises(ValueError, match=output.format(1)):
        check_exits(wrong, 6)
    with pytest.raises(ValueError, match=output.format(0)):
        RowExits(random_model().backbone, wrong, 2)


@pytest.mark.parametrize("right", [(6,), (1, 6), (1, 2, 3, 4, 5, 6)])
def test_exits_that_a_model_can_have_come_back_as_they_are(right):
    assert check_exits(right, 6) == right
    assert check_exits((0, *right), 6, least=0) == (0, *right)
    with pytest.raises(ValueError, match="exits must ascend from at least 1"):
        check_exits((0, *right), 6)


@pytest.mark.parametrize("pool", ["last", "", None])
def test_an_unknown_pool_is_refused(random_model, pool):
    with pytest.raises(ValueError, match=f"pool must be first or mean for a bert, got {pool!r}"):
        RowExits(random_model().backbone, (6,), 2, pool)


# The model


def arrays(inputs):
    return [torch.from_numpy(a) for a in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]


@each_pool
@pytest.mark.parametrize("chosen, num_labels", [((6,), 3), ((1, 2, 4, 6), 3), ((1, 2, 3, 4, 5, 6), 1)])
def test_forward_gives_the_logits_of_every_exit_in_order(random_model, padded_inputs, pool, chosen, num_labels):
    logits = random_model(chosen, num_labels, pool)(*arrays(padded_inputs))
    assert [exit_logits.shape for exit_logits in logits] == [(7, num_labels)] * len(chosen)


@each_pool
def test_forward_reads_head_k_on_the_hidden_state_after_layer_e_k(random_model, padded_inputs, pool):
    """The head that is trained on layer e reads layer e: published code has been off by one here."""
    model = random_model(pool=pool)
    ids, mask, types = arrays(padded_inputs)
    with torch.no_grad():
        hidden = model.backbone.hidden_states(ids, mask, types)
        logits = model(ids, mask, types)
    for k, layer in enumerate(model.exits):
        expected = model.heads[k](hidden[layer], padding_mask(mask))
        torch.testing.assert_close(logits[k], expected, rtol=0, atol=ATOL)
        wrong = model.heads[k](hidden[layer - 1], padding_mask(mask))
        assert (logits[k] - wrong).abs().max() > 100 * ATOL


def test_in_training_dropout_is_drawn_exit_by_exit_so_that_a_seed_means_the_same(random_model, padded_inputs):
    """What an exit draws does not depend on the layers above it: scores of a seed were measured so."""
    model, (ids, mask, types) = deepcopy(random_model()).train(), arrays(padded_inputs)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        logits = model(ids, mask, types)[0]
        torch.manual_seed(3)
        hidden = model.backbone.embed(padded_inputs)
        hidden = model.backbone.run_layers(hidden, model.backbone.context(padded_inputs), 0, 1)
        torch.testing.assert_close(logits, model.heads[0](hidden, padding_mask(mask)))


@each_pool
def test_a_row_says_the_same_alone_and_in_a_padded_batch(random_model, padded_inputs, pool):
    model = random_model(pool=pool)
    with torch.no_grad():
        together = model(*arrays(padded_inputs))
        for row in range(len(padded_inputs)):
            length = padded_inputs.attention_mask[row].sum()
            alone = model(*(array[[row], :length] for array in arrays(padded_inputs)))
            for one, many in zip(alone, together):
                torch.testing.assert_close(one[0], many[row], rtol=0, atol=ATOL)


def test_heads_are_separate_and_their_names_are_those_of_a_run_on_disk(random_model):
    model = random_model()
    names = {name for name, _ in model.named_parameters() if not name.startswith("backbone.")}
    parts = ("dense.weight", "dense.bias", "out.weight", "out.bias")
    assert names == {f"heads.{k}.{part}" for k in range(4) for part in parts}
    assert len({parameter.data_ptr() for parameter in model.heads.parameters()}) == 4 * 4


# Who gets a gradient


@pytest.mark.parametrize("k", range(4))
def test_the_loss_of_exit_k_reaches_its_head_and_the_layers_up_to_e_k_alone(random_model, padded_inputs, k):
    model = random_model()
    model.zero_grad()
    model(*arrays(padded_inputs))[k].square().sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    model.zero_grad()
    expected = {
        name
        for name, _ in model.named_parameters()
        if name.startswith((f"heads.{k}.", "backbone.embeddings."))
        or any(name.startswith(f"backbone.layers.{depth}.") for depth in range(model.exits[k]))
    }
    assert reached == expected


@each_pool
def test_padding_gets_no_gradient(pool):
    hidden, mask = random_hidden().requires_grad_(), attention_mask()
    random_head(pool)(hidden, padding_mask(mask)).square().sum().backward()
    touched = hidden.grad.abs().amax(dim=2) > 0
    expected = mask.bool() if pool == "mean" else torch.arange(6) == torch.zeros(4, 1)
    assert torch.equal(touched, expected)


@pytest.mark.parametrize("method", ["joint", "lora-exits", "multi-model"])
def test_linear_heads_are_trained_kept_exported_and_read_by_both_engines(
    method, tmp_path, checkpoint_folder, task_folder
):
    options = {"epochs": 1, "exits": (1, 3), "head": "linear"}
    run = mini_ee.train(method, checkpoint_folder, task_folder, tmp_path / "run", **options)
    again = mini_ee.load_run(tmp_path / "run")
    assert run.config["head"] == again.config["head"] == "linear"
    assert not [name for name, _ in again.model.named_parameters() if ".dense." in name and "heads." in name]
    texts = ["a charming film", "a dull song that never ends"]
    mini_ee.export(again, tmp_path / "exported")
    served = Runtime(tmp_path / "exported", threads=1)
    assert again.model.head == served.config["head"] == "linear"
    in_torch = Runtime(tmp_path / "exported", segments=torch_segments(tmp_path / "exported"))
    for one, other, ours in zip(served.run(texts), in_torch.run(texts), again.classify(texts), strict=True):
        assert (one.label, one.layers) == (other.label, other.layers) == (ours.label, ours.layers)
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-5)
