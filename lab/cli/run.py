"""`mini-ee run`: a stream of sentences or prompts through an export. Torch is for a run and for --engine torch alone.

Input: a table or a file with a text a line, see data/text_files.py. On standard input, one example per line, as plain
text (two texts separated by a tab) or as JSON: {"text": ..., "text_b": ...}, or with the keys sentence, or sentence1
and sentence2. For a decoder each text is a prompt.
Output: JSON lines in the same order: line, label, confidence, exit, layers, milliseconds; of several labels at once
`label` is an object, name -> probability; of tokens a list with the label and the place of each, for a question the
answer and its place; for a decoder line, text, tokens, layers, mean_layers, milliseconds; for an
invalid line line and error.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from mini_ee.lab.cli.command_options import add_options, positive
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine, open_exported, say_without_guarantee
from mini_ee.lab.cli.task_options import OF_LABELS, columns_given
from mini_ee.lab.cli.temporary_export import as_export
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import MANIFEST, STDOUT, errors_name, read_json, sole_writer
from mini_ee.lab.data.lines import row_of_line
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.text_files import InputRow, TextReader
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import MISSING_KV
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import versions

HELP = "run sentences or prompts, or JSONL, through an export or a run, in batches; prints JSONL"
EXAMPLE = "mini-ee run exported reviews.txt --out answers.jsonl"
USUAL = "--out", "--batch-size", "--device"


def add(sub: ArgumentParser) -> None:
    """Add the options of the command."""
    folder = "folder of an export, or of a run, which is exported to a temporary folder"
    sub.add_argument("exported", type=Path, metavar="RUN_OR_EXPORTED", help=folder)
    file = "file to read: one text per line, or a table (default standard input)"
    sub.add_argument("file", type=Path, nargs="?", metavar="FILE", help=file)
    add_options(sub, TaskOptions, lacks=OF_LABELS)
    sub.add_argument("--out", type=Path, metavar="FILE", help="file to write (default standard output)")
    sub.add_argument("--batch-size", type=positive, default=32, help="batch size; 1 answers line by line")
    add_engine(sub, "torch")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="device (default cuda if there is one, else cpu)")
    decoder = sub.add_argument_group("a decoder", "each line is a prompt; the text is generated greedily")
    decoder.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="maximum number of tokens after each prompt (default 100, at most half of the context)",
    )
    decoder.add_argument(
        "--missing-kv", choices=MISSING_KV, help="keys and values of skipped layers (default as trained)"
    )


def run(args: Namespace) -> dict:
    """Answer every line. Returns the JSON summary.

    An invalid line is reported, counted in `failed`, and skipped; the exit status is 1 then.
    """
    if args.json and args.out is None:
        raise WrongArguments("--json prints one object on standard output: name a file for the answers with --out")
    if args.file and args.out and args.out.is_file() and args.file.exists() and args.out.samefile(args.file):
        raise WrongArguments(f"--out {args.out}: is the input file; name another")
    with as_export(args.exported, "run") as folder:
        return _summary(args, _open(args, folder))


def _summary(args: Namespace, served: Runtime) -> dict:
    """Answer every line, and count."""
    rows = failed = counted = layers = truncated = 0
    begin = time.perf_counter()
    progress = {"unit": "row", "delay": 2, "file": sys.stderr, "disable": None}  # None: only on a terminal
    source = _rows(args.file, columns_given(args), served.num_texts)
    with _output(args.out) as sink, tqdm(**progress) as bar:
        while lines := list(islice(source, args.batch_size)):
            answers, cut = _answers(served, lines, args.batch_size)
            truncated += cut
            for answer in answers:
                rows += 1
                if "error" in answer:
                    failed += 1
                    print(f"mini-ee run: line {answer['line']}: {answer['error']}", file=sys.stderr)
                else:
                    counted += np.size(answer["layers"])
                    layers += float(np.sum(answer["layers"]))
            with errors_name(args.out or STDOUT):
                sink.writelines(json.dumps(answer) + "\n" for answer in answers)
                sink.flush()
            bar.update(len(lines))
    if truncated:
        print(
            f"mini-ee run: {truncated} of {rows} texts were cut to {served.tokenizer.max_length} tokens",
            file=sys.stderr,
        )
    return {
        "export": str(args.exported),
        "rows": rows,
        "failed": failed,
        "rows_truncated": truncated,
        "mean_layers": layers / counted if counted else None,
        "seconds": time.perf_counter() - begin,
        "engine": served.engine,
        "precision": chosen_engine(args).precision,
        "provider": served.provider,
        "seed": args.seed,
        "threads": args.threads,
        "versions": versions(),
    }


def _open(args: Namespace, folder: Path) -> Runtime:
    """The export, of a classifier or a decoder."""
    manifest = folder / MANIFEST
    decoder = manifest.is_file() and read_json(manifest).get("unit") == "tokens"
    settings = {
        name: getattr(args, name) for name in ("max_new_tokens", "missing_kv") if getattr(args, name) is not None
    }
    if settings and not decoder:
        option = next(iter(settings)).replace("_", "-")
        raise WrongArguments(f"--{option} is for decoders; {args.exported} is a classifier")
    if args.engine != "torch":
        return open_exported(args, folder, **settings)
    chosen_engine(args)  # refuses --precision
    import torch

    from mini_ee.lab.export.torch_engine import torch_segments

    if args.threads:
        torch.set_num_threads(args.threads)
    runtime = Runtime(folder, segments=torch_segments(folder, args.device or "cpu"), **settings)
    say_without_guarantee(args, Engine(), folder, runtime.config)  # the export compared torch with its graph
    return runtime


def _answers(runtime: Runtime, lines: list[InputRow], batch_size: int) -> tuple[list[dict], int]:
    """One batch of rows -> (answers in their order, number of texts that were cut)."""
    rows, errors, cut = {}, {row.line: row.error for row in lines if row.error}, 0
    for row in (row for row in lines if not row.error):
        try:
            cut += runtime.check(row.texts)
            rows[row.line] = row.texts
        except ValueError as error:
            errors[row.line] = str(error).removeprefix("row 0: ")
    answers = _run(runtime, rows, batch_size, errors)
    fields = {number: {"error": text} for number, text in errors.items()}
    fields |= {number: answer.to_dict() for number, answer in answers.items()}
    return [{"line": row.line, **fields[row.line]} for row in lines], cut


def _run(runtime: Runtime, rows: dict[int, tuple], batch_size: int, errors: dict[int, str]) -> dict:
    """The answers to numbered rows. If the batch fails, each row runs alone, and its error goes to `errors`."""
    try:
        return dict(zip(rows, runtime.run(list(rows.values()), batch_size)))
    except (ValueError, RuntimeError) as error:
        if len(rows) == 1:
            errors[next(iter(rows))] = " ".join(str(error).split())
            return {}
    alone = {}
    for number, row in rows.items():
        alone |= _run(runtime, {number: row}, 1, errors)
    return alone


def _rows(path: Path | None, columns: TaskOptions, num_texts: int) -> Iterator[InputRow]:
    """The rows of a file; of standard input, or of a pipe, the lines, which may have JSON objects."""
    if path is not None and (path.is_file() or not path.exists()):
        yield from TextReader(path, columns, num_texts)
        return
    if path is None and sys.stdin is None:
        raise WrongArguments("standard input is closed; name a file with one text per line")
    with open(path, "rb") if path else nullcontext(sys.stdin.buffer) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield InputRow(number, row_of_line(line, num_texts))
            except ValueError as error:
                yield InputRow(number, error=str(error))


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that gets its name when it is complete. A device or a pipe is written directly."""
    if path is None:
        yield sys.stdout
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        with errors_name(path), open(path, "w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()
    if path.is_dir() or not path.parent.is_dir():
        raise WrongArguments(f"--out {path}: {'is a folder' if path.is_dir() else 'is in no folder'}; name a file")
    partial = path.with_name(f".{path.name}.partial")
    with sole_writer(path):
        try:
            with errors_name(path), open(partial, "w", encoding="utf-8") as file:
                yield file
            os.replace(partial, path)
        except OSError as error:  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
        finally:
            partial.unlink(missing_ok=True)
