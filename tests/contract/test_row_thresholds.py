"""Under every rule that has a threshold, rows with thresholds of their own stop as in batches of one."""

import numpy as np
import pytest

from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.recording import Recorded
from mini_ee.lab.registry import RULES as OF_METHODS
from mini_ee.lab.row_thresholds import RowThresholds
from mini_ee.lab.rule_inputs import INPUTS, runtime_values, with_runtime
from mini_ee.lab.rules import RULES, Fixed, Threshold, rule_class, rule_from_dict

N, EXITS = 32, (1, 2, 4)
SETTINGS = {
    "threshold": {"threshold": 0.7},
    "patience-confidence": {"patience": 2, "threshold": 0.6},
    "policy": {"cut": 0.6},
    "q-exit": {"q": 0.7},
    "adainfer": {"gap": [1, 1], "top": [0.5, -0.5], "bias": [-0.5, 0]},
    "similarity": {"least_cosine": 0.5},
}
NAMES = [name for name in (*RULES, *OF_METHODS) if "threshold" in INPUTS.get(rule_class(name), ())]


def recorded():
    drawn = np.random.default_rng(3)
    logits = drawn.normal(0, 2, (N, 3, 3)).astype(np.float32)
    measures = {"exit_logit": drawn.normal(0, 1, (N, 2)).astype(np.float32)}
    return Recorded(EXITS, logits, np.ones((N, 3, 2)), [1, 1, 2], measures)


@pytest.mark.parametrize("name", dict.fromkeys(NAMES))
def test_32_rows_with_32_thresholds_stop_as_32_batches_of_one(name):
    rule, segments = rule_from_dict({"name": name} | SETTINGS[name]), recorded()
    cut = runtime_values(rule, 1)["threshold"][0]
    thresholds = (cut + np.random.default_rng(1).normal(0, 0.5, (N, 1))).astype(np.float32) * np.ones(2, np.float32)
    thresholds[:3] = np.array([np.inf, -np.inf, np.nan])[:, None]
    alone = []
    for row, (threshold, _) in enumerate(thresholds.tolist()):
        row_rule = rule if np.isnan(threshold) else with_runtime(rule, {"threshold": threshold})
        alone += early_exit(segments.take([row]), row_rule, range(1)).exit_index.tolist()
    result = early_exit(segments, RowThresholds(rule, thresholds), range(N))
    assert result.exit_index.tolist() == alone and len(set(alone)) > 1
    assert alone != early_exit(segments, rule, range(N)).exit_index.tolist()


@pytest.mark.parametrize(
    ("rule", "thresholds", "message"),
    [
        (
            Fixed(0),
            np.zeros((N, 2)),
            "expected a rule with a threshold, found the rule fixed; leave the thresholds out",
        ),
        (Threshold(0.5), np.zeros(2), r"expected thresholds of shape \(rows, exits - 1\), found \(2,\)"),
        (Threshold(0.5), np.zeros((N, 3)), "expected 2 thresholds for each row, .* found 3"),
        (Threshold(0.5), np.zeros((N - 1, 2)), "expected thresholds for 32 rows, found those of 31"),
    ],
    ids=["rule", "axes", "exits", "rows"],
)
def test_thresholds_that_do_not_fit_are_refused(rule, thresholds, message):
    with pytest.raises(ValueError, match=message):
        early_exit(recorded(), RowThresholds(rule, thresholds), range(N))
