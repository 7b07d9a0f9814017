"""`mini-ee train METHOD`: add exits to a checkpoint and train them. A method's options are made from its settings."""

import ast
import time
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mini_ee.lab.cli.command_options import Parser, add_options, given_options, sentence
from mini_ee.lab.cli.rule_options import rules_of_options
from mini_ee.lab.cli.task_options import add_task
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.tasks import TOY
from mini_ee.lab.registry import METHODS

HELP = "add exits to a checkpoint and train them"
EXAMPLE = "mini-ee train joint --out run"
USUAL = "--model", "--task", "--exits"
OF_UNIT = {"rows": ("a classifier", TOY), "tokens": ("a decoder", "continue")}  # unit -> (name, a --task that has it)


def add(commands, argv: list[str]) -> None:
    """The sub-commands: the method that argv names, imported for its options, or else all of them by name."""
    parser = commands.add_parser("train", description=sentence(HELP), example=EXAMPLE)
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD", parser_class=Parser)
    named = [name for name in METHODS if argv[:2] == ["train", name]]
    for name in named or METHODS:
        sub = methods.add_parser(name, example=f"mini-ee train {name} --out run", usual=USUAL)
        if named:
            _add_method(sub, name, argv[2:])
    if argv[:1] == ["train"] and not named:
        lines = "\n".join(f"  {name:<16} {_paper(name)}" for name in METHODS)
        parser.epilog = f"methods (mini-ee train METHOD --help shows the options):\n{lines}\n\n{parser.epilog}"


def _paper(name: str) -> str:
    """Name, authors and year, as the docstring of a method's file begins. The file is not imported: it needs torch.

    Empty if Python does not find the file.
    """
    try:
        file = find_spec(METHODS[name]).origin
    except (ModuleNotFoundError, AttributeError):
        return ""
    text = ast.get_docstring(ast.parse(Path(file).read_text(encoding="utf-8"))) or ""
    return text.partition(": ")[0]


def _add_method(sub: Parser, name: str, words: list[str]) -> None:
    """The options of a method. Those of its other units are parsed too, but the help does not show them."""
    from mini_ee.lab.cli.main import add_common
    from mini_ee.lab.training.method import load_method
    from mini_ee.lab.training.train_settings import OPTIONS, TASK_HELP, TrainOptions

    method, sub.of_rules = load_method(name), rules_of_options()
    sub.description = (import_module(METHODS[name]).__doc__ or "").partition("\n\n")[0]
    unit, named, usual = _defaults(method, words)
    built_in = f"the built-in {'Llama' if unit == 'tokens' else 'BERT'}"
    of_defaults = None if named else f"defaults for {built_in}; with --model DIR, those for your model"
    sub.add_argument("--model", type=Path, metavar="DIR", help=f"folder of a checkpoint (default {built_in})")
    common, source = OPTIONS[unit]
    if source is TaskOptions:
        add_task(sub, TASK_HELP[unit])
    else:
        sub.add_argument("--task", metavar="TASK", help=TASK_HELP[unit])
    sub.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the run; must not exist")
    sub.add_argument("--resume", action="store_true", help="continue an interrupted training")
    add_options(sub.add_argument_group(name), method.config, usual)
    add_options(sub.add_argument_group("training", of_defaults), TrainOptions, usual, method.lacks)
    add_options(sub.add_argument_group("model and data"), common, usual, method.lacks)
    if source is not TaskOptions:
        add_options(sub.add_argument_group("texts"), source, usual, method.lacks)
    known = {field.name for part in (common, source) for field in fields(part)}
    for other in method.units:
        for part in OPTIONS[other] if other != unit else ():
            sub.hidden.append(sub.add_argument_group(other))
            add_options(sub.hidden[-1], part, lacks=(*known, *method.lacks))
            known |= {field.name for field in fields(part)}
        if other != unit and (of := OF_UNIT.get(other)):
            sub.epilog += f"\n\noptions for {of[0]}:\n  mini-ee train {name} --task {of[1]} --help-all"
    add_common(sub)


