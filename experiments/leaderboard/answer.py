"""The first lines of the leaderboard: which method, how sure, whether it is the best elsewhere, and whether it pays."""

import math
import statistics

from mini_ee.experiments.leaderboard.figures import CONTROL, HEADLINE, REFERENCE, about_figure
from mini_ee.experiments.leaderboard.legend import ENOUGH
from mini_ee.experiments.leaderboard.plan import EXAM, NOT_RUN
from mini_ee.experiments.leaderboard.ranking import DIGITS, Drawn, compare, has_interval, interval, mean_of
from mini_ee.experiments.leaderboard.tables import (
    NO_INTERVAL,
    NOT_YET,
    Leaderboard,
    number,
    percent,
    plus_minus,
    signed,
    timed_tasks,
    why_fewer,
)
from mini_ee.experiments.markdown import listed

NAMED = 6  # methods that a sentence lists at most
SAME_TIME = 1.05  # ratio up to which two trainings take about as long


def answer(board: Leaderboard) -> list[str]:
    """The first lines of the page: which method, how sure, whether it pays, and what has not been run."""
    ranked, state = [name for name in board.order if name in board.ranks], _state(board)
    if not ranked:
        return [f"No method has a figure at half of the FLOPs yet. {state}"]
    best, where = ranked[0], listed(["the built-in reviews" if name == EXAM else name for name in board.compared])
    found = interval(board.headline[best])
    beaten = {worse for better, worse in board.better if better == best}
    open_ = [name for name in ranked[1:] if name not in beaten]
    average = ", on average" if len(board.compared) > 1 else ""
    between = (
        f" (95 % interval {percent(found.low)} to {percent(min(found.high, 1))})" if not math.isnan(found.low) else ""
    )
    tie = (
        "No method is clearly the best. "
        if 2 * len(open_) > len(ranked) - 1 and has_interval(board.headline[best])
        else ""
    )
    lines = [
        f"**Which method for a classifier with half of the FLOPs?** {tie}`{best}` has the highest accuracy: "
        f"{percent(found.mean)} % on {where}{average}{between}.{_trained(board)} "
        f"`mini-ee train {best}` trains it."
    ]
    lines.append("**How sure is that?** " + _certainty(board, best, open_, len(ranked)))
    others = _elsewhere(board, best), _against_reference(board), _pays(board, best), _at_one_point(board, best), state
    return [*lines, *filter(None, others)]


def _trained(board: Leaderboard) -> str:
    """The sentence that says what is trained on the compared tasks, on how many examples."""
    texts = [board.plan.training[name].partition(";")[0] for name in board.compared if name in board.plan.training]
    return f" Model and training: {listed(list(dict.fromkeys(texts)))}." if texts else ""


def _certainty(board: Leaderboard, best: str, open_: list[str], count: int) -> str:
    """Which methods the best one is better than, and which not."""
    if not has_interval(board.headline[best]):
        seeds = min(map(len, board.headline[best].seeds))
        return (
            f"Not at all yet: `{best}` has {seeds} seed{'s' * (seeds > 1)} of {board.plan.seeds}, and no method is "
            f"called better than another. {ENOUGH}"
        )
    if count == 1:
        return "No other method has been run on all of these tasks."
    _, low, high = board.ranks[best]
    text = f"Its rank is {low} of {count}. "
    if low < high:
        text = f"Its true rank may be anything from {low} to {high} of {count}. "
    if not open_:
        return text + "It is significantly better than every other method."
    tested = [name for name in open_ if has_interval(board.headline[name])]
    if len(open_) == count - 1:
        text += "It is not significantly better than any other method"
    else:
        beaten = [name for name in board.order if name in board.ranks and name not in (best, *open_)]
        which = f" ({listed(beaten)})" if len(beaten) <= NAMED else ""
        text += f"It is significantly better than {len(beaten)} of the other {count - 1} methods{which}. It is not "
        text += "significantly better than "
        text += listed(tested if len(tested) <= NAMED else [*tested[:NAMED], f"{len(tested) - NAMED} more"])
    few = len(open_) - len(tested)
    text += f"; the other {'one has' if few == 1 else f'{few} have'} too few seeds for a test" if few else ""
    times = {
        name: [v for task in timed_tasks(board) for v in about_figure(board.tasks[task], name, "seconds")]
        for name in (best, *open_)
    }
    timed = {name: math.fsum(each) / len(each) for name, each in times.items() if each}
    if len(timed) > 1:
        least = min(timed.values())
        quickest = [f"`{name}`" for name, each in timed.items() if each <= least * SAME_TIME]
        text += f". Of `{best}` and the methods that it does not beat significantly, {listed(quickest)} "
        text += f"train{'s' * (len(quickest) == 1)} fastest, in about {number([least])} processor seconds (on "
        text += f"{listed(timed_tasks(board) or board.compared)})"
    return text + "."


