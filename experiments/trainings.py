"""Train and measure the cases of a recipe, and write a small JSON file for each. An interrupted call can be continued.

Several processes can share the work: one process at a time runs a case.

OUT/PAPER/CASE.json    settings, values chosen on the held-out set; for each seed figures, lists, how they were made,
                       processor time in seconds, checksums of the data, the number of test rows, and of those that were
                       dropped because a training row has the same text
OUT/PAPER/runs/        unfinished trainings; removed once they are measured
OUT/records/PAPER/     CASE.npz, of a classifier: what every exit says of each reported example, and rules (records.py)
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from mini_ee import __version__
from mini_ee.experiments.measures import MEASUREMENTS, ON_A_GPU, READ_A_TASK, READ_ON_THE_DEVICE, WITHOUT_RECORD
from mini_ee.experiments.recipe import Case, is_choice
from mini_ee.experiments.records import read_about, write_record
from mini_ee.lab.data.files import (
    atomic_folder,
    file_sha256,
    json_sha256,
    read_json,
    sole_writer,
    write_bytes,
    write_json,
)
from mini_ee.lab.data.tasks import Task, load_task, toy_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.training.loop import Diverged
from mini_ee.lab.training.run_folder import Run, check_device, load_run, training_folder
from mini_ee.lab.training.state import STATE
from mini_ee.lab.training.train_run import train

MADE_WITH = {"commit", "torch", "machine", "threads", "processor"}  # keys of a seed's "how"
DIGITS = 5  # of a figure in the JSON
SENTENCES = "SST-2 sentences"
BUILT_IN = ("reviews", "continue", "copy")  # tasks and texts that need no file
ERRORS = ValueError, RuntimeError, OSError  # of one training; the others go on


class CaseLocked(Exception):
    """Another process is running this case, or its reference."""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process at a time may be in this block for a file. Raises CaseLocked if another one is."""
    with ExitStack() as stack:
        try:
            stack.enter_context(sole_writer(path))
        except FileExistsError:
            raise CaseLocked(path.stem) from None
        yield


def run_in_turns(work: Sequence[tuple], run: Callable[..., bool], say, failed: list[str] | None = None) -> int:
    """Run all items; returns how many were run here. Those that other processes are running are tried again until no
    other one is left, and then left to them.

    work: (title, arguments of `run`). run: whether there was something to do; raises CaseLocked. failed: gets a line
    for each item that raises one of ERRORS; None: the error is raised.
    """
    ran, waiting, before = 0, work, None
    while waiting != before:
        before, waiting = waiting, []
        for number, (title, *arguments) in enumerate(before, 1):
            try:
                if run(*arguments):
                    ran += 1
                    say(f"{number} of {len(before)} are done.")
            except CaseLocked:
                waiting.append((title, *arguments))
            except ERRORS as error:
                if failed is None:
                    raise
                failed.append(f"{title}: {error}")
                say(f"FAILED {failed[-1]}")
    if waiting:
        say(f"{len(waiting)} trainings are left to other processes, which run them or their reference.")
    return ran


