"""Metrics of a server in Prometheus' text format, and its guarantee: the agreement of answers with the full model.

A share of the requests, the shadow rows, runs on to the last exit after the answer. The metrics show how often the
prediction there equals the answer, with an exact interval (Clopper and Pearson 1934). With `tighten`, this agreement is
tested every TEST_EVERY shadow rows. The n-th test has the level ERROR_LEVEL / (n (n + 1)). The levels add up to
ERROR_LEVEL, so all tests together reject a rule that satisfies the guarantee with probability at most ERROR_LEVEL. If a
test rejects, the rule is made stricter, a line is logged, and counting and testing start again. The rule is never made
looser. To loosen it, calibrate again on requests of the server, and export.
"""

import logging
import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mini_ee.lab.rule_inputs import runtime_settings
from mini_ee.lab.rules import Rule
from mini_ee.lab.statistics import binomial_cdf, share_interval
from mini_ee.lab.sweep import KNOBS, knob, knob_range

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of the latency histogram, in seconds."""

RECENT = 1000  # latest answers, for the drift

WINDOW = 2000  # latest shadow rows, for the agreement

ERROR_LEVEL, TEST_EVERY = 0.1, 20  # tests of a guarantee: error probability; shadow rows between two tests

CLOSE_TO_NEVER = 1e-3  # a threshold this close to its largest value becomes `never`

log = logging.getLogger("mini_ee.serve")


class Guarantee:
    """Observes the agreement of early exits with the full model.

    share: of the requests that are shadow rows. epsilon: the guaranteed agreement; None: only report the agreement.
    tighten: make the rule stricter if the guarantee is violated.
    """

    def __init__(self, share: float, epsilon: float | None = None, tighten: bool = False):
        if not 0 < share <= 1:
            raise ValueError(f"the share of shadow rows must be above 0 and at most 1, got {share}")
        if epsilon is not None and not 0 < epsilon < 1:
            raise ValueError(f"the guaranteed agreement must be above 0 and below 1, got {epsilon}")
        self.share, self.epsilon, self.tighten = share, epsilon, tighten
        self.agreements: deque[bool] = deque(maxlen=WINDOW)
        self.rows = self.tightened = self._tests = 0

    def observe(self, agrees: bool, rule: Rule) -> Rule:
        """Count one row that also ran through all layers. agrees: whether its early prediction equals the final one.

        Returns the rule, or a stricter one if a test rejects the guaranteed agreement.
        """
        self.agreements.append(agrees)
        self.rows += 1
        if not self.tighten or self.rows % TEST_EVERY:
            return rule
        agreeing, count = sum(self.agreements), len(self.agreements)
        self._tests += 1
        if binomial_cdf(agreeing, count, self.epsilon) > ERROR_LEVEL / (self._tests * (self._tests + 1)):
            return rule
        tighter = stricter(rule)
        self.tightened, self._tests = self.tightened + 1, 0
        self.agreements.clear()
        log.warning(
            "%d of %d shadow rows agree with the full model, below the guaranteed agreement of %s; the new rule is %s",
            *(agreeing, count, self.epsilon, tighter.to_dict()),
        )
        return tighter


def stricter(rule: Rule) -> Rule:
    """The rule with its threshold halfway to the largest value, or larger by 1 if there is no largest value.

    Raises ValueError for a rule without a threshold that is an input of the graph.
    """
    name = knob(rule)
    if name not in runtime_settings(rule):
        raise ValueError(f"the rule {rule.name} has no threshold to raise; leave out --tighten")
    (least, most), value = knob_range(rule), getattr(rule, name)
    raised = tuple(_raised(number, least, most, KNOBS[type(rule)].never) for number in np.atleast_1d(value).tolist())
    return replace(rule, **{name: raised if isinstance(value, tuple) else raised[0]})


def _raised(value: float, least: float, most: float, never: float) -> float:
    if most == math.inf:
        return max(value, 0.0) + 1
    if value == math.inf:
        return value
    if value == -math.inf and least == -math.inf:
        return -1.0
    value = max(value, least)
    return never if most - value < CLOSE_TO_NEVER else (value + most) / 2


class Metrics:
    """The counters of one worker."""

    def __init__(
        self, exits: Sequence[int], guarantee: Guarantee | None, expected: Sequence[int] | None, model_id: str
    ):
        """expected: exit counts of the calibration (default: those of the first RECENT answers)."""
        self.exits, self.guarantee, self.model_id = exits, guarantee, model_id
        self.requests = Counter(dict.fromkeys(("answered", "refused", "late", "cancelled", "failed"), 0))
        self.responses = Counter()  # of an HTTP server, by status
        self.exit_counts, self.batches, self.rows = Counter(), Counter(), Counter()
        self._seconds, self._total = [0] * (len(BUCKETS) + 1), 0.0
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._expected = dict(zip(exits, expected)) if expected else None

    def count_batch(self, queue: str, rows: int) -> None:
        """Count a batch that is about to run."""
        self.batches[queue] += 1
        self.rows[queue] += rows

    def count_answer(self, layers: int | list[int], seconds: float) -> None:
        """Count an answer. layers: the depth of its row, or of each token."""
        self.requests["answered"] += 1
        self._seconds[bisect_left(BUCKETS, seconds)] += 1
        self._total += seconds
        for depth in layers if isinstance(layers, list) else (layers,):
            # If tokens exit within a row, its mean depth is between exits: count it at the next exit above.
            depth = self.exits[min(bisect_left(self.exits, depth), len(self.exits) - 1)]
            self.exit_counts[depth] += 1
            self._recent.append(depth)
        if self._expected is None and len(self._recent) == RECENT:
            self._expected = Counter(self._recent)

    def drift(self) -> float | None:
        """Half the sum of absolute differences between the shares of exits now and as expected, from 0 to 1."""
        if self._expected is None or not self._recent:
            return None
        now, before = Counter(list(self._recent)), self._expected
        count, total = now.total(), sum(before.values())
        return sum(abs(now[depth] / count - before.get(depth, 0) / total) for depth in self.exits) / 2

    def page(self, lengths: dict[str, int]) -> str:
        """The metrics in Prometheus' text format. lengths: rows in each queue, by its name."""
        exits = {depth: self.exit_counts[depth] for depth in self.exits}
        page = shown("model_info", "gauge", "1, with the id of the exported model", {self.model_id: 1}, "model")
        page += shown("requests_total", "counter", "requests by outcome", self.requests, "outcome")
        page += shown("http_responses_total", "counter", "responses by status", self.responses, "status")
        so_far = np.cumsum(self._seconds).tolist()
        help_text, buckets = "seconds from arrival to answer", dict(zip((*BUCKETS, "+Inf"), so_far))
        page += shown("request_seconds", "histogram", help_text, buckets, "le", "_bucket")
        page += f"mini_ee_request_seconds_sum {self._total:.6f}\nmini_ee_request_seconds_count {so_far[-1]}\n"
        page += shown("exits_total", "counter", "answers, or tokens of texts, by number of layers", exits, "layers")
        page += shown("queue_rows", "gauge", "waiting rows by queue", lengths, "queue")
        page += shown("batches_total", "counter", "batches by queue", self.batches, "queue")
        page += shown("batch_rows_total", "counter", "rows in these batches by queue", self.rows, "queue")
        drift, guarantee = self.drift(), self.guarantee
        if drift is not None:
            help_text = "distance between the latest exits and the expected ones, 0 to 1"
            page += shown("exit_drift", "gauge", help_text, round(drift, 6))
        if guarantee is None:
            return page
        help_text = "shadow rows, which ran through all layers after their answer"
        page += shown("shadow_total", "counter", help_text, guarantee.rows)
        page += shown("tightened_total", "counter", "times that the rule was made stricter", guarantee.tightened)
        if guarantee.epsilon is not None:
            page += shown("guaranteed_agreement", "gauge", "guaranteed agreement", guarantee.epsilon)
        help_text = "share of shadow rows whose answer equals that of the full model, with its 95% interval"
        return page + shown_share("agreement", help_text, guarantee.agreements)


