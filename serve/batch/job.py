"""A job: an export over all rows of some files, in parts. No torch here.

The folder `out` has, for each input, parts of `part_rows` rows, and errors.jsonl if rows failed. job.json names the
export, the options and the inputs. A part is written whole or not at all; the same command computes the parts that are
missing. So a job may be killed at any time.
"""

import glob
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import perf_counter

from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import check_regular, errors_name, file_sha256, read_json, sole_writer, write_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.table_files import SUFFIXES, TableFile, kind_of
from mini_ee.lab.data.text_files import TextReader
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.manifest import MANIFEST, read_manifest
from mini_ee.lab.export.runtime import ID_DIGITS
from mini_ee.serve.batch.parts import STATS, Part, PartWriter, stats_file
from mini_ee.serve.batch.pools import InProcess, Processes, RayActors
from mini_ee.serve.batch.rival import measure_rival
from mini_ee.serve.batch.rows import Block, blocks_of, rows_of

JOB, ERRORS, FORMAT_VERSION = "job.json", "errors.jsonl", 1
FORMATS = ("jsonl", "parquet")
REPORTED = 20  # errors that are printed; all are in errors.jsonl
SAMPLE = 10_000  # rows for the projection, at most
COMPARED, SECONDS = 1000, 10  # rows and seconds of CPU of the comparison with the full model, at most
BILLION, HOUR = 10**9, 3600
GO_ON = "the same command goes on where it stopped"


@dataclass(frozen=True, kw_only=True)
class JobOptions(Settings):
    """What decides the content of the parts, besides the export and the columns of the texts."""

    id_column: str | None = option(
        None, "column that is copied to the answers", metavar="NAME", default_text="id, if there is one"
    )
    format: str | None = option(
        None, "format of the parts", choices=FORMATS, default_text="parquet for .parquet, jsonl for the others"
    )
    part_rows: int = option(10_000, "number of rows of an input in one part", least=1, metavar="N")


