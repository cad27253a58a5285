"""SparseLoCo (arXiv 2508.15706): many local steps between sparse, quantized exchanges of pseudo-gradients."""

from lightning_scape.sparseloco.algorithm import ExchangeStats
from lightning_scape.sparseloco.config import SparseLoCoConfig
from lightning_scape.sparseloco.wrapper import SparseLoCo

__all__ = ["ExchangeStats", "SparseLoCo", "SparseLoCoConfig"]
