"""`mini-ee add-exits`: a fine-tuned model with exits, from text without labels. The model itself stays as it is.

Its own head is the last exit, so an example that does not exit early gets the model's own logits. Heads after earlier
layers learn what the model predicts, by the method of the registry that keeps the model (`keeps_model`). Held-out texts
choose the thresholds, and other held-out texts test the agreement with the model. If the model labels tokens, a text
agrees when all of them have the model's labels; if it answers questions, when the span of the answer is the same.

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
from itertools import compress
from pathlib import Path

import numpy as np

from mini_ee.lab.backbones.adapter import tokenizer_folder
from mini_ee.lab.backbones.fine_tuned import is_multi_label, is_sentence_encoder, label_names, token_kind_of
from mini_ee.lab.backbones.hub import read_config
from mini_ee.lab.backbones.sentence_encoder import sentence_modules
from mini_ee.lab.data.files import check_folder, read_json, write_bytes, write_json
from mini_ee.lab.data.model_files import changed_files, model_sha256s
from mini_ee.lab.data.rankings import queries_of, rankable, ranked
from mini_ee.lab.data.sentence_files import is_setfit
from mini_ee.lab.data.tasks import LISTED_LABELS, Split, Task
from mini_ee.lab.data.tokenizer_config import NO_LIMIT, own_max_length
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.gold_labels import check_tags, gold_scores, scores_line
from mini_ee.lab.evaluation.plots import can_draw, draw_agreement
from mini_ee.lab.evaluation.row_evaluation import evaluate
from mini_ee.lab.exits.row_exits import even_exits
from mini_ee.lab.export.encoder_exits import (
    card_of_encoder,
    check_options,
    encoder_task,
    exits_of_encoder,
    line_of_encoder,
)
from mini_ee.lab.export.original import compare, compared_texts
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.recording import predictions, record
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Never
from mini_ee.lab.statistics import share_interval
from mini_ee.lab.token_tasks import LABELS, SPAN
from mini_ee.lab.training.holdout import TEST_ROWS, split_rows
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import Run, is_run, load_run, training_folder, versions, write_rule
from mini_ee.lab.training.state import STATE
from mini_ee.lab.training.train_run import make_request, original_outputs, train
from mini_ee.lab.training.train_settings import AddOptions

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
    labels: Sequence[str | int] | None = None,
    **options,
) -> Run:
    """Train heads on a fine-tuned classifier or regression, choose thresholds, export, verify; all goes to `out`.

    model: a Hugging Face folder of a ...ForSequenceClassification, ...ForTokenClassification or
    ...ForQuestionAnswering, or of a sentence encoder (encoder_exits.py). texts: like those that the model will read;
    pairs if it reads pairs, such as a question and its context. labels: of the texts, their names or numbers, only for
    max_loss; of a model for tokens or questions the gold tags or answers of each text, by which the summary scores the
    test texts. options: the fields of AddOptions.
    Called again, it continues an interrupted call. Returns the run; the summary is out/summary.json, and out/exported
    is not there if `pays` is false in it. Raises WrongArguments for a model without a classification head, for too few
    texts, or for labels that are not the model's; FileExistsError if `out` contains another call, or one that is over.
    """
    if options.get("max_loss") is not None and options.get("agreement") is not None:
        raise WrongArguments("--agreement counts the model's own predictions, --max-loss the labels: give one of them")
    try:
        required, model, out = AddOptions(**options), Path(model), Path(out)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    check_folder(model)
    encodes = is_sentence_encoder(model)
    names, several = ((), False) if encodes else (label_names(model), is_multi_label(model))
    kind = "" if encodes else token_kind_of(model)
    gold, labels = (labels, None) if kind and required.max_loss is None else (None, labels)
    check_options(options, labels, encodes)
    _check_numbers(model, required, names or encodes)
    numbers = _numbers(labels, names, several or bool(kind), required, len(texts))
    rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    if (different := len(set(rows))) < LEAST_TEXTS:
        raise WrongArguments(
            f"expected at least {LEAST_TEXTS} different texts like those that the model will read, found {different}; "
            f"about 1,000 give a useful result, 10,000 a good one"
        )
    if required.top_k is not None:
        rows = [*compress(rows, rankable(rows, required.top_k, say, LEAST_TEXTS))]
    if kind:
        _check_rows(model, kind, rows)
        check_tags(kind, names, gold or ())
    task = encoder_task(rows) if encodes else _task(names, tuple(rows), several, numbers, required.top_k, kind)
    inputs = {"seed": seed, "texts": task.split("train").sha256(), "files": model_sha256s(model)}
    compared = _begin(out, inputs, required, lambda: _compared(model, task, out, required))
    say(compared)
    add = exits_of_encoder if encodes else _exits_of_classifier
    run, summary = add(model, task, out, required, seed, say)
    summary |= {"compared": compared}
    if gold is not None and summary["pays"]:
        summary |= _gold_scores(Runtime(out / "exported", threads=1), task, seed, gold)
    write_bytes(out / "README.md", card(summary).encode())
    write_json(out / "summary.json", summary)
    return run


def _exits_of_classifier(
    model: Path, task: Task, out: Path, required: AddOptions, seed: int, say: Callable[[str], None]
) -> tuple[Run, dict]:
    """Train the heads, choose thresholds, export, verify, measure. Returns the run and the summary."""
    count = _count_to_train(task)
    run = load_run(out / "run") if is_run(out / "run") else _trained(model, task, out, count, required, seed, say)
    test = split_rows(task, seed, count).test
    summary = _summary(run, test, required)
    if summary["majority_warning"]:
        say(summary["majority_warning"])
    if summary["pays"]:
        if not (out / "exported").exists():  # a killed call may have exported
            # A server compares its exits with these counts, and its agreement with this epsilon.
            counts, guarantee = run.metrics["tested"]["exit_counts"], run.config["guarantee"]
            if guarantee and required.max_loss is None:
                guarantee = guarantee | {"epsilon": round(1 - guarantee["max_loss"], 6)}
            write_rule(out / "run", run.rule, guarantee, counts, run.config.get("curve"))
            export(load_run(out / "run"), out / "exported", texts=test.texts, seed=seed)
        summary |= _measured(run, Runtime(out / "exported", threads=1), task, test, required.max_loss is not None)
    if can_draw():
        draw_agreement(out / "curve.png", summary)
    return run, summary


def _count_to_train(task: Task) -> int:
    """The number of texts, or of queries in a ranking, that the heads learn from."""
    rows = task.split("train").texts
    units = len(rows) if task.top_k is None else int(queries_of(rows).max()) + 1
    return max(int(TRAINED * units), units - 2 * TEST_ROWS)


def _gold_scores(runtime: Runtime, task: Task, seed: int, gold: Sequence[list[str]]) -> dict:
    """Scores of the test texts against gold labels, with exits and of the full model."""
    rows = task.split("train")
    numbered = replace(task, splits={"train": replace(rows, labels=np.arange(len(rows)))})
    test = split_rows(numbered, seed, _count_to_train(task)).test
    of_rules = {"scores": runtime.run(test.texts), "full_scores": runtime.run(test.texts, rule=Never())}
    wanted = [gold[row] for row in test.labels]
    return {
        name: gold_scores(task.token_kind, task.label_names, test.texts, wanted, [answer.label for answer in answers])
        for name, answers in of_rules.items()
    }


def _check_numbers(model: Path, required: AddOptions, other: object) -> None:
    """Raise WrongArguments for an option of models that predict a number. other: whether this model does not."""
    for flag, given in (("--tolerance", required.tolerance), ("--top-k", required.top_k)):
        if given is not None and other:
            raise WrongArguments(f"{model}: {flag} is for a model that predicts a number; this one predicts classes")
    if required.top_k is not None and required.tolerance is not None:
        raise WrongArguments("--top-k counts queries that keep their best texts, --tolerance numbers: give one of them")


def _numbers(labels, names: tuple[str, ...], several: bool, required: AddOptions, count: int) -> Sequence[int]:
    """The class of each text; without labels 0. Raises WrongArguments for labels that the model does not have."""
    if (labels is None) != (required.max_loss is None):
        actual = "found none" if labels is None else "found labels alone"
        raise WrongArguments(f"expected both --max-loss and texts with labels (.tsv, .csv or .jsonl), {actual}")
    if labels is None:
        return (0,) * count
    if not names or several:
        raise WrongArguments("--max-loss is for a model that gives a text one class: give --agreement")
    index = {str(number): number for number in range(len(names))}
    index |= {name.casefold(): number for number, name in enumerate(names)}
    numbers = [index.get(str(label).strip().casefold(), -1) for label in labels]
    if len(numbers) != count or -1 in numbers:
        actual = f"{len(numbers)} labels for {count} texts"
        actual = actual if len(numbers) != count else repr(labels[numbers.index(-1)])
        some = ", ".join(names[:LISTED_LABELS]) + ", ..." * (len(names) > LISTED_LABELS)
        raise WrongArguments(f"expected one of the model's labels {some}, or its number, found {actual}")
    return numbers


def _check_rows(model: Path, kind: str, rows: list[tuple[str, ...]]) -> None:
    """Raise WrongArguments unless there is one text in a row whose tokens are labelled, or a question and a context."""
    expected, count = 1 + (kind == SPAN), len(rows[0])
    if count != expected:
        what = "pairs, a question and its context" if kind == SPAN else "one text a row, whose tokens have labels"
        raise WrongArguments(
            f"{model}: a model for {kind} reads {what}, found {count} text{'s' * (count > 1)} in a row"
        )


def _task(
    names,
    rows: tuple[tuple[str, ...], ...],
    multi_label: bool = False,
    numbers: Sequence[int] = (),
    top_k: int | None = None,
    kind: str = "",
) -> Task:
    """The texts as a task, whose labels the training fills in if there are none."""
    labels = np.array(numbers or (0,) * len(rows), np.int64 if names else np.float32)
    metrics = ("accuracy",) if names else ("pearson",)
    kinds = {"multi_label": multi_label, "top_k": top_k, "token_kind": kind}
    return Task("texts", names, metrics, {"train": Split(rows, labels)}, **kinds)


def _begin(out: Path, inputs: dict, required: AddOptions, compare: Callable[[], str]) -> str:
    """Compare the model with its own library, then write out/request.json. Returns the result in a sentence.

    Raises FileExistsError if `out` holds another call, or one that is over.
    """
    path = out / "request.json"
    fields = inputs | asdict(required) | {"exits": required.exits and list(required.exits)}
    begun = read_json(path) if path.exists() else None
    if begun is not None and {key: begun.get(key) for key in fields} != fields:
        changed = changed_files(begun.get("files", {}), inputs["files"])[:3]
        difference = f"another {', '.join(changed)}" if changed else "other texts or options"
        raise FileExistsError(f"{out}: holds a call with {difference}; name another folder")
    if (out / "summary.json").exists() or begun is None and (out / "run").exists():
        raise FileExistsError(f"{out}: is there already; name another folder or remove it")
    compared = compare() if begun is None else begun["compared"]
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, fields | {"compared": compared})
    return compared


def _compared(model: Path, task: Task, out: Path, required: AddOptions) -> str:
    """Whether the model's own library has the same outputs for some of the texts. Nothing is written."""
    texts, encodes = compared_texts(task.split("train").texts), is_sentence_encoder(model)
    options = {"prompt_name": required.prompt_name} if encodes else {"max_length": _own_length(model)}
    request = make_request(_method("embeddings" if encodes else "rows"), model, task, out / "run", False, options)
    return compare(model, texts, *original_outputs(request, texts), encodes, required.prompt_name)


