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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from time import perf_counter

import numpy as np

from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import MANIFEST, check_regular, errors_name, file_sha256, read_json, sole_writer, write_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.table_files import SUFFIXES, TableFile, kind_of
from mini_ee.lab.data.text_files import TextReader
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.export.manifest import read_manifest
from mini_ee.lab.export.runtime import ID_DIGITS
from mini_ee.serve.batch_parts import (
    COMPARED,
    GO_ON,
    STATS,
    Block,
    Computing,
    Part,
    PartWriter,
    blocks_of,
    handling,
    parts_of,
    rows_of,
    stats_file,
)

JOB, ERRORS, FORMAT_VERSION = "job.json", "errors.jsonl", 1
REPORTED = 20  # errors that are printed; all are in errors.jsonl
SECONDS = 10  # of CPU of the comparison with the full model, at most
BILLION, HOUR = 10**9, 3600


@dataclass(frozen=True, kw_only=True)
class JobOptions(Settings):
    """What decides the content of the parts, besides the export and the columns of the texts."""

    id_column: str | None = option(
        None, "column that is copied to the answers", metavar="NAME", default_text="id, if there is one"
    )
    format: str | None = option(
        None,
        "format of the parts",
        choices=("jsonl", "parquet"),
        default_text="parquet for .parquet, jsonl for the others",
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
        options: JobOptions,
        columns: TaskOptions,
        engine: Engine = Engine(),
    ):
        self.exported, self.out, self.options, self._columns, self.engine = exported, out, options, columns, engine
        self.config = read_manifest(exported)
        if self.config["unit"] == "tokens":
            raise WrongArguments(f"{exported}: expected a classifier or a sentence encoder, found a decoder")
        if kind := self.config.get("task", {}).get("tokens"):
            raise WrongArguments(f"{exported}: is for {kind}, and a job gives one label of a text; use mini-ee run")
        self.paths = find_inputs(inputs)
        for path in self.paths:
            if "parquet" in (self._format_of(path), kind_of(path)[1:]) and not find_spec("pyarrow"):
                raise WrongArguments(f"{path}: Parquet needs pyarrow: pip install 'mini-ee[batch]'")
        self._check_columns()
        self._job = {
            "format_version": FORMAT_VERSION,
            "model_id": file_sha256(exported / MANIFEST)[:ID_DIGITS],
            "options": asdict(options) | columns.given() | (engine._asdict() if engine != Engine() else {}),
        }

    def run(self, computing: Computing, project: bool = True) -> dict:
        """Compute the missing parts. Returns the JSON summary. project: with the projection."""
        begin, names, times = perf_counter(), list[str](), None
        with sole_writer(self.out), handling(signal.SIGTERM, signal.default_int_handler):
            self._begin()
            with _Progress(sum(path.stat().st_size for path in self.paths)) as now:
                try:
                    missing = self._missing_blocks(names, now)
                    if first := list(islice(missing, 1)):
                        exported, out = self.exported.resolve(), self.out.resolve()
                        with computing.workers(exported, out, self.engine) as (submit, most):
                            for part in parts_of(submit, chain(first, missing), most):
                                now.count(part)
                            seconds = perf_counter() - begin
                            if project and now.sample:
                                times = submit(PartWriter.compare, now.sample, SECONDS).result()
                    summary = self._summary(names, now.rows, seconds if first else perf_counter() - begin)
                finally:
                    for leftover in chain(self.out.glob(".*.partial"), (self.out / STATS).glob(".*.partial")):
                        leftover.unlink(missing_ok=True)
        return summary | ({"projection": _projection(summary, times)} if times else {})

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
        inputs = {name: {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats.items()}
        if self.out.exists() and not self.out.is_dir():
            raise WrongArguments(f"--out {self.out}: expected a folder, found a file; name another")
        if (self.out / JOB).exists():
            self._compare(read_json(self.out / JOB, signed="model_id"), inputs)
        elif self.out.exists() and any(not path.name.startswith(".") for path in self.out.iterdir()):
            raise WrongArguments(f"--out {self.out}: expected an empty folder, found other files; name another")
        with errors_name(self.out):
            (self.out / STATS).mkdir(parents=True, exist_ok=True)
        write_json(self.out / JOB, self._job | {"inputs": inputs})

    def _compare(self, before: dict, inputs: dict) -> None:
        expected, actual = (
            {key: job.get(key) for key in ("format_version", "model_id")} | job.get("options", {})
            for job in (before, self._job)
        )
        for key in expected | actual:
            if expected.get(key) != actual.get(key):
                what = f"expected {key} {expected.get(key)} as in {JOB}, found {actual.get(key)}"
                raise WrongArguments(f"--out {self.out}: {what}; give the same, or name another folder")
        for name, stat in before["inputs"].items():
            if name not in inputs:
                raise WrongArguments(f"--in: expected {name} too, as the job in {self.out} has it; name all its inputs")
            if stat != inputs[name]:
                raise WrongArguments(f"{name}: changed since the job in {self.out} began; name another --out")

    def _missing_blocks(self, names: list[str], now: "_Progress") -> Iterator[Block]:
        """The blocks without a whole part. Adds the names of all parts to `names`."""
        for path in self.paths:
            for block in blocks_of(self._reader(path), self.options.part_rows, self._format_of(path)):
                names.append(block.part)
                stats, part = self._stats(block.part), self.out / block.part
                if stats and part.is_file() and part.stat().st_size == stats.get("bytes", part.stat().st_size):
                    now.bar.update(block.size)
                else:
                    yield block

    def _stats(self, part: str) -> dict | None:
        try:
            return read_json(stats_file(self.out, part), signed="io_seconds")
        except (FileNotFoundError, ValueError):
            return None

    def _summary(self, names: list[str], rows_now: int, seconds: float) -> dict:
        """Sums over all parts. Writes errors.jsonl."""
        total = dict.fromkeys(("rows", "failed", "rows_truncated", "layers", "seconds", "io_seconds"), 0)
        counts, errors = np.zeros(len(self.config["exits"]), int), self.out / f".{ERRORS}.partial"
        with errors_name(self.out / ERRORS), open(errors, "w", encoding="utf-8") as file:
            for name in names:
                stats = self._stats(name)
                if stats is None:
                    raise ValueError(f"{self.out}: the statistics of {name} are gone; {GO_ON}")
                total = {key: value + stats[key] for key, value in total.items()}
                counts += stats["exit_counts"]
                file.writelines(json.dumps(error) + "\n" for error in stats["errors"])
            file.flush()
            os.fsync(file.fileno())
        if total["failed"]:
            os.replace(errors, self.out / ERRORS)
        else:
            (self.out / ERRORS).unlink(missing_ok=True)
        mean = total["layers"] / total["rows"] if total["rows"] else None
        return {
            "export": str(self.exported),
            "model_id": self._job["model_id"],
            **self.engine._asdict(),
            "out": str(self.out),
            "inputs": len(self.paths),
            "parts": len(names),
            **{key: total[key] for key in ("rows", "failed", "rows_truncated")},
            "exit_counts": counts.tolist(),
            "mean_layers": mean,
            "layers_saved": None if mean is None else 1 - mean / self.config["exits"][-1],
            "core_seconds": total["seconds"],
            "io_core_seconds": total["io_seconds"],
            "rows_now": rows_now,
            "seconds": seconds,
            "rows_per_second": rows_now / seconds,
        }


class _Progress:
    """The bar, the errors that are printed, and a sample of the rows of this run."""

    def __init__(self, size: int):
        self.rows, self.sample = 0, list[tuple[str, ...]]()
        self._seen = self._errors = 0
        self._random = random.Random(0)
        self.bar = tqdm(total=size, unit="B", unit_scale=True, delay=2, file=sys.stderr, disable=None)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def count(self, part: Part) -> None:
        """A part that was written now."""
        self.rows += part.stats["rows"]
        for texts in part.sample:  # a reservoir: each row of all samples is in it with the same probability
            self._seen += 1
            at = len(self.sample) if len(self.sample) < COMPARED else self._random.randrange(self._seen)
            if at < COMPARED:
                self.sample[at : at + 1] = [texts]
        for error in part.stats["errors"][: max(0, REPORTED + 1 - self._errors)]:
            self._errors += 1
            line = f"{error['file']}:{error['line']}: {error['error']}"
            line = line if self._errors <= REPORTED else f"more errors are in {ERRORS}"
            self.bar.write(f"mini-ee batch: {line}", file=sys.stderr)
        self.bar.set_postfix(rows=self.rows, refresh=False)
        self.bar.update(part.size)


def _projection(summary: dict, times: dict) -> dict:
    """Core hours for a billion rows, with exits and with the full model.

    times: of a sample, in turns (PartWriter.compare). Reading and writing costs both the same.
    """
    ratio = (times["tokenizing"] + times["full"]) / (times["tokenizing"] + times["exits"])
    io = summary["io_core_seconds"] / summary["rows"]
    model = summary["core_seconds"] / summary["rows"] - io
    hours = {name: (io + model * share) * BILLION / HOUR for name, share in (("exits", 1), ("full", ratio))}
    return {"rows": BILLION, "core_hours": hours, "full_ratio": ratio, "compared_rows": times["rows"]}


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that names and patterns stand for, in their order. Folders among the matches of a pattern are left out.

    Raises WrongArguments if there are none, for another suffix, and for two files of one name.
    """
    paths = list[Path]()
    for pattern in patterns:
        matches = [Path(pattern)] if os.path.exists(pattern) else [Path(name) for name in sorted(glob.glob(pattern))]
        matches = [path for path in matches if len(matches) == 1 or not path.is_dir()]
        if not matches:
            raise WrongArguments(f"--in {pattern}: no such file")
        paths += matches
    names = set[str]()
    for path in paths:
        try:
            check_regular(path)
        except ValueError as error:
            raise WrongArguments(f"--in {error}") from None
        if kind_of(TableFile(path).path) not in (*SUFFIXES, ".txt"):
            expected = f"a name that ends with {', '.join(SUFFIXES)} or .txt, also with .gz"
            raise WrongArguments(f"--in {path}: expected {expected}; rename it")
        if path.name in names:
            raise WrongArguments(f"--in: expected different names, found {path.name} twice; rename one")
        names.add(path.name)
    return paths
