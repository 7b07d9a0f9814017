"""`mini-ee compare`: several runs on one task and one clock, and what their figures say side by side."""

from pathlib import Path

import numpy as np

from mini_ee import WrongArguments
from mini_ee.cli.arguments import check_device, check_task, open_task_of, open_trained, refuse_model, schedule_of
from mini_ee.cli.decoder_commands import holds_writer
from mini_ee.cli.writing_commands import compare_writers
from mini_ee.data.tasks import Task
from mini_ee.export.runtime import Runtime
from mini_ee.measure.evaluate import (
    LOSSES,
    RANGES,
    best_within,
    by_exit,
    curve,
    labels_of,
    measure_seconds,
    most_saved,
    over_seeds,
    timed_batches,
)
from mini_ee.measure.figures import draw_curves, draw_layers, draw_rewards, table
from mini_ee.measure.texts import compare_heads, holds_decoder, refuse
from mini_ee.rules import NeverExit, rule_from_dict
from mini_ee.training.methods import candidates_of
from mini_ee.training.rule import patiences, thresholds
from mini_ee.training.run import Run
from mini_ee.units.recording import exit_scores, plan_rows, record, summary

LOSS_HEADINGS = {"no_loss": "saved at no loss", "one_point": "at one point of loss"}

RANGE_HEADINGS = {
    "range": "operations",
    "run": "run",
    "how": "method",
    "score": "best score:.3f",
    "mean_layers": "layers:.2f",
    "layer_passes": "passes:.2f",
    "flops_ratio": "flops:.3f",
    "milliseconds": "ms a row:.2f",
    "speedup": "speed-up:.2f",
}


def run_compare(args, say) -> dict:
    """Several runs, each under its own rule, timed in turns; --sweep: also what each saves at no and little loss."""
    if holds_writer(args.runs[0]):
        check_device(args.device)
        return compare_writers(args, say)
    if holds_decoder(args.runs[0]):
        check_device(args.device)
        return compare_heads(args, say)
    of_writers = "max_rows", "text", "top_k", "top_p", *(["temperature"] if args.temperature else [])
    refuse(args, of_writers, "is for decoders' runs of consistent and calm")
    opened = [(folder, one) for folder in args.runs for one in open_schedules(folder, args)]
    trained = [one for _, one in opened]
    refuse_model(args, trained)
    if args.schedule and not any(isinstance(one, Run) and one.schedule for one in trained):
        raise WrongArguments("--schedule is for LoRA exits, and none of these runs has them")
    task = open_task_of(trained, args.task)
    for folder, one in opened:
        check_task(one, task, folder)
    if args.picture and task.regression and not args.sweep:
        raise WrongArguments("--picture shows the cross-entropy of exits, which a regression has not; give --sweep too")
    split = args.split or task.default_split
    labels = labels_of(task, split)
    rows, timed = [], []
    for folder, one in opened:
        encoded, segments, whole = one.encode(task.split(split).texts), one.segments(), one.whole_model()
        recorded = record(segments, encoded, args.batch_size, "reading", whole)
        rule = plan_rows(one.rule, encoded, args.batch_size) if one.rule.looks else one.rule
        result, training = recorded.replay(rule), one.config.get("training", {})
        row = {
            "run": str(folder),
            "method": one.config["method"],
            "how": named_schedule(one) if args.schedule else one.config["method"],
            **summary(result, recorded, task, labels),
            **{name: training[name] for name in ("alpha", "reward") if "reward" in training},
            **schedule_of(one),
            "by_exit": [] if task.regression else by_exit(recorded, result.exit_index, labels),
            "per_exit_accuracy": exit_scores(recorded, task, labels, "score" if task.regression else "accuracy"),
            "per_exit_score": (scores := exit_scores(recorded, task, labels)),
            "full_score": scores[-1],
            "megabytes": one.weight_bytes / 1e6,
            "engine": segments.engine,
            "exits": list(one.exits),
            "rule": one.rule.to_dict(),
            "pool": one.config["pool"],
            "rows_truncated": encoded.truncated,
        }
        timed += [(row, "full_seconds", (whole, NeverExit(), encoded)), (row, "seconds", (segments, one.rule, encoded))]
        if args.sweep:
            row["curve"] = _curve(one, recorded, task, labels)
            picked = {name: most_saved(row["curve"], row["full_score"] - loss - 1e-9) for name, loss in LOSSES.items()}
            picked |= {name: best_within(row["curve"], share) for name, share in RANGES.items()}
            for name, found in picked.items():
                row[name] = point = dict(found or {})
                if point:
                    timed.append((point, "seconds", (segments, rule_from_dict(point["rule"]), encoded)))
        rows.append(row)
    order = timed_batches(timed[0][2][2], args.batch_size, args.seed)
    for (row, key, _), seconds in zip(timed, measure_seconds([run for *_, run in timed], order)):
        row[key] = float(seconds)
    for row in rows:
        for point in [row, *(row[name] for name in (*LOSSES, *RANGES) if row.get(name))]:
            point["speedup"] = row["full_seconds"] / point["seconds"]
    columns = {
        "run": "run",
        "how": "method",
        "engine": "engine",
        "score": "score:.3f",
        "full_score": "full:.3f",
        "mean_layers": "layers:.2f",
        "layer_passes": "passes:.2f",
        "layers_saved": "saved:.1%",
        "seconds": "seconds:.3f",
        "speedup": "speed-up:.2f",
        "megabytes": "MB:.1f",
    }
    say(table(rows, columns))
    answer = {"task": task.name, "split": split, "rows": rows, "batch_size": args.batch_size}
    answer["timed_rows"] = sum(map(len, order))
    if args.sweep:
        say(_losses_table(rows))
        say(_ranges_table(rows, answer["timed_rows"]))
    answer["over_seeds"] = over_seeds(rows, [one.config for one in trained])
    if answer["over_seeds"]:
        say(_seeds_table(answer["over_seeds"], args.sweep))
    if args.picture:
        rewards = all("reward" in row for row in rows)
        draw = draw_curves if args.sweep else draw_rewards if rewards else draw_layers
        draw(args.picture, answer)
        say(f"Picture: {args.picture}")
    return answer


