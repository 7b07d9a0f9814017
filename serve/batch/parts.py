"""Computes the answers to a block of rows and writes them to one part file. No torch here.

A batch has rows of similar length and at most BATCH_TOKENS tokens. Rows that exit leave it inside model.onnx. The same
block always gives the same bytes: its batches do not depend on other blocks, and times are not written.
"""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.data.files import write_bytes, write_json
from mini_ee.lab.data.tokenizer import Encoded
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.runtime import Answer, Embedding, Runtime
from mini_ee.lab.export.sessions import PROVIDERS
from mini_ee.lab.rules import NeverExit
from mini_ee.serve.batch.rows import Block, error_record

STATS = ".parts"  # folder of the statistics of each part
BATCH_TOKENS = 512  # larger batches are slower on one thread: their states do not fit into its cache
SAMPLE = 2000  # rows of a part, at most, that may be used for the projection


class Part(NamedTuple):
    """What is known about a part that is written."""

    name: str
    stats: dict  # rows, failed, rows_truncated, layers (their sum), exit_counts, seconds and io_seconds of CPU, errors
    sample: list[tuple[tuple[str, ...], Any]]  # (texts, label) of some rows
    size: int  # bytes of the input


class PartWriter:
    """Writes parts to the folder `out`. exported: the export. threads: CPU threads of a batch."""

    def __init__(self, exported: Path, out: Path, device: str = "cpu", threads: int = 1):
        self.runtime = Runtime(exported, PROVIDERS[device], threads=threads)
        self._out = out
        self.runtime.warm_up()

    def write(self, block: Block) -> Part:
        """Compute a block and write its part. Raises OSError, which names the file, if it cannot be written."""
        begin = process_time()
        rows, encoded, errors = self._encoded(block)
        answers: dict[int, Answer | Embedding] = {}
        for batch in token_batches(encoded):
            for at, found in zip(batch, self._answers(encoded, batch)):
                row = rows[at]
                if isinstance(found, ValueError):
                    errors.append(_error(block, row, found))
                else:
                    answers[row] = found
        computed = process_time()
        done = sorted(answers)
        if block.part.endswith(".parquet"):
            content = parquet_content(block, done, answers, self.runtime)
        else:
            content = jsonl_content(block, done, answers)
        errors = sorted([*block.errors, *errors], key=lambda each: each["row"])
        written = process_time()
        stats = {
            "rows": len(done),
            "failed": len(errors),
            "rows_truncated": encoded.truncated,
            "layers": float(sum(answers[row].layers for row in done)),
            "exit_counts": np.bincount([answers[row].exit for row in done], minlength=len(self.runtime.exits)).tolist(),
            "seconds": written - begin + block.seconds,
            "io_seconds": written - computed + block.seconds,
            "errors": errors,
            "bytes": len(content),
        }
        write_json(stats_file(self._out, block.part), stats)  # before the part: a part that is there has statistics
        write_bytes(self._out / block.part, content)
        chosen = random.Random(block.part).sample(done, min(SAMPLE, len(done)))
        sample = [(block.texts[row], getattr(answers[row], "label", None)) for row in chosen]
        return Part(block.part, stats, sample, block.size)

    def compare(self, rows: list[tuple[str, ...]], seconds: float) -> dict:
        """CPU seconds for tokenizing, and for these rows with exits and without, batch by batch in turns.

        It ends after about `seconds`.
        """
        begin = process_time()
        encoded = self.runtime.encode(rows)
        times, count = {"tokenizing": process_time() - begin, "exits": 0.0, "full": 0.0}, 0
        engines = {
            "exits": (self.runtime.segments(), self.runtime.rule),
            "full": (self.runtime.whole_model(), NeverExit()),
        }
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

    def _encoded(self, block: Block) -> tuple[list[int], Encoded, list[dict]]:
        """The rows of the block that can be tokenized, and an error for each of the others."""
        try:
            return list(range(len(block.texts))), self.runtime.encode(block.texts), []
        except ValueError:
            errors = {}
            for row, texts in enumerate(block.texts):
                try:
                    self.runtime.check(texts)
                except ValueError as error:
                    errors[row] = _error(block, row, error)
        rows = [row for row in range(len(block.texts)) if row not in errors]
        return rows, self.runtime.encode([block.texts[row] for row in rows]), list(errors.values())

    def _answers(self, encoded: Encoded, batch: np.ndarray) -> list[Answer | Embedding | ValueError]:
        """The answer to each row of a batch. If the batch fails, each row runs alone, and may have an error."""
        runtime = self.runtime
        try:
            inputs, rule = next(iter(runtime.rule.of_batches([encoded.batch(batch)])))
            result = early_exit(runtime.segments(), rule, inputs)
            depth = result.cost.depth.tolist()
            return runtime.answers(result.logits, result.exit_index.tolist(), depth, [0.0] * len(batch))
        except (ValueError, RuntimeError) as error:
            if len(batch) == 1:
                return [ValueError(" ".join(str(error).split()))]
        return [found for at in range(len(batch)) for found in self._answers(encoded, batch[at : at + 1])]


def jsonl_content(block: Block, done: list[int], answers: dict) -> bytes:
    """A line for each of these rows of the block."""
    lines = (json.dumps(_keys(block, row) | _fields(answers[row]), default=str) for row in done)
    return "".join(f"{line}\n" for line in lines).encode()


def parquet_content(block: Block, done: list[int], answers: dict, runtime: Runtime) -> memoryview:
    """A Parquet file of the same rows. Embeddings are lists; several labels are a map; ids are integers or strings."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    types = {"exit": pa.int64(), "layers": pa.float64()}
    if runtime.embeds:
        types = {"embedding": pa.list_(pa.float32())} | types
    else:
        label = pa.string() if runtime.label_names else pa.float64()
        label = pa.map_(pa.string(), pa.float64()) if runtime.multi_label else label
        types = {"label": label, "confidence": pa.float64()} | types
    if block.ids is None:
        types = {"file": pa.string(), "row": pa.int64()} | types
    else:
        known = [each for each in block.ids if each is not None]
        whole = all(type(each) is int and abs(each) < 1 << 63 for each in known)
        types = {"id": pa.int64() if whole else pa.string()} | types
    rows = [_keys(block, row) | _fields(answers[row]) for row in done]
    for row in rows:
        if types.get("id") == pa.string() and row["id"] is not None:
            row["id"] = str(row["id"])
        if runtime.multi_label:
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


def _keys(block: Block, row: int) -> dict:
    """What identifies a row: its id, else file and row number."""
    if block.ids is not None:
        return {"id": block.ids[row]}
    return {"file": block.file, "row": block.numbers[row]}


def _fields(answer: Answer | Embedding) -> dict:
    fields = answer.to_dict()
    del fields["milliseconds"]
    return fields


def _error(block: Block, row: int, error: ValueError) -> dict:
    text = " ".join(str(error).split()).removeprefix("row 0: ")
    return error_record(block.file, block.numbers[row], block.lines[row], text)