def _trained(model: Path, task: Task, out: Path, count: int, required: AddOptions, seed: int, say) -> Run:
    """The heads: those that were named, or few of those that were trained."""
    layers = read_config(model / "config.json").num_hidden_layers
    settings = {"exits": required.exits or even_exits(layers, min(MOST_TRAINED + 1, layers)), "max_train": count}
    settings |= {"keep_exits": None if required.exits else MOST_KEPT, "tolerance": required.tolerance, "seed": seed}
    labelled = required.max_loss is not None
    max_loss = required.max_loss if labelled else round(1 - required.agreement, 6)
    settings |= {"max_loss": max_loss, "labelled": labelled, "confidence": required.confidence}
    settings["max_length"] = _own_length(model)
    interrupted = (training_folder(out / "run") / STATE).exists()
    return train(_method("rows"), model, task, out / "run", resume=interrupted, say=say, **settings)


def _own_length(model: Path) -> int:
    """The number of tokens up to which a classifier's own library reads a text, but for the limit of its positions."""
    length = sentence_modules(model).max_length if is_setfit(model) else own_max_length(tokenizer_folder(model))
    return length or NO_LIMIT


def _method(unit: str) -> str:
    """The method that trains exits of this unit on a model that stays as it is."""
    suiting = (name for name in METHODS if (loaded := load_method(name)).keeps_model and unit in loaded.units)
    method = next(suiting, None)
    if method is None:
        raise WrongArguments("no method of the registry trains exits on a model that stays as it is")
    return method


