"""The plans of a pool of strategies, and the order in which switching between them costs least.

Owns what the strategies of a run have in common: the nested order of their shards, their layouts, and every plan
between them. Strategies of equal layouts (`Strategy.layout`) have the same plans: phases of theirs that follow one
another share one load and one return. A load comes from the master store alone, or from there and from the weights of the strategy that ran
before (pair plans), for those who can afford to keep both in memory. Plans are made when they are first asked for and
kept; they are pure functions of the arguments, equal on all ranks. No torch.
"""

from collections.abc import Sequence

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import check_choice
from hf_hotspa.layout.nesting import nested_orders
from hf_hotspa.layout.placement import Layout, gradient_layout, master_layout, strategy_layout, trained_layout
from hf_hotspa.layout.units import Units, name_of_unit
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.plan.phase_order import order_phases
from hf_hotspa.plan.plan import SwitchPlan
from hf_hotspa.plan.planner import PLANNERS, plan_load, plan_return
from hf_hotspa.plan.ports import overlapped_seconds
from hf_hotspa.strategy import Strategy

_RESIDENT = "what several units use"


class PlanPool:
    """Plans of all strategies of a run.

    Args:
        strategies: The pool; the order of their shards is chosen here.
        weight_sizes: Bytes of one weight of each segment on the wire.
        gradient_sizes: Bytes of one gradient of each segment on the wire.
        planner: One of `planner.PLANNERS`.
        second_source: Whether a load may also draw on the weights of the strategy that ran before.
        by_stage: Whether the master store of each stage lies on its ranks; of one strategy. No transfer leaves a stage then, so
            that stages can run theirs at different times: `relay`, which also forwards by ranks of others, becomes `algorithm1`.

    Attributes:
        has_frozen: Whether some weights are frozen and others trained: then there are loads of the trained ones alone.
        units: The units of the model, which strategies with `+z2` and `+z3` load and return one at a time.

    Raises:
        HotspaConfigError: there is no such planner.
    """

    def __init__(
        self,
        vector: ParameterVector,
        strategies: Sequence[Strategy],
        cluster: Cluster,
        weight_sizes: Sequence[int],
        gradient_sizes: Sequence[int],
        planner: str = "relay",
        second_source: bool = False,
        by_stage: bool = False,
    ) -> None:
        check_choice("the planner", planner, PLANNERS)
        planner = "algorithm1" if by_stage and planner == "relay" else planner
        # by the usual paces: a cut for slow devices leaves every shard with its rank
        orders = nested_orders(strategies, vector.layer_costs, vector.stage_costs.with_paces(()))
        self.strategies = tuple(strategy.ordered(orders[strategy]) for strategy in strategies)
        self.second_source = second_source
        self.units = Units(vector)
        self.master = master_layout(vector, cluster.world_size, self.strategies[0] if by_stage else None)
        self._vector, self._cluster, self._planner = vector, cluster, planner
        self._weight_sizes, self._gradient_sizes = weight_sizes, gradient_sizes
        self._layouts = {strategy: strategy_layout(vector, strategy) for strategy in self.strategies}
        trainable = {segment.trainable for segment in vector.segments}
        self.has_frozen = trainable == {True, False}
        first = {own.layout: own for own in reversed(self.strategies)}
        self._twins = {own: first[own.layout] for own in self.strategies}
        self._loads: dict[tuple[Strategy | None, Strategy, bool], SwitchPlan] = {}
        self._returns: dict[Strategy, SwitchPlan] = {}
        self._of_units: dict[tuple[Strategy, int, bool], SwitchPlan] = {}
        self._orders: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}

    @property
    def num_layouts(self) -> int:
        """How many layouts the strategies have."""
        return len(set(self._twins.values()))

    def layout(self, strategy: Strategy) -> Layout:
        """Where the weights of a strategy lie."""
        return self._layouts[strategy]

    def load(self, strategy: Strategy, previous: Strategy | None = None, trained_only: bool = False) -> SwitchPlan:
        """The plan that fills a strategy's weights; with `+z3` those that stay for the whole phase.

        Args:
            previous: The one whose weights of the same optimizer step are still there; counts with `second_source`
                only.
            trained_only: Leave out the frozen weights, which are in its buffers already.
        """
        strategy, previous = self._twins[strategy], self._twins.get(previous) if previous else None
        streams = strategy.z == 3 or (previous is not None and previous.z == 3)
        drawn = previous if self.second_source and previous != strategy and not streams else None
        key = drawn, strategy, trained_only
        if key not in self._loads:
            sources = [self.master] if drawn is None else [self.master, self._layouts[drawn]]
            whole = self._layouts[strategy]
            target = trained_layout(self._vector, whole) if trained_only else whole
            plan = plan_load(sources, target, self._cluster, self._weight_sizes, self._planner)
            if strategy.z == 3:
                self._add_units(strategy, plan, True)
                plan = plan.only(self.units.resident, _RESIDENT)
            self._loads[key] = plan
        return self._loads[key]

    def return_gradients(self, strategy: Strategy) -> SwitchPlan:
        """The plan that adds a strategy's gradients to the master store; with `+z2` and `+z3` what is left of them when
        its units' have gone."""
        own = self._twins[strategy]  # with the pool's order of shards
        if own not in self._returns:
            contributions = gradient_layout(self._vector, own)
            plan = plan_return(contributions, self.master, self._cluster, self._gradient_sizes, self._planner)
            if own.z:
                self._add_units(own, plan, False)
                plan = plan.only(self.units.resident, _RESIDENT)
            self._returns[own] = plan
        return self._returns[own]

    def of_unit(self, strategy: Strategy, unit: int, is_load: bool) -> SwitchPlan:
        """The plan that fills a unit's weights, or adds its gradients to the master store."""
        strategy = self._twins[strategy]
        if (strategy, unit, is_load) not in self._of_units:
            if is_load:
                self.load(strategy)
            else:
                self.return_gradients(strategy)
        return self._of_units[strategy, unit, is_load]

    def _add_units(self, strategy: Strategy, plan: SwitchPlan, is_load: bool) -> None:
        for unit, segments in (self.units.segments if is_load else self.units.trained).items():
            self._of_units[strategy, unit, is_load] = plan.only(segments, name_of_unit(unit))

    def order(self, strategies: Sequence[Strategy], step: int = 0) -> tuple[Strategy, ...]:
        """The same strategies in the order in which loading them one after another costs least.

        Those of equal layouts follow one another, in the given order. That of layouts matters in two cases. With a second source a load is the cheaper the more of it is in the strategy before:
        the order of the least seconds by the fluid port model. With frozen weights, and memory for one strategy, the
        first load leaves these out where the mini-batch before ended with the same strategy: mini-batches end and begin
        in turns with the first strategy and with the second one, which are those of the shortest sequences and seldom
        missing. Else every load draws on the master store alone, no order is better than another, and the given one
        stays.

        Args:
            step: How many mini-batches came before it in the run. What it decides does not depend on what was loaded
                before, so that a resumed run goes on in the same order.
        """
        given = tuple(strategies)
        layouts = self._order(tuple(dict.fromkeys(self._twins[strategy] for strategy in given)), step)
        return tuple(s for layout in layouts for s in given if self._twins[s] == layout)

    def _order(self, key: tuple[Strategy, ...], step: int) -> tuple[Strategy, ...]:
        """Of strategies with layouts of their own."""
        if len(key) < 2:
            return key
        if not self.second_source:
            if not self.has_frozen:
                return key
            ends = key[0], *key[2:], key[1]
            return ends if step % 2 == 0 else ends[::-1]
        if key not in self._orders:
            first = [self._seconds(None, strategy) for strategy in key]
            between = [[self._seconds(a, b) if a != b else 0.0 for b in key] for a in key]
            self._orders[key] = tuple(key[index] for index in order_phases(first, between))
        return self._orders[key]

    def _seconds(self, previous: Strategy | None, strategy: Strategy) -> float:
        return overlapped_seconds(self.load(strategy, previous).loads(self._cluster, self._weight_sizes), self._cluster)

    def plans(self) -> list[SwitchPlan]:
        """Every plan that a mini-batch may need, whichever phases it has."""
        own = tuple(dict.fromkeys(self._twins.values()))
        whole = [strategy for strategy in own if strategy.z != 3]
        plans = [plan for s in own for plan in (self.load(s), self.return_gradients(s))]
        if self.second_source:
            plans += [self.load(b, a) for a in whole for b in whole if a != b]
        if self.has_frozen:
            plans += [self.load(s, trained_only=True) for s in whole]
        if self.has_frozen and self.second_source:
            plans += [self.load(b, a, True) for a in whole for b in whole if a != b]
        for strategy in own:
            if strategy.z == 3:
                plans += [self.of_unit(strategy, unit, True) for unit in self.units.segments]
            if strategy.z:
                plans += [self.of_unit(strategy, unit, False) for unit in self.units.trained]
        return plans
