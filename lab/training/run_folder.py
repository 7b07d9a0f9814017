"""A trained model on disk. The folder is written whole or not at all, and checked when it is read.

run/config.json          format_version, method, unit, settings, backbone, exits, pool, rule, task or text, max_length,
                         seed, training, versions, and the checksums of the other files; datastore/ has its own
run/model.safetensors    what the method trained: heads, policy, and the backbone if it was fine-tuned
run/exit_{e}/            LoRA exits: the adapters of the exit after layer e, in PEFT's layout
run/checkpoint/          SLEB: the short decoder, as a checkpoint like any other
run/backbone/            a backbone fine-tuned through prompts, or a fine-tuned decoder, as a checkpoint
run/datastore/           RAEE: the files of methods/raee_datastore.py
run/metrics.json         measurements of the training
run/tokenizer.json       the backbone's
"""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from mini_ee import __version__
from mini_ee.lab.backbones.backbone import check_integer
from mini_ee.lab.backbones.hub import (
    BUILT_IN_DECODER,
    BUILT_IN_MODEL,
    backbone_sha256,
    empty_backbone,
    load_backbone,
    load_strict,
    save_backbone,
    without_memory,
)
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.confidence import labels_of, usual_measure
from mini_ee.lab.data.files import (
    atomic_folder,
    file_sha256,
    how_to_download,
    read_json,
    run_config,
    sole_writer,
    write_json,
)
from mini_ee.lab.data.tokenizer import Encoded, Tokenizer, check_rows, in_order
from mini_ee.lab.data.values import shortened
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.recording import exited_rows
from mini_ee.lab.rules import Rule, rule_from_dict
from mini_ee.lab.segments import Segments
from mini_ee.lab.token_tasks import Span, TokenTask
from mini_ee.lab.training.method import Method, configured, load_method
from mini_ee.lab.training.unit import Unit, load_unit

if TYPE_CHECKING:
    from mini_ee.lab.exits.generation import Sampling
    from mini_ee.lab.training.default_rule import Chosen

FORMAT_VERSION = 2
OWN_BACKBONE = "backbone"
PARTS = "tokenizer.json", "metrics.json"
WRITTEN_TOKENS = 100


class Answer(NamedTuple):
    """The result for one example."""

    label: str | float | dict[str, float] | list | Span
    """A number for regression; of several labels at once their probabilities; a TokenLabel of each token; or a Span."""
    confidence: float | None  # the largest probability, or that of the weakest label; None for regression
    layers: int | float  # at its exit; if tokens exit, their mean


