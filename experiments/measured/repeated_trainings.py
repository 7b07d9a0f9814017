"""Trainings that are repeated, each on rows drawn anew: how often is the guarantee of the default rule broken?

Rows are generated, so that every draw is independent of the others and fresh rows never run out: a sentence of WORDS
words, each of which is worth 1, 0 or -1; the label is the sign of their sum, and NOISE of the labels are wrong. The
BERT that they train has one direction of the word vectors for this worth; the others are noise, which every layer makes
smaller. So the deeper an exit, the better it is. Every draw trains a method through `mini_ee.train`, as a user would,
takes the default rule and what is guaranteed of it, and measures on FRESH other rows what the rule loses against the
last exit.
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

import mini_ee.training.default_rule as rule
import mini_ee.training.row_unit as row_unit
import mini_ee.training.train_run as training
from mini_ee.backbones.bert import Bert, BertConfig
from mini_ee.backbones.hub import save_backbone
from mini_ee.data.files import read_json
from mini_ee.data.progress import tqdm
from mini_ee.data.tokenizer import Tokenizer
from mini_ee.exits.row_exits import RowData
from mini_ee.recording import predictions, record
from mini_ee.statistics import share_interval
from mini_ee.training.holdout import Parts, split_rows
from mini_ee.training.run_folder import Run, load_run

WORTH = np.array([1, 0, -1] * 16)  # of each word
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = (*SPECIAL, *(f"word{i}" for i in range(len(WORTH))))
WORDS, NOISE = 5, 0.05
WIDTH, LAYERS, SHRINKS = 16, 3, 0.5  # of the BERT; what a layer leaves of the noise
FRESH, MORE_FRESH = 10_000, 60_000
MAX_LOSS = 0.02
ROWS, TRAINED = 1_200, 150  # of a draw: all of them, and those that are trained on; 16 select, the others test
REPEATED = {
    "joint": {"epochs": 5},
    "lora-exits": {"epochs": 5, "rank": 4},
    "consistent": {"epochs": 3, "policy_epochs": 3, "rounds": 1},
    "right-tool": {"epochs": 5},
}
"""method -> its settings in these trainings."""
COMMON = {"exits": (1, 2, 3), "max_train": TRAINED, "max_loss": MAX_LOSS, "lr": 1e-4, "head_lr": 3e-2}


def sentences(count: int, random: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """So many texts, and their labels."""
    words = random.integers(0, len(WORTH), (count, WORDS))
    sums = WORTH[words].sum(axis=1) + random.choice([-0.5, 0.5], count)
    labels = (sums > 0) ^ (random.random(count) < NOISE)
    return [" ".join(f"word{word}" for word in row) for row in words], labels.astype(np.int64)


def write_task(folder: Path, count: int, random: np.random.Generator) -> Path:
    """A task folder with a train file of so many rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = zip(*sentences(count, random))
    lines = (json.dumps({"sentence": text, "label": str(label)}) for text, label in rows)
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@torch.no_grad()
def checkpoint(work: Path) -> Path:
    """The BERT of these sentences, and its tokenizer."""
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
    """What the default rule loses of accuracy against the last exit."""
    recorded = record(run.segments(), fresh.encoded, 512)
    right = predictions(recorded.replay(run.rule).logits) == fresh.labels
    return float((predictions(recorded.logits[:, -1]) == fresh.labels).mean() - right.mean())


def tested_on_what_chose(task, seed: int, max_train: int | None) -> Parts:
    """The rows that test the rule choose everything else as well, as before there were two parts."""
    parts = split_rows(task, seed, max_train)
    return parts._replace(selection=parts.test)


def as_observed(losses: np.ndarray, max_loss: float) -> np.ndarray:
    """No test: a rule passes that loses no more on the test rows themselves."""
    return np.where(losses.mean(axis=1) <= max_loss, 0.0, 1.0)


PLANTED = {
    "the test rows choose": (row_unit, "split_rows", tested_on_what_chose),
    "no test": (rule, "paired_p_values", as_observed),
}
"""Mistakes that are planted, to see what the measure finds."""


def draw(work: Path, method: str, seed: int, fresh: RowData) -> dict:
    """One training on rows of its own: what is guaranteed of the default rule, and what it loses on fresh rows."""
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
        "broken": guaranteed and loss > MAX_LOSS,
        "loss": loss,
        "saved": 1 - metrics["hold_out"]["mean_layers"] / run.exits[-1],
        "selecting": metrics["rows_held"],
        "tested": metrics["rows_tested"],
    }


def repeated(work: Path, method: str, draws: int, planted: str | None = None, fresh_rows: int = FRESH) -> dict:
    """How often the default rule of a method has a guarantee, and how often that is broken, over so many trainings."""
    texts, labels = sentences(fresh_rows, np.random.default_rng(10**6))
    torch.set_num_threads(1)  # so small a model waits for its threads
    fresh = RowData(Tokenizer.from_folder(checkpoint(work), None).encode(texts), labels, None)
    no_wait = patch.object(os, "fsync", lambda file: None)  # for the disk: every run is thrown away
    with patch.object(*PLANTED[planted]) if planted else nullcontext(), no_wait:
        found = [draw(work, method, seed, fresh) for seed in tqdm(range(draws), desc=method)]
    broken = sum(each["broken"] for each in found)
    return {
        "method": method,
        "planted": planted,
        "fresh": fresh_rows,
        "trainings": draws,
        **{name: found[0][name] for name in ("selecting", "tested")},
        "guaranteed": sum(each["guaranteed"] for each in found),
        "broken": broken,
        "interval": share_interval(broken, draws),  # of the share that is broken, at 95 %
        "loss": float(np.mean([each["loss"] for each in found if each["guaranteed"]] or [0.0])),
        "saved": float(np.mean([each["saved"] for each in found])),
    }


def every_method(work: Path, draws: int) -> list[dict]:
    """The same of all methods, as it is and with planted mistakes; so many processes at once."""
    ways = [(method, planted, FRESH) for planted in (None, "the test rows choose") for method in REPEATED]
    ways += [("joint", "no test", FRESH), ("joint", None, MORE_FRESH)]
    with ProcessPoolExecutor(len(REPEATED)) as pool:
        runs = [pool.submit(repeated, work / f"{number}", way[0], draws, *way[1:]) for number, way in enumerate(ways)]
        return [run.result() for run in runs]
