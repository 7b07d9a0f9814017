"""ConsistentEE on decoders: what is fine-tuned, how policies learn, how tokens leave, and runs on disk."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee.methods.consistent_tokens as decoder_policies
import mini_ee.training.fit_tokens as fit_tokens_module
import mini_ee.units.tokens as decoder_exits
from mini_ee.backbones.hub import load_backbone, save_backbone
from mini_ee.data.texts import Text
from mini_ee.methods.consistent import ConsistentEE
from mini_ee.methods.consistent_tokens import (
    DEFAULTS,
    ConsistentDecoder,
    all_rewards,
    held_out,
    learn,
    learn_heads,
    learn_policies,
)
from mini_ee.rules import FixedExit, NeverExit, Policy
from mini_ee.training.fit import NothingToResume, TrainConfig
from mini_ee.training.fit_tokens import fine_tune
from mini_ee.training.run_tokens import load_decoder_run, save_decoder_run
from mini_ee.units.generation import PAPER, Sampling, write
from mini_ee.units.tokens import ExitDecoder, instances

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("llama", "gemma", "phi")
ATOL = 1e-5  # float32 logits, folded adapters against adapters on the side; measured max 1.2e-6
QUICK = TrainConfig(epochs=6, lr=5e-3, head_lr=2e-2, batch_size=4, warmup=0.0)


def model_of(kind="llama", exits=(1, 2, 3), build=ConsistentDecoder, **lora):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(load_backbone(GOLDEN / kind), exits, **lora).eval()


def counting(count=24, tokens=10, start=2):
    """Texts that count upwards from a number below 8: what comes next is known."""
    random = np.random.default_rng(0)
    return [Text([int(first + at) % 30 for at in range(tokens)], start) for first in random.integers(0, 8, count)]


# ---- Step 1 ----


@pytest.mark.parametrize("kind", KINDS)
def test_folded_adapters_are_w_plus_scale_times_a_b_on_query_and_value_alone(kind):
    model, before = model_of(kind, rank=3, alpha=6.0), load_backbone(GOLDEN / kind)
    with torch.no_grad():
        for adapter in model.adapters:
            for pair in (adapter.query, adapter.value):
                pair.B.normal_()
    model.unfold()
    model.fold()
    for layer, old, adapter in zip(model.decoder.layers, before.layers, model.adapters):
        query, key, value = old.qkv.sizes
        rows = {"query": slice(0, query), "key": slice(query, query + key), "value": slice(-value, None)}
        change = (layer.qkv.weight - old.qkv.weight).double()
        torch.testing.assert_close(
            change[rows["query"]], 2.0 * (adapter.query.A @ adapter.query.B).T.double(), atol=ATOL, rtol=0
        )
        torch.testing.assert_close(
            change[rows["value"]], 2.0 * (adapter.value.A @ adapter.value.B).T.double(), atol=ATOL, rtol=0
        )
        assert not change[rows["key"]].any()
    untouched = {name: value for name, value in before.state_dict().items() if "qkv.weight" not in name}
    assert all(torch.equal(model.decoder.state_dict()[name], value) for name, value in untouched.items())


def test_a_new_model_is_the_decoder_and_its_heads_are_the_lm_head():
    model, before = model_of(), load_backbone(GOLDEN / "llama")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    model.unfold()
    model.fold()
    with torch.no_grad():
        states = before.hidden_states(ids)
        assert torch.equal(model.decoder(ids), states[-1])
        for k, layer in enumerate(model.exits):
            torch.testing.assert_close(
                model.classify(k, states[layer]), before.lm_logits(states[layer]), atol=ATOL, rtol=0
            )


def weighted_sum_by_hand(model, texts):
    """Eq. 1 over the tokens behind each text's start, with a loop, in float64."""
    sums, count = [0.0] * len(model.exits), 0
    with torch.no_grad():
        for text in texts:
            hidden = model.decoder.hidden_states(torch.tensor([text.ids]))
            for at in range(text.start, len(text.ids) - 1):
                count += 1
                for k, layer in enumerate(model.exits):
                    p = model.classify(k, hidden[layer][0, at]).double().softmax(-1)
                    sums[k] -= math.log(p[text.ids[at + 1]])
    return sum(depth * each / count for depth, each in zip(model.exits, sums)) / sum(model.exits)


