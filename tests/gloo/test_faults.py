"""Faults: what happens to all ranks, soon, when something happens to one.

The matrix below injects a fault of some kind into a phase of the third mini-batch (or of the save and the evaluation
after the second one) of a run that saves after every step, on the first or the last rank. Then every rank that is still
alive ends with an error of our family that has a code, a place and a fix (the rank itself may raise what was thrown
into it), soon; and every checkpoint on disk verifies and holds the bits of the run that nothing happened to.
"""

import functools
import json
import os
import resource
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.costs.terms import Cost
from hf_hotspa.data.collator import RowCollator
from hf_hotspa.engine import engine as engine_module
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.faults import OutOfMemory
from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.errors import HotspaConfigError, HotspaError, PhaseMemoryError
from hf_hotspa.model.replica import Replica
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.backends import BACKENDS
from hf_hotspa.strategy import Strategy, parse_buckets
from hf_hotspa.trainer import run_plan
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.known_shortages import fewest_tokens, largest_packs, record, warn_of_known
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.checkpoints import memory_folder
from tests.families import tiny_model
from tests.gloo.test_preemption import evaluate_every
from tests.gpu_machine import Machine, setup_of
from tests.harness import BACKEND_VARIABLE, run_ranks
from tests.training_runs import contents_of_shares, make_trainer, one_run, train

pytestmark = pytest.mark.gloo

WORLD = 2
HANG_TIMEOUT_S, TIMEOUT_S = 6, 900
"""How long ranks wait for a peer (in a switch, too): where one hangs, and elsewhere, where nobody waits: it is longer than
a world may live, so a rank that waited would be reported as hanging."""
NCCL_TIMEOUT_S = 45
"""The same over NCCL, whose operations do not end when a peer is gone: there every fault is noticed by the timeout."""
INJECTED = "an injected fault"
FILE = "hotspa_out_of_memory.json"
PHASES = ("data", "agreement", "load", "compute", "return", "optimizer", "evaluate", "save", "end")
KINDS = ("exception", "killed", "leaves", "hangs", "memory")
RUN = {"max_steps": 4, "hotspa_max_failed_saves": 0, "logging_steps": 2}


TARGETS = {  # the class and method that run in a phase
    "data": (RowCollator, "__call__"),
    "agreement": (Agreement, "check"),
    "load": (PhaseRunner, "load"),
    "compute": (PhaseRunner, "compute"),
    "return": (PhaseRunner, "return_gradients"),
    "optimizer": (torch.optim.AdamW, "step"),
    "evaluate": (PhaseRunner, "compute_forward"),
    "save": (Disk, "write"),
    "end": (HotSPaTrainer, "_finalize_training"),
    "plan": (HotSPaEngine, "forward_backward"),
}


def inject(kind, folder, original, owner, *args, **kwargs):
    """The fault, in place of a method or around it."""
    Path(folder, "injected").write_text(str(time.monotonic()))
    if kind == "exception":
        raise ValueError(INJECTED)
    if kind == "memory":
        raise torch.OutOfMemoryError(INJECTED)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leaves":
        os._exit(0)
    if kind == "hangs":
        time.sleep(timeout_of(kind, wakes_ranks()) + 8)
    if kind == "another plan":
        args = (replace(args[0], content="other"), *args[1:])
    result = original(owner, *args, **kwargs)
    if kind == "nan":
        next(g for g in owner._gradients if g is not None)[0] = torch.nan
    return result


def arm(trainer, kind, phase, folder):
    """Puts the fault into the class of this process, which ends with the test; it happens once."""
    pending = [True]
    cls, name = TARGETS["plan" if kind == "another plan" else phase]
    original = getattr(cls, name)

    def due(owner, args):
        if phase == "data" and owner is not trainer.callback_handler.train_dataloader.collate_fn:
            return False  # it reads for an evaluation
        if cls.__name__ == "Agreement" and not args[2].startswith("mini-batch"):
            return False
        return pending and trainer.state.global_step >= (RUN["max_steps"] if phase == "end" else 2)

    @functools.wraps(original)
    def faulty(owner, *args, **kwargs):
        if due(owner, args):
            pending.clear()
            return inject(kind, folder, original, owner, *args, **kwargs)
        return original(owner, *args, **kwargs)

    setattr(cls, name, faulty)


