"""Sockets: what arrives is typed or dropped; nothing that a peer sends can raise."""

from __future__ import annotations

import asyncio
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from asyncrl_node.messages import (
    Admit,
    Batch,
    BatchGroup,
    Cancel,
    EvaluationDone,
    GroupFailed,
    GroupKey,
    GroupStarted,
    Heartbeat,
    LauncherMessage,
    LauncherReport,
    LearnerMessage,
    LearnerOrder,
    SamplerMessage,
    SamplerOrder,
    StepFinished,
    Stop,
    Take,
    WeightEntry,
    WeightNotice,
    WeightRequest,
    WeightsManifest,
)
from asyncrl_node.transport import channel
from asyncrl_node.transport.channel import (
    AsyncDealer,
    Dealer,
    Peer,
    Router,
    endpoint,
    parse_peer,
)

WAIT_MS = 10_000
ROLES = {"sampler": SamplerMessage, "learner": LearnerMessage, "launcher": LauncherMessage}
UNIONS = [
    SamplerMessage,
    SamplerOrder,
    LearnerMessage,
    LearnerOrder,
    LauncherMessage,
    LauncherReport,
    WeightRequest,
    WeightNotice,
]
ME = Peer("sampler", 0, 0)
GOOD = GroupStarted(GroupKey(3, 0), 5)

encode = msgspec.msgpack.encode


def nested(depth: int) -> bytes:
    """A message whose unknown first field is a list in a list in a list ..."""
    return b"\x82\xa1a" + b"\x91" * depth + b"\x01" + b"\xa4type\xa9Heartbeat"


MALFORMED = {
    "empty": b"",
    "not a map": b"\xff",
    "text": b"hello there",
    "cut short": encode(GOOD)[:-1],
    "with something behind it": encode(GOOD) + b"\x00",
    "no tag": encode({"key": [1, 0], "version": 1}),
    "unknown tag": encode({"type": "Evil", "key": [1, 0]}),
    "a tag that is a number": encode({"type": 1}),
    "unknown field": encode({"type": "GroupStarted", "key": [1, 0], "version": 1, "x": 1}),
    "missing field": encode({"type": "GroupStarted", "key": [1, 0]}),
    "wrong type": encode({"type": "GroupStarted", "key": [1, 0], "version": "1"}),
    "wrong kind": encode({"type": "GroupFailed", "key": [1, 0], "kind": "x", "reason": ""}),
    "short key": encode({"type": "GroupStarted", "key": [1], "version": 1}),
    "another role's": encode(Take(1, 0, 4)),
    "another direction's": encode(Cancel(GroupKey(1, 0))),
    "bad text": encode(GroupFailed(GroupKey(1, 0), "engine", "XX")).replace(b"XX", b"\xff\xfe"),
    "deeply nested": nested(100_000),
    "claims four billion": b"\x81\xa4type\xdd\xff\xff\xff\xff",
}


