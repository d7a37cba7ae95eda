"""The table of metrics, and what a scrape gets."""

import gzip
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.breach import Breach, State, Verdict
from exporter.exposition import Exposition, accepts_gzip, choose_format
from exporter.health import Health, Histogram, SourceHealth
from exporter.judge import Resource
from exporter.limits import ContainerLimits
from exporter.metrics import EXPORTER_METRICS, MAX_LABEL_CHARACTERS, NODE_METRICS
from exporter.report import ContainerReport, GpuReport, Report
from exporter.snapshot import Gpu, GpuReading
from exporter.text_format import Format

NAMES = [row.name for row in (*NODE_METRICS, *EXPORTER_METRICS)]


def container(**more):
    values = {
        "namespace": "team-a",
        "pod": "half",
        "container": "main",
        "gpu_uuid": "GPU-0",
        "pod_uid": "uid",
        "container_id": "a" * 64,
        "memory_used_bytes": 10,
        "memory_used_peak_bytes": 12,
        "processes": 1,
        "limits": ContainerLimits(),
        "sm_utilization_ratio": None,
        "sm_utilization_mean_ratio": None,
        "busy_total": None,
        "breaches": {},
    }
    return ContainerReport(**(values | more))


def exposition(*containers, health=None):
    report = Report(time_seconds=1000.0, monotonic_seconds=0.0, containers=containers)
    return Exposition(report, health or Health(), {"sample_interval_seconds": "5"})


def text(*containers, **more):
    return exposition(*containers, **more).render(Format.TEXT, compressed=False).decode()


def lines(name, *containers, **more):
    return [line for line in text(*containers, **more).splitlines() if line.startswith(name)]


def test_no_two_rows_have_one_name():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("row", [*NODE_METRICS, *EXPORTER_METRICS], ids=lambda row: row.name)
def test_names_follow_the_conventions(row):
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", row.name)
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert not re.search(r"_(mib|gib|percent|ms|milliseconds)(_|$)", row.name)
    assert row.help.endswith(".")


def test_a_sample_is_written_with_its_labels():
    assert lines("fgpu_container_memory_used_bytes", container()) == [
        'fgpu_container_memory_used_bytes{container="main",gpu_uuid="GPU-0",namespace="team-a",pod="half"} 10.0'
    ]


def test_the_unknown_gives_no_sample():
    unknown = container(memory_used_bytes=None)
    assert lines("fgpu_container_memory_used_bytes", unknown) == []
    assert not re.search(r" (NaN|-1|-1\.0|1\.8446744073709552e\+19)$", text(unknown), re.MULTILINE)


def test_how_busy_a_gpu_instance_is_stands_on_the_gpu_alone():
    mig, parent = Gpu(gpu_uuid="MIG-0", parent_gpu_uuid="GPU-0"), Gpu(gpu_uuid="GPU-0")
    readings = (GpuReading(gpu=parent, up=True), GpuReading(gpu=mig, up=True, sm_utilization_ratio=0.25))
    gpus = tuple(
        GpuReport(
            gpu=reading.gpu,
            reading=reading,
            memory_allocated_bytes=0,
            compute_allocated_ratio=0.0,
            pods=0,
            unattributed_bytes=None,
            processes_memory_hidden=None,
        )
        for reading in readings
    )
    report = Report(time_seconds=1000.0, monotonic_seconds=0.0, containers=(container(gpu_uuid="MIG-0"),), gpus=gpus)
    text = Exposition(report, Health(), {}).render(Format.TEXT, compressed=False).decode()
    assert [line for line in text.splitlines() if "sm_utilization_ratio{" in line] == [
        'fgpu_gpu_sm_utilization_ratio{gpu_uuid="MIG-0"} 0.25'
    ]


def test_a_flag_is_one_or_zero_or_absent():
    above, below = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE), Breach(verdict=Verdict.BELOW)
    written = lines("fgpu_container_limit_exceeded", container(breaches={Resource.MEMORY: above, Resource.COMPUTE: below}))
    assert sorted(line.rsplit("}", 1)[1] for line in written) == [" 0.0", " 1.0"]
    assert lines("fgpu_container_limit_exceeded", container(breaches={Resource.MEMORY: Breach(verdict=Verdict.UNKNOWN)})) == []


