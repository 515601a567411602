"""One turn of one side: the stock Trainer with DDP or FSDP2, or ours under one strategy or `auto`.

Runs on every rank of a fresh world (`run`). All sides load the same weights and train the same mini-batches with the
same optimizer; each trained mini-batch is timed from end to end, on a synchronised device.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_hotspa.commands.bench.workload import Work, heaviest_first, make_rows, micro_batch_choices
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.report import StepReport
from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

DDP, FSDP, OURS = "ddp", "fsdp", "ours"
PADDED, FLATTENED = "padded", "flattened"
STOCK_KERNEL = "torch_varlen"
_TRIED_STEPS = 2
_NO_LIMIT_MIB = 1 << 16  # on CPU: free memory differs from turn to turn, and packs would differ with it
_IGNORED = -100


@dataclass(frozen=True)
class Contestant:
    """A side of a contest.

    Args:
        name: Its name in tables.
        kind: `ddp`, `fsdp` or `ours`.
        rows: How stock micro-batches are made: `padded` or `flattened`.
        strategies: `hotspa_strategies`, for ours.
    """

    name: str
    kind: str
    rows: str = FLATTENED
    strategies: str = ""


STOCK = (
    Contestant("Trainer + DDP, padded", DDP, PADDED),
    Contestant("Trainer + DDP, flattened", DDP),
    Contestant("Trainer + FSDP2, flattened", FSDP),
)
ALONE = (Contestant("Trainer, padded", DDP, PADDED), Contestant("Trainer, flattened", DDP))
"""The stock sides on several ranks, and on one."""


class _Clock(TrainerCallback):
    """Seconds and losses of the mini-batches, and which strategies ran."""

    def __init__(self, cuda: bool) -> None:
        self.seconds, self.losses = list[float](), list[float]()
        self.ran = dict[str, None]()
        self._cuda, self._began = cuda, 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._began = self._now()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = self._now()
        self.seconds.append(now - self._began)
        self._began = now

    def on_step_report(self, *_: object, report: StepReport, **__: object) -> None:
        self.ran |= dict.fromkeys(phase.strategy for phase in report.phases)

    def on_log(self, *_: object, logs: dict[str, Any] | None = None, **__: object) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float((logs or {})["loss"]))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def save_model(rank: int, world_size: int, config: dict[str, Any], folder: str) -> int:
    """Saves random weights of a config, in fp32, for all sides; returns the number of parameters."""
    torch.manual_seed(0)
    fields = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    model.save_pretrained(folder)
    return int(model.num_parameters())


def run(rank: int, world_size: int, side: Contestant, work: Work, micro_rows: int = 0) -> dict[str, Any]:
    """Trains one side's turn on this rank. Collective. `micro_rows`: rows of a stock micro-batch; 0 to find the
    fastest by trial. Returns `seconds` of each mini-batch on the slowest rank, without the warm-up; its `losses`;
    `peak_bytes` of the fullest rank (0 on CPU); `micro_rows` of a stock micro-batch; and what `ran`."""
    AttentionInterface.register(STOCK_KERNEL, varlen_of_stock)
    AttentionMaskInterface.register(STOCK_KERNEL, lambda *args, **kwargs: None)
    agreement = Agreement(backends.host_group(), rank)
    rows = [row | {"labels": row["input_ids"]} for row in make_rows(work.file.lengths, work.vocabulary, seed=1)]
    if side.kind != OURS and not micro_rows:
        micro_rows = _fastest_micro_batch(side, work, agreement, world_size)
    if work.cuda:
        torch.cuda.reset_peak_memory_stats()
    clock = _train(side, work, rows, world_size, micro_rows)
    peak = float(torch.cuda.max_memory_allocated()) if work.cuda else 0.0
    slowest = [float(agreement.gather([seconds]).max()) for seconds in clock.seconds]
    return {
        "seconds": slowest[work.warmup :],
        "losses": clock.losses,
        "peak_bytes": int(agreement.gather([peak]).max()),
        "micro_rows": micro_rows,
        "ran": list(clock.ran),
    }


def _fastest_micro_batch(side: Contestant, work: Work, agreement: Agreement, world_size: int) -> int:
    """Rows of a micro-batch with which a stock side is fastest: larger ones are tried as long as they are faster, on the
    mini-batch with the longest row. Collective."""
    seconds = dict[int, float]()
    sizes = micro_batch_choices(work.file.rows, world_size)
    heavy = heaviest_first(work.file.lengths, work.file.rows)[: _TRIED_STEPS * work.file.rows]
    tried = replace(work, file=replace(work.file, lengths=heavy))
    rows = [row | {"labels": row["input_ids"]} for row in make_rows(heavy, work.vocabulary, seed=1)]
    for size in sizes:
        if seconds and size * work.file.longest > work.micro_tokens:
            break
        clock = _train(side, tried, rows, world_size, size)
        seconds[size] = float(agreement.gather([clock.seconds[-1]]).max())
        if seconds[size] > min(seconds.values()):
            break
    return min(seconds, key=lambda size: seconds[size])


def _train(side: Contestant, work: Work, rows: list[Any], world_size: int, micro_rows: int) -> _Clock:
    """One training run from the first weights; nothing of it stays in memory."""
    clock = _Clock(work.cuda)
    make = _ours if side.kind == OURS else _stock
    trainer = make(side, work, rows, clock, (world_size, micro_rows))
    trainer.train()
    if isinstance(trainer, HotSPaTrainer):
        trainer.close_engine()
    del trainer
    gc.collect()
    if work.cuda:
        torch.cuda.empty_cache()
    return clock


def _arguments(work: Work, kind: Callable[..., Any], **more: object) -> Any:
    given: dict[str, Any] = {
        "output_dir": work.folder, "max_steps": work.steps, "train_sampling_strategy": "sequential",
        "average_tokens_across_devices": True, "optim": "adamw_torch", "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "bf16": work.bf16, "use_cpu": not work.cuda,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return kind(**(given | more))


def _model(work: Work, attention: str = "sdpa", **more: object) -> Any:
    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation=attention, **more)


def _stock(side: Contestant, work: Work, rows: list[Any], clock: _Clock, shape: tuple[int, int]) -> Trainer:
    ranks, micro_rows = shape
    accumulation = work.file.rows // (ranks * micro_rows)
    flattened = side.rows == FLATTENED
    varlen = flattened and work.cuda and work.bf16
    more: dict[str, Any] = {}
    if side.kind == FSDP:
        from transformers.distributed import DistributedConfig

        more["distributed_config"] = DistributedConfig(fsdp_size=ranks)
    return Trainer(
        model=_model(work, STOCK_KERNEL if varlen else "sdpa", **more),
        args=_arguments(
            work, TrainingArguments, per_device_train_batch_size=micro_rows, gradient_accumulation_steps=accumulation
        ),
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=varlen) if flattened else padded,
        callbacks=[clock],
    )


def _ours(side: Contestant, work: Work, rows: list[Any], clock: _Clock, shape: tuple[int, int]) -> HotSPaTrainer:
    args = _arguments(
        work, HotSPaTrainingArguments, hotspa_mini_batch_size=work.file.rows, hotspa_strategies=side.strategies,
        hotspa_calibration=work.calibration, hotspa_memory_limit_mb=None if work.cuda else _NO_LIMIT_MIB,
        hotspa_report=False,
    )  # fmt: skip
    return HotSPaTrainer(model=_model(work), args=args, train_dataset=rows, callbacks=[clock])


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pads rows to the longest of them: `input_ids`, `labels` and `attention_mask`, int64 [rows, tokens]."""
    most = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = (
        torch.tensor([[*values(row), *[filler] * (most - len(row["input_ids"]))] for row in rows])
        for values, filler in (
            (lambda row: row["input_ids"], 0),
            (lambda row: row["labels"], _IGNORED),
            (lambda row: [1] * len(row["input_ids"]), 0),
        )
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def varlen_of_stock(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """FlashAttention-2 of torch for the stock Trainer: what `flash_attention_2` is, if flash-attn is not installed."""
    from torch.nn.attention import varlen

    heads = [x[0].transpose(0, 1).to(torch.bfloat16) for x in (query, key, value)]
    heads[1:] = (
        x.repeat_interleave(heads[0].shape[1] // x.shape[1], 1) for x in heads[1:]
    )  # torch 2.11 groups nothing
    out = varlen.varlen_attn(
        *heads, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, 0)
    )
    return out[None], None
