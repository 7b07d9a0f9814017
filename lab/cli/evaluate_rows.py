"""`mini-ee evaluate` of a classifier or a regression: the score of each exit, and what a rule saves."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.cli.command_options import add_schedule, positive, refuse
from mini_ee.lab.cli.task_options import add_task_files
from mini_ee.lab.data.metrics import majority
from mini_ee.lab.registry import MEASUREMENTS


class Measured(NamedTuple):
    """One evaluation. answer: the JSON so far."""

    rule: Any  # of rules.py
    task: Any  # data.tasks.Task
    rows: Any  # the Split with the examples
    encoded: Any  # the same, encoded
    recorded: Any  # recording.Record of them
    answer: dict


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a classifier")
    add_task_files(sub)
    group.add_argument("--split", help="split to evaluate (default dev if there is one, else test)")
    add_schedule(group)
    top = "number of best texts; counts the queries (first texts) of a reranker that keep those of the full model"
    group.add_argument("--top-k", type=positive, metavar="K", help=top)
    group.add_argument(
        "--overthinking",
        action="store_true",
        help="also list examples that one exit predicts correctly and a later exit does not",
    )
    group.set_defaults(hardness=False)
    if "hardness" in MEASUREMENTS:
        group.add_argument(
            "--hardness",
            action="store_true",
            help="also measure the hardness of examples: the memorized layer and its correlations",
        )


def evaluate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Measure a classifier and print the results."""
    return conclude(measure(opened, args, say), args, say)


def measure(opened, args: Namespace, say: Callable[[str], None]) -> Measured:
    """Run all exits on the examples, and print the tables."""
    from mini_ee.lab.cli.open import schedule_of
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.cli.task_options import open_task_of
    from mini_ee.lab.evaluation.row_evaluation import evaluate, read_rows, rows_of
    from mini_ee.lab.evaluation.tables import exits_table, score_name, sweep_table
    from mini_ee.lab.training.train_run import check_task

    if len(opened.exits) == 1:
        refuse(args, ("sweep",), f"chooses between exits; {args.run} has one, after layer {opened.exits[0]}")
    task = open_task_of([opened], args)
    check_task(opened, task, args.run)
    rule = chosen_rule(args, opened)
    if not task.regression:
        refuse(args, ("top_k",), f"ranks texts by a number; {task.name} has classes")
    if task.regression:
        why = f"counts right predictions; {task.name} is a regression, give a task with classes"
        refuse(args, ("overthinking", "hardness"), why)
    split, rows = rows_of(task, args.split, args.max_rows, args.seed)
    encoded, copies = _encoded(opened, task, split, rows, say)
    recorded = read_rows(opened, encoded, rows.labels, args.batch_size)
    sweeps = args.sweep and not rule.plans_from_texts
    swept = swept_rules(rule if args.rule else None, recorded, task) if sweeps else None
    answer = evaluate(opened, rule, recorded, task, encoded, args.batch_size, swept)
    answer = {"method": opened.config["method"], "split": split, "copies": copies} | schedule_of(opened) | answer
    if "schedule" in answer:
        say(f"Streams that start together, by exit layer: {answer['schedule']}")
    say(exits_table(answer, score_name(task.metrics)))
    if swept is not None:
        say(sweep_table(answer["rows"], score_name(task.metrics)))
    if args.overthinking:
        answer["overthinking"] = _overthinking(recorded, task, rows, say)
    if args.top_k is not None:
        answer["top_k"] = _top_k(recorded, rule, rows, args.top_k, say)
    if args.hardness:
        answer["hardness"] = _hardness(recorded, opened, task, rows, args.batch_size, say)
    return Measured(rule, task, rows, encoded, recorded, answer)


