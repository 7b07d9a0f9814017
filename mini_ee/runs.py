"""A trained model on disk: a folder that is readable without us, whole or not there, and checked when it is read.

run/config.json          format_version, method, backbone, exits, pool, rule, task, max_length, training, versions,
                         and the checksum of every other file
run/model.safetensors    what the method trained: heads, and the backbone where it was fine-tuned
run/exit_{e}/            LoRA exits: the adapters of the exit after layer e, in PEFT's layout
run/backbone/            a backbone that was fine-tuned through prompts, in its own layout
run/datastore/           RAEE: what retrieval.py writes
run/metrics.json         what training measured
run/tokenizer.json       the backbone's
"""

import platform
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mini_ee import __version__
from mini_ee.bert import Bert, BertConfig
from mini_ee.checkpoint import (
    DECODERS,
    backbone_sha256,
    load_backbone,
    load_strict,
    read_tensors,
    save_backbone,
    write_tensors,
)
from mini_ee.decoder import Decoder, DecoderConfig
from mini_ee.early_exit import Segments
from mini_ee.encoders import OwnStates, SentenceEncoder
from mini_ee.exits import MultiExit, without_heads
from mini_ee.files import atomic_folder, file_sha256, read_json, write_json
from mini_ee.lora_exits import LoRAExits, load_adapters, save_adapters
from mini_ee.methods import MODELS
from mini_ee.multi_model import MultiModel
from mini_ee.prompting import PromptModel
from mini_ee.prompts import Prompt, PromptTokenizer
from mini_ee.retrieval import Datastore, Retrieval
from mini_ee.rules import Rule, rule_from_dict
from mini_ee.tasks import Encoded, Task, Tokenizer

FORMAT_VERSION = 1
OWN_BACKBONE = "backbone"


class Run(NamedTuple):
    """A loaded run."""

    config: dict
    model: MultiExit | LoRAExits | MultiModel | PromptModel
    tokenizer: Tokenizer
    rule: Rule
    schedule: list[list[int]] | None = None  # of LoRA streams

    def segments(self) -> Segments:
        """What early_exit drives."""
        return self.model.segments(self.schedule) if self.schedule else self.model.segments()

    def whole_model(self) -> Segments:
        """What a speed-up is measured against, under NeverExit: the last exit alone."""
        return self.model.whole()

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

    @property
    def weight_bytes(self) -> int:
        """Of all that the model holds in memory: backbone, adapters, heads. LoRAExit, Tables 2 and 10."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def encode(tokenizer: Tokenizer, texts, config: BertConfig | DecoderConfig) -> Encoded:
    """Tokenize texts for a backbone; ValueError where the tokenizer gives ids that the backbone does not know."""
    encoded = tokenizer.encode(texts)
    kinds = [("token", encoded.ids, config.vocab_size)]
    if isinstance(config, BertConfig):  # a decoder has no use for types
        kinds.append(("type", encoded.type_ids, config.type_vocab_size))
    for kind, rows, size in kinds:
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
    model: MultiExit | LoRAExits | MultiModel | PromptModel,
    tokenizer: Tokenizer,
    rule: Rule,
    task: Task,
    backbone: dict,
    training: dict,
    metrics: dict,
) -> None:
    """Write a run folder. backbone: folder and sha256 of the checkpoint it began from; training: the settings used.

    A model read through prompts is held only where `training` names the shots that fine-tuned it.
    """
    config = {
        "format_version": FORMAT_VERSION,
        "method": method,
        "model": type(model).__name__,
        "backbone": backbone,
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
        if isinstance(model, LoRAExits):  # the backbone is as it was: the run names it
            config["lora"] = {"rank": model.rank, "alpha": model.alpha, "targets": list(model.targets)}
            own = {name: value for name, value in model.state_dict().items() if name.startswith("heads.")}
            digests = save_adapters(model, partial, backbone["folder"])
        else:
            own, digests = model.state_dict(), {}
        if isinstance(model, PromptModel):  # nothing of it is new, or all
            config["prompt"] = tokenizer.prompt.to_dict()
            if training["shots"]:
                save_backbone(model.backbone, partial / OWN_BACKBONE)
                config["backbone"] = {"folder": OWN_BACKBONE, "sha256": backbone_sha256(partial / OWN_BACKBONE)}
        else:
            config["backbone"] |= {"config": model.backbone.config.to_dict()}
            digests["model.safetensors"] = write_tensors(partial / "model.safetensors", own)
        tokenizer.save(partial / "tokenizer.json")
        write_json(partial / "metrics.json", metrics)
        config["files"] = digests | {name: file_sha256(partial / name) for name in ("tokenizer.json", "metrics.json")}
        write_json(partial / "config.json", config)


def load_run(folder: str | Path, backbone_folder: str | Path | None = None) -> Run:
    """Read a run folder and check all of it.

    backbone_folder: where the backbone of a run that did not fine-tune it is now, if not where it was.

    Raises FileNotFoundError where there is none, ValueError where it was damaged or comes from another format.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        unfinished = training_folder(folder)
        hint = f"; {unfinished} holds an unfinished training, go on with --resume" if any(unfinished.glob("*")) else ""
        raise FileNotFoundError(f"{folder}: no run here; expected a folder that `mini-ee train` wrote{hint}")
    config = read_json(folder / "config.json", signed="format_version")
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: expected a run of format_version {FORMAT_VERSION}, found {config.get('format_version')!r}; "
            f"give a folder that `mini-ee train` wrote"
        )
    if "task" not in config:
        measure = "evaluate" if config.get("method") == "self-supervised" else "compare"
        raise ValueError(
            f"{folder}: holds {config.get('method')} on a decoder, which gives no labels; it is for "
            f"`mini-ee generate`, and measured by `mini-ee {measure}`"
        )
    try:
        return _read_run(folder, config, backbone_folder)
    except KeyError as error:
        raise ValueError(f"{folder}: config.json has no key {error}; train the run again") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: config.json holds a value of a wrong type ({error}); train the run again"
        ) from None


