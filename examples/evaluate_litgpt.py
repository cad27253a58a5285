"""LitGPT's `litgpt evaluate` (lm-eval) without a download: bits per byte of held-out Python, checked by a second way.

    pip install -c configs/constraints.txt -e '.[evaluate]'
    litgpt-scape pretrain --config configs/tiny_cpu.yaml
    python examples/evaluate_litgpt.py out/tiny_cpu/final

With --questions FOLDER the model also answers what python_questions.py has built there.

For LitGPT checkpoints over bytes (`configs/byte_tokenizer`) of Llama's architecture, or with a config.json beside them.
Two of lm-eval's perplexity tasks get held-out files of the standard library, laid out as local folders of the names
that the tasks ask for, instead of their own texts. Hence no figure here compares with published ones of these tasks.

pile_10k scores a file as it is: its bits per byte are the model's. wikitext first rewrites the file by rules for
WikiText's spaces (it takes one from every indentation) and then divides by the bytes of the original.

The second way is LitGPT's own model and torchmetrics on the same windows: as many bytes as the model's context, one
after the other from the start of the file, whose first byte follows the end mark as in training. A window's first byte
is predicted from one byte, its last from a full context. Only a file's last window reaches back, so that it is full,
too. Training's validation windows follow one another likewise, but across files, so that its loss is close, not equal.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.checkpoint.atomic_files import load_file
from lightning_scape.data import END_OF_FILE, Corpus, read_corpus

NEEDED = ("lm_eval", "transformers", "datasets", "litgpt")
INSTALL = "pip install -c configs/constraints.txt -e '.[evaluate]'"
SKIPPED = -100  # a target that is not scored
BATCH = 8
TOLERANCE = 1e-3  # bits per byte; both ways compute in fp32


class Task(NamedTuple):
    """Where lm-eval's task of that name looks for its documents."""

    folder: str
    config: str
    field: str


TASKS = {
    "wikitext": Task("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "page"),
    "pile_10k": Task("NeelNanda/pile-10k", "default", "text"),
}


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"This example must find {', '.join(NEEDED)}, got no {', '.join(missing)}: {INSTALL}")


def held_out_files(corpus: Corpus, max_bytes: int) -> dict[str, str]:
    """Whole validation files in a fixed random order, by name, as long as they fit."""
    contents = bytes(corpus.validation.tolist()).split(bytes([END_OF_FILE]))[:-1]
    files = dict(zip(corpus.validation_files, contents, strict=True))
    names, chosen, room = sorted(files), {}, max_bytes
    random.Random(0).shuffle(names)
    for name in names:
        if len(files[name]) <= room:
            try:
                chosen[name] = files[name].decode()
            except UnicodeDecodeError:  # lm-eval works on text
                print(f"left out, not UTF-8: {name}")
                continue
            room -= len(files[name])
    if not chosen:
        smallest = min(map(len, contents))
        raise SystemExit(f"--max-bytes must have room for one file, the smallest has {smallest:,}; got {max_bytes:,}.")
    return chosen


