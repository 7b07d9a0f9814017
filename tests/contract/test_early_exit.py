"""The loop: what must hold for every pair of segments and rule, and what a batch costs.

The loop on a table of logits, and the rules by their definitions: tests/spec/test_0_loop.py. Bugs that these tests
catch: tests/mutants.py.
"""

import subprocess
import sys
import textwrap
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mini_ee.lab.early_exit as loop
from mini_ee import rules as core
from mini_ee.lab.backbones.backbone import padding_mask
from mini_ee.lab.backbones.bert import LayerContext
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.tokenizer import Encoded, Inputs
from mini_ee.lab.exits.row_exits import RowSegments
from mini_ee.lab.recording import Recorded, plan_rows, read_every_exit, record
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Policy, Rule, Threshold
from mini_ee.lab.segments import Segments
from mini_ee.loop import early_exit

EXITS = (1, 2, 4, 6)
K, B, C = 4, 7, 3
ATOL = 2e-5  # float32 logits of size 7, at another batch size or padding; measured max 1.9e-6, torch 2.13 on CPU

PLAN = np.array([0, 3, 1, 2, 0, 3, 1])


class FakeState(NamedTuple):
    ids: np.ndarray  # (B,) which rows these are
    hidden: np.ndarray  # (B, D)

    def keep(self, rows):
        return FakeState(self.ids[rows], self.hidden[rows])


class Fake(Segments):
    """Segments in numpy that write down whom they ran and whom they read. Inputs are (B,) row ids."""

    exits = EXITS

    def __init__(self, rows=B, classes=C, passes=None, seed=3):
        random = np.random.default_rng(seed)
        self.embeddings = random.normal(size=(rows, 5))
        self.layers = random.normal(0, 1.5, (EXITS[-1], 5, 5))
        self.heads = random.normal(size=(K, 5, classes))
        self.passes = passes
        self.ran, self.was_read = [], []

    def layer(self, depth, hidden):
        return np.tanh(np.einsum("bd,de->be", hidden, self.layers[depth]))

    def start(self, inputs):
        return FakeState(np.asarray(inputs), self.embeddings[inputs])

    def advance(self, k, state):
        self.ran.append((k, state.ids.tolist()))
        hidden = state.hidden
        for depth in range((0, *EXITS)[k], EXITS[k]):
            hidden = self.layer(depth, hidden)
        return FakeState(state.ids, hidden)

    def read(self, k, state):
        self.was_read.append((k, state.ids.tolist()))
        return np.einsum("bd,dc->bc", state.hidden, self.heads[k])

    def layer_passes(self, k):
        return self.passes[k] if self.passes else super().layer_passes(k)

    def flops(self, k, inputs):
        return 1000.0 * self.layer_passes(k), 10.0

    def logits_by_hand(self):
        """(B, K, C), row by row and layer by layer."""
        output = np.zeros((len(self.embeddings), K, self.heads.shape[2]))
        for row, hidden in enumerate(self.embeddings):
            for depth in range(1, EXITS[-1] + 1):
                hidden = np.tanh(hidden @ self.layers[depth - 1])
                if depth in EXITS:
                    output[row, EXITS.index(depth)] = hidden @ self.heads[EXITS.index(depth)]
        return output


class Case(NamedTuple):
    """One kind of segments, a batch of B, each of its rows as a batch of one, and the whole model's answer."""

    segments: object
    inputs: object
    alone: list  # (segments, inputs) each
    logits: np.ndarray  # (B, K, C) of the whole model, not through segments


def unpadded(inputs, row):
    length = inputs.attention_mask[row].sum()
    one = inputs.take([row])
    return Inputs(one.input_ids[:, :length], one.attention_mask[:, :length], one.token_type_ids[:, :length], one.texts)


def torch_case(model, inputs):
    segments = RowSegments(model)
    input_ids, attention_mask, token_type_ids = tensors(inputs)
    with torch.no_grad():
        hidden = model.backbone.hidden_states(input_ids, attention_mask, token_type_ids)
        logits = [head(hidden[e], padding_mask(attention_mask)) for e, head in zip(model.exits, model.heads)]
    alone = [(segments, unpadded(inputs, row)) for row in range(len(inputs))]
    return Case(segments, inputs, alone, torch.stack(logits, 1).numpy())


