"""``litgpt-scape``: LitGPT's command line, training with SCAPE or SparseLoCo (:mod:`.litgpt_cli`).

What needs neither LitGPT nor torch is answered here, at once.
"""

from __future__ import annotations

import sys

from lightning_scape.__about__ import __version__
from lightning_scape.tools.console import ends_quietly

HELP = """usage: litgpt-scape COMMAND [options]

LitGPT's command line, training with SCAPE or SparseLoCo.

  pretrain       LitGPT's command, with --scape.OPTION or --sparseloco.OPTION in addition
  finetune_full  likewise
  ...            every other command is LitGPT's own: `litgpt --help` lists them

COMMAND --help lists all options."""


@ends_quietly
def main() -> None:
    """The console script; reads ``sys.argv``. Ends the process with status 2 where an option of ours is wrong."""
    if sys.argv[1:2] == ["--version"]:
        print(__version__)
    elif sys.argv[1:] in (["-h"], ["--help"]):
        print(HELP)
    else:
        from lightning_scape.tools.litgpt_cli import main as train

        train()


if __name__ == "__main__":
    main()