def test_a_series_that_repeats_is_dropped_and_counted():
    written = lines("fgpu_container_memory_used_bytes", container(memory_used_bytes=1), container(memory_used_bytes=2))
    assert [line.rsplit(" ", 1)[1] for line in written] == ["1.0"]
    assert 'fgpu_series_dropped{reason="repeated"} 0.0' not in lines("fgpu_series_dropped", container(), container())
    assert lines("fgpu_series_dropped", container()) == [
        'fgpu_series_dropped{reason="over_limit"} 0.0',
        'fgpu_series_dropped{reason="repeated"} 0.0',
    ]


@pytest.mark.parametrize(
    "name",
    ["a\nb", 'a"b', "a\\b", "a\0b", "\u202eabc", "\ud800", "x" * 10_000, "", "模型", "a{b}"],
    ids=["newline", "quote", "backslash", "NUL", "right-to-left", "surrogate", "10 kB", "empty", "not latin", "braces"],
)
def test_a_hostile_label_costs_nothing_but_itself(name):
    written = text(container(pod=name), container())
    families = {family.name: family for family in parse_text(written)}
    pods = {sample.labels["pod"] for sample in families["fgpu_container_memory_used_bytes"].samples}
    assert "half" in pods
    assert len(pods) == 2
    assert max(len(pod) for pod in pods) <= MAX_LABEL_CHARACTERS


def test_both_formats_say_the_same():
    made = exposition(container(busy_total=None), health=Health(samples_total=3, sample_duration=Histogram().observe(0.02)))
    plain = made.render(Format.TEXT, compressed=False).decode()
    openmetrics = made.render(Format.OPENMETRICS, compressed=False).decode()

    def samples(families):
        own = (sample for family in families for sample in family.samples if sample.name.startswith("fgpu_"))
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in own}

    assert samples(parse_openmetrics(openmetrics)) == samples(parse_text(plain))
    assert openmetrics.endswith("# EOF\n")


def test_a_report_is_rendered_once_for_each_format_and_encoding():
    made = exposition(container())
    assert made.render(Format.TEXT, compressed=False) is made.render(Format.TEXT, compressed=False)
    zipped = made.render(Format.TEXT, compressed=True)
    assert zipped is made.render(Format.TEXT, compressed=True)
    assert gzip.decompress(zipped) == made.render(Format.TEXT, compressed=False)


def test_without_its_report_an_exposition_keeps_the_exporters_own_series():
    source = SourceHealth(source="nvml", up=False, errors_total=4)
    own = exposition(container(), health=Health(sources=(source,))).without_report().render(Format.TEXT, compressed=False).decode()
    assert 'fgpu_source_errors_total{source="nvml"} 4.0' in own
    assert "process_resident_memory_bytes" in own
    assert "fgpu_container_" not in own


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("text/plain;version=0.0.4", Format.TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", Format.OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; q=0.2, text/plain; q=0.7", Format.TEXT),
        ("application/openmetrics-text;q=0", Format.TEXT),
        ("application/openmetrics-text;q=lots", Format.TEXT),
        (",;,=", Format.TEXT),
    ],
)
def test_the_format_is_the_one_that_is_asked_for(accept, expected):
    assert choose_format(accept) is expected


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [("", False), ("gzip", True), ("gzip;q=0", False), ("deflate, GZIP;q=0.5", True), ("br", False), ("gzip;q=x", False)],
)
def test_gzip_is_sent_to_who_takes_it(accept_encoding, expected):
    assert accepts_gzip(accept_encoding) is expected


def test_a_histogram_counts_each_observation_in_its_bucket():
    histogram = Histogram().observe(0.005).observe(0.3).observe(99.0)
    written = lines("fgpu_sample_duration_seconds", health=Health(sample_duration=histogram))
    assert 'fgpu_sample_duration_seconds_bucket{le="0.005"} 1.0' in written
    assert 'fgpu_sample_duration_seconds_bucket{le="0.25"} 1.0' in written
    assert 'fgpu_sample_duration_seconds_bucket{le="0.5"} 2.0' in written
    assert 'fgpu_sample_duration_seconds_bucket{le="+Inf"} 3.0' in written
    assert "fgpu_sample_duration_seconds_count 3.0" in written
