"""What ``litgpt-scape`` does: LitGPT's command line, training with SCAPE.

``litgpt-scape pretrain --config FILE --scape.sparsity 0.99`` is ``litgpt pretrain --config FILE`` with SCAPE as its
strategy. LitGPT has no argument for one, yet Fabric lets the environment variable ``LT_STRATEGY`` overrule what a
script asks for. So this script takes what is SCAPE's off the command line and the configuration files, registers the
strategy with it, sets the variable and hands over to LitGPT, none of whose code is changed. Processes that LitGPT
starts run this script again; they find the options in the environment.

Options hold in this order: command line, then (on ``--resume``) the checkpoint's ``hyperparameters.yaml``, then the
``scape:`` sections of ``--config`` files, then the defaults of :class:`~lightning_scape.ScapeConfig`.

``--sparseloco.sync_every 30``, or a ``sparseloco:`` section, takes SparseLoCo in place of SCAPE, with the options of
:class:`~lightning_scape.SparseLoCoConfig`.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_scape.core.method import Spelling
from lightning_scape.hosts.fabric import FabricScapeStrategy, FabricSparseLoCoStrategy
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.sparseloco import SparseLoCoConfig

COMMANDS = ("pretrain", "finetune_full")
"""LitGPT's commands that train all parameters with an optimizer that SCAPE can stand in for."""

OPTIONS_VARIABLE = "LIGHTNING_SCAPE_OPTIONS"
"""Environment variable by which a process passes the options on to those it starts: ``PID JSON``, with its own PID."""

Config = ScapeConfig | SparseLoCoConfig


class Method(NamedTuple):
    """A method of training that this script offers."""

    name: str
    """Of its strategy and of its section in files."""
    title: str
    config: type[ScapeConfig] | type[SparseLoCoConfig]

    @property
    def prefix(self) -> str:
        """Of its options on the command line."""
        return f"--{self.name}"

    @property
    def hints(self) -> dict[str, Any]:
        """Types of its options."""
        return typing.get_type_hints(self.config)


SCAPE = Method("scape", "SCAPE", ScapeConfig)
SPARSELOCO = Method("sparseloco", "SparseLoCo", SparseLoCoConfig)
METHODS = (SCAPE, SPARSELOCO)


def main() -> None:
    """All of it; reads ``sys.argv``. Ends the process with status 2 where an option of ours is wrong."""
    try:
        method = method_asked_for(sys.argv[1:])
        given, rest = split_arguments(sys.argv[1:], method)
        command = rest[0] if rest else None
        if command not in COMMANDS:
            _refuse_elsewhere(command, given, method)
            _run_litgpt(rest)
            return
        _check_environment(method)
        in_files, rest = take_sections(rest, method)
        config, total_steps = _resolve(rest, given, in_files, method)
    except ValueError as error:
        _fail(str(error))
    with scape_strategy(config, total_steps):
        _run_litgpt(rest, help_too=True)


def method_asked_for(arguments: Sequence[str]) -> Method:
    """The method whose options are given, on the command line or in a file; else a checkpoint's; else SCAPE.

    Raises:
        ValueError: options of both are given.
    """
    received = _received()
    if received is not None:
        return next(method for method in METHODS if method.name == received.get("method", SCAPE.name))
    asked = [method for method in METHODS if _is_asked_for(method, arguments)]
    if len(asked) > 1:
        raise ValueError(
            "Options of one method may be given, got some of SCAPE and some of SparseLoCo. Drop those of one of them:"
            f" {SCAPE.prefix}.* and `{SCAPE.name}:`, or {SPARSELOCO.prefix}.* and `{SPARSELOCO.name}:`."
        )
    if asked or not any(argument.startswith("--resume") for argument in arguments) or arguments[0] not in COMMANDS:
        return (asked or [SCAPE])[0]
    parsed = _parse(arguments)
    recorded = None if parsed is None else find_recorded(parsed, SPARSELOCO)
    return SPARSELOCO if recorded is not None and recorded.options else SCAPE