def test_fine_tuning_minimises_eq_1_of_the_tokens_behind_the_start(monkeypatch):
    """The first loss is that of a loop over tokens, padding left out; then it falls; other weights stay."""
    texts = [*counting(3, 10), *counting(2, 6)]
    model, found = model_of(), []
    expected = weighted_sum_by_hand(model, texts)
    monkeypatch.setattr(
        fit_tokens_module, "step", lambda optimizer, loss, *place: found.append(loss.item()) or found[-1]
    )
    fine_tune(model, texts, replace(QUICK, epochs=1, batch_size=5))
    assert found == [pytest.approx(expected, abs=1e-5)]
    monkeypatch.undo()
    history = fine_tune(model, counting(), QUICK)
    assert len(history) == QUICK.epochs and history[-1] < 0.7 * history[0]
    assert weighted_sum_by_hand(model, counting(4)) < 0.7 * expected
    mlp = [name for name in model.decoder.state_dict() if "up" in name or "embeddings" in name]
    before = load_backbone(GOLDEN / "llama").state_dict()
    assert mlp and all(torch.equal(model.decoder.state_dict()[name], before[name]) for name in mlp)


def test_a_seed_gives_the_same_model_twice_and_both_methods_begin_from_it():
    from mini_ee.baselines.calm import CalmDecoder

    models = [model_of(), model_of(), model_of(build=CalmDecoder)]
    for model in models:
        fine_tune(model, counting(8), replace(QUICK, epochs=1))
    first, *others = (
        {k: v for k, v in model.state_dict().items() if not k.startswith(("networks", "classifier"))}
        for model in models
    )
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_a_fine_tuning_that_was_killed_and_resumed_ends_with_the_same_weights(tmp_path, monkeypatch, stop_at):
    config, whole, killed = replace(QUICK, epochs=2, batch_size=4), model_of(), model_of()
    expected, right, steps = fine_tune(whole, counting(10), config), fit_tokens_module.step, iter(range(stop_at))

    def kill(*arguments):
        next(steps)  # StopIteration: the process ends
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fit_tokens_module, "SAVE_SECONDS", -1.0)
        patch.setattr(fit_tokens_module, "step", kill)
        with pytest.raises(StopIteration):
            fine_tune(killed, counting(10), config, tmp_path)
    resumed = model_of()
    assert fine_tune(resumed, counting(10), config, tmp_path, resume=True) == expected
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_a_fine_tuning_is_resumed_with_the_settings_that_it_was_started_with(tmp_path):
    config = replace(QUICK, epochs=1)
    with pytest.raises(NothingToResume, match="no unfinished training here"):
        fine_tune(model_of(), counting(4), config, tmp_path, resume=True)
    fine_tune(model_of(), counting(4), config, tmp_path, about={"method": "calm"})
    for texts, changed, about, message in (
        (counting(4), {"lr": 0.5}, {"method": "calm"}, "was started with lr .*; resume with the same settings"),
        (counting(5), {}, {"method": "calm"}, "was started with texts [0-9a-f]{12}; resume"),
        (counting(4), {}, {"method": "consistent"}, "was started with method calm; resume"),
    ):
        with pytest.raises(ValueError, match=message):
            fine_tune(model_of(), texts, replace(config, **changed), tmp_path, resume=True, about=about)


def test_a_loss_that_is_no_number_is_told():
    model = model_of()
    with pytest.raises(ValueError, match="the training diverged; begin anew with a smaller --lr"):
        fine_tune(model, counting(8), replace(QUICK, lr=1e30, head_lr=1e30))


# ---- Instances ----


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_is_a_token_behind_the_start_with_its_states_at_every_exit(kind):
    model, texts = model_of(kind), [*counting(3, 9), *counting(2, 5)]
    found = instances(model, texts, batch_size=2)
    row = 0
    with torch.no_grad():
        for text in texts:
            hidden = model.decoder.hidden_states(torch.tensor([text.ids]))
            for at in range(text.start, len(text.ids) - 1):
                expected = torch.stack([hidden[layer][0, at] for layer in model.exits])
                torch.testing.assert_close(found.states[row], expected, atol=ATOL, rtol=1e-5)
                assert found.labels[row] == text.ids[at + 1]
                row += 1
    assert row == len(found.labels)


