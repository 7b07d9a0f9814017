"""ONNX: graphs.py writes a segment node by node, segments.py a verified folder of them, runtime.py serves it.

decoder_graphs.py, decoder_segments.py and decoder_runtime.py do the same for text; prompt_graphs.py has what graphs.py
has for a decoder that is read through a prompt.
"""
