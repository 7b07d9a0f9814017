# %% [markdown]
# # 10. Deploy: one graph that stops by itself
#
# 16 minutes to read, 35 seconds to run
#
# ONNX is a file format for models that ONNX Runtime executes in Python, JavaScript, C++ and the browser. A file holds
# a *graph*: nodes such as `MatMul`, and the arrays that flow between them. All nodes are computed, with one exception:
# of the two branches of an `If` node, each a graph of its own, only one is.
#
# So the loop of chapter 1 becomes nested `If`s. After each exit, an `If` asks whether any row of the batch continues.
# Its then-branch selects these rows, runs them to the next exit, and contains the next `If`. `ScatterND` writes their
# new predictions over the earlier ones.
#
# ![Each then-branch runs the remaining rows to the next exit](docs/pictures/nested-if.svg)

# %%
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import classifier
import numpy as np
import onnx
import onnxruntime
import torch

from mini_ee.bert import Bert, Exits
from mini_ee.consistent import joint_loss
from mini_ee.data import open_task
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.loop import early_exit
from mini_ee.rules import Never, Threshold
from mini_ee.train import train

torch.manual_seed(0)
learn, test = open_task("", "bert", 128, 1000, seed=0)
model = Exits(Bert.load("bert"), (4, 8, 12), learn.outputs).eval()
rates = {model.bert: 1e-3, model.heads: 2e-3}
train(rates, len(learn), lambda some: joint_loss(model, model.states(learn.batch(some)), learn.labels[some]), epochs=2)

temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name) / "exported"
test = replace(test, names=("negative", "positive"))  # labels of the answers
verified = export(folder, model, Threshold(0.8), test, "bert")["verified"]
print(*sorted(path.name for path in folder.iterdir()))
print(f"{verified['texts']} sentences: logits within {verified['max_logit_difference']:.0e} of torch's,", end=" ")
print(f"the same exit for {verified['exit_agreement']:.0%}")

# %% [markdown]
# `export` compares the graph with torch on real sentences, and writes the folder only when they agree. (With the
# paper's scripts it is `--out exported`, with the command `mini-ee export run --out exported`.) Here are the nested
# graphs. At each level one branch holds a head, which is skipped when no row can stop there, and the other the next
# layers:


# %%
def show(graph, indent=0):
    """The nodes of a graph, and below them those of its then-branches."""
    kinds = [node.op_type for node in graph.node]
    print(f"{' ' * indent}{len(kinds)} nodes, of which {kinds.count('MatMul') + kinds.count('Gemm')} multiply matrices")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "then_branch":
                show(attribute.g, indent + 4)


show(onnx.load(folder / "onnx/model.onnx", load_external_data=False).graph)

# %% [markdown]
# ## The threshold is an input
#
# A graph that is already deployed can be made faster or more careful without a new export: `threshold` is an optional
# input, one number or one for each exit. Models differ in their inputs, so ask the session for their names.

# %%
onnxruntime.set_default_logger_severity(3)  # no warning that an input has a default
session = onnxruntime.InferenceSession(folder / "onnx/model.onnx", providers=["CPUExecutionProvider"])
names, optional = ({v.name for v in some} for some in (session.get_inputs(), session.get_overridable_initializers()))
print("inputs:", *sorted(names), " optional:", *sorted(optional & {"threshold", "exit_at"}))
print("outputs:", *(value.name for value in session.get_outputs()))
batch = test.batch(range(200))
inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": batch.kinds}
inputs = {name: tensor.numpy() for name, tensor in inputs.items() if name in names}
for threshold in (0.6, 0.8, 0.95, np.inf):
    label, layers = session.run(["label", "layers"], inputs | {"threshold": np.array(threshold, np.float32)})
    accuracy = (label == test.labels[:200].numpy()).mean()
    print(f"threshold {threshold:4}: {layers.mean():5.2f} layers, accuracy {accuracy:.3f}")
