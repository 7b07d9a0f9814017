"""The files from which a model is read, by which an interrupted call recognises what it was started with. No torch."""

import json
from pathlib import Path

from mini_ee.lab.data.files import file_sha256

UNREAD = (".bin", ".gguf", ".h5", ".log", ".md", ".msgpack", ".onnx", ".ot", ".pkl", ".png", ".pt", ".pth", ".py")
"""Suffixes of files in Hugging Face folders that are never read: weights in other formats, and what describes them."""


def model_sha256s(folder: Path) -> dict[str, str]:
    """The checksums of the files of a Hugging Face folder, by name.

    Those of the modules of sentence-transformers, and of the base model of an adapter, are among them if they are in
    folders of this machine. A file that cannot be understood is refused elsewhere.
    """
    folders = {"": folder, "base/": _named(folder / "adapter_config.json", "base_model_name_or_path", folder)}
    modules = _content(folder / "modules.json")
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    folders |= {f"{path}/": folder / path for path in ("1_Pooling", *paths) if path and isinstance(path, str)}
    return {
        f"{prefix}{path.name}": file_sha256(path)
        for prefix, parent in folders.items()
        for path in sorted(parent.iterdir() if parent is not None and parent.is_dir() else ())
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() not in UNREAD
    }


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The names of the files that were changed, added or removed."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _named(path: Path, key: str, folder: Path) -> Path | None:
    """The folder that a JSON file names, relative to here or to the folder of the file."""
    content = _content(path)
    name = content.get(key) if isinstance(content, dict) else None
    places = (Path(name), folder / name) if isinstance(name, str) else ()
    return next((place for place in places if place.is_dir()), None)


def _content(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
