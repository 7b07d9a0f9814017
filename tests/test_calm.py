"""CALM: three measures on a decoder, by the loop and by hand; the promise that a threshold keeps on whole texts."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee.baselines.calm as calm
from mini_ee.backbones.hub import load_backbone
from mini_ee.baselines.calm import MEASURES, CalmDecoder, agreement, calibrate, learn_classifier, p_value
from mini_ee.data.texts import Text
from mini_ee.early_exit import early_exit
from mini_ee.rules import FixedExit, NeverExit, Policy, Threshold
from mini_ee.training.fit import TrainConfig
from mini_ee.units.decoding import Tokens, gather
from mini_ee.units.generation import TokenSegments, generate, write
from mini_ee.units.tokens import PASSING, confidence, instances, sweep

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
ATOL = 1e-5  # float32 measures of single tokens against whole texts; measured max 5e-7


def model_of(kind="llama", exits=(1, 2, 3)):
    """Heads and classifier drawn wide, so that exits differ and tokens leave at all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CalmDecoder(load_backbone(GOLDEN / kind), exits)
        with torch.no_grad():
            for head in model.heads:
                head.linear.weight.normal_(std=0.3)
            model.classifier.weight.normal_(std=0.3)
    return model.eval()


def texts_of(count=12, tokens=9):
    random = np.random.default_rng(0)
    return [Text(random.integers(0, 40, tokens).tolist(), 2) for _ in range(count)]


