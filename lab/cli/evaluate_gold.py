"""`mini-ee evaluate` of an export that labels tokens or answers questions: against the gold labels of a file."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mini_ee.lab.cli.command_options import refuse
from mini_ee.lab.cli.task_options import OF_LABELS, refuse_task_options, task_options
from mini_ee.lab.errors import WrongArguments

if TYPE_CHECKING:
    from mini_ee.lab.data.text_files import InputRow
    from mini_ee.lab.export.runtime import Runtime

COSTS = "exit_counts", "mean_layers", "layers_saved", "flops_ratio"
MEASURED = "seconds", "speedup"
SETTINGS = "engine", "full_seconds", "timed_rows", "batch_size", "rows_truncated"


def evaluate(opened: "Runtime", args: Namespace, say: Callable[[str], None]) -> dict:
    """Score the answers of every exit and of the rule, measure time, and print the results."""
    from mini_ee.lab.cli.evaluate_rows import swept_rules
    from mini_ee.lab.cli.rule_options import chosen_rule
    from mini_ee.lab.data.tasks import Task
    from mini_ee.lab.evaluation.gold_labels import gold_scores
    from mini_ee.lab.evaluation.row_evaluation import evaluate as measure
    from mini_ee.lab.recording import predictions, record
    from mini_ee.lab.rules import Fixed, rule_from_dict

    rule, (rows, gold) = chosen_rule(args, opened), _rows(opened, args)
    texts, kind, names = [row.texts for row in rows], opened.token_task.kind, tuple(opened.label_names)
    task = Task(Path(args.task).name, names, ("accuracy",), {}, token_kind=kind)
    encoded = opened.encode(texts)
    recorded = record(opened.segments(), encoded, args.batch_size, "reading", opened.whole_model())
    recorded = recorded._replace(labels=predictions(recorded.logits[:, -1], task))
    swept = swept_rules(rule if args.rule else None, recorded, task) if args.sweep else None
    measured = measure(opened, rule, recorded, task, encoded, args.batch_size, swept)
    of_exits = [
        [answer.label for answer in opened.run(texts, args.batch_size, Fixed(k))] for k in range(len(opened.exits))
    ]

    def under(point: dict) -> dict:
        """Scores under a rule, and the share of rows whose labels, or span, are those of the full model."""
        exits = recorded.replay(rule_from_dict(point["rule"])).exit_index
        labels = [of_exits[k][row] for row, k in enumerate(exits)]
        return {"scores": gold_scores(kind, names, texts, gold, labels), "agreement": point["accuracy"]}

    scores = [gold_scores(kind, names, texts, gold, labels) for labels in of_exits]
    answer = {"method": opened.config["method"], "task": task.name, "kind": kind, "rows": len(rows)}
    answer |= under(measured) | {"full_scores": scores[-1], "rule": measured["rule"], "exits": list(opened.exits)}
    answer |= {"per_exit_scores": scores, "per_exit_agreement": measured["per_exit_accuracy"]}
    answer |= {name: measured[name] for name in (*COSTS, *MEASURED, *SETTINGS)}
    if swept is not None:
        fields = ("rule", *COSTS, *MEASURED)
        answer["sweep"] = [under(point) | {name: point[name] for name in fields} for point in measured["rows"]]
    _print(answer, say)
    return answer


def _rows(opened: "Runtime", args: Namespace) -> "tuple[list[InputRow], list[list[str]]]":
    """The rows of --task, or some drawn with the seed, and their gold labels."""
    import numpy as np

    from mini_ee.lab.data.text_files import read_rows
    from mini_ee.lab.evaluation.gold_labels import check_tags

    kind, what = opened.token_task.kind, "--task FILE with gold tags or answers"
    if args.task is None or not Path(args.task).is_file():
        actual = "none" if args.task is None else f"no file {args.task}"
        raise WrongArguments(f"{opened.folder}: a model for {kind} needs {what}, found {actual}")
    refuse(args, ("split", "top_k", "overthinking", "hardness"), "is for one label of a text")
    refuse_task_options(args, "is for one label of a text", OF_LABELS)
    rows, _ = read_rows([Path(args.task)], task_options(args), opened.num_texts)
    if args.max_rows and args.max_rows < len(rows):
        drawn = np.random.default_rng(args.seed).permutation(len(rows))[: args.max_rows]
        rows = [rows[row] for row in np.sort(drawn)]
    if lacking := next((row for row in rows if row.gold is None), None):
        raise WrongArguments(
            f"{args.task}:{lacking.line}: expected gold tags or answers, found none; give a labelled file"
        )
    gold = [row.gold for row in rows]
    check_tags(kind, opened.label_names, gold)
    return rows, gold


def _print(answer: dict, say: Callable[[str], None]) -> None:
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.evaluation.gold_labels import score_names, scores_line
    from mini_ee.lab.evaluation.tables import sweep_table

    named = score_names(answer["scores"])
    columns = zip(answer["exits"], answer["per_exit_scores"], answer["per_exit_agreement"], answer["exit_counts"])
    lines = [{"layer": layer, "agreement": same, "left": left} | scores for layer, scores, same, left in columns]
    headings = {name: f"{words}:.3f" for name, words in named.items()}
    say(table(lines, {"layer": "layer"} | headings | {"agreement": "agreement:.3f", "left": "exited here"}))
    if "sweep" in answer:
        name, words = next(iter(named.items()))
        say(sweep_table([point | {"score": point["scores"][name]} for point in answer["sweep"]], words))
    if answer["rows_truncated"]:
        say(f"{answer['rows_truncated']} of {answer['rows']} texts were cut; gold labels beyond the cut count.")
    scores = scores_line(answer["scores"], answer["full_scores"])
    say(
        f"{answer['task']}, {answer['rows']} rows (in brackets the full model): {scores}; agreement "
        f"{answer['agreement']:.1%}, {answer['mean_layers']:.2f} layers of {answer['exits'][-1]} "
        f"({answer['layers_saved']:.1%} saved), {answer['speedup']:.2f} times as fast as the full model (measured, "
        f"batch {answer['batch_size']}, {answer['timed_rows']} examples)"
    )
