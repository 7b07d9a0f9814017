"""Tokens as units: which of a text count, what every exit says of them, and trainings that know nothing of text."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee.lab.exits.token_exits as tokens
import mini_ee.lab.training.training_text as texts_module
from mini_ee import load_run, train
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.baselines.sweet import cut_off
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.generation import Sampling
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import NO_LABEL, TextData, TokenExits
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Policy, Threshold
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import build_model
from mini_ee.lab.training.state import Saved
from mini_ee.lab.training.train_settings import TrainConfig

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("llama", "gemma", "phi")
ATOL = 1e-5  # float32, padded batches against texts alone, folded adapters against adapters on the side; at most 3e-6
UNEVEN = [Text([3, 1, 4, 1, 5, 9], 2), Text([2, 6]), Text([5, 3, 5, 8], 2), Text([7, 9, 3, 2, 3, 8, 4, 6], 4)]
CONFIG = TrainConfig(epochs=6, lr=5e-3, head_lr=2e-2, batch_size=4, warmup=0.0)


def model_of(kind="llama", exits=(1, 2, 3), **settings):
    """Heads and policies are drawn wide, so that exits differ and tokens leave at all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(load_backbone(GOLDEN / kind), exits, **settings)
        with torch.no_grad():
            for head in model.heads:
                head.linear.weight.normal_(std=0.3)
            for network in model.policy.networks if model.policy is not None else ():
                network[2].weight.normal_(std=3.0)
                network[2].bias.zero_()
    return model.eval()


def counting(count=24, length=10, start=2):
    """Texts that count upwards from a number below 8: what comes next is known."""
    random = np.random.default_rng(0)
    return [Text([int(first + at) % 30 for at in range(length)], start) for first in random.integers(0, 8, count)]


def alone(model, text):
    """States (T, K, D) and logits (T, K, V) of all positions of one text, from the backbone's hidden states."""
    with torch.no_grad():
        hidden = model.backbone.hidden_states(torch.tensor([text.ids]))
        states = [hidden[layer][0] for layer in model.exits]
        logits = [model.classify(k, state) for k, state in enumerate(states)]
    return torch.stack(states, dim=1), torch.stack(logits, dim=1)


# ---- Which tokens count ----


def test_tokens_behind_the_start_count_and_are_labelled_with_the_token_that_follows():
    (ids, counted), labels = TextData(UNEVEN).batch(np.array([0, 1, 3]), "cpu")
    assert ids.tolist() == [[3, 1, 4, 1, 5, 9, 0, 0], [2, 6, 0, 0, 0, 0, 0, 0], [7, 9, 3, 2, 3, 8, 4, 6]]
    places = [(row, at) for row, at in counted.nonzero().tolist()]
    assert places == [(0, 2), (0, 3), (0, 4), (1, 0), (2, 4), (2, 5), (2, 6)]
    assert labels.tolist() == [1, 5, 9, 6, 8, 4, 6]


def test_with_every_all_positions_count_and_the_last_has_no_label():
    (_, counted), labels = TextData(UNEVEN, every=True).batch(np.array([1, 2]), "cpu")
    assert counted.tolist() == [[True, True, False, False], [True] * 4]
    assert labels.tolist() == [6, NO_LABEL, 3, 5, 8, NO_LABEL]


def test_every_epoch_takes_every_text_once_in_an_order_of_its_own():
    data = TextData(counting(11))
    epochs = [list(data.order(4, seed)) for seed in (0, 1)]
    assert all(sorted(np.concatenate(epoch)) == list(range(11)) and len(epoch) == data.steps(4) for epoch in epochs)
    assert [len(rows) for rows in epochs[0]] == [4, 4, 3]
    assert np.concatenate(epochs[0]).tolist() != np.concatenate(epochs[1]).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_text_alone(kind, monkeypatch):
    monkeypatch.setattr(tokens, "TEXTS_BATCH", 2)
    model = model_of(kind)
    data = TextData(UNEVEN).states(model)
    states = [alone(model, text)[0][text.start : -1] for text in UNEVEN]
    torch.testing.assert_close(data.states, torch.cat(states), atol=ATOL, rtol=1e-5)
    assert data.labels.tolist() == [token for text in UNEVEN for token in text.ids[text.start + 1 :]]
    units = np.concatenate(list(data.order(1, seed=3)))
    assert sorted(units) == list(range(len(data))) and len(list(data.order(1, seed=3))) == data.steps(1)


