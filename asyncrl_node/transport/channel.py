"""Typed ZeroMQ sockets over ipc://: what can be sent on each is decided by its type.

A DEALER names itself "role-number-incarnation"; the ROUTER at the other end decodes by role.
Reliability: between two live processes of one box, ipc never loses or reorders. Queues have no
high-water mark, because a ROUTER at its mark drops silently; what can be queued is bounded by the
slots (a group has a handful of messages in its life). A peer that is gone is an event of the
launcher's, never discovered here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

MAX_MESSAGE_BYTES = 16 << 20
MAX_SOCKET_PATH_BYTES = 107
_MALFORMED = (msgspec.MsgspecError, RecursionError)
"""What decoding can raise; a message nested thousands deep is the second."""

log = logging.getLogger(__name__)

Received = TypeVar("Received")
Sent = TypeVar("Sent", bound=msgspec.Struct)


class Peer(NamedTuple):
    """Who is at the other end."""

    role: str
    number: int = 0
    incarnation: int = 0

    def identity(self) -> bytes:
        """Encode as a socket identity."""
        return f"{self.role}-{self.number}-{self.incarnation}".encode()


def parse_peer(identity: bytes) -> Peer | None:
    """Decode a socket identity; None if it is not one of ours."""
    parts = identity.decode("ascii", "replace").split("-")
    if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
        return None
    return Peer(parts[0], int(parts[1]), int(parts[2]))


def endpoint(sockets_dir: Path, name: str) -> str:
    """Address of a socket; the directory is short, since unix paths end at 107 bytes."""
    path = str(sockets_dir / name)
    assert len(path.encode()) <= MAX_SOCKET_PATH_BYTES, path
    return f"ipc://{path}"


def _prepare(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # whoever starts before the one that binds
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class _Line(Generic[Received, Sent]):
    """What both kinds of DEALER share: who we are, how messages are written and read."""

    def __init__(self, context: zmq.Context[Any], address: str, me: Peer, received: object) -> None:
        self.socket = context.socket(zmq.DEALER)
        _prepare(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, me.identity())
        self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: Any = msgspec.msgpack.Decoder(received)
        self.num_malformed = 0

    def send(self, message: Sent) -> None:
        """Queue a message; returns at once (there is no high-water mark to wait at)."""
        self.socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Close; queued messages get one second to leave."""
        self.socket.close()

    def _decode(self, payload: bytes) -> Received | None:
        """Decode a message; None for a malformed one, which is counted and dropped."""
        try:
            decoded: Received = self._decoder.decode(payload)
        except _MALFORMED as error:
            self.num_malformed += 1
            log.warning("dropped a malformed message: %s", error)
            return None
        return decoded


class Dealer(_Line[Received, Sent]):
    """One end of a private line to a ROUTER. `receive` never blocks."""

    def receive(self) -> Received | None:
        """Return the next message, or None if there is none now."""
        while True:
            try:
                payload = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if (decoded := self._decode(payload)) is not None:
                return decoded


class AsyncDealer(_Line[Received, Sent]):
    """A Dealer for an asyncio loop, made with an asyncio context: `receive` waits."""

    async def receive(self) -> Received:
        """Wait for the next message; ended by the peer or by cancellation."""
        while True:
            if (decoded := self._decode(await self.socket.recv())) is not None:
                return decoded


class Router(Generic[Received, Sent]):
    """The end that many DEALERs connect to. What a peer may send is decided by its role.

    A message for a peer that has not connected yet is kept until it says its first word.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, received_by_role: Mapping[str, Any]
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _prepare(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[str, Any] = {
            r: msgspec.msgpack.Decoder(t) for r, t in received_by_role.items()
        }
        self._waiting: defaultdict[Peer, list[bytes]] = defaultdict(list)
        self._heard: set[Peer] = set()
        self.num_malformed = 0

    def send(self, peer: Peer, message: Sent) -> None:
        """Queue a message; returns at once. A peer that has gone away is forgotten silently."""
        payload = self._encoder.encode(message)
        if peer not in self._heard:
            self._waiting[peer].append(payload)
            return
        self._send(peer, payload)

    def knows(self, peer: Peer) -> bool:
        """Say whether a peer has said its first word."""
        return peer in self._heard

    def has_waiting(self, peer: Peer) -> bool:
        """Say whether messages wait for a peer that has not said its first word."""
        return bool(self._waiting.get(peer))

    def receive(self) -> tuple[Peer, Received] | None:
        """Return the next message and its sender, or None if there is none now."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = parse_peer(frames[0])
            decoder = None if peer is None else self._decoders.get(peer.role)
            if peer is None or decoder is None or len(frames) != 2:
                self._drop(f"{len(frames)} frames from {frames[0]!r}")
                continue
            try:
                message = decoder.decode(frames[1])
            except _MALFORMED as error:
                self._drop(f"{peer}: {error}")
                continue
            self._meet(peer)
            return peer, message

    def close(self) -> None:
        """Close; queued messages get one second to leave."""
        self.socket.close()

    def _send(self, peer: Peer, payload: bytes) -> None:
        try:
            self.socket.send_multipart([peer.identity(), payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.info("%s is gone; a message for it was dropped", peer)

    def _meet(self, peer: Peer) -> None:
        if peer in self._heard:
            return
        self._heard.add(peer)
        for payload in self._waiting.pop(peer, []):
            self._send(peer, payload)

    def _drop(self, what: str) -> None:
        self.num_malformed += 1
        log.warning("dropped a malformed or foreign message: %s", what)
