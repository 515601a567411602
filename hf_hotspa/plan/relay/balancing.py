"""Balances amounts over places: the water-filling behind the decisions of `routing`.

A split is a dictionary from places (ranks or nodes) to bytes. All functions are deterministic: amounts are visited in a
fixed order (places, size), never in hash order.
"""

from collections.abc import Mapping, Sequence

Shares = tuple[tuple[int, float], ...]
"""Ranks and their fractions, by rank; their sum is 1."""

TOLERANCE = 0.01
"""A NIC this much busier than its fair share is left alone: relaying so little costs a message and gains nothing."""
MOST_SWEEPS = 40
"""The most rounds of water-filling; regular layouts converge in two or three."""
_SETTLED = 1e-3
"""Water-filling ends when a round moves a smaller fraction of the bytes."""
_BISECTIONS = 30
"""Halvings of the interval when a level is searched."""
_LEAST_SHARE = 1e-6
"""A smaller share is rounding noise, and dropped."""


def balance(
    amounts: Mapping[tuple[int, ...], float], capacity: Sequence[float] | None = None
) -> tuple[dict[tuple[int, ...], dict[int, float]], dict[int, float]]:
    """Splits each amount over its places to minimise the load of the fullest place.

    Repeated water-filling, one amount after the other (fewest places first, then largest): block coordinate descent on
    the sum of squared loads. Its minimum also has the smallest maximum, and the least above any level.

    Returns:
        The split of each amount, and the load of each place.
    """
    loads: dict[int, float] = {}
    parts: dict[tuple[int, ...], dict[int, float]] = {}
    free = []
    for places, amount in amounts.items():
        if len(places) == 1:
            (place,) = places
            parts[places] = {place: amount}
            loads[place] = loads.get(place, 0.0) + amount
        else:
            free.append(places)
    if not free:
        return parts, loads
    for places in free:
        parts[places] = dict.fromkeys(places, 0.0)
        for place in places:
            loads.setdefault(place, 0.0)
    free.sort(key=lambda places: (len(places), -amounts[places], places))
    enough = _SETTLED * sum(amounts.values())
    for sweep in range(MOST_SWEEPS):
        moved = 0.0
        for places in free:
            part = parts[places]
            others = [loads[place] - part[place] for place in places]
            added = _fill(others, None if capacity is None else [capacity[p] for p in places], amounts[places])
            for place, base, num_bytes in zip(places, others, added, strict=True):
                moved += abs(num_bytes - part[place])
                part[place] = num_bytes
                loads[place] = base + num_bytes
        if sweep and moved <= enough:
            break
    return parts, loads


def _fill(loads: Sequence[float], capacity: Sequence[float] | None, amount: float) -> list[float]:
    """Pours an amount over places and returns each one's part: the lowest (per capacity) are filled first."""
    widths = [1.0] * len(loads) if capacity is None else capacity
    heights = [load / width for load, width in zip(loads, widths, strict=True)]
    order = sorted(range(len(loads)), key=heights.__getitem__)
    content = width = level = 0.0
    for position, place in enumerate(order):
        content += loads[place]
        width += widths[place]
        level = (amount + content) / width
        if position + 1 == len(order) or level <= heights[order[position + 1]]:
            break
    return [max(0.0, level - height) * width for height, width in zip(heights, widths, strict=True)]


def spill(
    parts: dict[tuple[int, ...], dict[int, float]],
    loads: Mapping[int, float],
    devices: Sequence[int],
    level: float,
    free: Mapping[int, float] | None = None,
) -> None:
    """Moves what exceeds `level` on a device to devices with capacity below it, in place.

    `level` is at least the even share: there is capacity for everything. The devices with capacity take the same
    fractions of everything that moves, which balances what they forward like what they take. `free`: bytes that each
    device should take at most; ignored if they do not suffice.
    """
    excess = {d: loads[d] - level for d in devices if loads.get(d, 0.0) > level * (1 + TOLERANCE)}
    if not excess:
        return
    moving = sum(excess.values())
    capacities = {d: level - loads.get(d, 0.0) for d in devices if loads.get(d, 0.0) < level}
    narrower = {d: min(capacity, free[d]) if free else capacity for d, capacity in capacities.items()}
    narrower = {d: capacity for d, capacity in narrower.items() if capacity > level * TOLERANCE}
    if sum(narrower.values()) >= moving * (1 - 2 * TOLERANCE):
        capacities = narrower
    space = sum(capacities.values())
    for part in parts.values():
        moved = 0.0
        for device in [d for d in part if d in excess]:
            share = part[device] * (excess[device] / loads[device])
            part[device] -= share
            moved += share
        if moved > 0:
            for device, capacity in capacities.items():
                part[device] = part.get(device, 0.0) + moved * capacity / space


