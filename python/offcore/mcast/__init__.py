"""Broadcast, all-gather and reduce-scatter of host memory across hosts, over UDP multicast.

    comm = offcore.mcast.Communicator("10.0.0.1:29400", rank=rank, world_size=4)
    comm.broadcast(weights, root=0).wait()        # numpy arrays and CPU torch tensors
    comm.all_gather(out, shard).wait(timeout=5.0)
    comm.reduce_scatter(part, gradients).wait()   # beside the others; shares go over TCP

Every gathered byte crosses each link once; what the network loses is fetched from the left
neighbour in a ring over TCP. docs/mcast.md explains the protocol and what is and is not protected.
"""

from offcore.mcast.communicator import Communicator, Handle, Result

__all__ = ["Communicator", "Handle", "Result"]
