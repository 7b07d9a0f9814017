"""Requests with thresholds of their own share batches, and each is answered as if it were alone."""

import numpy as np
import pytest
from http_server import SENTENCES, ask, serving, together

from mini_ee.lab.export.sessions import GraphRule
from mini_ee.lab.row_thresholds import RowThresholds
from mini_ee.lab.rules import Never, Policy, Threshold
from mini_ee.serve import engine_of
from mini_ee.serve.engines import RowEngine
from mini_ee.serve.monitoring import Guarantee
from mini_ee.serve.request_thresholds import RequestThresholds

TEXTS = (SENTENCES * 2)[:32]
THRESHOLDS = [
    np.round(row_thresholds, 4).tolist() for row_thresholds in np.random.default_rng(0).uniform(0.4, 1, (32, 3))
]
THRESHOLDS[:3] = 0.9, ["inf", 0.5, 0.5], None  # for all exits; never at the first; the rule's own
POINTS = [[0.4, 0.7, 0.2, 1.5], [0.8, 0.9, 0.05, 2.5], [0.9, 0.97, 0.0, 4.0], ["inf", 1.0, 0.0, 6.0]]


def alone(runtime, text, threshold):
    """The answer to one text as a batch of its own, under a rule of one threshold or of one for each exit."""
    if threshold is None:
        return runtime.run([text])[0]
    values = [threshold] if isinstance(threshold, float) else [*threshold, 0.0]
    numbers = tuple(map(float, values))
    return runtime.run([text], rule=Threshold(numbers if len(numbers) > 1 else numbers[0]))[0]


@pytest.mark.parametrize("rebatch", [True, False], ids=["segments", "one graph"])
def test_32_requests_with_32_thresholds_are_answered_as_32_batches_of_one(runtime, rebatch):
    expected = [alone(runtime, *pair) for pair in zip(TEXTS, THRESHOLDS)]
    assert len({answer.layers for answer in expected}) > 2
    assert [answer.layers for answer in expected] != [answer.layers for answer in runtime.run(TEXTS)]
    expected = [(answer.label, answer.layers) for answer in expected]
    bodies = [{"text": text, "threshold": threshold} for text, threshold in zip(TEXTS, THRESHOLDS)]
    with serving(RowEngine(runtime, rebatch=rebatch), max_wait=0.05) as (worker, port):
        apart = together(port, bodies)
        status, reply, _ = ask(port, {"texts": TEXTS, "threshold": THRESHOLDS})
        assert worker.metrics.rows.total() > worker.metrics.batches.total(), "some rows should share batches"
    assert status == 200 and [(answer["label"], answer["layers"]) for answer in reply["answers"]] == expected
    assert [(answer["label"], answer["layers"]) for _, answer, _ in apart] == expected


def test_the_runtime_takes_thresholds_by_row(runtime):
    values = np.array(
        [[np.nan] * 3 if threshold is None else np.ones(3) * np.float32(threshold) for threshold in THRESHOLDS]
    )
    answers = runtime.run(TEXTS, batch_size=8, thresholds=values)
    assert [answer.layers for answer in answers] == [alone(runtime, *pair).layers for pair in zip(TEXTS, THRESHOLDS)]
    with pytest.raises(ValueError, match="expected 3 thresholds for each row, one for each exit but the last, found 2"):
        runtime.run(TEXTS, thresholds=values[:, 1:])
    with pytest.raises(
        ValueError, match="expected a rule with a threshold, found the rule never; leave the thresholds out"
    ):
        runtime.run(TEXTS, rule=Never(), thresholds=values)


def test_the_graph_of_a_decoder_takes_one_threshold_for_all_rows(decoder):
    several = RowThresholds(decoder.rule, np.zeros((2, len(decoder.config["exits"]) - 1)))
    with pytest.raises(ValueError, match="expected a classifier for thresholds by row; a decoder takes one"):
        GraphRule(decoder.folder, decoder.config).feeds(several, None)


ENTROPY = Threshold(-0.5, "entropy")
FAILING = [[0.4, 0.95, 0.0, 1.5], [0.8, 0.85, 0.05, 2.5], ["inf", 1.0, 0.0, 6.0]]  # a stricter point fails
NO_CURVE = "a curve of its rule, which this export does not have: give threshold, or calibrate"
NO_LOSS = "max_loss needs a curve with losses, which this .* have: give threshold or agreement, or calibrate its run on"


@pytest.mark.parametrize(
    ("rule", "points", "fields", "expected"),
    [
        (None, POINTS, {"agreement": 0.5}, 0.4),
        (None, POINTS, {"agreement": 0.9}, 0.8),
        (None, POINTS, {"agreement": 0.901}, 0.9),
        (None, POINTS, {"agreement": 1}, np.inf),
        (None, POINTS, {"max_loss": 1}, 0.4),
        (None, POINTS, {"max_loss": 0.1}, 0.8),
        (None, POINTS, {"max_loss": 0}, 0.9),
        (None, FAILING, {"agreement": 0.9}, np.inf),
        (None, None, {"agreement": 0.9}, f"agreement needs {NO_CURVE} the export$"),
        (None, None, {"max_loss": 0.1}, f"max_loss needs {NO_CURVE} its run on examples"),
        (None, [[0.4, 0.7, None, 1.5]], {"max_loss": 0.1}, NO_LOSS),
        (ENTROPY, POINTS, {"agreement": 0.9}, "agreement needs a curve of its rule"),
        (ENTROPY, None, {"threshold": 0.5}, "expected threshold as a number of at most 0, "),
        (Policy(0.5), None, {"threshold": -7}, -7.0),  # a logit has no limits
        (Policy(0.5), None, {"threshold": 10**400}, "expected threshold as a number, "),
        (Policy(0.5), None, {"threshold": "high"}, 'expected threshold as a number, "inf" or "-inf", or a list of 3'),
        (Never(), None, {"agreement": 0.9}, "needs a rule with a threshold, found the rule never; leave it out"),
    ],
    ids=str,
)
def test_fields_become_the_loosest_threshold_of_the_curve_that_has_them(
    runtime, monkeypatch, rule, points, fields, expected
):
    monkeypatch.setitem(runtime.config, "curve", points and {"rows": 100, "points": points})
    requested = RequestThresholds(runtime, rule or runtime.rule)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            requested.of(**fields)
    else:
        np.testing.assert_array_equal(requested.of(**fields), np.full(3, expected, np.float32))


def test_a_row_with_its_own_threshold_is_no_shadow_row(runtime):
    with serving(engine_of(runtime, guarantee=Guarantee(1.0, 0.9))) as (worker, port):
        for threshold in (0.5, None):
            assert ask(port, {"text": "the film", "threshold": threshold})[0] == 200
    assert worker.engine.guarantee.rows == 1


def test_the_formats_of_other_servers_take_a_threshold(runtime):
    with serving(engine_of(runtime)) as (worker, port):
        for body in ({"inputs": "the film", "threshold": "inf"}, {"inputs": "the film", "threshold": "-inf"}):
            assert ask(port, body, "/predict")[0] == 200
        both = {"inputs": [["the film"], ["a meal"]], "threshold": ["inf", "-inf"]}
        assert ask(port, both, "/predict")[0] == 200
    assert worker.metrics.exit_counts == {1: 2, 6: 2}