def _measured(run: Run, runtime: Runtime, task: Task, test: Split, labelled: bool) -> dict:
    """Agreement, layers and time of the exported graph on the test texts, of which it reads each different one once;
    with labels accuracy.
    """
    place = {text: at for at, text in enumerate(dict.fromkeys(test.texts))}
    different = runtime.encode(tuple(place))
    recorded = record(runtime.segments(), different, 1, "test texts", runtime.whole_model())
    recorded = recorded.take(np.array([place[text] for text in test.texts]))
    model_labels = predictions(recorded.logits[:, -1], task)
    recorded = recorded._replace(labels=model_labels if task.top_k is None else ranked(model_labels, test.texts))
    task = replace(task, tolerance=run.metrics["tolerance"])
    evaluation = evaluate(runtime, run.rule, recorded, task, runtime.encode(test.texts), 1)
    predicted = predictions(recorded.replay(run.rule).logits, task)
    accuracies = {"accuracy": predicted, "full_accuracy": recorded.labels} if labelled else {}
    worse = ~task.agrees(predicted, recorded.labels)
    if labelled:
        worse &= recorded.labels == test.labels
    level = 2 * run.config["training"]["confidence"] - 1  # its lower end is one-sided at the confidence
    bound = share_interval(int((~worse).sum()), len(worse), level)[0]
    return {
        **{name: float((answers == test.labels).mean()) for name, answers in accuracies.items()},
        "agreement": evaluation["score"],
        "agreement_interval": share_interval(round(evaluation["score"] * len(worse)), len(worse)),
        **({} if task.top_k is None else {"queries": len(worse)}),
        **({"loss_bound": 1 - bound} if labelled else {"agreement_bound": bound}),
        **{key: evaluation[key] for key in ("mean_layers", "layers_saved", "exit_counts", "flops_ratio", "speedup")},
        "per_exit_agreement": evaluation["per_exit_accuracy"],
    }


