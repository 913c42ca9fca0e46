# SPDX-License-Identifier: Apache-2.0
"""A real worker whose ranks and server are killed and stopped awake, asleep and on the way: no image is lost, none is another.

Gates hold the ranks in the middle of a sleep, a wake or a load. Some sizes lack memory, and some prompts kill their ranks. The last tests
end the server itself.
"""

import concurrent.futures
import io
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.soak.frame import difference, pixels
from support.worker.extensions import Gates
from support.worker.process import DIGITS, WorkerProcess, decode_image, descendants, process_exists, resident_bytes
from support.worker.sleep_rig import write_desired

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "size": "32x32"}
LONG = {**REQUEST, "num_inference_steps": 60}
TESTS = Path(__file__).parents[2]


class Faulty(WorkerProcess):
    """A worker of two ranks with gates and other troubles, which may be lost 100 times. It sleeps under OnIdle and records its sleep."""

    def __init__(self, folder: Path) -> None:
        self.gates, self.mounted = Gates(folder), folder
        options = [f"--desired={write_desired(folder, 'OnIdle')}", f"--state-dir={folder / 'state'}", "--max-restarts=100"]
        super().__init__(
            ranks=2,
            loras={"stripes": DIGITS / "loras" / "stripes"},
            options=(*options, "--worker-extension=support.worker.extensions:Troubled", "--warmup-steps=0", "--drain-timeout-seconds=2"),
            env={"PYTHONPATH": str(TESTS), **self.gates.env},
        )
        self.alone = b""

    def begin(self, path: str, **body: Any) -> httpx2.Response:
        """Post to a path of the control port, for a sleep or a wake; return the answer, which comes before the operation ends."""
        return self.control("POST", path, json={"operationId": f"{path}-{time.monotonic()}", **body})

    def weights_resident(self) -> float:
        """Return the share of the weights of all ranks that the kernel counts in memory, from 0 to 1."""
        ranks = self.state()["ranks"]
        resident = sum(resident_bytes(rank["pid"], rank["memory"]["mappings"]) for rank in ranks)
        return float(resident / sum(rank["memory"]["weightsBytes"] for rank in ranks))

    def wait_over(self, state: str) -> dict[str, Any]:
        """Wait until no operation runs and the state is this one; return the document."""
        self.wait_for(lambda: self.state()["operation"] is None and self.state()["state"] == state, what=f"{state} for good")
        return self.state()

    def check_asleep_then_wake(self) -> None:
        """Assert that no more than 2 % of the weights are in memory, wake the worker, and assert that it makes the same image as before."""
        assert self.weights_resident() < 0.02
        self.wake()
        assert self.image(**REQUEST, model="stripes").tobytes() == self.alone


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with Faulty(tmp_path_factory.mktemp("faulty")) as worker:
        worker.wait_ready()
        worker.alone = worker.image(**REQUEST, model="stripes").tobytes()
        yield worker


@pytest.fixture
def faulty(of_all: Faulty) -> Iterator[Faulty]:
    """Provide the worker; after the test open all gates and wait until it is ready again."""
    yield of_all
    for gate in ("sleep", "wake", "adapter"):
        of_all.gates.open(gate)
    of_all.wait_over("ready")


def lose(worker: WorkerProcess, rank: int, number: signal.Signals = signal.SIGKILL) -> dict[str, Any]:
    """Signal a rank, and check that the same server soon has the next generation and no process of the last; return the new state."""
    before, pids = worker.state(), worker.rank_pids()
    os.kill(pids[rank], number)
    worker.wait_for(lambda: worker.state()["restarts"] > before["restarts"], what="noticing", timeout_s=60)
    worker.wait_for(lambda: worker.state()["state"] != "restarting", what="restarted", timeout_s=60)
    after = worker.state()
    assert (after["bootId"], after["generation"]) == (before["bootId"], before["generation"] + 1)
    assert f"rank {rank} (pid {pids[rank]})" in after["lastLoss"]["message"]
    assert [pid for pid in pids if process_exists(pid)] == []
    assert worker.get("/readyz").status_code == 200
    return after


