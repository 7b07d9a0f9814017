"""`mini-ee demo`: train exits, choose an exit rule, and show accuracy against measured time."""

import time
from argparse import Namespace
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from mini_ee.lab.cli.command_options import Parser, add_options, given_options
from mini_ee.lab.cli.task_options import add_task
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.sweep import from_loose_to_strict

HELP = "train exits, choose an exit rule, and show accuracy against measured time"
EXAMPLE = "mini-ee demo --model all-MiniLM-L6-v2 --task SST-2 --max-train 6000"
USUAL = "--model", "--task", "--out"
ANSWER = "demo.json"

EXAMPLE_OF = {  # number of texts per example -> options of classify
    1: '--text "I did not expect to like it, but I did."',
    2: '--text "I did not expect to like it, but I did." --text-b "I liked it."',
}

CURVE_POINTS = 9  # thresholds in the table

EXIT_COLUMNS = {"share": "share exiting:.1%", "seconds": "seconds:.3f", "speedup": "speed-up:.2f"}

CURVE_COLUMNS = {
    "mean_layers": "mean layers:.2f",
    "layers_saved": "layers saved:.1%",
    "seconds": "seconds:.3f",
    "speedup": "speed-up:.2f",
}


def add(sub: Parser) -> None:
    from mini_ee.lab.training.train_settings import ENCODER_DEFAULTS, RowOptions, TrainOptions

    named = any(word.partition("=")[0] == "--model" for word in sub.words)
    usual = ({} if named else ENCODER_DEFAULTS) | {"exits": "one after every layer"}
    sub.add_argument("--model", type=Path, metavar="DIR", help="folder of a checkpoint (default the built-in BERT)")
    add_task(sub, "folder of a task (default the built-in reviews)")
    sub.add_argument(
        "--out", type=Path, default=Path("mini-ee-demo"), help="folder of the report; an earlier report is replaced"
    )
    of_defaults = None if named else "defaults for the built-in BERT; with --model DIR, those for your model"
    add_options(sub.add_argument_group("training", of_defaults), TrainOptions, usual)
    add_options(sub.add_argument_group("model and data"), RowOptions, usual)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Train `joint`, evaluate it, and write report.md, pictures, the run and its export to the folder --out.

    Replaces the report of an earlier demo. Raises FileExistsError if --out is another folder.
    """
    import torch

    import mini_ee
    from mini_ee.lab.data.files import atomic_folder, write_bytes, write_json
    from mini_ee.lab.evaluation.row_evaluation import evaluate, read_rows, rows_of
    from mini_ee.lab.training.default_rule import usual_rule
    from mini_ee.lab.training.run_folder import versions
    from mini_ee.lab.training.train_run import open_task
    from mini_ee.lab.training.train_settings import RowOptions, TrainOptions

    begin, out, seed = time.perf_counter(), args.out, args.seed
    if out.exists() and not (out / ANSWER).is_file():
        raise FileExistsError(f"{out}: exists and is no report of a demo; name another folder with --out")
    given = given_options(args, TrainOptions, RowOptions, TaskOptions) | {"seed": seed}
    with atomic_folder(out, replace=True) as folder:
        say(_begun(args, out, given))
        task = open_task(args.task, TaskOptions(**given_options(args, TaskOptions)))
        split, rows = rows_of(task, None, None, seed)
        trained = mini_ee.train("joint", args.model, args.task, folder / "run", say=say, **given)
        batch_size = trained.config["training"]["batch_size"]
        segments, encoded = trained.segments(), trained.encode(rows.texts)
        if encoded.truncated:
            say(f"{encoded.truncated} of {len(encoded)} texts were cut to {trained.tokenizer.max_length} tokens.")
        say(f"Evaluating {len(rows)} sentences of {task.name} {split}: every exit, then {CURVE_POINTS} thresholds.")
        recorded = read_rows(trained, encoded, rows.labels, batch_size)
        rules = from_loose_to_strict(usual_rule(task), recorded, CURVE_POINTS)[:-1]  # the last is the full model
        measured = evaluate(trained, trained.rule, recorded, task, encoded, batch_size, rules)
        answer = {"method": "joint", "split": split, "guarantee": trained.config["guarantee"], **measured}
        answer |= {key: trained.metrics[key] for key in ("majority_warning", "guaranteed")} | {"seed": seed}
        answer |= {"curve": answer.pop("rows"), "threads": torch.get_num_threads(), "versions": versions()}
        answer["rows"] = _exit_rows(segments, encoded, answer)
        answer["latency_speedup"] = _latency_speedup(segments, trained.rule, encoded)
        if rows.hardness:
            answer["hardness"] = _hardness_rows(recorded.replay(trained.rule), task, rows, len(trained.exits))
        verified = mini_ee.export(trained, folder / "exported", texts=rows.texts, seed=seed)["verified"]
        say(text := _report(answer, task.regression))
        pictures = _pictures(folder, answer)
        plot = "\n".join(f"![]({name})" for name in pictures) or f"```\n{_curve_plot(answer)}\n```"
        if not pictures:
            say(_curve_plot(answer))
        write_json(folder / ANSWER, answer)
        write_bytes(folder / "report.md", f"# mini-ee demo\n\n```\n{text}\n```\n\n{plot}\n".encode())
    near = f"within {verified['max_logit_difference']:.1g} of torch on {verified['texts']} sentences"
    say(f"ONNX, {near}: {out / 'exported'}")
    say(f"Try: mini-ee classify {out / 'run'} {EXAMPLE_OF[len(rows.texts[0])]}")
    say(f"Report: {out / 'report.md'}")
    if pictures:
        say(f"Pictures: {', '.join(str(out / name) for name in pictures)}")
    return answer | {
        "report": str(out),
        "run": str(out / "run"),
        "export": str(out / "exported"),
        "pictures": [str(out / name) for name in pictures],
        "wall_seconds": time.perf_counter() - begin,
    }


def _begun(args: Namespace, out: Path, given: dict) -> str:
    """The first line: what will be trained. Raises WrongArguments for a model or a task that cannot be used."""
    from mini_ee.lab.backbones.hub import read_config
    from mini_ee.lab.training.train_run import exits_of, make_request

    request = make_request("joint", args.model, args.task, out, False, given)
    if request.task is None:
        raise WrongArguments(
            f"{request.model}: is a decoder, and the demo trains a classifier; name the folder of a task with --task"
        )
    layers = read_config(request.model / "config.json").num_hidden_layers
    return (
        f"Training {len(exits_of(request, layers))} exits on {request.model.name} ({layers} layers) for "
        f"{request.task.name}: all exits at once, their losses weighted by depth (ConsistentEE, Eq. 1)."
    )


def _pictures(folder: Path, answer: dict) -> list[str]:
    """Draw the pictures into a folder. Returns their names; empty without matplotlib."""
    from mini_ee.lab.evaluation.plots import can_draw, draw_exits_by_hardness, draw_speed_accuracy

    draws = {"speed_accuracy.png": draw_speed_accuracy}
    if "hardness" in answer:
        draws["exits_by_hardness.png"] = draw_exits_by_hardness
    if not can_draw():
        return []
    for name, draw in draws.items():
        draw(folder / name, answer)
    return list(draws)


def _exit_rows(segments, encoded, answer: dict) -> list[dict]:
    """For each exit: its score on all sentences, the share that exits there, and the time if all exit there."""
    from mini_ee.lab.evaluation.row_evaluation import measure_seconds, timed_batches
    from mini_ee.lab.rules import Fixed, Never

    runs = [(segments, rule, encoded) for rule in (Never(), *map(Fixed, range(len(segments.exits))))]
    full, *seconds = measure_seconds(runs, timed_batches(encoded, answer["batch_size"]), repeats=1)
    total = sum(answer["exit_counts"])
    return [
        {"layer": layer, "accuracy": accuracy, "score": score, "share": count / total}
        | {"seconds": float(exit_seconds), "speedup": float(full / exit_seconds)}
        for layer, accuracy, score, count, exit_seconds in zip(
            answer["exits"], answer["per_exit_accuracy"], answer["per_exit_score"], answer["exit_counts"], seconds
        )
    ]


def _latency_speedup(segments, rule, encoded) -> float:
    """Time of the full model / time of the rule, for sentences one by one."""
    from mini_ee.lab.evaluation.row_evaluation import measure_seconds, timed_batches
    from mini_ee.lab.rules import Never

    runs = [(segments, Never(), encoded), (segments, rule, encoded)]
    full, early = measure_seconds(runs, timed_batches(encoded, 1), repeats=1)
    return float(full / early)


def _hardness_rows(result, task, data, exits: int) -> list[dict]:
    """For each kind of sentence in the built-in task: its mean exit layer and its accuracy."""
    import numpy as np

    from mini_ee.lab.recording import predictions

    kinds = np.array(data.hardness)
    rows = []
    for kind in dict.fromkeys(data.hardness):
        chosen = kinds == kind
        rows.append(
            {
                "hardness": kind,
                "count": int(chosen.sum()),
                **task.score(predictions(result.logits[chosen]), data.labels[chosen]),
                "mean_layers": float(result.layers_run[chosen].mean()),
                "exit_counts": np.bincount(result.exit_index[chosen], minlength=exits).tolist(),
            }
        )
    return sorted(rows, key=lambda row: row["mean_layers"])


def _report(answer: dict, regression: bool) -> str:
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.training.default_rule import choose

    within_a_point = answer["full_score"] - 0.01
    best = choose(answer["curve"], itemgetter("layers_saved"), lambda row: row["score"] >= within_a_point)
    setting, quality = ("patience", "score") if regression else ("threshold", "accuracy")
    measured = {quality: f"{quality}:.3f"}
    curve = [row | {setting: row["rule"][setting]} for row in answer["curve"]]
    parts = [
        f"Each exit on its own ({answer['task']} {answer['split']}; time of {answer['timed_rows']} sentences, "
        f"batch {answer['batch_size']}):",
        table(answer["rows"], {"layer": "layer", **measured, **EXIT_COLUMNS}),
        "",
        "Exit by patience:" if regression else "Exit if the maximum probability reaches a threshold:",
        table(curve, {setting: f"{setting}:.3g", **measured, **CURVE_COLUMNS}),
        "",
        f"Full model: score {answer['full_score']:.3f}. The default rule, chosen on held-out train examples: "
        f"{answer['score']:.3f} with {answer['layers_saved']:.0%} of the layers saved, "
        f"{answer['speedup']:.2f} times as fast ({answer['latency_speedup']:.2f} times one by one).",
        *filter(None, (answer["majority_warning"], answer["guaranteed"])),
    ]
    if best:
        parts.append(
            f"Chosen on this split: within one point of the full model, "
            f"the curve saves {best['layers_saved']:.0%} of the layers."
        )
    if "hardness" in answer:
        columns = {"hardness": "hardness", "count": "sentences", **measured, "mean_layers": "mean layers:.2f"}
        parts += ["", "Exit layer by the hardness with which a sentence was made:"]
        parts.append(table(answer["hardness"], columns))
    return "\n".join(parts)


def _curve_plot(answer: dict) -> str:
    from mini_ee.lab.evaluation.plots import text_plot

    return text_plot([(row["speedup"], row["score"]) for row in answer["curve"] + answer["rows"]], "speed-up", "score")
