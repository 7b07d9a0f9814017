"""`mini-ee evaluate`: accuracy, layers saved and measured speed-up of a run. A file each has the kinds of runs."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli import evaluate_gold, evaluate_retrieval, evaluate_rows, evaluate_tokens
from mini_ee.lab.cli.command_options import Named, Parser, add_kinds, add_where, positive
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.registry import RULES as METHOD_RULES
from mini_ee.lab.rules import rule_class

HELP = "measure accuracy, layers saved and speed-up of a run"
EXAMPLE = "mini-ee evaluate run --sweep"
USUAL = "--task", "--sweep", "--batch-size"
KINDS = {"rows": evaluate_rows, "retrieval": evaluate_retrieval, "tokens": evaluate_tokens}


def add(sub: Parser) -> None:
    from mini_ee.lab.cli.rule_options import add_own, add_rule

    sub.add_argument(
        "run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run, of an export or of a decoder's checkpoint"
    )
    sub.add_argument(
        "--task",
        metavar="TASK",
        help="folder of a task, for a decoder of a benchmark such as HellaSwag; for labels of tokens, or answers to "
        "questions, a file with tags (.conll) or answers (default the task of the training)",
    )
    sub.add_argument(
        "--max-rows", type=positive, metavar="N", help="maximum number of examples, drawn with the seed (default all)"
    )
    sub.add_argument("--batch-size", type=positive, default=32, help="batch size; 1 measures latency")
    add_where(sub)
    add_engine(sub)
    add_rule(sub)
    add_own(sub)
    sub.add_argument(
        "--sweep",
        action="store_true",
        help="also evaluate other thresholds, or other values of the setting of --rule (decoders: of epsilon)",
    )
    add_kinds(sub, KINDS, _kinds)


def _kinds(named: Named) -> tuple[str, ...]:
    if named.unit == "tokens":
        return ("tokens",)
    retrieves = named.rule in METHOD_RULES and rule_class(named.rule).plans_from_texts
    return ("rows", "retrieval") if retrieves else ("rows",)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Measure one run and print the results."""
    from mini_ee.lab.cli.open import of_rows, open_trained
    from mini_ee.lab.training.train_run import say_left_out

    engine, opened = chosen_engine(args), open_trained(args.run, args, plain=True)
    if not opened.is_exported:
        if engine != Engine():
            raise WrongArguments(f"--engine {engine.engine}: expected an export, found a run, {args.run}; export it")
        say_left_out(opened.model.backbone, args.run, say)
    kind = "tokens" if not of_rows([opened]) else "retrieval" if opened.rule.plans_from_texts else "rows"
    answer = (evaluate_gold if opened.token_task else KINDS[kind]).evaluate(opened, args, say)
    return answer | ({"precision": engine.precision} if opened.is_exported else {})
