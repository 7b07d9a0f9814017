"""Classifiers and regressions fine-tuned with transformers, in a plain loop: models as users have them.

The folder of a model, in work/models, is as transformers saves it. test.npz in it contains the logits (N, C) that
transformers computes for the examples of dev or test.
"""

import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mini_ee.experiments.bench.common import load_transformers
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.backbones.hub import BUILT_IN_MODEL
from mini_ee.lab.data.files import atomic_folder, read_json, write_json
from mini_ee.lab.data.tasks import Split, Task, divided, load_task, subset

TASKS = {"SST-2": (3_000, 2), "TREC": (2_000, 2), "MRPC": (1_000, 2), "SICK-R": (1_000, 3)}
"""name -> rows of train on which a model is fine-tuned, epochs. The other rows of train are texts without labels."""

MODELS = {"MiniLM": ("all-MiniLM-L6-v2", 1e-4), "BERT-12x128": (None, 4e-4)}
"""name -> folder in weights/ (None: the built-in model), learning rate."""

SEEDS, MOST_TESTED, MAX_LENGTH, BATCH, CHUNK = 3, 1_000, 128, 32, 16
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


class FineTuned(NamedTuple):
    """A fine-tuned model, its texts without labels, and the examples on which it is tested."""

    folder: Path
    texts: list[tuple[str, ...]]
    test: Split
    task: Task
    logits: np.ndarray  # (N, C) of the test examples, from transformers

    def write_texts(self, path: Path, count: int) -> int:
        """Write the first `count` texts as JSONL, or all if there are fewer; returns how many."""
        names = ("sentence",) if len(self.texts[0]) == 1 else ("sentence1", "sentence2")
        rows = self.texts[:count]
        path.write_text("".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows), encoding="utf-8")
        return len(rows)


def fine_tuned(sources: Sources, work: Path, name: str, model: str, seed: int) -> FineTuned:
    """The model, fine-tuned unless the work folder has it."""
    task, _ = load_task(sources.find("data", name)).without_seen_rows()
    test = task.split(task.default_split)
    test = subset(test, min(MOST_TESTED, len(test)), 0)
    rows, others = divided(task.split("train"), TASKS[name][0], seed)
    used = set(rows.words())
    free = [text for text, words in zip(others.texts, others.words()) if words not in used]
    texts = list(dict.fromkeys(free))
    texts = [texts[at] for at in np.random.default_rng(seed).permutation(len(texts))]
    folder = work / "models" / f"{name}-{model}-{seed}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with atomic_folder(folder) as partial:
            _fine_tune(sources, partial, task, rows, test, model, seed)
    with np.load(folder / "test.npz") as saved:
        return FineTuned(folder, texts, test, task, saved["logits"])


def _fine_tune(sources: Sources, out: Path, task: Task, rows: Split, test: Split, model: str, seed: int) -> None:
    """AdamW, a rise over a tenth of the steps, then a linear fall; batches of texts of similar length."""
    transformers, (weights, lr), epochs = load_transformers(), MODELS[model], TASKS[task_key(task)][1]
    source = BUILT_IN_MODEL if weights is None else sources.find("weights", weights)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), **SPECIAL)
    tokenizer.model_max_length = MAX_LENGTH
    names = dict(enumerate(task.label_names))
    labels = {"id2label": names, "label2id": {label: at for at, label in names.items()}} if names else {}
    torch.manual_seed(seed)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=task.num_labels, **labels
    )
    if task.regression:
        torch.nn.init.constant_(network.classifier.bias, float(rows.labels.mean()))
    begin, random, steps = time.process_time(), np.random.default_rng(seed), epochs * -(-len(rows) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    network.train()
    for _ in range(epochs):
        for some in _similar_lengths(rows, random):
            wanted = torch.tensor(rows.labels[some])
            loss = network(**_tokens(tokenizer, rows.take(some)), labels=wanted).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    network.eval()
    with torch.inference_mode():
        parts = [
            network(**_tokens(tokenizer, test.take(slice(at, at + BATCH)))).logits for at in range(0, len(test), BATCH)
        ]
    np.savez(out / "test.npz", logits=torch.cat(parts).numpy())
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_json(out / "about.json", {"rows": len(rows), "epochs": epochs, "minutes": (time.process_time() - begin) / 60})


def minutes_of(model: FineTuned) -> float:
    """Minutes of processor time of the fine-tuning."""
    return read_json(model.folder / "about.json")["minutes"]


def task_key(task: Task) -> str:
    """The name of a task's folder: SICK-R is read as STS-B."""
    return Path(task.folder or "").name


def _similar_lengths(rows: Split, random: np.random.Generator) -> list[np.ndarray]:
    """Batches of row indices in random order; CHUNK batches at a time are sorted by length."""
    order, length = random.permutation(len(rows)), np.array([sum(map(len, texts)) for texts in rows.texts])
    chunks = [order[at : at + CHUNK * BATCH] for at in range(0, len(order), CHUNK * BATCH)]
    order = np.concatenate([chunk[np.argsort(length[chunk])] for chunk in chunks])
    found = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    return [found[at] for at in random.permutation(len(found))]


def _tokens(tokenizer, rows: Split):
    texts = [list(column) for column in zip(*rows.texts)]
    return tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
