"""Drafts without some of the layers: the full model's text, the choice of layers, and what is loaded."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from conftest import random_decoder

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits import clasp, swift
from mini_ee.lab.exits.clasp import Clasp, alone
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import TokenSegments, generate
from mini_ee.lab.exits.skipped_layers import generate_skipping, load_skipper
from mini_ee.lab.exits.swift import Swift
from mini_ee.lab.registry import SKIPPERS

PROMPT, NEW, LAYERS = [5, 9, 33, 7], 36, 8


def small_decoder(kind="llama", useful=(0, 1, 4, 7), layers=LAYERS):
    """Layers that change little, but for some."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        decoder = random_decoder(kind, layers)
    with torch.no_grad():
        for depth, layer in enumerate(decoder.layers):
            for linear in (layer.attention_output, layer.down):
                linear.weight *= 1.0 if depth in useful else 0.02
    return decoder.requires_grad_(False)


def written(decoder, skipper, new=NEW, stop=()):
    return gather(generate_skipping(decoder, PROMPT, skipper, max_new_tokens=new, stop=stop), 1)[0]


def in_full(decoder, new=NEW, stop=()):
    return gather(generate(decoder, [PROMPT], max_new_tokens=new, stop=stop), 1)[0].tokens


@pytest.fixture(scope="module")
def decoder():
    return small_decoder()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Choices in short texts."""
    monkeypatch.setattr(swift, "CONTEXT", 6)
    monkeypatch.setattr(clasp, "INTERVAL", 3)


# ---- Whatever chooses ----
@pytest.mark.parametrize("name", SKIPPERS)
@pytest.mark.parametrize(
    "kind, skipped, draft", [("llama", 0.15, 1), ("llama", 0.5, NEW), ("llama", 0.75, 4), ("phi", 0.5, 4)]
)
def test_the_text_is_the_full_models(name, kind, skipped, draft):
    """Whatever is skipped, and although the choice changes on the way."""
    decoder, skipper, choices = small_decoder(kind), load_skipper(name)(skipped, draft, 0.1), []
    skipper.skip = lambda layers: choices.append(layers) or type(skipper).skip(skipper, layers)
    assert written(decoder, skipper).tokens == in_full(decoder)
    assert len(choices) > 1 and all(len(layers) == round(skipped * LAYERS) for layers in choices)
    assert not any(layers & {0, LAYERS - 1} for layers in choices)


@pytest.mark.parametrize("name", SKIPPERS)
def test_it_ends_at_a_stop_token(decoder, name):
    stop = in_full(decoder)[7]
    skipper = load_skipper(name)(confidence_threshold=0)
    assert written(decoder, skipper, stop=[stop]).tokens == in_full(decoder, stop=[stop])


@pytest.mark.parametrize("name", SKIPPERS)
def test_each_draft_loads_the_layers_that_stay_and_each_round_all_of_them(decoder, monkeypatch, name):
    """And a choice what it runs."""
    loaded, run = [], type(decoder).run_layers

    def counted(self, hidden, context, start, stop, adapt=None):
        loaded.append(stop - start)
        return run(self, hidden, context, start, stop, adapt)

    monkeypatch.setattr(type(decoder), "run_layers", counted)
    skipper = load_skipper(name)(0.5, confidence_threshold=0.1)
    written(decoder, skipper)
    assert skipper.layers_loaded == sum(loaded) - LAYERS  # the prompt


def test_an_encoder_decoder_is_refused():
    with pytest.raises(WrongArguments, match="expected a decoder without an encoder, found a t5; let an exit draft"):
        written(load_backbone(Path(__file__).parents[2] / "golden/t5"), Swift())


@pytest.mark.parametrize("skipped", [0.0, 0.05, 0.9])
def test_a_share_that_leaves_nothing_to_skip_or_to_stay_is_refused(decoder, skipped):
    with pytest.raises(ValueError, match=f"must be from 0.12 to 0.75, got {skipped}"):
        written(decoder, Swift(skipped))


# ---- SWIFT ----
def test_layers_that_change_little_are_found_and_then_drafts_are_right(decoder):
    skipper, choices = Swift(0.5, 4, 0), []
    skipper.skip = lambda layers: choices.append(layers) or Swift.skip(skipper, layers)
    accepted = [layers == 0 for layers in written(decoder, skipper).layers_run]
    assert choices[0] == {1, 3, 4, 6} and skipper.segments.stay == [0, 1, 4, 7]
    assert skipper.skipped == {2, 3, 5, 6} and skipper.matchness == 1 and skipper.tries < 20
    assert sum(accepted[:24]) <= 5 and sum(accepted[-12:]) >= 9  # of 4 drafts and a token of the full model


def test_matchness_is_that_of_drafts_one_by_one_after_the_text_before(decoder):
    skipper = Swift(0.5, confidence_threshold=0.1)
    tokens = written(decoder, skipper).tokens
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


# ---- CLaSp ----
class OneToken:
    """Layers skipped at the last of some tokens, and at no token before it: whole texts, without a cache."""

    def __init__(self, decoder, ids):
        self.decoder, self.depth = decoder, len(decoder.layers)
        inputs = Tensors(torch.tensor([ids]))
        self.context, hidden, self.full = decoder.context(inputs), decoder.embed(inputs), []
        for layer in range(self.depth):
            self.full.append(hidden)
            hidden = decoder.run_layers(hidden, self.context, layer, layer + 1)

    def state(self, layer):
        return self.full[layer][0, -1]

    def after(self, layer, state):
        text = torch.cat((self.full[layer][:, :-1], state[None, None]), dim=1)
        return self.decoder.run_layers(text, self.context, layer, layer + 1)[0, -1]

    def similarity(self, layer, state):
        return float(torch.cosine_similarity(state, self.state(layer), dim=0))

    def similarities(self, count):
        """Of the state before the last layer, for all sets of `count` layers between the first and the last."""
        similarities = {}
        for layers in combinations(range(1, self.depth - 1), count):
            state = self.state(1)
            for layer in range(1, self.depth - 1):
                state = state if layer in layers else self.after(layer, state)
            similarities[layers] = self.similarity(self.depth - 1, state)
        return similarities

    def by_equation_2(self, count):
        @cache
        def g(i, j):
            """(state after i layers, the j layers that are skipped); None: there are fewer."""
            if j < 0 or j > i - 1:
                return None
            if j == 0:
                return self.state(i), ()
            run, skipped = g(i - 1, j), g(i - 1, j - 1)
            ways = [] if run is None else [(self.after(i - 1, run[0]), run[1])]
            ways += [] if skipped is None else [(skipped[0], (*skipped[1], i - 1))]
            return max(ways, key=lambda way: self.similarity(i, way[0]))

        return g(self.depth - 1, count)[1]


def choices(decoder, skipped, least=2):
    """(skipped layers, the token) of CLaSp at the tokens of a text, the last one first: slots after it are replaced."""
    skipper = Clasp(skipped)
    text = [*PROMPT, *written(decoder, skipper).tokens]
    for at in reversed(range(least, len(text) - len(skipper.skipped) - 1)):
        token = OneToken(decoder, text[: at + 1])
        yield skipper.closest(torch.stack([token.state(layer) for layer in range(token.depth)]), at), token


class Sloped(Decoder):
    """Scores fall off with distance: what is added to them is the mask."""

    def position_bias(self, at, reads):
        return 0.5 * (reads[:, None, None, :] - at[:, None, :, None]).expand(
            -1, self.config.num_attention_heads, -1, -1
        )


def windowed(config):
    return Decoder(replace(config, model_type="mistral", sliding_window=5))


def changing(make):
    """A decoder whose layers all change much."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make(random_decoder("llama", 6).config).eval().requires_grad_(False)


