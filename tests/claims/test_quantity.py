"""Numbers as others write them: what their own parsers refuse is refused, and nothing but ValueError is raised."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.quantity import (
    MAX_BYTES,
    parse_cuda_limit,
    parse_cuda_percent,
    parse_fraction,
    parse_keyed,
    parse_percent,
    parse_positive_percent,
    parse_quantity,
    parse_share,
    parse_unsigned,
    shown,
)

PARSERS = (
    parse_unsigned,
    parse_percent,
    parse_fraction,
    parse_share,
    parse_positive_percent,
    parse_quantity,
    parse_cuda_limit,
    parse_cuda_percent,
)

NO_NUMBERS = [
    "",
    " ",
    " 1",
    "1 ",
    "1\n",
    "1_0",
    "\uff11",  # full-width 1
    "\u0661",  # Arabic-Indic 1
    "\u00b2",  # superscript 2, which str.isdigit() takes
    "0x1",
    "0b1",
    "nan",
    "NaN",
    "inf",
    "Infinity",
    "-1",
    "- 1",
    "--1",
    "1\x00",
    "\x00",
    "1,5",
    "0x1p-2",
    ".",
    "e",
    "e5",
    "1e",
    "1" * 10_000,
    "half of the card, please; " * 400,
    "\ud800",
]


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: ascii(text[:20]))
def test_what_is_no_number_is_refused_with_a_short_printable_sentence(parse, text):
    with pytest.raises(ValueError, match=r" is no ") as caught:
        parse(text)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(text=st.one_of(st.text(max_size=80), st.text(alphabet="0123456789.+-eEgGkKmMiInux_ \x00", max_size=80)))
def test_any_text_is_a_number_that_is_not_negative_or_a_value_error(parse, text):
    try:
        value = parse(text)
    except ValueError:
        return
    assert 0 <= value <= (1 << 64) - 1


@pytest.mark.parametrize("text", ["2Gi", "2000Mi", "1.5", "-1", "+4000", " 4000", "4_000", "0x1000", "4e3", "", "18446744073709551616"])
def test_a_whole_number_is_digits_alone(text):
    with pytest.raises(ValueError, match="is no whole number"):
        parse_unsigned(text)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("4000", 4000), ("007", 7), ("18446744073709551615", 18446744073709551615)])
def test_a_whole_number_goes_up_to_64_bits(text, value):
    assert parse_unsigned(text) == value


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("+0.5", 0.5), (".25", 0.25), ("5e-1", 0.5), ("0.30000000000000004", 0.1 + 0.2)])
def test_a_fraction_is_what_go_and_the_quantity_grammar_both_take(text, value):
    assert parse_fraction(text) == value


@pytest.mark.parametrize(
    "text", ["0", "0.0", "1", "1.0", "1.5", "-0.5", "0,5", "1e400", "1e-400", "500m", "0.5Gi", "0x1p-1", " 0.5 ", "nan"]
)
def test_a_fraction_is_above_0_and_below_1(text):
    with pytest.raises(ValueError, match="is no fraction"):
        parse_fraction(text)


def test_a_share_may_be_the_whole():
    assert parse_share("1") == 1
    with pytest.raises(ValueError, match="is no share"):
        parse_share("1.01")


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("10", 10), ("100", 100)])
def test_a_percentage_goes_from_0_to_100(text, value):
    assert parse_percent(text) == value
    assert parse_cuda_percent(text) == value


@pytest.mark.parametrize("parse", [parse_percent, parse_cuda_percent, parse_positive_percent])
def test_a_percentage_is_not_above_100(parse):
    with pytest.raises(ValueError, match="101"):
        parse("101")


def test_a_percentage_of_threads_is_above_0_and_may_have_decimals():
    assert parse_positive_percent("12.5") == 12.5
    with pytest.raises(ValueError, match="'0'"):
        parse_positive_percent("0")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1024", 1024),
        ("8Gi", 8 << 30),
        ("4096Mi", 4096 << 20),
        ("1000M", 1_000_000_000),
        ("1k", 1000),
        ("1E", 10**18),
        ("2E3", 2000),
        ("1.5Gi", 3 << 29),
        (".5Ki", 512),
        ("5.", 5),
        ("1e3", 1000),
        ("1e-3", 1),
        ("100m", 1),
        ("1n", 1),
        ("+1", 1),
        ("9223372036854775807", MAX_BYTES),
        ("9223372036854775806.0000000000000000000000000000000000000001", MAX_BYTES),
    ],
)
def test_a_quantity_is_read_exactly_and_rounded_up(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["9223372036854775808", "8Ei", "1e400", "10E", "1e9999", "-1Gi", "8GiB", "8 Gi", "8gi", "8K", "1Mi1", "ten"]
)
def test_a_quantity_that_kubernetes_would_not_write_is_refused(text):
    with pytest.raises(ValueError, match=r"is no (quantity|amount)"):
        parse_quantity(text)


@given(
    whole=st.integers(min_value=0, max_value=10**9),
    decimals=st.text(alphabet="0123456789", max_size=9),
    suffix=st.sampled_from([("", 1), ("Ki", 1 << 10), ("Mi", 1 << 20), ("k", 1000), ("M", 10**6), ("m", Fraction(1, 1000))]),
)
def test_a_quantity_equals_exact_arithmetic(whole, decimals, suffix):
    exact = (whole + Fraction(int(decimals or "0"), 10 ** len(decimals))) * suffix[1]
    assert parse_quantity(f"{whole}.{decimals}{suffix[0]}") == -(-exact.numerator // exact.denominator)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8589934592", 8 << 30),
        ("6g", 6 << 30),
        ("6G", 6 << 30),
        ("3000m", 3000 << 20),
        ("2097152k", 2 << 30),
        ("2097152K", 2 << 30),
        ("0", 0),
        ("0m", 0),
    ],
)
def test_a_cuda_limit_counts_in_powers_of_1024(text, value):
    assert parse_cuda_limit(text) == value


@pytest.mark.parametrize("text", ["6gb", "6Gi", "1.5g", "g", "-1g", "6 g", "1t", "0x10m", "99999999999999999999g"])
def test_a_cuda_limit_in_another_form_is_refused(text):
    with pytest.raises(ValueError, match="is no limit"):
        parse_cuda_limit(text)


@pytest.mark.parametrize(("parse", "text"), [(parse_cuda_limit, "010m"), (parse_cuda_percent, "010")])
def test_a_zero_in_front_may_mean_octal_to_the_library_and_is_refused(parse, text):
    with pytest.raises(ValueError, match="010"):
        parse(text)


def test_an_error_is_told_with_its_key():
    with pytest.raises(ValueError, match=r"^gpu-memory: '2Gi' is no whole number"):
        parse_keyed("gpu-memory", "2Gi", parse_unsigned)


def test_hostile_text_is_shown_short_and_escaped():
    assert shown("a\x00\n\uff11'") == '"a\\x00\\n\\uff11\'"'
    assert shown("x" * 10_000) == "'" + "x" * 40 + "'..."
