"""RAEE's collection: the examples on which raee.collect runs, and the run folder that it writes.

The exits are those of a trained run, or every layer of a checkpoint that is read through a prompt (prompt_run.py).
"""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.files import atomic_folder, check_folder, copy_folder, file_sha256, sole_writer, write_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import Split, Task, divided, holdout, subset
from mini_ee.lab.data.tokenizer import batches
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.prompt_exits import draw_shots
from mini_ee.lab.methods.raee import Retrieval, collect
from mini_ee.lab.methods.raee_controls import best_single_exit
from mini_ee.lab.methods.raee_datastore import Datastore, new_index, unit_length
from mini_ee.lab.methods.raee_encoders import open_encoder
from mini_ee.lab.training import ranks
from mini_ee.lab.training.prompt_run import prompt_run, refuse_state
from mini_ee.lab.training.run_folder import Run, is_run, load_run, training_folder, versions
from mini_ee.lab.training.train_run import Request, check_task, say_beyond, say_left_out, trained_on

BATCH_SIZE, EMBEDDED_AT_ONCE = 32, 64  # examples that the exits, and the encoder of the queries, read at once
OF_PROMPTS = ("template", "words", "prompts", "shots", "include_embeddings")
OF_SHOTS = ("epochs", "lr", "batch_size", "warmup", "weight_decay", "clip", "precision")


def collect_run(request: Request, say: Callable) -> Run:
    """Collect at the exits of a run (class-head mode) or of a checkpoint (prompt mode), and write the new run.

    The datastore contains the examples on which no exit was trained, or max_train of them, because nearly every exit is
    right on its own training examples. An interrupted collection begins again, an interrupted fine-tuning continues.
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
            _write_run(request, run, *_collected(request, run))
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
        refuse_state(training_folder(request.out))
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


def _collected(request: Request, run: Run) -> tuple[Datastore, dict]:
    """Algorithm 3.1: the datastore, whose rows are ordered from short to long texts, and the metrics of the new run."""
    rows = untrained_rows(run, request.task)
    if request.common.max_train is not None:
        rows = subset(rows, request.common.max_train, request.seed)
    encoded, labels, model = run.encode(rows.texts), np.asarray(rows.labels), run.model.to(request.common.device)
    embed, begin = open_encoder(_query_source(request.config), model.backbone), time.perf_counter()
    values = collect(run.segments(), encoded, labels, BATCH_SIZE, progress="collecting")
    parts = list(batches(encoded, EMBEDDED_AT_ONCE))
    embeddings = [embed(encoded.batch(part)) for part in tqdm(parts, desc="embedding", unit="batch", delay=2)]
    order, texts = np.concatenate(parts), [encoded.texts[row] for part in parts for row in part]
    of_rows = unit_length(np.concatenate(embeddings)), values[order], labels[order], texts
    store = Datastore(embed.name, run.exits, *of_rows, request.config.shards)
    return store, {
        "epochs": run.metrics.get("epochs", []),
        "rows": len(store),
        "exits": list(run.exits),
        "per_exit_accuracy": (values > 0).mean(axis=0).tolist(),
        "best_single_exit": run.exits[best_single_exit(values)],
        "seconds": time.perf_counter() - begin,
    }


def _write_run(request: Request, run: Run, store: Datastore, metrics: dict) -> None:
    """The base run with the datastore and its rule, in request.out. Layer 0 is an exit if the run has it."""
    given = request.config
    rule = Retrieval(given.k, given.tau, given.fallback_top, include_embeddings=run.exits[0] == 0, datastore=store)
    of_its_rule = ("exit_counts", "curve")  # of the base
    config = {key: value for key, value in run.config.items() if key not in of_its_rule}
    source, prompts = _query_source(given), given.prompts
    settings = asdict(given) | {"encoder": source["encoder"], "max_train": request.common.max_train}
    settings["prompts"] = None if prompts is None else str(Path(prompts).resolve())
    base = {"method": config["method"], "settings": config["settings"]}
    config |= {"method": "raee", "settings": settings, "base": config.get("base", base)}
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
