# %% [markdown]
# # 2. Train exits in 50 lines
#
# 21 minutes to read, 60 seconds to run · Papers: [ConsistentEE's step 1](https://arxiv.org/abs/2312.11882), [DeeBERT](https://arxiv.org/abs/2004.12993)
#
# **How do we train outputs in the middle of a model?** Put a small head after some layers, compute a loss at each of
# them, and train on the weighted sum. This is *joint training*, and it needs nothing but PyTorch. With $l_i$ the
# cross-entropy of the exit after layer i, the loss is (Eq. 1 of ConsistentEE)
#
# $$\mathcal L = \frac{\sum_i i\,l_i}{\sum_i i}.$$
#
# ![Joint training: the losses of all exits, weighted by depth, train all layers](docs/pictures/method-joint.svg)
#
# The *backbone*, the transformer without heads, is the built-in BERT: 12 layers of width 128. `Bert` is one file,
# `mini_ee/bert.py`; [appendix A](#a-a-layer-by-hand-and-the-logit-lens) computes one of its layers by hand. The
# sentences are reviews that a grammar generated, positive or negative.

# %%
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import plots
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mini_ee.bert import Bert, Exits
from mini_ee.data import Inputs, open_task, read_table
from mini_ee.load import load_tokenizer
from mini_ee.loop import Table, early_exit
from mini_ee.rules import Never, Patience, Threshold

exits = (4, 8, 12)
rows, test = open_task("", model="bert", tokens=128, most=4000, seed=0)  # built-in sentences as token ids, with labels
learn, _ = rows.split(0.25, 0.75)  # 1,000 sentences; later chapters use the others


def new_model():
    """The pretrained backbone, and a head for each exit, always with the same random numbers."""
    torch.manual_seed(0)
    heads = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)) for _ in exits]
    return Bert.load("bert"), nn.ModuleList(heads)


def logits_at_exits(bert, heads, inputs):
    """B sentences of T tokens: inputs.ids (B, T) -> the logits of every exit, (B, K, C)."""
    hidden, logits = bert.embed(inputs), []
    visible = inputs.mask[:, None, None].bool()  # padding is not attended to
    weight = (inputs.mask / inputs.mask.sum(1, keepdim=True))[..., None]
    for depth, layer in enumerate(bert.layers, start=1):
        hidden = layer(hidden, visible)  # (B, T, D)
        if depth in exits:
            mean = (hidden * weight).sum(1)  # over the tokens, (B, D)
            logits.append(heads[exits.index(depth)](mean))
    return torch.stack(logits, 1)


def joint(losses):
    """Eq. 1. losses (K,), of the exits -> scalar."""
    weights = torch.tensor(exits, dtype=torch.float32)
    return (weights * losses).sum() / weights.sum()


def fit(bert, heads, loss_of, rates, epochs=2):
    """Train the modules in `rates`. loss_of: the exits' losses (K,) -> the loss."""
    optimizer = torch.optim.AdamW([{"params": module.parameters(), "lr": rate} for module, rate in rates.items()])
    steps = epochs * -(-len(learn) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, list(rates.values()), total_steps=steps, pct_start=0.1)
    bert.train(bert in rates)
    for epoch in range(epochs):
        for some in torch.randperm(len(learn)).split(32):
            logits = logits_at_exits(bert, heads, learn.batch(some.tolist()))
            labels = learn.labels[some]
            losses = torch.stack([cross_entropy(logits[:, k], labels) for k in range(len(exits))])
            loss = loss_of(losses)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f} on the last batch")
    bert.eval()


bert, heads = new_model()
fit(bert, heads, joint, {bert: 1e-3, heads: 2e-3})

# %% [markdown]
# That is all of the training. The heads read the mean over the tokens. All three losses reach the first four layers,
# so these layers learn to be useful early; the weights keep the last exit the most important one.
#
# ## A threshold decides
#
# We run the 600 test sentences once, with all exits, and then ask for several thresholds where each sentence would
# have stopped:


# %%
@torch.inference_mode()
def logits_on_test(bert, heads):
    """(N, K, C), of all test sentences as one batch."""
    return logits_at_exits(bert, heads, test.batch(range(len(test)))).numpy()


