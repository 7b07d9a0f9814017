"""An export compared with torch before its folder gets its name: logits, predictions and exits."""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.lab.data.tokenizer import Inputs, in_order
from mini_ee.lab.exits.decoding import MISSING_KV, DecoderSegments, decode, gather, greedy
from mini_ee.lab.exits.generation import token_segments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import CPU
from mini_ee.lab.recording import plan_rows, predictions, record
from mini_ee.lab.rules import Never, Rule
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.run_folder import Run

ROUNDED_AGREEMENT = {"float16": 0.98, "int8": 0.98, "int4": 0.8}
"""Share of predictions equal to those in float32 below which an export warns."""

VERIFIED_TOKENS = 32  # generated after each prompt

AGREEMENT = 0.9  # least share of equal exits, float32 compared with torch; rounding decides for a row at a threshold

TOLERANCE = 1e-4  # of any logit, float32 compared with torch; measured at most 2e-6 on MiniLM and SST-2

RELATIVE = 1e-5  # the same as a share of the largest logit, which may be a number of any scale

ROUNDED = {"float16": 0.02, "int8": 0.1, "int4": 0.5}
"""Largest relative difference of a decoder's logits, see `relative_difference`. Unrelated logits have 1.4."""

log = logging.getLogger("mini_ee.lab.export")


def verify(run: Run, folder: Path, texts: list, precision: str, seed: int) -> dict:
    """The manifest's entry `verified`. Raises ValueError if the graphs differ from torch."""
    served = Runtime(folder, [CPU])
    tokens = served.config["unit"] == "tokens"
    comparison, largest = _compare_texts(run, served, texts, seed) if tokens else _compare_rows(run, served, texts)
    difference, allowed = comparison["max_logit_difference"], max(TOLERANCE, RELATIVE * largest)
    exact = difference <= allowed and comparison["exit_agreement"] >= AGREEMENT
    if not np.isfinite(difference) or (precision == "float32" and not exact):
        raise ValueError(
            f"the {precision} graphs differ from torch by {difference:.2g} (logits; {allowed:.2g} allowed in float32), "
            f"{comparison['exit_agreement']:.1%} of the exits are equal; no folder was written"
        )
    if precision == "float32":
        return comparison | {"allowed_logit_difference": allowed}
    if tokens:
        difference, allowed = comparison["relative_difference"], ROUNDED[precision]
        if not difference <= allowed:
            raise ValueError(
                f"the {precision} graphs differ from torch by {difference:.1%} of the logits' deviation from their "
                f"mean, {allowed:.0%} allowed; no folder was written: export in float32"
            )
        comparison["allowed_relative_difference"] = allowed
    equal, least = comparison["prediction_agreement"], ROUNDED_AGREEMENT[precision]
    if equal < least:
        count = f"{comparison['prompts']} prompts" if tokens else f"{comparison['texts']} texts"
        log.warning(
            "%.1f%% of the predictions for %s in %s are those in float32, fewer than %.0f%%; compare both on "
            "your own texts, and calibrate this export on them",
            *(100 * equal, count, precision, 100 * least),
        )
    return comparison


def _compare_rows(run: Run, served: Runtime, texts: list[tuple[str, ...]]) -> tuple[dict, float]:
    """Compare the logits of every exit on every row, in batches of one and of many; also the largest logit."""
    encoded, segments, theirs = run.encode(texts), served.segments(), run.segments()
    expected, actual = record(theirs, encoded, 8), record(segments, encoded, 8)
    compared, alone = [(expected.logits, actual.logits)], [[row] for row in range(min(8, len(texts)))]
    if run.token_task is not None:  # then records have no logits
        compared, alone = [], [*in_order(len(texts), 8), *alone]
    compared += [[_logits(side, encoded.batch(rows)) for side in (theirs, segments)] for rows in alone]
    if f"segment_{served.exits[0]}" in served.config["graphs"]:
        compared.append((expected.logits, record(segments.by_segment(Never()), encoded, 8).logits))
    differences = [abs(mine - other).max() for mine, other in compared]
    rules = [plan_rows(rule, encoded, 8) if rule.plans_from_texts else rule for rule in (run.rule, served.rule)]
    results = [recorded.replay(rule) for recorded, rule in zip((expected, actual), rules)]
    largest = float(max(abs(mine).max() for mine, _ in compared))
    return {
        "texts": len(texts),
        "max_logit_difference": float(np.max(differences)),
        "prediction_agreement": _equal(*(result.logits for result in results), run),
        "exit_agreement": float((results[0].exit_index == results[1].exit_index).mean()),
    }, largest


