# SPDX-License-Identifier: MIT
"""An open-loop client of /generate: each request is sent when its time has come, however many are still
open, and its answer is streamed.

One thread and one selector serve all of them; while the clock runs bytes are only received and their
times noted, and read afterwards, because what a client computes is taken from the measured system.
"""

import bisect
import json
import re
import selectors
import socket
import time

EVENT = re.compile(rb"data: (.*?)\r?\n\r?\n", re.DOTALL)


class Answer:
    """status (None: none came), ids, times of tokens relative to the request, finished."""

    def __init__(self, due):
        self.due, self.sent = due, None
        self.status, self.ids, self.times, self.finished = None, [], [], False
        self.received, self.ends, self.arrivals = bytearray(), [], []

    def take(self, data, now):
        self.received += data
        self.ends.append(len(self.received))
        self.arrivals.append(now)

    def body(self):
        """(bytes of the body, [end of each chunk in it], [when it was there])."""
        raw = bytes(self.received)
        at = raw.find(b"\r\n\r\n") + 4
        body, ends, times = bytearray(), [], []
        while (line := raw.find(b"\r\n", at)) > at:
            length = int(raw[at:line], 16)
            at = line + 2 + length + 2
            if length == 0 or at > len(raw):
                break
            body += raw[line + 2 : at - 2]
            ends.append(len(body))
            times.append(self.arrivals[bisect.bisect_left(self.ends, at)])
        return bytes(body), ends, times

    def read(self):
        head = re.match(rb"HTTP/1\.1 (\d+)", bytes(self.received[:64]))
        self.status = int(head.group(1)) if head else None
        if self.status != 200:
            return
        body, ends, times = self.body()
        for event in EVENT.finditer(body):
            if event.group(1) == b"[DONE]":
                self.finished = True
                continue
            ids = json.loads(event.group(1)).get("output_ids") or []
            at = times[bisect.bisect_left(ends, event.end())] - self.due
            # Tokens that came together count as such: the later ones without a wait.
            self.times += [at] * (len(ids) - len(self.ids))
            self.ids = ids if len(ids) > len(self.ids) else self.ids


def replay(port, requests, patience):
    """requests: [(seconds from now, body)], in order of time. The answers, in that order; what has not
    ended `patience` seconds after the last request is cut off."""
    made = []
    for due, body in requests:
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        made.append((due, f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data))
    began = time.monotonic()
    answers = [Answer(began + due) for due, _ in made]
    selector = selectors.DefaultSelector()
    following, last = 0, began + (made[-1][0] if made else 0.0)
    try:
        while True:
            now = time.monotonic()
            while following < len(made) and answers[following].due <= now:
                connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                connection.sendall(made[following][1])
                answers[following].sent = time.monotonic()
                selector.register(connection, selectors.EVENT_READ, answers[following])
                following += 1
            if following == len(made) and (not selector.get_map() or now > last + patience):
                break
            wait = answers[following].due - now if following < len(made) else 0.2
            for key, _ in selector.select(max(wait, 0.0)):
                data = key.fileobj.recv(1 << 16)
                if data:
                    key.data.take(data, time.monotonic())
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    finally:
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()
    for answer in answers:
        answer.read()
    return answers