def measured_by_hand(model, ids, k, measure):
    """A measure of the last token of one text, from its hidden states, in numpy."""
    with torch.no_grad():
        hidden = [states[0, -1] for states in model.decoder.hidden_states(torch.tensor([ids]))]
        state, layer = hidden[model.exits[k]], model.exits[k - 1] if k else 0
        normed = model.heads[k].norm(state)
        if measure == "saturation":
            now, before = (each.double().numpy() for each in (state, hidden[layer]))
            return now @ before / math.sqrt((now @ now) * (before @ before))
        if measure == "classifier":
            weight, bias = (parameter.detach().double().numpy() for parameter in model.classifier.parameters())
            return 1 / (1 + math.exp(-(weight[0] @ normed.double().numpy() + bias[0])))
        p = np.exp(model.heads[k](state).double().numpy())
        top = sorted(p / p.sum())
        return top[-1] - top[-2]


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi"])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_measure_of_instances_is_the_one_computed_token_by_token(kind, measure):
    model, texts = model_of(kind), texts_of(3)
    found = confidence(model, instances(model, texts), MEASURES[measure])
    expected = [
        [measured_by_hand(model, text.ids[: at + 1], k, measure) for k in range(2)]
        for text in texts
        for at in range(text.start, len(text.ids) - 1)
    ]
    np.testing.assert_allclose(found.numpy(), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_loop_reads_the_measure_of_instances(measure):
    """A token leaves in generation where its measure, computed at once over the whole text, passes the threshold."""
    model = model_of()
    rule = sweep(model, instances(model, texts_of()), MEASURES[measure])[PASSING.index(0.5)]
    policies = model.policies if measure == "classifier" else ()
    found = set()
    for prompt in (text.ids[:5] for text in texts_of()):
        steps = generate(
            model.decoder,
            [prompt],
            max_new_tokens=1,
            exits=model.exits,
            heads=model.heads,
            policies=policies,
            rule=rule,
        )
        (text,) = gather(steps, 1)
        passed = [measured_by_hand(model, prompt, k, measure) for k in range(2)]
        passed = [value > rule.cut if measure == "classifier" else value >= rule.threshold for value in passed]
        assert text.layers_run == [next((layer for layer, leaves in zip(model.exits, passed) if leaves), 3)]
        found |= set(text.layers_run)
    assert len(found) > 1


def test_a_rule_that_looks_at_states_alone_reads_no_head_before_the_exit():
    model, read = model_of(), []
    heads = [
        lambda hidden, k=k, head=head: (read.append((k, len(hidden))), head(hidden))[1]
        for k, head in enumerate(model.heads)
    ]
    for rule, policies, expected in (
        (Threshold(-1.0, "saturation"), (), [(0, 3)]),
        (Policy(0.0), model.policies, [(0, 3)]),
        (Policy(1.0), model.policies, []),
        (Threshold(1.0, "breaking_ties"), (), [(0, 3), (1, 3)]),
    ):
        read.clear()
        list(
            generate(
                model.decoder, PROMPTS, max_new_tokens=1, exits=model.exits, heads=heads, policies=policies, rule=rule
            )
        )
        assert read == expected


@pytest.mark.parametrize("measure", MEASURES)
def test_no_threshold_passed_is_the_full_model_and_all_passed_the_first_head(measure):
    model, texts, rule = model_of(), texts_of(4), MEASURES[measure]
    always = Policy(0.0) if measure == "classifier" else replace(rule, threshold=-math.inf)
    never = Policy(1.0) if measure == "classifier" else replace(rule, threshold=math.inf)
    assert write(model, texts, always, new_tokens=6) == write(model, texts, FixedExit(0), new_tokens=6)
    assert write(model, texts, never, new_tokens=6) == write(model, texts, NeverExit(), new_tokens=6)


def test_saturation_is_kept_with_the_rows_when_some_leave():
    """In a batch whose rows leave at different exits, every row goes where it goes alone."""
    model, texts = model_of(), texts_of(8)
    low, high = confidence(model, instances(model, texts), MEASURES["saturation"]).flatten().sort().values[47:49]
    rule = Threshold(float(low + high) / 2, "saturation")  # no token sits on the threshold
    together = write(model, texts, rule, new_tokens=5, batch_size=8)
    assert len({layer for text in together for layer in text.layers_run}) > 1
    assert together == write(model, texts, rule, new_tokens=5, batch_size=1)


def test_saturation_that_is_not_handed_over_and_policies_that_are_missing_are_told():
    model = model_of()
    segments = TokenSegments(model.decoder, model.exits, model.heads, "propagate", 3, 8, model.policies)
    with pytest.raises(ValueError, match="saturation is a measure of hidden states"):
        early_exit(segments, Threshold(0.5, "saturation"), Tokens.of([[1], [2], [3]]))
    with pytest.raises(ValueError, match="expected a policy for each of the 2 heads, got 1"):
        generate(
            model.decoder, [[1]], max_new_tokens=1, exits=model.exits, heads=model.heads, policies=model.policies[:1]
        )


def test_the_classifier_learns_where_exits_agree():
    """Targets that a line parts: the classifier alone changes, and finds it."""
    model, train = model_of(), instances(model_of(), texts_of(60, 16))
    with torch.no_grad():
        normed = torch.stack([head.norm(train.states[:, k]) for k, head in enumerate(model.heads)], dim=1)
    wanted = normed[..., 0] > normed[..., 1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calm, "agreement", lambda model, some: wanted)
        patch.setattr(calm, "CLASSIFIER_EPOCHS", 60)
        patch.setattr(calm, "CLASSIFIER_LR", 0.1)
        learn_classifier(model, train, TrainConfig(seed=1))
    assert ((confidence(model, train, Policy()) > 0.5) == wanted).float().mean() > 0.95
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


def test_agreement_is_that_of_the_likeliest_tokens():
    model, texts = model_of(), texts_of(2)
    with torch.no_grad():
        expected = []
        for text in texts:
            hidden = model.decoder.hidden_states(torch.tensor([text.ids]))
            for at in range(text.start, len(text.ids) - 1):
                full = model.decoder.lm_logits(hidden[3][0, at]).argmax()
                expected.append([model.heads[k](hidden[k + 1][0, at]).argmax() == full for k in range(2)])
    assert agreement(model, instances(model, texts)).tolist() == expected


# ---- Calibration ----


def test_the_p_value_bounds_the_chance_of_so_small_a_mean():
    """Bernoulli risks, the worst there are: P(mean <= m) by the exact binomial sum."""
    for count, tolerance in ((20, 0.3), (60, 0.1)):
        for lost in range(1, count):
            exact = sum(math.comb(count, i) * tolerance**i * (1 - tolerance) ** (count - i) for i in range(lost + 1))
            assert p_value(lost / count, count, tolerance) >= min(exact, 1)
    assert p_value(0.0, 20, 0.3) == pytest.approx(0.7**20)
    assert p_value(0.3, 20, 0.3) == p_value(0.9, 20, 0.3) == 1.0


def test_calibrate_stops_at_the_first_rule_that_fails():
    risks = {Policy(0.9): 0.0, Policy(0.7): 0.05, Policy(0.5): 0.4, Policy(0.3): 0.0}
    asked = []

    def risk(rule):
        asked.append(rule)
        return [risks[rule]] * 60

    assert calibrate(list(risks), risk, 0.2, 0.05) == Policy(0.7)
    assert asked == list(risks)[:3]
    assert calibrate(list(risks)[2:], risk, 0.2, 0.05) is None


def test_the_promise_is_broken_for_a_share_of_delta_of_calibration_sets_at_most():
    """Rules under which texts are lost with chance 0, .1, .2, .3, .4, and 400 calibration sets."""
    random, rules, broken = np.random.default_rng(0), [Policy(cut) for cut in (0.9, 0.8, 0.7, 0.6, 0.5)], 0
    for _ in range(400):
        chance = dict(zip(rules, (0.0, 0.1, 0.2, 0.3, 0.4)))
        kept = calibrate(rules, lambda rule: (random.random(100) < chance[rule]).astype(float), 0.2, 0.1)
        broken += kept is not None and chance[kept] > 0.2 - 1e-9
    assert broken / 400 <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 400)


def test_a_sweep_lets_these_shares_pass_the_strictest_first():
    model = model_of()
    some = instances(model, texts_of())
    for rule in MEASURES.values():
        values, rules = confidence(model, some, rule).numpy().astype(np.float64), sweep(model, some, rule)
        for each, share in zip(rules, PASSING, strict=True):
            threshold = each.cut if isinstance(rule, Policy) else each.threshold
            assert (values >= threshold).mean() == pytest.approx(share, abs=2 / values.size)


def test_the_test_of_the_promise_can_fail(monkeypatch):
    monkeypatch.setattr(calm, "p_value", lambda mean, count, tolerance: float(mean > tolerance))
    with pytest.raises(AssertionError):
        test_the_promise_is_broken_for_a_share_of_delta_of_calibration_sets_at_most()


@pytest.mark.parametrize(
    "tolerance, delta, count, message",
    [
        (0.0, 0.1, 10, "tolerance must be above 0 and below 1, got 0.0"),
        (0.1, 1.0, 10, "delta must be above 0 and below 1, got 1.0"),
        (0.1, 0.05, 28, "at least 29 are needed, got 28"),
    ],
)
def test_settings_out_of_range_and_too_few_texts_are_errors(tolerance, delta, count, message):
    with pytest.raises(ValueError, match=message):
        calibrate([Policy(0.5)], lambda rule: [0.0] * count, tolerance, delta)
