"""Tests can fail: rows of (place, bug, test that must fail).

`bug` is given what stands at the place, and returns what is planted there. The test runs in this process, with its
own fixtures, which are made before the bug is planted.
"""

import functools
import inspect
import itertools
import math
import sys
import textwrap
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from mini_ee import rules as core_rules
from mini_ee.lab import confidence
from mini_ee.lab.backbones.bert import LayerContext
from mini_ee.lab.baselines import elasticbert
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.tasks import holdout
from mini_ee.lab.exits.generation import TokenSegments
from mini_ee.lab.exits.row_exits import RowState
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.export.tracing import Value
from mini_ee.lab.rule_inputs import with_runtime
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.stages import fine_tune_then_heads, joint_loss
from mini_ee.weights import make_reviews

TESTS = Path(__file__).parent
CAUGHT = (AssertionError, ValueError, RuntimeWarning, pytest.fail.Exception)  # some bugs break shapes: a catch too
OPTIONS = "-q -s -o addopts= --no-header --no-summary -p no:cacheprovider -p no:xdist -p no:doctest".split()

# ---- Bugs that need more than a line ----


def always(wrong):
    """The bug that does not need what it replaces."""
    return lambda true: wrong


def source(old, new):
    """One piece of a function's source is replaced."""

    def bug(true):
        code, module = textwrap.dedent(inspect.getsource(true)), vars(sys.modules[true.__module__])
        if code.count(old) != 1:  # no error that a test may raise
            raise LookupError(f"{old!r} is not in {true.__name__} any more: plant this bug anew")
        exec(code.replace(old, new), namespace := dict(module))
        return namespace[true.__name__]

    return bug


def thresholds_of_the_first_rows(self, k, read, memory):
    """Whoever stays gets the thresholds of the batch's first rows."""
    return with_runtime(self.rule, {"threshold": self.thresholds[: len(read), k]}).stop(k, read, memory)


def measure(wrong):
    """MEASURES: name -> (function, lowest, highest value)."""
    return lambda true: (wrong, *true[1:])


def counts_equal_predictions(self, k, read, memory):
    """t equal predictions instead of t + 1: the first one counts too."""
    predicted = read.argmax(axis=1)
    memory["streak"] = np.where(predicted == memory.get("predicted", -1), memory.get("streak", 0) + 1, 1)
    memory["predicted"] = predicted
    return memory["streak"] >= self.patience


def never_starts_again(self, k, read, memory):
    """A change of prediction does not set the counter back."""
    predicted = read.argmax(axis=1)
    memory["streak"] = memory.get("streak", 0) + (predicted == memory.get("predicted", -1))
    memory["predicted"] = predicted
    return memory["streak"] >= self.patience


def counter_on_the_rule(true):
    memory = {}
    return lambda self, k, read, _: true(self, k, read, memory)


def below_the_threshold(self, k, read, memory):
    return core_rules.MEASURES[self.measure](read) < self.threshold


def zero_times_log_zero(logits):
    """0 ln 0, as in published code."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        return (p * np.log(p)).sum(axis=1)


def in_half_precision(logits):
    """Logits keep their dtype."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted.max(axis=1) / shifted.sum(axis=1)


def softmax_twice(true):
    return lambda logits, full, penalty, target="soft": true(logits.softmax(-1), full, penalty, target)


def own_target(true):
    return lambda logits, full, penalty, target="soft": true(logits, logits, penalty, target)


def keep_without_mask(self, rows):
    return RowState(self.hidden[torch.from_numpy(rows)], LayerContext(None))


def keep_the_first_masks(self, rows):
    return RowState(self.hidden[torch.from_numpy(rows)], LayerContext(self.context.padding[: len(rows)]))


def next_head(shift):
    return lambda true: lambda self, k, state: true(self, (k + shift) % 4, state)


def runs_a_layer_first(true):
    """The bug that takes exit 0 for an exit after the first layer."""

    def bug(self, k, state):
        if k == 0 and self.exits[0] == 0:
            run = self.model.backbone.run_layers
            state = state._replace(hidden=run(state.hidden, state.context, 0, 1))
        return true(self, k, state)

    return bug


def segments_start_at(starts):
    """Segments that do not meet: a layer runs twice, or not at all."""

    def bug(true):
        def advance(self, k, state):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self, "starts", starts)
                return true(self, k, state)

        return advance

    return bug


def no_padding(true):
    return lambda attention_mask, device=None: None


def plain_quantile(rank):
    """The quantile of the calibration rows, without the one more."""

    def conformal_cut(observed, epsilon):
        worst = np.sort(np.where(observed.agrees, -np.inf, observed.confidence).max(axis=1))
        return worst[max(0, math.ceil(rank(len(worst), epsilon) - 1e-9) - 1)]

    return always(conformal_cut)


def gains_of_rows_that_both_get_wrong(task, labels, early, last, label_range):
    """Losses that are not paired with the last exit's own mistakes."""
    return -((early == labels) != (last == labels)).astype(np.int8)


def no_bound(losses, max_loss, level=1.0):
    """A guarantee wherever the hold-out itself loses no more."""
    return np.where(losses.sum(axis=1) <= losses.shape[1] * max_loss, 0.0, 1.0)


def no_bound_of_counts(worse, better, rows, max_loss):
    return np.where(worse - better <= rows * max_loss, 0.0, 1.0)


def wald(worse, better, rows, max_loss):
    """The standard error of the sample, which is too small if few rows differ."""
    loss = (worse - better) / rows
    error = np.sqrt(np.maximum((worse + better) / rows - loss**2, 1e-12) / rows)
    return np.where(loss + 1.645 * error <= max_loss, 0.0, 1.0)


def unmasked(true):
    """Padding is attended to."""

    def batch(self, rows):
        inputs = true(self, rows)
        return replace(inputs, attention_mask=np.ones_like(inputs.attention_mask))

    return batch


def last_layer_left_out(true):
    """If several layers lie between two exits, the last of them is not run."""
    return lambda self, hidden, context, start, stop: true(self, hidden, context, start, stop - (stop - start > 1))


def stacked(bug):
    """Streams: adapters (streams, ...) side by side."""
    return lambda true: lambda parts: bug(true(parts))


def forgets_embeddings(true):
    def keep(self, rows):
        index = torch.from_numpy(rows)
        hidden = None if self.hidden is None else self.hidden[:, : len(rows)]
        return type(self)(self.embedded[index], hidden, self.context.keep(index))

    return keep


def half_step(self, state):
    """An exit that reads the attention half of its layer alone."""
    attended, _ = state.chunk(2, dim=-1)
    return self.norm(self.scale * self.up(torch.relu(self.down(attended))) + attended)


def losses_in_the_full_model(true):
    """A layer's loss in the full model, not in the one that remains."""

    def next_token_losses(backbone, data, remaining, inner=True):
        once = true(backbone, data, range(len(backbone.layers)))
        return [once[layer] for layer in remaining] + once[-1:]

    return next_token_losses


def certainty_of_the_last_exit_too(self, states):
    """BERxiT asks for a certainty where nobody can exit early."""
    return torch.stack([self.policy.exit_logit(k, state) for k, state in enumerate(states[1:])], dim=1)


def history(of_the_first_exit):
    """CAT's memory of earlier exits: oldest first, or with a first exit whose classes are reversed."""

    def remember(before, logits, k):
        if of_the_first_exit and k == 1:
            return logits.softmax(1)[:, None].flip(2)
        if k == 0:
            return None
        p = logits.softmax(1)[:, None]
        return p if before is None else torch.cat((p, before) if of_the_first_exit else (before, p), 1)

    return always(remember)


def confidence_of_their_own_class(true):
    """How confident the exits before were of their own class, not of this one."""

    def features(logits, inner, before, k, exits):
        if before is not None:
            before = before.max(dim=2, keepdim=True).values.expand_as(before)
        return true(logits, inner, before, k, exits)

    return features


def held_out_alone(run, task):
    """Without the rows that max_train left."""
    return holdout(task.split("train"), run.config["seed"])[1]


def first_shard_only(self, work):
    return [work(0)]


def alone(true):
    """HashEE: tokens that have exited give no keys and values."""
    return lambda layer, first, hidden, mask: true(
        layer, first, first, None if mask is None else mask[..., : first.shape[1]]
    )


def read_mask(true):
    """TR-BERT: rows that keep as many tokens as the longest."""

    def compact(hidden, remaining):
        hidden, remaining = true(hidden, remaining)
        return hidden, torch.ones_like(remaining)

    return compact


def off_by(shift):
    """Heads in training read another layer."""

    def bug(true):
        def each_state(self, *inputs):
            exits = self.exits
            self.exits = (*(layer + shift for layer in exits[:-1]), *exits[-1:])
            try:
                return true(self, *inputs)
            finally:
                self.exits = exits

        return each_state

    return bug


def rounds_that_never_end(stages, epochs):
    """The stages of a recipe that is told that each was better than the one before: -100, -99, ..."""
    stages_run, scores = [next(stages)], itertools.count(-100)
    with suppress(StopIteration):
        while True:
            stages_run.append(stages.send(next(scores)))
    return stages_run


def query_and_key(self):
    """Query and key are adapted instead of query and value."""
    query, value = ((pair.A @ pair.B).T for pair in (self.query, self.value))
    return self.scale * torch.cat((query, value, value.new_zeros(self.key, query.shape[1])))


def one_token_late(true):
    def batch(self, rows, device):
        return true(type(self)([Text(text.ids, text.start + 1) for text in self.texts], self.every), rows, device)

    return batch


def policies_of_raw_states(self):
    return [lambda x, k=k: self.policy.exit_logit(k, x) for k in range(len(self.heads))]


def positions(bug):
    """The position of a token behind the prompt."""
    return lambda true: lambda self, rows, some: true(self, rows, [bug(ids) if len(ids) == 1 else ids for ids in some])


def one_slot_off(true):
    return lambda self, rows, some: true(
        self, rows, [[max(p - 1, 0) for p in ids] if len(ids) > 1 else ids for ids in some]
    )


def sampling(name, wrong):
    """Another setting than the one that was given."""

    def bug(true):
        def probabilities(self, *given):
            return true(replace(self, **{name: wrong}), *given)

        return probabilities

    return bug


def part_that_tests_selects(true):
    def split_rows(*given):
        parts = true(*given)
        return parts._replace(selection=parts.test)

    return split_rows


def first_rows(name):
    """A state that keeps one of its tensors of the batch's first rows, whoever stays."""
    return lambda true: lambda self, rows: true(self, rows)._replace(**{name: getattr(self, name)[: len(rows)]})


def changed_config(**change):
    """A backbone is made of another config."""
    return lambda true: lambda self, config, **parts: true(self, replace(config, **change), **parts)


def after_loading(damage):
    """load_backbone ends with `.eval()`: there the loaded model is damaged."""
    return lambda true: lambda self: (damage(self), self.train(False))[1]


def swapped(first, second):
    """Two modules of every layer."""
    return after_loading(lambda model: [[setattr(layer, name, module) for name, module in ((first, getattr(layer, second)), (second, getattr(layer, first)))] for layer in model.layers])


def heads_of(change):
    """Attention of changed queries, keys and values."""
    return lambda true: lambda query, key, value, **rest: true(*change(query, key, value), **rest)


def groups_in_turn(query, key, value):
    """Queries share keys in turn, not in groups."""
    return query[:, torch.arange(query.shape[1]).view(-1, key.shape[1]).T.flatten()], key, value


