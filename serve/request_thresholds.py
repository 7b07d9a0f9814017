"""The fields with which a request asks for other thresholds than those of the export. No torch here.

    threshold   a number for all exits, or a list with one for each exit but the last: as the input of model.onnx
    agreement   share of the predictions that should be those of the full model, for example .99
    max_loss    largest loss of the task's score against the full model, for example .01

At most one of them. The curve of the manifest turns the last two into a threshold (threshold_curve.py), without a
guarantee. In a request with several texts each is one value for all, or a list with a value or null for each text.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_ee.lab.data.values import shortened
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.row_thresholds import THRESHOLD, has_threshold
from mini_ee.lab.rule_inputs import runtime_inputs, served_by
from mini_ee.lab.rules import Rule
from mini_ee.lab.sweep import knob, knob_range
from mini_ee.lab.threshold_curve import threshold_for

FIELDS = (THRESHOLD, "agreement", "max_loss")

WITHOUT_NUMBER = {"inf": math.inf, "-inf": -math.inf}  # JSON has no infinities
LARGEST = 3e38  # of a finite threshold, which is float32


def fields_of_rows(fields: dict, count: int) -> list[dict[str, Any]]:
    """The fields of each of a request's `count` rows. Raises ValueError for a list of another length."""
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    if count == 1 and "texts" not in fields:
        return [given]
    for name, values in given.items():
        if isinstance(values, list) and len(values) != count:
            raise ValueError(f"expected {name} as a value for all {count} texts, or one for each, found {len(values)}")
    columns = {name: values if isinstance(values, list) else [values] * count for name, values in given.items()}
    return [{name: values[row] for name, values in columns.items() if values[row] is not None} for row in range(count)]


class RequestThresholds:
    """Reads these fields for the rule of a server."""

    def __init__(self, runtime: Runtime, rule: Rule):
        self._rule, self._count = rule, len(runtime.exits) - 1
        self._curve = runtime.config.get("curve") if served_by(rule, runtime.rule) else None
        self.fields = self._possible()  # of FIELDS, that a request may have

    def _possible(self) -> tuple[str, ...]:
        if not has_threshold(self._rule):
            return ()
        points = self._curve["points"] if self._curve else []
        return FIELDS[: 1 + bool(points) + bool(points and all(loss is not None for _, _, loss, _ in points))]

    def of(self, **given: Any) -> np.ndarray | None:
        """The thresholds (K - 1,) float32 of a row with these of FIELDS; None without any.

        Raises ValueError for several fields, a wrong value, or one that this export cannot turn into thresholds.
        """
        if not given:
            return None
        if len(given) > 1:
            raise ValueError(f"expected one of {', '.join(FIELDS)}, found {' and '.join(given)}")
        ((name, value),) = given.items()
        if not self.fields:
            raise ValueError(f"{name} needs a rule with a threshold, found the rule {self._rule.name}; leave it out")
        thresholds = self._numbers(value) if name == THRESHOLD else [self._mapped(name, value)] * self._count
        return np.array(thresholds, np.float32)

    def _numbers(self, value: Any) -> Sequence[float]:
        numbers = [
            WITHOUT_NUMBER.get(number, number) if isinstance(number, str) else number for number in _listed(value)
        ]
        least, most = -math.inf, math.inf
        if runtime_inputs(self._rule)[THRESHOLD] == knob(self._rule):  # else the threshold is a logit
            least, most = knob_range(self._rule)

        def is_valid(number: Any) -> bool:
            if type(number) not in (int, float):
                return False
            return number in WITHOUT_NUMBER.values() or abs(number) < LARGEST and least <= number <= most

        valid = all(map(is_valid, numbers))
        if not valid or isinstance(value, list) and len(value) != self._count:
            limits = f" of at least {least:g}" if math.isfinite(least) else ""
            limits += f"{' and' if limits else ' of'} at most {most:g}" if math.isfinite(most) else ""
            raise ValueError(
                f'expected threshold as a number{limits}, "inf" or "-inf", or a list of {self._count}, one for each '
                f"exit but the last, found {shortened(value)}"
            )
        return numbers if isinstance(value, list) else numbers * self._count

    def _mapped(self, name: str, value: Any) -> float:
        if name not in self.fields:
            missing = "a curve with losses" if "agreement" in self.fields else "a curve of its rule"
            advice = "the export" if name == "agreement" else "its run on examples with labels and export that again"
            raise ValueError(
                f"{name} needs {missing}, which this export does not have: give {' or '.join(self.fields)}, or "
                f"calibrate {advice}"
            )
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise ValueError(f"expected {name} as a number from 0 to 1, found {shortened(value)}")
        return threshold_for(self._curve, **{name: value})


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]
