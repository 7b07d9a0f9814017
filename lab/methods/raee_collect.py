"""RAEE's collection: the examples on which raee.collect runs, and the run folder that it writes.

The exits are those of a trained run, or every layer of a checkpoint that is read through a prompt.

Paper: RAEE (see raee.py), Algorithm 3.1. `few_shot` is LM-BFF's prompt-based fine-tuning (Gao et al. 2021).
"""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.hub import backbone_class, backbone_sha256, load_backbone, read_config
from mini_ee.lab.data.files import (
    atomic_folder,
    check_folder,
    copy_folder,
    file_sha256,
    json_sha256,
    sole_writer,
    write_json,
)
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.prompt_templates import PROMPTS, Prompt, PromptTokenizer, check_prompt, prompt_of
from mini_ee.lab.data.tasks import Split, Task, divided, holdout, subset
from mini_ee.lab.data.tokenizer import Tokenizer, batches
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.prompt_exits import KIND_READ_AT, PromptModel, draw_shots
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.methods.raee_controls import best_single_exit
from mini_ee.lab.methods.raee_datastore import Datastore, new_index, unit_length
from mini_ee.lab.methods.raee_encoders import open_encoder
from mini_ee.lab.rules import NeverExit, Rule
from mini_ee.lab.training import ranks
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.run_folder import (
    Run,
    about_task,
    encode,
    is_run,
    load_run,
    save_run,
    training_folder,
    versions,
)
from mini_ee.lab.training.stages import Stage
from mini_ee.lab.training.state import STATE, Saved
from mini_ee.lab.training.train_run import Request, check_task, exits_of, say_beyond, say_left_out, trained_on
from mini_ee.train import task_loss

BATCH_SIZE, EMBEDDED_AT_ONCE = 32, 64  # examples that the exits, and the encoder of the queries, read at once
OF_PROMPTS = ("template", "words", "prompts", "shots", "include_embeddings")
OF_SHOTS = ("epochs", "lr", "batch_size", "warmup", "weight_decay", "clip", "precision")


def collect_run(request: Request, rule: Rule, collect: Callable, say: Callable) -> Run:
    """Collect at the exits of a run (class-head mode) or of a checkpoint (prompt mode), and write the new run.

    The datastore contains the examples on which no exit was trained, or max_train of them, because nearly every exit is
    right on its own training examples. An interrupted collection begins again, an interrupted fine-tuning continues.
    rule: Retrieval, the rule of the new run. collect: Algorithm 3.1, raee.collect.
    """
    _check_given(request)
    unfinished = training_folder(request.out)
    new_index(1)  # fails first if hnswlib is missing
    with nullcontext() if ranks.rank() else sole_writer(unfinished):
        base = _base_run(request)
        if ranks.rank() == 0:
            run = load_run(base)
            say_left_out(run.model.backbone, request.model, say)
            say_beyond(run.tokenizer, run.model.backbone, request.model, say)
            if run.unit == "tokens":
                raise WrongArguments(
                    f"{base}: contains a decoder, whose tokens have no labels; give the run of a classifier"
                )
            check_task(run, request.task, base)
            if not run.label_names:
                raise ValueError(
                    f"{base}: a regression run, whose exits are neither right nor wrong; give a run with classes"
                )
            store, metrics = _collected(request, run, collect)
            _write_run(request, run, replace(rule, datastore=store), metrics)
            shutil.rmtree(unfinished, ignore_errors=True)  # it is there if a checkpoint was read
        ranks.wait()
    return load_run(request.out)


