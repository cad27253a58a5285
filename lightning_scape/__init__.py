"""SCAPE sparse data-parallel training for Lightning: ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``.

A name is imported when it is first asked for: the command line answers ``--help`` without Lightning and torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_scape.__about__ import __version__
from lightning_scape.hosts.registration import register_with_lightning
from lightning_scape.moved import import_old_names

if TYPE_CHECKING:
    from lightning_scape.checkpoint.atomic_files import CheckpointError
    from lightning_scape.checkpoint.inspection import newest_checkpoint, resume_path
    from lightning_scape.comm.restarts import init_process_group
    from lightning_scape.hosts.fabric import FabricMethodStrategy
    from lightning_scape.hosts.monitor import ScapeMonitor
    from lightning_scape.hosts.trainer import MethodStrategy
    from lightning_scape.scape.adams import AdamS
    from lightning_scape.scape.config import ScapeConfig
    from lightning_scape.scape.optimizer import ScapeOptimizer
    from lightning_scape.scape.stats import StepStats
    from lightning_scape.sparseloco import ExchangeStats, SparseLoCo, SparseLoCoConfig
    from lightning_scape.strategies import (
        FabricScapeStrategy,
        FabricSparseLoCoStrategy,
        ScapeStrategy,
        SparseLoCoMonitor,
        SparseLoCoStrategy,
    )

__all__ = [
    "AdamS",
    "CheckpointError",
    "ExchangeStats",
    "FabricMethodStrategy",
    "FabricScapeStrategy",
    "FabricSparseLoCoStrategy",
    "MethodStrategy",
    "ScapeConfig",
    "ScapeMonitor",
    "ScapeOptimizer",
    "ScapeStrategy",
    "SparseLoCo",
    "SparseLoCoConfig",
    "SparseLoCoMonitor",
    "SparseLoCoStrategy",
    "StepStats",
    "__version__",
    "init_process_group",
    "newest_checkpoint",
    "resume_path",
]

HOMES = {
    "AdamS": "scape.adams",
    "CheckpointError": "checkpoint.atomic_files",
    "ExchangeStats": "sparseloco",
    "FabricMethodStrategy": "hosts.fabric",
    "FabricScapeStrategy": "strategies",
    "FabricSparseLoCoStrategy": "strategies",
    "MethodStrategy": "hosts.trainer",
    "ScapeConfig": "scape.config",
    "ScapeMonitor": "hosts.monitor",
    "ScapeOptimizer": "scape.optimizer",
    "ScapeStrategy": "strategies",
    "SparseLoCo": "sparseloco",
    "SparseLoCoConfig": "sparseloco",
    "SparseLoCoMonitor": "strategies",
    "SparseLoCoStrategy": "strategies",
    "StepStats": "scape.stats",
    "init_process_group": "comm.restarts",
    "newest_checkpoint": "checkpoint.inspection",
    "resume_path": "checkpoint.inspection",
}
"""The module of each public name: those of the imports above."""


if not TYPE_CHECKING:  # to a type checker a name that is not there must stay an error

    def __getattr__(name: str) -> Any:
        """A public name, or a module of this package."""
        if name not in HOMES:
            if find_spec(f"{__name__}.{name}") is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            return import_module(f"{__name__}.{name}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


import_old_names()
# No entry point registers strategies: `strategy="scape"` works once this package is imported.
register_with_lightning(
    {
        "scape": ("ScapeStrategy", "FabricScapeStrategy"),
        "sparseloco": ("SparseLoCoStrategy", "FabricSparseLoCoStrategy"),
    }
)
