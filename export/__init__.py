"""The ring around the core: a BERT with exits as ONNX graphs (writer.py), and a runtime without torch (runtime.py)."""
