# %% [markdown]
# # 8. Decoding when tokens exit, and the gap in the cache
#
# 18 minutes to read, 40 seconds to run
#
# A decoder writes one token at a time. In every layer, the new token attends to the *keys* and *values* of all tokens
# before it. They never change, so the decoder stores them in a *KV cache*, and a new token costs one pass through the
# layers instead of a pass over the whole text.
#
# **The gap.** A token that exits after layer 4 has no keys and values in layers 5 to 12. A later token that runs
# deeper needs them:
#
# ![A gap in the cache, filled by copying the state or by recomputing](docs/pictures/cache-gap.svg)
#
# There are two ways to fill it. `copy_state` takes the token's state at its exit as the input of all deeper layers:
# each of them computes keys and values from it, and nothing else. `recompute` runs the missing layers as soon as a
# later token goes deeper, for all waiting tokens as one block, so the keys and values equal a full run's. Both
# are in the part of the loop that runs one segment:
#
# {code} mini_ee/llama.py Decoding.advance
#
# We train heads as in chapter 5, and take thresholds for an epsilon of 0.8.

# %%
import time

import numpy as np
import plots
import torch

from mini_ee.llama import Llama, TokenExits, generate
from mini_ee.load import load_tokenizer
from mini_ee.rules import Never
from mini_ee.self_supervised import CALIBRATION_PROMPTS, TRAINING_PROMPTS, calibrate, fit, logits_of, written

torch.manual_seed(0)
llama, tokenizer = Llama.load("llama"), load_tokenizer("llama")


def ids_of(text):
    return [llama.config["bos_token_id"], *tokenizer.encode(text, add_special_tokens=False).ids]


learn = written(llama, [ids_of(prompt) for prompt in TRAINING_PROMPTS], 200, seed=0)
model = TokenExits(llama, (4, 8, 12)).eval()
fit(model, learn, epochs=3, lr=2e-3)
confident = calibrate(logits_of(model, written(llama, [ids_of(prompt) for prompt in CALIBRATION_PROMPTS], 80, 1)), 0.8)

prompt, length = ids_of("Once upon a time, there was a little dog."), 40
(full,) = generate(model, Never(), [prompt], length)
print("the full model:", tokenizer.decode(full.ids))
stories = {}
for missing in ("copy_state", "recompute"):
    (stories[missing],) = generate(model, confident, [prompt], length, missing)
    print(f"{missing}, {np.mean(stories[missing].layers):.1f} layers a token:", tokenizer.decode(stories[missing].ids))
plots.tokens({name: ([tokenizer.decode([i]) for i in text.ids], text.layers) for name, text in stories.items()})

# %% [markdown]
# ![Layers that were run for each token, with copied and with recomputed keys and values](docs/pictures/tokens.png)
#
# Three different stories. An early head sometimes chooses another word, and from then on the text is another one. So
# we cannot compare word by word. Instead we ask the full model about each text: at what share of the positions would
# it have written the same token?
#
# ## Does it save time?
#
# Layers that are not run need not be time saved: heads cost something, and `recompute` runs most of the missing layers
# later. So we measure, on six stories, each setting in turn, three times.

# %%
starts = (
    "Once upon a time, there was a little",
    "One day, Tom",
    "The sun was shining and",
    "Lily had a big red ball. She",
)
prompts = [ids_of(text) for text in (*starts, "Ben and Mia went to the", "Mom said")]
settings = {"full model": (Never(), "copy_state")} | {missing: (confident, missing) for missing in stories}


@torch.no_grad()
def agrees(prompt, text):
    """The share of the tokens that the full model would have written too, after the same tokens."""
    ids = torch.tensor([*prompt, *text.ids])
    predicted = model.logits(2, model.states(ids[None])[0, :, 2]).argmax(-1)
    return (predicted[len(prompt) - 1 : -1] == ids[len(prompt) :]).float().mean().item()


seconds, texts = {name: [] for name in settings}, {}
for _ in range(3):
    for name, (rule, missing) in settings.items():
        begin = time.perf_counter()
        texts[name] = [generate(model, rule, [prompt], 60, missing)[0] for prompt in prompts]
        seconds[name].append(time.perf_counter() - begin)
print("              layers a token   agreement   speed-up")
for name, several in texts.items():
    layers, agreement = np.mean([text.layers for text in several]), np.mean([*map(agrees, prompts, several)])
    speed = np.median(seconds["full model"]) / np.median(seconds[name])
    print(f"{name:13} {layers:14.2f} {agreement:11.2f} {speed:9.2f}x")