class Sources:
    """Where models and tasks are: DIR/weights/NAME, DIR/data/NAME (default of DIR: $MINI_EE_SHARED, or ../shared).

    made: folder for tasks that are derived from others. device: of the trainings. Raises WrongArguments if torch cannot
    use it. `found` has what was looked up: (kind, name) -> path.
    """

    def __init__(self, folder: Path | None, made: Path, device: str = "cpu"):
        self.folder, self.made = folder or Path(os.environ.get("MINI_EE_SHARED", "../shared")), made
        self.device, self.paths = device, {}
        check_device(device)

    def find(self, kind: str, name: str) -> Path:
        """The folder of a model or a task, or the file of a text. Raises WrongArguments if it does not exist."""
        if name == SENTENCES:
            return self._sentences()
        path = self.folder / kind / name
        if not path.exists():
            raise WrongArguments(
                f"{path}: no such file or folder; give --sources a folder with weights/ and data/ that contain what "
                f"the recipe names (weights/README.md); the pages of the papers need none of them with --quick"
            )
        self.paths[kind, name] = path
        return path

    def _sentences(self) -> Path:
        """SST-2 with whole training sentences, as in RAEE: those of SST-5 without the neutral class."""
        folder = self.made / SENTENCES / "SST-2"
        self.made.mkdir(parents=True, exist_ok=True)
        with FileLock(self.made / ".sentences.lock"):  # one process writes the folder, the others wait
            if folder.exists():
                return folder
            lines = (self.find("data", "SST-5") / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
            rows = [line.rsplit("\t", 1) for line in lines]
            polar = [f"{text}\t{int(label) // 3}" for text, label in rows if label != "2"]
            with atomic_folder(folder) as partial:
                write_bytes(partial / "train.tsv", "\n".join(["sentence\tlabel", *polar, ""]).encode())
                shutil.copy(self.find("data", "SST-2") / "dev.tsv", partial / "dev.tsv")
        return folder

    def check(self, case: Case) -> None:
        """Raise WrongArguments if a model, a task or a text of the case does not exist."""
        for options in (case.options, case.options.get("base", {})):
            named = {name: value for name, value in options.items() if value != SENTENCES}
            self.options(named)
            if named != options:
                self.find("data", "SST-2"), self.find("data", "SST-5")
        self.read_by(case)

    def read_by(self, case: Case) -> Path | list[Path] | None:
        """The text, or the folders of the benchmarks, that the case reads."""
        if isinstance(case.reads, list):
            return [self.find("data", name) for name in case.reads]
        return self.find("data", case.reads) if case.reads else None

    def options(self, options: dict) -> dict:
        """The options with folders instead of names."""
        named = dict(options)
        for option, kind in (("model", "weights"), ("encoder", "weights"), ("task", "data"), ("text", "data")):
            if isinstance(named.get(option), str) and named[option] not in BUILT_IN:
                named[option] = self.find(kind, named[option])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}


def file_of(folder: Path, name: str) -> Path:
    """The JSON file of a case."""
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".json")


def record_of(folder: Path, name: str) -> Path:
    """The file with the outputs of every exit for each reported example of a case."""
    return folder.parent / "records" / folder.name / file_of(folder, name).with_suffix(".npz").name


def read_case(folder: Path, case: Case) -> dict:
    """The JSON of a case; without seeds if there is none, or if it was made with other settings or another text."""
    path = file_of(folder, case.name)
    empty = {"case": case.name, "measure": case.measure, "options": case.options, "reads": case.reads, "seeds": {}}
    if not path.exists():
        return empty
    figures = read_figures(path)
    return figures if all(figures.get(key) == empty[key] for key in empty if key != "seeds") else empty


def read_figures(path: Path) -> dict:
    """The JSON of a case. Raises ValueError if its checksum is wrong or missing."""
    return read_json(path, signed="seeds")


def is_done(folder: Path, case: Case, seed: int) -> bool:
    """Whether a seed of a case is in its JSON, and in its record if it has one, and was measured against the present
    figures of its reference. Raises ValueError if a file is damaged.
    """
    made = read_case(folder, case)["seeds"].get(str(seed))
    if case.measure not in WITHOUT_RECORD and seed not in read_about(record_of(folder, case.name)):
        return False
    if made is None or case.reference in (None, case.name) or not (path := file_of(folder, case.reference)).exists():
        return made is not None
    now = read_figures(path)["seeds"].get(str(seed))
    if now is None:
        return True
    counted = {"full": "reference", "hold-out full": "reference hold-out"}
    return all(made["figures"].get(name, figure := now["figures"].get(of)) == figure for of, name in counted.items())


