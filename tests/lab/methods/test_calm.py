"""CALM: three measures on a decoder, by the loop and by hand; the guarantee that a threshold keeps on whole texts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from method_cases import calm_model, calm_texts

import mini_ee.lab.baselines.calm as calm
from mini_ee.lab.baselines.calm import MEASURE_RULES, calibrate_texts, guaranteed_rule
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.metrics import rouge_l
from mini_ee.lab.exits.decoding import decode, gather
from mini_ee.lab.exits.generation import generate, token_segments
from mini_ee.lab.exits.row_exits import RowExits, States
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.export.row_segments import CPU
from mini_ee.lab.export.sessions import GraphRule, Session
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.token_segments import OrtTokenModel
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Fixed, Never, PatienceConfidence, Policy, Threshold, rule_from_dict
from mini_ee.lab.statistics import chernoff
from mini_ee.lab.training.default_rule import PASSING, passing
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.method import NoConfig
from mini_ee.lab.training.policies import OneForAll, agreement, held_out_loss
from mini_ee.lab.training.state import Saved
from mini_ee.lab.training.train_settings import TrainConfig

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
ATOL = 1e-5  # float32 measures of single tokens against whole texts; measured max 5e-7


def confidence(recorded, rule):
    """What the rule compares with its threshold, of every token at every exit but the last: (N, K - 1)."""
    if isinstance(rule, Policy):
        return 1 / (1 + np.exp(-recorded.confidence("exit_logit").astype(np.float64)))
    return recorded.confidence(rule.measure)


def measured_by_hand(model, ids, k, measure):
    """A measure of the last token of one text, from its hidden states, in numpy."""
    with torch.no_grad():
        hidden = [states[0, -1] for states in model.backbone.hidden_states(torch.tensor([ids]))]
        state, layer = hidden[model.exits[k]], model.exits[k - 1] if k else 0
        normed = model.heads[k].norm(state)
        if measure == "saturation":
            now, before = (hidden_state.double().numpy() for hidden_state in (state, hidden[layer]))
            return now @ before / math.sqrt((now @ now) * (before @ before))
        if measure == "classifier":
            weight, bias = (parameter.detach().double().numpy() for parameter in model.policy.linear.parameters())
            return 1 / (1 + math.exp(-(weight[0] @ normed.double().numpy() + bias[0])))
        p = np.exp(model.heads[k](state).double().numpy())
        top = sorted(p / p.sum())
        return top[-1] - top[-2]


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi"])
@pytest.mark.parametrize("measure", MEASURE_RULES)
def test_a_recorded_measure_is_the_one_computed_token_by_token(kind, measure):
    model, texts = calm_model(kind), calm_texts(3)
    confidences = confidence(record_texts(model, texts, last=False), MEASURE_RULES[measure])
    expected = [
        [measured_by_hand(model, text.ids[: at + 1], k, measure) for k in range(2)]
        for text in texts
        for at in range(text.start, len(text.ids) - 1)
    ]
    np.testing.assert_allclose(confidences, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("measure", MEASURE_RULES)
def test_the_loop_reads_the_recorded_measure(measure):
    """A token leaves in generation where its measure, computed at once over the whole text, passes the threshold."""
    model = calm_model()
    rule = passing(record_texts(model, calm_texts()), MEASURE_RULES[measure])[PASSING.index(0.5)]
    layers = set()
    for prompt in (text.ids[:5] for text in calm_texts()):
        (text,) = model.write([Text(prompt, 4)], rule, max_new_tokens=1)
        passed = [measured_by_hand(model, prompt, k, measure) for k in range(2)]
        passed = [value > rule.cut if measure == "classifier" else value >= rule.threshold for value in passed]
        assert text.layers_run == [next((layer for layer, leaves in zip(model.exits, passed) if leaves), 3)]
        layers |= set(text.layers_run)
    assert len(layers) > 1


def test_a_rule_that_looks_at_states_alone_reads_no_head_before_the_exit():
    model, read = calm_model(), []
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
                model.backbone, PROMPTS, max_new_tokens=1, exits=model.exits, heads=heads, policies=policies, rule=rule
            )
        )
        assert read == expected


@pytest.mark.parametrize("measure", MEASURE_RULES)
def test_no_threshold_passed_is_the_full_model_and_all_passed_the_first_head(measure):
    model, texts, rule = calm_model(), calm_texts(4), MEASURE_RULES[measure]
    always = Policy(0.0) if measure == "classifier" else replace(rule, threshold=-math.inf)
    never = Policy(1.0) if measure == "classifier" else replace(rule, threshold=math.inf)
    assert model.write(texts, always, max_new_tokens=6) == model.write(texts, Fixed(0), max_new_tokens=6)
    assert model.write(texts, never, max_new_tokens=6) == model.write(texts, Never(), max_new_tokens=6)


def test_saturation_is_kept_with_the_rows_when_some_leave():
    """In a batch whose rows leave at different exits, every row goes where it goes alone."""
    model, texts = calm_model(), calm_texts(8)
    low, high = np.sort(record_texts(model, texts).confidence("saturation").ravel())[55:57]
    rule = Threshold(float(low + high) / 2, "saturation")  # no token sits on the threshold
    together = model.write(texts, rule, max_new_tokens=5, batch_size=8)
    assert len({layer for text in together for layer in text.layers_run}) > 1
    assert together == model.write(texts, rule, max_new_tokens=5, batch_size=1)


@pytest.mark.parametrize("rule", [Threshold, PatienceConfidence])
def test_saturation_decides_on_both_engines_where_there_is_a_policy_too(tmp_path, rule):
    """Patience of one exit is no patience: it leaves where a threshold lets it leave."""
    model = calm_model()
    bar = float(np.median(record_texts(model, calm_texts()).confidence("saturation")))
    settings = {"threshold": bar, "measure": "saturation"} | ({"patience": 1} if rule is PatienceConfidence else {})
    rule, plain, layers = rule(**settings), Threshold(bar, "saturation"), []
    folder = tmp_path / "exported"
    folder.mkdir()
    manifest = write_graphs(model, TokenGraphs(model), rule, folder)
    graph = OrtTokenModel(
        Session(folder / "onnx/model.onnx", CPU, 1), GraphRule(folder, manifest), manifest, 3, 16, None
    )
    for segments in (token_segments(model, "copy_state", 3, 16), graph):
        with torch.inference_mode():
            written = gather(decode(segments, PROMPTS, 6, rule), 3)
        layers.append([text.layers_run for text in written])
    assert (
        layers[0]
        == layers[1]
        == [text.layers_run for text in gather(model.generate(PROMPTS, plain, max_new_tokens=6), 3)]
    )
    assert len({layer for row in layers[0] for layer in row}) > 1


def test_policies_that_are_missing_are_told():
    model = calm_model()
    with pytest.raises(ValueError, match="expected a policy for each of the 2 heads, got 1"):
        generate(
            model.backbone, [[1]], max_new_tokens=1, exits=model.exits, heads=model.heads, policies=model.policies[:1]
        )


def states_of(texts=60, length=16):
    """States of tokens of the model of these tests."""
    return TextData(calm_texts(texts, length)).states(calm_model())


def learn_classifier(model, data, folder, **settings):
    """The second stage of the recipe."""
    stage = calm.recipe(model, NoConfig())[1]
    stage = stage._replace(settings=stage.settings | settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fit(model, [stage], data, data, TrainConfig(seed=1), Saved(folder, {})).epochs


def test_the_classifier_learns_where_exits_agree(tmp_path, monkeypatch):
    """Targets that a line parts: the classifier alone changes, and finds it."""
    model, states = calm_model(), states_of()
    with torch.no_grad():
        normed = torch.stack([head.norm(states.states[:, k]) for k, head in enumerate(model.heads)], dim=1)
    wanted = (normed[..., 0] > normed[..., 1]).numpy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("mini_ee.lab.training.policies.agreement", lambda model, some: wanted)
    stage = calm.recipe(model, NoConfig())[1]
    assert stage.make_targets(model, states) is wanted  # recipe looks it up when it is called
    history = learn_classifier(model, TextData(calm_texts(60, 16)), tmp_path, epochs=30, head_lr=0.1)
    with torch.no_grad():
        logits = model.exit_logits(list(states.states.unbind(1))).numpy() > 0
    assert (logits == wanted).mean() > 0.95
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"policy.linear.weight", "policy.linear.bias"}
    assert history[-1]["score"] > history[0]["score"] and max(e["score"] for e in history) == pytest.approx(
        -held_out_loss(model, states, wanted)
    )


def test_agreement_is_that_of_the_likeliest_tokens():
    model, texts = calm_model(), calm_texts(2)
    with torch.no_grad():
        expected = []
        for text in texts:
            hidden = model.backbone.hidden_states(torch.tensor([text.ids]))
            for at in range(text.start, len(text.ids) - 1):
                full = model.backbone.lm_logits(hidden[3][0, at]).argmax()
                expected.append([model.heads[k](hidden[k + 1][0, at]).argmax() == full for k in range(2)])
    assert agreement(model, TextData(texts).states(model)).tolist() == expected


def test_of_rows_the_classifier_reads_the_pooled_state_and_learns_where_classes_agree(random_model, padded_inputs):
    """One linear map for all exits; its target is the last exit's class, whatever the label."""
    backbone = random_model().backbone
    model = RowExits(backbone, (1, 2, 4, 6), 3, policy=OneForAll).eval()
    model.heads = random_model().heads
    ids, mask, types, _ = vars(padded_inputs).values()
    inputs = [torch.from_numpy(array) for array in (ids, mask, types)]
    with torch.no_grad():
        states, logits = model.states(*inputs), model(*inputs)
        weight, bias = model.policy.linear.parameters()
        expected = torch.stack([state @ weight[0] + bias for state in states[:-1]], dim=1)
        torch.testing.assert_close(model.exit_logits(states), expected, atol=ATOL, rtol=0)
    data = States(torch.stack(states, dim=1), torch.zeros(7, dtype=torch.long), None, None)
    predictions = np.stack([exit_logits.argmax(1).numpy() for exit_logits in logits], axis=1)
    assert (agreement(model, data) == (predictions[:, :-1] == predictions[:, -1:])).all()


