"""Classifiers and regressions fine-tuned with transformers, in a plain loop: models as users have them.

The folder of a model, in work/models, is as transformers saves it. test.npz in it contains the logits (N, C) that
transformers computes for the examples of dev or test.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

OTHERS = {"DistilBERT": ("all-MiniLM-L6-v2", 1e-4), "MPNet": ("all-mpnet-base-v2", 3e-5)}
"""A DistilBERT with the layers of MiniLM, and a model of BERT-base's size."""

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
    """A head for labels of texts, or for a number. Batches have texts of similar length."""
    epochs, names = TASKS[task_key(task)][1], dict(enumerate(task.label_names))
    labels = {"id2label": names, "label2id": {label: at for at, label in names.items()}} if names else {}
    kind, settings = "SequenceClassification", labels | {"num_labels": task.num_labels}
    with new_head(sources, out, model, seed, kind, **settings) as (network, tokenizer):
        if task.regression:
            torch.nn.init.constant_(network.classifier.bias, float(rows.labels.mean()))

        def loss_of(some: np.ndarray) -> torch.Tensor:
            return network(**_tokens(tokenizer, rows.take(some)), labels=torch.tensor(rows.labels[some])).loss

        learn(network, rows, loss_of, (MODELS | OTHERS)[model][1], epochs, seed)
        with torch.inference_mode():
            parts = [
                network(**_tokens(tokenizer, test.take(slice(at, at + BATCH)))).logits
                for at in range(0, len(test), BATCH)
            ]
    np.savez(out / "test.npz", logits=torch.cat(parts).numpy())


@contextmanager
def new_head(sources: Sources, out: Path, model: str, seed: int, head: str, **settings) -> Iterator[tuple]:
    """A model of MODELS with a new head, and its tokenizer; after the block saved in `out`, with the minutes it took.

    head: that of a class AutoModelFor... of transformers; settings: of its configuration.
    """
    transformers, weights = load_transformers(), (MODELS | OTHERS)[model][0]
    source = BUILT_IN_MODEL if weights is None else sources.find("weights", weights)
    if (source / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    else:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), **SPECIAL)
    tokenizer.model_max_length = MAX_LENGTH
    torch.manual_seed(seed)
    network = getattr(transformers, f"AutoModelFor{head}").from_pretrained(source, **settings)
    if model == "DistilBERT":
        network = _as_distilbert(network)
    begin = time.process_time()
    yield network, tokenizer
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_json(out / "about.json", {"minutes": (time.process_time() - begin) / 60})


def learn(network, rows: Split, loss_of, lr: float, epochs: int, seed: int) -> None:
    """AdamW, a rise over a tenth of the steps, then a linear fall. loss_of: the loss of rows with these numbers."""
    random, steps = np.random.default_rng(seed), epochs * -(-len(rows) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    network.train()
    for _ in range(epochs):
        for some in _similar_lengths(rows, random):
            loss_of(some).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    network.eval()


def distilled(model: FineTuned, out: Path, most: int) -> None:
    """The first half of the model's layers, with its head, taught by its logits on its texts, `most` in all epochs."""
    transformers = load_transformers()
    kind, tokenizer = transformers.AutoModelForSequenceClassification, transformers.AutoTokenizer.from_pretrained
    teacher, tokenizer = kind.from_pretrained(model.folder).eval(), tokenizer(model.folder)
    student = kind.from_pretrained(model.folder, num_hidden_layers=teacher.config.num_hidden_layers // 2)
    texts = model.texts[:most]
    rows = Split(texts, np.zeros(len(texts), int))

    def loss_of(some: np.ndarray) -> torch.Tensor:
        tokens = _tokens(tokenizer, rows.take(some))
        with torch.inference_mode():
            wanted = teacher(**tokens).logits.softmax(1)
        return torch.nn.functional.cross_entropy(student(**tokens).logits, wanted.clone())

    torch.manual_seed(0)
    begin = time.process_time()
    learn(student, rows, loss_of, lr=1e-4, epochs=-(-most // len(rows)), seed=0)
    with atomic_folder(out) as partial:
        write_json(partial / "about.json", {"rows": len(rows), "minutes": (time.process_time() - begin) / 60})
        student.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _as_distilbert(bert):
    """A DistilBERT with the weights of a BERT of its shape. It has no token types: those of type 0 go to positions."""
    transformers, of = load_transformers(), bert.config
    config = transformers.DistilBertConfig(
        vocab_size=of.vocab_size,
        max_position_embeddings=of.max_position_embeddings,
        dim=of.hidden_size,
        n_layers=of.num_hidden_layers,
        n_heads=of.num_attention_heads,
        hidden_dim=of.intermediate_size,
        id2label=of.id2label,
        label2id=of.label2id,
    )
    network, weights = transformers.DistilBertForSequenceClassification(config), {}
    renamed = {
        "encoder.layer": "transformer.layer",
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    }
    for name, value in bert.bert.state_dict().items():
        for theirs, ours in renamed.items():
            if not name.startswith("embeddings"):
                name = name.replace(theirs, ours)
        weights[name] = value
    types, positions = (f"embeddings.{name}_embeddings.weight" for name in ("token_type", "position"))
    weights[positions] = weights[positions] + weights[types][0]
    known = network.distilbert.state_dict()
    missing = network.distilbert.load_state_dict({name: weights[name] for name in known if name in weights}, False)
    assert not missing.missing_keys, missing.missing_keys
    return network


def minutes_of(folder: Path) -> float:
    """Minutes of processor time of the training of a model in a folder."""
    return read_json(folder / "about.json")["minutes"]


def task_key(task: Task) -> str:
    """The name of a task's folder: SICK-R is read as STS-B."""
    return Path(task.folder or "").name


def _similar_lengths(rows: Split, random: np.random.Generator) -> list[np.ndarray]:
    """Batches of row indices in random order; CHUNK batches at a time are sorted by length."""
    order, length = random.permutation(len(rows)), np.array([sum(map(len, texts)) for texts in rows.texts])
    chunks = [order[at : at + CHUNK * BATCH] for at in range(0, len(order), CHUNK * BATCH)]
    order = np.concatenate([chunk[np.argsort(length[chunk])] for chunk in chunks])
    batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    return [batches[at] for at in random.permutation(len(batches))]


def _tokens(tokenizer, rows: Split):
    texts = [list(column) for column in zip(*rows.texts)]
    return tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
