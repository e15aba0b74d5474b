"""What the executor needs of a device: marks on its timeline, streams of its own, and memory that it can copy from.

On CUDA a mark is an event of the compute stream, and a lane's thread has a stream of its own. Without a device the
CPU takes its place: threads are the streams, and what has been called has been done.
"""

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

_LOG = logging.getLogger(__name__)

Mark = torch.cuda.Event | None
"""A moment on the compute stream."""


class ComputeDevice(ABC):
    """A device with its streams."""

    device: torch.device
    pinned: bool
    """Whether host memory for copies is pinned; False where it cannot be had."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return the moment that the compute stream is at."""

    @abstractmethod
    def enter_lane(self) -> None:
        """Give the calling thread a stream of its own."""

    @abstractmethod
    def after(self, mark: Mark) -> contextlib.AbstractContextManager[None]:
        """Run what is inside on the calling thread's stream, after a moment; it has ended when the block ends."""

    @abstractmethod
    def host_memory(self, size: int) -> torch.Tensor:
        """Return host memory for copies, one byte an element: pinned where it can be."""

    def device_memory(self, size: int) -> torch.Tensor:
        """Return device memory, one byte an element."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class CpuDevice(ComputeDevice):
    """The CPU in the place of a device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pinned = False

    def mark(self) -> Mark:
        """Return None: all that was called before has been done."""
        return None

    def enter_lane(self) -> None:
        """Do nothing: the thread is the stream."""

    def after(self, mark: Mark) -> contextlib.AbstractContextManager[None]:
        """Run what is inside."""
        return contextlib.nullcontext()

    def host_memory(self, size: int) -> torch.Tensor:
        """Return plain memory: nothing is pinned without a device."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")


class CudaDevice(ComputeDevice):
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = True
        self._streams = _ThreadStreams()

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def enter_lane(self) -> None:
        """Make the thread's stream."""
        torch.cuda.set_device(self.device)
        self._streams.mine = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Run what is inside on the thread's stream behind the event, and wait until the device has done it."""
        stream = self._streams.mine
        with torch.cuda.stream(stream):
            if mark is not None:
                stream.wait_event(mark)
            yield
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(stream)
        end.synchronize()

    def host_memory(self, size: int) -> torch.Tensor:
        """Return pinned memory, or plain memory where it cannot be had, and say so in the log."""
        return pinned_or_plain(self, size)


class _ThreadStreams(threading.local):
    """The stream of each thread."""

    mine: torch.cuda.Stream


def pinned_or_plain(device: ComputeDevice, size: int) -> torch.Tensor:
    """Return pinned memory; where the system refuses, plain memory, and `device.pinned` turns False."""
    if device.pinned and size:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            device.pinned = False
            _LOG.warning(
                "pinned memory: %d bytes cannot be had (%s); copies go through plain memory and are slower: raise the "
                "limit on locked memory (ulimit -l), or plan with fewer layers on the host",
                size,
                " ".join(str(error).split())[:200],
            )
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def compute_device(device: torch.device) -> ComputeDevice:
    """Return the device to run on."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
