"""What `mini-ee calibrate` shares for classifiers, decoders and exports: the guarantee, its rule, and its report."""

import math
from argparse import Namespace, _ArgumentGroup
from collections.abc import Callable

from mini_ee.lab.cli.command_options import positive
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.errors import WrongArguments

BATCH = 32
MEASURE = "confidence measure (default the one of the run's rule, else max_probability, for tokens breaking_ties)"


def add_guarantee(group: _ArgumentGroup) -> None:
    """Add --guarantee, --measure and --sets."""
    group.add_argument(
        "--guarantee",
        choices=("exits", "conformal"),
        default="exits",
        help="guarantee: agreement at each exit (exits), or of the final predictions, with one threshold (conformal)",
    )
    group.add_argument("--measure", choices=(*MEASURES, "exit_logit", "short_list"), help=MEASURE)
    group.add_argument(
        "--sets", type=positive, metavar="N", help="number of random calibration sets on which the guarantee is checked"
    )


def report(args: Namespace, exits: tuple[int, ...], answer: dict, source: str, say: Callable[[str], None]) -> None:
    """Print the thresholds and what other examples show. source: noun of the examples, `of`, and their origin."""
    from mini_ee.lab.data.text_table import table

    columns = zip(exits, answer["thresholds"], answer["agreement"], answer["exit_counts"])
    rows = [
        {"layer": layer, "threshold": f"{float(tau):.3g}", "agreement": "-" if share is None else f"{share:.3f}"}
        | {"exited": exited}
        for layer, tau, share, exited in columns
    ]
    headings = {"layer": "layer", "threshold": "threshold", "agreement": "agreement", "exited": "exit here"}
    if answer["tau_intervals"] is not None:
        headings["interval"] = "95% of bootstraps"
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


def check_epsilon(args: Namespace) -> None:
    """Raise WrongArguments for an agreement or a probability outside its limits."""
    from mini_ee.lab.calibration import check_guarantee

    try:
        check_guarantee(args.epsilon, args.delta)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def check(args: Namespace) -> None:
    """Raise WrongArguments for a guarantee that no rule can have."""
    from mini_ee.lab.calibration import POLICY

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
    if args.measure == "short_list" and args.measure not in recorded.segments.measures:
        raise WrongArguments(
            f"{args.run}: --measure short_list is read by lenses, and of an export only if its rule reads it; choose "
            "another --measure, or train a decoder with --head lens"
        )
    if args.measure and opened.token_task is not None:
        raise WrongArguments(
            f"--measure {args.measure} is of one label of a text; {args.run} labels tokens: leave it out"
        )
    of_rule = getattr(opened.rule, "measure", None)
    if args.guarantee == "exits":
        measure = args.measure or of_rule or opened.default_measure
        rule, answer = calibrate_record(recorded, args.epsilon, args.delta, measure, args.seed, args.sets or 0)
        guaranteed = () if args.delta is None else ("epsilon", "delta", "measure")
        return rule, answer, {name: answer[name] for name in guaranteed} or None
    measure = args.measure or of_rule or (POLICY if has_policy else opened.default_measure)
    rule, answer = calibrate_conformal(recorded, args.epsilon, measure, args.seed, args.sets or 0)
    return rule, answer, {name: answer[name] for name in ("guarantee", "epsilon", "measure")}


def calibrated_top_k(args: Namespace, recorded) -> tuple:
    """The same for a reranker: (rule, JSON answer, guarantee), with the keys that add-exits gives a guarantee."""
    from mini_ee.lab.top_k import calibrate_top_k

    rule, answer = calibrate_top_k(recorded, args.top_k, args.epsilon, args.delta, args.seed, args.sets or 0)
    guarantee = {"top_k": args.top_k, "epsilon": args.epsilon, "max_loss": round(1 - args.epsilon, 6)}
    return rule, answer, guarantee | {"confidence": 1 - args.delta, "rows": answer["queries"]}


def top_k_lines(answer: dict, source: str, layers: int) -> str:
    """In words, the calibration of a reranker."""
    k, tau = answer["top_k"], answer["thresholds"][0]
    lines = [
        f"Texts with a number of at most {-float(tau):.4g} exit early: {answer['queries']} queries of {source} tested "
        f"this threshold. Of {answer['queries_fresh']} other queries {answer['end_to_end']:.1%} keep the top {k} of "
        f"the full model, after {answer['mean_layers']:.2f} layers of {layers} on average. With confidence "
        f"{1 - answer['delta']:.1%}, at least {answer['epsilon']:.1%} of queries like these do."
    ]
    if float(tau) == math.inf:
        lines = [f"No threshold passed the test on {answer['queries']} queries of {source}: no text exits early."]
    if broken := answer.get("broken"):
        lines.append(
            f"We drew {broken['sets']} calibration sets, of which {broken['queries_tested']} queries tested. The "
            f"guarantee is broken for {broken['delta']:.1%} of the sets; on average {broken['kept']:.2%} of the other "
            f"queries keep their top {k}, after {broken['mean_layers']:.2f} layers."
        )
    return "\n".join(lines)


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
