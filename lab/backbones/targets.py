"""The projections that may have adapters, in all families."""

TARGETS = {  # projection -> the module of the layer that computes it, and the index of its part in that module
    "query": ("qkv", 0),
    "key": ("qkv", 1),
    "value": ("qkv", 2),
    "pos_proj": ("pos_proj", 0),  # DeBERTa: the projections of positions
    "pos_q_proj": ("pos_q_proj", 0),
    "attention_output": ("attention_output", 0),
    "cross_query": ("cross_query", 0),  # T5: cross attention
    "cross_key": ("cross_key_value", 0),
    "cross_value": ("cross_key_value", 1),
    "cross_output": ("cross_output", 0),
    "gate": ("gate", 0),
    "gated": ("gated", 0),
    "up": ("up", 0),
    "down": ("down", 0),
}
