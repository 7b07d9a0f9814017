"""ONNX: writer.py makes a verified folder of graphs; runtime.py serves it.

A graph is what the project's own torch and numpy code computes, run once on values of the graph: tracing.py has the
values, lower_shapes.py and lower_math.py say which nodes a function becomes, builder.py writes them. model_graph.py is
the graph that stops by itself, segment_graphs.py the graphs by segment, token_graphs.py what both take of a decoder.
Without torch: manifest.py, sessions.py, row_segments.py, token_segments.py and runtime.py. torch_engine.py runs the
same folder through torch.
"""

import sys

from mini_ee import CallableModule


def export(run, out, **options) -> dict:
    """Write the exported folder of a run and return its manifest: mini_ee.export(run, "exported"). See writer.py."""
    from mini_ee.export import writer

    return writer.export(run, out, **options)


sys.modules[__name__].__class__ = CallableModule
