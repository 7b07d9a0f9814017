"""Query embeddings: what is averaged, by whose name, and what it costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mini_ee.lab.backbones.backbone import padding_mask
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowSegments
from mini_ee.lab.methods.raee_encoders import OwnStates, SentenceEncoder
from mini_ee.lab.rules import Fixed

ATOL = 1e-5  # float32 means of states of rows alone against padded batches, in other orders of summation
TEXTS = (("the film was very good",), ("bad",), ("a song and a poor meal was dull",))


def mean_states_of_one(backbone, inputs, row, layer):
    """The oracle: one row alone, without its padding, averaged token by token in float64."""
    length = int(inputs.attention_mask[row].sum())
    ids, types = (
        torch.from_numpy(array[row : row + 1, :length]) for array in (inputs.input_ids, inputs.token_type_ids)
    )
    with torch.no_grad():
        states = backbone.hidden_states(ids, None, types)[layer][0].double()
    return (sum(states[t] for t in range(length)) / length).numpy()


@pytest.mark.parametrize("layer", [0, 2, 6])
def test_own_states_are_the_mean_over_the_tokens_of_the_row_after_the_layer(random_model, padded_inputs, layer):
    backbone = random_model().backbone
    states = OwnStates(backbone, layer)(padded_inputs)
    assert states.shape == (7, 24) and states.dtype == np.float32
    for row in range(7):
        np.testing.assert_allclose(
            states[row], mean_states_of_one(backbone, padded_inputs, row, layer), atol=ATOL, rtol=ATOL
        )


def test_a_layer_that_the_model_does_not_have_is_refused(random_model):
    for layer in (-1, 7):
        with pytest.raises(ValueError, match=f"the layer must be from 0 to 6, got {layer}"):
            OwnStates(random_model().backbone, layer)


def test_layer_0_costs_nothing_and_layer_l_what_the_loop_counts_for_l_layers(random_model, padded_inputs):
    model = random_model()
    assert OwnStates(model.backbone, 0).flops(padded_inputs) == 0
    segments = RowSegments(model)
    run = early_exit(segments, Fixed(1), padded_inputs)  # the exit after layer 2
    head = segments.flops(1, padded_inputs)[1]
    np.testing.assert_allclose(OwnStates(model.backbone, 2).flops(padded_inputs), run.cost.flops - head)


def test_a_name_is_of_the_weights_and_the_layer(checkpoint_folder):
    one, same, other = (load_backbone(checkpoint_folder) for _ in range(3))
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    assert OwnStates(one, 1).name == OwnStates(same, 1).name
    assert len({OwnStates(one, 1).name, OwnStates(one, 2).name, OwnStates(other, 1).name}) == 3


def test_a_sentence_encoder_reads_the_texts_with_its_own_tokenizer(checkpoint_folder, random_model):
    backbone = load_backbone(checkpoint_folder)
    encoded = Tokenizer.from_folder(checkpoint_folder).encode(TEXTS)
    inputs = encoded.batch(slice(None))
    mask = padding_mask(torch.from_numpy(inputs.attention_mask))
    assert mask is not None
    encoder = SentenceEncoder(checkpoint_folder)
    of_another_model = replace(inputs, input_ids=inputs.input_ids * 0 + 3)
    for row in range(3):
        expected = mean_states_of_one(backbone, inputs, row, 3)
        np.testing.assert_allclose(encoder(of_another_model)[row], expected, atol=ATOL, rtol=ATOL)
    assert encoder.flops(of_another_model) == OwnStates(backbone, 3).flops(inputs)
    longest, longer = (replace(inputs, texts=(("good " * words,),)) for words in (22, 60))  # of 24 tokens, two special
    np.testing.assert_array_equal(encoder(longer), encoder(longest))


def test_a_sentence_encoder_is_named_by_its_folders_content(checkpoint_folder, tmp_path):
    other = load_backbone(checkpoint_folder)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    save_backbone(other, tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((checkpoint_folder / name).read_bytes())
    assert SentenceEncoder(checkpoint_folder).name == SentenceEncoder(checkpoint_folder).name
    assert SentenceEncoder(checkpoint_folder).name != SentenceEncoder(tmp_path / "other").name


def test_an_encoder_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone: no sentence encoder here; expected a checkpoint"):
        SentenceEncoder(tmp_path / "gone")
