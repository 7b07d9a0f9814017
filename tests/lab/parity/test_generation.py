"""Decoding: in full as transformers does, with exits as the definitions of their caches say, and lossless."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.exits.decoding import MISSING_KV, gather
from mini_ee.lab.exits.generation import GREEDY, Sampling, TokenSegments, generate
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.rules import Fixed, Never, Patience, Threshold

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("llama", "llama3", "gemma", "phi", "mistral", "qwen2", "qwen3", "phi3")
ATTENTIONS = ("llama", "gemma", "phi", "mistral", "qwen3")  # one of each kind of attention, where a test takes long
EXITS = (1, 2, 3)
MIXED = Threshold(0.3)
"""On the models and heads below, tokens leave at every exit."""


def golden(kind):
    """A decoder of three layers, three prompts of 9, 6 and 4 tokens, and what transformers writes after them."""
    expected = read_tensors(GOLDEN / kind / "expected.safetensors")
    mask = expected["attention_mask"].bool()
    prompts = [ids[real].tolist() for ids, real in zip(expected["input_ids"], mask)]
    return load_backbone(GOLDEN / kind), prompts, expected["greedy"].tolist()


def drawn_heads(model):
    """Two heads that are unsure to a different degree from token to token."""
    generator = torch.Generator().manual_seed(3)
    width = model.config.hidden_size
    weights = [2 * width**-0.5 * torch.randn(model.config.vocab_size, width, generator=generator) for _ in range(2)]
    return [lambda hidden, weight=weight: F.layer_norm(hidden, hidden.shape[-1:]) @ weight.T for weight in weights]


def with_exits(model, prompts, rule=MIXED, missing_kv="copy_state", new=12, **settings):
    return gather(
        generate(
            model,
            prompts,
            max_new_tokens=new,
            exits=EXITS,
            heads=drawn_heads(model),
            rule=rule,
            missing_kv=missing_kv,
            **settings,
        ),
        len(prompts),
    )


def in_full(model, prompts, new=24, **settings):
    return gather(generate(model, prompts, max_new_tokens=new, **settings), len(prompts))


# ---- Plain decoding ----


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers_token_for_token(kind):
    model, prompts, expected = golden(kind)
    texts = in_full(model, prompts)
    assert [text.tokens for text in texts] == expected
    assert all(text.layers_run == [3] * 24 for text in texts)


def test_tokens_stream_one_step_at_a_time(monkeypatch):
    model, prompts, expected = golden("llama")
    passes = []
    right = model.run_layers
    monkeypatch.setattr(model, "run_layers", lambda *args: (passes.append(1), right(*args))[1])
    steps = generate(model, prompts, max_new_tokens=24)
    assert not passes
    first, second = next(steps), next(steps)
    assert len(passes) == 2 and torch.is_inference_mode_enabled() is False
    assert first.tokens == [text[0] for text in expected] and second.tokens == [text[1] for text in expected]
    assert first.rows == [0, 1, 2] and first.layers_run == [3, 3, 3]


@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_a_row_ends_at_its_stop_token_and_the_others_go_on_unchanged(missing_kv):
    model, prompts, _ = golden("llama")
    whole = with_exits(model, prompts, missing_kv=missing_kv)
    stop = whole[0].tokens[3]
    cut = with_exits(model, prompts, missing_kv=missing_kv, stop=[stop])
    lengths = [len(text.tokens) for text in cut]
    assert len(set(lengths)) > 1
    for text, full in zip(cut, whole):
        assert text.tokens == full.tokens[: len(text.tokens)]
        assert stop not in text.tokens[:-1] and (text.tokens[-1] == stop or len(text.tokens) == 12)


# ---- Sampling ----


def shares(logits, temperature=1.0, top_k=None, top_p=None, penalty=1.0, seen=()):
    """The distribution that Sampling draws from, one token at a time."""
    scores = {}
    for token, logit in enumerate(logits):
        if token in seen:
            logit = logit / penalty if logit > 0 else logit * penalty
        scores[token] = logit / temperature
    ranked = sorted(scores, key=lambda token: -scores[token])
    if top_k is not None:
        ranked = [token for token in ranked if scores[token] >= scores[ranked[min(top_k, len(ranked)) - 1]]]
    total = sum(math.exp(scores[token]) for token in ranked)
    remaining, mass = {}, 0.0
    for token in ranked:
        if top_p is not None and mass >= top_p:
            break
        remaining[token] = math.exp(scores[token]) / total
        mass += remaining[token]
    return [remaining.get(token, 0.0) / mass for token in range(len(logits))]


LOGITS = [2.0, -1.0, 0.5, 3.0, 0.5, -2.0, 1.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 4, 20])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.5, 0.5])
def test_probabilities_are_those_of_a_loop_over_tokens(temperature, top_k, top_p, penalty):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
    seen = torch.zeros(1, len(LOGITS), dtype=torch.bool)
    seen[0, [1, 3]] = True
    probabilities = sampling.probabilities(torch.tensor([LOGITS]), seen)[0]
    expected = torch.tensor(shares(LOGITS, temperature, top_k, top_p, penalty, seen=(1, 3)))
    torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)


def test_a_uniform_number_draws_each_token_with_its_probability():
    sampling, draws = Sampling(temperature=1.0, top_p=0.9), 10_000
    uniform = (torch.arange(draws) + 0.5) / draws
    tokens = sampling.choose(torch.tensor([LOGITS]).expand(draws, -1), uniform)
    frequencies = torch.bincount(tokens, minlength=len(LOGITS)) / draws
    expected = torch.tensor(shares(LOGITS, top_p=0.9))
    assert (frequencies - expected).abs().max() <= 1 / draws + 1e-6
    assert not frequencies[expected == 0].any()
    assert sampling.choose(torch.tensor([LOGITS]), torch.tensor([1 - 2**-24])).item() == 6


def test_greedy_takes_the_likeliest_after_the_penalty():
    seen = torch.tensor([[False, False, False, True, False, False, False]])
    assert GREEDY.choose(torch.tensor([LOGITS]), None).tolist() == [3]
    assert Sampling(repetition_penalty=2.0).choose(torch.tensor([LOGITS]), None, seen).tolist() == [0]


def test_a_seed_gives_the_same_text_twice_another_gives_another_and_rows_that_end_change_no_other():
    model, prompts, _ = golden("llama")
    sampling = Sampling(temperature=1.0, top_k=30, top_p=0.95, repetition_penalty=1.1)
    first = in_full(model, prompts, sampling=sampling, seed=1)
    assert first == in_full(model, prompts, sampling=sampling, seed=1)
    assert first != in_full(model, prompts, sampling=sampling, seed=2)
    stopped = in_full(model, prompts, sampling=sampling, seed=1, stop=[first[0].tokens[2]])
    assert all(cut.tokens == full.tokens[: len(cut.tokens)] for cut, full in zip(stopped, first))
    assert len({len(cut.tokens) for cut in stopped}) > 1


def test_the_penalty_counts_prompt_and_text():
    model, prompts, _ = golden("llama")
    strong = in_full(model, prompts, new=20, sampling=Sampling(repetition_penalty=1e6))
    for prompt, text in zip(prompts, strong):
        assert len({*text.tokens}) == 20 and not {*text.tokens} & {*prompt}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1.0}, "temperature must be 0 \\(greedy\\) or at least 1e-06, got -1.0"),
        ({"temperature": 1e-38}, "temperature must be 0 \\(greedy\\) or at least 1e-06"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be from 1e-06 to 1, got 0.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-06 to 1000000, got 0.0"),
    ],
)
def test_a_sampling_that_cannot_be_is_told(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


# ---- Exits ----


@pytest.mark.parametrize("kind", ["llama", "phi"])
@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_exits_off_is_plain_decoding(kind, missing_kv):
    model, prompts, expected = golden(kind)
    for rule in (Never(), Threshold(math.inf))[: 2 if kind == "llama" else 1]:
        texts = with_exits(model, prompts, rule, missing_kv, new=24)
        assert [text.tokens for text in texts] == expected


@pytest.mark.parametrize("kind", ["llama", "mistral"])  # mistral: within a window
@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_rows_that_stand_at_the_same_places_leave_gaps_of_their_own(kind, missing_kv):
    """Their states are kept by slices, and fetched by indices where the gaps behind them differ."""
    model, prompts, _ = golden(kind)
    prompts = [prompt[: min(map(len, prompts))] for prompt in prompts]
    together = with_exits(model, prompts, missing_kv=missing_kv, new=8)
    assert len({tuple(text.layers_run) for text in together}) > 1
    assert together == [with_exits(model, [prompt], missing_kv=missing_kv, new=8)[0] for prompt in prompts]


def defined(model, prompt, rule, missing_kv, new):
    """The definition: the whole text, from nothing, for every token.

    inputs[i][l] is what layer l + 1 computes the key and value of token i from.
    copy_state: the token's own hidden states to its exit, and that at its exit above. recompute: its own everywhere.
    """
    heads = [*drawn_heads(model), model.lm_logits]
    layers, text, depths, inputs = len(model.layers), [], [], []

    def run(token, left_at):
        """Hidden state 1 .. `left_at` of a token, each layer reading what came before."""
        states = [model.embed(Tensors(torch.tensor([[token]])))]
        for depth in range(left_at):
            read = torch.cat([token_inputs[depth] for token_inputs in inputs] + [states[-1]], dim=1)
            block = model.block(torch.arange(read.shape[1])[None])
            states.append(model.run_layers(read, block, depth, depth + 1)[:, -1:])
        return states

    for token in prompt[:-1]:
        inputs.append(run(token, layers))
    token = prompt[-1]
    for _ in range(new):
        states = run(token, layers)
        for k, layer in enumerate(EXITS):
            logits = heads[k](states[layer][:, 0])
            if k == len(EXITS) - 1 or MEASURES[rule.measure][0](logits.numpy())[0] >= rule.threshold:
                break
        if missing_kv == "copy_state":
            states = states[: layer + 1] + [states[layer]] * (layers - layer)
        inputs.append(states)
        token = int(logits.argmax())
        text.append(token)
        depths.append(layer)
    return text, depths


DEFINED = [(missing_kv, "llama", MIXED) for missing_kv in MISSING_KV]
DEFINED += [(MISSING_KV[number % 2], kind, MIXED) for number, kind in enumerate(KINDS[1:])]
DEFINED += [("copy_state", "llama", Threshold(0.15, "breaking_ties"))]


@pytest.mark.parametrize("missing_kv, kind, rule", DEFINED, ids=lambda setting: getattr(setting, "measure", setting))
def test_copy_state_and_recompute_are_what_their_definitions_say(missing_kv, kind, rule):
    """Each decoder in one of the two ways; its graphs are compared in both, in test_decoder_export.py."""
    model, prompts, _ = golden(kind)
    depths, new = set(), 12 if kind == "llama" else 8
    with torch.no_grad():
        for prompt, text in zip(prompts, with_exits(model, prompts, rule, missing_kv=missing_kv, new=new)):
            assert defined(model, prompt, rule, missing_kv, new) == (text.tokens, text.layers_run)
            depths |= set(text.layers_run)
    assert depths == {1, 2, 3} or rule is not MIXED and len(depths) > 1


def test_the_two_fills_differ():
    for kind in KINDS:
        model, prompts, _ = golden(kind)
        if with_exits(model, prompts, missing_kv="copy_state") != with_exits(model, prompts, missing_kv="recompute"):
            return
    pytest.fail("a stand-in for a deeper state should be felt somewhere")


@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_what_no_token_asks_for_is_never_computed(monkeypatch, missing_kv):
    model, prompts, _ = golden("llama")
    ran = []
    right = model.run_layers
    monkeypatch.setattr(
        model, "run_layers", lambda h, block, start, *rest: (ran.append(start), right(h, block, start, *rest))[1]
    )
    monkeypatch.setattr(model, "copy_state", lambda *args: pytest.fail("nothing reads above exit 1"))
    texts = with_exits(model, prompts, Fixed(0), missing_kv)
    assert all(text.layers_run == [1] * 12 for text in texts)
    assert ran == [0] * 13  # the prompt through all layers, then the first alone


@pytest.mark.parametrize("kind", ["llama", "phi"])
@torch.inference_mode()
def test_a_tokens_operations_equal_what_torch_counts(kind):
    """A token that reads itself and those before it: its layers up to an exit, and the exit's head."""
    model, prompts, _ = golden(kind)
    exits = (1, 3)
    segments = TokenSegments(model, exits, [model.lm_logits], "copy_state", 1, len(prompts[0]))
    inputs = segments.prefill(segments.begin(prompts[:1]))
    state, counted = segments.start(inputs), []
    for k in range(len(exits)):
        for step in (segments.advance, segments.read):
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                output = step(k, state)
            state = output if step == segments.advance else state
            counted.append(counter.get_total_flops())
    expected = np.concatenate([np.hstack(segments.flops(k, inputs)) for k in range(len(exits))])
    np.testing.assert_array_equal(counted, expected)


