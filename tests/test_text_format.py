"""The text formats: the bytes that prometheus_client writes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter.text_format import Family, Format, render_families


class Registry:
    """What prometheus_client's writers ask for families."""

    def __init__(self, families):
        self.families = families

    def collect(self):
        for family in self.families:
            metric = Metric(family.name.removesuffix("_total"), family.help, family.kind)
            suffix = "_bucket" if family.kind == "histogram" else ""
            for values, number in family.samples:
                metric.add_sample(family.name + suffix, dict(zip(family.labels, values, strict=True)), number)
            if family.sum is not None:
                metric.add_sample(family.name + "_count", {}, family.samples[-1][1])
                metric.add_sample(family.name + "_sum", {}, family.sum)
            yield metric


def written(families, wire_format):
    if wire_format is Format.TEXT:
        return generate_text(Registry(families)).decode()
    return generate_openmetrics(Registry(families)).decode().removesuffix("# EOF\n")


TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(['"', "\\", "\n", '\\"', "\\n", "\r", "\u2028", "a b"])
NUMBERS = st.floats(allow_nan=False) | st.integers(0, 2**63).map(float) | st.sampled_from([0.0, 1.0, 1e6, 1234567.0, 0.1, 1e-9, math.inf])
NAMES = st.lists(st.sampled_from(["pod", "namespace", "gpu_uuid", "container", "resource"]), unique=True, max_size=4).map(tuple)


@st.composite
def families(draw):
    kind = draw(st.sampled_from(["gauge", "counter"]))
    labels = draw(NAMES)
    samples = draw(st.dictionaries(st.tuples(*[TEXT for _ in labels]), NUMBERS, min_size=1, max_size=5))
    name = draw(st.sampled_from(["fgpu_pod_memory_used_bytes", "fgpu_up"])) + ("_total" if kind == "counter" else "")
    return Family(name=name, kind=kind, help=draw(TEXT), labels=labels, samples=tuple(samples.items()))


@pytest.mark.parametrize("wire_format", Format)
@given(st.lists(families(), max_size=4))
def test_the_bytes_are_those_of_prometheus_client(wire_format, made):
    assert render_families(made, wire_format) == written(made, wire_format)


@pytest.mark.parametrize("wire_format", Format)
def test_a_histogram_has_its_buckets_its_count_and_its_sum(wire_format):
    buckets = ((("0.5",), 2.0), (("+Inf",), 3.0))
    made = [Family(name="fgpu_sample_duration_seconds", kind="histogram", help="How long.", labels=("le",), samples=buckets, sum=4.5)]
    assert render_families(made, wire_format) == written(made, wire_format)
    assert render_families(made, wire_format).splitlines()[2:] == [
        'fgpu_sample_duration_seconds_bucket{le="0.5"} 2.0',
        'fgpu_sample_duration_seconds_bucket{le="+Inf"} 3.0',
        "fgpu_sample_duration_seconds_count 3.0",
        "fgpu_sample_duration_seconds_sum 4.5",
    ]


def test_labels_stand_in_the_order_of_their_names():
    made = [Family(name="fgpu_up", kind="gauge", help="", labels=("pod", "namespace"), samples=((("p", "n"), 1.0),))]
    assert render_families(made, Format.TEXT).splitlines()[-1] == 'fgpu_up{namespace="n",pod="p"} 1.0'
