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

import hashlib
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mini_ee import __version__
from mini_ee.backbones.backbone import Backbone
from mini_ee.backbones.hub import (
    backbone_sha256,
    empty_backbone,
    load_backbone,
    load_strict,
    read_tensors,
    save_backbone,
    write_tensors,
)
from mini_ee.baselines.multi_model import MultiModel
from mini_ee.data.files import atomic_folder, file_sha256, read_json, sole_writer, write_json
from mini_ee.data.prompts import Prompt, PromptTokenizer, check_prompt
from mini_ee.data.tasks import Split, Task, holdout, subset
from mini_ee.data.tokens import Encoded, Tokenizer
from mini_ee.early_exit import Segments
from mini_ee.methods.datastore import Datastore, build
from mini_ee.methods.encoders import OwnStates, SentenceEncoder
from mini_ee.methods.lora_exits import LoRAExits, load_adapters, save_adapters
from mini_ee.methods.raee import Retrieval, best_single_exit, collect
from mini_ee.methods.raee_prompts import few_shot
from mini_ee.rules import NeverExit, Rule, rule_from_dict
from mini_ee.training.fit import STATE, Data, Stage, TrainConfig, fit
from mini_ee.training.methods import MODELS
from mini_ee.training.rule import Candidates, default_rule
from mini_ee.units.prompts import PromptModel, draw_shots
from mini_ee.units.recording import exit_scores, record, summary
from mini_ee.units.rows import MultiExit

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


def encode(tokenizer: Tokenizer, texts, config) -> Encoded:
    """Tokenize texts for a backbone; ValueError where the tokenizer gives ids that the backbone does not know."""
    encoded = tokenizer.encode(texts)
    kinds = [("token", encoded.ids, config.vocab_size)]
    if config.token_types is not None:
        kinds.append(("type", encoded.type_ids, config.token_types))
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
        backbone = _backbone_of(source, folder, backbone_folder).without_heads()
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


def _read_prompted(folder: Path, config: dict, backbone_folder) -> tuple[PromptModel, PromptTokenizer]:
    """A backbone through its own head, which no training of ours has touched but that of a few shots."""
    backend = Tokenizer.from_folder(folder).backend
    tokenizer = PromptTokenizer(backend, config["max_length"], Prompt.from_dict(config["prompt"]))
    backbone = _backbone_of(config["backbone"], folder, backbone_folder)
    return PromptModel(backbone, tokenizer, tuple(config["exits"])), tokenizer


def open_encoder(source: dict, backbone: Backbone) -> OwnStates | SentenceEncoder:
    """The encoder of a datastore's queries: a layer of the model itself, or a checkpoint in a folder."""
    if source["encoder"] is None:
        return OwnStates(backbone, source["layer"])
    return SentenceEncoder(source["encoder"])


def _backbone_of(source: dict, run: Path, folder: str | Path | None) -> Backbone:
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