def shown(name: str, kind: str, help_text: str, values: float | dict, label: str = "", end: str = "") -> str:
    """A metric in Prometheus' text format. values: one, or several by the value of `label`."""
    lines = [f"# HELP mini_ee_{name} {help_text}", f"# TYPE mini_ee_{name} {kind}"]
    if isinstance(values, dict):  # a copy, because other threads change it
        lines += [f'mini_ee_{name}{end}{{{label}="{key}"}} {value}' for key, value in dict(values).items()]
    else:
        lines += [f"mini_ee_{name} {values}"]
    return "\n".join([*lines, ""])


def shown_share(name: str, help_text: str, agreements: Iterable[bool]) -> str:
    """The mean of the agreements with its 95% interval; nothing if there are none."""
    seen = list(agreements)
    if not seen:
        return ""
    low, high = share_interval(sum(seen), len(seen))
    ends = {"low": low, "mean": sum(seen) / len(seen), "high": high}
    return shown(name, "gauge", help_text, {end: round(value, 6) for end, value in ends.items()}, "end")


def merge_pages(pages: dict[str, str], label: str = "replica") -> str:
    """Merge the pages of several replicas, by name. Each value gets a label, unless it has that label.

    >>> page = "# HELP n rows\\n# TYPE n gauge\\nn{{at=\\"1\\"}} {0}\\nn {0}\\n"
    >>> print(merge_pages({"a": page.format(3), "b": page.format(4)}), end="")
    # HELP n rows
    # TYPE n gauge
    n{replica="a",at="1"} 3
    n{replica="a"} 3
    n{replica="b",at="1"} 4
    n{replica="b"} 4
    """
    made: dict[str, list[str]] = {}
    for replica, page in pages.items():
        for metric in page.split("# HELP ")[1:]:
            help_text, kind, *values = metric.splitlines()
            lines = made.setdefault(f"# HELP {help_text}\n{kind}", [])
            for value in values:
                name, labels, rest = re.fullmatch(r"(\w+)(?:{(.*)})? (\S+)", value).groups()
                known = labels.split(",") if labels else []
                if not any(pair.startswith(f"{label}=") for pair in known):
                    known.insert(0, f'{label}="{replica}"')
                lines.append(f"{name}{{{','.join(known)}}} {rest}")
    return "".join("\n".join([header, *values]) + "\n" for header, values in made.items())
