"""`mini-ee calibrate EXPORTED`: the thresholds and the guarantee of an export, from its own graph. No torch here.

What the engine computes is calibrated and tested, in int8 and bf16 too. The full model of the guarantee is the last
exit of this graph in this engine.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from mini_ee.lab.cli.command_options import positive, refuse
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine
from mini_ee.lab.cli.guarantee_options import (
    BATCH,
    add_guarantee,
    calibrated,
    calibrated_top_k,
    check,
    check_epsilon,
    report,
    top_k_lines,
)
from mini_ee.lab.cli.task_options import OF_LABELS, add_task, columns_given, refuse_task_options, task_options
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.decoder_texts import cut_text
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.rankings import rankable, ranked
from mini_ee.lab.data.tasks import Task, load_task
from mini_ee.lab.data.text_files import Row, read_texts
from mini_ee.lab.errors import WrongArguments

if TYPE_CHECKING:
    from mini_ee.lab.export.runtime import Runtime, TokenRuntime
    from mini_ee.lab.recording import Record

PIECE = 64  # tokens of a piece of a decoder's running text


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("an export", "its graph in an engine gives the thresholds and the guarantee")
    add_task(sub, "folder of a task with texts like those in service, whose labels are not read")
    group.add_argument("--split", help="split of --task (default train)")
    text = "file: one text per line, or a table, for an export; running text for a decoder's export"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    add_guarantee(group)
    top = "number of best texts of a query, the first text of a pair, that stay the best, if EXPORTED is a reranker"
    group.add_argument("--top-k", type=positive, metavar="K", help=top)
    out = "folder of the export with the new rule; must not exist (default EXPORTED itself, which is replaced)"
    group.add_argument("--out", type=Path, metavar="DIR", help=out)
    add_engine(group)
    size = f"number of examples in a batch; it changes predictions in int8 and bf16 a little (default {BATCH})"
    group.add_argument("--batch-size", type=positive, metavar="N", help=size)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Record every exit of the graph, calibrate, write the rule into the export, and print what other texts show."""
    from mini_ee.lab.export.calibrated import check_calibratable, write_calibrated
    from mini_ee.lab.threshold_curve import threshold_curve

    check_epsilon(args)
    check(args)
    if args.top_k is not None and (args.delta is None or args.guarantee == "conformal" or args.measure):
        raise WrongArguments("--top-k takes --epsilon and --delta, and no --guarantee conformal or --measure")
    refuse(args, ("model",), f"is for runs; {args.run} is an export")
    if args.device not in ("cpu", "cuda"):
        raise WrongArguments(f"--device {args.device}: expected cpu or cuda for an export")
    if args.out is not None and args.out.exists():
        raise FileExistsError(f"{args.out}: is there already; name another folder or remove it")
    engine = chosen_engine(args)
    runtime = engine.open(args.run, args.device, args.threads or 0)
    check_calibratable(runtime, args.guarantee == "conformal", args.top_k is not None)
    size = args.batch_size or BATCH
    read = _read_tokens if runtime.generates else _read_rows
    recorded, task, source = read(args, runtime, size, say)
    if args.top_k is not None:
        rule, answer, guarantee = calibrated_top_k(args, recorded)
    else:
        rule, answer, guarantee = calibrated(args, runtime, recorded)
    fields = ("rows_calibration", "rows_fresh", "end_to_end", "mean_layers", "agreement", "queries_fresh")
    computed = {"batch_size": size, **engine._asdict(), "provider": runtime.provider}
    computed["weights"] = runtime.config["precision"]
    measured = source | {key: answer[key] for key in fields if key in answer} | computed
    out = args.out or args.run
    curve = threshold_curve(recorded, rule, task, None) if task else None
    model_id = write_calibrated(runtime, out, rule, guarantee, answer["exit_counts"], measured, curve)
    name = ", ".join(source.values())
    if args.top_k is not None:
        say(top_k_lines(answer, name, runtime.exits[-1]))
    else:
        report(args, runtime.exits, answer, f"{'tokens' if runtime.generates else 'rows'} of {name}", say)
    say(f"The rule of {out} is now these thresholds; its model id is {model_id}.")
    answer = source | answer | computed | {"model": model_id}
    return {"method": runtime.config["method"], "exits": list(runtime.exits), "run": str(out)} | answer


def _read_rows(args: Namespace, runtime: "Runtime", size: int, say: Callable) -> tuple["Record", Task, dict]:
    """The record of rows of texts, the task that they would have, and where they come from."""
    from mini_ee.lab.recording import predictions, record

    texts, source = _texts(args, runtime)
    if args.top_k is not None:
        texts = [*compress(texts, rankable(texts, args.top_k, say))]
    recorded = record(runtime.segments(), runtime.encode(texts), size, progress="reading")
    names, kind = tuple(runtime.label_names), runtime.token_task.kind if runtime.token_task else ""
    kinds = {"multi_label": runtime.multi_label, "token_kind": kind, "top_k": args.top_k}
    task = Task(runtime.config["method"], names, (), {}, **kinds)
    predicted = predictions(recorded.logits, task)
    if args.top_k is not None:
        return recorded._replace(labels=ranked(predicted[:, -1], texts)), task, source
    recorded.segments.measures["prediction"] = predicted  # of several labels, their set
    return recorded, task, source


def _read_tokens(args: Namespace, runtime: "TokenRuntime", size: int, say: Callable) -> tuple["Record", None, dict]:
    """The record of the tokens of a file, in pieces, and where they come from."""
    from mini_ee.lab.export.token_record import record_tokens

    refuse(args, ("task", "split"), f"is for classifiers; {args.run} is a decoder")
    refuse_task_options(args, "is for classifiers, found a decoder")
    if args.text is None:
        raise WrongArguments(f"{args.run} is an export: give running text like that in service, with --text FILE")
    first = runtime.tokenizer.ids_of("")
    length = min(PIECE, runtime.config["max_tokens"] - len(first))
    ids = runtime.tokenizer.ids_of(read_text(args.text), special=False)
    if len(ids) < 2 * length:
        expected = f"expected at least {2 * length} tokens, two pieces of {length}"
        raise WrongArguments(f"{args.text}: {expected}, found {len(ids)}; give a longer text")
    return record_tokens(runtime, cut_text(ids, length, first), size), None, {"task": args.text.name}


def _texts(args: Namespace, runtime: "Runtime") -> tuple[list[Row], dict]:
    """The rows of --text or --task, and where they come from. Labels are not read."""
    if args.text is not None and args.task is not None:
        raise WrongArguments("expected texts from --text or from --task, found both; leave one out")
    if args.text is None and args.task is None:
        raise WrongArguments(f"{args.run} is an export: give texts like those in service, with --text FILE or --task")
    if args.text is not None:
        refuse_task_options(args, "describes the files of --task, found --text", OF_LABELS)
        refuse(args, ("split",), "is for --task, found --text")
        texts, source = read_texts([args.text], columns_given(args), runtime.num_texts), {"task": args.text.name}
    else:
        task = load_task(Path(args.task), task_options(args, TaskOptions()))
        split = args.split or ("train" if "train" in task.splits else task.default_split)
        texts, source = list(task.split(split).texts), {"task": task.name, "split": split}
    if len(texts[0]) != runtime.num_texts:
        raise WrongArguments(f"expected {runtime.num_texts} texts in a row for {args.run}, found {len(texts[0])}")
    return texts, source
