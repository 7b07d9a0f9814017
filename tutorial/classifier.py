"""For chapters 9 and 10: a fine-tuned classifier in a Hugging Face folder, and texts like its inputs."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import mini_ee
from mini_ee.bert import Bert, Exits, theirs
from mini_ee.data import open_task, read_table
from mini_ee.load import folder_of
from mini_ee.train import task_loss, train


def texts_of(split: str, count: int) -> list[str]:
    """The first sentences of a split of the built-in reviews, without labels."""
    reviews = read_table(Path(mini_ee.__file__).parent / "reviews.tsv")
    return [review["sentence"] for review in reviews if review["split"] == split][:count]


def fine_tune(folder: Path, rows: int = 1000, epochs: int = 2) -> None:
    """Fine-tune the built-in BERT on reviews, and write it as a BertForSequenceClassification."""
    torch.manual_seed(0)
    learn, bert = open_task("", "bert", 128, rows, seed=0).learn, Bert.load("bert")
    model = Exits(bert, (12,), 2, pool="first")

    def loss(some: torch.Tensor) -> torch.Tensor:
        return task_loss(model(learn.batch(some.numpy()))[:, 0], learn.labels[some])

    train({model.bert: 1e-3, model.heads: 2e-3}, len(learn), loss, epochs)
    tensors = {theirs(name): value for name, value in bert.state_dict().items()}
    for name, part in (("bert.pooler.dense", model.heads[0][0]), ("classifier", model.heads[0][3])):
        tensors |= {f"{name}.weight": part.weight.data, f"{name}.bias": part.bias.data}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in bert.config.items() if key != "sha256"}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {0: "negative", 1: "positive"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder_of("bert") / name, folder)