def wakes_ranks():
    """Whether this rank's operations end when a peer is gone."""
    known = BACKENDS.get(os.environ[BACKEND_VARIABLE])
    return known is None or known.wakes_ranks


def timeout_of(kind, wakes):
    """How long ranks wait for a peer in a run with a fault of a kind."""
    if not wakes:
        return NCCL_TIMEOUT_S
    return HANG_TIMEOUT_S if kind == "hangs" else TIMEOUT_S


def faulty_run(rank, world, folder, kind, phase, victim):
    import torch.distributed as dist

    timeout = timeout_of(kind, wakes_ranks())
    dist.init_process_group(
        os.environ[BACKEND_VARIABLE],
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    trainer = make_trainer(
        f"{folder}/out",
        world,
        ddp_timeout=timeout,
        hotspa_switch_timeout=float(timeout),
        use_cpu=not torch.cuda.is_available(),
        **RUN,
    )
    evaluate_every(trainer, 1)
    if rank == victim:
        arm(trainer, kind, phase, folder)
    train(trainer)


def expected_of(kind, phase, wakes=True):
    """The classes of the errors on the ranks that nothing was done to."""
    if kind in ("killed", "leaves"):
        return {"PeerError", "TransferError"} | (set() if wakes else {"SilentPeerError"})
    if kind == "hangs":
        return {"SilentPeerError"}
    if kind == "nan":
        return {"NonFiniteError"}
    if kind == "another plan":
        return {"PlanMismatchError"}
    if phase in ("data", "save"):
        return {"DataError" if phase == "data" else "UnsavableError" if kind == "exception" else "CheckpointError"}
    if kind == "memory" and phase in ("load", "compute", "return", "evaluate"):
        return {"PhaseMemoryError"}
    return {"PeerError"}


@pytest.fixture(scope="module")
def reference():
    return reference_run("cpu")


def reference_run(device):
    """The bits of every checkpoint of the run without a fault."""
    with memory_folder() as folder:
        options = {"max_steps": RUN["max_steps"], "use_cpu": device == "cpu"}
        run_ranks(WORLD, one_run, str(folder), None, options, device=device)
        return {path.name: contents_of_shares(path) for path in checkpoints(folder)}


def check_fault(kind, phase, victim, reference, device="cpu"):
    with memory_folder() as folder:
        outcomes = run_ranks(
            WORLD, faulty_run, str(folder), kind, phase, victim, expect_failure=True, init=False, timeout=240,
            device=device,
        )  # fmt: skip
        injected = float((folder / "injected").read_text())
        wakes = not setup_of(Machine.found(), WORLD).over_nccl if device == "cuda" else True
        expected, latest = expected_of(kind, phase, wakes), 0.0
        for outcome in outcomes:
            if outcome.rank == victim and kind in ("killed", "leaves"):
                assert not outcome.reported
                continue
            assert outcome.error_type is not None, f"rank {outcome.rank} went on"
            assert outcome.error is not None
            if outcome.rank == victim and outcome.error_type in ("ValueError", "OutOfMemoryError"):
                assert INJECTED in outcome.error  # its own, with the traceback
                assert expected == {"PeerError"}
                continue
            assert outcome.error_type in expected, outcome.describe()
            assert isinstance(outcome.exception, HotspaError)
            assert outcome.exception.code in outcome.error
            assert outcome.exception.fix, outcome.error
            assert "rank" in outcome.error, outcome.error
            if kind == "hangs":
                assert f"rank {victim} is silent" in outcome.error, outcome.error
            if kind in ("exception", "memory"):
                assert INJECTED in outcome.error, outcome.error
            if outcome.rank != victim:
                latest = max(latest, outcome.ended_at - injected)
        print(f"{kind} in {phase} on rank {victim}: the others have ended {latest:.1f} s after it")
        if expected == {"PhaseMemoryError"}:
            assert len(json.loads((folder / "out" / FILE).read_text())["entries"]) == 1
        found = checkpoints(folder / "out")
        assert found[0].name == {"save": "checkpoint-1", "evaluate": "checkpoint-1", "end": "checkpoint-4"}.get(
            phase, "checkpoint-2"
        )
        for path in found:
            verify(path)
            assert contents_of_shares(path) == reference[path.name]


# some kinds and phases, the ranks in turn; the rest of the matrix is slow: a hang has a quick test in test_overlap.py
CORNERS = [
    ("exception", "data", 1), ("exception", "evaluate", 1), ("exception", "save", 1),
    ("killed", "return", 0),
    ("leaves", "agreement", 1),
]  # fmt: skip
EVERYTHING = [(kind, phase, victim) for kind in KINDS for phase in PHASES for victim in (0, WORLD - 1)]
EVERYTHING += [(kind, phase, v) for kind, phase in (("nan", "compute"), ("another plan", "agreement")) for v in (0, 1)]


@pytest.mark.parametrize(("kind", "phase", "victim"), CORNERS)
def test_a_fault_on_one_rank(kind, phase, victim, reference):
    check_fault(kind, phase, victim, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "phase", "victim"), sorted(set(EVERYTHING) - set(CORNERS)))
