from pathlib import Path

import pytest
from pydantic import ValidationError

from solver_plan.errors import DocumentError, InputError
from solver_plan.parallelism.problem import RingRate
from solver_plan.profiles.cluster import EfficiencyTable, NodeLink, read_cluster, ready_clusters
from solver_plan.profiles.description import MatrixProduct

TABLE = EfficiencyTable(tokens=(128, 512), widths=(64, 256), values=((0.1, 0.3), (0.2, 0.4)))
V100 = Path(__file__).parents[2] / "solver_plan" / "clusters" / "v100_4x32gb.toml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = V100.read_text()
    assert old in text
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(old, new, 1))
    return file


@pytest.mark.parametrize("name", ready_clusters())
def test_ready_files_are_valid_and_named_after_their_cluster(name: str) -> None:
    cluster = read_cluster(name)
    assert cluster.name == name
    assert cluster.device.arithmetic


def test_the_machine_of_four_v100() -> None:
    cluster = read_cluster("v100_4x32gb")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (1, 4, 4)
    assert cluster.device.memory_bytes == 32 * 2**30
    assert read_cluster(V100) == cluster


def test_the_table_holds_at_its_points_and_between_them_in_logarithms() -> None:
    assert TABLE.at(128, 64) == pytest.approx(0.1)
    assert TABLE.at(512, 256) == pytest.approx(0.4)
    assert TABLE.at(256, 64) == pytest.approx(0.15)
    assert TABLE.at(256, 128) == pytest.approx(0.25)


def test_the_table_is_constant_beyond_its_end_and_falls_in_proportion_before_its_start() -> None:
    assert TABLE.at(10**6, 10**6) == pytest.approx(0.4)
    assert TABLE.at(64, 64) == pytest.approx(0.05)
    assert TABLE.at(64, 32) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("tokens", "widths", "values", "rule"),
    [
        ((2, 1), (1,), ((0.5,), (0.5,)), "grid points increase"),
        ((1, 2), (1,), ((0.5,),), "one row for each"),
        ((1,), (1, 2), ((0.5,),), "one value for each"),
        ((1,), (1,), ((1.5,),), "less than or equal to 1"),
    ],
)
def test_a_table_that_is_no_grid_is_refused(tokens: object, widths: object, values: object, rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        EfficiencyTable(tokens=tokens, widths=widths, values=values)  # type: ignore[arg-type]


def test_a_product_is_divided_where_it_is_split() -> None:
    rates = read_cluster("v100_4x32gb").arithmetic("float16")
    whole = MatrixProduct(rows=16384, inner=4096, columns=16384, split="none")
    columns = MatrixProduct(rows=16384, inner=4096, columns=16384, split="columns")
    assert rates.matrix_ms(whole, 1, 4) == rates.matrix_ms(whole, 1, 1)
    assert rates.matrix_ms(columns, 1, 4) == pytest.approx(rates.matrix_ms(columns, 1, 1) / 4)
    assert rates.matrix_ms(columns, 1, 1) == pytest.approx(2 * 16384 * 4096 * 16384 / (125e12 * 0.83) * 1000)


def test_samples_of_a_weight_product_join_and_those_of_a_head_do_not() -> None:
    rates = read_cluster("v100_4x32gb").arithmetic("float16")
    joined = MatrixProduct(rows=128, inner=1024, columns=1024, split="none")
    alone = MatrixProduct(rows=128, inner=1024, columns=1024, weight=False, split="none")
    assert rates.matrix_ms(joined, 64, 1) < 64 * rates.matrix_ms(joined, 1, 1)
    assert rates.matrix_ms(alone, 64, 1) == pytest.approx(64 * rates.matrix_ms(alone, 1, 1))


def test_a_ring_takes_the_row_of_the_next_smaller_number_of_devices() -> None:
    rows = (
        RingRate(devices=2, latency_ms=0.1, bus_bytes_per_s=1e9),
        RingRate(devices=4, latency_ms=0.2, bus_bytes_per_s=2e9),
    )
    link = NodeLink(latency_ms=0.01, bytes_per_s=5e9, collectives=rows)
    assert [link.ring(devices).bus_bytes_per_s for devices in (2, 3, 4, 8)] == [1e9, 1e9, 2e9, 2e9]
    assert NodeLink(latency_ms=0.01, bytes_per_s=5e9).ring(8).bus_bytes_per_s == 5e9


def test_a_data_type_without_rates_is_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match=r"found no rates for float8; V100-SXM2-32GB has float16, float32"):
        read_cluster("v100_4x32gb").arithmetic("float8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices_per_node = 4", "devices_per_node = 0", r"devices_per_node: found 0; .*greater than or equal to 1"),
        ("nodes = 1", "nodes = 1\nracks = 2", r"racks: found an unknown field"),
        ("memory_bytes_per_s = 900e9", "", r"device\.memory_bytes_per_s: found nothing; the field is required"),
        ("latency_ms = 0.036", "latency_ms = nan", r"cluster\.toml.*finite"),
        ("tokens = [128, 512,", "tokens = [512, 128,", r"matrix_efficiency\.tokens: found .*; grid points increase"),
        (
            "memory_bytes_per_s = 900e9",
            "memory_bytes_per_s = 1e-300",
            r"memory_bytes_per_s: found 1e-300; .* 0\.000001",
        ),
        ("memory_bytes_per_s = 900e9", "memory_bytes_per_s = 1e300", r"memory_bytes_per_s: found 1e\+300; .* 10{18}"),
        ("memory_bytes_per_s = 900e9", "memory_bytes_per_s = inf", r"numbers must be finite"),
        ("memory_bytes_per_s = 900e9", "memory_bytes_per_s = 1e-6", r"memory_efficiency: found 0.83; times .* 1e-06"),
        ("memory_efficiency = 0.83", "memory_efficiency = 1e-300", r"memory_efficiency: found 1e-300; .* 0\.000001"),
        ("nodes = 1", "nodes = 1000000", r"nodes: found 1000000; nodes times devices_per_node is at most 1000000"),
        ("nodes = 1", "nodes = ", r"found no TOML"),
        ("nodes = 1", "nodes = 2026-01-01", r"found a date or time"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as caught:
        read_cluster(edited(tmp_path, old, new))
    assert "\n" not in str(caught.value)


def test_a_name_of_nothing_is_answered_with_the_ready_ones() -> None:
    with pytest.raises(InputError, match=r"nowhere: cannot read a cluster file .* one of .*v100_4x32gb"):
        read_cluster("nowhere")
    with pytest.raises(InputError, match=r"cluster: found an empty name; name a TOML file or one of .*v100_4x32gb"):
        read_cluster("")
