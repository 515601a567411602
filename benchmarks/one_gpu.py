"""One NVIDIA GPU: the stock `Trainer` and ours on the same mini-batches of long-tailed lengths, in one run.

With one GPU there is nothing to switch. What is compared is what packing, the planner and the master store cost or save
against the stock Trainer: padded rows, and flattened rows with the kernel that ours uses too.

    python benchmarks/one_gpu.py
    python benchmarks/one_gpu.py --lengths github --longest 16384 --rows 16 --profile
    python benchmarks/one_gpu.py --lora     # LoRA on a bf16 base of Llama 3.1's 8B shape, beside TRL and PEFT
    python benchmarks/one_gpu.py --qlora    # the same on an nf4 base

Every side trains the same rows from the same weights; all take turns, and a step ends with a synchronised device. MFU is
the share of the card's peak (its data sheet's, in bf16) that the products of the model's forward and backward would take,
without padding, and with causal attention counted within each sequence; recomputation counts as nothing.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from peers.sides.common import tokenizer
from result_file import command_line, write_json
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_hotspa.commands.bench.contestants import STOCK_KERNEL, varlen_of_stock
from hf_hotspa.commands.bench.workload import LENGTHS, draw, make_rows
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.errors import PhaseMemoryError, UnsupportedError
from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

VOCABULARY = 32000


@dataclass
class Found:
    """What a side took, mini-batch after mini-batch; of ours also forward and backward, and moving weights and gradients."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    slots: int = 0
    computing: list[float] = field(default_factory=list)
    switching: list[float] = field(default_factory=list)
    note: str = ""
    failed: str = ""


class Clock(TrainerCallback):
    """Times every mini-batch from end to end; profiles the last one if asked to."""

    def __init__(self, found: Found, profile: bool, steps: int) -> None:
        self.found, self.steps = found, steps
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if profile else None
        self.began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.found.seconds.append(time.perf_counter() - self.began)
        if self.profiler and state.global_step == self.steps:
            self.profiler.stop()
        self._begin(state.global_step)

    def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
        """Of `HotSPaTrainer`: the phases of the mini-batch."""
        self.found.computing.append(sum(phase.compute_s for phase in report.phases))
        self.found.switching.append(sum(phase.load_s + phase.return_s for phase in report.phases))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.found.losses.append(logs["loss"])

    def _begin(self, done: int) -> None:
        if self.profiler and done == self.steps - 1:
            self.profiler.start()
        torch.cuda.synchronize()
        self.began = time.perf_counter()


def config_of(options: argparse.Namespace, attention: str = "sdpa") -> LlamaConfig:
    head, groups, wide = (128, 4, options.hidden * 7 // 2) if options.adapted else (64, 2, options.hidden * 11 // 4)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=wide,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // head,
        num_key_value_heads=options.hidden // head // groups,
        max_position_embeddings=options.longest,
        attn_implementation=attention,
    )


