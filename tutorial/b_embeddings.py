# %% [markdown]
# # B. Embeddings at each depth
#
# 8 minutes to read, 10 seconds to run
#
# **A search engine needs vectors, and no labels.** Freeze a sentence encoder, here the built-in BERT, whose embedding
# is the mean of its last hidden states. After each exit, a linear map learns the encoder's own full embedding from
# texts alone. It is the idea of chapter 5, for vectors; the loss is 1 minus the cosine of the two embeddings.

# %%
import numpy as np
import plots
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from mini_ee.bert import Bert, Exits
from mini_ee.data import of_all, open_task
from mini_ee.train import train

torch.manual_seed(0)
exits = (3, 6, 9, 12)
rows, test = open_task("", "bert", 128, 1000, seed=0)
encoder = Exits(Bert.load("bert"), exits, rows.outputs).eval()  # we use its states, and not its heads
states, test_states = of_all(encoder.states, rows), of_all(encoder.states, test)  # (N, K, D), means over the tokens
maps = nn.ModuleList(nn.Linear(128, 128) for _ in exits[:-1])
for linear in maps:
    nn.init.eye_(linear.weight)  # at the beginning the early embedding itself
    nn.init.zeros_(linear.bias)


def cosines(states):
    """states (B, K, D) -> (B, K - 1): the cosine of each mapped embedding to the full one."""
    full = states[:, -1]
    return torch.stack([cosine_similarity(linear(states[:, k]), full) for k, linear in enumerate(maps)], 1)


before = cosines(test_states).detach()
train({maps: 2e-3}, len(rows), lambda some: 1 - cosines(states[some]).mean(), epochs=10)
after = cosines(test_states).detach()
print(f"cosine to the full embedding, on {len(test)} new sentences")
print("layer   before  trained  lowest tenth below")
for k, layer in enumerate(exits[:-1]):
    print(f"{layer:5}   {before[:, k].mean():6.3f}  {after[:, k].mean():7.3f}  {after[:, k].quantile(0.1):18.3f}")
plots.embeddings(exits[:-1], before.numpy(), after.numpy())

# %% [markdown]
# ![Cosine of the early embeddings to the full one, before and after training](docs/pictures/cosines.png)
#
# The maps bring early embeddings close to the full one. For search another question counts: are the nearest neighbours
# the same?


# %%
def neighbours(vectors):
    """(N, D) -> (N, 5), the most similar other sentences."""
    unit = nn.functional.normalize(vectors, dim=1)
    return (unit @ unit.T).fill_diagonal_(-1).topk(5).indices.numpy()


full = neighbours(test_states[:, -1])
with torch.inference_mode():
    for k, layer in enumerate(exits[:-1]):
        early = neighbours(maps[k](test_states[:, k]))
        shared = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(early, full)])
        print(f"after layer {layer}: {shared:.0%} of the five nearest neighbours are those of the full embedding")

# %% [markdown]
# **What we found.** Linear maps recover much of the similarity of two texts, but fewer of the exact neighbours; the
# [results](results/embeddings.md) are measured on published encoders. **Use it** when similarities must be fast and
# may be rougher. `mini-ee add-exits ENCODER --text FILE --cosine .7` does it for a sentence encoder that you have.

# %% [markdown]
# ## Exercises
#
# **1.** All maps aim at the *full* embedding, so vectors of different depths can be compared. Documents may be
# embedded once, with all layers, and queries early. How often is the full embedding of a sentence the nearest one to
# its own early embedding?


# %%
def found_again(early, full):
    """early, full (N, D) -> the share of rows whose full embedding is the most similar of all to their early one."""
    ...  # FILL ME IN


def check_found_again():
    small = torch.tensor([[1.0, 0.1], [0.1, 1.0], [-1.0, 0.2]])
    share = found_again(small, small.flip(0))
    assert abs(share - 1 / 3) < 1e-6, f"expected {1 / 3:.3f}, got {share}"
    with torch.inference_mode():
        for k, layer in enumerate(exits[:-1]):
            print(f"after layer {layer}: {found_again(maps[k](test_states[:, k]), test_states[:, -1]):.0%}")