class Net:
    """One address and everything that talks there; closed at once at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.address = endpoint(folder, "scheduler")
        self.context: zmq.Context[Any] = zmq.Context()
        self._ends: list[Any] = []

    def router(self) -> Router[Any, Any]:
        return self._keep(Router(self.context, self.address, ROLES))

    def dealer(self, peer: Peer) -> Dealer[Any, Any]:
        return self._keep(Dealer(self.context, self.address, peer, SamplerOrder))

    def raw(self, identity: bytes) -> zmq.Socket[bytes]:
        """Make a peer that sends whatever it likes."""
        socket = self._keep(self.context.socket(zmq.DEALER))
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self.address)
        return socket

    def monitor(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        return self._keep(socket.get_monitor_socket())

    def close(self) -> None:
        for end in self._ends:
            getattr(end, "socket", end).close(linger=0)
        self.context.term()

    def _keep(self, end: Any) -> Any:
        self._ends.append(end)
        return end


@pytest.fixture
def net() -> Iterator[Net]:
    with tempfile.TemporaryDirectory(prefix="ch-", dir="/tmp") as folder:
        net = Net(Path(folder))
        yield net
        net.close()


@pytest.fixture
def router(net: Net) -> Router[Any, Any]:
    return net.router()


def next_of(end: Any) -> Any:
    """Wait for the next good message of a Dealer or a Router."""
    while (received := end.receive()) is None:
        assert end.socket.poll(WAIT_MS), "nothing came"
    return received


def wait_for(monitor: zmq.Socket[bytes], event: int) -> None:
    while True:
        assert monitor.poll(WAIT_MS), f"no event {event}"
        if recv_monitor_message(monitor)["event"] == event:
            return


# -- what is dropped -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_router_drops_and_counts_what_is_malformed(
    net: Net, router: Router[Any, Any], payload: bytes
) -> None:
    raw = net.raw(ME.identity())
    raw.send(payload)
    raw.send(encode(GOOD))
    assert next_of(router) == (ME, GOOD)
    assert router.num_malformed == 1


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"sampler",
        b"sampler-0",
        b"sampler-x-0",
        b"sampler-0-0-0",
        b"sampler--1-0",
        b"stranger-0-0",
        b"SAMPLER-0-0",
        b"\xff\xfe-0-0",
        "sampler-\u00b2-0".encode(),
        b"-" * 200,
        b"9" * 255,
    ],
)
def test_a_router_drops_and_counts_foreign_identities(
    net: Net, router: Router[Any, Any], identity: bytes
) -> None:
    net.raw(identity).send(encode(GOOD))
    while router.num_malformed == 0:
        assert router.socket.poll(WAIT_MS)
        assert router.receive() is None
    net.dealer(ME).send(GOOD)
    assert next_of(router) == (ME, GOOD)
    assert router.num_malformed == 1


def test_a_router_drops_a_message_in_several_frames(net: Net, router: Router[Any, Any]) -> None:
    raw = net.raw(ME.identity())
    raw.send_multipart([encode(GOOD), encode(GOOD)])
    raw.send_multipart([b"", encode(GOOD)])
    raw.send(encode(GOOD))
    assert next_of(router) == (ME, GOOD)
    assert router.receive() is None
    assert router.num_malformed == 2


def test_each_role_may_send_its_own_messages_only(net: Net, router: Router[Any, Any]) -> None:
    learner = net.raw(b"learner-0-0")
    learner.send(encode(GOOD))
    learner.send(encode(Take(1, 0, 4)))
    assert next_of(router) == (Peer("learner"), Take(1, 0, 4))
    sampler = net.raw(b"sampler-2-1")
    sampler.send(encode(Take(1, 0, 4)))
    sampler.send(encode(GOOD))
    assert next_of(router) == (Peer("sampler", 2, 1), GOOD)
    assert router.num_malformed == 2


def test_a_dealer_drops_and_counts_what_is_malformed(net: Net, router: Router[Any, Any]) -> None:
    dealer = net.dealer(ME)
    dealer.send(GOOD)
    assert next_of(router) == (ME, GOOD)
    for payload in MALFORMED.values():
        if payload != MALFORMED["another direction's"]:
            router.socket.send_multipart([ME.identity(), payload])
    router.send(ME, Stop())
    assert next_of(dealer) == Stop()
    assert dealer.num_malformed == len(MALFORMED) - 1
    assert dealer.receive() is None


def test_an_oversized_message_never_arrives_and_the_line_goes_on(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1 << 16)
    router = net.router()
    raw = net.raw(ME.identity())
    monitor = net.monitor(raw)
    raw.send(encode(GOOD))
    assert next_of(router) == (ME, GOOD)
    raw.send(encode(GroupFailed(GroupKey(1, 0), "engine", "x" * (1 << 16))))
    wait_for(monitor, zmq.EVENT_DISCONNECTED)
    wait_for(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    raw.send(encode(GroupStarted(GroupKey(4, 0), 6)))
    assert next_of(router) == (ME, GroupStarted(GroupKey(4, 0), 6))
    assert router.receive() is None


# -- peers that are not there yet, or no more ----------------------------------------------------


def test_messages_wait_for_the_first_word_and_arrive_in_order(
    net: Net, router: Router[Any, Any]
) -> None:
    orders = [Cancel(GroupKey(number, 0)) for number in range(20)]
    for order in orders[:10]:
        router.send(ME, order)
    assert router.has_waiting(ME)
    assert not router.knows(ME)
    dealer = net.dealer(ME)
    other = net.dealer(Peer("sampler", 0, 1))
    other.send(GOOD)
    assert next_of(router) == (Peer("sampler", 0, 1), GOOD)
    dealer.send(GOOD)
    assert next_of(router) == (ME, GOOD)
    assert router.knows(ME)
    assert not router.has_waiting(ME)
    for order in orders[10:]:
        router.send(ME, order)
    assert [next_of(dealer) for _ in orders] == orders
    assert dealer.receive() is None
    assert other.receive() is None, "the orders of one incarnation are not another's"


def test_a_first_word_that_is_malformed_opens_nothing(net: Net, router: Router[Any, Any]) -> None:
    router.send(ME, Stop())
    raw = net.raw(ME.identity())
    raw.send(b"\xff")
    while router.num_malformed == 0:
        assert router.socket.poll(WAIT_MS)
        assert router.receive() is None
    assert raw.poll(0) == 0
    raw.send(encode(GOOD))
    assert next_of(router) == (ME, GOOD)
    assert raw.poll(WAIT_MS)
    assert raw.recv() == encode(Stop())


def test_a_peer_that_is_gone_does_not_raise(net: Net, router: Router[Any, Any]) -> None:
    gone = net.dealer(ME)
    gone.send(GOOD)
    assert next_of(router) == (ME, GOOD)
    monitor = net.monitor(router.socket)
    gone.close()
    wait_for(monitor, zmq.EVENT_DISCONNECTED)
    for number in range(100):
        router.send(ME, Cancel(GroupKey(number, 0)))
    next_one = Peer("sampler", 0, 1)
    alive = net.dealer(next_one)
    alive.send(GOOD)
    assert next_of(router) == (next_one, GOOD)
    router.send(next_one, Stop())
    assert next_of(alive) == Stop()


def test_what_was_sent_before_a_close_still_arrives(net: Net, router: Router[Any, Any]) -> None:
    dealer = net.dealer(ME)
    dealer.send(GOOD)
    assert next_of(router) == (ME, GOOD)
    dealer.send(GroupStarted(GroupKey(4, 0), 6))
    dealer.close()
    assert next_of(router) == (ME, GroupStarted(GroupKey(4, 0), 6))
    listener = net.dealer(Peer("sampler", 1))
    listener.send(GOOD)
    assert next_of(router) == (Peer("sampler", 1), GOOD)
    router.send(Peer("sampler", 1), Stop())
    router.close()
    assert next_of(listener) == Stop()


def test_nothing_is_lost_or_reordered_in_a_burst(net: Net, router: Router[Any, Any]) -> None:
    dealer = net.dealer(ME)
    sent = [GroupStarted(GroupKey(number, 0), number) for number in range(1000)]
    for message in sent:
        dealer.send(message)
    assert [next_of(router) for _ in sent] == [(ME, message) for message in sent]
    orders = [Cancel(GroupKey(number, 0)) for number in range(1000)]
    for order in orders:
        router.send(ME, order)
    assert [next_of(dealer) for _ in orders] == orders


def test_an_async_dealer_waits_keeps_order_and_drops_what_is_malformed(
    net: Net, router: Router[Any, Any]
) -> None:
    async def talk() -> tuple[list[Any], int]:
        own: zmq.asyncio.Context = zmq.asyncio.Context()
        dealer: AsyncDealer[Any, Any] = AsyncDealer(own, net.address, ME, SamplerOrder)
        dealer.send(GOOD)
        waiting = asyncio.create_task(dealer.receive())
        assert await asyncio.to_thread(next_of, router) == (ME, GOOD)
        assert not waiting.done()
        router.send(ME, Cancel(GroupKey(1, 0)))
        router.socket.send_multipart([ME.identity(), MALFORMED["deeply nested"]])
        router.socket.send_multipart([ME.identity(), MALFORMED["unknown tag"]])
        router.send(ME, Stop())
        async with asyncio.timeout(WAIT_MS / 1000):
            received = [await waiting, await dealer.receive()]
        dealer.close()
        own.destroy(linger=0)
        return received, dealer.num_malformed

    assert asyncio.run(talk()) == ([Cancel(GroupKey(1, 0)), Stop()], 2)


# -- names and addresses -------------------------------------------------------------------------


@given(
    role=st.sampled_from(["sampler", "learner", "launcher"]),
    number=st.integers(0, 1 << 40),
    incarnation=st.integers(0, 1 << 40),
)
def test_an_identity_round_trips(role: str, number: int, incarnation: int) -> None:
    peer = Peer(role, number, incarnation)
    assert parse_peer(peer.identity()) == peer


@settings(max_examples=500)
@given(identity=st.binary(max_size=255))
@example(identity=b"a-" + b"9" * 250 + b"-1")
def test_no_identity_raises(identity: bytes) -> None:
    peer = parse_peer(identity)
    assert peer is None or (peer.number >= 0 and peer.incarnation >= 0)


def test_an_address_that_is_too_long_for_a_socket_is_our_own_bug() -> None:
    assert endpoint(Path("/tmp/x"), "weights") == "ipc:///tmp/x/weights"
    with pytest.raises(AssertionError, match="/long"):
        endpoint(Path("/long" * 30), "weights")


# -- fuzzing: the real receive loop on a scripted socket -----------------------------------------


class ScriptedSocket:
    """Hands out what it was given, then has nothing more."""

    def __init__(self, received: list[list[bytes]]) -> None:
        self._received = received

    def setsockopt(self, option: int, value: object) -> None: ...

    def bind(self, address: str) -> None: ...

    def connect(self, address: str) -> None: ...

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._received:
            raise zmq.Again
        return self._received.pop(0)

    def recv(self, flags: int) -> bytes:
        return self.recv_multipart(flags)[-1]


class ScriptedContext:
    def __init__(self, received: list[list[bytes]]) -> None:
        self._socket = ScriptedSocket(received)

    def socket(self, kind: int) -> ScriptedSocket:
        return self._socket


def drain(end: Any) -> list[Any]:
    received = []
    while (message := end.receive()) is not None:
        received.append(message)
    return received


def feed(union: Any, payloads: list[bytes]) -> None:
    """Let a Router and a Dealer of this union receive the payloads: each is typed or counted."""
    kinds = typing.get_args(union)
    frames = [[ME.identity(), payload] for payload in payloads]
    router: Router[Any, Any] = Router(ScriptedContext(list(frames)), "", {"sampler": union})
    received = [message for _, message in drain(router)]
    assert all(isinstance(message, kinds) for message in received)
    assert len(received) + router.num_malformed == len(payloads)
    dealer: Dealer[Any, Any] = Dealer(ScriptedContext(list(frames)), "", ME, union)
    assert len(drain(dealer)) + dealer.num_malformed == len(payloads)


@settings(max_examples=250)
@given(
    union=st.sampled_from(UNIONS),
    payloads=st.lists(st.binary(max_size=120), min_size=5, max_size=20),
)
def test_arbitrary_bytes_never_raise(union: Any, payloads: list[bytes]) -> None:
    feed(union, payloads)


SEEDS: list[tuple[Any, bytes]] = [
    (SamplerMessage, encode(GOOD)),
    (SamplerMessage, encode(GroupFailed(GroupKey(1, 0), "environment", "because"))),
    (SamplerMessage, encode(Heartbeat(0, 0, 3, 7, 1, False, 1 << 40))),
    (SamplerOrder, encode(Admit(GroupKey(9, 2), 1, 2, 3, 1 << 62))),
    (LearnerMessage, encode(StepFinished(3, {"time/total": 1.5, "async/staleness_max": 2.0}))),
    (LearnerOrder, encode(Batch(1, 2, (BatchGroup(GroupKey(1, 0), 2, 0, 64, 1),), True, 0.5))),
    (LearnerOrder, encode(EvaluationDone(1, 0.25))),
    (
        WeightNotice,
        encode(WeightsManifest(256, (WeightEntry("w", "float32", (8, 8), 0, 256),), 1 << 63)),
    ),
]


EDITS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 1), st.binary(max_size=1)), min_size=1, max_size=4
)


def damaged(payload: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Replace, insert or take out a few bytes."""
    for place, num_removed, inserted in edits:
        place %= len(payload) + 1
        payload = payload[:place] + inserted + payload[place + num_removed :]
    return payload


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(edits=st.lists(EDITS, min_size=5, max_size=5))
def test_damaged_messages_never_raise(edits: list[list[tuple[int, int, bytes]]]) -> None:
    for union, payload in SEEDS:
        feed(union, [damaged(payload, edit) for edit in edits])


@pytest.mark.parametrize("union", UNIONS)
def test_nesting_and_false_lengths_never_raise(union: Any) -> None:
    tags = [kind.__name__.encode() for kind in typing.get_args(union)]
    lengths = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    payloads = [nested(depth) for depth in (10, 1_000, 50_000)]
    for tag in tags:
        head = b"\x82\xa4type" + bytes([0xA0 + len(tag)]) + tag
        payloads += [head + b"\xa1a" + b"\x81\xa1b" * 20_000]
        for field in (b"\xa6groups", b"\xa7entries", b"\xa7metrics", b"\xa4text", b"\xa3key"):
            payloads += [head + field + length for length in lengths]
    feed(union, payloads)
