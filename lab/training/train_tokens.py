"""Tokens exit: a decoder learns from generated texts or those of a file, and its tokens exit early."""

from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.hub import empty_backbone, without_memory
from mini_ee.lab.data.files import json_sha256
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.state_store import Stored
from mini_ee.lab.exits.token_exits import SharedExits, TextData
from mini_ee.lab.training import ranks
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.loop import Fitted
from mini_ee.lab.training.run_folder import training_folder
from mini_ee.lab.training.train_run import Request, Say, TrainingData, build_checked
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.training_text import (
    GATE_PIECES,
    HELD_PIECES,
    Source,
    agreement_rule,
    check_count,
    texts_to_learn,
)


def opened(request: Request, task, source: TextOptions) -> Request:
    """The request with its text, after all checks that need no model."""
    name = request.name
    if source.kind == "pieces" != request.method.defaults.get("tokens", {}).get("kind"):
        raise WrongArguments(
            f"--task pieces: {name} needs labels at the end of a text, and pieces have none; give continue"
        )
    if source.kind != "pieces" and (source.prompt or source.greedy):
        given = "prompt" if source.prompt else "greedy"
        raise WrongArguments(f"--{given}: {name} learns from stories, which need no prompt; leave it out")
    check_count(source)
    return replace(request, texts=source)


def config_part(request: Request, backbone: nn.Module, tokenizer: Tokenizer) -> dict:
    """This unit's part of config.json."""
    return {"text": request.texts.to_dict(), "rank": request.texts.rank, "pool": None, "head": request.common.head}


def open_tokenizer(request: Request, backbone: nn.Module) -> Tokenizer:
    """The tokenizer of the model's folder; it does not cut texts."""
    return Tokenizer.from_folder(tokenizer_folder(request.model), None)


def data(request: Request, backbone: nn.Module, tokenizer: Tokenizer, known_config: dict, say: Say) -> TrainingData:
    """Texts that the decoder generates, or those of a file."""
    exits = known_config["exits"]
    if len(exits) < 2 and "exits" not in request.method.lacks:
        raise WrongArguments(f"--exits: expected exits before the last layer, got only {exits[0]}")
    with without_memory():  # a model that cannot be built is refused before texts are generated
        build_checked(request, empty_backbone(backbone.config.to_dict(), lm_head=True), known_config)
    lens = known_config["head"] == "lens"
    source = Source(backbone, tokenizer, request.texts, request.seed, GATE_PIECES if lens else HELD_PIECES)
    train, held = texts_to_learn(source)
    learners = f"{len(exits) - 1} heads on {request.model.name} learn"
    who = learners if len(exits) > 1 else f"{request.model.name} reads"
    say(f"{who} {_tokens(train)} tokens of {len(train)} texts.")
    if lens and request.method.keeps_model:  # it reads each text once
        model = SharedExits(backbone, tuple(exits))
        train, held = (_known(request, model, part, name) for part, name in ((train, "train"), (held, "held")))
    digest = json_sha256({"train": [text.ids for text in train.texts], "held": [text.ids for text in held.texts]})
    return TrainingData(train, held, source, {"text": known_config["text"], "data": digest})


def _known(request: Request, model: SharedExits, data: TextData, name: str) -> TextData:
    """The same texts with their states, which are kept in a file until the run is written."""
    key = {"files": model_sha256s(request.model), "texts": [text.ids for text in data.texts], "exits": model.exits}
    folder = training_folder(request.out) / f"states_{name}_{ranks.rank()}"
    store = partial(Stored, folder=folder, key=json_sha256(key), dtype=np.float16)
    return TextData(data.texts, data.every, data.states(model, store))


def conclude(request: Request, model: nn.Module, fitted: Fitted, data: TrainingData) -> tuple[Chosen, dict]:
    """The default rule, and what metrics.json contains."""
    model.fold()
    chosen = (request.method.default_rule or agreement_rule)(model, data.more, data.held)
    metrics = {"epochs": fitted.epochs, "history": fitted.metrics, "exits": list(model.exits)} | chosen.metrics
    metrics |= {"texts": len(data.train), "tokens": _tokens(data.train)}
    for stage in request.method.recipe(model, request.config) if request.method.has_stages else ():
        metrics |= stage.log_metrics(model, data.held) if stage.log_metrics else {}  # of the best epoch
    return chosen, metrics


def _tokens(data) -> int:
    return sum(len(text.ids) for text in data.texts)