def interleaved(true):
    """Neighbours rotate as pairs."""

    def rotate(heads, cos, sin):
        swap = torch.arange(heads.shape[-1]).view(2, -1).T.flatten()
        return true(heads[..., swap], cos, sin)[..., swap.argsort()]

    return rotate


def node(kind, becomes=None, **attributes):
    """Nodes of a kind in every graph become others."""

    def bug(true):
        def op(self, op_type, *inputs, **given):
            return true(self, becomes or kind, *inputs, **given | attributes) if op_type == kind else true(self, op_type, *inputs, **given)

        return op

    return bug


# ---- The rows ----

SPEC, CONTRACT, METHODS, PARITY = (f"{name}/test_" for name in ("spec", "contract", "lab/methods", "lab/parity"))

EQUATIONS = [
    ("mini_ee.rules.Patience.stop", always(counts_equal_predictions), "0_loop.py::test_patience_t_stops_where_pabees_counter_reaches_t[2-4]"),
    ("mini_ee.rules.Patience.stop", always(never_starts_again), "0_loop.py::test_patience_t_stops_where_pabees_counter_reaches_t[2-4]"),
    ("mini_ee.raee.neighbour_weights", always(lambda d: 1 / np.maximum(d, 1e-9)), "3_raee.py::test_eq4_to_6_three_neighbours_by_hand"),
    ("mini_ee.raee.neighbour_weights", always(np.ones_like), "3_raee.py::test_eq4_to_6_three_neighbours_by_hand"),
    ("mini_ee.raee.neighbour_weights", always(lambda d: d.min(axis=1, keepdims=True) / d), "3_raee.py::test_eq5_in_the_limit_of_distance_zero_only_the_zero_distances_count"),
    ("mini_ee.raee.passing_values", always(lambda v, tau, top=0: np.where(v > tau, v, 0)), "3_raee.py::test_eq4_a_probability_equal_to_tau_votes"),
    ("mini_ee.raee.passing_values", always(lambda v, tau, top=0: (v >= tau) * 1.0), "3_raee.py::test_eq4_to_6_three_neighbours_by_hand"),
    ("mini_ee.raee.chosen_exit", always(lambda p: p.argmax(axis=1)), "3_raee.py::test_eq6_if_no_neighbour_votes_the_example_runs_through_all_layers"),
    ("mini_ee.raee.chosen_exit", always(lambda p: p.shape[1] - 1 - p[:, ::-1].argmax(axis=1)), "3_raee.py::test_eq6_takes_the_earliest_of_equal_exits"),
    ("mini_ee.raee.exit_values", always(lambda logits, labels: np.exp(logits).max(axis=2) / np.exp(logits).sum(axis=2)), "3_raee.py::test_algorithm_3_1_two_exits_by_hand"),
    # the mean of all rewards, with the trajectory's own: biased
    ("mini_ee.consistent.leave_one_out", always(lambda rewards: rewards.mean(dim=1, keepdim=True)), "4_consistent.py::test_eq5_the_mean_of_10000_sampled_gradients_is_the_enumerated_one_within_its_standard_error[2-True]"),
    ("mini_ee.consistent.leave_one_out", lambda true: lambda rewards: 2 * true(rewards) - rewards, "4_consistent.py::test_eq5_the_mean_of_10000_sampled_gradients_is_the_enumerated_one_within_its_standard_error[2-True]"),
    ("mini_ee.consistent.memorized_layer", always(lambda right, depths: depths[(right.shape[1] - right.sum(dim=1)).clamp(max=right.shape[1] - 1)]), "4_consistent.py::test_eq7_is_the_first_layer_from_which_on_all_exits_are_right_for_every_pattern"),
    # the first right exit, whatever comes later
    ("mini_ee.consistent.memorized_layer", always(lambda right, depths: depths[right.long().argmax(dim=1)]), "4_consistent.py::test_eq7_is_the_first_layer_from_which_on_all_exits_are_right_for_every_pattern"),
]

CORE = "mini_ee."
EQUATIONS += [  # the same of the core, and bugs of its own
    (CORE + "loop.early_exit", source("append((rows[stops], logits))", "append((np.flatnonzero(stops), logits))"), "0_loop.py::test_an_example_stops_in_a_batch_where_it_stops_alone[<class 'mini_ee.rules.Threshold'>-[0.8]]"),
    (CORE + "loop.early_exit", source("values[staying]", "values[: len(staying)]"), "0_loop.py::test_an_example_stops_in_a_batch_where_it_stops_alone[<class 'mini_ee.rules.Patience'>-[2]]"),
    (CORE + "loop.early_exit", source("            break", "            pass"), "0_loop.py::test_an_example_that_stopped_is_neither_run_nor_read_again"),
    (CORE + "rules.Patience.stop", always(lambda self, k, read, memory: np.full(len(read), k >= self.patience)), "0_loop.py::test_patience_t_stops_where_pabees_counter_reaches_t[2-4]"),
    (CORE + "rules.Policy.stop", always(lambda self, k, read, memory: read > 0), "0_loop.py::test_policy_stops_at_the_first_exit_whose_probability_is_above_the_cut[0.8]"),
    (CORE + "consistent.depth_weighted_loss", source("depth * loss", "loss"), "4_consistent.py::test_eq1_is_the_sum_of_losses_weighted_with_their_depth_over_the_sum_of_depths"),
    (CORE + "lora_exits.LowRank.forward", always(lambda self, x, scale: x @ self.A @ self.B), "1_lora_exits.py::test_eq2_an_exit_computes_with_w_plus_ab[2]"),
    (CORE + "lora_exits.log_soft_label", always(lambda logits, T: logits.float().log_softmax(-1)), "1_lora_exits.py::test_eq5_soft_labels_are_the_softmax_of_the_logits_over_t"),
    (CORE + "lora_exits.sgmv", source("@ A[i], B[i]", "@ A[0], B[0]"), "1_lora_exits.py::test_eq6_adds_to_each_row_the_product_with_the_adapters_of_its_own_exit[[5, 5, 5]]"),
    (CORE + "lora_exits.SideBySide.read", lambda true: lambda self, k, state: true(self, k, state._replace(hidden=state.hidden[-1:])), "1_lora_exits.py::test_eq6_side_by_side_is_restart[Threshold(threshold=0.0, measure='max_probability')-2]"),
    (CORE + "lora_exits.LoRAExits.passes", always(lambda self, every_head: np.cumsum(self.exits)), "1_lora_exits.py::test_the_full_model_is_the_last_exit_alone"),
    (CORE + "lora_exits.LoRAExits.flops", always(lambda self, tokens, every: super(type(self), self).flops(tokens, every)), "1_lora_exits.py::test_only_exits_that_are_read_run_and_are_counted[Fixed(exit=1)-False-[1]]"),
    (CORE + "lora_exits.LoRAExits.advance", lambda true: lambda self, k, state: (self.read(k, state), true(self, k, state))[1], "1_lora_exits.py::test_only_exits_that_are_read_run_and_are_counted[Never()-False-[2]]"),
    (CORE + "lora_exits.teacher_of", lambda true: lambda k, last, way: true(k, last, "kd"), "1_lora_exits.py::test_the_teacher_of_each_of_four_exits[segd-teachers2]"),
    *[
        (CORE + "self_supervised.head_loss", bug, f"2_self_supervised.py::{test}")
        for bug in (softmax_twice, own_target)
        for test in ("test_eq1_position_by_position", "test_eq1_hard_targets_have_the_closed_form_optimum[0.1]")
    ],
    *[(CORE + "self_supervised.head_loss", source(*change), f"2_self_supervised.py::test_eq1_position_by_position[{case}]") for *change, case in (("- penalty * entropy", "+ penalty * entropy", "soft-0.1"), ("-(full.float().softmax(-1)", "-(logits.float().softmax(-1)", "soft-0.1"))],
    (CORE + "calibrate.tau", source("enough[-1]", "enough[0]"), "2_self_supervised.py::test_tau_is_the_lowest_confidence_from_which_on_a_share_epsilon_agrees"),
    (CORE + "consistent.log_exit_probabilities", lambda true: lambda z: true(z) + torch.nn.functional.pad(z[:, :1] * 0 - 1, (z.shape[1], 0)), "4_consistent.py::test_eq5_the_exit_probability_is_the_sum_over_all_sequences_of_actions"),
    (CORE + "consistent.hardness_guided_rewards", always(lambda losses, depths, alpha, memorized: -losses - alpha * depths), "4_consistent.py::test_eq3_and_eq4_count_depth_in_layers"),
]

ALONE = "test_compaction_changes_nothing_each_row_leaves_where_it_would_alone[numpy-"
NEVER = "test_never_exit_equals_the_full_model["
TURN, CORE_LOOP = "mini_ee.loop.at_exit", "mini_ee.loop.early_exit"
KEEP, LAST = "state, rows = state.keep(staying), rows[staying]", "k == len(engine.exits) - 1"
FLOPS = "test_flops_count_the_layers_each_row_ran_the_heads_it_passed_and_the_decisions"
STATE = "test_a_rule_that_needs_the_state_alone_reads_a_head_only_for_rows_that_leave_there"
LOOP = [
    (CORE_LOOP, source(KEEP, "state, rows = state.keep(staying), rows[: len(staying)]"), ALONE + "max_probability]"),
    (CORE_LOOP, source(KEEP, "state, rows = state.keep(np.arange(len(staying))), rows[staying]"), ALONE + "max_probability]"),
    (CORE_LOOP, source("values[staying]", "values[: len(staying)]"), ALONE + "remembers]"),
    (CORE_LOOP, source("values[staying]", "values[: len(staying)]"), "test_memory_is_kept_with_the_rows"),
    (CORE_LOOP, source("else plan[rows]", "else plan[: len(rows)]"), ALONE + "planned]"),
    (CORE_LOOP, source("            break", "            pass"), "test_nothing_runs_after_the_last_row_has_left"),
    (CORE_LOOP, source("exit_index[rows[stops]] = k", "exit_index[rows[stops]] = 0"), NEVER + "numpy]"),
    (CORE_LOOP, source("logits[at] = values", "logits[at] = stopped[0][1][: 1]"), ALONE + "max_probability]"),
    ("early_exit.run_segments", source("rule if plan is None else Planned(tuple(plan.tolist()))", "rule"), "test_a_plan_is_asked_for_once_and_stands_above_what_the_rule_would_decide[numpy]"),
    (TURN, source(LAST, "k >= len(engine.exits) - 2"), NEVER + "numpy]"),
    (TURN, source(LAST, "k >= len(engine.exits) - 2"), "test_the_last_exit_takes_whoever_is_left_and_is_not_asked[numpy]"),
    (TURN, source("else logits[stops]", "else logits[: stops.sum()]"), ALONE + "max_probability]"),
    (TURN, source("state if stops.all() else state.keep(np.flatnonzero(stops))", "state"), "test_a_planned_rule_reads_a_head_only_for_rows_that_leave_there"),
    (TURN, source("return state, np.zeros(0, bool), None", "engine.read(k, state)\n        return state, np.zeros(0, bool), None"), "test_never_exit_reads_the_last_head_once"),
    (TURN, source("getattr(engine, rule.needs)(k, state)", "engine.read(k, state)[:, 0]"), STATE),
    ("early_exit.run_segments", source("rule.needs if plan is None else None", "None"), FLOPS),
    ("early_exit.select_heads", source("set(plan.tolist())", "{len(segments.exits) - 1}"), "test_segments_are_told_before_they_run_which_heads_alone_will_be_read[rule1-heads1]"),
    ("segments.Cost", source("(of_state + decision)", "decision"), STATE),
    ("segments.Cost", source("self._rule.flops(math.prod(batch.logits.shape[1:]))", "0.0"), FLOPS),
    ("segments.Cost", source("np.cumsum([segments.layer_passes(k) for k in range(len(segments.exits))])", "np.asarray(segments.exits)"), "test_a_restart_at_each_of_the_exits_3_6_9_12_costs_3_9_18_30_layer_passes"),
    ("mini_ee.rules.Threshold.stop", always(below_the_threshold), "test_layers_run_does_not_grow_as_a_threshold_loosens[numpy-max_probability]"),
    ("backbones.bert.padding_mask", no_padding, "test_padding_does_not_change_the_decision[torch first-never]"),
    *[
        ("exits.row_exits.RowState.keep", always(bug), test)
        for bug in (keep_without_mask, keep_the_first_masks)
        for pool in ("torch first", "torch mean")
        for test in (
            f"test_a_batch_of_B_equals_B_batches_of_one[{pool}-max_probability]",
            f"test_compaction_changes_nothing_each_row_leaves_where_it_would_alone[{pool}-planned]",
        )
    ],
    *[
        ("exits.row_exits.RowSegments.read", next_head(shift), test)
        for shift in (1, -1)
        for test in (
            "test_always_exit_equals_the_first_head[torch mean-always]",
            NEVER + "torch first]",
            "test_chained_segments_equal_the_whole_model[torch mean]",
        )
    ],
    *[
        ("exits.row_exits.RowSegments.advance", segments_start_at(starts), test)
        for starts in ((0, 0, 2, 4), (0, 2, 3, 5))
        for test in (NEVER + "torch mean]", "test_chained_segments_equal_the_whole_model[torch mean]")
    ],
]

