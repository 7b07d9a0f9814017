# %% [markdown]
# # 6. RAEE: ask the neighbours where to exit
#
# 20 minutes to read, 35 seconds to run · Paper: [Huang et al. 2024](https://arxiv.org/abs/2405.15198) · needs hnswlib
#
# **Can we know the exit layer before the model runs?** RAEE looks up similar examples whose best exits are known, and
# lets them vote. The paper claims that this saves layers and even corrects the model's errors. Such a claim needs
# controls: the neighbours are *labelled*, so they may know the answer without the model.
#
# ![Neighbours in a datastore vote for an exit before the model runs](docs/pictures/method-raee.svg)

# %%
import numpy as np
import plots
import torch

from mini_ee.bert import Bert, Exits
from mini_ee.consistent import joint_loss
from mini_ee.data import Inputs, of_all, open_task
from mini_ee.load import load_tokenizer
from mini_ee.loop import Table, early_exit
from mini_ee.raee import chosen_exit, collect, exit_distribution, vote_of_labels
from mini_ee.rules import Threshold
from mini_ee.train import train

torch.manual_seed(0)
rows, test = open_task("", "bert", 128, 4000, seed=0)
learn, collected = rows.split(0.25, 0.75)
model = Exits(Bert.load("bert"), (4, 8, 12), rows.outputs).eval()
rates = {model.bert: 1e-3, model.heads: 2e-3}
train(rates, len(learn), lambda some: joint_loss(model, model.states(learn.batch(some)), learn.labels[some]), epochs=2)
print(f"exits trained on {len(learn)} sentences; {len(collected)} others go into the datastore")

# %% [markdown]
# The exits are those of chapter 2. The datastore needs sentences that have not trained them, because on its own
# training data nearly every exit looks right.
#
# ## Algorithm 3.1: collect
#
# For each collected sentence $i$ and each exit $j$ the datastore holds the value $p_i^j$: the probability of the
# correct class, or 0 when the exit is wrong. Next to it stands the sentence's embedding, here the mean of its token
# embeddings.
#
# {code} mini_ee/raee.py exit_values
#
# ## Algorithm 3.2: vote
#
# A new sentence $x$ finds its 12 nearest neighbours $v_i$, with squared distances $d$. Near neighbours count more (Eq.
# 5). A neighbour votes for an exit only when its value there is at least $\tau$; when none of a neighbour's exits
# reaches $\tau$, its three best correct exits vote (the *fallback* of the authors' code). The exit with the most votes
# wins (Eq. 4 and 6).
#
# {code} mini_ee/raee.py neighbour_weights
#
# {code} mini_ee/raee.py passing_values
#
# {code} mini_ee/raee.py exit_distribution
#
# {code} mini_ee/raee.py chosen_exit
#
# With three neighbours we can follow the votes by hand:

# %%
raee = collect(model, collected, k=12, tau=0.9)
tokenizer = load_tokenizer("bert")
sentence = tokenizer.encode("I expected to hate the film, but it was wonderful.")
query = Inputs(*(torch.tensor([part]) for part in (sentence.ids, sentence.attention_mask, sentence.type_ids)))
near, distances = (nearest[:, :3] for nearest in raee.neighbours(query))
print("distance  label     value at exits 4, 8, 12")
for row, distance in zip(near[0], distances[0]):
    label, text = ("negative", "positive")[collected.labels[row]], tokenizer.decode(collected.ids[row])
    values = " ".join(f"{value:.2f}" for value in raee.values[row])
    print(f"{distance:8.3f}  {label}  {values}   {text}")
for tau in (0.65, 0.9):
    votes = exit_distribution(raee.values[near], distances, tau, raee.fallback_top)
    print(f"tau {tau}: votes {votes[0].round(2)}, exit after layer {model.exits[chosen_exit(votes)[0]]}")

# %% [markdown]
# At 0.65 the third neighbour votes for exit 8, where its value is 0.71. The second one does not pass, so by the
# fallback its only correct exit votes; the first one was right at no exit, and never votes. At 0.9 nobody passes, and
# all correct exits vote.
#
# The neighbours talk about the same thing, and not with the same opinion: token embeddings know the words, but not
# their order.
#
# ## The controls
#
# Choosing a layer can leak the label. Suppose that exit 4 nearly always answers *positive*, and that the neighbours
# choose exit 4 for positive sentences. Then the choice is the answer, and the exit adds nothing. So four controls
# stand beside RAEE: the vote of the same neighbours' labels, the best single layer, RAEE's own layers dealt out at
# random, and a threshold on the same exits. The *oracle* takes the earliest correct exit. No real method can do this,
# since it needs the label; it shows what a perfect choice would save.

# %%
logits = of_all(model, test).numpy()  # (N, K, C)
right = logits.argmax(2) == test.labels.numpy()[:, None]  # (N, K)
everything = test.batch(range(len(test)))
plan = raee.plan(everything)  # (N,), exits


