"""What ``litgpt-scape`` does: LitGPT's command line, training with one of our methods.

``litgpt-scape pretrain --config FILE --scape.sparsity 0.99`` is ``litgpt pretrain --config FILE`` with SCAPE as its
strategy. LitGPT has no argument for one, yet Fabric lets the environment variable ``LT_STRATEGY`` overrule what a
script asks for. So this script takes what is ours off the command line and the configuration files, registers the
strategy with it, sets the variable and hands over to LitGPT, none of whose code is changed. Processes that LitGPT
starts run this script again; they find the options in the environment.

Options hold in this order: command line, then (on ``--resume``) the checkpoint's ``hyperparameters.yaml``, then the
``scape:`` sections of ``--config`` files, then the defaults of :class:`~lightning_scape.ScapeConfig`.

``--sparseloco.sync_every 30``, or a ``sparseloco:`` section, takes SparseLoCo in place of SCAPE, with the options of
:class:`~lightning_scape.SparseLoCoConfig`; likewise any other method that is registered
(:mod:`lightning_scape.core.method`).
"""

from __future__ import annotations

import json
import os
import sys
import typing
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_scape.core.method import Method, Spelling, find, for_config, named, names, plain
from lightning_scape.hosts.fabric import FabricMethodStrategy

COMMANDS = ("pretrain", "finetune_full")
"""LitGPT's commands that train all parameters with an optimizer that a method can stand in for."""

OPTIONS_VARIABLE = "LIGHTNING_SCAPE_OPTIONS"
"""Environment variable by which a process passes the options on to those it starts: ``PID JSON``, with its own PID."""

Options = dict[str, dict[str, Any]]
"""By method: its options by name."""


DEFAULT = "scape"
"""The method that trains where no other is asked for."""


class LitGPTStrategy(FabricMethodStrategy):
    """Fabric's strategy of any method, whose first line writes options as the command line takes them."""

    slow_saves = "a larger `--train.save_interval` saves less often"
    how_to_end = "ranks become equal when LitGPT saves the final model, after its last validation."

    @override
    def spelling(self) -> Spelling:
        flag = f"--{self._method.name}."
        return lambda options: " ".join(f"{flag}{name} {value}".replace('"', "") for name, value in options.items())

    @override
    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As ever. Finetuning, whose epochs may end before its steps, saves the model without its optimizer then."""
        if not any(map(find, state.values())):
            self.sync()
        super().save_checkpoint(path, state, *args, **kwargs)


def main() -> None:
    """All of it; reads ``sys.argv``. Ends the process with status 2 where an option of ours is wrong."""
    try:
        given, rest = split_arguments(sys.argv[1:])
        if not rest or rest[0] not in COMMANDS:
            _refuse_elsewhere(rest, given)
            _run_litgpt(rest)
            return
        in_files, rest = take_sections(rest)
        name, config, total_steps = _received() or _resolve(rest, given, in_files)
        _check_environment(name)
    except (TypeError, ValueError) as error:
        print(f"litgpt-scape: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with scape_strategy(config, total_steps):
        _run_litgpt(rest, help_too=True)


# ------------------------------------------------------------------------------------- what is ours on the command line


def split_arguments(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Our options, and all the other arguments in their order.

    >>> split_arguments(["pretrain", "--scape.sparsity", "0.9", "--seed=1", "--scape.dense_steps=3"])
    ({'scape': {'sparsity': 0.9, 'dense_steps': 3}}, ['pretrain', '--seed=1'])

    Raises:
        ValueError: an option that its method does not have, or one without its value.
    """
    options: Options = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, text = argument.partition("=")
        name, _, option = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or name not in names():
            rest.append(argument)
            continue
        _check_name(option, f"got {argument!r}", name)
        if not equals and (not waiting or waiting[0].startswith("--")):
            raise ValueError(f"{flag} must be followed by a value, got none. Write {flag}=VALUE.")
        options.setdefault(name, {})[option] = _read_value(text if equals else waiting.pop(0))
    return options, rest


