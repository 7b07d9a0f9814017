"""`mini-ee evaluate` of a decoder: the questions of a benchmark, or a sweep over epsilon."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import refuse
from mini_ee.lab.errors import WrongArguments


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a decoder")
    group.add_argument(
        "--text", type=Path, metavar="FILE", help="text file whose perplexity is measured too, with --sweep"
    )
    group.add_argument("--picture", type=Path, metavar="PNG", help="PNG file for figures, with --sweep")


def evaluate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Score a benchmark's answers, or sweep epsilon, and print the results."""
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.evaluation.token_evaluation import benchmark_answer

    if opened.is_exported:
        raise WrongArguments(f"{args.run}: expected a run, found an export; give the run that it came from")
    if not args.sweep and (args.text or args.picture or not args.task):
        given = "--text and --picture go" if args.task else "without --task a decoder's run goes"
        raise WrongArguments(f"{given} with --sweep: add it" + ("" if args.task else ", or name a benchmark's folder"))
    if not args.task:
        refuse(args, ("max_rows",), "is for the examples of a benchmark: give --task too")
    header = {"method": opened.config["method"], "run": str(args.run)}
    if args.sweep:
        return header | _over_epsilon(opened, args, say)
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
    return header | answer


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
    from mini_ee.lab.exits.text_record import record_texts

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
