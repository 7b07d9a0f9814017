"""`mini-ee embed`: the embedding of each line of a file, from a run or an export of a sentence encoder."""

import io
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np

HELP = "write the embedding of each text of a file"
EXAMPLE = "mini-ee embed exported texts.txt --out embeddings.npy"
USUAL = "--layer", "--prompt-name", "--batch-size"
FORMATS = ".npy", ".jsonl"


def add(sub: ArgumentParser) -> None:
    from mini_ee.lab.cli.command_options import add_options, add_where, positive
    from mini_ee.lab.cli.rule_options import add_own, add_rule
    from mini_ee.lab.cli.task_options import OF_LABELS
    from mini_ee.lab.data.columns import TaskOptions

    sub.add_argument("run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run or of an export")
    file = "file with one text per line, or a table (.jsonl, .json, .csv, .tsv, .parquet)"
    sub.add_argument("file", type=Path, metavar="FILE", help=file)
    add_options(sub, TaskOptions, lacks=OF_LABELS)
    out = "file to write: .npy for an array (N, d) of float32, .jsonl for one JSON object per text"
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help=out)
    prompt = "prompt of the encoder that stands before each text (default the encoder's own default, if it has one)"
    sub.add_argument("--prompt-name", metavar="NAME", help=prompt)
    sub.add_argument("--batch-size", type=positive, default=32, help="batch size")
    add_where(sub)
    add_rule(sub)
    add_own(sub)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Embed all texts, then write the file, whole or not at all."""
    from mini_ee.lab.cli.open import open_trained
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.cli.task_options import columns_given
    from mini_ee.lab.data.files import sole_writer, write_bytes
    from mini_ee.lab.data.sentence_prompts import with_prompt
    from mini_ee.lab.data.table_files import SUFFIXES, file_error, kind_of
    from mini_ee.lab.data.text_files import read_rows
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.recording import exited_rows

    if args.out.suffix not in FORMATS:
        raise WrongArguments(f"--out {args.out}: expected a name that ends with {' or '.join(FORMATS)}")
    trained = open_trained(args.run, args)
    if not trained.embeds:
        raise WrongArguments(f"{args.run}: expected a sentence encoder, found a run of {trained.config['method']}")
    rule, (rows, _) = chosen_rule(args, trained), read_rows([args.file], columns_given(args), 1)
    if kind_of(args.file) not in SUFFIXES and rows[-1].line != len(rows):  # an embedding would be that of another line
        blank = next(number for number, row in enumerate(rows, start=1) if row.line != number)
        raise file_error(args.file, blank, "text", "a blank line", "remove it")
    texts = with_prompt(trained.tokenizer, [row.texts for row in rows], args.prompt_name)
    begin, encoded, segments = time.perf_counter(), trained.encode(texts), trained.segments()
    embeddings, layers = exited_rows(segments, rule, encoded, args.batch_size, trained.config["num_labels"])
    seconds = time.perf_counter() - begin
    buffer = io.BytesIO()
    if args.out.suffix == ".npy":
        np.save(buffer, embeddings)
    else:
        for embedding, depth in zip(embeddings.tolist(), layers.tolist()):
            buffer.write(json.dumps({"embedding": embedding, "layers": depth}).encode() + b"\n")
    with sole_writer(args.out):
        write_bytes(args.out, buffer.getbuffer())
    count, size = embeddings.shape
    say(f"{count} embeddings of {size} numbers, after {layers.mean():.2f} of {segments.exits[-1]} layers: {args.out}")
    return {
        "run": str(args.run),
        "out": str(args.out),
        "rows": count,
        "size": size,
        "rows_truncated": encoded.truncated,
        "mean_layers": float(layers.mean()),
        "rule": rule.to_dict(),
        "engine": segments.engine,
        "seconds": seconds,
    }
