"""The conformal guarantee: its cut by brute force, what it keeps over draws, and strictness in float32."""

import json
import math
from itertools import product

import numpy as np
import pytest

import mini_ee.lab.calibration as calibration
from mini_ee.lab.calibration import (
    COMPARED_DELTA,
    POLICY,
    Observed,
    TooFew,
    above,
    agreement_by_sets,
    calibrate_conformal,
    conformal,
    conformal_cut,
    replay,
    tau_with_confidence,
)
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rule_inputs import runtime_values
from mini_ee.lab.rules import Policy, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.train_run import train


def drawn(rows, exits=3, seed=0, ties=False, power=0.3):
    """Rows whose exits agree the more often, the surer they are; the larger the power, the more seldom."""
    random = np.random.default_rng(seed)
    confidence = random.random((rows, exits))
    confidence = np.round(confidence, 1) if ties else confidence
    return Observed(confidence.astype(np.float32), random.random((rows, exits)) < confidence**power, np.arange(rows))


def smallest_that_keeps(observed, epsilon):
    """The cut by trying all there are: groups of rows lost in share, one more group lost wholly."""
    groups = np.unique(observed.groups)
    for tau in (-math.inf, *np.unique(observed.confidence)):
        lost = 1.0
        for group in groups:
            rows = [row for row in range(len(observed.groups)) if observed.groups[row] == group]
            bad = [
                any(c > tau and not a for c, a in zip(observed.confidence[row], observed.agrees[row])) for row in rows
            ]
            lost += sum(bad) / len(rows)
        if lost / (len(groups) + 1) <= 1 - epsilon + 1e-12:
            return tau
    return math.inf


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("epsilon", [0.5, 0.8, 0.9, 0.95])
def test_the_cut_is_the_smallest_that_keeps_the_guarantee_with_one_row_more_lost(epsilon, ties):
    for seed in range(5):
        observed = drawn(40, seed=seed, ties=ties)
        assert conformal_cut(observed, epsilon) == smallest_that_keeps(observed, epsilon)
        texts = observed._replace(groups=np.random.default_rng(seed).integers(0, 20, 40))
        assert conformal_cut(texts, epsilon) == smallest_that_keeps(texts, epsilon)


def test_of_single_rows_the_cut_is_an_order_statistic():
    """As CAT has it, but that rows which agree throughout stay, as minus infinity."""
    observed = drawn(59)
    worst = np.sort(np.where(observed.agrees, -np.inf, observed.confidence).max(axis=1))
    for epsilon in (0.5, 0.7, 0.9):
        assert conformal_cut(observed, epsilon) == worst[math.ceil(epsilon * 60 - 1e-9) - 1]


@pytest.mark.parametrize("epsilon", [0.6, 0.8, 0.9, 0.95])
def test_of_n_plus_one_rows_each_left_out_in_turn_no_more_are_lost_than_guaranteed(epsilon):
    """Whatever the scores are: the guarantee without a draw."""
    for seed, exits, power in product(range(6), (1, 3), (0.3, 8)):
        observed, broken = drawn(41, exits, seed, seed % 2 == 0, power), 0
        for row in range(41):
            others, one = np.arange(41) != row, observed.take([row])
            rule = above(conformal_cut(observed.take(others), epsilon), "max_probability")
            broken += not replay(one, rule).agrees[0]
        assert broken <= math.floor((1 - epsilon) * 41 + 1e-9)


def test_over_many_draws_the_guarantee_is_kept_on_average_and_not_by_much_more():
    observed, epsilon = drawn(4000, seed=3), 0.9
    means = agreement_by_sets(observed, epsilon, sets=300)
    assert means["sets"] == 300 and means["groups_a_set"] == 1000
    assert epsilon - 0.003 <= means["conformal"] <= 0.96  # M counts exits behind the one where a row leaves, too
    assert means["delta"] >= means["paper"]
    assert abs(means["paper"] - epsilon) < 0.02  # which guarantees it of each exit, to the rows that it was taken from


