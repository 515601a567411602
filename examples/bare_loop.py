"""Your own loop without the Hugging Face Trainer: `SwitchedModel` stands where DDP's wrapper would, under a plain Accelerate
`Accelerator`. Trains a small new Llama on the texts of chats, on four CPU processes:

    accelerate launch --multi_gpu --num_processes 4 examples/bare_loop.py --use_cpu

On GPUs leave out `--use_cpu`. In one process: `python examples/bare_loop.py --strategies dp1:1024 --use_cpu`.
"""

import argparse
import json
from itertools import islice

import torch
from accelerate import Accelerator
from from_trl import CHATS, small_model, small_tokenizer
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorForSeq2Seq

from hf_hotspa import SwitchedModel, parse_buckets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="dp4:256@1024,dp2tp2:1024", help="shortest first")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="of one optimizer step, on each process")
    parser.add_argument("--output_dir", default="out/bare_loop")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=options.use_cpu)  # nothing is prepared with it: the model spreads its weights itself
    buckets, tokenizer = parse_buckets(options.strategies), small_tokenizer()
    model = SwitchedModel(small_model(tokenizer), buckets, device=accelerator.device).train()

    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    texts = ["\n".join(message["content"] for message in chat) for chat in chats]
    rows = [{"input_ids": i, "labels": i} for i in tokenizer(texts, truncation=True, max_length=1024).input_ids]
    sampler = DistributedSampler(rows, accelerator.num_processes, accelerator.process_index)
    loader = DataLoader(rows, options.rows, sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    optimizer, step = torch.optim.AdamW(model.engine.parameter_groups(weight_decay=0.1), lr=1e-2), 0
    while step < options.steps:
        sampler.set_epoch(step)
        for batch in islice(model.batches(loader), options.steps - step):  # a process may have no more rows
            model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)  # by the norm over all processes: parameters are shares
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            report = model.report
            phases = "  ".join(f"{p.strategy}: {p.num_packs} packs, {p.compute_s:.2f} s" for p in report.phases)
            accelerator.print(f"step {step:3d}  loss {report.loss:.4f}  switching {report.switch_share:.1%}  {phases}")
    model.write_back()
    if accelerator.is_main_process:
        model.module.save_pretrained(options.output_dir)
        tokenizer.save_pretrained(options.output_dir)
    model.close()


if __name__ == "__main__":
    main()