class Job:
    """A job in the folder `out`. It checks its arguments before anything is written.

    inputs: names of files, or patterns with * and ?. Raises WrongArguments if the arguments do not fit each other, the
    export, or a job that is in `out` already.
    """

    def __init__(
        self,
        exported: Path,
        inputs: Sequence[str],
        out: Path,
        options: JobOptions = JobOptions(),
        columns: TaskOptions = TaskOptions(),
    ):
        self.exported, self.out, self.options, self._columns = exported, out, options, columns
        self.config = read_manifest(exported)
        if self.config["unit"] == "tokens":
            raise WrongArguments(f"{exported}: expected a classifier or a sentence encoder, found a decoder")
        self.paths = find_inputs(inputs)
        if not find_spec("pyarrow"):
            for path in self.paths:
                if "parquet" in (self._format_of(path), kind_of(path)[1:]):
                    raise WrongArguments(f"{path}: Parquet needs pyarrow: pip install 'mini-ee[batch]'")
        self._check_columns()
        self._about = {
            "format_version": FORMAT_VERSION,
            "model_id": file_sha256(exported / MANIFEST)[:ID_DIGITS],
            "options": asdict(options) | columns.given(),
        }
        self._names = list[str]()  # of all parts

    def run(self, make_pool: Callable, project: bool = True) -> dict:
        """Compute the missing parts. Returns the JSON summary.

        make_pool: makes a pool from a function that makes a PartWriter. project: with the projection.
        """
        begin, pool = perf_counter(), None
        with sole_writer(self.out), _sigterm_interrupts() as catch:
            self._begin()
            with _Progress(sum(path.stat().st_size for path in self.paths)) as now:
                try:
                    missing = self._missing_blocks(now)
                    if (first := next(missing, None)) is not None:
                        pool = make_pool(partial(PartWriter, self.exported.resolve(), self.out.resolve()))
                        catch()  # Ray replaces the handler
                        for part in pool.map(chain([first], missing)):
                            now.count(part)
                    summary = self._summary(now, perf_counter() - begin)
                    if project and now.sample:
                        summary["projection"] = _projection(summary, now.sample, pool)
                finally:
                    if pool is not None:
                        pool.close()
                    for folder in (self.out, self.out / STATS):
                        for leftover in folder.glob(".*.partial"):
                            leftover.unlink(missing_ok=True)
        return summary

    def _format_of(self, path: Path) -> str:
        return self.options.format or ("parquet" if kind_of(path) == ".parquet" else "jsonl")

    def _reader(self, path: Path) -> TextReader:
        return TextReader(path, self._columns, self.config["task"]["texts"], id_column=self.options.id_column)

    def _check_columns(self) -> None:
        """Raise WrongArguments if no input has the columns. If only some have not, their errors are reported later."""
        first = None
        for path in self.paths:
            reader = self._reader(path)
            for row in rows_of(reader):
                if reader.columns or row.error is None:
                    return
                first = first or f"{path}:{row.line}: {row.error}"
        raise WrongArguments(first or f"{self.paths[0]}: expected rows, found none; name a file with rows")

    def _begin(self) -> None:
        """Write job.json, or compare it with the one that is there."""
        stats = {path.name: path.stat() for path in self.paths}
        inputs = {name: {"bytes": each.st_size, "modified_ns": each.st_mtime_ns} for name, each in stats.items()}
        if self.out.exists() and not self.out.is_dir():
            raise WrongArguments(f"--out {self.out}: expected a folder, found a file; name another")
        if (self.out / JOB).exists():
            self._compare(read_json(self.out / JOB, signed="model_id"), inputs)
        elif self.out.exists() and any(not path.name.startswith(".") for path in self.out.iterdir()):
            raise WrongArguments(f"--out {self.out}: expected an empty folder, found other files; name another")
        with errors_name(self.out):
            (self.out / STATS).mkdir(parents=True, exist_ok=True)
        write_json(self.out / JOB, self._about | {"inputs": inputs})

    def _compare(self, before: dict, inputs: dict) -> None:
        expected, found = (
            {key: about.get(key) for key in ("format_version", "model_id")} | about.get("options", {})
            for about in (before, self._about)
        )
        for key in expected | found:
            if expected.get(key) != found.get(key):
                what = f"expected {key} {expected.get(key)} as in {JOB}, found {found.get(key)}"
                raise WrongArguments(f"--out {self.out}: {what}; give the same, or name another folder")
        for name, about in before["inputs"].items():
            if name not in inputs:
                raise WrongArguments(f"--in: expected {name} too, as the job in {self.out} has it; name all its inputs")
            if about != inputs[name]:
                raise WrongArguments(f"{name}: changed since the job in {self.out} began; name another --out")

    def _missing_blocks(self, now: "_Progress") -> Iterator[Block]:
        for path in self.paths:
            for block in blocks_of(self._reader(path), self.options.part_rows, self._format_of(path)):
                self._names.append(block.part)
                if self._is_whole(block.part):
                    now.skip(block)
                else:
                    yield block

    def _is_whole(self, part: str) -> bool:
        """Whether a part is there with its statistics, and as long as it was written."""
        path, stats = self.out / part, self._stats(part)
        return stats is not None and path.is_file() and path.stat().st_size == stats.get("bytes", path.stat().st_size)

    def _stats(self, part: str) -> dict | None:
        try:
            return read_json(stats_file(self.out, part), signed="io_seconds")
        except (FileNotFoundError, ValueError):
            return None

    def _summary(self, now: "_Progress", seconds: float) -> dict:
        """Sums over all parts. Writes errors.jsonl."""
        last = self.config["exits"][-1]
        total = dict.fromkeys(("rows", "failed", "rows_truncated", "layers", "seconds", "io_seconds"), 0)
        counts = [0] * len(self.config["exits"])
        with _written(self.out / ERRORS) as file:
            for name in self._names:
                stats = self._stats(name)
                if stats is None:
                    raise ValueError(f"{self.out}: the statistics of {name} are gone; {GO_ON}")
                total = {key: value + stats[key] for key, value in total.items()}
                counts = [count + more for count, more in zip(counts, stats["exit_counts"])]
                file.writelines(json.dumps(error) + "\n" for error in stats["errors"])
        if not total["failed"]:
            (self.out / ERRORS).unlink()
        rows = total["rows"]
        mean = total["layers"] / rows if rows else None
        return {
            "export": str(self.exported),
            "model_id": self._about["model_id"],
            "out": str(self.out),
            "inputs": len(self.paths),
            "parts": len(self._names),
            "rows": rows,
            "failed": total["failed"],
            "rows_truncated": total["rows_truncated"],
            "exit_counts": counts,
            "mean_layers": mean,
            "layers_saved": None if mean is None else 1 - mean / last,
            "core_seconds": total["seconds"],
            "io_core_seconds": total["io_seconds"],
            "rows_now": now.rows,
            "seconds": seconds,
            "rows_per_second": now.rows / seconds,
        }