# ---- Steps 2 to 5 ----


@pytest.fixture(scope="module")
def tuned():
    """A fine-tuned model, with its instances: counting upwards, which the deeper exits know better."""
    model = model_of()
    fine_tune(model, counting(), QUICK)
    return model, instances(model, counting(40)), instances(model, counting(12, 8))


def copy_of(model):
    with torch.random.fork_rng():
        other = ConsistentDecoder(load_backbone(GOLDEN / "llama"), model.exits)
    other.load_state_dict(model.state_dict())
    return other.eval()


def mixed(model):
    """The same model with policies drawn wide, so that tokens leave everywhere."""
    other = copy_of(model)
    with torch.no_grad():
        for network in other.networks:
            network[2].weight.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
            network[2].bias.zero_()
    return other


@pytest.mark.parametrize("reward", ["vanilla", "hardness-guided"])
def test_the_reward_of_every_token_is_eq_3_or_4(tuned, reward):
    model, _, held = tuned
    found = all_rewards(model, held, replace(DEFAULTS, alpha=0.3, reward=reward))
    with torch.no_grad():
        for row, (states, label) in enumerate(zip(held.states, held.labels)):
            p = [model.classify(k, state).double().softmax(-1) for k, state in enumerate(states)]
            right = [each.argmax() == label for each in p]
            memorized = min((depth for k, depth in enumerate(model.exits) if all(right[k:])), default=3)
            for k, depth in enumerate(model.exits):
                price = 0.3 * (1 - memorized / 3 if reward == "hardness-guided" else 1)
                assert found[row, k].item() == pytest.approx(math.log(p[k][label]) - price * depth, abs=1e-4)


@pytest.mark.parametrize("estimator", ["reinforce", "exact"])
def test_a_high_price_of_layers_makes_all_leave_at_once_and_none_brings_what_the_losses_want(tuned, estimator):
    model, train, held = tuned
    how = replace(DEFAULTS, alpha=50.0, estimator=estimator, policy_epochs=20, policy_lr=0.02)
    dear, free = copy_of(model), copy_of(model)
    torch.manual_seed(0)
    learn_policies(dear, train, how, TrainConfig())
    assert held_out(dear, held, how)["mean_layers"] == 1.0
    how = replace(how, alpha=0.0)
    learn_policies(free, train, how, TrainConfig())
    best_fixed = max(all_rewards(free, held, how).mean(0))
    assert held_out(free, held, how)["reward"] > best_fixed - 0.05


def test_alpha_up_means_layers_down(tuned):
    """Of exits whose heads know less the earlier they are."""
    model, train, held = tuned
    depths = []
    for alpha in (0.0, 0.5, 2.0, 50.0):
        how, other = replace(DEFAULTS, alpha=alpha, estimator="exact", policy_epochs=20, policy_lr=0.02), copy_of(model)
        torch.manual_seed(0)
        with torch.no_grad():
            for head, noise in zip(other.heads, (0.6, 0.2)):
                head.linear.weight.add_(noise * torch.randn_like(head.linear.weight))
        learn_policies(other, train, how, TrainConfig())
        depths.append(held_out(other, held, how)["mean_layers"])
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[1] and depths[-1] == 1.0


def test_labels_can_be_what_the_full_model_says(tuned):
    model, _, held = tuned
    found = decoder_policies.said_by_model(model, held)
    with torch.no_grad():
        assert found.labels.tolist() == [int(model.decoder.lm_logits(states[-1]).argmax()) for states in held.states]
    assert found.labels.tolist() != held.labels.tolist() and found.states is held.states


