"""Stopping a text early: trials against a loop that computes everything anew, and the guarantee over repeated draws."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import random_decoder

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.calibration import Observed, TooFew, replay
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import TokenSegments, generate
from mini_ee.lab.exits.trial_answers import Questioning, Trial, Worked, observe_trials, safe_threshold, work
from mini_ee.lab.rules import Threshold
from mini_ee.load import load_tokenizer

PROMPTS = ([5, 9, 33, 7], [7, 1], [40, 41, 8], [3], [22, 4, 59, 2, 11], [50], [19, 30], [44, 2])
NEW = 14
QUESTIONING = Questioning(frozenset(range(0, 60, 3)), frozenset(range(0, 12, 3)), (58, 57), frozenset(range(25, 60)), 3)


@pytest.fixture(scope="module", params=["llama", "phi"])
def decoder(request):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return random_decoder(request.param, 3)


def worked(decoder, prompts, threshold=math.inf, new=NEW):
    capacity = max(map(len, prompts)) + new + len(QUESTIONING.ask) + QUESTIONING.longest
    segments = TokenSegments(decoder, (3,), (), "copy_state", len(prompts), capacity)
    return work(segments, prompts, QUESTIONING, new, threshold)


@torch.no_grad()
def probabilities(decoder, ids):
    """Of the next token, after these: no cache, no batch."""
    inputs = Tensors(torch.tensor([ids]))
    hidden = decoder.run_layers(decoder.embed(inputs), decoder.context(inputs), 0, 3)
    return decoder.lm_logits(hidden[0, -1]).double().softmax(-1)


def by_loops(decoder, prompt):
    """Tokens, and (tokens before it, answer, probabilities) of each trial."""
    following, text, trials = partial(probabilities, decoder), [], []
    while True:
        token = int(following([*prompt, *text]).argmax())
        ends = token in QUESTIONING.ends or len(text) == NEW
        if ends or token in QUESTIONING.marks:
            answer, seen = [], []
            while len(seen) < QUESTIONING.longest:
                chances = following([*prompt, *text, *QUESTIONING.ask, *answer])
                seen.append(float(chances.max()))
                if int(chances.argmax()) in QUESTIONING.answer_ends:
                    break
                answer.append(int(chances.argmax()))
            trials.append((len(text), tuple(answer), seen))
            if ends:
                return text, trials
        text.append(token)


# ---- Trials ----
def test_trials_are_those_of_a_loop_that_reads_the_whole_text_each_time(decoder):
    for prompt, solution in zip(PROMPTS, worked(decoder, PROMPTS)):
        tokens, trials = by_loops(decoder, prompt)
        assert solution.tokens == tokens
        assert [(trial.at, trial.answer, trial.passes) for trial in solution.trials] == [
            (at, answer, len(seen)) for at, answer, seen in trials
        ]


def test_the_confidence_is_a_geometric_mean(decoder):
    """Of the largest probability at each token of the answer, and at the one that ends it."""
    sizes = set()
    for prompt, solution in zip(PROMPTS, worked(decoder, PROMPTS)):
        for trial, (_, answer, seen) in zip(solution.trials, by_loops(decoder, prompt)[1], strict=True):
            assert trial.confidence == pytest.approx(math.prod(seen) ** (1 / len(seen)), rel=1e-5)
            sizes.add((len(answer), len(seen)))
    assert len(sizes) > 2


def test_trials_do_not_change_the_text(decoder):
    """It is the greedy text of a decoder that is never asked, up to the token that ends it."""
    texts = gather(generate(decoder, PROMPTS, max_new_tokens=NEW, stop=QUESTIONING.ends), len(PROMPTS))
    for text, (tokens, trials) in zip(texts, worked(decoder, PROMPTS)):
        assert tokens == [token for token in text.tokens if token not in QUESTIONING.ends]
        assert trials[-1].at == len(tokens)


def test_a_batch_is_its_questions_one_by_one_and_ends_them_as_a_replay_of_the_record_says(decoder):
    record, stopped = worked(decoder, PROMPTS), set()
    levels = np.unique([trial.confidence for solution in record for trial in solution.trials])
    for threshold in (-math.inf, *((levels[1:] + levels[:-1]) / 2)[:: len(levels) // 3].tolist()):
        ended, outcome = (
            worked(decoder, PROMPTS, threshold),
            replay(observe_trials(record), Threshold(max(threshold, 0))),
        )
        for prompt, whole, short, k, agrees in zip(PROMPTS, record, ended, *outcome, strict=True):
            last = whole.trials[min(k, len(whole.trials) - 1)]
            assert short.tokens == whole.tokens[: last.at]
            assert short.trials[-1].answer == last.answer and agrees == (last.answer == whole.trials[-1].answer)
            assert [(trial.at, trial.answer) for trial in worked(decoder, [prompt], threshold)[0].trials] == [
                (trial.at, trial.answer) for trial in short.trials
            ]
            stopped.add((len(short.tokens) < len(whole.tokens), bool(agrees)))
    assert stopped == {(False, True), (True, True), (True, False)}


def test_a_cache_without_room_for_the_last_trial_is_refused(decoder):
    segments = TokenSegments(decoder, (3,), (), "copy_state", 1, 4 + NEW)
    with pytest.raises(ValueError, match=f"at least {4 + NEW + 5} tokens, with the last trial; got {4 + NEW}"):
        work(segments, PROMPTS[:1], QUESTIONING, NEW)


# ---- The guarantee ----
def test_exits_that_a_text_does_not_have_agree_with_confidence_0():
    one, other = Trial(3, (1, 2), 0.9, 3), Trial(5, (7,), 0.4, 2)
    observed = observe_trials([Worked([0] * 5, [one, other]), Worked([0] * 7, [other, one, other, other])])
    np.testing.assert_array_equal(observed.confidence, [[0.9, 0, 0], [0.4, 0.9, 0.4]])
    np.testing.assert_array_equal(observed.agrees, [[False, True, True], [True, False, True]])
    never_asked = observe_trials([Worked([0] * 5, [one]), Worked([0] * 3, [other])])
    assert (never_asked.confidence == 0).all() and never_asked.agrees.all() and never_asked.agrees.shape == (2, 1)


def questions(count, seed):
    """Surer and surer steps; a sure one may be wrong all the same, and then right again."""
    random = np.random.default_rng(seed)
    confidence = random.random((count, 4)) ** (1 / np.arange(1, 5))
    return Observed(confidence, random.random((count, 4)) < confidence**0.2, np.arange(count))


def agreement(observed, threshold):
    """By a loop over questions and their steps."""
    rows = zip(observed.confidence.tolist(), observed.agrees.tolist())
    return np.mean([next((a for c, a in zip(*row) if c >= threshold), True) for row in rows])


@pytest.mark.parametrize("epsilon, delta", [(0.9, 0.1), (0.95, 0.2)])
def test_the_threshold_is_above_as_many_sure_mistakes_as_a_binomial_tail_allows(epsilon, delta):
    observed = questions(120, 3)
    worst = [max([c for c, a in zip(*row) if not a], default=-1) for row in zip(observed.confidence, observed.agrees)]
    tail, lost = 0.0, 0  # P(X <= lost)
    while (tail := tail + math.comb(120, lost) * (1 - epsilon) ** lost * epsilon ** (120 - lost)) <= delta:
        lost += 1
    threshold = safe_threshold(observed, epsilon, delta)
    assert sum(surest_mistake >= threshold for surest_mistake in worst) == lost - 1
    assert threshold == pytest.approx(sorted(worst)[-lost], abs=1e-6) and threshold > sorted(worst)[-lost]


def test_the_guarantee_is_broken_by_delta_of_the_calibrations_at_most():
    """20,000 questions stand for all. It is broken now and then: stricter tests would save less."""
    population, repetitions, epsilon, delta = questions(20_000, 0), 200, 0.9, 0.2
    worst = np.where(population.agrees, -np.inf, population.confidence).max(1)
    thresholds = [safe_threshold(questions(100, 1 + seed), epsilon, delta) for seed in range(repetitions)]
    surely_kept = np.array([(worst < threshold).mean() for threshold in thresholds])
    assert 0.06 < np.mean(surely_kept < epsilon) <= delta + 2 * math.sqrt(delta * (1 - delta) / repetitions)
    for threshold, sure in zip(thresholds[:5], surely_kept):
        assert agreement(population, threshold) == replay(population, Threshold(threshold)).agrees.mean() >= sure


@pytest.mark.parametrize("agrees, threshold", [(True, -math.inf), (False, math.inf)])
def test_all_that_agree_stop_at_once_and_none_that_is_surely_wrong_stops(agrees, threshold):
    observed = Observed(np.ones((40, 2)), np.full((40, 2), agrees), np.arange(40))
    assert safe_threshold(observed, 0.9, 0.05) == threshold


def test_too_few_questions_are_refused_with_the_number_needed():
    with pytest.raises(TooFew, match="at least 29 questions are needed, got 28"):
        safe_threshold(questions(28, 0), 0.9, 0.05)
    assert safe_threshold(questions(29, 0), 0.9, 0.05) > 0


# ---- A published decoder ----
def test_smollm2_works_on_a_sum_as_without_trials(smollm2_folder):
    decoder, tokenizer = load_backbone(smollm2_folder).eval(), load_tokenizer(smollm2_folder)
    digits = {tokenizer.token_to_id(str(digit)) for digit in range(10)}
    ask = tuple(tokenizer.encode("\nThe answer is ", add_special_tokens=False).ids)
    marks = frozenset({ask[0], 2})
    questioning = Questioning(marks, frozenset({2}), ask, frozenset(range(49_152)) - digits, 6)
    prompt = tokenizer.encode("<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n").ids
    segments = TokenSegments(decoder, (30,), (), "copy_state", 1, len(prompt) + 40)
    (solution,) = work(segments, [prompt], questioning, 24)
    (text,) = gather(generate(decoder, [prompt], max_new_tokens=24, stop={2}), 1)
    assert solution.tokens == [token for token in text.tokens if token != 2] and solution.trials[-1].answer