# %% [markdown]
# Both save time. For `recompute` this is a surprise: the table counts the layer at which a token exits, but later
# tokens make it run nearly all layers for nearly all tokens (the first exercise counts them). It runs them in *blocks*:
# five tokens that catch up together cost little more than one, because a step of a small decoder is dominated by
# starting its operations and by reading weights. Copying saves more time, and costs agreement.
#
# **When decoding gets slower.** A head multiplies the state by the whole vocabulary. When a head costs about as much
# as the layers that it can save, exits make decoding slower, even when they save layers: the
# [results](results/self-supervised.md) have such a model.
#
# **When the vocabulary is large**, no head that is a copy of the LM head can pay: to read it once costs as much as
# several layers. `mini-ee train METHOD --head lens` puts a small linear map, a *lens*, before the model's own LM head
# ([Belrose et al. 2023](https://arxiv.org/abs/2303.08112)). Least squares fit it in closed form, and Eq. 1 trains it on
# stored states. A lens still needs the product with the vocabulary, so something cheaper decides first. A *gate* is a
# policy that reads the state alone and learned whether the exit agrees with the full model. A *short list* has the most
# frequent tokens, and the lens compares the two most likely of them. ([Vincenti et al.
# 2024](https://arxiv.org/abs/2410.18952) choose the list anew for each token.) Each token then reads the whole
# vocabulary once, where it exits. For models with a large vocabulary lenses are the default, with whichever of the two
# needs fewer FLOPs, and `mini-ee estimate DIR --text FILE` shows beforehand what a gate can save.
#
# **When the text must not change at all**, an exit *drafts* a few tokens, and the full model verifies them in one
# pass. Tokens that it does not confirm are discarded. This is self-speculative decoding, as in LayerSkip ([Elhoushi et
# al. 2024](https://arxiv.org/abs/2404.16710)); the second exercise builds it, and `mini-ee generate RUN --lossless
# --layer 8 --draft 4` does it for a run of the lab. Without any training, a decoder can draft with some of its layers
# skipped. `mini-ee generate DIR --lossless --draft-by swift` tries random ones ([Xia et al.
# 2025](https://arxiv.org/abs/2410.06916)). With `clasp`, dynamic programming chooses those without which the state
# changes least ([Chen et al. 2025](https://arxiv.org/abs/2505.24196)).
#
# CALM ([Schuster et al. 2022](https://arxiv.org/abs/2207.07061)) also decides for each token. It compares one measure
# with one threshold for all layers, and bounds how much whole texts may change:
#
# ![CALM: a token exits when one measure exceeds one threshold](docs/pictures/method-calm.svg)
#
# ## What we found
#
# Exits save time in decoding when heads are cheap, and a slightly different text is good enough. Draft and verify when
# it is not.

# %% [markdown]
# ## Exercises
#
# **1.** How many layer passes does a text need with `recompute`? A token's missing layers run as soon as a later token
# goes deeper.


# %%
def passes(layers):
    """layers: the exit layer of each token, in order -> the layer passes of `recompute`."""
    ...  # FILL ME IN


def check_passes():
    for layers in ([4, 12, 4, 8], [12, 4, 4], [4, 4, 4, 12], stories["recompute"].layers):
        known = [0] * len(layers)  # layers whose keys and values are known, for each token
        for token, depth in enumerate(layers):
            for before in range(token + 1):
                known[before] = max(known[before], depth)
        result = passes(layers)
        assert result == sum(known), f"{layers}: expected {sum(known)} passes, got {result}"
    print(f"the story: {sum(layers)} passes up to the exits, {result} with recompute, {12 * length} of the full model")


# %% [markdown]
# **2.** Draft and verify. In each round, exit 8, which is `predictions(1, ids)`, writes `draft` tokens, and the full
# model reads them all in one pass. Keep the drafts up to the first one that it would not have written, then add its
# own token at that place. The text must be the full model's, with fewer rounds than tokens.


# %%
@torch.no_grad()
def predictions(k, ids):
    """The most likely next token after each token, as exit k predicts it: a list like ids."""
    return model.logits(k, model.states(torch.tensor([ids]))[0, :, k]).argmax(-1).tolist()


def draft_and_verify(prompt, count, draft):
    """-> `count` tokens after the prompt, and the number of passes of the full model."""
    ...  # FILL ME IN


def check_draft_and_verify():
    tokens, rounds = draft_and_verify(prompt, length, 4)
    assert tokens == full.ids, "the text is not the full model's"
    assert rounds < length, f"{rounds} passes for {length} tokens: no draft was kept"
    print(f"the same text, with {rounds} passes of the full model for {length} tokens")
