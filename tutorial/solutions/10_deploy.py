"""Solutions of chapter 10."""

import numpy as np


def threshold_for(session, inputs, most):
    """Try them all."""

    def layers(threshold):
        return session.run(["layers"], inputs | {"threshold": np.array(threshold, np.float32)})[0].mean()

    depths = {threshold: layers(threshold) for threshold in np.linspace(0.5, 1, 26)}
    return max((threshold for threshold in depths if depths[threshold] <= most), key=depths.get)


def layer_runs(layers, size):
    """A batch runs as long as its deepest row."""
    return sum(int(layers[at : at + size].max()) for at in range(0, len(layers), size))
