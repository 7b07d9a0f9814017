"""ONNX: writer.py makes a verified folder of graphs, which builder.py writes node by node; runtime.py serves it.

What a graph is stands in the models, beside the torch code that it repeats. Without torch: manifest.py, runtime.py and,
for text, decoder_runtime.py. torch_engine.py runs the same folder through torch.
"""
