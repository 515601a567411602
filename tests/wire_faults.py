"""Faults that gloo forgives, or would only hang at: each is planted in the package's code, and `tests.wire_rules` names it.

`python -m tests.wire_faults ring` runs those with a word in their names. A fault changes text of a module that occurs once
there; in each rank the functions that differ get the changed code, so nothing is written to the tree.
"""

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.features.slow_devices.mode import HandOver
from tests.families import MIXTURE
from tests.harness import WorldError, run_ranks
from tests.wire_recorder import Trace, read_journal
from tests.wire_rules import Fault, Proof, check
from tests.wire_runs import Case, recorded, traces_of

_SOON = {"timeout_s": 8.0, "switch_timeout_s": 8.0}


def _case(world_size: int, buckets: str, run: str = "engine", num_rows: int = 6, layers: int = 4, **more: Any) -> Case:
    family = more.pop("family", "llama_gqa_bias")
    return Case("fault", world_size, buckets, {**_SOON, **more}, run, family, layers, num_rows)


PIPELINE, INTERLEAVED = _case(2, "pp2:62@64", pipeline_schedule="own"), _case(2, "pp2+v2:62@64")
LONG_PIPELINE = _case(4, "pp4+v2:62@64", layers=8, num_rows=10)
SWITCHES = _case(4, "dp4:20@32,tp2pp2:62@70", devices_per_node=2)
SMALL_ROUNDS = _case(2, "dp2:20@32,tp2:62@70", staging_bytes=1 << 12, planner="algorithm1")
LONG_STRETCHES = _case(2, "dp2:20@32,tp2:62@70", run="long stretches")
BESIDE = _case(2, "dp2:20@32,pp2:62@70", overlap_load=True, overlap_return=True)
RING, GATHERED = _case(2, "cp2:62@64", context_parallel="ring"), _case(2, "cp2:62@64", context_parallel="allgather")
HEADS = _case(2, "cp2:62@64", context_parallel="ulysses")
TENSOR, SEQUENCE = _case(2, "tp2:62@64"), _case(2, "tp2+sp:62@64")
TWO_GROUPS = _case(4, "tp2pp2:62@64")
EXPERTS = _case(2, "dp2ep2:62@64", family=MIXTURE)
STAGES = _case(4, "dp2pp2:40@44", run="stages", features=(PipeDream(),))
GIVEN = _case(2, "tp2:40@64", run="hand over", features=(HandOver(),))
CALLED = _case(2, "dp2:14@64,pp2:64@128", run="scoring")


