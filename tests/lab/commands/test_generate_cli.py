"""`mini-ee generate`, and the decoder that it has built in: text as it comes, and wrong input as one line."""

import math
import os
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import answer, refused, save_small_llama

from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, load_backbone
from mini_ee.lab.cli.generate import settled_length
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import file_sha256, read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import generate
from mini_ee.weights import pretrain_llama

SHARED = os.environ.get("MINI_EE_SHARED")
MOST_PERPLEXITY = 8  # of the built-in decoder on held-out stories; guessing by frequency alone has 298


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory):
    """A random 3-layer Llama over single bytes, with a context of 32 tokens."""
    folder = tmp_path_factory.mktemp("generate") / "llama"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return save_small_llama(folder, tokenizer, max_position_embeddings=32)


# ---- The answer ----


def test_the_json_answer_is_what_the_library_generates(capsys, decoder_folder):
    generated = answer(capsys, "generate", decoder_folder, "--prompt", "a bad cab", "--max-new-tokens", "12")
    ids = Tokenizer.from_folder(decoder_folder).backend.encode("a bad cab").ids
    (expected,) = gather(generate(load_backbone(decoder_folder), [ids], max_new_tokens=12), 1)
    assert generated["tokens"] == expected.tokens and generated["layers"] == [3] * 12
    assert (generated["mean_layers"], generated["layers_saved"], generated["prompt_tokens"]) == (3.0, 0.0, 9)
    assert generated["ended"] == "length" and generated["tokens_per_second"] > 0
    assert {"seed", "threads", "versions", "seconds", "model", "prompt"} <= generated.keys()


def test_what_streams_is_the_prompt_and_then_the_text_of_the_json_answer(capsys, decoder_folder):
    for seed in range(5):  # drawn bytes are often no character: none may be printed before it is whole
        argv = (decoder_folder, "--prompt", "é ", "--temperature", 2, "--seed", seed)
        generated = answer(capsys, "generate", *argv)
        assert main(["generate", *map(str, argv)]) == 0
        assert capsys.readouterr().out == "é " + generated["text"] + "\n"


def test_without_a_length_the_text_fills_the_context(capsys, decoder_folder):
    assert len(answer(capsys, "generate", decoder_folder, "--prompt", "abc")["tokens"]) == 32 - 3


def test_one_seed_gives_one_text_and_another_seed_another(capsys, decoder_folder):
    argv = (decoder_folder, "--prompt", "a", "--temperature", 1.5, "--top-k", 50, "--top-p", 0.9)
    one, again, other = (answer(capsys, "generate", *argv, "--seed", seed)["tokens"] for seed in (1, 1, 2))
    assert one == again != other


def test_the_text_ends_before_the_first_stop_text(capsys, decoder_folder):
    argv = (decoder_folder, "--prompt", "abc", "--temperature", 1.0)
    whole = answer(capsys, "generate", *argv)["text"]
    later, first = whole[9:12], whole[5:8]
    generated = answer(capsys, "generate", *argv, "--stop", later, "--stop", first)
    assert generated["text"] == whole[: whole.index(first)] and generated["ended"] == "stop"
    assert main(["generate", *map(str, argv), "--stop", first]) == 0
    assert capsys.readouterr().out == "abc" + generated["text"] + "\n"