def _defaults(method, words: list[str]) -> tuple[str, Path | None, dict]:
    """Of a training of these words: its unit, --model, and the defaults that are not those of the settings classes."""
    from mini_ee.lab.backbones.hub import read_config
    from mini_ee.lab.training.train_run import default_exits, defaults_of, unit_of

    peek = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    peek.add_argument("--model", type=Path)
    peek.add_argument("--task")
    named, first = Namespace(model=None), method.units[0]
    try:
        named, _ = peek.parse_known_args(words)
        unit, model = unit_of(method, named.model, named.task)
        layers = read_config(model / "config.json").num_hidden_layers
    except (ArgumentError, ValueError, OSError):  # the command reports it
        return first, named.model, method.defaults.get(first, {})
    exits = default_exits(method, unit.name, layers)
    return unit.name, named.model, defaults_of(method, unit.name, model) | {"exits": exits}


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Train, and print the result on held-out examples."""
    from mini_ee.lab.evaluation.tables import stages_table
    from mini_ee.lab.training.method import load_method
    from mini_ee.lab.training.train_run import train
    from mini_ee.lab.training.train_settings import OPTIONS, TrainOptions

    begin, method = time.perf_counter(), load_method(args.method)
    parts = [part for name in method.units for part in OPTIONS[name]]
    given = given_options(args, method.config, TrainOptions, *parts) | {"seed": args.seed}
    trained = train(args.method, args.model, args.task, args.out, args.resume, say, **given)
    metrics = trained.metrics
    if metrics.get("epochs"):
        say(stages_table(metrics["epochs"]))
    answer = {"method": args.method, "unit": trained.unit, "exits": list(trained.exits)}
    answer |= {"rule": trained.rule.to_dict(), "guarantee": trained.config["guarantee"], "run": str(args.out)}
    summarize = _of_tokens if trained.generates else _of_embeddings if trained.embeds else _of_rows
    measured = summarize(trained, metrics, say)
    say(f"Run: {args.out}")
    return answer | measured | {"seconds": time.perf_counter() - begin}


def _of_rows(trained, metrics: dict, say: Callable[[str], None]) -> dict:
    answer = {"task": trained.config["task"]["name"], "split": "hold-out"}
    answer |= {"per_exit_accuracy": metrics["per_exit_accuracy"], "rows": metrics["rows"]}
    if "hold_out" not in metrics:  # raee
        say(
            f"Collected {metrics['rows']} examples that the exits were not trained on. "
            f"The most accurate single exit is after layer {metrics['best_single_exit']}."
        )
        size = sum(path.stat().st_size for path in (trained.folder / "datastore").iterdir())
        prompt = {"prompt": trained.config["prompt"]} if "prompt" in trained.config else {}
        return answer | prompt | {"shots": trained.config["training"].get("shots", 0), "datastore_bytes": size}
    held_out = metrics["hold_out"]
    say(
        f"Trained on {metrics['rows']} examples, "
        f"{metrics['rows_truncated']} of them cut to {trained.tokenizer.max_length} tokens."
    )
    scores = ", ".join(f"{name} {held_out[name]:.3f}" for name in trained.config["task"]["metrics"])
    say(f"On {metrics['rows_held']} held-out examples: {scores}, {held_out['layers_saved']:.0%} of the layers saved.")
    for line in (*metrics["doubts"], metrics["guaranteed"]):
        say(line)
    names = ("rows_truncated", "rows_held", "rows_tested", "rows_needed", "doubts")
    return answer | held_out | {name: metrics[name] for name in names}


def _of_embeddings(trained, metrics: dict, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.sweep import knob

    names = ("per_exit_cosine", "per_exit_low_cosine")
    rows = [dict(zip(("layer", *names), row)) for row in zip(trained.exits, *(metrics[name] for name in names))]
    say(
        f"Trained on {metrics['rows']} texts. Cosine to the full embedding, on {metrics['rows_tested']} held-out texts:"
    )
    say(table(rows, {"layer": "layer", names[0]: "mean:.3f", names[1]: "10% quantile:.3f"}))
    depth = f"depth is {trained.exits[getattr(trained.rule, 'exit', -1)]} of {trained.exits[-1]} layers"
    default = depth if knob(trained.rule) is None else f"rule is {trained.rule}"
    say(f"The default {default}; --rule fixed --layer chooses a depth.")
    measured = ("rows", "rows_held", "rows_tested", "rows_truncated", *names)
    return {"texts": trained.config["task"]["name"]} | {name: metrics[name] for name in measured}


def _of_tokens(trained, metrics: dict, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.tables import heads_trained_table
    from mini_ee.lab.rules import rule_from_dict
    from mini_ee.lab.training.training_text import EPSILON

    if "agreement" in metrics:
        say(heads_trained_table(metrics, trained.exits))
    if "guaranteed" in metrics:
        say(metrics["guaranteed"])
    for measure, rule in metrics.get("own", {}).items():
        say(f"    {measure}: {rule_from_dict(rule)}")
    if "net_saved" in metrics:
        saved = ", ".join(f"{name} {share:.1%}" for name, share in metrics["net_saved"].items())
        say(f"FLOPs saved on held-out text at {EPSILON:.0%} agreement, heads included: {saved}.")
    calibration = metrics.get("calibration")
    if calibration:
        say(
            f"Rule: thresholds on {calibration['measure']} at which {calibration['epsilon']:.0%} of the tokens agree "
            f"with the full model. On other text {calibration['end_to_end']:.1%} agree, after "
            f"{calibration['mean_layers']:.2f} layers of {trained.exits[-1]}. `mini-ee calibrate` changes it."
        )
    names = ("agreement", "entropy", "calibration", "net_saved", "own", "sweep", "texts", "tokens")
    answer = {"loss": metrics["epochs"][-1]["loss"]} | {name: metrics[name] for name in names if name in metrics}
    return answer | {"model": trained.config["backbone"]["folder"], "history": metrics["history"] or metrics["epochs"]}
