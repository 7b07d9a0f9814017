"""Folders of sentence encoders are read as sentence-transformers reads them; what is not known is refused by name."""

import json
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import ENCODED as TEXTS
from safetensors.numpy import load_file
from safetensors.torch import save_file

import mini_ee
from mini_ee.lab.backbones.fine_tuned import is_sentence_encoder, label_names
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone
from mini_ee.lab.backbones.sentence_encoder import SentenceModules, sentence_modules
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.sentence_files import transformer_folder
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run
from mini_ee.serve.formats import formats_of

WIDTH, POSITIONS = 16, 24
LONG = " ".join(TEXTS[:9])
PROBES = (*TEXTS[:3], LONG, "Very GOOD Film", "the film")
OLD, NEW = "sentence_transformers.models.{}", "sentence_transformers.sentence_transformer.modules.{}"
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"
NORMALIZE = {"kind": "normalize"}
MEAN = {"pooling_mode": "mean", "embedding_dimension": WIDTH}
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def dense(out=8, activation=TANH, **config):
    return {"in_features": WIDTH, "out_features": out, "bias": True, "activation_function": activation} | config


def modules_of(kinds, transformer="", style=OLD):
    paths = [transformer, "1_Pooling", *(f"{number}_{kind}" for number, kind in enumerate(kinds[2:], 2))]
    return [
        {"idx": number, "name": str(number), "path": path, "type": style.format(kind)}
        for number, (kind, path) in enumerate(zip(kinds, paths))
    ]


def described(folder, *after, transformer="", pooling=MEAN, style=OLD, bert=None, model=None, limit=None):
    """Writes the side files. after: "Normalize", or the config of a Dense, whose weights are drawn."""
    kinds = ["Transformer", "Pooling", *("Dense" if isinstance(entry, dict) else entry for entry in after)]
    write(folder / "modules.json", modules_of(kinds, transformer, style))
    write(folder / "1_Pooling" / "config.json", pooling)
    for number, module in enumerate(after, 2):
        if isinstance(module, dict):
            write(folder / f"{number}_Dense" / "config.json", module)
            draw = torch.Generator().manual_seed(number)
            names = {
                "linear.weight": (module["out_features"], module["in_features"]),
                "linear.bias": (module["out_features"],),
            }
            drawn = {name: 0.4 * torch.randn(shape, generator=draw) for name, shape in names.items()}
            drawn = drawn if module.get("bias", True) else {"linear.weight": drawn["linear.weight"]}
            save_file(drawn, folder / f"{number}_Dense" / "model.safetensors")
    for name, content in (
        (f"{transformer or '.'}/sentence_bert_config.json", bert),
        ("config_sentence_transformers.json", model),
    ):
        if content is not None:
            write(folder / name, content)
    if limit is not None:
        write(folder / transformer / "tokenizer_config.json", {"model_max_length": limit})
    return folder


def copied(encoder_folder, folder):
    """The transformer of a sentence encoder, without the encoder's other files."""
    return shutil.copytree(encoder_folder, folder, ignore=shutil.ignore_patterns("modules.json", "1_Pooling"))


