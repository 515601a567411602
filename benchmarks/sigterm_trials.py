"""SIGTERM in every way that a job gets it: does it leave a checkpoint of the same step on all ranks?

    python benchmarks/sigterm_trials.py                       # 24 trials, two at a time; some minutes
    python benchmarks/sigterm_trials.py --rounds 1 --launchers torchrun --workers 2 --victims tree

A trial starts a training run of two CPU processes by a launcher, waits until some steps are trained, and sends SIGTERM

* `agent`: to the launcher alone, which passes it on;
* `group`: to the process group of the launcher, as a shell or `timeout` does;
* `tree`: to the launcher, the ranks and all their children at once, as schedulers do.

It counts when every rank says that its `train()` returned, preempted, at the same step, and the newest checkpoint is of
that step, verifies, and has the files of all ranks. Nothing saves in these runs but SIGTERM.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from result_file import write_json

LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    "accelerate": ("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
}  # fmt: skip
VICTIMS = ("agent", "group", "tree")
WORKERS = (0, 2)
_READY, _STOPPED = "ready-{}", "stopped-{}"
_STEPS_BEFORE = 3
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Trial:
    """What became of one run: the step of its checkpoint, the exit code of the launcher, seconds from the signal to its
    end, and why the trial does not count (None when it does)."""

    launcher: str
    victims: str
    workers: int
    step: int | None
    exit_code: int | None
    seconds: float
    reason: str | None


# -- a rank -----------------------------------------------------------------------------------------------------------


def train(folder: Path, workers: int) -> None:
    """The training script of a trial: a tiny model, steps without an end, no save but the one at a SIGTERM."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

    class Ready(TrainerCallback):
        """Says when some steps are trained."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == _STEPS_BEFORE:
                (folder / _READY.format(args.process_index)).touch()

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 48, (4000,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(64, (length,), generator=generator).tolist()} for length in lengths]
    args = HotSPaTrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1_000_000,
        save_steps=1_000_000, logging_steps=1_000, hotspa_mini_batch_size=8, hotspa_strategies="dp2:16@32,tp2:64",
        dataloader_num_workers=workers, hotspa_report=False,
    )  # fmt: skip
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, callbacks=[Ready()])
    trainer.train()
    stopped = {"step": trainer.state.global_step, "preempted": trainer.preempted}
    (folder / _STOPPED.format(args.process_index)).write_text(json.dumps(stopped))


# -- a trial ----------------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in task.read_text().split()]
        except OSError:  # it has ended meanwhile
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def send(launcher: int, victims: str) -> None:
    """SIGTERM, as somebody outside of the job sends it."""
    if victims == "group":
        os.killpg(launcher, signal.SIGTERM)
        return
    signalled = [launcher] if victims == "agent" else [launcher, *children(launcher)]
    random.shuffle(signalled)
    for pid in signalled:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


def judge(folder: Path) -> tuple[int | None, str | None]:
    """The step of the checkpoint that a run has left, and why it does not count."""
    from hf_hotspa.checkpoint.format.folder import checkpoints
    from hf_hotspa.checkpoint.format.manifest import rank_state, rank_tensors, verify
    from hf_hotspa.errors import HotspaError

    found = checkpoints(folder / "out")
    if not found:
        return None, "no checkpoint"
    try:
        manifest = verify(found[0])
    except HotspaError as error:
        return None, str(error)
    step = manifest.step
    stopped = {rank: folder / _STOPPED.format(rank) for rank in (0, 1)}
    missing = [rank for rank, path in stopped.items() if not path.exists()]
    if missing:
        return step, f"train() did not return on ranks {missing}"
    if any(json.loads(path.read_text()) != {"step": step, "preempted": True} for path in stopped.values()):
        return step, f"ranks stopped elsewhere: {[path.read_text() for path in stopped.values()]}"
    names = {file.name for file in manifest.files}
    wanted = {name for rank in (0, 1) for name in (rank_tensors(rank, 2), rank_state(rank, 2))}
    return step, f"no {sorted(wanted - names)}" if wanted - names else None


def try_once(launcher: str, victims: str, workers: int, log: Path | None = None) -> Trial:
    """One trial.

    Args:
        launcher: One of `LAUNCHERS`.
        victims: One of `VICTIMS`.
        workers: DataLoader workers of each rank.
        log: Where to keep what the run printed, when it does not count.
    """
    sent = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hotspa-sigterm-") as name:
        folder, text = Path(name), Path(name, "log")
        command = [sys.executable, "-m", *LAUNCHERS[launcher], __file__, "--train", name, "--workers", str(workers)]
        with text.open("w") as output:
            job = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
        reason: str | None = None
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not all((folder / _READY.format(rank)).exists() for rank in (0, 1)):
                if job.poll() is not None or time.monotonic() > deadline:
                    reason = "it did not start to train"
                    break
                time.sleep(0.05)
            if reason is None:
                time.sleep(random.random() / 2)
                sent = time.perf_counter()
                send(job.pid, victims)
                job.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            reason = "the launcher did not end"
        finally:
            for pid in [job.pid, *children(job.pid)] if job.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            job.wait()
        seconds = time.perf_counter() - sent
        step, found = judge(folder) if reason is None else (None, reason)
        if found is not None and log is not None:
            log.write_text(text.read_text())
        return Trial(launcher, victims, workers, step, job.returncode, seconds, found)


def table(trials: Iterable[Trial]) -> str:
    """The trials as text, one a line."""
    lines = ["launcher    victims  workers  checkpoint  exit code  seconds to the end"]
    for t in trials:
        step = t.reason or f"step {t.step}"
        lines.append(f"{t.launcher:<12}{t.victims:<9}{t.workers:<9}{step:<12}{t.exit_code!s:<11}{t.seconds:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each combination is tried")
    parser.add_argument("--launchers", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--parallel", type=int, default=2, help="trials that run at a time")
    parser.add_argument("--json", type=Path, help="also write the trials here")
    parser.add_argument("--logs", type=Path, help="keep what the runs printed that do not count in this folder")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # what a launcher runs: a rank
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.workers[0])
        return
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    cases = [
        case for _ in range(options.rounds) for case in product(options.launchers, options.victims, options.workers)
    ]

    def run(number: int) -> Trial:
        return try_once(*cases[number], options.logs / f"{number}.log" if options.logs is not None else None)

    with ThreadPoolExecutor(options.parallel) as pool:
        trials = list(pool.map(run, range(len(cases))))
    print(table(trials))
    good = sum(trial.reason is None for trial in trials)
    print(f"{good} of {len(trials)} left a checkpoint of the same step on all ranks")
    write_json(options.json, [asdict(trial) for trial in trials])
    sys.exit(good < len(trials))


if __name__ == "__main__":
    main()
