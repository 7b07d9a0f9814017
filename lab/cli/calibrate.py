"""`mini-ee calibrate`: thresholds at which predictions agree with the full model at least as often as epsilon."""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mini_ee.lab.cli.command_options import add_task, given_options, positive, refuse, refuse_task_options, share
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.errors import WrongArguments

HELP = "calibrate thresholds for an agreement with the full model; they become the rule of the run or export"
EXAMPLE = "mini-ee calibrate run --epsilon .95 --delta .05"
MEASURE = "confidence measure (default the one of the run's rule, else max_probability, for tokens breaking_ties)"
HELD_OUT = "default the examples that the training held out to test the default rule"
BATCH = 32


def add(sub: ArgumentParser) -> None:
    sub.add_argument("run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run or of an export")
    add_task(sub, f"folder of a task with examples like those in service ({HELD_OUT})")
    sub.add_argument("--split", help=f"split of --task ({HELD_OUT})")
    sub.add_argument("--model", type=Path, metavar="DIR", help="folder of the run's backbone, if it moved")
    sub.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1, ...")
    sub.add_argument(
        "--epsilon", type=share, required=True, help="least agreement with the full model, above 0, at most 1"
    )
    sub.add_argument(
        "--delta", type=share, help="largest probability that the guarantee is violated (default no guarantee)"
    )
    sub.add_argument(
        "--guarantee",
        choices=("exits", "conformal"),
        default="exits",
        help="guarantee: agreement at each exit (exits), or of the final predictions, with one threshold (conformal)",
    )
    cosine = "least cosine to the full embedding, for at least --epsilon of the texts, if the run is a sentence encoder"
    sub.add_argument("--cosine", type=share, metavar="C", help=cosine)
    measures = (*MEASURES, "exit_logit")
    sub.add_argument("--measure", choices=measures, help=MEASURE)
    sub.add_argument(
        "--sets", type=positive, metavar="N", help="number of random calibration sets on which the guarantee is checked"
    )
    sub.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="file: one text per line, or a table, for an export; running text for a decoder (default generated text)",
    )
    prompt = "prompt for a decoder's generated text; may be repeated (default built-in prompts)"
    sub.add_argument("--prompt", action="append", metavar="TEXT", help=prompt)
    sub.add_argument("--greedy", action="store_true", help="generate text greedily, once from each prompt")
    sub.add_argument(
        "--texts", type=positive, metavar="N", help="number of texts, for a decoder (default 512, or all of a file)"
    )
    sub.add_argument(
        "--new-tokens", type=positive, metavar="N", help="number of tokens per text, for a decoder (default 64)"
    )
    export = sub.add_argument_group("an export", "its graph in ONNX Runtime gives the thresholds and the guarantee")
    out = "folder of the export with the new rule; must not exist (default EXPORTED itself, which is replaced)"
    export.add_argument("--out", type=Path, metavar="DIR", help=out)
    size = f"number of examples in a batch; it changes predictions in int8 a little (default {BATCH})"
    export.add_argument("--batch-size", type=positive, metavar="N", help=size)


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Calibrate, write the rule into the run, and print its agreement on examples that did not calibrate it."""
    from mini_ee.lab.cli.open import of_rows, open_run
    from mini_ee.lab.threshold_curve import threshold_curve
    from mini_ee.lab.training.run_folder import write_rule
    from mini_ee.lab.training.unit import load_unit

    check(args)
    opened = open_run(args.run, args)
    refuse(args, ("out", "batch_size"), f"is for an export; {args.run} is a run")
    if opened.rule.plans_from_texts:
        raise WrongArguments(f"{args.run}: its datastore chooses the exits; calibrate the run that it was collected on")
    if len(opened.exits) == 1:
        raise WrongArguments(f"{args.run}: has one exit, so there is nothing to calibrate")
    if opened.embeds:
        return _embeddings(opened, args, say)
    refuse(args, ("cosine",), f"is for sentence encoders, found a run of {opened.config['method']}")
    tokens = not of_rows([opened])
    recorded, about, task = (_texts if tokens else _rows)(opened, args)
    rule, answer, guarantee = calibrated(args, opened, recorded)
    curve = None if tokens else threshold_curve(recorded, rule, task, recorded.labels)
    write_rule(args.run, rule, guarantee, answer["exit_counts"], curve)
    source = args.text or ("text that the model generated" if tokens else f"{about['task']}, {about['split']}")
    report(args, opened.exits, answer, f"{load_unit(opened.unit).noun} of {source}", say)
    say(f"The rule of {args.run} is now these thresholds.")
    return {"method": opened.config["method"], "exits": list(opened.exits), "run": str(args.run)} | about | answer


def report(args: Namespace, exits: tuple[int, ...], answer: dict, source: str, say: Callable[[str], None]) -> None:
    """Print the thresholds and what other examples show. source: noun of the examples, `of`, and their origin."""
    from mini_ee.lab.evaluation.tables import table

    columns = zip(exits, answer["thresholds"], answer["agreement"], answer["exit_counts"])
    rows = [
        {"layer": layer, "threshold": f"{float(tau):.3g}", "agreement": "-" if share is None else f"{share:.3f}"}
        | {"exited": exited}
        for layer, tau, share, exited in columns
    ]
    headings = {"layer": "layer", "threshold": "threshold", "agreement": "agreement", "exited": "exit here"}
    if answer["tau_intervals"] is not None:
        headings["interval"] = "95 % of bootstraps"
        for row, ends in zip(rows, answer["tau_intervals"]):
            row["interval"] = " to ".join(f"{float(end):.3g}" for end in ends)
    say(table(rows, headings))
    noun = source.partition(" of ")[0]
    guaranteed = answer["delta"] is not None or "guarantee" in answer
    say(
        f"Thresholds from {answer['rows_calibration']} {source}. On {answer['rows_fresh']} other {noun} of "
        f"it {answer['end_to_end']:.1%} have the full model's prediction, after {answer['mean_layers']:.2f} layers of "
        f"{exits[-1]} on average. "
        + (f"The guarantee holds for {noun} like these." if guaranteed else "Without --delta there is no guarantee.")
    )
    if below := below_line(answer, exits):
        say(below)
    if args.sets:
        say(conformal_line(answer) if "kept" in answer else broken_line(answer))


def _embeddings(opened, args: Namespace, say: Callable[[str], None]) -> dict:
    """Calibrate a sentence encoder: the rule changes its threshold, or the run its fixed depth."""
    from mini_ee.lab.cli.command_options import task_options
    from mini_ee.lab.evaluation.cosine_guarantee import calibrate_cosine
    from mini_ee.lab.recording import record
    from mini_ee.lab.training.run_folder import write_rule
    from mini_ee.lab.training.train_embeddings import unseen

    given = (args.cosine, args.delta, args.task)
    if None in given or not -1 < args.cosine <= 1 or args.epsilon == 1:
        raise WrongArguments(
            f"{args.run}: a sentence encoder needs --cosine, a number up to 1, --epsilon below 1, --delta, and texts "
            f"with --task FILE"
        )
    names = ("split", "measure", "sets", "text", "prompt", "greedy", "texts", "new_tokens")
    refuse(args, names, f"is not for sentence encoders; {args.run} is one")
    rows = unseen(opened, args.task, task_options(args))
    recorded = record(opened.segments(), opened.encode(rows.texts), BATCH, progress="reading")
    rule, answer = calibrate_cosine(recorded, opened.rule, args.cosine, args.epsilon, args.delta, args.seed)
    guarantee = {name: answer[name] for name in ("guarantee", "cosine", "epsilon", "delta")}
    write_rule(args.run, rule, guarantee, answer["exit_counts"])
    say(
        f"{answer['share']:.1%} of {answer['rows_tested']} texts have a cosine of at least {args.cosine} to the full "
        f"embedding, after {answer['mean_layers']:.2f} layers of {opened.exits[-1]} on average. With confidence "
        f"{1 - args.delta:.1%}, at least {args.epsilon:.1%} of texts like these do."
    )
    say(f"The rule of {args.run} is now {rule}.")
    return {"method": opened.config["method"], "exits": list(opened.exits), "run": str(args.run)} | answer


def check(args: Namespace) -> None:
    """Raise WrongArguments for a guarantee that no rule can have."""
    from mini_ee.lab.calibration import POLICY, check_guarantee

    try:
        check_guarantee(args.epsilon, args.delta)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    if args.guarantee == "conformal" and (args.delta is not None or args.epsilon == 1):
        raise WrongArguments("--guarantee conformal takes an --epsilon below 1 and no --delta")
    if args.guarantee != "conformal" and args.measure == POLICY:
        raise WrongArguments(f"--measure {POLICY} is for --guarantee conformal")


def calibrated(args: Namespace, opened, recorded) -> tuple:
    """(rule, JSON answer, guarantee for config.json)."""
    from mini_ee.lab.calibration import POLICY, calibrate_conformal, calibrate_record

    has_policy = recorded.segments.exit_logits is not None
    if args.measure == POLICY and not has_policy:
        raise WrongArguments(
            f"{args.run}: --measure {POLICY} needs a policy, and this run has none; choose another --measure"
        )
    measure = args.measure or getattr(opened.rule, "measure", opened.default_measure)
    if args.guarantee == "exits":
        rule, answer = calibrate_record(recorded, args.epsilon, args.delta, measure, args.seed, args.sets or 0)
        guaranteed = () if args.delta is None else ("epsilon", "delta", "measure")
        return rule, answer, {name: answer[name] for name in guaranteed} or None
    measure = args.measure or (POLICY if has_policy else measure)
    rule, answer = calibrate_conformal(recorded, args.epsilon, measure, args.seed, args.sets or 0)
    return rule, answer, {name: answer[name] for name in ("guarantee", "epsilon", "measure")}


def _rows(opened, args: Namespace):
    """The examples of --task, or the held-out test examples, which tested only the default rule.

    Examples that chose the epoch would guarantee too much, because the model fits them better than others.
    """
    from mini_ee.lab.cli.open import open_task_of
    from mini_ee.lab.recording import record
    from mini_ee.lab.training.holdout import split_rows
    from mini_ee.lab.training.train_run import check_task, trained_on

    if not opened.label_names:
        raise WrongArguments(
            f"{args.run}: expected a classifier, found a regression, which has no confidence to calibrate"
        )
    why = f"is for decoders; {args.run} is a classifier"
    refuse(args, ("text", "prompt", "greedy", "texts", "new_tokens"), why)
    task = open_task_of([opened], args)
    check_task(opened, task, args.run)
    if args.split or not trained_on(opened, task):
        split = args.split or ("train" if "train" in task.splits else task.default_split)
        rows = task.split(split)
    else:
        max_train = opened.config["training"].get("max_train")
        split, rows = "hold-out", split_rows(task, opened.config["seed"], max_train).test
        if not len(rows):
            raise WrongArguments(f"{args.run}: its training held out no test examples; give examples with --task DIR")
    recorded = record(opened.segments(), opened.encode(rows.texts), BATCH, progress="reading")
    return recorded._replace(labels=rows.labels), {"task": task.name, "split": split}, task


def _texts(opened, args: Namespace):
    """Texts that the decoder generates, or those of a file."""
    from mini_ee.lab.exits.token_exits import record_texts
    from mini_ee.lab.training.training_text import Source, TextOptions, texts_to_calibrate

    if args.task is not None or args.split is not None:
        raise WrongArguments(
            f"{args.run}: --task and --split are for classifiers, found a decoder; give --text, or nothing"
        )
    refuse_task_options(args, f"is for classifiers; {args.run} is a decoder")
    given = given_options(args, TextOptions)
    given = {name: value for name, value in given.items() if value}
    learned = opened.config.get("text", {})
    kind = learned.get("kind", "pieces")
    if kind == "continue" and "text" in given and learned.get("new_tokens"):
        given.setdefault("new_tokens", learned["new_tokens"])
    try:
        options = TextOptions(kind="pieces" if kind == "copy" and "text" not in given else kind, **given)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    source = Source(opened.model.backbone, opened.tokenizer, options, args.seed)
    return record_texts(opened.model, texts_to_calibrate(source), progress="observing"), {}, None


def below_line(answer: dict, exits: tuple[int, ...]) -> str:
    """A warning if examples that did not calibrate agree less often than epsilon. Else empty."""
    places = {f"the exit after layer {layer}": share for layer, share in zip(exits, answer["agreement"])}
    places = {} if "guarantee" in answer else places  # a conformal guarantee is about the answers alone
    places["the exits of the rule"] = answer["end_to_end"]
    below = [f"{share:.2%} at {at}" for at, share in places.items() if share is not None and share < answer["epsilon"]]
    if not below:
        return ""
    advice = " --delta .05 gives stricter thresholds." if answer["delta"] is None and "guarantee" not in answer else ""
    return f"This agreement is below --epsilon, {answer['epsilon']:.1%}: {', '.join(below)}.{advice}"


def conformal_line(answer: dict) -> str:
    """In words, the agreement under a conformal guarantee. answer: of a calibration with --sets."""
    of = answer["kept"]
    return (
        f"We drew {of['sets']} calibration sets of {of['groups_a_set']}. On average {of['conformal']:.2%} of the "
        f"others have the full model's prediction; {answer['epsilon']:.2%} are guaranteed. With the paper's thresholds "
        f"it is {of['paper']:.2%}, with those for delta .05 {of['delta']:.2%}."
    )


def broken_line(answer: dict) -> str:
    """In words, how often a guarantee was broken. answer: of a calibration with --sets."""
    broken = answer["broken"]
    line = (
        f"We drew {broken['sets']} calibration sets of {broken['groups_a_set']}. On the others the paper's rule "
        f"breaks the guarantee of {answer['epsilon']} for {broken['paper']:.1%} of the sets"
    )
    if "delta" in broken:
        error = math.sqrt(broken["delta"] * (1 - broken["delta"]) / broken["sets"])
        line += f", the rule with delta {answer['delta']} for {broken['delta']:.1%} (standard error {error:.1%})"
    return line + "."
