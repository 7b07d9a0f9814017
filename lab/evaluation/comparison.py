"""Compares several runs on one task: all are evaluated on the same data, and timed in turns in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import Split, Task, holdout
from mini_ee.lab.data.tokenizer import Encoded
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.row_evaluation import (
    LOSSES,
    RANGES,
    Trained,
    by_exit,
    curve,
    fewest_flops,
    is_full,
    measure_seconds,
    replayed,
    timed_batches,
)
from mini_ee.lab.evaluation.token_evaluation import (
    AGREEMENT_LEVEL,
    at_equal_agreement,
    decoded,
    measure_speed,
    quality,
    written_texts,
)
from mini_ee.lab.exits.decoding import Generated
from mini_ee.lab.exits.generation import Sampling
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.recording import Record, exit_scores, plan_rows, record, summary
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Never, Rule, rule_from_dict
from mini_ee.lab.sweep import from_loose_to_strict
from mini_ee.lab.training.default_rule import CANDIDATES, choose, sweep, usual_rule
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import Run
from mini_ee.lab.training.train_run import trained_on
from mini_ee.lab.training.training_text import Source, TextOptions, texts_to_test

TESTED_TEXTS, TIMED_TEXTS = 100, 2


class Compared(NamedTuple):
    """A run or an exported folder, its name on the command line, and its label in a table."""

    name: str
    trained: Trained
    label: str


# ---- Rows ----
@dataclass
class RowsOfRun:
    """A run while it is compared: its row of the answer, and its outputs at every exit."""

    trained: Trained
    row: dict
    encoded: Encoded  # the reported rows
    recorded: Record  # of the reported rows
    chosen_on: str | None = None  # sha256 of the held-out rows on which its rules are chosen; None: the reported rows
    points: list[dict] = field(default_factory=list)  # its curve on the rows on which its rules are chosen


def compare_rows(compared: Sequence[Compared], task: Task, rows: Split, batch_size: int, swept: bool) -> dict:
    """The JSON answer: each run under its own rule, all timed in turns.

    With `swept` also the curve of each run, and what it saves without loss and with little loss. Rules are then chosen
    on the rows held out in training, if the run knows them, else on the reported rows; the key `chosen_on` says which.
    A loss is the difference to the best full model among the runs whose rules are chosen on the same rows (runs with
    different seeds hold out different rows).
    """
    runs, timed = [], []
    for name, trained, label in compared:
        encoded, segments, whole = trained.encode(rows.texts), trained.segments(), trained.whole_model()
        recorded = record(segments, encoded, batch_size, "reading", whole)
        own_rule = trained.rule
        rule = plan_rows(own_rule, encoded, batch_size) if own_rule.plans_from_texts else own_rule
        row = {"run": name, "how": label} | _row(trained, recorded, rule, task, rows.labels)
        row["rows_truncated"] = encoded.truncated
        timed += [(row, "full_seconds", (whole, Never(), encoded)), (row, "seconds", (segments, own_rule, encoded))]
        runs.append(RowsOfRun(trained, row, encoded, recorded))
    if swept:
        timed += _swept(runs, task, rows.labels, batch_size)
    order = timed_batches(runs[0].encoded, batch_size)
    for (row, key, _), seconds in zip(timed, measure_seconds([timed_run for *_, timed_run in timed], order)):
        row[key] = float(seconds)
    answer = [run.row for run in runs]
    for row in answer:
        for point in [row, *(row[name] for name in (*LOSSES, *RANGES) if row.get(name))]:
            point["speedup"] = row["full_seconds"] / point["seconds"]
    return {"rows": answer, "timed_rows": sum(map(len, order))}


def _row(trained: Trained, recorded: Record, rule: Rule, task: Task, labels: np.ndarray) -> dict:
    result, settings = recorded.replay(rule), trained.config.get("settings", {})
    scores = exit_scores(recorded, task, labels)
    return {
        "method": trained.config["method"],
        **summary(result, recorded, task, labels),
        **{name: settings[name] for name in ("alpha", "reward") if "reward" in settings},
        "by_exit": [] if task.regression else by_exit(recorded, result.exit_index, labels),
        "per_exit_accuracy": exit_scores(recorded, task, labels, "score" if task.regression else "accuracy"),
        "per_exit_score": scores,
        "full_score": scores[-1],
        "megabytes": trained.weight_bytes / 1e6,
        "engine": trained.segments().engine,
        "exits": list(trained.exits),
        "rule": trained.rule.to_dict(),
        "pool": trained.config["pool"],
    }


def rules_of(trained: Trained, recorded: Record, task: Task) -> list[Rule]:
    """The rules of a method's curve; none if the run's own rule plans."""
    if trained.rule.plans_from_texts:
        return []
    rules = method_rules(trained.config["method"], recorded, task)
    if type(trained.rule) not in map(type, rules):  # calibrated, or chosen by hand
        rules += from_loose_to_strict(trained.rule, recorded, CANDIDATES)
    return rules


def method_rules(method: str, recorded: Record, task: Task) -> list[Rule]:
    """The full model and the candidates of a method; the usual rules, if it has none or is not registered."""
    usual = sweep(usual_rule(task))
    candidates = (load_method(method).candidates if method in METHODS else None) or usual
    return [Never(), *(candidates(recorded) or usual(recorded))]  # a graph with another rule contains no policy


def _swept(runs: Sequence[RowsOfRun], task: Task, labels: np.ndarray, batch_size: int) -> list[tuple]:
    """Add to the row of each run: its curve, what it saves at each of LOSSES, and its best rule in each of RANGES.

    Returns what to time: the row of a point, the key of its seconds, and (segments, rule, encoded).
    """
    for run in runs:
        held_out = None if run.trained.rule.plans_from_texts else _held_out(run.trained, task)
        run.row["chosen_on"] = "reported rows" if held_out is None else "hold-out"
        chosen_on, chosen_labels = run.recorded, labels
        if held_out is not None:
            run.chosen_on, chosen_labels = held_out.sha256(), held_out.labels
            encoded, whole = run.trained.encode(held_out.texts), run.trained.whole_model()
            chosen_on = record(run.trained.segments(), encoded, batch_size, "hold-out", whole)
        rules = rules_of(run.trained, chosen_on._replace(labels=chosen_labels), task)
        run.points = curve(chosen_on, rules, task, chosen_labels)
    full_scores: dict[str | None, float] = {}  # of the best full model, by chosen_on
    for run in runs:
        scores = [point["score"] for point in run.points if point["rule"]["name"] == "never"]
        full_scores[run.chosen_on] = max([full_scores.get(run.chosen_on, -1.0), *scores])
    timed = []
    for run in runs:
        reported = [replayed(point, run.recorded, task, labels) for point in run.points]
        run.row["curve"] = sorted(reported, key=lambda point: -point["mean_layers"])
        for name, point in _picks(run.points, full_scores[run.chosen_on]).items():
            run.row[name] = replayed(point, run.recorded, task, labels) if point else {}
            if point:
                segments = run.trained.whole_model() if is_full(run.row[name]) else run.trained.segments()
                timed.append((run.row[name], "seconds", (segments, rule_from_dict(point["rule"]), run.encoded)))
    return timed


def _picks(points: list[dict], full_score: float) -> dict[str, dict | None]:
    """The best point of a curve for each of LOSSES (fewest FLOPs) and RANGES (highest score), or None."""
    picks = {}
    for name, loss in LOSSES.items():
        least = full_score - loss - 1e-9
        picks[name] = choose(points, fewest_flops, lambda point, least=least: point["score"] >= least)
    for name, most in RANGES.items():
        picks[name] = choose(points, itemgetter("score"), lambda point, most=most: point["flops_ratio"] <= most)
    return picks


def _held_out(trained: Trained, task: Task) -> Split | None:
    """The rows that a run held out in training; None for an exported folder, and for a run on another task."""
    if not isinstance(trained, Run) or trained.unit != "rows" or not trained_on(trained, task):
        return None
    return holdout(task.split("train"), trained.config["seed"])[1]


# ---- Tokens ----


def compare_tokens(
    runs: Sequence[Run], texts: str | None, count: int | None, sampling: Sampling, swept: bool, seed: int
) -> dict:
    """The JSON answer: quality and speed of the text that each run generates, under each of its rules.

    With `swept` also under stricter and looser rules. For runs with the same decoder also `_heads`. texts: a file, if
    the runs' texts have moved; count: number of texts.
    Raises WrongArguments if the runs learned different kinds of text.
    """
    kinds = {run.config.get("text", {}).get("kind") for run in runs}
    if None in kinds or len(kinds) > 1:
        actual = " and ".join(sorted(str(kind) for kind in kinds))
        raise WrongArguments(f"expected runs that learned the same kind of text, found {actual}")
    rows, timed = [], []
    for run in runs:
        cases, settings = _cases(run, texts, count or TESTED_TEXTS, sampling)
        references = [run.tokenizer.backend.decode(text.ids[text.start + 1 :]) for text in cases]
        full = decoded(run, run.model.whole.write(cases, Never(), seed=seed, **settings))
        metrics = read_json(run.folder / "metrics.json")
        own_rules = metrics.get("own", {})
        if run.rule.to_dict() not in own_rules.values():  # from `mini-ee calibrate`
            name = run.rule.name if run.rule.name not in own_rules else f"{run.rule.name}, calibrated"
            own_rules = {name: run.rule.to_dict()} | own_rules
        for measure, rule in {"full model": Never().to_dict(), **own_rules}.items():
            others, points = metrics.get("sweep", {}).get(measure, []) if swept else [], []
            model = run.model.whole if measure == "full model" else run.model
            for rule_dict in tqdm([rule, *others], desc=measure, unit="rule", delay=2):
                written = model.write(cases, rule_from_dict(rule_dict), seed=seed, **settings)
                points.append({"rule": rule_dict} | quality(run, written, full, references))
            description = {"run": str(run.folder), "method": run.config["method"], "measure": measure}
            rows.append(description | points[0] | {"exits": list(model.exits), "curve": points[1:]})
            timed += [(point, _timed(model, cases, point["rule"], settings, seed)) for point in (rows[-1], *points[1:])]
    measure_speed(timed)
    answer = {"task": kinds.pop(), "rows": rows, "texts": len(cases), "timed_texts": TIMED_TEXTS}
    return answer | {"heads": _heads(runs, seed), "level": AGREEMENT_LEVEL}


def _cases(run: Run, texts: str | None, count: int, sampling: Sampling) -> tuple[list[Text], dict]:
    """Texts that the run was not trained on, and settings of `generate` to continue their beginnings."""
    description = run.config["text"] | ({"text": texts, "prompt": None} if texts else {})
    given = {name: description[name] for name in ("text", "kind", "texts", "new_tokens")}
    options = TextOptions(**given, prompt=description["prompt"] and tuple(description["prompt"]))
    source = Source(run.model.backbone, run.tokenizer, options, run.config["seed"])
    cases, follow = texts_to_test(source, count), source.follow
    if description["kind"] == "pieces":
        follow = max(1, *(len(text.ids) - text.start - 1 for text in cases))
    stop = run.model.backbone.config.stop_tokens
    return cases, {"max_new_tokens": follow, "stop": stop, "sampling": sampling}


def _timed(
    model: TokenExits, texts: list[Text], rule: dict, settings: dict, seed: int
) -> Callable[[], list[Generated]]:
    few = texts[:TIMED_TEXTS]
    return lambda: model.write(few, rule_from_dict(rule), batch_size=1, seed=seed, **settings | {"stop": ()})


def _on_one_decoder(runs: Sequence[Run]) -> bool:
    """Whether all runs have exits on the same decoder, which was not fine-tuned."""
    same = len({run.config["backbone"]["sha256"] for run in runs}) == 1
    return same and not any(run.model.rank or len(run.exits) == 1 for run in runs)


def have_history(runs: Sequence[Run]) -> bool:
    """Whether Fig. 1 of self-supervised exits can be drawn for these runs."""
    return _on_one_decoder(runs) and all(read_json(run.folder / "metrics.json").get("history") for run in runs)


def _heads(runs: Sequence[Run], seed: int) -> list[dict]:
    """Fig. 1 of self-supervised exits, and the layers of each run at AGREEMENT_LEVEL.

    Empty if the runs cannot be compared.
    """
    if not _on_one_decoder(runs):
        return []
    _, calibration, fresh = written_texts(runs[0], seed)
    rows = []
    for run in runs:
        recorded = [record_texts(run.model, texts, progress="observing") for texts in (calibration, fresh)]
        (equal,) = at_equal_agreement(*recorded, ("breaking_ties",), (AGREEMENT_LEVEL,))
        settings, metrics = run.config["settings"], read_json(run.folder / "metrics.json")
        row = {"run": str(run.folder), "init": settings.get("init"), "penalty": settings.get("penalty")}
        history = metrics.get("history", [])
        row |= {key: history[-1][key] for key in ("step", "loss") if history}
        row |= {key: metrics[key] for key in ("agreement", "entropy") if key in metrics}
        rows.append(row | {"exits": list(run.exits), "equal": equal, "history": history})
    return rows
