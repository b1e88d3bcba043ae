"""The device that candidates are measured on, through TVM's RPC: a server here, or one that a tracker knows."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CodaError
from .packed import REPEAT

Array = npt.NDArray[Any]


class DeviceError(CodaError):
    """A device that cannot be reached, or a candidate that does not run on it."""


@dataclass
class Device:
    """A connection. Tensors are bytes there: ``[size] uint8``."""

    session: Any
    _loaded: int = field(default=0)

    def load(self, library: bytes) -> Any:
        """A library of ``build`` as a module of the device. Raises DeviceError if it does not load."""
        self._loaded += 1
        name = f"candidate{self._loaded}.so"
        try:
            self.session.upload(bytearray(library), name)
            return self.session.load_module(name)
        except Exception as e:
            raise DeviceError(f"the device does not load a kernel library: {e}") from e

    def put(self, array: Array) -> Any:
        """``array`` on the device."""
        import tvm

        flat = np.ascontiguousarray(array).reshape(-1)
        data = flat if flat.dtype == np.int64 else flat.view(np.uint8)
        return tvm.runtime.tensor(data if data.size else np.zeros(8, np.uint8), self.session.cpu())

    def repeated(self, module: Any, array: Array, copies: int) -> tuple[Any, int]:
        """``copies`` of ``array`` one behind the other, and the bytes from one to the next, which keep its alignment."""
        import tvm

        stride = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        padded = np.zeros(stride, np.uint8)
        padded[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target = tvm.runtime.empty((stride * copies,), "uint8", self.session.cpu())
        module[REPEAT](self.put(padded), target, self.put(np.array([stride, copies], np.int64)))
        return target, stride

    def get(self, tensor: Any, like: Array) -> Array:
        """What ``tensor`` holds, as an array like ``like``."""
        return np.asarray(tensor.numpy()[: like.nbytes].view(like.dtype).reshape(like.shape))

    def call(self, module: Any, function: str, arguments: Sequence[Any]) -> None:
        """Calls a function once. Raises DeviceError if the device does not come back."""
        try:
            module[function](*arguments)
        except Exception as e:
            raise DeviceError(f"a kernel does not run on the device: {e}") from e

    def time(self, module: Any, function: str, arguments: Sequence[Any], repeat: int, number: int = 1) -> float:
        """Seconds of a call, over ``number``: the least of ``repeat``, behind one that does not count. Raises DeviceError as ``call``."""
        try:
            timer = module.time_evaluator(function, self.session.cpu(), number=number, repeat=repeat)
            return float(min(timer(*arguments).results))
        except Exception as e:
            raise DeviceError(f"a kernel does not run on the device: {e}") from e


_ALIGNMENT = 64
_TRIES = 200
_SERVE = (
    "import os, sys\n"
    "from tvm.rpc.server import PopenRPCServerState\n"
    "state = PopenRPCServerState('127.0.0.1', int(sys.argv[1]), int(sys.argv[1]) + 1, silent=True)\n"
    "os.read(0, 1)\n"
    "os._exit(0)\n"
)
"""A server of TVM's that ends with its standard input, which is a pipe from the tuner."""


@contextmanager
def local_device() -> Iterator[Device]:
    """This machine, by a server in a process of its own: a candidate that crashes takes that down and not the tuner."""
    from tvm import rpc

    port = _free_port()
    command = [sys.executable, "-c", _SERVE, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for attempt in range(_TRIES):
                try:
                    session = rpc.connect("127.0.0.1", port)
                    break
                except Exception as e:
                    if attempt + 1 == _TRIES or server.poll() is not None:
                        raise DeviceError(f"TVM's RPC server does not start here (`tvm.rpc`): {e}") from e
                    time.sleep(0.1)
            yield Device(session)
        finally:
            server.terminate()


def tracked_device(tracker: str, key: str, timeout: float = 60.0) -> AbstractContextManager[Device]:
    """A device that an RPC server offers under ``key`` at ``tracker`` (``HOST:PORT``), held while the context is entered.

    Raises DeviceError if there is no tracker; on entering, if it gives no such device within ``timeout`` seconds.
    """
    host, colon, port = tracker.rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise DeviceError(f"'{tracker}' is no address of a tracker: write HOST:PORT")
    try:
        # TVM's own client would try for a minute.
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except OSError as e:
        raise DeviceError(
            f"there is no RPC tracker at {tracker} ({e}): start one with "
            f"`python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {port}`"
        ) from e
    return _requested(host, int(port), key, timeout)


@contextmanager
def _requested(host: str, port: int, key: str, timeout: float) -> Iterator[Device]:
    from tvm import rpc

    connection = rpc.connect_tracker(host, port)
    try:
        end = time.monotonic() + timeout
        while key not in {info["key"].removeprefix("server:") for info in connection.summary()["server_info"]}:
            if time.monotonic() > end:
                raise DeviceError(
                    f"the tracker at {host}:{port} has no device with the key '{key}': start one there with "
                    f"`python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key}`"
                )
            time.sleep(0.5)
        session = connection.request(key, priority=1, session_timeout=_SESSION)
    finally:
        connection.close()
    yield Device(session)


_CONNECT = 10.0
"""Seconds within which a tracker must answer."""
_SESSION = 24 * 3600
"""Seconds after which a server ends a session on its own."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