def conclude(measured: Measured, args: Namespace, say: Callable[[str], None]) -> dict:
    """Print the last lines. Returns the answer, with the accuracy of a constant prediction."""
    from mini_ee.lab.evaluation.tables import score_name

    task, rows, answer = measured.task, measured.rows, measured.answer
    if answer["always"] is not None:
        say(f"The prediction is always {answer['always']}.")
    if not task.regression:
        most, answer["majority"] = task.label_names[np.bincount(rows.labels).argmax()], majority(rows.labels)
        no_better = ", and the full model is no better" * (answer["per_exit_accuracy"][-1] <= answer["majority"])
        say(f"If {most} is predicted for every example: accuracy {answer['majority']:.3f}{no_better}.")
    if (score := answer.get("all_tokens_score")) is not None:
        say(f"If every token runs all {answer['exits'][-1]} layers: {score_name(task.metrics)} {score:.3f}.")
    metrics = ", ".join(f"{name} {answer[name]:.3f}" for name in task.metrics)
    say(
        f"{task.name} {answer['split']}: {metrics} (full model {answer['full_score']:.3f}), "
        f"{answer['mean_layers']:.2f} layers of {answer['exits'][-1]} ({answer['layers_saved']:.1%} saved), "
        f"{answer['speedup']:.2f} times as fast as the full model (measured, batch {args.batch_size}, "
        f"{answer['timed_rows']} examples)"
    )
    return answer


def _encoded(opened, task, split: str, rows, say: Callable[[str], None]) -> tuple:
    """(Encoded, warning if the train split contains some of the examples, else None)."""
    from mini_ee.lab.training.doubts import of_copies

    copies = of_copies(task, split, rows) if split != "train" else None
    if copies:
        say(copies)
    encoded = opened.encode(rows.texts)
    if encoded.truncated:
        say(f"{encoded.truncated} of {len(encoded)} texts were cut to {opened.tokenizer.max_length} tokens.")
    return encoded, copies


def _top_k(recorded, rule, rows, k: int, say: Callable[[str], None]) -> dict:
    """How many queries keep the top k of the full model."""
    from mini_ee.lab.data.rankings import rankable, ranked
    from mini_ee.lab.recording import predictions
    from mini_ee.lab.statistics import share_interval
    from mini_ee.lab.top_k import queries_kept

    labels = ranked(predictions(recorded.logits[:, -1]), rows.texts)
    unchanged = queries_kept(recorded._replace(labels=labels).take(rankable(rows.texts, k, say)), rule, k)
    low, high = share_interval(int(unchanged.sum()), len(unchanged))
    say(
        f"{unchanged.mean():.1%} of {len(unchanged):,} queries keep the top {k} of the full model (95% interval "
        f"{low:.1%} to {high:.1%})."
    )
    return {"k": k, "queries": len(unchanged), "kept": float(unchanged.mean()), "interval": [low, high]}


def _overthinking(recorded, task, rows, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.row_evaluation import overthinking

    measured = overthinking(recorded, task, rows)
    for row in measured["rows"]:
        exits = ", ".join(
            f"{exit['layer']}: {exit['label']} {exit['confidence']:.3f} ({exit['entropy']:.3f} nats)"
            for exit in row["exits"]
        )
        say(f"{row['text']}\n    {row['label']}; predicted after layer {exits}")
    say(
        f"{measured['share']:.1%} of the examples are right at an exit and wrong at a later one, "
        f"{measured['share_at_the_end']:.1%} are wrong at the last exit."
    )
    return measured


def _hardness(recorded, opened, task, rows, batch_size: int, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.tables import table

    measure = import_module(MEASUREMENTS["hardness"])
    measured = measure.hardness(recorded, rows)
    say(
        f"Memorized layer (Eq. 7): {measured['mean_memorized_layer']:.2f} on average. Its Spearman correlation with "
        f"the loss of Eq. 1 is {measured['spearman_loss']:.2f}."
    )
    if "known" in measured:
        lines = [{"kind": kind, "mean": mean} for kind, mean in measured["known"].items()]
        say(table(lines, {"kind": "hardness", "mean": "memorized layer:.2f"}))
    measured["held_out"] = in_training = measure.hardness_in_training(opened, task, batch_size)
    if in_training:
        pairs = (f"with {name} {value:.2f}" for name, value in in_training["spearman"].items())
        say(
            f"On the {in_training['rows']} held-out examples of the training, of which {in_training['forgotten']} were "
            f"forgotten in {in_training['epochs']} epochs: {', '.join(pairs)}."
        )
    return measured


def swept_rules(named, recorded, task) -> list:
    """Other values of the setting of --rule, if it has one, else other thresholds."""
    from mini_ee.lab.sweep import from_loose_to_strict
    from mini_ee.lab.training.default_rule import CURVE_POINTS, usual_rule

    rules = from_loose_to_strict(named, recorded, CURVE_POINTS) if named else []
    return rules or from_loose_to_strict(usual_rule(task), recorded, CURVE_POINTS)
