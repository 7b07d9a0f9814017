"""Benchmarks: ratios of median times, measured in turns in one process after a warm-up.

A row has a case, its ratio, and the largest ratio that passes (`bar`).

backbone    our forward pass compared with that of transformers, on the same weights
exit-tax    a run forced to exit after layer e, with all heads up to there evaluated, compared with e/L of the full
            model without heads; if tokens exit, e is their mean layer
batch       32 rows that exit at different layers, compared with the layers alone at the batch sizes that remain
onnx        the graph that stops by itself, compared with the model without exits, with one graph per segment and with
            torch; int8 compared with float32; a decoder's step compared with that of one graph per segment and of
            transformers
sgmv        parallel LoRA streams compared with one pass per stream, with a loop over the adapters, with the bare
            backbone and with independent models; rows at different exits in one batch compared with a batch per exit
decode      cached greedy decoding compared with that of transformers; tokens forced to exit after layer e compared with
            the sum of the parts; lossless decoding compared with full decoding; in seconds per token. With --model of
            a decoder its exported graphs by precision, with and without exits, transformers and llama.cpp
retrieval   RAEE: embedding and retrieval compared with one forward pass; groups of rows with the same planned exit
            compared with single rows; recall and build time of the datastore
serve       the load that keeps p99 within a limit: the whole graph compared with the graph that stops by itself and
            with a server that forms new batches after each exit
"""
