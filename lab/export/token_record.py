"""Every exit of an exported decoder at each token of texts, from its own graph. No torch here.

A graph stops at one exit, so each token runs once to each exit, and to the last one last: then all caches are those of
the full model, and each token attends to all layers of the tokens before it, as in exits/token_exits.py.
"""

from collections.abc import Sequence

import numpy as np

from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.exits.decoding import Tokens
from mini_ee.lab.export.runtime import TokenRuntime
from mini_ee.lab.recording import Record, Recorded
from mini_ee.rules import MEASURES


def record_tokens(runtime: TokenRuntime, texts: Sequence[Text], batch_size: int) -> Record:
    """Record every exit after each token of texts of one length. A text is a group."""
    parts = []
    for begin in tqdm(range(0, len(texts), batch_size), desc="reading", unit="batch", delay=2):
        ids = np.array([text.ids for text in texts[begin : begin + batch_size]])
        model, rows = runtime.one_graph(*ids.shape), list(range(len(ids)))
        for at, tokens in enumerate(ids.T):
            inputs = Tokens(tokens[:, None].tolist(), rows, [[at]] * len(rows))
            columns = [_measured(**model.read_at(k, inputs)) for k in range(len(runtime.exits))]
            part = {name: np.stack([column[name] for column in columns], axis=1) for name in columns[0]}
            costs = (np.broadcast_arrays(*model.flops(k, inputs)) for k in range(len(columns)))
            part["flops"] = np.stack([np.stack(pair, axis=1) for pair in costs], axis=1)
            parts.append(part | {"groups": begin + np.arange(len(rows))})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["groups"], kind="stable")  # text by text, as they were read token by token
    columns = {name: values[order] for name, values in columns.items()}
    flops, groups = columns.pop("flops"), columns.pop("groups")
    passes = np.diff(runtime.exits, prepend=0).tolist()
    measures = {name: values if name == "prediction" else values[:, :-1] for name, values in columns.items()}
    recorded = Recorded(runtime.exits, columns["prediction"][:, :, None], flops, passes, measures)
    return Record(recorded, recorded.logits, flops[:, :, 0].sum(1) + flops[:, -1, 1], groups)


def _measured(logits: np.ndarray, **of_state: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of one exit, (B,) each."""
    return {"prediction": logits.argmax(-1)} | {name: of(logits) for name, of in MEASURES.items()} | of_state