NEW = "new_backbone.py::test_"
ZERO = "exit_0.py::test_exit_0_"
ZERO_COSTS = "exit_0.py::test_an_example_that_exits_at_0_runs_no_layer_and_costs_none[Fixed(exit=0)]"
PAIRS = "failure_prediction.py::test_auroc_is_the_share_of_pairs_in_order_and_a_tie_counts_half"
RULES = [
    ("data.metrics.ranks", always(lambda values: np.argsort(np.argsort(values, kind="stable"), kind="stable") + 1), PAIRS),
    ("evaluation.failure_prediction.failures", always(lambda right: ~right), "failure_prediction.py::test_an_exit_fails_where_it_is_wrong_and_a_later_exit_is_right"),
    ("evaluation.failure_prediction.failures", source("[:, ::-1]  #", "  #"), "failure_prediction.py::test_an_exit_fails_where_it_is_wrong_and_a_later_exit_is_right"),
    ("evaluation.failure_prediction.calibration_error", source("np.abs(gaps).sum()", "np.abs(gaps.sum())"), "failure_prediction.py::test_the_calibration_error_is_that_of_a_loop_over_bins[7]"),
    ("confidence.MEASURES.entropy", measure(zero_times_log_zero), "confidence.py::test_a_probability_of_zero_gives_full_confidence_and_no_nan[row0-entropy]"),
    ("confidence.MEASURES.entropy", measure(lambda logits: -core_rules.entropy(logits)), "confidence.py::test_each_measure_equals_a_loop_in_float64[3-entropy]"),
    ("confidence.MEASURES.entropy", measure(lambda logits: core_rules.entropy(logits) / math.log(2)), "confidence.py::test_each_measure_equals_a_loop_in_float64[3-entropy]"),
    ("confidence.MEASURES.normalised_entropy", measure(core_rules.entropy), "confidence.py::test_each_measure_equals_a_loop_in_float64[3-normalised_entropy]"),
    ("confidence.MEASURES.breaking_ties", measure(core_rules.breaking_ties_logits), "confidence.py::test_each_measure_equals_a_loop_in_float64[3-breaking_ties]"),
    ("confidence.MEASURES.max_probability", measure(lambda logits: np.exp(logits).max(axis=1)), "confidence.py::test_each_measure_equals_a_loop_in_float64[3-max_probability]"),
    ("confidence.MEASURES.max_probability", measure(in_half_precision), "confidence.py::test_half_precision_is_computed_in_float32[max_probability]"),
    ("row_thresholds.RowThresholds.stop", always(thresholds_of_the_first_rows), "row_thresholds.py::test_32_rows_with_32_thresholds_stop_as_32_batches_of_one[threshold]"),
    ("mini_ee.rules.Patience.stop", counter_on_the_rule, "rules.py::test_rules_hold_no_state_two_batches_in_turns_get_what_fresh_rules_give"),
    ("rules._json", always(lambda value: value), "rules.py::test_a_rule_written_as_json_and_read_back_is_the_same_rule"),
    *[("calibration.conformal_cut", plain_quantile(rank), "conformal.py::test_of_n_plus_one_rows_each_left_out_in_turn_no_more_are_lost_than_guaranteed") for rank in (lambda n, e: e * n, lambda n, e: e * (n + 1) - 1)],
    *[(f"mini_ee.calibrate.{name}", source(*change), "calibration.py::test_tau_is_the_lowest_confidence_whose_rows_agree_in_a_share_of_epsilon") for name, *change in (("cuts", "np.flatnonzero(confidence != np.append(confidence[1:], -np.inf))", "np.arange(len(order))"), ("cuts", "last + 1", "last"), ("tau", "math.inf", "confidence[-1]"))],
    ("calibration.intervals", source("times[groups]", "times[group]"), "calibration.py::test_intervals_resample_groups"),
    ("mini_ee.calibrate.lowest_passing", source("fixed_sequence(p_values[tested], delta)", "int((p_values[tested] <= delta).sum())"), "calibration.py::test_cuts_are_tested_from_the_strictest_down_and_the_first_that_fails_ends_it"),
    ("mini_ee.calibrate.lowest_passing", source("delta**2", "delta"), "calibration.py::test_some_may_disagree_in_the_first_cut_if_there_are_rows_enough"),
    ("statistics.p_values_of_counts", always(no_bound_of_counts), "guarantee.py::test_at_the_boundary_a_guarantee_is_made_for_a_share_of_alpha_at_most[600-0.02]"),
    ("evaluation.cosine_guarantee.share_p_value", source("successes - 1", "successes"), "cosine_guarantee.py::test_the_p_value_is_an_upper_binomial_tail"),
    ("evaluation.cosine_guarantee.share_p_value", always(lambda successes, count, epsilon: float(successes < epsilon * count)), "cosine_guarantee.py::test_over_repeated_draws_the_guarantee_is_violated_for_a_share_of_delta_at_most"),
    ("training.default_rule.paired_losses", always(gains_of_rows_that_both_get_wrong), "guarantee.py::test_candidates_and_their_order_come_from_the_selection_part_and_the_figures_from_the_test_part"),
    ("training.default_rule.paired_p_values", always(no_bound), "guarantee.py::test_a_rule_is_taken_from_59_test_rows_that_lose_nothing_and_not_from_fewer[58-0-False]"),
    ("statistics.p_values_of_counts", always(wald), "guarantee.py::test_at_the_boundary_a_guarantee_is_made_for_a_share_of_alpha_at_most[350-0.0]"),
    ("data.tokenizer.Encoded.batch", unmasked, "conformance.py::test_a_batch_of_rows_is_its_rows_alone_padding_included[joint]"),
    ("training.state.read_tensors", lambda true: lambda path, signed=False: true(path), "training.py::test_a_damaged_state_and_other_settings_are_refused[no-checksum]"),
    ("training.train_rows.split_rows", part_that_tests_selects, "training.py::test_nothing_that_a_training_chooses_has_read_the_rows_that_test_the_default_rule[right-tool]"),
    ("exits.heads.pooled", always(lambda hidden, mask, pool: hidden.mean(dim=1)), "exits.py::test_a_head_is_linear_of_tanh_of_dense_of_the_pooled_vector[3-mean]"),
    ("exits.heads.pooled", always(lambda hidden, mask, pool: hidden[:, -1]), "exits.py::test_a_head_is_linear_of_tanh_of_dense_of_the_pooled_vector[3-mean]"),
    ("exits.heads.pooled", always(lambda hidden, mask, pool: (hidden if mask is None else hidden * mask[:, 0, 0, :, None]).mean(dim=1)), "exits.py::test_a_head_is_linear_of_tanh_of_dense_of_the_pooled_vector[3-mean]"),
    ("exits.row_exits.RowExits.classify", lambda true: lambda self, k, state: true(self, 3, state), "exits.py::test_the_loss_of_exit_k_reaches_its_head_and_the_layers_up_to_e_k_alone[1]"),
    ("exits.heads.exit_heads", source('"mean" if layer == 0 and pool != TOKENS else pool', "pool"), ZERO + "of_every_encoder_is_exported[bert]"),
    ("exits.heads.pooled", always(lambda hidden, mask, pool: hidden[:, 0]), ZERO + "reads_the_mean_of_the_embeddings_whatever_the_other_exits_read[mean]"),
    ("exits.row_exits.RowSegments.advance", runs_a_layer_first, ZERO_COSTS),
    ("exits.row_exits.RowSegments.advance", runs_a_layer_first, ZERO + "reads_the_mean_of_the_embeddings_whatever_the_other_exits_read[mean]"),
    ("segments.Segments.layer_passes", always(lambda self, k: max(1, self.exits[k])), ZERO_COSTS),
    ("training.stages.reads_states", always(lambda model: True), "new_head.py::test_its_weights_learn_from_tokens_on_a_frozen_backbone_too"),
    ("training.stages.weighted_by_depth", source("max(1, depth)", "depth"), "exit_0.py::test_a_training_gives_exit_0_the_weight_of_an_exit_after_layer_1"),
    ("backbones.bert.Bert.run_layers", last_layer_left_out, "exits.py::test_forward_reads_head_k_on_the_hidden_state_after_layer_e_k[mean]"),
    ("backbones.bert.LayerContext.keep", always(lambda self, rows: self._replace(padding=self.padding[: len(rows)])), NEW + "rows_that_are_kept_go_on_as_if_the_others_had_never_been_there[bert-[1, 3]]"),
    ("backbones.bert.LayerContext.repeat", always(lambda self, count: self._replace(padding=self.padding.repeat_interleave(count, 0))), NEW + "the_context_of_a_repeated_batch_repeats_it[bert]"),
    ("backbones.bert.Bert.run_layers", lambda true: lambda self, *given: true(self, *given[:4]), NEW + "adapters_see_every_projection_of_every_layer_that_runs[bert]"),
    ("backbones.llama.Decoder.run_layers", lambda true: lambda self, hidden, context, start, stop: true(self, hidden, context, min(start + 1, stop), stop), NEW + "layers_chained_one_by_one_are_the_whole_model[llama]"),
    ("data.rankings.top_k_kept", source("(-numbers, query)", "(numbers, query)"), "top_k.py::test_the_top_k_is_a_set_and_of_equal_numbers_the_earlier_text_is_better[2]"),
    ("data.rankings.top_k_kept", source("(moved == 0)", "(moved <= 2)"), "top_k.py::test_a_query_is_kept_or_not_as_a_loop_over_its_texts_says"),
    ("top_k.choose_threshold", source("recorded.take(~proposes)", "recorded.take(proposes)"), "top_k.py::test_the_threshold_is_the_loosest_down_to_which_every_one_passes_its_test[0.8-0.1]"),
    ("training.holdout.split_rows", source("task.top_k is None", "task"), "top_k.py::test_all_texts_of_a_query_are_in_one_part"),
]
META = "cat.py::test_exits_and_meta_classifiers_are_those_of_the_paper[mean-False]"
ENCODERS = "trained_encoders.py::test_"
MEAN = "elasticbert.py::test_a_layer_learns_from_the_mean_of_the_exits_above_it_and_a_head_from_its_own[rows]"
COPIED = "balcony.py::test_with_copy_state_a_balcony_reads_the_state_at_which_a_token_exited"
SHADOWS = "del.py::test_shadow_tokens_are_those_of_every_exit_where_the_full_model_has_read_its_own_text"
RECOMPUTED = "balcony.py::test_with_recompute_each_token_has_the_logits_of_its_exit_in_the_whole_text"
MIXED = "baselines.py::test_mixed_training_teaches_the_backbone_by_the_last_exit_and_then_all_weights_by_the_mean"
OF_METHODS = [
    ("token_tasks.TokenTask.counted", source("counts & (ids != special)", "counts"), "token_tasks.py::test_the_confidence_is_that_of_the_least_confident_decision"),
    ("token_tasks.TokenTask.weakest", source("np.where(counted, likeliest, np.float32(1)).min", "likeliest.min"), "token_tasks.py::test_the_confidence_is_that_of_the_least_confident_decision"),
    ("token_tasks.spans", source("end[:, more:]", "end[:, : tokens - more]"), "token_tasks.py::test_the_likeliest_span_is_found_and_is_not_longer_than_the_longest_answer"),
    ("token_tasks.numbered", always(lambda rows: np.zeros(len(rows), np.int64)), "token_tasks.py::test_numbers_are_equal_when_all_decisions_are_equal_whatever_the_padding"),
    ("methods.lora_exits.LoRAExits.scale", always(property(lambda self: 1.0)), "lora_exits.py::test_an_exit_of_every_family_computes_with_w_plus_ab[2-bert]"),
    ("methods.lora_exits_sgmv._shrink", always(lambda x, A: x @ A.roll(1, 0)), "sgmv.py::test_it_adds_in_place_to_the_columns_that_it_is_given[equal]"),
    ("methods.lora_exits_sgmv._stack", stacked(lambda A: A * 0), "lora_exits.py::test_an_exit_of_every_family_computes_with_w_plus_ab[2-bert]"),
    ("methods.lora_exits_sgmv._stack", stacked(lambda A: 2 * A), "lora_exits.py::test_an_exit_of_every_family_computes_with_w_plus_ab[2-bert]"),
    ("methods.lora_exits.Config.factor", always(lambda self, classes: 1.0), "segd.py::test_t_squared_multiplies_the_divergence_and_not_a_squared_error[2-9.0]"),
    ("methods.lora_exits_sgmv._stack", stacked(lambda A: A.roll(1, 0)), "lora_exits.py::test_every_schedule_gives_every_exit_the_logits_that_it_has_alone[2-bert-[[0, 1, 2]]]"),
    ("methods.lora_exits_sgmv._stack", stacked(lambda A: A.roll(1, 0)), "lora_exits.py::test_a_ragged_batch_equals_each_exits_rows_apart[2-bert-(0, 1, 2, 0, 1, 2, 2)]"),
    ("methods.lora_exits_streams.LoRAState.keep", forgets_embeddings, "lora_exits.py::test_parallel_equals_restart_and_a_batch_equals_rows_alone[Threshold(threshold=0.75, measure='max_probability')-[[0, 1, 2]]]"),
    ("methods.raee_collect.untrained_rows", always(held_out_alone), "raee_run.py::test_the_datastore_holds_all_rows_that_a_training_with_max_train_left"),
    ("methods.raee_controls.knn_labels", always(lambda labels, weights: labels[:, 0]), "raee_run.py::test_controls_are_those_of_loops_over_rows"),
    ("methods.raee.neighbour_weights", always(lambda distances: 1 / (1e-6 + distances[:, ::-1])), "raee_run.py::test_controls_are_those_of_loops_over_rows"),
    ("methods.raee_controls.best_single_exit", always(lambda values: values.shape[1] - 1), "raee_run.py::test_controls_are_those_of_loops_over_rows"),
    ("methods.raee_controls.earliest_right_exit", always(lambda values: np.zeros(len(values), np.int64)), "raee_run.py::test_controls_are_those_of_loops_over_rows"),
    ("methods.raee_controls.shuffled_plan", always(lambda plan, seed: np.zeros_like(plan)), "raee_run.py::test_random_layers_have_the_plans_mean_and_a_spread_over_lots"),
    ("methods.raee_datastore.Datastore._map_shards", always(first_shard_only), "retrieval.py::test_the_nearest_of_all_shards_are_those_of_loops_over_all_rows[3]"),
    ("exits.token_exits.TokenExits.each_state", off_by(1), "self_supervised.py::test_train_and_inference_read_the_same_layer"),
    ("exits.token_exits.TokenExits.each_state", off_by(-1), "self_supervised.py::test_train_and_inference_read_the_same_layer"),
    ("training.loop.in_turn", always(rounds_that_never_end), "consistent.py::test_rounds_end_with_the_first_that_betters_nothing_and_leave_the_best_weights[verdicts0-3-4]"),
    ("methods.consistent.with_coins", lambda true: lambda z, epsilon: true(z, 0.0), "consistent.py::test_the_probability_of_an_exit_is_the_sum_over_all_sequences_of_coins_and_actions[0.5]"),
    ("mini_ee.consistent.inferred_reward", always(lambda logits, rewards: float(rewards[:, -1].mean())), "consistent.py::test_held_out_tokens_leave_at_the_first_policy_above_one_half"),
    ("exits.token_exits.TokenExits.policies", always(property(lambda self: [lambda x: self.policy.exit_logit(1, x)] * 2)), "consistent.py::test_a_written_token_leaves_where_its_policy_first_says_more_than_the_cut"),
    ("baselines.adainfer.MAX_STEPS", always(20), "adainfer.py::test_the_svm_meets_the_conditions_of_its_optimum[100.0-0.3]"),
    ("baselines.mixed.mean_loss", always(joint_loss), MIXED),
    ("baselines.mixed.recipe", always(fine_tune_then_heads), MIXED),
    ("baselines.right_tool.fit_temperature", always(lambda logits, labels: 1.0), "baselines.py::test_the_temperature_is_the_one_that_makes_the_labels_likeliest[4.0]"),
    ("baselines.right_tool.fit_temperature", lambda true: lambda logits, labels: 1 / true(logits, labels), "baselines.py::test_the_temperature_is_the_one_that_makes_the_labels_likeliest[4.0]"),
    ("exits.row_exits.RowExits.exit_logits", always(certainty_of_the_last_exit_too), "baselines.py::test_even_steps_pay_for_the_last_exit_and_odd_ones_for_all_and_for_the_certainty"),
    ("baselines.calm.chernoff", always(lambda mean, limit, count: float(mean > limit)), "calm.py::test_the_guarantee_is_broken_for_a_share_of_delta_of_calibration_sets_at_most"),
    ("exits.lens.fit_in_closed_form", source("RIDGE * count", "RIDGE"), "lens.py::test_the_closed_form_is_the_least_squares_of_the_stacked_problem"),
    ("exits.lens.LensHead.shorten", source("descending=True", "descending=False"), "lens.py::test_the_short_list_has_the_most_frequent_tokens_of_the_training"),
    ("exits.lens.LensHead.likely_rows", always(lambda self: self.decoder.lm_rows()), "lens.py::test_the_short_list_measure_is_breaking_ties_among_its_tokens"),
    ("exits.token_exits.TokenExits.begin", source("text.start + 1 :", "text.start :"), "lens.py::test_the_short_list_has_the_most_frequent_tokens_of_the_training"),
    ("exits.decoding.DecoderSegments.state_flops", always(lambda self, k, needs: 0.0), "lens.py::test_decoding_costs_what_the_record_says[short_list]"),
    ("exits.token_exits.TextData.states", source("F.rms_norm(states, states.shape[-1:], eps=EPS)", "states"), "lens.py::test_states_beyond_half_precision_are_stored_too"),
    ("methods.self_supervised.sparse_loss", source(".clamp(min=0)", " * 0"), "lens.py::test_the_sparse_loss_is_a_cross_entropy_over_the_likeliest_words_and_one_more_outcome"),
    ("training.training_text.cheapest", source("saved[best] >= LEAST_SAVED", "True"), "lens.py::test_the_rule_is_the_cheapest_heads_included"),
    ("evaluation.savings_estimate.savings_at", source("1.0 if costs.read_once else ", ""), "lens.py::test_the_estimate_reads_lenses_through_a_gate_and_one_head_a_token"),
    # the keys of an exit: those of the last layer's cache, of raw states, of no token that is filled in
    ("backbones.cache.LayerContext.of_exit", always(lambda self, k: self), RECOMPUTED),
    ("backbones.cache.Cache.of_exit", lambda true: lambda self, k: true(self, 0), RECOMPUTED),
    ("baselines.balcony.BalconySegments.run", lambda true: lambda self, *given: TokenSegments.run(self, *given), RECOMPUTED),
    ("baselines.balcony.BalconySegments.copy_state", lambda true: lambda self, *given: TokenSegments.copy_state(self, *given), COPIED),
    ("baselines.balcony.BalconySegments.draft_logits", lambda true: TokenSegments.draft_logits, "balcony.py::test_a_balcony_drafts_what_its_exit_predicts_in_the_whole_text[0]"),
    ("baselines.balcony.BalconySegments.run", lambda true: lambda self, *given: TokenSegments.run(self, *given), "balcony.py::test_a_balcony_drafts_what_its_exit_predicts_in_the_whole_text[0]"),
    ("baselines.balcony.self_distillation_loss", source("logits in exits", "logits in exits[:1]"), "balcony.py::test_the_loss_is_the_mean_divergence_from_the_full_model"),
    ("baselines.balcony.Balcony.forward", always(lambda self, state: self.decoder.lm_logits(state)), "balcony.py::test_an_exit_is_a_decoder_with_one_layer_more_than_the_exit[llama]"),
    ("baselines.cat.remember", history(of_the_first_exit=True), META),
    ("baselines.cat.remember", history(of_the_first_exit=False), META),
    ("baselines.cat.features", confidence_of_their_own_class, META),
    ("baselines.dynamic_exit_layer.tokens_per_layer", source("np.outer(layers[:-1], drafts)", "np.outer(layers[:-1], drafts + 1)"), "del.py::test_tokens_per_layer_are_the_expected_tokens_over_the_layers_that_are_loaded"),
    ("baselines.dynamic_exit_layer.OMEGA", always(1.0), "del.py::test_acceptance_is_a_decayed_share_and_the_threshold_lies_between_the_two_confidences"),
    ("baselines.dynamic_exit_layer.CONTEXT", always(64), SHADOWS),
    ("baselines.dynamic_exit_layer.DynamicExitLayer.observe", always(lambda self, segments, states, true, read: segments.compare(states, true, read | True)), SHADOWS),
    ("baselines.dynamic_exit_layer.DynamicExitLayer.choose", always(lambda self: None), "del.py::test_the_exit_of_the_most_tokens_per_layer_drafts_and_none_where_no_draft_pays"),
    ("baselines.dynamic_exit_layer.DynamicExitLayer.limit", lambda true: lambda self, logits, drafted, most: true(self, logits, drafted - 1, most), "del.py::test_the_first_draft_below_the_threshold_is_the_last"),
    ("baselines.dree.TaskBranch.forward", always(half_step), "dree.py::test_exits_are_the_equations_in_training_and_in_segments[bert-mean]"),
    ("baselines.dree.TaskBranch.forward", always(half_step), "dree.py::test_a_branch_without_adapter_is_the_layer"),
    ("baselines.dree.equiangular_frame", always(lambda width, classes: torch.eye(width)[:, :classes]), "dree.py::test_the_vectors_of_a_frame_have_length_one_and_stand_equally_far_apart[3]"),
    ("baselines.dree.BranchInputs.__getitem__", lambda true: lambda self, rows: true(self, rows[::-1]), "dree.py::test_the_second_stage_learns_from_what_the_backbone_gives_computed_once[mean]"),
    # no equilibrium, half of it, one exit too many
    ("baselines.elasticbert.balanced", always(lambda k, hidden, exits: (hidden, hidden)), MEAN),
    ("baselines.elasticbert.balanced", always(lambda k, hidden, exits: (hidden, elasticbert.rescaled(hidden, (exits - k - 1) / (exits - k)))), MEAN),
    ("baselines.elasticbert.balanced", lambda true: lambda k, hidden, exits: true(k, hidden, exits + 1), MEAN),
    ("baselines.free.Mixture.responsibility", always(lambda self, gaps, agrees: agrees.astype(float)), "free.py::test_a_step_of_em_is_that_of_a_loop"),
    ("backbones.bert.padding_mask", no_padding, "hashee.py::test_a_rows_answer_does_not_depend_on_its_batch[bert-first]"),
    ("baselines.hashee.attend", alone, "hashee.py::test_a_token_that_has_left_is_still_read_and_changes_no_more[bert-mean]"),
    ("baselines.layer_dropout.exit_scale", always(lambda exit, layers, scale: scale * exit), "layerskip.py::test_the_loss_is_the_weighted_sum_and_reads_only_heads_whose_turn_it_is"),
    ("baselines.layer_dropout.learning", always(lambda exits, batch, config: [True] * len(exits)), "layerskip.py::test_the_loss_is_the_weighted_sum_and_reads_only_heads_whose_turn_it_is"),
    ("baselines.layer_dropout.layer_dropout", always(lambda layer, layers, batch, config: config.dropout), "layerskip.py::test_the_first_layer_always_runs"),
    ("baselines.palbert.PonderState.keep", first_rows("current"), "palbert.py::test_a_row_leaves_once_it_would_have_left_with_a_chance_above_q_alone_as_in_a_batch"),
    ("baselines.sleb.next_token_losses", losses_in_the_full_model, "sleb.py::test_the_search_is_the_greedy_one_over_models_that_are_built_anew"),
    ("baselines.tr_bert.compact", read_mask, "tr_bert.py::test_a_rows_answer_does_not_depend_on_its_batch[bert-mean]"),
    ("baselines.tr_bert.leave_one_out", always(lambda rewards: rewards.mean(dim=1, keepdim=True)), "tr_bert.py::test_the_gradient_is_that_of_the_reward"),
    ("training.embedding_stages.cosent_loss", source("scores[:, None] > scores[None, :]", "scores[:, None] < scores[None, :]"), ENCODERS + "one_depth_trains_the_first_exit_alone[pairs]"),
    ("training.embedding_stages.alignment", source("last.detach()", "last"), ENCODERS + "the_last_layer_is_a_teacher_without_gradient"),
    ("baselines.starbucks.starbucks_loss", source(", 1.0)", ", KL_TEMPERATURE)"), ENCODERS + "starbucks_trains_every_layer_with_its_own_size[texts]"),
    ("baselines.matryoshka_2d.two_dimensional_loss", source("for embedding in shallow)", "for embedding in [last])"), ENCODERS + "2dmse_trains_the_last_layer_and_one_that_is_drawn[texts]"),
    ("baselines.matryoshka_2d.drawn", always(lambda count: 0), ENCODERS + "every_layer_but_the_last_is_drawn"),
    ("baselines.cosine_predictor.prediction_loss", source("mean(dim=0).sum()", "mean()"), ENCODERS + "the_loss_of_the_predictor_is_a_squared_error"),
    ("exits.embedding_exits.PairData.batch", lambda true: lambda self, rows, device: true(self, rows[::-1], device), ENCODERS + "pairs_are_scored_by_spearman_and_batched_with_both_texts"),
]

