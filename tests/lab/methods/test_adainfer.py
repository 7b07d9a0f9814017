"""AdaInfer: the SVM against its optimality conditions, closed forms and brute force; the rule against Threshold."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from method_cases import calm_model, calm_texts, of_exits

from mini_ee.lab.baselines.adainfer import Svm, bounds, fit_svm, right_of, svm, svm_of_texts, svms
from mini_ee.lab.cli.main import main
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Threshold, rule_from_dict
from mini_ee.lab.sweep import compared
from mini_ee.lab.training.run_folder import load_run
from mini_ee.rules import breaking_ties, max_probability

DRAWN = np.random.default_rng(0)


def drawn(count=200, share=0.3, seed=0):
    """Features of which the first tells something, and labels of which a share is 1."""
    random = np.random.default_rng(seed)
    y = np.where(random.random(count) < share, 1.0, -1.0)
    top = np.clip(random.normal(0.7 + 0.1 * y, 0.15), 0.34, 1)
    gap = np.clip(top - random.uniform(0, 0.6, count) * (1 - top), 0, 1)
    return np.stack((gap, top, np.ones(count)), 1), y


def primal(w, x, y, bound):
    """|w|^2 / 2 + sum bound max(0, 1 - y w.x), by a loop."""
    return sum(a * a for a in w) / 2 + sum(b * max(0.0, 1 - t * (w @ row)) for row, t, b in zip(x, y, bound))


# ---- The solver ----
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("cost", [1.0, 10.0, 100.0])
def test_the_svm_meets_the_conditions_of_its_optimum(share, cost):
    x, y = drawn(share=share)
    w, alpha = fit_svm(x, y, cost)
    bound = bounds(y, cost)
    assert (alpha >= 0).all() and (alpha <= bound).all()
    np.testing.assert_allclose(w, (alpha * y) @ x, atol=1e-9)
    dual = alpha.sum() - w @ w / 2
    assert -1e-9 <= primal(w, x, y, bound) - dual <= 1e-4 * dual
    slack = 1 - y * (x @ w)
    assert not ((alpha < bound * 0.99) & (slack > 0.02)).any()  # short of the margin: all of its weight
    assert not ((alpha > bound * 0.01) & (slack < -0.02)).any()  # beyond it: none
    random = np.random.default_rng(1)
    best = primal(w, x, y, bound)
    for _ in range(300):
        assert primal(w + random.normal(0, 0.1, 3), x, y, bound) >= best * (1 - 1e-4)


def test_two_points_have_a_closed_form():
    """Where nothing limits alpha, both lie on the margin: y_i w.x_i = 1 with w in their span."""
    x, y = np.array([[0.9, 0.95, 1.0], [0.1, 0.5, 1.0]]), np.array([1.0, -1.0])
    gram = (x * y[:, None]) @ (x * y[:, None]).T
    expected = np.linalg.solve(gram, np.ones(2)) @ (x * y[:, None])
    w, _ = fit_svm(x, y, 1e4)
    np.testing.assert_allclose(w, expected, rtol=1e-3)


def test_each_class_has_half_of_the_weight_however_rare_it_is():
    y = np.array([1.0] * 2 + [-1.0] * 98)
    weights = bounds(y, 10.0)
    assert weights[y > 0].sum() == pytest.approx(5) and weights[y < 0].sum() == pytest.approx(5)
    x, y = drawn(1000, share=0.03)
    w, _ = fit_svm(x, y)
    output = x @ w > 0
    assert output[y > 0].mean() > 0.5  # unbalanced, nobody would be said to be right


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_an_exit_is_always_right_all_leave_and_where_it_never_is_nobody(sign):
    x, _ = drawn()
    w, _ = fit_svm(x, np.full(len(x), sign))
    assert (sign * (x @ w) > 0).all()


# ---- The rule ----
def test_of_two_classes_it_is_a_threshold_on_the_largest_probability():
    last = DRAWN.normal(size=(300, 1, 2)) * 2
    recorded = of_exits(last + DRAWN.normal(size=(300, 4, 2)) * np.array([2.0, 1.5, 1.0, 0.0])[:, None])
    rule = svm(recorded, right_of(recorded)["final"])
    at = []
    for k in range(3):  # gap = 2 top - 1
        slope = 2 * rule.gap[k] + rule.top[k]
        assert slope > 0
        at.append(float(np.clip((rule.gap[k] - rule.bias[k]) / slope, 0, 1)))
    expected, exit_index = (recorded.replay(exit_rule).exit_index for exit_rule in (Threshold((*at, 0.0)), rule))
    assert (expected == exit_index).all() and len(set(exit_index)) > 2


def left_at(rule, logits):
    """The first exit with a decision above the margin, unit by unit."""
    exit_index = []
    for row in logits:
        p = [np.sort(np.exp(exit_logits) / np.exp(exit_logits).sum())[::-1] for exit_logits in row]
        values = [rule.gap[k] * (q[0] - q[1]) + rule.top[k] * q[0] + rule.bias[k] for k, q in enumerate(p[:-1])]
        exit_index.append(next((k for k, value in enumerate(values) if value > rule.margin), len(values)))
    return exit_index


@pytest.mark.parametrize("margin", [-np.inf, -0.5, 0.0, 0.4, np.inf])
def test_a_unit_leaves_at_the_first_exit_whose_decision_is_above_the_margin(margin):
    logits = DRAWN.normal(size=(60, 4, 3)) * 2
    rule = Svm((1.0, 2.0, 0.5), (0.5, -1.0, 3.0), (-1.0, -0.2, -2.0), margin)
    assert of_exits(logits).replay(rule).exit_index.tolist() == left_at(rule, logits)
    assert rule_from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


def test_the_rule_fits_a_model_with_as_many_exits():
    with pytest.raises(ValueError, match="expected 2 classifiers, one for each exit but the last, got 1"):
        Svm((1.0,), (1.0,), (1.0,)).check(3)
    with pytest.raises(ValueError, match="equally many of each"):
        Svm((1.0,), (1.0, 2.0), (1.0,))


# ---- What it is fitted to ----
def test_right_is_of_the_label_or_of_the_last_exit_and_without_labels_of_the_last_alone():
    logits = DRAWN.normal(size=(40, 3, 3))
    labels, recorded = DRAWN.integers(0, 3, 40), of_exits(logits)
    assert right_of(recorded).keys() == {"final"}
    correct = right_of(recorded._replace(labels=labels))
    for row in range(40):
        for k in range(2):
            prediction = logits[row, k].argmax()
            assert correct["gold"][row, k] == (prediction == labels[row])
            assert correct["final"][row, k] == (prediction == logits[row, 2].argmax())
    some = recorded._replace(labels=labels).take(np.arange(5))
    assert (some.labels == labels[:5]).all()


def test_of_tokens_the_rule_is_that_of_the_token_that_follows():
    texts = calm_texts(30)
    recorded = record_texts(calm_model(), texts, last=False)
    correct, at = right_of(recorded), 0
    model = calm_model()
    for text in texts:
        with torch.no_grad():
            states = model.backbone.hidden_states(torch.tensor([text.ids]))
        for position in range(text.start, len(text.ids) - 1):
            predictions = [int(model.heads[k](states[k + 1][0, position]).argmax()) for k in range(2)]
            assert correct["gold"][at].tolist() == [token == text.ids[position + 1] for token in predictions]
            at += 1
    assert at == len(correct["gold"]) and (correct["gold"] != correct["final"]).any()
    chosen = svm_of_texts(model, None, TextData(texts))
    assert chosen.rule == svm(recorded, correct["gold"]) != svm(recorded, correct["final"])


def test_candidates_are_the_svms_as_they_are_and_with_other_margins():
    logits = DRAWN.normal(size=(80, 4, 3))
    recorded = of_exits(logits)._replace(labels=DRAWN.integers(0, 3, 80))
    rules = svms(recorded)
    assert [rule.margin for rule in rules[:2]] == [0.0, 0.0] and {type(rule) for rule in rules} == {Svm}
    layers = [recorded.replay(rule).layers_run.mean() for rule in rules]
    assert min(layers) < 1.1 and max(layers) > 3.5
    for k in range(3):
        gap, top = breaking_ties(logits[:, k]), max_probability(logits[:, k])
        expected = rules[0].gap[k] * gap + rules[0].top[k] * top + rules[0].bias[k]
        np.testing.assert_allclose(compared(rules[0], recorded)[:, k], expected)
    assert svms(of_exits(np.zeros((5, 1, 2)))) == []


# ---- ONNX ----
def test_one_graph_and_segments_leave_where_torch_leaves(random_model, padded_inputs, tmp_path):
    model = random_model()
    rule = Svm((1.0, 2.0, 0.5), (0.5, 1.0, 3.0), (-1.1, -1.8, -2.0), 0.05)
    manifest = write_graphs(model, model.segments(), rule, tmp_path, segments=True)
    left = set()
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        for margin in (-np.inf, -0.3, 0.05, 0.3, np.inf):
            rule_of_margin = Svm(rule.gap, rule.top, rule.bias, margin)
            expected, result = (early_exit(one, rule_of_margin, padded_inputs) for one in (model.segments(), engine))
            assert result.exit_index.tolist() == expected.exit_index.tolist()
            np.testing.assert_allclose(result.logits, expected.logits, rtol=0, atol=1e-5)
            left |= set(expected.exit_index.tolist())
    assert len(left) > 2


# ---- On the command line ----
def test_it_is_trained_evaluated_compared_and_exported(checkpoint_folder, task_folder, tmp_path, capsys):
    def answer(*argv):
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run, data = tmp_path / "run", ("--task", task_folder)
    answer("train", "adainfer", "--model", checkpoint_folder, *data, "--out", run, "--epochs", 1, "--lr", 1e-3)
    assert load_run(run).rule.name in ("adainfer", "never")
    assert answer("evaluate", run, *data)["layers_saved"] >= 0
    (row,) = answer("compare", run, *data, "--sweep")["rows"]
    assert {point["rule"]["name"] for point in row["curve"]} == {"never", "adainfer"}
    assert answer("export", run, "--out", tmp_path / "exported", *data)["verified"]["exit_agreement"] == 1.0


def test_the_rule_takes_in_the_scale_of_the_measures_and_does_not_say_yes_to_all():
    draw = np.random.default_rng(0)
    last = draw.normal(size=(3000, 1, 2)) * 2
    recorded = of_exits(last + draw.normal(size=(3000, 2, 2)) * np.array([2.0, 0.0])[:, None])
    right = right_of(recorded)["final"]
    rule = svm(recorded, right)
    p = np.sort(np.exp(recorded.logits[:, 0]) / np.exp(recorded.logits[:, 0]).sum(1, keepdims=True), axis=1)
    raw = np.stack((p[:, 1] - p[:, 0], p[:, 1]), 1)
    x = np.column_stack(((raw - raw.mean(0)) / raw.std(0), np.ones(3000)))
    w, _ = fit_svm(x, np.where(right[:, 0], 1.0, -1.0))
    np.testing.assert_allclose(compared(rule, recorded)[:, 0], x @ w, atol=1e-9)
    output = x @ w > 0
    assert output[right[:, 0]].mean() > 0.6 > 0.55 > output[~right[:, 0]].mean()


def test_the_runtime_without_torch_reads_the_rule():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mini_ee.lab.rules import rule_from_dict\n"
        "rule_from_dict({'name': 'adainfer', 'gap': [1], 'top': [1], 'bias': [-1], 'margin': '-inf'}).check(2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
