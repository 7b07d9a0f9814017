"""Pages of measurements: OUT/NAME.md is made from OUT/NAME.json, which `--measure` writes.

The module of a page, NAME_page in this folder, has
    PARTS        part -> function (sources, work) that measures it and returns keys of the JSON, among them the name of
                 the part; `work` is a folder for trained runs, which later calls use again
    PAGE_TEXT    the template of the page
    page         figures -> the page as Markdown
    draw         (figures, folder) -> None: writes the pictures of the page; only pages with pictures have it
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from filelock import FileLock

from mini_ee import WrongArguments
from mini_ee.data.files import read_json, write_bytes, write_json
from mini_ee.experiments.markdown import check_is_page

MEASURED = ("onnx", "guarantees", "shards", "serving", "embeddings", "add-exits")


def make_page(
    name: str,
    measure: list[str] | None = None,
    sources: Path | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict:
    """Measure some parts of a page, then write the page if its JSON has all parts.

    measure: names of parts; empty: all parts; None: only write the page. Raises WrongArguments, before anything
    is measured, if a part is unknown, the page would overwrite another file, or the JSON does not exist.
    """
    module, out = import_module(f"{__name__}.{name.replace('-', '_')}_page"), out or Path("results")
    json_path, page_path, parts = out / f"{name}.json", out / f"{name}.md", list(module.PARTS)
    if unknown := [part for part in measure or () if part not in parts]:
        raise WrongArguments(f"--measure: expected some of {', '.join(parts)}; found {', '.join(unknown)}")
    if measure is None and not json_path.exists():
        raise WrongArguments(f"{json_path}: no such file; `mini-ee reproduce {name} --measure` writes it")
    check_is_page(page_path, module.PAGE_TEXT.partition("\n")[0])
    measured = [] if measure is None else [part for part in parts if part in (measure or parts)]
    for part in measured:
        say(f"{name}: measuring {part}")
        _measure(module.PARTS[part], json_path, sources)
    figures = read_json(json_path)
    missing = [part for part in parts if part not in figures]
    if missing:
        say(f"{page_path} is not written yet; missing parts: {', '.join(missing)}")
    else:
        if hasattr(module, "draw"):
            module.draw(figures, out)
        write_bytes(page_path, module.page(figures).encode())
        say(f"Page: {page_path}")
    return {"paper": name, "page": None if missing else str(page_path), "measured": measured}


def _measure(part: Callable, json_path: Path, sources: Path | None) -> None:
    """Measure one part and add it to the JSON. Other processes may measure other parts at the same time."""
    from mini_ee.experiments.trainings import Sources

    work = json_path.parent / json_path.stem / "runs"
    work.mkdir(parents=True, exist_ok=True)
    found = part(Sources(sources, work), work)
    with FileLock(json_path.with_suffix(".lock")):
        write_json(json_path, (read_json(json_path) if json_path.exists() else {}) | found)