def test_a_step_on_states_holds_at_least_as_many_tokens_as_a_step_is_worth(monkeypatch):
    data = TextData(counting(60)).states(model_of())
    assert data.steps(4) == 2 and [len(units) for units in data.order(4, 0)] == [210, 210]
    monkeypatch.setattr(tokens, "TOKENS_A_STEP", 3)
    assert data.steps(100) == 5 and data.steps(1) == 140


@pytest.mark.parametrize("every", [False, True])
def test_scores_are_shares_of_right_tokens_or_of_those_that_agree_with_the_last_exit(every):
    model, right = model_of(), []
    for text in UNEVEN:
        predictions = alone(model, text)[1].argmax(-1)
        for at in range(len(text.ids)) if every else range(text.start, len(text.ids) - 1):
            right.append((predictions[at] == (predictions[at, -1] if every else text.ids[at + 1])).tolist())
    scores, _ = TextData(UNEVEN, every).scores(model, batch_size=3)
    np.testing.assert_allclose(scores, np.mean(right, axis=0))


# ---- Adapters ----


def adapted(kind="llama"):
    model = model_of(kind, rank=3, alpha=6.0)
    with torch.no_grad():
        for adapter in model.adapters:
            for pair in (adapter.query, adapter.value):
                pair.B.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folded_adapters_are_w_plus_scale_times_a_b_on_query_and_value_alone(kind):
    model, before = adapted(kind), load_backbone(GOLDEN / kind)
    adapters = model.adapters
    model.fold()
    for layer, old, adapter in zip(model.backbone.layers, before.layers, adapters):
        query, key, value = old.qkv.sizes
        rows = {"query": slice(0, query), "key": slice(query, query + key), "value": slice(-value, None)}
        change = (layer.qkv.weight - old.qkv.weight).double()
        for name in ("query", "value"):
            pair = getattr(adapter, name)
            torch.testing.assert_close(change[rows[name]], 2.0 * (pair.A @ pair.B).T.double(), atol=ATOL, rtol=0)
        assert not change[rows["key"]].any()
    untouched = {name: value for name, value in before.state_dict().items() if "qkv.weight" not in name}
    assert all(torch.equal(model.backbone.state_dict()[name], value) for name, value in untouched.items())


@pytest.mark.parametrize("kind", KINDS)
def test_folding_changes_no_state_and_what_is_saved_stays(kind):
    model = adapted(kind)
    (inputs, _), weights = TextData(UNEVEN).batch(np.arange(4), "cpu"), model.own_state()
    with torch.no_grad():
        before = model.states(*inputs)
        plain = model_of(kind).states(*inputs)
        model.fold()
        after = model.states(*inputs)
    for with_adapters, without, folded in zip(before, plain, after):
        torch.testing.assert_close(with_adapters, folded, atol=ATOL, rtol=1e-5)
        assert (with_adapters - without).abs().max() > 100 * ATOL
    assert model.adapters is None and weights.keys() == model.own_state().keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.own_state().items())
    assert {name.split(".")[0] for name in weights} == {"adapters", "heads"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_is_the_decoder_and_copied_heads_are_its_lm_head(kind):
    backbone = load_backbone(GOLDEN / kind)
    model, (inputs, _) = TokenExits(load_backbone(GOLDEN / kind), (1, 2, 3), rank=2), TextData(UNEVEN).batch([0], "cpu")
    hidden = backbone.hidden_states(inputs[0])
    with torch.no_grad():
        for layer, state, logits in zip(model.exits, model.states(*inputs), model(*inputs)):
            assert torch.equal(state, hidden[layer][inputs[1]])
            torch.testing.assert_close(logits, backbone.lm_logits(state), atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"exits": (1, 2)}, "end at the last layer, 3, got 1,2"),
        ({"exits": (1, 3), "rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"exits": (1, 3), "init": "new"}, "init must be one of scratch, copy, got 'new'"),
    ],
)
def test_models_that_cannot_be_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenExits(load_backbone(GOLDEN / "llama"), **settings)


# ---- Recorded texts ----

TEXTS = [*UNEVEN, UNEVEN[2], Text(UNEVEN[3].ids, 2), *counting(3)]  # texts that are read once, and asked twice


