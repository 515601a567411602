"""The text of `hf-hotspa train --help`, with the flags that most runs need in groups, of `run --help`, and of `hf-hotspa` alone.

Plain text, so that help does not import torch and transformers. `train --help-all` lists every flag.
"""

OVERVIEW = """\
hf-hotspa: fine-tuning where short rows run data parallel, and long rows tensor,
context or pipeline parallel, inside the same optimizer step.

will it help me? Seconds, no GPU:
  hf-hotspa plan --model Qwen/Qwen3-8B --dataset my.jsonl --gpus 8xh100-80g
train:
  hf-hotspa train --model Qwen/Qwen3-0.6B --dataset my.jsonl
what a run did, as a page:
  hf-hotspa report out

hf-hotspa --help lists all commands.
"""

HELP = """\
usage: hf-hotspa train --model MODEL --dataset DATASET [flags]

Fine-tunes a model on all GPUs of this machine, or, with --use_cpu, on CPU
processes. Under accelerate launch or torchrun: on the launcher's processes.

  hf-hotspa train --model Qwen/Qwen3-0.6B --dataset my.jsonl --output_dir out

model and data
  --model NAME          a folder or a name on the hub; --config: a new one
  --dataset DATA        a json, jsonl, csv, parquet or txt file, a folder, or a
                        name on the hub: text, messages, or prompt + completion
  --dataset_split PART  such as train[:90%] (default: train)
  --eval_dataset DATA   evaluated after each epoch; or --eval_split PART
  --tokenizer NAME      default: the model's
  --output_dir FOLDER   checkpoints, model and report (default: out/MODEL)

training
  --num_train_epochs N  passes over the data (default: 3); or --max_steps N
  --learning_rate X     default: 2e-5; of an adapter 2e-4, of a new model 3e-4
  --hotspa_mini_batch_size N
                        rows of one optimizer step, over all processes; or
                        --per_device_train_batch_size N (default: 8)
  --lr_scheduler_type, --warmup_steps, --weight_decay, --max_grad_norm, --optim
  --bf16                computation in bfloat16 (default on GPUs that have it)
  --seed N              of shuffling and dropout

adapters
  --lora_r N            trains a LoRA adapter of this rank, such as 16, with
                        --lora_alpha and --lora_targets

long rows and memory
  --hotspa_strategies auto
                        chosen by measured speed and memory (default), or
                        written: dp8:4096@16384,tp8:32768 (docs/strategies.md)
  --hotspa_overlong error|truncate|split|drop
                        what to do with rows longer than the longest bucket
  --hotspa_offload master
                        optimizer state in the memory of the host

saving and logs
  --save_steps N, --save_total_limit N, --resume_from_checkpoint FOLDER
  --logging_steps N     default: 10; --report_to tensorboard or wandb
  --measure_gain N      then time N mini-batches with and without switching
  --verbose             also print the calibration and the plan in numbers; the
                        report has them in any case

processes
  --processes N         default: the GPUs; with --use_cpu the cores, at most 4
  --use_cpu             CPU processes

--help-all lists all flags of TrainingArguments and of hf_hotspa. Flags may have
dashes for underscores, and hotspa_ in front may be left out.
"""

RUN_HELP = """\
usage: hf-hotspa run [flags] -- COMMAND

Runs a command that trains with a transformers.Trainer (or a subclass of any
library), and trains its model over switched layouts. Nothing of the command is
changed. Commands that train nothing do not change.

  hf-hotspa run -- axolotl train config.yaml
  hf-hotspa run --strategies dp8:4096,tp8:32768 -- swift sft --model ...
  hf-hotspa run -- torchrun --nproc_per_node 8 train.py
  hf-hotspa run -- accelerate launch --multi_gpu --num_processes 8 train.py

flags of HotSPaTrainingArguments, with or without hotspa_ in front:
  --strategies LIST     auto (default), or as in docs/strategies.md
  --model-path FOLDER   where the program loads the model of this folder, each
                        process reads its share alone
  --overlong, --offload master, --mini-batch-size N, ... (docs/flags.md)
"""
