"""`mini-ee evaluate` of a run whose rule retrieves: also the controls of its plan, and the neighbours of examples."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import positive, refuse
from mini_ee.lab.cli.evaluate_rows import conclude, measure
from mini_ee.lab.errors import WrongArguments


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a run of raee")
    group.add_argument(
        "--neighbours", type=positive, metavar="N", help="number of examples whose neighbours are printed"
    )
    group.add_argument("--picture", type=Path, metavar="PNG", help="PNG file for figures, with --sweep")


def evaluate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Measure the run and print the results."""
    from mini_ee.lab.training.method import load_method

    if args.rule:
        refuse(args, ("neighbours", "picture"), "is for the run's own rule, which retrieves: leave out --rule")
    if args.picture and not args.sweep:
        raise WrongArguments("--picture is for --sweep: add it")
    measured, method = measure(opened, args, say), load_method(opened.config["method"])
    rule, task, rows = measured.rule, measured.task, measured.rows
    if rule.plans_from_texts:
        given = rule, measured.recorded, measured.encoded, task, rows.labels, args.batch_size, args.seed
        measured.answer.update(_controls(method, given, args, measured.answer, say))
    if args.neighbours:
        planned = method.neighbours(rule, opened.encode(rows.texts[: args.neighbours]), args.batch_size)
        measured.answer["neighbours"] = _neighbours(planned, rows, task.label_names, say)
    return conclude(measured, args, say)


def _neighbours(planned: list[dict], rows, names: list[str], say: Callable[[str], None]) -> list[dict]:
    neighbours = []
    for text, label, plan in zip(rows.texts, rows.labels, planned):
        neighbours.append({"text": " / ".join(text), "label": names[label]} | plan)
        say(f"{neighbours[-1]['text']}\n    {names[label]}; exits after {plan['layer']} layers. Its neighbours vote:")
        for near in plan["neighbours"]:
            near |= {"text": " / ".join(near["text"]), "label": names[near["label"]]}
            layers = ",".join(map(str, near["votes"])) or "no layer"
            say(f"    {near['weight']:.2f} for {layers}: {near['text']} ({near['label']})")
    return neighbours


def _controls(method, given: tuple, args: Namespace, answer: dict, say: Callable[[str], None]) -> dict:
    """Controls with which the figures of a retrieving rule are compared. given: the arguments of Method.controls."""
    from mini_ee.lab.evaluation.plots import draw_ablation
    from mini_ee.lab.evaluation.tables import ablation_table, controls_table

    figures = {"controls": method.controls(*given)}
    say(controls_table(answer, figures["controls"]))
    if args.sweep:
        figures["rows"] = method.ablation(*given)
        say(ablation_table(figures["rows"]))
        if args.picture:
            draw_ablation(args.picture, answer | figures)
            say(f"Picture: {args.picture}")
    return figures
