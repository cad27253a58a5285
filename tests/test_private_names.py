"""Private names of torch's and Lightning's stand in two files, and are there in the installed packages."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.fabric.strategies as of_fabric
import lightning.fabric.strategies.launchers.multiprocessing as in_fabrics
import lightning.fabric.strategies.strategy as of_fabrics
import lightning.pytorch.strategies as of_trainer
import lightning.pytorch.strategies.launchers.multiprocessing as in_trainers
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.amp.grad_scaler import GradScaler
from torch.distributed import HashStore  # type: ignore[attr-defined] # without a mark for mypy
from torch.nn.parallel import DistributedDataParallel

from lightning_scape.comm.collectives import timeout_of

ROOT = Path(__file__).resolve().parent.parent / "lightning_scape"
FILES = ("core/private_names.py", "hosts/private_names.py")
OTHERS = {
    "ops/cpu/numbers.py": "numba's: the one file that compiles with it, and does without these names",
}
"""Files that use private names of one more package."""
OPEN = re.compile(r"_foreach_\w+$|_(replace|fields|asdict|make|exit)$")
"""Public in spite of their names: torch documents the first, Python the others."""
STRINGS = re.compile(r"_lightning_scape_\w+|_scape_\w+|_MEM_FORMAT_ENCODING|_sysconfigdata|_notebook|_[PT]$")
"""What only looks like an attribute: our own on the user's objects, names in files, parts of names."""


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def _scheduled() -> torch.optim.SGD:
    optimizer = _sgd()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "_get_default_store": (dist.distributed_c10d._get_default_store, []),
    "_validate_keys_for_strict_loading": (
        of_fabrics._validate_keys_for_strict_loading,
        ["requested_keys", "checkpoint_keys", "strict"],
    ),
    "_sigterm_notifier_fn": (_SignalConnector._sigterm_notifier_fn, ["self", "signum", "_"]),
    "_slurm_sigusr_handler_fn": (_SignalConnector._slurm_sigusr_handler_fn, ["self", "signum", "_"]),
    "_broadcast_sigterm_tensor": (_TrainingEpochLoop._broadcast_sigterm_tensor, ["self"]),
    "_configure_launcher": (of_trainer.DDPStrategy._configure_launcher, ["self"]),
    "_configure_launcher of Fabric": (of_fabric.DDPStrategy._configure_launcher, ["self"]),
    "_get_process_group_backend": (of_trainer.DDPStrategy._get_process_group_backend, ["self"]),
    "_get_process_group_backend of Fabric": (of_fabric.DDPStrategy._get_process_group_backend, ["self"]),
    "_set_world_ranks": (of_fabric.DDPStrategy._set_world_ranks, ["self"]),
    "_setup_distributed": (of_fabric.DDPStrategy._setup_distributed, ["self"]),
    "_convert_stateful_objects_in_state": (
        of_fabric.DDPStrategy._convert_stateful_objects_in_state,
        ["self", "state", "filter"],
    ),
}
"""Functions, and their arguments."""
CLASSES = {
    "_BatchNorm": torch.nn.BatchNorm1d.__mro__[1],
    "_BackwardSyncControl": of_fabrics._BackwardSyncControl,
    "_MockOptimizer": _MockOptimizer,
    "_WrappingCheckpointIO": _WrappingCheckpointIO,
    "_MultiProcessingLauncher": in_trainers._MultiProcessingLauncher,
    "_MultiProcessingLauncher of Fabric": in_fabrics._MultiProcessingLauncher,
}
VALUES: dict[str, Callable[[], object]] = {
    "_C": lambda: torch._C.PyTorchFileReader,
    "_ddp_params_and_buffers_to_ignore": lambda: (
        (
            module := torch.nn.Linear(1, 1),
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"]),
        )[0]._ddp_params_and_buffers_to_ignore
    ),
    "_optimizer": lambda: vars(LightningOptimizer(_sgd()))["_optimizer"],
    "_optimizer of Fabric": lambda: vars(_FabricOptimizer(_sgd(), of_fabric.SingleDeviceStrategy()))["_optimizer"],
    "_profiler_enabled": lambda: torch.autograd._profiler_enabled() in (True, False),
    "_world": lambda: dist.distributed_c10d._world.pg_names == {},
    "_version": lambda: torch.zeros(1).add_(1)._version + 1,
    "_optimizer_step_pre_hooks": lambda: _sgd()._optimizer_step_pre_hooks is not None,
    "_optimizer_step_post_hooks": lambda: _sgd()._optimizer_step_post_hooks is not None,
    "_optimizer_state_dict_pre_hooks": lambda: not _sgd()._optimizer_state_dict_pre_hooks,
    "_optimizer_state_dict_post_hooks": lambda: not _sgd()._optimizer_state_dict_post_hooks,
    "_optimizer_load_state_dict_pre_hooks": lambda: not _sgd()._optimizer_load_state_dict_pre_hooks,
    "_optimizer_load_state_dict_post_hooks": lambda: not _sgd()._optimizer_load_state_dict_post_hooks,
    "_opt_called": lambda: _scheduled()._opt_called,
    "_wrapped_by_lr_sched": lambda: _scheduled().step._wrapped_by_lr_sched,
    "_device": lambda: GradScaler("cpu")._device,
    "_step_supports_amp_scaling": lambda: '"_step_supports_amp_scaling"' in inspect.getsource(GradScaler.step),
    "_getframe": lambda: inspect.currentframe() is not None,
    "_signal_connector": lambda: isinstance(Trainer(**QUIET)._signal_connector, _SignalConnector),
    "_checkpoint_connector": lambda: isinstance(Trainer(**QUIET)._checkpoint_connector, _CheckpointConnector),
    "_batches_that_stepped": lambda: Trainer(**QUIET).fit_loop.epoch_loop._batches_that_stepped + 1,
    "_skip_backward": lambda: Trainer(**QUIET).fit_loop._skip_backward is False,
    "_start_method": lambda: of_trainer.DDPStrategy()._start_method == of_fabric.DDPStrategy()._start_method,
    "_launcher": lambda: of_trainer.DDPStrategy()._launcher is of_fabric.DDPStrategy()._launcher,
    "_checkpoint_io": lambda: of_trainer.DDPStrategy()._checkpoint_io is of_fabric.DDPStrategy()._checkpoint_io,
    "_layer_sync": lambda: of_trainer.DDPStrategy()._layer_sync is None,
    "_backward_sync_control": lambda: of_fabric.DDPStrategy()._backward_sync_control,
}
"""Attributes: each says something that is true of them."""
OF_A_GROUP = {"_get_backend", "_device_types", "_timeout"}
"""By :func:`test_a_group_says_how_long_it_waits`."""
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

