"""The exit rule of a command line. Its options are made from the fields of the rules. No torch here."""

from argparse import Namespace
from dataclasses import MISSING, Field, fields, replace
from typing import TYPE_CHECKING

from mini_ee.lab.cli.command_options import READERS, help_of, named_run
from mini_ee.lab.confidence import LABEL_MEASURES, NUMBER_MEASURES
from mini_ee.lab.data.settings import flag_of
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.registry import RULES as OF_METHODS
from mini_ee.lab.rules import RULES, Rule, rule_class
from mini_ee.lab.segments import NO_POLICY
from mini_ee.lab.token_tasks import WEAKEST

if TYPE_CHECKING:
    from mini_ee.lab.cli.command_options import Parser
    from mini_ee.lab.export.runtime import Runtime
    from mini_ee.lab.training.run_folder import Run


def _can_be_named(rule: type[Rule]) -> bool:
    """Whether all settings have help. Others are fitted, and only a run has them."""
    return all(field.metadata for field in fields(rule))


def named_rules(embeds: bool = False) -> dict[str, type[Rule]]:
    """Name -> class of the rules that --rule can name. embeds: for a sentence encoder, so those of methods too."""
    for name in OF_METHODS if embeds else ():
        rule_class(name)
    return {name: kind for name, kind in RULES.items() if _can_be_named(kind) and (embeds or not kind.needs_embeddings)}


def rule_settings(embeds: bool = False) -> dict[str, Field]:
    """Name of a setting -> its field, in the first of these rules that has it."""
    settings = {}
    for field in (field for kind in named_rules(embeds).values() for field in fields(kind)):
        settings.setdefault(field.name, field)
    return settings


def rules_of_options() -> dict[str, str]:
    """Option of a setting -> the name of the first rule that has it, of those that --rule can name."""
    rules: dict[str, str] = {}
    for name, kind in named_rules().items():
        for field in fields(kind):
            rules.setdefault(flag_of(field.name, field.metadata), name)
    return rules


def settings_of_run(rule: str) -> dict[str, Field]:
    """Settings of a rule that only a run can have, by name. They replace those of the run; {} for other rules."""
    if rule not in OF_METHODS or _can_be_named(rule_class(rule)):
        return {}
    return {field.name: field for field in fields(rule_class(rule)) if field.metadata}


def add_rule(parser: "Parser") -> None:
    """Add --rule and the settings of the rules that fit the RUN of the command line, each once; without a RUN all."""
    named = named_run(parser.words)
    parser.kind, embeds = (named.kind, named.unit == "embeddings") if named else ("", True)
    parser.add_argument("--rule", choices=tuple(named_rules(embeds)), help="exit rule (default the run's own)")
    group = parser.add_argument_group("settings of a rule")
    for name, field in rule_settings(embeds).items():
        kind = {"type": READERS.get(field.type), "choices": field.metadata["choices"]}
        group.add_argument(flag_of(name, field.metadata), dest=name, help=help_of(field, field.default), **kind)


def refuse_settings(args: Namespace, why: str, *allowed: str, rule: str = "") -> None:
    """Raise WrongArguments if --rule or a setting of a rule that is not in `allowed` was given. rule: the run's."""
    for name in ("rule", *rule_settings(), *settings_of_run(rule)):
        if name not in allowed and getattr(args, name, None) is not None:
            raise WrongArguments(f"{why}: leave out --{'layer' if name == 'exit' else name.replace('_', '-')}")


def add_own(parser: "Parser") -> None:
    """Add the settings of the rule of the RUN that the command line names, which replace those of the run.

    Without such a run, those of the rules of all methods, which the help does not show.
    """
    named = named_run(parser.words)
    for rule in [named.rule] if named else OF_METHODS:
        if not (settings := settings_of_run(rule)):
            continue
        group = parser.add_argument_group(f"the rule {rule}", "in place of the settings of the run")
        if not named:
            parser.hidden.append(group)
        for name, field in settings.items():
            metadata = field.metadata
            kind = {"type": READERS[field.type], "metavar": metadata.get("metavar")}
            group.add_argument(flag_of(name, metadata), dest=name, help=metadata["help"], **kind)


