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
    """A table of each model and task, and the rows by name for the sentences."""
    cases = [case for name in MODELS for case in figures[name]]
    return {
        "tables": [case | {"cells": [cells(row) for row in case["rows"]]} for case in cases],
        "of": {(case["model"], case["task"]): {row["name"]: row for row in case["rows"]} for case in cases},
        **{"wanted": AGREEMENT, "batch": BATCH, "timed": TIMED, "rounds": ROUNDS, "threads": THREADS},
        "calibrated": CALIBRATED,
        "reference": REFERENCE,
    }


def cells(row: dict) -> list[str]:
    """A row of a table: shares in percent, times relative to the reference."""
    memory = "–" if row["memory_mb"] is None else f"{row['memory_mb']:.0f}"
    times = [f"{row[key]:.2f}" for key in ("time_1", f"time_{BATCH}")]
    shares = [f"{100 * row[key]:.1f}" for key in ("agreement", "score")]
    return [row["name"], *shares, *times, memory, f"{row['disk_mb']:.0f}", f"{row['minutes']:.1f}"]
