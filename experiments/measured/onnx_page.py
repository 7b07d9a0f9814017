"""results/onnx.md: the ONNX graph that stops by itself. onnx_parts.py measures its figures."""

import numpy as np

from mini_ee.experiments.measured.onnx_parts import AGREEMENT, EXITS, NEW_TOKENS, PARTS, PROMPT_WORDS
from mini_ee.experiments.measured.precision import precision_figures

__all__ = ["PARTS", "page_figures"]

ENGINES = {
    "early": "torch, `copy_state`",
    "recompute": "torch, `recompute`",
    "graph early": "exported graph, `copy_state`",
    "lossless": "torch, lossless decoding",
}


def digits(values: list[float]) -> list[str]:
    """Each with three decimals."""
    return [f"{value:.3f}" for value in values]


def bench_row(row: dict) -> list[str]:
    """The row of a case."""
    times = [f"{row[key] * 1e3:.3f}" for key in ("seconds", "against_seconds")]
    result = "passed" if row["holds"] else "**missed**"
    return [f"`{row['case']}`", *times, f"{row['ratio']:.3f}", f"{row['bar']:.3f}", result]


def decoder_row(engine: str, one: dict, deepest: int) -> list[str]:
    """The row of an engine; lossless decoding has no depth of its own."""
    depth = ["", ""] if engine == "lossless" else [f"{one['layers']:.2f}", f"{deepest / one['layers']:.2f}"]
    return [ENGINES[engine], f"{one['tokens']:,}", f"{one['agreement']:.3f}", *depth, f"{one['speedup']:.2f}"]


def page_figures(figures: dict) -> dict:
    """The rows of the tables, and what the first paragraphs compare."""
    heads, end, decoder, parity = (figures[key] for key in ("heads", "end", "decoder", "parity"))
    deepest, speedups = decoder["exits"][-1], [one["speedup"] for one in end]
    return {
        **{"ideal": EXITS[-1] / end[0]["mean_layers"], "speedup": float(np.median(speedups))},
        **{"speedups": [f"{value:.2f}" for value in speedups], "deepest": deepest, "graph": decoder["graph early"]},
        **{"predictions": sum(one["rows"] for one in parity), "equal_labels": sum(one["labels"] for one in parity)},
        "equal_depths": sum(one["layers"] for one in parity),
        "difference": max(one["difference"] for one in parity),
        "passed": sum(row["holds"] for row in figures["bench"]),
        **{"level": AGREEMENT, "words": PROMPT_WORDS, "new_tokens": NEW_TOKENS, "lora": digits(heads["lora"])},
        "bench_rows": [bench_row(row) for row in figures["bench"]],
        "head_rows": [[kind, *digits([*heads[kind], heads[f"{kind} alone"]])] for kind in ("dense", "linear")],
        "price_rows": [
            [head, *digits([*one["per_exit_score"], one["score"]]), f"{one['mean_layers']:.2f}"]
            for head, one in figures["price"].items()
        ],
        "decoder_rows": [decoder_row(engine, decoder[engine], deepest) for engine in ENGINES],
        "memory_rows": [
            [f"{one['model']}, {'with exits' if one['kind'] == 'exits' else 'without exits'}", f"{one['disk']:.3f}"]
            + [f"{one['load']:.2f}", f"{one['private']:.1f}", f"{one['resident']:.1f}"]
            for one in figures["memory"]
        ],
        **precision_figures(figures["precision"]),
    }
