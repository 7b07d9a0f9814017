"""Prompt mode: what is read where, as which probabilities, after which layer; and what is refused."""

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch

from mini_ee.experiments import retrieval_measures
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.data.glue import GLUE
from mini_ee.lab.data.prompt_templates import PROMPTS, Prompt, PromptTokenizer, check_prompt, prompt_of, read_prompts
from mini_ee.lab.data.tasks import Split, Task, load_task, toy_task
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.prompt_exits import PromptModel, draw_shots
from mini_ee.lab.methods.raee_encoders import OwnStates
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Planned
from mini_ee.lab.training.prompt_run import few_shot
from mini_ee.lab.training.stages import Batch
from mini_ee.raee import exit_values

SHARED = os.environ.get("MINI_EE_SHARED")

ATOL = 1e-5  # float32 logits of a row alone against padded batches; measured max 2.4e-7, torch 2.13 on CPU

IT_WAS = Prompt("{text} it was {mask} .", ("bad", "good", "fine"))
GOES_ON = Prompt("{text} it was", ("bad", "good", "fine"))
PAIR = Prompt("{text_a} {mask} , {text_b}", ("bad", "good"))
WORDS = "the a film meal song room was is it very and bad good fine great dull . ,".split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXTS = (("the film",), ("a very very dull song and a meal",), ("room",), ("the meal was good , the room was not",))