def _logits(segments: Segments, inputs: Inputs) -> np.ndarray:
    """The logits of all exits, (N, K, C); for tokens (N, K, T, C), 0 at padding."""
    logits = []
    with segments.running():
        state = segments.start(inputs)
        for k in range(len(segments.exits)):
            state = segments.advance(k, state)
            logits.append(segments.read(k, state))
    stacked = np.stack(logits, axis=1)
    return stacked if segments.token_task is None else stacked * inputs.attention_mask[:, None, :, None]


def _equal(expected: np.ndarray, actual: np.ndarray, run: Run) -> float:
    """Share of rows (N, C) with equal predictions; without labels, of numbers at most TOLERANCE apart."""
    if run.token_task is not None:  # numbers of all decisions
        return float((expected == actual).mean())
    if run.multi_label:
        return float(((expected > 0) == (actual > 0)).all(axis=1).mean())
    if run.label_names:
        return float((predictions(expected) == predictions(actual)).mean())
    return float((abs(expected - actual) <= TOLERANCE * max(1.0, abs(expected).max())).mean())


def _compare_texts(run: Run, served: Runtime, prompts: list[str], seed: int) -> tuple[dict, float]:
    """Compare both engines on one batch of all prompts, padded on the left, with each available missing_kv.

    Logits are compared while exits are drawn at random and both engines read the same tokens; generated texts and exit
    layers are compared with the rule and greedy decoding. A token that differs changes those after it in
    token_agreement; in prediction_agreement both read the same tokens. Also returns the largest logit.
    """
    ids = [run.tokenizer.ids_of(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    count = max(1, min(VERIFIED_TOKENS, served.config["max_tokens"] - longest))
    differences, relative, agreed, largest, equal = [], [], [], [], []
    for missing_kv in MISSING_KV if served.by_segment else ("copy_state",):
        engines = [
            partial(token_segments, run.model, missing_kv, len(ids), longest + count),
            partial(served.segments, len(ids), longest + count, missing_kv),
        ]
        expected, tokens = drawn_text(engines[0](), ids, count, seed)
        actual, _ = drawn_text(engines[1](), ids, count, seed, tokens)
        largest += [abs(mine).max() for mine in expected]
        differences += [abs(mine - theirs).max() for mine, theirs in zip(expected, actual, strict=True)]
        relative.append(relative_difference(np.stack(expected), np.stack(actual)))
        agreed.append(np.mean([mine.argmax(-1) == theirs.argmax(-1) for mine, theirs in zip(expected, actual)]))
        with torch.inference_mode():
            texts = [gather(decode(engine(), ids, count, run.rule), len(ids)) for engine in engines]
        equal.append([np.array(mine) == np.array(theirs) for mine, theirs in zip(*texts)])
    tokens, layers = np.array(equal).mean(axis=(0, 1, 3))  # of (way, prompt, token or layer, step)
    return {
        "prompts": len(ids),
        "tokens": count,
        "max_logit_difference": float(np.max(differences)),
        "relative_difference": float(np.max(relative)),
        "prediction_agreement": float(np.min(agreed)),
        "token_agreement": float(tokens),
        "exit_agreement": float(layers),
    }, float(np.max(largest))


def relative_difference(expected: np.ndarray, actual: np.ndarray) -> float:
    """Root mean square of the difference of logits (..., V), as a share of that of the expected ones.

    Both are taken without their mean over the vocabulary, which changes no probability.
    """
    expected, actual = (logits - logits.mean(-1, keepdims=True) for logits in (expected, actual))
    return float(np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean()))


class _Drawn(Rule):
    """Exits drawn at random: every head is evaluated, and all combinations of missing keys and values occur."""

    needs = None

    def __init__(self, num_exits: int, seed: int):
        self.num_exits, self.random = num_exits, np.random.default_rng(seed)

    def plan(self, inputs) -> np.ndarray:
        return self.random.integers(0, self.num_exits, len(inputs))


@torch.inference_mode()
def drawn_text(
    segments: DecoderSegments,
    prompts: list[list[int]],
    count: int,
    seed: int,
    forced: list[list[int]] | None = None,
) -> tuple[list[np.ndarray], list[list[int]]]:
    """The logits of each step, and the tokens: the likeliest ones, or `forced`, those of another engine."""
    rule, drawn_logits = _Drawn(len(segments.exits), seed), []

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        drawn_logits.append(logits)
        return greedy(logits, rows) if forced is None else forced[len(drawn_logits) - 1]

    return drawn_logits, [step.tokens for step in decode(segments, prompts, count, rule, choose)]