@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_layers_run_do_not_grow_as_the_threshold_falls(missing_kv):
    model, prompts, _ = golden("llama")
    means = []
    for threshold in (math.inf, 0.5, 0.3, 0.2, -math.inf):
        text = with_exits(model, prompts[:1], Threshold(threshold), missing_kv)[0]
        means.append(sum(text.layers_run[:1]))  # of the first token: later ones follow other texts
    assert means == sorted(means, reverse=True) and means[0] == 3 and means[-1] == 1


def test_rules_with_a_memory_start_anew_at_each_token():
    model, prompts, _ = golden("llama")
    same = [model.lm_logits] * 2
    steps = generate(
        model, prompts, max_new_tokens=6, exits=EXITS, heads=same, rule=Patience(1), missing_kv="recompute"
    )
    layers = {layers for text in gather(steps, 3) for layers in text.layers_run}
    assert layers <= {2, 3} and 2 in layers  # two exits must agree, within one token


# ---- Lossless ----


@pytest.mark.parametrize(
    "kind, exit_layer, draft, threshold",
    [("llama", 1, 1, 0.0), ("llama", 1, 4, 0.0), ("llama", 2, 30, 0.0), *((kind, 2, 30, 0.03) for kind in ATTENTIONS)],
)
def test_lossless_text_is_the_full_models(kind, exit_layer, draft, threshold):
    model, prompts, expected = golden(kind)
    for head in (model.lm_logits, drawn_heads(model)[0])[0 if threshold == 0 else 1 :]:
        settings = {"exit_layer": exit_layer, "head": head, "draft": draft, "confidence_threshold": threshold}
        steps = generate_lossless(model, prompts, max_new_tokens=12, **settings)
        assert [text.tokens for text in gather(steps, 3)] == [tokens[:12] for tokens in expected]


