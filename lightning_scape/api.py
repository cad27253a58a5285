"""The public names."""

from lightning_scape.checkpoint.files import CheckpointError
from lightning_scape.checkpoint.saver import newest_checkpoint
from lightning_scape.hosts.fabric import FabricMethodStrategy
from lightning_scape.hosts.monitor import ScapeMonitor
from lightning_scape.hosts.trainer import MethodStrategy
from lightning_scape.scape.adams import AdamS
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.scape.state import StepStats
from lightning_scape.sparseloco import ExchangeStats, SparseLoCo, SparseLoCoConfig
from lightning_scape.strategies import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeStrategy,
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
    "SparseLoCoStrategy",
    "StepStats",
    "newest_checkpoint",
]
