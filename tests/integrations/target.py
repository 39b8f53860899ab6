"""A program of one Mooncake engine, whose registered memory the test that started it shares.

Arguments: descriptor of a memory file, its size, host (and port). It says {"port", "address"}, then
answers commands, one a line, with one line of JSON each, until its input ends.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import time

import numpy as np

from aioflagcx.integrations.mooncake import TransferEngine

memory_fd, size, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
memory = np.frombuffer(mmap.mmap(memory_fd, size), np.uint8)
address = memory.ctypes.data


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


engine = TransferEngine()
assert engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0, engine.last_error()
assert engine.register_memory(address, size) == 0, engine.last_error()
say({"port": engine.get_rpc_port(), "address": address})
for line in sys.stdin:
    match line.split():
        case ["notified"]:  # the next notification, and what is in the memory then
            while not (notifies := engine.get_notifies()):
                time.sleep(0.001)
            digest = hashlib.sha256(memory.tobytes()).hexdigest()
            say([[one.name, one.msg] for one in notifies] + [digest])
        case ["notifies"]:
            say([one.name for one in engine.get_notifies()])
        case ["unregister"]:
            say(engine.unregister_memory(address))
        case ["register"]:
            say(engine.register_memory(address, size))
        case ["close"]:
            say(engine.close())
