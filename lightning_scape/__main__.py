"""``python -m lightning_scape <command>``, also under torchrun: the same as ``lightning-scape <command>``."""

import sys

from lightning_scape.tools.commands import main

sys.exit(main())
