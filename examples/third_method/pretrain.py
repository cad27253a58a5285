"""LitGPT's commands with DiLoCo: ``python examples/third_method/pretrain.py pretrain --diloco.sync_every=10 ...``."""

import diloco  # noqa: F401 # registers the method

from lightning_scape.tools.cli import main

if __name__ == "__main__":
    main()
