"""The measurements of `bench serve` at each load, as a table and as a picture."""

from pathlib import Path

from mini_ee.lab.data.text_table import table
from mini_ee.lab.evaluation.plots import new_panels, save_figure


def loads_table(loads: list[dict]) -> str:
    """A table of loads and servers: requests per second offered and answered in time, latencies in ms."""
    times = ("p50", "p95", "p99")
    rows = [load | {key: 1e3 * load[key] for key in times} for load in loads]
    columns = {"server": "server", "load": "load:.0%", "offered": "offered:.1f", "in_time": "in time:.1f"}
    return table(rows, columns | {key: f"{key}:.1f" for key in times})


def draw_loads(path: Path, rows: list[dict]) -> None:
    """Plot p99 and p50 of each server by load, with one panel for each kind of arrivals."""
    kinds = {
        "bursts of requests" if "bursts" in row["case"] else "single requests": row for row in rows if row.get("loads")
    }
    figure, panels = new_panels(len(kinds))
    for axes, (kind, row) in zip(panels, kinds.items()):
        for at, name in enumerate(dict.fromkeys(load["server"] for load in row["loads"])):
            loads = [load for load in row["loads"] if load["server"] == name and load["p99"] < float("inf")]
            for key, line in (("p99", "o-"), ("p50", ".:")):
                times = [1e3 * load[key] for load in loads]
                axes.plot([load["offered"] for load in loads], times, line, color=f"C{at}", label=f"{name}, {key}")
        axes.axhline(1e3 * row["limit"], color="0.6", linewidth=1, zorder=0)
        axes.set(title=kind, xlabel="requests per second", ylabel="latency in ms", yscale="log")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=8, loc="outside lower center", ncols=6)
    save_figure(figure, path)
