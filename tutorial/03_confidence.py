# %% [markdown]
# # 3. Confidence is not correctness
#
# 22 minutes to read, 30 seconds to run · Papers: [Guo et al. 2017](https://arxiv.org/abs/1706.04599), [Learn then Test](https://arxiv.org/abs/2110.01052)
#
# **May we believe a head that says "90%"?** A threshold compares a confidence. When a confident head is often wrong,
# the threshold lets wrong answers out, and the doubly negated sentences of chapter 2 are an example. So we ask two
# things: is the confidence honest, and how much accuracy can a threshold cost?
#
# We train the exits of chapter 2 again, now with the core's functions, and look at 3,000 sentences that trained
# nothing:

# %%
import numpy as np
import plots
import torch

from mini_ee.bert import Bert, Exits
from mini_ee.calibrate import binomial_cdf, default_rule, fixed_sequence
from mini_ee.consistent import joint_loss
from mini_ee.data import of_all, open_task
from mini_ee.loop import Table, early_exit
from mini_ee.rules import Never, Threshold, log_softmax, max_probability
from mini_ee.train import train

torch.manual_seed(0)
rows, test = open_task("", "bert", 128, 4000, seed=0)
learn, fresh = rows.split(0.25, 0.75)
model = Exits(Bert.load("bert"), (4, 8, 12), rows.outputs).eval()
rates = {model.bert: 1e-3, model.heads: 2e-3}
train(rates, len(learn), lambda some: joint_loss(model, model.states(learn.batch(some)), learn.labels[some]), epochs=2)

logits, labels = of_all(model, fresh).numpy(), fresh.labels.numpy()  # (N, K, C), (N,)
correct = logits.argmax(2) == labels[:, None]  # (N, K)
print(len(fresh), "sentences; accuracy after layers", model.exits, correct.mean(axis=0).round(3))

# %% [markdown]
# ## Reliability and temperature
#
# Sort the predictions into bins by their confidence, and compare the mean confidence in each bin with the accuracy
# there. A *calibrated* head lies on the diagonal: of its answers with confidence 0.9, nine in ten are right. The mean
# distance from the diagonal, weighted by the size of the bins, is the *expected calibration error* (ECE).
#
# *Temperature scaling* is the simplest repair. Divide the logits of an exit by one number T > 0. The prediction does
# not change, but the confidence does: T > 1 makes the head less confident. We fit T on half of the sentences, by the
# lowest cross-entropy, and look at the other half.


# %%
def bins(logits, correct):
    """(confidence, accuracy, share of the sentences) of five bins between 0.5 and 1, without empty ones."""
    confidence = max_probability(logits)
    number = np.clip(((confidence - 0.5) * 10).astype(int), 0, 4)
    inside = [number == b for b in range(5) if (number == b).any()]
    return np.array([(confidence[rows].mean(), correct[rows].mean(), rows.mean()) for rows in inside]).T


def cross_entropy(logits, labels):
    return -log_softmax(logits)[np.arange(len(labels)), labels].mean()


half, diagrams = len(fresh) // 2, {}
print("after layer  temperature  ECE before  ECE after")
for k, layer in enumerate(model.exits):
    temperatures = np.linspace(0.5, 4, 36)
    temperature = min(temperatures, key=lambda t: cross_entropy(logits[:half, k] / t, labels[:half]))
    before, after = (bins(logits[half:, k] / t, correct[half:, k]) for t in (1, temperature))
    errors = [(share * abs(confidence - accuracy)).sum() for confidence, accuracy, share in (before, after)]
    print(f"{layer:11}  {temperature:11.1f}  {errors[0]:10.3f}  {errors[1]:9.3f}")
    diagrams[layer] = {"as trained": before, f"temperature {temperature:.1f}": after}
plots.reliability(diagrams)

# %% [markdown]
# ![Reliability diagrams of the three exits, as trained and with a temperature](docs/pictures/reliability.png)
#
# Below the diagonal a head is too confident. A temperature brings it closer, but a calibrated head is no better a
# classifier; it just knows how often it is wrong.
#
# ## How much accuracy may a rule cost?
#
# A rule is chosen on held-out sentences, and one that looks good there may just be lucky. We can watch this happen,
# because we have 3,000 sentences: draw 1,000 of them as if they were all we had, choose a threshold, and look at its
# loss on the other 2,000. A rule *loses* a sentence when its exit is wrong and the last exit is right; its loss here is
# the share of such sentences, and not a cross-entropy. We accept 1%. There are two ways to choose:
#
# - *Without a bound:* the loosest threshold that loses at most 1% of the 1,000.
# - *With a bound:* test the thresholds from the strictest to the loosest, until one fails. A test asks: if the true
#   loss were 1%, how probable would so few losses be? When this *p-value* is at most 0.05, the threshold passes. Its
#   losses would follow a binomial distribution, so the p-value is exact.
#
# The order of the thresholds is fixed before we look, and the tests end at the first one that fails. So a bad threshold
# is accepted only if the first bad one in this order passes. That is one test at level 0.05, however many thresholds
# there are, and needs no correction:
#
# {code} mini_ee/calibrate.py fixed_sequence

