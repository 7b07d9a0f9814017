"""The adapters of LoRAExit on disk: PEFT's layout, one folder per exit.

PEFT is Hugging Face's library for adapters, and its PeftModel loads these folders (tests/lab/parity/test_peft.py).
"""

import json
from pathlib import Path

from torch import nn

from mini_ee.lab.backbones.hub import hugging_face_names
from mini_ee.lab.backbones.layers import StackedLinear
from mini_ee.lab.backbones.targets import TARGETS
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.data.files import file_sha256, read_json, write_bytes

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's names


def save_adapters(model: nn.Module, folder: Path, base: str) -> dict[str, str]:
    """Write exit_{e}/adapter_model.safetensors and adapter_config.json of a LoRAExits; return their checksums.

    base: the folder or name of the backbone, for PEFT. A checksum is over the tensors, or over the config's bytes.
    """
    digests = {}
    for k, layer in enumerate(model.exits):
        exit_folder = f"exit_{layer}"
        (folder / exit_folder).mkdir()
        tensors = {  # PEFT stores A and B transposed
            name: getattr(model.adapters[k][stored][target], part).T
            for (stored, target, part), name in _peft_names(model, k).items()
        }
        digests[f"{exit_folder}/{TENSORS}"] = write_tensors(folder / exit_folder / TENSORS, tensors)
        config = _peft_config(model, k) | {
            "base_model_name_or_path": base,
            "lora_dropout": 0.0,
            "inference_mode": True,
            "task_type": None,
        }
        path = folder / exit_folder / CONFIG
        write_bytes(path, (json.dumps(config, indent=2) + "\n").encode())
        digests[f"{exit_folder}/{CONFIG}"] = file_sha256(path)
    return digests


def load_adapters(model: nn.Module, folder: Path, digests: dict[str, str]) -> None:
    """Read the files of save_adapters into a LoRAExits of the same shape.

    digests: checksums by file; a file without one is not checked. Raises FileNotFoundError for a missing file,
    ValueError for a damaged file and for adapters of another shape.
    """
    for k, layer in enumerate(model.exits):
        exit_folder = f"exit_{layer}"
        path = folder / exit_folder / CONFIG
        _check_config(path, _peft_config(model, k), digests.get(f"{exit_folder}/{CONFIG}"))
        path = folder / exit_folder / TENSORS
        tensors = read_tensors(path, digests.get(f"{exit_folder}/{TENSORS}"))
        names = _peft_names(model, k)
        if set(tensors) != set(names.values()):
            raise ValueError(f"{path}: the tensors do not fit exit {layer} with targets {', '.join(model.targets)}")
        for (stored, target, part), name in names.items():
            parameter = getattr(model.adapters[k][stored][target], part)
            if tensors[name].shape != parameter.T.shape:
                shape, wanted = tuple(tensors[name].shape), tuple(parameter.T.shape)
                raise ValueError(f"{path}: {name} must have shape {wanted}, found {shape}: another backbone or rank")
            parameter.data = tensors[name].float().T.contiguous()  # adapters in float16 are computed in float32


def _check_config(path: Path, expected: dict, digest: str | None) -> None:
    """Raise if adapter_config.json is missing or edited, or differs from the run's config.json."""
    adapter_config = read_json(path)
    if digest is not None and file_sha256(path) != digest:
        raise ValueError(f"{path}: damaged or edited: not the checksum in the run's config.json; train the run again")
    for key, value in expected.items():
        if adapter_config.get(key) != value:
            raise ValueError(
                f"{path}: expected {key} {value!r} as in the run's config.json, found {adapter_config.get(key)!r}; "
                f"train the run again"
            )


def _peft_config(model: nn.Module, k: int) -> dict:
    """The settings with which PEFT computes exit k as this project does."""
    return {
        "peft_type": "LORA",
        "r": model.rank,
        "lora_alpha": model.alpha,
        "target_modules": sorted({_peft_module(model, *place[:2]) for place in _peft_names(model, k)}),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _peft_names(model: nn.Module, k: int) -> dict[tuple[int, str, str], str]:
    """(stored layer, target, A or B) -> the tensor's name in PEFT."""
    return {
        (stored, target, part): f"base_model.model.{_peft_module(model, stored, target)}.lora_{part}.weight"
        for stored, adapters in enumerate(model.adapters[k])
        for target in adapters
        for part in "AB"
    }


def _peft_module(model: nn.Module, stored: int, target: str) -> str:
    linear, part = TARGETS[target]
    names = hugging_face_names(model.backbone.config.model_type, f"layers.{stored}.{linear}.weight")
    if len(names) == 1 and isinstance(getattr(model.backbone.layers[stored], linear), StackedLinear):
        return (
            f"{names[0].removesuffix('.weight')}.{target}"  # Hugging Face has one linear map: PEFT names no part of it
        )
    return names[part].removesuffix(".weight")
