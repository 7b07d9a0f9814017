"""`mini-ee export`: a run as ONNX, verified against torch before the folder gets its name."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.task_options import add_task, refuse_task_options

HELP = "export a run to ONNX, verified against torch"
EXAMPLE = "mini-ee export mini-ee-demo/run --out exported"
USUAL = "--segments", "--int8", "--int4", "--web"


def add(sub: ArgumentParser) -> None:
    from mini_ee.lab.cli.command_options import add_schedule, add_where
    from mini_ee.lab.cli.rule_options import add_own, add_rule

    sub.add_argument("run", type=Path, metavar="RUN", help="folder of a run or of a decoder's checkpoint")
    sub.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder of the export; must not exist")
    texts = (
        "folder of a task whose sentences verify the export (default built-in sentences; with --int8 or "
        "--fp16 those that the training held out, if they are there)"
    )
    add_task(sub, texts)
    precision = sub.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="export in half precision, for GPUs")
    precision.add_argument(
        "--int8", action="store_true", help="export in 8 bits, for CPUs: weights and inputs of linear maps are rounded"
    )
    precision.add_argument(
        "--int4",
        action="store_true",
        help="export a decoder's layers in 4 bits, for CPUs (inputs, embeddings in 8 bits)",
    )
    sub.add_argument(
        "--segments", action="store_true", help="also export a graph per segment, for other rules and re-batching"
    )
    sub.add_argument(
        "--web",
        action="store_true",
        help="also write a page that runs the model in a browser, offline; npm fetches its libraries",
    )
    add_where(sub, device=False)
    add_schedule(sub)
    add_rule(sub)
    add_own(sub)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Export, and say how far the graphs are from torch."""
    import mini_ee
    from mini_ee.lab.cli.open import open_run
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.cli.task_options import open_task_of
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.export.web_page import fetch_libraries, vendor_command
    from mini_ee.lab.training.train_run import check_task

    if args.schedule and not args.segments:
        raise WrongArguments("--schedule needs --segments, because model.onnx restarts after each exit; add it")
    args.device = "cpu"
    opened = open_run(args.run, args, plain=True)
    opened = opened._replace(rule=chosen_rule(args, opened))
    begin, texts = time.perf_counter(), None
    precision = "float16" if args.fp16 else "int8" if args.int8 else "int4" if args.int4 else "float32"
    if args.int4 and not opened.generates:
        raise WrongArguments(f"--int4 is for decoders that generate text, found {args.run}; give --int8")
    if args.task is None:
        refuse_task_options(args)
        texts = None if precision == "float32" else _held_out(opened, args)
    else:
        if opened.generates:
            raise WrongArguments(f"--task is for classifiers; {args.run} is a decoder")
        task = open_task_of([opened], args)
        check_task(opened, task, args.run)
        texts = task.split(task.default_split).texts
    parts = {"segments": args.segments, "web": args.web}
    manifest = mini_ee.export(opened, args.out, texts=texts, precision=precision, seed=args.seed, **parts)
    verified = manifest["verified"]
    what = f"{verified['tokens']} tokens after each of {verified['prompts']} prompts" if "tokens" in verified else ""
    equal = verified["token_agreement" if what and precision == "float32" else "prediction_agreement"]
    say(
        f"{len(manifest['graphs'])} graphs in {precision}, against torch on "
        f"{what or str(verified.get('texts')) + ' texts'}: logits within {verified['max_logit_difference']:.2g}, "
        f"{equal:.1%} of the {'tokens' if what else 'predictions'} and {verified['exit_agreement']:.1%} of the exits "
        f"equal."
    )
    say(f"Exported: {args.out}")
    if args.web:
        failed = fetch_libraries(args.out, say) if vendor_command(args.out) else None
        command = f"python -m http.server -d {args.out}"
        say(f"Page, without its libraries ({failed}): run {vendor_command(args.out)}" if failed else f"Page: {command}")
    answer = {key: manifest[key] for key in ("method", "exits", "rule", "precision", "opset", "verified")}
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    return answer | {"export": str(args.out), "bytes": size, "seconds": time.perf_counter() - begin}


def _held_out(opened, args: Namespace) -> list | None:
    """The texts that the training held out to test its rule; None if they are not there."""
    from mini_ee.lab.cli.task_options import open_task_of
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.training.holdout import split_rows

    if opened.unit not in ("rows", "prompts"):
        return None
    try:
        task = open_task_of([opened], args)
        rows = split_rows(task, opened.config["seed"], opened.config["training"].get("max_train")).test
    except (WrongArguments, KeyError):
        return None
    return list(rows.texts) or None
