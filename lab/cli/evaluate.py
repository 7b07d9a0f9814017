"""`mini-ee evaluate`: accuracy, layers saved and measured speed-up of a run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np

from mini_ee.lab.cli.classify import add_where
from mini_ee.lab.cli.command_options import add_task, positive, refuse, refuse_task_options
from mini_ee.lab.data.metrics import majority
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.registry import MEASUREMENTS

HELP = "measure accuracy, layers saved and speed-up of a run"
EXAMPLE = "mini-ee evaluate run --sweep"


def add(sub: ArgumentParser) -> None:
    from mini_ee.lab.cli.rule_options import add_own, add_rule

    sub.add_argument(
        "run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run, of an export or of a decoder's checkpoint"
    )
    add_task(
        sub, "folder of a task; for a decoder also of a benchmark such as HellaSwag (default the task of the training)"
    )
    sub.add_argument("--split", help="split to evaluate (default dev if there is one, else test)")
    sub.add_argument(
        "--max-rows", type=positive, metavar="N", help="maximum number of examples, drawn with the seed (default all)"
    )
    sub.add_argument("--batch-size", type=positive, default=32, help="batch size; 1 measures latency")
    add_where(sub)
    add_rule(sub)
    add_own(sub)
    sub.add_argument(
        "--sweep",
        action="store_true",
        help="also evaluate other thresholds, or other values of the setting of --rule (decoders: of epsilon)",
    )
    sub.add_argument(
        "--overthinking",
        action="store_true",
        help="also list examples that one exit predicts correctly and a later exit does not",
    )
    sub.add_argument(
        "--neighbours", type=positive, metavar="N", help="number of examples whose neighbours are printed (raee)"
    )
    sub.set_defaults(hardness=False)
    if "hardness" in MEASUREMENTS:
        sub.add_argument(
            "--hardness",
            action="store_true",
            help="also measure the hardness of examples: the memorized layer and its correlations",
        )
    sub.add_argument(
        "--text", type=Path, metavar="FILE", help="text file whose perplexity is measured too (decoders, --sweep)"
    )
    sub.add_argument(
        "--picture", type=Path, metavar="PNG", help="PNG file for the paper's figures (raee or decoders, --sweep)"
    )


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Measure one run and print the results."""
    from mini_ee.lab.cli.open import of_rows, open_trained
    from mini_ee.lab.training.train_run import say_left_out

    opened = open_trained(args.run, args, plain=True)
    if not opened.is_exported:
        say_left_out(opened.model.backbone, args.run, say)
    if not of_rows([opened]):
        return _tokens(opened, args, say)
    return _rows(opened, args, say)


# ---- Rows ----


