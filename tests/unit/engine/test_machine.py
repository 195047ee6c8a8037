"""Processors and memory as containers limit them: both cgroup versions, nested limits, and none."""

import os
from pathlib import Path

import pytest

from moesaic.engine.machine import read_machine

GB = 10**9


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal:       64000000 kB\nMemFree:  1000 kB\nMemAvailable:   50000000 kB\n")
    write(proc / "self" / "cgroup", "0::/\n")
    cgroup.mkdir()
    return proc, cgroup


def test_no_limits(roots):
    proc, cgroup = roots
    machine = read_machine(proc=proc, cgroup=cgroup)
    assert machine.num_cpus == len(os.sched_getaffinity(0))
    assert machine.total_bytes == 65_536_000_000
    assert machine.available_bytes == 51_200_000_000
    assert "MemAvailable" in machine.memory_source


def test_version_2_limits_count_idle_page_cache_as_free(roots):
    proc, cgroup = roots
    write(cgroup / "memory.max", f"{8 * GB}\n")
    write(cgroup / "memory.current", f"{5 * GB}\n")
    write(cgroup / "memory.stat", f"anon {3 * GB}\ninactive_file {GB // 4}\nactive_file {3 * GB // 4}\n")
    write(cgroup / "cpu.max", "150000 100000\n")
    machine = read_machine(proc=proc, cgroup=cgroup)
    assert machine.total_bytes == 8 * GB
    assert machine.available_bytes == 4 * GB
    assert machine.num_cpus == 1
    assert "quota of 1.5" in machine.cpu_source or len(os.sched_getaffinity(0)) == 1
    assert str(cgroup) in machine.memory_source


def test_version_2_max_is_no_limit(roots):
    proc, cgroup = roots
    write(cgroup / "memory.max", "max\n")
    write(cgroup / "cpu.max", "max 100000\n")
    machine = read_machine(proc=proc, cgroup=cgroup)
    assert machine.available_bytes == 51_200_000_000
    assert machine.cpu_source == "processor affinity"


def test_a_parents_limit_binds(roots):
    proc, cgroup = roots
    write(proc / "self" / "cgroup", "0::/user/job\n")
    write(cgroup / "user" / "memory.max", f"{2 * GB}\n")
    write(cgroup / "user" / "memory.current", f"{GB}\n")
    write(cgroup / "user" / "job" / "memory.max", "max\n")
    assert read_machine(proc=proc, cgroup=cgroup).available_bytes == GB


def test_version_1_limits(roots):
    proc, cgroup = roots
    write(proc / "self" / "cgroup", "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", f"{6 * GB}\n")
    write(cgroup / "memory" / "memory.usage_in_bytes", f"{GB}\n")
    write(cgroup / "memory" / "memory.stat", "total_inactive_file 0\n")
    write(cgroup / "cpu" / "cpu.cfs_quota_us", "100000\n")
    write(cgroup / "cpu" / "cpu.cfs_period_us", "100000\n")
    machine = read_machine(proc=proc, cgroup=cgroup)
    assert machine.available_bytes == 5 * GB
    assert machine.num_cpus == 1


def test_version_1_huge_number_and_minus_one_are_no_limit(roots):
    proc, cgroup = roots
    write(proc / "self" / "cgroup", "5:memory:/\n3:cpu:/\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(cgroup / "cpu" / "cpu.cfs_period_us", "100000\n")
    machine = read_machine(proc=proc, cgroup=cgroup)
    assert machine.total_bytes == 65_536_000_000
    assert machine.cpu_source == "processor affinity"


def test_this_machine():
    machine = read_machine()
    assert 1 <= machine.num_cpus <= (os.cpu_count() or 1)
    assert 0 < machine.available_bytes <= machine.total_bytes
