"""A checkpoint as a run: every layer is an exit, read through a prompt and the checkpoint's own head. RAEE collects at
such exits. Nothing is trained but, with `shots`, the backbone.

Source: RAEE (see methods/raee.py), whose main table is zero-shot. `few_shot` is LM-BFF's prompt-based fine-tuning (Gao
et al. 2021). The settings, template to shots, are those of RAEE's Config.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.hub import backbone_class, backbone_sha256, load_backbone, read_config
from mini_ee.lab.data.files import json_sha256
from mini_ee.lab.data.model_files import model_sha256s
from mini_ee.lab.data.prompt_templates import PROMPTS, Prompt, PromptTokenizer, check_prompt, prompt_of
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.prompt_exits import KIND_READ_AT, PromptModel, draw_shots
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.rules import Never
from mini_ee.lab.training import ranks
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.run_folder import encode, save_run, training_folder
from mini_ee.lab.training.stages import Stage
from mini_ee.lab.training.state import STATE, Saved
from mini_ee.lab.training.train_run import Request, exits_of
from mini_ee.train import task_loss


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
        refuse_state(unfinished)
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
    known_config: dict[str, Any] = {"method": request.name, "unit": "prompts", "settings": {}, "backbone": source}
    known_config |= {"task": task.to_config(), "seed": request.seed, "training": training}
    base = unfinished / "base"
    if ranks.rank() == 0:
        shutil.rmtree(base, ignore_errors=True)
        unfinished.mkdir(parents=True, exist_ok=True)
        save_run(base, model, tokenizer, Chosen(Never(), None), known_config, {"epochs": epochs})
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
            actual = ",".join(config.words)
            raise ValueError(f"--words: expected a word for each class, as 0=terrible,1=great, found {actual}")
        words = {key.strip(): word.strip() for key, _, word in pairs}
        return Prompt.from_dict({"template": config.template, "words": words}, request.task.label_names)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def refuse_state(state_folder: Path) -> None:
    """Raise FileExistsError if the folder has a training that can be resumed."""
    if (state_folder / STATE).exists():
        what = "an unfinished training is there, and it is not a collection"
        raise FileExistsError(f"{state_folder}: {what}; remove it or name another folder")
