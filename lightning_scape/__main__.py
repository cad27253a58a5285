"""``python -m lightning_scape <command>``, also under torchrun: the same as ``lightning-scape <command>``."""

import sys

from lightning_scape.tools.cli import main

sys.exit(main())
