"""The calls of offcore/device.cuh for Triton kernels, by inline PTX: docs/gpu-driven.md.

    from offcore.device import triton as requests

    @triton.jit
    def exchange(port, ...):                        # port: comm.requests(...).port()
        tl.store(...)                               # what is to be sent
        ticket = requests.put_signal(port, peer, dst, src, chunk, chunks)
        fault = requests.wait(port, peer, dst, count)
        tl.load(...)                                # what has come

A call is made by the whole program: its threads meet in it, and one of them acts. So all of them
have to make it, under conditions that are the same for all, as scalars are. It sends what the
program has stored before; behind `wait` it sees what was sent. Other programs' data: `tl.atomic_*`
with release and acquire between them and this one.

Tickets are numbers above 0, faults (1 to 6, as device.cuh's) below; waits return a fault, 0: none.
Not for warp-specialised kernels. `test`, `received` and `put_bytes` of device.cuh are missing here.
"""

# ruff: noqa: SIM102, SIM108  (Triton's branches are no expressions)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["flush", "put", "put_signal", "signal", "wait", "wait_sent"]

# As core/proxy/ring.h has them.
_PUT: tl.constexpr = tl.constexpr(1)
_PUT_SIGNAL: tl.constexpr = tl.constexpr(2)
_SIGNAL: tl.constexpr = tl.constexpr(3)
_TIMEOUT: tl.constexpr = tl.constexpr(1)
_FULL: tl.constexpr = tl.constexpr(2)
_INVALID: tl.constexpr = tl.constexpr(3)
_CHUNK_BITS: tl.constexpr = tl.constexpr(21)
_CHUNKS_END: tl.constexpr = tl.constexpr(1 << 21)
_CLOSED: tl.constexpr = tl.constexpr(1 << 62)
_BUFFERS: tl.constexpr = tl.constexpr(64)
# Fields of a RequestPort, in bytes.
_SLOTS: tl.constexpr = tl.constexpr(0)
_TAIL: tl.constexpr = tl.constexpr(8)
_HEAD: tl.constexpr = tl.constexpr(16)
_SENT: tl.constexpr = tl.constexpr(32)
_RECEIVED: tl.constexpr = tl.constexpr(40)
_FAULT: tl.constexpr = tl.constexpr(48)
_FAULT_HERE: tl.constexpr = tl.constexpr(56)
_COMPLAINTS: tl.constexpr = tl.constexpr(64)
_START: tl.constexpr = tl.constexpr(72)
_SCHEDULE: tl.constexpr = tl.constexpr(80)
_LIMIT_NS: tl.constexpr = tl.constexpr(88)
_SLOTS_LOG2: tl.constexpr = tl.constexpr(96)
_RANK: tl.constexpr = tl.constexpr(100)
_RANKS: tl.constexpr = tl.constexpr(104)
_BUFFER_COUNT: tl.constexpr = tl.constexpr(108)
_FIRST: tl.constexpr = tl.constexpr(112)
_PERIOD: tl.constexpr = tl.constexpr(368)

# All that the program's threads have written is the first one's to release.
_MEET: tl.constexpr = tl.constexpr("""
{
    fence.acq_rel.gpu;
    bar.sync 0;
    mov.u32 $0, 0;
}
""")

# One thread stores: $1 the place, $2 the word.
_STORE: tl.constexpr = tl.constexpr("""
{
    .reg .pred %others;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %others, %thread, 0;
    @!%others st.release.sys.global.u64 [$1], $2;
    mov.u32 $0, 0;
}
""")

# One thread complains: $1 the place.
_COMPLAIN: tl.constexpr = tl.constexpr("""
{
    .reg .pred %others;
    .reg .u32 %word;
    mov.u32 %word, %tid.x;
    setp.ne.u32 %others, %word, 0;
    mov.u32 %word, 1;
    @!%others st.release.sys.global.u32 [$1], %word;
    mov.u32 $0, 0;
}
""")

