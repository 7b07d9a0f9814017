"""Texts exit with an embedding: the exits of a sentence encoder learn its own full embedding, from texts alone.

Methods that train the encoder itself also learn from pairs of texts with a score.
"""

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.hub import load_strict
from mini_ee.lab.backbones.sentence_encoder import SentenceModules, sentence_modules
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.sentence_prompts import PromptedTokenizer, check_prompt_name
from mini_ee.lab.data.table_files import SUFFIXES, kind_of
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.data.text_files import read_rows
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.embedding_exits import (
    AfterPooling,
    DistillationData,
    EmbeddingData,
    EmbeddingExits,
    PairData,
    full_cosines,
)
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Fixed, Never
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.holdout import different, split_rows
from mini_ee.lab.training.loop import Diverged, Fitted
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import Run, encode
from mini_ee.lab.training.train_run import Request, Say, TrainingData, is_labelled, open_task, trained_on

LEAST_TEXTS = 20
LOWEST = 0.1  # quantile of the cosines that is reported


def opened(request: Request, task, source: TaskOptions) -> Request:
    """The request with its texts and its encoder, after all checks that need no model."""
    encoder, common = sentence_modules(request.model, request.common.pool), request.common
    settings = {"pool": encoder.pool, "max_length": common.max_length or encoder.max_length}
    if encoder.modules[-1:] == ({"kind": "normalize"},) and (common.size or not encoder.size):
        # Each exit scales its embedding, after --size has cut it. The encoder's own size cuts a scaled one.
        settings["normalize"], encoder = True, encoder._replace(modules=encoder.modules[:-1])
    if common.prompt_name is not None:
        check_prompt_name(encoder.prompts, common.prompt_name, f"{request.model}: ")
        encoder = encoder._replace(default_prompt=common.prompt_name)
    pairs = _pairs_of(task, source) if request.method.trains_encoder else None
    return replace(request, task=pairs or _texts_of(task, source), common=replace(common, **settings), encoder=encoder)


def config_part(request: Request, backbone: nn.Module, tokenizer: Tokenizer) -> dict:
    """This unit's part of config.json."""
    common, encoder = request.common, request.encoder
    part = {"task": request.task.to_config() | {"texts": 1}, "normalize": common.normalize}
    part |= {
        "modules": list(encoder.modules),
        "prompts": encoder.prompts,
        "default_prompt_name": encoder.default_prompt,
    }
    return part | {"pool": common.pool, "head": None, "num_labels": _size(request, backbone)}


def open_tokenizer(request: Request, backbone: nn.Module) -> PromptedTokenizer:
    """The tokenizer of the encoder's folder. The backbone gets the linear maps that follow the pooling."""
    encoder, most = request.encoder, backbone.config.max_tokens
    length = min(request.common.max_length or most, most)
    tokenizer = Tokenizer.from_folder(tokenizer_folder(request.model), length, encoder.lower)
    backbone.dense_weights = _dense_weights(request.model, encoder)
    return PromptedTokenizer(tokenizer.backend, length, encoder.prompts, encoder.default_prompt)


def data(request: Request, backbone: nn.Module, tokenizer: Tokenizer, known_config: dict, say: Say) -> TrainingData:
    """The three parts of the texts, encoded."""
    parts = split_rows(request.task, request.seed, request.common.max_train)
    if len(parts.train.texts[0]) == 1:
        parts = parts._replace(train=different(parts.train))
    train, held = map(_data_of(request, backbone, tokenizer), parts[:2])
    texts = [(text,) for row in parts.test.texts for text in row]
    test = EmbeddingData(encode(tokenizer, texts, backbone), np.zeros(len(texts)), request.task)
    digest = hashlib.sha256(request.task.split("train").labels.tobytes())
    for weights in backbone.dense_weights.values():
        digest.update(weights.numpy().tobytes())
    for ids in (ids for part in (train, held, test) for ids in part.encoded.ids):
        digest.update(ids.tobytes() + b"|")
    begun_with = {"max_length": tokenizer.max_length, "task": request.task.name, "data": digest.hexdigest()}
    return TrainingData(train, held, test, begun_with)


