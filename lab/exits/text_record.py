"""The outputs of every exit of a decoder at every token of texts that counts, so that any rule can be replayed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.exits.generation import token_weights
from mini_ee.lab.exits.token_exits import NO_LABEL, TEXTS_BATCH, TokenExits
from mini_ee.lab.recording import Record, Recorded


@torch.inference_mode()
def record_texts(
    model: TokenExits,
    texts: Sequence[Text],
    batch_size: int = TEXTS_BATCH,
    progress: str = "reading",
    last: bool = True,
) -> Record:
    """Record every exit at the tokens of each text from its `start` on; a text is a group.

    Each token attends to all layers of the tokens before it, as in a prompt, and as in decoding with missing_kv
    "recompute". Instead of V logits, the record has two numbers (N, K, 2): ln p of the next token (nan if there is
    none), and 1 if that token is the most likely one. Its measures contain all that a rule can read. Tokens are in the
    order of the texts. last: whether the last token of a text, which has no next token, is recorded.
    """
    device, parts = next(model.parameters()).device, []
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].ids))
    for begin in tqdm(range(0, len(order), batch_size), desc=progress, unit="batch", delay=2):
        rows = order[begin : begin + batch_size]
        # Options of a question may differ only in the token that is not read, such as MMLU's letters. Equal texts run
        # through the model once: `which` has the index, among the unique texts, of each text of the batch.
        inputs_of = [(tuple(texts[row].ids if last else texts[row].ids[:-1]), texts[row].start) for row in rows]
        unique = {pair: at for at, pair in enumerate(dict.fromkeys(inputs_of))}
        which = torch.tensor([unique[pair] for pair in inputs_of], device=device)
        ids = nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens, _ in unique], batch_first=True).to(device)
        at = torch.arange(ids.shape[1])[None]
        lengths, starts = (
            torch.tensor(numbers)[:, None] for numbers in zip(*((len(tokens), s) for tokens, s in unique))
        )
        inputs, counted = model.backbone.read_texts(ids, ((at >= starts) & (at < lengths)).to(device))
        counted = counted[which]
        # The tokens after the counted ones: text by text, as boolean indexing with `counted` orders them.
        end = (NO_LABEL,) if last else ()
        following = [token for row in rows for token in (*texts[row].ids[texts[row].start + 1 :], *end)]
        part = _read_exits(model, inputs, (which, counted), torch.tensor(following, device=device))
        part["groups"] = np.repeat(rows, counted.sum(1).numpy(force=True))
        part["position"] = counted.nonzero()[:, 1].numpy(force=True)
        parts.append(part)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # Batches hold the texts by length; a stable sort by text brings back their order, and keeps the order of tokens.
    back = np.argsort(columns["groups"], kind="stable")
    columns = {name: values[back] for name, values in columns.items()}
    groups, position, answers = (columns.pop(name) for name in ("groups", "position", "answers"))
    passes = np.diff(model.exits, prepend=0).tolist()
    layer, attention, head = token_weights(model.backbone)
    layers = 2.0 * (layer + 2 * attention * (position + 1))  # a token attends to position + 1 tokens
    of_heads = 2.0 * head + np.outer(layers, [*[model.own_layers] * (len(passes) - 1), False])
    flops = np.stack([np.outer(layers, passes), of_heads], axis=2)
    of_states = {"saturation": 0.0} | ({} if model.policy is None else {"exit_logit": model.policy.flops})
    of_states |= {"short_list": model.heads[0].short_flops} if "short_list" in columns else {}
    state_flops = {name: [*[of_state] * (len(passes) - 1), 0.0] for name, of_state in of_states.items()}
    recorded = Recorded(model.exits, answers, flops, passes, columns, state_flops)
    return Record(recorded, answers, flops[:, :, 0].sum(1) + 2.0 * head, groups)


def _read_exits(
    model: TokenExits, inputs: Any, places: tuple[Tensor, Tensor], following: Tensor
) -> dict[str, np.ndarray]:
    """The columns of a record for the N tokens that count: (N, K, 2), (N, K) or (N, K - 1).

    Only the logits of one exit at a time are in memory. inputs: from the backbone's read_texts. places: the index of
    each text in the inputs, (B,), and which of its tokens count, (B, T) bool. following (N,): the next tokens.
    """
    which, counted = places
    context, hidden = model.backbone.context(inputs), model.backbone.embed(inputs)
    before, columns = hidden[which][counted], dict[str, list[np.ndarray]]()
    rows = model.heads[0].likely_rows() if model.head == "lens" else []
    for k, (start, stop) in enumerate(zip((0, *model.exits), model.exits)):
        hidden = model.backbone.run_layers(hidden, context, start, stop)
        state = hidden[which][counted]
        log_p = model.classify(k, model.head_input(k, hidden, context)[which][counted]).log_softmax(-1)
        prediction = log_p.argmax(-1)
        # gather needs a valid index for NO_LABEL too; the mask replaces what it finds there.
        of_next = log_p.gather(-1, following.clamp(min=0)[:, None])[:, 0].masked_fill(following < 0, torch.nan)
        of_exit = {
            "answers": torch.stack((of_next, (prediction == following).float()), dim=1),
            "prediction": prediction,
        }
        if k < len(model.exits) - 1:
            of_exit |= _measures(log_p)
            cosine = torch.cosine_similarity(before.float(), state.float())
            of_exit["saturation"] = cosine.clamp(-1, 1)  # rounding may leave the range
            if model.policy is not None:
                of_exit["exit_logit"] = model.policies[k](state).float()
            if model.head == "lens":
                short = model.heads[k].short_logits(state, rows).log_softmax(-1)
                of_exit["short_list"] = _measures(short)["breaking_ties"]
        before = state
        for name, values in of_exit.items():
            columns.setdefault(name, []).append(values.numpy(force=True))
    return {name: np.stack(values, axis=1) for name, values in columns.items()}


def _measures(log_p: Tensor) -> dict[str, Tensor]:
    """confidence.MEASURES of ln p (N, V), on the model's device: (N,) each."""
    first, second = log_p.topk(2).values.unbind(-1)
    # -inf is replaced by the least finite number, because 0 x -inf is NaN.
    entropy = (log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    measures = {
        "max_probability": first.exp(),
        "entropy": entropy,
        "normalised_entropy": (entropy / np.log(log_p.shape[-1])).clamp(min=-1),
        "breaking_ties": first.exp() - second.exp(),
        "breaking_ties_logits": first - second,
    }
    return {name: measures[name] for name in MEASURES}