def wordpiece():
    """As BERT has it: unknown words fall into pieces, or are [UNK]; [MASK] is a word of the vocabulary only."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *WORDS, "un", "##kind"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


def bytelevel():
    """As GPT has it: a word inside a sentence carries its space, alone it is letters."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", *letters])}
    merges = []
    for word in WORDS:
        piece = "Ġ"
        for letter in word:
            merges.append((piece, letter))
            piece += letter
            vocab.setdefault(piece, len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, list(dict.fromkeys(merges))))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def drawn(module):
    """Every parameter drawn, norms and biases too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.3, generator=generator)
    return module.eval()


def encoder_model(prompt=IT_WAS, max_length=24, layers=3, **options):
    tokenizer = PromptTokenizer(wordpiece(), max_length, prompt)
    size = tokenizer.backend.get_vocab_size()
    shape = dict(hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32)
    config = BertConfig(model_type="bert", vocab_size=size, max_position_embeddings=24, **shape)
    return PromptModel(drawn(Bert(config)), tokenizer, **options).eval(), tokenizer


def decoder_model(prompt=GOES_ON, max_length=32, **options):
    tokenizer = PromptTokenizer(bytelevel(), max_length, prompt)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=tokenizer.backend.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        hidden_act="silu",
        norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return PromptModel(drawn(Decoder(config)), tokenizer, **options).eval(), tokenizer


MODELS = {"encoder": encoder_model, "decoder": decoder_model}


@pytest.fixture(params=MODELS)
def pair(request):
    """(model, tokenizer) of an encoder and of a decoder."""
    return MODELS[request.param]()


def words_of(tokenizer, ids):
    return [tokenizer.backend.id_to_token(token) for token in ids]


# What an exit says


def states_of_one(model, ids):
    """hidden[0..L] of one row without padding, each (T, D)."""
    with torch.no_grad():
        return [state[0] for state in model.backbone.hidden_states(torch.tensor([list(ids)]))]


def logits_by_hand(model, tokenizer, ids):
    """(L + 1, C): the whole vocabulary at every position of every layer, then the one that counts."""
    ids = list(ids)
    at = len(ids) - 1 if tokenizer.mask is None else ids.index(tokenizer.mask_token_id)
    with torch.no_grad():
        whole = [model.backbone.lm_logits(state)[at].double().numpy() for state in states_of_one(model, ids)]
    return np.array([[logits[token] for token in tokenizer.label_tokens] for logits in whole])


def test_every_exit_has_the_lm_logits_of_its_layer_at_the_mask_or_the_last_token(pair):
    model, tokenizer = pair
    encoded = tokenizer.encode(TEXTS)
    logits, *_ = read_every_exit(model.segments(), encoded.batch(slice(None)))
    assert logits.shape == (4, 3, 3) and model.exits == (1, 2, 3)
    for row, ids in enumerate(encoded.ids):
        np.testing.assert_allclose(logits[row], logits_by_hand(model, tokenizer, ids)[1:], atol=ATOL)


def test_p_is_the_softmax_over_the_vocabulary_restricted_to_the_label_words_and_renormalised(pair):
    model, tokenizer = pair
    encoded = tokenizer.encode(TEXTS)
    labels = np.array([0, 1, 2, 1])
    logits, *_ = read_every_exit(model.segments(), encoded.batch(slice(None)))
    values = exit_values(logits, labels)
    for row, ids in enumerate(encoded.ids):
        at = len(ids) - 1 if tokenizer.mask is None else list(ids).index(tokenizer.mask_token_id)
        for layer, state in enumerate(states_of_one(model, ids)[1:]):
            with torch.no_grad():
                p = model.backbone.lm_logits(state)[at].double().softmax(0).numpy()
            words = [p[token] for token in tokenizer.label_tokens]
            best = max(range(3), key=words.__getitem__)
            expected = words[best] / sum(words) if best == labels[row] else 0
            assert values[row, layer] == pytest.approx(expected, abs=ATOL)


def test_the_last_exit_is_what_training_sees(pair):
    model, tokenizer = pair
    inputs = tokenizer.encode(TEXTS).batch(slice(None))
    arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, arrays)).numpy()
    logits, *_ = read_every_exit(model.segments(), inputs)
    np.testing.assert_allclose(expected, logits[:, -1], atol=ATOL)


def test_a_decoder_reads_the_last_real_token_with_padding_on_either_side():
    model, tokenizer = decoder_model()
    encoded = tokenizer.encode(TEXTS)
    right = encoded.batch(slice(None))
    order = np.argsort(right.attention_mask, axis=1, kind="stable")  # padding first, tokens in their order
    arrays = (right.input_ids, right.attention_mask, right.token_type_ids)
    left_padded = Inputs(*(np.take_along_axis(array, order, axis=1) for array in arrays), right.texts)
    assert left_padded.attention_mask[2, 0] == 0 and left_padded.attention_mask[:, -1].all()
    of_left, of_right = (read_every_exit(model.segments(), inputs)[0] for inputs in (left_padded, right))
    np.testing.assert_allclose(of_left, of_right, atol=ATOL)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_that_exit_at_different_layers_have_the_answers_of_single_rows(kind):
    model, tokenizer = MODELS[kind](exits=(0, 1, 2, 3))
    encoded = tokenizer.encode(TEXTS)
    plan = (2, 0, 3, 1)
    together = early_exit(model.segments(), Planned(plan), encoded.batch(slice(None)))
    assert together.layers_run.tolist() == list(plan)
    for row, ids in enumerate(encoded.ids):
        np.testing.assert_allclose(together.logits[row], logits_by_hand(model, tokenizer, ids)[plan[row]], atol=ATOL)


def test_with_embeddings_layer_0_is_an_exit_that_costs_no_layer(pair):
    model, tokenizer = pair
    more = PromptModel(model.backbone, tokenizer, (0, 1, 2, 3))
    assert more.exits == (0, *model.exits)
    inputs = tokenizer.encode(TEXTS).batch(slice(None))
    first = early_exit(more.segments(), Fixed(0), inputs)
    assert (first.layers_run == 0).all() and (first.cost.layer_passes == 0).all()
    ends = [early_exit(either.segments(), Never(), inputs) for either in (more, model)]
    np.testing.assert_allclose(ends[0].logits, ends[1].logits, atol=ATOL)
    assert (ends[0].cost.layer_passes == 3).all() and (ends[0].cost.flops == ends[1].cost.flops).all()


def test_operations_are_counted_once_a_layer_and_once_the_label_words():
    model, tokenizer = encoder_model()
    inputs = tokenizer.encode(TEXTS).batch(slice(None))
    tokens, words = inputs.input_ids.shape[1], len(tokenizer.label_tokens)
    layer = 2 * tokens * (4 * 16 * 16 + 2 * 16 * 32) + 4 * tokens * tokens * 16
    result = early_exit(model.segments(), Fixed(1), inputs)
    assert (result.cost.flops == 2 * layer + 2 * 16 * 16 + 2 * 16 * words).all()


@pytest.mark.parametrize("layer", [0, 2])
def test_queries_of_a_decoder_are_the_means_over_the_tokens_of_the_row_alone(layer):
    model, tokenizer = decoder_model()
    encoded, embed = tokenizer.encode(TEXTS), OwnStates(model.backbone, layer)
    inputs = encoded.batch(slice(None))
    embeddings, tokens = embed(inputs), inputs.input_ids.shape[1]
    for row, ids in enumerate(encoded.ids):
        expected = states_of_one(model, ids)[layer].double().mean(0).numpy()
        np.testing.assert_allclose(embeddings[row], expected, atol=ATOL)
    assert embed.flops(inputs) == layer * (2 * tokens * (4 * 16 * 16 + 3 * 16 * 32) + 4 * tokens * tokens * 16)


# Templates and tokens


def test_a_row_is_inserted_in_its_template_with_one_mask():
    _, tokenizer = encoder_model()
    encoded = tokenizer.encode([("the film ",)])
    (ids,) = encoded.ids
    assert encoded.texts == (("the film ",),), "an encoder of its own reads the text without the template"
    assert words_of(tokenizer, ids) == ["[CLS]", "the", "film", "it", "was", "[MASK]", ".", "[SEP]"]
    assert words_of(tokenizer, tokenizer.label_tokens) == ["bad", "good", "fine"]
    _, tokenizer = decoder_model()
    (ids,) = tokenizer.encode(["the film"]).ids
    assert words_of(tokenizer, ids)[-3:] == ["Ġfilm", "Ġit", "Ġwas"]
    assert words_of(tokenizer, tokenizer.label_tokens) == ["Ġbad", "Ġgood", "Ġfine"]
    _, tokenizer = decoder_model(replace(GOES_ON, words=("a", "x")))  # letters, of which only one has a space before it
    assert words_of(tokenizer, tokenizer.label_tokens) == ["Ġa", "x"]


def test_both_texts_of_a_pair_are_inserted_in_the_template():
    _, tokenizer = encoder_model(PAIR)
    (ids,) = tokenizer.encode([("the film", "a song")]).ids
    assert words_of(tokenizer, ids) == ["[CLS]", "the", "film", "[MASK]", ",", "a", "song", "[SEP]"]
    with pytest.raises(ValueError, match="row 0: the template takes 2 texts, found 1"):
        tokenizer.encode(["the film"])


def test_truncation_cuts_the_end_of_the_text_never_the_template(pair):
    tokenizer = pair[1]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS[:8], k=draw.randint(1, 40))) for _ in range(40)]
    encoded, whole = tokenizer.encode(texts), PromptTokenizer(tokenizer.backend, 10_000, tokenizer.prompt).encode(texts)
    (short,) = tokenizer.encode(["a"]).ids
    template = len(short) - 1
    assert 0 < encoded.truncated < 40 and whole.truncated == 0
    assert encoded.truncated == sum(len(ids) > tokenizer.max_length for ids in whole.ids)
    after = {"encoder": 5, "decoder": 2}[tokenizer.prompt.kind]  # tokens that follow the text
    for cut, ids in zip(encoded.ids, whole.ids):
        assert len(cut) == min(len(ids), tokenizer.max_length) and template < tokenizer.max_length
        np.testing.assert_array_equal(cut[-after:], ids[-after:])
        np.testing.assert_array_equal(cut[:-after], ids[: len(cut) - after])


def test_truncation_takes_from_the_longer_text_of_a_pair_until_both_are_equal():
    _, tokenizer = encoder_model(PAIR, max_length=12)
    (ids,) = tokenizer.encode([("the " * 9, "a a a")]).ids
    assert words_of(tokenizer, ids) == ["[CLS]", *["the"] * 5, "[MASK]", ",", *["a"] * 3, "[SEP]"]
    (ids,) = tokenizer.encode([("the " * 9, "a " * 9)]).ids
    assert words_of(tokenizer, ids) == ["[CLS]", *["the"] * 4, "[MASK]", ",", *["a"] * 4, "[SEP]"]


def test_a_mask_that_a_text_writes_out_is_not_read():
    model, tokenizer = encoder_model()
    encoded = tokenizer.encode(["the [MASK] film [MASK]", "the film"])
    assert words_of(tokenizer, encoded.ids[0]) == words_of(tokenizer, encoded.ids[1])
    logits, *_ = read_every_exit(model.segments(), encoded.batch(slice(None)))
    np.testing.assert_allclose(logits[0], logits[1], atol=ATOL)


def test_rows_of_another_tokenizer_have_no_mask_and_are_refused():
    model, _ = encoder_model()
    with pytest.raises(ValueError, match="expected one mask token in every row"):
        early_exit(model.segments(), Never(), Tokenizer(wordpiece()).encode(["the film"]).batch(slice(None)))


def test_a_label_word_of_several_pieces_is_refused_with_its_pieces():
    with pytest.raises(ValueError, match=r"label word 'unkind' must be one token .* found 2 \(un, ##kind\)"):
        encoder_model(replace(IT_WAS, words=("unkind", "good")))
    with pytest.raises(ValueError, match=r"label word 'odd' must be one token .* found 4 \(Ġ, o, d, d\)"):
        decoder_model(replace(GOES_ON, words=("good", "odd")))
    with pytest.raises(ValueError, match=r"label word 'nowhere' must be one token .* \(\[UNK\]\)"):
        encoder_model(replace(IT_WAS, words=("good", "nowhere")))


def test_equal_label_words_and_a_template_without_room_are_refused():
    with pytest.raises(ValueError, match="must be different tokens"):
        encoder_model(replace(IT_WAS, words=("good", "good")))
    with pytest.raises(ValueError, match="is 6 tokens of 6, and leaves no room for a text"):
        encoder_model(max_length=6)
    assert len(encoder_model(max_length=7)[1].encode(["the film"]).ids[0]) == 7


def test_an_encoder_without_its_head_a_tokenizer_without_mask_and_the_wrong_kind_are_refused():
    model, tokenizer = encoder_model()
    _, of_decoder = decoder_model()
    with pytest.raises(ValueError, match="expected {mask}, which an encoder reads"):
        PromptModel(model.backbone, of_decoder)
    with pytest.raises(ValueError, match="expected no {mask}: a decoder continues the prompt"):
        PromptModel(decoder_model()[0].backbone, tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        PromptTokenizer(bytelevel(), 24, IT_WAS)
    model.backbone.lm_head = None
    with pytest.raises(ValueError, match="this bert has no masked-LM head"):
        PromptModel(model.backbone, tokenizer)


@pytest.mark.parametrize(
    "template",
    ["it was {mask}", "{text} {text} {mask}", "{text_a} {mask}", "{text} {mask} {mask}", "{txt} {mask}", "{"],
)
def test_a_template_with_other_places_is_refused(template):
    with pytest.raises(ValueError, match="^template "):
        Prompt(template, ("bad", "good"))


# The file


WORDS_OF_LABELS = {  # RAEE's Table 6 under "encoder", our own under "decoder"; labels by their meaning
    "encoder": {
        "SST-2": {"negative": "terrible", "positive": "great"},
        "SST-5": dict(
            zip(
                ("very negative", "negative", "neutral", "positive", "very positive"),
                ("terrible", "bad", "okay", "good", "great"),
            )
        ),
        "MR": {"negative": "terrible", "positive": "great"},
        "CR": {"negative": "terrible", "positive": "great"},
        "MPQA": {"negative": "terrible", "positive": "great"},
        "Subj": {"subjective": "subjective", "objective": "objective"},
        "TREC": {
            "description": "Description",
            "entity": "Entity",
            "abbreviation": "Expression",
            "human": "Human",
            "location": "Location",
            "number": "Number",
        },
        "CoLA": {"unacceptable": "incorrect", "acceptable": "correct"},
        "MRPC": {"not_equivalent": "no", "equivalent": "yes"},
        "RTE": {"entailment": "yes", "not_entailment": "no"},
        "reviews": {"negative": "terrible", "positive": "great"},
    },
    "decoder": {
        **dict.fromkeys(("SST-2", "MR", "CR", "MPQA", "reviews"), {"negative": "bad", "positive": "good"}),
        "Subj": {"subjective": "feeling", "objective": "fact"},
        "TREC": {
            "description": "reason",
            "entity": "thing",
            "abbreviation": "word",
            "human": "person",
            "location": "place",
            "number": "number",
        },
        "CoLA": {"unacceptable": "wrong", "acceptable": "right"},
        "MRPC": {"not_equivalent": "different", "equivalent": "same"},
    },
}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_every_built_in_label_word_stands_for_its_class(kind):
    expected = {name: WORDS_OF_LABELS[kind].get(name, words) for name, words in WORDS_OF_LABELS["encoder"].items()}
    orders = {glue.name: glue.label_names for glue in GLUE} | {"reviews": toy_task().label_names}
    prompts = read_prompts()[kind]
    assert prompts.keys() == expected.keys()
    for name, prompt in prompts.items():
        labels = orders.get(name, tuple(expected[name]))  # the others have numbers, in the order above
        assert dict(zip(labels, prompt.words)) == expected[name], name


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
@pytest.mark.parametrize(
    "task, word, label",
    [("TREC", "Who", 3), ("TREC", "Where", 4), ("TREC", "How many", 5), ("SST-5", "bad", 1), ("MR", "dull", 0)],
)
def test_the_real_labels_have_the_meaning_of_the_label_words(task, word, label):
    split = load_task(Path(SHARED) / "data" / task).split("train")
    rows = [row for row, (text,) in enumerate(split.texts) if re.search(rf"\b{word}\b", text)]
    assert np.bincount(split.labels[rows]).argmax() == label


def test_every_prompt_that_is_built_in_fits_the_built_in_models():
    from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, BUILT_IN_MODEL

    prompts = read_prompts()
    assert set(prompts["encoder"]) == set(prompts["decoder"]) >= {"SST-2", "SST-5", "MR", "CR", "MPQA", "Subj", "TREC"}
    sentiment = ("SST-2", "MR", "CR", "MPQA", "reviews")  # other words are several tokens of a vocabulary of 1,024
    for kind, folder, names in (
        ("encoder", BUILT_IN_MODEL, prompts["encoder"]),
        ("decoder", BUILT_IN_DECODER, sentiment),
    ):
        backend = Tokenizer.from_folder(folder).backend
        for prompt in (prompts[kind][name] for name in names):
            assert len(PromptTokenizer(backend, 128, prompt).label_tokens) == len(prompt.words)
    with pytest.raises(ValueError, match="the label word 'reason' must be one token of this model"):
        PromptTokenizer(backend, 128, prompts["decoder"]["TREC"])


def test_a_task_is_found_however_it_is_spelled():
    assert prompt_of(named("sst2"), "encoder") == prompt_of(named("SST-2"), "encoder")
    assert prompt_of(named("SST_2"), "encoder") == prompt_of(named("SST-2"), "encoder")
    assert prompt_of(named("SST-2"), "encoder").texts == 1 and prompt_of(named("MRPC"), "decoder").texts == 2
    with pytest.raises(
        ValueError, match="expected a prompt for weather under decoder, found those for SST-2, .*; give"
    ):
        prompt_of(named("weather"), "decoder")


def named(name, *labels):
    return Task(name, labels or ("negative", "positive"), ("accuracy",), {})


def test_label_words_are_given_by_number_or_by_label_name(tmp_path):
    words, names = {"positive": "great", "negative": "bad"}, ("negative", "positive")
    assert Prompt.from_dict({"template": "{text}", "words": words}, names).words == ("bad", "great")
    assert Prompt.from_dict({"template": "{text}", "words": {"1": "great", "0": "bad"}}, names).words == (
        "bad",
        "great",
    )
    assert Prompt.from_dict({"template": "{text}", "words": {"2": "b", "1": "a"}}, ("1", "2")).words == ("a", "b")
    message = r"expected words by class number \(0 to 1\), or by label name \(negative, positive\), found words for a"
    with pytest.raises(ValueError, match=message):
        Prompt.from_dict({"template": "{text}", "words": {"a": "x"}}, names)
    entry = {"template": "{text}", "words": words}
    (tmp_path / "prompts.json").write_text(json.dumps({"decoder": {"mine": entry, "yours": entry}}))
    for order, expected in ((names, ("bad", "great")), (names[::-1], ("great", "bad"))):
        assert prompt_of(named("mine", *order), "decoder", tmp_path / "prompts.json").words == expected
    with pytest.raises(ValueError, match="decoder, mine: expected words by class number .* found words for positive"):
        prompt_of(named("mine", "up", "down"), "decoder", tmp_path / "prompts.json")


@pytest.mark.parametrize("words", [("bad", "\ud800"), ("bad", " "), ("bad", "good")])
def test_half_a_character_in_a_prompt_is_an_error_with_its_position(words):
    template = "{text} \ud800" if words[1] == "good" else "{text}"
    message = "found an empty text: ' '" if words[1] == " " else r"found half of a surrogate pair.*: '.*ud800"
    with pytest.raises(ValueError, match=f"expected a template and label words that are text, {message}"):
        Prompt(template, words)


GOOD_ENTRY = {"template": "{text} {mask}", "words": {"0": "bad", "1": "good"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"encoders": {}}, "expected prompts by task under encoder and decoder, found the key 'encoders'"),
        ({"encoder": []}, "found the key 'encoder'"),
        ({"encoder": {"a": GOOD_ENTRY | {"word": 1}}}, "encoder, a: expected the keys template and words, found tem"),
        (
            {"encoder": {"a": {"template": "{text}"}}},
            "encoder, a: expected the keys template and words, found template",
        ),
        ({"encoder": {"a": []}}, "encoder, a: expected the keys template and words, found list"),
        ({"encoder": {"a": GOOD_ENTRY | {"template": 3}}}, "encoder, a: expected a template that is text, found 3"),
        (
            {"encoder": {"a": GOOD_ENTRY | {"words": {"0": "bad", "2": "good"}}}},
            "expected words by class number .*for 0, 2",
        ),
        ({"encoder": {"a": GOOD_ENTRY | {"words": ["bad", "good"]}}}, "encoder, a: expected words by class"),
        ({"encoder": {"a": GOOD_ENTRY | {"words": {"0": "bad", "1": 1}}}}, "encoder, a: expected words by class, as"),
        ({"encoder": {"a": GOOD_ENTRY | {"words": {"0": "bad"}}}}, "encoder, a: expected a label word for each of two"),
        ({"encoder": {"a": GOOD_ENTRY | {"template": "{text}"}}}, "encoder, a: template .* expected {mask}, which"),
        ({"decoder": {"a": GOOD_ENTRY}}, "decoder, a: template .* expected no {mask}"),
    ],
)
def test_a_wrong_key_or_value_in_the_file_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_text(json.dumps({"encoder": {"a": GOOD_ENTRY}}))
    assert prompt_of(named("a"), "encoder", path).to_dict() == GOOD_ENTRY


def test_a_wheel_carries_the_prompts():
    import tomllib

    packaging = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert PROMPTS.name in packaging["package-data"]["mini_ee.lab.data"]


# Layers that are left out


def test_the_layers_go_without_which_the_label_words_of_rows_are_missed_least():
    model, tokenizer = encoder_model(layers=7)
    encoded, labels = tokenizer.encode([[text] for (text,) in TEXTS]), torch.tensor([0, 1, 2, 0])
    run = SimpleNamespace(model=model, tokenizer=tokenizer)

    def missed(layers):
        total = 0.0
        for row, label in enumerate(labels.tolist()):
            inputs = encoded.batch([row])
            state, context = model.backbone.embed(inputs), model.backbone.context(inputs)
            for layer in layers:
                state = model.backbone.run_layers(state, context, layer, layer + 1)
            at = inputs.input_ids[0].tolist().index(tokenizer.mask_token_id)
            scores = model.backbone.lm_logits(state[0, at]).double().numpy()[list(tokenizer.label_tokens)]
            total += np.log(np.exp(scores).sum()) - scores[label]
        return total

    kept_layers = list(range(7))
    with torch.inference_mode():
        for _ in range(2):  # a third of 7
            others = [[layer for layer in kept_layers if layer != gone] for gone in kept_layers[1:-1]]
            kept_layers = min(others, key=missed)
        assert retrieval_measures._sleb_layers(run, encoded.batch(slice(None)), labels) == kept_layers


# Few shots


@pytest.fixture
def words_task():
    random_rows = np.random.default_rng(0)
    labels = random_rows.integers(0, 3, 90)
    texts = tuple((f"the {WORDS[2 + row % 4]} {' '.join(['very'] * (row // 4))}",) for row in range(90))
    return Task("words", ("bad", "good", "fine"), ("accuracy",), {"train": Split(texts, labels)})


def test_shots_are_so_many_of_each_class_apart_from_each_other_and_from_the_rest(words_task):
    split = words_task.split("train")
    train, held, rest = draw_shots(split, 3, 5, seed=1)
    assert np.bincount(train.labels).tolist() == np.bincount(held.labels).tolist() == [5, 5, 5]
    assert sorted(train.texts + held.texts + rest.texts) == sorted(split.texts)
    assert draw_shots(split, 3, 5, seed=1)[0].texts == train.texts != draw_shots(split, 3, 5, seed=2)[0].texts
    assert len(draw_shots(split, 3, 0, seed=1)[2]) == 90
    with pytest.raises(ValueError, match=r"expected 100 rows of class 0 for 50 shots, found \d+"):
        draw_shots(split, 3, 50, seed=1)


def test_a_prompt_for_other_classes_or_texts_than_the_tasks_is_refused(words_task):
    check_prompt(IT_WAS, words_task)
    with pytest.raises(ValueError, match=r"words has 3 classes and rows of 1 texts, the prompt 2 words \(bad, good\)"):
        check_prompt(PAIR, words_task)
    with pytest.raises(ValueError, match="a regression, for which no label word is right or wrong"):
        check_prompt(IT_WAS, replace(words_task, label_names=()))


def test_the_loss_of_few_shots_is_cross_entropy_over_the_label_words_at_the_last_layer(pair):
    model, tokenizer = pair
    encoded = tokenizer.encode(TEXTS)
    inputs, labels = encoded.batch(slice(None)), [2, 0, 1, 1]
    arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
    (stage,) = few_shot(model)
    batch = Batch(tuple(map(torch.from_numpy, arrays)), torch.tensor(labels), None, None)
    expected = []
    for ids, label in zip(encoded.ids, labels):
        logits = logits_by_hand(model, tokenizer, ids)[-1]
        expected.append(np.log(sum(np.exp(logits))) - logits[label])
    assert stage.loss(model, batch).item() == pytest.approx(np.mean(expected), abs=ATOL)
    assert stage.score(np.array([0.1, 0.2, 0.7])) == 0.7 and stage.trainable("backbone.layers.0.up.weight")


def test_a_checkpoint_on_disk_reads_as_its_backbone_does(checkpoint_folder):
    prompt = Prompt("{text} was {mask}", ("bad", "good"))
    tokenizer = PromptTokenizer(Tokenizer.from_folder(checkpoint_folder).backend, 24, prompt)
    model = PromptModel(load_backbone(checkpoint_folder), tokenizer)
    encoded = tokenizer.encode(["the film", "a very poor meal"])
    logits, *_ = read_every_exit(model.segments(), encoded.batch(slice(None)))
    for row, ids in enumerate(encoded.ids):
        np.testing.assert_allclose(logits[row], logits_by_hand(model, tokenizer, ids)[1:], atol=ATOL)


def test_logits_that_are_no_numbers_are_one_line(pair):
    model, tokenizer = pair
    inputs = tokenizer.encode(TEXTS).batch(slice(None))
    with torch.no_grad():
        model.backbone.layers[1].up.weight.fill_(3e38)
    with pytest.raises(
        ValueError, match="the logits of the label words must be finite, found NaN or infinity: "
    ) as info:
        read_every_exit(model.segments(), inputs)
    assert "\n" not in str(info.value)
    assert np.isfinite(OwnStates(model.backbone, 1)(inputs)).all()
    with pytest.raises(ValueError, match="the mean of the states must be finite, found NaN or infinity: "):
        OwnStates(model.backbone, 2)(inputs)
