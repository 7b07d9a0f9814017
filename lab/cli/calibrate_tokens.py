"""`mini-ee calibrate` of a decoder: thresholds from texts that it generates, or from a file."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import given_options, positive
from mini_ee.lab.cli.guarantee_options import add_guarantee, calibrated, check, report
from mini_ee.lab.errors import WrongArguments


def add(sub: ArgumentParser) -> None:
    group = sub.add_argument_group("a decoder")
    group.add_argument("--text", type=Path, metavar="FILE", help="running text (default generated text)")
    prompt = "prompt for a decoder's generated text; may be repeated (default built-in prompts)"
    group.add_argument("--prompt", action="append", metavar="TEXT", help=prompt)
    group.add_argument("--greedy", action="store_true", help="generate text greedily, once from each prompt")
    group.add_argument(
        "--texts", type=positive, metavar="N", help="number of texts, for a decoder (default 512, or all of a file)"
    )
    group.add_argument(
        "--new-tokens", type=positive, metavar="N", help="number of tokens per text, for a decoder (default 64)"
    )
    add_guarantee(group)


def calibrate(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Write the rule into the run and print its agreement on other texts. Returns the JSON answer."""
    from mini_ee.lab.training.run_folder import write_rule
    from mini_ee.lab.training.unit import load_unit

    check(args)
    rule, answer, guarantee = calibrated(args, opened, _texts(opened, args))
    write_rule(args.run, rule, guarantee, answer["exit_counts"])
    source = args.text or "text that the model generated"
    report(args, opened.exits, answer, f"{load_unit(opened.unit).noun} of {source}", say)
    say(f"The rule of {args.run} is now these thresholds.")
    return answer


def _texts(opened, args: Namespace):
    """Texts that the decoder generates, or those of a file."""
    from mini_ee.lab.exits.text_record import record_texts
    from mini_ee.lab.training.train_settings import TextOptions
    from mini_ee.lab.training.training_text import Source, texts_to_calibrate

    given = given_options(args, TextOptions)
    given = {name: value for name, value in given.items() if value}
    learned = opened.config.get("text", {})
    kind = learned.get("kind", "pieces")
    if kind == "continue" and "text" in given and learned.get("new_tokens"):
        given.setdefault("new_tokens", learned["new_tokens"])
    try:
        options = TextOptions(kind="pieces" if kind == "copy" and "text" not in given else kind, **given)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    source = Source(opened.model.backbone, opened.tokenizer, options, args.seed)
    return record_texts(opened.model, texts_to_calibrate(source), progress="observing")