COPIES = "generation.py::test_copy_state_and_recompute_are_what_their_definitions_say["
GREEDY = "generation.py::test_greedy_text_is_that_of_transformers_token_for_token[llama]"
LOSSLESS = "generation.py::test_lossless_text_is_the_full_models[llama-1-4-0.0]"
BLOCKS = "t5_tokens.py::test_blocks_over_a_cache_are_the_whole_answer[t5]"
if find_spec("triton"):
    late = lambda true: lambda x, W, starts: true(x, W, (1, *starts[1:]))  # noqa: E731 - every segment begins a row late
    OF_METHODS += [("methods.lora_exits_sgmv_triton._launch", late, "sgmv_triton.py::test_the_kernel_twice_equals_the_loop[8-ragged-small]")]
OF_MODELS = [
    # a gap behind the prompt, and a position too low
    ("exits.generation.TokenSegments.block", positions(lambda some: [position + 2 for position in some]), GREEDY),
    ("exits.generation.TokenSegments.block", positions(lambda some: [max(position - 1, -1) for position in some]), GREEDY),
    ("backbones.llama.Decoder.copy_state", always(lambda *given: None), COPIES + "copy_state-llama-max_probability]"),
    ("backbones.llama.Decoder.copy_state", lambda true: lambda self, hidden, *more: true(self, hidden * 0, *more), COPIES + "copy_state-llama-max_probability]"),
    ("exits.generation.TokenSegments._slots", one_slot_off, COPIES + "copy_state-llama-max_probability]"),
    ("exits.generation.TokenSegments._slots", one_slot_off, COPIES + "recompute-llama-max_probability]"),
    ("exits.lossless._accepted", always(lambda drafted, true, stop: drafted or true), LOSSLESS),
    ("exits.lossless._accepted", always(lambda drafted, true, stop: true), LOSSLESS),
    *[("exits.generation.Sampling.probabilities", sampling(name, wrong), f"generation.py::test_probabilities_are_those_of_a_loop_over_tokens[{case}]")
      for name, wrong, case in (("temperature", 2.0, "1.0-None-None-1.0"), ("top_k", 3, "1.0-None-4-1.0"), ("top_p", 0.4, "1.0-0.7-None-1.0"), ("repetition_penalty", 1.4, "1.5-None-None-1.0"))],
    ("exits.token_exits.QueryValueAdapter.delta", always(query_and_key), "tokens.py::test_folded_adapters_are_w_plus_scale_times_a_b_on_query_and_value_alone[llama]"),
    ("exits.token_exits.QueryValueAdapter.adapt", always(lambda self, name, x, y: y), "tokens.py::test_folding_changes_no_state_and_what_is_saved_stays[llama]"),
    ("exits.token_exits.TextData.batch", one_token_late, "tokens.py::test_tokens_behind_the_start_count_and_are_labelled_with_the_token_that_follows"),
    ("exits.text_record._measures", always(lambda log_p: {name: log_p.exp().amax(-1) for name in confidence.MEASURES}), "tokens.py::test_every_measure_is_that_of_confidence_py_on_the_logits[entropy]"),
    ("exits.token_exits.TokenExits.policies", always(property(policies_of_raw_states)), "tokens.py::test_policies_read_states_behind_the_norm_of_their_head"),
    # the cache of another layer, of the batch's first rows
    ("backbones.t5_layers.Memory.heads", lambda true: lambda self, depth, *more: true(self, 0, *more), BLOCKS),
    ("backbones.t5_layers.Memory.heads", lambda true: lambda self, depth, layer, rows, adapt: true(self, depth, layer, rows and list(range(len(rows))), adapt), BLOCKS),
    ("backbones.t5_layers.Layer.write_keys", lambda true: lambda self, hidden, *more: true(self, hidden * 2 + 1, *more), "t5_tokens.py::test_with_copy_state_a_state_stands_in_for_those_above_it[t5-v1.1]"),
    ("backbones.deberta.Layer.position_scores", lambda true: lambda self, query, key, tables, index: true(self, query, key, {term: table.flip(0) for term, table in tables.items()}, index), "deberta.py::test_every_schedule_gives_every_exit_what_it_has_alone[deberta-('query', 'value', 'pos_proj', 'pos_q_proj')-{}]"),
    *[("methods.raee_encoders.pooled", always(bug), "encoders.py::test_own_states_are_the_mean_over_the_tokens_of_the_row_after_the_layer[2]") for bug in (lambda hidden, mask, pool: hidden[:, 0], lambda hidden, mask, pool: hidden[:, -1], lambda hidden, mask, pool: hidden.amax(dim=1))],
]

