"""Computes the answers to blocks of rows, and writes each to one part file. No torch here.

Memory holds one block for each worker, and one that waits. A batch has rows of similar length and at most BATCH_TOKENS
tokens; rows that exit leave it inside model.onnx. The same block always gives the same bytes: its batches do not depend
on other blocks, and times are not written.
"""

import io
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np

from mini_ee.lab.data.files import write_bytes, write_json
from mini_ee.lab.data.text_files import InputRow, TextReader
from mini_ee.lab.data.tokenizer import Encoded
from mini_ee.lab.data.values import shortened
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.export.runtime import Answer, Embedding, Runtime
from mini_ee.lab.rules import Never

STATS = ".parts"  # folder of the statistics of each part
CHARACTERS = 1 << 25  # of the texts of a block, if its rows are long
BATCH_TOKENS = 512  # larger batches are slower on one thread: their states do not fit into its cache
COMPARED = 1000  # rows of a part, at most, that may be compared with the full model
OBJECT_STORE = 256 << 20  # bytes of the object store of a cluster that is started here
GO_ON = "the same command goes on where it stopped"

Submit = Callable[..., Future]
"""(method of PartWriter, its arguments) -> its result, which a worker computes."""


class Block(NamedTuple):
    """The rows of one part."""

    part: str  # name of the part file: reviews.csv.part-00000.jsonl
    file: str  # name of the input
    rows: dict[int, InputRow]  # by their number in the file, from 1; damaged rows count, blank lines do not
    has_ids: bool
    seconds: float  # of CPU, for reading
    size: int  # bytes read


def rows_of(reader: TextReader) -> Iterator[InputRow]:
    """The rows of a file, with ids that JSON and Parquet hold. The last one is an error if the rest is not read."""
    count = 0
    try:
        for count, row in enumerate(reader, start=1):
            if isinstance(row.id, float) and not math.isfinite(row.id):
                row = row._replace(id=None if math.isnan(row.id) else str(row.id))
            try:
                json.dumps(row.id, default=str, allow_nan=False, ensure_ascii=False).encode()
            except ValueError:
                error = f"expected an id that UTF-8 and JSON hold, found {shortened(row.id)}; correct or drop the row"
                row = InputRow(row.line, error=error)
            yield row
    except ValueError as error:
        line, _, message = str(error).removeprefix(f"{reader.path}:").partition(": ")
        part = "the rest of this file is not read" if count else "no row of this file is read"
        yield InputRow(int(line), error=f"{message}; {part}")


def blocks_of(reader: TextReader, size: int, format: str) -> Iterator[Block]:
    """The blocks of a file: `size` rows each, or fewer if their texts have more than CHARACTERS characters.

    format: of the part files, and their suffix.
    """
    rows, file = enumerate(rows_of(reader), start=1), reader.path.name
    for count in itertools.count():
        begin, position, characters, block = process_time(), reader.position, 0, dict[int, InputRow]()
        for number, row in rows:
            block[number] = row
            characters += sum(map(len, row.texts))
            if len(block) == size or characters > CHARACTERS:
                break
        if not block:
            return
        part = f"{file}.part-{count:05d}.{format}"
        yield Block(part, file, block, reader.has_ids, process_time() - begin, reader.position - position)


class Part(NamedTuple):
    """What is known about a part that is written."""

    stats: dict  # rows, failed, rows_truncated, layers (their sum), exit_counts, seconds and io_seconds of CPU, errors
    sample: list[tuple[str, ...]]  # the texts of some rows
    size: int  # bytes of the input