def replayed(worker: WorkerProcess) -> float:
    [found] = re.findall(r"^diffusion_worker_images_replayed_total (.*)$", worker.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_a_rank_lost_while_idle_is_replaced_before_the_next_request(faulty: Faulty) -> None:
    base = faulty.image(**REQUEST).tobytes()
    state = lose(faulty, 0)
    assert (state["state"], state["adapters"][0]["state"]) == ("ready", "Loaded")
    assert [faulty.image(**REQUEST, model=model).tobytes() for model in ("digits", "stripes")] == [base, faulty.alone]


def test_a_rank_stopped_in_the_middle_of_images_costs_time_and_no_image_also_of_those_that_come_meanwhile(faulty: Faulty) -> None:
    alone = [faulty.image(**{**LONG, "seed": seed}).tobytes() for seed in range(2)]
    before = replayed(faulty)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(faulty.image, **{**LONG, "seed": seed}) for seed in range(2)]
        # The scheduler decides to run them together or one after the other.
        faulty.wait_for(lambda: faulty.state()["inFlight"] > 0, what="working")
        losing = threads.submit(lose, faulty, 1, signal.SIGSTOP)
        faulty.wait_for(lambda: faulty.state()["state"] == "restarting", what="restarting")
        asked.append(threads.submit(faulty.image, **{**LONG, "seed": 0}))
        losing.result(120)
        # A shared call rounds a sum in another order.
        for found, expected in zip(asked, [*alone, alone[0]], strict=True):
            assert all(abs(a - b) <= 1 for a, b in zip(found.result(60).tobytes(), expected, strict=True))
    # At least one request was under way when its rank was lost.
    assert replayed(faulty) > before


def test_a_rank_lost_while_an_adapter_loads_fails_that_load_only(faulty: Faulty) -> None:
    def put() -> int:
        return faulty.put_adapter("frame", DIGITS / "loras" / "frame").status_code

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        loading = threads.submit(put)
        lose(faulty, 1)
        # The put was over before the kill, was under way, or met the restart.
        assert loading.result(60) in (200, 500, 503)
    assert put() == 200
    assert faulty.image(**REQUEST, model="frame").tobytes() != faulty.image(**REQUEST).tobytes()
    assert faulty.delete_adapter("frame").status_code == 200


def test_a_rank_killed_in_the_middle_of_a_sleep_leaves_the_model_asleep(faulty: Faulty) -> None:
    faulty.gates.close("sleep")
    assert faulty.begin("/v1/sleep").status_code == 202
    faulty.wait_state("sleeping")
    os.kill(faulty.rank_pids()[1], signal.SIGKILL)
    faulty.gates.open("sleep")
    faulty.wait_over("asleep")
    faulty.check_asleep_then_wake()


def test_a_rank_lost_asleep_leaves_the_model_asleep_and_it_wakes(faulty: Faulty) -> None:
    faulty.sleep(level="Discard")
    state = lose(faulty, 0)
    assert state["state"] == "asleep"
    assert [rank["memory"]["weightsResidentBytes"] for rank in state["ranks"]] == [0, 0]
    faulty.check_asleep_then_wake()


def test_a_rank_stopped_in_the_middle_of_a_wake_leaves_the_model_awake(faulty: Faulty) -> None:
    faulty.sleep()
    faulty.gates.close("wake")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        held = threads.submit(faulty.image, **REQUEST, model="stripes")
        faulty.wait_state("waking")
        os.kill(faulty.rank_pids()[1], signal.SIGSTOP)
        faulty.gates.open("wake")
        assert held.result(60).tobytes() == faulty.alone
    assert faulty.wait_over("ready")["lastLoss"]["message"].startswith("rank 1 ")


def test_weights_that_come_back_spoiled_by_one_bit_are_never_served_from(faulty: Faulty) -> None:
    restarts = faulty.sleep()["restarts"]
    faulty.gates.close("spoil")
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone
    document = faulty.wait_over("ready")
    assert document["restarts"] == restarts + 1
    assert document["lastOperation"]["error"]["code"] == "VerificationFailed"
    assert "rank 1" in document["lastLoss"]["message"], document["lastLoss"]


def test_an_adapter_that_is_spoiled_in_memory_while_the_model_sleeps_is_never_served_from(faulty: Faulty) -> None:
    """Spoil the adapters of sleeping ranks, and ask for an image, which wakes the model.

    The wake has to find the fault and read the adapter from its file again, without a restart.
    """
    restarts = faulty.sleep()["restarts"]
    faulty.gates.close("spoil-adapters")
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone
    document = faulty.wait_over("ready")
    assert (document["restarts"], document["lastOperation"]["error"]) == (restarts, None)
    [loads] = re.findall(r'adapter_loads_total\{.*code="VerificationFailed".*\} (.*)', faulty.get("/metrics").text)
    assert float(loads) == 1


def test_one_operation_runs_at_a_time_and_a_call_in_conflict_names_it(faulty: Faulty) -> None:
    faulty.gates.close("sleep")
    call = {"operationId": "the-sleep", "level": "HostMemory"}
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 202
    faulty.wait_state("sleeping")
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 202
    conflict = faulty.begin("/v1/wake")
    assert (conflict.status_code, conflict.json()["code"]) == (409, "Conflict"), conflict.text
    assert conflict.json()["details"]["operationId"] == "the-sleep"
    faulty.gates.open("sleep")
    last = faulty.wait_over("asleep")["lastOperation"]
    assert (last["operationId"], last["kind"], last["error"], last["level"]) == ("the-sleep", "sleep", None, "HostMemory")
    assert last["freedBytes"] > 10_000_000 and 0 < last["seconds"] < 10
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 200
    faulty.check_asleep_then_wake()