def keep_bytewise(files: dict[str, str], checkpoint: Path) -> dict[str, str]:
    """The files that lm-eval's tokenizer turns into their own bytes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix != END_OF_FILE or tokenizer.encode(" é\r\n") != list(" é\r\n".encode()):
        raise SystemExit(
            "The checkpoint's tokens must be bytes, with 0 before a document, got something else from the tokenizer in"
            f" {checkpoint}: train with tokenizer_dir: configs/byte_tokenizer, as configs/tiny_cpu.yaml does."
        )
    # The character that stands for byte 0 in tokenizer.json is the end mark to transformers, wherever it comes.
    kept = {name: text for name, text in files.items() if tokenizer.encode(text) == list(text.encode())}
    for name in files.keys() - kept.keys():
        print(f"left out, not read byte by byte: {name}")
    return kept


def lay_out(texts: list[str], work: Path) -> None:
    """The same documents for each task, as a data set that `datasets.load_dataset` finds below its working folder."""
    for task in TASKS.values():
        folder = work / task.folder
        folder.mkdir(parents=True)
        # Only one split is scored (wikitext: test, pile_10k: train); wikitext wants to see a train split, too.
        splits = "".join(f"  - split: {split}\n    path: documents.jsonl\n" for split in ("train", "test"))
        header = f"---\nconfigs:\n- config_name: {task.config}\n  data_files:\n{splits}---\n"
        (folder / "README.md").write_text(header)
        lines = [json.dumps({task.field: text}) + "\n" for text in texts]
        (folder / "documents.jsonl").write_text("".join(lines))


def llama_config(config: Any) -> dict[str, Any]:
    """LitGPT's `Config` as the config.json of a Hugging Face Llama.

    Raises:
        ValueError: The model is not one.
    """
    required = {
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "parallel_residual": False,
        "rotary_percentage": 1.0,
        "rope_condense_ratio": 1,
        "rope_adjustments": None,
        "bias": False,
        "attn_bias": False,
        "lm_head_bias": False,
        "norm_qk": False,
        "post_attention_norm": False,
        "post_mlp_norm": False,
        "scale_embeddings": False,
        "sliding_window_size": None,
        "attention_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_scores_scalar": None,
    }
    others = {name: got for name, value in required.items() if (got := getattr(config, name)) != value}
    if others:
        raise ValueError(
            f"Only models of Llama's architecture get a config.json from this example, got {others}; put one for the"
            " checkpoint's own architecture beside it."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,  # LitGPT's checkpoints hold both matrices
        "bos_token_id": None,
        "eos_token_id": END_OF_FILE,
    }


def run_litgpt_evaluate(checkpoint: Path, work: Path) -> dict[str, Any]:
    """What `litgpt evaluate` writes to results.json; the converted model lies in `work`, not beside the checkpoint."""
    command = [sys.executable, "-m", "litgpt", "evaluate", str(checkpoint), "--tasks", ",".join(TASKS)]
    command += ["--out_dir", "converted", "--batch_size", str(BATCH), "--device", "cpu", "--dtype", "float32"]
    print("$ litgpt", *command[3:], flush=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "cache")}
    log = work / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=work, env=os.environ | offline, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{log.read_text()[-5000:]}\n`litgpt evaluate` must end with status 0, got {done.returncode}.")
    return json.loads((work / "converted" / "results.json").read_text())


def answers(model: Path, questions: Path) -> dict[str, list[int]]:
    """By lm-eval: right (1) or wrong (0), question by question, for each kind of python_questions.py's.

    Args:
        model: a folder of Hugging Face's.
        questions: what python_questions.py has built.
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from python_questions import KINDS, TASK

    network = HFLM(pretrained=str(model), device="cpu", batch_size=BATCH, dtype="float32")
    tasks = TaskManager(include_path=str(questions.resolve()))
    results = evaluator.simple_evaluate(network, tasks=[TASK], task_manager=tasks, log_samples=True)
    samples = {kind: results["samples"][f"{TASK}_{kind}"] for kind in KINDS}
    return {
        kind: [int(s["acc"]) for s in sorted(of_kind, key=lambda s: s["doc_id"])] for kind, of_kind in samples.items()
    }


def tell_answers(found: dict[str, list[int]], model: str, questions: Path, out: Path | None) -> None:
    """Prints the share that is right, of each kind and of all; ``out`` gets every answer, and whose they are."""
    from python_questions import accuracy, with_all

    print(f"\n{'questions':<12} {'asked':>6} {'right':>7} {'standard error':>15}")
    for kind, right in with_all(found).items():
        share, error = accuracy(right)
        print(f"{kind:<12} {len(right):6,} {share:7.1%} {error:15.1%}")
    if out is not None:
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(questions.glob("*.jsonl")))).hexdigest()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"questions": digest[:16], "model": model, "answers": found}) + "\n")
        print(f"\neach answer is in {out}")


