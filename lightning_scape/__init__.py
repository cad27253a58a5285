"""SCAPE sparse data-parallel training for Lightning: ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_scape.__about__ import __version__
from lightning_scape.adams import AdamS
from lightning_scape.checkpoint.atomic_files import CheckpointError
from lightning_scape.checkpoint.inspection import newest_checkpoint, resume_path
from lightning_scape.comm.restarts import init_process_group
from lightning_scape.config import ScapeConfig
from lightning_scape.data import PythonSource
from lightning_scape.engine.stats import StepStats
from lightning_scape.integrations.fabric import FabricScapeStrategy
from lightning_scape.integrations.monitor import ScapeMonitor
from lightning_scape.integrations.sparseloco_fabric import FabricSparseLoCoStrategy
from lightning_scape.integrations.sparseloco_monitor import SparseLoCoMonitor
from lightning_scape.integrations.sparseloco_trainer import SparseLoCoStrategy
from lightning_scape.integrations.trainer import ScapeStrategy
from lightning_scape.optimizer import ScapeOptimizer
from lightning_scape.sparseloco import ExchangeStats, SparseLoCo, SparseLoCoConfig

# No entry point registers strategies: `strategy="scape"` works once this package is imported.
ScapeStrategy.register_strategies(StrategyRegistry)
FabricScapeStrategy.register_strategies(STRATEGY_REGISTRY)
SparseLoCoStrategy.register_strategies(StrategyRegistry)
FabricSparseLoCoStrategy.register_strategies(STRATEGY_REGISTRY)

__all__ = [
    "AdamS",
    "CheckpointError",
    "ExchangeStats",
    "FabricScapeStrategy",
    "FabricSparseLoCoStrategy",
    "PythonSource",
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