labels = test.labels.numpy()
logits = logits_on_test(bert, heads)
shifted = np.exp(logits - logits.max(2, keepdims=True))
probabilities = shifted / shifted.sum(2, keepdims=True)  # softmax
print("threshold  accuracy  mean layers")
for threshold in (0.6, 0.8, 0.9, 0.95, 1.01):
    confident = probabilities.max(2) >= threshold  # (N, K)
    confident[:, -1] = True
    k = confident.argmax(1)  # the first exit that is confident
    right = logits[np.arange(len(test)), k].argmax(1) == labels
    print(f"{threshold:9}  {right.mean():8.3f}  {np.array(exits)[k].mean():11.2f}")

# %% [markdown]
# With two classes, a threshold of 0.5 stops everything at the first exit; one above 1 never stops anything early. In
# between we trade accuracy for layers. Do easy sentences exit early? Nobody told the model what is easy, but the
# grammar knows: each sentence has a kind.

# %%
reviews = [row for row in read_table(Path(str(files("mini_ee") / "reviews.tsv"))) if row["split"] == "test"]
kinds = np.array([review["hardness"] for review in reviews])
recorded = Table(exits, logits)  # an engine of chapter 1 that knows all logits already
result = early_exit(recorded, Threshold(0.7), range(len(test)))
right = result.logits.argmax(1) == labels
print("threshold 0.7    layers  accuracy")
for kind in ("plain", "negated", "misleading", "doubly negated"):
    some = kinds == kind
    example = reviews[int(some.argmax())]["sentence"]
    print(f"{kind:15} {result.layers[some].mean():7.1f} {right[some].mean():9.2f}   {example}")

# %% [markdown]
# Plain sentences exit early, and most of their answers are right. The others run deeper, but without the same success:
# a model this small gets fewer than half of the doubly negated sentences right.
#
# ## From layers to time
#
# A recorded table saves nothing. To save time, the layers above an exit must not run, and for this the model has to be
# an engine of chapter 1's loop. `Exits` in `mini_ee/bert.py` is such an engine: our BERT and heads in one model. Its
# state is the hidden states and the mask, and a segment is a few layers:
#
# {code} mini_ee/bert.py Exits.advance
#
# {code} mini_ee/bert.py Exits.read
#
# We give it our heads, and measure both rules in turn, so that other programs on the machine disturb both alike:

# %%
engine = Exits(bert, exits, classes=2).eval()
engine.heads = heads
batch, seconds = test.batch(range(64)), {Never(): [], Threshold(0.8): []}
with torch.inference_mode():
    for _ in range(7):
        for rule, measured in seconds.items():
            begin = time.perf_counter()
            timed = early_exit(engine, rule, batch)
            measured.append(time.perf_counter() - begin)
full, early = (np.median(measured) for measured in seconds.values())
print(f"threshold 0.8: {timed.layers.mean():.1f} of 12 layers, {full / early:.1f} times as fast as the full model")

tokenizer = load_tokenizer("bert")
for text in ("A charming film.", "Terrible service!", "I expected to hate the film, but it was wonderful."):
    encoding = tokenizer.encode(text)
    parts = encoding.ids, encoding.attention_mask, encoding.type_ids
    with torch.inference_mode():
        answer = early_exit(engine, Threshold(0.8), Inputs(*(torch.tensor([part]) for part in parts)))
    print(f"{('negative', 'positive')[answer.logits.argmax()]} after {answer.layers[0]:2} layers: {text}")

# %% [markdown]
# Fewer layers do not mean proportionally less time, because heads, rules and taking examples out of the batch take time
# too. The last answer is wrong after four layers, and its exit was confident: chapter 3 is about that. Write sentences
# of your own into the loop and run the script again.
#
# ## Another recipe: two stages
#
# DeeBERT trains the backbone for the last exit first, and then the other heads on the frozen backbone:
#
# ![First the backbone with the last head, then the other heads](docs/pictures/method-two-stage.svg)
#
# With the functions above these are two calls. The second has no rate for the backbone, so nothing changes it:

