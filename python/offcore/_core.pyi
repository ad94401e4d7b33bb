import enum
from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray

def env(name: str) -> str:
    """The environment variable's value, or its default."""

def env_variables() -> list[tuple]: ...

def now_ns() -> int:
    """The monotonic clock that real-time backends use."""

class Counts:
    """What a program costs in commands."""

    @property
    def commands(self) -> int:
        """Of every kind, on engine queues."""

    @property
    def copies(self) -> int:
        """Copies and swaps."""

    @property
    def engines(self) -> int:
        """Engine queues in use."""

    @property
    def syncs(self) -> int:
        """Signals on engine queues, each row counted."""

    @property
    def bytes(self) -> int:
        """Bytes written by copies and swaps."""

class Program:
    """DMA commands of every queue of every rank. str() is its text form."""

    @overload
    @staticmethod
    def parse(text: str) -> Program:
        """Raises invalid, naming line and column, for malformed text."""

    @overload
    @staticmethod
    def parse(text: bytes) -> Program: ...

    @property
    def text(self) -> str: ...

    def __str__(self) -> str: ...

    def __eq__(self, other: object | None) -> bool: ...

    @property
    def op(self) -> str: ...

    @property
    def machine(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    @property
    def mode(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    @property
    def native(self) -> bool: ...

    @property
    def flag_words(self) -> int: ...

    @property
    def flag_span(self) -> int: ...

    @property
    def buffers(self) -> list[tuple]:
        """Rows of (name, kind, bytes), without the flags."""

    @property
    def queues(self) -> list[tuple]:
        """Rows of (rank, index or "caller", command texts)."""

    def counts(self) -> Counts: ...

    __hash__: None = None

def verify(program: Program) -> None:
    """
    Raises verify, naming rule, queue and command, for a program that breaks a rule.
    """

class Topology(enum.Enum):
    full = 0

    switched = 1

    shared = 2

class FlagHome(enum.Enum):
    host = 0

    peer = 1

class Native:
    @property
    def strided(self) -> bool: ...

    @strided.setter
    def strided(self, arg: bool, /) -> None: ...

    @property
    def bcst_rows(self) -> int: ...

    @bcst_rows.setter
    def bcst_rows(self, arg: int, /) -> None: ...

    @property
    def swap(self) -> bool: ...

    @swap.setter
    def swap(self, arg: bool, /) -> None: ...

    @property
    def strided_flags(self) -> bool: ...

    @strided_flags.setter
    def strided_flags(self, arg: bool, /) -> None: ...

class Limits:
    @property
    def copy_bytes_max(self) -> int: ...

    @copy_bytes_max.setter
    def copy_bytes_max(self, arg: int, /) -> None: ...

    @property
    def pitch_bytes_max(self) -> int: ...

    @pitch_bytes_max.setter
    def pitch_bytes_max(self, arg: int, /) -> None: ...

    @property
    def rows_max(self) -> int: ...

    @rows_max.setter
    def rows_max(self, arg: int, /) -> None: ...

    @property
    def swap_align(self) -> int: ...

    @swap_align.setter
    def swap_align(self, arg: int, /) -> None: ...

    @property
    def bcst_align(self) -> int: ...

    @bcst_align.setter
    def bcst_align(self, arg: int, /) -> None: ...

    @property
    def swap_scratch_bytes(self) -> int: ...

    @swap_scratch_bytes.setter
    def swap_scratch_bytes(self, arg: int, /) -> None: ...

class Links:
    @property
    def link_gbps(self) -> float: ...

    @link_gbps.setter
    def link_gbps(self, arg: float, /) -> None: ...

    @property
    def egress_gbps(self) -> float: ...

    @egress_gbps.setter
    def egress_gbps(self, arg: float, /) -> None: ...

    @property
    def ingress_gbps(self) -> float: ...

    @ingress_gbps.setter
    def ingress_gbps(self, arg: float, /) -> None: ...

    @property
    def host_gbps(self) -> float: ...

    @host_gbps.setter
    def host_gbps(self, arg: float, /) -> None: ...

    @property
    def local_gbps(self) -> float: ...

    @local_gbps.setter
    def local_gbps(self, arg: float, /) -> None: ...

    @property
    def engine_gbps(self) -> float: ...

    @engine_gbps.setter
    def engine_gbps(self, arg: float, /) -> None: ...

    @property
    def strided_gbps(self) -> float: ...

    @strided_gbps.setter
    def strided_gbps(self, arg: float, /) -> None: ...

    @property
    def bcst_gbps(self) -> float: ...

    @bcst_gbps.setter
    def bcst_gbps(self, arg: float, /) -> None: ...

    @property
    def swap_gbps(self) -> float: ...

    @swap_gbps.setter
    def swap_gbps(self, arg: float, /) -> None: ...

class Cost:
    @property
    def control_ns(self) -> float: ...

    @control_ns.setter
    def control_ns(self, arg: float, /) -> None: ...

    @property
    def doorbell_ns(self) -> float: ...

    @doorbell_ns.setter
    def doorbell_ns(self, arg: float, /) -> None: ...

    @property
    def doorbell_growth(self) -> float: ...

    @doorbell_growth.setter
    def doorbell_growth(self, arg: float, /) -> None: ...

    @property
    def wake_ns(self) -> float: ...

    @wake_ns.setter
    def wake_ns(self, arg: float, /) -> None: ...

    @property
    def fetch_ns(self) -> float: ...

    @fetch_ns.setter
    def fetch_ns(self, arg: float, /) -> None: ...

    @property
    def setup_ns(self) -> float: ...

    @setup_ns.setter
    def setup_ns(self, arg: float, /) -> None: ...

    @property
    def issue_ns(self) -> float: ...

    @issue_ns.setter
    def issue_ns(self, arg: float, /) -> None: ...

    @property
    def overlap(self) -> int: ...

    @overlap.setter
    def overlap(self, arg: int, /) -> None: ...

    @property
    def sync_ns(self) -> float: ...

    @sync_ns.setter
    def sync_ns(self, arg: float, /) -> None: ...

    @property
    def poll_ns(self) -> float: ...

    @poll_ns.setter
    def poll_ns(self, arg: float, /) -> None: ...

    @property
    def host_poll_ns(self) -> float: ...

    @host_poll_ns.setter
    def host_poll_ns(self, arg: float, /) -> None: ...

    @property
    def trigger_ns(self) -> float: ...

    @trigger_ns.setter
    def trigger_ns(self, arg: float, /) -> None: ...

class TunedRow:
    def __init__(self) -> None: ...

    @property
    def op(self) -> str: ...

    @op.setter
    def op(self, arg: str, /) -> None: ...

    @property
    def ranks(self) -> int: ...

    @ranks.setter
    def ranks(self, arg: int, /) -> None: ...

    @property
    def in_place(self) -> bool: ...

    @in_place.setter
    def in_place(self, arg: bool, /) -> None: ...

    @property
    def bytes_min(self) -> int: ...

    @bytes_min.setter
    def bytes_min(self, arg: int, /) -> None: ...

    @property
    def bytes_max(self) -> int: ...

    @bytes_max.setter
    def bytes_max(self, arg: int, /) -> None: ...

    @property
    def variant(self) -> str: ...

    @variant.setter
    def variant(self, arg: str, /) -> None: ...

class Machine:
    def __init__(self) -> None: ...

    @property
    def name(self) -> str: ...

    @name.setter
    def name(self, arg: str, /) -> None: ...

    @property
    def vendor(self) -> str: ...

    @vendor.setter
    def vendor(self, arg: str, /) -> None: ...

    @property
    def ranks(self) -> int: ...

    @ranks.setter
    def ranks(self, arg: int, /) -> None: ...

    @property
    def engines_peer(self) -> int: ...

    @engines_peer.setter
    def engines_peer(self, arg: int, /) -> None: ...

    @property
    def engines_host(self) -> int: ...

    @engines_host.setter
    def engines_host(self, arg: int, /) -> None: ...

    @property
    def topology(self) -> Topology: ...

    @topology.setter
    def topology(self, arg: Topology, /) -> None: ...

    @property
    def flags(self) -> FlagHome: ...

    @flags.setter
    def flags(self, arg: FlagHome, /) -> None: ...

    @property
    def native(self) -> Native: ...

    @native.setter
    def native(self, arg: Native, /) -> None: ...

    @property
    def limits(self) -> Limits: ...

    @limits.setter
    def limits(self, arg: Limits, /) -> None: ...

    @property
    def links(self) -> Links: ...

    @links.setter
    def links(self, arg: Links, /) -> None: ...

    @property
    def cost(self) -> Cost: ...

    @cost.setter
    def cost(self, arg: Cost, /) -> None: ...

    @property
    def tuned(self) -> list[TunedRow]: ...

    @tuned.setter
    def tuned(self, arg: Sequence[TunedRow], /) -> None: ...

    @property
    def tuned_version(self) -> str: ...

    @tuned_version.setter
    def tuned_version(self, arg: str, /) -> None: ...

    def check(self) -> None:
        """Raises invalid when a field makes no sense."""

class Phases:
    @property
    def control_ns(self) -> float: ...

    @property
    def schedule_ns(self) -> float: ...

    @property
    def copy_ns(self) -> float: ...

    @property
    def sync_ns(self) -> float: ...

    @property
    def total_ns(self) -> float: ...

def estimate(program: Program, machine: Machine) -> Phases:
    """A program's estimated phases on a machine."""

class Moves:
    @property
    def op(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    @property
    def in_place(self) -> bool: ...

    @property
    def full_exchange(self) -> bool: ...

    @property
    def moves(self) -> list[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
        """
        (dst, src, bytes); a place is (buffer, rank, offset), rank -1 the host.
        """

def moves_all_gather(counts: Sequence[int], in_place: bool = False) -> Moves: ...

def moves_all_to_all(ranks: int, counts: Sequence[int], in_place: bool = False) -> Moves: ...

def moves_broadcast(ranks: int, root: int, nbytes: int, in_place: bool = False) -> Moves: ...

def moves_scatter(root: int, counts: Sequence[int]) -> Moves: ...

def moves_gather(root: int, counts: Sequence[int]) -> Moves: ...

def moves_batch(ranks: int, buffers: Sequence[tuple[str, str, int]], moves: Sequence[tuple[tuple[int, int, int], tuple[int, int, int], int]]) -> Moves:
    """
    buffers: (name, kind, bytes), their ids from 1 on; moves: (dst, src, bytes).
    """

class Protocol:
    def __init__(self, entry: bool = True, staged: bool = False) -> None: ...

    def __str__(self) -> str: ...

def variants() -> list[str]:
    """Every variant's name."""

def check_variant(name: str) -> str:
    """The variant's canonical name; raises invalid for an unknown one."""

def variants_of(moves: Moves, protocol: Protocol) -> list[str]:
    """The variants that these moves can have."""

def why_not(moves: Moves, variant: str, protocol: Protocol) -> str:
    """Why the moves cannot have the variant; empty when they can."""

def lower(moves: Moves, variant: str, machine: Machine, protocol: Protocol) -> Program: ...

def legalize(program: Program, machine: Machine) -> Program: ...

def plan(moves: Moves, variant: str, machine: Machine, protocol: Protocol) -> Program:
    """lower, legalize and verify."""

def choose(moves: Moves, total_bytes: int, machine: Machine, protocol: Protocol) -> tuple:
    """(variant, whether the tuned table said so)."""

def probe_backends() -> list[tuple]:
    """Rows of (name, available, reason)."""

class Fault:
    """What the simulator is to do wrong (core/backend/sim)."""

    def __init__(self, kind: str, rank: int = 0, queue: object = 0, nth: int = 0, factor: float = 1.0, ns: int = 0) -> None: ...

    @property
    def kind(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def nth(self) -> int: ...

    @property
    def factor(self) -> float: ...

    @property
    def ns(self) -> int: ...

    def __repr__(self) -> str: ...

def random_fault(seed: int, program: Program) -> Fault:
    """A fault that a launch of this program meets."""

class CommandTime:
    """When a command ran, from the launch on."""

    @property
    def queue(self) -> int: ...

    @property
    def command(self) -> int: ...

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...

    @property
    def phases(self) -> Phases: ...

class RunReport:
    """What a session's run took; phases of the last launch."""

    @property
    def time_ns(self) -> int: ...

    @property
    def phases(self) -> Phases: ...

    @property
    def commands(self) -> list[CommandTime]: ...

    @property
    def timestamps_ns(self) -> list[int]: ...

    @property
    def times_ns(self) -> list[int]: ...

class Session:
    """A backend with all ranks in this process."""

    def __init__(self, backend: str, machine: Machine, ranks: int, phantom: bool = False, seed: int = 0, faults: Sequence[Fault] = []) -> None: ...

    def run(self, program: Program, buffers: dict = {}, timeout_s: float = 10.0, repeat: int = 1, epoch: int = 0, checked: bool = True) -> RunReport:
        """
        Runs the program `repeat` times on copies of the arrays (uint8, one a rank, one for a
        host buffer; None or an absent name: zeros) and copies back what it left in them.
        Unless `checked` is false the program is verified first.
        """

    @property
    def now_ns(self) -> int: ...

class Window:
    @property
    def ranks(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def phantom(self) -> bool: ...

    def view(self, rank: int, offset: int, nbytes: int) -> object: ...

    def region(self, offset: int, nbytes: int) -> Region: ...

class Region:
    """The same bytes of a window on every rank."""

    @property
    def window(self) -> Window: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

def fill(array: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], seed: int, offset: int = 0) -> None:
    """
    Fills a uint8 array with bytes [offset, offset + len) of the stream `seed`.
    """

def wrong_bytes(array: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: int, nbytes: int, seed: int, source_offset: int = 0) -> int:
    """
    How many of array[offset : offset + nbytes] differ from the stream's bytes from
    source_offset on.
    """

class Result:
    @property
    def op(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    @property
    def mode(self) -> str: ...

    @property
    def native(self) -> bool: ...

    @property
    def staged(self) -> bool: ...

    @property
    def tuned(self) -> bool: ...

    @property
    def armed_ahead(self) -> bool: ...

    @property
    def in_place(self) -> bool: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def counts(self) -> Counts: ...

    @property
    def time_ns(self) -> int: ...

    @property
    def phases(self) -> Phases: ...

class Pending:
    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> Result: ...

def open_communicator(backend: str, machine: Machine, *, ranks: int, store: str, rank: int, world_size: int, phantom: bool, seed: int, faults: Sequence[Fault], timeout_s: float) -> Communicator: ...

class Communicator:
    @property
    def ranks(self) -> int: ...

    @property
    def local_ranks(self) -> list[int]: ...

    @property
    def now_ns(self) -> int: ...

    def window(self, nbytes: int, timeout_s: float) -> Window: ...

    def start(self, op: str, out: object, inp: object | None, counts: Sequence[int], root: int, variant: str, protocol: str, lane: int, keep: object | None, timeout_s: float) -> Pending: ...

    def barrier(self, timeout_s: float) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...
