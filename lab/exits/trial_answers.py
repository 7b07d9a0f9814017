"""Stopping a text early: a decoder that works step by step is asked for its answer before each step, and the text ends
when the answer is sure enough. What exits is a question; its exits are the steps of its text. No torch here.

Source: Yang et al. 2025, Dynamic Early Exit in Reasoning Models (DEER), arXiv:2504.15895v3.

1. When the decoder is about to write a mark (a line break, "Wait", or the end of the text), `ask` is put in its place,
   and the decoder writes a trial answer.
2. The confidence is the geometric mean of the largest probabilities at the answer's tokens.
3. If it is at least the threshold, the answer is given. Otherwise the trial is revoked, and the mark is written.

The cache is kept: a trial writes to the slots after the text, which the next tokens of the text replace, and masks hide
those that are left (backbones/cache.py). So nothing is copied, and nothing is computed again.

The answer of the whole text is the one at its end. `safe_threshold` guarantees that it is kept.

Deviations from the paper, with their tests in tests/lab/methods/test_trial_answers.py:
1. The threshold is chosen by a test, at or above which a trial ends the text; the paper has > .95 for all models
   (test_the_guarantee_is_broken_by_delta_of_the_calibrations_at_most).
2. The token that ends an answer counts too: 1 and 12 differ by it (test_the_confidence_is_a_geometric_mean).
3. The trial answer is the answer; the paper lets the model write a conclusion after it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.calibrate import binomial_cdf
from mini_ee.lab.calibration import Observed, TooFew, above, check_guarantee, conformal_cut
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.decoding import CachedSegments, Tokens
from mini_ee.lab.rules import Never
from mini_ee.lab.segments import check_finite
from mini_ee.rules import max_probability


class Questioning(NamedTuple):
    """When and how a decoder is asked for its answer, in token ids."""

    marks: frozenset[int]  # before each of these it is asked
    ends: frozenset[int]  # and these end a text
    ask: tuple[int, ...]
    answer_ends: frozenset[int]  # these end an answer, and are not part of it
    longest: int  # most tokens of an answer, the one that ends it included


class Trial(NamedTuple):
    """A trial answer."""

    at: int  # tokens of the text before it
    answer: tuple[int, ...]
    confidence: float
    passes: int  # of the decoder: its cost in tokens


class Worked(NamedTuple):
    """The text after a prompt, and all its trials; the last one is the answer."""

    tokens: list[int]
    trials: list[Trial]


def work(
    segments: CachedSegments,
    prompts: Sequence[Sequence[int]],
    questioning: Questioning,
    max_new_tokens: int,
    threshold: float = math.inf,
) -> list[Worked]:
    """Work on prompts greedily, each until a trial is sure enough, its text ends, or it has max_new_tokens.

    segments: new, of the full model, with a row for each prompt. Without a threshold all texts are whole, so the trials
    are a record, which `observe_trials` turns into exits. Raises ValueError if the cache is too small.
    """
    needed = max(map(len, prompts)) + max_new_tokens + len(questioning.ask) + questioning.longest
    if segments.capacity < needed:
        raise ValueError(f"expected a cache for at least {needed} tokens, with the last trial; got {segments.capacity}")
    worked, inputs = [Worked([], []) for _ in prompts], segments.prefill(segments.begin(prompts))
    while True:
        new = _logits(segments, inputs).argmax(-1).tolist()
        rows, after = inputs.rows, [row[-1] + 1 for row in inputs.positions]
        last = [t in questioning.ends or len(worked[row].tokens) == max_new_tokens for row, t in zip(rows, new)]
        marked = [i for i, token in enumerate(new) if last[i] or token in questioning.marks]
        for i, (answer, probabilities) in zip(marked, _trials(segments, inputs, marked, questioning)):
            confidence = math.exp(np.log(probabilities).mean())
            trial = Trial(len(worked[rows[i]].tokens), answer, confidence, len(probabilities))
            worked[rows[i]].trials.append(trial)
            last[i] |= confidence >= threshold
        running = [i for i in range(len(rows)) if not last[i]]
        if not running:
            return worked
        for i in running:
            worked[rows[i]].tokens.append(new[i])
        inputs = Tokens([[new[i]] for i in running], [rows[i] for i in running], [[after[i]] for i in running])


def _trials(
    segments: CachedSegments, inputs: Tokens, marked: list[int], questioning: Questioning
) -> list[tuple[tuple[int, ...], list[float]]]:
    """The answers of some of the rows after their newest tokens, and the largest probability at each token."""
    answers, probabilities = [list[int]() for _ in marked], [list[float]() for _ in marked]
    places = [inputs.positions[i][-1] + 1 for i in marked]
    ids, steps = [[*questioning.ask] for _ in marked], len(questioning.ask)
    writing = list(range(len(marked)))
    for _ in range(questioning.longest):
        if not writing:
            break
        positions = [list(range(places[j], places[j] + steps)) for j in writing]
        logits = _logits(segments, Tokens(ids, [inputs.rows[marked[j]] for j in writing], positions))
        best, still = logits.argmax(-1).tolist(), list[int]()
        for j, token, probability in zip(writing, best, max_probability(logits).tolist()):
            probabilities[j].append(probability)
            places[j] += steps
            if token not in questioning.answer_ends:
                answers[j].append(token)
                still.append(j)
        writing, ids, steps = still, [[answers[j][-1]] for j in still], 1
    return [(tuple(tokens), chances) for tokens, chances in zip(answers, probabilities)]


def _logits(segments: CachedSegments, inputs: Tokens) -> np.ndarray:
    """(B, V), after the newest token of each row."""
    return check_finite(early_exit(segments, Never(), inputs).logits)


# ---- From a record to a threshold ----
def observe_trials(worked: Sequence[Worked]) -> Observed:
    """The trials of whole texts as exits (N, K - 1): their confidence, and whether they agree with the last answer.

    Texts have different numbers of trials. Where a text has no more, its exits agree with confidence 0.
    """
    most = max(1, *(len(text.trials) - 1 for text in worked))
    confidence, agrees = np.zeros((len(worked), most)), np.ones((len(worked), most), bool)
    for row, (_, trials) in enumerate(worked):
        for k, trial in enumerate(trials[:-1]):
            confidence[row, k], agrees[row, k] = trial.confidence, trial.answer == trials[-1].answer
    return Observed(confidence, agrees, np.arange(len(worked)))


def safe_threshold(observed: Observed, epsilon: float, delta: float) -> float:
    """With probability 1 - delta over the draw of these N questions, at least a share epsilon of new ones agrees.

    They agree if they stop with the answer of the whole text. inf: no text may stop early; -inf: all at once.

    `conformal` has the same bound on average, without delta: a question is surely kept if the threshold is above the
    largest confidence among its trials that disagree. With k the most losses that a test at level delta allows,
    P(X <= k) <= delta for X ~ Binomial(N, 1 - epsilon), the cut is the (k + 1)-th largest of these (Wilks 1941). Raises
    ValueError for an epsilon or a delta outside its range, TooFew if the test allows not even k = 0.
    """
    check_guarantee(epsilon, delta)
    count, lost = len(observed.groups), 0
    while binomial_cdf(lost, count, 1 - epsilon) <= delta:
        lost += 1
    if not lost:
        needed = math.ceil(math.log(delta) / math.log(epsilon))
        raise TooFew(f"epsilon {epsilon}, delta {delta}: at least {needed} questions are needed, got {count}", needed)
    rule = above(conformal_cut(observed, 1 - lost / (count + 1)), "max_probability")
    return rule.threshold  # type: ignore[attr-defined]  # of this measure, a Threshold
