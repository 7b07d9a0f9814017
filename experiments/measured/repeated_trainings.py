"""Repeated trainings, each on newly drawn rows: how often is the guarantee of the default rule violated?

The rows are generated, so draws are independent and fresh rows never run out. A sentence has WORDS words, each worth 1,
0 or -1. The label is the sign of their sum; a share NOISE of the labels is wrong. In the BERT that is trained, one
direction of the word vectors is this worth, and the others are noise that every layer reduces. So a deeper exit is more
accurate. Every draw trains a method by `mini_ee.train`, as a user would, and measures on FRESH other rows the accuracy
that its default rule loses compared with the last exit.
"""

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import tokenizers
import torch

import mini_ee.lab.training.default_rule as rule
import mini_ee.lab.training.train_rows as train_rows
import mini_ee.lab.training.train_run as training
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import save_backbone
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.recording import predictions, record
from mini_ee.lab.statistics import share_interval
from mini_ee.lab.training.holdout import Parts, split_rows
from mini_ee.lab.training.run_folder import Run, load_run

WORTH = np.array([1, 0, -1] * 16)  # worth of each word
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = (*SPECIAL, *(f"word{i}" for i in range(len(WORTH))))
WORDS, NOISE = 5, 0.05
WIDTH, LAYERS, SHRINKS = 16, 3, 0.5  # size of the BERT; the factor by which a layer multiplies the noise
FRESH, MORE_FRESH = 10_000, 60_000
REPEATED_MAX_LOSS = 0.02
ROWS, TRAINED = 1_200, 150  # per draw: all rows, and those to train on; of the others 16 select and the rest test
REPEATED = {
    "joint": {"epochs": 5},
    "lora-exits": {"epochs": 5, "rank": 4},
    "consistent": {"epochs": 3, "policy_epochs": 3, "rounds": 1},
    "right-tool": {"epochs": 5},
}
"""method -> its settings in these trainings."""
COMMON = {"exits": (1, 2, 3), "max_train": TRAINED, "max_loss": REPEATED_MAX_LOSS, "lr": 1e-4, "head_lr": 3e-2}