def by_hand(model, texts=TEXTS, last=True):
    """Every token that counts, read text by text: the true logits, and what else a rule may ask for, in float64."""
    columns = {"logits": [], "answers": [], "exit_logit": [], "saturation": [], "groups": []}
    for group, text in enumerate(texts):
        states, logits = alone(model, text)
        embedded = model.backbone.embed(Tensors(torch.tensor([text.ids])))
        before = torch.cat([embedded[0, :, None], states[:, :-1]], dim=1).detach().double()
        for at in range(text.start, len(text.ids) - (not last)):
            following = text.ids[at + 1] if at + 1 < len(text.ids) else None
            log_p = logits[at].double().log_softmax(-1).numpy()
            predictions = [exit_log_p.argmax() == following for exit_log_p in log_p]
            columns["logits"].append(logits[at].numpy())
            of_label = [math.nan if following is None else exit_log_p[following] for exit_log_p in log_p]
            columns["answers"].append(list(zip(of_label, predictions)))
            cosine = torch.cosine_similarity(before[at], states[at].double(), dim=-1)
            columns["saturation"].append(cosine[:-1].tolist())
            if model.policy is not None:
                with torch.no_grad():
                    columns["exit_logit"].append(
                        [float(decide(states[at, k])) for k, decide in enumerate(model.policies)]
                    )
            columns["groups"].append(group)
    return {name: np.array(values) for name, values in columns.items()}


