"""One end of a socket: whole frames, however their bytes come, and ends of all kinds."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller.call_socket import CallSocket, SocketPayload
from daskps.cluster.sockets import channel, served
from daskps.cluster.sockets.channel import BUFFER_NBYTES, Channel
from daskps.cluster.sockets.frames import CALL, Head, pack_head
from daskps.cluster.sockets.served import ServedChannel, views_of
from daskps.errors import ProtocolError
from tests.cluster.forks import child

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    mine = Channel(here, 30.0)
    yield mine, there
    mine.close()
    there.close()


def trickle(there: socket.socket, data: bytes, sizes: list[int]) -> threading.Thread:
    """Send bytes in pieces of these sizes, from another thread."""

    def run() -> None:
        at = 0
        for size in sizes:
            there.sendall(data[at : at + size])
            at += size
        there.sendall(data[at:])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class FewBytes(socket.socket):
    """Takes and gives few bytes at once, as the kernel does with more than 2 GiB."""

    def sendmsg(self, buffers: Any, *args: Any) -> int:
        return super().send(b"".join(map(bytes, buffers))[:7001])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(buffer, min(nbytes or len(buffer), 7003), flags)


@pytest.mark.parametrize("kind", [socket.socket, FewBytes])
def test_what_is_too_much_for_one_call_goes_in_parts(monkeypatch, kind):
    """A gibibyte at a time, and what the kernel leaves of that."""
    for module in (channel, served):
        monkeypatch.setattr(module, "MOST_NBYTES", 9001)
    here, there = socket.socketpair()
    call_socket = CallSocket(kind(fileno=here.detach()), 30.0)
    host = ServedChannel(kind(fileno=there.detach()), 30.0)
    data = {"w": np.frombuffer(random.Random(0).randbytes(400_000), "u1")}
    slices = (("w", 0, 150_000), ("w", 3, 10), ("w", 150_000, 300_001))
    n = sum(b - a for _, a, b in slices)
    wanted = b"".join(data["w"][a:b].tobytes() for _, a, b in slices)
    said: Any = {"key": b"0", "patience": 30.0, "nbytes": n, "counts": b""}
    template: Any = SimpleNamespace(slices=slices, **said)
    call_socket._templates[template.key] = 0
    thread = threading.Thread(
        target=call_socket.ask, args=(template, SocketPayload(arrays=data))
    )
    thread.start()
    host.lend(memoryview(bytearray(BUFFER_NBYTES)))
    head = host.try_head(waits=True)
    assert head is not None
    found = [bytearray(b - a) for _, a, b in slices]
    views = views_of(found)
    while not host.try_fill(views, waits=True):
        pass
    thread.join(10)
    assert (head.nbytes, b"".join(found)) == (n, wanted)
    answer = [pack_head(head), *found]

    def send() -> None:
        # What a slow caller did not take is sent by whoever has time.
        rest = host.send_some(answer, waits=True)
        while rest and not host.try_send(rest, waits=True):
            pass

    thread = threading.Thread(target=send)
    thread.start()
    assert call_socket.receive_head() == head
    for piece in found:
        again = bytearray(len(piece))
        call_socket.receive_into(again)
        assert again == piece
    thread.join(10)
    call_socket.close()
    host.close()


@pytest.mark.parametrize("n", [0, 1, 65_535])
def test_a_thread_waits_for_few_bytes_of_a_large_body_once(ends, monkeypatch, n):
    """Ten bytes a second on as many sockets would have all threads, for a minute."""
    _, there = ends
    host, waited = ServedChannel(there, 30.0), list[bool]()

    def receive(_: Any, view: memoryview, waits: bool, how: int = 0) -> int:
        waited.append(waits)
        return n

    monkeypatch.setattr(ServedChannel, "_try_receive", receive)
    views = views_of([bytearray(200_000), bytearray(10)])
    assert not host.try_fill(views, waits=True)
    assert waited == [True]
    assert len(views[0]) == 200_000 - n


def test_the_kernel_takes_no_more_than_it_is_about_to_send():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    mine, served = Channel(here, 30.0), ServedChannel(there, 0.2)
    for one in (here, there):
        found = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert found == channel.UNSENT_NBYTES
    mine.close()
    served.close()


@pytest.mark.parametrize("n", [0, 1, 1000, BUFFER_NBYTES - 64, BUFFER_NBYTES, 300_001])
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 1000])
def test_frames_arrive_whole_however_they_are_cut(ends, n, cut):
    mine, there = ends
    body = random.Random(n).randbytes(n)
    frame = pack_head(Head(CALL, n, number=1)) + body
    thread = trickle(there, 2 * frame, [cut, 1, cut])
    for _ in range(2):
        head = mine.receive_head()
        assert (head.nbytes, head.number) == (n, 1)
        found = np.empty(head.nbytes, "u1")
        mine.receive_into(found)
        assert found.tobytes() == body
    mine.end_frame()
    thread.join()


def test_arrays_are_filled_where_they_are(ends):
    mine, there = ends
    arrays = [np.arange(5, dtype="f4"), np.arange(40_000, dtype="f8"), np.ones(1, "i8")]
    other = Channel(there, 30.0)
    thread = threading.Thread(target=other.send, args=([b"head", *arrays],))
    thread.start()
    assert mine.receive_bytes(4) == b"head"
    for array in arrays:
        found = np.empty_like(array)
        mine.receive_into(found)
        assert found.tolist() == array.tolist()
    thread.join()


def test_more_buffers_than_one_call_of_the_kernel_takes(ends, monkeypatch):
    monkeypatch.setattr(channel, "MOST_BUFFERS", 3)
    mine, there = ends
    sent = [bytes([i]) * i for i in range(50)]
    thread = threading.Thread(target=mine.send, args=(sent,))
    thread.start()
    assert Channel(there, 30.0).receive_bytes(sum(range(50))) == b"".join(sent)
    thread.join()


def test_bytes_that_nobody_has_asked_for_are_found(ends):
    mine, there = ends
    there.sendall(pack_head(Head(CALL)) + b"more")
    mine.receive_head()
    with pytest.raises(ProtocolError, match="answer nothing"):
        mine.end_frame()


def test_an_http_client_is_told_from_a_caller(ends):
    mine, there = ends
    there.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: curl\r\n\r\n" * 2)
    with pytest.raises(ProtocolError, match="no frame of a socket"):
        mine.receive_head()


def test_an_end_in_the_middle_of_a_frame(ends):
    mine, there = ends
    there.sendall(pack_head(Head(CALL, 10))[:40])
    there.close()
    with pytest.raises(ConnectionResetError):
        mine.receive_head()


def test_who_stops_within_a_frame_is_given_up(ends):
    mine, there = ends
    there.sendall(pack_head(Head(CALL, 7)) + b"abc")
    mine.set_limits(0.001, 30.0)
    assert mine.receive_head().nbytes == 7
    with pytest.raises(TimeoutError):
        mine.receive_bytes(7)


def test_who_sends_a_byte_now_and_then_is_too_slow(ends):
    mine, there = ends
    mine.set_limits(30.0, 0.0)
    there.sendall(b"a")
    with pytest.raises(TimeoutError, match="too slow"):
        mine.receive_bytes(2)


def test_who_does_not_read_is_given_up(ends):
    mine, _ = ends
    mine.set_limits(0.001, 30.0)
    with pytest.raises(TimeoutError):
        mine.send([bytes(10**7)])


def test_another_thread_wakes_who_waits(ends):
    mine, _ = ends
    found: list[Exception] = []

    def wait() -> None:
        try:
            mine.receive_head()
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mine.shut()
    thread.join()
    assert found
    assert not mine.is_open
    mine.close()
    mine.shut()  # of what is closed nothing


def test_a_forked_process_leaves_the_socket_to_its_parent(ends):
    mine, there = ends
    number = mine._socket.fileno()

    def closed(pipe: Any) -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        assert not mine.is_open

    with child(closed) as forked:
        assert forked.end() == 0
    there.sendall(pack_head(Head(CALL, 1)))
    assert mine.receive_head().nbytes == 1
