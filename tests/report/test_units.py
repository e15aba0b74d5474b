"""Sizes are shown in a unit that fits them."""

import pytest

from solver_plan.report.units import size_text, size_unit


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (99, "99 bytes"),
        (100, "0.10 kB"),
        (99_999, "100.00 kB"),
        (1_416_192, "1.42 MB"),
        (99_000_000, "99.00 MB"),
        (100_000_000, "0.10 GB"),
        (157_440_000_000, "157.44 GB"),
    ],
)
def test_a_size_has_two_digits_or_more(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_other_sizes_are_shown_in_the_unit_of_the_largest() -> None:
    unit = size_unit(2_000_000)
    assert (unit.name, unit.of(1_500)) == ("MB", 0.0015)