REPLACED = [
    (Precision, "clip_gradients", ["self", "optimizer", "clip_val", "gradient_clip_algorithm"]),
    (Precision, "post_backward", ["self", "tensor", "module"]),
    (FabricPrecision, "forward_context", ["self"]),
    (ProgressBar, "get_metrics", ["self", "trainer", "pl_module"]),
    (Trainer, "save_checkpoint", ["self", "filepath", "weights_only", "storage_options"]),
    (_CheckpointConnector, "dump_checkpoint", ["self", "weights_only"]),
    (_CheckpointConnector, "resume_start", ["self", "checkpoint_path", "weights_only"]),
    (saving, "pl_load", ["path_or_url", "map_location", "weights_only"]),
]
"""Public functions in whose place the hosts put others for a fit."""


def private_names(source: str) -> set[str]:
    """All that a source imports, reads, sets or defines, and the strings that may be attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found if re.match(r"_[A-Za-z]", name) and not OPEN.match(name)}


def own_names(source: str) -> set[str]:
    """What a source gives a name to by itself: functions, classes, variables, attributes of ``self`` and ``cls``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls", "machine") else set()
    return found


def _sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def _elsewhere() -> dict[str, str]:
    return {name: source for name, source in _sources().items() if name not in (*FILES, *OTHERS)}


def test_no_other_file_uses_a_private_name_of_another_package() -> None:
    own = set().union(*map(own_names, _elsewhere().values()))
    found = {name: private_names(source) - own for name, source in _elsewhere().items()}
    left = {name: {each for each in names if not STRINGS.match(each)} for name, names in found.items()}
    assert {name: names for name, names in left.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("trainer._signal_connector.received", {"_signal_connector"}),
        ("from torch._C import x", {"_C"}),
        ("from a.b import _PATH", {"_PATH"}),
        ("setattr(plugin, '_device', 1)", {"_device"}),
        ("group._timeout = 3", {"_timeout"}),
        ("torch._foreach_mul(x, y)._replace(z=__name__)", set()),
    ],
)
def test_a_private_name_is_found(source: str, names: set[str]) -> None:
    assert private_names(source) - own_names(source) == names


def test_what_is_ones_own_is_not() -> None:
    source = (
        "class A:\n    def __init__(self):\n        self._x = 1\n    def _f(self):\n        return self._x + a._f()\n"
    )
    assert private_names(source) - own_names(source) == set()


def _classes() -> Iterator[tuple[str, type]]:
    for name in _elsewhere():
        if name.startswith(("ops/cuda", "__main__")) or "litgpt" in name:
            continue
        module = importlib.import_module(".".join(("lightning_scape", *Path(name).with_suffix("").parts)))
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield name, value


def test_no_other_class_overrides_a_private_name_of_a_foreign_base() -> None:
    found = {
        f"{name}: {cls.__name__}.{each}"
        for name, cls in _classes()
        for base in cls.__mro__
        if base.__module__.split(".")[0] in ("torch", "lightning", "litgpt")
        for each in vars(cls).keys() & vars(base).keys()
        if re.match(r"_[a-z]", each) and not each.startswith(("_abc_", "_is_"))
    }
    assert found == set()


def test_each_of_them_is_checked_here() -> None:
    used = set().union(*(private_names(_sources()[name]) for name in FILES))
    checked = {name.split(" ")[0] for name in (*FUNCTIONS, *CLASSES, *VALUES, *OF_A_GROUP)}
    assert used == checked


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_there_and_takes_what_we_give_it(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    assert function.__name__ == name.split(" ")[0]
    assert list(inspect.signature(function).parameters) == arguments


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_there(name: str) -> None:
    assert inspect.isclass(CLASSES[name])
    assert CLASSES[name].__name__ == name.split(" ")[0]


@pytest.mark.parametrize("name", VALUES)
def test_an_attribute_is_there(name: str) -> None:
    assert VALUES[name]()


def test_a_group_says_how_long_it_waits() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert timeout_of(None) == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("owner", "name", "arguments"), REPLACED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_the_hosts_replace_is_there(owner: Any, name: str, arguments: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters)[: len(arguments)] == arguments
