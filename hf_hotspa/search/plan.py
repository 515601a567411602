"""The answer of a search, whoever asked: buckets, what each of them takes and holds, and what to compare with.

`hf-hotspa plan` prints it, the Trainer logs it, and the record of a run keeps it for the report; all say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.costs.breakdown import MemoryBreakdown, size
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.search.baselines import Baseline
from hf_hotspa.search.choice import Choice
from hf_hotspa.search.rivals import Rival
from hf_hotspa.strategy import Bucket, Strategy

_GIB, _MIB = 1 << 30, 1 << 20
_SAME = 0.02
"""Seconds that differ by less are the same."""
_COLUMNS = ["bucket", "strategy", "pack tokens", "sequences", "tokens", "packs", "compute s", "switch s"]
_LINKS, _LINK_KEYS = ("in nodes s", "between s"), ("switch_seconds_in_nodes", "switch_seconds_between_nodes")


@dataclass(frozen=True)
class Plan:
    """Buckets for a model, a machine and lengths.

    Args:
        choice: What the search chose.
        pool: The buckets that mini-batches choose from, each with a strategy of its own; the last takes the longest. Those of
            the choice, and perhaps the best single strategy beside them.
        memory: What each bucket of `buckets` holds on its fullest rank with full packs.
        limit_bytes: What may be filled of a device; None for no limit.
        limit_source: Where that is from, in words.
        baselines: What others would make of it under data parallelism, by stage of ZeRO.
        raced: The pools of other plans, which fit beside this one: the first mini-batches try them, too.
        ready: Pools for other lengths, where these may move.
        rivals: What people run beside data parallelism, and `written`, what a user wants to know the price of.
        links: Of the switch of each row of the choice, seconds of the links inside nodes and of those between them; empty on one
            node.
    """

    choice: Choice
    pool: tuple[Bucket, ...]
    memory: tuple[MemoryBreakdown, ...]
    mini_batch_size: int
    limit_bytes: float | None = None
    limit_source: str = ""
    baselines: tuple[Baseline, ...] = ()
    raced: tuple[tuple[Bucket, ...], ...] = ()
    ready: tuple[tuple[Bucket, ...], ...] = ()
    rivals: tuple[Rival, ...] = ()
    written: tuple[Rival, ...] = ()
    links: tuple[tuple[float, float], ...] = ()

    @property
    def answer(self) -> str:
        """Whether the plan is worth it, in one line: against what a user would run instead."""
        others = [(b.name, b.seconds) for b in self.baselines if b.seconds is not None]
        others += [(rival.name, rival.seconds) for rival in self.rivals if rival.seconds is not None]
        if not others:
            return f"Yes: nothing that people run holds a sequence of {self.longest} tokens here"
        name, seconds = min(others, key=lambda each: each[1])
        gain = seconds / self.choice.seconds
        if gain < 1 + _SAME:
            return f"No: use {name}, {f'{1 / gain:.2f}x as fast as this plan' if gain < 1 - _SAME else 'within 2 %'}"
        fsdp = next((s for n, s in others if "FSDP" in n and n != name), None)
        beside = f", and {fsdp / self.choice.seconds:.2f}x over FSDP" if fsdp is not None else ""
        return f"Yes: {gain:.2f}x over {name}{beside}"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Of all pools: what an engine has to hold."""
        return all_buckets([self.pool, *self.raced, *self.ready])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.pool[-1].longest

    @property
    def rival(self) -> tuple[str, float]:
        """What to compare with, and its seconds: the best of a single strategy and the baselines."""
        others = [(baseline.name, baseline.seconds) for baseline in self.baselines if baseline.seconds is not None]
        return min([("the best static strategy", self.choice.static_seconds), *others], key=lambda each: each[1])

    @property
    def verdict(self) -> str:
        """What the plan gains, and over what."""
        choice, (name, seconds) = self.choice, self.rival
        gain = choice.static_seconds / choice.seconds
        if seconds < choice.seconds * (1 - _SAME):
            lost = f"{name} is predicted to be {choice.seconds / seconds:.2f}x as fast as this plan"
            return f"{lost}: one layout is enough here"
        if not choice.switches:
            return "switching is not worth it here"
        if seconds < choice.static_seconds:
            better = "as fast as" if seconds < choice.seconds * (1 + _SAME) else f"{seconds / choice.seconds:.2f}x"
            return f"{better} {name}, and {gain:.2f}x the best static strategy"
        return f"{gain:.2f}x the best static strategy"

    def __str__(self) -> str:
        """The buckets, seconds beside those of others, and memory."""
        rows = [[*_COLUMNS, *(_LINKS if self.links else ())]]
        for index, row in enumerate(self.choice.rows):
            bucket = row.bucket
            counts = [f"{row.num_sequences:,.1f}", f"{row.num_tokens:,.0f}", f"{row.num_packs:,.1f}"]
            seconds = [
                self._seconds(each) for each in (row.compute_s, row.switch_s, *(self.links and self.links[index]))
            ]
            place = [f"{bucket.low + 1} - {bucket.longest}", str(bucket.strategy), str(bucket.pack_tokens)]
            rows.append([*place, *counts, *seconds])
        chosen = {row.bucket.strategy for row in self.choice.rows}
        spare = [bucket for bucket in self.pool if bucket.strategy not in chosen]
        kept = (
            [f"kept ready for mini-batches that are better off with it: {', '.join(map(str, spare))}"] if spare else []
        )
        for pool in self.raced:
            kept.append(f"tried on the first mini-batches, too: {' + '.join(str(bucket.strategy) for bucket in pool)}")
        names = [str(bucket.strategy) for bucket in self.buckets]
        return "\n".join(
            [text_table("", rows, 2), "", self._comparison(), self.verdict, "", memory_table(names, self.memory), *kept]
        )

    def _seconds(self, value: float) -> str:
        return f"{value:,.2f}" if self.choice.seconds >= 10 else f"{value:,.3f}"

    def _comparison(self) -> str:
        choice = self.choice
        rows = [
            ["predicted", "seconds a step", "of these switches"],
            ["this plan", self._seconds(choice.seconds), self._seconds(choice.switch_seconds)],
            [f"best static, {choice.static}", self._seconds(choice.static_seconds), ""],
        ]
        for other in self.baselines:
            if other.seconds is None:
                longest = (
                    f"holds sequences of up to {other.pack_tokens} tokens" if other.pack_tokens else "does not fit"
                )
                rows.append([f"{other.name}: {longest}", "-", ""])
            else:
                rows.append([f"{other.name}, packs of {other.pack_tokens}", self._seconds(other.seconds), ""])
        for rival in (*self.rivals, *self.written):
            how = ",".join(map(str, rival.buckets))
            name = rival.name if not how or how == rival.name else f"{rival.name}: {how}"
            took = f"{rival.name}: {rival.why}" if rival.seconds is None else name
            rows.append([took, "-" if rival.seconds is None else self._seconds(rival.seconds), ""])
        rows += [[f"near: {near}", self._seconds(near.seconds), ""] for near in choice.near]
        return text_table("", rows)

    def to_dict(self) -> dict[str, object]:
        choice, held = self.choice, dict(zip((bucket.strategy for bucket in self.pool), self.memory, strict=True))
        buckets = [
            {
                "strategy": str(row.bucket.strategy),
                "low": row.bucket.low,
                "longest": row.bucket.longest,
                "pack_tokens": row.bucket.pack_tokens,
                "sequences": row.num_sequences,
                "tokens": row.num_tokens,
                "packs": row.num_packs,
                "compute_seconds": row.compute_s,
                "switch_seconds": row.switch_s,
                **dict(zip(_LINK_KEYS, links, strict=False)),
                "memory": memory_dict(held[row.bucket.strategy]),
            }
            for row, links in zip(choice.rows, self.links or [()] * len(choice.rows), strict=True)
        ]
        return {
            "mini_batch_size": self.mini_batch_size,
            "hotspa_strategies": str(choice),
            "switches": choice.switches,
            "seconds": choice.seconds,
            "switch_seconds": choice.switch_seconds,
            "static": {"hotspa_strategies": str(choice.static), "seconds": choice.static_seconds},
            "answer": self.answer,
            "baselines": [baseline.to_dict() for baseline in self.baselines],
            "rivals": [rival.to_dict() for rival in self.rivals],
            "written": [rival.to_dict() for rival in self.written],
            "near": [{"hotspa_strategies": str(near), "seconds": near.seconds} for near in choice.near],
            "gain": {"over": self.rival[0], "factor": self.rival[1] / choice.seconds},
            "buckets": buckets,
            "phases_simulated": choice.num_simulated,
        }

    def summary(self) -> dict[str, object]:
        """What the record of a run keeps of it."""
        choice = self.choice
        return {
            "seconds": choice.seconds,
            "switch_s": choice.switch_seconds,
            "static": str(choice.static.strategy),
            "static_s": choice.static_seconds,
            "verdict": self.verdict,
            "rows": [
                {"strategy": str(row.bucket.strategy), "compute_s": row.compute_s, "switch_s": row.switch_s}
                for row in choice.rows
            ],
        }


