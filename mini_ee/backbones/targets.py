"""The projections of a layer that adapters may be put on, in all families, by the names that their modules have."""

TARGETS = {  # projection -> the linear map of a layer that holds it, and which of its parts
    "query": ("qkv", 0),
    "key": ("qkv", 1),
    "value": ("qkv", 2),
    "pos_proj": ("pos_proj", 0),  # of DeBERTa, where positions have projections of their own
    "pos_q_proj": ("pos_q_proj", 0),
    "attention_output": ("attention_output", 0),
    "cross_query": ("cross_query", 0),  # of T5: to the encoder's output
    "cross_key": ("cross_key_value", 0),
    "cross_value": ("cross_key_value", 1),
    "cross_output": ("cross_output", 0),
    "gate": ("gate", 0),
    "gated": ("gated", 0),
    "up": ("up", 0),
    "down": ("down", 0),
}
