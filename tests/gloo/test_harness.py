"""The harness itself: worlds start, talk, fail with the right traceback, and never hang."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_hotspa.errors import StrategyError
from tests.harness import PRELOAD, Outcome, WorldError, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return rank, int(value.item()), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_talk(world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    assert run_ranks(world_size, _sum_of_ranks, 10) == [(rank, total, 1) for rank in range(world_size)]


def _missing_modules(rank: int, world_size: int) -> list[str]:
    return [name for name in PRELOAD if name not in sys.modules]


def test_a_rank_finds_the_large_modules_imported() -> None:
    assert run_ranks(2, _missing_modules, init=False) == [[], []]


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


def _die(rank: int, world_size: int, how: str) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "code"), [("signal", "-9 (SIGKILL)"), ("exit", "7")])
def test_a_rank_that_dies_comes_before_those_that_lost_it(how: str, code: str) -> None:
    with pytest.raises(WorldError, match="first rank 1 died without a traceback") as caught:
        run_ranks(2, _die, how, timeout=60)
    assert f"exit code {code}" in str(caught.value)


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


def _raise_after_agreeing(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    bad = torch.tensor([float(rank == 1)])
    dist.all_reduce(bad)
    raise ValueError(f"agreed on {bad.item():.0f} bad rank")


def test_an_agreed_error_is_the_same_on_all_ranks() -> None:
    outcomes: list[Outcome] = run_ranks(4, _raise_after_agreeing, expect_failure=True)
    assert {(o.error_type, o.error) for o in outcomes} == {("ValueError", "agreed on 1 bad rank")}


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


def _environment(rank: int, world_size: int) -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HOTSPA_TEST_WORD"))


def test_environment_of_the_ranks() -> None:
    got = run_ranks(2, _environment, init=False, env={"HOTSPA_TEST_WORD": "hello"})
    assert got == [(str(rank), str(rank), "2", "127.0.0.1", "hello") for rank in range(2)]
    assert "RANK" not in os.environ


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
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_arguments_see_the_world(tmp_path: Path, world_size: int, init: bool) -> None:
    got = run_ranks(world_size, _training_arguments, str(tmp_path), init=init)
    assert got == [(world_size, rank, "cpu", "gloo") for rank in range(world_size)]


def _loaded(rank: int, world_size: int) -> tuple[bool, str]:
    return "transformers.trainer" in sys.modules, __name__


def test_ranks_are_forked_from_a_warm_server_and_know_this_module() -> None:
    assert run_ranks(1, _loaded, init=False) == [(True, "tests.gloo.test_harness")]
