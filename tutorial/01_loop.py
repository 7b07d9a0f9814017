# %% [markdown]
# # 1. The loop
#
# 15 minutes to read, 5 seconds to run
#
# **How does a model stop early?** We split it at the layers where it may stop. A model with L layers and *exits* after
# layers $e_1 < \dots < e_K = L$ consists of K *segments*: the layers between two exits, and a small *head* that can
# already predict the answer. After each segment an *exit rule* reads the head's *logits*, one number per class, and
# decides which examples stop here with that prediction. The others continue.
#
# ![One turn of the loop: a segment, a head, a rule; examples that exit leave the batch](docs/pictures/loop.svg)
#
# We start with a model that is small enough to follow by hand. An example is one number, and a layer adds this number
# to a running sum. The head predicts *negative* or *positive* from the sign of the sum, and it is more confident when
# the sum is larger. Three methods make this model an *engine* of the loop. `keep` selects the examples that continue
# after the others have exited. Shapes are in brackets: B is the number of examples in the batch, C the number of
# classes.

# %%
from typing import NamedTuple

import numpy as np
import plots

from mini_ee.loop import early_exit
from mini_ee.rules import Never, Patience, Rule, Threshold


class Rows(NamedTuple):  # the state that the loop passes from segment to segment
    number: np.ndarray
    total: np.ndarray

    def keep(self, rows):
        return Rows(self.number[rows], self.total[rows])


class Adder:
    exits = (1, 2, 3, 4)  # layers that were run

    def start(self, inputs):
        return Rows(inputs, np.zeros_like(inputs))

    def advance(self, k, state):
        print(f"layer {self.exits[k]} runs for {len(state.number)} rows")
        return Rows(state.number, state.total + state.number)

    def read(self, k, state):
        return np.stack([-state.total, state.total], axis=1)  # logits (B, C), C = 2


# %% [markdown]
# The simplest rule compares the largest probability with a *threshold*:

# %%
numbers = np.array([3.0, -0.2, 0.6, -1.0])
result = early_exit(Adder(), Threshold(0.95), numbers)
print("exited after layers", result.layers.tolist())
plots.adder(numbers, result.layers, threshold=0.95)

# %% [markdown]
# ![The largest probability of four examples after each layer, up to the layer where they exit](docs/pictures/adder.png)
#
# The most confident example, 3.0, exited after one layer; the least confident, -0.2, ran through all four. Examples
# that exited were removed from the batch, so each later layer ran for fewer of them: this is how early exit saves
# time.
#
# The loop is `early_exit` in `mini_ee/loop.py`. Without bookkeeping, it is this:


# %%
def loop(segments, rule, inputs):
    state, rows, memory = segments.start(inputs), np.arange(len(inputs)), {}
    layers_run = np.zeros(len(inputs), int)
    for k, layer in enumerate(segments.exits):
        state = segments.advance(k, state)
        exiting = rule.stop(k, segments.read(k, state), memory) | (layer == segments.exits[-1])
        layers_run[rows[exiting]] = layer
        staying = np.flatnonzero(~exiting)
        state, rows = state.keep(staying), rows[staying]
        memory = {name: values[staying] for name, values in memory.items()}
        if not len(rows):
            return layers_run


print("the loop by hand:", loop(Adder(), Threshold(0.95), numbers).tolist())

# %% [markdown]
# The same rules work with any engine: a sentence classifier, the tokens of a decoder, an ONNX graph. The stricter the
# rule, the more layers run:


# %%
class Quiet(Adder):  # the same without printing
    def advance(self, k, state):
        return Rows(state.number, state.total + state.number)


print(f"{'rule':55} layers run    mean")
for rule in (Threshold(0.5), Threshold(0.9), Threshold(0.99), Threshold(-0.3, "entropy"), Patience(2), Never()):
    layers = early_exit(Quiet(), rule, numbers).layers
    print(f"{rule!s:55} {layers.tolist()}  {layers.mean():.2f}")

# %% [markdown]
# The measure `entropy` is the *negative* entropy, because a larger value of every measure means more confidence. So
# `Threshold(-0.3, "entropy")` exits when the entropy is at most 0.3 *nats* (units of the natural logarithm).
#
# `Patience` needs no threshold ([PABEE, Zhou et al. 2020](https://arxiv.org/abs/2006.04152)): it exits when
# consecutive exits predict the same class. `Patience(2)` needs two repetitions, so three equal predictions.
#
# ![PABEE: an example exits when consecutive exits predict the same](docs/pictures/method-pabee.svg)
#
# Every rule that reads logits is a class with one important method. `stop(k, read, memory)` gets the logits of exit k,
# counted from 0, for the examples that are still in the batch, and returns which of them exit. `memory` is a
# dictionary of arrays with one value per example. The loop removes the values of examples that exit, so a rule can
# remember what earlier exits predicted. (A rule may also `plan` all exits before the model runs, as in chapter 6.)
#
# **What we found.** Early exit is one loop: run a segment, read its head, ask a rule, shrink the batch. All methods of
# this project run in it.

# %% [markdown]
# ## Exercises
#
# An exercise is a function or class to fill in; its check tests your answer, for example `check_GapAndPatience()`.
#
# **1.** CALM ([Schuster et al. 2022](https://arxiv.org/abs/2207.07061)) exits when the two most probable classes are
# far apart, PABEE when consecutive predictions agree. Write a rule that requires both: exit when the gap between the
# two largest logits is at least `gap`, and the prediction equals the previous exit's (so never at the first one).


# %%
class GapAndPatience(Rule):
    def __init__(self, gap):
        self.gap = gap

    def stop(self, k, read, memory): ...  # FILL ME IN: (B,) bool from read (B, C); keep what you need in memory


def check_GapAndPatience():
    for gap, expected in ((0.0, [2, 2, 2, 2]), (2.0, [2, 4, 2, 2]), (3.0, [2, 4, 3, 2])):
        layers = early_exit(Quiet(), GapAndPatience(gap), numbers).layers.tolist()
        assert layers == expected, f"gap {gap}: expected {expected}, got {layers}"
        print(f"gap {gap}: exited after layers {layers}")


# %% [markdown]
# **2.** `Threshold(0.5)` stops every example after one layer. Why? Which is the smallest threshold that can keep an
# example in a model with C classes?


# %%
def smallest_useful_threshold(classes):
    """The largest probability of an example is never below this."""
    ...  # FILL ME IN


def check_smallest_useful_threshold():
    for classes in (2, 3, 10):
        logits, threshold = np.zeros((1, classes)), smallest_useful_threshold(classes)
        assert Threshold(threshold - 1e-9).stop(0, logits, {}), f"{classes} classes: {threshold} is too large"
        assert not Threshold(threshold + 1e-9).stop(0, logits, {}), f"{classes} classes: {threshold} is too small"
    print("right")
