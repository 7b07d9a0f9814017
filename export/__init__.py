"""ONNX: graphs.py writes a segment node by node, segments.py a verified folder of them, runtime.py serves it.

decoder_graphs.py, decoder_segments.py and decoder_runtime.py do the same for text; causal_graphs.py is a decoder that
classifies.
"""
