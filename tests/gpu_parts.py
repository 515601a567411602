"""What must hold over NCCL, as parts that run anywhere: on GPUs over NCCL, over gloo through the host, on CPU processes.

`make test-gpu` runs every part on what the machine has (`tests/gpu/test_parts_on_gpu.py`), and `make test-slow` on CPU processes
over gloo (`tests/gloo/test_gpu_parts.py`), so that what reaches a GPU is known to be right code. A part raises where something is wrong, and returns figures for the log.
"""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from hf_hotspa.engine.executor import SwitchExecutor
from hf_hotspa.engine.transport import ProcessGroupTransport, TransferHandle
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.search.offers import context_strategies
from hf_hotspa.strategy import Strategy, expert_strategies, legal_strategies, strategies_with_options
from tests.checkpoints import memory_folder
from tests.families import MIXTURE, tiny_model
from tests.gloo import test_faults, test_switch_gloo
from tests.gloo.test_exact import SWITCHES, errors_of
from tests.gloo.test_exact import check as check_errors
from tests.gloo.test_overlap import SAME_BITS, same_bits
from tests.harness import Device, run_ranks
from tests.loss_curves import FAMILY, differences, hotspa_losses, stock_losses
from tests.oracle import random_rows
from tests.switch_cases import check_rank, direct_messages, make_case
from tests.training_runs import STEPS, contents, make_trainer, newest, train
from tests.worlds import make_engine, make_mini_batch

TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Stage:
    """Where a part runs.

    Args:
        device: See `run_ranks`.
        ranks: 2 or 4.
        folder: An empty one.
    """

    device: Device
    ranks: int
    folder: Path

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        given = {"device": self.device, "timeout": TIMEOUT_S, **options}
        found: list[Any] = run_ranks(given.pop("ranks", self.ranks), function, *args, **given)
        return found

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Of training arguments."""
        return {"use_cpu": self.device == "cpu"}


Figures = dict[str, float | int | str]


# ------------------------------------------------------------------------------------------------------- exactness


def strategies(ranks: int, family: str) -> list[Strategy]:
    """Every strategy that exists for a model: all degrees, cp too, with all options, and chunks beside no other option; of
    a mixture of experts those that divide the experts (ep)."""
    shape = describe_model(tiny_model(family)).shape
    if family == MIXTURE:
        found = strategies_with_options(ranks, shape)
        return expert_strategies(found + context_strategies(found, shape), shape)
    chunked = [replace(strategy, ck=24) for strategy in legal_strategies(ranks, shape)]
    found = strategies_with_options(ranks, shape) + [s for s in chunked if s.unsupported_reason(shape) is None]
    return found + context_strategies(found, shape)


def exact(stage: Stage) -> Figures:
    """Loss and gradients of every strategy, in fp64 and fp32, with every way to plan and to run switches in turn."""
    count = 0
    for family in ("llama_uneven", "qwen3_qk_norm_tied", "phi3_fused", MIXTURE):
        buckets = [f"{strategy}:40@64" for strategy in strategies(stage.ranks, family)]
        for dtype in (torch.float64, torch.float32):
            check_errors(stage.run(errors_of_rank, family, dtype, buckets, SWITCHES), dtype)
            count += len(buckets)
    return {"strategies checked": count}


def errors_of_rank(rank: int, world_size: int, *args: Any) -> Any:
    return errors_of(*args)


def pipelines(stage: Stage) -> Figures:
    """Packs of different shapes, fewer of them than stages, and replicas without any: sends and receives in one batch."""
    two = ["pp2:40@44", "pp2:40@16", "dp2:8@16,pp2:40"]
    four = ["pp4:40@44", "pp4:40@16", "dp2pp2:40@24", "tp2pp2:40@44", "dp4:8@16,dp2pp2:16,pp4:40@48"]
    buckets = {2: two, 4: four}[stage.ranks]
    families = ("llama_uneven", "qwen3_qk_norm_tied", "olmo")
    for family in families:
        check_errors(stage.run(errors_of_rank, family, torch.float64, buckets, SWITCHES), torch.float64)
    return {"bucket lists checked": len(buckets) * len(families)}


# -------------------------------------------------------------------------------------------------------- switches


class OnDevice(ProcessGroupTransport):
    """Carries tensors of the host on a device: what the clauses of the contract need to run on one."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._device = device
        self._received: list[tuple[Tensor, Tensor]] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        super().send(tensor.to(self._device), dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int) -> None:
        self._received.append((tensor, torch.empty_like(tensor, device=self._device)))
        super().recv(self._received[-1][1], src, tag)

    def start(self) -> TransferHandle:
        received, self._received = self._received, []
        return _Copied(super().start(), received)


