"""Topologies read from trees like /sys, and the plans made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_sys import big_little, two_core_vm, two_sockets, write_cpu
from twofold.platforms.cpu_topology import Core, CpuTopology, parse_cpu_list, read_topology
from twofold.platforms.thread_plan import plan_threads, usable_cores


def test_two_cores(tmp_path: Path) -> None:
    topology = read_topology({0, 1}, two_core_vm(tmp_path))
    assert topology == CpuTopology((Core((0,)), Core((1,))), {0: 1_024_000})
    plan = plan_threads(topology, None)
    assert (plan.num_threads, plan.num_cores, plan.team, plan.nodes) == (2, 2, (), ())
    assert "every CPU" in plan.free and str(plan) == f"not tied to CPUs: {plan.free}"
    one = plan_threads(topology, None, 1)
    assert (one.team, one.home) == ((), frozenset()) and one.free.startswith("they are fewer than the 2 cores")
    tied = plan_threads(topology, None, 1, "on")
    assert (tied.team, tied.rest) == ((0,), {1})


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    topology = read_topology(range(16), two_sockets(tmp_path))
    assert [core.cpus for core in topology.cores] == [(cpu, cpu + 8) for cpu in range(8)]
    assert [core.node for core in topology.cores] == [0] * 4 + [1] * 4
    assert topology.node_free == {0: 1_024_000, 1: 5_120_000}
    plan = plan_threads(topology, None)
    assert plan.num_threads == 8 and sorted(plan.team) == list(range(8))
    assert plan.rest == frozenset(range(8, 16)) and plan.nodes == (0, 1)
    assert str(plan) == "tied to CPUs 0-7, the rest of the server to 8-15; weights spread over memory nodes 0-1"


def test_a_team_that_fits_stays_on_the_node_with_most_memory(tmp_path: Path) -> None:
    topology = read_topology(range(16), two_sockets(tmp_path))
    plan = plan_threads(topology, None, 3)
    assert (plan.team, plan.nodes, plan.home) == ((), (), {4, 5, 6, 7, 12, 13, 14, 15})
    assert str(plan).startswith("not tied to CPUs, but kept to 4-7,12-15: they are fewer than the 8 cores")
    tied = plan_threads(topology, None, 3, "on")
    assert (tied.team, tied.nodes) == ((4, 5, 6), ()) and tied.rest == frozenset(range(16)) - {4, 5, 6}
    five = plan_threads(topology, None, 5, "on")
    assert five.nodes == (0, 1) and set(five.team[:4]) == {4, 5, 6, 7}
    granted = plan_threads(topology, 4.0)
    assert (granted.num_threads, granted.team, granted.home) == (4, (), plan.home)


def test_a_node_with_too_few_cores_is_passed_over(tmp_path: Path) -> None:
    topology = read_topology({0, 1, 2, 3, 4, 8}, two_sockets(tmp_path))
    assert plan_threads(topology, None, 2).home == {0, 1, 2, 3, 8}


def test_big_and_little_cores(tmp_path: Path) -> None:
    topology = read_topology(range(8), big_little(tmp_path))
    assert [core.capacity for core in topology.cores] == [160] * 4 + [530] * 2 + [1024] * 2
    plan = plan_threads(topology, None)
    assert (plan.num_threads, plan.team, plan.rest) == (4, (4, 5, 6, 7), {0, 1, 2, 3})
    assert plan_threads(topology, None, 6).free == "more threads than the 4 cores"


def test_container_with_a_mask_and_part_of_a_cpu(tmp_path: Path) -> None:
    topology = read_topology({2, 3, 10}, two_sockets(tmp_path))
    assert [core.cpus for core in topology.cores] == [(2, 10), (3,)] and topology.nodes == (0,)
    plan = plan_threads(topology, 1.5)
    assert (plan.num_threads, plan.team) == (2, ())
    assert plan.free == "the container grants 1.5 of 3 CPUs' time"
    assert plan_threads(topology, 0.4).num_threads == 1
    assert usable_cores(topology, 64.0) == 2
    assert plan_threads(topology, 3.0).team == (2, 3)


def test_unpinned_threads_of_two_nodes_still_spread_their_weights(tmp_path: Path) -> None:
    topology = read_topology(range(16), two_sockets(tmp_path))
    for plan in (plan_threads(topology, 6.0), plan_threads(topology, None, pin="off"), plan_threads(topology, None, 9)):
        assert (plan.team, plan.home, plan.nodes) == ((), frozenset(), (0, 1))


def test_the_option(tmp_path: Path) -> None:
    topology = read_topology({0, 1}, two_core_vm(tmp_path))
    forced = plan_threads(topology, 1.0, 2, "on")
    assert (forced.team, forced.rest) == ((0, 1), {0, 1})
    assert plan_threads(topology, None, 1, "off").team == ()
    assert plan_threads(topology, None, 3, "on").team == ()


def test_no_files_at_all(tmp_path: Path) -> None:
    """As on a Mac, or where /sys is hidden: every CPU counts."""
    topology = read_topology({0, 1, 5}, tmp_path / "absent")
    assert topology == CpuTopology((Core((0,)), Core((1,)), Core((5,))), {0: 0})


def test_some_files(tmp_path: Path) -> None:
    write_cpu(tmp_path, 0, package=0, core=3)
    write_cpu(tmp_path, 1, package=0, core=3)
    write_cpu(tmp_path, 2, package=1, core=3)
    write_cpu(tmp_path, 3, siblings="broken, list")
    topology = read_topology(range(5), tmp_path)
    assert [core.cpus for core in topology.cores] == [(0, 1), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8\n", (0, 1, 2, 8)), ("5", (5,)), ("", ()), ("a-b", ()), ("1-", (1,)), ("3,", ())],
)
def test_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