class Planted(NamedTuple):
    """A fault: the changes of a module (old text, new text), what runs, the rule, and a function of which a stack tells."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]
    case: Case
    rule: str
    function: str


CIRCLE, OTHER_SIZE, DIFFERENT = "wait for each other", "another size or dtype", "different collectives"
_PIPE, _MESH, _CONTEXT = "hf_hotspa.parallel.pipeline", "hf_hotspa.parallel.mesh", "hf_hotspa.parallel.context"
_MASTER, _TENSOR, _MOVE = "hf_hotspa.engine.master", "hf_hotspa.parallel.tensor_parallel", "hf_hotspa.engine.transport"
_BATCH = "works = dist.batch_isend_irecv(posts) if posts else []"
_EXCHANGE = "            works = dist.batch_isend_irecv(operations)\n            if receive is not None:\n                works.pop(0).wait()"

FAULTS = (
    # -- pipelines
    Planted("a send and a receive of neighbours are two calls", _PIPE,
            ((_EXCHANGE, _EXCHANGE.replace("dist.batch_isend_irecv(operations)", "[w for o in operations for w in dist.batch_isend_irecv([o])]")),),
            PIPELINE, CIRCLE, "_exchange"),
    Planted("a stage receives equal bytes of another dtype", _PIPE,
            (("            dist.P2POp(kind, tensor, group=self._group, tag=tag, group_peer=peer)\n            for kind",
              "            dist.P2POp(kind, tensor.view(torch.float64) if kind is dist.irecv else tensor, group=self._group, tag=tag, group_peer=peer)\n            for kind"),),
            PIPELINE, OTHER_SIZE, "_exchange"),
    Planted("a stage sends half of the hidden state twice", _PIPE,
            (("            works = dist.batch_isend_irecv(operations)\n            if receive",
              "            works = dist.batch_isend_irecv([dist.P2POp(o.op, part, group=o.group, tag=o.tag, group_peer=o.group_peer) for o in operations for part in (o.tensor.view(-1).chunk(2) if o.op is dist.isend else [o.tensor])])\n            if receive"),),
            PIPELINE, OTHER_SIZE, "_exchange"),
    Planted("the last stage sends no gradient of the last pack", _PIPE,
            (("        self._exchange(message, None)\n        CLOCK.wait(*(work", "        CLOCK.wait(*(work"),),
            PIPELINE, CIRCLE, "_exchange"),
    Planted("interleaved: receives are posted when they are needed", _PIPE,
            (("self._received[turn] = room, self._post(dist.irecv, room, turn, turn.stage)", "self._received[turn] = room, None"),
             ("        tensor, work = self._received.pop(turn)\n", "        tensor, work = self._received.pop(turn)\n        work = self._post(dist.irecv, tensor, turn, turn.stage)\n")),
            LONG_PIPELINE, CIRCLE, "_post"),
    Planted("interleaved: two sends are swapped", _PIPE,
            (("                    self._post(dist.isend, made, turn, target)\n",
              "                    held = self.__dict__.setdefault('held', [])\n                    held.append((dist.isend, made, turn, target))\n                    while len(held) > 1 and self._index or len(held) == 1 and not self._index or held and turn is order[-1]:\n                        self._post(*held.pop())\n"),),
            INTERLEAVED, "", "_post"),
    Planted("interleaved: a receive is posted before the send that goes first", _PIPE,
            (("        for turn in order:\n            target",
              "        for turn in ([*order] if self._index else [t for a, b in zip([*order][::2], [*order][1::2] + [None]) for t in ((b, a) if b is not None and (b.stage % self._num_ranks != self._index) and (a.stage % self._num_ranks == self._index) and not b.is_backward else (a, b)) if t is not None]):\n            target"),),
            INTERLEAVED, "", "_post"),
    # -- switches
    Planted("messages of a round are single calls", _MOVE,
            ((_BATCH, "works = [w for p in posts for w in dist.batch_isend_irecv([p])]"),), SWITCHES, CIRCLE, "start"),
    Planted("one rank posts in the opposite order", _MOVE,
            ((_BATCH, "works = dist.batch_isend_irecv(posts[::-1] if self.rank == 1 else posts) if posts else []"),),
            LONG_STRETCHES, OTHER_SIZE, "start"),
    Planted("messages go over the default group", _MOVE,
            (("op.peer, self.group, op.wire_tag", "op.peer, None, op.wire_tag"),), SWITCHES, "first operation", "start"),
    Planted("a rank sends inside of nodes over the group of all nodes", "hf_hotspa.engine.executor",
            (("if bound.plan.links[current.hop] == INTRA else", "if bound.plan.links[current.hop] == INTRA and self.rank != 1 else"),),
            SWITCHES, "", "start"),
    Planted("a rank sends bytes as other numbers", "hf_hotspa.engine.executor",
            (("            transport.send(tensor, message.peer", "            transport.send(tensor.view(torch.int32) if self.rank else tensor, message.peer"),),
            SMALL_ROUNDS, OTHER_SIZE, "start"),
    Planted("a rank leaves out the second message of a round", "hf_hotspa.engine.executor",
            (("        for message, tensor in zip(current.sends, tensors.outgoing, strict=True):", "        for message, tensor in [*zip(current.sends, tensors.outgoing, strict=True)][:1 if self.rank == 1 else None]:"),),
            LONG_STRETCHES, "", "start"),
    Planted("pipelines use the communicator of switches beside them", _MESH,
            (('tensor, groups.get("pp"), groups.get("cp")', 'tensor, self.switch if "pp" in groups else None, groups.get("cp")'),),
            BESIDE, "two threads", "_exchange"),
    # -- communicators
    Planted("ranks make groups in another order", _MESH,
            (("groups = {ranks: self.group(ranks) for ranks in parts}", "groups = {ranks: self.group(ranks) for ranks in (parts if self.rank else parts[::-1])}"),),
            TWO_GROUPS, "made by all ranks in one order", "_own"),
    Planted("ranks make only their own groups", _MESH,
            (("groups = {ranks: self.group(ranks) for ranks in parts}", "groups = {ranks: self.group(ranks) for ranks in parts if self.rank in ranks}"),),
            TWO_GROUPS, "made by all ranks in one order", "_own"),
    Planted("groups are not warmed up", _MESH,
            (("self._joined(self.switch, self.forward, *self._by_ranks.values()):\n            dist", "self._joined(self.switch, self.forward):\n            dist"),),
            PIPELINE, "first operation", "_exchange"),
    Planted("the warm-up sends a host tensor", _MESH,
            (("torch.zeros(1, device=self.device)", "torch.zeros(1)"),), PIPELINE, "host memory", "warm_up"),
    Planted("ranks warm groups up in another order", _MESH,
            (("in self._joined(self.switch, self.forward, *self._by_ranks.values()):", "in self._joined(self.switch, self.forward, *self._by_ranks.values())[:: 1 if self.rank else -1]:"),),
            TWO_GROUPS, CIRCLE, "warm_up"),
    Planted("ranks start two communicators in another order, and wait for both", _MESH,
            (("        for group in self._joined(self.switch, self.forward, *self._by_ranks.values()):\n            dist.all_reduce(torch.zeros(1, device=self.device), group=group)",
              "        works = [dist.all_reduce(torch.zeros(1, device=self.device), group=group, async_op=True) for group in self._joined(self.switch, self.forward, *self._by_ranks.values())[:: 1 if self.rank else -1]]\n        [work.wait() for work in works]"),),
            PIPELINE, "issued in one order", "warm_up"),
    # -- context parallel
    Planted("a ring receives before its own send", _CONTEXT,
            (("        works = dist.batch_isend_irecv(\n            [\n                dist.P2POp(dist.irecv, received,", "        works = sum((dist.batch_isend_irecv([p]) for p in\n            [\n                dist.P2POp(dist.irecv, received,"),
             ("group_peer=(index + 1) % size),\n            ]\n        )", "group_peer=(index + 1) % size),\n            ]), []\n        )")),
            RING, CIRCLE, "passed"),
    Planted("blocks of a ring are not padded", _CONTEXT,
            (("return functional.pad(rows, (0, 0, 0, self.most - rows.shape[2])).contiguous()", "return functional.pad(rows, (0, 0, 0, self.most - rows.shape[2] - self.context.index)).contiguous()"),),
            RING, OTHER_SIZE, "passed"),
    Planted("a ring takes one step more on one rank", _CONTEXT,
            (("((), at_hand) if step + 1 == self.steps else self.passed(at_hand)", "((), at_hand) if step + 1 == self.steps and self.context.index else self.passed(at_hand)"),),
            RING, "", "passed"),
    Planted("ranks expect parts of tokens as they send them", _CONTEXT,
            (("return dist.all_to_all_single(out, own, received, sent, group=context.group, async_op=True)", "return dist.all_to_all_single(out[: sum(sent)] if len(out) >= sum(sent) else out.new_empty(sum(sent)), own, sent, sent, group=context.group, async_op=True)"),),
            HEADS, "parts of an all-to-all", "_start"),
    Planted("gathers of uneven rows are not padded", "hf_hotspa.parallel.collectives",
            (("    own = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])\n    size", "    own, most = x, len(x)\n    size"),),
            GATHERED, DIFFERENT, "start_gather"),
    Planted("one rank gathers where the others exchange", _CONTEXT,
            (("    return dist.all_to_all_single(out, x.contiguous(), group=context.group, async_op=True), out", "    return (dist.all_to_all_single if context.index else dist.all_gather_into_tensor)(out, x.contiguous() if context.index else x[0].contiguous(), group=context.group, async_op=True), out"),),
            GATHERED, DIFFERENT, "scattered_sum"),
    # -- tensor parallel
    Planted("one rank leaves out an all-reduce of the backward", _TENSOR,
            (("            dist.all_reduce(grad, group=group)", "            dist.get_rank(group) and dist.all_reduce(grad, group=group)"),), TENSOR, "", "summed"),
    Planted("one rank reduces equal bytes of another dtype", _TENSOR,
            (("        with CLOCK.waiting:\n            dist.all_reduce(x, group=group)", "        with CLOCK.waiting:\n            dist.all_reduce(x.view(torch.float64) if dist.get_rank(group) else x, group=group)"),),
            TENSOR, DIFFERENT, "forward"),
    Planted("one rank takes the sum where the others take the maximum", "hf_hotspa.parallel.loss",
            (("    with CLOCK.waiting:\n        dist.all_gather(shards, own, group=group)", "    with CLOCK.waiting:\n        dist.all_reduce(own.clone(), dist.ReduceOp.MAX if dist.get_rank(group) else dist.ReduceOp.SUM, group=group)\n        dist.all_gather(shards, own, group=group)"),),
            TENSOR, DIFFERENT, "_gathered"),
    Planted("shards of tokens are gathered and summed in another order", "hf_hotspa.parallel.collectives",
            (("        _reduce_scatter(mine, x.contiguous(), group=group)", "        dist.get_rank(group) and dist.all_reduce(mine.clone(), group=group)\n        _reduce_scatter(mine, x.contiguous(), group=group)\n        dist.get_rank(group) or dist.all_reduce(mine.clone(), group=group)"),),
            SEQUENCE, DIFFERENT, "scatter_sum"),
    Planted("a host tensor is reduced over shards", _TENSOR,
            (("        grad = grad.clone(memory_format=torch.contiguous_format)\n", "        grad = torch.tensor(grad.tolist())\n"),), TENSOR, "host memory", "summed"),
    # -- experts
    Planted("experts expect as many rows as they send", "hf_hotspa.features.experts.expert_parallel",
            (("        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)", "        dist.all_to_all_single(out, x.contiguous(), received[::-1], sent, group=group)"),),
            EXPERTS, "parts of an all-to-all", "_exchanged"),
    Planted("a rank sends counts of rows as other numbers", "hf_hotspa.features.experts.expert_parallel",
            (("            dist.all_to_all_single(counts_received, counts_sent, group=group)", "            dist.all_to_all_single(*((x.view(torch.float64) if dist.get_rank(group) else x) for x in (counts_received, counts_sent)), group=group)"),),
            EXPERTS, DIFFERENT, "_of_tokens"),
    # -- stages, columns of slow ranks
    Planted("a stage agrees with all ranks", "hf_hotspa.features.pipedream.stage_updates",
            (("            dist.all_reduce(total, group=self._stage)", "            dist.all_reduce(total, group=None if dist.get_rank() == 3 else self._stage)"),), STAGES, "", "update"),
    Planted("another rank is the giver", "hf_hotspa.features.slow_devices.flexible_linear",
            (('return {"group": self.work.group, "group_src": self.migration.giver}', 'return {"group": self.work.group, "group_src": dist.get_rank(self.work.group)}'),),
            GIVEN, DIFFERENT, "whole"),
    # -- saves, evaluation, meetings
    Planted("shares of a segment are gathered without padding", _MASTER,
            (("padded = torch.zeros(max(sizes), dtype=dtype", "padded = torch.zeros(max(sizes) + self.rank, dtype=dtype"),), TENSOR, DIFFERENT, "gather"),
    Planted("a save waits for an empty share", _MASTER,
            (("            transport.send(own.to(device, dtype), to, 0)", "            transport.send(own.to(device, dtype)[:-1], to, 0)"),), TENSOR, OTHER_SIZE, "start"),
    Planted("another rank owns a segment", _MASTER,
            (("            dist.broadcast(part, source, group=group)", "            dist.broadcast(part, source if rank else 1 - source, group=group)"),), TENSOR, DIFFERENT, "_whole"),
    Planted("logits are broadcast from a host tensor", "hf_hotspa.engine.evaluation",
            (("shards = [torch.empty(num_tokens, width, dtype=dtype, device=self._groups.device) for width in widths]", "shards = [torch.empty(num_tokens, width, dtype=dtype) for width in widths]"),),
            TENSOR, "host memory", "_replica_logits"),
    Planted("logits of shards are broadcast in another order", "hf_hotspa.engine.evaluation",
            (("for tp in range(strategy.tp if num_tokens else 0):", "for tp in [*range(strategy.tp if num_tokens else 0)][:: 1 if self._groups.rank else -1]:"),),
            TENSOR, DIFFERENT, "_replica_logits"),
    Planted("a rank does not come to a meeting", "hf_hotspa.parallel.agreement",
            (("        if self.group is not None:\n            self._collective(lambda: dist.barrier", "        if self.group is not None and self.rank:\n            self._collective(lambda: dist.barrier"),), PIPELINE, "", "barrier"),
    Planted("results are received and not sent", "hf_hotspa.switched.passes",
            (("                sends.append(engine.agreement.start_send(part, owner, number))\n                self.exchange.sent[\"numbers_bytes\"]", "                self.exchange.sent[\"numbers_bytes\"]"),), CALLED, "", "receive"),
)  # fmt: skip
"""More than half of them pass on gloo, or only give wrong numbers there."""


# -- planting ---------------------------------------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _functions(module: ModuleType) -> Iterator[Any]:
    owners = [module, *(c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)]
    for owner in owners:
        for value in vars(owner).values():
            inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            inner = inspect.unwrap(inner) if callable(inner) else inner
            if inspect.isfunction(inner) and inner.__module__ == module.__name__:
                yield inner


def plant(name: str, changes: Sequence[tuple[str, str]]) -> int:
    """Changes a module of this process; how many functions got other code."""
    module = importlib.import_module(name)
    text = Path(inspect.getfile(module)).read_text()
    before = dict(_codes(compile(text, inspect.getfile(module), "exec")))
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    after, num = dict(_codes(compile(text, inspect.getfile(module), "exec"))), 0
    for function in _functions(module):
        code = after.get(function.__code__.co_qualname)
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            num += (
                code.co_code != before[function.__code__.co_qualname].co_code
                or code.co_consts != function.__code__.co_consts
            )
            function.__code__ = code
    return num


def _journal(folder: str, rank: int) -> Path:
    return Path(folder, f"journal-{rank}")


def _planted_run(rank: int, world_size: int, fault: Planted, folder: str) -> None:
    torch.manual_seed(0)
    assert plant(fault.module, fault.changes), fault.name
    recorded(rank, world_size, fault.case, f"{folder}/{rank}", _journal(folder, rank))


def traces_with(fault: Planted) -> list[Trace]:
    """The traces of a run with a fault, as far as it came."""
    size = fault.case.world_size
    with tempfile.TemporaryDirectory(prefix="hotspa-wire-") as folder:
        with suppress(WorldError):  # a rank hangs
            run_ranks(size, _planted_run, fault, folder, timeout=45.0, expect_failure=True)
        return [read_journal(_journal(folder, rank), rank, size) for rank in range(size)]


def complaint(fault: Planted, found: Proof | Fault) -> str:
    """Why a fault counts as not found, or not by its right name; empty if it was."""
    if isinstance(found, Proof):
        return "not found"
    functions = {frame.rpartition(" ")[2] for place in found.places for frame in place.stack}
    if fault.rule not in found.rule or fault.function not in functions:
        return f"found as: {found}"
    return ""


def complaints_without(faults: Sequence[Planted]) -> list[str]:
    """What is found in the runs of these faults without the faults: nothing, or the rules are wrong."""
    cases = list({(str(f.case.options), f.case.buckets, f.case.run): f.case for f in faults}.values())
    return [f"{case}: {found}" for case, traces, _ in traces_of(cases) if isinstance(found := check(traces), Fault)]


def main(report: Callable[[str], object] = print) -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen, wrong = [fault for fault in FAULTS if word in fault.name], 0
    for fault in chosen:
        found = check(traces_with(fault))
        text = complaint(fault, found)
        wrong += bool(text)
        ranks = ", ".join(str(place.rank) for place in found.places) if isinstance(found, Fault) else ""
        report(f"{'NOT FOUND' if text else 'found'}: {fault.name}: {text or f'{found.rule} (ranks {ranks})'}")  # type: ignore[union-attr]
    for text in (without := complaints_without(chosen)):
        report(f"FOUND WITHOUT A FAULT: {text}")
    report(f"{len(chosen) - wrong} of {len(chosen)} faults found")
    return int(wrong > 0 or bool(without))


if __name__ == "__main__":
    raise SystemExit(main())