def options_help() -> str:
    """What ``--help`` says of our options: name, type, default and meaning of each, by method."""
    from docstring_parser import parse_from_object

    parser = ArgumentParser(usage=SUPPRESS, add_help=False)
    for name, config in ((name, named(name).config_class) for name in names()):
        group = parser.add_argument_group(f"{named(name).title} (also under `{name}:` in --config files)")
        hints = typing.get_type_hints(config)
        meanings = {each.arg_name: each.description or "" for each in parse_from_object(config).params}
        for field in fields(config):
            default = "null" if field.default is None else field.default
            said = f"{meanings.get(field.name, '')} (type: {_kind(hints[field.name])}, default: {default})"
            group.add_argument(f"--{name}.{field.name}", metavar=field.name.upper(), help=said.replace("%", "%%"))
    return parser.format_help()


def _kind(hint: Any) -> str:
    """A type as a user writes its values: ``bf16 or fp32``, ``int or null``."""
    if hint is NoneType:
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(typing.get_args(hint))
    return " or ".join(map(_kind, typing.get_args(hint))) or str(hint.__name__)


def _check_name(option: str, received: str, name: str) -> None:
    known = [field.name for field in fields(named(name).config_class)]
    if option not in known:
        (near,) = get_close_matches(str(option), known, n=1) or [""]
        raise ValueError(
            f"An option of {named(name).title} must be one of {', '.join(known)}; {received}."
            f" {f'Did you mean {near}?' if near else 'Use one of these names.'}"
        )


def _read_value(value: Any) -> Any:
    """A text as LitGPT's own options are read, by YAML's rules; whether the value will do is for the config to say."""
    from jsonargparse import get_loader

    if not isinstance(value, str):
        return value
    try:
        return None if value.lower() == "none" else get_loader("yaml")(value)
    except yaml.YAMLError:
        return value


def _refuse_elsewhere(rest: Sequence[str], given: Options) -> None:
    if given:
        titles = " and ".join(named(name).title for name in given)
        flags = ", ".join(f"--{name}.{option}" for name, options in given.items() for option in options)
        raise ValueError(
            f"Options of {titles} must go with the commands {' or '.join(COMMANDS)}, which train all parameters,"
            f" got {flags} with {rest[0] if rest else None!r}. Drop them: every other command is LitGPT's own."
        )


def _check_environment(name: str) -> None:
    asked = os.environ.get("LT_STRATEGY", name)
    if asked != name:
        raise ValueError(
            f"The environment variable LT_STRATEGY must be unset, got {asked!r}: it asks Fabric for another strategy."
            " Unset it, or use `litgpt`."
        )