def relieve(
    parts: dict[tuple[int, ...], dict[int, float]],
    served: Mapping[tuple[int, ...], float],
    wanted: Mapping[int, float],
    level_s: float,
    nic: float,
    intra: float,
) -> None:
    """Improves one node's landing, in place, where forwarding keeps a device's intra-node port above `level_s`.

    Water-filling of the busier of a device's two ports (NIC in, intra-node out), over all devices, while the load of
    the node's busiest port falls. Between the rounds the pulls move to the owners that forward least.

    Args:
        parts: Bytes that land, by needers and device.
        served: Bytes that are pulled inside the node, by owners.
        wanted: Bytes that each rank of the node needs and lacks; its intra-node port receives what does not land on it.
        level_s: Seconds up to which a port is not a bottleneck.
        nic: Bytes per second into a device from other nodes.
        intra: Bytes per second out of a device inside the node.
    """
    devices = sorted(wanted)
    cost = {needers: {d: (len(needers) - (d in needers)) / intra for d in devices} for needers in parts}
    trial = {needers: dict(part) for needers, part in parts.items()}
    order = sorted(trial, key=lambda needers: (-len(needers) * sum(trial[needers].values()), needers))
    best_s = float("inf")
    for _ in range(MOST_SWEEPS):
        received_s, forwarded_s = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
        handed = dict(wanted)
        for needers, part in trial.items():
            for device, num_bytes in part.items():
                received_s[device] += num_bytes / nic
                forwarded_s[device] += num_bytes * cost[needers][device]
                handed[device] -= num_bytes if device in needers else 0.0
        sends: dict[tuple[int, ...], float] = {(device,): seconds * intra for device, seconds in forwarded_s.items()}
        for owners, num_bytes in served.items():
            sends[owners] = sends.get(owners, 0.0) + num_bytes
        sent_s = {device: num_bytes / intra for device, num_bytes in balance(sends)[1].items()}
        busiest_s = max(*received_s.values(), *sent_s.values(), max(handed.values()) / intra)
        if busiest_s < best_s:
            parts.update({needers: dict(part) for needers, part in trial.items()})
        if max(sent_s.values()) <= level_s * (1 + TOLERANCE) or busiest_s > best_s * (1 - _SETTLED):
            return
        best_s = busiest_s
        for needers in order:
            part, step = trial[needers], cost[needers]
            amount = sum(part.values())
            for device, num_bytes in part.items():
                received_s[device] -= num_bytes / nic
                sent_s[device] -= num_bytes * step[device]
            trial[needers] = part = _fill_two_ports(amount, needers, received_s, sent_s, step, nic, level_s)
            for device, num_bytes in part.items():
                received_s[device] += num_bytes / nic
                sent_s[device] += num_bytes * step[device]


def _fill_two_ports(
    amount: float,
    needers: tuple[int, ...],
    received_s: Mapping[int, float],
    sent_s: Mapping[int, float],
    step: Mapping[int, float],
    nic: float,
    level_s: float,
) -> dict[int, float]:
    """Splits an amount over devices by bisection, raising the lowest `max(received, sent)` first. Ports are free below
    `level_s`, where needers come first."""

    def capacity(device: int, level: float) -> float:
        space = (level - received_s[device]) * nic
        if step[device] > 0:
            space = min(space, (level - sent_s[device]) / step[device])
        return max(0.0, space)

    low = min(max(received_s[d], sent_s[d]) for d in step)
    high = max(max(received_s[d], sent_s[d]) for d in step) + amount * max(1 / nic, *step.values())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(capacity(device, middle) for device in step) < amount:
            low = middle
        else:
            high = middle
    capacities = {device: capacity(device, max(high, level_s)) for device in step}
    part: dict[int, float] = {}
    for group in (needers, [device for device in step if device not in needers]):
        space, left = sum(capacities[device] for device in group), amount - sum(part.values())
        if space > 0 and left > amount * _LEAST_SHARE:
            part.update(
                {device: capacities[device] * min(1.0, left / space) for device in group if capacities[device] > 0}
            )
    total = sum(part.values())
    return {device: num_bytes * amount / total for device, num_bytes in part.items()}


def shares_of(part: Mapping[int, float]) -> Shares:
    """Returns a split as fractions, by rank; an even one for no bytes."""
    total = sum(part.values())
    if total <= 0:
        return tuple((rank, 1 / len(part)) for rank in sorted(part))
    kept = {rank: num_bytes for rank, num_bytes in part.items() if num_bytes > total * _LEAST_SHARE}
    total = sum(kept.values())
    return tuple((rank, kept[rank] / total) for rank in sorted(kept))
