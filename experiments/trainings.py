"""Train what is missing, measure it, and keep a small JSON of every case: a run that was stopped goes on where it was.

Several processes may do so side by side: a case is run by one at a time.

OUT/PAPER/CASE.json    settings, the rates that the hold-out chose, and by seed figures, lists, how it was made, and how
                       many test rows were dropped because train has them too
OUT/PAPER/runs/        trainings under way; removed when they are measured
"""

import os
import platform
import re
import shutil
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from mini_ee import __version__
from mini_ee.data.files import atomic_folder, json_sha256, read_json, sole_writer, write_bytes, write_json
from mini_ee.data.tasks import load_task, toy_task
from mini_ee.errors import WrongArguments
from mini_ee.experiments.measures import MEASURES, OF_ROWS
from mini_ee.experiments.recipe import Case, is_choice
from mini_ee.training.loop import Diverged
from mini_ee.training.run_folder import Run, load_run, training_folder
from mini_ee.training.state import STATE
from mini_ee.training.train_run import train

MADE_WITH = ("commit", "torch", "machine", "threads")  # what is said of it
DIGITS = 5  # of a figure in JSON
SENTENCES = "SST-2 sentences"


class Held(Exception):
    """Another process runs this case."""


class Sources:
    """Where models and tasks are: DIR/weights/NAME, DIR/data/NAME. DIR is by default $MINI_EE_SHARED, or ../shared."""

    def __init__(self, folder: Path | None, made: Path):
        self.folder, self.made = folder or Path(os.environ.get("MINI_EE_SHARED", "../shared")), made

    def find(self, kind: str, name: str) -> Path:
        """A model's or a task's folder, a text's file. Raises WrongArguments where it is not there."""
        if name == SENTENCES:
            return self._sentences()
        found = self.folder / kind / name
        if not found.exists():
            raise WrongArguments(
                f"{found}: is not there; give --sources a folder with weights/ and data/ as the recipe names them, or "
                f"--quick, which needs none"
            )
        return found

    def _sentences(self) -> Path:
        """SST-2 with whole sentences to train on, as RAEE's datastore has them: SST-5's, without its neutral ones."""
        folder = self.made / SENTENCES / "SST-2"
        self.made.mkdir(parents=True, exist_ok=True)
        with FileLock(self.made / ".sentences.lock"):  # processes that start together wait for the first
            if folder.exists():
                return folder
            lines = (self.find("data", "SST-5") / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
            rows = [line.rsplit("\t", 1) for line in lines]
            kept = [f"{text}\t{int(label) // 3}" for text, label in rows if label != "2"]
            with atomic_folder(folder) as partial:
                write_bytes(partial / "train.tsv", "\n".join(["sentence\tlabel", *kept, ""]).encode())
                shutil.copy(self.find("data", "SST-2") / "dev.tsv", partial / "dev.tsv")
        return folder

    def check(self, case: Case) -> None:
        """Raise WrongArguments where one of a case's models, tasks or texts is not there."""
        for options in (case.options, case.options.get("base", {})):
            named = {name: value for name, value in options.items() if value != SENTENCES}
            self.options(named)
            if named != options:
                self.find("data", "SST-2"), self.find("data", "SST-5")
        if case.reads:
            self.find("data", case.reads)

    def options(self, options: dict) -> dict:
        """Options with folders in place of names."""
        named = dict(options)
        for option, kind in (("model", "weights"), ("encoder", "weights"), ("task", "data"), ("text", "data")):
            if isinstance(named.get(option), str) and named[option] not in ("reviews", "continue", "copy"):
                named[option] = self.find(kind, named[option])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}


def file_of(folder: Path, name: str) -> Path:
    """Where a case's figures are kept."""
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".json")


def read_case(folder: Path, case: Case) -> dict:
    """What is kept of a case; nothing where it was made with other settings, or read another text."""
    path = file_of(folder, case.name)
    empty = {"case": case.name, "measure": case.measure, "options": case.options, "reads": case.reads, "seeds": {}}
    if not path.exists():
        return empty
    kept = {"reads": case.reads} | read_figures(path)
    return kept if all(kept.get(key) == empty[key] for key in empty if key != "seeds") else empty


def read_figures(path: Path) -> dict:
    """A case's JSON. Raises ValueError where the checksum is not its own or is gone, or a value is of a wrong type."""
    kept = read_json(path, signed="seeds")
    seeds, tried, chosen = kept.get("seeds"), kept.get("tried", []), kept.get("chosen", {})
    right = isinstance(seeds, dict) and isinstance(tried, list) and all(map(_holds_numbers, (*tried, chosen)))
    if not right or not all(seed.isdigit() and _is_made(made) for seed, made in seeds.items()):
        what = "figures, lists of numbers, and how they were made, of each seed"
        raise ValueError(f"{path}: expected {what}, found something else; remove the file to make it again")
    return kept


def _holds_numbers(values) -> bool:
    return isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())


