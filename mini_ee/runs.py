"""A trained model on disk: a folder that is readable without us, whole or not there, and checked when it is read.

run/config.json          format_version, method, backbone, exits, pool, rule, task, max_length, training, versions,
                         and the checksum of every other file
run/model.safetensors    what the method trained: heads, and the backbone where it was fine-tuned
run/metrics.json         what training measured
run/tokenizer.json       the backbone's
"""

import platform
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mini_ee import __version__
from mini_ee.bert import Bert, BertConfig
from mini_ee.checkpoint import load_strict, read_tensors, write_tensors
from mini_ee.exits import MultiExit, TorchSegments
from mini_ee.files import atomic_folder, file_sha256, read_json, write_json
from mini_ee.rules import Rule, rule_from_dict
from mini_ee.tasks import Encoded, Task, Tokenizer

FORMAT_VERSION = 1


class Run(NamedTuple):
    """A loaded run."""

    config: dict
    model: MultiExit
    tokenizer: Tokenizer
    rule: Rule

    def segments(self) -> TorchSegments:
        """What early_exit drives."""
        return self.model.segments()

    def whole_model(self) -> TorchSegments:
        """What a speed-up is measured against, under NeverExit: in torch the same segments."""
        return self.segments()

    @property
    def exits(self) -> tuple[int, ...]:
        return self.model.exits

    def encode(self, texts) -> Encoded:
        """Tokenize texts of one sentence or two, checked against the backbone."""
        return encode(self.tokenizer, texts, self.model.backbone.config)

    @property
    def label_names(self) -> list[str]:
        """Empty for regression."""
        return self.config["task"]["label_names"]


def encode(tokenizer: Tokenizer, texts, config: BertConfig) -> Encoded:
    """Tokenize texts for a backbone; ValueError where the tokenizer gives ids that the backbone does not know."""
    encoded = tokenizer.encode(texts)
    for kind, rows, size in (
        ("token", encoded.ids, config.vocab_size),
        ("type", encoded.type_ids, config.type_vocab_size),
    ):
        largest = max(int(row.max()) for row in rows)
        if largest >= size:
            raise ValueError(
                f"the tokenizer gives the {kind} id {largest}, the model knows {size}; "
                f"put the tokenizer that belongs to the model beside it"
            )
    return encoded


def versions() -> dict[str, str]:
    """What a figure depends on, for every JSON answer."""
    return {
        "mini_ee": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def save_run(
    folder: Path,
    method: str,
    model: MultiExit,
    tokenizer: Tokenizer,
    rule: Rule,
    task: Task,
    backbone: dict,
    training: dict,
    metrics: dict,
) -> None:
    """Write a run folder. backbone: folder and sha256 of the checkpoint it began from; training: the settings used."""
    config = {
        "format_version": FORMAT_VERSION,
        "method": method,
        "backbone": backbone
        | {
            "config": model.backbone.config.to_dict(),
            "pooler": bool(model.backbone.poolers),
            "lm_head": model.backbone.lm_head is not None,
        },
        "exits": list(model.exits),
        "pool": model.pool,
        "rule": rule.to_dict(),
        "task": {
            "name": task.name,
            "label_names": list(task.label_names),
            "metrics": list(task.metrics),
            "texts": len(task.split("train").texts[0]),
        },
        "max_length": tokenizer.max_length,
        "seed": training["seed"],
        "training": training,
        "versions": versions(),
    }
    with atomic_folder(folder) as partial:
        digest = write_tensors(partial / "model.safetensors", model.state_dict())
        tokenizer.save(partial / "tokenizer.json")
        write_json(partial / "metrics.json", metrics)
        config["files"] = {"model.safetensors": digest} | {
            name: file_sha256(partial / name) for name in ("tokenizer.json", "metrics.json")
        }
        write_json(partial / "config.json", config)


def load_run(folder: str | Path) -> Run:
    """Read a run folder and check all of it.

    Raises FileNotFoundError where there is none, ValueError where it was damaged or comes from another format.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        unfinished = training_folder(folder)
        hint = f"; {unfinished} holds an unfinished training, go on with --resume" if unfinished.is_dir() else ""
        raise FileNotFoundError(f"{folder}: no run here; expected a folder that `mini-ee train` wrote{hint}")
    config = read_json(folder / "config.json", signed="format_version")
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: expected a run of format_version {FORMAT_VERSION}, found {config.get('format_version')!r}; "
            f"give a folder that `mini-ee train` wrote"
        )
    try:
        return _read_run(folder, config)
    except KeyError as error:
        raise ValueError(f"{folder}: config.json has no key {error}; train the run again") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: config.json holds a value of a wrong type ({error}); train the run again"
        ) from None


def _read_run(folder: Path, config: dict) -> Run:
    for name in ("tokenizer.json", "metrics.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; train the run again")
        if file_sha256(folder / name) != config["files"][name]:
            raise ValueError(
                f"{folder / name}: damaged: the content does not have the checksum that was written with it"
            )
    source = config["backbone"]
    num_labels = len(config["task"]["label_names"]) or 1
    with torch.device("meta"):
        backbone = Bert(BertConfig(**source["config"]), pooler=source["pooler"], lm_head=source["lm_head"])
        model = MultiExit(backbone, tuple(config["exits"]), num_labels, config["pool"])
    tensors = read_tensors(folder / "model.safetensors", config["files"]["model.safetensors"])
    load_strict(model, tensors, {name: (name,) for name in model.state_dict()}, folder / "model.safetensors")
    tokenizer = Tokenizer.from_folder(folder, config["max_length"])
    rule = rule_from_dict(config["rule"])
    rule.check(len(model.exits))
    return Run(config, model.eval(), tokenizer, rule)


def training_folder(folder: Path) -> Path:
    """Where the state of a training that will become `folder` stands until it is finished."""
    return folder.with_name(f"{folder.name}.training")