def recorded_case(source):
    logits, flops, _ = read_every_exit(source.segments, source.inputs)
    passes = [source.segments.layer_passes(k) for k in range(K)]
    alone = [(Recorded(EXITS, logits[[row]], flops[[row]], passes), range(1)) for row in range(B)]
    return Case(Recorded(EXITS, logits, flops, passes), range(B), alone, source.logits)


def fake_case(**options):
    fake = Fake(**options)
    return Case(fake, np.arange(B), [(fake, np.array([row])) for row in range(B)], fake.logits_by_hand())


NAMES = ("torch first", "torch mean", "recorded", "numpy")


@pytest.fixture(scope="module")
def cases(random_model, padded_inputs):
    first, mean = (torch_case(random_model(pool=pool), padded_inputs) for pool in ("first", "mean"))
    return dict(zip(NAMES, (first, mean, recorded_case(mean), fake_case())))


@pytest.fixture(params=NAMES)
def case(request, cases):
    return cases[request.param]


# Rules, for the given rows of the batch


class Planned(Rule):
    """Knows the exit of each row beforehand."""

    needs = None

    def __init__(self, exits):
        self.exits, self.requested = exits, 0

    def plan(self, inputs):
        self.requested += 1
        return self.exits


class Remembers(Rule):
    """Leaves where the mean of all max probabilities so far is high: memory matters."""

    def stop(self, k, read, memory):
        memory["sum"] = memory.get("sum", 0) + MEASURES["max_probability"][0](read)
        return memory["sum"] / (k + 1) >= 0.75


RULES = {
    "never": lambda rows: Never(),
    **{f"fixed {k}": lambda rows, k=k: Fixed(k) for k in range(K)},
    "always": lambda rows: Threshold(-np.inf),
    "infinite threshold": lambda rows: Threshold(np.inf),
    "max_probability": lambda rows: Threshold(0.85),
    "one threshold an exit": lambda rows: Threshold((0.95, 0.9, 0.8, 0.0)),
    "entropy": lambda rows: Threshold(-0.4, "entropy"),
    "normalised_entropy": lambda rows: Threshold(-0.4, "normalised_entropy"),
    "breaking_ties": lambda rows: Threshold(0.8, "breaking_ties"),
    "breaking_ties_logits": lambda rows: Threshold(2.0, "breaking_ties_logits"),
    "patience 1": lambda rows: Patience(1),
    "patience 2": lambda rows: Patience(2),
    "patience-confidence": lambda rows: PatienceConfidence(2, 0.8),
    "remembers": lambda rows: Remembers(),
    "planned": lambda rows: Planned(PLAN[rows]),
}
each_rule = pytest.mark.parametrize("rule", RULES)
ALL = np.arange(B)


def run(case, rule):
    return loop.early_exit(case.segments, rule, case.inputs)


def exit_by_hand(logits, rule):
    """The exit of one row that is alone in the model: no batch, no compaction. logits (K, C)."""
    memory = {}
    plan = rule.plan([0])
    for k in range(K - 1):
        if plan is not None:
            if plan[0] <= k:
                return k
        elif rule.needs and rule.stop(k, logits[k : k + 1], memory)[0]:
            return k
    return K - 1


def assert_same(result, logits, exit_index):
    np.testing.assert_array_equal(result.exit_index, exit_index)
    np.testing.assert_array_equal(result.layers_run, np.array(EXITS)[exit_index])
    np.testing.assert_allclose(result.logits, logits, rtol=0, atol=ATOL)


# The contract, and six invariants


@pytest.mark.parametrize(
    "rule, same",
    [(core.Threshold(0.85), Threshold(0.85)), (core.Patience(2), Patience(2)), (core.Fixed(1), Fixed(1))],
)
def test_the_loop_and_the_rules_of_the_core_need_nothing_of_the_lab(case, rule, same):
    result, expected = early_exit(case.segments, rule, case.inputs), run(case, same)
    assert_same(expected, result.logits, result.exit_index)
    np.testing.assert_array_equal(result.layers, expected.layers_run)


def test_never_exit_equals_the_full_model(case):
    assert_same(run(case, Never()), case.logits[:, -1], np.full(B, K - 1))


@pytest.mark.parametrize("rule", ["fixed 0", "always"])
def test_always_exit_equals_the_first_head(case, rule):
    assert_same(run(case, RULES[rule](ALL)), case.logits[:, 0], np.zeros(B, int))


