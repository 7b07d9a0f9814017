"""The load generator of `mini-ee bench serve`: when requests arrive, and which of them are in time."""

import numpy as np
import pytest
from http_server import Slow

from mini_ee.experiments.bench.open_load import Answered, arrivals, goodput, offer
from mini_ee.serve import Worker


def test_arrivals_are_those_of_their_seed_at_their_rate():
    one_by_one, bursts = arrivals(200, 20, seed=1), arrivals(200, 20, burst=8, seed=1)
    np.testing.assert_array_equal(one_by_one, arrivals(200, 20, seed=1))
    assert len(one_by_one) == len(bursts) == 4000
    for moments in (one_by_one, bursts):
        assert 0.9 < 200 * moments[-1] / len(moments) < 1.1
    gaps = np.diff(one_by_one)
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05  # as of an exponential
    assert (bursts.reshape(-1, 8) == bursts[::8, None]).all()


def test_an_open_load_counts_the_time_that_a_request_waited_to_be_given():
    """The server stands still for 0.2 s; who should have come meanwhile has waited, too."""
    engine = Slow(0.2)
    with Worker(engine, batch=100, max_open=1000) as worker:
        load = offer(worker, ["xx"], np.linspace(0.001, 0.15, 30))
    assert len(load.seconds) == 26 and load.seconds.max() > 0.2
    assert load.quantiles[0] <= load.quantiles[1] <= load.quantiles[2] == load.seconds.max()


def test_what_is_refused_or_late_is_not_answered_in_time():
    with Worker(Slow(0.2), batch=1, max_open=2) as worker:
        load = offer(worker, ["xx"], np.linspace(0.001, 0.02, 20))
    assert len(load.seconds) == 17 and np.isinf(load.seconds).sum() >= 10  # of 20 the first three are not counted
    assert Answered(40.0, np.array([0.1, 0.2, 0.3, np.inf])).within(0.2) == 20.0


def test_goodput_is_where_a_time_crosses_the_limit():
    loads = [(10, 0.01), (20, 0.02), (30, 0.04)]
    assert goodput(loads, 0.03) == pytest.approx(25)
    assert goodput(loads, 0.1) == 30
    assert goodput([(10, 0.01), (20, np.inf)], 0.03) == 10
    assert goodput(loads, 0.005) == pytest.approx(5)
