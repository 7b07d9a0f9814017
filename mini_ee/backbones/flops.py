"""Floating-point operations of the parts of a model, a multiply-add as two."""


def layer_flops(weights: int, attention: int, tokens: int) -> float:
    """One layer on one row: its matrix products, and every token against every other.

    weights: of the matrices; attention: the width of all heads together.
    """
    return 2.0 * tokens * weights + 4.0 * tokens * tokens * attention