def _elsewhere(board: Leaderboard, best: str) -> str:
    """Whether the best method is also the best on a task that the ranks do not count."""
    lines = []
    for name in (each for each in board.plan.tasks if each not in board.compared):
        found = {method: board.drawn[name].get((method, HEADLINE)) for method in board.plan.methods}
        drawn = {method: each for method, each in found.items() if each is not None}
        if best not in drawn or len(drawn) < 2:
            continue
        top = max(drawn, key=lambda method: (round(drawn[method].mean, DIGITS), method == best))
        about = f" ({board.plan.models[name]})" if name in board.plan.models else ""
        if top == best:
            lines.append(f"Yes: on {name}{about}, its accuracy of {percent(drawn[best].mean)} % is the highest, too.")
        else:
            gap = _difference(drawn[best], drawn[top])
            lines.append(
                f"No: on {name}{about}, `{top}` has the highest accuracy, {percent(drawn[top].mean)} %; `{best}` is "
                f"{gap}."
            )
        if control := board.drawn[name].get((CONTROL, HEADLINE)):
            gap = _difference(drawn[best], control)
            lines.append(f"Compared with a fixed depth of joint training (see below), `{best}` is {gap}.")
        if name == EXAM:
            lines.append("The reviews are generated sentences, so ranks do not count them.")
    return f"**Is it the best elsewhere?** {' '.join(lines)}" if lines else ""


def _against_reference(board: Leaderboard) -> str:
    """How many methods are better than joint training, how many worse, and how many have too few seeds."""
    if REFERENCE not in board.headline or not has_interval(board.headline[REFERENCE]) or len(board.ranks) == 1:
        return ""
    others = [name for name in board.order if name in board.ranks and name != REFERENCE]
    few = sum(not has_interval(board.headline[name]) for name in others)
    better = [name for name in others if (name, REFERENCE) in board.better]
    worse = [name for name in others if (REFERENCE, name) in board.better]
    enough = " and enough seeds for a test" if few else ""
    are = "are" if len(better) > 1 else "is"
    text = "**Is a method better than joint training?** "
    text += "" if better else "None is shown to be. "
    text += f"At half of the FLOPs, of the {len(others) - few} other "
    text += f"methods with an accuracy there{enough}, {counted(better)} {are} significantly better and "
    text += f"{counted(worse)} significantly worse (Holm's correction over all pairs of methods)."
    text += f" The other {'one has' if few == 1 else f'{few} have'} too few seeds." if few else ""
    gaps = [compare(board.headline[name], board.headline[REFERENCE]) for name in others]
    if halves := [each.high - each.mean for each in gaps if not math.isnan(each.high)]:
        half = percent(statistics.median(halves))
        text += f" The 95 % interval of a difference from joint training is ±{half} points (median over the methods)."
    return text


