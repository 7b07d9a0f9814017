"""`mini-ee calibrate` of a classifier: thresholds from examples that chose nothing of its training."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from mini_ee.lab.cli.guarantee_options import BATCH, add_guarantee, calibrated, check, report
from mini_ee.lab.cli.task_options import add_task
from mini_ee.lab.errors import WrongArguments

HELD_OUT = "default the examples that the training held out to test the default rule"


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a classifier")
    add_task(sub, f"folder of a task with examples like those in service ({HELD_OUT})")
    group.add_argument("--split", help=f"split of --task ({HELD_OUT})")
    add_guarantee(group)


def calibrate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Write the rule into the run and print its agreement on other examples. Returns the JSON answer."""
    from mini_ee.lab.threshold_curve import threshold_curve
    from mini_ee.lab.training.run_folder import write_rule
    from mini_ee.lab.training.unit import load_unit

    check(args)
    recorded, source, task = _rows(opened, args)
    rule, answer, guarantee = calibrated(args, opened, recorded)
    curve = threshold_curve(recorded, rule, task, recorded.labels)
    write_rule(args.run, rule, guarantee, answer["exit_counts"], curve)
    examples = f"{load_unit(opened.unit).noun} of {source['task']}, {source['split']}"
    report(args, opened.exits, answer, examples, say)
    say(f"The rule of {args.run} is now these thresholds.")
    return source | answer


def _rows(opened, args: Namespace):
    """The examples of --task, or the held-out test examples, which tested only the default rule.

    Examples that chose the epoch would guarantee too much, because the model fits them better than others.
    """
    from mini_ee.lab.cli.task_options import open_task_of
    from mini_ee.lab.recording import record
    from mini_ee.lab.training.holdout import split_rows
    from mini_ee.lab.training.train_run import check_task, trained_on

    if not opened.label_names:
        raise WrongArguments(
            f"{args.run}: expected a classifier, found a regression, which has no confidence to calibrate"
        )
    task = open_task_of([opened], args)
    check_task(opened, task, args.run)
    if args.split or not trained_on(opened, task):
        split = args.split or ("train" if "train" in task.splits else task.default_split)
        rows = task.split(split)
    else:
        max_train = opened.config["training"].get("max_train")
        split, rows = "hold-out", split_rows(task, opened.config["seed"], max_train).test
        if not len(rows):
            raise WrongArguments(f"{args.run}: its training held out no test examples; give examples with --task DIR")
    recorded = record(opened.segments(), opened.encode(rows.texts), BATCH, progress="reading")
    return recorded._replace(labels=rows.labels), {"task": task.name, "split": split}, task
