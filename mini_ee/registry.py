"""What there is, by name: one line a method, one line a backbone. Strings only: nothing is imported before its use."""

BACKBONES = {  # model_type in config.json -> the module that ends with BACKBONE and LAYOUTS
    "bert": "mini_ee.backbones.bert",
    "roberta": "mini_ee.backbones.bert",
    "albert": "mini_ee.backbones.bert",
    "elasticbert": "mini_ee.backbones.bert",
    "llama": "mini_ee.backbones.llama",
    "gemma": "mini_ee.backbones.llama",
    "phi": "mini_ee.backbones.llama",
}