def test_what_sets_keep_is_that_of_loops_over_fresh_texts():
    observed = drawn(600)._replace(groups=np.random.default_rng(1).integers(0, 300, 600))
    random, names, shares = np.random.default_rng(5), np.unique(observed.groups), []
    for _ in range(4):
        inside = np.isin(observed.groups, random.permutation(names)[: len(names) // 4])
        some = observed.take(inside)
        columns = list(zip(some.confidence.T, some.agrees.T))
        paper = [calibration.tau(*column, 0.6) for column in columns]
        surer = [tau_with_confidence(*column, some.groups, 0.6, COMPARED_DELTA / 3) for column in columns]
        of_texts = {}
        for group, output, right in zip(*(array[~inside] for array in (observed.groups, *observed[:2]))):
            sure = output > conformal_cut(some, 0.6), output >= paper, output >= surer
            of_texts.setdefault(group, []).append([next((a for s, a in zip(left, right) if s), True) for left in sure])
        shares.append(np.mean([np.mean(rows, axis=0) for rows in of_texts.values()], axis=0))
    agreement = agreement_by_sets(observed, 0.6, sets=4, seed=5)
    assert [agreement[name] for name in ("conformal", "paper", "delta")] == pytest.approx(np.mean(shares, axis=0))
    assert agreement["delta"] < 1


@pytest.mark.parametrize("measure", ["max_probability", POLICY])
def test_whoever_stands_at_the_cut_stays_in_float32_too(measure):
    random = np.random.default_rng(0)
    for value in np.concatenate(([0.5, 1 - 2**-24], random.random(200))).astype(np.float32):
        tau = value if measure == "max_probability" else np.float32(40) * (value - np.float32(0.5))
        scores = np.array([np.nextafter(tau, np.float32(-50)), tau, np.nextafter(tau, np.float32(50))])
        rule, logits = above(float(tau), measure), np.zeros((3, 2, 2), np.float32)
        segments = Recorded((1, 2), logits, np.zeros((3, 2, 2)), [1, 1], {measure: scores[:, None]})
        assert early_exit(segments, rule, range(3)).exit_index.tolist() == [1, 1, 0]
        bar = runtime_values(rule, 1)["threshold"][0]
        compared = scores >= bar if measure == "max_probability" else scores > bar
        assert compared.tolist() == [False, False, True]


def test_a_logit_whose_probability_is_nearly_one_stays_at_its_own_cut():
    for tau in np.linspace(20, 40, 50, dtype=np.float32):
        assert not above(float(tau), POLICY).stop(0, np.array([tau]), {}).any()


def test_at_the_ends_all_leave_or_nobody():
    assert above(-700.0, POLICY).least_logit == pytest.approx(-700) and above(-744.0, POLICY).cut > 0
    assert above(-math.inf, POLICY) == Policy(0.0) and above(-math.inf, "entropy") == Threshold(-math.inf, "entropy")
    assert above(1.0, "max_probability").threshold == math.inf and above(800.0, POLICY) == Policy(1.0)


def test_too_few_rows_are_told_with_the_number_that_would_do():
    assert conformal(drawn(9), 0.9)
    with pytest.raises(TooFew) as error:
        conformal(drawn(8), 0.9)
    assert error.value.needed == 9
    for epsilon in (0, 1):
        with pytest.raises(ValueError, match="above 0 and below 1 for a conformal guarantee"):
            conformal(drawn(9), epsilon)
    with pytest.raises(ValueError, match="must be a finite number"):
        conformal(drawn(9)._replace(confidence=np.full((9, 3), np.nan)), 0.9)


def test_the_answer_says_what_fresh_rows_keep():
    random = np.random.default_rng(0)
    logits = random.normal(size=(401, 4, 3))
    logits[:, 1:] += 2 * logits[:, :1]
    recorded = Record(Recorded((1, 2, 3, 4), logits, np.zeros((401, 4, 2)), [1] * 4), logits, 1.0)
    rule, answer = calibrate_conformal(recorded, 0.8, "max_probability", sets=20)
    result = recorded.replay(rule)
    fresh = np.ones(401, bool)
    fresh[np.random.default_rng(0).permutation(401)[:200]] = False
    same = np.array([logits[row, result.exit_index[row]].argmax() == logits[row, 3].argmax() for row in range(401)])
    assert answer["end_to_end"] == pytest.approx(np.mean(same[fresh]))
    assert answer["agreement"] == pytest.approx([same[fresh & (result.exit_index == k)].mean() for k in range(3)])
    assert (answer["rows_calibration"], answer["rows_fresh"]) == (200, 201)
    assert answer["exit_counts"] == np.bincount(result.exit_index[fresh], minlength=4).tolist()
    assert answer["thresholds"] == [rule.threshold] * 3 and answer["kept"]["conformal"] >= 0.8 - 0.02
    assert answer["mean_layers"] == pytest.approx(result.layers_run[fresh].mean()) and answer["mean_layers"] < 4
    few = recorded.take(np.arange(6))
    with pytest.raises(ValueError, match="at least 8 rows or texts are needed .*got 6"):
        calibrate_conformal(few, 0.8, "max_probability")


# ---- The command ----
@pytest.fixture(scope="module")
def run_folder(checkpoint_folder, task_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("conformal") / "run"
    train("joint", checkpoint_folder, task_folder, out, epochs=1)
    return out


def test_the_command_writes_the_rule_and_its_guarantee(run_folder, task_folder, capsys):
    argv = ["calibrate", str(run_folder), "--task", str(task_folder), "--split", "train", "--epsilon", ".8"]
    assert main([*argv, "--guarantee", "conformal", "--sets", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["guarantee"] == "conformal" and answer["measure"] == "max_probability" and answer["kept"]["sets"] == 5
    config = read_json(run_folder / "config.json")
    assert config["guarantee"] == {"guarantee": "conformal", "epsilon": 0.8, "measure": "max_probability"}
    assert load_run(run_folder).rule.to_dict() == config["rule"]
    assert main([*argv, "--guarantee", "conformal", "--sets", "5"]) == 0
    assert "We drew 5 calibration sets of 15. On average " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--guarantee", "conformal", "--delta", ".05"), "takes an --epsilon below 1 and no --delta"),
        (("--measure", "exit_logit"), "--measure exit_logit is for --guarantee conformal"),
        (("--guarantee", "conformal", "--measure", "exit_logit"), "needs a policy, and this run has none"),
    ],
)
def test_what_cannot_be_guaranteed_is_one_line(run_folder, task_folder, capsys, given, message):
    assert main(["calibrate", str(run_folder), "--task", str(task_folder), "--epsilon", ".8", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error.split("\n")[-1]