class _Copied:
    def __init__(self, handle: TransferHandle, received: list[tuple[Tensor, Tensor]]) -> None:
        self._handle, self._received = handle, received

    def wait(self) -> None:
        self._handle.wait()
        for host, device in self._received:
            host.copy_(device)


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def keeps_the_contract(rank: int, world_size: int) -> int:
    clauses = [test_switch_gloo.everyone_exchanges_everything, test_switch_gloo.starts_may_overlap_and_be_empty]
    if backends.abilities().tags:
        clauses.append(test_switch_gloo.messages_keep_their_order_and_tags_their_own)
    group = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.zeros(1, device=this_device()), group=group)  # the first operation is one of all ranks
    for clause in clauses:
        clause(OnDevice(this_device(), group), rank, world_size)
    return len(clauses)


def random_switches(rank: int, world_size: int, seeds: range) -> int:
    """Switches of every kind, relays too, bit for bit; one executor for all of them."""
    device = this_device()
    group = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    agreement = Agreement(backends.host_group(range(world_size)), rank)
    for epoch, seed in enumerate(seeds):
        case = make_case(seed, world_size)
        agreement.check({"plan": case.plan.digest}, None, f"switch {epoch}")
        executor = SwitchExecutor(
            ProcessGroupTransport(group), rank, case.staging_bytes, device, native=case.native, by_layer=epoch % 2 == 0
        )
        there = [
            None if buffers is None else [None if b is None else b.to(device) for b in buffers]
            for buffers in (case.sources[rank], case.targets[rank], case.seconds[rank] if case.seconds else None)
        ]
        source, target, second = there
        assert source is not None
        assert target is not None
        with direct_messages(case):
            executor.prepare(case.plan, case.wires)
        executor.run(case.plan, source, target, case.wires, epoch, second=second)
        check_rank(case, rank, [None if b is None else b.cpu() for b in target])
        executor.forget()
    return len(seeds)


def bits(tensors: Any) -> list[Tensor | None]:
    return [None if t is None else t.detach().contiguous().view(torch.uint8).clone() for t in tensors]


def all_pairs(rank: int, world_size: int, family: str, options: dict[str, Any]) -> int:
    """Each strategy after each other one, with the other's weights as a second source: the bits of a load by itself.

    Of a mixture of experts every second one, and all that divide the experts (ep).
    """
    model = tiny_model(family)
    shape = describe_model(model).shape
    among = legal_strategies(world_size, shape)
    if family == MIXTURE:
        among = among[::2] + expert_strategies(among, shape)
    buckets = ",".join(f"{s}:{8 * (i + 1)}@128" for i, s in enumerate(among))
    engine = make_engine(model, buckets, second_source=True, compute_dtype=torch.bfloat16, **options)
    runners = list(engine.phases.values())
    expected = []
    for runner in runners:
        runner.load().result()
        expected.append(bits(runner.weights))
        runner.release()
    pairs = list(itertools.permutations(range(len(runners)), 2))
    for first, second in pairs:
        runners[first].load().result()
        runners[second].load(runners[first]).result()
        found = bits(runners[second].weights)
        runners[first].release()
        runners[second].release()
        for a, b in zip(found, expected[second], strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b), f"{buckets}: {first} -> {second}"
    engine.close()
    return len(pairs)


def switches(stage: Stage) -> Figures:
    """The contract of transports, random switches, and every pair of strategies, direct and over relays."""
    clauses = stage.run(keeps_the_contract)
    seeds = range(1000 * stage.ranks, 1000 * stage.ranks + 90)
    stage.run(random_switches, seeds)
    plans = [{"planner": planner, "devices_per_node": 2} for planner in ("relay", "algorithm1")]
    given = itertools.product(("qwen3_qk_norm_tied", MIXTURE), plans)
    pairs = sum(stage.run(all_pairs, *each)[0] for each in given)
    return {"clauses": clauses[0], "random switches": len(seeds), "pairs": pairs}


