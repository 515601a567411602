"""The answer of a search: buckets, the time and memory of each, and what to compare with.

`hf-hotspa plan` prints it, the Trainer logs it, and the record of a run keeps it for the report.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hf_hotspa.costs.memory import MemoryBreakdown, size
from hf_hotspa.reporting.gain_words import (
    PREDICTED_ERROR,
    against_others,
    of_one_strategy,
    of_predicted_switching,
)
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.search.baselines import Baseline, Rival
from hf_hotspa.search.search import Choice
from hf_hotspa.strategy import Bucket, Strategy

_GIB, _MIB = 1 << 30, 1 << 20
_NEAREST = 0.08  # plans that are slower than the fastest by less, as a share, are not distinguished by a time model
_COLUMNS = ["up to", "strategy", "pack", "rows", "packs", "compute s", "switch s"]
_LINKS = ["seconds of switches", "links in nodes", "links between nodes"]
_LINK_KEYS = ("switch_seconds_in_nodes", "switch_seconds_between_nodes")
WIDTH = 80  # columns of a terminal that printed text keeps to
_LABEL = 54  # columns of these for the first column of the table of seconds


@dataclass(frozen=True)
class Plan:
    """Buckets for a model, a machine and lengths."""

    choice: Choice  # what the search chose
    # the buckets that mini-batches choose from, each with a different strategy; the last takes the longest. The
    # choice's buckets, and perhaps the best single strategy
    pool: tuple[Bucket, ...]
    memory: tuple[MemoryBreakdown, ...]  # what each bucket of `buckets` holds on its fullest rank with full packs
    mini_batch_size: int
    limit_bytes: float | None = None  # of a device; None for no limit
    limit_source: str = ""  # its origin, in words
    baselines: tuple[Baseline, ...] = ()  # data parallelism by others, by stage of ZeRO
    # pools of other plans, which fit beside this one: the first mini-batches try them, too
    raced: tuple[tuple[Bucket, ...], ...] = ()
    ready: tuple[tuple[Bucket, ...], ...] = ()  # pools for other lengths, if lengths may shift
    # what clusters run besides data parallelism; `layouts`: of ours, without switching; `written`: strategies that a user
    # wants priced
    rivals: tuple[Rival, ...] = ()
    layouts: tuple[Rival, ...] = ()
    written: tuple[Rival, ...] = ()
    # seconds of each row's switch on links inside nodes and between them; empty on one node
    links: tuple[tuple[float, float], ...] = ()

    def with_seconds(self, more: float) -> "Plan":
        """The same plan with seconds that every step takes beside phases and switches, by whatever is compared."""
        if not more:
            return self

        def longer(others: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(o if o.seconds is None else replace(o, seconds=o.seconds + more) for o in others)

        choice = self.choice
        near, static = longer(choice.near), choice.static_seconds + more
        choice = replace(choice, seconds=choice.seconds + more, static_seconds=static, near=near)
        return replace(
            self, choice=choice, baselines=longer(self.baselines), rivals=longer(self.rivals),
            layouts=longer(self.layouts), written=longer(self.written),
        )  # fmt: skip

    @cached_property
    def _others(self) -> list[tuple[float, Baseline | Rival]]:
        """What one would run and holds the longest sequence, with its seconds, fastest first."""
        everything: list[Baseline | Rival] = [*self.baselines, *self.rivals]
        fitting = [(other.seconds, other) for other in everything if other.seconds is not None]
        return sorted(fitting, key=lambda each: each[0])

    @property
    def gain(self) -> float | None:
        """How much faster than the fastest alternative the plan is, as a factor; None if there is none."""
        return self._others[0][0] / self.choice.seconds if self._others else None

    @property
    def single(self) -> tuple[str, float]:
        """The best single strategy, or layout without switches, of ours, and its seconds."""
        layouts = [(f"{each.name} ({_text(each.buckets)})", each.seconds) for each in self.layouts if each.seconds]
        static = str(self.choice.static), self.choice.static_seconds
        return min([static, *layouts], key=lambda each: each[1])

    @property
    def answer(self) -> str:
        """One line: whether this package is worth it, compared with what one would run without it."""
        if not (self.baselines or self.rivals):
            return "Not compared with what one would run: the calibration does not know replicas alone"
        if self.gain is None:
            return f"Yes: nothing that people run holds a sequence of {self.longest} tokens here"
        return against_others(self.gain, self._others[0][1].name)

    @property
    def switching(self) -> str:
        """One line: whether switching is worth it, compared with the best single strategy."""
        if not self.choice.switches:
            return of_one_strategy(str(self.choice.rows[0].bucket.strategy))
        name, seconds = self.single
        return of_predicted_switching(seconds / self.choice.seconds, name)

    @property
    def answers(self) -> list[str]:
        """The first lines of a plan: both answers, the first one if it was asked what else one would run."""
        asked = [self.answer] if self.baselines or self.rivals else []
        return [line for text in (*asked, self.switching) for line in wrapped(text)]

    @property
    def why(self) -> str:
        """The reason for the answers, in a sentence or two."""
        choice, step = self.choice, self._seconds(self.choice.seconds)
        first, last = choice.rows[0], choice.rows[-1]
        if first is last:
            return f"{first.bucket.strategy} trains all rows in {step} s a step.{self._beside}"
        share = min(first.num_sequences / self.mini_batch_size, 0.999)
        return (
            f"{share:.1%} of the rows have at most {first.bucket.longest} tokens and run under {first.bucket.strategy}; the "
            f"longest ({self.longest} tokens) need {last.bucket.strategy}. A step takes {step} s, of these "
            f"{self._seconds(choice.switch_seconds)} s for switches.{self._beside}"
        )

    @property
    def _beside(self) -> str:
        for seconds, best in self._others[:1]:
            return f" {best.name[0].upper()}{best.name[1:]} takes {self._seconds(seconds)} s."
        return ""

    @property
    def fully_sharded(self) -> Baseline:
        """The setting with packs and the highest stage of ZeRO: with whole logits, unless it fits with Liger only."""
        with_packs = [each for each in self.baselines if not each.padded]
        return max(
            with_packs or self.baselines, key=lambda each: (each.stage, each.seconds is not None, not each.liger)
        )

    @property
    def stock(self) -> Baseline | None:
        """What to run instead of the plan, if that is about as fast or faster: the fastest setting with whole logits; with
        Liger only if nothing else is near and it is faster than the plan."""
        error = 1 + PREDICTED_ERROR
        near = [each for seconds, each in self._others if seconds <= self.choice.seconds * error]
        for other in near:
            if isinstance(other, Baseline) and not other.liger:
                return other
        faster = bool(near) and self._others[0][0] * error < self.choice.seconds
        return near[0] if faster and isinstance(near[0], Baseline) else None

    @property
    def to_copy(self) -> str:
        return f'hotspa_strategies="{self.choice}"' if self.stock is None else self.stock.line

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all pools: what an engine has to hold."""
        return all_buckets([self.pool, *self.raced, *self.ready])

    @property
    def trial_order(self) -> list[int]:
        """The order in which a race tries the pool (0) and the raced ones (1, 2, ...). Of plans that the time model
        does not distinguish, those whose layers need the fewest ranks together come first: their seconds are predicted
        best, and so they cost least if they are wrong. The others follow, the fastest as predicted first."""
        known = {frozenset(b.strategy for b in near.buckets): near.seconds for near in self.choice.near}
        seconds = [self.choice.seconds, *(known[frozenset(b.strategy for b in pool)] for pool in self.raced)]
        most = min(seconds) * (1 + _NEAREST)

        def key(index: int) -> tuple[bool, int, float]:
            near = seconds[index] <= most
            together = max(b.strategy.ranks_of_a_layer for b in (self.pool, *self.raced)[index]) if near else 0
            return not near, together, seconds[index]

        return sorted(range(len(seconds)), key=key)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.pool[-1].longest

    def __str__(self) -> str:
        rows = [_COLUMNS]
        for row in self.choice.rows:
            place = map(str, (row.bucket.longest, row.bucket.strategy, row.bucket.pack_tokens))
            counts = f"{row.num_sequences:,.1f}", f"{row.num_packs:,.1f}"
            rows.append([*place, *counts, self._seconds(row.compute_s), self._seconds(row.switch_s)])
        chosen = [str(row.bucket.strategy) for row in self.choice.rows]
        spare = ", ".join(str(bucket) for bucket in self.pool if str(bucket.strategy) not in chosen)
        kept = [f"kept ready for mini-batches that are better off with it: {spare}"] if spare else []
        links = [[name, *map(self._seconds, each)] for name, each in zip(chosen, self.links, strict=False)]
        for pool in self.raced:
            kept.append(f"tried on the first mini-batches, too: {' + '.join(str(bucket.strategy) for bucket in pool)}")
        names = [str(bucket.strategy) for bucket in self.buckets]
        tables = [text_table("", rows, 2), *([text_table("", [_LINKS, *links])] if links else []), self._comparison()]
        return "\n\n".join([*tables, "\n".join([memory_table(names, self.memory), *kept])])

    def _seconds(self, value: float) -> str:
        return f"{value:,.2f}" if self.choice.seconds >= 10 else f"{value:,.3f}"

    def _comparison(self) -> str:
        choice = self.choice
        labels: list[tuple[str, float | None, str]] = [
            ("this plan", choice.seconds, self._seconds(choice.switch_seconds)),
            (f"best static, {choice.static}", choice.static_seconds, ""),
        ]
        for other in self.baselines:
            packs = f", rows in {other.padded}s" if other.padded else f", packs of {other.pack_tokens}"
            if other.seconds is None:
                packs = f": sequences of up to {other.pack_tokens} tokens" if other.pack_tokens else ": does not fit"
            labels.append((other.name + packs, other.seconds, ""))
        for rival in (*self.rivals, *self.layouts, *self.written):
            how = _text(rival.buckets)
            name = rival.name if not how or how == rival.name else f"{rival.name}: {how}"
            labels.append((f"{rival.name}: {rival.why}" if rival.seconds is None else name, rival.seconds, ""))
        labels += [(f"near: {near}", near.seconds, "") for near in choice.near]
        rows = [["predicted", "s a step", "of switches"]]
        for label, seconds, switches in labels:
            *lines, last = wrapped(label, _LABEL)
            rows += [[line, "", ""] for line in lines]
            rows.append([last, "-" if seconds is None else self._seconds(seconds), switches])
        return text_table("", rows)

    def to_dict(self) -> dict[str, object]:
        choice, need_of = self.choice, dict(zip((bucket.strategy for bucket in self.pool), self.memory, strict=True))
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
                "memory": memory_dict(need_of[row.bucket.strategy]),
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
            "switching": self.switching,
            "copy": self.to_copy,
            "baselines": [baseline.to_dict() for baseline in self.baselines],
            "rivals": [rival.to_dict() for rival in self.rivals],
            "layouts": [layout.to_dict() for layout in self.layouts],
            "written": [rival.to_dict() for rival in self.written],
            "near": [{"hotspa_strategies": str(near), "seconds": near.seconds} for near in choice.near],
            "gain": {"over": self._others[0][1].name if self._others else None, "factor": self.gain},
            "switching_gain": {"over": self.single[0], "factor": self.single[1] / choice.seconds},
            "buckets": buckets,
            "phases_simulated": choice.num_simulated,
        }

    def summary(self) -> dict[str, object]:
        """Returns what the record of a run keeps of the plan."""
        choice = self.choice
        return {
            "seconds": choice.seconds,
            "switch_s": choice.switch_seconds,
            "static": str(choice.static.strategy),
            "static_s": choice.static_seconds,
            "verdict": self.switching,
            "answer": self.answer if self.baselines else None,
            "text": re.sub("\x1b\\[[0-9;]*m", "", str(self)),  # a terminal's table has colours
            "rows": [
                {"strategy": str(row.bucket.strategy), "compute_s": row.compute_s, "switch_s": row.switch_s}
                for row in choice.rows
            ],
        }


