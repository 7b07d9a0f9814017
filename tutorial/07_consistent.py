# %% [markdown]
# # 7. ConsistentEE: a policy that learns to exit
#
# 20 minutes to read, 55 seconds to run · Paper: [Zeng et al. 2024](https://arxiv.org/abs/2312.11882)
#
# **Can exiting itself be learned?** A small *policy* at each exit reads the hidden state and returns the probability
# of stopping. It learns by reinforcement: an exit earns a reward for a correct answer and pays a price per layer. The
# paper claims that such a policy saves more layers than earlier methods, and that hard sentences should pay less per
# layer.
#
# ![A policy at every exit decides, and learns from the reward](docs/pictures/method-consistent.svg)

# %%
from pathlib import Path

import numpy as np
import plots
import torch

import mini_ee
from mini_ee.bert import Bert
from mini_ee.consistent import (
    PolicyExits,
    Settings,
    exit_logits,
    fit_rows,
    log_exit_probabilities,
    memorized_layer,
    reinforce_loss,
    sample_exits,
)
from mini_ee.data import of_all, open_task, read_table
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.loop import Table, early_exit
from mini_ee.rules import Policy, Threshold

# %% [markdown]
# ## REINFORCE and its baseline
#
# (Skip this part if you know them.) The exit is a random choice, so we cannot differentiate through it. But the
# gradient of the expected reward is the expectation of reward times gradient of the log probability of the choice. So
# draw an exit, compute its reward $R$, and make this choice the more probable the larger $R$ is. One draw says little,
# because its variance is large. Subtracting a *baseline* $b$, which does not depend on the draw, keeps the mean, since
# $\mathrm{E}[b\,\nabla \ln p] = b\,\nabla \sum p = 0$, and lowers the variance. Here $b$ is the mean reward of the
# other draws for the same sentence:
#
# {code} mini_ee/consistent.py log_exit_probabilities
#
# {code} mini_ee/consistent.py reinforce_loss
#
# {code} mini_ee/consistent.py leave_one_out
#
# With three exits there are only three outcomes, so we can also compute the expected reward, and its gradient,
# exactly. We estimate the gradient 20,000 times from 8 draws each, and compare:

# %%
torch.manual_seed(0)
times = 20_000
policy = torch.tensor([[0.3, -0.5]]).expand(times, 2).clone().requires_grad_()  # logits of two policies
rewards = torch.tensor([[-1.0, -0.4, -0.6]]).expand(times, 3)  # of stopping at exits 1, 2, 3
log_exit = log_exit_probabilities(policy)
exits = sample_exits(log_exit, 8)
losses = {
    "exact": -(log_exit.exp() * rewards).sum(1).mean(),
    "sampled, no baseline": reinforce_loss(log_exit, rewards, exits, baseline=False),
    "sampled, leave-one-out": reinforce_loss(log_exit, rewards, exits),
}
gradients = {}
for name, loss in losses.items():
    (gradient,) = torch.autograd.grad(loss, policy, retain_graph=True)
    gradients[name] = times * gradient[:, 0].numpy()  # the loss is a mean over the estimates
    print(f"{name:22} gradient {gradients[name].mean():.4f}, standard deviation {gradients[name].std():.4f}")
plots.gradients(gradients)

# %% [markdown]
# ![Sampled gradients, without and with the baseline](docs/pictures/variance.png)
#
# All three agree on average. The baseline makes a single estimate several times as precise.
#
# ## Eq. 2 to 4 and 7: the reward
#
# The vanilla reward (Eq. 3) is minus the loss, minus a price alpha for each layer. The *memorized layer* $M$ (Eq. 7)
# is the layer from which on all exits are correct: it measures how hard a sentence is. The hardness-guided reward (Eq.
# 4) lowers the price for hard sentences.
#
# {code} mini_ee/consistent.py vanilla_rewards
#
# {code} mini_ee/consistent.py hardness_guided_rewards
#
# {code} mini_ee/consistent.py memorized_layer
#
# A sentence with $M = L$ pays nothing, even when no exit ever predicts it correctly.
#
# ## Training
#
# Step 1 trains all exits together. Steps 2 to 4 then alternate: compute the rewards, train the policies on the frozen
# model, train the model at the exits that the policies choose (Eq. 5 and 6). A round that does not raise the reward of
# held-out sentences ends the training.

# %%
torch.manual_seed(0)
rows, test = open_task("", "bert", 128, 4000, seed=0)
learn, held = rows.split(0.25, 0.1, 0.65)[:2]
model = PolicyExits(Bert.load("bert"), (4, 8, 12), rows.outputs).eval()
fit_rows(model, learn, held, Settings(alpha=0.02, epochs=2, lr=1e-3))

with torch.no_grad():
    states = of_all(model.states, test)  # (N, K, D)
    table = Table(model.exits, model.classify(states).numpy(), exit_logits(model, states).numpy())
labels = test.labels.numpy()