def make_model(options: argparse.Namespace, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    if options.adapted:
        model = make_adapted(options, attention)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the weights in 16 bits were there once, for all sides
        return model
    return LlamaForCausalLM(config_of(options, attention))


def make_adapted(options: argparse.Namespace, attention: str) -> Any:
    """Random weights in the shape of Llama 3.1 8B (or `--hidden`, `--layers`) in bf16, with `--qlora` quantized to nf4, and
    LoRA of rank 16."""
    from peft import LoraConfig, get_peft_model

    config = config_of(options, attention)
    with torch.device("cuda" if torch.cuda.is_available() else torch.get_default_device()):
        base = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    if options.qlora:
        base = in_four_bits(base, config, attention)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def in_four_bits(whole: Any, config: LlamaConfig, attention: str) -> Any:
    """The same weights in nf4, as PEFT prepares them for training."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=whole.state_dict(), dtype=torch.bfloat16, quantization_config=four_bits,
        device_map={"": 0}, attn_implementation=attention,
    )  # fmt: skip
    return prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)


def rows_with_labels(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """The rows of all mini-batches."""
    lengths = draw(options.lengths, options.rows * options.steps, options.longest)
    return [row | {"labels": row["input_ids"]} for row in make_rows(lengths, VOCABULARY, seed=1)]


def counted(collator: Callable[[list[Any]], Any], found: Found) -> Callable[[list[Any]], Any]:
    def collate(rows: list[Any]) -> Any:
        batch = collator(rows)
        found.slots += batch["input_ids"].numel()
        return batch

    return collate


def arguments(options: argparse.Namespace, folder: str, kind: type = TrainingArguments, **more: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": folder, "max_steps": options.steps, "train_sampling_strategy": "sequential",
        "average_tokens_across_devices": True, "optim": "adamw_torch", "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "bf16": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return kind(**(given | more))


def of_trl(options: argparse.Namespace, folder: str, rows: Any, clock: Clock, micro: int) -> None:
    """TRL's `SFTTrainer` as its config is: padded rows and recomputed layers."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = {"max_length": None, "per_device_train_batch_size": micro}
    args = arguments(options, folder, SFTConfig, **more, gradient_accumulation_steps=options.rows // micro)
    trainer = SFTTrainer(
        make_model(options), args, train_dataset=Dataset.from_list(rows), callbacks=[clock],
        processing_class=tokenizer(VOCABULARY),
    )  # fmt: skip
    trainer.data_collator = counted(trainer.data_collator, clock.found)
    trainer.train()


def stock(options: argparse.Namespace, folder: str, rows: Any, clock: Clock, micro: int, padded: bool) -> None:
    """Padded rows with `sdpa`, or flattened ones with the kernel for variable lengths."""
    collator = (
        DataCollatorForSeq2Seq(tokenizer(VOCABULARY))
        if padded
        else DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    )
    trainer = Trainer(
        model=make_model(options, "sdpa" if padded else STOCK_KERNEL),
        args=arguments(
            options,
            folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=options.rows // micro,
            gradient_checkpointing=options.adapted,
        ),
        train_dataset=rows,
        data_collator=counted(collator, clock.found),
        callbacks=[clock],
    )
    trainer.train()


def ours(options: argparse.Namespace, folder: str, rows: Any, clock: Clock, strategies: str) -> None:
    measured = {"hotspa_calibration": "measure"} if strategies == "auto" else {}
    args = arguments(
        options, folder, HotSPaTrainingArguments, hotspa_mini_batch_size=options.rows, hotspa_strategies=strategies,
        **measured,
    )  # fmt: skip
    trainer = HotSPaTrainer(model=make_model(options), args=args, train_dataset=rows, callbacks=[clock])
    trainer.train()
    clock.found.slots += sum(len(row["input_ids"]) for row in rows)
    clock.found.note = "  ".join(str(bucket) for bucket in trainer.engine.buckets)
    trainer.close_engine()


def unsupported_options() -> dict[str, str]:
    """What the stock Trainer can switch on to be faster and ours cannot: option -> what ours says to it."""
    found = {}
    for name in ("use_liger_kernel", "torch_compile"):
        try:
            HotSPaTrainingArguments("out", hotspa_strategies="dp1:64", report_to="none", use_cpu=True, **{name: True})
        except UnsupportedError as error:
            found[name] = str(error)
    return found


def flops_of(options: argparse.Namespace, lengths: Sequence[int]) -> float:
    """Floating-point operations of forward and backward over these sequences: 6 for each weight of a product and token, and
    of causal attention 6 * length * width for each layer and token (Chowdhery et al., 2022, appendix B, half of it)."""
    config, hidden = config_of(options), options.hidden
    kv = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config.intermediate_size
    weights = options.layers * layer + hidden * VOCABULARY
    each = 4 if options.adapted else 6  # a frozen weight has no gradient; the adapters' own are left out
    return float(sum(each * weights * n + 6 * options.layers * hidden * n * n for n in lengths))


def peak_flops(gpu: str) -> float | None:
    """Of a card in bf16, by the name that torch gives it; None for one that has no data sheet here."""
    text = gpu.lower().replace(" ", "-")
    for name, card in (("h100-pcie", "h100-80g-pcie"), ("h100-nvl", "h100-94g-nvl"), ("h100", "h100-80g"),
                       ("h200", "h200-141g"), ("b200", "b200-180g"), ("a100", "a100-80g"), ("l40s", "l40s-48g")):  # fmt: skip
        if name in text:
            return float(load_hardware(card).device.flops("bfloat16"))
    return None


def sides_of(options: argparse.Namespace) -> dict[str, Callable[..., None]]:
    packs = options.pack_tokens
    found: dict[str, Callable[..., None]] = {"ours, auto": lambda *given: ours(*given, "auto")}
    if not options.adapted:  # an 8B model's activations of such a pack are 140 GiB
        found[f"ours, dp1 in packs of {packs}"] = lambda *given: ours(*given, f"dp1:{options.longest}@{packs}")
    else:
        found |= {
            f"TRL's SFTTrainer, padded, micro-batches of {micro}": lambda *given, micro=micro: of_trl(*given, micro)
            for micro in options.padded_rows
        }
        options.padded_rows = []
    for padded, sizes in ((False, options.flattened_rows), (True, options.padded_rows)):
        for micro in sizes:
            name = f"Trainer, {'padded' if padded else 'flattened'}, micro-batches of {micro}"
            found[name] = lambda *given, micro=micro, padded=padded: stock(*given, micro, padded)
    return found


def train(name: str, run: Callable[..., None], options: argparse.Namespace, rows: Any, profile: bool) -> Found:
    """One run of one side, from the first weights, on an empty device."""
    found = Found()
    clock = Clock(found, profile, options.steps)
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(options, folder, rows, clock)
        except (torch.cuda.OutOfMemoryError, PhaseMemoryError) as error:
            found.failed = str(error).split(".")[0]
    if found.failed:
        return found
    found.peak_bytes = torch.cuda.max_memory_allocated()
    if clock.profiler:
        print(f"\n{name}, its last mini-batch:")
        print(kernels(clock.profiler, found.seconds[-1]), flush=True)
    return found


def kernels(profiler: Any, seconds: float, most: int = 8) -> str:
    """How busy the device was, and with which kernels."""
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 1e6
    lines = [f"  {busy:.3f} s of kernels in {seconds:.3f} s"]
    for event in events[:most]:
        lines.append(f"  {event.self_device_time_total / 1e3:8.1f} ms {event.count:6d} x {event.key[:80]}")
    return "\n".join(lines)


def table(
    found: dict[str, list[Found]], options: argparse.Namespace, tokens: int, flops: float, peak: float | None
) -> str:
    """Medians over the mini-batches after the warm-up, over all rounds.

    Args:
        tokens: Of all mini-batches of a round.
        flops: Of a mini-batch, on average.
        peak: Floating-point operations a second that the card can do.
    """
    lines = [
        "| side | s / mini-batch | tokens/s | MFU | / ours, auto | padding | peak GiB | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    medians = {
        name: statistics.median(s for each in runs for s in each.seconds[options.warmup :])
        for name, runs in found.items()
        if not any(each.failed for each in runs)
    }
    base = medians.get("ours, auto")
    for name, runs in found.items():
        if name not in medians:
            lines.append(f"| {name} | {runs[-1].failed} | | | | | | |")
            continue
        seconds = medians[name]
        waste = 1 - tokens / runs[-1].slots
        lines.append(
            f"| {name} | {seconds:.3f} | {tokens / options.steps / seconds:,.0f} | "
            f"{f'{flops / seconds / peak:.1%}' if peak else 'peak unknown'} | "
            f"{seconds / base if base else float('nan'):.2f} | {waste:.0%} | "
            f"{max(each.peak_bytes for each in runs) / 2**30:.1f} | {runs[-1].losses[-1]:.5f} |"
        )
    lines.append("")
    for name in medians:
        runs = found[name]
        if runs[-1].computing:
            whole, compute, switch = (
                statistics.fmean(value for run in runs for value in getattr(run, part)[options.warmup :])
                for part in ("seconds", "computing", "switching")
            )
            lines.append(
                f"{name}: mean {whole:.3f} s, of which forward and backward {compute:.3f}, loading and returning {switch:.3f}"
            )
    return "\n".join(lines)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", default="commoncrawl", choices=list(LENGTHS))
    parser.add_argument("--longest", type=int, default=32768, help="tokens at which lengths are cut")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a mini-batch")
    parser.add_argument("--steps", type=int, default=8, help="mini-batches of a round")
    parser.add_argument("--warmup", type=int, default=2, help="mini-batches of a round that do not count")
    parser.add_argument("--rounds", type=int, default=2)
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument("--lora", action="store_true", help="LoRA on a base in bf16, and TRL with PEFT as a side")
    adapters.add_argument("--qlora", action="store_true", help="the same on a base in 4 bits")
    parser.add_argument(
        "--hidden", type=int, help="width of the Llama; heads of 64 (1024; with LoRA 4096, heads of 128)"
    )
    parser.add_argument("--layers", type=int, help="16; 32 with LoRA")
    parser.add_argument(
        "--flattened-rows", type=int, nargs="*", default=[4, 16], help="of the stock Trainer's micro-batch"
    )
    parser.add_argument("--padded-rows", type=int, nargs="*", default=[1], help="likewise, where it pads")
    parser.add_argument("--pack-tokens", type=int, default=32768, help="packs of ours without auto")
    parser.add_argument("--profile", action="store_true", help="also profile one mini-batch of each side")
    options = parser.parse_args(arguments)
    options.adapted = options.lora or options.qlora
    options.hidden = options.hidden or (4096 if options.adapted else 1024)
    options.layers = options.layers or (32 if options.adapted else 16)
    if options.quick:
        options.hidden = 512 if options.adapted else 256
        options.layers, options.longest, options.pack_tokens = 2, 1024, 2048
        options.rows, options.steps, options.warmup, options.rounds = 8, 3, 1, 1
        options.flattened_rows, options.padded_rows = [4], [1]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch sees none")
    AttentionInterface.register(STOCK_KERNEL, varlen_of_stock)
    AttentionMaskInterface.register(STOCK_KERNEL, lambda *args, **kwargs: None)
    rows = rows_with_labels(options)
    tokens = sum(len(row["input_ids"]) for row in rows)
    with torch.device("meta"):
        parameters = LlamaForCausalLM(config_of(options)).num_parameters()
    head = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": parameters, "lengths": options.lengths,
        "longest": max(len(row["input_ids"]) for row in rows), "tokens_of_a_mini_batch": tokens // options.steps,
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in head.items()), flush=True)
    unsupported = unsupported_options()
    for name, text in unsupported.items():
        print(f"ours with {name}: {text}", flush=True)
    found: dict[str, list[Found]] = {}
    for number in range(options.rounds):
        for name, run in sides_of(options).items():
            began = time.perf_counter()
            last = number == options.rounds - 1
            found.setdefault(name, []).append(train(name, run, options, rows, options.profile and last))
            gc.collect()
            torch.cuda.empty_cache()
            print(
                f"round {number + 1}: {name}: {time.perf_counter() - began:.0f} s {found[name][-1].note or found[name][-1].failed}",
                flush=True,
            )
    flops = flops_of(options, [len(row["input_ids"]) for row in rows]) / options.steps
    peak = peak_flops(head["gpu"])
    print(f"\n{table(found, options, tokens, flops, peak)}")
    data = head | {"unsupported": unsupported, "flops_of_a_mini_batch": flops, "peak_flops": peak}
    data |= {"sides": {name: [asdict(each) for each in runs] for name, runs in found.items()}}
    write_json(options.json, data)


if __name__ == "__main__":
    main()
