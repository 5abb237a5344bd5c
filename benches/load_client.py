# SPDX-License-Identifier: MIT
"""Closed-loop clients of /generate, all in one thread, on connections that stay open.

On a machine whose cores the measured system fills, what a client computes is taken from it. So the
requests are made beforehand, the answers are only received while the clock runs and read afterwards,
and one selector serves all streams. Standard library only.
"""

import json
import selectors
import socket
import time


class Failed(Exception):
    """An answer that is none."""


def request(port, body):
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


class Stream:
    """One connection; asks the same again as soon as it is answered."""

    def __init__(self, port, data):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = data
        self.answers = []
        self.missing = None  # bytes of the body still to come; None: the head is not there yet
        self.received = bytearray()

    def ask(self):
        self.socket.sendall(self.request)

    def receive(self):
        """Takes what has come; True when an answer is complete."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise Failed(f"the connection was closed: {bytes(self.received[:300])!r}")
        self.received += data
        if self.missing is None:
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self.received[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                raise Failed(f"{bytes(self.received[:300])!r}")
            length = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
            self.missing = int(length) + end + 4
        if len(self.received) < self.missing:
            return False
        self.answers.append(self.received)
        self.received = bytearray()
        self.missing = None
        return True

    def tokens(self):
        """Output tokens of all answers."""
        total = 0
        for answer in self.answers:
            body = json.loads(bytes(answer).split(b"\r\n\r\n", 1)[1])
            total += len((body[0] if isinstance(body, list) else body)["output_ids"])
        return total


def rate(port, bodies, seconds, limit=600.0):
    """Output tokens a second of one stream a body, which all ask until `seconds` are over; the clock
    runs until the last answer is there."""
    streams = [Stream(port, request(port, body)) for body in bodies]
    selector = selectors.DefaultSelector()
    try:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        began = time.monotonic()
        for stream in streams:
            stream.ask()
        open_streams = len(streams)
        while open_streams:
            for key, _ in selector.select(limit):
                if not key.data.receive():
                    continue
                if time.monotonic() - began < seconds:
                    key.data.ask()
                else:
                    open_streams -= 1
            if time.monotonic() - began > limit:
                raise Failed(f"no end after {limit:g} s")
        elapsed = time.monotonic() - began
        return sum(stream.tokens() for stream in streams) / elapsed
    finally:
        selector.close()
        for stream in streams:
            stream.socket.close()
