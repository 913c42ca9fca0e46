# SPDX-License-Identifier: Apache-2.0
"""Generated traffic for the soak: the same from the same seed. Pure.

Good requests come from a small pool, so that each image can be compared with the one made alone; among them are requests
that are wrong, that ask for what is not there, and whose client goes away.
"""

import random
from dataclasses import dataclass, field
from typing import Any

MODELS = ("digits", "digits", "stripes", "frame")
SIZES = ("32x32", "48x32", "64x64")
GUIDANCE = (1.0, 4.0, 7.5)
COLOURS = ("red", "green", "blue")
DIGITS = ("one", "two", "seven", "nine")

# What a wrong request is answered with.
BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": ""}, 400),
    ({"prompt": "p", "size": "33x32"}, 400),
    ({"prompt": "p", "size": "9999x9999"}, 400),
    ({"prompt": "p", "n": 100}, 400),
    ({"prompt": "p", "num_inference_steps": 100_000}, 400),
    ({"prompt": "p", "guidance_scale": -1.0}, 400),
    ({"prompt": "p", "unknown": True}, 400),
    ({"prompt": "p", "model": "nobody"}, 404),
    ({"prompt": ["a", "list"]}, 400),
)


@dataclass(frozen=True)
class Request:
    """One request: its body, the status it should get, and when its client goes away (seconds; None: never)."""

    body: dict[str, Any] = field(hash=False)
    status: int = 200
    gone_after_s: float | None = None
    # Of the pool; None for a wrong one.
    image: int | None = None


def pool(seed: int, size: int, *, most_steps: int) -> list[dict[str, Any]]:
    """Bodies of good requests."""
    rng = random.Random(seed)
    return [
        {
            "prompt": f"a {rng.choice(COLOURS)} digit {rng.choice(DIGITS)}",
            "model": rng.choice(MODELS),
            "size": rng.choice(SIZES),
            "guidance_scale": rng.choice(GUIDANCE),
            "num_inference_steps": rng.randint(1, most_steps),
            "seed": number,
        }
        for number in range(size)
    ]


def traffic(seed: int, count: int, bodies: list[dict[str, Any]], *, bad: float, aborted: float) -> list[Request]:
    """`count` requests, of which these parts are wrong or given up by their client."""
    rng = random.Random(seed)
    return [_request(rng, bodies, bad=bad, aborted=aborted) for _ in range(count)]


def _request(rng: random.Random, bodies: list[dict[str, Any]], *, bad: float, aborted: float) -> Request:
    kind = rng.random()
    if kind < bad:
        body, status = rng.choice(BAD)
        return Request(body, status)
    image = rng.randrange(len(bodies))
    if kind < bad + aborted:
        return Request(bodies[image], gone_after_s=rng.uniform(0.0, 0.3), image=image)
    return Request(bodies[image], image=image)
