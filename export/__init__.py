"""ONNX: graphs.py writes a segment node by node, segments.py a verified folder of them, runtime.py serves it."""
