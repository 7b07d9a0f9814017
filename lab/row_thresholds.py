"""A threshold per row: the rows of one batch stop by the same rule, each with thresholds of its own. No torch here.

    early_exit(segments, RowThresholds(Threshold(0.9), thresholds), inputs)     thresholds (B, K - 1)

The thresholds are kept in the rule's memory, so that the loop, and model.onnx, keep those of the rows that continue.
"""

from typing import Any

import numpy as np

from mini_ee.lab.rule_inputs import runtime_inputs, runtime_values, with_runtime
from mini_ee.lab.rules import Rule

THRESHOLD = "threshold"  # the input of the graph, and the entry of the memory


class RowThresholds(Rule):
    """The rule of one batch of B rows of a classifier or an encoder. The texts of a decoder share their thresholds.

    thresholds: (B, K - 1), one for each exit but the last. NaN: that of the rule. They are compared in float32, with
    what the input `threshold` of model.onnx is compared with: the exit_logit, if a policy decides.
    Raises ValueError if the rule has no threshold, or for another number of axes.
    """

    name = "row-thresholds"

    def __init__(self, rule: Rule, thresholds: np.ndarray):
        if not has_threshold(rule):
            raise ValueError(f"expected a rule with a threshold, found the rule {rule.name}; leave the thresholds out")
        thresholds = np.asarray(thresholds, np.float32)
        if thresholds.ndim != 2:
            raise ValueError(f"expected thresholds of shape (rows, exits - 1), found {thresholds.shape}")
        exported = runtime_values(rule, thresholds.shape[1])[THRESHOLD]
        self.rule, self.thresholds = rule, np.where(np.isnan(thresholds), exported, thresholds)
        self.needs, self.needs_embeddings = rule.needs, rule.needs_embeddings

    def check(self, num_exits: int) -> None:
        self.rule.check(num_exits)
        if self.thresholds.shape[1] != num_exits - 1:
            raise ValueError(
                f"expected {num_exits - 1} thresholds for each row, one for each exit but the last, found "
                f"{self.thresholds.shape[1]}"
            )

    def plan(self, inputs: Any) -> None:
        if len(inputs) != len(self.thresholds):
            raise ValueError(f"expected thresholds for {len(inputs)} rows, found those of {len(self.thresholds)}")

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        of_rows = memory.setdefault(THRESHOLD, self.thresholds)
        return with_runtime(self.rule, {THRESHOLD: of_rows[:, k]}).stop(k, read, memory)

    def flops(self, classes: int) -> float:
        return self.rule.flops(classes)


def has_threshold(rule: Rule) -> bool:
    """Whether the rule compares something with a threshold."""
    return THRESHOLD in runtime_inputs(rule) and not rule.plans_from_texts
