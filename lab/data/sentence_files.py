"""modules.json of sentence-transformers, which says where the transformer is: it may be in a folder of its own."""

import json
import os
from pathlib import Path

from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model, each with its type and folder."""


SETFIT_CONFIG, SETFIT_SAVED, SETFIT_EXPORTED = "config_setfit.json", "model_head.pkl", "model_head.safetensors"


def is_setfit(folder: Path) -> bool:
    """Whether a folder is a SetFit model."""
    return any((folder / name).is_file() for name in (SETFIT_CONFIG, SETFIT_SAVED, SETFIT_EXPORTED))


def listed_modules(folder: Path) -> list[dict]:
    """The modules of modules.json in their order, each with its `type` and a `path` inside the folder.

    Raises WrongArguments for another content.
    """
    path = folder / MODULES
    try:
        modules = json.loads(read_text(path))
    except ValueError as error:
        raise WrongArguments(f"{path}: expected a list of modules, found no JSON ({error})") from None
    listed = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not listed or not all(isinstance(module.get(key), str) for module in modules for key in ("type", "path")):
        raise WrongArguments(f"{path}: expected a list of modules with type and path, found {shortened(modules)}")
    for place in (Path(module["path"]) for module in modules):
        if place.is_absolute() or ".." in place.parts:
            raise WrongArguments(f"{path}: expected paths inside the folder, found {place}")
    return modules


def transformer_folder(folder: str | os.PathLike) -> Path:
    """The folder with config.json, weights and tokenizer: the one that modules.json names, else the folder itself.

    Raises WrongArguments for a modules.json without a transformer.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return folder
    modules = {module["type"].rpartition(".")[2]: module["path"] for module in listed_modules(folder)}
    if "Transformer" not in modules:
        kinds = ", ".join(modules) or "none"
        raise WrongArguments(
            f"{folder / MODULES}: expected a Transformer among the modules, found {kinds}: not supported"
        )
    return folder / modules["Transformer"]
