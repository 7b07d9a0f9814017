"""Examples exit: a classifier or a regression learns from a task, and the default rule is tested on held-out rows."""

import hashlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.fine_tuned import is_multi_label, label_names, token_kind_of
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import json_sha256
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.rankings import ranked
from mini_ee.lab.data.tasks import Task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.heads import TOKENS
from mini_ee.lab.exits.row_exits import Known, RowData
from mini_ee.lab.exits.state_store import Stored
from mini_ee.lab.recording import Record, exit_scores, predictions, summary
from mini_ee.lab.threshold_curve import threshold_curve
from mini_ee.lab.token_tasks import TokenTask
from mini_ee.lab.training import doubts, ranks
from mini_ee.lab.training.default_rule import Chosen, curves, default_rule
from mini_ee.lab.training.few_exits import few_exits, head_layers, savings_curve
from mini_ee.lab.training.holdout import different, split_rows
from mini_ee.lab.training.loop import Diverged, Fitted
from mini_ee.lab.training.run_folder import encode, training_folder
from mini_ee.lab.training.train_run import Request, Say, TrainingData, open_task

TOLERANCE = 0.1
"""Two numbers agree if they differ by at most this share of the standard deviation of the model's numbers."""


def opened(request: Request, task, source: TaskOptions) -> Request:
    """The request with its task, after all checks that need no model."""
    opened_task = open_task(task, source)
    if request.method.keeps_model:
        _check_labels(opened_task, label_names(request.model), request.model)
        opened_task = replace(
            opened_task, multi_label=is_multi_label(request.model), token_kind=token_kind_of(request.model)
        )
        if opened_task.token_kind and request.common.pool is not None:
            raise WrongArguments("--pool is for one label of a text; this model labels tokens: leave it out")
    elif request.common.keep_exits is not None or request.common.tolerance is not None:
        raise WrongArguments(f"keep_exits and tolerance are for a model that stays as it is, not for {request.name}")
    if opened_task.regression and request.method.classes_only:
        raise WrongArguments(
            f"{request.name} needs the confidence or the accuracy of an exit, and {opened_task.name} is a regression; "
            f"train joint or pabee"
        )
    return replace(request, task=opened_task)


def config_part(request: Request, backbone: nn.Module, tokenizer: Tokenizer) -> dict:
    """This unit's part of config.json."""
    usual = "mean" if "mean" in backbone.poolings else backbone.poolings[0]
    heads = {"pool": request.common.pool or usual, "head": request.common.head}
    task = request.task.to_config()
    if request.task.token_kind:
        heads["pool"], task["around"] = TOKENS, list(tokenizer.around(task["texts"]))
    return {"num_labels": request.task.num_labels, "task": task} | heads


def open_tokenizer(request: Request, backbone: nn.Module) -> Tokenizer:
    """The tokenizer of the model's folder.

    Raises WrongArguments for pairs of a fine-tuned model that would read them otherwise than its own library.
    """
    length = min(request.common.max_length, backbone.config.max_tokens)
    tokenizer = Tokenizer.from_folder(tokenizer_folder(request.model), length)
    pairs = len(request.task.split("train").texts[0]) == 2
    if pairs and request.method.keeps_model and backbone.classification_head and not tokenizer.separates_pairs:
        raise WrongArguments(
            f"{request.model}: expected a tokenizer that separates the two texts of a pair, found one that joins "
            f"them; join them as the model learned them, and give one text"
        )
    return tokenizer


def data(request: Request, backbone: nn.Module, tokenizer: Tokenizer, known_config: dict, say: Say) -> TrainingData:
    """The three parts of the train split, encoded."""
    if request.method.keeps_model:
        train, held, test = _labelled_by_model(request, backbone, tokenizer, known_config)
    else:
        parts = split_rows(request.task, request.seed, request.common.max_train)
        train, held, test = (RowData(encode(tokenizer, p.texts, backbone), p.labels, request.task) for p in parts)
    task = train.task
    if (train.labels == train.labels[0]).all():
        who = f"{request.model} predicts" if request.method.keeps_model else "found only"
        label = "same labels" if task.multi_label or task.token_kind else f"label {train.labels[0]}"
        raise ValueError(
            f"{task.name}: {who} the {label} for all {len(train)} examples to train on, so "
            f"there is nothing to learn; give examples with different labels"
        )
    begun_with = {"max_length": tokenizer.max_length, "task": task.name, "data": _sha256(train, held, test)}
    if request.method.keeps_model:
        begun_with |= {"tolerance": task.tolerance, "top_k": task.top_k, "keep_exits": request.common.keep_exits}
    return TrainingData(train, held, test, begun_with)


