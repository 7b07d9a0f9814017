"""ONNX export: writer.py writes a verified folder of graphs, runtime.py runs it.

A graph is written by running the project's torch and numpy code once on values of the graph. tracing.py has the values,
lower_shapes.py and lower_math.py map functions to nodes, builder.py writes the nodes. model_graph.py writes the graph
that stops by itself, segment_graphs.py one graph per segment, token_graphs.py the graphs of a decoder. manifest.py,
sessions.py, row_segments.py, token_segments.py and runtime.py need no torch. torch_engine.py runs the same folder in
torch, openvino_engine.py in OpenVINO; engine.py opens it in the engine that is wanted.
"""