def _check_given(request: Request) -> None:
    """Raise WrongArguments for an option that would have no effect."""
    model, given = request.model, request.given

    def refuse(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in given:
                raise WrongArguments(f"--{name.replace('_', '-')} {why}")

    if is_run(model):
        refuse(
            OF_PROMPTS, f"is for a checkpoint that is read through a prompt; {model} is a trained run, which has heads"
        )
        refuse(("exits", "max_length", *OF_SHOTS), f"is set by {model}, a trained run")
    elif request.config.shots is None:
        refuse(OF_SHOTS, "is for fine-tuning on a few examples: give --shots too")
    if "encoder" in given:
        check_folder(Path(request.config.encoder))
        refuse(("layer",), "selects the states of the model that are the queries: leave out --layer or --encoder")


def _base_run(request: Request) -> Path:
    """The run at whose exits values are collected: request.model, or a run that reads it through a prompt."""
    if is_run(request.model):
        _refuse_state(training_folder(request.out))
        return request.model
    backbone = load_backbone(request.model)  # checked before anything is trained; so is the encoder of the queries
    if not backbone.has_lm_head:
        raise WrongArguments(
            f"{request.model}: {backbone.no_lm_head()}, or train heads on it first (mini-ee train joint) and "
            f"give that run as --model"
        )
    open_encoder(_query_source(request.config), backbone)
    return prompt_run(request)


def _query_source(config: Any) -> dict:
    """The source of the queries, as open_encoder takes it."""
    return {"layer": config.layer, "encoder": None if config.encoder is None else str(Path(config.encoder).resolve())}


def _collected(request: Request, run: Run, collect: Callable) -> tuple[Datastore, dict]:
    """Algorithm 3.1: the datastore, whose rows are ordered from short to long texts, and the metrics of the new run."""
    rows = untrained_rows(run, request.task)
    if request.common.max_train is not None:
        rows = subset(rows, request.common.max_train, request.seed)
    encoded, model = run.encode(rows.texts), run.model.to(request.common.device)
    embed, begin = open_encoder(_query_source(request.config), model.backbone), time.perf_counter()
    values = collect(run.segments(), encoded, rows.labels, BATCH_SIZE, progress="collecting")
    parts = list(batches(encoded, EMBEDDED_AT_ONCE))
    embeddings = [embed(encoded.batch(part)) for part in tqdm(parts, desc="embedding", unit="batch", delay=2)]
    order, of_rows = np.concatenate(parts), unit_length(np.concatenate(embeddings))
    texts = [encoded.texts[row] for row in order]
    labels, shards = np.asarray(rows.labels)[order], request.config.shards
    store = Datastore(embed.name, run.exits, of_rows, values[order], labels, texts, shards)
    return store, {
        "epochs": run.metrics.get("epochs", []),
        "rows": len(store),
        "exits": list(run.exits),
        "per_exit_accuracy": (values > 0).mean(axis=0).tolist(),
        "best_single_exit": run.exits[best_single_exit(values)],
        "seconds": time.perf_counter() - begin,
    }


def _write_run(request: Request, run: Run, rule: Any, metrics: dict) -> None:
    """The base run with the rule, its datastore and settings, in request.out. Layer 0 is an exit if the run has it."""
    of_its_rule = ("exit_counts", "curve")  # of the base
    config = {key: value for key, value in run.config.items() if key not in of_its_rule}
    source, prompts = _query_source(request.config), request.config.prompts
    settings = asdict(request.config) | {"encoder": source["encoder"], "max_train": request.common.max_train}
    settings["prompts"] = None if prompts is None else str(Path(prompts).resolve())
    base = {"method": config["method"], "settings": config["settings"]}
    config |= {"method": "raee", "settings": settings, "base": config.get("base", base)}
    rule = replace(rule, include_embeddings=run.exits[0] == 0)
    config |= {"rule": rule.to_dict(), "guarantee": None, "retrieval": source, "versions": versions()}
    with atomic_folder(request.out) as partial:
        copy_folder(run.folder, partial, without=("datastore",))
        rule.save(partial)
        write_json(partial / "metrics.json", metrics)
        config["files"] = config["files"] | {"metrics.json": file_sha256(partial / "metrics.json")}
        write_json(partial / "config.json", config)


def untrained_rows(run: Run, task: Task) -> Split:
    """The examples of train on which no exit of a run was trained; after few-shot fine-tuning also without those that
    selected its best epoch.

    Raises WrongArguments if they are not known.
    """
    train = task.split("train")
    if not trained_on(run, task):
        return train
    seed, training = run.config["seed"], run.config["training"]
    if run.unit == "prompts":
        *_, rest = draw_shots(train, task.num_labels, training["shots"], seed)
        return rest
    fitted, held_out = holdout(train, seed)
    if training["max_train"] is None:
        return held_out
    return held_out + divided(fitted, training["max_train"], seed)[1]


# ---- Through a prompt ----


def prompt_run(request: Request) -> Path:
    """A checkpoint as a run: each layer is an exit, read through the checkpoint's own head. Returns its folder, inside
    that of the unfinished training.

    shots: the backbone is first fine-tuned on this many examples of each class; as many others select the best epoch.
    include_embeddings: layer 0 is an exit too. Raises ValueError for a prompt that does not fit the model or the task,
    and if an interrupted run was started with other settings.
    """
    config, task, unfinished = request.config, request.task, training_folder(request.out)
    prompt = chosen_prompt(request)
    if not config.shots:
        _refuse_state(unfinished)
    check_prompt(prompt, task)
    backbone = load_backbone(request.model)
    limit = min(request.common.max_length, backbone.config.max_tokens)
    tokenizer = PromptTokenizer(Tokenizer.from_folder(tokenizer_folder(request.model)).backend, limit, prompt)
    exits = exits_of(request, backbone.config.num_hidden_layers)
    exits = (0, *exits) if config.include_embeddings else exits
    model = PromptModel(backbone, tokenizer, exits).to(request.common.device)
    source = {"folder": str(request.model.resolve()), "sha256": backbone_sha256(request.model)}
    epochs = _fine_tuned(request, model, tokenizer, source) if config.shots else []
    training = asdict(request.train) | {"shots": config.shots or 0, "from": source, "max_train": None}
    about: dict[str, Any] = {"method": "raee", "unit": "prompts", "settings": {}, "backbone": source}
    about |= {"task": about_task(task), "seed": request.seed, "training": training}
    base = unfinished / "base"
    if ranks.rank() == 0:
        shutil.rmtree(base, ignore_errors=True)
        unfinished.mkdir(parents=True, exist_ok=True)
        save_run(base, model, tokenizer, Chosen(NeverExit(), None), about, {"epochs": epochs})
    return base


def _fine_tuned(request: Request, model: PromptModel, tokenizer: PromptTokenizer, source: dict) -> list[dict]:
    """Train on the shots, in place. Returns the record of every epoch."""
    task, unfinished = request.task, training_folder(request.out)
    shots = draw_shots(task.split("train"), task.num_labels, request.config.shots, request.seed)[:2]
    train, held_out = (
        RowData(encode(tokenizer, part.texts, model.backbone), np.asarray(part.labels), task) for part in shots
    )
    settings = asdict(request.train) | {"shots": request.config.shots, "backbone": source["sha256"]}
    settings |= {"files": model_sha256s(request.model)}
    digest = json_sha256([part.texts for part in shots])
    settings |= {"exits": list(model.exits), "prompt": tokenizer.prompt.to_dict(), "data": digest}
    saved = Saved(unfinished, settings, (unfinished / STATE).exists())
    with torch.random.fork_rng():
        torch.manual_seed(request.seed)
        return fit(model, few_shot(model), train, held_out, request.train, saved).epochs


def few_shot(model: PromptModel) -> list[Stage]:
    """LM-BFF's prompt-based fine-tuning: the whole backbone learns from the cross-entropy over the label words."""
    return [
        Stage(
            name="prompt",
            trainable=lambda name: True,
            loss=lambda model, batch: task_loss(model(*batch.inputs), batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]


def chosen_prompt(request: Request) -> Prompt:
    """The prompt of --template and --words, or the one for this task in --prompts or in the built-in prompts.json."""
    config = request.config
    kind = KIND_READ_AT[backbone_class(read_config(request.model / "config.json").model_type).reads_prompt_at]
    if (config.template is None) != (config.words is None) or (config.template and config.prompts):
        raise WrongArguments("give --template and --words together, or --prompts alone, or none of them")
    try:
        if config.template is None:
            return prompt_of(request.task, kind, Path(config.prompts or PROMPTS))
        pairs = [word.partition("=") for word in config.words]
        if not all(key.strip() and word.strip() for key, _, word in pairs):
            found = ",".join(config.words)
            raise ValueError(f"--words: expected a word for each class, as 0=terrible,1=great, found {found}")
        words = {key.strip(): word.strip() for key, _, word in pairs}
        return Prompt.from_dict({"template": config.template, "words": words}, request.task.label_names)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def _refuse_state(state_folder: Path) -> None:
    """Raise FileExistsError if the folder has a training that can be resumed."""
    if (state_folder / STATE).exists():
        what = "an unfinished training is there, and it is not a collection"
        raise FileExistsError(f"{state_folder}: {what}; remove it or name another folder")
