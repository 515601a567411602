"""The numbers of phases, in one table: how each is summed, and which tables and logs show it, under which name.

Attributes of `PhaseReport` add up over the phases and steps of a strategy (`summed`). `strategy_columns` makes the
tables of strategies: in the page of a run, in `hf-hotspa report` and `compare`, and in the printed lines of a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_hotspa.report import COUNTED
from hf_hotspa.reporting.svg import short


@dataclass(frozen=True)
class Column:
    """A number of a strategy."""

    name: str
    title: str = ""  # its heading; `{}` is the unit of bytes there
    unit: str = ""  # `s`, `bytes`, `1/s`, `%`; empty for a count
    tables: tuple[str, ...] = ()  # the tables that have it, by `PLACES`
    metric: str = ""  # `hotspa/<metric>` in logs: its mean over steps; bytes are in MB
    given: str = ""  # shown and logged only where any number of this name is not 0; empty for always
    summed: bool = True  # whether it is the sum of attributes of phases

    def text(self, value: float, place: "Place") -> str:
        if self.unit == "bytes":
            return f"{value / place.size:{place.bytes_format}}"
        formats = {"s": place.seconds_format, "%": ".1%", "": ""}
        return f"{value:{formats[self.unit]}}" if self.unit in formats else short(value)


@dataclass(frozen=True)
class Place:
    """How numbers are written in one table."""

    seconds_format: str = ".2f"
    size: float = 1e9
    size_name: str = "GB"
    bytes_format: str = ".3g"


PLACES = {"page": Place(), "report": Place(), "compare": Place(), "log": Place(".3f", 1e6, "MB", ".1f")}
_ALL = ("page", "report", "compare", "log")
COLUMNS = (
    Column("num_phases", "phases", tables=("page",), metric="phases", summed=False),
    Column("num_packs", "packs", tables=("page", "report", "log")),
    Column("num_sequences", "sequences", tables=("page", "log")),
    Column("num_tokens", "tokens", tables=_ALL),
    Column("compute_s", "compute s", "s", ("page", "report", "log")),
    Column("tokens_per_s", "tokens/s", "1/s", ("page", "report", "compare"), summed=False),
    Column("wait_s", "wait s", "s", ("page", "report", "log"), "wait_s"),
    Column("moved_s", "load+return s", "s", _ALL),
    Column("hidden_s", "hidden s", "s", ("report", "log")),
    Column("moved_bytes", "{} moved", "bytes", ("page", "log")),
    Column("moved_share", "share", "%", ("log",), summed=False),
    Column("predicted_s", "predicted s", "s", ("log",), given="measured_s", summed=False),
    Column("frozen_bytes", "of it frozen", "bytes", ("page",), "frozen_mb", given="frozen_bytes"),
    Column("unit_s", "units s", "s", ("log",), "unit_s", given="unit_bytes"),
    Column("hidden_unit_s", metric="hidden_unit_s", given="unit_bytes"),
    Column("unit_bytes", "{} of units", "bytes", ("log",), "unit_mb", given="unit_bytes"),
    Column("context_bytes", "{} between ranks of cp", "bytes", ("page",), "context_mb", given="context_bytes"),
    Column("squared_tokens"),
    *(
        Column(m.name, m.title, "", ("page",) if m.title else (), "" if m.over else m.metric, given=m.name)
        for m in COUNTED
        if m.name
    ),
)
SUMMED = tuple(column.name for column in COLUMNS if column.summed)


def strategy_columns(table: str, strategies: Mapping[str, Callable[[str], float]]) -> dict[str, list[str]]:
    """Returns the columns of a table of `PLACES`, heading -> cells. `strategies`: for each the function that returns its
    numbers by the names of `COLUMNS`."""
    place, columns = PLACES[table], {"strategy": list(strategies)}
    for column in COLUMNS:
        if table in column.tables and (not column.given or any(of(column.given) for of in strategies.values())):
            cells = [column.text(of(column.name), place) for of in strategies.values()]
            columns[column.title.format(place.size_name)] = cells
    return columns


def rows_of(columns: Mapping[str, list[str]]) -> list[list[str]]:
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]
