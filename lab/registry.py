"""Names and the modules that define them: methods, rules, measurements, heads, engines and backbones, one per line.

Strings only: a module is imported when it is first used.
"""

from importlib.metadata import entry_points

METHODS = {  # name on the command line -> the module that ends with METHOD
    "lora-exits": "mini_ee.lab.methods.lora_exits",
    "self-supervised": "mini_ee.lab.methods.self_supervised",
    "raee": "mini_ee.lab.methods.raee",
    "consistent": "mini_ee.lab.methods.consistent",
    "embedding-maps": "mini_ee.lab.methods.embedding_maps",
    "joint": "mini_ee.lab.baselines.joint",
    "two-stage": "mini_ee.lab.baselines.two_stage",
    "mixed": "mini_ee.lab.baselines.mixed",
    "sweet": "mini_ee.lab.baselines.sweet",
    "deebert": "mini_ee.lab.baselines.deebert",
    "fastbert": "mini_ee.lab.baselines.fastbert",
    "right-tool": "mini_ee.lab.baselines.right_tool",
    "pabee": "mini_ee.lab.baselines.pabee",
    "pcee-bert": "mini_ee.lab.baselines.pcee_bert",
    "berxit": "mini_ee.lab.baselines.berxit",
    "multi-model": "mini_ee.lab.baselines.multi_model",
    "calm": "mini_ee.lab.baselines.calm",
    "dree": "mini_ee.lab.baselines.dree",
    "cat": "mini_ee.lab.baselines.cat",
    "elasticbert": "mini_ee.lab.baselines.elasticbert",
    "palbert": "mini_ee.lab.baselines.palbert",
    "adainfer": "mini_ee.lab.baselines.adainfer",
    "sleb": "mini_ee.lab.baselines.sleb",
    "free": "mini_ee.lab.baselines.free",
    "layerskip": "mini_ee.lab.baselines.layerskip",
    "del": "mini_ee.lab.baselines.dynamic_exit_layer",
    "balcony": "mini_ee.lab.baselines.balcony",
    "hashee": "mini_ee.lab.baselines.hashee",
    "tr-bert": "mini_ee.lab.baselines.tr_bert",
    "2dmse": "mini_ee.lab.baselines.matryoshka_2d",
    "starbucks": "mini_ee.lab.baselines.starbucks",
    "one-depth": "mini_ee.lab.baselines.one_depth",
    "cosine-predictor": "mini_ee.lab.baselines.cosine_predictor",
}
METHODS |= {method.name: method.value for method in entry_points(group="mini_ee.methods")}  # of other packages

RULES = {  # name in a run's config.json -> the module of the method that defines the rule, and adds it to rules.RULES
    "raee": "mini_ee.lab.methods.raee",
    "adainfer": "mini_ee.lab.baselines.adainfer",
    "similarity": "mini_ee.lab.methods.embedding_maps_rule",
}

MEASUREMENTS = {  # NAME of `mini-ee evaluate --NAME`, an extra measurement of any run -> the module that defines it
    "hardness": "mini_ee.lab.methods.consistent_hardness",
}

HEADS = {  # `head` in a run's config.json: the kind of head of an example's exit -> module:function
    "dense": "mini_ee.lab.exits.heads:dense",
    "linear": "mini_ee.lab.exits.heads:linear",
}

VOCABULARY_HEADS = {  # the same of a token's exit, besides the method's own -> module:class
    "lens": "mini_ee.lab.exits.lens:LensHead",
}

SKIPPERS = {  # --draft-by of `mini-ee generate`: what chooses the layers that drafts skip -> module:class
    "swift": "mini_ee.lab.exits.swift:Swift",
    "clasp": "mini_ee.lab.exits.clasp:Clasp",
}

ENGINES = {  # --engine of an export in place of ONNX Runtime -> the module that defines open_segments
    "openvino": "mini_ee.lab.export.openvino_engine",
}

BACKBONES = {  # model_type in config.json -> the module that ends with BACKBONE and LAYOUTS
    "bert": "mini_ee.lab.backbones.bert",
    "roberta": "mini_ee.lab.backbones.bert",
    "xlm-roberta": "mini_ee.lab.backbones.bert",
    "albert": "mini_ee.lab.backbones.bert",
    "elasticbert": "mini_ee.lab.backbones.bert",
    "deberta": "mini_ee.lab.backbones.deberta",
    "deberta-v2": "mini_ee.lab.backbones.deberta",
    "electra": "mini_ee.lab.backbones.electra",
    "distilbert": "mini_ee.lab.backbones.distilbert",
    "mpnet": "mini_ee.lab.backbones.mpnet",
    "modernbert": "mini_ee.lab.backbones.modernbert",
    "t5": "mini_ee.lab.backbones.t5",
    "llama": "mini_ee.lab.backbones.llama",
    "gemma": "mini_ee.lab.backbones.llama",
    "phi": "mini_ee.lab.backbones.llama",
    "mistral": "mini_ee.lab.backbones.llama",
    "qwen2": "mini_ee.lab.backbones.llama",
    "qwen3": "mini_ee.lab.backbones.llama",
    "phi3": "mini_ee.lab.backbones.llama",
}

TOKENIZERS = {  # model_type in config.json -> the tokenizer that transformers takes if the folder names none
    **dict.fromkeys(("bert", "distilbert", "electra"), "Bert"),
    "roberta": "Roberta",
    "mpnet": "MPNet",
    "xlm-roberta": "XLMRoberta",
    "albert": "Albert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
}

# the same, for folders that have a tokenizer_config.json
DECODER_TOKENIZERS = {"llama": "Llama", "gemma": "Gemma", "qwen3": "Qwen2", "phi": "GPT2", "t5": "T5"}

# model_type -> the tokenizer that transformers takes whatever tokenizer_config.json names
ONLY_TOKENIZERS = {"qwen2": "Qwen2", **dict.fromkeys(("modernbert", "phi3", "mistral"), "TokenizersBackend")}