@pytest.mark.parametrize("kind, last", [("llama", True), ("llama", False), ("gemma", False), ("phi", True)])
def test_a_record_is_what_each_text_says_alone(kind, last):
    """However many are read together, and where several texts share what is read."""
    model = model_of(kind, policy=PolicyNetworks)
    expected = by_hand(model, last=last)
    for batch_size in (1, 3, 16):
        recorded = record_texts(model, TEXTS, batch_size, last=last)
        np.testing.assert_allclose(recorded.logits, expected["answers"], atol=ATOL, rtol=0)
        assert recorded.predictions.tolist() == expected["logits"].argmax(-1).tolist()
        assert recorded.groups.tolist() == expected["groups"].tolist()
        for name in ("exit_logit", "saturation"):
            np.testing.assert_allclose(recorded.confidence(name), expected[name], atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_is_that_of_confidence_py_on_the_logits(measure):
    model = model_of("gemma")
    logits = by_hand(model)["logits"]
    expected = np.stack([MEASURES[measure][0](logits[:, k].astype(np.float64)) for k in range(2)], axis=1)
    np.testing.assert_allclose(record_texts(model, TEXTS).confidence(measure), expected, atol=ATOL, rtol=ATOL)


def full_record(model):
    """The same tokens with their whole logits, as rows are recorded: measures are computed from these."""
    columns = by_hand(model)
    logits, passes = columns["logits"], np.diff(model.exits, prepend=0).tolist()
    handed = {name: columns[name] for name in ("exit_logit", "saturation")}
    return Record(Recorded(model.exits, logits, np.zeros((*logits.shape[:2], 2)), passes, handed), logits, 0.0)


def rules_of(record):
    """Rules of every kind; no token sits on a threshold."""

    def between(values, share):
        ordered = np.unique(values.round(3))
        at = int(share * len(ordered))
        return float(ordered[at - 1 : at + 1].mean())

    for measure in (*MEASURES, "saturation"):
        yield Threshold(between(record.confidence(measure), 0.6), measure)
    yield Threshold((math.inf, between(record.confidence("entropy")[:, 1], 0.5), -math.inf), "entropy")
    yield PatienceConfidence(2, between(record.confidence("max_probability"), 0.3), "max_probability")
    yield from (Patience(1), Policy(), Policy(0.9), Fixed(0), Fixed(1), Never())


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_replayed_on_a_record_lets_tokens_leave_as_on_their_logits(kind):
    model = model_of(kind, policy=PolicyNetworks)
    short, whole, used = record_texts(model, TEXTS), full_record(model), set()
    answers = by_hand(model)["answers"]
    for rule in rules_of(short):
        replayed, expected = short.replay(rule), early_exit(whole.segments, rule, range(len(whole.logits)))
        assert replayed.exit_index.tolist() == expected.exit_index.tolist(), rule
        assert replayed.layers_run.tolist() == [model.exits[k] for k in expected.exit_index]
        exit_index = answers[np.arange(len(answers)), expected.exit_index]
        np.testing.assert_allclose(replayed.logits, exit_index, atol=ATOL, rtol=0)
        used |= {(rule.name, k) for k in expected.exit_index.tolist()}
    for name, k in itertools.product(("threshold", "policy"), range(3)):
        assert (name, k) in used


def test_a_rule_replayed_is_the_rule_while_decoding_where_skipped_layers_are_recomputed():
    model = model_of(policy=PolicyNetworks)
    given = [Text(text.ids[: text.start + 1], text.start) for text in counting(8)]
    for rule in rules_of(record_texts(model, TEXTS)):
        written = model.write(given, rule, max_new_tokens=6, missing_kv="recompute")
        whole = [Text([*text.ids, *ending.tokens], text.start) for text, ending in zip(given, written)]
        replayed = record_texts(model, whole, last=False).replay(rule)
        assert replayed.layers_run.tolist() == [layers for ending in written for layers in ending.layers_run], rule
        assert replayed.logits[:, 1].all()  # what was written is the likeliest token of the exit


def test_texts_that_are_sampled_from_one_prompt_in_several_batches_differ():
    options = {"max_new_tokens": 8, "sampling": Sampling(temperature=1.0)}
    written = model_of().write([UNEVEN[0]] * 3, Never(), batch_size=1, **options)
    assert len({tuple(continuation.tokens) for continuation in written}) == 3
    assert written == model_of().write([UNEVEN[0]] * 3, Never(), batch_size=1, **options)


def test_a_rule_that_asks_for_a_policy_needs_one():
    with pytest.raises(ValueError, match="the rule policy needs a model with a policy, and this one has none"):
        record_texts(model_of(), UNEVEN).replay(Policy())


# ---- Training ----


def weighted_sum_by_hand(model, texts):
    """Eq. 1 of ConsistentEE over the tokens behind each text's start, with a loop, in float64."""
    sums, count = [0.0] * len(model.exits), 0
    for text in texts:
        logits = alone(model, text)[1].double().log_softmax(-1)
        for at in range(text.start, len(text.ids) - 1):
            count += 1
            for k in range(len(model.exits)):
                sums[k] -= float(logits[at, k, text.ids[at + 1]])
    return sum(depth * total / count for depth, total in zip(model.exits, sums)) / sum(model.exits)


def fitted(name, texts, folder, held=None, config=CONFIG, stages=None, rank=8, **settings):
    """A model of a method on the small golden decoder, after its first stages; and what was measured."""
    method, shape = load_method(name), {"exits": [1, 2, 3], "settings": settings, "rank": rank}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(method, "tokens", load_backbone(GOLDEN / "llama"), shape)
        recipe = list(method.recipe(model, method.config(**settings)))[:stages]
        return model, fit(model, recipe, TextData(texts), TextData(held or texts[:5]), config, Saved(folder, {})).epochs


def test_joint_training_minimises_eq_1_of_the_tokens_behind_the_start(tmp_path):
    """The first loss is that of a loop over tokens, padding left out; then it falls; the decoder's weights stay."""
    texts, begun = [*counting(3, 10), *counting(2, 6)], TokenExits(load_backbone(GOLDEN / "llama"), (1, 2, 3))
    model, (first,) = fitted("joint", texts, tmp_path / "one", config=replace(CONFIG, epochs=1, batch_size=5))
    assert first["loss"] == pytest.approx(weighted_sum_by_hand(begun, texts), abs=ATOL)
    model, history = fitted("joint", counting(), tmp_path / "more")
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    before = load_backbone(GOLDEN / "llama").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    model.fold()
    assert weighted_sum_by_hand(model, counting(4)) < 0.7 * first["loss"]


def test_consistent_and_calm_begin_from_the_model_that_joint_training_makes(tmp_path):
    given = {"stages": 1, "config": replace(CONFIG, epochs=2)}
    models = [fitted(name, counting(8), tmp_path / name, **given)[0] for name in ("joint", "consistent", "calm")]
    first, *others = ({name: v for name, v in model.own_state().items() if "policy" not in name} for model in models)
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in first.items())


def test_two_stage_heads_learn_behind_adapters_that_stay(tmp_path):
    before, _ = fitted("two-stage", counting(), tmp_path / "before", stages=1)
    after, history = fitted("two-stage", counting(), tmp_path / "after")
    state = before.own_state()
    changed = {key.split(".")[0] for key, value in after.own_state().items() if not torch.equal(value, state[key])}
    assert changed == {"heads"}
    assert [epoch["stage"] for epoch in history] == ["fine-tune"] * 6 + ["heads"] * 6
    fine_tuned, heads = history[:6], history[6:]
    assert len({epoch["exit_scores"][-1] for epoch in heads}) == 1
    assert fine_tuned[-1]["loss"] < 0.8 * fine_tuned[0]["loss"] and heads[-1]["loss"] < 0.8 * heads[0]["loss"]


