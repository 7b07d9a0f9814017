"""results/alternatives.md: what a user would take in place of exits. alternatives_cases.py measures it."""

from functools import partial

from mini_ee.experiments.measured.alternatives_cases import (
    AGREEMENT,
    BATCH,
    CALIBRATED,
    MODELS,
    REFERENCE,
    ROUNDS,
    THREADS,
    TIMED,
    alternatives,
)

__all__ = ["PARTS", "page_figures"]

PARTS = {name: partial(alternatives, name=name) for name in MODELS}


def page_figures(figures: dict) -> dict:
    """The cases of each model and task, and their rows by name for the sentences."""
    cases = [case for name in MODELS for case in figures[name]]
    return {
        "tables": cases,
        "of": {(case["model"], case["task"]): {row["name"]: row for row in case["rows"]} for case in cases},
        **{"wanted": AGREEMENT, "batch": BATCH, "timed": TIMED, "rounds": ROUNDS, "threads": THREADS},
        "calibrated": CALIBRATED,
        "reference": REFERENCE,
    }
