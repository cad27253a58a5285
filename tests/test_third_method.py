"""examples/third_method: a method from outside trains under every host, is saved and resumed, by registering itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_helpers import MARKS, GivenRanks, Regression, loader, make_trainer, weights
from warm_python import warm_python

from lightning_scape import FabricMethodStrategy, MethodStrategy, ScapeMonitor
from lightning_scape.core import method
from lightning_scape.planning.cost_model import step_costs
from lightning_scape.tools.commands import main

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "third_method"))
import diloco

pytestmark = MARKS
RunRanks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = Path(diloco.__file__).parent
CONFIG = diloco.DiLoCoConfig(sync_every=4)


def test_the_example_has_at_most_250_lines() -> None:
    files = EXAMPLE.glob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 250


@pytest.mark.parametrize("option", [{"sync_every": 1.5}, {"outer_lr": -0.7}, {"outer_momentum": 1.0}])
def test_options_outside_their_rules_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got {option[name]}"):
        diloco.DiLoCoConfig(**option)


def _fit(
    rank: int, world_size: int, steps: int, saved: str | None = None, resumed: str | None = None, **options: Any
) -> Tensor:
    model = Regression()
    callbacks: list[Any] = [ModelCheckpoint(saved, filename="c", save_top_k=1, monitor=None)] if saved else []
    trainer = make_trainer(
        MethodStrategy(CONFIG, **options), max_steps=steps, max_epochs=-1, callbacks=callbacks,
        enable_checkpointing=bool(saved),
    )  # fmt: skip
    trainer.fit(model, ckpt_path=resumed)
    return weights(model)


def expected(world_size: int, steps: int) -> Tensor:
    """The same by hand: replicas in one process, an outer SGD of torch's over what they have moved."""
    batches = [list(loader())[rank::world_size] for rank in range(world_size)]
    replicas = [Regression() for _ in range(world_size)]
    inner = [torch.optim.AdamW(replica.parameters(), 1e-2) for replica in replicas]
    start = [nn.Parameter(p.detach().clone()) for p in replicas[0].parameters()]
    outer = torch.optim.SGD(start, CONFIG.outer_lr, momentum=CONFIG.outer_momentum, nesterov=True)
    for step in range(steps):
        for replica, optimizer, mine in zip(replicas, inner, batches, strict=True):
            inputs, targets = mine[step % len(mine)]
            optimizer.zero_grad()
            nn.functional.mse_loss(replica.net(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % CONFIG.sync_every and step + 1 < steps:
            continue
        for place, begun in enumerate(start):
            begun.grad = torch.stack([begun - [*each.parameters()][place] for each in replicas]).mean(0).detach()
        outer.step()
        with torch.no_grad():
            for replica in replicas:
                for parameter, begun in zip(replica.parameters(), start, strict=True):
                    parameter.copy_(begun)
    return weights(replicas[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_diloco(run_ranks: RunRanks, world_size: int) -> None:
    found = run_ranks(_fit_in_order, world_size, 10)
    assert all(torch.equal(found[0], each) for each in found)
    torch.testing.assert_close(found[0], expected(world_size, 10), rtol=1e-5, atol=1e-6)


def test_one_rank_sends_nothing() -> None:
    module = Regression()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    found = diloco.DiLoCo.attach(optimizer, CONFIG, method.Surroundings())
    for inputs, targets in list(loader())[: CONFIG.sync_every]:
        nn.functional.mse_loss(module.net(inputs), targets).backward()
        optimizer.step()
    assert found.progress().ended == 1
    assert found.stats()["bytes_total"] == 0


class InOrder(Regression):
    """Deals batches as `expected` does."""

    def train_dataloader(self) -> Any:
        batches = list(loader())[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else list(loader())
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _fit_in_order(rank: int, world_size: int, steps: int) -> Tensor:
    model = InOrder()
    make_trainer(MethodStrategy(CONFIG), max_steps=steps, max_epochs=-1, use_distributed_sampler=False).fit(model)
    return weights(model)


def _resumed(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> bool:
    whole = _fit(rank, world_size, 10)
    _fit(rank, world_size, 7, f"{folder}/saved", **options)  # inside a window, which a fit that ends here ends early
    goes_on = _fit(rank, world_size, 10, resumed=f"{folder}/saved/c.ckpt")
    again = _fit(rank, world_size, 10, resumed=f"{folder}/saved/c.ckpt")
    return torch.equal(goes_on, again) and bool(torch.isfinite(whole).all())


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"state_dict_type": "sharded", "async_save": True}])
def test_a_checkpoint_resumes_alike_on_any_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert run_ranks(_resumed, 2, str(tmp_path), options) == [True, True]
    saved = str(tmp_path / "saved" / "c.ckpt")
    assert main(["verify", saved]) == 0
    assert main(["consolidate", saved, str(tmp_path / "one.ckpt")]) == 0
    for number in (1, 3):
        ends = run_ranks(_fit, number, 10, None, str(tmp_path / "one.ckpt"))
        assert all(torch.equal(ends[0], each) for each in ends)
        assert torch.equal(ends[0], run_ranks(_fit, number, 10, None, saved)[0])


def _saved(rank: int, world_size: int, folder: str) -> None:
    _fit(rank, world_size, 2, folder, state_dict_type="sharded")


def _verified(*options: str) -> subprocess.CompletedProcess[str]:
    """By a process that knows the package's own methods."""
    command = [warm_python(), "-m", "lightning_scape", "verify", *options]
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)


def test_commands_import_the_module_that_registers_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    """No command knew a method from outside: its checkpoints were said to be damaged."""
    run_ranks(_saved, 1, str(tmp_path / "saved"))
    path = str(tmp_path / "saved" / "c.ckpt")
    without = _verified(path)
    assert without.returncode == 1
    assert without.stderr.endswith("take `--import MODULE`), or load another checkpoint.\n")
    assert _verified("--import", "diloco", path).returncode == 0
    unknown = _verified("--import", "no_such_module", path)
    assert unknown.returncode == 2
    assert "--import must name a module that Python finds, got 'no_such_module'" in unknown.stderr


class OneBatch(Regression):
    """Every step of a rank has the same batch: where in an epoch a loader goes on does not matter."""

    def train_dataloader(self) -> Any:
        return DataLoader([list(loader())[dist.get_rank()]] * 20, batch_size=None)  # type: ignore[arg-type]


def _never_stopped(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor]:
    found = []
    for resumed in (None, f"{folder}/step=7.ckpt"):  # inside a window
        saves = ModelCheckpoint(folder, "{step}", monitor=None, every_n_train_steps=7, save_top_k=-1)
        model, strategy = OneBatch(), MethodStrategy(CONFIG)
        trainer = make_trainer(
            strategy, max_steps=10, callbacks=[saves], enable_checkpointing=True, use_distributed_sampler=False
        )
        trainer.fit(model, ckpt_path=resumed)
        found.append(weights(model))
    return found[0], found[1]


def test_a_resumed_fit_ends_as_one_that_never_stopped(run_ranks: RunRanks, tmp_path: Path) -> None:
    for whole, resumed in run_ranks(_never_stopped, 2, str(tmp_path)):
        assert torch.equal(whole, resumed)


def _in_fabric(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor]:
    def train(steps: range, resumed: bool) -> Tensor:
        fabric = L.Fabric(
            accelerator="cpu", devices=world_size, strategy=FabricMethodStrategy(CONFIG), plugins=[GivenRanks()]
        )
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Linear(7, 3)
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
        state = {"net": net, "optimizer": optimizer}
        if resumed:
            fabric.load(f"{folder}/fabric", state)
        batches = list(loader())[rank::world_size]
        for step in steps:
            inputs, targets = batches[step % len(batches)]
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()
        if steps.stop == 6:
            fabric.save(f"{folder}/fabric", state)
        return weights(net)

    whole = train(range(12), False)
    train(range(6), False)  # inside a window
    return whole, train(range(6, 12), True)


def test_under_fabric_it_resumes_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    (first, resumed), (second, _) = run_ranks(_in_fabric, 2, str(tmp_path))
    assert torch.equal(first, second)
    assert torch.equal(first, resumed)


def _monitored(rank: int, world_size: int, folder: str) -> dict[str, float]:
    trainer = make_trainer(MethodStrategy(CONFIG), max_steps=9, max_epochs=-1, callbacks=[ScapeMonitor(report=folder)])
    trainer.fit(Regression())
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "/" in name}


@pytest.mark.few(0)
def test_the_monitor_logs_and_reports_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run_ranks(_monitored, 2, str(tmp_path))[0] == {"diloco/compression": 4.0}
    assert "DiLoCo" in (tmp_path / "report.html").read_text(encoding="utf-8")


def _under_litgpt(rank: int, world_size: int, out: str) -> str:
    from lightning_scape.tools import litgpt_cli

    for name in ("run", "run"):
        sys.argv = [
            *("litgpt-scape", "pretrain", f"--config={out}/tiny.yaml", "--diloco.sync_every=2"),
            *("--model_config.n_embd=32", "--model_config.block_size=32", "--model_config.n_layer=1"),
            *("--model_config.intermediate_size=64", "--data.max_bytes=300000", f"--devices={world_size}"),
            *("--train.global_batch_size=8", "--train.micro_batch_size=2", "--train.max_tokens=1024"),
            *("--train.lr_warmup_steps=1", "--train.save_interval=2", "--eval.max_iters=1"),
            *(f"--tokenizer_dir={ROOT / 'configs' / 'byte_tokenizer'}", f"--out_dir={out}/{name}", "--resume=auto"),
        ]
        with torch.compiler.set_stance("force_eager"):
            litgpt_cli.main()
    return (Path(out) / "run" / "final" / "hyperparameters.yaml").read_text(encoding="utf-8")


@pytest.mark.few(0)
def test_litgpts_command_line_trains_and_resumes_with_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("litgpt")
    tiny = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text(encoding="utf-8"))
    del tiny["scape"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    recorded = yaml.safe_load(run_ranks(_under_litgpt, 2, str(tmp_path))[0])
    assert recorded["diloco"]["sync_every"] == 2


def test_nothing_of_the_package_names_it() -> None:
    assert method.named("diloco") is diloco.DiLoCo
    sources = (ROOT / "lightning_scape").rglob("*.py")
    named = [path.name for path in sources if "diloco" in path.read_text(encoding="utf-8").lower()]
    assert named == ["method.py"] or named == []


def test_litgpts_command_line_knows_its_options() -> None:
    pytest.importorskip("litgpt")
    from lightning_scape.tools import litgpt_cli

    assert litgpt_cli.split_arguments(["--diloco.outer_lr=5e-1"]) == ({"diloco": {"outer_lr": 0.5}}, [])
    with pytest.raises(ValueError, match=r"An option of DiLoCo must be one of .*Did you mean outer_lr\?"):
        litgpt_cli.split_arguments(["--diloco.outer_l=1"])
    assert "--diloco.outer_lr OUTER_LR" in litgpt_cli.options_help()


def test_a_plan_has_a_method_from_outside_that_says_what_its_steps_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing let the command know of it."""
    pytest.importorskip("litgpt")
    source = "import diloco\nfrom lightning_scape.sparseloco.cost import *\ndiloco.DiLoCo.step_cost = SparseLoCoCost()"
    (tmp_path / "planned.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(diloco.DiLoCo, "step_cost", None)
    given = ["--model=pythia-14m", "--nodes=2", "--bandwidth=10mbit", "--step-compute=350ms"]
    assert [main(["plan", *given, *more]) for more in ([], ["--import", "planned"])] == [0, 0]
    assert capsys.readouterr().out.count("| H = 30 |") == 3  # once without, twice with


def test_a_plan_leaves_out_a_method_that_does_not_say_what_its_steps_cost() -> None:
    assert "diloco" in method.names()
    assert "diloco" not in step_costs()