def test_sweets_adapters_of_a_layer_learn_from_the_next_exit_alone():
    model = model_of(exits=(1, 3), rank=2)
    with torch.no_grad():
        for adapter in model.adapters:
            adapter.query.B.normal_()
    inputs, labels = TextData(UNEVEN).batch(np.arange(4), "cpu")
    for k, reached in ((0, {"0"}), (1, {"1", "2"})):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(*inputs, cut_off)[k], labels).backward()
        layers = {
            name.split(".")[1] for name, p in model.named_parameters() if "adapters" in name and p.grad is not None
        }
        assert layers == reached


def test_berxits_certainty_of_a_token_becomes_that_of_its_head(tmp_path):
    """Heads that are right and heads that are wrong are told apart: the module says more where the head is right."""
    config = replace(CONFIG, epochs=30)
    model, _ = fitted("berxit", [*counting(12, 10), *counting(12, 10, 4)], tmp_path, config=config)
    model.fold()
    states = TextData(counting(20)).states(model)
    with torch.no_grad():
        output = torch.stack([model.classify(k, state) for k, state in enumerate(states.states.unbind(1))], dim=1)
        certainty = model.exit_logits(list(states.states.unbind(1))).sigmoid()
    right = (output.argmax(-1) == states.labels[:, None])[:, :-1]
    assert certainty[right].mean() > certainty[~right].mean() + 0.05
    assert certainty.mean().item() == pytest.approx(right.float().mean().item(), abs=0.15)


@pytest.fixture
def small(monkeypatch):
    """Few and short texts, held out too."""
    for name, value in {"GIVEN": 5, "HELD_STORIES": 12}.items():
        monkeypatch.setattr(texts_module, name, value)
    return {"texts": 40, "new_tokens": 8, "batch_size": 8, "epochs": 2}


@pytest.mark.parametrize(
    "method, parts, rule",
    [
        ("joint", {"adapters", "heads"}, "threshold"),
        ("berxit", {"adapters", "heads", "policy"}, "policy"),
        ("consistent", {"adapters", "heads", "policy"}, "policy"),
    ],
)
def test_a_method_of_rows_trains_a_decoder_and_its_run_comes_back(
    method, parts, rule, tmp_path, decoder_checkpoint, small
):
    run = train(method, decoder_checkpoint, out=tmp_path / "run", task="continue", **small)
    saved = read_tensors(tmp_path / "run" / "model.safetensors")
    assert {name.split(".")[0] for name in saved} == parts and not (tmp_path / "run.training").exists()
    assert (run.unit, run.rule.name, run.exits) == ("tokens", rule, (1, 2, 3))
    again = load_run(tmp_path / "run")
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    given = [Text([5, 6, 7], 2)]
    assert again.model.write(given, again.rule, max_new_tokens=5) == run.model.write(given, run.rule, max_new_tokens=5)
    folded = load_backbone(decoder_checkpoint).layers[0].qkv.weight
    assert not torch.equal(again.model.backbone.layers[0].qkv.weight, folded)


def test_what_a_training_on_tokens_refuses(tmp_path, decoder_checkpoint, small):
    with pytest.raises(WrongArguments, match="expected exits before the last layer, got only 3"):
        train("joint", decoder_checkpoint, "continue", tmp_path / "run", exits=(3,), **small)
    with pytest.raises(WrongArguments, match="at least 1, got 0"):
        train("joint", decoder_checkpoint, "continue", tmp_path / "run", rank=0, **small)
    with pytest.raises(WrongArguments, match="--task pieces: joint needs labels at the end of a text"):
        train("joint", decoder_checkpoint, "pieces", tmp_path / "run", **small)
    with pytest.raises(WrongArguments, match="for a decoder continue or copy, found stories"):
        train("joint", decoder_checkpoint, "stories", tmp_path / "run", **small)
    with pytest.raises(ValueError, match="the training diverged; train again with a smaller --lr"):
        train("joint", decoder_checkpoint, "continue", tmp_path / "run", lr=1e30, head_lr=1e30, **small)
    assert not (tmp_path / "run").exists()


def test_policies_read_states_behind_the_norm_of_their_head():
    model = model_of(policy=PolicyNetworks)
    states = list(TextData(UNEVEN).states(model).states.unbind(1))
    with torch.no_grad():
        expected = [network(head.norm(x))[:, 0] for network, head, x in zip(model.policy.networks, model.heads, states)]
        torch.testing.assert_close(model.exit_logits(states), torch.stack(expected, dim=1))
