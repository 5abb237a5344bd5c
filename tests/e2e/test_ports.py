# SPDX-License-Identifier: MIT
"""The tests' own choice of ports: whoever is given one binds it later, so no port may be given twice."""

import harness


def distinct_ports():
    whole, harness.FREE_PORTS = harness.FREE_PORTS, harness.FREE_PORTS[:120]
    try:
        ports = [harness.free_port() for _ in range(60)]
    finally:
        harness.FREE_PORTS = whole
    harness.check(len(set(ports)) == len(ports), f"of {len(ports)} ports {len(ports) - len(set(ports))} were given twice")


def no_port_left():
    whole, harness.FREE_PORTS = harness.FREE_PORTS, range(0)
    try:
        harness.free_port()
    except harness.Failed:
        return
    finally:
        harness.FREE_PORTS = whole
    raise harness.Failed("a port was given where none is left")


if __name__ == "__main__":
    harness.main(distinct_ports, no_port_left)
