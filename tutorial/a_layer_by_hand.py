# %% [markdown]
# # A. A layer by hand, and the logit lens
#
# 13 minutes to read, 5 seconds to run
#
# The built-in BERT is one file, `mini_ee/bert.py`: embeddings, then 12 layers of attention and feed-forward network.
# Here is one of its layers from scratch. With $H$ attention heads, width $D$, and $Q$, $K$, $V$ linear maps of the
# input $h$ (biases are omitted; each head uses its own $D/H$ columns; the mask hides padding):
#
# $$h' = \mathrm{norm}(h + W_o\,\mathrm{softmax}(QK^\top/\sqrt{D/H})\,V), \qquad
#   h'' = \mathrm{norm}(h' + W_2\,\mathrm{gelu}(W_1 h')).$$

# %%
import plots
import torch
from torch.nn.functional import gelu

from mini_ee.bert import Bert
from mini_ee.data import Inputs
from mini_ee.llama import Llama, TokenExits
from mini_ee.load import load_tokenizer

bert, tokenizer = Bert.load("bert"), load_tokenizer("bert")
encoding = tokenizer.encode("The film was not bad.")
inputs = Inputs(*(torch.tensor([part]) for part in (encoding.ids, encoding.attention_mask, encoding.type_ids)))
layer = bert.layers[0]


def split(x):
    """(B, T, D) -> (B, H, T, D / H)."""
    return x.unflatten(-1, (layer.heads, -1)).transpose(1, 2)


with torch.inference_mode():
    before = bert.embed(inputs)
    after = bert.run(before, inputs.mask, 0, 1)  # layer 1
    q, k, v = (split(linear(before)) for linear in (layer.query, layer.key, layer.value))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (B, H, T, T): each token and each that it reads
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    h = layer.attention_norm(before + layer.attention_output(attended))
    h = layer.output_norm(h + layer.down(gelu(layer.up(h))))
print(f"states {tuple(after.shape)}, largest difference {(h - after).abs().max():.4f} of {after.abs().max():.1f}")

# %% [markdown]
# ## What would the model say after each layer?
#
# A decoder has a head that turns the last hidden state into a probability for each word. We may read any other hidden
# state with the same head (the *logit lens*). `TokenExits` copies the head to every layer, so with no training at all
# this is:

# %%
llama, words = Llama.load("llama"), load_tokenizer("llama")
lens = TokenExits(llama, range(1, 13)).eval()
beginnings = "Once upon a", "Once upon a time, there was a little girl named", "They lived happily ever"
guesses, probabilities = [], []
for beginning in beginnings:
    ids = torch.tensor([[llama.config["bos_token_id"], *words.encode(beginning, add_special_tokens=False).ids]])
    with torch.inference_mode():
        chances = lens.classify(lens.states(ids))[0, -1].softmax(-1)  # (12, vocabulary)
    best = chances.argmax(-1)
    guesses.append([words.decode([token]).strip() for token in best.tolist()])
    probabilities.append(chances[:, best[-1]].numpy())
    settled = max((depth + 1 for depth, guess in enumerate(best, 1) if guess != best[-1]), default=1)
    print(f"settled after layer {settled:2}: {beginning} {guesses[-1][-1]}")
plots.guesses(beginnings, guesses, probabilities)

# %% [markdown]
# ![The word that each of 12 layers would write, and the probability of the final word](docs/pictures/guesses.png)
#
# Many predictions are settled before the last layer, but the layer differs from input to input. The model's own head
# reads early layers badly, because it was trained for the last one; chapter 5 trains heads for them.

# %% [markdown]
# ## Exercises
#
# **1.** From which layer on does the prediction no longer change?


# %%
def settled_layer(guesses):
    """guesses: the predictions after layers 1 to L, a list -> the first layer from which on they equal the last one."""
    ...  # FILL ME IN


def check_settled_layer():
    for row, expected in (([7, 7, 7], 1), ([1, 7, 7], 2), ([7, 1, 7], 3), ([1, 2, 3, 3, 3], 3)):
        layer = settled_layer(row)
        assert layer == expected, f"{row}: expected layer {expected}, got {layer}"
    print([settled_layer(row) for row in guesses])


# %% [markdown]
# **2.** `settled_layer` looks into the future. A rule cannot: it may stop as soon as two layers in a row predict the
# same word. How often is that word the final one?


# %%
def stopped_layer(guesses):
    """The first layer whose prediction equals the one of the layer before it; if there is none, the last layer."""
    ...  # FILL ME IN


def check_stopped_layer():
    for row, expected in (([7, 7, 7], 2), ([1, 2, 2, 3, 3], 3), ([1, 2, 3], 3)):
        layer = stopped_layer(row)
        assert layer == expected, f"{row}: expected layer {expected}, got {layer}"
    for row in guesses:
        print(
            f"stops after layer {stopped_layer(row)} with {row[stopped_layer(row) - 1]!r}, the model says {row[-1]!r}"
        )
