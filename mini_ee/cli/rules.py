"""The rule that a command line names, made from the rules' own settings. No torch here."""

from dataclasses import MISSING, fields, replace

from mini_ee import WrongArguments
from mini_ee.cli.options import READERS, number, positive, whole_number
from mini_ee.data.options import flag_of
from mini_ee.rules import NO_POLICY, RULES, Rule

PLAIN = ("never", "fixed", "threshold", "patience", "patience-confidence", "policy", "q-exit")

SETTINGS = {}
for _each in (each for name in PLAIN for each in fields(RULES[name]) if each.metadata):
    SETTINGS.setdefault(_each.name, _each)
"""Name, as the arguments have it -> field, of the first of these rules that has it."""


RETRIEVAL = ("k", "tau", "fallback_top")  # of RAEE's rule


def add_rule(parser) -> None:
    """--rule, and the settings of all rules, each once."""
    parser.add_argument("--rule", choices=PLAIN, help="instead of the run's own rule")
    group = parser.add_argument_group("settings of a rule")
    for name, each in SETTINGS.items():
        about, usual = each.metadata, "" if each.default is MISSING else f"; {each.default}"
        kind = {"type": READERS.get(each.type), "choices": about["choices"]}
        group.add_argument(flag_of(name, about), dest=name, help=about["help"] + usual, **kind)


def refuse_settings(args, why: str, *spared: str) -> None:
    """Raise WrongArguments where --rule was given, or a setting of a rule that is not spared."""
    for name in ("rule", *SETTINGS, *RETRIEVAL):
        if name not in spared and getattr(args, name, None) is not None:
            raise WrongArguments(f"{why}: leave out --{'layer' if name == 'exit' else name.replace('_', '-')}")


def add_retrieval(parser) -> None:
    """The settings of RAEE's rule, in place of those that a run was collected with."""
    group = parser.add_argument_group("a run of raee", "instead of the settings that it was collected with")
    group.add_argument("--k", type=positive, help="neighbours that vote")
    group.add_argument("--tau", type=number, help="how sure a neighbour's exit must be to vote, Eq. 4")
    group.add_argument(
        "--fallback-top", type=whole_number, metavar="N", help="best exits of a neighbour with none that sure"
    )


def chosen_rule(args, run) -> Rule:
    """The rule that the arguments name, or the run's own. Raises WrongArguments where the pieces do not fit.

    run: a Run or a Runtime, with `rule`, `exits` and `config`.
    """
    given = {name: value for name in SETTINGS if (value := getattr(args, name, None)) is not None}
    retrieval = {name: value for name in RETRIEVAL if (value := getattr(args, name, None)) is not None}
    name = args.rule or _named_by(given)
    try:
        if name is None:
            if "measure" in given:
                raise ValueError("--measure says what a threshold is on: give --threshold too")
            if given:
                raise ValueError(f"--{next(iter(given))} is a setting of a rule: name it with --rule")
            if retrieval and run.rule.name != "raee":
                raise ValueError(f"--{next(iter(retrieval)).replace('_', '-')} is for a run of raee")
            rule = replace(run.rule, **retrieval)
        elif retrieval:
            raise ValueError(f"--{next(iter(retrieval)).replace('_', '-')} is for a run of raee under its own rule")
        else:
            rule = _made(name, given, run)
            if rule.needs is not None and len(run.exits) == 1:
                raise ValueError(f"the rule {name} needs exits before the last layer; {run.folder} has none")
            if rule.asks_policy and hasattr(run, "model") and getattr(run.model, "policy", None) is None:
                raise ValueError(NO_POLICY.format(name))
        rule.check(len(run.exits))
        if rule.needs is not None and run.exits[0] == 0:
            raise ValueError(f"layer 0 is an exit for rules that plan only: use raee, never or fixed, not {rule.name}")
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return rule


def _named_by(given: dict) -> str | None:
    """The rule that a setting alone stands for."""
    alone = {"threshold": "threshold", "patience": "patience", "exit": "fixed", "cut": "policy", "q": "q-exit"}
    return next((rule for setting, rule in alone.items() if setting in given), None)


def _made(name: str, given: dict, run) -> Rule:
    """A rule from its settings; what is on a decoder is on the gap by default, as in self-supervised exits."""
    kind, tokens = RULES[name], run.config.get("unit") == "tokens"
    known = {each.name: each for each in fields(kind) if each.metadata}
    foreign = sorted(given.keys() - known.keys())
    if foreign:
        options = ", ".join(f"--{each}" for each in foreign).replace("--exit", "--layer")
        raise ValueError(f"the rule {name} does not take {options}")
    missing = [each for each in known.values() if each.default is MISSING and each.name not in given]
    if missing:
        raise ValueError(f"the rule {name} needs {', '.join(flag_of(each.name, each.metadata) for each in missing)}")
    if "measure" in known and not tokens and not run.config.get("task", {}).get("label_names", True):
        raise ValueError("a regression task has no confidence: use --rule fixed or --rule patience")
    if "measure" in known and tokens:
        given = {"measure": "breaking_ties"} | given
    if name == "fixed":
        if given["exit"] not in run.exits:
            exits = ",".join(map(str, run.exits))
            raise ValueError(f"--layer must be one of the exits {exits}, got {given['exit']}")
        given = {"exit": run.exits.index(given["exit"])}
    return kind(**given)
