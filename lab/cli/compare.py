"""`mini-ee compare`: several runs in one table, with times measured in turns."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import SCHEDULES, positive, refuse
from mini_ee.lab.cli.generate import add_sampling, sampling_of
from mini_ee.lab.cli.task_options import add_task, refuse_task_options
from mini_ee.lab.errors import WrongArguments

HELP = "compare several runs in one table, with times measured in turns"
EXAMPLE = "mini-ee compare run-a run-b"
USUAL = "--task", "--sweep", "--picture"
BATCH_SIZE = 32


def add(sub: ArgumentParser) -> None:
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs or exports")
    add_task(sub, "folder of a task (default the task of the trainings)")
    sub.add_argument("--split", help="split to evaluate (default dev if there is one, else test)")
    sub.add_argument(
        "--max-rows",
        type=positive,
        metavar="N",
        help="maximum number of examples or generated texts (default all examples, 100 texts)",
    )
    sub.add_argument("--batch-size", type=positive, help="batch size; 1 measures latency (default 32)")
    sub.add_argument("--model", type=Path, metavar="DIR", help="folder of the runs' backbone, if it moved")
    sub.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1, ...")
    sub.add_argument(
        "--schedule",
        type=_schedules,
        metavar="S",
        help="schedules of lora-exits, such as restart,parallel; one table row for each (default restart)",
    )
    sub.add_argument("--sweep", action="store_true", help="also evaluate other values of each rule's setting")
    sub.add_argument(
        "--picture", type=Path, metavar="PNG", help="PNG file: loss and accuracy by layer; with --sweep curves"
    )
    sub.add_argument("--text", type=Path, metavar="FILE", help="file of the decoders' stories, if it moved")
    add_sampling(sub)


def _schedules(text: str) -> tuple[str, ...]:
    import argparse

    names = tuple(text.split(","))
    if not set(names) <= set(SCHEDULES):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(SCHEDULES)}, separated by commas, found {text!r}"
        )
    return names


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Open the runs, compare them, print and draw."""
    from mini_ee.lab.cli.open import of_rows

    schedules, args.schedule = args.schedule or (None,), None
    opened = [one for folder in args.runs for one in _opened(folder, schedules, args)]
    if schedules != (None,) and not any(getattr(one.trained, "schedule", None) for one in opened):
        raise WrongArguments("--schedule is for runs of lora-exits, and none of these runs has streams")
    if of_rows([one.trained for one in opened]):
        return _rows(opened, args, say)
    return _tokens([one.trained for one in opened], args, say)


def _opened(folder: Path, schedules, args: Namespace) -> list:
    """A run, once for each schedule if it has streams."""
    from mini_ee.lab.cli.open import open_trained, schedule_of
    from mini_ee.lab.evaluation.comparison import Compared

    first = open_trained(folder, args)
    if schedules == (None,) or not getattr(first, "schedule", None):
        return [Compared(str(folder), first, first.config["method"])]
    scheduled = []
    for schedule in schedules:
        args.schedule = schedule
        one = open_trained(folder, args)
        groups = ["+".join(map(str, group)) for group in schedule_of(one)["schedule"]]
        scheduled.append(Compared(str(folder), one, " ".join([one.config["method"], *groups])))
    args.schedule = None
    return scheduled


def _rows(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.cli.open import schedule_of
    from mini_ee.lab.cli.task_options import open_task_of
    from mini_ee.lab.evaluation.comparison import compare_rows
    from mini_ee.lab.evaluation.plots import draw_compared
    from mini_ee.lab.evaluation.row_evaluation import over_seeds, rows_of
    from mini_ee.lab.evaluation.tables import compare_table, losses_table, ranges_table, score_name, seeds_table
    from mini_ee.lab.training.train_run import check_task

    refuse(args, ("text", "temperature", "top_k", "top_p"), "is for decoders")
    task = open_task_of([one.trained for one in opened], args)
    for one in opened:
        check_task(one.trained, task, one.name)
    if args.picture and task.regression and not args.sweep:
        raise WrongArguments(
            "--picture shows the cross-entropy of the exits, and a regression has none; give --sweep too"
        )
    split, rows = rows_of(task, args.split, args.max_rows, args.seed)
    batch_size = args.batch_size or BATCH_SIZE
    compared = compare_rows(opened, task, rows, batch_size, args.sweep)
    answer = {"task": task.name, "split": split, "batch_size": batch_size} | compared
    for row, one in zip(answer["rows"], opened):
        row |= schedule_of(one.trained)
    say(compare_table(answer["rows"], score_name(task.metrics)))
    if args.sweep:
        say(losses_table(answer["rows"]))
        say(ranges_table(answer["rows"], answer["timed_rows"]))
    answer["over_seeds"] = over_seeds(answer["rows"], [one.trained.config for one in opened])
    if answer["over_seeds"]:
        say(seeds_table(answer["over_seeds"], args.sweep))
    if args.picture:
        draw_compared(args.picture, answer, args.sweep)
        say(f"Picture: {args.picture}")
    return answer


def _tokens(runs, args: Namespace, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.comparison import compare_tokens, have_history
    from mini_ee.lab.evaluation.plots import draw_training, draw_writing
    from mini_ee.lab.evaluation.tables import heads_table, writing_table

    why = "is not for decoders: they generate the kind of text that they learned"
    refuse(args, ("task", "split"), why)
    refuse_task_options(args, why)
    refuse(args, ("batch_size",), "is for classifiers; decoders are timed text by text")
    exported = [folder for folder, run in zip(args.runs, runs) if run.is_exported]
    if exported:
        raise WrongArguments(f"{exported[0]}: expected a run, found an export; give the run that it came from")
    if args.picture and not args.sweep and not have_history(runs):
        raise WrongArguments("--picture draws savings and losses of these decoders: give --sweep too")
    texts = args.text and str(args.text)
    answer = compare_tokens(runs, texts, args.max_rows, sampling_of(args), args.sweep, args.seed)
    say(writing_table(answer["rows"], args.sweep))
    if answer["heads"]:
        say(heads_table(answer))
    if args.picture:
        if args.sweep:
            draw_writing(args.picture, answer)
        else:
            draw_training(args.picture, answer["heads"])
        say(f"Picture: {args.picture}")
    return answer