BERTS = "bert.py::test_hidden_states_pooled_outputs_and_logits_are_those_of_transformers["
FAMILIES = {name: f"{name}.py::test_hidden_states_and_logits_are_those_of_transformers" for name in ("deberta", "modernbert", "t5", "decoder")}
ATTENTION = "F.scaled_dot_product_attention"
OF_FAMILIES = [
    *[(f"backbones.{place}", bug, BERTS + kind + "]") for kind, place, bug in (
        ("bert", f"bert.{ATTENTION}", lambda true: lambda *heads, attn_mask, dropout_p: true(*heads)),
        ("bert", f"bert.{ATTENTION}", heads_of(lambda query, key, value: (key, query, value))),
        ("bert", f"bert.{ATTENTION}", lambda true: lambda *heads, **rest: true(*heads, scale=1.0, **rest)),
        ("bert", "bert.ACTIVATIONS.gelu", always(lambda x: torch.nn.functional.gelu(x, approximate="tanh"))),
        ("bert", "bert.Embeddings.forward", lambda true: lambda self, ids, types: true(self, ids, 1 - types)),
        ("bert", "bert.Embeddings.forward", lambda true: lambda self, ids, types: true(self, ids)),
        ("bert", "bert.Bert.__init__", changed_config(num_attention_heads=2)),
        ("bert", "bert.Bert.eval", swapped("attention_norm", "output_norm")),
        ("bert", "bert.Bert.pooled", source("torch.tanh", "")),
        ("bert", "bert.Bert.eval", after_loading(lambda model: model.lm_head.bias.zero_())),
        ("roberta", "bert.Embeddings.forward", source("real.cumsum(1) * real", "torch.ones_like(real).cumsum(1)")),
        ("roberta", "bert.Embeddings.forward", source(" + self.config.pad_token_id)", ")")),
        ("roberta", "bert.ACTIVATIONS.relu", always(torch.nn.functional.gelu)),
        ("albert", "bert.ACTIVATIONS.gelu_new", always(torch.nn.functional.gelu)),
        ("albert", "bert.Bert.eval", after_loading(lambda model: model.embeddings.to_hidden.bias.zero_())),
        ("elasticbert", "bert.Bert.pooled", source("self.poolers[str(depth)](", 'self.poolers["1"](')),
        ("elasticbert", "bert.Bert.__init__", changed_config(layer_norm_eps=1e-12)),
        ("electra", "electra.ElectraConfig.head_act", always("relu")),
        ("distilbert", "bert.Bert.__init__", changed_config(layer_norm_eps=1e-3)),
        ("mpnet", "relative_biases.Biases.forward", lambda true: lambda self, *places: true(self, *places).mT),
        ("mpnet", "relative_biases.buckets", lambda true: lambda distances, both, config: true(distances, False, config)),
        ("mpnet", "mpnet.padding_mask", always(lambda mask, device=None: None)),
    )],
    *[(f"backbones.{place}", bug, f"{FAMILIES['deberta']}[{kind}]") for kind, place, bug in (
        *[(kind, "deberta.Layer.position_scores", lambda true: lambda self, q, k, tables, index: true(self, q, k, dict(zip(tables, [*tables.values()][::-1])), index)) for kind in ("deberta", "deberta-v2")],
        *[(kind, "deberta.Layer.position_scores", lambda true: lambda self, q, k, tables, index: true(self, q, k, tables, index.T)) for kind in ("deberta", "deberta-v2")],
        ("deberta", "deberta.Layer.position_scores", lambda true: lambda self, q, k, tables, index: true(self, q, k, tables | {"p2c": tables["p2c"].flip(-2)}, index)),  # by (j, i), as the paper prints it
        ("deberta", "deberta.HeadByHead.from_file", always(lambda self, weight: weight)),
        ("deberta", "deberta.padding_mask", always(lambda mask, device: None)),
        ("deberta", "deberta.Deberta.eval", after_loading(lambda model: [setattr(layer, "scale", 4**-0.5) for layer in model.layers])),
        ("deberta", "deberta.Deberta.eval", after_loading(lambda model: [layer.v_bias.zero_() for layer in model.layers])),
        ("deberta-v2", "deberta_config.table_rows", always(lambda distances, config: (distances + config.span).clamp(0, 2 * config.span - 1))),
        ("deberta-v2", "deberta_config.table_rows", source("ceil", "floor")),
        ("deberta-v2", "deberta.Embeddings.forward", lambda true: lambda self, ids, types, padding: true(self, ids, types, None)),
        ("deberta-v2", "deberta.Deberta.eval", after_loading(lambda model: setattr(model.positions, "norm", None))),
        ("deberta-v2", "deberta.Deberta.eval", after_loading(lambda model: setattr(model.layers[0], "conv", None))),
        ("deberta-v2", "deberta.Deberta.eval", after_loading(lambda model: setattr(model.layers[0].conv, "activation", torch.tanh))),
    )],
    *[(f"backbones.{place}", bug, FAMILIES["modernbert"]) for place, bug in (
        ("modernbert.padding_mask", always(lambda mask, device: None)),
        ("modernbert.ModernBert._near", lambda true: lambda self, places, padding: true(self, places, None)),
        *[("modernbert.ModernBert.__init__", changed_config(**change)) for change in ({"local_attention": 6}, {"local_attention": 64}, {"layer_types": ("full_attention",) * 3}, {"global_rope_theta": 20.0, "local_rope_theta": 500.0}, {"hidden_activation": "gelu_new"}, {"classifier_activation": "gelu_new"}, {"norm_eps": 1e-2})],
        ("cache.rotate", lambda true: lambda heads, cos, sin: true(heads, cos, -sin)),
        ("modernbert.ModernBert.eval", swapped("gate", "up")),
        ("modernbert.ModernBert.eval", after_loading(lambda model: setattr(model.layers[0], "attention_norm", model.layers[1].attention_norm))),
        ("modernbert.ModernBert.eval", after_loading(lambda model: setattr(model, "norm", torch.nn.Identity()))),
        ("modernbert.ModernBert.eval", after_loading(lambda model: model.lm_head.bias.zero_())),
    )],
    *[(f"backbones.{place}", bug, f"{FAMILIES['t5']}[{kind}]") for kind, place, bug in (
        ("t5", f"t5_layers.{ATTENTION}", lambda true: lambda *heads, scale, **rest: true(*heads, scale=5**-0.5 * scale, **rest)),
        *[("t5", "relative_biases.buckets", lambda true, change=change: lambda *given: true(*change(*given))) for change in (lambda r, both, config: (-r, both, config), lambda r, both, config: (r, False, config), lambda r, both, config: (r, True, config), lambda r, both, config: (r, both, replace(config, relative_attention_max_distance=5)))],
        ("t5", "t5.T5.context", source(".masked_fill(places > places[:, None], -torch.inf)", "")),
        ("t5", "t5.padding_mask", always(lambda mask, device: None)),
        ("t5", "t5.T5.context", source("readable, bias)", "None, bias)")),
        ("t5", "t5_layers.Layer.memory_heads", source('"cross_key_value", memory,', '"cross_key_value", self.cross_norm(memory),')),
        ("t5", "t5.T5.eval", after_loading(lambda model: setattr(model, "biases", model.encoder_biases))),
        ("t5", "t5.T5.eval", after_loading(lambda model: setattr(model, "encoder_norm", torch.nn.Identity()))),
        ("t5", "t5.T5.eval", after_loading(lambda model: setattr(model.norm, "scale", 1.0))),
        ("t5-v1.1", "t5.T5.eval", after_loading(lambda model: setattr(model.norm, "scale", 8**-0.5))),
        ("t5-v1.1", "t5.T5.eval", after_loading(lambda model: setattr(model, "lm_head", None))),
        ("t5-v1.1", "t5.T5.eval", swapped("gate", "gated")),
        ("t5-v1.1", "t5.T5.eval", after_loading(lambda model: [setattr(layer, "activation", torch.nn.functional.gelu) for layer in model.layers])),
    )],
    *[(f"backbones.{place}", bug, f"{FAMILIES['decoder']}[{kind}]") for kind, place, bug in (
        ("llama", f"cache.{ATTENTION}", lambda true: lambda *heads, attn_mask, is_causal, **rest: true(*heads, **rest)),
        *[("llama", f"cache.{ATTENTION}", heads_of(change)) for change in (groups_in_turn, lambda q, k, v: (q, k.flip(1), v), lambda q, k, v: (q * 2, k, v))],
        *[("llama", "cache.rotate", bug) for bug in (always(lambda heads, cos, sin: heads), interleaved, lambda true: lambda heads, cos, sin: true(heads, cos, -sin if heads.shape[2] > 1 else sin))],
        ("llama", "layers.RMSNorm.forward", always(lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))),
        *[(kind, "layers.RMSNorm.__init__", lambda true: lambda self, width, eps, offset: true(self, width, eps, not offset)) for kind in ("llama", "gemma")],
        ("llama", "llama.Layer.mlp", always(lambda self, x, adapt: self.down(self.gate(x) * self.activation(self.up(x))))),
        ("gemma", "llama.Decoder.embed", always(lambda self, inputs: self.embeddings(inputs.input_ids))),
        *[(kind, "llama.Decoder.__init__", changed_config(**change)) for kind, change in (("llama", {"hidden_act": "gelu"}), ("llama", {"norm_eps": 1e-2}), ("llama3", {"rope_scaling": None}), ("llama3", {"rope_theta": 10000.0}), ("phi", {"partial_rotary_factor": 1.0}), ("phi", {"hidden_act": "relu"}), ("mistral", {"sliding_window": None}), ("mistral", {"sliding_window": 5}), ("mistral", {"sliding_window": 7}), ("qwen2", {"layer_types": None, "max_window_layers": 0}), ("qwen3", {"layer_types": None}), ("phi3", {"partial_rotary_factor": 1.0, "rope_scaling": None}))],
        ("qwen3", "llama.Layer.of_heads", always(lambda self, norm, x: x)),
        ("phi3", "llama_config.DecoderConfig.rope_scale", always(1.0)),
        ("phi3", "llama_config.DecoderConfig.rope_frequencies", lambda true: lambda config, long=False: true(config, True)),
        ("phi3-long", "llama_config.DecoderConfig.short_tokens", always(None)),
    )],
]
LABEL_WORDS = "export.py::test_each_layer_says_of_the_label_words_what_the_masked_lm_head_says[bert-None]"
DECODER_WORDS = "export.py::test_each_layer_of_a_decoder_says_of_the_label_words_what_its_head_says[llama-1]"
STOPS = "model_graph.py::test_rows_leave_where_the_loop_lets_them_leave_with_what_it_says[bert]"
OPERATION = "export.builder.Builder.op"
OF_HEADS = [
    (f"exits.{place}", always(wrong), f"classification_heads.py::test_the_logits_of_every_family_are_those_of_transformers[{kind}]")
    for place, wrong, kind in (
        ("heads._last", lambda hidden, real: hidden[:, -1], "llama"),
        ("heads._last", lambda hidden, real: hidden[:, 0], "llama"),
        ("classification_head.ClassificationHead.inner", lambda self, state: state, "bert"),
        ("classification_head.ClassificationHead.inner", lambda self, state: self.dense(state), "roberta"),
    )
]
OF_GRAPHS = [
    (OPERATION, node("Gelu", approximate="tanh"), LABEL_WORDS),
    (OPERATION, node("LayerNormalization", epsilon=1e-2), LABEL_WORDS),
    ("export.row_segments.OrtState.keep", lambda true: lambda self, rows: (state := true(self, rows))._replace(ids=state.ids | {"input_ids": self.ids["input_ids"][: len(rows)]}), LABEL_WORDS),
    ("export.row_segments.OrtState.keep", lambda true: lambda self, rows: true(self, rows)._replace(rows=np.arange(len(rows))), LABEL_WORDS),
    (OPERATION, node("LessOrEqual", "GreaterOrEqual"), DECODER_WORDS),
    ("export.decoder_blocks.GraphBlock.of_texts", lambda true: classmethod(lambda cls, decoder, mask: true.__func__(cls, decoder, ~mask)), DECODER_WORDS),
    ("export.segment_graphs._rows_of", source("value[(slice(None),) * at + (rows,)]", "value[(slice(None),) * at + (slice(0, rows.shape[0]),)]"), LABEL_WORDS),
    (OPERATION, node("Not", "Identity"), STOPS),
    ("export.sessions.GraphRule.feeds", lambda true: lambda self, rule, plan: {name: np.roll(value, 1, axis=0) for name, value in true(self, rule, plan).items()}, STOPS),
    ("row_thresholds.RowThresholds.stop", always(thresholds_of_the_first_rows), STOPS),
    ("export.runtime.Runtime.answers", source("(self.exits[k] for k in exit_index)", "exit_index"), "export.py::test_the_runtime_answers_like_torch_in_the_order_of_the_texts[32]"),
    ("export.runtime.early_exit", lambda true: lambda segments, rule, inputs: true(segments, rule, inputs.take(np.s_[::-1])), "export.py::test_the_runtime_answers_like_torch_in_the_order_of_the_texts[32]"),
    ("export.token_segments.OrtTokenSegments._slots", lambda true: lambda self, rows, positions: true(self, rows[::-1], positions), "decoder_export.py::test_every_exit_says_what_its_definition_says_in_a_padded_batch[llama-copy_state]"),
    ("export.builder.Builder.packed", source("columns[:inputs] = matrix.T", "columns[:inputs] = matrix.T[::-1]"), "weights_in_blocks.py::test_products_and_rows_are_those_of_the_dequantised_matrix[64-8]"),
    ("export.builder.Builder.linear_in_blocks", lambda true: lambda self, x, weight, bias, rows=slice(None): true(self, x, weight, bias, slice(0, rows.stop - rows.start) if rows.start else rows), "weights_in_blocks.py::test_products_and_rows_are_those_of_the_dequantised_matrix[64-8]"),
    ("export.builder._copy_into_branches", source("count[name] > 1", "count[name] > 99"), "weights_in_blocks.py::test_every_product_has_its_matrix_in_its_own_branch_and_the_file_has_it_once"),
    ("export.builder.Builder.model", source("not self.flat", "True"), "weights_in_blocks.py::test_every_product_has_its_matrix_in_its_own_branch_and_the_file_has_it_once"),
    ("export.token_graphs.TokenGraphs.shares_head", always(property(lambda self: False)), "weights_in_blocks.py::test_lenses_read_the_vocabulary_once_after_the_exit_unless_the_rule_reads_logits[gate]"),
    ("export.token_graphs.TokenGraphs.mapped", source("self.model.heads[k].mapped(hidden)", "hidden"), "weights_in_blocks.py::test_a_decoder_writes_what_torch_writes_with_the_rounded_weights[4]"),
    ("export.writer.block_maps", lambda true: lambda model, bits: true(model, bits) | {id(value): bits for value in model.policy.parameters() if value.dim() == 2}, "weights_in_blocks.py::test_a_decoder_writes_what_torch_writes_with_the_rounded_weights[4]"),
    ("export.token_record.record_tokens", source('np.argsort(columns["groups"], kind="stable")', 'np.arange(len(columns["groups"]))'), "weights_in_blocks.py::test_the_record_of_a_graph_is_that_of_torch"),
    ("export.verification.relative_difference", always(lambda expected, found: 0.0), "weights_in_blocks.py::test_the_check_states_its_tolerance_and_no_folder_is_left_if_it_fails"),
    ("exits.row_exits.RowState.keep", always(lambda self, rows: RowState(self.hidden[: rows.shape[0]], self.context.keep(rows))), STOPS),
    ("rules.Patience.stop", lambda true: lambda self, k, reading, memory: true(self, k, reading, {} if isinstance(reading, Value) else memory), STOPS),
]

