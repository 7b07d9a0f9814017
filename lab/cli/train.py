"""`mini-ee train METHOD`: add exits to a checkpoint and train them. A method's options are made from its settings."""

import ast
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mini_ee.lab.cli.command_options import Parser, add_options, given_options
from mini_ee.lab.cli.task_options import add_task
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.settings import flag_of
from mini_ee.lab.registry import METHODS

HELP = "add exits to a checkpoint and train them"
EXAMPLE = "mini-ee train joint --out run"


def add(commands, argv: list[str]) -> None:
    """The sub-commands: the method that argv names, imported for its options, or else all of them by name."""
    about = f"{HELP}\n\n`mini-ee train METHOD --help` shows the options of a method."
    parser = commands.add_parser("train", description=about, example=EXAMPLE)
    methods = parser.add_subparsers(
        dest="method", required=True, metavar="METHOD", parser_class=Parser, help="method, see below"
    )
    named = [name for name in METHODS if argv[:2] == ["train", name]]
    for name in named or METHODS:
        sub = methods.add_parser(name, example=f"mini-ee train {name} --out run")
        if named:
            _add_method(sub, name)
    if argv[:1] == ["train"] and not named:
        lines = "\n".join(f"  {name:<16} {_paper(name)}" for name in METHODS)
        parser.epilog = f"methods:\n{lines}\n\n{parser.epilog}"


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


def _add_method(sub: Parser, name: str) -> None:
    from mini_ee.lab.cli.main import add_common
    from mini_ee.lab.training.method import load_method
    from mini_ee.lab.training.train_settings import OPTIONS, TASK_HELP, TEXT_HELP, TrainOptions

    method = load_method(name)
    sub.description = (import_module(METHODS[name]).__doc__ or "").partition("\n\n")[0]
    add_common(sub)
    sub.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a checkpoint (default a built-in one, for which some defaults differ)",
    )
    units = {name: OPTIONS[name] for name in sorted(method.units)}
    words = "; or ".join(TASK_HELP[name] for name in reversed(units) if name in TASK_HELP)
    if any(TaskOptions in parts for parts in units.values()):
        add_task(sub, words)
    else:
        sub.add_argument("--task", metavar="TASK", help=words)
    sub.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the run; must not exist")
    sub.add_argument("--resume", action="store_true", help="continue an interrupted training")
    usual = method.defaults.get(method.units[0], {})
    add_options(sub.add_argument_group(name), method.config, usual)
    add_options(sub.add_argument_group("training"), TrainOptions, usual, method.lacks)
    common = max((common for common, _ in units.values()), key=lambda part: len(fields(part)))
    add_options(sub.add_argument_group("common"), common, usual, method.lacks)
    for name, (_, source) in units.items():
        if source is TaskOptions:
            continue
        about = TEXT_HELP if len(units) > 1 else None
        if about and (others := _other_defaults(method, (method.config, TrainOptions, common, source))):
            about += f";\n{'else' if method.units[0] == name else 'there'} the defaults are {others}"
        add_options(sub.add_argument_group(name, about), source, usual, method.lacks)


def _other_defaults(method, parts: tuple[type, ...]) -> str:
    """For the help: the options that have another default on the method's second unit than on its first."""
    options = {each.name: each for part in parts for each in fields(part) if each.metadata}
    usual = {name: each.default for name, each in options.items() if name not in method.lacks}
    first, second = (usual | method.defaults.get(unit, {}) for unit in method.units)
    flags = {name: flag_of(name, options[name].metadata) for name in usual}
    return ", ".join(f"{flag} {second[name]}" for name, flag in flags.items() if second[name] != first[name])


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
    say(table(rows, {"layer": "layer", names[0]: "mean:.3f", names[1]: "10 % quantile:.3f"}))
    depth = f"depth is {trained.exits[getattr(trained.rule, 'exit', -1)]} of {trained.exits[-1]} layers"
    default = depth if knob(trained.rule) is None else f"rule is {trained.rule}"
    say(f"The default {default}; --rule fixed --layer chooses a depth.")
    measured = ("rows", "rows_held", "rows_tested", "rows_truncated", *names)
    return {"texts": trained.config["task"]["name"]} | {name: metrics[name] for name in measured}


def _of_tokens(trained, metrics: dict, say: Callable[[str], None]) -> dict:
    from mini_ee.lab.evaluation.tables import heads_trained_table
    from mini_ee.lab.rules import rule_from_dict

    if "agreement" in metrics:
        say(heads_trained_table(metrics, trained.exits))
    if "guaranteed" in metrics:
        say(metrics["guaranteed"])
    for measure, rule in metrics.get("own", {}).items():
        say(f"    {measure}: {rule_from_dict(rule)}")
    calibration = metrics.get("calibration")
    if calibration:
        say(
            f"Rule: thresholds on {calibration['measure']} at which {calibration['epsilon']:.0%} of the tokens agree "
            f"with the full model. On other text {calibration['end_to_end']:.1%} agree, after "
            f"{calibration['mean_layers']:.2f} layers of {trained.exits[-1]}. `mini-ee calibrate` changes it."
        )
    names = ("agreement", "entropy", "calibration", "own", "sweep", "texts", "tokens")
    answer = {"loss": metrics["epochs"][-1]["loss"]} | {name: metrics[name] for name in names if name in metrics}
    return answer | {"model": trained.config["backbone"]["folder"], "history": metrics["history"] or metrics["epochs"]}