def test_a_prompt_file_gives_the_text_of_its_prompt(capsys, decoder_folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("dé ab", encoding="utf-8")
    given = ("--prompt-file", path), ("--prompt", "dé ab")
    one, other = (answer(capsys, "generate", decoder_folder, *prompt) for prompt in given)
    assert one["tokens"] == other["tokens"]


@pytest.mark.parametrize(
    "text, settled", [("abc", 3), ("abc\ufffd", 3), ("It is an en", 9), ("It is an eno", 12), ("", 0)]
)
def test_half_a_character_and_the_beginning_of_a_stop_text_are_not_printed_yet(text, settled):
    assert settled_length(text, ["end", "zzz"]) == settled


# ---- Wrong input ----


@pytest.mark.parametrize(
    ("argv", "messages"),
    [
        (("--prompt", ""), ["mini-ee generate: --prompt: expected a prompt, found no text"]),
        (("--prompt-file", "empty.txt"), ["empty.txt: expected a prompt"]),
        (("--prompt-file", "latin.txt"), ["latin.txt: expected text in UTF-8", "at byte 1"]),
        (("--prompt-file", "none.txt"), ["none.txt"]),
        (("--prompt", "abcd" * 10), ["expected at most 32 tokens, prompt and continuation together, got 40 and 1"]),
        (("--prompt", "abcd", "--max-new-tokens", 29), ["got 4 and 29"]),
        (("--prompt", "a", "--temperature", "-1"), ["temperature must be 0 (greedy) or at least"]),
        (("--prompt", "a", "--temperature", "1", "--top-p", "0"), ["top_p must be from 1e-06 to 1"]),
        (("--prompt", "a", "--top-k", "3"), ["--top-k is for sampling: give a --temperature above 0"]),
        (("--prompt", "a", "--repetition-penalty", "0"), ["repetition_penalty must be from 1e-06"]),
        (("--prompt", "a", "--stop", ""), ["--stop: expected some text"]),
        (("--prompt", "a", "--prompt-file", "b"), ["not allowed with"]),
        ((), ["one of the arguments --prompt --prompt-file is required"]),
    ],
)
def test_a_wrong_value_is_refused(capsys, tmp_path, monkeypatch, decoder_folder, argv, messages):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("latin.txt").write_bytes("né".encode("latin-1"))
    line = refused(capsys, "generate", decoder_folder, *argv, status=2)
    assert all(message in line for message in messages)


def test_an_encoder_is_refused(capsys, checkpoint_folder):
    line = refused(capsys, "generate", checkpoint_folder, "--prompt", "the film", status=2)
    assert "holds a bert, which writes no text; give one of " in line and "llama, gemma, phi" in line


# ---- The recipe ----


def test_windows_contain_every_token_of_the_stream_once_and_overlap_by_one_token(monkeypatch):
    monkeypatch.setattr(pretrain_llama, "CONTEXT", 4)
    documents = [[0, 1, 2], [0, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    rng = pretrain_llama.np.random.default_rng(0)
    windows = pretrain_llama.windows(documents, rng).tolist()
    assert all(len(window) == 5 for window in windows) and windows[0][-1] == windows[1][0]
    stream = windows[0] + [token for window in windows[1:] for token in window[1:]]
    stories = "".join(map(str, stream)).split("0")[1:-1]
    assert {"".join(map(str, document[1:])) for document in documents} >= set(stories) and stories


def test_an_epoch_contains_every_story_and_its_shares_of_other_documents(monkeypatch):
    monkeypatch.setattr(pretrain_llama, "CONTEXT", 10)
    documents = [[[0] + [kind] * 4 for _ in range(200)] for kind in (1, 2, 3)]
    stories, others = documents[0], [(documents[1], 0.3), (documents[2], 0.1)]
    windows_of_an_epoch = 200 * 5 * 10 // 6 // 10
    stream = pretrain_llama.batches(stories, others, size=2, seed=0)
    seen = torch.cat([next(stream) for _ in range(windows_of_an_epoch // 2)])[:, :-1]
    for kind, share in ((1, 0.6), (2, 0.3), (3, 0.1)):
        assert (seen == kind).sum() / (seen > 0).sum() == pytest.approx(share, abs=0.02)
    assert (seen == 1).sum() >= 4 * 200 - 30  # what the last windows cut off


def test_sampled_stories_are_those_that_ended_and_are_written_once(monkeypatch, tmp_path, decoder_checkpoint):
    copy = shutil.copytree(decoder_checkpoint, tmp_path / "weights" / "stories260K")
    config = {key: value for key, value in read_json(copy / "config.json").items() if key != "sha256"}
    write_json(copy / "config.json", config | {"bos_token_id": 1, "eos_token_id": [2, 3, 4]})
    monkeypatch.setattr(pretrain_llama, "SAMPLED_ROWS", 8)
    written = []

    def counted(*given, **settings):
        for step in generate(*given, **settings):
            written.append(step)
            yield step

    monkeypatch.setattr(pretrain_llama, "generate", counted)
    stories = pretrain_llama.sampled_stories(tmp_path, tmp_path / "sampled", 16, seed=0)
    steps = len(written)
    assert 0 < len(stories) < 16 and all(stories) and steps
    assert (
        pretrain_llama.sampled_stories(tmp_path, tmp_path / "sampled", 16, seed=0) == stories and len(written) == steps
    )
    (tmp_path / "sampled" / "000008.txt").unlink()  # killed before the second batch
    assert pretrain_llama.sampled_stories(tmp_path, tmp_path / "sampled", 16, seed=0) == stories


def test_held_out_stories_are_of_the_last_tenth_and_none_was_trained_on(tmp_path):
    stories = [f"story {i} " + "word " * 20 for i in range(40)] + ["story 3 " + "word " * 20, "cut"]
    (tmp_path / "s.txt").write_text("<|endoftext|>".join(stories))
    train, held_out = pretrain_llama.read_stories(tmp_path / "s.txt")
    assert len(train) in (35, 36, 37) and 2 <= len(held_out) <= 4
    assert not set(train) & set(held_out) and "cut" not in held_out


def test_the_rate_warms_up_stays_and_ends_at_nearly_nothing():
    args = pretrain_llama.parse(["--shared", ".", "--out", ".", "--state", ".", "--steps", "100", "--warm-up", "10"])
    rates = [pretrain_llama.learning_rate(step, args) for step in range(1, 101)]
    assert rates[:10] == [pytest.approx(args.lr * step / 10) for step in range(1, 11)]
    assert set(rates[10:81]) == {args.lr} and rates[-1] == pytest.approx(args.lr / 20)
    assert all(now > later for now, later in zip(rates[81:], rates[82:]))


# ---- The built-in decoder ----


@pytest.fixture(scope="module")
def built_in():
    tokenizer = Tokenizer.from_folder(BUILT_IN_DECODER).backend
    tokenizer.no_truncation()
    return load_backbone(BUILT_IN_DECODER), tokenizer


def test_the_built_in_decoder_has_12_layers_of_width_256_and_its_tokenizers_vocabulary(built_in):
    decoder, tokenizer = built_in
    config = decoder.config
    assert (config.num_hidden_layers, config.hidden_size) == (12, 256)
    assert config.vocab_size == tokenizer.get_vocab_size() == 1024
    assert tokenizer.token_to_id("<|endoftext|>") == config.bos_token_id == config.eos_token_id == 0


def test_its_tokenizer_gives_every_text_back_and_begins_with_the_bos_token(built_in):
    _, tokenizer = built_in
    for text in ('Once upon a time, Lily said "Hi!"\n\nThe end.', " two  spaces ", "é 漢 🙂", "x" * 50):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0 and tokenizer.decode(ids) == text


def test_it_prefers_a_story_to_the_same_words_in_reverse(built_in):
    decoder, tokenizer = built_in
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    losses = []
    for text in (story, " ".join(reversed(story.split()))):
        with torch.inference_mode():
            losses.append(pretrain_llama.next_token_loss(decoder, torch.tensor([tokenizer.encode(text).ids])).item())
    assert losses[0] < losses[1] - 1


def test_it_continues_a_prompt_with_words(capsys):
    generated = answer(capsys, "generate", "--prompt", "Once upon a time, there was a little", "--max-new-tokens", 20)
    assert generated["model"] == str(BUILT_IN_DECODER) and generated["text"].count(" ") >= 10


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_its_loss_on_held_out_stories_is_the_one_in_its_recipe(built_in):
    """The weights are those that the recipe measured. MINI_EE_FULL=1 measures them on all stories again."""
    decoder, tokenizer = built_in
    assert file_sha256(BUILT_IN_DECODER / "model.safetensors").startswith("2a8833dd1232d5c0")
    _, held_out = pretrain_llama.read_stories(Path(SHARED) / "data" / "TinyStories" / "tinystories_sample.txt")
    recipe = read_json(BUILT_IN_DECODER / "recipe.json")["held_out"]
    assert recipe["perplexity"] == pytest.approx(math.exp(recipe["loss"]), abs=0.01)
    assert recipe["perplexity"] < MOST_PERPLEXITY < math.exp(recipe["unigram_loss"])
    full = "MINI_EE_FULL" in os.environ
    stories, loss = (held_out, recipe["loss"]) if full else (held_out[:8], 2.0524)
    documents = [tokenizer.encode(text).ids + [0] for text in stories]
    scores = pretrain_llama.held_out_scores(decoder, documents, sum(len(text.encode()) for text in stories))
    assert scores["loss"] == pytest.approx(loss, abs=1e-3)