LEADERBOARD = "experiments.leaderboard."
OF_LEADERBOARD = [
    (LEADERBOARD + "ranking.holm", source("(len(p_values) - place)", "len(p_values)"), "statistics.py::test_holm_rejects_what_adjusted_p_values_reject"),
    (LEADERBOARD + "ranking.seed_weights", source("max(1, len(seeds) - 1)", "len(seeds)"), "statistics.py::test_the_spread_of_the_draws_is_the_standard_error"),
    (LEADERBOARD + "ranking.seed_weights", source("{task}, seeds {seeds}", "{task}"), "statistics.py::test_a_difference_is_of_the_seeds_that_both_have_and_of_all_if_they_share_none"),
    (LEADERBOARD + "ranking.degrees_of_freedom", always(lambda drawn, spread: math.inf), "statistics.py::test_degrees_of_freedom_are_few_if_seeds_differ_and_many_if_examples_do"),
    (LEADERBOARD + "ranking.difference", source("own_seeds == foreign_seeds", "False"), "statistics.py::test_a_difference_is_paired_if_the_seeds_are_the_same"),
    (LEADERBOARD + "ranking._on_seeds_of", source("[at] * len(one.seeds)", "[at]"), "statistics.py::test_a_difference_over_tasks_is_on_each_task_of_the_seeds_that_both_have"),
    (LEADERBOARD + "ranking.has_interval", source("LEAST_SEEDS - 1", "1"), "statistics.py::test_with_one_or_two_seeds_nothing_has_an_interval_or_is_better[2]"),
    (LEADERBOARD + "exam._partial", source("xy - xz * yz", "xy"), "statistics.py::test_the_exam_tells_easy_from_short[<lambda>-what is easy]"),
    (LEADERBOARD + "figures.seed_figures", source("reported.passes[at_one", "reported.depth[at_one"), "page.py::test_rules_are_chosen_on_held_out_examples_within_the_share_of_the_flops"),
    (LEADERBOARD + "figures.best_mixture", source("(PARTS - deeper)", "PARTS"), "page.py::test_rules_are_chosen_on_held_out_examples_within_the_share_of_the_flops"),
]

