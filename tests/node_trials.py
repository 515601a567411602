"""Jobs on two nodes that lose one: `python -m tests.node_trials` makes 20 of them and prints the table of the documentation.

A trial starts a job by one of the ways, takes a node away once a checkpoint is there (kills or freezes its launcher and its
ranks, or cuts its network), and times how long the ranks of the other node take to end. Then each checkpoint that was there
must hold the bits of the run that lost nothing, and the job is resumed on the node that is left, with other strategies: the
end must be, bit for bit, that of a resume on as many ranks from the same checkpoint of the run that lost nothing.
"""

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import read_manifest, verify
from tests.node_job import STRATEGIES
from tests.nodes import NAMES, Job, Nodes, all_end, job
from tests.ray_nodes import ray_job, workers
from tests.training_runs import contents, contents_of_shares

STEPS, SAVES, AT = 24, 2, 4
"""Mini-batches of a job, how often it saves, and the checkpoint after which a node is taken away."""
TIMEOUT_S = 10
"""`ddp_timeout` of the jobs: how long a rank waits for one that is silent."""
LIMIT_S = 60.0
RAY_LIMIT_S = 240.0
"""Ray's: it ends the processes of other nodes only after its own checks of a silent node have failed, about a minute."""
AS_THE_SCRIPT = ["--lr_scheduler_type", "cosine", "--warmup_steps", "0.03"]
"""What `examples/finetune.py` says where nothing is given."""
WAYS = ("accelerate", "restarting", "slurm")
KINDS = ("killed", "frozen", "cut off")


def make_inputs(folder: Path) -> str:
    """A tiny model with its tokenizer, and rows; returns the flags that name them."""
    from tests.families import tiny_model
    from tests.gloo.test_trainer_world import make_tokenizer

    rows = "".join(f'{{"text": "{"def f(x): return x + 1 " * (1 + n % 17)}"}}\n' for n in range(24))
    (folder / "texts.jsonl").write_text(rows)
    model = make_tokenizer(folder)
    tiny_model("llama_gqa_bias").save_pretrained(model)
    return f"--model {model} --dataset {folder / 'texts.jsonl'}"


def flags(inputs: str, output: Path, world: int, **changes: object) -> list[str]:
    """The command line of a job; without strategies for `world` 0."""
    settings = {"max_steps": STEPS, "save_steps": SAVES, "logging_steps": 1, "hotspa_mini_batch_size": 4,
                "hotspa_overlong": "split", "learning_rate": 1e-2, "ddp_timeout": TIMEOUT_S, "disable_tqdm": True,
                "output_dir": output, **changes}  # fmt: skip
    if world:
        settings["hotspa_strategies"] = STRATEGIES[world]
    return [
        *inputs.split(),
        "--use_cpu",
        *(word for key, value in settings.items() for word in (f"--{key}", str(value))),
    ]


def script(way: str, words: Sequence[str]) -> list[str]:
    """What the launchers of a way are given."""
    if way == "slurm":
        return [*words, "--bf16", "False"]
    name = "tests/node_job.py" if way == "restarting" else "examples/finetune.py"
    return [name, *words]


def ray_words(words: Sequence[str], storage: Path, least: int) -> list[str]:
    """The arguments of `examples/ray_train.py`, for four processes or at least so many."""
    at = words.index("--output_dir")  # it makes one of the storage
    strategies = [f"{world}={text}" for world, text in STRATEGIES.items()]
    return [*words[:at], *words[at + 2 :], *AS_THE_SCRIPT, "--storage", str(storage), "--workers", "4", "--min_workers",
            str(least), "--strategies", *strategies]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What became of a job.

    Args:
        end_s: Seconds from the loss to the end of the last rank of the other node.
        error: The first error of ours that was shown.
        names_node: Whether that names the node that is gone.
        checkpoint: The newest after the loss.
        acknowledged: The newest when the node was taken away.
        resumed: Whether the resumed job ended with the expected bits.
    """

    way: str
    kind: str
    node: int
    end_s: float
    error: str
    names_node: bool
    checkpoint: int
    acknowledged: int
    resumed: bool

    def row(self) -> str:
        """A row of the table."""
        named = "yes" if self.names_node else "no"
        ends = "bitwise" if self.resumed else "NO"
        return (
            f"| {self.way} | {self.kind} | {NAMES[self.node]} | {self.end_s:.1f} | {self.error} | {named} "
            f"| {self.checkpoint} (>= {self.acknowledged}) | {ends} |"
        )


HEAD = """| way | node | which | seconds to the last rank's end | error | names the node | newest checkpoint | resumed on one node |
|---|---|---|---|---|---|---|---|"""


class Trials:
    """Trials against one run that loses nothing.

    Args:
        folder: For everything.
    """

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self._nodes, self._folder, self._number = nodes, folder, 0
        self._inputs = make_inputs(folder)
        self._whole = folder / "whole"
        self._resumes: dict[int, dict[str, str]] = {}
        words = flags(self._inputs, self._whole, 4)
        with job(nodes, "accelerate", folder, script("accelerate", words)) as running:
            assert running.code(300) == 0, running.said()[-3000:]

    def resumed_from(self, step: int) -> dict[str, str]:
        """What a resume on two ranks from a checkpoint of the run that lost nothing ends with."""
        if step not in self._resumes:
            output = self._folder / f"resumed-{step}"
            output.mkdir()
            shutil.copytree(self._whole / f"checkpoint-{step}", output / f"checkpoint-{step}")
            words = [*flags(self._inputs, output, 2), "--resume_from_checkpoint", "True"]
            with job(self._nodes, "accelerate", self._folder, script("accelerate", words), [0]) as running:
                assert running.code(300) == 0, running.said()[-3000:]
            self._resumes[step] = contents(output / f"checkpoint-{STEPS}")
        return self._resumes[step]

    def ray(self, kind: str) -> Trial:
        """Makes one with Ray, whose head is on the first node: the second one goes, and Ray starts two processes again."""
        folder = self._next_folder()
        output = folder / "trainer"
        words = ray_words(flags(self._inputs, output, 0), folder, 2)
        with ray_job(self._nodes, folder, words) as running:
            acknowledged = self._await(output, running)
            ranks = workers(running, 0)
            begin = time.monotonic()
            take_away(running, kind, 1)
            ended = all_end(ranks, RAY_LIMIT_S)
            end_s = time.monotonic() - begin
            assert running.step is not None
            code = running.step.wait(RAY_LIMIT_S) if ended else None
            if kind == "cut off":
                self._nodes.mend(1)
            said = running.said()
        assert code == 0, f"ray, {kind}: {'it ended with ' + str(code) if ended else 'not ended'}\n{said[-12000:]}"
        for copy in [manifest.parent for manifest in (folder / "hotspa").glob("*/MANIFEST.json")]:
            if verify(copy).world_size == 4:
                assert contents_of_shares(copy) == contents_of_shares(self._whole / f"checkpoint-{verify(copy).step}")
        newest = self._check(output, acknowledged)
        resumed = contents(output / f"checkpoint-{STEPS}") == self.resumed_from(newest)
        return Trial("ray", kind, 1, end_s, *first_error(said, NAMES[1]), newest, acknowledged, resumed)

    def _next_folder(self) -> Path:
        self._number += 1
        folder = self._folder / f"trial-{self._number}"
        folder.mkdir()
        return folder

    def trial(self, way: str, kind: str, node: int) -> Trial:
        """Makes one."""
        if way == "ray":
            return self.ray(kind)
        folder = self._next_folder()
        output = folder / "out"
        restarts = way == "restarting" and node == 1  # the launchers of the other node have met at a port of node 0
        words = flags(self._inputs, output, 0 if way == "restarting" else 4)
        with job(self._nodes, way, folder, script(way, words)) as running:
            acknowledged = self._await(output, running)
            ranks = running.processes(1 - node)[1:]
            begin = time.monotonic()
            take_away(running, kind, node)
            ended = all_end(ranks, LIMIT_S)
            end_s = time.monotonic() - begin
            if not ended:  # their stacks go to the log: PYTHONFAULTHANDLER
                running.send(1 - node, signal.SIGABRT)
                psutil.wait_procs(ranks, 10)
            # torchrun itself waits on for the node with its rendezvous, where that is silent
            ended = ended and ((way == "restarting" and node == 0) or self._end_of(running, node, output, restarts))
            if kind == "cut off":
                self._nodes.mend(node)
            said = running.said()
        assert ended, f"{way}, {NAMES[node]} {kind}: the other node has not ended\n{said[-12000:]}"
        newest = self._check(output, acknowledged)
        if not restarts:
            self._resume(way, folder, output, 1 - node)
        resumed = contents(output / f"checkpoint-{STEPS}") == self.resumed_from(newest)
        code, names = first_error(said, NAMES[node])
        return Trial(way, kind, node, end_s, code, names, newest, acknowledged, resumed)

    def _await(self, output: Path, running: Job) -> int:
        """Waits for the checkpoint after which the node goes; returns the newest."""
        deadline = time.monotonic() + 4 * LIMIT_S
        while (newest := newest_step(output)) < AT:
            assert time.monotonic() < deadline, running.said()[-3000:]
            assert all(p.is_running() for p in running.launchers), running.said()[-3000:]
            time.sleep(0.02)
        return newest

    def _end_of(self, running: Job, node: int, output: Path, restarts: bool) -> bool:
        if not restarts:
            return running.wait(1 - node, LIMIT_S)
        return running.wait(1 - node, 2 * LIMIT_S) and newest_step(output) == STEPS

    def _check(self, output: Path, acknowledged: int) -> int:
        """The newest checkpoint of the job that lost a node; each must be whole, and have the bits of the whole run's."""
        steps = []
        for checkpoint in checkpoints(output):
            verify(checkpoint)
            manifest = read_manifest(checkpoint)
            if manifest.world_size == 4:
                steps.append(manifest.step)
                assert contents_of_shares(checkpoint) == contents_of_shares(self._whole / checkpoint.name)
        assert max(steps) >= acknowledged
        return max(steps)

    def _resume(self, way: str, folder: Path, output: Path, node: int) -> None:
        words = flags(self._inputs, output, 0 if way == "restarting" else 2)
        if way in ("accelerate", "torchrun"):  # the others do it by themselves
            words += ["--resume_from_checkpoint", "True"]
        with job(self._nodes, way, folder, script(way, words), [node]) as running:
            assert running.code(300) == 0, running.said()[-3000:]


def take_away(running: Job, kind: str, node: int) -> None:
    """Takes a node away from a job."""
    if kind == "cut off":
        running.nodes.cut(node)
    else:
        running.send(node, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def newest_step(output: Path) -> int:
    """The step of the newest checkpoint; 0 without."""
    found = checkpoints(output) if output.exists() else []
    return int(found[0].name.split("-")[1]) if found else 0


def first_error(said: str, name: str) -> tuple[str, bool]:
    """The code of the first error in a log, and whether an error names a node."""
    lines = [line for line in said.splitlines() if re.search(r"HSP-\d+ ", line)]
    codes = [match[0] for line in lines if (match := re.search(r"HSP-\d+ \w+", line))]
    return (codes[0] if codes else "none"), any(name in line for line in lines)


def planned(count: int, can_cut: bool) -> list[tuple[str, str, int]]:
    """So many trials, spread over ways, kinds and nodes."""
    kinds = [kind for kind in KINDS if can_cut or kind != "cut off"]
    every = [(way, kind, node) for node in (1, 0) for kind in kinds for way in WAYS]
    every += [("ray", kind, 1) for kind in kinds]
    return [every[number % len(every)] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=21)
    parser.add_argument("--only", nargs="+", help="WAY,KIND,NODE ...: these trials")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="node-trials-"))
    folder.mkdir(parents=True, exist_ok=True)
    with Nodes() as nodes:
        trials, plan = Trials(nodes, folder), planned(given.trials, nodes.real)
        if given.only:
            plan = [(way, kind, int(node)) for way, kind, node in (each.split(",") for each in given.only)]
        print(HEAD, flush=True)
        for each in plan:
            try:
                print(trials.trial(*each).row(), flush=True)
            except AssertionError as error:
                print(f"| {each} failed: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