@pytest.mark.parametrize(
    "threshold, widths, layers",
    [
        (0.0, [6, 6, 6, 6], [1, 1, 1, 1, 1, 3] * 4),  # 24 tokens in four passes of the upper layers
        (0.9, [3] * 8, [1, 1, 3] * 8),  # a draft that it is not sure of is not made
    ],
)
def test_a_head_that_is_always_right_saves_all_passes_but_one_a_round(threshold, widths, layers):
    model, prompts, expected = golden("llama")
    upper, right = [], model.run_layers

    def counted(hidden, block, start, *rest):
        upper.append(hidden.shape[1]) if start == 1 else None
        return right(hidden, block, start, *rest)

    model.run_layers = counted
    text = iter(enumerate((token for at, token in enumerate(expected[0], start=1) if threshold or at % 6), start=1))

    def head(hidden):
        at, token = next(text)
        return (5.0 if at % 3 == 0 else 50.0) * F.one_hot(torch.tensor([token]), 64)  # every third: p = .7 of 64 tokens

    settings = {"exit_layer": 1, "head": head, "draft": 5, "confidence_threshold": threshold}
    (lossless,) = gather(generate_lossless(model, prompts[:1], max_new_tokens=24, **settings), 1)
    assert lossless.tokens == expected[0] and lossless.layers_run == layers and upper == widths


