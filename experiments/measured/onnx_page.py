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


def page_figures(figures: dict) -> dict:
    """What the first paragraphs compare, and the engines of the decoder; lossless decoding is the last."""
    heads, end, decoder, parity = (figures[key] for key in ("heads", "end", "decoder", "parity"))
    deepest, speedups = decoder["exits"][-1], [one["speedup"] for one in end]
    return {
        **{"ideal": EXITS[-1] / end[0]["mean_layers"], "speedup": float(np.median(speedups))},
        **{"speedups": [f"{value:.2f}" for value in speedups], "deepest": deepest, "graph": decoder["graph early"]},
        **{"predictions": sum(one["rows"] for one in parity), "equal_labels": sum(one["labels"] for one in parity)},
        "equal_depths": sum(one["layers"] for one in parity),
        "difference": max(one["difference"] for one in parity),
        "passed": sum(row["holds"] for row in figures["bench"]),
        **{
            "level": AGREEMENT,
            "words": PROMPT_WORDS,
            "new_tokens": NEW_TOKENS,
            "lora": [f"{value:.3f}" for value in heads["lora"]],
        },
        "decoders": [(name, decoder[engine]) for engine, name in ENGINES.items()],
        **precision_figures(figures["precision"]),
    }