class PartWriter:
    """Writes parts to the folder `out`. exported: the export. threads: CPU threads of a batch."""

    def __init__(self, exported: Path, out: Path, device: str = "cpu", threads: int = 1, engine: Engine = Engine()):
        self.runtime, self._out = engine.open(exported, device, threads), out
        self.runtime.warm_up()

    def write(self, block: Block) -> Part:
        """Compute a block and write its part. Raises OSError, which names the file, if it cannot be written."""
        begin = process_time()
        errors = {number: row.error for number, row in block.rows.items() if row.error}
        encoded = self._encoded(block, errors)
        numbers, answers = [number for number in block.rows if number not in errors], {}
        for batch in token_batches(encoded):
            for at, outcome in zip(batch, self._answers(encoded, batch)):
                (errors if isinstance(outcome, str) else answers)[numbers[at]] = outcome
        computed, answers = process_time(), dict(sorted(answers.items()))
        as_parquet = block.part.endswith(".parquet")
        content = parquet_content(block, answers, self.runtime) if as_parquet else jsonl_content(block, answers)
        written, exits = process_time(), [answer.exit for answer in answers.values()]
        stats = {
            "rows": len(answers),
            "failed": len(errors),
            "rows_truncated": encoded.truncated,
            "layers": float(sum(answer.layers for answer in answers.values())),
            "exit_counts": [exits.count(layer) for layer in self.runtime.exits],
            "seconds": written - begin + block.seconds,
            "io_seconds": written - computed + block.seconds,
            "errors": [
                {"file": block.file, "row": number, "line": block.rows[number].line, "error": error}
                for number, error in sorted(errors.items())
            ],
            "bytes": len(content),
        }
        write_json(stats_file(self._out, block.part), stats)  # before the part: a part that is there has statistics
        write_bytes(self._out / block.part, content)
        chosen = random.Random(block.part).sample(list(answers), min(COMPARED, len(answers)))
        return Part(stats, [block.rows[number].texts for number in chosen], block.size)

    def compare(self, rows: list[tuple[str, ...]], seconds: float) -> dict:
        """CPU seconds for tokenizing, and for these rows with exits and without, batch by batch in turns.

        It ends after about `seconds`.
        """
        begin, runtime = process_time(), self.runtime
        encoded = runtime.encode(rows)
        times, count = {"tokenizing": process_time() - begin, "exits": 0.0, "full": 0.0}, 0
        engines = {"exits": (runtime.segments(), runtime.rule), "full": (runtime.whole_model(), Never())}
        for batch in token_batches(encoded):
            inputs = encoded.batch(batch)
            for name in sorted(engines, reverse=bool(count % 2)):
                segments, rule = engines[name]
                start = process_time()
                early_exit(segments, next(iter(rule.of_batches([inputs])))[1], inputs)
                times[name] += process_time() - start
            count += len(batch)
            if process_time() - begin > seconds:
                break
        return times | {"tokenizing": times["tokenizing"] * count / len(rows), "rows": count}

    def _encoded(self, block: Block, errors: dict[int, str]) -> Encoded:
        """The rows without an error. Those that cannot be tokenized get one."""
        try:
            return self.runtime.encode([row.texts for row in block.rows.values() if not row.error])
        except ValueError:
            for number, row in block.rows.items():
                try:
                    if not row.error:
                        self.runtime.check(row.texts)
                except ValueError as error:
                    errors[number] = one_line(error)
        return self.runtime.encode([row.texts for number, row in block.rows.items() if number not in errors])

    def _answers(self, encoded: Encoded, batch: np.ndarray) -> list[Answer | Embedding | str]:
        """The answer to each row of a batch. If the batch fails, each row runs alone, and may have an error."""
        runtime = self.runtime
        try:
            inputs, rule = next(iter(runtime.rule.of_batches([encoded.batch(batch)])))
            result = early_exit(runtime.segments(), rule, inputs)
            depth = result.cost.depth.tolist()
            return runtime.answers(result.logits, inputs, result.exit_index.tolist(), depth)
        except (ValueError, RuntimeError) as error:
            if len(batch) == 1:
                return [one_line(error)]
        return [answer for at in range(len(batch)) for answer in self._answers(encoded, batch[at : at + 1])]


def jsonl_content(block: Block, answers: dict[int, Answer | Embedding]) -> bytes:
    """A line for each answer."""
    lines = (json.dumps(_fields(block, number, answer), default=str) for number, answer in answers.items())
    return "".join(f"{line}\n" for line in lines).encode()