def _curve(one: Run | Runtime, recorded, task: Task, labels: np.ndarray) -> list[dict]:
    """The speed-accuracy curve of a run under the rules of its method; the run's own rule alone where it plans."""
    if one.rule.looks:
        return []
    candidates = candidates_of(one.config["method"]) or (patiences if task.regression else thresholds)
    rules = [NeverExit(), *candidates(recorded.logits, recorded.segments.exit_logits)]
    return curve(recorded, rules, task, labels)


def _losses_table(rows: list[dict]) -> str:
    """What each run saves at no loss and at one point, its rule picked on this split."""
    lines = []
    for row in rows:
        line = {"run": row["run"], "how": row["how"], "full": f"{row['full_score']:.3f}"}
        for name in LOSSES:
            point = row[name]
            line[name] = f"{point['layers_saved']:.1%}, {point['speedup']:.2f} x" if point else "-"
        lines.append(line)
    return "\n" + table(lines, {"run": "run", "how": "method", "full": "full"} | LOSS_HEADINGS)


def _ranges_table(rows: list[dict], timed_rows: int) -> str:
    """The best score that each run has for a share of the full model's operations, and what that takes."""
    lines = [
        row[name]
        | {"range": f"at most {share:.0%}", "run": row["run"], "how": row["how"]}
        | {"milliseconds": row[name]["seconds"] * 1e3 / timed_rows}
        for name, share in RANGES.items()
        for row in rows
        if row[name]
    ]
    return "\n" + table(lines, RANGE_HEADINGS) if lines else ""


def _seeds_table(groups: list[dict], swept: bool) -> str:
    """The mean over seeds and, in brackets, the least and the most: of the full model, and of what is saved."""

    def said(spread: dict, form: str) -> str:
        return f"{spread['mean']:{form}} ({spread['least']:{form}} to {spread['most']:{form}})"

    lines = []
    for group in groups:
        line = {"how": group["how"], "seeds": len(group["seeds"])}
        line["exits"] = " ".join(f"{spread['mean']:.3f}" for spread in group["per_exit_score"])
        line |= {"full": said(group["full_score"], ".3f"), "score": said(group["score"], ".3f")}
        for name, point in {"saved": group, **{name: group.get(name) for name in LOSSES}}.items():
            both = point and (said(point["layers_saved"], ".1%"), f"{point['speedup']['mean']:.2f} x")
            line[name] = ", ".join(both) if both else "-"
        lines.append(line)
    headings = {"how": "method", "seeds": "seeds", "exits": "after each exit", "full": "full model"}
    return "\n" + table(lines, headings | (LOSS_HEADINGS if swept else {"score": "own rule", "saved": "saved"}))


def open_schedules(folder: Path, args) -> list[Run | Runtime]:
    """A run for compare: LoRA exits once under each schedule that was asked for, any other once."""
    one = open_trained(folder, args, None)
    if not args.schedule or not isinstance(one, Run) or not one.schedule:
        return [one]
    return [open_trained(folder, args, schedule) for schedule in args.schedule]


def named_schedule(one: Run | Runtime) -> str:
    """The method, and the exits of LoRA streams, with + where they start together."""
    groups = ["+".join(map(str, group)) for group in schedule_of(one).get("schedule", [])]
    return " ".join([one.config["method"], *groups])