def test_lossless_rows_end_at_their_stop_tokens():
    model, prompts, _ = golden("llama")
    plain = in_full(model, prompts)
    stop = [plain[0].tokens[5]]
    steps = generate_lossless(model, prompts, max_new_tokens=24, exit_layer=2, head=model.lm_logits, draft=4, stop=stop)
    expected = in_full(model, prompts, stop=stop)
    assert [text.tokens for text in gather(steps, 3)] == [text.tokens for text in expected]
    assert len({len(text.tokens) for text in expected}) > 1


@pytest.mark.parametrize("threshold, requested", [(0.7, 3), (0.8, 1)])
def test_a_round_goes_on_while_the_head_is_sure_of_its_drafts_in_the_mean_of_the_rows(threshold, requested):
    """Of one row it is wholly sure, of the other by a half: .75."""
    model, prompts, _ = golden("llama")
    calls = []

    def head(hidden):
        calls.append(hidden)
        logits = torch.zeros(2, model.config.vocab_size)
        logits[0, 5] = logits[1, 6] = logits[1, 7] = 100.0
        return logits

    options = {"exit_layer": 1, "head": head, "draft": 3, "confidence_threshold": threshold}
    next(generate_lossless(model, prompts[:2], max_new_tokens=8, **options))
    assert len(calls) == requested