# One thread waits until the word at $1 is $2 to $2 + 2^61 - 1, an engine has failed (the words at
# $3, $4 and, of the host, $5), or $7 ns are over: then it complains at $6. $0: the fault, which all
# threads get.
_SPIN: tl.constexpr = tl.constexpr("""
{
    .reg .pred %p, %q;
    .reg .u32 %fault, %looks, %bits, %found;
    .reg .u64 %value, %began, %now, %far;
    mov.u32 %fault, 0;
    mov.u32 %looks, 0;
    mov.u64 %far, 0x2000000000000000;
    mov.u32 %bits, %tid.x;
    setp.ne.u32 %p, %bits, 0;
    @%p bra MEET;
    mov.u64 %began, %globaltimer;
LOOK:
    ld.acquire.sys.global.u64 %value, [$1];
    sub.u64 %value, %value, $2;
    setp.lt.u64 %p, %value, %far;
    @%p bra MEET;
    add.u32 %looks, %looks, 1;
    and.b32 %bits, %looks, 63;
    setp.ne.u32 %p, %bits, 0;
    @%p bra LOOK;
    ld.acquire.sys.global.u64 %value, [$3];
    cvt.u32.u64 %fault, %value;
    setp.ne.u32 %p, %fault, 0;
    @%p bra FAILED;
    ld.acquire.sys.global.u64 %value, [$4];
    cvt.u32.u64 %fault, %value;
    setp.ne.u32 %p, %fault, 0;
    @%p bra FAILED;
    and.b32 %bits, %looks, 4095;
    setp.ne.u32 %p, %bits, 0;
    @%p bra CLOCK;
    ld.acquire.sys.global.u64 %value, [$5];
    cvt.u32.u64 %fault, %value;
    setp.ne.u32 %p, %fault, 0;
    @%p bra FAILED;
CLOCK:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %began;
    setp.le.u64 %p, %now, $7;
    @%p bra LOOK;
    mov.u32 %fault, 1;
    st.release.sys.global.u32 [$6], %fault;
    bra MEET;
FAILED:
    ld.acquire.sys.global.u64 %value, [$1];
    sub.u64 %value, %value, $2;
    setp.lt.u64 %p, %value, %far;
    @%p mov.u32 %fault, 0;
MEET:
    mov.u32 %found, 0;
    and.b32 %bits, %fault, 1;
    setp.ne.u32 %p, %bits, 0;
    bar.red.or.pred %q, 0, %p;
    @%q or.b32 %found, %found, 1;
    and.b32 %bits, %fault, 2;
    setp.ne.u32 %p, %bits, 0;
    bar.red.or.pred %q, 0, %p;
    @%q or.b32 %found, %found, 2;
    and.b32 %bits, %fault, 4;
    setp.ne.u32 %p, %bits, 0;
    bar.red.or.pred %q, 0, %p;
    @%q or.b32 %found, %found, 4;
    mov.u32 $0, %found;
}
""")


@triton.jit
def put(port, peer, dst, src, chunk, chunks):
    """Copies these chunks of buffer `src` to the same place of the peer's buffer `dst`."""
    return _push(port, _PUT, peer, dst, src, chunk, chunks)


@triton.jit
def put_signal(port, peer, dst, src, chunk, chunks):
    """The same; then adds one to what the peer has received from this rank in `dst`."""
    return _push(port, _PUT_SIGNAL, peer, dst, src, chunk, chunks)


@triton.jit
def signal(port, peer, dst):
    """That alone, behind all earlier requests for the peer."""
    return _push(port, _SIGNAL, peer, dst, 0, 0, 0)


@triton.jit
def wait(port, peer, buffer, count):
    """Until `count` signals have come from the peer in that buffer."""
    fault = _INVALID
    if _is_rank(port, peer) & (buffer >= 0) & (buffer < _number(port, _BUFFER_COUNT)):
        at = _word(port, _RECEIVED) + 8 * (tl.cast(peer, tl.int64) * _BUFFERS + buffer)
        fault = _spin(port, peer, at, count, _TIMEOUT)
    else:
        _complain(port, _INVALID)
    return fault


@triton.jit
def wait_sent(port, peer, ticket):
    """Until the put's source may be written again."""
    ticket = tl.cast(ticket, tl.int64)
    fault = _INVALID
    if ticket < 0:
        fault = tl.cast(-ticket, tl.int32)
    elif _is_rank(port, peer):
        at = _word(port, _SENT) + 8 * tl.cast(peer, tl.int64)
        fault = _spin(port, _number(port, _RANK), at, ticket, _TIMEOUT)
    else:
        _complain(port, _INVALID)
    return fault


@triton.jit
def flush(port, peer):
    """The same of all requests for the peer that were pushed before."""
    known = _is_rank(port, peer) & (peer != _number(port, _RANK))
    if (_word(port, _START) == 0) | (known == 0):
        ticket = _push(port, _PUT, peer, 0, 0, 0, 0)
    else:
        ticket = _count(port, peer)
    return wait_sent(port, peer, ticket)


@triton.jit
def _word(port, field):
    return tl.load((tl.cast(port, tl.int64) + field).to(tl.pointer_type(tl.int64)))