def sentences(count: int, random: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """`count` texts and their labels."""
    words = random.integers(0, len(WORTH), (count, WORDS))
    sums = WORTH[words].sum(axis=1) + random.choice([-0.5, 0.5], count)
    labels = (sums > 0) ^ (random.random(count) < NOISE)
    return [" ".join(f"word{word}" for word in row) for row in words], labels.astype(np.int64)


def write_task(folder: Path, count: int, random: np.random.Generator) -> Path:
    """A task folder with a train file of `count` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = zip(*sentences(count, random))
    lines = (json.dumps({"sentence": text, "label": str(label)}) for text, label in rows)
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@torch.no_grad()
def checkpoint(work: Path) -> Path:
    """Write the BERT for these sentences and its tokenizer; returns the folder."""
    folder = work / "checkpoint"
    if folder.exists():
        return folder
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": WORDS + 2, "vocab_size": len(VOCABULARY)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bert = Bert(BertConfig(model_type="bert", **sizes))
        words = torch.randn(len(WORTH), WIDTH)
    words[:, 0] = torch.from_numpy(WORTH)
    bert.embeddings.word.weight[len(SPECIAL) :] = words
    noise = torch.eye(WIDTH)
    noise[0, 0] = 0.0
    for layer in bert.layers:
        layer.attention_output.weight.zero_()
        layer.up.weight[:] = torch.cat((noise, -noise))  # gelu(x) - gelu(-x) = x
        layer.down.weight[:] = (SHRINKS - 1) * torch.cat((noise, -noise), dim=1)
    save_backbone(bert, folder)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def loss_on(run: Run, fresh: RowData) -> float:
    """The accuracy that the default rule loses compared with the last exit."""
    recorded = record(run.segments(), fresh.encoded, 512)
    correct = predictions(recorded.replay(run.rule).logits) == fresh.labels
    return float((predictions(recorded.logits[:, -1]) == fresh.labels).mean() - correct.mean())


def select_with_test_rows(task, seed: int, max_train: int | None) -> Parts:
    """Split the rows so that those that test the rule also select everything else, as in an earlier version."""
    parts = split_rows(task, seed, max_train)
    return parts._replace(selection=parts.test)


def accept_observed_loss(losses: np.ndarray, max_loss: float, level: float = 1.0) -> np.ndarray:
    """P-values without a test: 0 for a rule that loses at most max_loss on the test rows themselves, else 1."""
    return np.where(losses.mean(axis=1) <= max_loss, 0.0, 1.0)


PLANTED = {
    "the test rows choose": (train_rows, "split_rows", select_with_test_rows),
    "no test": (rule, "paired_p_values", accept_observed_loss),
}
"""Planted mistakes, to check that the measurement finds them: name -> (module, function, replacement)."""


def draw(work: Path, method: str, seed: int, fresh: RowData) -> dict:
    """One training on its own rows: whether the default rule has a guarantee, and its loss on fresh rows."""
    task = write_task(work / "task", ROWS, np.random.default_rng(seed))
    out = work / "run"
    for folder in (out, work / "run.training"):
        shutil.rmtree(folder, ignore_errors=True)
    settings = COMMON | REPEATED[method] | {"seed": seed}
    training.train(method, checkpoint(work), task, out, **settings)
    run, metrics = load_run(out), read_json(out / "metrics.json")
    loss, guaranteed = loss_on(run, fresh), run.config["guarantee"] is not None
    return {
        "guaranteed": guaranteed,
        "broken": guaranteed and loss > REPEATED_MAX_LOSS,
        "loss": loss,
        "saved": 1 - metrics["hold_out"]["mean_layers"] / run.exits[-1],
        "selecting": metrics["rows_held"],
        "tested": metrics["rows_tested"],
    }


def repeated(work: Path, method: str, draws: int, planted: str | None = None, fresh_rows: int = FRESH) -> dict:
    """How many of `draws` trainings of a method give a guarantee, and how many of the guarantees are violated."""
    texts, labels = sentences(fresh_rows, np.random.default_rng(10**6))
    torch.set_num_threads(1)  # with more threads, so small a model is slower
    fresh = RowData(Tokenizer.from_folder(checkpoint(work), None).encode(texts), labels, None)
    no_wait = patch.object(os, "fsync", lambda file: None)  # do not wait for the disk: runs are temporary
    with patch.object(*PLANTED[planted]) if planted else nullcontext(), no_wait:
        trainings = [draw(work, method, seed, fresh) for seed in tqdm(range(draws), desc=method)]
    broken = sum(trained["broken"] for trained in trainings)
    return {
        "method": method,
        "planted": planted,
        "fresh": fresh_rows,
        "trainings": draws,
        **{name: trainings[0][name] for name in ("selecting", "tested")},
        "guaranteed": sum(trained["guaranteed"] for trained in trainings),
        "broken": broken,
        "interval": share_interval(broken, draws),  # of the share of violated guarantees, at 95%
        "loss": float(np.mean([trained["loss"] for trained in trainings if trained["guaranteed"]] or [0.0])),
        "saved": float(np.mean([trained["saved"] for trained in trainings])),
    }


def every_method(work: Path, draws: int) -> list[dict]:
    """The same for all methods, without and with planted mistakes; several processes at once."""
    ways = [(method, planted, FRESH) for planted in (None, "the test rows choose") for method in REPEATED]
    ways += [("joint", "no test", FRESH), ("joint", None, MORE_FRESH)]
    with ProcessPoolExecutor(len(REPEATED)) as pool:
        runs = [pool.submit(repeated, work / f"{number}", way[0], draws, *way[1:]) for number, way in enumerate(ways)]
        return [run.result() for run in runs]