# %%
two_stage, other_heads = new_model()
fit(two_stage, other_heads, lambda losses: losses[-1], {two_stage: 1e-3, other_heads: 2e-3})
fit(two_stage, other_heads, lambda losses: losses[:-1].sum(), {other_heads: 2e-3})
recorded_stages = Table(exits, logits_on_test(two_stage, other_heads))


def sweep(table):
    """(mean layers, accuracy) for thresholds from the loosest to the strictest."""
    results = [early_exit(table, Threshold(float(cut)), range(len(test))) for cut in np.linspace(0.5, 1, 26)]
    return [(some.layers.mean(), (some.logits.argmax(1) == labels).mean()) for some in results]


for name, table in (("joint", recorded), ("two-stage", recorded_stages)):
    each_exit = (table.logits.argmax(2) == labels[:, None]).mean(0)
    print(f"{name:9} accuracy after layers {exits}: {each_exit.round(3)}")
    plots.curve(f"{name}, threshold", sweep(table), "curve-2.png")

# %% [markdown]
# ![Accuracy against layers of joint and two-stage training](docs/pictures/curve-2.png)
#
# Check the simplest alternative first, a *fixed depth*: stop every sentence after the same layer. Joint training is as
# accurate after layer 8 as after layer 12, so a rule that runs more than 8 layers on average gains nothing here.
#
# This picture grows with every paper. Joint training is ahead here, because two-stage training never asks the early
# layers for anything. But one seed and 600 sentences prove little, because such an accuracy has a standard error of
# almost two points. On TREC (questions of six types), with MiniLM's six layers and five seeds, joint training reaches
# 91.1% after two layers and two-stage training 85.8% ([results](results/loraexit.md)).
#
# A third recipe, SWEET ([Rotem et al. 2023](https://arxiv.org/abs/2306.02307)), cuts the gradients between exits, so
# that each layer learns from one exit only: `mini-ee train sweet`.
#
# ![SWEET: the gradient of an exit stops at the exit before](docs/pictures/method-sweet.svg)
#
# **What we found.** Exits cost a weighted sum of losses and a comparison. **Begin with joint training** when you may
# train the backbone; when your model is already fine-tuned, add exits to it as in chapter 9.

# %% [markdown]
# ## Exercises
#
# **1.** PABEE exits when consecutive predictions agree. Of many thresholds and two patiences, which rule saves most
# layers without losing accuracy?

# %%
rules = [Threshold(cut / 100) for cut in range(50, 100)] + [Patience(1), Patience(2)]


def cheapest(rules, table, labels):
    """The rule that runs fewest layers among those that are at least as accurate as the last exit alone."""
    ...  # FILL ME IN


def check_cheapest():
    def score(rule):
        result = early_exit(recorded, rule, range(len(labels)))
        return (result.logits.argmax(1) == labels).mean(), result.layers.mean()

    chosen, full = score(cheapest(rules, recorded, labels)), score(Never())[0]
    assert chosen[0] >= full, f"it is less accurate than the full model: {chosen[0]:.3f} and {full:.3f}"
    fewest = min(layers for accuracy, layers in map(score, rules) if accuracy >= full)
    assert chosen[1] == fewest, f"{fewest:.2f} layers are enough, your rule runs {chosen[1]:.2f}"
    print(f"accuracy {chosen[0]:.3f} after {chosen[1]:.2f} layers")


# %% [markdown]
# We chose this rule on the very examples on which we report it, so the number is too good. Chapter 3 does it properly.
#
# **2.** A loss reaches all layers below its exit. Which share of the weights in Eq. 1 reaches a given layer?


# %%
def reaching(layer, exits):
    """layer: 1 to L -> the share of the weights of the losses that train this layer, from 0 to 1."""
    ...  # FILL ME IN


def check_reaching():
    for layer, expected in ((1, 1.0), (4, 1.0), (5, 20 / 24), (8, 20 / 24), (9, 0.5), (12, 0.5)):
        share = reaching(layer, (4, 8, 12))
        assert share is not None and abs(share - expected) < 1e-9, f"layer {layer}: expected {expected}, got {share}"
    print("Early layers are trained by all exits. Do these want the same? Chapter 4 measures it.")