def chosen_rule(args: Namespace, run: "Run | Runtime") -> Rule:
    """The rule that the arguments name, else the run's own. Raises WrongArguments if the arguments do not fit.

    run: a Run or a Runtime, with `rule`, `exits` and `config`.
    """
    given = {name: value for name in rule_settings(run.embeds) if (value := getattr(args, name, None)) is not None}
    of_run = settings_of_run(run.rule.name)
    replaced = {name: value for name in of_run if (value := getattr(args, name, None)) is not None}
    name = args.rule or _named_by(given, run.embeds)
    try:
        if name is None:
            if "measure" in given:
                raise ValueError("--measure is for a threshold: give --threshold too")
            if given:
                raise ValueError(f"--{next(iter(given))} is a setting of a rule: name the rule with --rule")
            rule = replace(run.rule, **replaced)
        elif replaced:
            flag = flag_of(next(iter(replaced)), of_run[next(iter(replaced))].metadata)
            raise ValueError(f"{flag} is for a run of {run.rule.name} under its own rule")
        else:
            rule = _made(name, given, run)
            if rule.needs is not None and len(run.exits) == 1:
                raise ValueError(f"the rule {name} needs exits before the last layer; {run.folder} has none")
            if rule.needs == "exit_logit" and not run.is_exported and getattr(run.model, "policy", None) is None:
                raise ValueError(NO_POLICY.format(name))
            if given.get("patience", 0) >= len(run.exits):
                raise ValueError(
                    f"--patience must be less than the number of exits, {len(run.exits)}, or nothing exits early; "
                    f"got {given['patience']}"
                )
        rule.check(len(run.exits))
        if rule.needs is not None and run.exits[0] == 0 and run.config["unit"] == "prompts":
            raise ValueError(
                f"only a rule that plans can exit at layer 0 of a prompt: use never, fixed or the run's own rule, not "
                f"{rule.name}"
            )
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return rule


def _named_by(given: dict, embeds: bool) -> str | None:
    """The rule that a setting implies: the first rule whose first field it is."""
    alone = {}
    for name, kind in named_rules(embeds).items():
        for field in fields(kind)[:1]:
            alone.setdefault(field.name, name)
    return next((rule for setting, rule in alone.items() if setting in given), None)


def _made(name: str, given: dict, run: "Run | Runtime") -> Rule:
    """A rule from its settings, on the default measure of the run if none is given."""
    kind = RULES[name]
    if name == "patience" and (run.multi_label or run.token_task is not None):
        raise ValueError(f"the rule {name} compares one prediction of a text, which has several labels here")
    known = {field.name: field for field in fields(kind) if field.metadata}
    foreign = sorted(given.keys() - known.keys())
    if foreign:
        options = ", ".join(f"--{setting}" for setting in foreign).replace("--exit", "--layer")
        raise ValueError(f"the rule {name} does not take {options}")
    missing = [field for field in known.values() if field.default is MISSING and field.name not in given]
    if missing:
        raise ValueError(f"the rule {name} needs {', '.join(flag_of(field.name, field.metadata) for field in missing)}")
    if "measure" in known:
        one_number = not run.config.get("task", {}).get("label_names", True)
        if (given.get("measure", run.default_measure) in NUMBER_MEASURES) != one_number:
            why = "a regression task has no confidence: use --rule fixed, --rule patience or --measure low_score"
            raise ValueError(
                why if one_number else f"--measure {given['measure']} is for a model that gives one number"
            )
        if (given.get("measure", run.default_measure) in LABEL_MEASURES) != run.multi_label:
            word = "needs" if run.multi_label else "has no use for"
            count = "several labels" if run.multi_label else "one label"
            raise ValueError(f"a text has {count} here, which {word} --measure {next(iter(LABEL_MEASURES))}")
        of_tokens = run.token_task is not None
        if (given.get("measure", run.default_measure) == WEAKEST) != of_tokens:
            word = (
                "each token has a label here, which needs"
                if of_tokens
                else "a text has one label, which has no use for"
            )
            raise ValueError(f"{word} --measure {WEAKEST}")
        given = {"measure": run.default_measure} | given
    if name == "fixed":
        if given["exit"] not in run.exits:
            exits = ",".join(map(str, run.exits))
            raise ValueError(f"--layer must be one of the exits {exits}, got {given['exit']}")
        given = {"exit": run.exits.index(given["exit"])}
    return kind(**given)