def conclude(request: Request, model: nn.Module, fitted: Fitted, data: TrainingData) -> tuple[Chosen, dict]:
    """The default rule, and what metrics.json contains."""
    common, task = request.common, data.held.task
    recorded = _recorded(model, data.held, request.train.batch_size)
    labels = recorded.labels
    if common.keep_exits is not None:
        full = exit_scores(recorded, task, labels)[-1]
        columns = few_exits(recorded, task, common.keep_exits, full - common.max_loss, head_layers(model))
        model.keep_exits(columns)
        recorded = recorded.at(columns)
    tested = recorded.take(slice(0))
    if len(data.more):
        tested = _recorded(model, data.more, request.train.batch_size)
    wanted = {"max_loss": common.max_loss, "confidence": common.confidence}
    if task.regression and not task.counts_agreement:
        wanted["label_range"] = float(np.ptp(data.train.labels))
    chosen = default_rule(recorded, tested, task, **wanted, candidates=request.method.candidates)
    observed, labelled = tested if len(data.more) else recorded, common.labelled or not request.method.keeps_model
    gold = observed.labels if labelled else None
    curve = threshold_curve(observed, chosen.rule, task, gold)
    chosen = chosen._replace(curve=curve)
    predicted = predictions(recorded.replay(chosen.rule).logits, task)
    metrics = {"epochs": fitted.epochs} | _held_out(recorded, chosen, task, labels)
    majority = doubts.of_majority(task, predictions(observed.logits[:, -1], task), gold)
    metrics |= {
        "majority_warning": majority,
        "doubts": [majority] * bool(majority) + doubts.of_result(task, data.train.labels, labels, predicted),
        "rows": len(data.train),
        "rows_held": len(data.held),  # they chose
        "rows_tested": len(data.more),  # they tested the default rule
        "rows_truncated": data.train.encoded.truncated,
        "mean_tokens": float(np.mean([len(ids) for ids in data.held.encoded.ids])),
    }
    if request.method.keeps_model and len(data.more):
        metrics |= {"tolerance": task.tolerance}
        relabelled = tested._replace(labels=predictions(tested.logits[:, -1], task)) if common.labelled else tested
        metrics |= {"tested": savings_curve(relabelled, task, chosen.rule, head_layers(model), gold)}
    return chosen, metrics


def _check_labels(task: Task, names: tuple[str, ...], model) -> None:
    """Raise WrongArguments for a task whose labels are not those of a fine-tuned model, in the order of its logits."""
    generic = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
    same = [name.casefold() for name in names] == [name.casefold() for name in task.label_names]
    if len(names) != len(task.label_names) or not (generic or same):
        expected = f"the labels {', '.join(names)}, as {model} gives them" if names else "numbers as labels"
        raise WrongArguments(f"{task.name}: expected {expected}, found {', '.join(task.label_names) or 'numbers'}")


def _labelled_by_model(
    request: Request, backbone: nn.Module, tokenizer: Tokenizer, known_config: dict
) -> list[RowData]:
    """The three parts of the train split, with what the fine-tuned model itself predicts as labels.

    A score is an agreement; if the task counts as labelled, its own labels stay, and heads still learn from the model.
    Heads learn from each different text once. In the other two parts, a text counts as often as it stands in the task,
    because the guarantee is for texts that are drawn like the lines of a file. The model reads each different text
    once: labels and states come from the same pass. States that do not fit in memory are in the folder of the
    training's state.
    """
    task, rows = request.task, request.task.split("train")
    exits, pool = known_config["exits"], known_config["pool"]
    model = FrozenClassifier(backbone, tuple(exits), task.num_labels, pool).to(request.common.device)
    model.token_task = TokenTask.of(known_config)
    numbered = replace(task, splits={"train": replace(rows, labels=np.arange(len(rows)))})
    parts = split_rows(numbered, request.seed, request.common.max_train)
    parts = parts._replace(train=different(parts.train))
    ends = np.cumsum([0, *map(len, parts)])
    rows = rows.take(np.concatenate([part.labels for part in parts]))
    place = {text: at for at, text in enumerate(dict.fromkeys(rows.texts))}
    places, texts = np.array([place[text] for text in rows.texts]), tuple(place)
    encoded = encode(tokenizer, texts, backbone)
    key = {"files": model_sha256s(request.model), "texts": texts, "max_length": tokenizer.max_length}
    folder = training_folder(request.out) / f"states_{ranks.rank()}"
    store = partial(Stored, folder=folder, key=json_sha256(key | {"exits": exits, "pool": pool}))
    computed = RowData(encoded, np.arange(len(texts)), task).states(model, store)
    model_labels = predictions(computed.logits(model, [len(exits) - 1])[:, 0], task)[places]
    metrics = task.metrics if task.regression else ("accuracy",)
    labels = rows.labels if request.common.labelled else model_labels
    if task.top_k is not None:
        labels = ranked(model_labels, rows.texts)
    elif task.regression:  # from the training texts alone: what tests the agreement must not define it
        own_tolerance = TOLERANCE * float(model_labels[: ends[1]].std())
        task = replace(task, tolerance=request.common.tolerance or own_tolerance)
    task = replace(task, metrics=metrics, splits={"train": replace(rows, labels=labels)})
    states = [computed.states[: ends[1]], *(computed.states[places[a:b]] for a, b in zip(ends[1:], ends[2:]))]
    return [
        RowData(encode(tokenizer, rows.texts[a:b], backbone), labels[a:b], task, Known(model.exits, known))
        for a, b, known in zip(ends, ends[1:], states)
    ]


def _recorded(model, data: RowData, batch_size: int) -> Record:
    """The logits of the exits for these rows. Raises Diverged if one is not finite."""
    recorded = data.recorded(model, batch_size, "held-out rows")
    if not np.isfinite(recorded.logits).all():
        raise Diverged("the logits are not finite: the training diverged; train again with a smaller --lr")
    return recorded


def _held_out(recorded: Record, chosen: Chosen, task: Task, labels: np.ndarray) -> dict:
    metric = "score" if task.regression else "accuracy"
    return {
        "exits": list(recorded.segments.exits),
        "per_exit_accuracy": exit_scores(recorded, task, labels, metric),
        "hold_out": summary(recorded.replay(chosen.rule), recorded, task, labels),
        "guarantee": chosen.guarantee,
        "rows_needed": chosen.rows_needed,
        "curves": curves(recorded, task, labels, chosen.rule),
        **chosen.metrics,
    }


def _sha256(*parts: RowData) -> str:
    """A digest of tokens and labels, by which a resumed training recognises its data."""
    digest = hashlib.sha256()
    for part in parts:
        for ids in part.encoded.ids:
            digest.update(ids.tobytes() + b"|")
        digest.update(part.labels.tobytes())
    return digest.hexdigest()