@pytest.mark.parametrize("make", [Decoder, Sloped, windowed])
def test_states_of_a_token_read_the_text_before_it_and_themselves(make):
    """With each kind of mask; and what the full model has read of the text stays in the cache."""
    decoder, skipper, at = changing(make), Clasp(0.5), 20
    text = [*PROMPT, *written(decoder, skipper).tokens]
    token, cache = OneToken(decoder, text[: at + 1]), skipper.segments.cache
    before = cache.keys[:, :, :, : at + 1].clone(), cache.values[:, :, :, : at + 1].clone()
    states = 3 * torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    for layer in range(6):
        after = decoder.run_layers(states[None], alone(skipper.segments, at, 5), layer, layer + 1)[0]
        expected = torch.stack([token.after(layer, state) for state in states])
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((cache.keys[:, :, :, : at + 1], cache.values[:, :, :, : at + 1]), before)


def test_clasp_chooses_by_equation_2():
    different = set()
    for layers, token in choices(changing(Decoder), 0.34):
        assert layers == set(token.by_equation_2(2))
        different.add(frozenset(layers))
    assert len(different) > 2


def test_of_two_layers_the_better_one_is_skipped():
    """The only size at which no state is given up on the way, so that the choice is exact."""
    decoder = small_decoder(useful=range(4), layers=4)
    best = []
    for layers, token in choices(decoder, 0.25):
        similarities = token.similarities(1)
        best.append(max(similarities, key=similarities.get))
        assert layers == set(best[-1])
    assert {*best} == {(1,), (2,)}


def test_the_choice_is_close_to_the_best_of_all_sets_of_layers():
    """It is approximate: of 20 sets it is the best one for most tokens, but not for all of them."""
    better = []
    for layers, token in choices(small_decoder(useful=range(8)), 0.375):
        similarities = token.similarities(3)
        better.append(sum(other > similarities[tuple(sorted(layers))] for other in similarities.values()))
    assert max(better) <= 5 and 0.5 < better.count(0) / len(better) < 1


def test_clasp_reads_the_state_of_the_last_verified_token(decoder):
    """Not that of a rejected draft, nor that of the token which the full model adds."""
    skipper, given, closest = Clasp(0.5, confidence_threshold=0), [], Clasp.closest
    skipper.closest = lambda *state: given.append(state) or closest(skipper, *state)
    text = [*PROMPT, *written(decoder, skipper).tokens]
    for states, at in given:
        token = OneToken(decoder, text[: at + 1])
        torch.testing.assert_close(states, torch.stack([token.state(layer) for layer in range(LAYERS)]))
    assert len(given) > 2


def test_layers_are_chosen_after_the_first_round_and_each_interval(decoder):
    skipper, rounds, closest = Clasp(0.5, confidence_threshold=0), [], Clasp.closest
    skipper.closest = lambda *state: rounds.append(skipper.rounds) or closest(skipper, *state)
    assert written(decoder, skipper).tokens and skipper.skipped == {2, 3, 5, 6}
    assert rounds == [*range(0, skipper.rounds, 3)][: len(rounds)] and len(rounds) > 2


def test_no_layers_are_chosen_when_the_rest_of_the_text_is_shorter_than_they_are_many(decoder):
    skipper = Clasp(0.5, 1)
    assert written(decoder, skipper, new=3).tokens == in_full(decoder, 3) and skipper.skipped == {1, 3, 4, 6}
    assert written(decoder, skipper, new=6).tokens == in_full(decoder, 6) and skipper.skipped != {1, 3, 4, 6}
