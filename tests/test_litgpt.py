"""LitGPT under SCAPE: its model families, its training function, our configuration files for it, the byte data."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
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
from python_source import PythonSource
from torch import Tensor

pytest.importorskip("litgpt", reason="tests of LitGPT need litgpt")

from litgpt import GPT, Config, Tokenizer
from litgpt.args import EvalArgs, TrainArgs
from litgpt.pretrain import main as pretrain_main
from litgpt.utils import chunked_cross_entropy

from lightning_scape import (
    FabricScapeStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
)
from lightning_scape.tools import litgpt as command

RunRanks = Callable[..., list[Any]]
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def assert_replicas_equal(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.detach().contiguous())
        for other in everyone:
            assert torch.equal(other, parameter)


def make_fabric(world_size: int, config: ScapeConfig) -> L.Fabric:
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=FabricScapeStrategy(config=config))
    fabric.launch()
    return fabric


# ------------------------------------------------------------------------------------------------ families

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "padded_vocab_size": 64, "block_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia-14m": {"intermediate_size": 64},
    "Llama-3-8B": {"n_query_groups": 2, "intermediate_size": 64},
    "Gemma-2-2b": {"n_query_groups": 2, "intermediate_size": 64, "sliding_window_size": 8},
    "Gemma-3-1b-it": {"n_query_groups": 1, "intermediate_size": 64, "sliding_window_size": 8},
    "phi-2": {"intermediate_size": 64},
    "Qwen2.5-0.5B": {"n_query_groups": 2, "intermediate_size": 64},
    "Qwen3-0.6B": {"n_query_groups": 2, "intermediate_size": 64},
    "Mistral-7B-v0.1": {"n_query_groups": 2, "intermediate_size": 64},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "intermediate_size": 32},
    "OLMo-1B-hf": {"intermediate_size": 64},
    "falcon-7b": {"n_query_groups": 1, "intermediate_size": 64},
    "stablelm-3b-4e1t": {"intermediate_size": 64},
    "gpt2": {"intermediate_size": 64},
}
TIED = ("Gemma", "gpt2")


def family_model(name: str) -> GPT:
    if name == "gpt2":  # LayerNorm, GELU, biases, one matrix for embedding and output
        shape = {"gelu_approximate": "tanh", "parallel_residual": False, "lm_head_bias": False, **SMALL}
        config = Config(name=name, vocab_size=64, **shape, **FAMILIES[name])
    else:
        config = Config.from_name(name, **{**SMALL, **FAMILIES[name]})
    torch.manual_seed(0)
    model = GPT(config)
    if name.startswith(TIED):
        model.transformer.wte.weight = model.lm_head.weight
    return model


def train_families(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[list[float], int]]:
    """Losses by family, and how many of its parameters had a gradient of zeros or none on this rank at first."""
    fabric = make_fabric(world_size, ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    results = {}
    for name in names:
        model = family_model(name)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
        # On each rank the same few tokens at every step: enough to learn, too few for every expert.
        tokens = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(rank))
        losses, untouched = [], 0
        for step in range(8):
            loss = chunked_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], chunk_size=0)
            fabric.backward(loss)
            if step == 0:
                untouched = sum(p.grad is None or not p.grad.any() for p in model.parameters())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert_replicas_equal(model)
        results[name] = (losses, untouched)
    return results


def test_families_learn_and_keep_replicas_bitwise_equal(run_ranks: RunRanks) -> None:
    names = list(FAMILIES)[::4]  # Mixtral is number 8
    first, second = run_ranks(train_families, 2, names)
    for name in names:
        for losses, _ in (first[name], second[name]):
            assert losses[-1] < losses[0] - 0.1, f"{name}: {losses}"
    # Mixtral: on each rank some expert met no token, and others on the other rank.
    assert first["Mixtral-8x7B-v0.1"][1] > 0
    assert second["Mixtral-8x7B-v0.1"][1] > 0


# ------------------------------------------------------------------------------------------------ four ways, one result

TINY = Config(
    name="tiny",
    block_size=16,
    vocab_size=256,
    padded_vocab_size=256,
    n_layer=1,
    n_head=2,
    n_embd=16,
    bias=False,
    norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
    intermediate_size=32,
)
SCAPE = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
LR, STEPS, MICRO, ACCUMULATE = 1e-2, 4, 2, 2
DATA = {"seed": 3}


def initial_weights() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return GPT(TINY).state_dict()


def built_model() -> GPT:
    model = GPT(TINY)
    model.load_state_dict(initial_weights())
    return model


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return chunked_cross_entropy(model(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())


def dense(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


def python_source() -> PythonSource:
    return PythonSource(batch_size=MICRO, context_length=TINY.block_size, **DATA)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_litgpt(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    fabric = make_fabric(world_size, SCAPE)
    sys.argv = ["litgpt", "tiny"]  # LitGPT parses it again when it saves
    loaded = Path(folder, "raw")
    loaded.mkdir(exist_ok=True)
    if rank == 0:
        torch.save(initial_weights(), loaded / "lit_model.pth")
    dist.barrier()
    with torch.compiler.set_stance("force_eager"):
        pretrain_main(
            fabric=fabric,
            devices=world_size,
            seed=1,
            initial_checkpoint_dir=loaded,
            resume=False,
            config=TINY,
            data=PythonSource(**DATA),
            out_dir=Path(folder, "out"),
            tokenizer_dir=None,
            tokenizer=None,
            train=TrainArgs(
                save_interval=None,
                global_batch_size=MICRO * ACCUMULATE * world_size,
                micro_batch_size=MICRO,
                max_tokens=STEPS * MICRO * ACCUMULATE * world_size * TINY.block_size,
                max_norm=0.5,
                lr_warmup_steps=0,
                min_lr=LR,  # so constant
                tie_embeddings=False,
            ),
            eval=EvalArgs(interval=2, max_iters=1),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1},
            },
        )
    dist.barrier()
    return torch.load(Path(folder, "out", "final", "lit_model.pth"), weights_only=True)["model"]


def train_fabric(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    fabric = make_fabric(world_size, SCAPE)
    model = built_model()
    model, optimizer = fabric.setup(model, dense(model))
    batches = iter(python_source().train_dataloader())
    for _ in range(STEPS):
        for micro in range(ACCUMULATE):
            with fabric.no_backward_sync(model, enabled=micro < ACCUMULATE - 1):
                fabric.backward(loss_of(model, next(batches)) / ACCUMULATE)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train_plain(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model = built_model()
    optimizer = ScapeOptimizer.from_optimizer(dense(model), SCAPE)
    batches = iter(python_source().train_dataloader())
    for _ in range(STEPS):
        for _ in range(ACCUMULATE):
            (loss_of(model, next(batches)) / ACCUMULATE).backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = built_model()

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense(self)


def train_trainer(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ScapeStrategy(config=SCAPE),
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=python_source())
    return weights(module.model)


def test_litgpt_trainer_fabric_and_plain_optimizer_end_bitwise_equal(run_ranks: RunRanks, tmp_path: Path) -> None:
    ends = [run_ranks(train, 2, str(tmp_path))[1] for train in (train_litgpt, train_fabric, train_plain, train_trainer)]
    start = initial_weights()
    for name, tensor in ends[0].items():
        assert not torch.equal(tensor, start[name])
        for end in ends[1:]:
            assert torch.equal(end[name], tensor), name


# ------------------------------------------------------------------------------------------------ the command


def finetune(rank: int, world_size: int, folder: str) -> None:
    """Full finetuning by ``litgpt-scape finetune_full`` in two halves."""
    base = Path(folder, "base")
    if rank == 0:
        base.mkdir()
        torch.save(initial_weights(), base / "lit_model.pth")
        (base / "model_config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(TINY)))
        for file in (CONFIGS / "byte_tokenizer").iterdir():
            shutil.copy(file, base)
        samples = [{"instruction": f"{n}+1", "output": str(n + 1)} for n in range(40)]
        Path(folder, "data.json").write_text(json.dumps(samples))
    dist.barrier()
    for resume, steps in (("false", 4), ("auto", 8)):
        sys.argv = ["litgpt-scape", "finetune_full", str(base), f"--out_dir={folder}/out", f"--resume={resume}"]
        sys.argv += ["--data=JSON", f"--data.json_path={folder}/data.json", "--data.val_split_fraction=0.2"]
        sys.argv += ["--data.prompt_style=phi-2", "--data.num_workers=0", "--precision=32-true"]
        sys.argv += [f"--devices={world_size}", "--train.global_batch_size=4", "--train.micro_batch_size=1"]
        sys.argv += ["--train.epochs=100", f"--train.max_steps={steps}", "--train.lr_warmup_steps=1"]
        sys.argv += ["--train.max_seq_length=16"]
        sys.argv += ["--train.save_interval=4", "--eval.max_iters=2", "--eval.max_new_tokens=2"]
        sys.argv += ["--optimizer=AdamW"]
        sys.argv += ["--scape.sparsity", "0.75", "--scape.check_replicas_every=1"]
        command.main()


def test_full_finetuning_trains_saves_and_resumes(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(finetune, 2, str(tmp_path))
    state = torch.load(tmp_path / "out" / "step-000008" / "lit_model.pth", weights_only=True)
    assert (state["step_count"], state["optimizer"]["scape"]["facts"]["step"]) == (8, 8)
    assert state["optimizer"]["scape"]["facts"]["config"]["sparsity"] == 0.75
    final = torch.load(tmp_path / "out" / "final" / "lit_model.pth", weights_only=True)["model"]
    assert not torch.equal(final["lm_head.weight"], initial_weights()["lm_head.weight"])


def test_processes_that_litgpt_starts_train_with_the_options_of_the_command(tmp_path: Path) -> None:
    """The section of the file, and the command line over it."""
    (tmp_path / "tiny.yaml").write_text(
        (CONFIGS / "tiny_cpu.yaml").read_text().partition("\nscape:")[0] + "\nscape: {sparsity: 0.5, max_skipped: 7}\n"
    )
    arguments = [f"--config={tmp_path / 'tiny.yaml'}", "--scape.sparsity", "0.75", f"--out_dir={tmp_path / 'out'}"]
    arguments += [f"--train.max_tokens={3 * 16 * 128}", "--eval.max_iters=1"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_scape.tools.litgpt", "pretrain", *arguments],
        cwd=CONFIGS.parent, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SCAPE: sends 25% of the entries per step" in done.stderr
    state = torch.load(tmp_path / "out" / "final" / "lit_model.pth", weights_only=True)
    assert state["optimizer"]["scape"]["facts"]["ranks"] == 2
    config = state["optimizer"]["scape"]["facts"]["config"]
    assert (config["sparsity"], config["max_skipped"]) == (0.75, 7)
    saved = yaml.safe_load((tmp_path / "out" / "final" / "hyperparameters.yaml").read_text())
    assert saved["train"]["max_tokens"] == 3 * 16 * 128
    assert "scape" not in saved  # plain LitGPT reads the folder


def sparse_and_local(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor]:
    """A window is open when LitGPT saves what a run ends with. Weights before that, and after."""
    command.register("sparseloco", {"sync_every": 2})
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy="sparseloco")
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(3):
        fabric.backward(model(torch.eye(4) * (rank + step)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    before = model.weight.detach().clone()
    fabric.save(Path(folder, "final", "lit_model.pth"), {"model": model})
    return before, model.weight.detach()


def test_the_final_model_of_sparseloco_is_that_of_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    (before, after), (other_before, other) = run_ranks(sparse_and_local, 2, str(tmp_path))
    assert not torch.equal(before, other_before)
    assert torch.equal(after, other)
    final = torch.load(tmp_path / "final" / "lit_model.pth", weights_only=True)
    assert torch.equal(final["model"]["weight"], after)


def test_options_and_sections_are_taken_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    given = ["pretrain", "--scape.sparsity", "0.9", "--seed=1", "--sparseloco.bits=4", "--scapegoat", "3"]
    ours, rest = command.split(given)
    assert ours == ["--scape.sparsity=0.9", "--sparseloco.bits=4"]
    assert rest == ["pretrain", "--seed=1", "--scapegoat", "3"]
    (tmp_path / "a.yaml").write_text("seed: 3\nscape:\n  sparsity: 0.9\n")
    (tmp_path / "b.yaml").write_text("seed: 4\n")
    arguments = ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}", "--config=none", "--seed=1"]
    sections, rest = command.take_sections(arguments)
    assert sections == ['--scape={"sparsity": 0.9}']
    assert rest == ["--config=seed: 3\n", f"--config={tmp_path / 'b.yaml'}", "--config=none", "--seed=1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrain", "--scape.sparsty=0.9"], "Unrecognized arguments: --scape.sparsty"),
        (["pretrain", "--scape.sparsity=often"], "sparsity"),
        (["pretrain", "--scape.sparsity=2"], "`sparsity` must be a number in [0.5, 1), or 0, got 2"),
        (["pretrain", "--scape.sparsity=0.9", "--sparseloco.bits=4"], "some of scape and sparseloco"),
        (["chat", "--scape.sparsity=0.9"], "--scape.sparsity=0.9 must follow pretrain or finetune_full, not chat"),
        (["--scape.sparsity", "0.9", "pretrain"], "must follow pretrain or finetune_full, not --scape.sparsity"),
    ],
)
def test_a_wrong_option_ends_with_status_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["litgpt-scape", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_explains_the_options_of_both_methods() -> None:
    text = "import sys; from lightning_scape.tools import litgpt; sys.argv[1:] = ['pretrain', '--help']; litgpt.main()"
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert re.search(r"--scape.sparsity SPARSITY\s+Share of the entries", said)
    assert re.search(r"--sparseloco.sync_every SYNC_EVERY\s+H: steps of the inner optimizer", said)


# ------------------------------------------------------------------------------------------------ configuration files


def test_the_byte_tokenizer_maps_every_byte_to_its_value_and_back() -> None:
    tokenizer = Tokenizer(CONFIGS / "byte_tokenizer")
    text = "".join(map(chr, range(1, 128))) + "äß€ 中 🚀\n\tdef f():\n    return 1\n"
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (256, 0, None)
