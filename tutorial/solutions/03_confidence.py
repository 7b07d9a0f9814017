"""Solutions of chapter 3."""

import math


def examples_needed(most, level):
    """No loss in n examples has the probability (1 - most)^n."""
    return math.ceil(math.log(1 - level) / math.log(1 - most))


def calibration_error(confidence, correct, count):
    """The gap in each bin, weighted by its share of the examples."""
    number = (confidence * count).astype(int).clip(max=count - 1)
    inside = [number == b for b in set(number.tolist())]
    return sum(rows.mean() * abs((confidence[rows] - correct[rows]).mean()) for rows in inside)