def run_case(folder: Path, case: Case, seed: int, sources: Sources, say) -> None:
    """Train and measure one case with one seed, unless that is done, and write its JSON. Its reference must be done.

    Raises CaseLocked if another process is running the case.
    """
    path = file_of(folder, case.name)
    at = _trainings(path, case, seed)
    with alone(path):
        record = read_case(folder, case)
        if is_done(folder, case, seed):
            shutil.rmtree(at, ignore_errors=True)  # left by a process that was killed before it removed the folder
            return
        say(f"{case.name}, seed {seed}")
        begin, device = sum(os.times()[:4]), "cuda" if case.measure == ON_A_GPU else sources.device
        measured_on, dropped = _read(case, sources)
        if dropped:
            say(f"  {dropped} test examples are dropped: training examples have the same texts")
        reference = _reference(folder, case, seed, dropped)
        if any(is_choice(value) for value in case.options.values()) and "chosen" not in record:
            record["chosen"] = _chosen(path, case, record, seed, sources, say)
        run = trained(at / "run", _settled(case, record.get("chosen", {})), seed, sources)
        if device != "cpu" and case.measure in READ_ON_THE_DEVICE:
            run.model.to(device)
        figures, lists, *records = MEASUREMENTS[case.measure](run, measured_on, reference)
        for made in records:
            metadata = {"settings": _settled(case, record.get("chosen", {})), "how": how_made(device)}
            write_record(record_of(folder, case.name), seed, made._replace(about=made.about | metadata))
        record["seeds"][str(seed)] = {
            "figures": {name: _short(value) for name, value in figures.items()},
            "lists": {name: [_short(value) for value in values] for name, values in lists.items()},
            "test_rows_dropped": dropped,
            "data": _checksums(case, measured_on, sources),
            "core_seconds": round(sum(os.times()[:4]) - begin, 1),
            "how": how_made(device) | {name: run.config.get(name) for name in ("settings", "training")},
        }
        if isinstance(measured_on, Task):
            record["seeds"][str(seed)]["test_rows"] = len(measured_on.split(measured_on.default_split))
        write_json(path, record)
        shutil.rmtree(at)
        with suppress(OSError):  # the folder still contains trainings of other seeds
            os.removedirs(at.parent)


def _trainings(path: Path, case: Case, seed: int) -> Path:
    """The folder of a case's unfinished trainings, one for each choice of settings and seed."""
    return path.parent / "runs" / path.stem / json_sha256(case.options)[:12] / str(seed)


def _reference(folder: Path, case: Case, seed: int, dropped: int) -> dict | None:
    """The figures of the case's reference. Raises ValueError if they were measured on other test rows."""
    if case.reference in (None, case.name):
        return None
    path = file_of(folder, case.reference)
    made = read_figures(path)["seeds"][str(seed)]
    if (before := made["test_rows_dropped"]) != dropped:
        raise ValueError(
            f"{path}: expected figures without the {dropped} test examples that also occur in train, found {before} "
            f"dropped; remove the file, so that {case.reference} is run again"
        )
    return made["figures"]


def _read(case: Case, sources: Sources) -> tuple:
    """The task, the text or the benchmarks of a case, and the number of rows that are dropped from the reported split
    of the task because a row of its train split has the same text.
    """
    if case.measure not in READ_A_TASK:
        return sources.read_by(case), 0
    folder = sources.options(case.options).get("task")
    task, dropped = (load_task(folder) if isinstance(folder, Path) else toy_task()).without_seen_rows()
    return task, dropped.get(task.default_split, 0)


def _checksums(case: Case, measured_on, sources: Sources) -> dict[str, str]:
    """Name -> sha256 of the task (texts and labels of all splits), and of the other data that the case reads."""
    sums = {}
    for name in case.sources():
        if name == case.options.get("task"):
            if isinstance(measured_on, Task):
                sums[name] = json_sha256({split: rows.sha256() for split, rows in measured_on.splits.items()})
        elif name not in BUILT_IN:
            sums[name] = sha256_of(sources.find("data", name))
    return sums


def sha256_of(path: Path) -> str:
    """Of a file its own; of a folder that of its files' names and checksums."""
    if path.is_file():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return json_sha256({file.relative_to(path).as_posix(): file_sha256(file) for file in files})