def all_buckets(pools: Sequence[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """A bucket for each strategy of some pools, with the longest sequence and the largest packs that it has in any of them."""
    known: dict[Strategy, Bucket] = {}
    for bucket in (bucket for pool in pools for bucket in pool):
        other = known.get(bucket.strategy, bucket)
        longest, tokens = max(bucket.longest, other.longest), max(bucket.pack_tokens, other.pack_tokens)
        known[bucket.strategy] = replace(other, low=min(bucket.low, other.low), longest=longest, pack_tokens=tokens)
    return tuple(sorted(known.values(), key=lambda bucket: (bucket.longest, bucket.pack_tokens)))


def limit_text(limit_bytes: float | None, source: str) -> str:
    """What may be filled of a device, and where that number is from."""
    at_most = "" if limit_bytes is None else f"at most {size(limit_bytes)}, "
    return f"memory that a plan may fill of a device: {at_most}{source}"


def memory_table(names: Sequence[str], memory: Sequence[MemoryBreakdown]) -> str:
    """What each strategy holds, part by part, in GiB, or in MiB where all of it is less."""
    unit, name = (_GIB, "GiB") if max(need.total for need in memory) >= _GIB else (_MIB, "MiB")
    rows = [[f"{name} a device", *names]]
    parts = [need.parts() for need in memory]
    for part in parts[0]:
        if any(need[part] >= unit / 200 for need in parts):  # what would be printed as 0.00 is left out
            rows.append([part.replace("_", " "), *(f"{need[part] / unit:,.2f}" for need in parts)])
    rows.append(["total", *(f"{need.total / unit:,.2f}" for need in memory)])
    rows.append(["fullest stage", *(f"{need.stage}" for need in memory)])
    rows.append(["packs in flight", *(f"{need.in_flight}" for need in memory)])
    rows.append(["tokens in flight", *(f"{need.held_tokens:,}" for need in memory)])
    return text_table("", rows)


def memory_dict(memory: MemoryBreakdown) -> dict[str, object]:
    """A breakdown as plain data, in bytes."""
    place = {"stage": memory.stage, "in_flight": memory.in_flight, "held_tokens": memory.held_tokens}
    return {"total": memory.total, **memory.parts(), **place}
