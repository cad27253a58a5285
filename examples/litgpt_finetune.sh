#!/usr/bin/env bash
# Continued pretraining, then full finetuning, with LitGPT's own commands and SCAPE: offline, on two CPU processes.
#
#   examples/litgpt_finetune.sh [FOLDER]        # from the repository's root; FOLDER is out/litgpt_finetune
#
# With a real model, replace the first step by `litgpt download EleutherAI/pythia-160m`, and the byte tokenizer and the
# data by your own. STEPS (default 60) sets the length of each stage; EXTRA is added to every training command. LitGPT
# compiles the model when pretraining; where there is no C++ compiler set TORCHDYNAMO_DISABLE=1.
set -euo pipefail

out=${1:-out/litgpt_finetune}
steps=${STEPS:-60}
python=${PYTHON:-python}
scape=("$python" -m lightning_scape.tools.cli) # the same as the command litgpt-scape
read -ra extra <<< "${EXTRA:-}"
mkdir -p "$out"

echo "== 1. a base model: the tiny configuration, shortened"
"${scape[@]}" pretrain --config configs/tiny_cpu.yaml --out_dir "$out/base" \
  --train.max_tokens $((steps * 16 * 128)) --train.lr_warmup_steps 5 --eval.max_iters 4 "${extra[@]}"

echo "== 2. continued pretraining: its weights, other data (here: another order), a smaller learning rate, sparser"
# --initial_checkpoint_dir wants weights without optimizer state, as a download has them.
rm -rf "$out/weights"
"$python" -m litgpt convert_pretrained_checkpoint "$out/base/final" "$out/weights"
"${scape[@]}" pretrain --config configs/tiny_cpu.yaml --out_dir "$out/continued" \
  --initial_checkpoint_dir "$out/weights" --data.seed 7 --optimizer.init_args.lr 3e-4 \
  --scape.sparsity 0.99 --scape.dense_steps 10 \
  --train.max_tokens $((steps * 16 * 128)) --train.lr_warmup_steps 5 --eval.max_iters 4 "${extra[@]}"

echo "== 3. full finetuning on instructions"
"$python" - "$out/instructions.json" << 'PYTHON'
import json, sys

samples = [{"instruction": f"{a} + {b} =", "output": str(a + b)} for a in range(16) for b in range(16)]
json.dump(samples, open(sys.argv[1], "w"))
PYTHON
"${scape[@]}" finetune_full "$out/continued/final" --out_dir "$out/finetuned" \
  --data JSON --data.json_path "$out/instructions.json" --data.val_split_fraction 0.1 --data.num_workers 0 \
  --data.prompt_style phi-2 --precision 32-true --devices 2 \
  --train.global_batch_size 8 --train.micro_batch_size 4 --train.epochs 100 --train.max_steps "$steps" \
  --train.lr_warmup_steps 5 --eval.max_iters 4 --eval.max_new_tokens 5 --optimizer AdamW \
  --scape.sparsity 0.9 "${extra[@]}"

echo "== 4. ask it, with plain LitGPT"
"$python" -m litgpt generate "$out/finetuned/final" --prompt "3 + 4 =" --max_new_tokens 5
