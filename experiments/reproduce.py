"""`mini-ee reproduce`: all seeds of what a recipe's claims, tables and pictures read, and the pages made from that."""

import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from filelock import FileLock

from mini_ee.data.files import write_bytes
from mini_ee.evaluation.plots import can_draw
from mini_ee.experiments.markdown import check_is_page
from mini_ee.experiments.pictures import draw
from mini_ee.experiments.recipe import PAPERS, cases_named, cases_of, load_recipe, select
from mini_ee.experiments.result_page import CLAIMS, OTHERS, claims_page, in_short, judge, page, read_data
from mini_ee.experiments.trainings import Held, Sources, is_kept, run_case
from mini_ee.experiments.verdicts import LEAST_SEEDS


def reproduce(
    paper: str,
    *,
    only: str | None = None,
    quick: bool = False,
    seeds: tuple[int, int | None] = (0, None),
    sources: Path | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict:
    """Train and measure what is missing, then write OUT/PAPER.md, its pictures, and OUT/README.md.

    seeds: the first, and how many of each case; None: as many as its page has. All cases are run with the first before
    the second is begun. What is kept of an earlier call, of a killed one too, is not run again; what another process is
    running is left to it, so that several calls share the work. Raises WrongArguments, before anything is run, for a
    model or a task that is not there, and where another file has a page's name.
    """
    begin, recipe = time.perf_counter(), load_recipe(paper, quick)
    out = out or Path("results-quick" if quick else "results")
    folder = out / paper
    found = Sources(sources, folder / "runs")
    cases = cases_named(recipe if only is None else select(recipe, only), cases_of(recipe))
    for path, heading in ((out / "README.md", CLAIMS), (out / f"{paper}.md", f"# {recipe['title']}")):
        check_is_page(path, heading)
    (first, count), usual = seeds, 1 if quick else LEAST_SEEDS
    wanted = [(case, first + k) for case in cases.values() for k in range(count or case.seeds or usual)]
    wanted.sort(key=itemgetter(1))
    missing = [(case, seed) for case, seed in wanted if not is_kept(folder, case, seed)]
    for case, _ in missing:
        found.check(case)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{len(cases)} cases, {len(wanted)} with their seeds; {len(missing)} to run.")
    waiting, before, ran, pages = wanted, None, 0, out / ".pages.lock"
    while waiting != before:
        before, waiting = waiting, []
        for case, seed in before:
            reference = cases.get(case.reference, case)
            if is_kept(folder, case, seed):
                continue
            try:
                if reference != case and not is_kept(folder, reference, seed):
                    raise Held(reference.name)
                run_case(folder, case, seed, found, say)
            except Held:
                waiting.append((case, seed))
                continue
            ran += 1
            with FileLock(pages):
                write_page(paper, recipe, out, quick)
            say(f"{sum(is_kept(folder, *each) for each in wanted)} of {len(wanted)} are there.")
    if waiting:
        say(f"{len(waiting)} are left to other processes, which are running them or what they are compared with.")
    with FileLock(pages):
        path = write_page(paper, recipe, out, quick)
        write_claims(out, quick)
    say(f"Page: {path}")
    return {"paper": paper, "page": str(path), "ran": ran, "wall_seconds": time.perf_counter() - begin}


def write_page(paper: str, recipe: dict, out: Path, quick: bool) -> Path:
    """The paper's page and pictures, from the JSON of its cases."""
    data = read_data(out / paper, recipe)
    for picture in recipe["pictures"] if can_draw() else []:
        draw(out / paper / picture["file"], picture, data)
    command = f"mini-ee reproduce {paper}{' --quick' if quick else ''}"
    path = out / f"{paper}.md"
    write_bytes(path, page(paper, recipe, data, out / paper, command).encode())
    return path


def write_claims(out: Path, quick: bool) -> None:
    """OUT/README.md: what came out in short, and the claims of all papers that have a page there in one table."""
    judged, titles, shorts = {}, {}, {}
    for paper in (paper for paper in PAPERS if (out / f"{paper}.md").exists()):
        recipe = load_recipe(paper, quick)
        data = read_data(out / paper, recipe)
        judged[paper], titles[paper] = [judge(claim, data) for claim in recipe["claims"]], recipe["title"]
        shorts[paper] = in_short(recipe, data)
    write_bytes(out / "README.md", claims_page(judged, titles, shorts, "" if quick else OTHERS).encode())