def _is_asked_for(method: Method, arguments: Sequence[str]) -> bool:
    given = any(argument.split("=")[0].split(".")[0] == method.prefix for argument in arguments)
    sources = [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    sources += [source for flag, source in zip(arguments, arguments[1:], strict=False) if flag == "--config"]
    return given or any(method.name in _read_mapping(source) for source in sources)


def _received() -> dict[str, Any] | None:
    """What the process that started this one has resolved; None if this is the first."""
    sender, _, passed_on = os.environ.get(OPTIONS_VARIABLE, "").partition(" ")
    if sender != str(os.getppid()):
        return None
    received: dict[str, Any] = json.loads(passed_on)
    return received


# ------------------------------------------------------------------------------------- what is ours on the command line


def split_arguments(arguments: Sequence[str], method: Method = SCAPE) -> tuple[dict[str, Any], list[str]]:
    """Options of the method by field, and all the other arguments in their order.

    >>> split_arguments(["pretrain", "--scape.sparsity", "0.9", "--seed=1", "--scape.dense_steps=3"])
    ({'sparsity': 0.9, 'dense_steps': 3}, ['pretrain', '--seed=1'])

    Raises:
        ValueError: an option that the method does not have, or one without its value.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument.split("=")[0].split(".")[0] != method.prefix:
            rest.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix(method.prefix).removeprefix(".")
        _check_name(name, f"got {argument!r}", method)
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{flag} must be followed by a value, got none. Write {flag}=VALUE.")
            text = waiting.pop(0)
        options[name] = _read_value(name, text, method)
    return options, rest


def _check_name(name: str, received: str, method: Method) -> None:
    if name not in method.hints:
        known = ", ".join(method.hints)
        raise ValueError(f"An option of {method.title} must be one of {known}; {received}. Use one of these names.")


def _read_value(name: str, value: Any, method: Method) -> Any:
    """A text as the field's type, where it can be read so; whether the value will do is for the config to say."""
    if not isinstance(value, str):
        return value
    kinds = typing.get_args(method.hints[name]) or (method.hints[name],)
    if NoneType in kinds and value.lower() in ("null", "none"):
        return None
    if bool in kinds:
        return {"true": True, "false": False}.get(value.lower(), value)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _refuse_elsewhere(command: str | None, given: Mapping[str, Any], method: Method) -> None:
    if given:
        raise ValueError(
            f"Options of {method.title} must go with the commands {' or '.join(COMMANDS)}, which train all parameters,"
            f" got {', '.join(f'{method.prefix}.{name}' for name in given)} with {command!r}. Drop them: every other"
            " command is LitGPT's own."
        )


def _check_environment(method: Method) -> None:
    asked = os.environ.get("LT_STRATEGY", method.name)
    if asked != method.name:
        raise ValueError(
            f"The environment variable LT_STRATEGY must be unset, got {asked!r}: it asks Fabric for another strategy."
            " Unset it, or use `litgpt`."
        )


def take_sections(arguments: Sequence[str], method: Method = SCAPE) -> tuple[dict[str, Any], list[str]]:
    """The method's sections (``scape:``) of all ``--config`` files, and the arguments without them.

    Of an option that comes twice the last holds.

    LitGPT's parser refuses a section it does not know, and it reads the file again when it saves a checkpoint. A file
    with such a section is therefore replaced by its other content as text, which the parser takes as well as a path.

    Raises:
        ValueError: a section is not a mapping of options that the method has.
    """
    found: dict[str, Any] = {}
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
        if method.name not in content:
            rest.append(f"--config={source}")
            continue
        found |= _check_section(content.pop(method.name), source, method)
        if content:
            rest.append(f"--config={yaml.safe_dump(content, sort_keys=False)}")
    return found, rest


def _read_mapping(source: str) -> dict[str, Any]:
    """What a ``--config`` argument holds; empty for what is not a local file with a mapping, which LitGPT judges."""
    try:
        content = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_section(section: Any, source: str | Path, method: Method) -> dict[str, Any]:
    if not isinstance(section, dict):
        first = fields(method.config)[0]
        raise ValueError(
            f"`{method.name}:` in {source} must be a mapping, got {section!r}. Write the options under it, one a line:"
            f" `{first.name}: {first.default}`."
        )
    for name in section:
        _check_name(name, f"got {name!r} under `{method.name}:` in {source}", method)
    return {name: _read_value(name, value, method) for name, value in section.items()}


# --------------------------------------------------------------------------------------------------- which options hold


class Recorded(NamedTuple):
    """What a checkpoint says of the options it was trained with."""

    file: Path
    """The checkpoint's ``hyperparameters.yaml``."""

    options: dict[str, Any]
    """The method's section (``scape:``); empty where there is none."""


def _resolve(
    rest: Sequence[str], given: Mapping[str, Any], in_files: Mapping[str, Any], method: Method
) -> tuple[Config, int | None]:
    """The options, and the steps of the run, if it knows them."""
    received = _received()
    if received is not None:
        return method.config(**received["options"]), received["total_steps"]
    parsed = _parse(rest)
    if parsed is None:
        recorded, total_steps = None, None
    else:
        recorded, total_steps = find_recorded(parsed, method), steps_of_run(rest[0], parsed)
    if recorded is None:
        config = method.config(**{**in_files, **given})
        if isinstance(config, ScapeConfig) and not _asks_for_help(rest):
            _tell_fresh(config)
        return config, total_steps
    config = method.config(**{**in_files, **recorded.options, **given})
    _tell_resumed(recorded, given, in_files, method)
    return config, total_steps


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
        return parsed.train.max_steps or None
    try:
        train = TrainArgs(**parsed.train.as_dict())
        block_size = (parsed.model_config or Config.from_name(parsed.model_name)).block_size
        ranks = parse_devices(parsed.devices) * parsed.num_nodes
        batches = train.max_tokens // ranks // (train.micro_batch_size * (train.max_seq_length or block_size))
        return batches // train.gradient_accumulation_iters(ranks) or None
    except Exception:  # of any kind: LitGPT meets it next and reports it as it always does
        return None


def find_recorded(parsed: Any, method: Method = SCAPE) -> Recorded | None:
    """The options of the checkpoint that LitGPT will resume from, if any.

    Args:
        parsed: LitGPT's arguments, as its parser returns them.
        method: whose options.
    """
    from litgpt.utils import find_resume_path, init_out_dir

    try:
        checkpoint = find_resume_path(parsed.resume, init_out_dir(parsed.out_dir))
    except Exception:  # of any kind: LitGPT meets it next and reports it as it always does
        return None
    if not checkpoint:
        return None
    folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent
    file = folder / "hyperparameters.yaml"
    return Recorded(file, _check_section(_read_mapping(str(file)).get(method.name, {}), file, method))


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument.split("=")[0] in ("-h", "--help", "--print_config") for argument in arguments)