# ---- Calibration ----


def test_calibration_stops_at_the_first_rule_that_fails():
    risks = {Policy(0.9): 0.0, Policy(0.7): 0.05, Policy(0.5): 0.4, Policy(0.3): 0.0}
    calls = []

    def risk(rule):
        calls.append(rule)
        return [risks[rule]] * 60

    assert calibrate_texts(list(risks), risk, 0.2, 0.05) == Policy(0.7)
    assert calls == list(risks)[:3]
    assert calibrate_texts(list(risks)[2:], risk, 0.2, 0.05) is None


def test_the_default_rule_keeps_its_guarantee_on_texts_that_proposed_no_rule(monkeypatch):
    model, texts, read = calm_model(), calm_texts(40, 8), []
    monkeypatch.setattr(calm, "record_texts", lambda model, some: read.extend(some) or record_texts(model, some))
    backend = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    source = SimpleNamespace(follow=4, tokenizer=SimpleNamespace(backend=backend))

    def risk(rule):
        written, full = (model.write(tested, exit_rule, max_new_tokens=4) for exit_rule in (rule, Never()))
        pairs = [[backend.decode(text.tokens) for text in pair] for pair in zip(written, full)]
        return np.mean([1 - rouge_l(*pair) for pair in pairs])

    monkeypatch.setattr(calm, "TOLERANCE", 0.5)
    chosen = guaranteed_rule(model, source, TextData(texts))
    tested = [text for text in texts if text not in read]
    assert read and chosen.guarantee["rows"] == len(tested) == len(texts) - len(read)
    assert (chosen.guarantee["max_loss"], chosen.guarantee["confidence"]) == (0.5, 0.95)
    assert chosen.metrics["own"]["gap"] == chosen.rule.to_dict() != Never().to_dict()
    assert chernoff(risk(chosen.rule), 0.5, len(tested)) <= 0.05
    for measure, rules in chosen.metrics["sweep"].items():
        chosen_rule, rules = chosen.metrics["own"][measure], [rule_from_dict(rule) for rule in rules]
        remaining = rules.index(rule_from_dict(chosen_rule)) + 1 if chosen_rule["name"] != "never" else 0
        assert remaining == len(rules) or chernoff(risk(rules[remaining]), 0.5, len(tested)) > 0.05
    monkeypatch.setattr(calm, "calibrate_texts", lambda *_: None)  # none passes
    chosen = guaranteed_rule(model, source, TextData(texts))
    assert (chosen.rule, chosen.guarantee) == (Never(), None)