@each_rule
def test_a_batch_of_B_equals_B_batches_of_one(case, rule):
    together = run(case, RULES[rule](ALL))
    singles = [
        loop.early_exit(segments, RULES[rule]([row]), inputs) for row, (segments, inputs) in enumerate(case.alone)
    ]
    assert_same(
        together, np.concatenate([one.logits for one in singles]), np.concatenate([one.exit_index for one in singles])
    )
    passes = [one.cost.layer_passes for one in singles]
    np.testing.assert_array_equal(together.cost.layer_passes, np.concatenate(passes))


def test_chained_segments_equal_the_whole_model(case):
    state = case.segments.start(case.inputs)
    for k in range(K):
        state = case.segments.advance(k, state)
        np.testing.assert_allclose(case.segments.read(k, state), case.logits[:, k], rtol=0, atol=ATOL)


@pytest.mark.parametrize("measure", MEASURES)
def test_layers_run_does_not_grow_as_a_threshold_loosens(case, measure):
    least, most = {"entropy": (-1.1, 0.0), "breaking_ties_logits": (0.0, 9.0)}.get(measure, MEASURES[measure][1:])
    layers = np.stack([run(case, Threshold(level, measure)).layers_run for level in np.linspace(most, least, 21)])
    assert (np.diff(layers, axis=0) <= 0).all()
    assert len(np.unique(layers.sum(axis=1))) > 3, "the sweep has to meet more than both ends"


@pytest.mark.parametrize("make", [Patience, lambda t: PatienceConfidence(t, 0.6)], ids=["patience", "with confidence"])
def test_layers_run_does_not_grow_as_patience_shrinks(case, make):
    layers = np.stack([run(case, make(t)).layers_run for t in (5, 4, 3, 2, 1)])
    assert (np.diff(layers, axis=0) <= 0).all()
    assert (layers[0] == EXITS[-1]).all() and (layers[-1] < EXITS[-1]).any()


@each_rule
@pytest.mark.parametrize("pool", ["torch first", "torch mean"])
def test_padding_does_not_change_the_decision(cases, rule, pool):
    """Nor does what stands under it: here other tokens, and more of them."""
    case = cases[pool]
    mask = np.pad(case.inputs.attention_mask, ((0, 0), (0, 5)))
    junk = np.random.default_rng(1).integers(5, 60, mask.shape) * (1 - mask)
    wider = Inputs(
        np.pad(case.inputs.input_ids, ((0, 0), (0, 5))) + junk,
        mask,
        np.pad(case.inputs.token_type_ids, ((0, 0), (0, 5))),
        case.inputs.texts,
    )
    expected = run(case, RULES[rule](ALL))
    assert_same(loop.early_exit(case.segments, RULES[rule](ALL), wider), expected.logits, expected.exit_index)


# The loop against a slow oracle


@each_rule
def test_compaction_changes_nothing_each_row_leaves_where_it_would_alone(case, rule):
    expected = np.array([exit_by_hand(case.logits[row], RULES[rule]([row])) for row in range(B)])
    assert_same(run(case, RULES[rule](ALL)), case.logits[ALL, expected], expected)


@pytest.mark.parametrize("rule", ["max_probability", "entropy", "patience 1", "remembers", "planned"])
def test_these_batches_are_mixed_so_that_compaction_is_at_work(case, rule):
    assert len(set(run(case, RULES[rule](ALL)).exit_index)) >= 2


def test_the_last_exit_takes_whoever_is_left_and_is_not_asked(case):
    calls = []

    class Refuses(Rule):
        def stop(self, k, read, memory):
            calls.append(k)
            return np.zeros(len(read), bool)

    assert_same(run(case, Refuses()), case.logits[:, -1], np.full(B, K - 1))
    assert calls == [0, 1, 2]


def test_a_plan_is_asked_for_once_and_stands_above_what_the_rule_would_decide(case):
    class Both(Planned):
        needs = "logits"

        def stop(self, k, read, memory):
            raise AssertionError("a rule that plans decides nothing on the way")

    rule = Both(PLAN)
    assert_same(run(case, rule), case.logits[ALL, PLAN], PLAN)
    assert rule.requested == 1


# Who is run, read and remembered


def test_nothing_runs_after_the_last_row_has_left():
    for plan in (np.ones(len(ALL), int), np.arange(len(ALL)) % 2):  # all at once, or some before the others
        fake = Fake()
        loop.early_exit(fake, Planned(plan), ALL)
        assert [k for k, _ in fake.ran] == [0, 1]


def test_a_planned_rule_reads_a_head_only_for_rows_that_leave_there():
    fake = Fake()
    loop.early_exit(fake, Planned(PLAN), ALL)
    assert fake.was_read == [(k, np.flatnonzero(PLAN == k).tolist()) for k in range(K)]


