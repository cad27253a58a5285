"""LitGPT under SCAPE: its model families, its training function, our configuration files for it, the byte data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launcher
import lightning as L
import pytest
import short_form
import torch
import torch.distributed as dist
import yaml
from python_source import PythonSource
from torch import Tensor

pytest.importorskip("litgpt", reason="tests of LitGPT need litgpt")

from litgpt import GPT, Config, Tokenizer
from litgpt.args import EvalArgs, TrainArgs
from litgpt.pretrain import main as pretrain_main
from litgpt.pretrain import setup as pretrain_setup
from litgpt.utils import chunked_cross_entropy

from lightning_scape import (
    FabricScapeStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
)
from lightning_scape.tools import litgpt_cli

RunRanks = Callable[..., list[Any]]
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
LITGPT_CONFIGS = sorted(
    path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith(("lightning_cli", "sparseloco"))
)
"""Those of SCAPE; test_sparseloco_litgpt.py has the others."""


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
    assert len(FAMILIES) == 13
    names = list(FAMILIES)[:: 1 if short_form.whole else 4]  # Mixtral is number 8
    first, second = run_ranks(train_families, 2, names)
    for name in names:
        for losses, _ in (first[name], second[name]):
            assert losses[-1] < losses[0] - 0.1, f"{name}: {losses}"
    # Mixtral: on each rank some expert met no token, and others on the other rank.
    assert first["Mixtral-8x7B-v0.1"][1] > 0
    assert second["Mixtral-8x7B-v0.1"][1] > 0


def test_tied_families_are_tied() -> None:
    for name in FAMILIES:
        model = family_model(name)
        tied = model.transformer.wte.weight is model.lm_head.weight
        assert tied == name.startswith(TIED)


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


def train_litgpt(rank: int, world_size: int, folder: str, compiled: bool = False) -> dict[str, Tensor]:
    fabric = make_fabric(world_size, SCAPE)
    sys.argv = ["litgpt", "tiny"]  # LitGPT parses it again when it saves
    loaded = Path(folder, "raw")
    loaded.mkdir(exist_ok=True)
    if rank == 0:
        torch.save(initial_weights(), loaded / "lit_model.pth")
    dist.barrier()
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@launcher.needs_compiler
def test_litgpts_own_compiled_training_agrees_with_the_eager_one_within_rounding(
    run_ranks: RunRanks, tmp_path: Path, compiler_cache: Path
) -> None:
    ends = {}
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        folder.mkdir()
        first, second = run_ranks(train_litgpt, 2, str(folder), compiled, timeout=500)
        assert all(torch.equal(first[name], second[name]) for name in first)
        ends[compiled] = first
    assert list(compiler_cache.rglob("*.so"))
    # A rounding may move an entry into another mask: then it differs by the size of a step, as few do.
    differences = torch.cat([(ends[True][name] - eager).abs().flatten() for name, eager in ends[False].items()])
    assert differences.quantile(0.99) < 1e-6
    assert differences.max() < 5 * LR


# ------------------------------------------------------------------------------------------------ finetuning


def finetune(rank: int, world_size: int, folder: str) -> list[str]:
    """Full finetuning by ``litgpt-scape finetune_full`` in two halves; what was said when it was resumed."""
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
    said = io.StringIO()
    for resume, steps in (("false", 4), ("auto", 8)):
        sys.argv = ["litgpt-scape", "finetune_full", str(base), f"--out_dir={folder}/out", f"--resume={resume}"]
        sys.argv += ["--data=JSON", f"--data.json_path={folder}/data.json", "--data.val_split_fraction=0.2"]
        sys.argv += ["--data.prompt_style=phi-2", "--data.num_workers=0", "--precision=32-true"]
        sys.argv += [f"--devices={world_size}", "--train.global_batch_size=4", "--train.micro_batch_size=1"]
        sys.argv += ["--train.epochs=100", f"--train.max_steps={steps}", "--train.lr_warmup_steps=1"]
        sys.argv += ["--train.max_seq_length=16"]
        sys.argv += ["--train.save_interval=4", "--eval.max_iters=2", "--eval.max_new_tokens=2"]
        sys.argv += ["--optimizer=AdamW"]
        if resume == "false":
            sys.argv += ["--scape.sparsity", "0.75", "--scape.check_replicas_every=1"]
        with contextlib.redirect_stderr(said):
            litgpt_cli.main()
    return said.getvalue().splitlines()


def test_full_finetuning_trains_saves_and_resumes(run_ranks: RunRanks, tmp_path: Path) -> None:
    said = run_ranks(finetune, 2, str(tmp_path))[0]
    assert any("options are those of the checkpoint" in line for line in said)
    for folder in ("step-000004", "step-000008", "final"):
        saved = yaml.safe_load((tmp_path / "out" / folder / "hyperparameters.yaml").read_text())
        assert ScapeConfig(**saved["scape"]) == ScapeConfig(sparsity=0.75, check_replicas_every=1)
    state = torch.load(tmp_path / "out" / "step-000008" / "lit_model.pth", weights_only=True)
    assert (state["step_count"], state["optimizer"]["scape"]["step"]) == (8, 8)
    final = torch.load(tmp_path / "out" / "final" / "lit_model.pth", weights_only=True)["model"]
    assert not torch.equal(final["lm_head.weight"], initial_weights()["lm_head.weight"])


# ------------------------------------------------------------------------------------------------ configuration files


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text())


def test_the_files_are_those_promised() -> None:
    assert LITGPT_CONFIGS == [
        "gpt_345m_openwebtext.yaml",
        "llama_1_8b_slimpajama.yaml",
        "llama_500m_slimpajama.yaml",
        "tiny_cpu.yaml",
        "tinyllama_1_1b.yaml",
    ]


@pytest.mark.parametrize("name", LITGPT_CONFIGS)
def test_a_file_states_its_models_parameter_count(name: str) -> None:
    content = read(name)
    with torch.device("meta"):
        model = GPT(Config(**content["model_config"]))
        if content["train"]["tie_embeddings"]:
            model.transformer.wte.weight = model.lm_head.weight
    count = sum(parameter.numel() for parameter in model.parameters())
    ends = {id(weight): weight.numel() for weight in (model.transformer.wte.weight, model.lm_head.weight)}
    head = " ".join((CONFIGS / name).read_text().split("model_name:")[0].replace("#", " ").split())
    assert f"{count:,} parameters" in head
    if name != "tiny_cpu.yaml":
        assert f"({count - sum(ends.values()):,} without" in head


def test_the_tinyllama_file_has_the_shape_that_litgpt_gives_it() -> None:
    theirs = dataclasses.asdict(Config.from_name("tiny-llama-1.1b"))
    ours = dataclasses.asdict(Config(**read("tinyllama_1_1b.yaml")["model_config"]))
    for name in ("hf_config", "padding_multiple"):
        theirs.pop(name)
        ours.pop(name)
    assert ours == theirs


@pytest.mark.parametrize("name", LITGPT_CONFIGS)
def test_a_file_gives_every_argument_and_explains_every_key(name: str) -> None:
    content = read(name)
    arguments = set(inspect.signature(pretrain_setup).parameters)
    assert set(content) == arguments - {"log"} | {"scape"}
    assert set(content["scape"]) == {field.name for field in dataclasses.fields(ScapeConfig)}
    lines = (CONFIGS / name).read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\s+\w+:", line) and not re.match(r"\s+(class_path|init_args):", line):
            assert re.search(r"# .*\(.*default: .*\)$", line), line
        elif re.match(r"(?!train|eval|scape)\w+:", line):
            assert re.search(r"\(.*(default|required).*\)$", lines[number - 1]), line


def parse_files(rank: int, world_size: int) -> None:
    from jsonargparse import capture_parser
    from litgpt.utils import CLI

    for name in LITGPT_CONFIGS:
        options, rest = litgpt_cli.take_sections([f"--config={CONFIGS / name}"])
        content = read(name)
        assert ScapeConfig(**options["scape"]) == ScapeConfig(**content["scape"])
        # litdata's data modules are named, not imported before a loader is asked for.
        parsed = capture_parser(lambda: CLI(pretrain_setup)).parse_args(rest)
        assert parsed.train.global_batch_size == content["train"]["global_batch_size"]
        assert parsed.train.max_tokens == content["train"]["max_tokens"]
        assert parsed.model_config.n_embd == content["model_config"]["n_embd"]
        assert parsed.data.class_path.endswith(content["data"]["class_path"].split(".")[-1])
        for key, value in content["data"]["init_args"].items():
            assert str(parsed.data.init_args[key]) == str(value)


def test_litgpts_parser_takes_every_file_as_it_is(run_ranks: RunRanks) -> None:
    run_ranks(parse_files, 1)


def run_files(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    """Files through ``litgpt-scape pretrain``: its model shrunk, its data replaced, everything else its own."""
    for name in names:
        shrunk = {"n_layer": 1, "n_embd": 32, "n_head": 4, "intermediate_size": 64, "block_size": 32}
        shrunk |= {"vocab_size": 256, "padded_vocab_size": 256}
        if "n_query_groups" in read(name)["model_config"]:
            shrunk["n_query_groups"] = 2
        options = {f"model_config.{key}": value for key, value in shrunk.items()} | {
            "data": "examples.python_source.PythonSource",
            "devices": world_size,
            "num_nodes": 1,
            "out_dir": f"{folder}/{name}",
            "logger_name": "csv",
            "tokenizer_dir": CONFIGS / "byte_tokenizer",
            "train.global_batch_size": 8,
            "train.micro_batch_size": 2,
            "train.max_tokens": 3 * 8 * 32,
            "train.lr_warmup_steps": 1,
            "train.log_interval": 1,
            "eval.max_iters": 1,
        }
        sys.argv = ["litgpt-scape", "pretrain", f"--config={CONFIGS / name}"]
        sys.argv += [f"--{key}={value}" for key, value in options.items()]
        with torch.compiler.set_stance("force_eager"):
            litgpt_cli.main()


@pytest.mark.few(0)
@pytest.mark.parametrize("names", [LITGPT_CONFIGS[::2], pytest.param(LITGPT_CONFIGS[1::2], marks=pytest.mark.slow)])
def test_every_file_trains_through_its_entry_point(run_ranks: RunRanks, tmp_path: Path, names: list[str]) -> None:
    run_ranks(run_files, 2, str(tmp_path), names)
    for name in names:
        content, final = read(name), tmp_path / name / "final"
        saved = yaml.safe_load((final / "hyperparameters.yaml").read_text())
        assert ScapeConfig(**saved["scape"]) == ScapeConfig(**content["scape"])
        assert saved["optimizer"] == content["optimizer"]
        assert saved["precision"] == content["precision"]
        state = torch.load(final / "lit_model.pth", weights_only=True)
        assert state["step_count"] == 3
        assert state["optimizer"]["scape"]["world_size"] == 2
        tied = torch.equal(state["model"]["lm_head.weight"], state["model"]["transformer.wte.weight"])
        assert tied == content["train"]["tie_embeddings"]


# ------------------------------------------------------------------------------------------------ data and tokenizer


def test_the_byte_tokenizer_maps_every_byte_to_its_value_and_back() -> None:
    tokenizer = Tokenizer(CONFIGS / "byte_tokenizer")
    text = "".join(map(chr, range(1, 128))) + "äß€ 中 🚀\n\tdef f():\n    return 1\n"
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (256, 0, None)