OF_PAGES = [
    ("experiments.pages._recorded", always(lambda value: value), "pages.py::test_a_figure_without_a_record_is_an_error[none-{{ x }}]"),
    ("experiments.data.convert", source("!= KNOWN[name]", "is None"), "data.py::test_a_file_that_differs_is_not_written_and_what_is_missing_is_named"),
    ("experiments.data.sentence_piece", source("in tokens[3 + 256 :]:", "in reversed(tokens[3 + 256 :]):"), "data.py::test_pieces_merge_in_the_order_of_their_result"),
    ("experiments.claims._row_variance", source("np.mean(one, axis=0)", "one[0]"), "verdicts.py::test_with_records_the_error_is_that_of_the_differences_of_examples"),
    ("experiments.verdicts.judged", source("LEVEL / sizes", "LEVEL"), "verdicts.py::test_the_papers_size_is_excluded_among_several_with_bonferronis_correction"),
    ("experiments.example_values._at_share", source("<= share + SLACK", "<= 1"), "verdicts.py::test_accuracy_at_a_cost_is_that_of_the_best_rule_that_needs_at_most_so_much"),
    ("experiments.page_data.printed", source("1 if digits is None else digits", "1"), "reproduce.py::test_a_bound_that_rounds_to_0_shows_its_sign_which_can_decide_a_verdict"),
    ("experiments.page_data._selected", source("max(figures", "min(figures"), "reproduce.py::test_held_out_examples_select_a_setting_for_each_seed"),
    ("experiments.measured.add_exits_guarantee.Observer.outcomes", source("self.untested", "self.chosen"), "token_tasks_page.py::test_draws_without_a_test_violate_the_agreement_and_draws_with_one_rarely"),
    ("experiments.measured.token_tasks_page.page_figures", source('["interval"][0]', '["interval"][1]'), "token_tasks_page.py::test_a_page_is_written_for_sets_with_exits_and_for_one_where_they_are_not_worth_it"),
    ("experiments.measured.token_tasks_page.repetition", source("recorded.replay(rule)", "recorded.take(lines).replay(rule)"), "token_tasks_page.py::test_draws_without_a_test_violate_the_agreement_and_draws_with_one_rarely"),
]

if find_spec("transformers"):
    OF_PAGES += [
        ("experiments.measured.token_tasks_page._tag_targets", source("word != before", "True"), "token_tasks_page.py::test_the_first_token_of_a_word_has_its_tag"),
        ("experiments.measured.token_tasks_page._span_targets", source("BEYOND if None in places else place", "place or 0"), "token_tasks_page.py::test_a_span_has_the_tokens_of_its_ends_and_one_that_is_cut_is_ignored"),
    ]

BAG_OF_WORDS = "reviews.py::test_a_bag_of_words_reads_plain_sentences_and_is_near_chance_on_hard_ones[0]"
OF_DATA = [
    ("mini_ee.weights.make_reviews.GRAMMAR.negated", always(make_reviews.PLAIN), BAG_OF_WORDS),
    ("mini_ee.weights.make_reviews.GRAMMAR.negated", always(tuple(flip for _, flip in make_reviews.NEGATED)), BAG_OF_WORDS),
    *[
        (f"exits.prompt_exits.{place}", bug, f"prompting.py::test_every_exit_has_the_lm_logits_of_its_layer_at_the_mask_or_the_last_token[{kind}]")
        for kind in ("encoder", "decoder")
        for place, bug in (
            ("PromptModel.read_at", lambda true: lambda *given: true(*given) * 0),
            ("PromptModel.read_at", lambda true: lambda *given: true(*given) - 1),
            ("PromptSegments.advance", always(lambda self, k, state: state)),
        )
    ],
]

TRIALS = "trial_answers.py::test_trials_are_those_of_a_loop_that_reads_the_whole_text_each_time[llama]"
SURE = "trial_answers.py::test_the_threshold_is_above_as_many_sure_mistakes_as_a_binomial_tail_allows[0.9-0.1]"
OF_TRIALS = [
    ("exits.trial_answers._trials", source("places[j] += steps", "places[j] += 1"), TRIALS),
    ("exits.trial_answers._trials", source("[inputs.rows[marked[j]] for j in writing]", "inputs.rows[: len(writing)]"), TRIALS),
    ("exits.trial_answers._trials", source("not in questioning.answer_ends", "not in questioning.ends"), TRIALS),
    # the text goes on after a trial that was revoked
    ("exits.trial_answers.work", source("[[after[i]] for i in running]", "[[after[i] + 2 * (i in marked)] for i in running]"), "trial_answers.py::test_trials_do_not_change_the_text[llama]"),
    *[("exits.trial_answers.work", source("np.log(probabilities).mean()", wrong), "trial_answers.py::test_the_confidence_is_a_geometric_mean[llama]") for wrong in ("np.log(probabilities).sum()", "np.log(probabilities[:-1] or [1]).mean()", "np.log(probabilities).min()")],
    ("exits.trial_answers.work", source("confidence >= threshold", "confidence < threshold"), "trial_answers.py::test_a_batch_is_its_questions_one_by_one_and_ends_them_as_a_replay_of_the_record_says[llama]"),
    ("exits.trial_answers.observe_trials", source("trials[-1].answer", "trials[0].answer"), "trial_answers.py::test_exits_that_a_text_does_not_have_agree_with_confidence_0"),
    ("exits.trial_answers.safe_threshold", source("1 - lost / (count + 1)", "1 - (lost + 1) / (count + 1)"), SURE),
    ("calibration.above", always(lambda tau, measure: Threshold(tau, measure)), SURE),
    # on average, not with probability 1 - delta
    ("exits.trial_answers.safe_threshold", source("1 - lost / (count + 1)", "epsilon"), "trial_answers.py::test_the_guarantee_is_broken_by_delta_of_the_calibrations_at_most"),
]

SCORES = "token_metrics.py::test_entities_are_those_of_a_regular_expression[0-"
ANSWERED = "token_metrics.py::test_answers_are_scored_against_the_gold_answer_that_is_nearest"
OF_SCORES = [
    ("data.token_metrics.entities", source('before in "BI"', 'before in "BIES"'), SCORES + "IOBES]"),
    ("data.token_metrics.entities", source(" and kind == kind_before", ""), SCORES + "IOB2]"),
    ("data.token_metrics.tag_scores", source("_ratio(both, named)", "_ratio(both, there)"), SCORES + "IOB2]"),
    ("data.token_metrics.answer_scores", source("shared += max(", "shared += min("), ANSWERED),
    ("data.token_metrics.normalised", source("a|an|the", "a|the"), ANSWERED),
    ("data.token_metrics._word_f1", source("return float(words == wanted)", "return 0.0"), ANSWERED),
]
GOLD = "token_tasks.py::test_gold_labels_score_the_exits_and_the_rule[token-classification]"
OF_GOLD = [
    ("evaluation.gold_labels.word_tags", source("reversed(tokens)", "tokens"), "token_tasks.py::test_a_word_has_the_label_of_its_first_token"),
    ("cli.evaluate_gold.evaluate", source("[of_exits[k][row] for", "[of_exits[-1][row] for"), GOLD),
    ("export.add_exits._gold_scores", source("for row in test.labels", "for row in range(len(test.labels))"), "token_tasks.py::test_the_summary_scores_the_test_texts_if_there_are_gold_labels[token-classification]"),
]

