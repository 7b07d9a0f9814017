"""`mini-ee run`: a stream of sentences through an exported folder. No torch here, unless it is asked for as the engine.

In: one row a line, text as it stands (two texts with a tab between them), or JSON: {"text": ..., "text_b": ...}.
Out: JSON lines, in the same order: line, label, confidence, exit, layers, milliseconds; or line and error.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
import onnxruntime
from tqdm import tqdm

from mini_ee import WrongArguments, __version__
from mini_ee.export.runtime import CPU, CUDA, Runtime, read_manifest


def run(args) -> dict:
    """Answer every line; returns the JSON summary. A line that cannot be answered is reported and passed over."""
    if args.json and args.out is None:
        raise WrongArguments("--json prints one object on standard output: give the answers a file with --out")
    runtime = _open(args)
    rows = failed = 0
    layers = 0
    begin = time.perf_counter()
    with _input(args.file) as source, _output(args.out) as sink, tqdm(unit="row", delay=2, file=sys.stderr) as bar:
        numbered = enumerate(source, start=1)
        while lines := list(islice(numbered, args.batch_size)):
            for answer in _answers(runtime, lines, args.batch_size):
                rows += 1
                if "error" in answer:
                    failed += 1
                    print(f"mini-ee run: line {answer['line']}: {answer['error']}", file=sys.stderr)
                else:
                    layers += answer["layers"]
                sink.write(json.dumps(answer) + "\n")
            sink.flush()
            bar.update(len(lines))
    answered = rows - failed
    return {
        "export": str(args.exported),
        "rows": rows,
        "failed": failed,
        "mean_layers": layers / answered if answered else None,
        "seconds": time.perf_counter() - begin,
        "engine": runtime.segments().engine,
        "provider": runtime.provider,
        "seed": args.seed,
        "threads": args.threads,
        "versions": {
            "mini_ee": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }


def _open(args) -> Runtime:
    if args.engine == "torch":
        import torch

        from mini_ee.export.segments import torch_segments

        if args.threads:
            torch.set_num_threads(args.threads)
        segments = torch_segments(args.exported, read_manifest(args.exported), args.device or "cpu")
        return Runtime(args.exported, segments=segments)
    providers = {None: None, "cpu": [CPU], "cuda": [CUDA]}[args.device]
    return Runtime(args.exported, providers, threads=args.threads or 0)


def _answers(runtime: Runtime, lines: list[tuple[int, bytes]], batch_size: int) -> Iterator[dict]:
    """One batch of numbered lines -> answers in their order."""
    expected = runtime.config["task"]["texts"]
    rows, errors = {}, {}
    for number, line in lines:
        try:
            rows[number] = _row(line, expected)
            runtime.encode([rows[number]])
        except ValueError as error:
            rows.pop(number, None)
            errors[number] = str(error).removeprefix("row 0: ")
    answers = dict(zip(rows, runtime.run(list(rows.values()), batch_size)))
    for number, _ in lines:
        if number in errors:
            yield {"line": number, "error": errors[number]}
        else:
            fields = answers[number]._asdict()
            fields.pop("logits")
            yield {"line": number, **fields}


def _row(line: bytes, expected: int) -> tuple[str, ...]:
    """The texts of one line, or ValueError."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found {error.reason} at byte {error.start}") from None
    if not text.startswith("{"):
        texts = tuple(text.split("\t")) if expected == 2 else (text,)
    else:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected one JSON object, found {error}") from None
        texts = tuple(fields[key] for key in ("text", "text_b") if key in fields)
    if len(texts) != expected:
        form = '{"text": ...}' if expected == 1 else 'two texts with a tab between, or {"text": ..., "text_b": ...}'
        raise ValueError(f"expected {form}, found {len(texts)} texts")
    return texts


@contextmanager
def _input(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that takes its name when all is written."""
    if path is None:
        yield sys.stdout
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