@pytest.mark.parametrize("rule, heads", [(Planned(PLAN), {0, 1, 2, 3}), (Fixed(2), {2}), (Never(), {K - 1})])
def test_segments_are_told_before_they_run_which_heads_alone_will_be_read(rule, heads):
    calls = []

    class Reported(Fake):
        def select_heads(self, heads):
            assert not self.ran
            calls.append(set(heads))
            return self

    loop.early_exit(Reported(), rule, ALL)
    loop.early_exit(Reported(), Threshold(0.8), ALL)
    assert calls == [heads]


def test_a_rule_that_needs_the_state_alone_reads_a_head_only_for_rows_that_leave_there():
    class Policed(Fake):
        """A policy says at every exit but the last who leaves: rows whose number is a multiple of 3, then of 2."""

        def exit_logit(self, k, state):
            self.policy_read.append((k, state.ids.tolist()))
            return np.where(state.ids % (3 - k) == 0, 1.0, -1.0) if k < 2 else -np.ones(len(state.ids))

        def state_flops(self, k, needs):
            return 7.0

    fake = Policed()
    fake.policy_read = []
    result = loop.early_exit(fake, Policy(), ALL)
    assert result.exit_index.tolist() == [0, 3, 1, 0, 1, 3, 0]
    assert fake.policy_read == [(0, ALL.tolist()), (1, [1, 2, 4, 5]), (2, [1, 5])]
    assert fake.was_read == [(0, [0, 3, 6]), (1, [2, 4]), (3, [1, 5])]
    e = result.exit_index
    decisions = np.minimum(e + 1, K - 1) * (7 + Policy().flops(C))
    np.testing.assert_array_equal(result.cost.flops, 1000 * np.array(EXITS)[e] + 10 + decisions)


def test_never_exit_reads_the_last_head_once():
    fake = Fake()
    loop.early_exit(fake, Never(), ALL)
    assert fake.was_read == [(K - 1, ALL.tolist())]


def test_memory_is_kept_with_the_rows():
    fake, met = Fake(), []

    class Ids(Rule):
        """Remembers who each row is, and lets every other go: the segments know who is really there."""

        def stop(self, k, read, memory):
            here = np.array(fake.was_read[-1][1])
            np.testing.assert_array_equal(memory.setdefault("ids", here), here)
            np.testing.assert_array_equal(memory.setdefault("squares", here[:, None] ** 2)[:, 0], here**2)
            met.append(here.tolist())
            return np.arange(len(here)) % 2 == 0

    result = loop.early_exit(fake, Ids(), ALL)
    assert met == [[0, 1, 2, 3, 4, 5, 6], [1, 3, 5], [3]]
    assert result.exit_index.tolist() == [0, 1, 0, 2, 0, 1, 0]


# Costs


@each_rule
def test_layer_passes_equal_layers_run_where_segments_follow_one_another(case, rule):
    result = run(case, RULES[rule](ALL))
    np.testing.assert_array_equal(result.cost.layer_passes, result.layers_run)


def test_a_restart_at_each_of_the_exits_3_6_9_12_costs_3_9_18_30_layer_passes():
    logits, flops, exits = np.zeros((4, 4, 2)), np.zeros((4, 4, 2)), (3, 6, 9, 12)
    restart = Recorded(exits, logits, flops, list(exits))
    result = loop.early_exit(restart, Planned(np.arange(4)), range(4))
    assert result.layers_run.tolist() == [3, 6, 9, 12]
    assert result.cost.layer_passes.tolist() == [3, 9, 18, 30]


def test_flops_count_the_layers_each_row_ran_the_heads_it_passed_and_the_decisions():
    fake = Fake(passes=[3, 6, 9, 12])
    layers = np.cumsum([3000.0, 6000.0, 9000.0, 12000.0])
    planned = loop.early_exit(fake, Planned(PLAN), ALL)
    np.testing.assert_array_equal(planned.cost.flops, layers[PLAN] + 10)
    rule = Threshold(0.8)
    requested = loop.early_exit(fake, rule, ALL)
    e = requested.exit_index
    assert len(set(e)) >= 3 and (e == K - 1).any()
    decisions = np.minimum(e + 1, K - 1) * rule.flops(C)
    np.testing.assert_array_equal(requested.cost.flops, layers[e] + 10 * (e + 1) + decisions)