SKIPPED = "skipped_layers.py::"
STATES = SKIPPED + "test_states_of_a_token_read_the_text_before_it_and_themselves"
OF_SKIPPING = [
    ("exits.skipped_layers.SkippingSegments.draft_logits", source("self.stay", "range(self.exits[-1])"), SKIPPED + "test_each_draft_loads_the_layers_that_stay_and_each_round_all_of_them[swift]"),
    ("exits.swift.Swift.choose_layers", source("> self.matchness", "< self.matchness"), SKIPPED + "test_layers_that_change_little_are_found_and_then_drafts_are_right"),
    # the full model reads the keys and values of a try
    ("exits.swift.Swift.matchness_without", source("slot.copy_(value)", "pass"), SKIPPED + "test_the_text_is_the_full_models[llama-0.75-4-swift]"),
    ("exits.swift.Swift.matchness_without", source("range(self.newest - CONTEXT, self.newest)", "range(CONTEXT)"), SKIPPED + "test_matchness_is_that_of_drafts_one_by_one_after_the_text_before"),
    # the full model reads the keys and values of a choice
    ("exits.clasp.alone", source("range(at + 1, at + 1 + count)", "range(at, at + count)"), STATES + "[Decoder]"),
    ("exits.clasp.alone", source("~itself", "~itself.cumsum(0).bool()"), STATES + "[Decoder]"),  # states read each other
    ("exits.clasp.alone", source("else -torch.inf", "else 0.0"), STATES + "[Sloped]"),
    ("exits.clasp.alone", source("widened(block.window_mask)", "None"), STATES + "[windowed]"),
    ("exits.clasp.Clasp.closest", source("similar > other", "similar < other"), SKIPPED + "test_of_two_layers_the_better_one_is_skipped"),
    ("exits.clasp.Clasp.closest", source("states[layer + 1], dim", "states[layer], dim"), SKIPPED + "test_clasp_chooses_by_equation_2"),
    ("exits.clasp.Clasp.closest", source("best.roll(1, dims=0)", "best"), SKIPPED + "test_clasp_chooses_by_equation_2"),
    ("exits.skipped_layers.Skipper.observe", source("len(written) - 1]", "-1]"), SKIPPED + "test_clasp_reads_the_state_of_the_last_verified_token"),
    ("exits.lossless._accepted", always(lambda drafted, true, stop: drafted or true), SKIPPED + "test_the_text_is_the_full_models[llama-0.75-4-swift]"),
]

SHARED = "test_request_thresholds.py::test_32_requests_with_32_thresholds_are_answered_as_32_batches_of_one["
ALONE = "test_serving.py::test_answers_are_those_of_the_runtime_at_batch_1_whoever_shared_the_batches["
OF_SERVING = [
    *[("serve.engines.RowEngine._rule_of", always(lambda self, rows: self.rule), SHARED + engine) for engine in ("segments]", "one graph]")],
    *[("row_thresholds.RowThresholds.__init__", lambda true: lambda self, rule, values: true(self, rule, np.roll(values, 1, axis=0)), SHARED + engine) for engine in ("segments]", "one graph]")],
    ("export.row_segments.OrtSegments.joined", lambda true: lambda self, inputs, parts: true(self, inputs, parts[::-1]), ALONE + "threshold-segments]"),
    ("serve.engines._memory", always(lambda parts: {}), ALONE + "patience-segments]"),
    ("export.runtime.Runtime.run", lambda true: lambda self, texts, size: true(self, texts, size)[::-1], "test_serve.py::test_every_line_gets_the_answer_of_the_model_in_the_order_of_the_lines[32]"),
    ("statistics.share_interval", lambda true: lambda *seen: true(*seen, level=0.68), "test_serve_guarantee.py::test_the_interval_contains_the_true_agreement_in_93_percent_of_200_hours"),
    ("export.engine.calibrated_engine", always(lambda manifest: Engine()), "test_openvino.py::test_a_guarantee_of_another_engine_is_not_claimed[f32 in bf16]"),
    ("serve.monitoring.stricter", always(lambda rule: rule), "test_serve_guarantee.py::test_a_broken_guarantee_holds_again_within_2000_requests"),
    ("serve.batch_parts.PartWriter._answers", lambda true: lambda self, encoded, batch: true(self, encoded, batch)[::-1], "test_batch.py::test_the_answers_are_those_of_run_in_the_order_of_the_rows"),
    ("serve.http_messages.check_key", source("not hmac.compare_digest(given.strip(), key.encode())", "given.strip().lower() != key.encode()"), "test_several.py::test_a_request_without_the_key_is_401_and_one_line[Bearer Secret]"),
    ("serve.several.Several.chosen", always(lambda self, request: self.apps["words"]), "test_several.py::test_a_request_is_answered_by_the_export_that_it_names[/classify-fields0-names0]"),
    ("serve.http_messages.Inflating.pieces", source("(part, PIECE)", "(part)"), "test_several.py::test_what_a_small_body_inflates_to_is_limited_while_it_is_read"),
]

if find_spec("openvino"):
    own_alone = lambda true: lambda self, inputs, *read: true(self, {name: value for name, value in inputs.items() if name != "threshold"}, *read)  # noqa: E731
    OF_SERVING += [("export.openvino_engine.OpenVinoGraph.run", own_alone, "test_openvino.py::test_rows_of_a_batch_have_thresholds_of_their_own")]

OF_COMMANDS = [
    ("cli.train._defaults", lambda true: lambda method, words: (*true(method, words)[:2], {}), "help.py::test_help_shows_the_defaults_of_this_training[joint]"),
    ("cli.temporary_export.as_export", always(lambda folder, command: nullcontext(folder)), "first_steps.py::test_run_answers_by_a_run_as_by_its_export[joint]"),
]

EQUAL = "graphs.py::test_the_graph_stops_where_torch_stops_with_the_same_logits["
OF_RING = [
    ("mini_ee.export.nested_if.NestedIf.patient", source("GreaterOrEqual", "Greater"), EQUAL + "joint, Patience 2]"),
    ("mini_ee.export.nested_if.Parts.adapted", always(lambda self, x, y, name: y), EQUAL + "lora, Threshold max_probability]"),
    ("mini_ee.export.nested_if.Parts.pooled", source("rows.mask, to", 'g.op("Or", rows.mask, g.op("Not", rows.mask)), to'), EQUAL + "policies, Never 8]"),
    ("mini_ee.export.nested_if.measured", source('"Sub", first, second', '"Add", first, second'), EQUAL + "joint, Threshold breaking_ties]"),
    ("mini_ee.export.runtime.Segments.read", always(lambda self, k, state: state.outputs["logits"][: len(state)]), "graphs.py::test_segments_are_an_engine_of_the_loop[first token]"),
    ("mini_ee.export.manifest.read_manifest", source("!= digest", "is None"), "folders.py::test_damage_is_one_line[joint-other weights]"),
    ("mini_ee.export.writer.verify", source("max(TOLERANCE", "max(1e9"), "graphs.py::test_the_export_compares_and_leaves_no_folder"),
]

TORCH = [  # what the package calls
    ("torch.nn.functional.kl_div", lambda true: lambda student, teacher, **options: true(teacher, student, **options), METHODS + "baselines.py::test_self_distillation_is_the_divergence_of_each_student_from_the_teacher_student_first"),
    ("torch.Tensor.detach", always(lambda self: self), METHODS + "baselines.py::test_sweet_teaches_each_layer_by_the_loss_of_the_first_exit_above_it_alone[rows]"),
    ("torch.Tensor.detach", always(lambda self: self), METHODS + "consistent.py::test_step_3_reaches_policies_only_and_step_4_everything_else[exact]"),
    ("torch.set_rng_state", always(lambda state: None), METHODS + "consistent.py::test_a_training_that_was_killed_and_resumed_ends_with_the_same_weights"),
    ("torch.set_rng_state", always(lambda state: None), CONTRACT + "training.py::test_a_training_that_was_stopped_and_resumed_ends_with_the_same_weights_and_metrics"),
    ("numpy.argsort", always(lambda values, kind=None: np.arange(len(values))), PARITY + "tokens.py::test_a_record_is_what_each_text_says_alone[llama-True]"),
]

def dotted(place):
    """The full name of a place in the lab, or in another ring that it names."""
    if place.startswith(("experiments.", "serve.")):
        return f"mini_ee.{place}"
    return place if place.startswith("mini_ee.") else f"mini_ee.lab.{place}"


MUTANTS = [
    *[(place, bug, SPEC + test) for place, bug, test in EQUATIONS],
    *[(dotted(place), bug, f"{CONTRACT}early_exit.py::{test}") for place, bug, test in LOOP],
    *[(dotted(place), bug, CONTRACT + test) for place, bug, test in RULES],
    *[(dotted(place), bug, METHODS + test) for place, bug, test in (*OF_METHODS, *OF_TRIALS, *OF_SKIPPING, *OF_GOLD)],
    *[(dotted(place), bug, PARITY + test) for place, bug, test in (*OF_MODELS, *OF_FAMILIES, *OF_HEADS, *OF_GRAPHS)],
    *[(dotted(place), bug, f"experiments/test_leaderboard_{test}") for place, bug, test in OF_LEADERBOARD],
    *[(dotted(place), bug, f"experiments/test_{test}") for place, bug, test in OF_PAGES],
    *[(dotted(place), bug, f"lab/data/test_{test}") for place, bug, test in (*OF_DATA, *OF_SCORES)],
    *[(dotted(place), bug, f"serve/{test}") for place, bug, test in OF_SERVING],
    *[(dotted(place), bug, f"lab/commands/test_{test}") for place, bug, test in OF_COMMANDS],
    *[(dotted(place), bug, f"export/test_ring_{test}") for place, bug, test in OF_RING],
    *TORCH,
]


# ---- The test ----


def owner_of(place):
    """(module, class or dict, name) of a place: module.name, module.Class.name or module.DICT.name."""
    path, name = place.rsplit(".", 1)
    try:
        return import_module(path), name
    except ModuleNotFoundError:
        module, inner = path.rsplit(".", 1)
        return getattr(import_module(module), inner), name


def of_tests(module):
    return str(getattr(module, "__file__", None)).startswith(str(TESTS))


@contextmanager
def planted(place, bug):
    """The bug, also in modules that imported what it replaces by name."""
    owner, name = owner_of(place)
    true = owner[name] if isinstance(owner, dict) else inspect.getattr_static(owner, name)
    wrong = bug(true)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(owner, name, wrong) if isinstance(owner, dict) else patch.setattr(owner, name, wrong)
        for module in [other for name, other in sys.modules.items() if name.startswith("mini_ee") or of_tests(other)]:
            for alias in [alias for alias, value in vars(module).items() if callable(true) and value is true]:
                patch.setattr(module, alias, wrong)
        yield


class EachBug:
    """A plugin: in place of a test's function, it is called with every bug that it must catch, until it is caught."""

    def __init__(self, file):
        self.rows = [row for row in range(len(MUTANTS)) if MUTANTS[row][2].startswith(f"{file}::")]
        self.errors = {row: [] for row in self.rows}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        for row in self.rows:
            place, bug, test = MUTANTS[row]
            if not self.errors[row] and f"{pyfuncitem.nodeid}[".startswith(f"tests/{test}["):
                try:
                    with planted(place, bug):
                        pyfuncitem.obj(**given)
                except BaseException as error:
                    self.errors[row].append(error)
        return True


@functools.cache
def errors_in(file):
    """Row -> what its test raised, of all rows of a test file: its fixtures are made once."""
    plugin = EachBug(file)
    tests = {str(TESTS / MUTANTS[row][2]) for row in plugin.rows}
    assert pytest.main([*OPTIONS, *sorted(tests)], plugins=[plugin]) == 0
    return plugin.errors


def named(row):
    place, _, test = MUTANTS[row]
    file, name = test.split("::")
    return pytest.param(row, file, id=f"{row} {place} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("row, file", [*map(named, range(len(MUTANTS)))])
def test_a_planted_bug_is_caught(row, file):
    errors = errors_in(file)[row]
    assert errors and all(isinstance(error, CAUGHT) for error in errors), errors
