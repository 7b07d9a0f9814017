"""`mini-ee calibrate`: thresholds at which predictions agree with the full model at least as often as epsilon.

A file each has the kinds of runs; guarantee_options.py has what they share.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli import calibrate_embeddings, calibrate_export, calibrate_rows, calibrate_tokens
from mini_ee.lab.cli.command_options import Named, Parser, add_kinds, add_where, share
from mini_ee.lab.cli.guarantee_options import check_epsilon
from mini_ee.lab.errors import WrongArguments

HELP = "calibrate thresholds for an agreement with the full model; they become the rule of the run or export"
EXAMPLE = "mini-ee calibrate run --epsilon .95 --delta .05"
USUAL = "--delta", "--task", "--cosine", "--text"
KINDS = {
    "rows": calibrate_rows,
    "tokens": calibrate_tokens,
    "embeddings": calibrate_embeddings,
    "export": calibrate_export,
}


def add(sub: Parser) -> None:
    sub.add_argument("run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run or of an export")
    add_where(sub)
    sub.add_argument(
        "--epsilon", type=share, required=True, help="least agreement with the full model, above 0, at most 1"
    )
    sub.add_argument("--delta", type=share, help="largest probability that the guarantee is violated (default none)")
    add_kinds(sub, KINDS, _kinds)


def _kinds(named: Named) -> tuple[str]:
    unit = named.unit if named.unit in KINDS else "rows"
    return ("export" if named.is_exported else unit,)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Calibrate, write the rule into the run, and print its agreement on examples that did not calibrate it."""
    from mini_ee.lab.cli.open import open_run

    check_epsilon(args)
    opened = open_run(args.run, args)
    if opened.rule.plans_from_texts:
        raise WrongArguments(f"{args.run}: its datastore chooses the exits; calibrate the run that it was collected on")
    if len(opened.exits) == 1:
        raise WrongArguments(f"{args.run}: has one exit, so there is nothing to calibrate")
    kind = "embeddings" if opened.embeds else "tokens" if opened.generates else "rows"
    answer = {"method": opened.config["method"], "exits": list(opened.exits), "run": str(args.run)}
    return answer | KINDS[kind].calibrate(opened, args, say)