def overlap(stage: Stage) -> Figures:
    """Loads and returns beside the computation, in streams of their own: the same bits as without."""
    cases = {
        4: ("five-strategies-tied", "uneven-shards", "torch-1f1b-tied", "empty-replica", "frozen"),
        2: ("fused-bf16", "norms-without-weights"),
    }[stage.ranks]
    off = {"overlap_load": False, "overlap_return": False}
    for case in cases:
        ranks, family, buckets, mini_batches, options = SAME_BITS[case]
        assert ranks == stage.ranks
        late = [
            n for of_rank in stage.run(same_bits, family, buckets, mini_batches, {**off, **options}) for n in of_rank
        ]
        assert late
        assert not any(late), f"{case}: a gradient was final before, but nobody noticed"
    return {"cases": len(cases)}


# --------------------------------------------------------------------------------------------- agreement and faults


def agreement(stage: Stage) -> Figures:
    """A difference, and an error of one rank, are an error on every rank, and work goes on afterwards."""
    messages = stage.run(test_switch_gloo.disagreeing, ranks=4)
    assert all("nothing was sent" in text for texts in messages for text in texts)
    for first, second, raised, differs in stage.run(test_switch_gloo.one_has_an_error, ranks=4):
        assert "broken on 1" in first
        assert "broken on 2" in second
        assert "no such file" in raised
        assert "rank 3 differs" in differs
    return {"disagreements": len(messages[0]), "errors": 3}


def faults(stage: Stage) -> Figures:
    """A rank that is killed, hangs, or raises: a typed error on the others within the timeout, and nobody hangs."""
    corners = [
        ("exception", "compute", 1), ("killed", "compute", 1), ("hangs", "compute", 0), ("memory", "compute", 1),
        ("killed", "load", 0), ("hangs", "load", 1), ("exception", "return", 0), ("killed", "return", 1),
        ("another plan", "agreement", 1), ("leaves", "agreement", 1), ("killed", "save", 0),
    ]  # fmt: skip
    reference = test_faults.reference_run(stage.device)
    for kind, phase, victim in corners:
        test_faults.check_fault(kind, phase, victim, reference, stage.device)
    return {"faults": len(corners)}


# --------------------------------------------------------------------------------------------------------- training


class _StopAfterThree(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def interrupted(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    """A run in one go, and one that is stopped and resumed."""
    train(make_trainer(f"{folder}/whole", world_size, **options))
    train(make_trainer(f"{folder}/parts", world_size, **options, callbacks=[_StopAfterThree()]))
    train(make_trainer(f"{folder}/parts", world_size, **options), resume=True)


def checkpoints(stage: Stage) -> Figures:
    """A run that is stopped and resumed is the run in one go, bit for bit."""
    with memory_folder() as folder:
        stage.run(interrupted, str(folder), {**stage.trainer_options, "bf16": True})
        whole, parts = newest(folder / "whole"), newest(folder / "parts")
        assert whole.name == parts.name == f"checkpoint-{STEPS}"
        assert contents(whole) == contents(parts)
    return {"steps": STEPS, "resumed after": 3}


def automatic(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[list[float], str, float]:
    """The losses, the device, and the most memory that was allocated, of `auto` with a calibration of its own."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    model = tiny_model(FAMILY)
    args = HotSPaTrainingArguments(
        output_dir=folder, max_steps=3, logging_steps=1, hotspa_mini_batch_size=8, hotspa_strategies="auto",
        hotspa_calibration="measure", disable_tqdm=True, report_to="none", bf16=True, save_strategy="no", **options,
    )  # fmt: skip
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=random_rows(24, model.config.vocab_size, longest=60))
    trainer.train()
    assert trainer.engine is not None
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    peak = float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0
    device = trainer.engine.device.type
    trainer.close_engine()
    return losses, device, peak


def auto(stage: Stage) -> Figures:
    """`auto` measures this machine, and trains with what it chose."""
    found = stage.run(automatic, str(stage.folder), stage.trainer_options)
    for losses, device, peak in found:
        assert device == stage.device
        assert (peak > 0) == (device == "cuda")
        assert losses == found[0][0]
        assert len(losses) == 3
    return {"steps": 3}


def stock_run(rank: int, world_size: int, *args: Any) -> list[float]:
    return stock_losses(rank, world_size, *args)


def hot_run(rank: int, world_size: int, folder: str, steps: int, options: dict[str, Any]) -> list[float]:
    three = {2: "dp2:16@32,tp2:32,pp2:60@64", 4: "dp4:16@32,dp2tp2:32,tp2pp2:60@64"}[world_size]
    return hotspa_losses(rank, world_size, folder, steps, {**options, "hotspa_strategies": three})


def curve(stage: Stage) -> Figures:
    """Twenty steps of the stock Trainer in one process, and ours with three strategies: the same losses."""
    steps, options = 20, stage.trainer_options
    (stock,) = stage.run(stock_run, str(stage.folder / "stock"), steps, options, ranks=1, init=False)
    most = 0.0
    for losses in stage.run(hot_run, str(stage.folder / "hot"), steps, options):
        assert len(losses) == len(stock) == steps
        most = max(most, differences(losses, stock)[1])
    assert most <= 1e-5
    return {"steps": steps, "largest difference of a loss": float(f"{most:.1e}")}


def held_bytes() -> int:
    """Bytes of the tensors that are alive on this rank's device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())
    alive = (t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter))
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive if t.layout == torch.strided
        }.values()
    )