def parquet_content(block: Block, answers: dict[int, Answer | Embedding], runtime: Runtime) -> memoryview:
    """A Parquet file of the same rows. Embeddings are lists; several labels are a map; ids are integers or strings."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    types = {"file": pa.string(), "row": pa.int64()}
    rows = [_fields(block, number, answer) for number, answer in answers.items()]
    if block.has_ids:
        ids = [row.id for row in block.rows.values() if row.id is not None]
        whole = all(type(value) is int and abs(value) < 1 << 63 for value in ids)
        types = {"id": pa.int64() if whole else pa.string()}
        for row in rows:
            row["id"] = row["id"] if whole or row["id"] is None else str(row["id"])
    if runtime.embeds:
        types |= {"embedding": pa.list_(pa.float32())}
    else:
        label = pa.string() if runtime.label_names else pa.float64()
        types |= {"label": pa.map_(pa.string(), pa.float64()) if runtime.multi_label else label}
        types |= {"confidence": pa.float64()}
    types |= {"exit": pa.int64(), "layers": pa.float64()}
    if runtime.multi_label:
        for row in rows:
            row["label"] = list(row["label"].items())
    buffer = io.BytesIO()
    write_table(pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()}), buffer)
    return buffer.getbuffer()


def stats_file(out: Path, name: str) -> Path:
    """The file with the statistics of a part."""
    return out / STATS / f"{name}.json"


def token_batches(encoded: Encoded) -> Iterator[np.ndarray]:
    """Row indices of each batch, from short rows to long ones: at most BATCH_TOKENS tokens with padding, or one row."""
    lengths = np.array([len(ids) for ids in encoded.ids], np.int64)
    order, begin = np.argsort(lengths, kind="stable"), 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] * (end + 1 - begin) > BATCH_TOKENS:
            yield order[begin:end]
            begin = end


def _fields(block: Block, number: int, answer: Answer | Embedding) -> dict:
    """The fields of an answer, after the id of its row, or its file and number."""
    fields = answer.to_dict()
    del fields["milliseconds"]
    return ({"id": block.rows[number].id} if block.has_ids else {"file": block.file, "row": number}) | fields


def one_line(error: Exception) -> str:
    """The message of the error of one row."""
    return " ".join(str(error).split()).removeprefix("row 0: ")


# ---- Workers ----
class Computing(NamedTuple):
    """Who computes the blocks: this process, several on this machine, or as many tasks at a time on Ray."""

    count: int = 1
    threads: int = 1  # of each
    device: str = "cpu"
    on_ray: bool = False

    def workers(self, exported: Path, out: Path, engine: Engine) -> AbstractContextManager[tuple[Submit, int]]:
        """How to call methods of PartWriter, and how many blocks may wait for their parts at a time."""
        writer_arguments = (exported, out, self.device, self.threads, engine)
        if self.on_ray:
            return _tasks_on_ray(writer_arguments, self.count)
        return _processes(writer_arguments, self.count) if self.count > 1 else _this_process(writer_arguments)


def parts_of(submit: Submit, blocks: Iterator[Block], most: int) -> Iterator[Part]:
    """The part of each block, as they are ready. Blocks are read while others are computed."""
    waiting = set[Future]()
    while True:
        waiting |= {submit(PartWriter.write, block) for block in islice(blocks, most - len(waiting))}
        if not waiting:
            return
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


@contextmanager
def _this_process(writer_arguments: tuple) -> Iterator[tuple[Submit, int]]:
    writer = PartWriter(*writer_arguments)

    def submit(method: Callable, *arguments) -> Future:
        future = Future()
        future.set_result(method(writer, *arguments))
        return future

    yield submit, 1


@contextmanager
def _processes(writer_arguments: tuple, count: int) -> Iterator[tuple[Submit, int]]:
    """Each has one block, and one more waits for it."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _end_with_parent)

    def submit(*call) -> Future:
        with handling(signal.SIGINT, signal.SIG_IGN):  # Ctrl-C goes to all processes: this one ends the others
            return pool.submit(_call, writer_arguments, *call)

    try:
        yield submit, 2 * count
    except BrokenProcessPool:
        raise RuntimeError(f"expected every worker process to finish, found one that ended; {GO_ON}") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()


def _end_with_parent() -> None:
    """End this process when its parent has died."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextmanager
def _tasks_on_ray(writer_arguments: tuple, count: int) -> Iterator[tuple[Submit, int]]:
    """On a cluster on this machine, or on the one that RAY_ADDRESS names.

    There, all machines must have the export and share the folder `out`. The texts come over the network.
    """
    import ray
    from ray.exceptions import RayTaskError

    _, _, device, threads, _ = writer_arguments
    address = os.environ.get("RAY_ADDRESS", "local")
    room = {"num_cpus": count * threads, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    try:
        ray.init(address, logging_level="ERROR", log_to_driver=False, **(room if address == "local" else {}))
        task = ray.remote(num_cpus=threads, num_gpus=int(device != "cpu"), max_calls=0)(_call)
        with handling(signal.SIGTERM, signal.default_int_handler):  # Ray has replaced the handler
            yield lambda *call: task.remote(writer_arguments, *call).future(), count
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ValueError | OSError) else RuntimeError(str(error))) from None
    except (ValueError, OSError):
        raise
    except Exception as error:  # Ray's own have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeError(f"Ray could not finish: {reason}; {GO_ON}") from None
    finally:
        ray.shutdown()


def _call(writer_arguments: tuple, method: Callable, *arguments):
    return method(_writer(*writer_arguments), *arguments)


@cache
def _writer(*arguments) -> PartWriter:
    """The PartWriter of a worker's process."""
    return PartWriter(*arguments)


@contextmanager
def handling(number: int, handler) -> Iterator[None]:
    """Handles a signal in this block. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
