"""Tokens exit: a decoder learns from generated texts or those of a file, and its tokens exit early."""

from dataclasses import replace

from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, check_generates, empty_backbone, generates, without_memory
from mini_ee.lab.data.files import json_sha256
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.training.run_folder import read_trained
from mini_ee.lab.training.train_run import build_checked
from mini_ee.lab.training.train_settings import KINDS, CommonOptions, TextOptions
from mini_ee.lab.training.training_text import MEASURE, Source, agreement_rule, check_count, texts_to_learn
from mini_ee.lab.training.unit import TrainingData, Unit, is_labelled


class TokenUnit(Unit):
    """A token that a decoder generates."""

    name = "tokens"
    noun = "tokens"
    generates = True
    default_measure = MEASURE
    built_in = BUILT_IN_DECODER
    options = CommonOptions, TextOptions
    task_help = "kind of a decoder's training text: continue (the ends of stories) or copy (sentences)"
    options_help = "text for a decoder, if --task is not a folder"

    def wants(self, model_type, task):
        return not is_labelled(task) and (model_type is None or generates(model_type) or task in KINDS)

    def check_source(self, model, model_type, task):
        if model_type is not None:
            check_generates(model, model_type)
        if is_labelled(task):
            raise WrongArguments(
                "this method is for tokens of decoders: give --model a decoder, and no folder with --task"
            )
        if task is not None and task not in KINDS:
            raise WrongArguments(
                f"--task: expected a task's folder, or for a decoder {' or '.join(KINDS[1:])}, found {task}"
            )

    def implied(self, task):
        return {"kind": task} if task in KINDS else {}

    def opened(self, request, task, source):
        name = request.name
        if source.kind == "pieces" != request.method.defaults.get(self.name, {}).get("kind"):
            raise WrongArguments(
                f"--task pieces: {name} needs labels at the end of a text, and pieces have none; give continue"
            )
        if source.kind != "pieces" and (source.prompt or source.greedy):
            given = "prompt" if source.prompt else "greedy"
            raise WrongArguments(f"--{given}: {name} learns from stories, which need no prompt; leave it out")
        check_count(source)
        return replace(request, texts=source)

    def exit_count(self, method):
        return 4

    def with_last(self, exits, num_layers):
        return exits if exits[-1] == num_layers else (*exits, num_layers)  # the LM head is always there

    def about(self, request):
        return {"text": request.texts.to_dict(), "rank": request.texts.rank}

    def data(self, request, backbone, tokenizer, about, say):
        exits = about["exits"]
        if len(exits) < 2 and "exits" not in request.method.lacks:
            raise WrongArguments(f"--exits: expected exits before the last layer, got only {exits[0]}")
        with without_memory():  # a model that cannot be built is refused before texts are generated
            build_checked(request, empty_backbone(backbone.config.to_dict(), lm_head=True), about)
        source = Source(backbone, tokenizer, request.texts, request.seed)
        train, held = texts_to_learn(source)
        learners = f"{len(exits) - 1} heads on {request.model.name} learn"
        who = learners if len(exits) > 1 else f"{request.model.name} reads"
        say(f"{who} {_tokens(train)} tokens of {len(train)} texts.")
        digest = json_sha256({"train": [text.ids for text in train.texts], "held": [text.ids for text in held.texts]})
        return TrainingData(train, held, source, {"text": about["text"], "data": digest})

    def conclude(self, request, model, fitted, data):
        model.fold()
        chosen = (request.method.default_rule or agreement_rule)(model, data.more, data.held)
        metrics = {"epochs": fitted.epochs, "history": fitted.metrics, "exits": list(model.exits)} | chosen.about
        metrics |= {"texts": len(data.train), "tokens": _tokens(data.train)}
        for stage in request.method.recipe(model, request.config) if request.method.has_stages else ():
            metrics |= stage.log_metrics(model, data.held) if stage.log_metrics else {}  # of the best epoch
        return chosen, metrics

    def build(self, method, backbone, exits, config):
        return TokenExits(backbone, exits, "copy", method.policy, config["rank"])

    def read(self, folder, config, backbone_folder):
        model = read_trained(self, folder, config, backbone_folder)
        model.fold()
        return model, Tokenizer.from_file(
            folder / "tokenizer.json", None
        )  # texts are not cut, even if config.json has a max_length


def _tokens(data) -> int:
    return sum(len(text.ids) for text in data.texts)


UNIT = TokenUnit()
