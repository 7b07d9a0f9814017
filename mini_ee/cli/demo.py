"""The main job, end to end: give an encoder exits, decide when to stop, show accuracy against measured time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mini_ee.baselines.joint import joint
from mini_ee.data.files import atomic_folder, write_bytes, write_json
from mini_ee.data.tasks import Task
from mini_ee.export.writer import export
from mini_ee.measure.evaluate import evaluate, labels_of, measure_seconds, timed_batches
from mini_ee.measure.figures import can_draw, draw_exits_by_hardness, draw_speed_accuracy, table, text_plot
from mini_ee.rules import FixedExit, NeverExit, Rule
from mini_ee.training.fit import TrainConfig
from mini_ee.training.run import train_run, versions
from mini_ee.units.recording import predictions, record

ANSWER = "demo.json"

CURVE_POINTS = 9  # thresholds whose time is measured

EXIT_COLUMNS = {"share": "share leaving:.1%", "seconds": "seconds:.3f", "speedup": "speed-up:.2f"}

CURVE_COLUMNS = {
    "mean_layers": "mean layers:.2f",
    "layers_saved": "layers saved:.1%",
    "seconds": "seconds:.3f",
    "speedup": "speed-up:.2f",
}


def demo(model_folder: Path, task: Task, out: Path, config: TrainConfig, say: Callable[[str], None], **options) -> dict:
    """Train `joint`, evaluate, and write report.md, pictures and the run itself to the folder `out`.

    say: called with each piece of text as it is ready; options: what train_run takes. Returns the JSON answer.
    A report of an earlier demo is replaced; FileExistsError where `out` is anything else.
    """
    if out.exists() and not (out / ANSWER).is_file():
        raise FileExistsError(f"{out}: is there and holds no demo report; name another folder with --out")
    split = task.default_split
    labels = labels_of(task, split)
    with atomic_folder(out, replace=True) as folder:
        run = train_run(folder / "run", "joint", joint, model_folder, task, config, **options)
        run.model.to(options["device"])
        segments = run.segments()
        encoded = run.encode(task.split(split).texts)
        if encoded.truncated:
            say(f"{encoded.truncated} of {len(encoded)} texts cut to {run.tokenizer.max_length} tokens")
        say(f"Evaluating {len(labels)} sentences of {task.name} {split}: every exit, then {CURVE_POINTS} thresholds.")
        measured = (encoded, config.batch_size, CURVE_POINTS, config.seed)
        answer = {"method": "joint", **evaluate(segments, run.whole_model(), run.rule, task, split, *measured)}
        answer["curve"] = answer.pop("rows")
        answer |= {"seed": config.seed, "threads": torch.get_num_threads(), "versions": versions()}
        answer["rows"] = _exit_rows(segments, task, encoded, answer, config)
        answer["latency_speedup"] = _latency_speedup(segments, run.rule, encoded, config.seed)
        if task.split(split).hardness:
            answer["hardness"] = _hardness_rows(run, task, split, encoded, config.batch_size)
        verified = export(run, folder / "exported", task.split(split).texts, seed=config.seed)["verified"]
        text = _report(answer, task.regression)
        say(text)
        pictures = []
        if can_draw():
            draw_speed_accuracy(folder / "speed_accuracy.png", answer)
            pictures.append("speed_accuracy.png")
            if "hardness" in answer:
                draw_exits_by_hardness(folder / "exits_by_hardness.png", answer)
                pictures.append("exits_by_hardness.png")
        else:
            say(_curve_plot(answer))
        write_json(folder / ANSWER, answer)
        plot = "\n".join(f"![]({name})" for name in pictures) or f"```\n{_curve_plot(answer)}\n```"
        write_bytes(folder / "report.md", f"# mini-ee demo\n\n```\n{text}\n```\n\n{plot}\n".encode())
    say(
        f"ONNX segments, within {verified['max_logit_difference']:.1g} of torch on {verified['texts']} sentences: "
        f"{out / 'exported'}"
    )
    say(f"Report: {out / 'report.md'}" + "".join(f", {out / name}" for name in pictures))
    return answer | {
        "report": str(out),
        "run": str(out / "run"),
        "export": str(out / "exported"),
        "pictures": [str(out / name) for name in pictures],
    }


def _exit_rows(segments, task: Task, encoded, answer: dict, config: TrainConfig) -> list[dict]:
    """One row an exit: its score on all sentences, the share that leaves there, the time when all leave there."""
    runs = [(segments, rule, encoded) for rule in (NeverExit(), *map(FixedExit, range(len(segments.exits))))]
    full, *seconds = measure_seconds(runs, timed_batches(encoded, config.batch_size, config.seed), repeats=1)
    total = sum(answer["exit_counts"])
    return [
        {"layer": layer, "accuracy": accuracy, "score": score, "share": count / total}
        | {"seconds": float(each), "speedup": float(full / each)}
        for layer, accuracy, score, count, each in zip(
            answer["exits"], answer["per_exit_accuracy"], answer["per_exit_score"], answer["exit_counts"], seconds
        )
    ]


def _latency_speedup(segments, rule: Rule, encoded, seed: int) -> float:
    """How many times as fast the rule is where sentences come one by one."""
    runs = [(segments, NeverExit(), encoded), (segments, rule, encoded)]
    full, early = measure_seconds(runs, timed_batches(encoded, 1, seed), repeats=1)
    return float(full / early)


def _hardness_rows(run, task: Task, split: str, encoded, batch_size: int) -> list[dict]:
    """The built-in task knows how hard each sentence was made: where each kind leaves, and how often it is right."""
    recorded = record(run.segments(), encoded, batch_size)
    result, data = recorded.replay(run.rule), task.split(split)
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
                "exit_counts": np.bincount(result.exit_index[chosen], minlength=len(run.model.exits)).tolist(),
            }
        )
    return sorted(rows, key=lambda row: row["mean_layers"])


def _report(answer: dict, regression: bool) -> str:
    best = max(
        (row for row in answer["curve"] if row["score"] >= answer["full_score"] - 0.01),
        key=lambda row: row["layers_saved"],
        default=None,
    )
    setting, quality = ("patience", "score") if regression else ("threshold", "accuracy")
    measured = {quality: f"{quality}:.3f"}
    curve = [row | {setting: row["rule"][setting]} for row in answer["curve"]]
    parts = [
        f"Each exit on its own ({answer['task']} {answer['split']}; time of {answer['timed_rows']} sentences, "
        f"batch {answer['batch_size']}):",
        table(answer["rows"], {"layer": "layer", **measured, **EXIT_COLUMNS}),
        "",
        "Leave by patience:" if regression else "Leave when the max probability reaches a threshold:",
        table(curve, {setting: f"{setting}:.3g", **measured, **CURVE_COLUMNS}),
        "",
        f"Full model: score {answer['full_score']:.3f}. The default rule, chosen on rows held out of train: "
        f"{answer['score']:.3f} with {answer['layers_saved']:.0%} of the layers saved, "
        f"{answer['speedup']:.2f} times as fast ({answer['latency_speedup']:.2f} times one by one).",
    ]
    if best:
        parts.append(
            f"Picked on this split: within one point of the full model "
            f"the curve saves {best['layers_saved']:.0%} of the layers."
        )
    if "hardness" in answer:
        columns = {"hardness": "hardness", "count": "sentences", **measured, "mean_layers": "mean layers:.2f"}
        parts += ["", "The layer a sentence needs, against the hardness it was made with:"]
        parts.append(table(answer["hardness"], columns))
    return "\n".join(parts)


def _curve_plot(answer: dict) -> str:
    return text_plot([(row["speedup"], row["score"]) for row in answer["curve"] + answer["rows"]], "speed-up", "score")
