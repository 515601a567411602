"""The harness itself: worlds start, talk, fail with the right traceback, and never hang."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_hotspa.errors import StrategyError
from tests.harness import PRELOAD, WorldError, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return rank, int(value.item()), torch.get_num_threads()


def test_ranks_talk() -> None:
    assert run_ranks(4, _sum_of_ranks, 10) == [(rank, 46, 1) for rank in range(4)]


def _surroundings(rank: int, world_size: int) -> tuple[list[str], str, tuple[str, ...]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HOTSPA_TEST_WORD")
    missing = [name for name in (*PRELOAD, "transformers.trainer") if name not in sys.modules]
    return missing, __name__, tuple(map(os.environ.__getitem__, names))


def test_ranks_are_forked_from_a_warm_server_and_know_this_module_and_their_environment() -> None:
    got = run_ranks(2, _surroundings, init=False, env={"HOTSPA_TEST_WORD": "hello"})
    environments = [(str(rank), str(rank), "2", "127.0.0.1", "hello") for rank in range(2)]
    assert got == [([], "tests.gloo.test_harness", environment) for environment in environments]
    assert "RANK" not in os.environ


def _fail_on(rank: int, world_size: int, bad_rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == bad_rank:
        raise KeyError(f"rank {rank} has no such thing")
    dist.all_reduce(torch.ones(1))  # waits for the rank that never comes


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_failing_rank_is_reported_and_nobody_hangs(bad_rank: int) -> None:
    with pytest.raises(WorldError) as caught:
        run_ranks(2, _fail_on, bad_rank, timeout=200)
    text = str(caught.value)
    assert f"1 of 2 ranks failed; first rank {bad_rank} failed" in text
    assert f"KeyError: 'rank {bad_rank} has no such thing'" in text
    assert "in _fail_on" in text


def _die(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_comes_before_those_that_lost_it() -> None:
    with pytest.raises(WorldError, match=r"(?s)first rank 1 died without a traceback.*exit code -9 \(SIGKILL\)"):
        run_ranks(2, _die, timeout=60)


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_a_hang_ends_with_the_stacks() -> None:
    with pytest.raises(WorldError, match="did not finish within 3 s") as caught:
        run_ranks(2, _hang, timeout=3)
    assert "in _hang" in str(caught.value)  # rank 1
    assert "in barrier" in str(caught.value)  # rank 0, which waits for it


class _Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def _mixed_ends(rank: int, world_size: int) -> int:
    if rank == 0:
        raise StrategyError("no such strategy", fix="write dp2")
    if rank == 1:
        raise _Unpicklable("this", "that")
    if rank == 2:
        os._exit(3)
    return rank


def test_outcomes_of_all_ranks() -> None:
    ours, unpicklable, dead, fine = run_ranks(4, _mixed_ends, expect_failure=True)
    assert isinstance(ours.exception, StrategyError)
    assert ours.exception.fix == "write dp2"
    assert ours.error_type == "StrategyError"
    assert "HSP-020" in (ours.error or "")
    assert (unpicklable.error_type, unpicklable.error, unpicklable.exception) == ("_Unpicklable", "this and that", None)
    assert "in _mixed_ends" in (unpicklable.traceback or "")
    assert (dead.reported, dead.error_type, dead.exitcode) == (False, None, 3)
    assert (fine.ok, fine.value, fine.exitcode) == (True, 3, 0)
    assert [o.ok for o in (ours, unpicklable, dead)] == [False] * 3


def _return_a_function(rank: int, world_size: int) -> object:
    return lambda: rank


def test_a_value_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"(?s)2 of 2 ranks failed.*pickle local object"):
        run_ranks(2, _return_a_function)


def _abort_at_exit(rank: int, world_size: int) -> None:
    import atexit
    from multiprocessing import util

    atexit.register(os.abort)
    util.Finalize(None, os.abort, exitpriority=1)


def test_a_bad_exit_code_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"returned, then its process left with exit code -6 \(SIGABRT\)"):
        run_ranks(1, _abort_at_exit)


def _training_arguments(rank: int, world_size: int, folder: str) -> tuple[int, int, str, str]:
    import torch
    import torch.distributed as dist
    from transformers import TrainingArguments

    before = dist.group.WORLD if dist.is_initialized() else None
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    result = arguments.world_size, arguments.process_index, arguments.device.type, dist.get_backend()
    if before is not None:
        assert dist.group.WORLD is before, "the process group was made anew"
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world_size
    return result


@pytest.mark.parametrize("init", [True, False])
def test_training_arguments_see_the_world(tmp_path: Path, init: bool) -> None:
    got = run_ranks(2, _training_arguments, str(tmp_path), init=init)
    assert got == [(2, rank, "cpu", "gloo") for rank in range(2)]