def _summary(run: Run, test: Split, required: AddOptions) -> dict:
    """The options, and what the test texts show, before anything is exported."""
    tested = run.metrics["tested"]
    labelled = required.max_loss is not None
    return {
        "pays": tested["net_saved"] >= LEAST_SAVED,
        "model": run.config["backbone"]["folder"],
        "exits": list(run.exits),
        "texts": {"trained": run.metrics["rows"], "held_out": run.metrics["rows_held"], "tested": len(test)},
        "required_agreement": None if labelled else required.agreement,
        **({"max_loss": required.max_loss} if labelled else {}),
        **{key: tested[key] for key in ("accuracy", "full_accuracy") if labelled},
        "confidence": required.confidence,
        "guarantee": run.config["guarantee"],
        "rows_needed": run.metrics["rows_needed"],
        "tolerance": run.metrics["tolerance"],
        **({"top_k": required.top_k} if required.top_k is not None else {}),
        "majority_warning": run.metrics["majority_warning"],
        **({"multi_label": True} if run.multi_label else {}),
        **({"tokens": run.token_task.kind} if run.token_task else {}),
        **{key: tested[key] for key in ("rule", "agreement", "layers_saved", "net_saved", "head_layers", "curve")},
        "versions": versions(),
    }


def line_of(summary: dict) -> str:
    """The summary in two sentences or three."""
    if "required_cosine" in summary:
        return line_of_encoder(summary)
    layers, labelled = summary["exits"][-1], "max_loss" in summary
    within = f" within {summary['tolerance']:.3g}" if summary["tolerance"] is not None else ""
    within = " in every label" if summary.get("multi_label") else within
    of_tokens = {LABELS: " in the label of every token", SPAN: " in the answer's span"}
    within = of_tokens.get(summary.get("tokens"), within)
    within = f" about the top {summary['top_k']}" if "top_k" in summary else within
    unit = "queries" if "top_k" in summary else "texts"
    if not summary["pays"]:
        if labelled:
            metric, least = "accuracy", summary["full_accuracy"] - summary["max_loss"]
            budget = f"lose at most {summary['max_loss']:.1%} of accuracy"
        else:
            metric, least = "agreement", summary["required_agreement"]
            budget = f"keep an agreement of {least:.1%}{within}"
        enough = [point["net_saved"] for point in summary["curve"] if point[metric] >= least]
        reason = f"no thresholds that {budget} save time"
        if (most := max(enough, default=0)) > 0:
            reason = f"thresholds that {budget} save at most {most:.1%} of the time"
        more = f"; about {summary['rows_needed']:,} test {unit} may show more" if summary["rows_needed"] else ""
        return f"Early exit does not pay here: {reason}, heads included{more}. The model is left as it is."
    wanted = f"a loss of {summary['max_loss']:.1%}" if labelled else f"{summary['required_agreement']:.1%}"
    guarantee = f"{'at most' if labelled else 'at least'} {wanted} with {summary['confidence']:.0%} confidence"
    if summary["guarantee"] is None:
        needed = summary["rows_needed"]
        more = f"; about {needed:,} test {unit} would do" if needed else ""
        guarantee = f"{bound_of(summary)}; {wanted} is not guaranteed{more}"
    agrees = f"Agrees with the original{within} on {summary['agreement']:.1%} of "
    if "top_k" in summary:
        agrees = f"Keeps the top {summary['top_k']} of the original for {summary['agreement']:.1%} of "
    if labelled:
        agrees = f"Its accuracy is {summary['accuracy']:.1%}, that of the original {summary['full_accuracy']:.1%}, on "
    gold = ""
    if "scores" in summary:
        gold = (
            f" Against gold labels, in brackets the original: {scores_line(summary['scores'], summary['full_scores'])}."
        )
    return (
        f"{agrees}{summary.get('queries', summary['texts']['tested']):,} test {unit} ({guarantee}). It saves "
        f"{summary['layers_saved']:.1%} of the {layers} layers and is {summary['speedup']:.2f} times as fast at batch "
        f"size 1.{gold}"
    )


