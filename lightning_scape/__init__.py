"""SCAPE sparse data-parallel training for Lightning: ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``.

Importing the package registers the strategies with Lightning: ``Trainer(strategy="scape")``.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_scape.__about__ import __version__ as __version__

# Lightning takes seconds to import, and the commands answer `--help` at once.
if TYPE_CHECKING or Path(*sys.argv[:1]).name not in ("lightning-scape", "litgpt-scape"):
    from lightning_scape.api import *  # noqa: F403 - its `__all__` says what
    from lightning_scape.api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """A public name, imported when it is first asked for."""
        if name.startswith("_") or find_spec(f"{__name__}.{name}"):  # a module, which Python imports itself
            raise AttributeError(f"module {__name__!r} has not yet imported {name!r}")
        return getattr(import_module(f"{__name__}.api"), name)