@rank_zero_only
def _tell_fresh(config: ScapeConfig) -> None:
    """Says which options were chosen, beside those of which the strategy's own first line speaks."""
    defaults = ScapeConfig().as_dict()
    chosen = {name: value for name, value in config.as_dict().items() if value != defaults[name]}
    if chosen.keys() <= {"sparsity", "sparsity_warmup_steps", "dense_steps", "update"}:
        return
    options = ", ".join(f"{name}={value!r}" for name, value in {"sparsity": config.sparsity, **chosen}.items())
    print(f"SCAPE: {options}; all other options are the defaults.", file=sys.stderr)


@rank_zero_only
def _tell_resumed(recorded: Recorded, given: Mapping[str, Any], in_files: Mapping[str, Any], method: Method) -> None:
    title = method.title
    if not recorded.options:
        print(f"{title}: {recorded.file} records no options of {title}; those given now hold.", file=sys.stderr)
        return
    print(f"{title}: options are those of the checkpoint, from {recorded.file}.", file=sys.stderr)
    saved = method.config(**recorded.options).as_dict()
    # By way of the config: "float32" and "torch.float32" are the same option.
    wanted = method.config(**{**recorded.options, **in_files, **given}).as_dict()
    for name in (name for name in wanted if wanted[name] != saved[name]):
        value = wanted[name]
        if name in given:
            print(f"{title}: {name} is {value!r} by the command line (checkpoint: {saved[name]!r}).", file=sys.stderr)
        else:
            print(
                f"{title}: {name} is {saved[name]!r} by the checkpoint, not {value!r} as in the configuration file;"
                f" pass {method.prefix}.{name}={value} to change it.",
                file=sys.stderr,
            )


