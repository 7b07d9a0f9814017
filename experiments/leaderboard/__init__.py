"""`mini-ee reproduce leaderboard`: one table for all methods, computed from records of runs (OUT/records).

protocol.py   classifiers: exams, methods that fit, exits, epochs, rates, seeds
runs.py       classifiers: trains what is missing and writes the records
decoders.py   decoders: the same
page.py       OUT/leaderboard.md and its details in OUT/leaderboard, from the records alone
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from filelock import FileLock

from mini_ee.experiments.leaderboard.decoders import run_decoders, token_methods, trainings
from mini_ee.experiments.leaderboard.figures import REFERENCE
from mini_ee.experiments.leaderboard.page import write_page
from mini_ee.experiments.leaderboard.protocol import SEARCH_SEEDS, exams, methods, seed_count, trainings_of, why_not
from mini_ee.experiments.leaderboard.runs import Job, Places, jobs, missing, run_job
from mini_ee.experiments.trainings import CaseLocked, Sources

ERRORS = ValueError, RuntimeError, OSError  # of one training; the others go on


def make_leaderboard(
    *,
    only: str | None = None,
    quick: bool = False,
    seeds: tuple[int, int | None] = (0, None),
    sources: Path | None = None,
    out: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> dict:
    """Write OUT/leaderboard.md from the records that are there, train and record what is missing, and write it again.

    only: a method; seeds: the first seed, and their number. A training that another process runs is left to it, so
    several calls share the work. device: of the trainings; times of rules are of the CPU. A training that fails is
    named in a line, and the others go on. Raises WrongArguments, before anything runs, if a model, a task or the device
    is missing, or a method is unknown; ValueError at the end, if one failed.
    """
    begin, out = time.perf_counter(), out or Path("results-quick" if quick else "results")
    tokens = only is None or only in token_methods()
    names = [] if only and tokens and why_not(only) else methods(quick, only)
    all_seeds = tuple(range(seeds[0], seeds[0] + (seeds[1] or seed_count(quick))))
    opened = Sources(sources, out / "leaderboard", device)
    chosen = exams(quick)
    work = [job for exam in chosen for job in jobs(trainings_of(exam, opened), names, all_seeds)]
    # A table with few seeds before one with many, and the built-in model first, because it is the smallest.
    work.sort(key=lambda job: (all_seeds.index(job.seeds[0]), job.training.exam.model is not None))
    if tokens:
        for training in trainings(quick, only):
            opened.options(training.options)  # raises if a model or a text is missing
    places = Places(out, opened, {exam.name: exam.read(opened) for exam in chosen}, say)
    number = sum(len(missing(out, job, all_seeds)) for job in work)
    say(f"{len(names)} methods, {len(chosen)} exams, {len(all_seeds)} seeds: {number} records to make.")
    if number:
        _page(out, quick, say)  # of the records that are there, because the others take hours
    decoder_seeds = all_seeds[:1] if quick else all_seeds
    threads, failed, waiting = torch.get_num_threads(), [], []
    torch.set_num_threads(1)  # times are of one thread; a second process may use another core
    try:
        for part in filter(None, (all_seeds[:SEARCH_SEEDS], all_seeds[SEARCH_SEEDS:])):
            waiting += run_all([job for job in work if job.seeds[0] in part], all_seeds, places, failed)
            if tokens and (few := [seed for seed in part if seed in decoder_seeds]):
                number += _decoders(few, only, quick, places, failed)
    finally:
        torch.set_num_threads(threads)
    if waiting:
        say(f"{len(waiting)} trainings are left to other processes, which are running them.")
    path = _page(out, quick, say)
    if failed:
        raise ValueError(f"{len(failed)} trainings failed: {'; '.join(failed)}")
    return {"paper": "leaderboard", "page": str(path or ""), "ran": number, "wall_seconds": time.perf_counter() - begin}


def _page(out: Path, quick: bool, say: Callable[[str], None]) -> Path | None:
    """Write the pages of the records that are there."""
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".pages.lock"):
        path = write_page(out, quick)
    say(f"Page: {path}" if path else f"No page: {REFERENCE} has no record, and all methods are compared with it.")
    return path


def _decoders(seeds: Sequence[int], only: str | None, quick: bool, places: Places, failed: list[str]) -> int:
    """The number of trainings of decoders that were run."""
    try:
        return run_decoders(places.out, places.sources, seeds, only, quick, places.say)
    except ERRORS as error:
        failed.append(f"decoders: {error}")
        places.say(f"FAILED {failed[-1]}")
        return 0


def run_all(work: list[Job], seeds: tuple[int, ...], places: Places, failed: list[str]) -> list[Job]:
    """Run the jobs in turn; returns those that other processes run. failed: gets a line for each that raises."""
    waiting, before = work, None
    while waiting != before:
        before, waiting = waiting, []
        for number, job in enumerate(before):
            if not missing(places.out, job, seeds):
                continue
            try:
                run_job(job, seeds, places)
            except CaseLocked:
                waiting.append(job)
            except ERRORS as error:
                failed.append(f"{job.training.exam.name}, {job.training.name}: {error}")
                places.say(f"FAILED {failed[-1]}")
            places.say(f"{len(before) - number - 1} of {len(before)} steps follow.")
    return waiting