def _rows(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.cli.open import open_task_of, schedule_of
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.evaluation.row_evaluation import evaluate, read_rows, rows_of
    from mini_ee.lab.evaluation.tables import exits_table, score_name, sweep_table
    from mini_ee.lab.training.method import load_method
    from mini_ee.lab.training.train_run import check_task

    refuse(args, ("text",), f"is for decoders; {args.run} is a classifier")
    if len(opened.exits) == 1:
        refuse(args, ("sweep",), f"chooses between exits; {args.run} has one, after layer {opened.exits[0]}")
    task = open_task_of([opened], args)
    check_task(opened, task, args.run)
    rule = chosen_rule(args, opened)
    retrieves = rule.plans_from_texts
    if args.picture and not (args.sweep and retrieves):
        raise WrongArguments("--picture is for --sweep of decoders or of raee; mini-ee compare draws other runs")
    if not retrieves:
        refuse(args, ("neighbours",), f"is for runs of raee; {args.run} has no datastore")
    if task.regression:
        why = f"counts right predictions; {task.name} is a regression, give a task with classes"
        refuse(args, ("overthinking", "hardness"), why)
    split, rows = rows_of(task, args.split, args.max_rows, args.seed)
    encoded, copies = _encoded(opened, task, split, rows, say)
    recorded = read_rows(opened, encoded, rows.labels, args.batch_size)
    swept = _swept(rule if args.rule else None, recorded, task) if args.sweep and not retrieves else None
    answer = evaluate(opened, rule, recorded, task, encoded, args.batch_size, swept)
    answer = {"method": opened.config["method"], "split": split, "copies": copies} | schedule_of(opened) | answer
    if "schedule" in answer:
        say(f"Streams that start together, by exit layer: {answer['schedule']}")
    say(exits_table(answer, score_name(task.metrics)))
    if swept is not None:
        say(sweep_table(answer["rows"], score_name(task.metrics)))
    if args.overthinking:
        answer["overthinking"] = _overthinking(recorded, task, rows, say)
    if args.hardness:
        answer["hardness"] = _hardness(recorded, opened, task, rows, args.batch_size, say)
    if retrieves:
        given = rule, recorded, encoded, task, rows.labels, args.batch_size, args.seed
        answer |= _controls(load_method(opened.config["method"]), given, args, answer, say)
    if args.neighbours:
        few = opened.encode(rows.texts[: args.neighbours])
        found = load_method(opened.config["method"]).neighbours(rule, few, args.batch_size)
        answer["neighbours"] = _neighbours(found, rows, task.label_names, say)
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
        f"{task.name} {split}: {metrics} (full model {answer['full_score']:.3f}), "
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


def _overthinking(recorded, task, rows, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.row_evaluation import overthinking

    found = overthinking(recorded, task, rows)
    for row in found["rows"]:
        exits = ", ".join(
            f"{each['layer']}: {each['label']} {each['confidence']:.3f} ({each['entropy']:.3f} nats)"
            for each in row["exits"]
        )
        say(f"{row['text']}\n    {row['label']}; predicted after layer {exits}")
    say(
        f"{found['share']:.1%} of the examples are right at an exit and wrong at a later one, "
        f"{found['share_at_the_end']:.1%} are wrong at the last exit."
    )
    return found


def _hardness(recorded, opened, task, rows, batch_size: int, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.tables import table

    measure = import_module(MEASUREMENTS["hardness"])
    found = measure.hardness(recorded, rows)
    say(
        f"Memorized layer (Eq. 7): {found['mean_memorized_layer']:.2f} on average. Its Spearman correlation with "
        f"the loss of Eq. 1 is {found['spearman_loss']:.2f}."
    )
    if "known" in found:
        lines = [{"kind": kind, "mean": mean} for kind, mean in found["known"].items()]
        say(table(lines, {"kind": "hardness", "mean": "memorized layer:.2f"}))
    found["held_out"] = in_training = measure.hardness_in_training(opened, task, batch_size)
    if in_training:
        pairs = (f"with {name} {value:.2f}" for name, value in in_training["spearman"].items())
        say(
            f"On the {in_training['rows']} held-out examples of the training, of which {in_training['forgotten']} were "
            f"forgotten in {in_training['epochs']} epochs: {', '.join(pairs)}."
        )
    return found


def _swept(named, recorded, task) -> list:
    """Other values of the setting of --rule, if it has one, else other thresholds."""
    from mini_ee.lab.training.default_rule import CURVE_POINTS, usual_rule

    own = named.from_loose_to_strict(recorded, CURVE_POINTS) if named else []
    return own or usual_rule(task).from_loose_to_strict(recorded, CURVE_POINTS)


def _neighbours(planned: list[dict], rows, names: list[str], say: Callable[[str], None]) -> list[dict]:
    found = []
    for text, label, each in zip(rows.texts, rows.labels, planned):
        found.append({"text": " / ".join(text), "label": names[label]} | each)
        say(f"{found[-1]['text']}\n    {names[label]}; exits after {each['layer']} layers. Its neighbours vote:")
        for near in each["neighbours"]:
            near |= {"text": " / ".join(near["text"]), "label": names[near["label"]]}
            layers = ",".join(map(str, near["votes"])) or "no layer"
            say(f"    {near['weight']:.2f} for {layers}: {near['text']} ({near['label']})")
    return found


def _controls(method, given: tuple, args: Namespace, answer: dict, say: Callable[[str], None]) -> dict:
    """Controls with which the figures of a retrieving rule are compared. given: the arguments of Method.controls."""
    from mini_ee.lab.evaluation.plots import draw_ablation
    from mini_ee.lab.evaluation.tables import ablation_table, controls_table

    found = {"controls": method.controls(*given)}
    say(controls_table(answer, found["controls"]))
    if args.sweep:
        found["rows"] = method.ablation(*given)
        say(ablation_table(found["rows"]))
        if args.picture:
            draw_ablation(args.picture, answer | found)
            say(f"Picture: {args.picture}")
    return found


# ---- Tokens ----


def _tokens(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.evaluation.tables import table
    from mini_ee.lab.evaluation.token_evaluation import benchmark_answer

    if opened.is_exported:
        raise WrongArguments(f"{args.run}: expected a run, found an export; give the run that it came from")
    why = f"is for classifiers; {args.run} is a decoder"
    refuse(args, ("split", "schedule", "overthinking", "hardness", "neighbours"), why)
    refuse_task_options(args, why)
    if not args.sweep and (args.text or args.picture or not args.task):
        given = "--text and --picture go" if args.task else "without --task a decoder's run goes"
        raise WrongArguments(f"{given} with --sweep: add it" + ("" if args.task else ", or name a benchmark's folder"))
    if not args.task:
        refuse(args, ("max_rows",), "is for the examples of a benchmark: give --task too")
    about = {"method": opened.config["method"], "run": str(args.run)}
    if args.sweep:
        return about | _over_epsilon(opened, args, say)
    rule = chosen_rule(args, opened)
    answer = benchmark_answer(_benchmark_scores(opened, args), rule)
    columns = zip(answer["exits"], answer["per_exit_accuracy"], answer["exit_counts"])
    rows = [{"layer": layer, "accuracy": accuracy, "exited": count} for layer, accuracy, count in columns]
    say(table(rows, {"layer": "layer", "accuracy": "accuracy:.3f", "exited": "tokens that exit here"}))
    most = opened.model.backbone.config.max_tokens
    if answer["rows_truncated"]:
        say(f"{answer['rows_truncated']} of {answer['rows']} contexts were cut to the model's {most} tokens.")
    if "shots" in answer:
        shots = ", ".join(f"{count} with {number}" for number, count in enumerate(answer["shots"]) if count)
        say(f"Questions by the number of answered questions in their context: {shots}.")
    chance = f", by chance {answer['chance']:.3f}" if "chance" in answer else ""
    say(
        f"{answer['task']}, {answer['rows']} questions: "
        f"accuracy {answer['accuracy']:.3f} +- {answer['standard_error']:.3f} "
        f"(full model {answer['full_accuracy']:.3f}{chance}), ln p of the right answer {answer['log_likelihood']:.2f}; "
        f"on average {answer['mean_layers']:.2f} layers of {opened.model.whole.exits[-1]} per scored token."
    )
    return about | answer


def _benchmark_scores(opened, args: Namespace):
    from mini_ee.lab.data.multiple_choice import load_benchmark
    from mini_ee.lab.evaluation.token_evaluation import score_benchmark

    benchmark = load_benchmark(args.task)
    if args.max_rows:
        benchmark = benchmark.subset(args.max_rows, args.seed)
    return score_benchmark(opened, benchmark, args.batch_size)


def _over_epsilon(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.cli.rule_options import refuse_settings
    from mini_ee.lab.evaluation.plots import draw_decoder
    from mini_ee.lab.evaluation.tables import epsilon_table
    from mini_ee.lab.evaluation.token_evaluation import held_text, sweep
    from mini_ee.lab.exits.token_exits import record_texts

    if len(opened.exits) == 1:
        raise WrongArguments(f"{args.run}: a decoder without exits has no epsilon; give a run with exits")
    refuse_settings(args, "--sweep calibrates the thresholds", "measure")
    measure = args.measure or getattr(opened.rule, "measure", opened.default_measure)
    held_out = None
    if args.text:
        held_out = record_texts(opened.model, held_text(args.text, opened, args.seed), args.batch_size, last=False)
    scores = _benchmark_scores(opened, args) if args.task else None
    answer = sweep(opened, measure, held_out, scores, args.seed)
    say(epsilon_table(answer))
    if args.picture:
        draw_decoder(args.picture, answer, opened.metrics.get("history", []))
        say(f"Picture: {args.picture}")
    return answer
