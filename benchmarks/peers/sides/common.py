"""What the adapters share: training arguments, turns, what is counted of batches, and the loss that all are judged by."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import make_model
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.calibrate.probe import PeakMemory
from hf_hotspa.commands.bench.workload import make_rows
from peers.work import Work

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
_EVALUATED = (256,) * 8
_STATUS = Path("/proc/self/status")


def arguments(work: Work, kind: type = TrainingArguments, **more: Any) -> Any:
    """The training arguments that are alike on every side. `more` adds to them or replaces them."""
    given: dict[str, Any] = {
        "output_dir": f"{work.folder}/{work.name}",
        "max_steps": work.steps,
        "per_device_train_batch_size": work.micro_batch_rows,
        "gradient_accumulation_steps": work.accumulation,
        "train_sampling_strategy": "sequential",
        "average_tokens_across_devices": True,
        "optim": "adamw_torch",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": 1.0,
        "bf16": work.dtype == "bf16",
        "use_cpu": True,
        "logging_steps": work.steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    return kind(**(given | more))


def trainer_of(work: Work, turns: "Turns", model: Any, collator: Any, kind: type = Trainer, **more: Any) -> Any:
    """A stock Trainer, or a subclass, that takes turns; `more` as for `arguments`."""
    return kind(
        model=model,
        args=arguments(work, **more),
        train_dataset=work.rows(),
        data_collator=turns.counting(collator),
        callbacks=[turns.callback()],
    )


def decayed_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The groups of parameters of an optimizer as the Trainer makes them."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    return [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) == decay], "weight_decay": weight}
        for decay, weight in ((True, WEIGHT_DECAY), (False, 0.0))
    ]


def tokenizer(vocabulary: int) -> Any:
    """Every token is a word: w0, which pads (labels are -100 there), w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{at}": at for at in range(vocabulary)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w1", unk_token="w0")


class Turns:
    """Lets this rank train a mini-batch when it is its side's turn, and reports what it took.

    Args:
        work: The run.
        gate: Says when to begin, and takes reports; None for a run that is not timed.
    """

    def __init__(self, work: Work, gate: Any) -> None:
        self.work, self.gate = work, gate
        self.tokens = self.slots = 0
        self.phases: list[dict[str, Any]] = []
        self.inside: Callable[[], dict[str, dict[str, float]]] = dict
        self.facts: dict[str, Any] = {}
        self.peaks: list[int] = []
        self._began = self._cpu = 0.0
        self._memory = PeakMemory(torch.device("cpu"))
        self._file_bytes = 0

    def start_memory(self) -> None:
        """From here on, what this process holds counts as the side's."""
        self._memory.start()
        self._file_bytes = _file_bytes()

    def begin(self, steps: int) -> None:
        """Waits for this side's next turn."""
        if self.gate is not None:
            self.gate.send(("ready", steps))
            self.gate.recv()
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """A mini-batch is done."""
        if self.gate is None:
            # pages of program files hold no tensors
            self.peaks.append(self._memory.stop() - (_file_bytes() - self._file_bytes))
            self._memory.restart()
            return
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.gate.send(("step", {"seconds": seconds, "cpu": cpu, "phases": self.phases, "inside": self.inside()}))
        self.phases = []

    def counting(self, collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The collator, its tokens counted: those that are trained, and the places that they are padded to."""

        def counted(rows: list[Any]) -> Any:
            batch = collator(rows)
            self.slots += batch["input_ids"].numel()
            self.tokens += sum(len(row["input_ids"]) for row in rows)
            return batch

        return counted

    def callback(self) -> TrainerCallback:
        """Takes turns in the loop of a Trainer: all that happens between two ends of a step counts."""
        return _TurnCallback(self)

    def summary(self) -> dict[str, Any]:
        """What this run was, over all ranks."""
        counts = torch.tensor([self.tokens, self.slots], dtype=torch.float64)
        dist.all_reduce(counts)
        peaks = torch.tensor(self.peaks, dtype=torch.float64)
        if len(peaks):
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        tokens, slots = counts.tolist()
        return {"tokens": tokens, "slots": slots, "peaks": peaks.tolist()} | self.facts


class _TurnCallback(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.begin(state.max_steps)

    def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
        """Of `HotSPaTrainer`: the phases of the mini-batch."""
        self.turns.tokens += report.num_tokens if args.process_index == 0 else 0
        self.turns.slots += report.num_tokens if args.process_index == 0 else 0
        self.turns.phases = [
            {
                "strategy": phase.strategy,
                "tokens": phase.num_tokens,
                "compute": phase.compute_s,
                "wait": phase.wait_s,
                "load": phase.load_s,
                "return": phase.return_s,
            }
            for phase in report.phases
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.end()
        self.turns.begin(state.max_steps)  # after the last one, to end in peace


def evaluated_loss(weights: dict[str, Any], work: Work) -> float:
    """Token mean of the cross entropy of fixed rows under the trained weights, in fp32: the same for every side."""
    model = make_model(work.model)
    model.load_state_dict({name: tensor.detach().float() for name, tensor in weights.items()})
    ids = torch.tensor([row["input_ids"] for row in make_rows(_EVALUATED, work.vocabulary, seed=10**6)])
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids, use_cache=False).loss)


def warm_up(work: Work) -> None:
    """Touches what a first forward, backward and collective bring in, so that none of it counts as a side's memory."""
    model, ids = make_model(work.model), torch.zeros(1, 64, dtype=torch.int64)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    dist.all_reduce(torch.zeros(1))


def _file_bytes() -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(lines["RssFile"].split()[0]) * 1024
