"""Whether traces of all ranks (`tests.wire_recorder`) keep the rules of NCCL: `check` gives a `Proof`, or the shortest `Fault`.

Rules of gloo do not help: no tags, no buffers, no operation of its own accord. What is checked, for communicators of devices:

1. Every communicator is made by all ranks in one order, before it is used; its first operation is a collective of all its ranks.
2. Collectives: the same kinds, sizes and dtypes on all its ranks, in one order.
3. Messages: between two ranks of a communicator sends and receives match in order, without tags, with elements and dtype.
4. Queues: what a rank issues on a communicator runs in order. A group call, or a message outside of one, ends when its partners'
   are at the head too. A thread goes on from a wait when the operation is over. Nothing may wait in a circle.
5. One order: the same if all communicators that a thread uses are one queue. Then every rank issues them in one order.
6. One communicator serves one thread at a time, or there is an event between its uses.
7. No tensor in host memory.

Groups for host tensors are gloo's on every machine: their messages match by tag and hold nobody's queue; rules 1, 2 and 4 apply.

`check` runs the traces: a step happens when all it needs has happened. The result does not depend on the order of steps.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.wire_recorder import Communicator, Event, Operation, Trace

_ROOTED = ("gather", "scatter")


@dataclass(frozen=True)
class Place:
    """An event of a rank, for a message: what, and the stack, innermost first."""

    rank: int
    text: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"  rank {self.rank}: {self.text}", *(f"      {frame}" for frame in self.stack)])


@dataclass(frozen=True)
class Fault:
    """A broken rule, and the events that break it: two, or a circle of waits."""

    rule: str
    places: tuple[Place, ...]

    def __str__(self) -> str:
        return "\n".join([self.rule, *map(str, self.places)])


@dataclass
class Proof:
    """What was checked, of all ranks together.

    Attributes:
        operations: By kind.
        communicators: For devices, of all ranks; a rank has at most `most_communicators` at a time.
        pairs: Pairs of ranks that need a communicator of two for messages outside of group calls.
        depth: The most group calls and collectives that wait in one queue at a time.
        beside: The most communicators of a rank with an operation under way at a time.
    """

    operations: Counter[str] = field(default_factory=Counter)
    communicators: int = 0
    most_communicators: int = 0
    pairs: int = 0
    depth: int = 0
    beside: int = 0


def check(traces: Sequence[Trace]) -> Proof | Fault:
    """Checks the traces of all ranks, in the order of ranks. A run that an error ended is checked as far as it went."""
    rules = (_made_in_one_order, _no_host_tensor, _begins_together, _one_thread_at_a_time)
    for rule in rules:
        if (fault := rule(traces)) is not None:
            return fault
    proof = Proof()
    for joint in (False, True):
        if (fault := _Run(traces, joint, proof).run()) is not None:
            return fault
    _count(traces, proof)
    return proof


def _count(traces: Sequence[Trace], proof: Proof) -> None:
    made, pairs = set[str](), set[tuple[str, int, int]]()
    for trace in traces:
        live = set[str]()
        for op in trace.operations:
            if op.kind == "destroy":
                live.discard(op.comm)
                continue
            proof.operations[op.kind] += 1
            if not trace.communicators[op.comm].is_host:
                live.add(op.comm)
                proof.most_communicators = max(proof.most_communicators, len(live))
                if op.is_message and op.call < 0:
                    pairs.add((op.comm, min(trace.rank, op.peer), max(trace.rank, op.peer)))
        made |= {name for name, communicator in trace.communicators.items() if not communicator.is_host}
    proof.communicators, proof.pairs = len(made - {"world"}), len(pairs)


def _text(op: Operation) -> str:
    sizes = "x".join(map(str, op.sizes)) or "no"
    to = {"send": f" to rank {op.peer}", "recv": f" from rank {op.peer}"}.get(op.kind, "")
    to = f" of rank {op.peer}" if op.peer >= 0 and not to else to
    return f"{op.kind}{to}, {sizes} {op.dtype or 'elements'}, on {op.comm}"


def _said(rank: int, op: Operation) -> Place:
    return Place(rank, _text(op), op.stack)


def _place(rank: int, event: Event) -> Place:
    if event.operation is not None:
        return _said(rank, event.operation)
    text = {"wait": "waits for an operation", "make": f"makes {event.comm}", "pass": "waits for another thread"}
    return Place(rank, text.get(event.kind, event.kind), event.stack)


# -- rules that need no run ----------------------------------------------------------------------------------------------


def _made_in_one_order(traces: Sequence[Trace]) -> Fault | None:
    made = [[event for event in trace.events if event.kind == "make"] for trace in traces]
    for number in range(max(map(len, made))):
        row = [events[number] if number < len(events) else None for events in made]
        for rank, event in enumerate(row):
            if (event and event.comm) != (row[0] and row[0].comm):
                if (event is None and traces[rank].error) or (row[0] is None and traces[0].error):
                    continue  # it did not come so far
                places = [_place(r, e) if e else Place(r, "makes none") for r, e in ((0, row[0]), (rank, event))]
                return Fault(f"communicator no. {number + 1} is not made by all ranks in one order", tuple(places))
    return None


def _no_host_tensor(traces: Sequence[Trace]) -> Fault | None:
    for trace in traces:
        for event in trace.events:
            op = event.operation
            if op is not None and op.on_host and not trace.communicators[op.comm].is_host:
                return Fault("a tensor in host memory on a communicator for devices", (_place(trace.rank, event),))
    return None


def _begins_together(traces: Sequence[Trace]) -> Fault | None:
    for trace in traces:
        begun = set[str]()
        for event in trace.events:
            op = event.operation
            if op is None or op.comm in begun or trace.communicators[op.comm].is_host:
                continue
            begun.add(op.comm)
            if op.is_message:
                return Fault(
                    "the first operation of a communicator is a message: only some of its ranks would set it up",
                    (_place(trace.rank, event),),
                )
    return None


def _one_thread_at_a_time(traces: Sequence[Trace]) -> Fault | None:
    for trace in traces:
        clocks = defaultdict[int, dict[int, int]](dict)  # of each thread: how far it knows of each
        stamps = dict[int, dict[int, int]]()
        last = dict[str, tuple[int, Event, int]]()
        for index, event in enumerate(trace.events):
            clock = clocks[event.thread]
            clock[event.thread] = index
            if event.kind == "record":
                stamps[index] = dict(clock)
            elif event.kind == "pass":
                for thread, known in stamps[event.targets[0]].items():
                    clock[thread] = max(clock.get(thread, -1), known)
            elif event.operation is not None and not trace.communicators[event.operation.comm].is_host:
                comm = event.operation.comm
                if comm in last:
                    thread, before, at = last[comm]
                    if thread != event.thread and clock.get(thread, -1) < at:
                        places = _place(trace.rank, before), _place(trace.rank, event)
                        return Fault("two threads use a communicator without an event between them", places)
                last[comm] = event.thread, event, index
    return None


# -- queues --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Entry:
    """A collective, or all messages of a group call, in a rank's queue; `op` is the first of it."""

    rank: int
    queue: str
    op: Operation
    events: list[int] = field(default_factory=list)
    issued: int = 0
    left: list[tuple[int, Operation]] = field(default_factory=list)  # messages without their partner so far

    @property
    def comm(self) -> str:
        return self.op.comm