def score(plan):
    """Mean layers and accuracy when each test sentence stops at its exit, plan (N,)."""
    return np.array(model.exits)[plan].mean(), right[np.arange(len(plan)), plan].mean()


random = np.random.default_rng(0)
shuffled = np.array([score(random.permutation(plan)) for _ in range(100)])
best = int(of_all(model, collected).argmax(2).eq(collected.labels[:, None]).float().mean(0).argmax())
confident = early_exit(Table(model.exits, logits), Threshold(0.8), range(len(test)))
oracle = np.where(right.any(1), right.argmax(1), len(model.exits) - 1)
points = {
    "RAEE": score(plan),
    "vote of the neighbours' labels": (0, vote_of_labels(raee, collected, test)),
    f"best single layer, {model.exits[best]}": score(np.full(len(plan), best)),
    "RAEE's layers at random": shuffled.mean(0),
    "threshold 0.8": score(confident.exit_index),
    "oracle": score(oracle),
    "full model": score(np.full(len(plan), 2)),
}
print(f"on {len(test)} test sentences           accuracy   layers")
for name, (layers, accuracy) in points.items():
    spread = f"  +- {shuffled[:, 1].std():.3f}" if "random" in name else ""
    print(f"{name:33} {accuracy:8.3f} {layers:8.2f}{spread}")
plots.controls(points, spread=shuffled[:, 1].std())

# %% [markdown]
# ![RAEE and its controls, accuracy against layers](docs/pictures/controls.png)
#
# RAEE beats the vote of labels here, because labels of similar words say little about a review. Its lead over its own
# layers at random is small, less than twice their spread, and a threshold on the same exits saves more layers at the
# same accuracy. One seed and 600 sentences decide nothing more.
#
# Its knob is $\tau$, which gives a curve:

# %%
curve = []
for tau in (0.0, 0.7, 0.9):
    raee.tau = tau
    curve.append(score(raee.plan(everything)))
plots.curve("RAEE", curve, "curve-6.png")
thresholds = np.linspace(0.5, 1, 11)
stops = [early_exit(Table(model.exits, logits), Threshold(value), range(len(test))).exit_index for value in thresholds]
plots.curve("threshold on RAEE's exits", map(score, stops), "curve-6.png")

# %% [markdown]
# ![Accuracy against layers, now with RAEE](docs/pictures/curve-6.png)
#
# Two trainings of the same exits differ, so compare the two coloured curves: both use the exits of this chapter.
#
# ## What we found
#
# | the paper says | here |
# |---|---|
# | RAEE saves layers | holds |
# | it is more accurate than the full model | excluded: no gain as large as the paper's, perhaps a smaller one |
# | *our control:* it is more accurate than its own layers at random | holds: the neighbours know *where* to exit |
# | *our control:* it is more accurate than a vote of the neighbours' labels | fails, on each of five tasks |
#
# In these [verdicts](results/raee.md) a sentence encoder finds the neighbours, as in the paper, and it finds better
# ones than the token embeddings of this chapter. **Use it** only after you have tried the vote of labels.
#
# The same as a script: `python -m mini_ee.raee`, with `--model DIR --task FILE` for your own.

# %% [markdown]
# ## Exercises
#
# **1.** Write Eq. 4 to 6 for one sentence, without the fallback.


# %%
def exit_of(values, distances, tau):
    """values (k, K), distances (k,) > 0 -> an exit: in a tie the first; when nobody votes, the last."""
    ...  # FILL ME IN


def check_exit_of():
    near, distances = raee.neighbours(test.batch(range(40)))
    for tau in (0.5, 0.9, 0.99):
        expected = chosen_exit(exit_distribution(raee.values[near], distances, tau))
        for row in range(40):
            result = exit_of(raee.values[near[row]], distances[row], tau)
            assert result == expected[row], f"tau {tau}, sentence {row}: expected exit {expected[row]}, got {result}"
    print("the same exits as in mini_ee")


# %% [markdown]
# **2.** How much of RAEE's accuracy comes from the *number* of sentences at each exit, and how much from *which* ones?
# Compute the mean accuracy over all permutations of the plan exactly, without drawing any.


# %%
def random_accuracy(right, plan):
    """right (N, K) bool, plan (N,) exits -> the mean accuracy when the N exits are dealt out at random."""
    ...  # FILL ME IN


def check_random_accuracy():
    small = np.array([[True, False], [False, True], [True, True]])
    result = random_accuracy(small, np.array([0, 0, 1]))
    assert np.isclose(result, 2 / 3), f"expected {2 / 3:.3f}, got {result}"
    result, margin = random_accuracy(right, plan), 4 * shuffled[:, 1].std() / 10
    assert abs(result - shuffled[:, 1].mean()) < margin, f"expected about {shuffled[:, 1].mean():.4f}, got {result}"
    print(f"RAEE {right[np.arange(len(plan)), plan].mean():.3f}, its layers at random {result:.3f}")