def changed(before, model):
    return {name.split(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def test_the_policy_step_changes_policies_alone_and_the_task_step_heads_alone(tuned):
    model, train, _ = tuned
    other = copy_of(model)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    learn_policies(other, train, DEFAULTS, TrainConfig())
    assert changed(before, other) == {"networks"}
    before = {name: value.clone() for name, value in other.state_dict().items()}
    learn_heads(other, train, DEFAULTS, TrainConfig())
    assert changed(before, other) == {"heads"}


def test_a_head_at_which_no_token_leaves_learns_nothing(tuned):
    model, train, _ = tuned
    other = copy_of(model)
    with torch.no_grad():
        for k, logit in enumerate((-50.0, 50.0)):
            other.networks[k][2].weight.zero_()
            other.networks[k][2].bias.fill_(logit)
    before = [[p.clone() for p in head.parameters()] for head in other.heads]
    learn_heads(other, train, replace(DEFAULTS, task_lr=1e-3), TrainConfig(weight_decay=0.0))
    same = [all(torch.equal(a, b) for a, b in zip(old, head.parameters())) for old, head in zip(before, other.heads)]
    assert same == [True, False]


def test_rounds_end_when_the_reward_no_longer_rises_and_the_best_is_kept(tuned, monkeypatch):
    model, train, held = tuned
    rewards, kept = iter([-3.0, -2.0, -2.5, -2.1, -9.0]), []
    other = copy_of(model)

    def judged(model, held, how):
        kept.append({name: value.clone() for name, value in model.own.state_dict().items()})
        return {"reward": next(rewards), "mean_layers": 2.0}

    monkeypatch.setattr(decoder_policies, "held_out", judged)
    history = learn(other, train, held, replace(DEFAULTS, rounds=5), TrainConfig())
    assert [record["step"] for record in history] == ["policy 1", "task 1", "policy 2", "task 2"]
    assert all(torch.equal(value, kept[1][name]) for name, value in other.own.state_dict().items())


def test_held_out_leaves_at_the_first_policy_above_one_half(tuned):
    model, _, held = tuned
    how, other = replace(DEFAULTS, alpha=0.1), mixed(model)
    found, rewards = held_out(other, held, how), all_rewards(other, held, how)
    with torch.no_grad():
        p = other.exit_logits(held.states).sigmoid()
    left = [next((k for k in range(2) if row[k] > 0.5), 2) for row in p]
    assert len(set(left)) > 1
    assert found["mean_layers"] == pytest.approx(np.mean([model.exits[k] for k in left]))
    assert found["reward"] == pytest.approx(float(np.mean([rewards[row, k] for row, k in enumerate(left)])), abs=1e-5)


# ---- Writing ----


def test_a_written_token_leaves_where_its_policy_first_says_more_than_the_cut(tuned):
    """With the cache, and by the definition of state copying without one, for the first token behind a prompt."""
    model, texts = mixed(tuned[0]), counting(20, 6, 4)
    written = write(model, texts, Policy(), new_tokens=1)
    found = set()
    with torch.no_grad():
        for text, each in zip(texts, written):
            hidden = model.decoder.hidden_states(torch.tensor([text.ids[:5]]))
            states = [hidden[layer][0, -1] for layer in model.exits]
            k = next((k for k in range(2) if model.exit_logit(k, states[k]).sigmoid() > 0.5), 2)
            assert each.layers_run == [model.exits[k]]
            assert each.tokens == [int(model.classify(k, states[k]).argmax())]
            found.add(k)
    assert len(found) > 1


@pytest.mark.parametrize("sampling", [Sampling(), PAPER], ids=["greedy", "paper"])
def test_cut_1_is_the_full_model_cut_0_the_first_head_and_a_batch_is_its_rows(tuned, sampling):
    model, texts = mixed(tuned[0]), counting(6, 6, 4)
    settings = {"new_tokens": 6, "sampling": sampling, "seed": 3}
    assert write(model, texts, Policy(1.0), **settings) == write(model, texts, NeverExit(), **settings)
    assert write(model, texts, Policy(0.0), **settings) == write(model, texts, FixedExit(0), **settings)
    together = write(model, texts, Policy(), **settings)
    assert len({layer for text in together for layer in text.layers_run}) > 1
    if sampling.temperature == 0:
        assert together == write(model, texts, Policy(), **settings, batch_size=1)


def test_the_papers_decoding_settings():
    assert (PAPER.temperature, PAPER.top_k, PAPER.top_p) == (1.0, 40, 0.75)


# ---- On disk ----


@pytest.fixture()
def run_folder(tuned, tmp_path):
    (tmp_path / "backbone").mkdir()
    for file in (GOLDEN / "llama").iterdir():
        (tmp_path / "backbone" / file.name).write_bytes(file.read_bytes())
    if not (tmp_path / "backbone" / "tokenizer.json").exists():
        import tokenizers

        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
            str(tmp_path / "backbone" / "tokenizer.json")
        )
    save_decoder_run(
        tuned[0], tmp_path / "run", tmp_path / "backbone", Policy(), {"method": "consistent"}, {"history": []}
    )
    return tmp_path / "run"


MODELS = {"consistent": ConsistentDecoder}


def test_a_run_comes_back_with_the_same_weights_and_rule(tuned, run_folder):
    loaded = load_decoder_run(run_folder, MODELS)
    assert loaded.rule == Policy() and loaded.model.exits == (1, 2, 3)
    for name, value in tuned[0].state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value, atol=0, rtol=0)