@triton.jit
def _number(port, field):
    return tl.load((tl.cast(port, tl.int64) + field).to(tl.pointer_type(tl.int32)))


@triton.jit
def _is_rank(port, peer):
    return (peer >= 0) & (peer < _number(port, _RANKS))


@triton.jit
def _count(port, peer):
    """Armed: how many requests for the peer were started."""
    at = (_word(port, _START) + 8 * tl.cast(peer, tl.int64)).to(tl.pointer_type(tl.int64))
    return tl.atomic_add(at, 0, sem="relaxed", scope="sys")


@triton.jit
def _spin(port, peer, at, count, complaint):
    faults = _word(port, _FAULT)
    own = faults + 8 * tl.cast(_number(port, _RANK), tl.int64)
    other = faults + 8 * tl.cast(peer, tl.int64)
    told = _word(port, _COMPLAINTS) + 4 * complaint
    here, limit = _word(port, _FAULT_HERE), _word(port, _LIMIT_NS)
    return tl.inline_asm_elementwise(
        _SPIN,
        "=r,l,l,l,l,l,l,l,~{memory}",
        [at, tl.cast(count, tl.int64), own, other, here, told, limit],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _complain(port, fault):
    at = _word(port, _COMPLAINTS) + 4 * fault
    tl.inline_asm_elementwise(
        _COMPLAIN, "=r,l,~{memory}", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _push(port, op, peer, dst, src, chunk, chunks):
    peer = tl.cast(peer, tl.int64)
    chunk = tl.cast(chunk, tl.int64)
    chunks = tl.cast(chunks, tl.int64)
    buffers = _number(port, _BUFFER_COUNT)
    known = _is_rank(port, peer) & (peer != _number(port, _RANK))
    known = known & (dst >= 0) & (dst < buffers) & (src >= 0) & (src < buffers)
    known = known & (chunk >= 0) & (chunk < _CHUNKS_END) & (chunks >= 0) & (chunks < _CHUNKS_END)
    ticket = tl.cast(-_INVALID, tl.int64)
    if known:
        head = (tl.cast(op, tl.int64) << 60) | (peer << 54)
        head = head | (tl.cast(dst, tl.int64) << 48) | (tl.cast(src, tl.int64) << 42)
        word = head | (chunk << _CHUNK_BITS) | chunks
        tl.inline_asm_elementwise(_MEET, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)
        if _word(port, _START) == 0:
            ticket = _enqueue(port, word)
        else:
            ticket = _start(port, peer, word)
    if ticket == -_INVALID:
        _complain(port, _INVALID)
    return ticket


@triton.jit
def _enqueue(port, word):
    """By the ring."""
    log2 = tl.cast(_number(port, _SLOTS_LOG2), tl.int64)
    tail = _word(port, _TAIL).to(tl.pointer_type(tl.int64))
    position = tl.atomic_add(tail, 1, sem="relaxed", scope="gpu")
    slots = tl.cast(1, tl.int64) << log2
    rank = _number(port, _RANK)
    fault = _spin(port, rank, _word(port, _HEAD), position + 1 - slots, _FULL)
    ticket = -tl.cast(tl.where(fault == _TIMEOUT, _FULL, fault), tl.int64)
    if fault == 0:
        lap = (1 - ((position >> log2) & 1)) << 63
        at = _word(port, _SLOTS) + 8 * (position & (slots - 1))
        tl.inline_asm_elementwise(
            _STORE, "=r,l,l,~{memory}", [at, word | lap], dtype=tl.int32, is_pure=False, pack=1
        )
        ticket = position + 1
    return ticket


@triton.jit
def _start(port, peer, word):
    """Armed: the peer's next request lies in its queue already."""
    at = (_word(port, _START) + 8 * peer).to(tl.pointer_type(tl.int64))
    period = _number(port, _PERIOD + 4 * peer)
    first = _word(port, _SCHEDULE) + 8 * tl.cast(_number(port, _FIRST + 4 * peer), tl.int64)
    before = _count(port, peer)
    ticket = tl.cast(0, tl.int64)
    while ticket == 0:
        if (before >= _CLOSED) | (before < 0):
            told = _word(port, _FAULT_HERE).to(tl.pointer_type(tl.int64))
            ticket = -tl.load(told, volatile=True)
        else:
            ticket = tl.cast(-_INVALID, tl.int64)
            if period > 0:
                if _word(first, 8 * (before % period)) == word:
                    found = tl.atomic_cas(at, before, before + 1, sem="release", scope="sys")
                    ticket = tl.where(found == before, before + 1, 0)
                    before = found
    return ticket