def _pays(board: Leaderboard, best: str) -> str:
    """The best method against the full model of joint training, against a fixed depth, and in time."""
    lines, tasks = [], board.compared
    if REFERENCE in board.headline:
        full = mean_of([board.drawn[name][REFERENCE, "full"] for name in tasks])
        lines.append(
            f"If no example exits early, joint training has an accuracy of {percent(full.mean)} %. With half of the "
            f"FLOPs, `{best}` is {_difference(board.headline[best], full)}."
        )
    if CONTROL in board.headline:
        control = board.headline[CONTROL]
        text = f"If all examples exit at the same layer of joint training (*{CONTROL}*), the accuracy is "
        text += f"{percent(control.mean)} %. Compared with that, "
        if REFERENCE in board.headline and REFERENCE != best:
            text += f"joint training with its own rule is {_difference(board.headline[REFERENCE], control)}, and "
        lines.append(f"{text}`{best}` is {_difference(board.headline[best], control)}.")
        lower = [name for name in board.ranks if round(board.headline[name].mean - control.mean, DIGITS) < 0]
        if lower:
            are = "is" if len(lower) == 1 else "are"
            lines.append(f"{len(lower)} of the {len(board.ranks)} methods {are} less accurate than the fixed depth.")
    times = [about_figure(board.tasks[name], best, "half speedup") for name in tasks]
    if all(times):
        faster = number([math.fsum(each) / len(each) for each in times])
        lines.append(f"With one example at a time, `{best}` is {faster} times as fast as its own full model.")
    return f"**Does it pay?** {' '.join(lines)}" if lines else ""


def _at_one_point(board: Leaderboard, best: str) -> str:
    """Which method saves most layers if one point may be lost, and how many the best one at half of the FLOPs saves."""
    found = {name: [board.drawn[task].get((name, "saved")) for task in board.compared] for name in board.order}
    saved = {name: mean_of(each) for name, each in found.items() if each and None not in each}
    if len(saved) < 2:
        return ""
    most = max(saved, key=lambda name: (round(saved[name].mean, DIGITS), name == best))
    text = "**How much is saved if one point of accuracy may be lost?** "
    text += f"`{most}` saves the most layers: {plus_minus(interval(saved[most]))} %."
    if most != best and best in saved:
        text += f" The share that `{best}` saves is {_difference(saved[best], saved[most])}."
    return text + " Each method has the rule with the fewest FLOPs that loses at most one point on held-out examples."


def _difference(one: Drawn, other: Drawn) -> str:
    """A difference in words, on the seeds of both, with half of its interval if there is one."""
    points = signed(compare(one, other)).lstrip("+-")
    half = f" (95 % interval ±{points.partition('±')[2]})" if not points.endswith(NO_INTERVAL) else ""
    text = f"{points.split()[0]} points {'lower' if one.mean < other.mean else 'higher'}"
    return text + (" on the seeds that both have" if one.seeds != other.seeds else "") + half


def _state(board: Leaderboard) -> str:
    """What has been run, if something is missing; else nothing."""
    plan, begun, complete, unequal = board.plan, [], True, False
    for name in plan.tasks:
        task = board.tasks[name]
        runs = {method: len(task.runs[method]) for method in plan.methods if method in task.runs}
        not_yet = [method for method, count in runs.items() if NOT_YET in why_fewer(plan, task, method)]
        not_run = sum(plan.missing(name).get(method) == NOT_RUN for method in plan.methods)
        complete &= not (not_yet or not_run)
        if runs:
            seeds = " to ".join(map(str, sorted({min(runs.values()), max(runs.values())})))
            begun.append(f"{len(runs)} of {len(plan.methods)} methods on {name} ({seeds} of {plan.seeds} seeds)")
            unequal |= " to " in seeds
    if complete:
        return ""
    waiting = [name for name in plan.tasks if not board.tasks[name].runs]
    text = f"**What is missing?** Run so far: {listed(begun) or 'none'}."
    text += f" {listed(waiting)} follow{'s' * (len(waiting) == 1)}." if begun and waiting else ""
    if unequal:
        text += " Some methods have fewer seeds than others, so part of a difference may come from the seeds."
    return text + (f" Ranks are computed on {listed(board.compared)} alone." if board.compared else "")


def counted(names: list[str]) -> str:
    """How many, and which if they are few."""
    return f"{len(names)} ({listed(names)})" if 0 < len(names) <= NAMED else str(len(names) or "none")