class _Run:
    """Runs the traces of all ranks; with `joint` queues, of all communicators of a thread."""

    def __init__(self, traces: Sequence[Trace], joint: bool, proof: Proof) -> None:
        self.traces, self.joint, self.proof = traces, joint, proof
        self.communicators: dict[str, Communicator] = {}
        self.queues: list[dict[str, deque[_Entry]]] = []
        self.entry_of: list[dict[int, _Entry]] = []
        self.programs: list[dict[int, list[int]]] = []
        self.at: list[dict[int, int]] = []
        self.done: list[set[int]] = [set() for _ in traces]
        self.numbers: list[dict[int, int]] = []  # of a making, by event: the how manieth
        self.makes = [0] * len(traces)  # how many a rank has come to
        self.posted: dict[tuple[str, str, int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        for trace in traces:
            self._queue(trace)

    def _queue(self, trace: Trace) -> None:
        queues, entries, programs = defaultdict[str, deque[_Entry]](deque), dict[int, _Entry](), dict[int, list[int]]()
        calls = dict[tuple[str, int], _Entry]()
        self.communicators.update(trace.communicators)
        numbers = dict[int, int]()
        for index, event in enumerate(trace.events):
            programs.setdefault(event.thread, []).append(index)
            if event.kind == "make":
                numbers[index] = len(numbers) + 1
            op = event.operation
            if op is None or (op.is_message and trace.communicators[op.comm].is_host):
                continue
            is_joint = self.joint and not trace.communicators[op.comm].is_host
            queue = f"thread {event.thread}" if is_joint else op.comm
            key = op.comm, op.call if op.call >= 0 else -1 - index
            if key not in calls:
                calls[key] = _Entry(trace.rank, queue, op)
                queues[queue].append(calls[key])
            entry = entries[index] = calls[key]
            entry.events.append(index)
            if op.is_message:
                entry.left.append((index, op))
        self.numbers.append(numbers)
        self.queues.append(queues)
        self.entry_of.append(entries)
        self.programs.append(programs)
        self.at.append(dict.fromkeys(programs, 0))

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self) -> Fault | None:
        while True:
            moved = [self._advance(rank) for rank in range(len(self.traces))]
            self._measure()
            matched, fault = self._match()
            if fault is not None:
                return fault
            if not any(moved) and not matched:
                return self._blocked()

    def _measure(self) -> None:
        if self.joint:
            return
        for queues in self.queues:
            device = [q for q in queues.values() if q and not self.communicators[q[0].comm].is_host]
            waiting = [sum(e.issued > 0 and e.op.kind != "destroy" for e in queue) for queue in device]
            self.proof.depth = max(self.proof.depth, *waiting, 0)
            self.proof.beside = max(self.proof.beside, sum(n > 0 for n in waiting))

    def _advance(self, rank: int) -> bool:
        moved, again = False, True
        while again:
            again = False
            for thread, program in self.programs[rank].items():
                while self.at[rank][thread] < len(program) and self._happens(rank, program[self.at[rank][thread]]):
                    self.at[rank][thread] += 1
                    moved = again = True
        return moved

    def _happens(self, rank: int, index: int) -> bool:
        event, done = self.traces[rank].events[index], self.done[rank]
        if event.kind in ("wait", "pass"):
            return all(target in done for target in event.targets)
        if event.kind == "record":
            done.add(index)
        elif event.kind == "make":
            self.makes[rank] = max(self.makes[rank], self.numbers[rank][index])
            return min(self.makes) >= self.numbers[rank][index]
        elif index in self.entry_of[rank]:
            if index not in done and self.entry_of[rank][index].issued < len(self.entry_of[rank][index].events):
                self.entry_of[rank][index].issued += 1
        else:
            self._post_on_host(rank, index, event.operation)
        return True

    def _post_on_host(self, rank: int, index: int, op: Operation | None) -> None:
        """gloo: a message waits for its partner beside all others; a send needs none."""
        assert op is not None
        ends = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
        partner = "recv" if op.kind == "send" else "send"
        if op.kind == "send":
            self.done[rank].add(index)
        waiting = self.posted[op.comm, partner, *ends, op.tag]
        if waiting:
            other, at = waiting.popleft()
            self.done[other].add(at)
            self.done[rank].add(index)
        else:
            self.posted[op.comm, op.kind, *ends, op.tag].append((rank, index))

    def _head(self, rank: int, comm: str) -> _Entry | None:
        """The entry of a communicator that may run now on a rank, if it is one."""
        queues = self.queues[rank]
        names = (
            [comm] if comm in queues else [name for name, queue in queues.items() if queue and queue[0].comm == comm]
        )
        for name in names:
            if queues[name] and queues[name][0].comm == comm and queues[name][0].issued == len(queues[name][0].events):
                return queues[name][0]
        return None

    def _end(self, entry: _Entry) -> None:
        self.done[entry.rank].update(entry.events)
        self.queues[entry.rank][entry.queue].popleft()

    def _match(self) -> tuple[bool, Fault | None]:
        matched = False
        heads = {q[0].comm for queues in self.queues for q in queues.values() if q and q[0].issued == len(q[0].events)}
        for comm in heads:
            ranks = self.communicators[comm].ranks
            entries = {rank: entry for rank in ranks if (entry := self._head(rank, comm)) is not None}
            for rank, entry in entries.items():
                if entry.left:
                    found, fault = self._match_messages(rank, entry, entries)
                    if fault is not None:
                        return True, fault
                    matched |= found
            ended = [entry for entry in entries.values() if not entry.left and entry.op.is_message]
            for entry in ended:
                self._end(entry)
            if len(entries) == len(ranks) and not any(entry.op.is_message for entry in entries.values()):
                if (fault := self._unequal(list(entries.values()))) is not None:
                    return True, fault
                for entry in entries.values():
                    self._end(entry)
                matched = True
            elif (fault := self._mixed(entries)) is not None:
                return True, fault
            matched |= bool(ended)
        return matched, None

    def _match_messages(self, rank: int, entry: _Entry, entries: dict[int, _Entry]) -> tuple[bool, Fault | None]:
        """Matches this entry's sends with receives at the head of their partners' queues, in order."""
        matched = False
        for peer in {op.peer for _, op in entry.left if op.kind == "send"}:
            other = entries.get(peer)
            if other is None:
                continue
            sends = [pair for pair in entry.left if pair[1].kind == "send" and pair[1].peer == peer]
            receives = [pair for pair in other.left if pair[1].kind == "recv" and pair[1].peer == rank]
            for send, receive in zip(sends, receives, strict=False):
                if (send[1].sizes, send[1].dtype) != (receive[1].sizes, receive[1].dtype):
                    places = _said(rank, send[1]), _said(peer, receive[1])
                    return True, Fault("a send meets a receive of another size or dtype", places)
                entry.left.remove(send)
                other.left.remove(receive)
                matched = True
        return matched, None

    def _mixed(self, entries: dict[int, _Entry]) -> Fault | None:
        """A message at the head on one rank, and a collective on the partner: neither ends."""
        for rank, entry in entries.items():
            for _, op in entry.left:
                other = entries.get(op.peer)
                if other is not None and not other.op.is_message:
                    return Fault("a message meets a collective", (_said(rank, op), _said(op.peer, other.op)))
        return None

    def _unequal(self, entries: list[_Entry]) -> Fault | None:
        first = entries[0].op
        ranks = self.communicators[first.comm].ranks
        for at, entry in enumerate(entries):
            op = entry.op
            if (op.kind, op.dtype, op.peer) != (first.kind, first.dtype, first.peer) or not _fits(
                first, op, at, len(ranks)
            ):
                places = _said(entries[0].rank, first), _said(entry.rank, op)
                return Fault("ranks issue different collectives", places)
        if first.kind == "all_to_all":
            return self._unequal_parts(entries)
        return None

    def _unequal_parts(self, entries: list[_Entry]) -> Fault | None:
        size = len(entries)
        ops = [entry.op for entry in entries]
        for i, sender in enumerate(ops):
            for j, receiver in enumerate(ops):
                if sender.sizes[j] != receiver.sizes[size + i]:
                    places = tuple(
                        Place(entries[k].rank, f"{_text(op)}: {what} {n} elements", op.stack)
                        for k, op, what, n in (
                            (i, sender, f"sends rank {entries[j].rank}", sender.sizes[j]),
                            (j, receiver, f"expects from rank {entries[i].rank}", receiver.sizes[size + i]),
                        )
                    )
                    return Fault("parts of an all-to-all differ in size", places)
        return None

    # -- what does not end ---------------------------------------------------------------------------------------------

    def _blocked(self) -> Fault | None:
        """The shortest circle of waits, if something has not happened; or what waits for something that nobody issues."""
        nodes: list[_Node] = []
        for rank, queues in enumerate(self.queues):
            nodes += [(rank, entry.events[0], True) for q in queues.values() for entry in list(q)[:1] if entry.issued]
            for thread, program in self.programs[rank].items():
                if self.at[rank][thread] < len(program):
                    nodes.append((rank, program[self.at[rank][thread]], False))
        if not nodes:
            return None
        circles = [circle for node in nodes if (circle := self._circle(node))]
        if circles:
            shortest = min(circles, key=lambda circle: len(circle))
            return Fault(self._rule("ranks wait for each other"), tuple(map(self._at, shortest)))
        for node in nodes:
            if (fault := self._alone(node)) is not None:
                return fault
        if any(trace.error for trace in self.traces):
            return None  # what is left waits for ranks that an error has ended
        return Fault(self._rule("operations do not end"), tuple(map(self._at, nodes[:2])))

    def _rule(self, text: str) -> str:
        return f"{text}, if all communicators of a thread are issued in one order" if self.joint else text

    def _at(self, node: "_Node") -> Place:
        return _place(node[0], self.traces[node[0]].events[node[1]])

    def _circle(self, start: "_Node") -> list["_Node"]:
        """The shortest way from a node back to it, along what each waits for."""
        came: dict[_Node, _Node | None] = {start: None}
        line = deque([start])
        while line:
            node = line.popleft()
            for need in self._needs(node):
                if need == start:
                    way = [node]
                    while (before := came[way[-1]]) is not None:
                        way.append(before)
                    return way[::-1]
                if need[1] >= 0 and need not in came:
                    came[need] = node
                    line.append(need)
        return []

    def _needs(self, node: "_Node") -> Iterator["_Node"]:
        """What a blocked head or thread waits for; the event is -1 if the rank has ended."""
        rank, index, is_head = node
        event = self.traces[rank].events[index]
        if is_head:
            entry = self.entry_of[rank][index]
            if entry.issued < len(entry.events):
                yield self._thread_before(rank, entry.events[entry.issued])
                return
            yield from self._partners(entry)
        elif event.kind in ("wait", "pass"):
            for target in event.targets:
                if target not in self.done[rank]:
                    yield self._towards(rank, target)
        elif event.kind == "make":
            for other, number in enumerate(self.makes):
                if number < self.numbers[rank][index]:
                    making = next((i for i, n in self.numbers[other].items() if n == number + 1), None)
                    yield (other, -1, False) if making is None else self._thread_before(other, making)

    def _partners(self, entry: _Entry) -> Iterator["_Node"]:
        if entry.op.is_message:
            for _, op in entry.left:
                wanted = "recv" if op.kind == "send" else "send", entry.rank
                yield self._pending(op.peer, entry.comm, partial(_is_of, wanted))
            return
        for rank in self.communicators[entry.comm].ranks:
            head = self._head(rank, entry.comm)
            if head is None:
                yield self._pending(rank, entry.comm, lambda o: not o.is_message)

    def _pending(self, rank: int, comm: str, fits: Callable[[Operation], bool]) -> "_Node":
        """What holds up a rank's next operation of a kind; where it waits if it has not come to one."""
        for index, event in enumerate(self.traces[rank].events):
            op = event.operation
            if op is not None and op.comm == comm and index not in self.done[rank] and fits(op):
                entry = self.entry_of[rank].get(index)
                if entry is not None and (index, op) not in entry.left and op.is_message:
                    continue
                return self._towards(rank, index)
        waiting = [
            program[self.at[rank][t]] for t, program in self.programs[rank].items() if self.at[rank][t] < len(program)
        ]
        return rank, waiting[0] if waiting else -1, False

    def _towards(self, rank: int, index: int) -> "_Node":
        """What holds up an event: the head of its queue if it is issued, else its thread."""
        entry = self.entry_of[rank].get(index)
        if entry is not None and entry.issued:
            return rank, self.queues[rank][entry.queue][0].events[0], True
        op = self.traces[rank].events[index].operation
        if entry is None and op is not None and self._is_issued(rank, index):  # a receive on the host
            return self._pending(op.peer, op.comm, lambda o: (o.kind, o.peer, o.tag) == ("send", rank, op.tag))
        return self._thread_before(rank, index)

    def _is_issued(self, rank: int, index: int) -> bool:
        thread = self.traces[rank].events[index].thread
        program, at = self.programs[rank][thread], self.at[rank][thread]
        return at >= len(program) or program[at] > index

    def _thread_before(self, rank: int, index: int) -> "_Node":
        thread = self.traces[rank].events[index].thread
        program, at = self.programs[rank][thread], self.at[rank][thread]
        return rank, program[at] if at < len(program) else -1, False

    def _alone(self, node: "_Node") -> Fault | None:
        """What waits for a rank that has ended without an error."""
        rank, index, is_head = node
        ended = [need[0] for need in self._needs(node) if need[1] < 0 and not self.traces[need[0]].error]
        if not is_head or not ended:
            return None
        entry = self.entry_of[rank][index]
        op = entry.left[0][1] if entry.left else entry.op
        events = self.traces[ended[0]].events
        last = [event for i, event in enumerate(events) if self._of(ended[0], i) == entry.comm]
        partner = _place(ended[0], last[-1]) if last else Place(ended[0], f"nothing on {entry.comm}")
        what = {"send": "is never received", "recv": "is never sent"}.get(op.kind, "is not joined")
        partner = Place(partner.rank, f"issues nothing after: {partner.text}", partner.stack)
        return Fault(f"an operation {what}", (_said(rank, op), partner))

    def _of(self, rank: int, index: int) -> str:
        op = self.traces[rank].events[index].operation
        return op.comm if op is not None else ""


_Node = tuple[int, int, bool]
"""A rank, an event, and whether it is the head of a queue rather than where a thread is."""


def _is_of(wanted: tuple[str, int], op: Operation) -> bool:
    return (op.kind, op.peer) == wanted


def _fits(first: Operation, op: Operation, at: int, size: int) -> bool:
    """Whether sizes of a collective belong together on two ranks."""
    if op.kind in _ROOTED:
        return op.sizes[0 if op.kind == "gather" else 1] == first.sizes[0 if op.kind == "gather" else 1]
    if op.kind == "all_to_all":
        return len(op.sizes) == len(first.sizes)
    if op.kind == "all_gather":
        return op.sizes[0] == first.sizes[0] and set(op.sizes[1:]) == {op.sizes[0]}
    return op.sizes == first.sizes