# --------------------------------------------------------------------------------------------------- handing over


class LitGPTScapeStrategy(FabricScapeStrategy):
    """The same, whose first line writes options as the command line takes them."""

    @override
    def _spelling(self) -> Spelling:
        return lambda options: " ".join(
            f"{SCAPE.prefix}.{name} {value}".replace('"', "") for name, value in options.items()
        )


@contextmanager
def scape_strategy(config: Config, total_steps: int | None = None) -> Iterator[None]:
    """Inside, whatever Fabric a script builds trains with the method, and LitGPT's saved configurations say so.

    Args:
        config: the options of SCAPE, or of SparseLoCo.
        total_steps: optimizer steps of the whole run, by which the default warm-up goes (SparseLoCo ends its last
            window there); None is not known.
    """
    method = next(method for method in METHODS if isinstance(config, method.config))
    before = {name: os.environ.get(name) for name in ("LT_STRATEGY", OPTIONS_VARIABLE)}
    passed_on = json.dumps({"method": method.name, "options": config.as_dict(), "total_steps": total_steps})
    os.environ.update({"LT_STRATEGY": method.name, OPTIONS_VARIABLE: f"{os.getpid()} {passed_on}"})
    strategy = LitGPTScapeStrategy if method is SCAPE else FabricSparseLoCoStrategy
    STRATEGY_REGISTRY.register(method.name, strategy, override=True, total_steps=total_steps, **vars(config))
    _record_in_saved_configurations(method.name, config.as_dict())
    try:
        yield
    finally:
        _record_in_saved_configurations(method.name, None)
        FabricScapeStrategy.register_strategies(STRATEGY_REGISTRY)
        FabricSparseLoCoStrategy.register_strategies(STRATEGY_REGISTRY)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
            print("\n" + "\n\n".join(map(options_help, METHODS)))


def options_help(method: Method = SCAPE) -> str:
    """What ``--help`` says of the options of a method: name, type, default and meaning of each."""
    from docstring_parser import parse_from_object

    documented = parse_from_object(method.config).params
    meanings = {parameter.arg_name: parameter.description or "" for parameter in documented}
    lines = [f"{method.title} (also under `{method.name}:` in --config files):"]
    for field in fields(method.config):
        hint = method.hints[field.name]
        kinds = (hint,) if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
        named = [
            choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
        ]
        plain = [kind.__name__ for kind in kinds if isinstance(kind, type) and kind is not NoneType]
        kind = " or ".join([*plain, *named, *(["null"] if NoneType in kinds else [])]) if named else field.type
        default = "null" if field.default is None else field.default
        lines.append(f"  {method.prefix}.{field.name} {field.name.upper()}")
        note = f"{' '.join(meanings[field.name].split())} (type: {kind}, default: {default})"
        lines += textwrap.wrap(note, width=100, initial_indent=" " * 24, subsequent_indent=" " * 24)
    return "\n".join(lines)


def _fail(message: str) -> NoReturn:
    print(f"litgpt-scape: error: {message}", file=sys.stderr)
    raise SystemExit(2)
