"""The learner's other thread: it answers messages while the main thread trains.

    main thread --commands--> courier <--> scheduler (orders), samplers (the weight transaction)

It also serves the tests of pairs (weights.py), when a sampler says hello.

A lease must be granted within milliseconds, also in the middle of a long training step; torch
releases the interpreter inside its kernels, so this thread gets its turn. It decides nothing:
PublishingCore does.

Waits of the main thread: `next_order` is ended by the scheduler; `wait_until_free` by the last
lease going back, or by the overdue rule. Both also end with an error of this thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any, assert_never

import zmq

from asyncrl_node.core.publishing import (
    AtFault,
    BufferFree,
    PublishingCore,
    PublishingEvent,
    PublishingInstruction,
    RequestWrite,
    Tick,
    ToSampler,
    WriteDone,
)
from asyncrl_node.core.transport import Decided, EndRun, EndTest, PrepareTest, WriteTestPattern
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.weights import LearnerWeights
from asyncrl_node.messages import (
    LearnerOrder,
    LearnerReport,
    SamplerFault,
    Warned,
    WeightNotice,
    WeightRequest,
    WeightsHello,
)
from asyncrl_node.transport.channel import Dealer, Peer, Router, endpoint

log = logging.getLogger(__name__)

_TICK_MS = 100


class _End:
    """The command that ends the thread."""


_Scheduler = Dealer[LearnerOrder, LearnerReport]
_Command = LearnerReport | RequestWrite | WriteDone | _End


class Courier:
    """Messages of the learner, on a thread of their own."""

    def __init__(self, core: PublishingCore, sockets_dir: Path, weights: LearnerWeights) -> None:
        self._core = core
        self._weights = weights
        self._sockets_dir = sockets_dir
        self._zmq = zmq.Context()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[LearnerOrder | BaseException] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[BufferFree | BaseException] = queue.SimpleQueue()
        self._wake = self._zmq.socket(zmq.PAIR)
        self._wake.setsockopt(zmq.SNDHWM, 0)
        self._wake.bind("inproc://wake")
        self._incarnations: dict[int, int] = {}
        self._thread = threading.Thread(target=self._main, name="courier", daemon=True)
        self._thread.start()

    # -- the main thread's side --------------------------------------------------------------

    def send(self, message: LearnerReport) -> None:
        """Send to the scheduler; returns at once."""
        self._command(message)

    def next_order(self) -> LearnerOrder:
        """Wait for the scheduler's next order."""
        order = self._orders.get()
        if isinstance(order, BaseException):
            raise order
        return order

    def wait_until_free(self) -> None:
        """Wait until the buffer may be written: no lease is out."""
        self._command(RequestWrite())
        free = self._free.get()
        if isinstance(free, BaseException):
            raise free

    def announce(
        self, version: int, weights_hash: int, canary_logprobs: tuple[float, ...] = ()
    ) -> None:
        """Say that the buffer holds `version`, complete."""
        self._command(WriteDone(version, weights_hash, canary_logprobs))

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._command(_End())
        self._thread.join()
        self._wake.close()
        self._zmq.term()

    def _command(self, command: _Command) -> None:
        self._commands.put(command)
        # Without a thread at the other end this would wait for ever; its error waits in the queues.
        with contextlib.suppress(zmq.Again):
            self._wake.send(b"", zmq.NOBLOCK)

    # -- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._orders.put(error)
            self._free.put(error)

    def _serve(self) -> None:
        woken = self._zmq.socket(zmq.PAIR)
        woken.connect("inproc://wake")
        scheduler: _Scheduler = Dealer(
            self._zmq, endpoint(self._sockets_dir, "scheduler"), Peer("learner"), LearnerOrder
        )
        samplers: Router[WeightRequest, WeightNotice] = Router(
            self._zmq, endpoint(self._sockets_dir, "weights"), {"sampler": WeightRequest}
        )
        poller = zmq.Poller()
        for socket in (woken, scheduler.socket, samplers.socket):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                poller.poll(_TICK_MS)
                while woken.poll(0):
                    woken.recv()
                    command = self._commands.get()
                    if isinstance(command, _End):
                        return
                    if isinstance(command, RequestWrite | WriteDone):
                        self._handle(command, scheduler, samplers)
                    else:
                        scheduler.send(command)
                while (order := scheduler.receive()) is not None:
                    self._orders.put(order)
                while (received := samplers.receive()) is not None:
                    peer, request = received
                    if (peer.number, peer.incarnation) != (request.sampler, request.incarnation):
                        log.warning("dropped a request of %s in another's name: %s", peer, request)
                        continue
                    if isinstance(request, WeightsHello):
                        known = self._incarnations.get(peer.number, 0)
                        self._incarnations[peer.number] = max(known, peer.incarnation)
                    self._handle(request, scheduler, samplers)
                self._handle(Tick(), scheduler, samplers)
        finally:
            woken.close()
            scheduler.close()
            samplers.close()

    def _handle(
        self,
        event: PublishingEvent,
        scheduler: _Scheduler,
        samplers: Router[Any, WeightNotice],
    ) -> None:
        for instruction in self._core.handle(event, time.monotonic()):
            self._obey(instruction, scheduler, samplers)

    def _obey(
        self,
        instruction: PublishingInstruction,
        scheduler: _Scheduler,
        samplers: Router[Any, WeightNotice],
    ) -> None:
        match instruction:
            case ToSampler():
                number = instruction.sampler
                peer = Peer("sampler", number, self._incarnations[number])
                samplers.send(peer, instruction.message)
            case BufferFree():
                self._free.put(instruction)
            case AtFault():
                log.error("%s: %s", instruction.name, instruction.story)
                scheduler.send(SamplerFault(*instruction))
            case PrepareTest():
                self._handle(self._weights.prepare_test(instruction), scheduler, samplers)
            case WriteTestPattern():
                self._handle(self._weights.write_pattern(instruction), scheduler, samplers)
            case EndTest():
                self._weights.end_test(instruction)
            case Decided(kind="host"):
                log.warning("%s", instruction.text)
                scheduler.send(Warned(instruction.text))
            case Decided():
                log.info("%s", instruction.text)
            case EndRun():
                raise RunFault(instruction.name, instruction.story)
            case _:
                assert_never(instruction)