def communicators() -> int:
    """Process groups that torch knows of."""
    return len(dist.distributed_c10d._world.pg_map)


def long_loop(rank: int, world_size: int, steps: int) -> list[tuple[int, int]]:
    """Bytes held and communicators after a warm-up, after the loop, and after the engine's end."""
    model = tiny_model("qwen3_qk_norm_tied")
    before = communicators()
    buckets = {2: "dp2:16@32,tp2:32,pp2:60@64", 4: "dp4:16@32,dp2tp2:32,tp2pp2:60@64"}[world_size]
    engine = make_engine(model, buckets, overlap_load=True, overlap_return=True)
    optimizer = torch.optim.SGD([p for _, p in engine.named_parameters()], lr=1e-3)
    rows = [random_rows(8, model.config.vocab_size, longest=60, seed=seed) for seed in range(5)]
    found = []
    for step in range(steps):
        engine.forward_backward(make_mini_batch(engine, rows[step % len(rows)]))
        optimizer.step()
        if step + 1 in (2 * len(rows), steps):
            found.append((held_bytes(), communicators()))
    engine.close()
    return [*found, (0, communicators() - before)]


def loop(stage: Stage, steps: int = 200) -> Figures:
    """Two hundred steps: no byte and no communicator more than after ten, and none left at the end."""
    for warm, late, after in stage.run(long_loop, steps):
        assert late[1] == warm[1], f"{late[1] - warm[1]} communicators more after {steps} steps"
        assert abs(late[0] - warm[0]) <= 1 << 16, f"{late[0] - warm[0]} bytes more after {steps} steps"
        assert after[1] == 0, f"{after[1]} communicators are left"
    return {"steps": steps, "communicators": warm[1]}


@dataclass(frozen=True)
class Part:
    """A part, and what a reader is told of it."""

    name: str
    title: str
    run: Callable[[Stage], Figures]


PARTS = {
    part.name: part
    for part in (
        Part("exact", "exactness of every strategy", exact),
        Part("pipelines", "pipelines of packs of different shapes", pipelines),
        Part("switches", "switches of all pairs, relays too", switches),
        Part("overlap", "loads and returns beside the computation", overlap),
        Part("agreement", "agreement", agreement),
        Part("faults", "faults: killed, hanging, failing ranks", faults),
        Part("checkpoints", "checkpoints and resume", checkpoints),
        Part("auto", "`auto` with a calibration", auto),
        Part("curve", "20 steps beside the stock `Trainer`", curve),
        Part("loop", "200 steps, memory and communicators counted", loop),
    )
}