def layer_flops_by_hand(config, tokens):
    """Every matrix product of one layer as (m, k, n): 2 m k n operations."""
    d, h, i = config.hidden_size, config.num_attention_heads, config.intermediate_size
    products = [(tokens, d, d)] * 4 + [(tokens, d, i), (tokens, i, d)]
    products += [(tokens, d // h, tokens), (tokens, tokens, d // h)] * h
    return sum(2 * m * k * n for m, k, n in products)


@pytest.mark.parametrize("pool, averaged", [("torch first", 0), ("torch mean", 12 * 24)])
def test_flops_of_torch_segments_equal_a_count_of_every_matrix_product(cases, pool, averaged):
    case = cases[pool]
    config = case.segments.model.backbone.config
    layer, head = layer_flops_by_hand(config, 12), 2 * (24 * 24 + 24 * C) + averaged
    result = run(case, Never())
    np.testing.assert_array_equal(result.cost.flops, 6 * layer + head)
    rule = Threshold(0.9)
    result = run(case, rule)
    decisions = np.minimum(result.exit_index + 1, K - 1) * rule.flops(C)
    heads = (result.exit_index + 1) * head
    np.testing.assert_array_equal(result.cost.flops, result.layers_run * layer + heads + decisions)


@pytest.mark.parametrize("linear", [False, True], ids=["dense", "linear"])
@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_layer_and_head_flops_equal_what_torch_counts(random_model, tokens, linear):
    model = deepcopy(random_model(pool="first"))
    if linear:
        model.use_heads("linear")
    hidden = torch.zeros(2, tokens, 24)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as layer:
            model.backbone.run_layers(hidden, LayerContext(None), 0, 1)
        with FlopCounterMode(display=False) as head:
            model.heads[0](hidden, None)
    assert layer.get_total_flops() == 2 * model.backbone.layer_flops(tokens) > 0
    assert head.get_total_flops() == 2 * model.heads[0].flops(tokens) > 0


def test_seconds_are_the_time_of_the_whole_batch(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    class Slow(Fake):
        def start(self, inputs):
            clock.now += 1
            return super().start(inputs)

        def advance(self, k, state):
            clock.now += 2
            return super().advance(k, state)

        def read(self, k, state):
            clock.now += 4
            return super().read(k, state)

    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    assert loop.early_exit(Slow(), Never(), ALL).cost.seconds == 1 + 4 * 2 + 4
    assert loop.early_exit(Slow(), Threshold(-np.inf), ALL).cost.seconds == 1 + 2 + 4


# Results, records and refusals


@each_rule
def test_a_result_has_one_entry_a_row_of_the_documented_type(case, rule):
    result = run(case, RULES[rule](ALL))
    assert result.logits.shape == (B, C) and result.logits.dtype == case.logits.dtype
    assert result.exit_index.shape == (B,) and result.exit_index.dtype == np.int64
    assert result.layers_run.shape == (B,) and result.layers_run.dtype == np.int64
    assert result.cost.layer_passes.shape == (B,) and result.cost.layer_passes.dtype == np.int64
    assert result.cost.flops.shape == (B,) and (result.cost.flops > 0).all()
    assert isinstance(result.cost.seconds, float) and result.cost.seconds > 0


def test_read_every_exit_gives_all_logits_and_what_each_exit_costs(case):
    logits, flops, _ = read_every_exit(case.segments, case.inputs)
    assert logits.shape == (B, K, C) and flops.shape == (B, K, 2)
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=ATOL)
    never = run(case, Never())
    np.testing.assert_array_equal(flops[:, :, 0].sum(axis=1) + flops[:, -1, 1], never.cost.flops)


def test_a_record_is_replayed_on_all_of_its_units(case):
    with pytest.raises(ValueError, match=f"expected {B} rows, as were recorded, got {B - 1}"):
        loop.early_exit(recorded_case(case).segments, Never(), range(B - 1))


@each_rule
@pytest.mark.parametrize("name", ["torch first", "torch mean", "numpy"])
def test_a_record_replayed_equals_the_loop_on_the_model_cost_and_all(cases, name, rule):
    real, replayed = (run(case, RULES[rule](ALL)) for case in (cases[name], recorded_case(cases[name])))
    assert_same(replayed, real.logits, real.exit_index)
    np.testing.assert_array_equal(replayed.cost.flops, real.cost.flops)
    np.testing.assert_array_equal(replayed.cost.layer_passes, real.cost.layer_passes)


def test_costs_of_rows_are_means_over_rows_though_the_last_batch_is_smaller(random_model, padded_inputs):
    """The operations of the full model, and those of a plan, here one a token with its padding."""

    class OneAToken(Fixed):
        def plan_flops(self, inputs):
            return inputs.input_ids.shape[1]

    ids = [row[: mask.sum()] for row, mask in zip(padded_inputs.input_ids, padded_inputs.attention_mask)]
    encoded = Encoded(ids, [np.zeros_like(row) for row in ids], padded_inputs.texts, 0, 0)
    recorded = record(random_model().segments(), encoded, 4)
    longest = recorded.take(np.argsort([len(row) for row in ids])[4:])
    for some in (recorded, longest):
        assert some.full_flops == pytest.approx(some.replay(Never()).cost.flops.mean())
    assert longest.full_flops > recorded.full_flops
    short, long = np.split(np.sort([len(row) for row in ids]), [4])
    planned = plan_rows(OneAToken(1), encoded, 4)
    assert len(short) > len(long) and planned.cost == pytest.approx((4 * short.max() + 3 * long.max()) / B)


@pytest.mark.parametrize("rule", ["max_probability", "never"])
def test_what_a_row_has_spent_is_what_it_cost(cases, rule):
    """Where tokens leave within a row, which itself has one exit: its layers, and its operations but for the head."""
    logits, flops, _ = (
        array if array is None else array[:, -1:] for array in read_every_exit(*cases["torch mean"][:2])
    )
    token_cost = np.random.default_rng(0).uniform(1, 2, (B, 1, 2))
    recorded = Recorded(EXITS[-1:], logits, flops, [1], {"token_cost": token_cost})
    result = loop.early_exit(recorded, RULES[rule](ALL), range(B))
    np.testing.assert_array_equal(result.logits, logits[:, 0])
    np.testing.assert_array_equal(result.cost.depth, token_cost[:, 0, 0])
    np.testing.assert_array_equal(result.cost.layer_passes, token_cost[:, 0, 0])
    np.testing.assert_allclose(result.cost.flops, token_cost[:, 0, 1] + flops[:, 0, 1], rtol=1e-9)
    np.testing.assert_array_equal(result.layers_run, EXITS[-1])


@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_a_regression_leaves_by_patience_and_returns_one_number_a_row(random_model, padded_inputs, tolerance):
    case = torch_case(random_model(num_labels=1), padded_inputs)
    result = run(case, Patience(1, tolerance))
    expected = np.array([exit_by_hand(case.logits[row], Patience(1, tolerance)) for row in range(B)])
    assert_same(result, case.logits[ALL, expected], expected)
    assert result.logits.shape == (B, 1)
    with pytest.raises(ValueError, match="take Fixed or Patience"):
        run(case, Threshold(0.9))


@pytest.mark.parametrize("rule", [Fixed(K), Threshold((0.5, 0.5))])
def test_a_rule_that_does_not_fit_is_refused_before_anything_runs(rule):
    fake = Fake()
    with pytest.raises(ValueError, match="the fixed exit must be|expected one threshold or 4"):
        loop.early_exit(fake, rule, ALL)
    assert not fake.ran and not fake.was_read


@pytest.mark.parametrize("rule", ["never", "max_probability", "planned"])
def test_a_batch_without_rows_is_refused(case, rule):
    none = case.inputs.take([]) if isinstance(case.inputs, Inputs) else case.inputs[:0]
    with pytest.raises(ValueError, match="expected a batch of at least one row, got none"):
        loop.early_exit(case.segments, RULES[rule]([]), none)


def test_the_model_answers_in_eval_mode_and_its_weights_stay_as_they_were(random_model, padded_inputs):
    model = random_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    segments = RowSegments(model)
    assert not any(module.training for module in model.modules())
    twice = [loop.early_exit(segments, Threshold(0.9), padded_inputs).logits for _ in range(2)]
    np.testing.assert_array_equal(*twice)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loop_its_rules_and_the_tasks_import_without_torch():
    """For the deployer, who has none: an import of torch, direct or not, is an error here."""
    code = """
        import sys

        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch":
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, NoTorch())
        import mini_ee.lab.confidence, mini_ee.lab.early_exit, mini_ee.lab.data.metrics
        import mini_ee.lab.rules, mini_ee.lab.data.tasks
        try:
            import mini_ee.lab.exits.row_exits
        except ImportError as error:
            print(error)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (process.returncode, process.stdout.strip()) == (0, "torch is blocked"), process.stderr
