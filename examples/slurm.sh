#!/usr/bin/env bash
# Trains on several nodes under Slurm: one launcher a node, one process a GPU.
#
#   OUTPUT_DIR=/data/out sbatch examples/slurm.sh --model /data/Qwen3-8B --dataset /data/chats.jsonl --save_steps 200
#
# What follows slurm.sh goes to examples/finetune.py. All nodes must see the same files, OUTPUT_DIR included. Submitted
# again with the same OUTPUT_DIR, or started again by Slurm, the run resumes from its newest checkpoint.
#SBATCH --job-name=hotspa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM two minutes before the end: all ranks finish the mini-batch and save at the same step.
#SBATCH --signal=TERM@120
set -euo pipefail
# The time that the launcher gives them for it; 30 s when left out.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100

OUTPUT_DIR=${OUTPUT_DIR:-out/$SLURM_JOB_ID}
if compgen -G "$OUTPUT_DIR/checkpoint-*" >/dev/null; then
    set -- "$@" --resume_from_checkpoint True
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
# Every node gets the same address, the first node's, and a port of this job's own.
MAIN_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OUTPUT_DIR GPUS_PER_NODE MAIN_ADDRESS MAIN_PORT

# Without this a restarted job can meet the dead attempt's addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Gloo and NCCL take the first network they find; name yours where nodes have several.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-8} / GPUS_PER_NODE))}
# Calibrations and scans of lengths are kept here; a folder that all nodes share spares each of them the work.
export HF_HOTSPA_CACHE=${HF_HOTSPA_CACHE:-$PWD/.cache/hf_hotspa}

# SLURM_NODEID is known on the nodes only, so the single quotes keep it until there. --machine_rank, --main_process_ip
# and --main_process_port replace what the file says; --num_processes counts the processes of all nodes.
# Strategies are `auto` unless you give --hotspa_strategies; their dp*tp*pp is the number of all processes.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch \
    --config_file examples/accelerate_configs/two_nodes_16_gpus.yaml \
    --num_machines "$SLURM_JOB_NUM_NODES" \
    --num_processes "$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_ADDRESS" \
    --main_process_port "$MAIN_PORT" \
    examples/finetune.py --bf16 --output_dir "$OUTPUT_DIR" "$@"' finetune "$@"
