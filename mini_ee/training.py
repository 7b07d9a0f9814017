"""From a recipe to a run on disk: open the parts, hold rows out, train, choose the default rule, write."""

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mini_ee.checkpoint import backbone_sha256, load_backbone
from mini_ee.evaluation import Candidates, default_rule, exit_scores, record, summary
from mini_ee.exits import MultiExit, without_heads
from mini_ee.files import atomic_folder, file_sha256, read_json, sole_writer, write_json
from mini_ee.fitting import STATE, Data, Stage, TrainConfig, fit
from mini_ee.prompting import PromptModel, draw_shots, few_shot
from mini_ee.prompts import Prompt, PromptTokenizer, check_prompt
from mini_ee.retrieval import Retrieval, best_single_exit, build, collect
from mini_ee.rules import NeverExit, Rule
from mini_ee.runs import Run, encode, load_run, open_encoder, save_run, training_folder, versions
from mini_ee.tasks import Split, Task, Tokenizer, holdout, subset


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
    backbone = without_heads(load_backbone(model_folder))
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
