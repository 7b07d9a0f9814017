# %% [markdown]
# # C. Stopping a text early
#
# 18 minutes to read, 65 seconds to run · Paper: [Yang et al. 2025](https://arxiv.org/abs/2504.15895v3)
#
# **Models that reason write long texts**, and often have their answer long before the end. For them *early exit* means
# to stop writing when the answer no longer changes. The loop of chapter 1 stays as it is. What exits is now a question,
# and the exits are the steps of its text in place of layers: after each step the model is asked for its answer, and a
# confident answer ends the text.
#
# We need a decoder that works step by step, so we train a small one, with a character as a token. It adds numbers one
# by one, and then again from the other end, as a check. Half of the training texts break off after some line, and `A`
# asks for the answer there. So the model has learned to answer when it is asked early, even when it has to guess.

# %%
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.calibration import replay
from mini_ee.lab.exits.generation import TokenSegments
from mini_ee.lab.exits.trial_answers import Questioning, observe_trials, safe_threshold, work
from mini_ee.lab.rules import Threshold
from mini_ee.train import train

random, LAYERS, LONGEST = np.random.default_rng(0), 3, 80
CHARACTERS = "0123456789+=\nA. "
ids_of, text_of = (lambda text: [*map(CHARACTERS.index, text)]), (lambda ids: "".join(CHARACTERS[i] for i in ids))


def additions(numbers):
    """[7, 5, 9] -> 7+5=12, 12+9=21: the lines of one pass."""
    sums = np.cumsum(numbers)
    return [f"{a}+{number}={b}" for a, number, b in zip(sums, numbers[1:], sums[1:])]


def example():
    """A question, and what the decoder should write: both passes, or only some of their lines."""
    numbers = random.integers(1, 10, random.integers(3, 6)).tolist()
    lines = additions(numbers) + additions(numbers[::-1])
    if random.random() < 0.5:
        lines = lines[: random.integers(1, len(lines))]
    return "+".join(map(str, numbers)) + "\n", "\n".join(lines) + f"A{sum(numbers)}."


examples = [example() for _ in range(30_000)]
width = max(len(question + text) for question, text in examples)
ids = torch.tensor([ids_of((question + text).ljust(width)) for question, text in examples])
place = torch.arange(width)
begin, end = (torch.tensor(sizes)[:, None] for sizes in zip(*((len(q), len(q + t)) for q, t in examples)))
learned = (begin - 1 <= place) & (place < end - 1)  # the places after which the model is to write
sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 128}
sizes |= {"vocab_size": len(CHARACTERS), "max_position_embeddings": 128, "tie_word_embeddings": True}
torch.manual_seed(0)
decoder = Decoder(DecoderConfig(model_type="llama", hidden_act="silu", norm_eps=1e-6, **sizes))


def loss(rows):
    inputs = Tensors(ids[rows, : int(end[rows].max())])
    states = decoder.run_layers(decoder.embed(inputs), decoder.context(inputs), 0, LAYERS)
    some = learned[rows, : states.shape[1]]
    return cross_entropy(decoder.lm_logits(states[some]), inputs.input_ids.roll(-1, 1)[some])


train({decoder: 3e-3}, len(ids), loss, epochs=1)
print(f"{len(ids):,} examples, such as:\n{examples[0][0]}{examples[0][1]}")

# %% [markdown]
# Now it works on new questions. Whenever it is about to begin a new line, `A` is put in the place of the line break. It
# writes a *trial answer*, whose confidence is the geometric mean of the largest probabilities at its tokens, as in the
# paper. If the confidence is below the threshold, the trial is forgotten: the line break is written after all, and
# replaces the trial in the cache. Nothing is computed again.
#
# {code} lab/exits/trial_answers.py work
#
# Without a threshold all texts are written to their end, so this is a record of all trials.


# %%
def ask(questions, threshold=np.inf):
    """The texts of many questions, in batches."""
    line, answer, stop = map(CHARACTERS.index, "\nA.")
    questioning = Questioning(frozenset({line, answer}), frozenset({answer}), (answer,), frozenset({stop}), 4)
    worked = []
    for some in (questions[at : at + 250] for at in range(0, len(questions), 250)):
        segments = TokenSegments(decoder, (LAYERS,), (), "copy_state", len(some), LONGEST + 20)
        worked += work(segments, [ids_of(question) for question in some], questioning, LONGEST, threshold)
    return worked


questions = [example()[0] for _ in range(1000)]
worked = ask(questions)
answers = [[text_of(trial.answer) for trial in text.trials] for text in worked]
sums = [str(sum(map(int, question.split("+")))) for question in questions]
right = [trials[-1] == total for trials, total in zip(answers, sums)]
print(f"{len(worked)} new questions, {np.mean(right):.1%} right")
for question, text in list(zip(questions, worked))[:2]:
    print(f"\n{question.strip():16}asked after the line")
    lines = text_of(text.tokens).split("\n")
    for line, trial in zip(lines, text.trials):
        print(f"  {line:14}{text_of(trial.answer):>4}, confidence {trial.confidence:.3f}")