# ---- Bad input ----


@pytest.mark.parametrize(
    "prompts, change, message",
    [
        ([], {}, "prompts of at least one token each, got an empty one: begin with the bos token"),
        ([[1], []], {}, "prompts of at least one token each"),
        ([[1, 64]], {}, "token ids must be from 0 to 63, got 64"),
        ([[1] * 60], {"max_new_tokens": 5}, "at most 64 tokens, prompt and continuation together, got 60 and 5"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ([[1]], {"max_new_tokens": "5"}, "max_new_tokens must be a whole number of at least 1, got '5'"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens must be a whole number of at least 1, got 1.5"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens must be a whole number of at least 1, got True"),
        ([[1]], {"exits": (1, 3)}, "expected a head for each of the 1 exits before the last, got 0"),
        ([[1]], {"exits": (1, 2), "heads": [None]}, "end at the last layer, 3, got 1,2"),
        ([[1]], {"missing_kv": "copy"}, "missing_kv must be one of copy_state, recompute, got 'copy'"),
        ([[1]], {"rule": Fixed(1)}, "must be one of the 1 exits, got index 1"),
    ],
)
def test_what_cannot_be_decoded_is_told_before_anything_runs(prompts, change, message):
    model, *_ = golden("llama")
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **({"max_new_tokens": 4} | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"exit_layer": 3}, "exit_layer must be from 1 to 2, below the last layer, got 3"),
        ({"exit_layer": 0}, "exit_layer must be from 1 to 2"),
        ({"draft": 0}, "draft must be at least 1 token, got 0"),
        ({"confidence_threshold": 1.5}, "confidence_threshold must be a probability, got 1.5"),
    ],
)
def test_drafts_that_cannot_be_are_told(change, message):
    model, prompts, _ = golden("llama")
    settings = {"max_new_tokens": 4, "exit_layer": 1, "head": model.lm_logits} | change
    with pytest.raises(ValueError, match=message):
        generate_lossless(model, prompts, **settings)


# ---- The real one ----


@pytest.mark.skipif("MINI_EE_SHARED" not in os.environ, reason="needs the real stories260K (2026-11)")
def test_200_tokens_of_the_real_stories260k_are_those_of_transformers():
    expected = read_tensors(GOLDEN / "stories260K" / "expected.safetensors")
    model = load_backbone(Path(os.environ["MINI_EE_SHARED"]) / "weights" / "stories260K")
    prompts, text = expected["input_ids"].tolist(), expected["greedy"][0].tolist()
    assert len(text) == 200
    assert in_full(model, prompts, new=200)[0].tokens == text
    steps = generate_lossless(model, prompts, max_new_tokens=200, exit_layer=3, head=model.lm_logits)
    assert gather(steps, 1)[0].tokens == text


@pytest.mark.parametrize("lossless", [False, True])
def test_weights_that_are_too_large_are_told_and_no_text_is_written(lossless):
    model, prompts, _ = golden("llama")
    with torch.no_grad():
        model.layers[-1].up.weight.fill_(3e38)
    head = model.lm_logits
    with pytest.raises(ValueError, match="the logits must be finite, found NaN or infinity: the weights are damaged"):
        if lossless:
            next(generate_lossless(model, prompts, max_new_tokens=4, exit_layer=1, head=head))
        else:
            next(generate(model, prompts, max_new_tokens=4))
