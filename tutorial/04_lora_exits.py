# %% [markdown]
# # 4. LoRAExit: an adapter for each exit
#
# 25 minutes to read, 70 seconds to run · Paper: [Liu et al. 2024](https://aclanthology.org/2024.findings-emnlp.539)
#
# **Do exits compete for the layers that they share?** In joint training one set of weights has to serve all exits. We
# train them as in chapter 3, and then ask each exit for the gradient of its loss in the first two layers. A cosine of 1
# means that two exits want the same change:

# %%
import numpy as np
import plots
import torch

from mini_ee.bert import Bert, Exits
from mini_ee.consistent import joint_loss
from mini_ee.data import of_all, open_task
from mini_ee.loop import Table, early_exit
from mini_ee.lora_exits import LoRAExits, SideBySide, fit
from mini_ee.rules import Threshold
from mini_ee.train import task_loss, train

torch.manual_seed(0)
rows, test = open_task("", "bert", 128, 4000, seed=0)
learn, held = rows.split(0.25, 0.1, 0.65)[:2]
joint = Exits(Bert.load("bert"), (4, 8, 12), rows.outputs).eval()
rates = {joint.bert: 1e-3, joint.heads: 2e-3}
train(rates, len(learn), lambda some: joint_loss(joint, joint.states(learn.batch(some)), learn.labels[some]), epochs=2)

shared = list(joint.bert.layers[:2].parameters())
logits, gradients = joint(held.batch(range(len(held)))), []
for k in range(len(joint.exits)):
    loss = task_loss(logits[:, k], held.labels)
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, shared, retain_graph=True)])
    gradients.append(gradient / gradient.norm())
cosines = torch.stack(gradients) @ torch.stack(gradients).T
print("cosine with the gradient of")
print("exit    " + "".join(f"{layer:7}" for layer in joint.exits))
for layer, row in zip(joint.exits, cosines.tolist()):
    print(f"{layer:4}    " + "".join(f"{cosine:7.2f}" for cosine in row))

# %% [markdown]
# On these sentences the competition is mild: the exits ask for similar changes, though not for the same ones. Joint
# training has to find one compromise for all of them. LoRAExit needs none. It freezes the backbone, and gives each exit
# small adapters of its own in all layers up to that exit, so the exits share nothing that learns:
#
# ![LoRAExit: each exit has its own stream of adapters on the frozen backbone](docs/pictures/method-lora-exits.svg)
#
# ## Eq. 2: the adapters
#
# (Skip the first paragraph if you know [LoRA](https://arxiv.org/abs/2106.09685).) Fine-tuning changes a weight matrix
# $W$ of $d \times d$ numbers into $W + \Delta$. LoRA freezes $W$ and assumes that the change has a low rank m, so
# $\Delta = A B$, where $A$ is $d \times m$ and $B$ is $m \times d$. It trains $2dm$ numbers in place of $d^2$. $B$
# begins as zeros, so training begins with the unchanged model.
#
# {code} mini_ee/lora_exits.py LowRank
#
# {code} mini_ee/lora_exits.py Adapters.forward
#
# An exit computes with its own adapters, from the embeddings to its head:
#
# {code} mini_ee/lora_exits.py LoRAExits.logits_from
#
# ## Eq. 3 to 5: the loss
#
# The last exit learns from the labels. Each other exit also learns from a *teacher*: in the paper's distillation
# (SEGD) this is the next exit. With $q$ the probabilities at a temperature, the loss of an exit is
# $(1 - \lambda)\,\mathrm{CE} + \lambda\,\mathrm{KL}(q^t \,\|\, q^k)$:
#
# {code} mini_ee/lora_exits.py exit_loss
#
# {code} mini_ee/lora_exits.py distillation_loss
#
# {code} mini_ee/lora_exits.py log_soft_label
#
# The teacher has to be trained before it teaches, so training goes from the last exit to the first:
#
# {code} mini_ee/lora_exits.py fit

# %%
torch.manual_seed(0)
model = LoRAExits(Bert.load("bert"), (4, 8, 12), rows.outputs).eval()
fit(model, learn, held, epochs=2, lr=3e-3)
for name, part in (("backbone, frozen", model.bert), *zip(("exit 4", "exit 8", "exit 12"), model.adapters)):
    print(f"{name:16} {sum(parameter.numel() for parameter in part.parameters()):9,} parameters")

