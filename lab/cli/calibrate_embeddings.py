"""`mini-ee calibrate` of a sentence encoder: a guarantee for the cosine to the full embedding."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from mini_ee.lab.cli.command_options import share
from mini_ee.lab.cli.guarantee_options import BATCH
from mini_ee.lab.cli.task_options import add_task, task_options
from mini_ee.lab.errors import WrongArguments


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a sentence encoder")
    cosine = "least cosine to the full embedding, for at least --epsilon of the texts, if the run is a sentence encoder"
    group.add_argument("--cosine", type=share, metavar="C", help=cosine)
    add_task(sub, "file or folder with texts like those in service")


def calibrate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Calibrate a sentence encoder: the rule changes its threshold, or the run its fixed depth."""
    from mini_ee.lab.evaluation.cosine_guarantee import calibrate_cosine
    from mini_ee.lab.recording import record
    from mini_ee.lab.training.run_folder import write_rule
    from mini_ee.lab.training.train_embeddings import unseen

    given = (args.cosine, args.delta, args.task)
    if None in given or not -1 < args.cosine <= 1 or args.epsilon == 1:
        raise WrongArguments(
            f"{args.run}: a sentence encoder needs --cosine, a number up to 1, --epsilon below 1, --delta, and texts "
            f"with --task FILE"
        )
    rows = unseen(opened, args.task, task_options(args))
    recorded = record(opened.segments(), opened.encode(rows.texts), BATCH, progress="reading")
    rule, answer = calibrate_cosine(recorded, opened.rule, args.cosine, args.epsilon, args.delta, args.seed)
    guarantee = {name: answer[name] for name in ("guarantee", "cosine", "epsilon", "delta")}
    write_rule(args.run, rule, guarantee, answer["exit_counts"])
    say(
        f"{answer['share']:.1%} of {answer['rows_tested']} texts have a cosine of at least {args.cosine} to the full "
        f"embedding, after {answer['mean_layers']:.2f} layers of {opened.exits[-1]} on average. With confidence "
        f"{1 - args.delta:.1%}, at least {args.epsilon:.1%} of texts like these do."
    )
    say(f"The rule of {args.run} is now {rule}.")
    return answer