def test_the_guarantee_is_broken_for_a_share_of_delta_of_calibration_sets_at_most():
    """Rules under which texts are lost with chance 0, .1, .2, .3, .4, and 400 calibration sets."""
    random, rules, broken = np.random.default_rng(0), [Policy(cut) for cut in (0.9, 0.8, 0.7, 0.6, 0.5)], 0
    for _ in range(400):
        chance = dict(zip(rules, (0.0, 0.1, 0.2, 0.3, 0.4)))
        remaining = calibrate_texts(rules, lambda rule: (random.random(100) < chance[rule]).astype(float), 0.2, 0.1)
        broken += remaining is not None and chance[remaining] > 0.2 - 1e-9
    assert broken / 400 <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 400)


def test_a_sweep_lets_these_shares_pass_the_strictest_first():
    recorded = record_texts(calm_model(), calm_texts())
    for rule in MEASURE_RULES.values():
        values, rules = confidence(recorded, rule).astype(np.float64), passing(recorded, rule)
        for candidate, share in zip(rules, PASSING, strict=True):
            threshold = candidate.cut if isinstance(rule, Policy) else candidate.threshold
            assert (values >= threshold).mean() == pytest.approx(share, abs=2 / values.size)


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
        calibrate_texts([Policy(0.5)], lambda rule: [0.0] * count, tolerance, delta)
