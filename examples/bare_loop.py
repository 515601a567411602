"""A loop of your own without the Hugging Face Trainer: `SwitchedModel` stands where DDP's wrapper would, under a plain Accelerate
`Accelerator`.

Trains a small Llama from scratch on the sources of Python's standard library, on four CPU processes:

    accelerate launch --multi_gpu --num_processes 4 examples/bare_loop.py --use_cpu

On GPUs leave out `--use_cpu`. In one process, without a launcher:

    python examples/bare_loop.py --strategies dp1:512@1024 --use_cpu

With another number of processes than the strategies need, the model says which command starts the right one.
"""

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from stdlib_corpus import build_corpus, build_tokenizer
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from hf_hotspa import SwitchedModel, parse_buckets


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="dp4:512@1024,dp2tp2:2048,tp4:4096", help="shortest first")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--mini_batch_size", type=int, default=16, help="rows of one optimizer step, over all processes"
    )
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--vocab_size", type=int, default=1024)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--max_files", type=int, default=None, help="use only so many files of the standard library")
    parser.add_argument("--cache_dir", default=None, help="where tokenizer and corpus are kept")
    parser.add_argument("--output_dir", default="out/bare_loop")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            intermediate_size=3 * options.hidden_size,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
        )
    )


def make_loader(options: argparse.Namespace, accelerator: Accelerator, longest: int) -> tuple[Any, DataLoader[Any]]:
    """The tokenizer, and this process's own padded batches, as DDP would get them."""
    with accelerator.main_process_first():  # one process makes the files, the others find them
        paths = {"cache_dir": options.cache_dir, "max_files": options.max_files}
        tokenizer, corpus = build_tokenizer(options.vocab_size, **paths), build_corpus(**paths)
    # one row for each top-level definition: mostly short, with a long tail
    texts = [text for file in corpus for text in file["text"].split("\n\n\n") if text.strip()]
    rows = [
        {"input_ids": ids, "labels": ids} for ids in tokenizer(texts, truncation=True, max_length=longest).input_ids
    ]
    shares = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index, "seed": options.seed}
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=max(options.mini_batch_size // accelerator.num_processes, 1),
        sampler=DistributedSampler(rows, **shares),  # type: ignore[arg-type]
        collate_fn=DataCollatorForSeq2Seq(tokenizer),
    )
    return tokenizer, loader


def main() -> None:
    options = parse_options()
    accelerator = Accelerator(cpu=options.use_cpu)  # nothing is prepared with it: the model spreads its weights itself
    set_seed(options.seed)
    buckets = parse_buckets(options.strategies)
    # checks launch, strategies and model
    model = SwitchedModel(make_model(options), buckets, device=accelerator.device).train()
    tokenizer, loader = make_loader(options, accelerator, max(bucket.longest for bucket in buckets))

    optimizer = torch.optim.AdamW(model.engine.parameter_groups(weight_decay=0.1), lr=options.learning_rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    step = epoch = 0
    begin = time.perf_counter()
    while step < options.steps:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in model.batches(loader):  # a process whose rows have ended takes part without any
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)  # by the norm over all processes: parameters are shares
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            report, now = model.report, time.perf_counter()
            assert report is not None
            accelerator.print(
                f"step {step:3d}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}"
                f"  {report.num_tokens / (now - begin):7.0f} tokens/s  switching {report.switch_share:5.1%}  "
                + "  ".join(f"{p.strategy}: {p.num_packs} packs, {p.compute_s:.2f} s" for p in report.phases),
                flush=True,
            )
            begin = now
            if step == options.steps:
                break
        epoch += 1

    model.write_back()
    if accelerator.is_main_process:
        model.module.save_pretrained(options.output_dir)
        tokenizer.save_pretrained(options.output_dir)
        print(f"the model is in {options.output_dir}")
    model.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