def _text(buckets: Sequence[Bucket]) -> str:
    return ",".join(map(str, buckets))


def all_buckets(pools: Sequence[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """Returns a bucket for each strategy of some pools, with its longest sequence and largest packs in any of them."""
    known: dict[Strategy, Bucket] = {}
    for bucket in (bucket for pool in pools for bucket in pool):
        other = known.get(bucket.strategy, bucket)
        longest, tokens = max(bucket.longest, other.longest), max(bucket.pack_tokens, other.pack_tokens)
        known[bucket.strategy] = replace(other, low=min(bucket.low, other.low), longest=longest, pack_tokens=tokens)
    return tuple(sorted(known.values(), key=lambda bucket: (bucket.longest, bucket.pack_tokens)))


def limit_text(limit_bytes: float | None, source: str) -> str:
    """Describes how much of a device may be filled, and the origin of that number."""
    at_most = "" if limit_bytes is None else f"{size(limit_bytes)}, "
    return f"memory limit of a device: {at_most}{source}"


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Wraps a text at blanks and behind commas into lines of at most a width; indents all but the first."""
    lines = [""]
    for piece in re.findall(r"[^\s,]*,|[^\s,]+|\s+", text):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1].strip():
            lines[-1] = lines[-1].rstrip()
            lines.append("  " + piece.lstrip())
        else:
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def memory_table(names: Sequence[str], memory: Sequence[MemoryBreakdown]) -> str:
    """Tabulates what each strategy holds, part by part, in GiB, or in MiB if all of it is less."""
    unit, name = (_GIB, "GiB") if max(need.total for need in memory) >= _GIB else (_MIB, "MiB")
    rows = [[f"{name} a device", *names]]
    parts = [need.parts() for need in memory]
    for part in parts[0]:
        if any(need[part] >= unit / 200 for need in parts):  # skips what would print as 0.00
            rows.append([part.replace("_", " "), *(f"{need[part] / unit:,.2f}" for need in parts)])
    rows.append(["total", *(f"{need.total / unit:,.2f}" for need in memory)])
    rows.append(["fullest stage", *(f"{need.stage}" for need in memory)])
    rows.append(["packs in flight", *(f"{need.in_flight}" for need in memory)])
    rows.append(["tokens in flight", *(f"{need.held_tokens:,}" for need in memory)])
    return text_table("", rows)


def memory_dict(memory: MemoryBreakdown) -> dict[str, object]:
    place = {"stage": memory.stage, "in_flight": memory.in_flight, "held_tokens": memory.held_tokens}
    return {"total": memory.total, **memory.parts(), **place}
