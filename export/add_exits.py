"""`mini-ee add-exits`: a fine-tuned classifier with exits, from text without labels. The model itself stays as it is.

Its own head is the last exit, so an example that does not exit early gets the model's own logits. Heads after earlier
layers learn what the model predicts, by the method of the registry that keeps the model (`keeps_model`). Held-out texts
choose the thresholds, and other held-out texts test the agreement with the model.

    out/run/         the run, as `mini-ee train` writes it
    out/exported/    model.onnx and what belongs to it, verified against torch
    out/summary.json agreement, layers saved and measured time on the test texts
    out/README.md    the model card
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mini_ee.backbones.fine_tuned import label_names
from mini_ee.backbones.hub import read_config
from mini_ee.data.columns import TaskOptions, columns_of
from mini_ee.data.files import read_text, write_bytes, write_json
from mini_ee.data.lines import row_of_line
from mini_ee.data.table_files import SUFFIXES, file_error, table_rows
from mini_ee.data.tasks import Split, Task
from mini_ee.errors import WrongArguments
from mini_ee.evaluation.row_evaluation import evaluate
from mini_ee.exits.row_exits import even_exits
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.recording import predictions, record
from mini_ee.registry import METHODS
from mini_ee.statistics import share_interval
from mini_ee.training.holdout import TEST_ROWS, split_rows
from mini_ee.training.method import load_method
from mini_ee.training.run_folder import Run, training_folder, versions
from mini_ee.training.state import STATE
from mini_ee.training.train_run import train
from mini_ee.training.train_settings import AddOptions

LEAST_TEXTS = 100
"""Fewer texts are refused. About a third of the texts test the agreement; one of .99 needs at least 299 of them."""

TRAINED = 0.6  # share of the texts that the heads learn from; more if TEST_ROWS are left to test

MOST_EXITS = 6


def add_exits(
    model: str | Path,
    texts: Sequence[str | tuple[str, ...]],
    out: str | Path = "fast",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> Run:
    """Train heads on a fine-tuned classifier, choose thresholds, export, verify, and write everything to `out`.

    model: a Hugging Face folder of a ...ForSequenceClassification. texts: like those that the model will read, without
    labels; pairs if it reads pairs. options: the fields of AddOptions. Called again, it continues an interrupted
    training. Returns the run; the summary is out/summary.json. Raises WrongArguments for a model without a
    classification head, for a regression, or for too few texts; FileExistsError if `out` contains a run.
    """
    required = AddOptions(**options)
    model, out, names = Path(model), Path(out), label_names(model)
    rows = list(dict.fromkeys((text,) if isinstance(text, str) else tuple(text) for text in texts))
    if len(rows) < LEAST_TEXTS:
        raise WrongArguments(
            f"expected at least {LEAST_TEXTS} different texts like those that the model will read, found {len(rows)}; "
            f"about 1,000 give a useful result, 10,000 a good one"
        )
    if not names:
        raise WrongArguments(f"{model}: predicts a number; agreement is defined for classes: not supported yet")
    task = Task("texts", names, ("accuracy",), {"train": Split(tuple(rows), np.zeros(len(rows), np.int64))})
    count = max(int(TRAINED * len(rows)), len(rows) - 2 * TEST_ROWS)
    layers = read_config(model / "config.json").num_hidden_layers
    settings = {"exits": required.exits or even_exits(layers, MOST_EXITS), "max_train": count, "seed": seed}
    settings |= {"max_loss": round(1 - required.agreement, 6), "confidence": required.confidence}
    method = next((name for name in METHODS if load_method(name).keeps_model), None)
    if method is None:
        raise WrongArguments("no method of the registry trains heads on a model that stays as it is")
    interrupted = (training_folder(out / "run") / STATE).exists()
    run = train(method, model, task, out / "run", resume=interrupted, say=say, **settings)
    test = split_rows(task, seed, count).test
    export(run, out / "exported", texts=test.texts, seed=seed)
    summary = _summary(run, Runtime(out / "exported", threads=1), task, test, required)
    write_json(out / "summary.json", summary)
    write_bytes(out / "README.md", card(summary).encode())
    return run


def _summary(run: Run, runtime: Runtime, task: Task, test: Split, required: AddOptions) -> dict:
    """Agreement, layers and time of the exported graph on the texts that have chosen nothing."""
    encoded = runtime.encode(test.texts)
    recorded = record(runtime.segments(), encoded, 1, "test texts", runtime.whole_model())
    recorded = recorded._replace(labels=predictions(recorded.logits[:, -1]))  # the model's own
    found = evaluate(runtime, run.rule, recorded, task, encoded, 1)
    return {
        "model": run.config["backbone"]["folder"],
        "exits": list(run.exits),
        "texts": {"trained": run.metrics["rows"], "held_out": run.metrics["rows_held"], "tested": len(test)},
        "required_agreement": required.agreement,
        "confidence": required.confidence,
        "guarantee": run.config["guarantee"],
        "rows_needed": run.metrics["rows_needed"],
        "agreement": found["accuracy"],
        "agreement_interval": share_interval(round(found["accuracy"] * len(test)), len(test)),
        "rule": run.rule.to_dict(),
        **{key: found[key] for key in ("mean_layers", "layers_saved", "exit_counts", "flops_ratio", "speedup")},
        "per_exit_agreement": found["per_exit_accuracy"],
        "versions": versions(),
    }


def line_of(summary: dict) -> str:
    """The summary in one sentence or two."""
    layers, required = summary["exits"][-1], summary["required_agreement"]
    if not summary["layers_saved"]:
        return f"Early exit does not pay here: no thresholds keep an agreement of {required:.1%}."
    guarantee = f"at least {required:.1%} with {summary['confidence']:.0%} confidence"
    if summary["guarantee"] is None:
        needed = summary["rows_needed"]
        more = f"; about {needed:,} test texts would do" if needed else ""
        guarantee = f"{required:.1%} is not guaranteed{more}"
    return (
        f"Agrees with the original on {summary['agreement']:.1%} of {summary['texts']['tested']:,} test texts "
        f"({guarantee}). It saves {summary['layers_saved']:.1%} of the {layers} layers and is "
        f"{summary['speedup']:.2f} times as fast at batch size 1."
    )


def card(summary: dict) -> str:
    """The model card, as Markdown."""
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


# ---- Texts from files ----


def read_texts(paths: Sequence[Path], options: TaskOptions = TaskOptions()) -> list[tuple[str, ...]]:
    """The texts of files without labels: one a line, or .tsv, .csv and .jsonl with their columns. Pairs stay pairs.

    Raises ValueError, of one line, for a file that holds none, or rows with another number of texts than the first.
    """
    found: list[tuple[str, ...]] = []
    for path in paths:
        rows = list(_rows_of(path, options))
        if not rows:
            raise file_error(path, 1, "texts", "none", "give a file with one text a line")
        found += rows
        if len({len(row) for row in found}) > 1:
            raise file_error(path, 1, f"rows of {len(found[0])} texts, as before", f"{len(rows[0])}", "give one kind")
    return found


def _rows_of(path: Path, options: TaskOptions):
    if path.suffix.lower() not in SUFFIXES:
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            try:
                if line.strip():
                    yield row_of_line(line.encode(), 2 if "\t" in line else 1)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
        return
    (_, header), *rows = table_rows(path)
    columns = columns_of(path, header, options, labelled=False)
    for _, fields in rows:
        yield tuple(fields[at] for at in columns.texts)
