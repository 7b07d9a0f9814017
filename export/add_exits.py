"""`mini-ee add-exits`: a fine-tuned classifier with exits, from text without labels. The model itself stays as it is.

Its own head is the last exit, so an example that does not exit early gets the model's own logits. Heads after earlier
layers learn what the model predicts, by the method of the registry that keeps the model (`keeps_model`). Held-out texts
choose the thresholds, and other held-out texts test the agreement with the model.

If exits save hardly any time, it says so: summary.json has `pays` false, and nothing is exported.

    out/request.json the inputs and options of the call; the same call again goes on where a killed one stopped
    out/run/         the run, as `mini-ee train` writes it
    out/exported/    model.onnx and what belongs to it, verified against torch
    out/summary.json agreement, layers saved and measured time on the test texts, and the curve of other thresholds
    out/curve.png    the curve as a picture, if matplotlib is installed
    out/README.md    the model card
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from mini_ee.backbones.fine_tuned import is_multi_label, label_names
from mini_ee.backbones.hub import backbone_sha256, read_config
from mini_ee.data.files import read_json, write_bytes, write_json
from mini_ee.data.tasks import Split, Task
from mini_ee.data.tokenizer import NO_LIMIT, own_max_length
from mini_ee.errors import WrongArguments
from mini_ee.evaluation.plots import can_draw, draw_agreement
from mini_ee.evaluation.row_evaluation import evaluate
from mini_ee.exits.row_exits import even_exits
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.recording import predictions, record
from mini_ee.registry import METHODS
from mini_ee.statistics import share_interval
from mini_ee.training.holdout import TEST_ROWS, split_rows
from mini_ee.training.method import load_method
from mini_ee.training.run_folder import Run, is_run, load_run, training_folder, versions, write_rule
from mini_ee.training.state import STATE
from mini_ee.training.train_run import train
from mini_ee.training.train_settings import AddOptions

LEAST_TEXTS = 100
"""Fewer texts are refused. About a third of the texts test the agreement; one of .99 needs at least 299 of them."""

TRAINED = 0.6  # share of the texts that the heads learn from; more if TEST_ROWS are left to test

MOST_TRAINED, MOST_KEPT = 6, 3
"""Early exits with a head at first, and those that are kept if none are named."""

LEAST_SAVED = 0.03
"""Exits pay if they save this share of the time on the test texts, heads included."""


def add_exits(
    model: str | Path,
    texts: Sequence[str | tuple[str, ...]],
    out: str | Path = "fast",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> Run:
    """Train heads on a fine-tuned classifier or regression, choose thresholds, export, verify; all goes to `out`.

    model: a Hugging Face folder of a ...ForSequenceClassification. texts: like those that the model will read, without
    labels; pairs if it reads pairs. options: the fields of AddOptions. Called again, it continues an interrupted
    call. Returns the run; the summary is out/summary.json, and out/exported is not there if `pays` is false in it.
    Raises WrongArguments for a model without a classification head, or for too few texts; FileExistsError if `out`
    contains another call, or one that is over.
    """
    required = AddOptions(**options)
    model, out, names = Path(model), Path(out), label_names(model)
    rows = list(dict.fromkeys((text,) if isinstance(text, str) else tuple(text) for text in texts))
    if len(rows) < LEAST_TEXTS:
        raise WrongArguments(
            f"expected at least {LEAST_TEXTS} different texts like those that the model will read, found {len(rows)}; "
            f"about 1,000 give a useful result, 10,000 a good one"
        )
    if required.tolerance is not None and names:
        raise WrongArguments(f"{model}: --tolerance is for a model that predicts a number; this one predicts classes")
    task = _task(names, tuple(rows), is_multi_label(model))
    count = max(int(TRAINED * len(rows)), len(rows) - 2 * TEST_ROWS)
    _begin(out, {"seed": seed, "texts": task.split("train").sha256(), "model": backbone_sha256(model)}, required)
    run = load_run(out / "run") if is_run(out / "run") else _trained(model, task, out, count, required, seed, say)
    test = split_rows(task, seed, count).test
    summary = _summary(run, test, required)
    if summary["pays"]:
        if not (out / "exported").exists():  # a killed call may have exported
            counts = run.metrics["tested"]["exit_counts"]  # with which a server compares its own
            write_rule(out / "run", run.rule, run.config["guarantee"], counts)
            export(load_run(out / "run"), out / "exported", texts=test.texts, seed=seed)
        summary |= _measured(run, Runtime(out / "exported", threads=1), task, test)
    if can_draw():
        draw_agreement(out / "curve.png", summary)
    write_bytes(out / "README.md", card(summary).encode())
    write_json(out / "summary.json", summary)
    return run


def _task(names: tuple[str, ...], rows: tuple[tuple[str, ...], ...], multi_label: bool = False) -> Task:
    """The texts as a task, whose labels the training fills in."""
    labels, metrics = np.zeros(len(rows), np.int64 if names else np.float32), ("accuracy",) if names else ("pearson",)
    return Task("texts", names, metrics, {"train": Split(rows, labels)}, multi_label=multi_label)


def _begin(out: Path, inputs: dict, required: AddOptions) -> None:
    """Write out/request.json. Raises FileExistsError if `out` holds another call, or one that is over."""
    path = out / "request.json"
    fields = inputs | asdict(required) | {"exits": required.exits and list(required.exits)}
    begun = read_json(path) if path.exists() else None
    if begun is not None and {key: begun.get(key) for key in fields} != fields:
        raise FileExistsError(f"{out}: holds a call with another model, other texts or options; name another folder")
    if (out / "summary.json").exists() or begun is None and (out / "run").exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, fields)


def _trained(model: Path, task: Task, out: Path, count: int, required: AddOptions, seed: int, say) -> Run:
    """The heads: those that were named, or few of those that were trained."""
    method = next((name for name in METHODS if load_method(name).keeps_model), None)
    if method is None:
        raise WrongArguments("no method of the registry trains heads on a model that stays as it is")
    layers = read_config(model / "config.json").num_hidden_layers
    settings = {"exits": required.exits or even_exits(layers, min(MOST_TRAINED + 1, layers)), "max_train": count}
    settings |= {"keep_exits": None if required.exits else MOST_KEPT, "tolerance": required.tolerance, "seed": seed}
    settings |= {"max_loss": round(1 - required.agreement, 6), "confidence": required.confidence}
    settings["max_length"] = own_max_length(model) or NO_LIMIT  # the training cuts what the model itself cannot read
    interrupted = (training_folder(out / "run") / STATE).exists()
    return train(method, model, task, out / "run", resume=interrupted, say=say, **settings)


def _measured(run: Run, runtime: Runtime, task: Task, test: Split) -> dict:
    """Agreement, layers and time of the exported graph on the texts that have chosen nothing."""
    encoded = runtime.encode(test.texts)
    recorded = record(runtime.segments(), encoded, 1, "test texts", runtime.whole_model())
    recorded = recorded._replace(labels=predictions(recorded.logits[:, -1], task))  # the model's own
    task = replace(task, tolerance=run.metrics["tolerance"])
    found = evaluate(runtime, run.rule, recorded, task, encoded, 1)
    return {
        "agreement": found["score"],
        "agreement_interval": share_interval(round(found["score"] * len(test)), len(test)),
        **{key: found[key] for key in ("mean_layers", "layers_saved", "exit_counts", "flops_ratio", "speedup")},
        "per_exit_agreement": found["per_exit_accuracy"],
    }


def _summary(run: Run, test: Split, required: AddOptions) -> dict:
    """The options, and what the test texts show, before anything is exported."""
    tested = run.metrics["tested"]
    return {
        "pays": tested["net_saved"] >= LEAST_SAVED,
        "model": run.config["backbone"]["folder"],
        "exits": list(run.exits),
        "texts": {"trained": run.metrics["rows"], "held_out": run.metrics["rows_held"], "tested": len(test)},
        "required_agreement": required.agreement,
        "confidence": required.confidence,
        "guarantee": run.config["guarantee"],
        "rows_needed": run.metrics["rows_needed"],
        "tolerance": run.metrics["tolerance"],
        **({"multi_label": True} if run.multi_label else {}),
        **{key: tested[key] for key in ("rule", "agreement", "layers_saved", "net_saved", "head_layers", "curve")},
        "versions": versions(),
    }


def line_of(summary: dict) -> str:
    """The summary in one sentence or two."""
    layers, required = summary["exits"][-1], summary["required_agreement"]
    within = f" within {summary['tolerance']:.3g}" if summary["tolerance"] is not None else ""
    within = " in every label" if summary.get("multi_label") else within
    if not summary["pays"]:
        enough = [each["net_saved"] for each in summary["curve"] if each["agreement"] >= required]
        found = f"no thresholds that keep an agreement of {required:.1%}{within} save time"
        if (most := max(enough, default=0)) > 0:
            found = f"thresholds that keep an agreement of {required:.1%}{within} save at most {most:.1%} of the time"
        more = f"; about {summary['rows_needed']:,} test texts may show more" if summary["rows_needed"] else ""
        return f"Early exit does not pay here: {found}, heads included{more}. The model is left as it is."
    guarantee = f"at least {required:.1%} with {summary['confidence']:.0%} confidence"
    if summary["guarantee"] is None:
        needed = summary["rows_needed"]
        more = f"; about {needed:,} test texts would do" if needed else ""
        guarantee = f"{required:.1%} is not guaranteed{more}"
    return (
        f"Agrees with the original{within} on {summary['agreement']:.1%} of {summary['texts']['tested']:,} test texts "
        f"({guarantee}). It saves {summary['layers_saved']:.1%} of the {layers} layers and is "
        f"{summary['speedup']:.2f} times as fast at batch size 1."
    )


def card(summary: dict) -> str:
    """The model card, as Markdown."""
    if not summary["pays"]:
        return f"# {Path(summary['model']).name} without exits\n\n{line_of(summary)}\n"
    rows = "\n".join(
        f"| {layer} | {count} | {equal:.1%} |"
        for layer, count, equal in zip(summary["exits"], summary["exit_counts"], summary["per_exit_agreement"])
    )
    texts = summary["texts"]
    return f"""# {Path(summary["model"]).name} with exits

{line_of(summary)}

The model is unchanged; its own head is the last exit. Heads after earlier layers learned from {texts["trained"]:,}
texts without labels, {texts["held_out"]:,} others chose the thresholds, and {texts["tested"]:,} tested them.

| exit after layer | test texts that exit here | agreement with the model if all exited here |
|---|---|---|
{rows}

The agreement holds for texts like these. `mini-ee serve exported --shadow .05` watches it in service.
"""