def take_sections(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The methods' sections (``scape:``) of all ``--config`` files, and the arguments without them.

    Of an option that comes twice the last holds.

    LitGPT's parser refuses a section it does not know, and it reads the file again when it saves a checkpoint. A file
    with such a section is therefore replaced by its other content as text, which the parser takes as well as a path.

    Raises:
        ValueError: a section is not a mapping of options that the method has.
    """
    found: Options = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, source = argument.partition("=")
        if flag != "--config" or not (equals or waiting):
            rest.append(argument)
            continue
        source = source if equals else waiting.pop(0)
        content = _read_mapping(source)
        sections = _sections(content, source)
        for name, options in sections.items():
            found[name] = found.get(name, {}) | options
            del content[name]
        if not sections:
            rest.append(f"--config={source}")
        elif content:
            rest.append(f"--config={yaml.safe_dump(content, sort_keys=False)}")
    return found, rest


def _read_mapping(source: str | Path) -> dict[str, Any]:
    """What a ``--config`` argument holds; empty for what is not a local file with a mapping, which LitGPT judges."""
    try:
        content = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _sections(content: Mapping[str, Any], source: str | Path) -> Options:
    """Those of our methods that a file has."""
    found: Options = {}
    for name in [name for name in names() if name in content]:
        section = content[name]
        if not isinstance(section, dict):
            first = fields(named(name).config_class)[0]
            raise ValueError(
                f"`{name}:` in {source} must be a mapping, got {section!r}. Write the options under it, one a line:"
                f" `{first.name}: {first.default}`."
            )
        for option in section:
            _check_name(option, f"got {option!r} under `{name}:` in {source}", name)
        found[name] = {option: _read_value(value) for option, value in section.items()}
    return found


# --------------------------------------------------------------------------------------------------- which options hold


def _received() -> tuple[str, Any, int | None] | None:
    """What the process that started this one has resolved; None if this is the first."""
    sender, _, passed_on = os.environ.get(OPTIONS_VARIABLE, "").partition(" ")
    if sender != str(os.getppid()):
        return None
    received = json.loads(passed_on)
    name = received.get("method", DEFAULT)
    return name, named(name).config_class(**received["options"]), received["total_steps"]


def _resolve(rest: Sequence[str], given: Options, in_files: Options) -> tuple[str, Any, int | None]:
    """The method, its config, and the steps of the run, if it knows them."""
    parsed = _parse(rest)
    checkpoint = None if parsed is None else find_recorded(parsed)
    total_steps = None if parsed is None else steps_of_run(rest[0], parsed)
    recorded = {} if checkpoint is None else _sections(_read_mapping(checkpoint), checkpoint)
    name = method_asked_for(given, in_files, recorded)
    by_hand, by_file, saved = (options.get(name, {}) for options in (given, in_files, recorded))
    config = named(name).config_class(**{**by_file, **saved, **by_hand})
    if checkpoint is not None:
        _tell_resumed(name, checkpoint, saved, by_hand, by_file)
    elif not _asks_for_help(rest):
        _tell_fresh(named(name), config)
    return name, config, total_steps


def method_asked_for(given: Options, in_files: Options, recorded: Options) -> str:
    """The method whose options are given, on the command line or in a file; else a checkpoint's; else SCAPE.

    Raises:
        ValueError: options of several are given.
    """
    asked = [name for name in names() if name in given or name in in_files]
    if len(asked) > 1:
        titles = " and some of ".join(named(name).title for name in asked)
        places = ", or ".join(f"--{name}.* and `{name}:`" for name in asked)
        raise ValueError(
            f"Options of one method may be given, got some of {titles}. Leave those of one, and drop {places}."
        )
    return [*asked, *(name for name in names() if recorded.get(name)), DEFAULT][0]


def _parse(arguments: Sequence[str]) -> Any | None:
    """What LitGPT's parser makes of its own arguments, the command first; None where it runs no training with them."""
    if _asks_for_help(arguments):
        return None
    from jsonargparse import capture_parser
    from litgpt.__main__ import PARSER_DATA
    from litgpt.utils import CLI

    parser = capture_parser(lambda: CLI(PARSER_DATA[arguments[0]]))
    parser.exit_on_error = False
    try:
        return parser.parse_args(list(arguments[1:]))
    except Exception:  # of any kind: LitGPT meets it next and reports it as it always does
        return None


def steps_of_run(command: str, parsed: Any) -> int | None:
    """Optimizer steps of the whole run, as far as LitGPT's arguments tell; None where they do not.

    ``pretrain`` counts tokens (``max_tokens``) and heeds no ``max_steps``. Finetuning ends after ``max_steps``, or
    after ``epochs`` of data that nobody has read yet.

    Args:
        command: ``pretrain`` or ``finetune_full``.
        parsed: LitGPT's arguments, as its parser returns them.
    """
    from litgpt import Config
    from litgpt.args import TrainArgs
    from litgpt.utils import parse_devices

    if command != "pretrain":
        return parsed.train.max_steps if (parsed.train.max_steps or 0) > 0 else None
    try:
        train = TrainArgs(**parsed.train.as_dict())
        block_size = (parsed.model_config or Config.from_name(parsed.model_name)).block_size
        ranks = parse_devices(parsed.devices) * parsed.num_nodes
        batches = train.max_tokens // ranks // (train.micro_batch_size * (train.max_seq_length or block_size))
        return max(0, batches // train.gradient_accumulation_iters(ranks)) or None
    except Exception:  # of any kind: LitGPT meets it next and reports it as it always does
        return None


def find_recorded(parsed: Any) -> Path | None:
    """The ``hyperparameters.yaml`` of the checkpoint that LitGPT will resume from, if any.

    Args:
        parsed: LitGPT's arguments, as its parser returns them.
    """
    from litgpt.utils import find_resume_path, init_out_dir

    try:
        checkpoint = find_resume_path(parsed.resume, init_out_dir(parsed.out_dir))
    except Exception:  # of any kind: LitGPT meets it next and reports it as it always does
        return None
    if not checkpoint:
        return None
    folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent
    return folder / "hyperparameters.yaml"


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument.split("=")[0] in ("-h", "--help", "--print_config") for argument in arguments)


@rank_zero_only
def _tell_fresh(method: type[Method], config: Any) -> None:
    """Says which options were chosen, beside those of which the strategy's own first line speaks."""
    defaults, values = plain(method.config_class()), plain(config)
    chosen = {name: value for name, value in values.items() if value != defaults[name]}
    if method.told is None or chosen.keys() <= method.told:
        return
    first = next(iter(values))
    options = ", ".join(f"{name}={value!r}" for name, value in {first: values[first], **chosen}.items())
    print(f"{method.title}: {options}; all other options are the defaults.", file=sys.stderr)


@rank_zero_only
def _tell_resumed(
    name: str, file: Path, saved: dict[str, Any], by_hand: dict[str, Any], by_file: dict[str, Any]
) -> None:
    title, config = named(name).title, named(name).config_class
    if not saved:
        print(f"{title}: no options of {title} can be read from {file}; those given now hold.", file=sys.stderr)
        return
    print(f"{title}: options are those of the checkpoint, from {file}.", file=sys.stderr)
    # By way of the config: it may write an option in another way than it was given.
    recorded, wanted = plain(config(**saved)), plain(config(**{**saved, **by_file, **by_hand}))
    for option, value in wanted.items():
        before = recorded[option]
        if value == before:
            continue
        if option in by_hand:
            said = f"{option} is {value!r} by the command line (checkpoint: {before!r})."
        else:
            said = f"{option} is {before!r} by the checkpoint, not {value!r} as in the configuration file;"
            said += f" pass --{name}.{option}={value} to change it."
        print(f"{title}: {said}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------- handing over


@contextmanager
def scape_strategy(config: Any, total_steps: int | None = None) -> Iterator[None]:
    """Inside, whatever Fabric a script builds trains with the method, and LitGPT's saved configurations say so.

    Args:
        config: the options: a method's config.
        total_steps: optimizer steps of the whole run, by which the default warm-up goes (SparseLoCo ends its last
            window there); None is not known.
    """
    name, options = for_config(config).name, plain(config)
    variables, registered = dict(os.environ), dict(STRATEGY_REGISTRY)
    passed_on = json.dumps({"method": name, "options": options, "total_steps": total_steps})
    os.environ.update({"LT_STRATEGY": name, OPTIONS_VARIABLE: f"{os.getpid()} {passed_on}"})
    STRATEGY_REGISTRY.register(name, LitGPTStrategy, override=True, total_steps=total_steps, config=config)
    _record_in_saved_configurations(name, options)
    try:
        yield
    finally:
        _record_in_saved_configurations(name, None)
        _put_back(STRATEGY_REGISTRY, registered, name)
        for variable in ("LT_STRATEGY", OPTIONS_VARIABLE):
            _put_back(os.environ, variables, variable)


def _put_back(values: Any, before: Mapping[str, Any], name: str) -> None:
    if name in before:
        values[name] = before[name]
    else:
        values.pop(name, None)


def _record_in_saved_configurations(section: str, options: Mapping[str, Any] | None) -> None:
    """Have jsonargparse add the method's section to the configurations of training commands that it writes as YAML.

    LitGPT saves ``hyperparameters.yaml`` by parsing ``sys.argv`` anew, with a parser that knows no option of ours, and
    after all hooks of a strategy. How values become YAML is what jsonargparse lets its users choose.
    """
    from jsonargparse import set_dumper

    def dump(data: Any) -> str:
        if options is not None and isinstance(data, dict) and {"out_dir", "train", "eval"} <= data.keys():
            data = {**data, section: dict(options)}
        text: str = yaml.safe_dump(data, default_flow_style=False, allow_unicode=True, sort_keys=False)
        return text

    set_dumper("yaml", dump)


def _run_litgpt(arguments: Sequence[str], help_too: bool = False) -> None:
    from litgpt.__main__ import main as litgpt_main

    before = sys.argv
    sys.argv = [sys.argv[0], *arguments]
    try:
        litgpt_main()
    finally:
        sys.argv = before
        if help_too and {"-h", "--help"} & set(arguments):
            print(f"\n{options_help()}")