def _is_made(made) -> bool:
    """Whether a value is what run_case writes of a seed."""
    parts = [made.get(name) for name in ("figures", "lists", "how")] if isinstance(made, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        return False
    lists = parts[1].values()
    numbers = all(isinstance(each, list) and all(type(number) in (int, float) for number in each) for each in lists)
    return numbers and _holds_numbers(parts[0]) and parts[2].keys() >= set(MADE_WITH)


def is_kept(folder: Path, case: Case, seed: int) -> bool:
    """Whether a seed of a case is kept, and was measured against the reference that is kept now."""
    made = read_case(folder, case)["seeds"].get(str(seed))
    if made is None or case.reference in (None, case.name) or not (path := file_of(folder, case.reference)).exists():
        return made is not None
    now = read_figures(path)["seeds"].get(str(seed))
    if now is None:
        return True
    counted = {"full": "reference", "hold-out full": "reference hold-out"}
    return all(made["figures"].get(name, found := now["figures"].get(of)) == found for of, name in counted.items())


def run_case(folder: Path, case: Case, seed: int, sources: Sources, say) -> None:
    """Train and measure one case with one seed, if that is not done yet, and keep it. Its reference is kept already.

    Raises Held.
    """
    path = file_of(folder, case.name)
    at = _trainings(path, case, seed)
    with ExitStack() as alone:
        try:
            alone.enter_context(sole_writer(path))
        except FileExistsError:
            raise Held(case.name) from None
        kept = read_case(folder, case)
        if is_kept(folder, case, seed):
            shutil.rmtree(at, ignore_errors=True)  # a kill came before
            return
        say(f"{case.name}, seed {seed}")
        measured_on, dropped = _read(case, sources)
        if dropped:
            say(f"  {dropped} test rows are dropped, which train has word for word")
        reference = _reference(folder, case, seed, dropped)
        if any(is_choice(value) for value in case.options.values()):
            if "chosen" not in kept:
                kept["chosen"] = _chosen(path, case, kept, seed, sources, say)
        run = _trained(at / "run", case.options | kept.get("chosen", {}), seed, sources)
        figures, lists = MEASURES[case.measure](run, measured_on, reference)
        kept["seeds"][str(seed)] = {
            "figures": {name: _short(value) for name, value in figures.items()},
            "lists": {name: [_short(value) for value in values] for name, values in lists.items()},
            "test_rows_dropped": dropped,
            "how": how_made() | {name: run.config.get(name) for name in ("settings", "training")},
        }
        write_json(path, kept)
        shutil.rmtree(at)
        with suppress(OSError):  # other seeds' trainings stay
            os.removedirs(at.parent)


def _trainings(path: Path, case: Case, seed: int) -> Path:
    """Where the trainings of a case stand while they are needed: those of other settings stand elsewhere."""
    return path.parent / "runs" / path.stem / json_sha256(case.options)[:12] / str(seed)


def _reference(folder: Path, case: Case, seed: int, dropped: int) -> dict | None:
    """The figures of the case that this one is compared with. Raises ValueError where other test rows gave them."""
    if case.reference in (None, case.name):
        return None
    path = file_of(folder, case.reference)
    kept = read_figures(path)["seeds"][str(seed)]
    if (found := kept.get("test_rows_dropped", 0)) != dropped:
        raise ValueError(
            f"{path}: expected figures without the {dropped} test rows that train has too, found {found} dropped; "
            f"remove the file, so that {case.reference} is run again"
        )
    return kept["figures"]


def _read(case: Case, sources: Sources) -> tuple:
    """The task of rows, or the text that is read beside; and how many rows of the reported split were dropped from it,
    because its train split has them word for word.
    """
    if case.measure not in OF_ROWS:
        return case.reads and sources.find("data", case.reads), 0
    folder = sources.options(case.options).get("task")
    task, dropped = (load_task(folder) if isinstance(folder, Path) else toy_task()).without_seen_rows()
    return task, dropped.get(task.default_split, 0)


def _chosen(path: Path, case: Case, kept: dict, seed: int, sources: Sources, say) -> dict:
    """The value that does best on the rows held out of train; what was tried is kept. The best is this seed's run."""
    at = _trainings(path, case, seed)
    ((name, choice),) = ((name, value) for name, value in case.options.items() if is_choice(value))
    if kept.get("tried with seed") != seed:  # another one holds out other rows
        kept |= {"tried": [], "tried with seed": seed}
    tried = kept["tried"]
    while value := next_to_try(choice["choose"], {each[name]: each["hold-out"] for each in tried}):
        try:
            run = _trained(at / f"try-{len(tried)}", case.options | {name: value}, seed, sources)
            metrics = read_json(run.folder / "metrics.json")
            scores = metrics.get("agreement") or metrics["per_exit_accuracy"]
        except Diverged:
            scores = [0.0]
        tried.append({name: value, "hold-out": _short(float(np.mean(scores)))})
        say(f"  {name} {value}: {tried[-1]['hold-out']:.3f} on the hold-out, the mean of all exits")
        write_json(path, kept)
    best = max(range(len(tried)), key=lambda number: tried[number]["hold-out"])
    if (at / f"try-{best}").exists() and not (at / "run").exists():
        (at / f"try-{best}").rename(at / "run")
    return {name: tried[best][name]}


def next_to_try(values: list[float], scores: dict[float, float]) -> float | None:
    """Of the recipe's values the first without a score; then, while the best is the largest or the smallest, one beyond
    it, by the factor between it and its neighbour.
    """
    if left := [value for value in values if value not in scores]:
        return left[0]
    best, tried = max(scores, key=scores.get), sorted(scores)
    if best in (tried[0], tried[-1]):
        return _short(best**2 / (tried[1] if best == tried[0] else tried[-2]))
    return None


def _trained(folder: Path, options: dict, seed: int, sources: Sources) -> Run:
    """The run of these options: loaded, gone on with, or trained."""
    if folder.exists():
        return load_run(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = dict(options)
    if base := given.pop("base", None):
        given["model"] = str(_trained(folder.parent / "base", base, seed, sources).folder.absolute())
    method = given.pop("method")
    unfinished = (training_folder(folder) / STATE).exists()
    if not unfinished:
        shutil.rmtree(training_folder(folder), ignore_errors=True)
    return train(method, out=folder, resume=unfinished, seed=seed, **sources.options(given))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def how_made() -> dict:
    """What a figure was made with."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True)
    return {
        "commit": found.stdout.strip() or __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }
