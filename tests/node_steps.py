"""A few steps of a switched model on two nodes, in processes that have imported everything already (`tests/harness.py`): what
`torchrun` does on each node, without what its command line takes to start."""

import ctypes
import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hf_hotspa.cluster import Cluster
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.mesh import known_nodes
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.families import tiny_model
from tests.switched import batch_of, rows_of

STEPS = 3
_LIMIT_S = 60
"""Nothing that hangs is left over for longer."""


def steps(rank: int, world: int) -> dict[str, Any]:
    """Trains; the losses, how many switches there were, the nodes that this rank knows, and elements that a load of replicas
    brings to other nodes."""
    model = SwitchedModel(
        tiny_model("llama_gqa_bias"), parse_buckets("dp4:24@48,dp2tp2:64@64"), EngineOptions()
    ).train()
    optimizer = torch.optim.AdamW(model.engine.parameter_groups(weight_decay=0.1), lr=1e-2)
    losses, switches = [], 0
    for step in range(STEPS):
        model(**batch_of(rows_of(rank, model, seed=step))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.report
        assert report is not None
        losses.append(report.loss)
        switches += len(report.phases)
    nodes, pool = known_nodes(), model.engine._switching.pool
    assert nodes is not None
    plan = pool.load(pool.strategies[0])
    loads = plan.loads(Cluster(world, 2), [1] * len(plan.kind_of))
    model.close()
    return {
        "losses": losses, "switches": switches, "nodes": nodes.names, "a_node": pool._cluster.devices_per_node,
        "between": sum(load.received_inter.sum() for load in loads), "parameters": model.engine.description.vector.numel,
    }  # fmt: skip


def launch(number: int, world: int, holders: list[int], environments: list[dict[str, str]], endpoint: str) -> Any:
    """One of two launchers, on its node; what `steps` returns on its two ranks, by rank.

    Args:
        holders: A process of each node; none where nodes are no namespaces.
    """
    context = multiprocessing.get_context("fork")  # this process has threads, and may not change its user namespace
    ours, theirs = context.Pipe(duplex=False)
    launcher = context.Process(target=_launch, args=(number, holders, environments, endpoint, theirs))
    launcher.start()
    theirs.close()
    result = ours.recv()
    launcher.join()
    return result


def _launch(
    number: int, holders: list[int], environments: list[dict[str, str]], endpoint: str, pipe: Connection
) -> None:
    if holders:
        enter(holders[number])
    os.environ.update(environments[number])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    address = endpoint.rpartition(":")[0] if number == 0 else None
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=2, run_id="quick", rdzv_backend="c10d", rdzv_endpoint=endpoint,
        rdzv_configs={"is_host": number == 0, "join_timeout": _LIMIT_S}, start_method="fork", max_restarts=0, local_addr=address,
    )  # fmt: skip
    pipe.send(elastic_launch(config, _rank)())


def _rank() -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    result = steps(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    return result


def enter(process: int) -> None:
    """Moves this process, which has one thread, into the namespaces of another. What `os.setns` does from Python 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net", "uts", "mnt")]
    for file in files:
        if library.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
