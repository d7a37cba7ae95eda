"""Writes the generated parts of the documentation: the metrics table, the flags and the JSON's keys. A test holds them equal to the code."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exporter.config import FLAGS, show_default
from exporter.metrics import EXPORTER_METRICS, NODE_METRICS, PREFIX

DOCS = Path(__file__).parents[1] / "docs"

_METRICS_HEAD = """\
# Metrics

Made from the table in `exporter/metrics.py` by `make docs`.

Base units: bytes, seconds, ratios from 0 to 1. A sample that is absent is unknown; 0 was measured. There is no `node` label: the node is a
label of the scrape target. A MIG device is a GPU with its own `gpu_uuid` and a parent.

`sum()` over a family means something: it counts each byte and each second once. Two exceptions: in `fgpu_gpu_*` a MIG device and its parent both
stand, so sum those whose `parent_gpu_uuid` in `fgpu_gpu_info` is empty; in `fgpu_claim_*` each sharing system states its own claim.

**Words.** A *claim* is what a sharing system says a container or pod may use of one GPU; an *allocation* is a GPU that it was handed, with or without
an amount; a *limit* is the tightest claim; a *breach* is use above a limit for longer than the *hold* (`--breach-hold-seconds`).

## Label values

| label | values |
|---|---|
| `resource` | `memory`; `compute` (the mean over `--compute-window-seconds`); `unallocated`: processes on a GPU that no one gave the pod |
| `scope` | `pod`, `container`, or `process`: each client process is limited |
| `system` | the sharing system: [sharing-systems.md](sharing-systems.md) |
| `role` | `workload`, or `system`: plumbing of a sharing system, or a pod of `--system-namespaces` |
| `source` | `nvml`, `procfs`, `kubelet`, `kubernetes`, `hostfiles` |
| `reason` of `fgpu_gpu_unattributed_memory_bytes` | `host_process`: of no container; `process_gone`: it ended meanwhile; `unknown_container`: of a pod or container not known (yet); `mps_server`; `exporter`; `partly_hidden`: the driver hides another process of the same container |
| `reason` of `fgpu_dropped_samples_total` | `bad_pid`, `bad_timestamp`, `bad_utilization`, `unknown_pid`: samples that cannot be true; `scrambled_list`: a whole process list that cannot |
| `reason` of `fgpu_events_dropped_total` | `rate_limited`: too many about one pod; `queue_full`: too many on the node; `forbidden`: may not be written; `gone`: the namespace is; `refused`: not taken; `unreachable`: not taken in all the attempts; `begin_untold`: the end of a breach whose begin was not written |
| `reason` of `fgpu_hostfiles_unreadable` | `unknown_layout`: a size of no known version; `wrong_magic`, `impossible_value`: torn or hostile; `not_a_file`: a link, pipe, device or folder; `too_many_files`; `not_permitted`; `io_error` |
"""

_FLAGS_HEAD = """\
# Flags

Made from the table in `exporter/config.py` by `make docs`.

Each flag can also be set by an environment variable: `--breach-hold-seconds` by `FGPU_BREACH_HOLD_SECONDS`. The command line wins. A value
that cannot be used ends the program with status 2 and one line that says which and why.

| flag | default | meaning |
|---|---|---|
"""

_API_HEAD = """\
# The HTTP API

Made from [node.v1.schema.json](node.v1.schema.json), [history.v1.schema.json](history.v1.schema.json) and [explain.v1.schema.json](explain.v1.schema.json) by
`make docs`.

