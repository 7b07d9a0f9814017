"""A figure of single reported examples: from the record of a run, the values of which the figure is the mean."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from mini_ee.experiments.records import SeedRecord, read_records
from mini_ee.lab.recording import ExitResult
from mini_ee.lab.rules import rule_from_dict

FLOPS_SHARES = {"at a third": 1 / 3, "at two thirds": 2 / 3}  # of the full model's FLOPs, for scores at a cost
SLACK = 1e-9  # of a sum of FLOPs
PREFIXES = {"default ": "default", "policy ": "policy"}  # of a figure -> the name of its rule in the record


@lru_cache(maxsize=64)
def _records(path: Path, changed: int) -> dict[int, SeedRecord]:
    try:
        return read_records(path)
    except ValueError as error:
        what = "remove it, so that its case is run again"
        raise ValueError(f"{path}: expected records of runs, found a damaged file; {what}") from error


def example_values(path: Path, seed: int, figure: str) -> np.ndarray | None:
    """(N,): the values of the reported examples; None if there is no record, or if it does not have the figure.

    Raises ValueError if the file is damaged.
    """
    if not path.exists():
        return None
    made = _records(path, path.stat().st_mtime_ns).get(seed)
    return None if made is None else values_of(made, figure)


def values_of(made: SeedRecord, figure: str) -> np.ndarray | None:
    """(N,): the values of the reported examples; None if the record does not have the figure."""
    if figure in (listed := made.about.get("values", {})):
        return np.array(listed[figure], np.float64)
    if "rules" not in made.about:
        return None
    exits, labels = made.reported.segments.exits, made.reported.labels
    right = made.reported.predictions == labels[:, None]
    at_exit = {f"score after {layer}": k for k, layer in enumerate(exits)} | {"full": len(exits) - 1}
    if figure in at_exit:
        return right[:, at_exit[figure]].astype(np.float64)
    of_result: dict[str, Callable[[ExitResult], np.ndarray]] = {
        "score": lambda result: right[np.arange(len(right)), result.exit_index].astype(np.float64),
        "saved": lambda result: 1 - result.cost.depth / exits[-1],
    }
    for what, values in of_result.items():
        for prefix, rule in PREFIXES.items():
            if figure == prefix + what and rule in made.about["rules"]:
                return values(made.reported.replay(rule_from_dict(made.about["rules"][rule])))
        name = figure.removeprefix(f"{what} ")
        if name in FLOPS_SHARES and what == "score":
            at_share = _at_share(made, FLOPS_SHARES[name])
            return None if at_share is None else values(at_share)
        if name != figure and name in made.about["rules"]:
            return values(made.reported.replay(rule_from_dict(made.about["rules"][name])))
    return None


def _at_share(made: SeedRecord, share: float) -> ExitResult | None:
    """The reported examples with the best rule of the curve that needs at most this share of the full model's FLOPs on
    them: the one with the highest held-out score, of equal ones the most expensive. None if every rule needs more.
    """
    held_out, best = made.held_out, None
    for rule in made.about["curve"]:
        result = made.reported.replay(rule_from_dict(rule))
        if (flops := _flops(made, rule, result)) <= share + SLACK:
            exits = held_out.replay(rule_from_dict(rule)).exit_index
            score = (held_out.predictions[np.arange(len(exits)), exits] == held_out.labels).mean()
            if best is None or (score, flops) > best[:2]:
                best = score, flops, result
    return best and best[2]


def _flops(made: SeedRecord, rule: dict, result: ExitResult) -> float:
    """Relative to the full model, which runs without exits if no example exits early."""
    full = rule["name"] == "never" and (result.cost.depth == made.reported.segments.exits[-1]).all()
    return 1.0 if full else float(result.cost.flops.mean()) / made.reported.full_flops
