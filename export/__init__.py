"""ONNX: writer.py makes a verified folder of graphs, which builder.py writes node by node; runtime.py serves it.

What a graph is stands in the models, beside the torch code that it repeats. Without torch: manifest.py, sessions.py,
row_segments.py, token_segments.py and runtime.py. torch_engine.py runs the same folder through torch.
"""

import sys

from mini_ee import CallableModule


def export(run, out, **options) -> dict:
    """Write the exported folder of a run and return its manifest: mini_ee.export(run, "exported"). See writer.py."""
    from mini_ee.export import writer

    return writer.export(run, out, **options)


sys.modules[__name__].__class__ = CallableModule
