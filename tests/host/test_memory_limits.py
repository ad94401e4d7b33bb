"""Limits of memory: those of control groups, wherever a process finds them."""

from pathlib import Path

import pytest

from offcore import _core

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
MOUNTED_V1 = "memory rw,memory"  # source, options
MOUNTED_V2 = "cgroup2 rw,nsdelegate"


class Host:
    """A /proc and a /sys of 16 GiB of which 12 are available, without a limit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def enter(self, groups: str, *mounts: tuple[str, str, str, str]) -> None:
        """`mounts`: the group that is mounted, where, the kind, and source and options."""
        self.write("proc/self/cgroup", groups)
        lines = [
            f"{number} 24 0:{number} {top} {at} rw,relatime shared:9 - {kind} {rest}\n"
            for number, (top, at, kind, rest) in enumerate(mounts, 30)
        ]
        self.write("proc/self/mountinfo", "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(lines))

    def limit(self, folder: str, files: tuple[str, ...], *bytes_: object) -> None:
        """The limit, what is used, and how much of that are caches."""
        for file, number in zip(files[:2], bytes_, strict=False):
            self.write(f"{folder}/{file}", f"{number}\n")
        if len(bytes_) > 2:
            self.write(f"{folder}/memory.stat", f"anon 5\n{files[2]} {bytes_[2]}\n")

    def memory(self) -> tuple[float, float]:
        total, available = _core.host_memory(str(self.root))
        return total / GIB, available / GIB


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_control_groups(host: Host) -> None:
    assert host.memory() == (16, 12)


def test_version_2_in_a_namespace(host: Host) -> None:
    host.enter("0::/\n", ("/", "/sys/fs/cgroup", "cgroup2", MOUNTED_V2))
    host.limit("sys/fs/cgroup", V2, 4 * GIB, GIB)
    assert host.memory() == (4, 3)


def test_version_2_without_a_namespace(host: Host) -> None:
    host.enter("0::/user/job/step\n", ("/", "/sys/fs/cgroup", "cgroup2", MOUNTED_V2))
    host.limit("sys/fs/cgroup/user/job/step", V2, "max", GIB)
    host.limit("sys/fs/cgroup/user/job", V2, 6 * GIB, GIB)  # of a group above
    host.limit("sys/fs/cgroup/user", V2, 8 * GIB, 6 * GIB)  # with less to be had
    assert host.memory() == (6, 2)


def test_version_2_where_only_its_own_group_is_mounted(host: Host) -> None:
    for group in ("/docker/abc", "/../../other"):
        host.enter(f"0::{group}\n", ("/docker/abc", "/sys/fs/cgroup", "cgroup2", MOUNTED_V2))
        host.limit("sys/fs/cgroup", V2, 2 * GIB, GIB)
        assert host.memory() == (2, 1)


def test_version_1(host: Host) -> None:
    host.enter(
        "5:cpu,cpuacct:/else\n4:memory:/slurm/job\n0::/\n",
        ("/", "/sys/fs/cgroup/cpu", "cgroup", "cgroup rw,cpu,cpuacct"),
        ("/", "/sys/fs/cgroup/memory", "cgroup", MOUNTED_V1),
        ("/", "/sys/fs/cgroup/unified", "cgroup2", MOUNTED_V2),
    )
    host.limit("sys/fs/cgroup/cpu", V1, 1, 1)
    host.limit("sys/fs/cgroup/memory", V1, 2**63 - 4096, GIB)
    host.limit("sys/fs/cgroup/memory/slurm/job", V1, 4 * GIB, GIB)
    assert host.memory() == (4, 3)


def test_caches_of_files_are_available(host: Host) -> None:
    for kind, files, mounted in (("cgroup2", V2, MOUNTED_V2), ("cgroup", V1, MOUNTED_V1)):
        group = "0::/job\n" if kind == "cgroup2" else "3:memory:/job\n"
        host.enter(group, ("/", f"/sys/{kind}", kind, mounted))
        host.limit(f"sys/{kind}/job", files, 4 * GIB, 4 * GIB, 3 * GIB)
        assert host.memory() == (4, 3)


def test_a_group_over_its_limit_has_nothing(host: Host) -> None:
    host.enter("0::/job\n", ("/", "/sys/fs/cgroup", "cgroup2", MOUNTED_V2))
    host.limit("sys/fs/cgroup/job", V2, GIB, 2 * GIB)
    assert host.memory() == (1, 0)
