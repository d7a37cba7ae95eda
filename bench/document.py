"""What bench/light.py and bench/fleet.py measured as tables, and their place in docs/performance.md."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"

Found = Mapping[str, Any]
Target = tuple[str, dict[str, float], Callable[[Found], float], str]

# What, the most (or, where it is a ratio to nvitop-exporter, the least) that each node may have, how it follows, and how it is written.
_TARGETS: tuple[Target, ...] = (
    ("resident memory at the end, MiB", {"typical": 64, "extreme": 80}, lambda found: found["resident_mib"], "{:.1f}"),
    (
        "its growth after the first 15 minutes, MiB",
        {"typical": 2, "extreme": 2},
        lambda found: found["resident_mib"] - found["resident_settled_mib"],
        "{:+.1f}",
    ),
    ("processor, % of one core", {"typical": 0.5, "extreme": 2}, lambda found: found["cpu_percent"], "{:.2f}"),
    ("scrape, p99, ms", {"typical": 3, "extreme": 5}, lambda found: found["scrape_p99_ms"], "{:.2f}"),
    ("start to first whole report, s", {"typical": 1.5, "extreme": 3}, lambda found: found["start_seconds"], "{:.2f}"),
    ("List calls to the kubelet, per sample", {"typical": 1, "extreme": 1}, lambda found: found["list_calls_per_tick"], "{:.2f}"),
    ("list calls to the API server, steady", {"typical": 0, "extreme": 0}, lambda found: found["api_lists"], "{:.0f}"),
)
_TOLERANCE = 1.02


def render(results: Found) -> str:
    """Answer the tables."""
    names = list(results["nodes"])
    machine = results["machine"]
    where = (
        f"Measured on {results['date']} at {results['commit']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_mib'] // 1024} GiB, Linux {machine['kernel']}, Python {machine['python']}."
    )
    lines = [
        where,
        "",
        "| what | " + " | ".join(f"{name} | target | met" for name in names) + " |",
        "|---|" + "---|---|---|" * len(names),
    ]
    for title, most, value, form in _TARGETS:
        cells = []
        for name in names:
            found = value(results["nodes"][name])
            cells += [form.format(found), f"<= {most[name]:g}", "yes" if found <= most[name] * _TOLERANCE else "no"]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    cells = []
    for name in names:
        found = results["nodes"][name]
        ratio = found["scrapes_per_second"] / found["nvitop_scrapes_per_second"]
        cells += [f"{ratio:.0f}x", ">= 20x", "yes" if ratio >= 20 else "no"]  # noqa: PLR2004 - the target
    lines.append("| scrapes a second beside nvitop-exporter | " + " | ".join(cells) + " |")
    lines += ["", *_beside(results, names), *_growth(results)]
    return "\n".join(lines) + "\n"


def _beside(results: Found, names: list[str]) -> list[str]:
    rows: tuple[tuple[str, str, str, str], ...] = (
        ("scrapes a second, one connection", "scrapes_per_second", "nvitop_scrapes_per_second", "{:.0f}"),
        ("p99 of those, ms", "saturated_p99_ms", "nvitop_p99_ms", "{:.1f}"),
        ("resident memory, MiB", "resident_mib", "nvitop_resident_mib", "{:.1f}"),
        ("processor, % of one core", "cpu_percent", "nvitop_cpu_percent", "{:.2f}"),
    )
    lines = ["| beside nvitop-exporter, same node | " + " | ".join(f"{name}: fgpu | nvitop" for name in names) + " |"]
    lines.append("|---|" + "---|---|" * len(names))
    for title, ours, theirs, form in rows:
        cells = [form.format(results["nodes"][name][key]) for name in names for key in (ours, theirs)]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "| more | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    more = (
        ("series", "series", "{:.0f}"),
        ("bytes of a scrape, gzipped", "scrape_bytes", "{:.0f}"),
        ("calls of the driver, per sample", "driver_calls_per_tick", "{:.0f}"),
        ("GetAllocatableResources, per sample", "allocatable_calls_per_tick", "{:.2f}"),
        ("watches opened anew", "api_watches", "{:.0f}"),
        ("scrape, median, ms", "scrape_p50_ms", "{:.2f}"),
        ("anonymous memory, MiB", "anonymous_mib", "{:.1f}"),
        ("resident memory after one minute, MiB", "resident_at_first_mib", "{:.1f}"),
        ("resident memory after 15 minutes, MiB", "resident_settled_mib", "{:.1f}"),
        ("highest resident memory, MiB", "resident_peak_mib", "{:.1f}"),
        ("minutes of running", "minutes", "{:.0f}"),
    )
    lines += [f"| {title} | " + " | ".join(form.format(results["nodes"][name][key]) for name in names) + " |" for title, key, form in more]
    return lines


def _growth(results: Found) -> list[str]:
    if "growth" not in results:
        return []
    lines = [
        "",
        "| typical node, times | pods | processes | processor, % | to the one before | resident, MiB | series | gzipped bytes | start, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = None
    for row in results["growth"]:
        ratio = f"{row['cpu_percent'] / before['cpu_percent']:.2f}x" if before else ""
        lines.append(
            f"| {row['factor']} | {row['pods']} | {row['processes']} | {row['cpu_percent']:.2f} | {ratio} | {row['resident_mib']:.1f} | "
            f"{row['series']:.0f} | {row['scrape_bytes']} | {row['start_seconds']:.2f} |"
        )
        before = row
    return lines


def render_fleet(found: Found) -> str:
    """Answer what bench/fleet.py found, and what follows for a fleet, with the arithmetic."""
    series, per_node = found["head_series"], found["series_per_node"]
    bytes_per_series = found["prometheus_resident_bytes"] / series
    seconds = found["scrape_interval_seconds"]
    rows = (
        ("nodes scraped, up", f"{found['up']:.0f} of {found['nodes']}"),
        ("series per node", f"{per_node:.0f}"),
        ("series in Prometheus", f"{series:,.0f}"),
        ("samples a second", f"{found['samples_per_second']:,.0f}"),
        ("scrape, mean", f"{found['scrape_seconds_mean'] * 1e3:.1f} ms"),
        ("slowest scrape in five minutes of 99 % of the nodes", f"{found['scrape_seconds_p99'] * 1e3:.0f} ms"),
        ("Prometheus, resident", f"{found['prometheus_resident_bytes'] / 2**20:,.0f} MiB"),
        ("Prometheus, resident bytes per series", f"{bytes_per_series:,.0f}"),
        ("Prometheus, processor, % of one core", f"{100 * found['prometheus_cpu_ratio']:.0f}"),
        ("series that were new in the last five minutes", f"{found['churned_series']:,.0f}"),
    )
    fleet = 5000
    arithmetic = (
        ("series", f"{fleet:,} x {per_node:,.0f} = {fleet * per_node / 1e6:.1f} million"),
        ("samples a second", f"{fleet * per_node / 1e6:.1f} million / {seconds:g} s = {fleet * per_node / seconds:,.0f}"),
        (
            "memory of Prometheus for them, as measured per series above",
            f"{fleet * per_node / 1e6:.1f} million x {bytes_per_series:,.0f} bytes = {fleet * per_node * bytes_per_series / 2**30:.0f} GiB",
        ),
        (
            "bytes scraped, gzipped",
            f"{fleet:,} x {found['scrape_bytes']:,} / {seconds:g} s = {fleet * found['scrape_bytes'] / seconds / 1e6:.1f} MB/s",
        ),
        ("open watches of API servers", f"{fleet:,} x 2 (pods of the node, the Node object) = {fleet * 2:,}; with `--dra` twice that"),
        (
            "requests to API servers, steady",
            f"{fleet * 2:,} watches, each opened anew after 300 to 600 s: {fleet * 2:,} / 450 s = {fleet * 2 / 450:.0f} a second; no list",
        ),
    )
    lines = [
        f"Prometheus {found['version']}, {found['minutes']:g} minutes, a scrape of each node every {seconds:g} s.",
        "",
        f"| {found['nodes']} typical nodes on loopback | |",
        "|---|---|",
        *(f"| {title} | {text} |" for title, text in rows),
        "",
        f"| {fleet:,} typical nodes, on paper | |",
        "|---|---|",
        *(f"| {title} | {text} |" for title, text in arithmetic),
    ]
    return "\n".join(lines) + "\n"


def write(section: str, text: str) -> None:
    """Put tables into the document, in place of those that the section had."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, _, rest = DOCUMENT.read_text().partition(begin)
    _, _, after = rest.partition(end)
    DOCUMENT.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")