def bound_of(summary: dict) -> str:
    """The end of the one-sided confidence interval of what did not pass a test."""
    if "max_loss" in summary:
        return f"upper {summary['confidence']:.0%} confidence bound of the loss {summary['loss_bound']:.1%}"
    return f"lower {summary['confidence']:.0%} confidence bound {summary['agreement_bound']:.1%}"


def card(summary: dict) -> str:
    """The model card, as Markdown."""
    if "required_cosine" in summary:
        return card_of_encoder(summary)
    if not summary["pays"]:
        return f"# {Path(summary['model']).name} without exits\n\n{line_of(summary)} {summary['compared']}\n"
    rows = "\n".join(
        f"| {layer} | {count} | {equal:.1%} |"
        for layer, count, equal in zip(summary["exits"], summary["exit_counts"], summary["per_exit_agreement"])
    )
    texts, held_out = summary["texts"], f"{summary['texts']['held_out']:,} others"
    tested = f"{held_out} chose the exits and proposed thresholds, and {texts['tested']:,} tested them"
    drawn = "texts like these, drawn like the lines of their files: a text that stands there often counts as\noften"
    if "top_k" in summary:
        drawn = f"queries like these, with as many texts; the order among the top {summary['top_k']} may change"
    monitoring = "`mini-ee serve exported --shadow .05` watches the agreement in service.\n"
    monitoring = "" if summary["tolerance"] is not None or "top_k" in summary else monitoring
    if summary["guarantee"] is None:
        tested = f"{held_out} chose the exits. No thresholds passed the test on {texts['tested']:,} more, so these"
        tested += " chose the thresholds, too: the confidence bound above does not count this choice"
    return f"""# {Path(summary["model"]).name} with exits

{f"{warning} " if (warning := summary["majority_warning"]) else ""}{line_of(summary)}

The model is unchanged; its own head is the last exit. Heads after earlier layers learned from {texts["trained"]:,}
different texts without labels. {tested}.
{summary["compared"]}

| exit after layer | test texts that exit here | agreement with the model if all exited here |
|---|---|---|
{rows}

The agreement holds for {drawn}. A guarantee is for one call: the best of several calls on the same texts has none.
{monitoring}"""
