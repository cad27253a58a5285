"""What both hosts do when a model and its optimizers are set up, and when they clip. Knows neither host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NoReturn

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_scape.comm.collectives import Communicator, broadcast_tensors, world_size
from lightning_scape.core import method
from lightning_scape.core.private_names import IGNORED_BY_DDP, scaler_device
from lightning_scape.core.replicas import check_same_setup


def resolve_config(name: str | None, config: Any, options: Mapping[str, Any]) -> Any:
    """One configuration from a strategy's two ways of giving it.

    Args:
        name: of the method; None: ``config`` says which.
        config: a whole configuration, or None.
        options: those of the method that were given by name.

    Raises:
        ValueError: an option is outside its rule, or is given beside ``config``.
        TypeError: ``config`` is not one of this method, or there is no such option.
    """
    kind = (method.method_of(config) if name is None else method.named(name)).config_class
    if config is None:
        return kind(**options)
    if not isinstance(config, kind):
        first = fields(kind)[0]
        raise TypeError(
            f"`config` must be a {kind.__name__} or None, got {config!r}. Write"
            f" `config={kind.__name__}({first.name}={first.default})`, or pass the options themselves by name."
        )
    if options:
        raise ValueError(
            "Options must be given by name or in `config`, not in both, got `config` and"
            f" {', '.join(f'{option}={value!r}' for option, value in options.items())}. Drop one of the two, or use"
            " `dataclasses.replace(config, ...)`."
        )
    return config


def clip_gradients(optimizer: object, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
    """Clip the averaged gradient of the coming step by its norm; the gradients themselves are left alone.

    No rank has the averaged gradient. So only the factor is determined here (one small message), and the step applies
    it. Has the signature of a precision plugin's ``clip_gradients`` and takes its place.

    Args:
        optimizer: one under a method that clips, wrapped or not.
        clip_val: the bound; 0 or less means no clipping, as everywhere in Lightning.
        gradient_clip_algorithm: ``"norm"``.

    Raises:
        ValueError: another algorithm.
        RuntimeError: the optimizer is under no method.
    """
    if clip_val <= 0:
        return
    algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
    if algorithm != "norm":
        refuse_to_clip_by_value(f"gradient_clip_algorithm={algorithm!r}")
    attached(optimizer).clip_grad_norm(clip_val)


def refuse_to_clip_by_value(got: str) -> NoReturn:
    """Raises ``ValueError``."""
    raise ValueError(
        f"Gradients must be clipped by norm, got {got}: no rank ever has the averaged gradient of a step, so its"
        ' entries cannot be bounded. Set gradient_clip_algorithm="norm" (Fabric: `max_norm`).'
    )


def attached(optimizer: object) -> method.Method:
    """The method of an optimizer that the host steps.

    Raises:
        RuntimeError: it is under none: ranks would train apart.
    """
    found = method.find(optimizer)
    if found is None:
        raise RuntimeError(
            "Every optimizer that is stepped must be under the strategy's method, got"
            f" {type(method.unwrapped(optimizer)).__name__}, which is not: it would take this rank's own gradient."
            " Return it from configure_optimizers, or put it into `trainer.optimizers` (Fabric: give it to"
            " fabric.setup), on all ranks."
        )
    return found


def sharded_scaler(scaler: GradScaler) -> GradScaler:
    """A scaler by which all ranks skip a step if one of them met an inf; a plain one decides alone.

    With a plain GradScaler the rank that met the inf would leave out the step's collectives, and the others would wait
    for it. The scale and how it grows are those of ``scaler``. With one rank nothing changes.
    """
    if not scaler.is_enabled() or world_size() == 1:
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if isinstance(scaler, ShardedGradScaler):
        return scaler
    sharded = ShardedGradScaler(device=scaler_device(scaler), process_group=None)
    sharded.load_state_dict(scaler.state_dict())
    return sharded


def start_equal(module: nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0, as DDP's constructor does. Collective.

    Untrained ones that DDP was told to leave alone are left out: they are each rank's own.

    Raises:
        ValueError: ranks have built different modules; on every rank.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    ignored = getattr(module, IGNORED_BY_DDP, ())
    state = [tensor for name, tensor in named if tensor.requires_grad or name not in ignored]
    described = [(tuple(each.shape), str(each.dtype)) for each in state]
    check_same_setup(Communicator(), {"parameters and buffers": described})
    broadcast_tensors(state)


def share_buffers(modules: Iterable[nn.Module]) -> None:
    """Overwrites the modules' buffers with rank 0's, but for those that DDP was told to leave alone. Collective.

    Those that a module updates from its own batch (BatchNorm's statistics) DDP hands on before each forward pass. Here
    each rank trains on with its own. Before a validation, a save and the end all take rank 0's, so that what is
    validated and saved is one model.

    Raises:
        ValueError: ranks have different buffers by now; on every rank.
    """
    buffers = [
        (name, buffer)
        for module in modules
        for name, buffer in module.named_buffers()
        if not isinstance(buffer, DTensor) and name not in getattr(module, IGNORED_BY_DDP, ())
    ]
    described = [(name, tuple(each.shape), str(each.dtype)) for name, each in buffers]
    check_same_setup(Communicator(), {"buffers": described})
    broadcast_tensors(each for _, each in buffers)


def check_apart(optimizers: Iterable[Optimizer]) -> None:
    """Raises ``ValueError`` where two optimizers train one parameter, for a method with local steps."""
    trained = [id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]]
    if len(set(trained)) < len(trained):
        raise ValueError(
            "With local steps each parameter must have one optimizer, got one that two train: at an exchange each would"
            " undo what the other has done. Give it to one of them, or take ScapeStrategy."
        )