def test_a_wake_while_the_model_drains_cancels_the_sleep(faulty: Faulty) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(faulty.request_images, **LONG)
        faulty.wait_for(lambda: faulty.state()["inFlight"] == 1, what="working")
        assert faulty.begin("/v1/sleep").status_code == 202
        faulty.wait_state("draining")
        assert faulty.begin("/v1/wake").status_code in (200, 202)
        faulty.wait_over("ready")
        assert running.result(60).status_code == 200
    assert faulty.state()["lastOperation"]["error"] is None or faulty.state()["lastOperation"]["error"]["code"] == "Cancelled"


def test_a_sleep_during_the_load_of_an_adapter_leaves_both_whole(faulty: Faulty) -> None:
    faulty.gates.close("adapter")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        put = threads.submit(faulty.put_adapter, "frame", DIGITS / "loras" / "frame")
        faulty.wait_for(lambda: "frame" in [one["name"] for one in faulty.state()["adapters"]], what="loading an adapter")
        assert faulty.begin("/v1/sleep").status_code == 202
        faulty.gates.open("adapter")
        answer = put.result(60)
    assert answer.status_code == 200 or answer.json()["error"]["retryable"], answer.text
    faulty.wait_over("asleep")
    assert faulty.weights_resident() < 0.02
    assert faulty.put_adapter("frame", DIGITS / "loras" / "frame").status_code == 200
    faulty.wake()
    assert faulty.image(**REQUEST, model="frame").tobytes() != faulty.image(**REQUEST).tobytes()
    assert faulty.delete_adapter("frame").status_code == 200


def test_images_asked_for_while_the_model_sleeps_again_and_again_are_what_they_are_alone(faulty: Faulty) -> None:
    alone = [faulty.image(**{**REQUEST, "seed": seed}) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = []
        for number in range(12):
            asked.append(threads.submit(faulty.image, **{**REQUEST, "seed": number % 4}))
            if number % 4 == 3:
                faulty.begin("/v1/sleep", level="Discard")
        images = [one.result(90).tobytes() for one in asked]
    for number, image in enumerate(images):
        # A shared call rounds a sum in another order.
        assert all(abs(a - b) <= 1 for a, b in zip(image, alone[number % 4].tobytes(), strict=True))
    faulty.wait_for(lambda: faulty.state()["operation"] is None, what="done")
    faulty.wake()


def code(answer: httpx2.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_a_size_that_failed_in_company_works_a_moment_later_and_one_that_failed_alone_is_refused(faulty: Faulty) -> None:
    fits_alone, never_fits = {**REQUEST, "size": "48x48"}, {**REQUEST, "size": "96x96"}
    alone = faulty.image(**fits_alone).tobytes()
    pids = faulty.rank_pids()
    two = faulty.request_images(**fits_alone, n=2)
    assert two.status_code == 200, two.text
    assert "ran out of memory beside others, and runs once more by itself" in faulty.output
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda body: faulty.request_images(**body), [REQUEST, fits_alone] * 2))
    assert [code(answer) for answer in answers] == [(200, None)] * 4
    assert code(faulty.request_images(**never_fits)) == (507, "InsufficientMemory")
    refused = faulty.request_images(**never_fits)
    assert code(refused) == (400, "InvalidRequest")
    assert "which is what fits in memory" in refused.json()["error"]["message"]
    # It needs no loss of the ranks, and changes nothing in the image.
    assert faulty.image(**fits_alone).tobytes() == alone
    assert faulty.rank_pids() == pids