# %%
cuts = np.linspace(1, 0.5, 51)  # from the strictest to the loosest
results = [early_exit(Table(model.exits, logits), Threshold(float(cut)), range(len(fresh))) for cut in cuts]
lost = np.array([correct[:, -1] & (result.logits.argmax(1) != labels) for result in results])  # (thresholds, N)
layers = np.array([result.layers.mean() for result in results])

accepted, drawn, draws = 0.01, 1000, 200
p_value = np.array([binomial_cdf(count, drawn, accepted) for count in range(drawn + 1)])  # by the number of losses
random, losses, saved = np.random.default_rng(0), {}, {}
for _ in range(draws):
    some, others = np.split(random.permutation(len(fresh)), [drawn])
    counts = lost[:, some].sum(axis=1)
    lucky = np.flatnonzero(counts <= accepted * drawn)[-1]
    bounded = max(fixed_sequence(p_value[counts], 0.05) - 1, 0)
    for name, chosen in (("without a bound", lucky), ("with a bound", bounded)):
        losses.setdefault(name, []).append(lost[chosen, others].mean())
        saved.setdefault(name, []).append(1 - layers[chosen] / 12)
for name, values in losses.items():
    missed = (np.array(values) > accepted).mean()
    print(
        f"{name:15}  loses more than 1% in {missed:4.0%} of 200 draws, saves {np.mean(saved[name]):.0%} of the layers"
    )
plots.losses(losses, accepted)

# %% [markdown]
# ![Histogram of the losses of 200 chosen rules, without and with a bound](docs/pictures/guarantee.png)
#
# Without a bound, the choice breaks its target in nearly half of the draws, as any estimate without a margin must. With
# the bound it may do so in at most 5 of 100 draws, and the price is some of the layers.
#
# ## The core's rule with a guarantee
#
# `default_rule` does this for a model: the selection proposes thresholds, and a test set that has chosen nothing tests
# them. Every set has one task:
#
# | sentences | here | what they choose |
# |---|---|---|
# | training | 1,000 | the weights |
# | selection | 1,000 | which thresholds are tested |
# | test of the rules | 2,000 | which of these is used: the last one that passes |
# | test | 600 | nothing: we report on them |

# %%
chosen = default_rule(model.exits, (logits[:1000], labels[:1000]), (logits[1000:], labels[1000:]), most_loss=0.01)
print(f"{chosen.rule}: {chosen.worse} losses on {chosen.tested} sentences, p-value {chosen.p_value:.3f}")
table = Table(model.exits, of_all(model, test).numpy())
for name, rule in (("full model", Never()), ("guaranteed rule", chosen.rule)):
    result = early_exit(table, rule, range(len(test)))
    accuracy = (result.logits.argmax(1) == test.labels.numpy()).mean()
    print(f"{name:15}  accuracy {accuracy:.3f} after {result.layers.mean():.2f} layers")

# %% [markdown]
# The bound is conservative: it counts the sentences that only the last exit gets right, and ignores those that only
# the early exit gets right. It holds for new sentences like the tested ones. When your texts differ, calibrate on
# them.
#
# **What we found.** A confidence has to be checked before it decides, and a threshold that was chosen on few examples
# needs a bound. The [guarantees](results/guarantees.md) are measured on two real tasks. **Use the bound** when someone
# relies on the accuracy.

# %% [markdown]
# ## Exercises
#
# **1.** You test a rule on n examples, and it never loses. How many examples do you need to show, with a given
# confidence level, that its loss is at most `most`?


# %%
def examples_needed(most, level):
    """The smallest n at which no loss in n examples has a probability of at most 1 - level."""
    ...  # FILL ME IN


def check_examples_needed():
    for most, level in ((0.01, 0.95), (0.05, 0.95), (0.01, 0.99)):
        n = examples_needed(most, level)
        assert binomial_cdf(0, n, most) <= 1 - level, f"{n} examples are too few"
        assert binomial_cdf(0, n - 1, most) > 1 - level, f"{n} examples are more than needed"
        print(f"loss at most {most}, confidence {level}: {n} examples")


# %% [markdown]
# **2.** Compute the expected calibration error from confidences and correctness, with equal bins between 0 and 1.


# %%
def calibration_error(confidence, correct, count):
    """confidence (N,) in [0, 1], correct (N,) bool, count: number of bins -> the ECE."""
    ...  # FILL ME IN


def check_calibration_error():
    confidence, hits = np.array([0.55, 0.65, 0.95, 0.96]), np.array([True, False, True, True])
    for count, expected in ((1, 0.0275), (2, 0.0275), (10, 0.2975)):
        error = calibration_error(confidence, hits, count)
        assert error is not None and abs(error - expected) < 1e-9, f"{count} bins: expected {expected}, got {error}"
    for k, layer in enumerate(model.exits):
        error = calibration_error(max_probability(logits[:, k]), correct[:, k], 10)
        print(f"after layer {layer}: {error:.3f}")


# %% [markdown]
# **3.** Does temperature scaling move the curve of chapter 2? Divide the logits of each exit by its temperature, make
# a new `Table`, and draw the sweep. (One temperature for all exits would move nothing, because two classes keep the
# order of all confidences, but one per exit moves them a little.)