class _Progress:
    """The bar, the errors that are printed, and a sample of the rows of this run."""

    def __init__(self, size: int):
        self.rows, self.sample = 0, list[tuple]()
        self._seen = self._reported = 0
        self._random = random.Random(0)
        self._bar = tqdm(total=size, unit="B", unit_scale=True, delay=2, file=sys.stderr, disable=None)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()

    def skip(self, block: Block) -> None:
        """A part that is there already."""
        self._bar.update(block.size)

    def count(self, part: Part) -> None:
        """A part that was written now."""
        self.rows += part.stats["rows"]
        for row in part.sample:  # a reservoir: each row of all samples is in it with the same probability
            self._seen += 1
            at = len(self.sample) if len(self.sample) < SAMPLE else self._random.randrange(self._seen)
            if at < SAMPLE:
                self.sample[at : at + 1] = [row]
        for error in part.stats["errors"]:
            self._reported += 1
            if self._reported <= REPORTED:
                line = f"mini-ee batch: {error['file']}:{error['line']}: {error['error']}"
                self._bar.write(line, file=sys.stderr)
            elif self._reported == REPORTED + 1:
                self._bar.write(f"mini-ee batch: more errors are in {ERRORS}", file=sys.stderr)
        self._bar.set_postfix(rows=self.rows, refresh=False)
        self._bar.update(part.size)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that names and patterns stand for, in their order. Folders among the matches of a pattern are left out.

    Raises WrongArguments if there are none, for another suffix, and for two files of one name.
    """
    paths = list[Path]()
    for pattern in patterns:
        found = [Path(pattern)] if os.path.exists(pattern) else [Path(each) for each in sorted(glob.glob(pattern))]
        found = [path for path in found if len(found) == 1 or not path.is_dir()]
        if not found:
            raise WrongArguments(f"--in {pattern}: no such file")
        paths += found
    for path in paths:
        try:
            check_regular(path)
        except ValueError as error:
            raise WrongArguments(f"--in {error}") from None
        if kind_of(TableFile(path).path) not in (*SUFFIXES, ".txt"):
            expected = f"a name that ends with {', '.join(SUFFIXES)} or .txt, also with .gz"
            raise WrongArguments(f"--in {path}: expected {expected}; rename it")
    names = sorted(path.name for path in paths)
    for name, following in zip(names, names[1:]):
        if name == following:
            raise WrongArguments(f"--in: expected different names, found {name} twice; rename one")
    return paths


def _projection(summary: dict, sample: list[tuple], pool: InProcess | Processes | RayActors) -> dict:
    """Core hours for a billion rows: with exits, with the full model, with a linear model (None: not for this task).

    The ratio of full model and exits is measured on a sample, in turns. Reading and writing costs all three the same.
    """
    texts = [texts for texts, _ in sample]
    times = pool.compare(texts[:COMPARED], SECONDS)
    ratio = (times["tokenizing"] + times["full"]) / (times["tokenizing"] + times["exits"])
    io = summary["io_core_seconds"] / summary["rows"]
    model = summary["core_seconds"] / summary["rows"] - io
    rival = measure_rival(sample) if all(isinstance(label, str) for _, label in sample) else None
    seconds = {"exits": io + model, "full": io + model * ratio, "linear": rival and io + rival["seconds_per_row"]}
    hours = {name: each and each * BILLION / HOUR for name, each in seconds.items()}
    return {
        "rows": BILLION,
        "core_hours": hours,
        "full_ratio": ratio,
        "compared_rows": times["rows"],
        "linear": rival,
    }


def summary_lines(summary: dict) -> list[str]:
    """The summary in words."""
    rows, mean = summary["rows"], summary["mean_layers"]
    parts = f"{rows:,} rows in {summary['parts']:,} parts: {summary['out']}"
    lines = [f"{parts}; {summary['failed']:,} rows failed: {summary['out']}/{ERRORS}" if summary["failed"] else parts]
    if rows:
        depth = f"{mean:.2f} layers on average, {summary['layers_saved']:.1%} of the layers saved"
        lines.append(f"{depth}, {summary['core_seconds']:,.1f} core seconds")
    if summary["rows_now"]:
        lines.append(f"{summary['rows_now']:,} rows now, {summary['rows_per_second']:,.0f} rows per second")
    if "projection" not in summary:
        return lines
    projection = summary["projection"]
    hours, rival = projection["core_hours"], projection["linear"]
    lines.append(f"core hours for a billion such rows: {hours['exits']:,.0f} with exits")
    ratio = f"{projection['full_ratio']:.2f} times as many, on {projection['compared_rows']:,} rows in turns"
    lines.append(f"  {hours['full']:,.0f} with the full model ({ratio})")
    if rival:
        texts = f"{rival['agreement']:.1%} of {rival['test_rows']:,} rows"
        lines.append(f"  {hours['linear']:,.0f} with a linear model on n-grams, which agrees with the job on {texts}")
    return lines


@contextmanager
def _written(path: Path) -> Iterator:
    """A text file that gets its name when it is complete."""
    partial_path = path.with_name(f".{path.name}.partial")
    with errors_name(path):
        with open(partial_path, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)


@contextmanager
def _sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """SIGTERM ends the block as Ctrl-C does. Yields a function that sets this again."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)

    def catch() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    catch()
    try:
        yield catch
    finally:
        signal.signal(signal.SIGTERM, before)