def test_two_poisons_at_once_fail_alone_and_three_innocents_beside_each_get_their_images(faulty: Faulty) -> None:
    poisons, beside_each = 2, 3

    def ask(prompt: str, seed: int) -> httpx2.Response:
        return faulty.request_images(**{**REQUEST, "prompt": prompt, "seed": seed})

    alone = [pixels(ask("a red digit seven", seed).json()) for seed in range(beside_each)]
    restarts = faulty.state()["restarts"]
    with concurrent.futures.ThreadPoolExecutor(poisons * (beside_each + 1)) as threads:
        poisoned, innocents = [], []
        for number in range(poisons):
            poisoned.append(threads.submit(ask, f"poison kumquatfen {number}", number))
            innocents += [threads.submit(ask, "a red digit seven", seed) for seed in range(beside_each)]
        failed = [future.result() for future in poisoned]
        made = [pixels(future.result().json()) for future in innocents]
    assert [code(answer) for answer in failed] == [(422, "RequestFailed")] * poisons
    # An image that shared a step with others may be rounded otherwise.
    assert [number for number, one in enumerate(made) if difference(one, alone[number % beside_each]) > 1] == []
    # The last loss may have been the last poison's.
    state = faulty.wait_state("ready")
    assert (state["bootId"], state["failure"]) == (faulty.boot_id, None)
    assert state["restarts"] - restarts <= 2 * poisons
    # The same request is refused without a loss, whatever the seed.
    again = ask("poison kumquatfen 0", 99)
    assert (again.status_code, again.headers["x-should-retry"]) == (422, "false")
    assert "requests like this one are refused for" in again.json()["error"]["message"]
    assert faulty.state()["restarts"] == state["restarts"]


def test_an_edit_is_made_again_with_its_image_when_a_rank_dies(faulty: Faulty) -> None:
    out = io.BytesIO()
    faulty.image(**REQUEST).save(out, "PNG")
    asked: dict[str, Any] = {"prompt": "a green digit three", "extra_body": {"seed": 4, "num_inference_steps": 60, "strength": 0.9}}

    def edit() -> bytes:
        answer = client.images.edit(image=out.getvalue(), **asked)
        return decode_image(answer.data[0].b64_json).tobytes()

    with faulty.openai() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        expected = edit()
        waiting = threads.submit(edit)
        faulty.wait_for(lambda: faulty.state()["inFlight"] == 1, what="at work")
        lose(faulty, 1)
        assert waiting.result(60) == expected


def test_a_server_killed_while_asleep_takes_its_processes_along_and_comes_back_asleep_and_holds_nothing(faulty: Faulty) -> None:
    faulty.sleep()
    pids, boot = [faulty.pid, *descendants(faulty.pid)], faulty.boot_id
    faulty.send_signal(signal.SIGKILL)
    faulty.wait_exit()
    faulty.wait_until(lambda: not any(process_exists(pid) for pid in pids), what="gone", timeout_s=60)
    faulty.start()
    assert faulty.boot_id != boot
    seen = set[str]()
    faulty.wait_for(lambda: seen.add(faulty.state()["state"]) or "asleep" in seen, what="asleep")
    assert seen <= {"starting", "asleep"}
    faulty.wait_ready()  # the worker looks for the adapter's file while the model is still asleep
    assert all(rank["memory"]["weightsResidentBytes"] == 0 for rank in faulty.state()["ranks"])
    assert faulty.weights_resident() == 0
    # The request wakes the model, without an operator.
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone


def test_a_worker_terminated_while_it_drains_gives_what_runs_its_time_and_ends_with_0(of_all: Faulty) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(of_all.request_images, **LONG)
        of_all.wait_for(lambda: of_all.state()["inFlight"] == 1, what="working")
        of_all.begin("/v1/sleep")
        of_all.wait_state("draining")
        check_end(of_all)
        answer = running.result(60)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "Terminating", answer.text


def test_the_desired_file_names_adapters_and_lets_the_worker_fall_asleep_by_itself_and_end_asleep_with_0(
    of_all: Faulty, bad_adapters: dict[str, Path]
) -> None:
    """End the worker, if no other test did, and start it again with other files."""
    of_all.terminate()
    adapters = [
        {"name": "frame", "source": {"path": str(DIGITS / "loras" / "frame")}, "digest": None, "scale": 0.5},
        {"name": "broken", "source": {"path": str(bad_adapters["garbage"])}, "digest": None, "scale": 1.0},
    ]
    write_desired(of_all.mounted, "Asleep", adapters=adapters)
    of_all.start()
    of_all.wait_ready()
    of_all.wait_over("asleep")
    found = {adapter["name"]: (adapter["state"], adapter["scale"]) for adapter in of_all.state()["adapters"]}
    assert (found["frame"], found["broken"]) == (("Loaded", 0.5), ("Failed", 1.0))
    assert of_all.request_images(**REQUEST).json()["error"]["code"] == "Asleep"
    of_all.wake()
    assert of_all.request_images(**REQUEST, model="frame").status_code == 200
    of_all.sleep()
    check_end(of_all)


def check_end(worker: WorkerProcess) -> None:
    """Send SIGTERM, and assert that the worker ends with code 0 within 10 s and that none of its processes stays."""
    pids, begun = [*worker.rank_pids(), *descendants(worker.pid)], time.monotonic()
    assert worker.terminate() == 0
    assert time.monotonic() - begun < 10
    worker.wait_until(lambda: not any(process_exists(pid) for pid in pids), what=f"gone: {pids}", timeout_s=45)