def score(rule):
    """Mean layers and accuracy on the test rows."""
    result = early_exit(table, rule, range(len(labels)))
    return result.layers.mean(), (result.logits.argmax(1) == labels).mean()


print("stop at          accuracy   layers")
cuts = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
curve = [score(Policy(cut)) for cut in cuts]
for cut, (layers, accuracy) in zip(cuts, curve):
    print(f"pi > {cut:<5}       {accuracy:8.3f} {layers:8.2f}")
plots.curve("ConsistentEE", curve, "curve-7.png")
thresholds = [score(Threshold(threshold)) for threshold in np.linspace(0.5, 1, 11)]
plots.curve("threshold on ConsistentEE's exits", thresholds, "curve-7.png")

# %% [markdown]
# ![Accuracy against layers, now with ConsistentEE](docs/pictures/curve-7.png)
#
# A threshold on the same exits is as good as the policy, or better. So this curve lies above those of earlier chapters
# because step 4 trains the exits further, and not because the policy decides well.
#
# The paper stops when $\pi > 0.5$. Another cut moves a trained policy to another speed, without a new training.
#
# **Do hard sentences exit later?** Nobody told the policy what is hard. The built-in sentences come with their kind of
# difficulty, so we can look:

# %%
reviews = read_table(Path(mini_ee.__file__).parent / "reviews.tsv")
kinds = np.array([review["hardness"] for review in reviews if review["split"] == "test"])
right = torch.from_numpy(table.logits.argmax(2) == labels[:, None])
memorized = memorized_layer(right, torch.tensor(model.exits)).numpy()
depth = early_exit(table, Policy(), range(len(labels))).layers
means = {kind: (memorized[kinds == kind].mean(), depth[kinds == kind].mean()) for kind in HARDNESS}
print("                  memorized layer   exit of the policy")
for kind, (layer, exit_layer) in means.items():
    print(f"{kind:16} {layer:16.2f} {exit_layer:20.2f}")
plots.memorized(means)

# %% [markdown]
# ![Memorized layer and exit of the policy, by kind of sentence](docs/pictures/memorized.png)
#
# The policy lets plain sentences exit first and contrasted ones last. But it stops doubly negated sentences too early:
# it reads what the exit's head reads, and cannot see what this head overlooks.
#
# ## What we found
#
# | the paper says | here |
# |---|---|
# | it saves more layers than earlier methods | holds for PABEE and BERxiT, fails for a confidence threshold |
# | the memorized layer measures how hard an example is | holds: it correlates with the loss |
# | the hardness-guided reward is better than the vanilla one | undecided |
#
# These [verdicts](results/consistentee.md) rest on TREC and SST-2, with five seeds. **Use it** when you can set
# the speed during training; afterwards only the cut on the policy's probability changes it.
#
# A policy can decide for tokens too: see `fit_tokens` in the same file. The same as a script: `python -m
# mini_ee.consistent`, with `--model DIR --task FILE` for your own.

# %% [markdown]
# ## Exercises
#
# **1.** A policy returns the probability of stopping for a sentence that has *reached* its exit. Compute the
# probability that a sentence exits at each exit, the last one included.


# %%
def exit_probabilities(stopping):
    """stopping (K - 1,), from the policies -> (K,), the probability of exiting at each exit."""
    ...  # FILL ME IN


def check_exit_probabilities():
    for logits in ([0.3, -0.5], [0.0, 0.0, 0.0], [-2.0, 3.0]):
        expected = log_exit_probabilities(torch.tensor([logits]).double()).exp()[0].numpy()
        result = np.asarray(exit_probabilities(1 / (1 + np.exp(-np.array(logits)))), float)
        assert result.shape == expected.shape, f"expected {len(expected)} probabilities, got {result}"
        assert np.allclose(result, expected), f"{logits}: expected {expected.round(3)}, got {result.round(3)}"
        print(result.round(3), "sum", round(result.sum(), 6))


# %% [markdown]
# **2.** Which exit should a perfectly informed policy choose? Return the exit with the largest reward (Eq. 3) for each
# test sentence, and look how the depth changes with alpha.


# %%
def best_exits(losses, depths, alpha):
    """losses (N, K), depths (K,) in layers -> (N,): the exit with the largest reward, the first of equal ones."""
    ...  # FILL ME IN


def check_best_exits():
    small = np.array([[0.1, 0.0, 0.0], [0.9, 0.5, 0.1]])
    for alpha, expected in ((0.0, [1, 2]), (0.05, [0, 2]), (0.2, [0, 0])):
        result = np.asarray(best_exits(small, np.array([4, 8, 12]), alpha))
        assert result.tolist() == expected, f"alpha {alpha}: expected exits {expected}, got {result}"
    shifted = table.logits - table.logits.max(2, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(2, keepdims=True))
    losses = -log_p[np.arange(len(labels)), :, labels]
    for alpha in (0.0, 0.02, 0.07):
        layers = np.array(model.exits)[best_exits(losses, np.array(model.exits), alpha)]
        print(f"alpha {alpha}: {layers.mean():.2f} layers")
