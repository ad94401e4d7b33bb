"""Collectives of the ranks on one host."""

from offcore.comm.communicator import Communicator
from offcore.comm.handle import Handle, View
from offcore.comm.programs import show_program, variants
from offcore.comm.registration import Registration
from offcore.comm.requests import Put, Requests, RequestStats
from offcore.comm.result import Result
from offcore.comm.window import Window

__all__ = [
    "Communicator",
    "Handle",
    "Put",
    "Registration",
    "RequestStats",
    "Requests",
    "Result",
    "View",
    "Window",
    "show_program",
    "variants",
]
