"""Where the transformer is in the folder of a model: sentence-transformers may put it in a folder of its own."""

import json
import os
from pathlib import Path

MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model, each with its type and folder."""


def transformer_folder(folder: str | os.PathLike) -> Path:
    """The folder with config.json, weights and tokenizer: the one that modules.json names, else the folder itself."""
    folder = Path(folder)
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        paths = [module["path"] for module in modules if module["type"].endswith(".Transformer")]
        return folder / paths[0] if paths[0] else folder
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return folder  # there is no such file, or sentence_encoder.py refuses it
