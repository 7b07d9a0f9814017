"""Run an exported folder in torch, for machines without ONNX Runtime: Runtime(folder, segments=...)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mini_ee.export.torch_engine import read_weights
from mini_ee.lab.backbones.hub import empty_backbone, load_strict, without_memory
from mini_ee.lab.exits.generation import token_segments
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export.builder import SOME_ROWS
from mini_ee.lab.export.manifest import blaming_manifest, read_manifest
from mini_ee.lab.export.runtime import open_tokenizer
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import build_model


def torch_segments(folder: str | Path, device: str = "cpu") -> Segments | Callable[[str, int, int], Segments]:
    """The engine, for the argument `segments` of Runtime.

    Raises ValueError for weights in int8 or int4, which only ONNX Runtime can use, and what read_manifest raises.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    with blaming_manifest(folder):
        if (precision := manifest["precision"]).startswith("int"):
            raise ValueError(
                f"{folder}: expected float weights for --engine torch, found {precision}; export the run in float32"
            )
        model = _empty_model(folder, manifest)
        tensors = _whole(read_weights(folder), model) | _short_lists(model, manifest)
        load_strict(model, tensors, {name: (name,) for name in model.state_dict()}, folder)
        model = model.requires_grad_(False).eval().to(device)
        if manifest["unit"] == "tokens":
            return partial(token_segments, model)
        return model.segments(manifest["schedule"]) if "schedule" in manifest else model.segments()


def _empty_model(folder: Path, manifest: dict) -> nn.Module:
    """The exported model, without weights. Adapters of a decoder are already folded into its weights."""
    config = manifest | manifest.get("base", {}) | {"rank": None}
    with without_memory():
        backbone = empty_backbone(manifest["backbone"], lm_head=manifest["unit"] != "rows")
        if manifest["unit"] == "tokens" and len(manifest["exits"]) == 1:  # plain, or changed by a method
            return TokenExits(backbone, tuple(manifest["exits"]))
        if manifest["unit"] != "prompts":
            return build_model(load_method(config["method"]), manifest["unit"], backbone, config)
    return PromptModel(backbone, open_tokenizer(folder, manifest), tuple(manifest["exits"]))


def _short_lists(model: nn.Module, manifest: dict) -> dict[str, torch.Tensor]:
    """What lenses know of their short list, which graphs have as rows of the LM head."""
    if "short_list" not in manifest:
        return {}
    likely = torch.zeros(manifest["vocab_size"])
    likely[manifest["short_list"]] = 1
    return {f"heads.{k}.likely": likely.clone() for k in range(len(model.heads))}


def _whole(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters. A head to words may be stored for the label words alone: its other rows are zero."""
    names = model.state_dict()  # without constants of the graphs, and the encoder of a rule
    restored = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SOME_ROWS) in names}
    for name in [name for name in restored if name.endswith(SOME_ROWS)]:
        rows, whole = restored.pop(name), name.removesuffix(SOME_ROWS)
        if whole not in restored:
            restored[whole] = rows.new_zeros(names[whole].shape)
            restored[whole][model.label_tokens] = rows
    return restored
