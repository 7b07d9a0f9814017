"""Pages of measurements: OUT/NAME.md is made from OUT/NAME.json, which `--measure` writes. Each page ends with how its
parts were measured: processor, core hours, versions, and checksums of the data.

The page is written by hand, ../pages/NAME.md. The module of its figures, NAME_page in this folder, has
    PARTS        part -> function (sources, work) that measures it and returns keys of the JSON, among them the name of
                 the part; `work` is a folder for trained runs, which later calls use again
    page_figures the JSON -> the figures that the page names, besides the JSON itself
    draw         (figures, folder) -> None: writes the pictures of the page; only pages with pictures have it
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from filelock import FileLock

from mini_ee.experiments.pages import check_is_page, heading, write_page
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.errors import WrongArguments

MADE = "measured"  # key of the JSON: part -> how it was measured
MEASURED = (
    "onnx",
    "guarantees",
    "shards",
    "serving",
    "embeddings",
    "add-exits",
    "token-tasks",
    "alternatives",
    "language-model",
)


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
    module, out = _module(name), out or Path("results")
    json_path, page_path, parts = out / f"{name}.json", out / f"{name}.md", list(module.PARTS)
    if unknown := [part for part in measure or () if part not in parts]:
        raise WrongArguments(f"--measure: expected some of {', '.join(parts)}; found {', '.join(unknown)}")
    if measure is None and not json_path.exists():
        raise WrongArguments(f"{json_path}: no such file; `mini-ee reproduce {name} --measure` writes it")
    check_is_page(page_path, heading(name))
    measured = [] if measure is None else [part for part in parts if part in (measure or parts)]
    for part in measured:
        say(f"{name}: measuring {part}")
        _measure(part, module.PARTS[part], json_path, sources)
    figures = read_json(json_path)
    missing = [part for part in parts if part not in figures.get(MADE, {})]
    if missing:
        say(f"{page_path} is not written yet; missing parts: {', '.join(missing)}")
    else:
        if hasattr(module, "draw"):
            module.draw(figures, out)
        say(f"Page: {write_page(name, page_figures(name, figures), out)}")
    return {"paper": name, "page": None if missing else str(page_path), "measured": measured}


def page_figures(name: str, figures: dict) -> dict:
    """All that the template of a page may name: its JSON, what its module makes of it, and how parts were measured."""
    made = [{"part": part} | figures[MADE][part] for part in _module(name).PARTS]
    data = {data_name: digest for one in made for data_name, digest in one["data"].items()}
    return figures | _module(name).page_figures(figures) | {MADE: made, "data": sorted(data.items()), "page": name}


def _module(name: str):
    return import_module(f"{__name__}.{name.replace('-', '_')}_page")


def _measure(name: str, part: Callable, json_path: Path, sources: Path | None) -> None:
    """Measure one part and add it to the JSON. Other processes may measure other parts at the same time."""
    from mini_ee.experiments.trainings import Sources, how_made, sha256_of

    work = json_path.parent / json_path.stem / "runs"
    work.mkdir(parents=True, exist_ok=True)
    seconds_path, begin, read = work / f"{name}.seconds.json", sum(os.times()[:4]), Sources(sources, work)
    seconds = read_json(seconds_path)["seconds"] if seconds_path.exists() else 0.0
    try:
        part_figures = part(read, work)
    finally:  # earlier calls count, because their trained runs are used again; so does one that is interrupted
        seconds += sum(os.times()[:4]) - begin  # of this process and those it started
        write_json(seconds_path, {"seconds": seconds})
    made = how_made() | {
        "core_hours": float(f"{seconds / 3600:.3g}"),
        "data": {data_name: sha256_of(path) for (kind, data_name), path in read.paths.items() if kind == "data"},
    }
    with FileLock(json_path.with_suffix(".lock")):
        figures = read_json(json_path) if json_path.exists() else {}
        write_json(json_path, figures | part_figures | {MADE: figures.get(MADE, {}) | {name: made}})
