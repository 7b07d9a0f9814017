"""`mini-ee reproduce`: run all cases of a recipe with all their seeds, and write the pages made from their JSON."""

import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import torch
from filelock import FileLock

from mini_ee.experiments.measures import ON_A_GPU
from mini_ee.experiments.page_data import read_data
from mini_ee.experiments.pages import check_is_page, heading, page_of
from mini_ee.experiments.pictures import draw, draw_sizes, draw_verdicts
from mini_ee.experiments.recipe import Case, cases_named, cases_of, load_recipe, select
from mini_ee.experiments.result_page import overview_figures, pages_of
from mini_ee.experiments.trainings import CaseLocked, Sources, is_done, run_case, run_in_turns
from mini_ee.experiments.verdicts import LEAST_SEEDS
from mini_ee.lab.data.files import write_bytes
from mini_ee.lab.evaluation.plots import can_draw

OVERVIEW = ("README", "judging")


def reproduce(
    paper: str,
    *,
    only: str | None = None,
    quick: bool = False,
    seeds: tuple[int, int | None] = (0, None),
    sources: Path | None = None,
    out: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> dict:
    """Train and measure what is missing; write OUT/PAPER.md, its details and pictures, OUT/README.md, OUT/judging.md.

    seeds: the first seed, and the number of seeds of each case; None: as many as the page of the case shows. All cases
    run with the first seed before any runs with the second. Results of an earlier call are used again, also if that
    call was interrupted. A case that another process is running is left to that process, so several calls share the
    work. device: of the trainings; times are of the CPU. Cases that need a GPU are left out if there is none. Raises
    WrongArguments, before anything runs, if a model, a task or the device is missing, or a page is another file.
    """
    begin, recipe = time.perf_counter(), load_recipe(paper, quick)
    out = out or Path("results-quick" if quick else "results")
    folder = out / paper
    opened = Sources(sources, folder / "runs", device)
    cases = _possible(cases_named(recipe if only is None else select(recipe, only), cases_of(recipe)), say)
    check_is_page(out / f"{paper}.md", f"# {recipe['title']}")
    for name in OVERVIEW:
        check_is_page(out / f"{name}.md", heading(name))
    (first, count), usual = seeds, 1 if quick else LEAST_SEEDS
    runs = [(case, first + k) for case in cases.values() for k in range(count or case.seeds or usual)]
    runs.sort(key=itemgetter(1))
    missing = [case for case, seed in runs if not is_done(folder, case, seed)]
    for case in missing:
        opened.check(case)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{len(cases)} cases, {len(runs)} runs with all seeds; {len(missing)} to run.")
    pages = out / ".pages.lock"

    def run(case: Case, seed: int) -> bool:
        reference = cases.get(case.reference, case)
        if is_done(folder, case, seed):
            return False
        if reference != case and not is_done(folder, reference, seed):
            raise CaseLocked(reference.name)
        run_case(folder, case, seed, opened, say)
        with FileLock(pages):
            write_page(paper, recipe, out)
        return True

    ran = run_in_turns([(case.name, case, seed) for case, seed in runs], run, say)
    with FileLock(pages):
        path = write_page(paper, recipe, out)
        write_overview(out, quick)
    say(f"Page: {path}")
    return {"paper": paper, "page": str(path), "ran": ran, "wall_seconds": time.perf_counter() - begin}


def _possible(cases: dict[str, Case], say: Callable[[str], None]) -> dict[str, Case]:
    """Those that are trained, without those that need a GPU, if there is none."""
    cases = {name: case for name, case in cases.items() if not case.of}
    unable = [name for name, case in cases.items() if case.measure == ON_A_GPU and not torch.cuda.is_available()]
    if unable:
        say(f"{len(unable)} of {len(cases)} cases need a GPU and are left out: {', '.join(unable)}.")
    return {name: case for name, case in cases.items() if name not in unable}


def write_page(paper: str, recipe: dict, out: Path) -> Path:
    """Write the pages and the pictures of a paper from the JSON of its cases; returns the path of the first page."""
    data = read_data(out / paper, recipe)
    for picture in recipe["pictures"] if can_draw() else []:
        draw(out / paper / picture["file"], picture, data)
    for path, text in pages_of(paper, recipe, out).items():
        write_bytes(out / path, text.encode())
    return out / f"{paper}.md"


def write_overview(out: Path, quick: bool) -> None:
    """Write OUT/README.md, the verdicts of all papers that have a page in OUT, their picture, and OUT/judging.md."""
    figures = overview_figures(out, quick)
    if can_draw():
        claims = {paper["title"]: paper["claims"] for paper in figures["papers"].values()}
        draw_verdicts(out / "verdicts.png", claims)
        draw_sizes(out / "paper-sizes.png", claims)
    for name in OVERVIEW:
        write_bytes(out / f"{name}.md", page_of(name, figures).encode())
