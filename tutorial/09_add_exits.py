# %% [markdown]
# # 9. Exits for a classifier that you have
#
# 13 minutes to read, 40 seconds to run
#
# **You have a fine-tuned classifier, and texts, but no labels.** `add-exits` leaves the model as it is and adds heads
# after earlier layers, which learn what the model predicts, as in chapter 5. It chooses thresholds on held-out texts,
# and tests the agreement with the model on others.
#
# Any Hugging Face folder of a `...ForSequenceClassification` will do. Ours is the built-in BERT, fine-tuned on 1,000
# reviews by `tutorial/classifier.py`:

# %%
import json
import tempfile
from pathlib import Path

import classifier
import plots

import mini_ee
from mini_ee.export.runtime import Runtime
from mini_ee.lab.rules import Never

temporary = tempfile.TemporaryDirectory()
folder, fast = Path(temporary.name) / "my-classifier", Path(temporary.name) / "fast"
classifier.fine_tune(folder)
print(*sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# From here on, the folder could come from anywhere. On the command line the next step is
#
#     mini-ee add-exits my-classifier --text inputs.txt --agreement .95 --out fast
#
# and in Python:

# %%
texts = classifier.texts_of("train", 1500)
run = mini_ee.add_exits(folder, texts, fast, agreement=0.95)
summary = json.loads((fast / "summary.json").read_text())
for use, count in summary["texts"].items():
    print(f"{count:5} texts {use}")
print("layers with an exit:", *summary["exits"])
print(f"same predictions as the original: {summary['agreement']:.1%} of the test texts")
print(f"layers saved: {summary['layers_saved']:.1%}, speed-up at batch size 1: {summary['speedup']:.2f}x")
plots.agreement(summary)

# %% [markdown]
# ![Agreement with the original model against layers saved, one point per threshold](docs/pictures/add-exits.png)
#
# Three groups of texts keep the test honest: heads learn from the first, thresholds come from the second, and the
# third tests what nothing has chosen. With confidence 95%, the agreement on new texts of the same kind is at least
# 95%.
#
# The speed-up compares the exported graph with and without exits. Skipped layers explain a factor of at most 1 / (1 -
# share of layers saved); more than that is the noise of a busy machine.
#
# **How many texts?** To show an agreement of .99 with confidence 95%, a test needs 299 texts without a single
# difference, because $.99^{299} < .05$; a difference or two needs more. A few hundred texts are enough for .95, and
# ten thousand are good for .99. The [results](results/add-exits.md) have the numbers for a published model.
#
# **What is in the folder?** `fast/README.md` is a model card, `fast/curve.png` the picture above, `fast/run` the run,
# and `fast/exported` an ONNX graph, which is also a Hugging Face folder. When exits save hardly any time, the command
# says so and exports nothing.
#
# **When texts have labels**, `--max-loss .01` bounds the loss of accuracy instead of the agreement. A sentence encoder
# works too: `--cosine .9` asks for its embeddings' similarity.
#
# The run answers with exits; with the rule `Never` it is the original model:

# %%
original = run._replace(rule=Never())
for text, early, full in zip(texts[:4], run.classify(texts[:4]), original.classify(texts[:4])):
    print(f"{early.label} after {early.layers} layers, {full.label} after {full.layers}: {text}")

# %% [markdown]
# The first sentence is one of the few whose prediction changes: a hard one that looks easy to an early head.
#
# ## What we found
#
# Exits skip much of a classifier and change few of its predictions; how much depends on the model, and the command
# prints it for yours. The guarantee holds for texts like the tested ones, so check again when your texts change. **Use
# it** when the classifier is good, must not change, and you can collect texts like its inputs.

# %% [markdown]
# ## Exercises
#
# **1.** A test finds no difference on n texts. How many texts are needed to be sure, with a given confidence, that the
# agreement is at least `agreement`?


# %%
def texts_needed(agreement, confidence):
    """-> the smallest n for which n texts without a difference would be too unlikely at a lower agreement."""
    ...  # FILL ME IN


def check_texts_needed():
    for agreement, confidence, expected in ((0.5, 0.5, 1), (0.95, 0.95, 59), (0.99, 0.95, 299), (0.99, 0.99, 459)):
        result = texts_needed(agreement, confidence)
        assert result == expected, f"agreement {agreement}, confidence {confidence}: expected {expected}, got {result}"
        print(f"{result} texts for an agreement of {agreement} with confidence {confidence:.0%}")


# %% [markdown]
# **2.** Exits repeat most of the model's predictions. Find the texts on which they do not.


# %%
def differences(run, texts):
    """-> the texts that the run with exits and the original model label differently."""
    ...  # FILL ME IN


def check_differences():
    some, exported = classifier.texts_of("test", 300), Runtime(fast / "exported")
    pairs = zip(some, exported.run(some), exported.run(some, rule=Never()))
    expected = {text for text, early, full in pairs if early.label != full.label}
    result = differences(run, some)
    assert set(result) == expected, f"expected {len(expected)} texts, got {len(result)}"
    print(f"{len(result)} of {len(some)} texts, such as: {min(result, default='none')}")
