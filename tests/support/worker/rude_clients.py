# SPDX-License-Identifier: Apache-2.0
"""Clients over bare sockets that send no request at all, or leave in the middle of one; the same clients from the same seed.

Real: the sockets and their bytes. Not real: the reading of answers, of which at most the first part is read.
"""

import asyncio
import contextlib
import json
import random

BODY = json.dumps({"prompt": "p kumquatfen", "num_inference_steps": 3, "stream": True, "partial_images": 1}).encode()
PLAIN = json.dumps({"prompt": "p kumquatfen", "num_inference_steps": 3}).encode()
HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
DEADLINE_S = 60.0

# The bytes that are sent, and the number of bytes of the answer that are read before the client leaves.
RUDE: tuple[tuple[bytes, int], ...] = (
    (b"", 0),
    (b"GET", 0),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 0),
    (b"\0" * 70_000, 0),
    (HEAD % len(PLAIN), 0),
    (HEAD % len(PLAIN) + PLAIN[:10], 0),
    (HEAD % len(PLAIN) + b"\xff" * len(PLAIN), 1),
    (HEAD % 2 + b"{}", 1),
    (HEAD % 100_000_000 + b"x" * 1000, 1),
    (HEAD % len(PLAIN) + PLAIN, 0),
    (HEAD % len(PLAIN) + PLAIN, 100),
    (HEAD % len(BODY) + BODY, 0),
    (HEAD % len(BODY) + BODY, 1),
    (HEAD % len(BODY) + BODY, 1000),
    ((HEAD % len(PLAIN) + PLAIN) * 3, 100),
    (HEAD % len(PLAIN) + PLAIN + b"garbage after it", 100),
)


async def be_rude(port: int, *, seed: int, count: int, at_once: int = 4) -> None:
    """Let `count` clients come and go, `at_once` at a time. Their answers do not matter. TimeoutError if one takes longer than
    DEADLINE_S."""
    rng = random.Random(seed)
    waiting = iter([rng.choice(RUDE) for _ in range(count)])

    async def client() -> None:
        for sent, read in waiting:
            async with asyncio.timeout(DEADLINE_S):
                abort = rng.random() < 0.5
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(ConnectionError):
                    writer.write(sent)
                    await writer.drain()
                    if read:
                        await reader.read(read)
                    if abort:
                        writer.transport.abort()
                    writer.close()
                    await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(at_once)))