def _chosen(path: Path, case: Case, record: dict, seed: int, sources: Sources, say) -> dict:
    """The settings with the best held-out score. Choices are made one after the other; until its turn, a choice has its
    first value. The JSON lists all that were tried; the best run is that of this seed.
    """
    at = _trainings(path, case, seed)
    choices = {name: value["choose"] for name, value in case.options.items() if is_choice(value)}
    if record.get("tried with seed") != seed:  # other seeds have other held-out sets
        record |= {"tried": [], "tried with seed": seed}
    tried, best = record["tried"], {}
    for name, values in choices.items():
        best |= _settings(name, values[0])
    for name, values in choices.items():
        others = {key: value for key, value in best.items() if key not in _settings(name, values[0])}
        while value := _untried(name, values, alike := [trial for trial in tried if others.items() <= trial.items()]):
            settings = best | _settings(name, value)
            try:
                run = trained(at / f"try-{len(tried)}", _settled(case, settings), seed, sources)
                metrics = read_json(run.folder / "metrics.json")
                scores = metrics.get("agreement") or metrics["per_exit_accuracy"]
            except Diverged:
                scores = [0.0]
            tried.append(settings | {"hold-out": _short(float(np.mean(scores)))})
            listed = ", ".join(f"{key} {setting}" for key, setting in settings.items())
            say(f"  {listed}: held-out score {tried[-1]['hold-out']:.3f}, mean over all exits")
            write_json(path, record)
        chosen = max(alike, key=lambda trial: trial["hold-out"])
        best = {key: value for key, value in chosen.items() if key != "hold-out"}
    number = tried.index(chosen)
    if (at / f"try-{number}").exists() and not (at / "run").exists():
        (at / f"try-{number}").rename(at / "run")
    return best


def _settled(case: Case, chosen: dict) -> dict:
    """The options of the case, with chosen settings in place of its choices."""
    return {name: value for name, value in case.options.items() if not is_choice(value)} | chosen


def _settings(name: str, value) -> dict:
    """The options that a value of a choice stands for: those that it lists, or that of the choice's name."""
    return value if isinstance(value, dict) else {name: value}


def _untried(name: str, values: list, tried: list[dict]) -> dict | float | None:
    """The next value of a choice to try, behind those that were tried with equal other settings."""
    if isinstance(values[0], dict):
        return next((value for value in values if not any(value.items() <= one.items() for one in tried)), None)
    return next_to_try(values, {trial[name]: trial["hold-out"] for trial in tried})


def next_to_try(values: list[float], scores: dict[float, float]) -> float | None:
    """The next value to try: the first of the recipe's that has no score; then, while the best value is the largest or
    the smallest, one beyond it, by the factor between it and its neighbour.
    """
    if untried := [value for value in values if value not in scores]:
        return untried[0]
    best, tried = max(scores, key=scores.get), sorted(scores)
    if best in (tried[0], tried[-1]):
        return _short(best**2 / (tried[1] if best == tried[0] else tried[-2]))
    return None


def trained(folder: Path, options: dict, seed: int, sources: Sources) -> Run:
    """The run of these options: loaded if it is finished, otherwise trained or continued."""
    if folder.exists():
        return load_run(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = dict(options)
    if base := given.pop("base", None):
        given["model"] = str(trained(folder.parent / "base", base, seed, sources).folder.absolute())
    method = given.pop("method")
    unfinished = (training_folder(folder) / STATE).exists()
    if not unfinished:
        shutil.rmtree(training_folder(folder), ignore_errors=True)
    return train(method, out=folder, resume=unfinished, seed=seed, device=sources.device, **sources.options(given))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def processor() -> str:
    """The processor's name, as Linux gives it."""
    with suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return match[1]
    return platform.processor() or "unknown"


def how_made(device: str = "cpu") -> dict:
    """Commit, torch version, machine, processor and threads of this process, and the GPU, if the device is one."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    process = subprocess.run(git, capture_output=True, text=True)
    return {
        "commit": process.stdout.strip() or __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        "threads": torch.get_num_threads(),
    } | ({} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)})