class Run(NamedTuple):
    """A loaded run."""

    folder: Path
    config: dict
    model: nn.Module
    tokenizer: Tokenizer
    rule: Rule
    schedule: list[list[int]] | None = None  # of LoRA streams
    metrics: dict = {}  # measurements of the training

    is_exported = False  # True of an export.runtime.Runtime

    @property
    def unit(self) -> str:
        """The name of what exits, see unit.py."""
        return self.config["unit"]

    @property
    def generates(self) -> bool:
        """Whether the model continues texts, and predicts no labels."""
        return load_unit(self.unit).generates

    @property
    def embeds(self) -> bool:
        """Whether the model returns embeddings, and predicts no labels."""
        return load_unit(self.unit).embeds

    @property
    def default_measure(self) -> str:
        """The confidence measure of a rule, if none is named."""
        usual = load_unit(self.unit).default_measure
        return usual if self.generates else usual_measure(self.multi_label, self.token_task is not None)

    @property
    def exits(self) -> tuple[int, ...]:
        return self.model.exits

    def segments(self) -> Segments:
        """What early_exit drives."""
        return self.model.segments(self.schedule) if self.schedule else self.model.segments()

    def whole_model(self) -> Segments:
        """The full model, with the last exit only; the baseline of speed-ups."""
        return self.segments().whole()

    @property
    def label_names(self) -> list[str]:
        """Empty for regression."""
        return self.config["task"]["label_names"]

    @property
    def multi_label(self) -> bool:
        """Whether an example may have several labels at once."""
        return self.config.get("task", {}).get("multi_label", False)

    @property
    def token_task(self) -> TokenTask | None:
        return TokenTask.of(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, with stacked copies of adapters. LoRAExit, Tables 2 and 10."""
        segments = self.segments()
        return getattr(segments, "bytes_held", sum(parameter.nbytes for parameter in self.model.parameters()))

    def encode(self, texts) -> Encoded:
        """Tokenize texts of one sentence or two, checked against the backbone."""
        return encode(self.tokenizer, texts, self.model.backbone)

    def classify(self, texts: Sequence[str | tuple[str, str]], batch_size: int = 32) -> list[Answer]:
        """The prediction for each text, or pair of texts, at the exit that the run's rule decides.

        Raises ValueError like Runtime.run.
        """
        if self.generates or self.embeds:
            actual = "a decoder; use generate" if self.generates else "a sentence encoder; use embed"
            raise WrongArguments(f"{self.folder}: expected a classifier, found {actual}")
        check_rows(texts, self.config["task"]["texts"])
        if not len(texts):
            return []
        encoded, segments, answers = self.encode(texts), self.segments(), []
        for rows in in_order(len(encoded), batch_size):
            inputs = encoded.batch(rows)
            result = early_exit(segments, self.rule, inputs)
            answers += map(Answer, *labels_of(self, result.logits, inputs), result.cost.depth.tolist())
        return answers

    def embed(self, texts: Sequence[str], batch_size: int = 32, prompt_name: str | None = None) -> np.ndarray:
        """The embedding of each text at the exit that the run's rule decides, (N, d) float32.

        prompt_name: of the encoder's prompts (None: its default one). Raises ValueError like Runtime.embed.
        """
        from mini_ee.lab.data.sentence_prompts import with_prompt

        if not self.embeds:
            raise WrongArguments(f"{self.folder}: expected a sentence encoder, found a run of {self.config['method']}")
        check_rows(texts, 1)
        encoded = self.encode(with_prompt(self.tokenizer, texts, prompt_name))
        return exited_rows(self.segments(), self.rule, encoded, batch_size, self.model.num_labels)[0]

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = WRITTEN_TOKENS,
        missing_kv: str | None = None,
        sampling: "Sampling | None" = None,
        seed: int = 0,
    ) -> list[str]:
        """The text that the decoder generates after each prompt, by the run's rule. sampling: None is greedy."""
        from mini_ee.lab.exits.decoding import gather

        if not self.generates:
            actual = "a sentence encoder; use embed" if self.embeds else "a classifier; use classify"
            raise WrongArguments(f"{self.folder}: expected a decoder, found {actual}")
        check_rows(prompts, 1)
        if not len(prompts):
            return []
        ids = [self.tokenizer.ids_of(prompt) for prompt in prompts]
        settings = {"max_new_tokens": max_new_tokens, "seed": seed} | ({"sampling": sampling} if sampling else {})
        steps = self.model.generate(ids, self.rule, missing_kv=missing_kv or self.model.missing_kv, **settings)
        written = gather(steps, len(ids))
        decode = self.tokenizer.backend.decode
        return [decode(given + generation.tokens)[len(decode(given)) :] for given, generation in zip(ids, written)]


def encode(tokenizer: Tokenizer, texts, backbone) -> Encoded:
    """Tokenize texts for a backbone. Raises ValueError if the tokenizer returns ids that the backbone does not have."""
    return tokenizer.encode_for(texts, backbone.config.vocab_size, backbone.config.token_types)


def versions() -> dict[str, str]:
    """The versions of Python and the libraries, for every JSON answer."""
    return {
        "mini_ee": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def check_device(device: str) -> None:
    """Raise WrongArguments for a device that torch cannot use."""
    try:
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("expected cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise WrongArguments(f"--device {device}: cannot be used here ({reason}); use cpu") from None


def build_model(method: Method, unit: str, backbone, config: dict) -> nn.Module:
    """The model of a method, its own or the unit's. config: exits, settings; for rows pool, head and num_labels."""
    exits, settings = tuple(config["exits"]), configured(method, config["settings"])
    shape = (1, None) if unit == "tokens" else (config["num_labels"], config["pool"])
    if method.model is not None:
        model = method.model(backbone, exits, *shape, settings)
    elif unit == "tokens":
        from mini_ee.lab.exits.token_exits import TokenExits

        model = TokenExits(backbone, exits, "copy", method.policy, config["rank"])
    elif unit == "embeddings":
        from mini_ee.lab.exits.embedding_exits import EmbeddingExits, TrainedEncoder

        kind = TrainedEncoder if method.trains_encoder else EmbeddingExits
        modules = config.get("modules", ())  # older runs have none
        model = kind(backbone, exits, *shape, config["normalize"], method.policy, modules)
    else:
        from mini_ee.lab.exits.row_exits import RowExits

        model = RowExits(backbone, exits, *shape, method.policy)
    model.token_task = TokenTask.of(config)
    model.use_heads(config.get("head") or "dense")
    return model


# ---- Writing ----


def save_run(
    folder: Path, model: nn.Module, tokenizer: Tokenizer, chosen: "Chosen", known_config: dict, metrics: dict
) -> None:
    """Write a run folder, whole or not at all.

    known_config: method, unit, settings, backbone (folder and sha256 of the initial checkpoint), task or text, seed,
    training. The backbone is only written if the training changed it. Raises FileExistsError if the folder exists.
    """
    unit, config = load_unit(model.unit), {"format_version": FORMAT_VERSION} | known_config
    config |= {"exits": list(model.exits), "pool": model.pool, "head": model.head}
    config |= {"num_labels": model.num_labels} if unit.embeds else {}
    config |= {"rule": chosen.rule.to_dict(), "guarantee": chosen.guarantee}
    config |= {"curve": chosen.curve} if chosen.curve else {}
    config |= {"max_length": tokenizer.max_length, "versions": versions()}
    with atomic_folder(folder) as partial:
        digests, changed = model.save_parts(partial, known_config["backbone"]["folder"]), model.holds_backbone
        if unit.name == "prompts":
            changed, config["prompt"] = bool(known_config["training"]["shots"]), tokenizer.prompt.to_dict()
        else:
            digests["model.safetensors"] = write_tensors(partial / "model.safetensors", model.own_state())
        if changed and not unit.reads_lm_head:
            config["backbone"] = config["backbone"] | {"config": model.backbone.config.to_dict()}
        elif changed:
            save_backbone(model.backbone, partial / OWN_BACKBONE)
            tokenizer.save_beside_model(partial / OWN_BACKBONE)  # a checkpoint like any other
            config["backbone"] = {"folder": OWN_BACKBONE, "sha256": backbone_sha256(partial / OWN_BACKBONE)}
        tokenizer.save(partial / "tokenizer.json")
        write_json(partial / "metrics.json", metrics)
        config["files"] = digests | {name: file_sha256(partial / name) for name in PARTS}
        write_json(partial / "config.json", config)


def write_rule(
    folder: str | Path, rule: Rule, guarantee: dict | None, exit_counts: list[int], curve: dict | None = None
) -> None:
    """Write another rule, its held-out exit counts and its curve into a run. The other files do not change.

    curve: see threshold_curve.py; None: requests cannot ask for an agreement or a loss.
    Raises FileExistsError if another process is writing the run.
    """
    path = Path(folder) / "config.json"
    rule_fields = {"rule": rule.to_dict(), "guarantee": guarantee, "exit_counts": exit_counts}
    rule_fields |= {"curve": curve} if curve else {}
    with sole_writer(path):
        config = read_json(path, signed="format_version")
        for name in ("promise", "curve"):  # promise: the name of guarantee in runs of 0.1.0
            config.pop(name, None)
        write_json(path, config | rule_fields)


def training_folder(folder: Path) -> Path:
    """The folder of the state of an unfinished training that will become `folder`."""
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}.training")


# ---- Reading ----


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run, not a checkpoint."""
    return run_config(folder) is not None


def load_run(folder: str | Path, backbone_folder: str | Path | None = None) -> Run:
    """Read a run folder and check all of it.

    backbone_folder: folder of the backbone, if the run does not contain it and it moved. Raises FileNotFoundError if
    there is no run, ValueError if it is damaged or has another format.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        unfinished, hint = training_folder(folder), how_to_download(folder)
        if any(unfinished.glob("*")):
            hint = f"; {unfinished} is an unfinished training, continue it with --resume"
        elif is_run(folder / "run"):
            hint = f"; did you mean {folder / 'run'}?"
        raise FileNotFoundError(f"{folder}: no run here; expected a folder that `mini-ee train` wrote{hint}")
    config = read_json(folder / "config.json", signed="format_version")
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        advice = "train it again" if version == 1 else "give a folder that `mini-ee train` wrote"
        raise ValueError(f"{folder}: expected a run of format_version {FORMAT_VERSION}, found {version!r}; {advice}")
    if "promise" in config:  # the name of guarantee in runs of 0.1.0
        config["guarantee"] = config.pop("promise")
    try:
        return _read_run(folder, config, backbone_folder)
    except KeyError as error:
        raise ValueError(f"{folder}: config.json has no key {error}; train the run again") from None
    except (TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{folder}: config.json has a value of a wrong type ({reason}); train the run again") from None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}" if str(folder) not in str(error) else str(error)) from None


def _read_run(folder: Path, config: dict, backbone_folder: str | Path | None) -> Run:
    for name in PARTS:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; train the run again")
        if file_sha256(folder / name) != config["files"][name]:
            raise ValueError(
                f"{folder / name}: damaged: expected the checksum in config.json, found another; train the run again"
            )
    _check_values(config)
    model, tokenizer = _read_model(folder, config, backbone_folder)
    rule = rule_from_dict(config["rule"])
    rule = rule.opened(folder, config["retrieval"], model.backbone) if "retrieval" in config else rule
    rule.check(len(model.exits))
    return Run(folder, config, model.eval(), tokenizer, rule, metrics=read_json(folder / "metrics.json"))


def _check_values(config: dict) -> None:
    """Raise ValueError for values of config.json that no other check finds."""
    unit = load_unit(config["unit"])
    if unit.generates:
        return
    check_integer("max_length", config["max_length"])
    if unit.embeds:
        return check_integer("num_labels", config["num_labels"])
    names = config["task"]["label_names"]
    check_integer("texts", config["task"]["texts"], most=2)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"label_names must be a list of names, found {shortened(names)}; train the run again")
    expected = max(1, len(names))
    if unit.name == "rows" and config["num_labels"] != expected:
        raise ValueError(
            f"num_labels must be {expected}, the number of label names, found "
            f"{shortened(config['num_labels'])}; train the run again"
        )


def _read_model(folder: Path, config: dict, backbone_folder) -> tuple[nn.Module, Tokenizer]:
    """The model and the tokenizer of a run."""
    unit, file = load_unit(config["unit"]), folder / "tokenizer.json"
    if unit.name == "prompts":
        from mini_ee.lab.data.prompt_templates import Prompt, PromptTokenizer
        from mini_ee.lab.exits.prompt_exits import PromptModel

        prompt = Prompt.from_dict(config["prompt"])
        tokenizer = PromptTokenizer(Tokenizer.from_file(file).backend, config["max_length"], prompt)
        backbone = backbone_of(config["backbone"], folder, backbone_folder)
        return PromptModel(backbone, tokenizer, tuple(config["exits"])), tokenizer
    model = _trained_model(unit, folder, config, backbone_folder)
    if unit.generates:
        model.fold()
        return model, Tokenizer.from_file(file, None)  # texts are not cut, even if config.json has a max_length
    tokenizer = Tokenizer.from_file(file, config["max_length"])
    if unit.embeds and "prompts" in config:  # an older run has none
        from mini_ee.lab.data.sentence_prompts import PromptedTokenizer

        tokenizer = PromptedTokenizer(
            tokenizer.backend, config["max_length"], config["prompts"], config["default_prompt_name"]
        )
    return model, tokenizer


def _trained_model(unit: Unit, folder: Path, config: dict, backbone_folder) -> nn.Module:
    """The trained exits, on the backbone that the run contains or names."""
    source = config["backbone"]
    base = config | config.get("base", {})  # for RAEE: method and settings of the run that it was collected on
    method = load_method(base["method"])
    if "config" in source:
        with without_memory():
            model = build_model(method, unit.name, empty_backbone(source["config"]), base)
    else:
        backbone = backbone_of(source, folder, backbone_folder)
        model = build_model(method, unit.name, backbone if unit.reads_lm_head else backbone.without_heads(), base)
    path = folder / "model.safetensors"
    tensors = read_tensors(path, config["files"]["model.safetensors"])
    load_strict(model, tensors, {name: (name,) for name in model.own_state()}, path)
    model.load_parts(folder, config["files"])
    return model


def backbone_of(source: dict, run: Path, folder: str | Path | None):
    """The backbone of a run. Raises an error for another one, because adapters fit only one backbone."""
    there = Path(folder or run / source["folder"])  # an absolute path stays as it is
    if folder is None and not there.is_dir():  # or a built-in one of this installation
        built_in = (path for path in (BUILT_IN_MODEL, BUILT_IN_DECODER) if path.is_dir())
        there = next((path for path in built_in if backbone_sha256(path) == source["sha256"]), there)
    folder = there
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run}: its backbone was in {folder}, which does not exist; give its folder with --model"
        )
    if backbone_sha256(folder) != source["sha256"]:
        raise ValueError(
            f"{run}: was trained on another backbone than the one in {folder}; give the right one with --model"
        )
    return load_backbone(folder)
