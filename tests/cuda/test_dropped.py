"""What waits for a busy GPU when nobody holds it any more: other threads of Python go on meanwhile,
among them the one that it waits for."""

import pytest
from test_cuda import run

DROPPED = """
MIB = 1 << 20

class Freed(threading.Thread):
    '''Frees the engines once what is dropped waits for them.'''

    def run(self):
        time.sleep(0.3)
        lib.fakecuda_hold_host_engines(0)

def stuck():
    '''A communicator, and an operation on its engines that does not end.'''
    comm = offcore.Communicator(backend="cuda", ranks=2, timeout=30)
    inp, out = comm.window(32 * MIB), comm.window(32 * MIB)
    assert comm.all_to_all(out, inp).wait().own_copy == "engines"
    lib.fakecuda_hold_host_engines(1)
    handle = comm.all_to_all(out, inp)
    Freed().start()
    return comm, handle

def check_ended():
    '''It waited until its engines were idle, and gave up nothing.'''
    assert not any(live().values()), live()
"""


@pytest.mark.parametrize("last", ["comm", "handle"])
def test_a_communicator(last: str) -> None:
    code = """
    comm, handle = stuck()
    if sys.argv[1] == "comm":
        del handle
        del comm
    else:
        del comm
        del handle
    check_ended()
    """
    assert run(code, last, prelude=DROPPED) == ""


def test_a_communicator_as_an_exception_passes() -> None:
    """The error that is under way stays the same."""
    code = """
    def fail():
        comm, handle = stuck()
        raise KeyError("a step failed")

    try:
        fail()
    except KeyError as error:
        assert error.args == ("a step failed",)
        del error
    check_ended()
    """
    assert run(code, prelude=DROPPED) == ""


def test_a_communicator_as_the_interpreter_ends() -> None:
    code = """
    import builtins
    builtins.kept = stuck()
    """
    assert run(code, prelude=DROPPED) == ""


def test_a_communicator_in_a_child() -> None:
    """Which destroys nothing, and waits for nothing."""
    code = """
    comm, handle = stuck()
    child = os.fork()
    if child == 0:
        del comm, handle
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8
    del comm, handle
    check_ended()
    """
    assert run(code, prelude=DROPPED) == ""
