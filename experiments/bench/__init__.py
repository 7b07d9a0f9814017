"""Benchmarks: ratios of interleaved medians in one process, warm. A row is a case and its bar.

backbone    our forward over that of transformers, on the same weights
exit-tax    a run forced out at layer e, every head on the way read and judged, over e/L of the full model
            without heads; where tokens leave, e the mean layer that they run
batch       32 rows that leave at mixed depths, over the layers alone at the batch sizes that remain
onnx        the graph that stops by itself over the model without exits, over graphs by segment, and over torch; int8
            over float32; a decoder's token over that by segment, and over transformers'
sgmv        LoRA streams side by side over one pass a stream, over a loop over adapters, over the bare backbone, and
            over independent models; rows at different exits in one batch over each exit's rows apart
decode      our cached greedy decoding over that of transformers; tokens forced out at layer e over the sum of the
            parts; lossless over full decoding; all in seconds a token
retrieval   RAEE: embed, retrieve and plan over one forward pass; planned groups over row by row; recall and building
serve       the load within a limit on p99: what the whole graph bears over what the graph that stops bears, and over
            what a server bears that takes rows together again after each exit
"""
