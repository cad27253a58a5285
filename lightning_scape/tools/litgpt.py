"""``litgpt-scape``: LitGPT's command line, training with SCAPE or SparseLoCo.

``litgpt-scape pretrain --config FILE --scape.sparsity 0.99`` is ``litgpt pretrain --config FILE`` with SCAPE as its
strategy. LitGPT has no argument for one, yet Fabric lets the environment variable ``LT_STRATEGY`` overrule what a
script asks for. So what is ours is taken off the command line and out of the configuration files, the strategy is
registered with it, and LitGPT's own main goes on. Processes that LitGPT starts run this script again; they find our
options in an environment variable.

Of an option that comes twice the last holds: environment, then sections of files (``scape:``), then the command line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_scape.__about__ import __version__
from lightning_scape.core.method import METHODS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

COMMANDS = ("pretrain", "finetune_full")
"""LitGPT's commands that train all parameters with an optimizer that a method can be put on."""
VARIABLE = "LIGHTNING_SCAPE_OPTIONS"
"""Environment variable that hands our options to processes that LitGPT starts: a list of arguments, as JSON."""
HELP = """usage: litgpt-scape COMMAND [options]

LitGPT's command line, training with SCAPE or SparseLoCo.

  pretrain       LitGPT's command, with --scape.OPTION or --sparseloco.OPTION in addition
  finetune_full  likewise
  ...            every other command is LitGPT's own: `litgpt --help` lists them

COMMAND --help lists all options."""


def main() -> None:
    """The console script; reads ``sys.argv``. Ends the process with status 2 where an option of ours is wrong."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(__version__)
    elif arguments in ([], ["-h"], ["--help"]):
        print(HELP)
    elif arguments[0] in COMMANDS:
        train(arguments)
    else:
        ours, rest = split(arguments)
        if ours:
            options_parser().error(f"{ours[0]} must follow {' or '.join(COMMANDS)}, not {arguments[0]}. Drop it.")
        run_litgpt(rest)


def train(arguments: Sequence[str]) -> None:
    """Registers the strategy that our options ask for, and hands the other arguments to LitGPT."""
    ours, rest = split(arguments)
    sections, rest = take_sections(rest)
    ours = [*json.loads(os.environ.get(VARIABLE, "[]")), *sections, *ours]
    parser = options_parser()
    asked = [name for name in METHODS if any(option.startswith((f"--{name}.", f"--{name}=")) for option in ours)]
    if len(asked) > 1:
        parser.error(f"Options of one method may be given, got some of {' and '.join(asked)}. Leave those of one.")
    name = [*asked, "scape"][0]
    given = parser.parse_args(ours)[name]
    try:
        register(name, given.as_dict())
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    os.environ |= {VARIABLE: json.dumps(ours), "LT_STRATEGY": name}
    try:
        run_litgpt(rest)
    finally:
        if {"-h", "--help"} & set(rest):
            print(f"\n{options_parser().format_help()}")  # LitGPT's main has had meanings read, too


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, each as ``--NAME.OPTION=VALUE``, and all the other arguments in their order.

    >>> split(["pretrain", "--scape.sparsity", "0.9", "--seed=1"])
    (['--scape.sparsity=0.9'], ['pretrain', '--seed=1'])
    """
    ours, rest, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith(tuple(f"--{name}." for name in METHODS)):
            rest.append(argument)
        elif "=" in argument or not waiting:
            ours.append(argument)
        else:
            ours.append(f"{argument}={waiting.pop(0)}")
    return ours, rest


def take_sections(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sections ``scape:`` and ``sparseloco:`` of ``--config`` files as arguments, and the arguments without them.

    LitGPT's parser refuses a section that it does not know, and reads the file again when it saves a checkpoint. A
    file with one is therefore replaced by its other content as text, which the parser takes as well as a path.
    """
    import yaml

    sections, rest, waiting = [], [], list(arguments)
    while waiting:
        flag, equals, source = waiting.pop(0).partition("=")
        if flag == "--config" and not equals and waiting:
            equals, source = "=", waiting.pop(0)
        if flag == "--config" and os.path.isfile(source):
            content = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
            found = {name: content.pop(name) for name in METHODS if isinstance(content, dict) and name in content}
            sections += [f"--{name}={json.dumps(section)}" for name, section in found.items()]
            source = yaml.safe_dump(content, sort_keys=False) if found else source
        rest.append(f"{flag}{equals}{source}")
    return sections, rest


def options_parser() -> ArgumentParser:
    """Of our options only: those of all methods, with their types, defaults and meanings."""
    from jsonargparse import SUPPRESS, ArgumentParser

    from lightning_scape.core.method import named

    parser = ArgumentParser(prog="litgpt-scape", usage=SUPPRESS, add_help=False)
    for name in METHODS:
        parser.add_class_arguments(named(name).config_class, name)
    return parser


def register(name: str, options: dict[str, Any]) -> None:
    """Has Fabric train with a method where it is asked for it by name.

    Raises:
        TypeError, ValueError: an option is outside its rule.
    """
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from typing_extensions import override

    from lightning_scape.core.method import named
    from lightning_scape.hosts.fabric import FabricMethodStrategy

    class LitGPTStrategy(FabricMethodStrategy):
        """Ranks are made equal before LitGPT saves what a run ends with: it says of no step that it is the last."""

        @override
        def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if Path(path).parent.name == "final":
                self.sync()
            super().save_checkpoint(path, state, *args, **kwargs)

    config = named(name).config_class(**options)
    STRATEGY_REGISTRY.register(name, LitGPTStrategy, override=True, config=config)


def run_litgpt(arguments: Sequence[str]) -> None:
    """LitGPT's own main, with these arguments."""
    from litgpt.__main__ import main as litgpt_main

    sys.argv[1:] = arguments
    litgpt_main()


if __name__ == "__main__":
    main()