def conclude(request: Request, model: nn.Module, fitted: Fitted, data: TrainingData) -> tuple[Chosen, dict]:
    """The default rule is the method's, or the shallowest exit whose mean cosine is at least --min-cosine."""
    tested = data.more if len(data.more) else data.held
    recorded = record(model.segments(), tested.encoded, request.train.batch_size, "held-out texts")
    if not np.isfinite(recorded.logits).all():
        raise Diverged("the embeddings are not finite: the training diverged; train again with a smaller --lr")
    cosines = full_cosines(recorded.logits)
    means, last = cosines.mean(axis=0).tolist(), len(model.exits) - 1
    depth = next(k for k, mean in enumerate(means) if mean >= request.common.min_cosine or k == last)
    metrics = {
        "epochs": fitted.epochs,
        "exits": list(model.exits),
        "per_exit_cosine": means,
        "per_exit_low_cosine": np.quantile(cosines, LOWEST, axis=0).tolist(),
        "rows": len(data.train),
        "rows_held": len(data.held),
        "rows_tested": len(tested),
        "rows_truncated": data.train.encoded.truncated,
    }
    rule = Never() if depth == last else Fixed(depth)
    if request.method.default_rule is not None:
        rule = request.method.default_rule(recorded, request.common.min_cosine)
    return Chosen(rule, None), metrics


def unseen(run: Run, task, source: TaskOptions) -> Split:
    """The texts of a file, a table or a task. Of those that the run was trained on, only the ones that test."""
    opened_task = _pairs_of(task, source) if load_method(run.config["method"]).trains_encoder else None
    opened_task = opened_task or _texts_of(task, source)
    rows = opened_task.split("train")
    if trained_on(run, opened_task):
        rows = split_rows(opened_task, run.config["seed"], run.config["training"].get("max_train")).test
    texts = tuple((text,) for row in rows.texts for text in row)
    return Split(texts, np.zeros(len(texts)))


def _data_of(request: Request, backbone: nn.Module, tokenizer: Tokenizer) -> Callable[[Split], Any]:
    """The function that makes training data from a split: texts, texts with their embedding as label, or pairs."""

    def of_pairs(part: Split) -> PairData:
        first, second = zip(*part.texts)
        encoded = (encode(tokenizer, [(text,) for text in texts], backbone) for texts in ((*first, *second), first))
        return PairData(*encoded, part.labels)

    def of_texts(part: Split) -> EmbeddingData:
        return EmbeddingData(encode(tokenizer, part.texts, backbone), part.labels, request.task)

    def distilled(part: Split) -> DistillationData:
        encoded = encode(tokenizer, part.texts, backbone)
        recorded = record(teacher.segments(), encoded, request.train.batch_size, "full embeddings")
        return DistillationData(encoded, recorded.logits[:, -1], request.task)

    if len(request.task.split("train").texts[0]) == 2:
        return of_pairs
    if not request.method.trains_encoder:
        return of_texts
    common, layers = request.common, (backbone.config.num_hidden_layers,)
    given = _size(request, backbone), common.pool, common.normalize, None, request.encoder.modules
    teacher = EmbeddingExits(deepcopy(backbone), layers, *given).to(common.device)
    return distilled


def _size(request: Request, backbone: nn.Module) -> int:
    """How many numbers an embedding has."""
    encoder = request.encoder
    dense_sizes = [step["out_features"] for step in encoder.modules if step["kind"] == "dense"]
    full = dense_sizes[-1] if dense_sizes else backbone.config.hidden_size
    return request.common.size or min(encoder.size or full, full)


def _dense_weights(folder: Path, encoder: SentenceModules) -> dict:
    """The weights of the encoder's linear maps after its pooling, by their names in AfterPooling."""
    after = AfterPooling(encoder.modules)
    for linear, step in zip(after.maps, (step for step in encoder.modules if step["kind"] == "dense")):
        path = folder / step["path"] / "model.safetensors"
        load_strict(linear, read_tensors(path), {name: (f"linear.{name}",) for name in linear.state_dict()}, path)
    return after.state_dict()


def _pairs_of(task, source: TaskOptions) -> Task | None:
    """The task, if its examples are pairs of texts with a number as label; else None."""
    if not is_labelled(task):
        return None
    opened_task = open_task(task, source)
    train = opened_task.split("train")
    return (
        replace(opened_task, splits={"train": train}) if opened_task.regression and len(train.texts[0]) == 2 else None
    )


def _texts_of(task, source: TaskOptions) -> Task:
    """The texts of a file, a table or a task, as a Task without labels; pairs become two texts."""
    path = None if task is None or isinstance(task, Task) else Path(task)
    if path is None or path.is_dir() or not path.is_file():
        named = open_task(task, source)
        name, rows = named.name, named.split("train").texts
    else:
        num_texts = None if kind_of(path) in SUFFIXES else 1  # an encoder reads one text: a tab in it is text
        name, rows = path.stem, [row.texts for row in read_rows([path], source, num_texts, drop=True)[0]]
    texts = [text for row in rows for text in row if text.strip()]
    if (count := len(set(texts))) < LEAST_TEXTS:
        raise WrongArguments(f"{name}: expected at least {LEAST_TEXTS} different texts, found {count}; give more")
    return Task(name, (), ("cosine",), {"train": Split(tuple((text,) for text in texts), np.zeros(len(texts)))})
