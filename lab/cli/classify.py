"""`mini-ee classify`: the prediction of every exit for one sentence."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mini_ee.lab.cli.command_options import add_schedule, add_where
from mini_ee.lab.data.values import checked_text

HELP = "predict the label of one sentence at every exit"
EXAMPLE = 'mini-ee classify mini-ee-demo/run "I loved every minute of it."'
USUAL = "--text-b", "--layer", "--threshold"


def add(sub: ArgumentParser) -> None:
    from mini_ee.lab.cli.rule_options import add_own, add_rule

    sub.add_argument("run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run or of an export")
    sub.add_argument("sentence", nargs="?", metavar="TEXT", help="sentence to classify")
    sub.add_argument("--text", help="sentence to classify, in place of TEXT")
    sub.add_argument("--text-b", help="second sentence, if the task has pairs")
    add_where(sub)
    add_schedule(sub)
    add_rule(sub)
    add_own(sub)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Predict the label of one text at every exit, and print at which one the text exits."""
    from mini_ee.lab.cli.open import of_rows, open_trained
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.early_exit import early_exit
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.recording import read_every_exit
    from mini_ee.rules import log_softmax

    if (args.sentence is None) == (args.text is None):
        number = "none" if args.text is None else "two, TEXT and --text"
        raise WrongArguments(f"expected one sentence, found {number}; for example: {EXAMPLE}")
    sentence = args.text if args.sentence is None else args.sentence
    given = (("TEXT" if args.text is None else "--text", sentence), ("--text-b", args.text_b))
    text = tuple(checked_text(some, name, "a sentence") for name, some in given if some is not None)
    trained = open_trained(args.run, args)
    if not of_rows([trained]):
        raise WrongArguments(f"{args.run}: expected a classifier, found a decoder; use mini-ee generate")
    rule = chosen_rule(args, trained)
    expected = trained.config["task"]["texts"]
    if len(text) != expected:
        advice = "give the second one with --text-b" if expected == 2 else "leave out --text-b"
        raise WrongArguments(
            f"{args.run}: expected {expected} texts per example, as in training, found {len(text)}; {advice}"
        )
    encoded, names = trained.encode([text]), (trained.label_names, trained.multi_label)
    inputs, segments = encoded.batch(np.arange(1)), trained.segments()
    by_exit, *_ = read_every_exit(segments, inputs)
    result = early_exit(segments, rule, inputs)
    words = list(trained.config.get("prompt", {}).get("words", {}).values())

    rows = []
    for layer, logits in zip(segments.exits, by_exit[0]):
        row = {"layer": layer, **_prediction(logits, *names), "left_here": layer == int(result.layers_run[0])}
        if words:
            row["words"] = dict(zip(words, np.exp(log_softmax(logits[None])[0]).tolist()))
        rows.append(row)
    shown = [_in_table(row) for row in rows]
    confident = "confidence" in rows[0] and not words
    headings = {"layer": "layer", "label": "label"} | ({"confidence": "confidence:.3f"} if confident else {})
    say(table(shown, headings | {word: f"{word}:.3f" for word in words} | {"left_here": " "}))
    layers, depth = int(result.layers_run[0]), result.cost.depth[0].item()
    if encoded.truncated:
        say(f"The text was cut to {trained.tokenizer.max_length} tokens.")
    answer = {
        "method": trained.config["method"],
        "text": sentence,
        **_prediction(result.logits[0], *names),
        "exit": segments.exits[result.exit_index[0]],
        "layers": layers,
        "exits": list(segments.exits),
        "layers_saved": 1 - depth / segments.exits[-1],
        "rows": rows,
        "rule": rule.to_dict(),
        "rows_truncated": encoded.truncated,
    }
    say(f"{_shown(answer['label'])}, after {depth:.4g} of {segments.exits[-1]} layers")
    return answer


def _prediction(logits: np.ndarray, names: list[str], multi_label: bool) -> dict:
    """The prediction from one example's logits (C,). names: of the labels; empty for a regression."""
    from mini_ee.lab.confidence import named

    (label,), (confidence,) = named(logits[None], names, multi_label)
    return {"label": label} | ({} if confidence is None else {"confidence": confidence})


def _in_table(row: dict) -> dict:
    left_here = "<- exits here" if row["left_here"] else ""
    return row | row.get("words", {}) | {"label": _shown(row["label"]), "left_here": left_here}


def _shown(label):
    """A label as text; of several the probabilities too."""
    if not isinstance(label, dict):
        return label
    return ", ".join(f"{name} {probability:.3f}" for name, probability in label.items()) or "no label"
