"""`mini-ee batch`: an export over all rows of many files, in parts that are written whole or not at all. No torch."""

import os
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from mini_ee.lab.cli.command_options import add_options, given_options, positive
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine, say_without_guarantee
from mini_ee.lab.cli.task_options import OF_LABELS, columns_given
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.sessions import versions
from mini_ee.serve.batch import ERRORS, Job, JobOptions
from mini_ee.serve.batch_parts import Computing
from mini_ee.serve.command_serve import OF_RAY

HELP = "run the rows of many files through an export, in parts; a second call continues a killed job"
EXAMPLE = "mini-ee batch exported --in 'in/*' --out out"
USUAL = "--format", "--processes", "--device"


def add(sub: ArgumentParser) -> None:
    """Add the options of the command."""
    sub.add_argument("exported", type=Path, metavar="EXPORTED", help="folder of an export")
    inputs = (
        "files, or patterns in quotation marks: .jsonl, .json, .csv, .tsv, .parquet, or .txt with one text per line"
    )
    sub.add_argument("--in", dest="inputs", nargs="+", required=True, metavar="FILE", help=inputs)
    out = "folder for the parts; to continue a killed job, name its folder"
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    columns = sub.add_argument_group("columns of the inputs, and parts")
    add_options(columns, TaskOptions, lacks=OF_LABELS)
    add_options(columns, JobOptions)
    computing = sub.add_argument_group("computing")
    computing.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device")
    add_engine(computing)
    processes = "number of processes, or of tasks on Ray (default one for each core; with --threads or on a GPU, 1)"
    computing.add_argument("--processes", type=positive, metavar="N", help=processes)
    cluster = "run tasks on Ray: on this machine, or on the cluster that RAY_ADDRESS names"
    computing.add_argument("--ray", action="store_true", help=cluster)
    projection = "leave out the projection to a billion rows, which takes a few seconds"
    computing.add_argument("--no-projection", action="store_true", help=projection)


def run(args: Namespace) -> dict:
    """Compute the missing parts. Returns the JSON summary; `failed` is the number of damaged rows."""
    try:
        options = JobOptions(**given_options(args, JobOptions))
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    if args.ray:
        if not find_spec("ray"):
            raise WrongArguments("--ray needs Ray: pip install 'mini-ee[ray]'")
        os.environ.update({name: value for name, value in OF_RAY.items() if name not in os.environ})
    job = Job(args.exported, args.inputs, args.out, options, columns_given(args), chosen_engine(args))
    alone = args.device != "cpu" or args.threads is not None
    count = args.processes or (1 if alone else os.cpu_count() or 1)
    say_without_guarantee(args, job.engine, args.exported, job.config)
    summary = job.run(Computing(count, args.threads or 1, args.device, args.ray), not args.no_projection)
    for line in _lines(summary):
        print(line, file=sys.stderr if args.json else sys.stdout)
    return summary | {"seed": args.seed, "threads": args.threads, "versions": versions()}


def _lines(summary: dict) -> list[str]:
    """The summary in words."""
    rows, mean = summary["rows"], summary["mean_layers"]
    parts = f"{rows:,} rows in {summary['parts']:,} parts: {summary['out']}"
    lines = [f"{parts}; {summary['failed']:,} rows failed: {summary['out']}/{ERRORS}" if summary["failed"] else parts]
    if rows:
        depth = f"{mean:.2f} layers on average, {summary['layers_saved']:.1%} of the layers saved"
        lines.append(f"{depth}, {summary['core_seconds']:,.1f} core seconds")
    if summary["rows_now"]:
        lines.append(f"{summary['rows_now']:,} rows now, {summary['rows_per_second']:,.0f} rows per second")
    if projection := summary.get("projection"):
        hours = projection["core_hours"]
        lines.append(f"core hours for a billion such rows: {hours['exits']:,.0f} with exits")
        ratio = f"{projection['full_ratio']:.2f} times as many, on {projection['compared_rows']:,} rows in turns"
        lines.append(f"  {hours['full']:,.0f} with the full model ({ratio})")
    return lines
