"""A fine-tuned model in a Hugging Face folder: the names of its labels. own_head.py has its head."""

from pathlib import Path

from mini_ee.lab.backbones.adapter import adapter_tensors, is_adapter, model_config, model_folder
from mini_ee.lab.backbones.families import layout_of
from mini_ee.lab.backbones.own_head import CLASSIFIES, MULTI_LABEL, classifies, head_layout, token_kind
from mini_ee.lab.backbones.sentence_encoder import POOLING, check_reranker
from mini_ee.lab.backbones.setfit_head import logistic_head
from mini_ee.lab.backbones.tensor_files import shapes_of
from mini_ee.lab.data.sentence_files import MODULES, is_setfit
from mini_ee.lab.data.values import fits, shortened
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.token_tasks import ENDS, LABELS, SPAN

REGRESSION, SINGLE_LABEL = "regression", "single_label_classification"

MOST_LABELS = 63  # of several at once: their sets are numbered in int64


def is_sentence_encoder(folder: Path) -> bool:
    """Whether a folder names a pooling of embeddings, and its model is no classifier, such as a reranker."""
    names_pooling = (folder / MODULES).is_file() or (folder / POOLING / "config.json").is_file()
    return names_pooling and not is_setfit(folder) and not classifies(model_config(folder), False)


def is_multi_label(folder: str | Path) -> bool:
    """Whether a fine-tuned classifier gives an input several labels at once."""
    return not token_kind_of(folder) and model_config(Path(folder)).get("problem_type") == MULTI_LABEL


def token_kind_of(folder: str | Path) -> str:
    """The kind of token_tasks.py of a fine-tuned model; empty if it classifies texts."""
    return "" if is_setfit(Path(folder)) else token_kind(model_config(Path(folder)))


def label_names(folder: str | Path) -> tuple[str, ...]:
    """The labels of a fine-tuned classifier, in the order of its logits; empty for a regression, ENDS for a span.

    Raises WrongArguments for a model that is no classifier, one of several numbers, or of too many labels at once; and
    if config.json does not name the labels that the head has.
    """
    folder = Path(folder)
    if is_setfit(folder):
        return logistic_head(folder).labels
    check_reranker(folder)
    config, path = model_config(folder), model_folder(folder) / "config.json"
    kind = token_kind(config)
    rows = _rows_of_head(folder, config)
    if rows is None or not classifies(config, True):
        named = config.get("architectures")
        given = shortened(named[0] if isinstance(named, list) and named else named)
        if head_layout(layout_of(config.get("model_type", "")), config) is None:
            given += ", whose kind of head is not supported"
        elif rows is None and classifies(config, True):
            given += " without the tensors of its head" if named else " and no tensors of a head"
        raise WrongArguments(
            f"{folder}: expected a fine-tuned classifier, architectures of config.json a ...{CLASSIFIES}, found {given}"
            f"; `mini-ee train joint` trains one"
        )
    if kind == SPAN and rows != len(ENDS):
        raise WrongArguments(f"{folder}: expected the logits of start and end, found {rows}; save the model again")
    if kind == SPAN:
        return ENDS
    try:
        names = _names_in(config)
        if len(names) != rows and is_adapter(folder):  # the base model of an adapter does not know its labels
            names = _numbered(rows)
        if len(names) != rows:
            key = "id2label" if config.get("id2label") and "num_labels" not in config else "num_labels"
            raise ValueError(f"{key} must give the {rows} labels of the head, found {len(names)}; write id2label")
        problem = LABELS if kind and len(names) > 1 else _problem_type(config, len(names))
    except ValueError as error:
        raise WrongArguments(f"{path}: {error}") from None
    if problem == MULTI_LABEL and not 2 <= len(names) <= MOST_LABELS:
        actual = f"several labels at once ({problem}) of {len(names)}"
        raise WrongArguments(f"{folder}: gives an input {actual}; from 2 to {MOST_LABELS} are supported")
    if problem == REGRESSION and len(names) != 1:
        raise WrongArguments(f"{folder}: predicts {len(names)} numbers for an input ({problem}): not supported yet")
    if kind and problem == REGRESSION:
        raise WrongArguments(f"{folder}: expected at least 2 labels of tokens, found 1: there is nothing to decide")
    return () if problem == REGRESSION else names


def _rows_of_head(folder: Path, config: dict) -> int | None:
    """The number of logits of the classification head; None without one."""
    head = head_layout(layout_of(config.get("model_type", "")), config)
    if head is None:
        return None
    shapes = shapes_of(model_folder(folder))
    if is_adapter(folder):
        shapes |= {name: tuple(tensor.shape) for name, tensor in adapter_tensors(folder)[0].items()}
    ending = f"{head.out}.weight"
    head_shapes = [shape for name, shape in shapes.items() if name == ending or name.endswith(f".{ending}")]
    return head_shapes[-1][0] if head_shapes and head_shapes[-1] else None


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(count))


def _names_in(config: dict) -> tuple[str, ...]:
    """The names of the labels, as transformers 5 reads id2label and num_labels. Raises ValueError where it would."""
    names, count = config.get("id2label"), config.get("num_labels")
    if "num_labels" in config and not fits(count, int, least=1):
        raise ValueError(f"num_labels must be a whole number of at least 1, found {shortened(count)}")
    if names is None:
        return _numbered(2 if count is None else count)
    try:
        numbered = {int(key): name for key, name in names.items()}
    except (AttributeError, ValueError):
        raise ValueError(
            f'id2label must give each number from 0 on a name, such as {{"0": "no", "1": "yes"}}, found '
            f"{shortened(names)}; write the numbers as keys"
        ) from None
    if count is not None and len(numbered) != count:  # then num_labels counts
        return _numbered(count)
    if sorted(numbered) != [*range(len(numbered))] or not numbered:
        raise ValueError(f"id2label must have the keys 0 to {max(0, len(numbered) - 1)}, found {shortened(names)}")
    if not all(isinstance(name, str | int | float) for name in numbered.values()):
        raise ValueError(f"id2label must have texts as names, found {shortened(names)}")
    return tuple(str(numbered[number]) for number in range(len(numbered)))


def _problem_type(config: dict, count: int) -> str:
    """The problem_type, from the number of labels if config.json has none. Raises ValueError for one that is none."""
    problem = config.get("problem_type") or (REGRESSION if count == 1 else SINGLE_LABEL)
    if problem not in (REGRESSION, SINGLE_LABEL, MULTI_LABEL):
        expected = f"{REGRESSION}, {SINGLE_LABEL} or {MULTI_LABEL}"
        raise ValueError(f"problem_type must be {expected}, found {shortened(problem)}")
    if problem == SINGLE_LABEL and count == 1:
        raise ValueError(f"problem_type {problem} needs at least 2 labels, found 1; {REGRESSION} is for one number")
    return problem
