"""Will it help here? The cost of a step, computed and measured, and what follows from it."""

from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning.conclusions import (
    WORTH,
    advice,
    best_dense,
    break_even_bandwidth,
    in_four_bits,
    least_bandwidth,
    show_bandwidth,
)
from lightning_scape.planning.cost_model import (
    BACKWARD_SHARE,
    BUCKET_BYTES,
    PEER_SECONDS,
    Job,
    Link,
    Machine,
    Prediction,
    Weight,
    compute_only,
    ddp,
    fsdp,
    nodes_share,
    predict,
    scaling,
    scape,
    zero1,
)
from lightning_scape.planning.local_steps import predict_local, sparseloco, which_method
from lightning_scape.planning.two_level import hsdp, predict_nodes, scape_nodes
from lightning_scape.scape.cost import scape_bytes, scape_traffic
from lightning_scape.scape.payoff import WARN_BELOW, dense_would_be_faster
from lightning_scape.sparseloco.cost import exchange_bytes

__all__ = [
    "BACKWARD_SHARE",
    "BUCKET_BYTES",
    "PEER_SECONDS",
    "WARN_BELOW",
    "WORTH",
    "Job",
    "Link",
    "Machine",
    "Prediction",
    "Weight",
    "advice",
    "best_dense",
    "break_even_bandwidth",
    "compute_only",
    "ddp",
    "dense_would_be_faster",
    "exchange_bytes",
    "fsdp",
    "hsdp",
    "in_four_bits",
    "least_bandwidth",
    "nodes_share",
    "predict",
    "predict_local",
    "predict_nodes",
    "scaling",
    "scape",
    "scape_bytes",
    "scape_nodes",
    "scape_traffic",
    "show_bandwidth",
    "show_bytes",
    "show_seconds",
    "sparseloco",
    "which_method",
    "zero1",
]
