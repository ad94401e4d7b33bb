"""Linux network namespaces and interfaces, by system calls: what os and socket lack.

Everything here works for an unprivileged user inside a user namespace of its own (see `enter`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from offcore.errors import Error, error

Made = TypeVar("Made")

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

# What makes hosts of namespaces and the network between them, and what it is a part of.
TOOLS = {"unshare": "util-linux", "ip": "iproute2", "nft": "nftables"}
# What may keep users from namespaces: with which value, and one that allows them.
_SYSCTLS = (
    ("kernel.unprivileged_userns_clone", 0, 1),
    ("kernel.apparmor_restrict_unprivileged_userns", 1, 0),
    *((f"user.max_{kind}_namespaces", 0, 10_000) for kind in ("user", "net", "mnt", "pid")),
)
# What a packet larger than the wire's needs: segmentation on sending, merging on receiving.
OFFLOADS = (
    "tx-generic-segmentation",
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
    "tx-udp-segmentation",
    "tx-gso-list",
    "rx-gro",
    "rx-gro-list",
)


def _checked(what: str, result: int) -> None:
    if result < 0:
        failure = ctypes.get_errno()
        raise error("driver", f"{what}: {os.strerror(failure)}")


def die_with_parent() -> None:
    """To be called in a child before it executes: it is killed when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter_command() -> list[str]:
    """The words that run a command as root of namespaces of its own, where all it makes and starts
    ends with it. Raises unavailable."""
    if shutil.which("unshare") is None:
        raise error("unavailable", "namespaces need unshare: install util-linux")
    flags = ("--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc")
    return ["unshare", *flags, "--kill-child"]


def not_installed() -> str | None:
    """Which of the tools is missing, and what to install. None where all are there."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool} is not installed: install {package}"
    return None


def refused() -> str | None:
    """Why hosts made of namespaces cannot be had here: what is not installed, or what this kernel
    or container keeps from this user. None where they can."""
    if missing := not_installed():
        return missing
    try:
        wanted = "ip link add name one type veth peer name other && nft list tables"
        command = [*enter_command(), "sh", "-c", wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (Error, OSError, subprocess.SubprocessError) as failure:
        return str(failure)
    if done.returncode == 0:
        return None
    said = done.stderr.strip() or f"unshare ended with status {done.returncode}"
    return f"{said}; {denied_by()}"


def denied_by(folder: Path = Path("/proc/sys")) -> str:
    """What keeps namespaces from this user, as far as the kernel tells, and what to do about it."""
    found = []
    for name, denies, allows in _SYSCTLS:
        try:
            value = int((folder / name.replace(".", "/")).read_text())
        except (OSError, ValueError):  # this kernel has none such
            continue
        if value == denies:
            found.append(f"{name} is {value} (as root: sysctl -w {name}={allows})")
    return "; ".join(found) or (
        "no sysctl denies it, so a container or a security module does: allow it to make user, "
        "network, mount and PID namespaces (docker: --privileged)"
    )


@contextlib.contextmanager
def inside(words: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in namespaces of its own. Nothing of it is left when the context ends,
    nor when this process does, however that ends."""
    with subprocess.Popen(
        [*enter_command(), *words], preexec_fn=die_with_parent, text=True, **more
    ) as child:

        def end(number: int, _: object) -> None:
            child.kill()
            raise SystemExit(128 + number)

        ending = (signal.SIGTERM, signal.SIGHUP)
        before = {one: signal.signal(one, end) for one in ending}
        try:
            yield child
        finally:
            child.kill()
            for one, handler in before.items():
                signal.signal(one, handler)


def current() -> int:
    """A descriptor of this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def switch(namespace_fd: int) -> None:
    """Moves this thread into a network namespace."""
    _checked("cannot enter a network namespace", _libc.setns(namespace_fd, _CLONE_NEWNET))


@contextlib.contextmanager
def within(namespace_fd: int) -> Iterator[None]:
    """This thread's stay in another network namespace: sockets made there remain there."""
    home = current()
    try:
        switch(namespace_fd)
        yield
    finally:
        switch(home)
        os.close(home)


def made_within(namespace_fd: int, make: Callable[[], Made]) -> Made:
    """What `make` returns there."""
    with within(namespace_fd):
        return make()


