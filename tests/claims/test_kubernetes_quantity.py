from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.quantity import MAX_BYTES, parse_exact_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1024", 1024),
        ("81559Mi", 81559 << 20),
        ("10Gi", 10 << 30),
        ("500M", 500_000_000),
        ("1.5Gi", 3 << 29),
        ("1k", 1000),
        ("1Ki", 1024),
        ("7Ei", 7 << 60),
        ("1E", 10**18),
        ("2P", 2 * 10**15),
        ("3Ti", 3 << 40),
        ("4Pi", 4 << 50),
        ("1e3", 1000),
        ("1.5E3", 1500),
        ("12e-1", 2),
        ("1500m", 2),
        ("1n", 1),
        (".5", 1),
        ("5.", 5),
        ("+5", 5),
        ("-0", 0),
    ],
)
def test_a_quantity_is_so_many_bytes_rounded_up(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 ",
        "1K",
        "1ki",
        "1Mib",
        "1 Gi",
        "0x10",
        "1_000",
        "10GB",
        "1e",
        "e3",
        ".",
        "-1",
        "nan",
        "inf",
        "１",
        "8Ei",
        "1e19",
        "1e999999999",
    ],
)
def test_what_kubernetes_does_not_read_is_no_quantity(text):
    with pytest.raises(ValueError, match=r"is no (quantity|amount)"):
        parse_quantity(text)


FACTORS = {
    "": 1,
    "m": Decimal("0.001"),
    **{letter: 1000**power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)},
}


@given(st.integers(0, 10**12), st.integers(0, 9), st.sampled_from(sorted(FACTORS)))
def test_quantities_are_exact(digits, places, suffix):
    with localcontext(prec=60):
        number = Decimal(digits).scaleb(-places)
        expected = Fraction(number * FACTORS[suffix])
    text = f"{number:f}{suffix}"
    assert parse_exact_quantity(text) == expected
    if expected <= MAX_BYTES:
        assert 0 <= parse_quantity(text) - expected < 1


@given(st.text(alphabet="0123456789.+-eEkKMGTPimnu ", max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text):
    try:
        value = parse_quantity(text)
    except ValueError:
        return
    assert 0 <= value <= MAX_BYTES