def _read_run(folder: Path, config: dict, backbone_folder: str | Path | None) -> Run:
    for name in ("tokenizer.json", "metrics.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; train the run again")
        if file_sha256(folder / name) != config["files"][name]:
            raise ValueError(
                f"{folder / name}: damaged: the content does not have the checksum that was written with it"
            )
    model, tokenizer = (_read_prompted if "prompt" in config else _read_trained)(folder, config, backbone_folder)
    rule = rule_from_dict(config["rule"])
    if isinstance(rule, Retrieval):
        encoder = open_encoder(config["retrieval"], model.backbone)
        rule = rule.with_datastore(Datastore.load(folder / "datastore", encoder.name), encoder)
    rule.check(len(model.exits))
    return Run(config, model.eval(), tokenizer, rule)


def _read_trained(folder: Path, config: dict, backbone_folder) -> tuple[nn.Module, Tokenizer]:
    """Exits that were trained, on the backbone that the run holds or names."""
    source = config["backbone"]
    shape = tuple(config["exits"]), len(config["task"]["label_names"]) or 1, config["pool"]
    tensors = read_tensors(folder / "model.safetensors", config["files"]["model.safetensors"])
    build = MODELS[config["model"]]
    if build is LoRAExits:
        backbone = without_heads(_backbone_of(source, folder, backbone_folder))
        model = LoRAExits(backbone, *shape, **config["lora"])
        load_adapters(model, folder, config["files"])
        trained, prefix = model.heads, "heads."
    else:
        with torch.device("meta"):
            model = build(empty_backbone(source["config"]), *shape)
        trained, prefix = model, ""
    names = {name: (prefix + name,) for name in trained.state_dict()}
    load_strict(trained, tensors, names, folder / "model.safetensors")
    return model, Tokenizer.from_folder(folder, config["max_length"])


def empty_backbone(config: dict, lm_head: bool = False) -> Bert | Decoder:
    """A backbone with weights yet to come, from what its config's to_dict gave; with its head to words or without."""
    if config["model_type"] in DECODERS:
        decoder = Decoder(DecoderConfig.from_dict(config))
        return decoder if lm_head else without_heads(decoder)
    return Bert(BertConfig(**config), pooler=False, lm_head=lm_head)


def _read_prompted(folder: Path, config: dict, backbone_folder) -> tuple[PromptModel, PromptTokenizer]:
    """A backbone through its own head, which no training of ours has touched but that of a few shots."""
    backend = Tokenizer.from_folder(folder).backend
    tokenizer = PromptTokenizer(backend, config["max_length"], Prompt.from_dict(config["prompt"]))
    backbone = _backbone_of(config["backbone"], folder, backbone_folder)
    return PromptModel(backbone, tokenizer, tuple(config["exits"])), tokenizer


def open_encoder(source: dict, backbone: Bert | Decoder) -> OwnStates | SentenceEncoder:
    """The encoder of a datastore's queries: a layer of the model itself, or a checkpoint in a folder."""
    if source["encoder"] is None:
        return OwnStates(backbone, source["layer"])
    return SentenceEncoder(source["encoder"])


def _backbone_of(source: dict, run: Path, folder: str | Path | None) -> Bert | Decoder:
    """The backbone that a run was made with, or an error: adapters and values fit one backbone only."""
    folder = Path(folder or run / source["folder"])  # an absolute path stands for itself
    if not folder.is_dir():
        raise FileNotFoundError(f"{run}: its backbone was in {folder}, nothing is there; say where with --model")
    if backbone_sha256(folder) != source["sha256"]:
        raise ValueError(f"{run}: was trained on another backbone than the one in {folder}; give that one with --model")
    return load_backbone(folder)


def write_rule(folder: str | Path, rule: Rule, exit_counts: list[int]) -> None:
    """Give a run on disk another rule, and what it made of held-out rows. Its other files stay as they are."""
    path = Path(folder) / "config.json"
    about = {"rule": rule.to_dict(), "exit_counts": exit_counts}
    write_json(path, read_json(path, signed="format_version") | about)


def training_folder(folder: Path) -> Path:
    """Where the state of a training that will become `folder` stands until it is finished."""
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}.training")