in_torch = early_exit(model, Threshold(0.8), batch).layers
print("the same layers as in torch:", np.array_equal(session.run(["layers"], inputs)[0], in_torch))

# %% [markdown]
# ## What it saves
#
# `Runtime` adds tokenization, label names and checksums. It needs numpy, tokenizers and onnxruntime, and no torch. We
# measure the same graph with exits and without, in turn: one text at a time, and in batches of 32.

# %%
runtime = Runtime(folder, threads=1)
texts = classifier.texts_of("test", 200)
print(runtime.run(["Terrible service!"])[0])
for size in (1, 32):
    seconds = {"exits": [], "full model": []}
    for _ in range(9):
        for name, rule in (("exits", None), ("full model", Never())):
            begin = time.perf_counter()
            answers = runtime.run(texts, size, rule)
            seconds[name].append(time.perf_counter() - begin)
    saved = 1 - np.mean([answer.layers for answer in runtime.run(texts)]) / 12
    speed = np.median(seconds["full model"]) / np.median(seconds["exits"])
    print(f"batch size {size:2}: {saved:.0%} of the layers saved, {speed:.2f} times as fast as without exits")

# %% [markdown]
# In a batch, a row that exits is taken out, and the deep layers run for the others only. At batch size 1 the layers
# above the exit are skipped entirely.
#
# ## Where will it run?
#
# ![CPU at batch size 1, batches, browser, GPU](docs/pictures/decision-tree.svg)
#
#     echo "Terrible service!" | mini-ee run exported
#     mini-ee serve exported --port 8000
#     curl -s localhost:8000/classify --json '{"text": "A lovely stay."}'
#
# `mini-ee export` has more: `--int8`, which combines with exits; `--segments`, one graph per segment, so that a server
# merges the rows of many requests after each exit; `--web`, a page that shows sentences going through the layers.
# `export/README.md` describes the way from a run to production in eight steps, and has clients for Node, C++ and the
# browser.
#
# ## What we found
#
# One graph stops by itself in every language that ONNX Runtime supports, and heads and rule add little to the time of
# its layers ([measured](results/onnx.md)). **Use it** on a CPU or in a browser, most of all one text at a time; on a
# GPU, exits save less (`export/gpu.md`).

# %% [markdown]
# ## Exercises
#
# **1.** A busy server wants to run at most half of the layers, on average over these sentences. Which threshold comes
# closest without running more?


# %%
def threshold_for(session, inputs, most):
    """most: mean number of layers allowed -> a threshold from np.linspace(.5, 1, 26)."""
    ...  # FILL ME IN


def check_threshold_for():
    def layers(threshold):
        return session.run(["layers"], inputs | {"threshold": np.array(threshold, np.float32)})[0].mean()

    result = threshold_for(session, inputs, 6.0)
    assert result is not None, "expected a threshold"
    best = max(depth for depth in map(layers, np.linspace(0.5, 1, 26)) if depth <= 6)
    assert layers(result) == best, f"{layers(result)} layers at {result}; {best} are possible"
    print(f"threshold {result:.2f}: {best:.2f} layers")


# %% [markdown]
# **2.** What is left to save in a batch? A layer runs as long as one row of the batch needs it. Compute how many *runs
# of a layer* all batches need, whatever their numbers of rows: this part of the time does not shrink when single rows
# stop.


# %%
def layer_runs(layers, size):
    """layers (N,): exit layer of each row, in order; batches of `size` rows -> the runs of all batches."""
    ...  # FILL ME IN


def check_layer_runs():
    assert layer_runs(np.array([4, 4, 12, 4, 8, 4]), 3) == 20, (
        "two batches, the deepest rows are at 12 and 8: expected 20"
    )
    layers = session.run(["layers"], inputs)[0]
    for size in (1, 8, 32):
        result = layer_runs(layers, size)
        print(f"batches of {size:2}: {result} of {12 * -(-len(layers) // size)} runs")
