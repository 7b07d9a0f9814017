"""Compare the graphs of an export with torch, before the folder gets its name."""

from pathlib import Path

import numpy as np
import torch

from mini_ee.bert import Exits
from mini_ee.data import Rows
from mini_ee.export.manifest import IDS
from mini_ee.export.runtime import Batch, Runtime
from mini_ee.loop import early_exit
from mini_ee.rules import Fixed, Never, Rule

ROWS, SINGLE = 64, 8  # compared as one batch, and each alone
TOLERANCE, RELATIVE = 1e-4, 1e-5  # of a logit, and as a share of the largest one
AGREEMENT = 0.9  # least share of equal exits: rounding decides for a row at a threshold


@torch.inference_mode()
def verify(folder: Path, model: Exits, rule: Rule, data: Rows) -> dict:
    """Compare every exit of model.onnx and by segment, and where the rule stops. Raises ValueError if they differ."""
    runtime, differences, largest = Runtime(folder, threads=1), list[float](), 0.0
    rows = np.random.default_rng(0).permutation(len(data))[:ROWS]
    rule = Never() if rule.needs is None else rule  # a plan is an input
    for some in (*rows[:SINGLE, None], rows):
        inputs = data.batch(some)
        ids = dict(zip(IDS, (inputs.ids.numpy(), inputs.kinds.numpy(), inputs.mask.numpy())))
        batch = Batch(ids, np.arange(len(some)))
        for k in range(len(model.exits)):
            expected = early_exit(model, Fixed(k), inputs).logits
            found = [runtime.run_batch(batch, Fixed(k)).logits]
            if f"segment_{model.exits[0]}" in runtime.config["graphs"]:
                found.append(early_exit(runtime.segments, Fixed(k), batch).logits)
            differences += [float(abs(expected - logits).max()) for logits in found]
            largest = max(largest, float(abs(expected).max()))
    in_torch, in_graph = early_exit(model, rule, inputs), runtime.run_batch(batch, rule)
    agreement = float(np.mean(in_torch.exit_index == in_graph.exit_index))
    predictions = float(np.mean(in_torch.logits.argmax(1) == in_graph.logits.argmax(1)))
    difference, allowed = float(np.max(differences)), max(TOLERANCE, RELATIVE * largest)
    if not difference <= allowed or agreement < AGREEMENT:
        line = f"by {difference:.2g} (logits; {allowed:.2g} are allowed), {agreement:.1%} of the exits are equal"
        raise ValueError(f"graphs and torch differ {line}; no folder was written")
    shares = {"prediction_agreement": predictions, "exit_agreement": agreement}
    return {"texts": len(rows), "max_logit_difference": difference} | shares