| path | what it answers |
|---|---|
| `/metrics` | the metrics, as text or OpenMetrics: [metrics.md](metrics.md) |
| `/` | the same report as a page for people: [node-page.md](node-page.md) |
| `/api/v1/node` | the same report as JSON: below |
| `/api/v1/history` | the last 15 minutes of memory and utilization as JSON: [below](#apiv1history) |
| `/api/v1/explain?pod=NAMESPACE/POD`, `/api/v1/explain?gpu=UUID` | why the report says what it says of a pod or a GPU: [below](#apiv1explain) |
| `/healthz`, `/readyz` | 200 while samples come; 200 once every source has answered |

## /api/v1/node

```sh
curl -s http://localhost:9844/api/v1/node | jq '.pods[] | {pod, gpus: [.gpus[] | {memory_used_bytes, memory_limit_bytes}]}'
```

The words are those of the metrics: a key is a metric's name without the entity in front. **Unknown is `null`; 0 was measured.** What belongs together in
one answer is of one sample, that of `last_sample_timestamp_seconds`; when samples stop coming, all that is measured becomes `null` after three
intervals. Objects by limit have the keys `memory`, `compute` and `unallocated`, those that there are.

Within `v1` a key keeps its meaning and its place; new ones may come, so a reader skips what it does not know. Names are what their authors wrote: escape
them where you show them. The answer must not be kept (`Cache-Control: no-store`) and is gzipped on request.
"""

_HISTORY_HEAD = """
## /api/v1/history

60 points 15 seconds apart (further where the sample interval is above 10 s) for each GPU and each pod on it. A point is the last sample of its step, no mean: what came and went within a step is not
there. A gap in the samples is `null`s in the lists, the newest ones when samples stop coming. It is kept in memory, so it is short after a restart; for a
longer past ask a Prometheus.
"""

_EXPLAIN_HEAD = """
## /api/v1/explain

```sh
curl -s 'http://localhost:9844/api/v1/explain?pod=team-a/train' | jq -r '.summary // .error'
```

`fgpu-exporter explain` prints the same for people: [explain.md](explain.md). A pod's name alone is enough where it is the only one. Errors are an object
with one sentence, `{"error": "..."}`: 400 for a question that names neither a pod nor a GPU, 404 for one that is not here (with the names nearest to it),
503 while there is no report that can be believed.
"""


def render_api() -> str:
    """Answer docs/api.md."""
    return "".join(
        [
            _API_HEAD,
            *_entities("node", "the answer"),
            _HISTORY_HEAD,
            *_entities("history", "the past"),
            _EXPLAIN_HEAD,
            *_entities("explain", "the explanation"),
        ]
    )


def _entities(name: str, title: str) -> list[str]:
    schema = json.loads((DOCS / f"{name}.v1.schema.json").read_text())
    parts = []
    for heading, entity in {title: schema, **schema["$defs"]}.items():
        parts.append(f"\n### {heading.replace('_', ' ')}\n\n{entity['description']}\n\n| key | type | meaning |\n|---|---|---|\n")
        parts += [f"| `{key}` | {' or '.join(_types(value))} | {value['description']} |\n" for key, value in entity["properties"].items()]
    return parts


def _types(value: Mapping[str, Any]) -> Iterator[str]:
    """Answer the JSON types that a value may have."""
    if "const" in value:
        yield f'`"{value["const"]}"`'
        return
    given = value["type"]
    for each in [given] if isinstance(given, str) else given:
        inner = value.get("items", {}).get("$ref") if each == "array" else value.get("$ref") if each == "object" else None
        link = f"[{inner.rpartition('/')[2].replace('_', ' ')}](#{inner.rpartition('/')[2].replace('_', '-')})" if inner else ""
        yield f"array of {link}" if inner and each == "array" else link or each


def render_metrics() -> str:
    """Answer docs/metrics.md."""
    parts = [_METRICS_HEAD]
    for title, rows in (("The node", NODE_METRICS), ("The exporter itself", EXPORTER_METRICS)):
        parts.append(f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
        for row in rows:
            labels = ", ".join(f"`{label}`" for label in row.labels if label != "le")
            parts.append(f"| `{PREFIX}{row.name}` | {row.kind} | {labels} | {row.help} |\n")
    parts.append(
        f"| `{PREFIX}config_info` | gauge | the flags that shape the numbers | The flags that shape the numbers. |\n"
        f"| `{PREFIX}series_dropped` | gauge | `reason` | Series left out of this exposition because another has the same labels. |\n"
        "\nBeside these the exporter shows `process_*` and `python_info` of its own process.\n"
    )
    return "".join(parts)


def render_flags() -> str:
    """Answer docs/flags.md."""
    rows = []
    for flag in FLAGS:
        default = show_default(flag)
        rows.append(f"| `--{flag.name}` | {f'`{default}`' if default else ''} | {flag.help} Expects {flag.expected}. |\n")
    return _FLAGS_HEAD + "".join(rows)


GENERATED = {DOCS / "metrics.md": render_metrics, DOCS / "flags.md": render_flags, DOCS / "api.md": render_api}


def main() -> None:
    """Write every generated file."""
    for path, render in GENERATED.items():
        path.write_text(render())


if __name__ == "__main__":
    main()