# %% [markdown]
# ## Eq. 6, and what it costs
#
# The adapters of two exits differ from layer 1 on, so exit 8 cannot reuse the hidden states of exit 4. There are two
# ways to run the exits. *Restart* runs one exit at a time: a sentence that does not stop starts again from the
# embeddings. *Side by side* runs all exits together. They share the product with $W$, and each adds the small product
# with its own adapters (SGMV):
#
# {code} mini_ee/lora_exits.py sgmv
#
# The predictions are the same. A *layer pass* is one layer that runs for one sentence, and here their number differs
# from the exit layer:

# %%
batch, beside = test.batch(range(64)), SideBySide(model)
with torch.inference_mode():
    answers = [early_exit(engine, Threshold(0.8), batch) for engine in (model, beside)]
print("same exits:", np.array_equal(answers[0].exit_index, answers[1].exit_index), end=", ")
print(f"logits differ by at most {np.abs(answers[0].logits - answers[1].logits).max():.4f}")
print("a sentence that stops after layer", *(f"{layer:4}" for layer in model.exits))
print("layer passes, restart            ", *(f"{passes:4}" for passes in model.passes(every_head=True)))
print("layer passes, side by side       ", *(f"{passes:4}" for passes in beside.passes(every_head=True)))

table, labels = Table(model.exits, of_all(model, test).numpy()), test.labels.numpy()
each_exit = (table.logits.argmax(2) == labels[:, None]).mean(0)
print(f"accuracy after layers {model.exits}: {each_exit.round(3)}")
curve = []
for cut in np.linspace(0.5, 1, 26):
    result = early_exit(table, Threshold(float(cut)), range(len(test)))
    curve.append((model.passes(True)[result.exit_index].mean(), (result.logits.argmax(1) == labels).mean()))
plots.curve("LoRAExit, threshold", curve, "curve-4.png")

# %% [markdown]
# ![Accuracy against layer passes, now with LoRAExit](docs/pictures/curve-4.png)
#
# After two epochs the adapters are still behind, because they can change little of a frozen model. The curve continues
# beyond the picture, because a sentence that no early exit answers costs 24 passes, twice the full model.
#
# ## What we found
#
# | the paper says | here |
# |---|---|
# | the first exit is more accurate than after two-stage training | holds |
# | it is more accurate than after joint training | excluded: no gain as large as the paper's |
# | the next exit is the better teacher | undecided |
# | adapters take little memory | holds |
# | *our control:* faster than joint training with a threshold | fails: a sentence that continues starts again |
#
# The [verdicts](results/loraexit.md) are measured on TREC and SST-2, and in these five [words](results/README.md).
# **Use it** when the backbone must stay frozen, for example because several tasks share it.
#
# The same as a script: `python -m mini_ee.lora_exits`, with `--model DIR --task FILE` for your own.

# %% [markdown]
# ## Exercises
#
# **1.** Count the layer passes of both ways yourself, for a sentence that stops at exit k.


# %%
def layer_passes(exits, together):
    """exits: their layers; together: side by side, else restart -> the passes up to each exit, a list."""
    ...  # FILL ME IN


def check_layer_passes():
    for engine, together in ((model, False), (beside, True)):
        expected, passes = engine.passes(True).tolist(), layer_passes(model.exits, together)
        assert list(passes) == expected, f"together={together}: expected {expected}, got {passes}"
    assert list(layer_passes((3, 6, 9, 12), True)) == [12, 21, 27, 30], "not right for the exits 3, 6, 9, 12"
    print("the table in the head of mini_ee/lora_exits.py")


# %% [markdown]
# **2.** For an exit that is always used, the adapters can be merged into the weights: $W + \text{scale}\,A B$. Then it
# costs no more than a model without adapters.


# %%
def merged(linear, adapter, scale):
    """linear: nn.Linear, which computes x @ linear.weight.T + linear.bias; adapter: its LowRank -> the new weight."""
    ...  # FILL ME IN


def check_merged():
    layer, adapters, x = model.bert.layers[0], model.adapters[0][0], torch.randn(5, 128)
    for name in adapters:
        linear = getattr(layer, name)
        expected, weight = adapters(name, x, linear(x)), merged(linear, adapters[name], model.scale)
        difference = (x @ weight.T + linear.bias - expected).abs().max()
        assert difference < 1e-4, f"{name}: the outputs differ by {difference:.4f}"
        print(f"{name}: the same output, at most {difference:.6f} apart")


# %% [markdown]
# **3.** `--teacher kd` takes the last exit as the teacher of all. At which exits must it give bitwise the same result
# as SEGD, and why? (At the last one, which has no teacher, and at the one before, whose next exit is the last one.)