def split_rows(task: Task, seed: int, max_train: int | None) -> tuple[Split, Split]:
    """(train, held): a seeded tenth of train is held out for every choice; with max_train both parts shrink alike."""
    train, held = holdout(task.split("train"), seed)
    if max_train is not None:
        train, held = subset(train, max_train, seed), subset(held, max(1, max_train // 9), seed)
    return train, held


def train_run(
    out: Path,
    method: str,
    recipe: Callable[[MultiExit], list[Stage]],
    model_folder: Path,
    task: Task,
    config: TrainConfig,
    *,
    exits: tuple[int, ...] | None = None,
    pool: str = "mean",
    max_train: int | None = None,
    max_length: int = 128,
    max_loss: float = 0.01,
    device: str = "cpu",
    resume: bool = False,
    build: Callable[..., nn.Module] = MultiExit,
    candidates: Candidates | None = None,
    rule: Rule | None = None,
    method_settings: dict | None = None,
) -> Run:
    """Train a classifier with exits (every layer by default) and write it to `out` with its default rule.

    build: backbone, exits, num_labels, pool -> the model that the recipe trains; candidates: the rules among which the
    default one is chosen, unless it is `rule`; method_settings: what build and recipe were made from, in JSON, for the
    run's config and for a resumed training to compare.

    A killed training leaves `out`.training behind, from which `resume` goes on. The caller's random state is kept.
    Raises FileExistsError where `out` or an unfinished training of it is there already.
    """
    if out.exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    state_folder = training_folder(out)
    if not resume:
        _refuse_state(state_folder)
    backbone = load_backbone(model_folder).without_heads()
    tokenizer = Tokenizer.from_folder(model_folder, min(max_length, backbone.config.max_tokens))
    train, held = (
        Data(encode(tokenizer, part.texts, backbone.config), part.labels)
        for part in split_rows(task, config.seed, max_train)
    )
    exits = exits or tuple(range(1, backbone.config.num_hidden_layers + 1))
    source = {"folder": str(Path(model_folder).resolve()), "sha256": backbone_sha256(model_folder)}
    settings = asdict(config) | {"max_train": max_train, "max_loss": max_loss} | (method_settings or {})
    begun_with = settings | {
        "method": method,
        "backbone": source["sha256"],
        "exits": list(exits),
        "pool": pool,
        "max_length": tokenizer.max_length,
        "task": task.name,
        "rows": len(train.labels),
    }
    begun_with["data"] = _sha256(train, held)
    with torch.random.fork_rng(), sole_writer(state_folder):
        torch.manual_seed(config.seed)
        model = build(backbone, exits, task.num_labels, pool).to(device)
        history = fit(model, recipe(model), task, train, held, config, begun_with, state_folder, resume)
    recorded = record(model.segments(), held.encoded, config.batch_size, whole=model.whole())
    if not np.isfinite(recorded.logits).all():
        raise ValueError("the logits became no numbers: the training diverged; begin anew with a smaller --lr")
    rule = rule or default_rule(recorded, task, held.labels, max_loss, candidates)
    metrics = {
        "epochs": history,
        "exits": list(model.exits),
        "per_exit_accuracy": exit_scores(recorded, task, held.labels, "score" if task.regression else "accuracy"),
        "hold_out": summary(recorded.replay(rule), recorded, task, held.labels),
        "rows": len(train.labels),
        "rows_held": len(held.labels),
        "rows_truncated": train.encoded.truncated,
        "mean_tokens": float(np.mean([len(ids) for ids in held.encoded.ids])),
    }
    save_run(out, method, model, tokenizer, rule, task, source, settings, metrics)
    shutil.rmtree(state_folder)
    return load_run(out)


def collect_run(
    out: Path,
    base_folder: Path,
    task: Task,
    rule: Retrieval,
    *,
    layer: int = 0,
    encoder: Path | None = None,
    seed: int = 0,
    max_train: int | None = None,
    batch_size: int = 32,
    device: str = "cpu",
) -> Run:
    """RAEE on the exits of a trained run (class-head mode): the same model, with a datastore and the rule that asks it.

    The datastore holds the rows that the run was not trained on, or max_train of them: on its own training rows nearly
    every exit is right. Queries are the mean state of the model itself after `layer`, or an encoder's in a folder of
    its own. A killed collection goes on where it was. Raises FileExistsError where `out` is there.
    """
    if out.exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    unfinished = training_folder(out)
    if base_folder.parent != unfinished:
        _refuse_state(unfinished)
    base = load_run(base_folder)
    if not base.label_names:
        raise ValueError(f"{base_folder}: a regression run, of which no exit is right or wrong; give one with classes")
    rows = untrained_rows(base, task)
    if max_train is not None:
        rows = subset(rows, max_train, seed)
    encoded = base.encode(rows.texts)
    model = base.model.to(device)
    source = {"layer": layer, "encoder": None if encoder is None else str(encoder.resolve())}
    embed, begin = open_encoder(source, model.backbone), time.perf_counter()
    values = collect(base.segments(), encoded, rows.labels, batch_size, progress="collecting")
    unfinished.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(unfinished / "datastore", ignore_errors=True)  # built, but its run was not written
    arguments = encoded, values, rows.labels, base.exits
    store = build(unfinished / "datastore", embed.name, embed, *arguments, progress="indexing")
    metrics = {
        "epochs": read_json(base_folder / "metrics.json").get("epochs", []),
        "rows": len(store),
        "per_exit_accuracy": (values > 0).mean(axis=0).tolist(),
        "best_single_exit": base.exits[best_single_exit(values)],
        "seconds": time.perf_counter() - begin,
    }
    with atomic_folder(out) as partial:
        shutil.copytree(base_folder, partial, ignore=shutil.ignore_patterns("datastore"), dirs_exist_ok=True)
        (unfinished / "datastore").rename(partial / "datastore")
        write_json(partial / "metrics.json", metrics)
        config = base.config | {"method": "raee", "rule": rule.to_dict(), "retrieval": source, "versions": versions()}
        config["files"] = config["files"] | {"metrics.json": file_sha256(partial / "metrics.json")}
        write_json(partial / "config.json", config)
    shutil.rmtree(unfinished)
    return load_run(out)


def untrained_rows(run: Run, task: Task) -> Split:
    """The rows of train that no exit of a run was trained on; after few shots, nor those that chose its best epoch."""
    train, seed = task.split("train"), run.config["seed"]
    if isinstance(run.model, PromptModel):
        *_, rest = draw_shots(train, task.num_labels, run.config["training"]["shots"], seed)
        return rest
    return holdout(train, seed)[1]


def prompt_run(
    out: Path,
    model_folder: Path,
    prompt: Prompt,
    task: Task,
    rule: Retrieval,
    *,
    exits: tuple[int, ...] | None = None,
    shots: int = 0,
    config: TrainConfig = TrainConfig(),
    max_length: int = 128,
    max_train: int | None = None,
    layer: int = 0,
    encoder: Path | None = None,
    device: str = "cpu",
) -> Run:
    """RAEE's prompt mode: layers of a checkpoint, all by default, are exits through its own head; then `collect_run`.

    With shots the backbone is fine-tuned on so many rows of each class first, under `config`, its best epoch chosen on
    as many others. Layer 0 is an exit where the rule has include_embeddings. A killed one goes on where it was. Raises
    FileExistsError where `out` is there, ValueError for a prompt that does not fit the model or the task, and where
    the killed one was started with other settings.
    """
    if out.exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    if not shots:
        _refuse_state(training_folder(out))
    check_prompt(prompt, task)
    backbone = load_backbone(model_folder)
    limit = min(max_length, backbone.config.max_tokens)
    tokenizer = PromptTokenizer(Tokenizer.from_folder(model_folder).backend, limit, prompt)
    exits = exits or tuple(range(1, backbone.config.num_hidden_layers + 1))
    exits = (0, *exits) if rule.include_embeddings else exits
    model = PromptModel(backbone, tokenizer, exits).to(device)
    unfinished, history = training_folder(out), []
    train, held, _ = draw_shots(task.split("train"), task.num_labels, shots, config.seed)
    base, source = unfinished / "base", {"folder": str(Path(model_folder).resolve())}
    source["sha256"] = backbone_sha256(model_folder)
    if shots:
        data = [Data(encode(tokenizer, part.texts, backbone.config), part.labels) for part in (train, held)]
        begun_with = asdict(config) | {"shots": shots, "backbone": source["sha256"], "exits": list(model.exits)}
        begun_with |= {"prompt": prompt.to_dict(), "data": _sha256(*data)}
        with torch.random.fork_rng(), sole_writer(unfinished):
            torch.manual_seed(config.seed)
            stages, resume = few_shot(model), (unfinished / STATE).exists()
            history = fit(model, stages, task, *data, config, begun_with, unfinished, resume)
    shutil.rmtree(base, ignore_errors=True)
    training = asdict(config) | {"shots": shots, "from": source}
    save_run(base, "prompt", model, tokenizer, NeverExit(), task, source, training, {"epochs": history})
    return collect_run(
        out, base, task, rule, layer=layer, encoder=encoder, seed=config.seed, max_train=max_train, device=device
    )


def _refuse_state(state_folder: Path) -> None:
    """Raise FileExistsError where there is a training that could go on."""
    if (state_folder / STATE).exists():
        raise FileExistsError(f"{state_folder}: an unfinished training is there; go on with --resume or remove it")


def _sha256(*parts: Data) -> str:
    """One digest over tokens and labels, so that a resumed training knows its data again."""
    digest = hashlib.sha256()
    for part in parts:
        for ids in part.encoded.ids:
            digest.update(ids.tobytes() + b"|")
        digest.update(part.labels.tobytes())
    return digest.hexdigest()