def test_every_fault_in_every_phase(kind, phase, victim, reference):
    check_fault(kind, phase, victim, reference)


# ------------------------------------------------------------------------------------------------ no memory


def short_of_memory(rank, world, folder, options):
    """A pack of 40 tokens or more is too much for one rank."""
    forward = Replica.forward

    def limited(self, micro_batch, hidden, scale, *more):
        if rank == 1 and self.mesh.strategy.tp == 2 and micro_batch.num_tokens >= 40:
            raise torch.OutOfMemoryError(INJECTED)
        return forward(self, micro_batch, hidden, scale, *more)

    Replica.forward = limited
    trainer = make_trainer(folder, world, **options)
    before = []

    class Weights(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            before[:] = [p.detach().clone() for _, p in trainer.engine.named_parameters()]

    trainer.add_callback(Weights())
    try:
        train(trainer)
    finally:
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.engine.named_parameters(), strict=True))
        Path(folder, f"same-{rank}").write_text(str(same))


def test_the_next_launch_avoids_what_ran_out_of_memory(tmp_path, caplog):
    options = {"hotspa_strategies": "dp2:16@32,tp2:60", "ddp_timeout": TIMEOUT_S, "save_strategy": "no"}
    outcomes = run_ranks(2, short_of_memory, str(tmp_path), options, expect_failure=True)
    [entry] = json.loads((tmp_path / FILE).read_text())["entries"]
    for outcome in outcomes:
        assert isinstance(outcome.exception, PhaseMemoryError), outcome.describe()
        assert (tmp_path / f"same-{outcome.rank}").read_text() == "True", "the weights changed"
        error = outcome.exception.to_dict()
        assert error["code"] == "HSP-401"
        for part in (
            "rank 1",
            "compute",
            "tp2",
            "a pack of ",
            "predicted ",
            "before activations, held at most ",
            INJECTED,
        ):
            assert part in error["what"], error
        assert f"mini-batch {entry['step']}, strategy tp2" in error["where"]
    assert (entry["strategy"], entry["rank"], entry["act"]) == ("tp2", 1, "compute")
    assert entry["pack_tokens"] >= 40
    [(strategy, tokens)] = fewest_tokens([largest_packs(tmp_path)] * 2).items()
    assert strategy == Strategy(tp=2)
    assert 0 < tokens < entry["pack_tokens"]
    warn_of_known(tmp_path, parse_buckets("dp2:16@32,tp2:60"))
    assert "tp2:60 ran out of memory in an earlier run" in caplog.text
    caplog.clear()
    warn_of_known(tmp_path, parse_buckets(f"dp2:16@32,tp2:{tokens}"))
    assert not caplog.text
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(HotspaConfigError, match="delete hotspa_out_of_memory.json"):
        largest_packs(tmp_path)