def windows(text: str, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [n, context]; every byte is a target once, the other targets are `SKIPPED`.

    `context` 4, bytes a to f, 0 the end mark: inputs 0abc, bcde; targets abcd, --ef.
    """
    tokens = [END_OF_FILE, *text.encode()]
    inputs, targets = [], []
    for start in range(0, len(tokens) - 1, context):
        end = min(start + context, len(tokens) - 1)
        begin = max(0, end - context)
        scored = [SKIPPED] * (start - begin) + tokens[start + 1 : end + 1]
        padding = context - (end - begin)  # on the right, where a causal model does not see it
        inputs.append(tokens[begin:end] + [END_OF_FILE] * padding)
        targets.append(scored + [SKIPPED] * padding)
    return torch.tensor(inputs).reshape(-1, context), torch.tensor(targets).reshape(-1, context)


@torch.inference_mode()
def bits(model: torch.nn.Module, texts: list[str], context: int) -> float:
    """What all the texts take together, in bits."""
    from torchmetrics.text import Perplexity

    perplexity, scored = Perplexity(ignore_index=SKIPPED).set_dtype(torch.float64), 0
    for text in texts:
        for inputs, targets in zip(*(part.split(BATCH) for part in windows(text, context)), strict=True):
            perplexity.update(model(inputs).double(), targets)
            scored += int((targets != SKIPPED).sum())
    assert scored == sum(len(text.encode()) for text in texts)
    return scored * math.log2(perplexity.compute().item())


def save_checkpoint(model: Any, folder: Path) -> None:
    """Writes a GPT of LitGPT's over bytes as a folder of LitGPT's, which this script takes."""
    from litgpt.utils import copy_config_files, save_config

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    save_config(model.config, folder)
    copy_config_files(Path(__file__).resolve().parents[1] / "configs" / "byte_tokenizer", folder)


def check_checkpoint(folder: Path) -> None:
    """Raises ValueError for a folder that is none of LitGPT's."""
    for name in ("lit_model.pth", "model_config.yaml"):
        if not (folder / name).is_file():
            raise ValueError(f"The checkpoint must be a folder with a {name}, got {folder}. Name LitGPT's.")


def load_model(config: Any, checkpoint: Path) -> torch.nn.Module:
    from litgpt import GPT

    state = load_file(checkpoint / "lit_model.pth")
    model = GPT(config)
    model.load_state_dict(state.get("model", state))
    return model.float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="LitGPT's folder, such as out/tiny_cpu/final")
    parser.add_argument("--max-bytes", type=int, default=100_000, help="of whole held-out files (default: 100000)")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="as in training (default: 0.05)")
    parser.add_argument("--questions", type=Path, help="folder of python_questions.py, to be answered too")
    parser.add_argument("--answers", type=Path, help="with --questions: file for every answer")
    options = parser.parse_args()
    if options.questions is not None and not (options.questions / "group.yaml").is_file():
        parser.error(
            f"--questions must be a folder that `python_questions.py build` wrote, got {options.questions}. Build it."
        )
    if options.answers is not None and options.questions is None:
        parser.error("--answers must come with --questions, got no questions. Build them, or leave it out.")
    check_installed()
    from litgpt import Config

    # transformers and datasets read it when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    checkpoint = options.checkpoint.resolve()
    try:
        check_checkpoint(checkpoint)
        config = Config.from_file(checkpoint / "model_config.yaml")
        made = None if (checkpoint / "config.json").exists() else llama_config(config)
        model = load_model(config, checkpoint)
        corpus = read_corpus(options.val_fraction)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    files = keep_bytewise(held_out_files(corpus, options.max_bytes), checkpoint)
    texts = list(files.values())
    size = sum(len(text.encode()) for text in texts)

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lay_out(texts, work)
        if made is not None:
            (work / "converted").mkdir()
            (work / "converted" / "config.json").write_text(json.dumps(made, indent=2))
        results = run_litgpt_evaluate(checkpoint, work)
        answered = answers(work / "converted", options.questions) if options.questions else None

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{parameters:,} parameters, context {config.block_size}. Held out of the standard library of Python")
    print(
        f"{sys.version.split()[0]} (corpus {corpus.fingerprint}): {len(texts)} files, {size:,} bytes. Bits per byte:\n"
    )
    print(f"{'task':<10} {'text':<12} {'lm-eval':>9} {'LitGPT':>9} {'difference':>11}")
    worst = 0.0
    for name in TASKS:
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        read = [sample["doc"][TASKS[name].field] for sample in samples]
        assert read == texts, "lm-eval read other documents than those laid out for it"
        scored = [sample["arguments"][0][0] for sample in samples]
        theirs, ours = results["results"][name]["bits_per_byte,none"], bits(model, scored, config.block_size) / size
        worst = max(worst, abs(theirs - ours))
        print(f"{name:<10} {'as it is' if scored == texts else 'rewritten':<12} {theirs:9.5f} {ours:9.5f}", end=" ")
        print(f"{theirs - ours:11.1e}")
    if worst > TOLERANCE:
        raise SystemExit(f"\nBoth must agree within {TOLERANCE} bits per byte, got {worst:.1e}: trust neither.")
    if answered is not None:
        tell_answers(answered, checkpoint.name, options.questions, options.answers)


if __name__ == "__main__":
    main()
