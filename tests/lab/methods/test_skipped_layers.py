"""Drafts without some of the layers: the full model's text, the choice of layers, and what is loaded."""

import pytest
import torch
from conftest import random_decoder

from mini_ee.lab.exits import skipped_layers
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import TokenSegments, generate
from mini_ee.lab.exits.skipped_layers import generate_skipping

PROMPT, NEW, LAYERS = [5, 9, 33, 7], 36, 8


def small_decoder(kind="llama", useful=(0, 1, 4, 7)):
    """Layers that change little, but for some."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        decoder = random_decoder(kind, LAYERS)
    with torch.no_grad():
        for depth, layer in enumerate(decoder.layers):
            for linear in (layer.attention_output, layer.down):
                linear.weight *= 1.0 if depth in useful else 0.02
    return decoder


def in_full(decoder, new=NEW, stop=()):
    return gather(generate(decoder, [PROMPT], max_new_tokens=new, stop=stop), 1)[0].tokens


@pytest.fixture(scope="module")
def decoder():
    return small_decoder()


@pytest.fixture(autouse=True)
def short_context(monkeypatch):
    monkeypatch.setattr(skipped_layers, "CONTEXT", 6)


@pytest.mark.parametrize(
    "kind, skipped, draft", [("llama", 0.15, 1), ("llama", 0.5, NEW), ("llama", 0.75, 4), ("phi", 0.5, 4)]
)
def test_the_text_is_the_full_models(kind, skipped, draft):
    """Whatever is skipped, and although the choice changes on the way."""
    decoder = small_decoder(kind)
    steps, skipper = generate_skipping(
        decoder, PROMPT, max_new_tokens=NEW, skipped=skipped, draft=draft, confidence_threshold=0.1
    )
    assert gather(steps, 1)[0].tokens == in_full(decoder)
    assert skipper.tries and len(skipper.skipped) == round(skipped * LAYERS)
    assert not skipper.skipped & {0, LAYERS - 1}


def test_it_ends_at_a_stop_token(decoder):
    stop = in_full(decoder)[7]
    steps, _ = generate_skipping(decoder, PROMPT, max_new_tokens=NEW, confidence_threshold=0, stop=[stop])
    assert gather(steps, 1)[0].tokens == in_full(decoder, stop=[stop])


def test_layers_that_change_little_are_found_and_then_drafts_are_right(decoder):
    steps, skipper = generate_skipping(
        decoder, PROMPT, max_new_tokens=NEW, skipped=0.5, draft=4, confidence_threshold=0
    )
    assert skipper.skipped == {1, 3, 4, 6} and skipper.segments.stay == [0, 2, 5, 7]
    accepted = [layers == 0 for layers in gather(steps, 1)[0].layers_run]
    assert skipper.skipped == {2, 3, 5, 6} and skipper.matchness == 1 and skipper.tries < 20
    assert sum(accepted[:24]) <= 5 and sum(accepted[-12:]) >= 9  # of 4 drafts and a token of the full model


@torch.no_grad()
def test_matchness_is_that_of_drafts_one_by_one_after_the_text_before(decoder):
    steps, skipper = generate_skipping(decoder, PROMPT, max_new_tokens=NEW, skipped=0.5, confidence_threshold=0.1)
    tokens = gather(steps, 1)[0].tokens
    assert [*skipper.tokens] == tokens[-7:] and skipper.matchness_without(set()) == 1
    for layers in ({2, 3, 5, 6}, {2, 5, 1, 3}, {3, 4}):
        segments, text = TokenSegments(decoder, (LAYERS,), (), "copy_state", 1, 40), [*PROMPT, *tokens]
        segments.run_through([text[:-7]], [0], [[*range(len(text) - 7)]])
        equal = []
        for at in range(len(text) - 7, len(text) - 1):
            hidden, block = segments.embed(torch.tensor([[text[at]]]), [[at]]), segments.block([0], [[at]])
            for depth in sorted({*range(LAYERS)} - layers):
                hidden = decoder.layers[depth](hidden, block, depth)
            equal.append(int(decoder.lm_logits(hidden)[0, 0].argmax()) == text[at + 1])
        assert skipper.matchness_without(layers) == pytest.approx(sum(equal) / 6)


def test_each_draft_loads_the_layers_that_stay_and_each_round_all_of_them(decoder, monkeypatch):
    loaded, run = [], type(decoder).run_layers

    def counted(self, hidden, context, start, stop, adapt=None):
        loaded.append(stop - start)
        return run(self, hidden, context, start, stop, adapt)

    monkeypatch.setattr(type(decoder), "run_layers", counted)
    monkeypatch.setattr(skipped_layers, "TRIES", 0)
    steps, skipper = generate_skipping(decoder, PROMPT, max_new_tokens=NEW, skipped=0.5, confidence_threshold=0.1)
    gather(steps, 1)
    assert skipper.layers_loaded == sum(loaded) - LAYERS  # the prompt


@pytest.mark.parametrize("skipped", [0.0, 0.05, 0.9])
def test_a_share_that_leaves_nothing_to_skip_or_to_stay_is_refused(decoder, skipped):
    with pytest.raises(ValueError, match=f"must be from 0.12 to 0.75, got {skipped}"):
        generate_skipping(decoder, PROMPT, max_new_tokens=4, skipped=skipped)
