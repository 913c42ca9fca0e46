# SPDX-License-Identifier: Apache-2.0
"""An application that asks a deployment's Service all the time, with the OpenAI SDK as it comes: its retries are all the patience there is.

Real: the SDK, the way to the Service and the images. Not real: the application, which asks for the same image always. A request is lost
that gets neither the right image in the end, nor an error that allows another try (`retryable` in its body).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

import openai

from tools.demo.images import DemoImage, Request, ask_once, mean_difference

# Of 255: a batch of another size rounds its sums in another order.
TOLERANCE = 1.0
ANSWER_S = 120.0
# The SDK's own patience with a connection.
PATIENCE = openai.Timeout(ANSWER_S, connect=5.0)
PAUSE_S = 0.3


class Clients:
    """An application in a thread of its own, for as long as the block lasts.

    `address` is asked again for every request, because a Service that was made again has another one. `allowed` are codes of answers
    that are right at that time although nobody may try again, such as those about an adapter that comes and goes.
    """

    def __init__(self, address: Callable[[], str], right: DemoImage, request: Request, *, allowed: frozenset[str] = frozenset()) -> None:
        self._address, self._right, self._request, self._allowed = address, right, request, allowed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_asking, daemon=True)
        self.sent = self.answered = 0
        self.refused: Counter[str] = Counter()
        self.lost: list[str] = []
        self.slowest_s = 0.0

    def __enter__(self) -> "Clients":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(ANSWER_S)

    def told(self) -> str:
        """All of it in one line."""
        return f"{self.sent} sent, {self.answered} answered, refused {dict(self.refused)}, slowest {self.slowest_s:.1f} s, lost {self.lost}"

    def _keep_asking(self) -> None:
        while not self._ended.is_set():
            began, address = time.monotonic(), self._address()
            self.sent += 1
            with openai.OpenAI(base_url=f"{address}/v1", api_key="not-needed", timeout=PATIENCE) as client:
                if wrong := self._ask(client):
                    self.lost.append(f"{time.strftime('%H:%M:%S')} {wrong}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self._ended.wait(PAUSE_S)

    def _ask(self, client: openai.OpenAI) -> str:
        """Return what went wrong; empty for an image and for an error that may be tried again."""
        try:
            difference = mean_difference(ask_once(client, self._request), self._right)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code"))
            if body.get("retryable") or code in self._allowed:
                self.refused[code] += 1
                return ""
            return f"{error.status_code} {error.body}"
        except openai.APIConnectionError as error:
            return f"{type(error).__name__}: {error.__cause__ or error}"
        if difference > TOLERANCE:
            return f"an image {difference:.1f} levels away from the right one"
        self.answered += 1
        return ""