# %% [markdown]
# The answer is there after half of the text, and the check repeats it. Before that, the model guesses, and is not sure.
# So a threshold can tell both apart.
#
# **Which threshold?** The paper takes .95 for all models. We choose it by calibration, because how sure a guess is
# depends on the model. A question surely keeps its answer if the threshold is above the largest confidence among its
# trials that disagree with the end. So we need a number that is above this for a share epsilon of all questions, and an
# exact test says how many of the calibrating questions may be above it:
#
# {code} lab/exits/trial_answers.py safe_threshold
#
# We repeat this 100 times. The questions of the record stand for all that there are: 500 of them are drawn at random,
# with replacement, and calibrate. The guarantee is *broken* if then less than epsilon of all questions keep their
# answer, which may happen in 5 of 100 repetitions. What is saved is counted twice: tokens that are not written, and
# passes of the decoder after the trials are paid for, each of which takes a pass for each token of its answer.

# %%
observed = observe_trials(worked)
rows, exits = np.arange(len(worked)), observed.confidence.shape[1] + 1
trials = [text.trials + text.trials[-1:] * (exits - len(text.trials)) for text in worked]  # as many for each question
written = np.array([[trial.at for trial in of_text] for of_text in trials])
asked = np.array([np.cumsum([trial.passes for trial in of_text]) for of_text in trials])
whole = written[:, -1] + [of_text[-1].passes for of_text in trials]  # the text, and its answer


def figures(threshold):
    """The share of questions that keep their answer, of tokens that are not written, of passes that are saved."""
    stops, agrees = replay(observed, Threshold(threshold))
    tokens = written[rows, stops].sum()
    return agrees.mean(), 1 - tokens / written[:, -1].sum(), 1 - (tokens + asked[rows, stops].sum()) / whole.sum()


print("                   threshold     kept   tokens saved   passes saved   broken")
for epsilon in (0.9, 0.95, 0.99):
    thresholds = []
    for _ in range(100):
        drawn = observed.take(random.integers(len(worked), size=500))
        thresholds.append(safe_threshold(drawn._replace(groups=np.arange(500)), epsilon, delta=0.05))
    results = np.array([*map(figures, thresholds)])
    kept, *saved = (f"{mean:.1%}" for mean in results.mean(0))
    broken = (results[:, 0] < epsilon).sum()
    print(f"epsilon {epsilon:<10} {np.median(thresholds):9.4f} {kept:>8} {saved[0]:>14} {saved[1]:>14} {broken:8}")
kept, *saved = (f"{mean:.1%}" for mean in figures(0.95))
print(f"the paper's {0.95:16.4f} {kept:>8} {saved[0]:>14} {saved[1]:>14}")

# %% [markdown]
# Trials have a price. They are short here, but so are the lines of the text. Texts of real models have longer steps, so
# a trial costs less beside them.
#
# **Does it do in practice what the record says?** We ask again, with the threshold for 95%, and look at the texts that
# stopped with another answer.

# %%
threshold = safe_threshold(observed, 0.95, delta=0.05)
stopped = ask(questions[:500], threshold)
same = sum(short.trials[-1].answer == long.trials[-1].answer for short, long in zip(stopped, worked))
still = sum(text_of(text.trials[-1].answer) == total for text, total in zip(stopped, sums))
print(f"{same} of {len(stopped)} questions keep their answer; {sum(right[:500])} were right, {still} are now")
changed = [row for row, short in enumerate(stopped) if short.trials[-1].answer != worked[row].trials[-1].answer]
for row in changed[:3]:
    short, long = stopped[row], worked[row]
    print(f"\n{questions[row].strip()}, whole text: {answers[row][-1]}")
    print(f"{text_of(short.tokens)}\n  stopped with {text_of(short.trials[-1].answer)}")

# %% [markdown]
# These stopped before their first pass was complete: the model had added the rest in its head, and was wrong.
#
# ## What we found
#
# A text that checks itself can stop at half its length, or earlier, and nearly all answers stay. The guarantee holds,
# and is on the safe side: more questions keep their answer than were asked for, because a question may be confidently
# wrong after the text has stopped. A strict epsilon is expensive. Then most trials only cost passes.
#
# This model was trained to answer early. A published model was not, so its confidence may mean less; the calibration
# shows what is left to save, and it may be nothing. **Use it** when steps are long, answers are short, and questions
# like those to come are at hand. A guarantee is about the answer of the whole text, and not about the right one.
#
# ## Exercises
#
# **1.** *Answer convergence*: stop when a trial has repeated the answer of the trial before it `times` times in a row.
# It needs no confidence. How many questions keep their answer?


# %%
def first_repeated(answers, times):
    """answers of all trials of a text, in order -> the index of the trial at which it stops; else the last one's."""
    ...  # FILL ME IN


def check_first_repeated():
    for given, times, stop in (("aab", 1, 1), ("abb", 1, 2), ("abab", 1, 3), ("aabbb", 2, 4), ("a", 1, 0)):
        chosen = first_repeated(list(given), times)
        assert chosen == stop, f"{given}, {times} times: expected trial {stop}, got {chosen}"
    for times in (1, 2, 3):
        stops = [first_repeated(of_text, times) for of_text in answers]
        kept = np.mean([of_text[stop] == of_text[-1] for of_text, stop in zip(answers, stops)])
        saved = 1 - written[rows, stops].sum() / written[:, -1].sum()
        print(f"{times} times: {kept:.1%} kept, {saved:.1%} of the tokens saved")
