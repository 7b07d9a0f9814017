"""One graph per segment, for rules that model.onnx does not contain. runtime.py has the engine that runs them.

   input_ids, attention_mask, token_type_ids   (B, T) of the rows that continue
   hidden          (B', T, D) hidden_out of the segment before; LoRA exits start from the embeddings and take none
   rows            (B,) int64: which of those B' rows continue
-> hidden_out (B, T, D), logits (B, C), exit_logit (B,) of a policy
"""

from mini_ee.bert import Exits
from mini_ee.export.graph import BOOL, FLOAT, INT64, Graph
from mini_ee.export.nested_if import Parts


def write_segment(g: Graph, model: Exits, k: int) -> None:
    """Write the graph of segment k."""
    parts, last = Parts(g, model), k == len(model.exits) - 1
    if k == 0 or parts.restarts:
        rows = parts.start()
    else:
        mask = g.op("Cast", g.input("attention_mask", INT64, "batch", "tokens"), to=BOOL)
        hidden = g.input("hidden", FLOAT, "rows_before", "tokens", parts.width)
        rows = parts.rows(g.op("Gather", hidden, g.input("rows", INT64, "batch")), mask)
    rows = parts.advance(k, rows)
    if not last and not parts.restarts:
        g.output("hidden_out", g.op("Reshape", rows.hidden, rows.shape), FLOAT, "batch", "tokens", parts.width)
    pooled = parts.pooled(rows)
    g.output("logits", parts.logits(k, pooled), FLOAT, "batch", model.classes)
    if hasattr(model, "policies") and not last:
        g.output("exit_logit", parts.exit_logit(k, pooled), FLOAT, "batch")