def create() -> int:
    """A descriptor of a new, empty network namespace, which lives as long as that is open or
    something runs in it."""
    home = current()
    try:
        _checked("cannot make a network namespace", _libc.unshare(_CLONE_NEWNET))
        return current()
    finally:
        switch(home)
        os.close(home)


class Link:
    """An interface of this thread's network namespace, by ioctl."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def _control(self, request: int, data: bytes, family: int = socket.AF_INET) -> bytes:
        with socket.socket(family, socket.SOCK_DGRAM) as handle:
            try:
                return fcntl.ioctl(handle, request, data)
            except OSError as failure:
                what = f"interface {self._name.decode()}: request {request:#x}"
                raise error("driver", f"{what}: {failure.strerror}") from None

    def _request(self, rest: bytes) -> bytes:
        return struct.pack("16s24s", self._name, rest)

    def up(self) -> None:
        flags = struct.unpack_from("16xh", self._control(0x8913, self._request(b"")))[0]
        self._control(0x8914, self._request(struct.pack("h", flags | 1)))

    def address(self, ipv4: str, mask: str) -> None:
        for request, value in ((0x8916, ipv4), (0x891C, mask)):
            packed = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value))
            self._control(request, self._request(packed))

    def address6(self, ipv6: str, bits: int) -> None:
        index = socket.if_nametoindex(self._name.decode())
        packed = struct.pack("16sIi", socket.inet_pton(socket.AF_INET6, ipv6), bits, index)
        self._control(0x8916, packed, socket.AF_INET6)

    def route(self, ipv4: str, mask: str, gateway: str = "") -> None:
        """All of a network leaves by this interface, through the gateway if there is one."""
        addresses = [
            struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(one or "0.0.0.0"))
            for one in (ipv4, gateway, mask)
        ]
        flags = 1 | (2 if gateway else 0) | (4 if mask == "255.255.255.255" else 0)
        name = ctypes.create_string_buffer(self._name)
        packed = struct.pack(
            "L16s16s16sHhLPhPLLH", 0, *addresses, flags, 0, 0, 0, 0, ctypes.addressof(name), 0, 0, 0
        )
        self._control(0x890B, packed)

    def neighbour(self, ipv4: str, mac: str) -> None:
        """The hardware address of a neighbour, for good."""
        place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ipv4))
        hardware = struct.pack("H6s8x", 1, bytes.fromhex(mac.replace(":", "")))
        self._control(0x8955, struct.pack("16s16si16s16s", place, hardware, 6, b"", self._name))

    def _ethtool(self, data: array.array[int]) -> None:
        self._control(0x8946, self._request(struct.pack("P", data.buffer_info()[0])))

    def _features(self) -> list[str]:
        """The names of what this kernel can turn on and off, in its order."""
        info = array.array("B", struct.pack("IIQI", 0x37, 0, 1 << 4, 0))
        self._ethtool(info)
        count = struct.unpack_from("16xI", info)[0]
        strings = array.array("B", struct.pack("III", 0x1B, 4, count) + bytes(32 * count))
        self._ethtool(strings)
        names = strings.tobytes()[12:]
        return [names[32 * i : 32 * i + 32].split(b"\0")[0].decode() for i in range(count)]

    def set_features(self, wanted: dict[str, bool]) -> None:
        """Turns offloads on and off; names that this kernel has not are passed over."""
        names = self._features()
        valid = [0] * (-(-len(names) // 32))
        on = list(valid)
        for place, name in enumerate(names):
            if name in wanted:
                valid[place // 32] |= 1 << place % 32
                on[place // 32] |= wanted[name] << place % 32
        pairs = [number for pair in zip(valid, on, strict=True) for number in pair]
        packed = struct.pack(f"II{len(pairs)}I", 0x3B, len(valid), *pairs)
        self._ethtool(array.array("B", packed))


def write_sysctl(name: str, value: object) -> None:
    """Sets a value of this thread's network namespace (`net.ipv6.conf.all.disable_ipv6`)."""
    path = Path("/proc/sys", *name.split("."))
    try:
        path.write_text(str(value))
    except OSError as failure:
        raise error("driver", f"cannot set {name}: {failure.strerror}") from None
