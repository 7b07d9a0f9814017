# %% [markdown]
# # 11. A method of your own
#
# 16 minutes to read, 25 seconds to run
#
# **A method is one file.** Training, evaluation, calibration, export and serving then work for it. Ours is called
# *doubt*: at each exit, a small module learns whether the exit is correct, and an example stops when the module thinks
# so. This is all of `tutorial/doubt.py`:
#
# {code} tutorial/doubt.py
#
# - `Config` has the options. Each field becomes an option of the command, here `--caution`, with its help and limits.
# - `Trust` is the policy: one linear map per exit. It reads the hidden state without changing it (`detach`). `flops`,
#   a multiplication and an addition per number, goes into the tables.
# - `recipe` returns the stages of a training. The first trains heads and backbone, as joint training does. The second
#   trains the policy; `on_states` says that the backbone is frozen, so its states are computed once. `score` would
#   choose the best epoch; it is always 0 here, so the first epoch counts.
# - `METHOD` puts them together. `candidates` says which rules the default rule is chosen from, and `classes_only`
#   refuses tasks whose answer is a number, because such an answer is not simply right or wrong.
#
# ## Let mini_ee find it
#
# A package of your own names its methods by an *entry point*, so nothing of mini_ee is edited. Beside `doubt.py`,
# write a `pyproject.toml` and install it:
#
#     [project]
#     name = "my-methods"
#     version = "1"
#
#     [project.entry-points."mini_ee.methods"]
#     doubt = "doubt"
#
#     [tool.setuptools]
#     py-modules = ["doubt"]
#
# After `pip install -e .`, `mini-ee train doubt --out run-doubt` works, and so do all other commands. In a script, one
# line does the same until the script ends:

# %%
import tempfile
from pathlib import Path

import plots

import mini_ee
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.recording import predictions, record
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Policy, Threshold
from mini_ee.lab.sweep import from_loose_to_strict

METHODS["doubt"] = "doubt"
temporary = tempfile.TemporaryDirectory()
settings = {"exits": (4, 8, 12), "max_train": 1000, "epochs": 2, "lr": 1e-3, "head_lr": 2e-3}
run = mini_ee.train("doubt", out=Path(temporary.name) / "run-doubt", caution=2.0, **settings)
print("stages:", *dict.fromkeys(epoch["stage"] for epoch in run.metrics["epochs"]))
print("default rule:", run.rule)

# %% [markdown]
# ## Is it good?
#
# The fair comparison is a threshold on the same exits: same training, same sentences, and only the decision differs.
# `record` stores the outputs of all exits once, and `replay` runs any rule on them.

# %%
test = toy_task().split("test")
recorded = record(run.segments(), run.encode(test.texts), batch_size=32)
curves = {}
for name, rule in (("doubt", Policy(0.5)), ("threshold on the same exits", Threshold(0.5))):
    results = [recorded.replay(some) for some in from_loose_to_strict(rule, recorded, 12)]
    curves[name] = [
        (some.cost.layer_passes.mean(), (predictions(some.logits) == test.labels).mean()) for some in results
    ]
    print(name)
    for layers, accuracy in curves[name][::3]:
        print(f"  {layers:5.2f} layers, accuracy {accuracy:.3f}")
plots.compared(curves)

# %% [markdown]
# ![Accuracy against layers of the new method and of a threshold on the same exits](docs/pictures/own-method.png)
#
# Doubt did not win. At most depths a threshold on the same exits is a little more accurate, and it needs no training
# of its own.
#
# One seed and 600 sentences decide little. `mini-ee reproduce leaderboard --only doubt` trains a method with five
# seeds on the leaderboard's tasks, and [CONTRIBUTING.md](CONTRIBUTING.md) says how backbones, heads and rules are
# added in the same way.

# %% [markdown]
# ## Exercises
#
# **1.** Change the target of `Trust` from "is the exit correct" to "does the exit agree with the last one", which
# needs no labels. Write it as a function, as `recipe` could use it.


# %%
def target(predictions, labels):
    """predictions (N, K), of the exits; labels (N,) -> (N, K - 1), 1.0 where an exit agrees with the last one."""
    ...  # FILL ME IN


def check_target():
    import numpy as np

    result = np.asarray(target(np.array([[0, 1, 1], [1, 0, 1]]), np.array([1, 1])))
    assert result.tolist() == [[0, 1], [1, 0]], f"expected [[0, 1], [1, 0]], got {result.tolist()}"
    exits = recorded.predictions
    agreeing, correct = target(exits, test.labels).mean(0), (exits[:, :-1] == test.labels[:, None]).mean(0)
    for layer, agrees, right in zip(run.exits, agreeing, correct):
        print(f"exit {layer}: {agrees:.2f} agree with the last exit, {right:.2f} are correct")


# %% [markdown]
# **2.** What can a decision win at most? Of all plans that stop each sentence at a correct exit where there is one,
# the oracle takes the earliest. Compute its mean depth, so that you know how much is left for your method.


# %%
def oracle_layers(right, exits):
    """right (N, K) bool, exits (K,) -> mean layers when rows stop at the first correct exit, or else at the last."""
    ...  # FILL ME IN


def check_oracle_layers():
    import numpy as np

    small = np.array([[True, False, True], [False, True, True], [False, False, False]])
    result = oracle_layers(small, (4, 8, 12))
    assert result == 8, f"expected 8, got {result}"
    print(f"the oracle runs {oracle_layers(recorded.predictions == test.labels[:, None], run.exits):.2f} layers")