def short_of_memory_in_an_evaluation(rank, world, folder):
    """`evaluate()` without a `train()` around it."""
    forward = Replica.forward

    def limited(self, *args):
        if rank == 1:
            raise torch.OutOfMemoryError(INJECTED)
        return forward(self, *args)

    Replica.forward = limited
    trainer = make_trainer(folder, world, hotspa_strategies="tp2:60", ddp_timeout=TIMEOUT_S)
    trainer.evaluate(trainer.train_dataset)


def test_an_evaluation_that_runs_out_of_memory_leaves_a_note_too(tmp_path):
    for outcome in run_ranks(2, short_of_memory_in_an_evaluation, str(tmp_path), expect_failure=True):
        assert isinstance(outcome.exception, PhaseMemoryError), outcome.describe()
        assert INJECTED in outcome.error
    [entry] = json.loads((tmp_path / FILE).read_text())["entries"]
    assert (entry["strategy"], entry["rank"], entry["act"]) == ("tp2", 1, "compute")


def auto_pool(rank, world, folder):
    """The buckets that auto chooses, and chooses after dp2 ran out of memory with 60 tokens, and tp2 at its load."""
    from tests.calibrations import made_calibration

    model = tiny_model("qwen3_qk_norm_tied")
    calibration = made_calibration(model, world, {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)})
    run_plan.calibrate = lambda config, **kwargs: calibration  # this process ends with the test
    pools = []
    for failed in ({}, {"dp2": 60, "tp2": 0}):
        for strategy, tokens in failed.items() if rank == 1 else ():
            record(folder, OutOfMemory(1, 3, "compute", strategy, tokens, 2, 1, 1, "no memory"))
        trainer = make_trainer(folder, world, hotspa_strategies="auto", max_steps=1, save_strategy="no")
        trainer._hotspa.ranks.agreement().barrier()
        train(trainer)
        pools.append(
            {str(bucket.strategy): bucket.pack_tokens for bucket in trainer._hotspa.watchers.plan.choices.plan.pool}
        )
    return pools


def test_auto_makes_smaller_packs_after_a_lack_of_memory(tmp_path):
    first = run_ranks(2, auto_pool, str(tmp_path))
    assert first[0] == first[1]
    before, after = first[0]
    assert before != after
    assert after.get("dp2", 0) <= 45
    assert "tp2" not in after


def starts_badly(rank, world, folder, place):
    """Rank 1 dies, or may open no more files, on the way to the first step."""
    if rank == 1:
        kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if place == "scan":
            HotSPaTrainingArguments.main_process_first = kill
        elif place == "constructor":
            Trainer.create_accelerator_and_postprocess = kill
        elif place == "set-up":
            engine_module.plan_switches = kill
    trainer = make_trainer(folder, world, ddp_timeout=60, hotspa_switch_timeout=10)
    if rank == 1 and place == "no descriptors":
        taken = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    trainer.train()


@pytest.mark.parametrize(
    "place", ["scan", *(pytest.param(p, marks=pytest.mark.slow) for p in ("constructor", "set-up", "no descriptors"))]
)
def test_a_fault_before_the_first_step_is_typed(place, tmp_path):
    survivor, victim = run_ranks(2, starts_badly, str(tmp_path), place, expect_failure=True)
    assert isinstance(survivor.exception, HotspaError), survivor.describe()
    if place != "no descriptors":
        assert victim.exitcode == -signal.SIGKILL
        assert survivor.exception.code in ("HSP-110", "HSP-112")
        return
    for outcome in (survivor, victim):
        assert isinstance(outcome.exception, HotspaConfigError), outcome.describe()
        assert "too many open files and connections" in str(outcome.exception)
        assert "rank 1" in outcome.exception.where
        assert "ulimit -n" in outcome.exception.fix