def test_a_run_of_another_backbone_a_moved_one_and_damage_are_told(run_folder, tmp_path):
    other = load_backbone(GOLDEN / "llama")
    with torch.no_grad():
        other.norm.weight.add_(1)
    save_backbone(other, tmp_path / "other")
    with pytest.raises(ValueError, match="was trained on another backbone than the one in .*other"):
        load_decoder_run(run_folder, MODELS, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nothing is there; say where it is"):
        load_decoder_run(run_folder, MODELS, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="method calm, found 1 and 'consistent'"):
        load_decoder_run(run_folder, {"calm": ExitDecoder})
    (run_folder / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match="metrics.json: missing or damaged; train the run again"):
        load_decoder_run(run_folder, MODELS)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_decoder_run(tmp_path / "none", MODELS)


def test_exits_and_ranks_that_cannot_be_are_errors():
    decoder = load_backbone(GOLDEN / "llama")
    for exits, message in (((1, 2), "end at the last layer, 3"), ((3,), "expected exits before the last layer")):
        with pytest.raises(ValueError, match=message):
            ConsistentDecoder(decoder, exits)
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1, got 0"):
        ConsistentDecoder(decoder, (1, 3), rank=0)


@pytest.mark.parametrize(
    "setting, message",
    [({"alpha": -0.1}, "alpha must be a number of at least 0, got -0.1"), ({"epsilon": 1.5}, "from 0 to 1, got 1.5")],
)
def test_settings_out_of_range_are_errors(setting, message):
    with pytest.raises(ValueError, match=message):
        ConsistentEE(**setting)


# ---- The tests can fail ----


def swapped(self, weight):
    """Query and key are adapted instead of query and value."""
    parts = [(pair.A @ pair.B).T for pair in (self.query, self.value)]
    return weight + self.scale * torch.cat((*parts, parts[1].new_zeros(self.key, weight.shape[1])))


def late(model, texts):
    """The first token that counts is left out."""
    return right_forward(model, [Text(text.ids, text.start + 1) for text in texts])


right_forward = decoder_exits._forward
PLANTED = {
    "query and key adapted": (
        (decoder_exits.QueryValueAdapter, "forward", swapped),
        lambda tuned: test_folded_adapters_are_w_plus_scale_times_a_b_on_query_and_value_alone("llama"),
    ),
    "one token late": (
        (decoder_exits, "_forward", late),
        lambda tuned: test_an_instance_is_a_token_behind_the_start_with_its_states_at_every_exit("llama"),
    ),
    "the reward of the last exit": (
        (decoder_policies, "inferred_reward", lambda logits, rewards: float(rewards[:, -1].mean())),
        test_held_out_leaves_at_the_first_policy_above_one_half,
    ),
    "the policy of the next exit": (
        (ConsistentDecoder, "policies", property(lambda self: [lambda state: self.exit_logit(1, state)] * 2)),
        test_a_written_token_leaves_where_its_policy_first_says_more_than_the_cut,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_tests_can_fail(tuned, monkeypatch, name):
    planted, test = PLANTED[name]
    monkeypatch.setattr(*planted)
    with pytest.raises(AssertionError):
        test(tuned)