# ---- What the files say ----
ENTRIES = {
    "since 5.4": ({"pooling": MEAN | {"include_prompt": True}, "style": NEW}, {}),
    "cls": ({"pooling": {"pooling_mode": "cls"}}, {"pool": "first"}),
    "one in a list": ({"pooling": {"pooling_mode": ["lasttoken"]}}, {"pool": "last"}),
    "before 5.4": ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}, {"pool": "first"}),
    "none is true": ({"pooling": {"pooling_mode_mean_tokens": False}}, {"pool": "mean"}),
    "the newer key counts": ({"pooling": {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}}, {"pool": "first"}),
    "lower": ({"bert": {"max_seq_length": 7, "do_lower_case": True}}, {"max_length": 7, "lower": True}),
    "tokenizer": ({"limit": 9}, {"max_length": 9}),
    "no limit": ({"limit": 1e30, "bert": {"max_seq_length": None}}, {"max_length": POSITIONS}),
    "arguments": ({"bert": {"tokenizer_args": {"model_max_length": 5}, "max_seq_length": 9}}, {"max_length": 5}),
    "text only": ({"bert": {"modality_config": TEXT, "module_output_name": "token_embeddings"}}, {}),
    "prompts": (
        {"model": {"prompts": {"query": "film: ", "other": None}, "default_prompt_name": "query", "truncate_dim": 4}},
        {"prompts": {"query": "film: ", "document": "", "other": ""}, "default_prompt": "query", "size": 4},
    ),
    "include_prompt without prompts": ({"pooling": MEAN | {"include_prompt": False}}, {}),
    "harmless": ({"model": {"__version__": {}, "similarity_fn_name": "dot", "model_type": "SentenceTransformer"}}, {}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_of_a_side_file_counts(name, encoder_folder, tmp_path):
    given, expected = ENTRIES[name]
    folder = described(copied(encoder_folder, tmp_path / "st"), **given)
    assert sentence_modules(folder) == SentenceModules(**{"max_length": POSITIONS} | expected)


def test_modules_are_read_in_their_order_and_from_their_folders(encoder_folder, tmp_path):
    copied(encoder_folder, tmp_path / "st" / "0_Transformer")
    after = ("Normalize", dense(8), "Dropout", dense(5, IDENTITY, in_features=8, bias=False), "Normalize")
    folder = described(tmp_path / "st", *after, transformer="0_Transformer")
    first = {"kind": "dense", "path": "3_Dense", "in_features": WIDTH, "out_features": 8}
    second = {"kind": "dense", "path": "5_Dense", "in_features": 8, "out_features": 5}
    expected = (NORMALIZE, first | {"bias": True, "activation": "tanh"})
    assert sentence_modules(folder).modules == (
        *expected,
        second | {"bias": False, "activation": "identity"},
        NORMALIZE,
    )
    assert (
        transformer_folder(folder) == folder / "0_Transformer" and transformer_folder(encoder_folder) == encoder_folder
    )
    assert backbone_sha256(folder) == backbone_sha256(encoder_folder)
    older = described(copied(encoder_folder, tmp_path / "older"))
    write(older / "sentence_xlm-roberta_config.json", {"max_seq_length": 6})
    assert sentence_modules(older).max_length == 6
    assert sentence_modules(copied(encoder_folder, tmp_path / "bare")) == SentenceModules(max_length=POSITIONS)


REFUSED = {
    "max": ({"pooling": {"pooling_mode": "max"}}, "1_Pooling/config.json: expected a pooling of mean, cls, lasttoken"),
    "two": ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "found cls with mean"),
    "old two": ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "found cls with mean"),
    "prompt outside": (
        {"pooling": MEAN | {"include_prompt": False}, "model": {"prompts": {"query": "film: "}}},
        "1_Pooling/config.json: expected include_prompt as true, found False",
    ),
    "pooling key": ({"pooling": MEAN | {"weights": 1}}, "1_Pooling/config.json: weights: not supported"),
    "length": ({"bert": {"max_seq_length": 0}}, "sentence_bert_config.json: expected max_seq_length"),
    "task": ({"bert": {"transformer_task": "fill-mask"}}, 'expected transformer_task as "feature-extraction"'),
    "images": (
        {"bert": {"modality_config": TEXT | {"image": {}}}},
        "sentence_bert_config.json: expected modality_config",
    ),
    "processing": ({"bert": {"processing_kwargs": {"text": {"max_length": 4}}}}, "expected processing_kwargs"),
    "argument": ({"bert": {"config_args": {"is_decoder": True}}}, "config_args holds is_decoder: not supported"),
    "query length": ({"bert": {"query_length": 4}}, "expected query_length as null, found 4"),
    "bert key": ({"bert": {"odd": 1}}, "sentence_bert_config.json: odd: not supported"),
    "sparse": ({"model": {"model_type": "SparseEncoder"}}, 'expected model_type as "SentenceTransformer"'),
    "model key": ({"model": {"query_prefix": "[Q]"}}, "config_sentence_transformers.json: query_prefix: not supported"),
    "default": (
        {"model": {"default_prompt_name": "odd"}},
        "default_prompt_name: expected as prompt name one of query, document, found odd",
    ),
    "prompt": ({"model": {"prompts": {"query": 1}}}, "expected the prompt query as a text, found 1"),
    "size": ({"model": {"truncate_dim": 0}}, "expected truncate_dim"),
    "activation": ({"after": [dense(activation="own.Act")]}, "2_Dense/config.json: expected activation_function"),
    "residual": ({"after": [dense(use_residual=True)]}, "expected use_residual as false, found True"),
    "tokens": (
        {"after": [dense(module_input_name="token_embeddings")]},
        "2_Dense/config.json: expected module_input_name",
    ),
    "foreign": (
        {"style": "custom_st.{}"},
        "modules.json: expected modules of a SentenceTransformer, found custom_st.",
    ),
    "module": ({"after": ["LayerNorm"]}, "found Transformer, Pooling, LayerNorm: not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_change_an_embedding_and_is_not_known_is_refused(name, encoder_folder, tmp_path):
    given, message = REFUSED[name]
    folder = described(copied(encoder_folder, tmp_path / "st"), *given.pop("after", ()), **given)
    with pytest.raises(ValueError) as error:
        sentence_modules(folder)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


RERANKERS = {
    "as saved": ({}, {"activation_fn": "torch.nn.modules.activation.Sigmoid", "prompts": {"query": "film "}}, None),
    "prompt": ({}, {"prompts": {"query": "film "}, "default_prompt_name": "query"}, "the prompt query stands before"),
    "lower": ({"do_lower_case": True}, {}, "sentence_bert_config.json: expected do_lower_case as false, found True"),
    "length": ({"max_seq_length": 7}, {}, "max_seq_length is 7, not None; write it as model_max_length"),
    "scores": ({"transformer_task": "text-generation"}, {}, 'expected transformer_task as "sequence-classification"'),
}


@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_that_its_library_reads_in_another_way_is_refused(name, classifier_folder, tmp_path):
    bert, model, message = RERANKERS[name]
    folder = shutil.copytree(classifier_folder, tmp_path / "st")
    write(folder / "modules.json", modules_of(["Transformer"], style="sentence_transformers.base.modules.{}"))
    write(folder / "sentence_bert_config.json", bert)
    write(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"} | model)
    if message is None:
        assert label_names(folder) == label_names(classifier_folder)
        message, _ = "expected Transformer alone", write(folder / "modules.json", modules_of(["Transformer", "Dense"]))
    with pytest.raises(ValueError) as error:
        label_names(folder)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_length_beyond_relative_positions_is_refused_and_one_beyond_absolute_positions_is_cut(
    encoder_folder, tmp_path
):
    folder = described(copied(encoder_folder, tmp_path / "st"), bert={"max_seq_length": 99})
    assert sentence_modules(folder).max_length == 99  # the model cannot read more than its positions
    write(
        folder / "config.json",
        {"model_type": "deberta-v2", "position_biased_input": False, "max_position_embeddings": 64},
    )
    with pytest.raises(ValueError, match="max_seq_length is 99, and the model has 64 positions"):
        sentence_modules(folder)


def test_damaged_lists_of_modules_are_refused(encoder_folder, tmp_path):
    folder = described(copied(encoder_folder, tmp_path / "st"), dense())
    two = modules_of(["Transformer", "Pooling"])
    for modules, message in (
        ({}, "expected a list of modules"),
        ([], "expected Transformer, Pooling, and then"),
        ([{"type": "a.B"}], "expected a list of modules with type and path"),
        (two[::-1], "found Pooling, Transformer"),
        ([two[0] | {"path": "../other"}, two[1]], "expected paths inside the folder"),
        ([two[0], two[1] | {"name": "0"}], "expected a name for each module, found 0, 0"),
        ([two[0] | {"kwargs": ["task"]}, two[1]], "expected kwargs as"),
    ):
        write(folder / "modules.json", modules)
        with pytest.raises(ValueError, match=message):
            sentence_modules(folder)
    write(folder / "modules.json", modules_of(["StaticEmbedding"]))
    for read in (load_backbone, Tokenizer.from_folder, is_sentence_encoder):
        with pytest.raises(
            ValueError, match="modules.json: expected a Transformer among the modules, found StaticEmbedding"
        ):
            read(folder)
    (folder / "modules.json").unlink()
    assert sentence_modules(folder) == SentenceModules(max_length=POSITIONS)  # a bare transformer
    write(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    with pytest.raises(
        ValueError, match="modules.json: no such file, and .*1_Pooling/config.json names the pooling first"
    ):
        sentence_modules(folder)
    shutil.rmtree(folder / "1_Pooling")
    write(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    with pytest.raises(ValueError, match="expected a tokenizer without chat template"):
        sentence_modules(folder)


# ---- What comes out ----
@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def trained(folder, texts_file, out, method="embedding-maps", **options):
    return mini_ee.train(method, folder, texts_file, out, epochs=1, **options)


def full(model, texts, **given):
    """The embeddings of the last exit."""
    return (
        model.embed(texts, rule=Never(), **given)
        if isinstance(model, Runtime)
        else model._replace(rule=Never()).embed(texts, **given)
    )


def test_dense_modules_prompts_and_lower_case_reach_the_run_and_the_export(encoder_folder, texts_file, tmp_path):
    copied(encoder_folder, tmp_path / "st" / "0_Transformer")
    after = (dense(12), dense(20, IDENTITY, in_features=12, bias=False), "Normalize")
    model = {"prompts": {"query": "GOOD film ", "plain": ""}, "default_prompt_name": "query"}
    bert = {"do_lower_case": True, "max_seq_length": 12}
    folder = described(tmp_path / "st", *after, transformer="0_Transformer", bert=bert, model=model)
    backbone, words = load_backbone(encoder_folder), Tokenizer.from_folder(encoder_folder, 12)
    first, second = (load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
    trained(folder, texts_file, tmp_path / "run")
    run = load_run(tmp_path / "run")
    mini_ee.export(run, tmp_path / "exported")
    shutil.rmtree(folder / "2_Dense")  # the run contains it
    assert run.exits == (1, 2, 3) and (folder / "3_Dense").is_dir()
    for prompt_name, prompt in ((None, "good film "), ("query", "good film "), ("plain", "")):
        for text in PROBES:
            inputs = words.encode([prompt + text.lower()]).batch(slice(None))
            tensors = map(torch.from_numpy, (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))
            with torch.no_grad():
                pooled = backbone(*tensors)[0].mean(dim=0).numpy()
            expected = second["linear.weight"] @ np.tanh(first["linear.weight"] @ pooled + first["linear.bias"])
            expected /= np.linalg.norm(expected)
            for either in (load_run(tmp_path / "run"), Runtime(tmp_path / "exported")):
                np.testing.assert_allclose(full(either, [text], prompt_name=prompt_name)[0], expected, atol=2e-6)


def test_the_encoders_own_size_cuts_after_its_norm_and_size_before(encoder_folder, texts_file, tmp_path):
    folder = described(copied(encoder_folder, tmp_path / "st"), "Normalize", model={"truncate_dim": 5})
    plain = trained(described(copied(encoder_folder, tmp_path / "plain")), texts_file, tmp_path / "full")
    expected = full(plain, PROBES)
    embeddings = full(trained(folder, texts_file, tmp_path / "own"), PROBES)
    np.testing.assert_allclose(
        embeddings, (expected / np.linalg.norm(expected, axis=1, keepdims=True))[:, :5], atol=1e-6
    )
    cut = full(trained(folder, texts_file, tmp_path / "cut", size=4), PROBES)
    np.testing.assert_allclose(cut, expected[:, :4] / np.linalg.norm(expected[:, :4], axis=1, keepdims=True), atol=1e-6)


def test_maps_start_as_the_linear_part_of_the_modules(encoder_folder):
    modules = [
        {
            "kind": "dense",
            "path": "2_Dense",
            "in_features": WIDTH,
            "out_features": 6,
            "bias": True,
            "activation": "tanh",
        }
    ]
    model = EmbeddingExits(load_backbone(encoder_folder), (1, 3), 5, "mean", False, modules=modules)
    state = torch.randn(4, WIDTH)
    torch.testing.assert_close(model.classify(0, state), model.heads[1].after.maps[0](state)[:, :5])
    assert model.heads[1].flops(7) == 7 * WIDTH + 2 * WIDTH * 6
    with pytest.raises(ValueError, match="2_Dense: expected in_features 16, found 8"):
        EmbeddingExits(load_backbone(encoder_folder), (3,), 5, "mean", False, modules=[modules[0] | {"in_features": 8}])


def test_each_exit_of_a_trained_encoder_has_the_modules(encoder_folder, texts_file, tmp_path):
    folder = described(copied(encoder_folder, tmp_path / "st"), dense(6), "Normalize")
    run = trained(folder, texts_file, tmp_path / "run", "2dmse", exits=(1, 3))
    weights = load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"]
    moved = [float(abs(head.after.maps[0].weight.numpy(force=True) - weights).max()) for head in run.model.heads]
    assert all(0 < most < 0.05 for most in moved) and full(run, PROBES).shape == (len(PROBES), 6)


def test_weights_of_a_module_in_another_format_are_refused(encoder_folder, texts_file, tmp_path):
    folder = described(copied(encoder_folder, tmp_path / "st"), dense())
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"2_Dense/model.safetensors: no such file; only safetensors are read, con"
    ):
        trained(folder, texts_file, tmp_path / "run")


def test_commands_read_the_transformers_own_folder_and_named_prompts(
    encoder_folder, texts_file, task_folder, tmp_path, capsys
):
    copied(encoder_folder, tmp_path / "st" / "0_Transformer")
    model = {"prompts": {"query": "good film "}}
    folder, out = described(tmp_path / "st", transformer="0_Transformer", model=model), tmp_path / "fast"
    add = ["add-exits", folder, "--text", texts_file, "--out", out, "--cosine", "-1", "--prompt-name"]
    embed = ["embed", out / "exported", texts_file, "--out", tmp_path / "a.npy", "--prompt-name"]

    def called(*words):
        assert main([str(word) for word in words]) == 0

    def refused(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "expected as prompt name one of query, document, found odd" in line

    refused(*add, "odd")
    called(*add, "query")
    runtime = Runtime(out / "exported")
    plain, named = (runtime.embed(TEXTS, prompt_name=name) for name in ("document", "query"))
    np.testing.assert_allclose(runtime.embed(TEXTS), named)  # the prompt that its exits have learned
    assert abs(named - plain).max() > 1e-2
    refused(*embed, "odd")
    called(*embed, "document")
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), plain, atol=1e-6)
    called("estimate", folder, "--text", texts_file)
    called("train", "joint", "--model", folder, "--task", task_folder, "--out", tmp_path / "joint", "--epochs", "1")


def test_requests_of_text_embeddings_inference_name_prompts(encoder_folder, texts_file, tmp_path):
    folder = described(copied(encoder_folder, tmp_path / "st"), model={"prompts": {"query": "good film "}})
    mini_ee.export(trained(folder, texts_file, tmp_path / "run"), tmp_path / "exported")
    runtime = Runtime(tmp_path / "exported")
    read, like_openai = (formats_of(runtime)[path].rows for path in ("/embed", "/v1/embeddings"))
    assert like_openai(runtime, {"input": "a", "prompt_name": "query"}) == [("good film a",)]
    for fields, expected in (
        ({"prompt_name": "query"}, "good film the book"),
        ({"prompt_name": None}, "the book"),
        ({}, "the book"),
    ):
        rows = read(runtime, {"inputs": "the book"} | fields)
        assert runtime.encode(rows).ids[0].tolist() == runtime.tokenizer.ids_of(expected)
        assert pickle.loads(pickle.dumps(rows[0])) == rows[0] and type(pickle.loads(pickle.dumps(rows[0]))[0]) is type(
            rows[0][0]
        )
    with pytest.raises(ValueError, match="one of query, document, found odd"):
        read(runtime, {"inputs": "the book", "prompt_name": "odd"})


# ---- The library itself ----
def drawn_folder(draw, encoder_folder, folder):
    """A folder of sentence-transformers with entries that are drawn, some of them not supported."""
    transformer = draw.choice(["", "", "0_Transformer"])
    copied(encoder_folder, folder / transformer)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer |= draw.choice([{}, {"model_max_length": 9}, {"model_max_length": 1e30}])
    write(folder / transformer / "tokenizer_config.json", tokenizer)
    after, width = [], WIDTH
    for kind in draw.choices(["Dense", "Normalize", "Dropout"], [6, 4, 1], k=draw.randint(0, 3)):
        if kind == "Dense":
            out = draw.choice([4, 12, 20])
            after.append(dense(out, draw.choice([TANH, IDENTITY]), in_features=width, bias=draw.random() < 0.7))
            after[-1] |= draw.choices([{}, {"use_residual": True}], [9, 1])[0]
            width = out
        else:
            after.append(kind)
    old = {f"pooling_mode_{name}_tokens": draw.random() < 0.3 for name in ("mean", "max")}
    old |= {"pooling_mode_cls_token": draw.random() < 0.3, "pooling_mode_lasttoken": draw.random() < 0.2}
    new = {"pooling_mode": draw.choices(["mean", "cls", "lasttoken", "max", ["cls", "mean"]], [4, 3, 3, 1, 1])[0]}
    pooling = draw.choice([old, new, new, old | new]) | {"embedding_dimension": WIDTH}
    pooling |= draw.choice([{}, {"include_prompt": True}, {"include_prompt": False}])
    bert = {"max_seq_length": draw.choice([None, 6, 15])} | draw.choice([{}, {"do_lower_case": True}])
    bert |= draw.choices([{}, {"tokenizer_args": {"model_max_length": 8}}, {"query_length": 9}], [8, 1, 1])[0]
    model = {"prompts": draw.choice([{}, {"query": "good film "}, {"other": "the book ", "document": ""}])}
    model |= draw.choice([{}, {"default_prompt_name": "query"}, {"default_prompt_name": "other"}])
    model |= draw.choices([{}, {"truncate_dim": 3}, {"truncate_dim": 50}], [6, 1, 1])[0]
    given = {"bert": draw.choice([None, bert, bert]), "model": draw.choice([None, model, model])}
    return described(folder, *after, transformer=transformer, pooling=pooling, style=draw.choice([OLD, NEW]), **given)


def test_drawn_folders_give_the_librarys_embeddings_or_are_refused(encoder_folder, texts_file, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    draw, equal = random.Random(0), 0
    for number in range(30):
        folder = drawn_folder(draw, encoder_folder, tmp_path / f"st{number}")
        try:
            run = trained(folder, texts_file, tmp_path / f"run{number}", exits=(3,))
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
            continue
        reader = library.SentenceTransformer(str(folder), device="cpu")
        for name in (None, *reader.prompts):
            expected = reader.encode(list(PROBES), prompt_name=name)
            np.testing.assert_allclose(full(run, PROBES, prompt_name=name), expected, atol=1e-5)
        equal += 1
    assert equal >= 10
