# SPDX-License-Identifier: Apache-2.0
"""Applications that ask a deployment's Service all the time, with the OpenAI SDK as it comes: its retries are all the patience there is.

Real: the SDK, the way to the Service and the images. Not real: the applications, which all ask for the same image. A request is lost
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
    """A few of them, each in a thread of its own, for as long as the block lasts.

    `address` is asked again for every request, because a Service that was made again has another one. `allowed` are codes of answers
    that are right at that time although nobody may try again, such as those about an adapter that comes and goes.
    """

    def __init__(
        self, address: Callable[[], str], right: DemoImage, request: Request, *, count: int = 1, allowed: frozenset[str] = frozenset()
    ) -> None:
        self._address, self._right, self._request, self._allowed = address, right, request, allowed
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep_asking, daemon=True) for _ in range(count)]
        self.sent = self.answered = 0
        self.refused: Counter[str] = Counter()
        self.lost: list[str] = []
        self.slowest_s = 0.0

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(ANSWER_S)

    def told(self) -> str:
        """All of it in one line."""
        return f"{self.sent} sent, {self.answered} answered, refused {dict(self.refused)}, slowest {self.slowest_s:.1f} s, lost {self.lost}"

    def _keep_asking(self) -> None:
        while not self._ended.is_set():
            began, address = time.monotonic(), self._address()
            with self._lock:
                self.sent += 1
            with openai.OpenAI(base_url=f"{address}/v1", api_key="not-needed", timeout=PATIENCE) as client:
                refused, wrong = self._ask(client)
            with self._lock:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.refused.update(refused)
                self.lost += [f"{time.strftime('%H:%M:%S')} {each}" for each in wrong]
                self.answered += not (refused or wrong)
            self._ended.wait(PAUSE_S)

    def _ask(self, client: openai.OpenAI) -> tuple[list[str], list[str]]:
        """Return the code of an error that may be tried again, and what went wrong else; neither for the right image."""
        try:
            difference = mean_difference(ask_once(client, self._request), self._right)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code"))
            if body.get("retryable") or code in self._allowed:
                return [code], []
            return [], [f"{error.status_code} {error.body}"]
        except openai.APIConnectionError as error:
            return [], [f"{type(error).__name__}: {error.__cause__ or error}"]
        return [], [f"an image {difference:.1f} levels away from the right one"] if difference > TOLERANCE else []
